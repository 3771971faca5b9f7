package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/events"
	"github.com/ashlar-csi/ashlar/pkg/cluster/store"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
	"github.com/ashlar-csi/ashlar/pkg/volume/storetest"
)

// cutObject returns the object of a snapshot; nil if there is none.
func (w *environment) cutObject(id volume.ID) *v1alpha1.Snapshot {
	w.Helper()
	s := &v1alpha1.Snapshot{}
	if err := w.Get(w.ctx, client.ObjectKey{Name: id.Key}, s); client.IgnoreNotFound(err) != nil {
		w.Fatal(err)
	} else if err != nil {
		return nil
	}
	return s
}

// cutMovesTo asks for a snapshot to be moved to a node; with an empty node it takes the move back.
func (w *environment) cutMovesTo(id volume.ID, node string) {
	w.Helper()
	s := w.cutObject(id)
	before := s.DeepCopy()
	if s.Spec.Move = nil; node != "" {
		s.Spec.Move = &v1alpha1.Move{Node: node}
	}
	check.OK(w, w.Patch(w.ctx, s, client.MergeFrom(before)))
}

// hasMoved reports whether the move of a snapshot to a machine has ended.
func (w *environment) hasMoved(id volume.ID, to *machine) bool {
	w.Helper()
	s := w.cutObject(id)
	return s.Spec.NodeName == to.name && s.Spec.Move == nil && s.Status.Move == nil
}

// cutMoved waits until a snapshot has moved to a machine, and its old node has given its bytes back. It shows that nothing is left.
func (w *environment) cutMoved(id volume.ID, from, to *machine) {
	w.Helper()
	w.eventually(id.String()+" has moved to "+to.name, func() bool { return w.hasMoved(id, to) })
	fails(w, second(from.local.GetSnapshot(w.ctx, id)), errdefs.ErrNotFound)
	check.OK(w, second(to.local.GetSnapshot(w.ctx, id)))
	for _, m := range []*machine{from, to} {
		w.eventually("nothing is left on "+m.name, func() bool { return len(w.leftovers(m)) == 0 })
		w.tally(m)
	}
}

// cutSays waits until the message about its move in the object of a snapshot (status.move) has some text.
func (w *environment) cutSays(id volume.ID, part string) {
	w.Helper()
	w.eventually("the move of "+id.String()+" says "+part, func() bool {
		s := w.cutObject(id).Status.Move
		return s != nil && strings.Contains(s.Message, part)
	})
}

// knows waits until a store knows that a snapshot is on a machine.
func (w *environment) knows(s *store.Store, id volume.ID, m *machine) {
	w.Helper()
	w.eventually("the store knows that it is on "+m.name, func() bool {
		have, err := s.GetSnapshot(w.ctx, id)
		return err == nil && have.Node == m.name
	})
}

// TestSnapshotMove: a snapshot moves to another node, after its volume was deleted, and back. Nothing else of it changes, and volumes are restored where
// it is.
func TestSnapshotMove(t *testing.T) {
	w, a, b, s := twoNodes(t)
	v, snapshot := w.snapshotOf(s, a, "v", 3, 17, 1000)
	was, want := w.cutObject(snapshot.ID), w.content(a, snapshot.ID)
	check.OK(t, s.Delete(w.ctx, v.ID))
	w.cutMovesTo(snapshot.ID, b.name)
	w.cutMoved(snapshot.ID, a, b)
	if have := w.content(b, snapshot.ID); string(have) != string(want) {
		t.Error("its bytes are others")
	}
	now := w.cutObject(snapshot.ID)
	if now.UID != was.UID || !now.Status.Created.Equal(was.Status.Created) || now.Status.Size != was.Status.Size || v1alpha1.StateOf(now) != v1alpha1.StateReady {
		t.Errorf("its object says %+v, before %+v", now.Status, was.Status)
	}
	w.knows(s, snapshot.ID, b)
	if have, err := s.GetSnapshot(w.ctx, snapshot.ID); err != nil || have.Source != v.ID || have.Created != snapshot.Created {
		t.Errorf("it is %+v, %v; before it was %+v", have, err, snapshot)
	}
	again, err := s.CreateSnapshot(w.ctx, snapshot.Name, v.ID) // as external-snapshotter does, which does not know of moves
	if check.OK(t, err); again.ID != snapshot.ID || again.Node != b.name {
		t.Errorf("asked for again it is %+v", again)
	}
	restored, err := s.Create(w.ctx, volume.Spec{Name: "restored", Source: snapshot.ID, Size: volume.Range{Required: 64 * mib}})
	check.OK(t, err)
	if have := w.content(b, restored.ID); restored.Node != b.name || string(have) != string(want) {
		t.Errorf("restored is %+v, with all bytes: %v", restored, string(have) == string(want))
	}
	w.cutMovesTo(snapshot.ID, a.name)
	w.cutMoved(snapshot.ID, b, a)
	w.knows(s, snapshot.ID, a)
	check.OK(t, s.DeleteSnapshot(w.ctx, snapshot.ID))
	check.OK(t, s.Delete(w.ctx, restored.ID))
	w.tally(a)
	w.tally(b)
}

// coarse is a pool whose sizes are multiples of 48 MiB.
type coarse struct{ *memory.Pool }

func (coarse) Granularity() int64 { return 48 * mib }

// TestSnapshotMoveLarger: a snapshot that moves to a pool with coarser sizes becomes larger, and can be restored on other nodes all the same.
func TestSnapshotMoveLarger(t *testing.T) {
	w := newEnvironment(t)
	a := w.begin(&machine{name: "node-1", ported: true})
	b := w.begin(&machine{name: "node-2", ported: true, wrap: func(p *memory.Pool) blockdev.Pool { return coarse{p} }})
	s := w.calling(a)
	w.pooled(s, b)
	_, snapshot := w.snapshotOf(s, a, "v", 3, 1000)
	w.cutMovesTo(snapshot.ID, b.name)
	w.cutMoved(snapshot.ID, a, b)
	if size := w.cutObject(snapshot.ID).Status.Size; size != 96*mib {
		t.Errorf("it has %d bytes", size)
	}
	w.eventually("the store knows its size", func() bool {
		have, err := s.GetSnapshot(w.ctx, snapshot.ID)
		return err == nil && have.Size == 96*mib
	})
	spec := elsewhere("restored", snapshot.ID, a)
	spec.Size.Required = snapshot.Size
	if restored, err := s.Create(w.ctx, spec); err != nil || restored.Node != a.name || restored.Size != 96*mib {
		t.Errorf("restored is %+v, %v", restored, err)
	}
}

// TestSnapshotMoveCutShort is TestMoveCutShort for a snapshot.
func TestSnapshotMoveCutShort(t *testing.T) {
	w, s, at, other, snapshot := cutShort(t, nil, func(w *environment, s *store.Store, at *machine) onTheWay {
		_, cut := w.snapshotOf(s, at, "v", 3, 1000)
		return onTheWay{cut.ID, func(to *machine) { w.cutMovesTo(cut.ID, to.name) }, func(to *machine) bool { return w.hasMoved(cut.ID, to) },
			func(from, to *machine) { w.cutMoved(cut.ID, from, to) }}
	})
	w.knows(s, snapshot.id, at)
	check.OK(t, s.DeleteSnapshot(w.ctx, snapshot.id))
	w.tally(at)
	w.tally(other)
}

// slowCuts returns a cluster of two nodes, and a snapshot of the first, whose pool is a halting one, which waits for let.
func slowCuts(t *testing.T) (w *environment, a, b *machine, s *store.Store, snapshot volume.Snapshot, let chan struct{}) {
	t.Helper()
	w, let = newEnvironment(t), make(chan struct{}, 1)
	a = w.begin(&machine{name: "node-1", ported: true, wrap: func(p *memory.Pool) blockdev.Pool { return &halting{p, let} }})
	b = w.begin(&machine{name: "node-2", ported: true})
	s = w.calling(a)
	w.pooled(s, b)
	_, snapshot = w.snapshotOf(s, a, "v", 3, 1000)
	return w, a, b, s, snapshot, let
}

// TestSnapshotMoveUndone: a move that is taken back leaves nothing on the new node, and the snapshot as it was. The move of a snapshot that is deleted
// leaves nothing either.
func TestSnapshotMoveUndone(t *testing.T) {
	w, a, b, s, snapshot, let := slowCuts(t)
	copying := func() {
		t.Helper()
		w.cutMovesTo(snapshot.ID, b.name)
		let <- struct{}{}
		w.eventually("what it was let is copied", func() bool { return len(let) == 0 }) // otherwise the next copy may copy two ranges
		w.cutSays(snapshot.ID, "are copied from node node-1")
		if left := w.leftovers(b); len(left) != 1 {
			t.Fatalf("node-2 has %v", left)
		}
	}
	copying()
	w.cutMovesTo(snapshot.ID, "")
	w.eventually("nothing is left", func() bool { return len(w.leftovers(b)) == 0 && w.cutObject(snapshot.ID).Status.Move == nil })
	check.OK(t, second(a.local.GetSnapshot(w.ctx, snapshot.ID)))
	w.tally(a)
	copying()
	check.OK(t, s.DeleteSnapshot(w.ctx, snapshot.ID))
	w.eventually("nothing is left", func() bool { return len(w.leftovers(b)) == 0 })
	w.tally(a)
	w.tally(b)
}

// TestSnapshotMoveRead: a snapshot can be read on its old node while it moves. A copy of it that was begun on another node keeps it there until the copy
// is made.
func TestSnapshotMoveRead(t *testing.T) {
	w, a, b, s, snapshot, let := slowCuts(t)
	want := w.content(a, snapshot.ID)
	made := make(chan error, 1)
	go func() { made <- second(s.Create(w.ctx, elsewhere("copy", snapshot.ID, b))) }()
	let <- struct{}{}
	w.eventually("a copy is under way", func() bool { return len(w.leftovers(b)) == 1 })
	w.cutMovesTo(snapshot.ID, b.name)
	w.eventually("both are under way", func() bool { return len(w.leftovers(b)) == 2 })
	check.OK(t, second(s.Create(w.ctx, volume.Spec{Name: "restored", Source: snapshot.ID, Size: volume.Range{Required: 64 * mib}})))
	if have := w.content(a, volume.ID{Kind: blockdev.Volume, Pool: "default", Key: volume.KeyOf("restored")}); string(have) != string(want) {
		t.Error("what was restored meanwhile has other bytes")
	}
	close(let)
	check.OK(t, <-made)
	w.cutMoved(snapshot.ID, a, b)
	for _, id := range []volume.ID{snapshot.ID, {Kind: blockdev.Volume, Pool: "default", Key: volume.KeyOf("copy")}} {
		if have := w.content(b, id); string(have[:len(want)]) != string(want) {
			t.Errorf("%s has other bytes", id)
		}
	}
}

// TestSnapshotMoveWaitsForCopies: the controller does not change the node of a snapshot as long as a volume on another node is being copied from it.
func TestSnapshotMoveWaitsForCopies(t *testing.T) {
	w, a, b, s, snapshot, let := slowCuts(t)
	c := w.begin(&machine{name: "node-3", ported: true})
	w.pooled(s, c)
	ctx, cancel := context.WithCancel(w.ctx)
	made := make(chan error, 1)
	go func() { made <- second(s.Create(ctx, elsewhere("copy", snapshot.ID, c))) }()
	let <- struct{}{}
	w.eventually("a copy is under way", func() bool { return len(w.leftovers(c)) == 1 })
	c.stop()
	w.cutMovesTo(snapshot.ID, b.name)
	close(let)
	w.cutSays(snapshot.ID, "all bytes are on node node-2")
	time.Sleep(time.Second) // so that the controller can do what is wrong
	if now := w.cutObject(snapshot.ID); now.Spec.NodeName != a.name {
		t.Errorf("it is on node %s", now.Spec.NodeName)
	}
	w.start(c)
	check.OK(t, <-made)
	cancel()
	w.cutMoved(snapshot.ID, a, b)
}

// flippedCut returns a cluster of two nodes, and a snapshot that has moved from the first to the second, which has not taken it over. Both agents are
// stopped.
func flippedCut(t *testing.T) (w *environment, a, b *machine, s *store.Store, snapshot volume.Snapshot, want []byte) {
	t.Helper()
	w = newEnvironment(t)
	a, b = w.begin(&machine{name: "node-1", ported: true}), w.begin(&machine{name: "node-2", ported: true})
	s = w.calling(a)
	w.pooled(s, b)
	_, snapshot = w.snapshotOf(s, a, "v", 3, 1000)
	want = w.content(a, snapshot.ID)
	from, err := a.local.OpenMove(w.ctx, snapshot.ID)
	check.OK(t, err)
	a.stop()
	b.stop()
	check.OK(t, b.local.CopySnapshotIn(w.ctx, snapshot.Name, from))
	w.cutMovesTo(snapshot.ID, b.name)
	now := w.cutObject(snapshot.ID)
	before := now.DeepCopy()
	now.Status.Move = &v1alpha1.MoveStatus{Node: b.name, Message: "m", Copied: &v1alpha1.MoveCopied{Generation: now.Generation, Size: now.Status.Size, Sealed: metav1.NewMicroTime(from.Created)}}
	check.OK(t, w.Status().Patch(w.ctx, now, client.MergeFrom(before)))
	w.knows(s, snapshot.ID, b)
	return w, a, b, s, snapshot, want
}

// TestSnapshotMoveNotArrived: from when a snapshot has moved until its new node has taken it over, calls for it fail with ErrUnavailable, and the move
// cannot be taken back. The snapshot cannot be deleted before the old node has given its bytes back.
func TestSnapshotMoveNotArrived(t *testing.T) {
	w, a, b, s, snapshot, want := flippedCut(t)
	fails(t, second(s.Create(w.ctx, volume.Spec{Name: "restored", Source: snapshot.ID, Size: volume.Range{Required: 64 * mib}})), errdefs.ErrUnavailable)
	fails(t, s.Allocated(w.ctx, snapshot.ID, 0, func(blockdev.Extent) error { return nil }), errdefs.ErrUnavailable)
	fails(t, s.Changed(w.ctx, snapshot.ID, snapshot.ID, 0, func(blockdev.Extent) error { return nil }), errdefs.ErrUnavailable)
	fails(t, s.DeleteSnapshot(w.ctx, snapshot.ID), errdefs.ErrUnavailable)
	now := w.cutObject(snapshot.ID)
	before := now.DeepCopy()
	now.Spec.Move = nil
	if err := w.Patch(w.ctx, now, client.MergeFrom(before)); err == nil || !strings.Contains(err.Error(), "it is too late to undo that") {
		t.Errorf("taken back: %v", err)
	}
	w.start(a)
	a.agent.Changed()
	time.Sleep(time.Second) // so that the agent can do what is wrong
	check.OK(t, second(a.local.GetSnapshot(w.ctx, snapshot.ID)))
	if p := w.pool(a.name, "default"); p.Status.StrayCount != 0 {
		t.Errorf("strays are %+v", p.Status.Strays)
	}
	w.start(b)
	w.cutMoved(snapshot.ID, a, b)
	if have := w.content(b, snapshot.ID); string(have) != string(want) {
		t.Error("its bytes are others")
	}
	check.OK(t, s.DeleteSnapshot(w.ctx, snapshot.ID))
	w.tally(a)
	w.tally(b)
}

// TestSnapshotMoveCopyLost: the copy of a snapshot that has moved, and not arrived, is gone. It is copied again from the old node.
func TestSnapshotMoveCopyLost(t *testing.T) {
	w, a, b, _, snapshot, want := flippedCut(t)
	for _, left := range w.leftovers(b) {
		check.OK(t, b.local.DropLeftover(w.ctx, left))
	}
	w.start(b)
	w.cutSays(snapshot.ID, "not all bytes are here")
	if s := w.cutObject(snapshot.ID); v1alpha1.StateOf(s) == v1alpha1.StateLost {
		t.Errorf("it is lost: %+v", s.Status)
	}
	w.start(a)
	w.cutMoved(snapshot.ID, a, b)
	if have := w.content(b, snapshot.ID); string(have) != string(want) {
		t.Error("its bytes are others")
	}
}

// cutArrived writes into the object of a snapshot that has moved that its new node has taken it over.
func (w *environment) cutArrived(id volume.ID) {
	w.Helper()
	now := w.cutObject(id)
	before := now.DeepCopy()
	now.Status.Move.Arrived = true
	check.OK(w, w.Status().Patch(w.ctx, now, client.MergeFrom(before)))
}

// TestSnapshotMoveRestored: the object of a snapshot that has moved, and not arrived, is restored without its status. The snapshot is copied again, and
// arrives.
func TestSnapshotMoveRestored(t *testing.T) {
	w, a, b, _, snapshot, want := flippedCut(t)
	backup := w.cutObject(snapshot.ID)
	check.OK(t, w.Delete(w.ctx, w.cutObject(snapshot.ID)))
	w.eventually("its object is gone", func() bool { return w.cutObject(snapshot.ID) == nil })
	w.restored([]client.Object{backup})
	w.start(b)
	w.cutSays(snapshot.ID, "not all bytes are here")
	w.start(a)
	w.cutMoved(snapshot.ID, a, b)
	if have := w.content(b, snapshot.ID); string(have) != string(want) {
		t.Error("its bytes are others")
	}
}

// TestSnapshotMoveRolledBack: the object was restored to an earlier move, after which the snapshot had moved back: the bytes of the old node are all there
// is. They stay, whether the new node is away or says that it has nothing, and can be adopted by a person.
func TestSnapshotMoveRolledBack(t *testing.T) {
	w, a, b, s, snapshot, want := flippedCut(t)
	for _, left := range w.leftovers(b) {
		check.OK(t, b.local.DropLeftover(w.ctx, left))
	}
	w.cutArrived(snapshot.ID)
	w.start(a)
	w.cutSays(snapshot.ID, "the bytes that node node-1 had are still there: ask node node-2 whether it has all of")
	w.start(b)
	w.cutSays(snapshot.ID, "is lost on node node-2")
	check.OK(t, w.Delete(w.ctx, w.cutObject(snapshot.ID)))
	w.eventually("node-1 has a stray", func() bool {
		a.agent.Changed()
		return w.pool(a.name, "default").Status.StrayCount == 1
	})
	w.adopt("default", snapshot.ID.String())
	w.knows(s, snapshot.ID, a)
	if have := w.content(a, snapshot.ID); string(have) != string(want) {
		t.Error("its bytes are others")
	}
}

// TestSnapshotMoveNewHomeLoses: the new node loses a snapshot that has arrived, before the old one has given its bytes back. The old one keeps them until
// the new one has the snapshot again.
func TestSnapshotMoveNewHomeLoses(t *testing.T) {
	w, a, b, _, snapshot, want := flippedCut(t)
	w.start(b)
	w.cutSays(snapshot.ID, "node-1 is to give its bytes back")
	lost := blockdev.Ref{Kind: blockdev.Snapshot, Key: snapshot.ID.Key}
	b.disks[0].Ail(lost, blockdev.Problem{Severity: blockdev.DataLoss, Reason: "Bad", Message: "m"})
	w.touch(w.cutObject(snapshot.ID))
	w.eventually("it is lost", func() bool { return v1alpha1.IsLost(w.cutObject(snapshot.ID)) })
	w.start(a)
	w.cutSays(snapshot.ID, "is lost on node node-2")
	if have := w.content(a, snapshot.ID); string(have) != string(want) {
		t.Error("its bytes are others")
	}
	b.disks[0].Ail(lost)
	w.touch(w.cutObject(snapshot.ID))
	w.cutMoved(snapshot.ID, a, b)
}

// leftForGood deletes the Node that a snapshot has left, and waits until the move is over.
func (w *environment) leftForGood(id volume.ID, from, to *machine) {
	w.Helper()
	check.OK(w, w.Delete(w.ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: from.name}}))
	now := w.cutObject(id)
	before := now.DeepCopy()
	metav1.SetMetaDataAnnotation(&now.ObjectMeta, "example.com/touched", "it") // a change of the object, so that the mover looks at it
	check.OK(w, w.Patch(w.ctx, now, client.MergeFrom(before)))
	w.eventually("the move is over", func() bool { return w.hasMoved(id, to) })
}

// TestSnapshotMoveNodeGone: the node that a snapshot has left is gone for good, and comes back all the same with the old bytes. When the snapshot moves
// back there, it has all its bytes.
func TestSnapshotMoveNodeGone(t *testing.T) {
	w, a, b, s, snapshot, want := flippedCut(t)
	w.start(b)
	w.cutSays(snapshot.ID, "node-1 is to give its bytes back")
	fails(t, s.DeleteSnapshot(w.ctx, snapshot.ID), errdefs.ErrUnavailable)
	w.leftForGood(snapshot.ID, a, b)
	w.node(a.name, true)
	w.start(a)
	w.cutMovesTo(snapshot.ID, a.name)
	w.cutMoved(snapshot.ID, b, a)
	if have := w.content(a, snapshot.ID); string(have) != string(want) {
		t.Error("its bytes are others")
	}
	w.knows(s, snapshot.ID, a)
	check.OK(t, s.DeleteSnapshot(w.ctx, snapshot.ID))
}

// TestSnapshotMoveNodeGoneStray: such a node deletes the old bytes when the new node says that it has the snapshot, and keeps them if that has lost it.
func TestSnapshotMoveNodeGoneStray(t *testing.T) {
	for _, lost := range []bool{false, true} {
		t.Run(fmt.Sprintf("lost=%v", lost), func(t *testing.T) {
			w, a, b, s, snapshot, want := flippedCut(t)
			w.start(b)
			w.cutSays(snapshot.ID, "node-1 is to give its bytes back")
			w.leftForGood(snapshot.ID, a, b)
			if lost {
				check.OK(t, b.disks[0].Open("default", nil).Delete(w.ctx, blockdev.Ref{Kind: blockdev.Snapshot, Key: snapshot.ID.Key}))
			}
			w.node(a.name, true)
			w.start(a)
			if lost {
				w.eventually("node-1 has a stray", func() bool { return w.pool(a.name, "default").Status.StrayCount == 1 })
				time.Sleep(time.Second) // so that the agent can do what is wrong
				if have := w.content(a, snapshot.ID); string(have) != string(want) {
					t.Error("its bytes are others")
				}
				return
			}
			w.eventually("its old bytes are gone", func() bool { return errors.Is(second(a.local.GetSnapshot(w.ctx, snapshot.ID)), errdefs.ErrNotFound) })
			if have := w.content(b, snapshot.ID); string(have) != string(want) {
				t.Error("its bytes are others")
			}
			check.OK(t, s.DeleteSnapshot(w.ctx, snapshot.ID))
			w.tally(a)
			w.tally(b)
		})
	}
}

// TestSnapshotMoveObjectDeleted: the object of a snapshot is deleted by hand before its move has ended. The copy that has not arrived is removed, and the
// bytes of the old node stay.
func TestSnapshotMoveObjectDeleted(t *testing.T) {
	w, a, b, _, snapshot, want := flippedCut(t)
	check.OK(t, w.Delete(w.ctx, w.cutObject(snapshot.ID)))
	w.start(a)
	w.start(b)
	strays := func(m *machine) int {
		m.agent.Changed()
		return w.pool(m.name, "default").Status.StrayCount
	}
	w.eventually("node-1 has a stray", func() bool { return strays(a) == 1 })
	w.eventually("what has not arrived is gone", func() bool { return len(w.leftovers(b)) == 0 })
	check.OK(t, second(a.local.GetSnapshot(w.ctx, snapshot.ID)))
	if have := w.content(a, snapshot.ID); string(have) != string(want) {
		t.Error("its bytes are others")
	}
}

// TestSnapshotMoveGroup: the members of a group move one by one, also one that was adopted. The group stays complete, and can be restored from and
// deleted, wherever its members are.
func TestSnapshotMoveGroup(t *testing.T) {
	w, a, b, s := twoNodes(t)
	var sources []volume.ID
	for _, name := range []string{"v", "w"} {
		v, err := s.Create(w.ctx, volume.Spec{Name: name, Size: volume.Range{Required: mib}, Nodes: []string{a.name}})
		check.OK(t, err)
		check.OK(t, storetest.WriteTo(a.disks[0].Open("default", nil))(w.ctx, v.ID, 64<<10, []byte(name)))
		sources = append(sources, v.ID)
	}
	group, err := s.CreateGroup(w.ctx, "group", sources)
	check.OK(t, err)
	adopted := w.cutObject(group.Snapshots[1].ID)
	before := adopted.DeepCopy()
	delete(adopted.Labels, v1alpha1.GroupLabel)
	check.OK(t, w.Patch(w.ctx, adopted, client.MergeFrom(before)))
	whole := func() {
		t.Helper()
		w.eventually("the group is whole", func() bool {
			have, err := s.GetGroup(w.ctx, group.ID)
			return err == nil && len(have.Snapshots) == 2 && have.Created.Equal(group.Created)
		})
	}
	for i, m := range group.Snapshots {
		w.cutMovesTo(m.ID, b.name)
		w.cutMoved(m.ID, a, b)
		whole()
		w.knows(s, m.ID, b)
		restored, err := s.Create(w.ctx, volume.Spec{Name: "restored " + string(rune('a'+i)), Source: m.ID, Size: volume.Range{Required: mib}})
		if check.OK(t, err); restored.Node != b.name {
			t.Errorf("restored is %+v", restored)
		}
	}
	w.cutMovesTo(group.Snapshots[0].ID, a.name)
	w.cutMoved(group.Snapshots[0].ID, b, a)
	whole()
	check.OK(t, s.DeleteGroup(w.ctx, group.ID)) // each node has one of its members
	for _, m := range group.Snapshots {
		if o := w.cutObject(m.ID); o != nil {
			t.Errorf("%s is still there: %+v", m.ID, o)
		}
	}
	w.tally(a)
	w.tally(b)
}

// TestSnapshotMoveGroupStrays: the objects of a group that is on two nodes are deleted. Its members are strays there, and belong to the group again when
// they are adopted; when all are there, so is the group.
func TestSnapshotMoveGroupStrays(t *testing.T) {
	w, a, b, s := twoNodes(t)
	var sources []volume.ID
	for _, name := range []string{"v", "w"} {
		v, err := s.Create(w.ctx, volume.Spec{Name: name, Size: volume.Range{Required: mib}, Nodes: []string{a.name}})
		check.OK(t, err)
		sources = append(sources, v.ID)
	}
	group, err := s.CreateGroup(w.ctx, "group", sources)
	check.OK(t, err)
	w.cutMovesTo(group.Snapshots[0].ID, b.name)
	w.cutMoved(group.Snapshots[0].ID, a, b)
	var were []*v1alpha1.Snapshot
	for _, m := range group.Snapshots {
		were = append(were, w.cutObject(m.ID))
	}
	for _, was := range were {
		check.OK(t, w.Delete(w.ctx, was))
	}
	for i, m := range []*machine{b, a} {
		id, was := group.Snapshots[i].ID, were[i]
		w.eventually("node "+m.name+" lists it", func() bool {
			m.agent.Changed()
			strays := w.pool(m.name, "default").Status.Strays
			return len(strays) == 1 && strays[0].ID == id.String() && strays[0].Group == group.ID.String()
		})
		w.adoptOn(m.name, "default", group.ID.String())
		w.eventually("it is there again", func() bool {
			now := w.cutObject(id)
			return now != nil && now.Status.Created.Equal(was.Status.Created) && now.Spec.NodeName == m.name && *now.Spec.Group == *was.Spec.Group
		})
	}
	w.eventually("the group is there again", func() bool {
		have, err := s.GetGroup(w.ctx, group.ID)
		return err == nil && len(have.Snapshots) == 2 && have.Created.Equal(group.Created)
	})
	b.stop()
	x := w.takenOver(t, b.name) // an attacker claims that another snapshot belongs to the group
	fake := snapshotOn(b.name, "fake")
	fake.Spec.Name, fake.Spec.Group = "group", &v1alpha1.Group{Key: group.ID.Key, Size: 2}
	x.has(fake, mib)
	other := snapshotOn(b.name, "other")
	x.has(other, mib)
	w.eventually("the store has heard of both", func() bool { return second(s.GetSnapshot(w.ctx, cluster.SnapshotID(other))) == nil })
	check.OK(t, second(s.GetGroup(w.ctx, group.ID)))
	check.OK(t, errors.Join(w.Delete(w.ctx, fake), w.Delete(w.ctx, other)))
	w.start(b)
	check.OK(t, s.DeleteGroup(w.ctx, group.ID))
	w.tally(a)
	w.tally(b)
}

// TestSnapshotMoveGroupOneAdopted: the object of one member of a group that is on two nodes is deleted. When that is adopted, it belongs to the group
// again. A snapshot that does not have the name of a member does not get into the group in its place.
func TestSnapshotMoveGroupOneAdopted(t *testing.T) {
	w, a, b, s := twoNodes(t)
	var sources []volume.ID
	for _, name := range []string{"v", "w"} {
		v, err := s.Create(w.ctx, volume.Spec{Name: name, Size: volume.Range{Required: mib}, Nodes: []string{a.name}})
		check.OK(t, err)
		sources = append(sources, v.ID)
	}
	group, err := s.CreateGroup(w.ctx, "group", sources)
	check.OK(t, err)
	id := group.Snapshots[0].ID
	w.cutMovesTo(id, b.name)
	w.cutMoved(id, a, b)
	check.OK(t, w.Delete(w.ctx, w.cutObject(id)))
	w.eventually("the group is not whole", func() bool { return errors.Is(second(s.GetGroup(w.ctx, group.ID)), errdefs.ErrNotFound) })
	x := w.takenOver(t, b.name) // an attacker claims that another snapshot belongs to the group
	fake := snapshotOn(b.name, "fake")
	fake.Spec.Name, fake.Spec.Group = "group", &v1alpha1.Group{Key: group.ID.Key, Size: 2}
	x.has(fake, mib)
	time.Sleep(time.Second) // so that the controller can do what is wrong
	fails(t, second(s.GetGroup(w.ctx, group.ID)), errdefs.ErrNotFound)
	check.OK(t, w.Delete(w.ctx, fake))
	w.eventually("node-2 lists it", func() bool {
		b.agent.Changed()
		strays := w.pool(b.name, "default").Status.Strays
		return len(strays) == 1 && strays[0].ID == id.String()
	})
	w.adoptOn(b.name, "default", id.String())
	w.eventually("the group is there again", func() bool {
		have, err := s.GetGroup(w.ctx, group.ID)
		return err == nil && len(have.Snapshots) == 2 && have.Created.Equal(group.Created)
	})
	check.OK(t, s.DeleteGroup(w.ctx, group.ID))
	w.tally(a)
	w.tally(b)
}

// TestSnapshotMoveGroupDeleted: a group of which a member is about to move can be deleted at once, and leaves nothing.
func TestSnapshotMoveGroupDeleted(t *testing.T) {
	w, a, b, s, _, let := slowCuts(t)
	group, err := s.CreateGroup(w.ctx, "group", []volume.ID{{Kind: blockdev.Volume, Pool: "default", Key: volume.KeyOf("v")}})
	check.OK(t, err)
	w.cutMovesTo(group.Snapshots[0].ID, b.name)
	let <- struct{}{}
	w.cutSays(group.Snapshots[0].ID, "are copied from node node-1")
	check.OK(t, s.DeleteGroup(w.ctx, group.ID))
	w.eventually("nothing is left", func() bool { return len(w.leftovers(b)) == 0 })
	w.tally(a)
	w.tally(b)
}

// TestSnapshotMoveTold: events on a snapshot tell that it moves, why that does not go on, and that it has moved.
func TestSnapshotMoveTold(t *testing.T) {
	w, a, b, _, snapshot, let := slowCuts(t)
	a.stop()
	w.cutMovesTo(snapshot.ID, b.name)
	w.told(events.MoveWaits, "connection refused", w.cutObject(snapshot.ID))
	w.start(a)
	let <- struct{}{}
	w.told(events.Moving, "it is being moved to node node-2", w.cutObject(snapshot.ID))
	close(let)
	w.told(events.Moved, "it has moved here from node node-1", w.cutObject(snapshot.ID))
	w.cutMoved(snapshot.ID, a, b)
}

// TestSnapshotMoveToldOfNode: the node that a snapshot moves to goes down while it copies, so that no agent reports anything: an event on the snapshot tells that
// the move waits for it, as long as that is so.
func TestSnapshotMoveToldOfNode(t *testing.T) {
	w, a, b, _, snapshot, let := slowCuts(t)
	w.cutMovesTo(snapshot.ID, b.name)
	let <- struct{}{}
	w.cutSays(snapshot.ID, "are copied from node node-1")
	version := w.cutObject(snapshot.ID).ResourceVersion
	w.node(b.name, false)
	w.told(events.MoveWaits, "its move waits for node node-2: it is not ready", w.cutObject(snapshot.ID))
	if now := w.cutObject(snapshot.ID).ResourceVersion; now != version {
		t.Errorf("its object was written meanwhile: %s, and before %s", now, version)
	}
	w.node(b.name, true)
	close(let)
	w.cutMoved(snapshot.ID, a, b)
}

// TestSnapshotMoveRefused: a node without room for a snapshot says so, and the snapshot stays where it is until there is room. Meanwhile others can have what
// room there is.
func TestSnapshotMoveRefused(t *testing.T) {
	w, a, b, s := twoNodes(t)
	_, snapshot := w.snapshotOf(s, a, "v", 3)
	big, err := s.Create(w.ctx, volume.Spec{Name: "big", Size: volume.Range{Required: storetest.Size - 32*mib}, Nodes: []string{b.name}})
	check.OK(t, err)
	w.cutMovesTo(snapshot.ID, b.name)
	w.eventually("there is no room", func() bool {
		far := w.cutObject(snapshot.ID).Status.Move
		return far != nil && far.Waits && far.Copied == nil && strings.Contains(far.Message, "bytes are left")
	})
	check.OK(t, second(a.local.GetSnapshot(w.ctx, snapshot.ID)))
	w.eventually("no room is kept for it", func() bool { return w.available(s, b.name) == 32*mib })
	check.OK(t, s.Delete(w.ctx, big.ID))
	w.cutMoved(snapshot.ID, a, b)
}

// TestSnapshotMoveOldAgents: with agents that do not know moves of snapshots, no wrong bytes are sent, and the snapshot stays where it is.
func TestSnapshotMoveOldAgents(t *testing.T) {
	w, a, b, s := twoNodes(t)
	_, snapshot := w.snapshotOf(s, a, "v", 3)
	// An old agent takes the request for one for the volume of that key, which it does not have.
	from := errors.Join(second(a.local.Seal(w.ctx, volume.ID{Kind: blockdev.Volume, Pool: "default", Key: snapshot.ID.Key}, 1, "node-2")))
	fails(t, from, errdefs.ErrNotFound)
	b.stop()
	w.cutMovesTo(snapshot.ID, b.name)
	time.Sleep(time.Second) // no agent goes on with the move
	if now := w.cutObject(snapshot.ID); now.Spec.NodeName != a.name || now.Status.Move != nil || cluster.SnapshotMayMove(now) {
		t.Errorf("it is %+v, %+v", now.Spec, now.Status.Move)
	}
	w.cutMovesTo(snapshot.ID, "")
	check.OK(t, s.DeleteSnapshot(w.ctx, snapshot.ID))
	w.tally(a)
}
