package volume

import (
	"context"
	"errors"
	"fmt"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// The ID of a volume names the pool that it was made in. One that has moved may be in another one (docs/decisions/moving.md): its record has a label with the pool that its ID
// names, and the Local knows where those are.

// IDOf is the ID of an object of a pool.
func IDOf(pool string, r blockdev.Record) ID {
	if named := r.Labels[labelPool]; named != "" {
		pool = named
	}
	return ID{r.Kind, pool, r.Key}
}

// sourceOf is the ID of what an object of a pool was copied from, or cut of; the zero ID if it was not.
func sourceOf(pool string, r blockdev.Record) ID {
	if id, err := ParseID(r.Labels[labelSource]); err == nil {
		return id
	}
	if r.Origin == (blockdev.Ref{}) {
		return ID{}
	}
	return ID{r.Origin.Kind, pool, r.Origin.Key}
}

// labelOrigin says in the labels of a new object of a pool what it is of, if the ID of that names another pool.
func labelOrigin(labels map[string]string, pool string, source ID) {
	if source.Pool != pool {
		labels[labelSource] = source.String()
	}
}

// Locate says in which pool an object of this node is, whatever pool its ID names. Its record may not be known yet, as that of a pool that is not open: until it is, calls
// for the object are for that pool, and what another pool has of it when that opens does not change that.
func (l *Local) Locate(id ID, pool string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.places[id] = pool
}

// gone notes that an object of a pool is not there any more.
func (l *Local) gone(pool string, r blockdev.Record) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if id := IDOf(pool, r); l.places[id] == pool {
		delete(l.places, id)
	}
}

// placeOf is the name of the pool that an object is in, if there is one.
func (l *Local) placeOf(id ID) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if pool := l.places[id]; pool != "" {
		return pool
	}
	return id.Pool
}

// recoverPlaces learns which objects of a pool have moved there, but for those that somebody has located, and what may be left of a move.
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

// recoverPlace is Locate for an object that nobody has located.
func (l *Local) recoverPlace(id ID, pool string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.places[id] == "" {
		l.places[id] = pool
	}
}

// mayBeLeft reports whether what a pool has of an object may be left of a move, with the object in another pool: a pool that opens late may have been away while the object came
// to that one. Whatever it has is left if another pool has a whole object; what is sealed or unfinished also if the pool that the ID names has anything of it, or is not open yet.
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

// settled reports whether a record is that of an object that neither comes nor may have left.
func settled(r blockdev.Record) bool { return !unfinished(r) && r.Labels[labelSealed] == "" }

// alone has no pool of this node but one have anything of a volume that comes there, but for a moment: what is unfinished goes, as of dropCopy, and so does what had left this node and was taken
// for gone then, as of dropLeft. ErrExists for anything else.
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

// DropLeft removes what a pool has of a volume that is in another pool of this node: what had left this node, and was taken for gone while that pool was closed, so that alone
// did not see it. claims is how many claims the volume has had. ErrExists for what may be more than that, ErrPrecondition where the other pool does not have the volume whole. The caller
// has the lock of the volume, and the cluster's word for which pool it is in (Locate).
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
