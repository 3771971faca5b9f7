package volume

import (
	"context"
	"time"

	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Leftover is what a copy of something in another pool has made and not finished, or not removed yet: the copy itself, or the snapshot that
// was cut for it. The next call for the copy goes on with it.
type Leftover struct {
	ID  ID
	For string // key of the copy
	// Began is when it was made.
	Began time.Time
}

// leftoverTime is how long a start keeps a leftover that nobody asked for again.
const leftoverTime = 24 * time.Hour

// LeftoverOf returns what a record of a pool is a leftover of; false if it is none.
func LeftoverOf(pool string, r blockdev.Record) (left Leftover, is bool) {
	left = Leftover{ID{r.Kind, pool, r.Key}, r.Labels[labelCutFor], r.Created}
	if r.Kind == blockdev.Volume && unfinished(r) {
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

// DropLeftover removes a leftover that nobody goes on with. What is whole by now stays.
func (l *Local) DropLeftover(ctx context.Context, left Leftover) error {
	if left.ID.Kind == blockdev.Snapshot {
		return l.EndCut(ctx, left.ID.Pool, left.For)
	}
	return l.dropUnfinished(ctx, left.ID)
}

// recoverLeftovers removes what nobody went on with for long.
func (l *Local) recoverLeftovers(ctx context.Context, pool blockdev.Pool) error {
	all, err := l.Leftovers(ctx, pool)
	for _, left := range all {
		if time.Since(left.Began) < leftoverTime {
			continue
		}
		if err := errdefs.IgnoreNotFound(pool.Delete(ctx, left.ID.ref())); err != nil {
			klog.FromContext(ctx).Error(err, "Could not remove what is left of a copy; the next start tries again", "id", left.ID.String())
		}
	}
	return err
}
