package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/remotepool/remotetest"
	"github.com/ashlar-csi/ashlar/pkg/cluster/store"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
	"github.com/ashlar-csi/ashlar/pkg/volume/storetest"
)

// atHome returns a cluster of two nodes in a network, and a volume of the first with data (want). The controller is stopped.
func atHome(t *testing.T) (w *environment, a, b *machine, v volume.Volume, want []byte) {
	t.Helper()
	drivertest.NeedRoot(t)
	w, network := newEnvironment(t), &remotetest.Network{}
	a, b = w.begin(&machine{name: "node-1", ported: true, network: network}), w.begin(&machine{name: "node-2", ported: true, network: network})
	s, stop := w.store()
	w.pooled(s, b)
	v, err := s.Create(w.ctx, volume.Spec{Name: "v", Size: volume.Range{Required: mib}, Access: volume.AccessAny, Nodes: []string{a.name}})
	check.OK(t, err)
	check.OK(t, storetest.WriteTo(a.disks[0].Open("default", nil))(w.ctx, v.ID, 64<<10, []byte("data")))
	want = w.content(a, v.ID)
	stop()
	return w, a, b, v, want
}

// aboutToMove is atHome, but the volume is to move, and the second node has a full copy: the next step is the controller's.
func aboutToMove(t *testing.T) (w *environment, a, b *machine, v volume.Volume, want []byte) {
	t.Helper()
	w, a, b, v, want = atHome(t)
	w.movesTo("v", b.name)
	w.copied("v")
	return w, a, b, v, want
}

// copied waits until the object of a volume says that its new node has all bytes.
func (w *environment) copied(name string) {
	w.Helper()
	w.eventually("all bytes of "+name+" are there", func() bool {
		v := w.object(name)
		return v.Status.Move != nil && v.Status.Move.Copied != nil
	})
}

// flipped starts a controller, and waits until it has written the new node into the object of a volume.
func (w *environment) flipped(name string, to *machine) *store.Store {
	w.Helper()
	s, _ := w.store()
	w.eventually("it is of "+to.name, func() bool { return w.object(name).Spec.NodeName == to.name })
	return s
}

// TestMoveUndoneTooLate: a move that is taken back after the volume has changed its node is refused: the bytes on the new node are the volume, and stay.
func TestMoveUndoneTooLate(t *testing.T) {
	w, a, b, v, want := aboutToMove(t)
	b.stop()
	w.flipped("v", b)
	o := w.object("v")
	before := o.DeepCopy()
	o.Spec.Move = nil
	if err := w.Patch(w.ctx, o, client.MergeFrom(before)); err == nil || !strings.Contains(err.Error(), "it is too late to undo that") {
		t.Errorf("taken back: %v", err)
	}
	w.start(b)
	w.moved("v", a, b)
	if have := w.content(b, v.ID); string(have) != string(want) {
		t.Error("its bytes are others")
	}
}

// TestMoveAskedAgain: a move is taken back, and asked for again. What the new node has reported of the first copy, which it has removed, does not count
// for the second move.
func TestMoveAskedAgain(t *testing.T) {
	w, a, b, v, want := aboutToMove(t)
	a.stop()
	w.movesTo("v", "")
	w.eventually("the copy is gone", func() bool { return len(w.leftovers(b)) == 0 })
	w.movesTo("v", b.name)
	s, _ := w.store()
	w.movesays("v", "connection refused")
	if now := w.object("v"); now.Spec.NodeName != a.name {
		t.Fatalf("it is of %s, which has no bytes", now.Spec.NodeName)
	}
	w.start(a)
	w.moved("v", a, b)
	if have := w.content(b, v.ID); string(have) != string(want) {
		t.Error("its bytes are others")
	}
	check.OK(t, s.Delete(w.ctx, v.ID))
}

// TestMoveUnclaimed: a volume that is to move cannot be used without a claim, also before all bytes are on the new node: claims alone show that node that
// the volume is used.
func TestMoveUnclaimed(t *testing.T) {
	w, a, b, s, v, let, _ := slowly(t, 8, 40)
	w.movesTo("v", b.name)
	let <- struct{}{}
	w.movesays("v", "are copied from node node-1")
	here, err := a.local.Get(w.ctx, v.ID)
	check.OK(t, err)
	_, err = a.local.Attach(w.ctx, here, nil)
	fails(t, err, errdefs.ErrUnavailable)
	close(let)
	w.moved("v", a, b)
	check.OK(t, s.Delete(w.ctx, v.ID))
}

// TestMoveCopyLost: a volume has moved, and not arrived. The copy on the new node is gone, or is older than what the old node has (the object was restored
// to an earlier move, and the volume was used since). Then the bytes of the old node are copied again.
func TestMoveCopyLost(t *testing.T) {
	for _, lost := range []bool{true, false} {
		t.Run(fmt.Sprintf("lost=%v", lost), func(t *testing.T) {
			w, a, b, v, want := aboutToMove(t)
			b.stop()
			for _, left := range w.leftovers(b) {
				if lost {
					check.OK(t, b.local.DropLeftover(w.ctx, left))
					continue
				}
				check.OK(t, storetest.WriteTo(a.disks[0].Open("default", nil))(w.ctx, v.ID, 128<<10, []byte("since")))
				check.OK(t, second(a.local.Seal(w.ctx, v.ID, 9, "node-2")))
				want = w.content(a, v.ID)
			}
			s := w.flipped("v", b)
			w.start(b)
			w.moved("v", a, b)
			if have := w.content(b, v.ID); string(have) != string(want) {
				t.Error("its bytes are others")
			}
			check.OK(t, s.Delete(w.ctx, v.ID))
		})
	}
}

// TestMoveBroughtAgain: the new node of a volume that has moved copies all bytes again, with a later seal, and dies at one of the writes after that. The
// old node gives its bytes back all the same.
func TestMoveBroughtAgain(t *testing.T) {
	for n := 1; n <= 2; n++ {
		t.Run(fmt.Sprintf("write %d", n), func(t *testing.T) {
			w, a, b, v, want := aboutToMove(t)
			b.stop()
			for _, left := range w.leftovers(b) {
				check.OK(t, b.local.DropLeftover(w.ctx, left))
			}
			check.OK(t, second(a.local.Seal(w.ctx, v.ID, 9, "node-2")))
			w.flipped("v", b)
			cut := &breaking{}
			wrap(t, cut.of(b.name))
			cut.arm(n, false)
			w.start(b)
			w.eventually("it dies", func() bool { return len(cut.hit) > 0 })
			b.stop()
			cut.arm(0, false)
			w.start(b)
			w.moved("v", a, b)
			if have := w.content(b, v.ID); string(have) != string(want) {
				t.Error("its bytes are others")
			}
		})
	}
}

// TestMoveHomeDies: the old node dies when the volume has moved. The new one has a full copy, and takes the volume over. When the old node is back, it
// keeps bytes that have another seal than those that have moved.
func TestMoveHomeDies(t *testing.T) {
	w, a, b, v, want := aboutToMove(t)
	a.stop()
	s := w.flipped("v", b)
	w.movesays("v", "node-1 is to give its bytes back")
	if have := w.content(b, v.ID); string(have) != string(want) {
		t.Error("its bytes are others")
	}
	check.OK(t, second(a.local.Seal(w.ctx, v.ID, 9, "node-2"))) // as for another move, which the API server does not know any more
	w.start(a)
	w.movesays("v", "its bytes stay here")
	check.OK(t, second(a.local.Get(w.ctx, v.ID)))
	fails(t, s.Delete(w.ctx, v.ID), errdefs.ErrUnavailable)
}

// TestMoveObjectDeleted: the object of a volume is deleted when the volume is about to move, or has moved and not arrived. The copy is removed, and the
// old node keeps its bytes, which can be adopted.
func TestMoveObjectDeleted(t *testing.T) {
	for _, flipped := range []bool{false, true} {
		t.Run(fmt.Sprintf("moved=%v", flipped), func(t *testing.T) {
			w, a, b, v, want := aboutToMove(t)
			var s *store.Store
			if flipped {
				b.stop()
				s = w.flipped("v", b)
			}
			check.OK(t, w.Delete(w.ctx, w.object("v")))
			if flipped {
				w.start(b)
			} else {
				s, _ = w.store()
			}
			w.eventually("the copy is gone", func() bool { return len(w.leftovers(b)) == 0 })
			w.strays("default", 1)
			pool := &v1alpha1.Pool{}
			check.OK(t, w.Get(w.ctx, client.ObjectKey{Name: overview.PoolName(a.name, "default")}, pool))
			before := pool.DeepCopy()
			pool.Annotations = map[string]string{v1alpha1.AdoptAnnotation: "all"}
			check.OK(t, w.Patch(w.ctx, pool, client.MergeFrom(before)))
			w.eventually("it was not meant by all", func() bool {
				check.OK(t, w.Get(w.ctx, client.ObjectKeyFromObject(pool), pool))
				return pool.Annotations[v1alpha1.AdoptAnnotation] == "" && pool.Status.StrayCount == 1
			})
			before = pool.DeepCopy()
			pool.Annotations = map[string]string{v1alpha1.AdoptAnnotation: v.ID.String()}
			check.OK(t, w.Patch(w.ctx, pool, client.MergeFrom(before)))
			w.eventually("it has an object again", func() bool {
				have, err := s.Get(w.ctx, v.ID)
				return err == nil && have.Node == a.name
			})
			w.claimFor(v.ID, a.name)
			w.attaches(a, v.ID)
			w.claimFor(v.ID, "")
			w.movesTo("v", b.name)
			w.moved("v", a, b)
			if have := w.content(b, v.ID); string(have) != string(want) {
				t.Error("its bytes are others")
			}
		})
	}
}

// leftGone moves the volume of aboutToMove to b while a is down, and deletes the Node of a, so that the move ends.
func (w *environment) leftGone(v volume.Volume, a, b *machine) {
	w.Helper()
	a.stop()
	w.flipped("v", b)
	w.movesays("v", "node-1 is to give its bytes back")
	check.OK(w, w.Delete(w.ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: a.name}}))
	w.claimFor(v.ID, b.name) // a change of the object, so that the mover looks at it
	w.claimFor(v.ID, "")
	w.eventually("the move is over", func() bool { return w.object("v").Spec.Move == nil })
}

// comesBack creates the Node of a machine again, starts its agent, and waits until its pool reports a stray.
func (w *environment) comesBack(m *machine) {
	w.Helper()
	w.node(m.name, true)
	w.start(m)
	w.eventually("node "+m.name+" has a stray", func() bool { return w.pool(m.name, "default").Status.StrayCount == 1 })
}

// forgets waits until a machine, whose Node was deleted when a volume left it, has nothing of that any more. It restarts the agent meanwhile: if the new
// node does not answer, the agent asks again only after minutes, or when it starts.
func (w *environment) forgets(m *machine, id volume.ID) {
	w.Helper()
	w.eventually("its old bytes are gone", func() bool {
		m.stop()
		w.start(m)
		gone := false
		for end := time.Now().Add(15 * time.Second); !gone && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
			gone = errors.Is(second(m.local.Get(w.ctx, id)), errdefs.ErrNotFound)
		}
		return gone
	})
}

// TestMoveNodeGone: a volume leaves a node that dies, and whose Node is deleted. The node comes back with the old bytes, which cannot be used, and deletes
// them when the new node says that it has the volume. The volume can move back there.
func TestMoveNodeGone(t *testing.T) {
	w, a, b, v, _ := aboutToMove(t)
	before := w.object("v")
	w.leftGone(v, a, b)
	check.OK(t, storetest.WriteTo(b.disks[0].Open("default", nil))(w.ctx, v.ID, 128<<10, []byte("since")))
	want := w.content(b, v.ID)
	b.stop()
	w.comesBack(a)
	here, err := a.local.Get(w.ctx, v.ID)
	check.OK(t, err)
	_, err = a.local.Attach(w.ctx, here, nil)
	fails(t, err, errdefs.ErrPrecondition)
	w.start(b)
	w.forgets(a, v.ID)
	w.eventually("node-1 has no strays", func() bool { return w.pool(a.name, "default").Status.StrayCount == 0 })
	w.movesTo("v", a.name)
	w.moved("v", b, a)
	if have := w.content(a, v.ID); string(have) != string(want) || w.object("v").UID != before.UID {
		t.Error("its bytes are others")
	}
}

// TestMoveNodeGoneMovedOn: such a node deletes the old bytes also if the volume has moved on to a third node meanwhile.
func TestMoveNodeGoneMovedOn(t *testing.T) {
	w, a, b, v, want := aboutToMove(t)
	w.leftGone(v, a, b)
	c := w.begin(&machine{name: "node-3", ported: true, network: a.network})
	w.movesTo("v", c.name)
	w.moved("v", b, c)
	w.node(a.name, true)
	w.start(a)
	w.eventually("its old bytes are gone", func() bool { return errors.Is(second(a.local.Get(w.ctx, v.ID)), errdefs.ErrNotFound) })
	if have := w.content(c, v.ID); string(have) != string(want) {
		t.Error("its bytes are others")
	}
}

// TestMoveNodeGoneOnlyCopy: such a node keeps the old bytes if the new node has lost the volume, or has one that did not come from these bytes (the object
// was restored to an earlier move).
func TestMoveNodeGoneOnlyCopy(t *testing.T) {
	for _, lost := range []bool{true, false} {
		t.Run(fmt.Sprintf("lost=%v", lost), func(t *testing.T) {
			w, a, b, v, want := aboutToMove(t)
			w.leftGone(v, a, b)
			if lost {
				check.OK(t, b.disks[0].Open("default", nil).Delete(w.ctx, ref(v)))
				w.touch(w.object("v"))
				w.eventually("it is lost", func() bool { return v1alpha1.IsLost(w.object("v")) })
			} else {
				check.OK(t, second(a.disks[0].Open("default", nil).SetLabels(w.ctx, ref(v), func(labels map[string]string) error {
					delete(labels, "sealed")
					return nil
				})))
				check.OK(t, second(a.local.Seal(w.ctx, v.ID, 9, "node-2")))
			}
			w.comesBack(a)
			time.Sleep(time.Second) // so that the agent can do what is wrong
			if have := w.content(a, v.ID); string(have) != string(want) {
				t.Error("its bytes are others")
			}
			if p := w.pool(a.name, "default"); p.Status.StrayCount != 1 {
				t.Errorf("node-1 has %d strays", p.Status.StrayCount)
			}
		})
	}
}

// TestMoveRounds: moves between three nodes are asked for, and taken back, quickly one after the other. In the end the volume is on one node, with all
// bytes, and nothing is left on the others.
func TestMoveRounds(t *testing.T) {
	w, a, b, v, want := aboutToMove(t)
	c := w.begin(&machine{name: "node-3", ported: true, network: a.network})
	s, _ := w.store()
	w.pooled(s, c)
	ask := func(m *machine) bool {
		o := w.object("v")
		if o.Spec.Move != nil && o.Spec.Move.Left {
			return false // such a move ends by itself
		}
		before := o.DeepCopy()
		if o.Spec.Move = nil; m != nil && o.Spec.NodeName != m.name {
			o.Spec.Move = &v1alpha1.Move{Node: m.name}
		}
		return w.Patch(w.ctx, o, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})) == nil
	}
	for i := range 60 {
		ask([]*machine{a, b, c, nil, b, a}[i%6])
		time.Sleep(time.Duration(i*37%90) * time.Millisecond)
	}
	w.eventually("nothing is asked for", func() bool { return ask(nil) })
	at := w.object("v").Spec.NodeName
	for _, m := range []*machine{a, b, c} {
		if m.name != at {
			w.eventually("nothing is left on "+m.name, func() bool {
				_, err := m.local.Get(w.ctx, v.ID)
				return len(w.leftovers(m)) == 0 && errors.Is(err, errdefs.ErrNotFound)
			})
			continue
		}
		if have := w.content(m, v.ID); string(have) != string(want) {
			t.Errorf("on %s its bytes are others", at)
		}
	}
	check.OK(t, s.Delete(w.ctx, v.ID))
}

// TestMoveUsedMeanwhile: a volume is used on one node after the other, for a moment each, while moves of it are asked for. Each user finds what the one
// before has written.
func TestMoveUsedMeanwhile(t *testing.T) {
	w, a, b, s, v, let, dir := slowly(t, 8, 40)
	close(let)
	w.pooled(s, a)
	nodes := []*machine{a, b}
	last := ""
	for i := range 12 {
		for range i % 3 { // a second move that is asked for at once has no effect of its own
			o := w.object("v")
			before := o.DeepCopy()
			if o.Spec.Move == nil {
				o.Spec.Move = &v1alpha1.Move{Node: map[string]string{a.name: b.name, b.name: a.name}[o.Spec.NodeName]}
				_ = w.Patch(w.ctx, o, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
			}
			time.Sleep(time.Duration(i*53%120) * time.Millisecond)
		}
		m := nodes[i/2%2]
		w.again("it is claimed", func(ctx context.Context) error {
			return second(s.Claim(ctx, v.ID, volume.Claim{Node: m.name, Mode: "m"}))
		})
		file := filepath.Join(w.staged(m, dir, v.ID, mounted), "file")
		if have, err := os.ReadFile(file); err == nil && string(have) != last || err != nil && last != "" {
			t.Fatalf("round %d on %s: it has %q, %v; %q was written", i, m.name, have, err, last)
		}
		last = fmt.Sprint("round ", i)
		check.OK(t, os.WriteFile(file, []byte(last), 0o600))
		w.again("it is unstaged", func(ctx context.Context) error { return m.unstage(ctx, dir, v.ID) })
		w.again("it is released", func(ctx context.Context) error { return s.Release(ctx, v.ID, m.name) })
	}
	w.eventually("no move is under way", func() bool { return w.object("v").Spec.Move == nil })
	w.again("it is deleted", func(ctx context.Context) error { return s.Delete(ctx, v.ID) })
	for _, m := range nodes {
		w.eventually("nothing is left on "+m.name, func() bool { return len(w.leftovers(m)) == 0 })
		w.tally(m)
	}
}
