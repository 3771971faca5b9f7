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
// for the object are for that pool.
func (l *Local) Locate(id ID, pool string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if pool == id.Pool {
		delete(l.places, id)
	} else {
		l.places[id] = pool
	}
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

// recoverPlaces learns where the objects of a pool are that have moved there.
func (l *Local) recoverPlaces(ctx context.Context, pool blockdev.Pool) error {
	for _, kind := range []blockdev.Kind{blockdev.Volume, blockdev.Snapshot} {
		records, err := pool.List(ctx, kind, "", 0)
		if err != nil {
			return err
		}
		for _, r := range records {
			if r.Labels[labelPool] != "" {
				l.Locate(IDOf(pool.Name(), r), pool.Name())
			}
		}
	}
	return nil
}

// alone has no pool of this node but one have anything of a volume that comes there, but for a moment: what is unfinished goes, and so does what had left this node and was taken
// for gone then, as of dropLeft. ErrExists for anything else.
func (l *Local) alone(ctx context.Context, id ID, in blockdev.Pool, claims int64) error {
	for _, pool := range l.openPools() {
		if pool.Name() == in.Name() {
			continue
		}
		record, err := pool.Get(ctx, id.ref())
		switch {
		case errors.Is(err, errdefs.ErrNotFound), err == nil && IDOf(pool.Name(), record) != id:
			continue
		case err == nil && unfinished(record):
			err = l.dropUnfinished(ctx, pool, record.Ref)
		case err == nil:
			err = l.dropLeft(ctx, pool, record, claims)
		}
		if err != nil {
			return fmt.Errorf("make room in pool %s for a volume of which pool %s has something: %w", in.Name(), pool.Name(), err)
		}
	}
	return nil
}
