package volume_test

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lazy"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// TestPoolComesLater: a store over two pools of which one is missing serves the other, and says that the one is missing. It removes no part of a group that may
// be whole there. Once the pool opens, all that is in it is there, and what a crash has left in it is finished or removed.
func TestPoolComesLater(t *testing.T) {
	disk, other := memory.NewDisk(1<<30), memory.NewDisk(1<<30)
	before := start(t, 2, disk.Open("first", nil), other.Open("second", nil))
	size := volume.Range{Required: 8 << 20}
	a := made(t)(before.Create(t.Context(), volume.Spec{Name: "a", Size: size}))
	b := made(t)(before.Create(t.Context(), volume.Spec{Name: "b", Pool: "second", Size: size}))
	check.OK(t, second(before.Claim(t.Context(), b.ID, volume.Claim{Node: node, Mode: "SINGLE_NODE_WRITER"})))
	group, err := before.CreateGroup(t.Context(), "g", []volume.ID{a.ID, b.ID})
	check.OK(t, err)
	unsure, err := before.CreateGroup(t.Context(), "h", []volume.ID{a.ID, b.ID}) // a group that no record says to be whole
	check.OK(t, err)
	for i, d := range []*memory.Disk{disk, other} {
		_, err := d.Open("", nil).SetLabels(t.Context(), blockdev.Ref{Kind: blockdev.Snapshot, Key: unsure.Snapshots[i].ID.Key}, func(labels map[string]string) error {
			delete(labels, "group.whole")
			return nil
		})
		check.OK(t, err)
	}
	check.OK(t, second(before.Create(t.Context(), volume.Spec{Name: "gone pod", Pool: "second", Size: size, Ephemeral: filepath.Join(t.TempDir(), "none", "mount")})))

	mounts, err := mount.LoadTable()
	check.OK(t, err)
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		there := false
		late := lazy.New("second", errors.New("no disk"), func(context.Context) (blockdev.Pool, error) {
			if !there {
				return nil, errors.New("no disk")
			}
			return other.Open("second", nil), nil
		})
		l, err := volume.NewLocal(ctx, node, []blockdev.Pool{disk.Open("first", nil), late}, mounts, 2)
		check.OK(t, err)

		if v, err := l.Get(ctx, a.ID); err != nil || v.Name != "a" {
			t.Errorf("a volume of the other pool: %+v, %v", v, err)
		}
		c := made(t)(l.Create(ctx, volume.Spec{Name: "c", Size: size}))
		check.OK(t, second(l.Claim(ctx, c.ID, volume.Claim{Node: node, Mode: "SINGLE_NODE_WRITER"})))
		fails(t, second(l.Get(ctx, b.ID)), errdefs.ErrUnavailable, "Get of a volume of a missing pool")
		fails(t, second(l.Create(ctx, volume.Spec{Name: "b", Pool: "second", Size: size})), errdefs.ErrUnavailable, "Create in a missing pool, again")
		fails(t, l.Delete(ctx, b.ID), errdefs.ErrUnavailable, "Delete in a missing pool")
		fails(t, second(l.List(ctx, volume.ID{}, 0)), errdefs.ErrUnavailable, "a list that would lack volumes")
		fails(t, second(l.GetGroup(ctx, group.ID)), errdefs.ErrUnavailable, "Get of a group with a part in a missing pool")
		fails(t, second(l.GetSnapshot(ctx, unsure.Snapshots[0].ID)), errdefs.ErrNotFound, "a snapshot of a group that may not be whole")
		check.OK(t, second(l.GetSnapshot(ctx, group.Snapshots[0].ID)))
		if problems, err := l.Health(ctx, b.ID); err != nil || len(problems) != 1 || problems[0].Reason != "PoolMissing" {
			t.Errorf("health of a volume of a missing pool: %v, %v", problems, err)
		}
		if problems := l.PoolHealth(ctx); len(problems) != 1 || problems[0].Reason != "PoolMissing" {
			t.Errorf("health with a missing pool: %v", problems)
		}

		there = true
		time.Sleep(time.Minute)
		if v, err := l.Get(ctx, b.ID); err != nil || v.Claim.Node != node {
			t.Errorf("a volume of a pool that came: %+v, %v", v, err)
		}
		if have, err := l.GetGroup(ctx, group.ID); err != nil || len(have.Snapshots) != 2 {
			t.Errorf("a group with a part in a pool that came: %+v, %v", have, err)
		}
		if _, err := l.GetSnapshot(ctx, unsure.Snapshots[0].ID); err != nil {
			t.Errorf("a snapshot of a group that is whole again: %v", err)
		}
		if problems := l.PoolHealth(ctx); len(problems) != 0 {
			t.Errorf("health of a pool that came: %v", problems)
		}
		fails(t, second(l.Claim(ctx, a.ID, volume.Claim{Node: node, Mode: "SINGLE_NODE_WRITER"})), errdefs.ErrLimit, "a third claim, with one in the pool that came")
		list, err := l.List(ctx, volume.ID{}, 0)
		if err != nil || len(list) != 3 {
			t.Errorf("volumes %+v, %v; want a, b and c, and not that of the pod that is gone", list, err)
		}
	})
}

// TestGroupBesideMissingPool: a pool that is missing does not keep groups of volumes in other pools from being made and deleted, if it is known that it has no
// part of them.
func TestGroupBesideMissingPool(t *testing.T) {
	mounts, err := mount.LoadTable()
	check.OK(t, err)
	missing := lazy.New("second", errors.New("no disk"), func(context.Context) (blockdev.Pool, error) { return nil, errors.New("no disk") })
	l, err := volume.NewLocal(t.Context(), node, []blockdev.Pool{memory.NewDisk(1<<30).Open("first", nil), missing}, mounts, 2)
	check.OK(t, err)
	v := made(t)(l.Create(t.Context(), volume.Spec{Name: "a", Size: volume.Range{Required: mib}}))
	group, err := l.CreateGroup(t.Context(), "g", []volume.ID{v.ID})
	check.OK(t, err)
	again, err := l.CreateGroup(t.Context(), "g", []volume.ID{v.ID})
	if err != nil || again.ID != group.ID || len(again.Snapshots) != 1 {
		t.Errorf("repeated: %+v, %v", again, err)
	}
	there := volume.ID{Kind: blockdev.Volume, Pool: "second", Key: volume.KeyOf("b")}
	fails(t, second(l.CreateGroup(t.Context(), "h", []volume.ID{v.ID, there})), errdefs.ErrUnavailable, "a group with a volume of the missing pool")
	fails(t, l.DeleteGroup(t.Context(), group.ID), errdefs.ErrUnavailable, "DeleteGroup, as the missing pool may have a part of it")
	check.OK(t, l.DeleteMembers(t.Context(), group.ID, []volume.ID{group.Snapshots[0].ID}))
	fails(t, second(l.GetSnapshot(t.Context(), group.Snapshots[0].ID)), errdefs.ErrNotFound, "GetSnapshot")
}

// made returns what was made, or ends the test.
func made(t testing.TB) func(volume.Volume, error) volume.Volume {
	return func(v volume.Volume, err error) volume.Volume {
		t.Helper()
		check.OK(t, err)
		return v
	}
}

// TestCopiedPool: a copy of a pool is not opened beside that pool, so that the pool's group snapshots stay whole.
func TestCopiedPool(t *testing.T) {
	disk := memory.NewDisk(1 << 30)
	before := start(t, 0, disk.Open("first", nil))
	v := made(t)(before.Create(t.Context(), volume.Spec{Name: "a", Size: volume.Range{Required: 8 << 20}}))
	group, err := before.CreateGroup(t.Context(), "g", []volume.ID{v.ID})
	check.OK(t, err)

	mounts, err := mount.LoadTable()
	check.OK(t, err)
	var both []blockdev.Pool
	for _, name := range []string{"first", "second"} {
		pool, err := lazy.Open(t.Context(), name, func(context.Context) (blockdev.Pool, error) { return disk.Open(name, nil), nil })
		check.OK(t, err)
		t.Cleanup(func() { check.OK(t, pool.Close()) })
		both = append(both, pool)
	}
	l, err := volume.NewLocal(t.Context(), node, both, mounts, 0)
	check.OK(t, err)
	if problems := both[1].PoolHealth(t.Context()); len(problems) != 1 || problems[0].Reason != "PoolMissing" || !strings.Contains(problems[0].Message, "pool second has the volumes of pool first") {
		t.Errorf("the health of the copy: %v", problems)
	}
	if have, err := l.Get(t.Context(), v.ID); err != nil || have.Name != "a" {
		t.Errorf("a volume of the pool: %+v, %v", have, err)
	}
	fails(t, l.DeleteGroup(t.Context(), group.ID), errdefs.ErrUnavailable, "DeleteGroup, as a pool may have a part of it")
}

// TestCopyComesLater: if a pool and a copy of it open at the same moment, the one that comes first is used, and nothing in the other one. The other one is not
// used either while the disk of the first is away, so that this can come back.
func TestCopyComesLater(t *testing.T) {
	disk := memory.NewDisk(1 << 30)
	ref := made(t)(start(t, 0, disk.Open("first", nil)).Create(t.Context(), volume.Spec{Name: "a", Size: volume.Range{Required: 8 << 20}})).ID
	check.OK(t, second(disk.Open("first", nil).SetLabels(t.Context(), blockdev.Ref{Kind: ref.Kind, Key: ref.Key}, func(labels map[string]string) error { labels["pool"] = "old"; return nil })))
	moved := volume.ID{Kind: ref.Kind, Pool: "old", Key: ref.Key}
	mounts, err := mount.LoadTable()
	check.OK(t, err)
	synctest.Test(t, func(t *testing.T) {
		there, waits := false, make(chan struct{})
		come := func(name string, hook memory.Hook) *lazy.Pool {
			return lazy.New(name, errors.New("no disk"), func(context.Context) (blockdev.Pool, error) {
				if !there {
					return nil, errors.New("no disk")
				}
				return &leaving{Pool: disk.Open(name, hook), gone: func() bool { return !there }}, nil
			})
		}
		held := false
		pool, copied := come("first", func(operation string, _ blockdev.Ref) error {
			if operation == "Orphans" && !held { // its records have been read by now
				held = true
				<-waits
			}
			return nil
		}), come("second", nil)
		defer func() { check.OK(t, errors.Join(pool.Close(), copied.Close())) }()
		l, err := volume.NewLocal(t.Context(), node, []blockdev.Pool{pool, copied}, mounts, 0)
		check.OK(t, err)
		there = true
		time.Sleep(time.Minute)
		ended := make(chan error)
		go func() { ended <- second(pool.Capacity(t.Context())) }()
		synctest.Wait()
		refused := second(copied.Capacity(t.Context()))
		close(waits)
		if err := <-ended; err != nil || !errors.Is(refused, errdefs.ErrUnavailable) {
			t.Errorf("the pool: %v; its copy, which comes at the same moment: %v", err, refused)
		}
		if v, err := l.Get(t.Context(), moved); err != nil || v.Pool != "first" {
			t.Errorf("what has moved to the pool: %+v, %v", v, err)
		}

		there = false
		fails(t, second(pool.Get(t.Context(), blockdev.Ref{})), errdefs.ErrUnavailable, "the pool, which goes")
		there = true
		time.Sleep(time.Minute)
		fails(t, second(copied.Capacity(t.Context())), errdefs.ErrUnavailable, "the copy, while the pool is away")
		check.OK(t, second(pool.Capacity(t.Context())))
	})
}

// leaving is a pool whose disk may go.
type leaving struct {
	*memory.Pool
	gone func() bool
}

func (l *leaving) Gone() bool { return l.gone() }

func (l *leaving) Get(ctx context.Context, ref blockdev.Ref) (blockdev.Record, error) {
	if l.gone() {
		return blockdev.Record{}, errdefs.ErrUnavailable
	}
	return l.Pool.Get(ctx, ref)
}
