package volume_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lazy"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pools"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// otherPools is two nodes. The first has a pool a, the second a pool a and a pool b. restart starts their drivers, the first time or again; it returns pool
// b too.
func otherPools(t *testing.T) (restart func() (first, second *volume.Local, b blockdev.Pool)) {
	t.Helper()
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	var opened []blockdev.Pool
	closed := func() {
		for _, pool := range opened {
			check.OK(t, pool.Close())
		}
		opened = nil
	}
	t.Cleanup(closed)
	return func() (*volume.Local, *volume.Local, blockdev.Pool) {
		closed()
		for i, name := range []string{"a", "a", "b"} {
			at := filepath.Join(dir, []string{"first", "second", "third"}[i])
			check.OK(t, os.MkdirAll(at, 0o700))
			pool, err := pools.Open(t.Context(), name, "file://"+at+"?reservePercent=0&create=1")
			check.OK(t, err)
			opened = append(opened, pool)
		}
		first, second := start(t, 1, opened[0]), start(t, 1, opened[1:]...)
		for _, l := range []*volume.Local{first, second} {
			l.SetMoves(&stays{})
		}
		return first, second, opened[2]
	}
}

// move moves a volume from one node to a pool of another node.
func move(t *testing.T, name string, id volume.ID, from, to *volume.Local, pool string) {
	t.Helper()
	sealed, err := from.Seal(t.Context(), id, 3, "node-2")
	check.OK(t, err)
	check.OK(t, to.CopyIn(t.Context(), pool, name, blockdev.Thin, sealed))
	check.OK(t, to.Arrive(t.Context(), id))
	check.OK(t, from.Depart(t.Context(), id, sealed.Created))
	fails(t, second(from.Get(t.Context(), id)), errdefs.ErrNotFound, "Get where it was")
}

// TestMoveToOtherPool: a volume that has moved to a pool of another name keeps its ID. All calls for it work there, also after a start of the drivers.
// Snapshots and copies that are made of it there name it as their source. It can move back.
func TestMoveToOtherPool(t *testing.T) {
	restart := otherPools(t)
	a, b, pool := restart()
	v, before := withContents(t, a)
	if v.Pool != "a" {
		t.Errorf("a new volume says pool %q", v.Pool)
	}
	move(t, "source", v.ID, a, b, "b")
	for _, again := range []bool{false, true} {
		if again {
			a, b, pool = restart()
		}
		have, err := b.Get(t.Context(), v.ID)
		check.OK(t, err)
		want := v
		want.Pool, want.Format = "b", have.Format
		if !reflect.DeepEqual(have, want) {
			t.Errorf("again %v: it is %+v, want %+v", again, have, want)
		}
		holds(t, b, have)
	}

	in, err := b.InPool(t.Context(), "b")
	check.OK(t, err)
	if len(in) != 1 || in[0].ID != v.ID {
		t.Errorf("pool b has %+v", in)
	}
	o, err := b.Overview(t.Context(), nil)
	check.OK(t, err)
	if len(o.Volumes) != 1 || o.Volumes[0].ID != v.ID.String() || o.Volumes[0].Pool != "b" || len(o.Problems) > 0 {
		t.Errorf("the overview has %+v, problems %+v", o.Volumes, o.Problems)
	}
	check.OK(t, second(b.Claim(t.Context(), v.ID, volume.Claim{Node: node, Mode: "SINGLE_NODE_WRITER"})))
	check.OK(t, b.Release(t.Context(), v.ID, node))
	check.OK(t, second(b.Claim(t.Context(), v.ID, volume.Claim{Node: node, Mode: "SINGLE_NODE_WRITER"}))) // the node can have one claim
	check.OK(t, b.Release(t.Context(), v.ID, node))
	grown, err := b.Expand(t.Context(), v.ID, volume.Range{Required: v.Size + mib})
	check.OK(t, err)
	if grown.ID != v.ID || grown.Size != v.Size+mib {
		t.Errorf("it has grown to %+v", grown)
	}

	group := volume.GroupID{Key: volume.KeyOf("g")}
	for _, again := range []bool{false, true} {
		if again {
			a, b, pool = restart()
		}
		s, err := b.CreateSnapshot(t.Context(), "later", v.ID)
		check.OK(t, err)
		if s.ID != (volume.ID{Kind: blockdev.Snapshot, Pool: "b", Key: volume.KeyOf("later")}) || s.Source != v.ID {
			t.Errorf("again %v: the snapshot is %+v", again, s)
		}
		all, err := b.ListSnapshots(t.Context(), v.ID, volume.ID{}, 0)
		check.OK(t, err)
		if len(all) != map[bool]int{false: 1, true: 2}[again] {
			t.Errorf("again %v: its snapshots are %+v", again, all)
		}
		g, err := b.CreateGroup(t.Context(), "g", []volume.ID{v.ID})
		check.OK(t, err)
		if g.ID != group || len(g.Snapshots) != 1 || g.Snapshots[0].Source != v.ID {
			t.Errorf("again %v: the group is %+v", again, g)
		}
		for name, source := range map[string]volume.ID{"clone": v.ID, "restored": s.ID} {
			for _, in := range []string{"", "b"} {
				c, err := b.Create(t.Context(), volume.Spec{Name: name, Pool: in, Source: source, Size: volume.Range{Required: v.Size}})
				check.OK(t, err)
				if c.Source != source || c.ID.Pool != "b" || c.Pool != "b" {
					t.Errorf("again %v: %s is %+v", again, name, c)
				}
				holds(t, b, c)
			}
		}
		c, err := b.Create(t.Context(), volume.Spec{Name: "elsewhere", Pool: "a", Source: v.ID, Size: volume.Range{Required: v.Size}})
		check.OK(t, err)
		if c.Source != v.ID || c.ID.Pool != "a" {
			t.Errorf("again %v: the copy in the other pool is %+v", again, c)
		}
		holds(t, b, c)
	}
	if leftovers, err := b.Leftovers(t.Context(), pool); err != nil || len(leftovers) > 0 {
		t.Errorf("left are %v, %v", leftovers, err)
	}

	move(t, "source", v.ID, b, a, "a")
	back, err := a.Get(t.Context(), v.ID)
	check.OK(t, err)
	if back.ID != v.ID || back.Pool != "a" {
		t.Errorf("back it is %+v", back)
	}
	holds(t, a, back)
	check.OK(t, second(a.CreateSnapshot(t.Context(), "snapshot", v.ID))) // it is there already
	check.OK(t, errors.Join(a.DeleteSnapshot(t.Context(), before.ID), a.Delete(t.Context(), v.ID)))
	fails(t, second(a.Get(t.Context(), v.ID)), errdefs.ErrNotFound, "Get of what was deleted")
}

// TestOnePlace: a node has a volume that moves there in one pool only. What another of its pools has of it, an unfinished copy or what an earlier move left, is
// removed. If that may be newer than the volume, the move is refused.
func TestOnePlace(t *testing.T) {
	a, b, pool := otherPools(t)()
	v, _ := withContents(t, a)
	read := int64(0)
	from, err := a.Seal(t.Context(), v.ID, 3, "node-2")
	check.OK(t, err)
	fails(t, b.CopyIn(t.Context(), "b", "source", blockdev.Thin, stopping(from, 6*mib, errdefs.ErrUnavailable, &read)), errdefs.ErrUnavailable, "an origin that goes away")
	check.OK(t, b.CopyIn(t.Context(), "a", "source", blockdev.Thin, from)) // now pool a is asked for
	if left, err := b.Leftovers(t.Context(), pool); err != nil || len(left) > 0 {
		t.Errorf("pool b has %v, %v", left, err)
	}
	check.OK(t, b.Arrive(t.Context(), v.ID))
	check.OK(t, a.Depart(t.Context(), v.ID, from.Created))

	left, err := b.Seal(t.Context(), v.ID, 3, "node-2") // it moves away, and what is here is not removed
	check.OK(t, err)
	check.OK(t, a.CopyIn(t.Context(), "a", "source", blockdev.Thin, left))
	check.OK(t, a.Arrive(t.Context(), v.ID))
	for _, claims := range []int64{2, 4} {
		want := map[int64]error{2: errdefs.ErrExists}[claims]
		from, err := a.Seal(t.Context(), v.ID, claims, "node-2")
		check.OK(t, err)
		if err := b.CopyIn(t.Context(), "b", "source", blockdev.Thin, from); !errors.Is(err, want) {
			t.Errorf("after %d claims: %v, want %v", claims, err, want)
		}
	}
	check.OK(t, b.Arrive(t.Context(), v.ID))
	have, err := b.Get(t.Context(), v.ID)
	check.OK(t, err)
	if have.Pool != "b" {
		t.Errorf("it is %+v", have)
	}
	holds(t, b, have)
	if in, err := b.InPool(t.Context(), "a"); err != nil || len(in) > 0 {
		t.Errorf("pool a still has %+v, %v", in, err)
	}
}

// TestListOfMoved: all volumes are listed once, in the order of their IDs, also those that are in another pool than their IDs say, or name a pool that this node
// does not have. Pages go on after a volume that was deleted meanwhile, moved or not.
func TestListOfMoved(t *testing.T) {
	for _, size := range []int{0, 1, 2, 3} {
		made := func(l *volume.Local, name, pool string) volume.Volume {
			v, err := l.Create(t.Context(), volume.Spec{Name: name, Pool: pool, Size: volume.Range{Required: mib}})
			check.OK(t, err)
			return v
		}
		before := start(t, 0, memory.NewDisk(1<<30).Open("a", nil), memory.NewDisk(1<<30).Open("b", nil), memory.NewDisk(1<<30).Open("other", nil))
		l := start(t, 0, memory.NewDisk(1<<30).Open("a", nil), memory.NewDisk(1<<30).Open("b", nil))
		var want, have []volume.ID
		for i := range 3 {
			for _, in := range []string{"a", "b"} {
				want = append(want, made(l, fmt.Sprint("stays in ", in, i), in).ID)
				for _, named := range []string{"a", "b", "other"} {
					name := fmt.Sprint("comes from ", named, " to ", in, i)
					v := made(before, name, named)
					move(t, name, v.ID, before, l, in)
					want = append(want, v.ID)
				}
			}
		}
		for after := (volume.ID{}); ; {
			page, err := l.List(t.Context(), after, size)
			check.OK(t, err)
			for _, v := range page {
				have = append(have, v.ID)
			}
			if len(page) == 0 || size == 0 {
				break
			}
			after = page[len(page)-1].ID
			check.OK(t, l.Delete(t.Context(), after))
		}
		slices.SortFunc(want, func(a, b volume.ID) int { return strings.Compare(a.String(), b.String()) })
		if !slices.Equal(have, want) {
			t.Errorf("in pages of %d: listed %v, want %v", size, have, want)
		}
	}
}

// TestPlaceComesLater: a volume that was located (Locate) in a pool which its ID does not name is not taken for lost while that pool is not open: calls return
// ErrUnavailable. Once the pool is open, the volume is found.
func TestPlaceComesLater(t *testing.T) {
	origin, disk, other := memory.NewDisk(1<<30), memory.NewDisk(1<<30), memory.NewDisk(1<<30)
	a, b := start(t, 0, origin.Open("first", nil)), start(t, 0, disk.Open("first", nil), other.Open("second", nil))
	v := made(t)(a.Create(t.Context(), volume.Spec{Name: "v", Size: volume.Range{Required: 8 << 20}}))
	move(t, "v", v.ID, a, b, "second")
	mounts, err := mount.LoadTable()
	check.OK(t, err)
	synctest.Test(t, func(t *testing.T) {
		there := false
		late := lazy.New("second", errors.New("no disk"), func(context.Context) (blockdev.Pool, error) {
			if !there {
				return nil, errors.New("no disk")
			}
			return other.Open("second", nil), nil
		})
		l, err := volume.NewLocal(t.Context(), node, []blockdev.Pool{disk.Open("first", nil), late}, mounts, 0)
		check.OK(t, err)
		l.Locate(v.ID, "second")
		fails(t, second(l.Get(t.Context(), v.ID)), errdefs.ErrUnavailable, "Get")
		fails(t, l.Delete(t.Context(), v.ID), errdefs.ErrUnavailable, "Delete")
		there = true
		time.Sleep(time.Minute) // until it is tried again
		have, err := l.Get(t.Context(), v.ID)
		check.OK(t, err)
		if have.Pool != "second" || have.ID != v.ID {
			t.Errorf("it is %+v", have)
		}
		check.OK(t, l.Delete(t.Context(), v.ID))
		fails(t, second(l.Get(t.Context(), v.ID)), errdefs.ErrNotFound, "Get of what was deleted")
	})
}

// leaveInSecond makes the disks of the two pools of a node, first and second. Pool second has what is left of a volume: as way says, sealed after it had moved
// away, or an unfinished copy. Pool first has the volume itself, which came there while second was away.
func leaveInSecond(t *testing.T, way string) (id volume.ID, first, late *memory.Disk) {
	t.Helper()
	origin, first, late := memory.NewDisk(1<<30), memory.NewDisk(1<<30), memory.NewDisk(1<<30)
	a, before := start(t, 0, origin.Open("first", nil)), start(t, 0, first.Open("first", nil), late.Open("second", nil))
	v := made(t)(a.Create(t.Context(), volume.Spec{Name: "v", Size: volume.Range{Required: 8 << 20}}))
	switch way {
	case "sealed":
		move(t, "v", v.ID, a, before, "second")
		left, err := before.Seal(t.Context(), v.ID, 3, "node-2")
		check.OK(t, err)
		check.OK(t, a.CopyIn(t.Context(), "first", "v", blockdev.Thin, left))
		check.OK(t, a.Arrive(t.Context(), v.ID))
	case "unfinished":
		from, err := a.Seal(t.Context(), v.ID, 3, "node-2")
		check.OK(t, err)
		from.Read = func(context.Context, int64, func(int64, []byte) error) error { return errdefs.ErrUnavailable }
		fails(t, before.CopyIn(t.Context(), "second", "v", blockdev.Thin, from), errdefs.ErrUnavailable, "an origin that goes away")
	}
	move(t, "v", v.ID, a, start(t, 0, first.Open("first", nil)), "first")
	return v.ID, first, late
}

// TestPlaceOfLeftover: what is left of a volume in another pool is not taken for the volume, which is in the pool that its ID names, whichever pool opens last.
func TestPlaceOfLeftover(t *testing.T) {
	mounts, err := mount.LoadTable()
	check.OK(t, err)
	for _, way := range []string{"sealed", "unfinished"} {
		for _, last := range []string{"second", "first"} {
			t.Run(way+", and "+last+" opens last", func(t *testing.T) {
				id, first, late := leaveInSecond(t, way)
				synctest.Test(t, func(t *testing.T) {
					there := map[string]bool{}
					var pools []blockdev.Pool
					for name, disk := range map[string]*memory.Disk{"first": first, "second": late} {
						pools = append(pools, lazy.New(name, errors.New("no disk"), func(context.Context) (blockdev.Pool, error) {
							if !there[name] {
								return nil, errors.New("no disk")
							}
							return disk.Open(name, nil), nil
						}))
					}
					l, err := volume.NewLocal(t.Context(), node, pools, mounts, 0)
					check.OK(t, err)
					for _, name := range []string{map[string]string{"first": "second", "second": "first"}[last], last} {
						there[name] = true
						time.Sleep(time.Minute) // until it is tried again
						check.OK(t, second(l.InPool(t.Context(), name)))
					}
					have, err := l.Get(t.Context(), id)
					check.OK(t, err)
					if have.Pool != "first" || have.Sealed {
						t.Errorf("it is %+v", have)
					}
				})
			})
		}
	}
}

// TestLocatedStays: a volume is where it was located (Locate), whatever a pool that opens later has of it.
func TestLocatedStays(t *testing.T) {
	origin, disk, other := memory.NewDisk(1<<30), memory.NewDisk(1<<30), memory.NewDisk(1<<30)
	a, b := start(t, 0, origin.Open("first", nil)), start(t, 0, disk.Open("first", nil), other.Open("second", nil))
	v := made(t)(a.Create(t.Context(), volume.Spec{Name: "v", Size: volume.Range{Required: 8 << 20}}))
	move(t, "v", v.ID, a, b, "second")
	mounts, err := mount.LoadTable()
	check.OK(t, err)
	synctest.Test(t, func(t *testing.T) {
		late := lazy.New("second", errors.New("no disk"), func(context.Context) (blockdev.Pool, error) { return other.Open("second", nil), nil })
		l, err := volume.NewLocal(t.Context(), node, []blockdev.Pool{disk.Open("first", nil), late}, mounts, 0)
		check.OK(t, err)
		l.Locate(v.ID, "first")
		time.Sleep(time.Minute) // until it is tried again
		in, err := l.InPool(t.Context(), "second")
		check.OK(t, err)
		if len(in) != 1 || in[0].ID != v.ID {
			t.Errorf("the pool has %+v", in)
		}
		fails(t, second(l.Get(t.Context(), v.ID)), errdefs.ErrNotFound, "Get of what is not where it was located")
	})
}

// TestLeftoverOfPool: a leftover of a volume that is in another pool by now is dropped from the pool in which it was found, and the volume stays.
func TestLeftoverOfPool(t *testing.T) {
	id, first, late := leaveInSecond(t, "unfinished")
	pool := late.Open("second", nil)
	l := start(t, 0, first.Open("first", nil), pool)
	left, err := l.Leftovers(t.Context(), pool)
	check.OK(t, err)
	if len(left) != 1 || left[0].ID != id || left[0].Pool != "second" {
		t.Fatalf("left are %+v", left)
	}
	check.OK(t, l.DropLeftover(t.Context(), left[0]))
	if left, err := l.Leftovers(t.Context(), pool); err != nil || len(left) > 0 {
		t.Errorf("left are %+v, %v", left, err)
	}
	have, err := l.Get(t.Context(), id)
	check.OK(t, err)
	if have.Pool != "first" {
		t.Errorf("it is %+v", have)
	}
}

// TestDropLeft: what a pool has left of a volume that is in another pool is not listed. DropLeft removes it if the volume came by its seal, and refuses if it
// may be newer than the volume, or if the volume itself may have moved.
func TestDropLeft(t *testing.T) {
	id, first, late := leaveInSecond(t, "sealed")
	l := start(t, 0, first.Open("first", nil), late.Open("second", nil))
	l.SetMoves(&stays{})
	all, err := l.List(t.Context(), volume.ID{}, 1)
	check.OK(t, err)
	if len(all) != 1 || all[0].ID != id || all[0].Pool != "first" {
		t.Fatalf("listed are %+v", all)
	}
	if more, err := l.List(t.Context(), all[0].ID, 1); err != nil || len(more) > 0 {
		t.Errorf("after it are listed %+v, %v", more, err)
	}
	fails(t, l.DropLeft(t.Context(), "first", id, 3), errdefs.ErrPrecondition, "DropLeft of the volume itself")
	fails(t, l.DropLeft(t.Context(), "second", id, 2), errdefs.ErrExists, "DropLeft of what was used since")
	reseal := func(label string) (was string) {
		check.OK(t, second(late.Open("second", nil).SetLabels(t.Context(), blockdev.Ref{Kind: id.Kind, Key: id.Key}, func(labels map[string]string) error {
			was, labels["sealed"] = labels["sealed"], label
			return nil
		})))
		return was
	}
	was := reseal("2020-01-02T03:04:05Z/1")
	fails(t, l.DropLeft(t.Context(), "second", id, 3), errdefs.ErrExists, "DropLeft of what the volume did not come from")
	reseal(was)
	check.OK(t, second(l.Seal(t.Context(), id, 3, "node-2")))
	fails(t, l.DropLeft(t.Context(), "second", id, 3), errdefs.ErrPrecondition, "DropLeft while the volume may have moved")
	check.OK(t, l.Unseal(t.Context(), id))
	if in, err := l.InPool(t.Context(), "second"); err != nil || len(in) != 1 {
		t.Errorf("the other pool has %+v, %v", in, err)
	}
	check.OK(t, l.DropLeft(t.Context(), "second", id, 3))
	fails(t, l.DropLeft(t.Context(), "second", id, 3), errdefs.ErrNotFound, "DropLeft of what is gone")
	if in, err := l.InPool(t.Context(), "second"); err != nil || len(in) > 0 {
		t.Errorf("the other pool has %+v, %v", in, err)
	}
	if have, err := l.Get(t.Context(), id); err != nil || have.Pool != "first" {
		t.Errorf("the volume is %+v, %v", have, err)
	}
}
