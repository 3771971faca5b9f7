package volume

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// The ID of a volume names the pool that it was made in. A volume that has moved may be in another pool (docs/decisions/moving.md). Then its record has
// the label labelPool, with the pool that its ID names, and Local.places has the pool that it is in.

// IDOf returns the ID of an object of a pool.
func IDOf(pool string, r blockdev.Record) ID {
	if named := r.Labels[labelPool]; named != "" {
		pool = named
	}
	return ID{r.Kind, pool, r.Key}
}

// sourceOf returns the ID of what an object of a pool was copied from, or is a snapshot of; the zero ID if there is none.
func sourceOf(pool string, r blockdev.Record) ID {
	if id, err := ParseID(r.Labels[labelSource]); err == nil {
		return id
	}
	if r.Origin == (blockdev.Ref{}) {
		return ID{}
	}
	return ID{r.Origin.Kind, pool, r.Origin.Key}
}

// labelOrigin adds the ID of the source to the labels of a new object, if that ID names another pool than the new object's.
func labelOrigin(labels map[string]string, pool string, source ID) {
	if source.Pool != pool {
		labels[labelSource] = source.String()
	}
}

// Locate sets the pool of this node that an object is in, whichever pool its ID names. That pool need not be open. Calls for the object go to it, also
// after another pool opens that has something of the object.
func (l *Local) Locate(id ID, pool string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.places[id] = pool
}

// gone forgets where an object was that a pool no longer has.
func (l *Local) gone(pool string, r blockdev.Record) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if id := IDOf(pool, r); l.places[id] == pool {
		delete(l.places, id)
	}
}

// placeOf returns the name of the pool that an object is in, if it exists.
func (l *Local) placeOf(id ID) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if pool := l.places[id]; pool != "" {
		return pool
	}
	return id.Pool
}

// elsewhere returns the IDs of the objects of a kind that are in another pool of this node than their IDs name, by the pool that these name, in order.
func (l *Local) elsewhere(kind blockdev.Kind) map[string][]ID {
	names, ids := l.poolNames(), map[string][]ID{}
	l.mu.Lock()
	for id, pool := range l.places {
		if id.Kind == kind && id.Pool != pool && slices.Contains(names, pool) {
			ids[id.Pool] = append(ids[id.Pool], id)
		}
	}
	l.mu.Unlock()
	for _, of := range ids {
		slices.SortFunc(of, func(a, b ID) int { return strings.Compare(a.Key, b.Key) })
	}
	return ids
}

// recoverPlaces finds the objects of a pool that have moved there. It leaves out those that were located (Locate), and what may only be left of a move.
func (l *Local) recoverPlaces(ctx context.Context, pool blockdev.Pool) error {
	for _, kind := range []blockdev.Kind{blockdev.Volume, blockdev.Snapshot} {
		records, err := pool.List(ctx, kind, "", 0)
		if err != nil {
			return err
		}
		for _, r := range records {
			if r.Labels[labelPool] != "" && !l.mayBeLeft(ctx, pool, r) {
				l.recoverPlace(IDOf(pool.Name(), r), pool.Name())
			}
		}
	}
	return nil
}

// recoverPlace is Locate for an object that was not located yet.
func (l *Local) recoverPlace(id ID, pool string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.places[id] == "" {
		l.places[id] = pool
	}
}

// mayBeLeft reports whether what a pool has of an object may only be left of a move, and the object be in another pool. A pool that opens late may have
// been away during that move. It is left if another open pool has the whole object. What is sealed or unfinished may also be left if the pool that the ID
// names has anything of the object, or is not open.
func (l *Local) mayBeLeft(ctx context.Context, in blockdev.Pool, r blockdev.Record) bool {
	id := IDOf(in.Name(), r)
	for _, pool := range l.pools {
		if pool.Name() == in.Name() {
			continue
		}
		named := !settled(r) && pool.Name() == id.Pool
		open := blockdev.Unwrap(pool)
		if open == nil {
			if named {
				return true
			}
			continue
		}
		have, err := open.Get(ctx, id.ref())
		switch {
		case errors.Is(err, errdefs.ErrNotFound), err == nil && IDOf(open.Name(), have) != id:
		case named, err == nil && settled(have):
			return true
		}
	}
	return false
}

// settled reports whether a record is neither of an unfinished copy nor sealed.
func settled(r blockdev.Record) bool { return !unfinished(r) && r.Labels[labelSealed] == "" }

// alone removes what other open pools of this node have of a volume that moves to pool in: unfinished copies as by dropCopy, and what an earlier move left
// as by dropLeft. ErrExists for anything else.
func (l *Local) alone(ctx context.Context, in blockdev.Pool, from Origin) error {
	for _, pool := range l.openPools() {
		if pool.Name() == in.Name() {
			continue
		}
		record, err := pool.Get(ctx, from.ID.ref())
		switch {
		case errors.Is(err, errdefs.ErrNotFound), err == nil && IDOf(pool.Name(), record) != from.ID:
			continue
		case err == nil && unfinished(record):
			err = l.dropCopy(ctx, pool, record, from)
		case err == nil:
			err = l.dropLeft(ctx, pool, record, from.Labels[labelCame], from.Claims)
		}
		if err != nil {
			return fmt.Errorf("make room in pool %s for a volume of which pool %s has something: %w", in.Name(), pool.Name(), err)
		}
	}
	return nil
}

// DropLeft removes what pool in has left of a volume that is in another pool of this node: pool in was closed when the volume came, so alone did not see
// it. claims is how many claims the volume has had. ErrExists if it may be newer than the volume, ErrPrecondition if the other pool does not have the
// volume whole. The caller has the lock of the volume, and has located it (Locate) as the cluster says.
func (l *Local) DropLeft(ctx context.Context, in string, id ID, claims int64) error {
	have, err := l.Get(ctx, id)
	if err != nil {
		return err
	}
	if have.Pool == in || have.Sealed {
		return fmt.Errorf("%w: volume %s is in pool %s of node %s, and its bytes may be needed in pool %s", errdefs.ErrPrecondition, id, have.Pool, l.node, in)
	}
	pool, record, err := l.recordAt(ctx, place{id, in})
	if err != nil {
		return err
	}
	_, is, err := l.finishedRecord(ctx, id)
	if err != nil {
		return err
	}
	return l.dropLeft(ctx, pool, record, is.Labels[labelCame], claims)
}
