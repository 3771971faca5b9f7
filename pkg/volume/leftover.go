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

// Leftover is what an unfinished or ended copy has left: the copy itself, the snapshot that was cut for it, or what is here of a volume or snapshot that
// moves here. The next call for the copy resumes it.
type Leftover struct {
	ID   ID
	Pool string // the pool that has it; the object may be in another one
	For  string // key of the copy, or of what moves
	// Began is when it was made.
	Began time.Time
	// Carried is the UID of the object by which the copy of a volume in use was completed (Complete); empty for anything else. If the volume has moved,
	// only this copy has what was written since.
	Carried string
	// Generation is the generation of that object at that time. If the object has an earlier one now, the API server was restored.
	Generation int64
}

// LeftoverOf returns the leftover that a record of a pool is; false if it is none.
func LeftoverOf(pool string, r blockdev.Record) (left Leftover, is bool) {
	left = Leftover{ID: IDOf(pool, r), Pool: pool, For: r.Labels[labelCutFor], Began: r.Created}
	left.Carried, left.Generation = carriedBy(r)
	if unfinished(r) {
		left.For = r.Key
	}
	return left, left.For != ""
}

// Leftovers returns the leftovers in an open pool.
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

// Comes reports whether it is of a snapshot that moves here.
func (left Leftover) Comes() bool {
	return left.ID.Kind == blockdev.Snapshot && left.ID.Key == left.For
}

// DropLeftover removes a leftover that nobody resumes. An object that has become whole stays.
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

// keptClaims is the count of claims in the seal of KeepLeftover. No object counts as many.
const keptClaims = math.MaxInt64

// KeepLeftover makes a sealed volume of a leftover that has Carried, when nobody knows any more whether the volume has moved. Whoever adopts it decides
// that. Its consumer goes on, and no later move to this node removes it. ErrPrecondition for any other leftover.
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

// DropOldLeftovers removes the leftovers in open pools that were begun more than a day ago (leftoverTime), except those with Carried. It is for the start
// of a single machine, where nobody else knows what is still wanted. In a cluster a copy may take days.
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
