package volume_test

import (
	"context"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// aged is a pool whose objects are listed as if they were made longer ago, by so much.
type aged struct {
	*memory.Pool
	by time.Duration
}

func (a *aged) List(ctx context.Context, kind blockdev.Kind, after string, limit int) ([]blockdev.Record, error) {
	records, err := a.Pool.List(ctx, kind, after, limit)
	for i := range records {
		records[i].Created = records[i].Created.Add(-a.by)
	}
	return records, err
}

// TestOldLeftovers: an unfinished copy, and the snapshot that was cut for it, stay over a start of the driver, also after more than a day. DropOldLeftovers,
// which is for a node without a cluster, removes both once they are older than a day. It keeps a copy of a volume that moved while it was in use, which may
// be the only one that has the last writes.
func TestOldLeftovers(t *testing.T) {
	mounts, err := mount.LoadTable()
	check.OK(t, err)
	a, b := memory.NewDisk(1<<30), memory.NewDisk(1<<30)
	over := func(by time.Duration) (*volume.Local, func() int) {
		pools := []blockdev.Pool{&aged{a.Open("a", nil), by}, &aged{b.Open("b", nil), by}}
		l, err := volume.NewLocal(t.Context(), node, pools, mounts, 0)
		check.OK(t, err)
		return l, func() (n int) {
			for _, pool := range pools {
				left, err := l.Leftovers(t.Context(), pool)
				check.OK(t, err)
				n += len(left)
			}
			return n
		}
	}
	l, _ := over(0)
	v, err := l.Create(t.Context(), volume.Spec{Name: "source", Pool: "a", Size: volume.Range{Required: mib}})
	check.OK(t, err)
	from, err := l.OpenCut(t.Context(), v.ID, volume.KeyOf("copy"))
	check.OK(t, err)
	from.Read = func(context.Context, int64, func(int64, []byte) error) error { return errdefs.ErrUnavailable }
	spec := volume.Spec{Name: "copy", Pool: "b", Source: v.ID, Size: volume.Range{Required: mib}}
	fails(t, second(l.Import(t.Context(), spec, from)), errdefs.ErrUnavailable, "an import whose origin goes away")
	moved, err := l.Create(t.Context(), volume.Spec{Name: "moved", Pool: "a", Size: volume.Range{Required: mib}})
	check.OK(t, err)
	check.OK(t, second(a.Open("a", nil).SetLabels(t.Context(), blockdev.Ref{Kind: moved.ID.Kind, Key: moved.ID.Key}, func(labels map[string]string) error {
		labels["import"], labels["carried"] = moved.ID.Key+"/2026-01-02T03:04:05Z/all", "the UID of an object"
		return nil
	})))
	for _, c := range []struct {
		age  time.Duration
		drop bool
		want int
	}{{0, true, 3}, {48 * time.Hour, false, 3}, {48 * time.Hour, true, 1}} {
		l, left := over(c.age)
		if c.drop {
			l.DropOldLeftovers(t.Context())
		}
		if n := left(); n != c.want {
			t.Errorf("after %v, dropped: %v: %d are left, want %d", c.age, c.drop, n, c.want)
		}
	}
}
