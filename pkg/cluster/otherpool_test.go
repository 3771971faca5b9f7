package cluster_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
	"github.com/ashlar-csi/ashlar/pkg/volume/storetest"
)

// isIn shows that a volume is in a pool of a machine, and still has its ID.
func (w *environment) isIn(name string, id volume.ID, m *machine, pool string) {
	w.Helper()
	o := w.object(name)
	if o.Spec.NodeName != m.name || o.Spec.Pool != pool || cluster.VolumeID(o) != id || o.ID() != id.String() {
		w.Errorf("its object says pool %s of node %s, and is that of %s", o.Spec.Pool, o.Spec.NodeName, o.ID())
	}
	have, err := m.local.Get(w.ctx, id)
	check.OK(w, err)
	if have.Pool != pool || have.ID != id {
		w.Errorf("its node has %+v", have)
	}
}

// TestMoveToOtherPool: a volume moves to a pool of another name on another node. It keeps its ID, and can be used on any node. Copies and snapshots that
// are made of it there name it as their source, also after a restart. It can be adopted there, and moves back.
func TestMoveToOtherPool(t *testing.T) {
	w, a, b, s, v, dir := reached(t, volume.Spec{Name: "v", Filesystem: "ext4", Size: volume.Range{Required: 64 * mib}})
	w.claimFor(v.ID, a.name)
	target := w.staged(a, dir, v.ID, mounted)
	check.OK(t, os.WriteFile(filepath.Join(target, "file"), []byte("from node-1"), 0o600))
	check.OK(t, a.unstage(w.ctx, dir, v.ID))
	w.claimFor(v.ID, "")
	before, err := s.CreateSnapshot(w.ctx, "before", v.ID)
	check.OK(t, err)
	want := w.content(a, v.ID)

	w.movesToPool("v", b.name, "b")
	w.moved("v", a, b)
	w.isIn("v", v.ID, b, "b")
	if have := w.content(b, v.ID); string(have) != string(want) {
		t.Error("its bytes are others")
	}
	for _, at := range []*machine{b, a} { // on its new home, and on its old one
		w.claimFor(v.ID, at.name)
		target = w.staged(at, dir, v.ID, mounted)
		if have, err := os.ReadFile(filepath.Join(target, "file")); err != nil || string(have) != "from node-1" {
			t.Errorf("on %s the file has %q, %v", at.name, have, err)
		}
		check.OK(t, at.unstage(w.ctx, dir, v.ID))
		w.claimFor(v.ID, "")
	}
	w.exported("v", nil)

	b.stop()
	w.start(b)
	all, err := s.List(w.ctx, volume.ID{}, 0)
	check.OK(t, err)
	if len(all) != 1 || all[0].ID != v.ID || all[0].Pool != "b" {
		t.Errorf("listed are %+v", all)
	}
	again, err := s.Create(w.ctx, volume.Spec{Name: "v", Pool: "default", Filesystem: "ext4", Access: volume.AccessAny, Size: volume.Range{Required: 64 * mib}}) // a late retry, with the pool of its class
	if err != nil || again.ID != v.ID {
		t.Errorf("made again it is %+v, %v", again, err)
	}
	after, err := s.CreateSnapshot(w.ctx, "after", v.ID)
	check.OK(t, err)
	if after.ID.Pool != "b" || after.Source != v.ID || before.ID.Pool != "default" {
		t.Errorf("the snapshots are %+v and %+v", before, after)
	}
	group, err := s.CreateGroup(w.ctx, "group", []volume.ID{v.ID})
	check.OK(t, err)
	if len(group.Snapshots) != 1 || group.Snapshots[0].Source != v.ID || group.Snapshots[0].ID.Pool != "b" {
		t.Errorf("the group is %+v", group)
	}
	cut, err := s.ListSnapshots(w.ctx, v.ID, volume.ID{}, 0)
	check.OK(t, err)
	if len(cut) != 3 {
		t.Errorf("its snapshots are %+v", cut)
	}
	for name, source := range map[string]volume.ID{"clone": v.ID, "restored": after.ID, "as before": before.ID} {
		at, pool := b, "b"
		if source == before.ID {
			at, pool = a, "default"
		}
		for range 2 { // the second time as a retry
			c, err := s.Create(w.ctx, volume.Spec{Name: name, Source: source, Filesystem: "ext4", Size: volume.Range{Required: 64 * mib}})
			check.OK(t, err)
			if c.Node != at.name || c.ID.Pool != pool || c.Source != source {
				t.Errorf("%s is %+v", name, c)
			}
		}
	}
	elsewhere, err := s.Create(w.ctx, volume.Spec{Name: "elsewhere", Pool: "default", Source: v.ID, Filesystem: "ext4", Copies: volume.CopiesAnywhere, Nodes: []string{a.name}, Size: volume.Range{Required: 64 * mib}})
	check.OK(t, err)
	if elsewhere.Node != a.name || elsewhere.Source != v.ID {
		t.Errorf("the copy on the other node is %+v", elsewhere)
	}
	check.OK(t, second(s.Expand(w.ctx, v.ID, volume.Range{Required: 80 * mib})))
	for _, m := range []*machine{a, b} {
		w.tally(m)
	}

	// The object is deleted, and the volume adopted.
	o := w.object("v")
	spec := o.Spec
	b.stop()
	check.OK(t, w.Delete(w.ctx, o))
	w.start(b)
	pool := &v1alpha1.Pool{}
	w.eventually("the pool that has it says that it is a stray", func() bool {
		check.OK(t, w.Get(w.ctx, client.ObjectKey{Name: b.name + ".b"}, pool))
		return len(pool.Status.Strays) == 1 && pool.Status.Strays[0].ID == v.ID.String()
	})
	w.adoptOn(b.name, "b", "all")
	w.eventually("it has an object again", func() bool { o := w.object("v"); return o != nil && o.Status.Created != nil })
	w.isIn("v", v.ID, b, "b")
	if now := w.object("v").Spec; now.IDPool != spec.IDPool || now.Size != spec.Size {
		t.Errorf("its object says %+v, before %+v", now, spec)
	}

	w.movesToPool("v", a.name, "default")
	w.moved("v", b, a)
	w.isIn("v", v.ID, a, "default")
	if o := w.object("v"); o.Spec.IDPool != "" {
		t.Errorf("its object says %+v", o.Spec)
	}
	for _, name := range []string{"clone", "restored", "as before", "elsewhere"} {
		check.OK(t, s.Delete(w.ctx, cluster.VolumeID(w.object(name))))
	}
	check.OK(t, s.DeleteGroup(w.ctx, group.ID))
	for _, id := range []volume.ID{before.ID, after.ID} {
		check.OK(t, s.DeleteSnapshot(w.ctx, id))
	}
	check.OK(t, s.Delete(w.ctx, v.ID))
	w.tally(a)
	w.tally(b)
}

// TestMoveToOtherPoolSnapshots: snapshots move to pools of their own name only, wherever their volume is. They still name that volume as their source,
// whatever pool it is in, and are restored where they are; so they do after an adoption.
func TestMoveToOtherPoolSnapshots(t *testing.T) {
	w, a, b, s, v, _ := reached(t, volume.Spec{Name: "v", Size: volume.Range{Required: 64 * mib}})
	check.OK(t, storetest.WriteTo(a.disks[0].Open("default", nil))(w.ctx, v.ID, 5*mib, []byte("some")))
	want := w.content(a, v.ID)
	before, err := s.CreateSnapshot(w.ctx, "before", v.ID)
	check.OK(t, err)
	w.movesToPool("v", b.name, "b")
	w.moved("v", a, b)
	after, err := s.CreateSnapshot(w.ctx, "after", v.ID)
	check.OK(t, err)

	o := w.cutObject(before.ID)
	other := o.DeepCopy()
	other.Spec.Move = &v1alpha1.Move{Node: b.name, Pool: "b"}
	if err := w.Patch(w.ctx, other, client.MergeFrom(o)); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "a snapshot stays in pools of one name: its ID has that") {
		t.Errorf("a move of a snapshot to a pool of another name: %v", err)
	}
	for _, one := range []struct {
		volume.Snapshot
		from, to *machine
	}{{before, a, b}, {after, b, a}} {
		w.cutMovesTo(one.ID, one.to.name)
		w.cutMoved(one.ID, one.from, one.to)
		w.knows(s, one.ID, one.to)
		if again, err := s.CreateSnapshot(w.ctx, one.Name, v.ID); err != nil || again.ID != one.ID || again.Source != v.ID || again.Node != one.to.name {
			t.Errorf("asked for again %s is %+v, %v", one.ID, again, err)
		}
		restored, err := s.Create(w.ctx, volume.Spec{Name: "restored from " + one.Name, Source: one.ID, Size: volume.Range{Required: 64 * mib}})
		check.OK(t, err)
		if have := w.content(one.to, restored.ID); restored.Node != one.to.name || restored.ID.Pool != one.ID.Pool || string(have) != string(want) {
			t.Errorf("restored is %+v, with all bytes: %v", restored, string(have) == string(want))
		}
		check.OK(t, s.Delete(w.ctx, restored.ID))
	}
	if all, err := s.ListSnapshots(w.ctx, v.ID, volume.ID{}, 0); err != nil || len(all) != 2 {
		t.Errorf("its snapshots are %+v, %v", all, err)
	}

	spec := w.cutObject(after.ID).Spec
	a.stop()
	check.OK(t, w.Delete(w.ctx, w.cutObject(after.ID)))
	w.start(a)
	pool := &v1alpha1.Pool{}
	w.eventually("the pool that has it says that it is a stray", func() bool {
		check.OK(t, w.Get(w.ctx, client.ObjectKey{Name: a.name + ".b"}, pool))
		return len(pool.Status.Strays) == 1 && pool.Status.Strays[0].ID == after.ID.String()
	})
	w.adoptOn(a.name, "b", "all")
	w.eventually("it has an object again", func() bool { o := w.cutObject(after.ID); return o != nil && o.Status.Created != nil })
	if now := w.cutObject(after.ID).Spec; now.SourcePool != "default" || now.Pool != "b" || now.Source != spec.Source || now.NodeName != a.name {
		t.Errorf("its object says %+v, before %+v", now, spec)
	}
	for _, id := range []volume.ID{before.ID, after.ID} {
		check.OK(t, s.DeleteSnapshot(w.ctx, id))
	}
	check.OK(t, s.Delete(w.ctx, v.ID))
	w.tally(a)
	w.tally(b)
}

// TestMoveToOtherPoolUndone: a move to another pool that is taken back, or asked for again for another pool, leaves nothing.
func TestMoveToOtherPoolUndone(t *testing.T) {
	w, a, b, s, v, _ := reached(t, volume.Spec{Name: "v", Size: volume.Range{Required: 64 * mib}})
	b.stop()
	w.movesToPool("v", b.name, "b")
	w.start(b)
	w.eventually("its bytes are there, or it has moved", func() bool {
		m := w.object("v").Status.Move
		return m != nil && m.Pool == "b" || w.object("v").Spec.Pool == "b"
	})
	o := w.object("v")
	if o.Spec.Move != nil && !o.Spec.Move.Left {
		before := o.DeepCopy()
		o.Spec.Move = nil
		if w.Patch(w.ctx, o, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})) == nil {
			w.movesToPool("v", b.name, "")
			w.moved("v", a, b)
			w.isIn("v", v.ID, b, "default")
		}
	}
	check.OK(t, func() error {
		w.eventually("the move is over", func() bool { return w.object("v").Spec.Move == nil })
		return s.Delete(w.ctx, v.ID)
	}())
	w.eventually("nothing is left", func() bool { return len(w.leftovers(b)) == 0 })
	w.tally(a)
	w.tally(b)
}

// TestMoveToOtherPoolInUse: a volume in use moves to a pool of another name. With a driver that does not know such moves, nothing is prepared, and the
// volume does not move.
func TestMoveToOtherPoolInUse(t *testing.T) {
	c, _ := newConsumerTo(t, "b")
	want := c.content(c.a, c.id)
	from, err := c.old.Describe(c.ctx, c.of())
	check.OK(t, err)
	older := from
	older.Pool = "" // as from an older driver of the old home, or of the user
	fails(t, second(c.fresh.Prepare(c.ctx, c.of(), older)), errdefs.ErrUnavailable)
	if left := c.leftovers(c.b); len(left) > 0 {
		t.Errorf("left are %v", left)
	}
	c.pinned()
	v := c.object("v")
	if !cluster.MayMove(v) {
		t.Errorf("it may not move: %+v", v.Status.Move)
	}
	v.Status.Move.Pool = "" // as from an older driver of the user
	if cluster.MayMove(v) {
		t.Error("it moves by the word of a driver of before")
	}
	s := c.flipped("v", c.b)
	c.over(want)
	c.isIn("v", c.id, c.b, "b")
	c.exported("v", &volume.Grant{Generation: 2, Node: c.name})
	c.released(s)
}

// leaves puts an old copy of a volume of another machine (from) into a pool of a machine (m) whose agent is stopped, as if the volume had come from m: the
// copy was sealed after some claims, and has other bytes.
func (w *environment) leaves(v volume.Volume, from, m *machine, pool string, claims int64) {
	w.Helper()
	sealed, err := from.local.Seal(w.ctx, v.ID, volume.AnyClaims, "node-2")
	check.OK(w, err)
	mounts, err := mount.LoadTable()
	check.OK(w, err)
	in := m.disks[map[string]int{"default": 0, "b": 1}[pool]].Open(pool, nil)
	was, err := volume.NewLocal(w.ctx, m.name, []blockdev.Pool{in}, mounts, 0)
	check.OK(w, err)
	check.OK(w, errors.Join(was.CopyIn(w.ctx, pool, v.Name, blockdev.Thin, sealed), was.Arrive(w.ctx, v.ID)))
	check.OK(w, storetest.WriteTo(in)(w.ctx, v.ID, 64<<10, []byte("old")))
	left, err := was.Seal(w.ctx, v.ID, claims, "node-2")
	check.OK(w, err)
	check.OK(w, second(from.disks[0].Open("default", nil).SetLabels(w.ctx, ref(v), func(labels map[string]string) error {
		labels["came"] = left.Created.UTC().Format(time.RFC3339Nano)
		return nil
	})))
}

// cameWithout returns a cluster of two nodes, and a volume that has moved to the second, into the pool that its ID names. In another pool of that node
// there is an old copy of the volume (leaves): that pool was away when the volume came, and is back now.
func cameWithout(t *testing.T, claims int64) (w *environment, b *machine, v volume.Volume, want []byte) {
	t.Helper()
	w, a, b, _, v, _ := reached(t, volume.Spec{Name: "v", Size: volume.Range{Required: mib}})
	check.OK(t, storetest.WriteTo(a.disks[0].Open("default", nil))(w.ctx, v.ID, 64<<10, []byte("now")))
	want = w.content(a, v.ID)
	b.stop()
	w.leaves(v, a, b, "b", claims)
	b.without = "b"
	w.start(b)
	w.movesTo("v", b.name)
	w.eventually("it has moved", func() bool {
		o := w.object("v")
		return o.Spec.NodeName == b.name && o.Spec.Move == nil && o.Status.Move == nil
	})
	b.stop()
	b.without = ""
	w.start(b)
	return w, b, v, want
}

// TestMoveToOtherPoolLeftGoes: an old copy of a volume, in a pool that was away when the volume came to another pool of the node, is removed when that
// pool is back.
func TestMoveToOtherPoolLeftGoes(t *testing.T) {
	w, b, v, want := cameWithout(t, 0)
	w.eventually("nothing is left of it", func() bool {
		in, err := b.local.InPool(w.ctx, "b")
		return err == nil && len(in) == 0
	})
	w.isIn("v", v.ID, b, "default")
	if string(w.content(b, v.ID)) != string(want) {
		t.Error("its bytes are others")
	}
	w.tally(b)
}

// TestMoveToOtherPoolLeft: an old copy that was used since it was sealed stays. It is not taken for the volume, and its seal is not taken off.
func TestMoveToOtherPoolLeft(t *testing.T) {
	w, b, v, want := cameWithout(t, 7)
	fails(t, b.agent.Stays(w.ctx, v.ID, "b", volume.Sealing{}), errdefs.ErrPrecondition)
	fails(t, b.agent.IsHere(w.ctx, v.ID, "b", volume.Sealing{}), errdefs.ErrPrecondition)
	check.OK(t, errors.Join(b.agent.Stays(w.ctx, v.ID, "default", volume.Sealing{}), b.agent.IsHere(w.ctx, v.ID, "default", volume.Sealing{})))
	pool := &v1alpha1.Pool{}
	w.eventually("the pool says that what it has is a stray", func() bool {
		check.OK(t, w.Get(w.ctx, client.ObjectKey{Name: b.name + ".b"}, pool))
		return len(pool.Status.Strays) == 1 && pool.Status.Strays[0].ID == v.ID.String()
	})
	w.isIn("v", v.ID, b, "default")
	if string(w.content(b, v.ID)) != string(want) {
		t.Error("its bytes are others")
	}
	in, err := b.local.InPool(w.ctx, "b")
	check.OK(t, err)
	if len(in) != 1 || !in[0].Sealed {
		t.Errorf("the other pool has %+v", in)
	}
	if o := w.object("v"); v1alpha1.IsLost(o) || len(o.Status.Health) > 0 {
		t.Errorf("its object says %+v", o.Status)
	}

	// Without the object both are strays. An adoption of all does not include the old copy.
	b.stop()
	check.OK(t, w.Delete(w.ctx, w.object("v")))
	w.start(b)
	for i, name := range []string{"b", "default"} {
		w.adoptOn(b.name, name, "all")
		w.eventually("pool "+name+" has adopted all that was meant", func() bool { return w.pool(b.name, name).Status.StrayCount == 1-i })
	}
	w.isIn("v", v.ID, b, "default")
}

// TestMoveLeftBefore: a node that has an old copy of a volume does not take that over when the volume has moved there, and its new copy is gone: the
// volume is copied again.
func TestMoveLeftBefore(t *testing.T) {
	w, a, b, v, want := aboutToMove(t)
	b.stop()
	for _, left := range w.leftovers(b) {
		check.OK(t, b.local.DropLeftover(w.ctx, left))
	}
	w.leaves(v, a, b, "default", 0)
	s := w.flipped("v", b)
	w.start(b)
	w.moved("v", a, b)
	if string(w.content(b, v.ID)) != string(want) {
		t.Error("its bytes are others")
	}
	check.OK(t, s.Delete(w.ctx, v.ID))
}

// TestPoolOfMoveAway: a volume in a pool that its ID does not name, and that is not there when its node starts, is not reported as lost. It can be deleted
// when the pool is back.
func TestPoolOfMoveAway(t *testing.T) {
	w, a, b, s, v, _ := reached(t, volume.Spec{Name: "v", Size: volume.Range{Required: 64 * mib}})
	w.movesToPool("v", b.name, "b")
	w.moved("v", a, b)
	b.stop()
	b.without = "b"
	w.start(b)
	w.eventually("its node says that its pool is away", func() bool {
		h := w.object("v").Status.Health
		return len(h) == 1 && h[0].Reason == "PoolUnavailable"
	})
	if o := w.object("v"); v1alpha1.IsLost(o) || o.Status.Failure != nil {
		t.Errorf("its object says %+v", o.Status)
	}
	waiting, cancel := context.WithCancel(w.ctx)
	gone := make(chan error, 1)
	go func() { gone <- s.Delete(waiting, v.ID) }()
	w.eventually("its deletion is asked for", func() bool { o := w.object("v"); return o != nil && o.Deleting() })
	b.stop()
	b.without = ""
	w.start(b)
	check.OK(t, <-gone)
	cancel()
	w.tally(b)
	if in, err := b.local.InPool(w.ctx, "b"); err != nil || !reflect.DeepEqual(in, []volume.Volume(nil)) {
		t.Errorf("its pool has %+v, %v", in, err)
	}
	fails(t, second(b.local.Get(w.ctx, volume.ID{Kind: blockdev.Volume, Pool: "b", Key: v.ID.Key})), errdefs.ErrNotFound)
}
