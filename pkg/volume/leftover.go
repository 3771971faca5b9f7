package volume

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Leftover is what a copy of something in another pool has made and not finished, or not removed yet: the copy itself, or the snapshot that
// was cut for it; or what is here of what moves here. The next call for the copy goes on with it.
type Leftover struct {
	ID   ID
	Pool string // that has it, whatever pool its ID names; the object itself may be in another one by now
	For  string // key of the copy, or of what moves
	// Began is when it was made.
	Began time.Time
	// Carried is the UID of the object by which it became all of a volume whose user went on while it was copied (Complete). If the volume has moved, nobody else has what was
	// written since. Empty for anything else.
	Carried string
	// Generation is that of this object then. One that has an earlier one went back to before, with the API server.
	Generation int64
}

// LeftoverOf returns what a record of a pool is a leftover of; false if it is none.
func LeftoverOf(pool string, r blockdev.Record) (left Leftover, is bool) {
	left = Leftover{ID: IDOf(pool, r), Pool: pool, For: r.Labels[labelCutFor], Began: r.Created}
	left.Carried, left.Generation = carriedBy(r)
	if unfinished(r) {
		left.For = r.Key
	}
	return left, left.For != ""
}

// Leftovers are those of a pool that is open.
func (l *Local) Leftovers(ctx context.Context, pool blockdev.Pool) (all []Leftover, err error) {
	for _, kind := range []blockdev.Kind{blockdev.Volume, blockdev.Snapshot} {
		records, err := pool.List(ctx, kind, "", 0)
		if err != nil {
			return nil, err
		}
		for _, r := range records {
			if left, is := LeftoverOf(pool.Name(), r); is {
				all = append(all, left)
			}
		}
	}
	return all, nil
}

// Comes reports whether it is of a snapshot that moves here. Otherwise it is of a volume.
func (left Leftover) Comes() bool {
	return left.ID.Kind == blockdev.Snapshot && left.ID.Key == left.For
}

// DropLeftover removes a leftover that nobody goes on with. What is whole by now stays.
func (l *Local) DropLeftover(ctx context.Context, left Leftover) error {
	if left.ID.Kind == blockdev.Snapshot && !left.Comes() {
		return l.EndCut(ctx, left.Pool, left.For)
	}
	pool, err := l.pool(left.Pool)
	if err != nil {
		return err
	}
	return l.dropUnfinished(ctx, pool, left.ID.ref())
}

// keptClaims is after how many claims KeepLeftover seals: more than any object counts.
const keptClaims = math.MaxInt64

// KeepLeftover makes a volume, which is sealed, of one that is carried, as nobody knows any more whether the volume has moved: whoever adopts it decides that. Who uses it goes on, and
// no move to here removes it.
func (l *Local) KeepLeftover(ctx context.Context, left Leftover) error {
	pool, err := l.pool(left.Pool)
	if err != nil {
		return err
	}
	_, err = pool.SetLabels(ctx, left.ID.ref(), func(labels map[string]string) error {
		since, is := copiedInSeal(blockdev.Record{Labels: labels})
		if !is || labels[labelCarried] == "" {
			return fmt.Errorf("%w: what pool %s of node %s has of volume %s is not all of it", errdefs.ErrPrecondition, left.Pool, l.node, left.ID)
		}
		delete(labels, labelImport)
		delete(labels, labelCarried)
		labels[labelSealed] = seal{since: since, claims: keptClaims}.label()
		return nil
	})
	return err
}

// leftoverTime is how long DropOldLeftovers keeps a leftover that nobody asked for again.
const leftoverTime = 24 * time.Hour

// DropOldLeftovers removes what is left of copies, in the pools that are open, that were begun more than a day ago; but for what may be all there is of a volume (Leftover.Carried). It is for the start of a
// machine without a cluster, on which nobody else says what is still wanted: in a cluster a copy may take days, whoever starts meanwhile.
func (l *Local) DropOldLeftovers(ctx context.Context) {
	for _, pool := range l.openPools() {
		if err := l.dropOldLeftovers(ctx, pool); err != nil {
			klog.FromContext(ctx).Error(err, "Could not remove what is left of copies; the next start tries again", "pool", pool.Name())
		}
	}
}

func (l *Local) dropOldLeftovers(ctx context.Context, pool blockdev.Pool) error {
	all, err := l.Leftovers(ctx, pool)
	for _, left := range all {
		if left.Carried == "" && time.Since(left.Began) >= leftoverTime {
			err = errors.Join(err, l.DropLeftover(ctx, left))
		}
	}
	return err
}
