package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/remotepool/remotetest"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// TestMoveGrown: a volume grows when all of it is on the new node, and it has not moved yet. The copy grows too: it is never smaller than the volume.
func TestMoveGrown(t *testing.T) {
	w, a, b, v, want := aboutToMove(t)
	o := w.object("v")
	before := o.DeepCopy()
	o.Spec.Size = 2 * mib
	check.OK(t, w.Patch(w.ctx, o, client.MergeFrom(before)))
	w.eventually("all bytes are there, as it is now", func() bool {
		m := w.object("v").Status.Move
		return m != nil && m.Copied != nil && m.Copied.Size == 2*mib
	})
	record, err := b.disks[0].Open("default", nil).Get(w.ctx, blockdev.Ref{Kind: blockdev.Volume, Key: v.ID.Key})
	check.OK(t, err)
	if record.Size != 2*mib {
		t.Errorf("what node %s has is of %d bytes", b.name, record.Size)
	}
	w.store()
	w.moved("v", a, b)
	if have := w.content(b, v.ID); string(have) != string(want)+strings.Repeat("\x00", mib) {
		t.Error("its bytes are others")
	}
}

// TestMoveNewNodeLoses: the old node was away when its volume moved, and comes back when the new one is away, or has lost the volume. The old bytes may be
// all there is, so they are kept, and can be adopted.
func TestMoveNewNodeLoses(t *testing.T) {
	for _, away := range []bool{true, false} {
		t.Run(fmt.Sprintf("away=%v", away), func(t *testing.T) {
			w, a, b, v, want := aboutToMove(t)
			a.stop()
			s := w.flipped("v", b)
			w.movesays("v", "node-1 is to give its bytes back")
			b.stop()
			if !away {
				check.OK(t, b.disks[0].Open("default", nil).Delete(w.ctx, blockdev.Ref{Kind: blockdev.Volume, Key: v.ID.Key}))
				w.start(b)
				w.eventually("it is lost", func() bool { return v1alpha1.IsLost(w.object("v")) })
			}
			w.start(a)
			w.movesays("v", "node node-2 has to say that it has all of volume "+v.ID.String())
			if have := w.content(a, v.ID); string(have) != string(want) {
				t.Error("its old bytes are others")
			}
			if away {
				w.start(b)
				w.moved("v", a, b)
				check.OK(t, s.Delete(w.ctx, v.ID))
				return
			}
			check.OK(t, w.Delete(w.ctx, w.object("v")))
			w.strays("default", 1)
			w.adoptOn(a.name, "default", v.ID.String())
			w.eventually("it has an object again", func() bool {
				have, err := s.Get(w.ctx, v.ID)
				return err == nil && have.Node == a.name
			})
			if have := w.content(a, v.ID); string(have) != string(want) {
				t.Error("its bytes are others")
			}
		})
	}
}

// withoutStatus deletes the object of a volume, and creates it again without its status, as when it is restored from a backup.
func (w *environment) withoutStatus(name string) {
	w.Helper()
	o := w.object(name)
	check.OK(w, w.Delete(w.ctx, o))
	w.eventually("it is gone", func() bool { return w.object(name) == nil })
	again := cluster.VolumeNamed(o.Name)
	again.Spec = o.Spec
	check.OK(w, w.Create(w.ctx, again))
}

// TestMoveObjectRestored: the object of a volume that has moved is restored from a backup, without its status, before the new node has taken the volume
// over. That does so all the same, with all bytes, also if its copy is gone.
func TestMoveObjectRestored(t *testing.T) {
	for _, have := range []string{"all", "nothing"} {
		t.Run(have, func(t *testing.T) {
			w, a, b, v, want := aboutToMove(t)
			b.stop()
			s := w.flipped("v", b)
			if have == "nothing" {
				check.OK(t, b.local.DropLeftover(w.ctx, w.leftovers(b)[0]))
			}
			w.withoutStatus("v")
			w.start(b)
			w.moved("v", a, b)
			if have := w.content(b, v.ID); string(have) != string(want) {
				t.Error("its bytes are others")
			}
			check.OK(t, s.Delete(w.ctx, v.ID))
		})
	}
}

// TestMoveInUseObjectRestored: the same with a volume that has moved in use. If the copy of the new node is gone, the bytes of the old one are older than
// what the user has written since, and are not taken for the volume.
func TestMoveInUseObjectRestored(t *testing.T) {
	for _, lost := range []bool{false, true} {
		t.Run(fmt.Sprintf("lost=%v", lost), func(t *testing.T) {
			c, _ := newConsumer(t)
			want := c.content(c.a, c.id)
			c.pinned()
			c.b.stop()
			s := c.flipped("v", c.b)
			check.OK(t, c.a.local.Unexport(c.ctx, c.id, 0)) // the old node has ended its export
			if lost {
				check.OK(t, c.b.local.DropLeftover(c.ctx, c.leftovers(c.b)[0]))
			}
			c.withoutStatus("v")
			c.start(c.b)
			if !lost {
				c.over(want)
				c.released(s)
				return
			}
			c.movesays("v", "which has nothing of what was written since")
			fails(t, second(c.b.local.Get(c.ctx, c.id)), errdefs.ErrNotFound)
			check.OK(t, second(c.a.local.Get(c.ctx, c.id)))
		})
	}
}

// TestMoveToNodeGone: the new node of a volume, and of a snapshot, is gone for good when it has all bytes. They stay where they are, and can be deleted
// there when the moves are taken back.
func TestMoveToNodeGone(t *testing.T) {
	w, a, b, v, _ := aboutToMove(t)
	w.movesTo("v", "") // otherwise the controller, which starts now, changes its node
	s, stop := w.store()
	cut, err := s.CreateSnapshot(w.ctx, "cut", v.ID)
	check.OK(t, err)
	stop()
	w.cutMovesTo(cut.ID, b.name)
	w.movesTo("v", b.name)
	w.copied("v")
	w.eventually("all of the snapshot is there", func() bool { m := w.cutObject(cut.ID).Status.Move; return m != nil && m.Copied != nil })
	b.stop()
	check.OK(t, w.Delete(w.ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: b.name}}))
	s, _ = w.store()
	time.Sleep(time.Second)
	if one, other := w.object("v").Spec.NodeName, w.cutObject(cut.ID).Spec.NodeName; one != a.name || other != a.name {
		t.Fatalf("the volume is of node %s, the snapshot of %s", one, other)
	}
	w.movesTo("v", "")
	w.cutMovesTo(cut.ID, "")
	w.eventually("they are deleted", func() bool {
		return errors.Join(s.DeleteSnapshot(w.ctx, cut.ID), s.Delete(w.ctx, v.ID)) == nil
	})
	w.tally(a)
}

// rots makes the disk of a machine, whose agent is stopped, fail all operations on a volume.
func (m *machine) rots(id volume.ID) {
	m.hook = func(_ string, ref blockdev.Ref) error {
		if ref.Key == id.Key {
			return fmt.Errorf("read the record: %w", unix.EIO)
		}
		return nil
	}
}

// TestMoveOldDiskFails: the disk of the old node fails when the volume has moved. The new node takes the volume over, and the object says that the old
// bytes are still there.
func TestMoveOldDiskFails(t *testing.T) {
	w, a, b, v, want := aboutToMove(t)
	a.stop()
	b.stop()
	w.flipped("v", b)
	a.rots(v.ID)
	w.start(a)
	w.start(b)
	w.movesays("v", "the bytes that node node-1 had are still there: read the record: input/output error")
	if have := w.content(b, v.ID); string(have) != string(want) {
		t.Error("its bytes are others")
	}
}

// TestMoveInUseOldDiskFails: the same with a volume that has moved in use.
func TestMoveInUseOldDiskFails(t *testing.T) {
	c, _ := newConsumer(t)
	c.pinned()
	c.a.stop()
	c.b.stop()
	c.flipped("v", c.b)
	c.a.rots(c.id)
	c.start(c.a)
	c.start(c.b)
	c.exported("v", &volume.Grant{Generation: 2, Node: c.name})
	c.eventually("it has arrived", func() bool { return c.object("v").Status.Move.Arrived })
	c.a.stop()
	c.a.hook = nil
	c.start(c.a)
	c.moved("v", c.a, c.b)
}

// hanging is a pool whose disk does not answer when a record is written.
type hanging struct {
	*memory.Pool
	t testing.TB
}

func (h *hanging) SetLabels(ctx context.Context, ref blockdev.Ref, change func(map[string]string) error) (blockdev.Record, error) {
	<-h.t.Context().Done()
	return h.Pool.SetLabels(ctx, ref, change)
}

// TestMoveHomeHangs: the disk of a node hangs, and volumes that are to leave it do not go on. One of another disk of the node does.
func TestMoveHomeHangs(t *testing.T) {
	w, network := newEnvironment(t), &remotetest.Network{}
	a := w.begin(&machine{name: "node-1", ported: true, network: network, wrap: func(p *memory.Pool) blockdev.Pool { return &hanging{p, t} }})
	b := w.begin(&machine{name: "node-2", ported: true, network: network})
	s, _ := w.store()
	w.pooled(s, b)
	for i := range 6 {
		name, pool := fmt.Sprintf("v%d", i), "default"
		if i == 5 {
			name, pool = "v", "b"
		}
		check.OK(t, second(s.Create(w.ctx, volume.Spec{Name: name, Pool: pool, Size: volume.Range{Required: mib}, Access: volume.AccessAny, Nodes: []string{a.name}})))
		w.movesTo(name, b.name)
	}
	w.eventually("that of the other disk has moved", func() bool { o := w.object("v"); return o.Spec.NodeName == b.name && o.Spec.Move == nil })
}

// TestMoveHomeStalls: as TestMoveHomeHangs, with a disk that hangs while it is read.
func TestMoveHomeStalls(t *testing.T) {
	w, network, let := newEnvironment(t), &remotetest.Network{}, make(chan struct{})
	a := w.begin(&machine{name: "node-1", ported: true, network: network, wrap: func(p *memory.Pool) blockdev.Pool { return &halting{p, let} }})
	b := w.begin(&machine{name: "node-2", ported: true, network: network})
	s, _ := w.store()
	w.pooled(s, b)
	t.Cleanup(func() { close(let) })
	moves := func(name, pool string) {
		v, err := s.Create(w.ctx, volume.Spec{Name: name, Pool: pool, Size: volume.Range{Required: mib}, Access: volume.AccessAny, Nodes: []string{a.name}})
		check.OK(t, err)
		if pool == "default" {
			w.write(a, v.ID, 0)
		}
		w.movesTo(name, b.name)
	}
	for i := range 6 {
		moves(fmt.Sprint("slow", i), "default")
	}
	w.eventually("as many as can be are copied", func() bool { return len(w.leftovers(b)) == 4 })
	moves("v", "b")
	w.eventually("that of the other disk has moved", func() bool { o := w.object("v"); return o.Spec.NodeName == b.name && o.Spec.Move == nil })
	if copied := len(w.leftovers(b)); copied != 4 {
		t.Errorf("%d are copied from one pool at once", copied)
	}
}

// TestMoveEndsBeside: many volumes have moved, and the disk of the new node hangs when it takes them over, or that of the old node when it gives them
// back. A volume of the node's other disk moves all the same.
func TestMoveEndsBeside(t *testing.T) {
	for hangs, of := range map[string]string{"SetLabels": "node-2", "Delete": "node-1"} {
		t.Run(of, func(t *testing.T) {
			w, network, let := newEnvironment(t), &remotetest.Network{}, make(chan struct{})
			a, b := w.begin(&machine{name: "node-1", ported: true, network: network}), w.begin(&machine{name: "node-2", ported: true, network: network})
			s, stop := w.store()
			w.pooled(s, b)
			made := func(name, pool string) string {
				v, err := s.Create(w.ctx, volume.Spec{Name: name, Pool: pool, Size: volume.Range{Required: mib}, Access: volume.AccessAny, Nodes: []string{a.name}})
				check.OK(t, err)
				return v.ID.Key
			}
			slow := map[string]string{}
			for i := range 17 {
				name := fmt.Sprint("slow", i)
				slow[made(name, "default")] = name
			}
			made("v", "b")
			stop()
			for _, name := range slow {
				w.movesTo(name, b.name)
			}
			for _, name := range slow {
				w.copied(name)
			}
			m := map[string]*machine{a.name: a, b.name: b}[of]
			m.stop()
			var hung atomic.Int32
			m.hook = func(operation string, ref blockdev.Ref) error {
				if operation == hangs && slow[ref.Key] != "" {
					hung.Add(1)
					<-let
				}
				return nil
			}
			w.store()
			for _, name := range slow {
				w.eventually(name+" is of its new node", func() bool { return w.object(name).Spec.NodeName == b.name })
			}
			w.start(m)
			t.Cleanup(func() { close(let) }) // runs before the agent is stopped
			w.eventually("they hang", func() bool { return hung.Load() >= 4 })
			time.Sleep(time.Second) // so that more can hang, if more are tried at once
			w.movesTo("v", b.name)
			w.eventually("that of the other disk has moved", func() bool { o := w.object("v"); return o.Spec.NodeName == b.name && o.Spec.Move == nil })
			if n := hung.Load(); n != 4 {
				t.Errorf("%d are at work at once in one pool", n)
			}
		})
	}
}

// TestMoveGivesBackBeside: a node gives the bytes of a volume back while as many volumes as possible are being copied to it.
func TestMoveGivesBackBeside(t *testing.T) {
	w, network, let := newEnvironment(t), &remotetest.Network{}, make(chan struct{})
	t.Cleanup(func() { close(let) })
	a := w.begin(&machine{name: "node-1", ported: true, network: network, wrap: func(p *memory.Pool) blockdev.Pool { return &halting{p, let} }})
	b := w.begin(&machine{name: "node-2", ported: true, network: network})
	s, _ := w.store()
	w.pooled(s, b)
	made := func(name string, m *machine) volume.Volume {
		v, err := s.Create(w.ctx, volume.Spec{Name: name, Size: volume.Range{Required: mib}, Access: volume.AccessAny, Nodes: []string{m.name}})
		check.OK(t, err)
		w.write(m, v.ID, 0)
		return v
	}
	for i := range 4 {
		made(fmt.Sprint("slow", i), a)
		w.movesTo(fmt.Sprint("slow", i), b.name)
	}
	w.eventually("they are copied", func() bool { return len(w.leftovers(b)) == 4 })
	made("v", b)
	w.movesTo("v", a.name)
	w.eventually("the other one is given back", func() bool { o := w.object("v"); return o.Spec.NodeName == a.name && o.Spec.Move == nil })
}

// dying is a way to a port. When it is dead, connections are accepted, and nothing answers.
type dying struct {
	testing.TB
	dead atomic.Bool
}

// via: see machine.
func (d *dying) via(address string) string {
	d.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check.OK(d, err)
	d.Cleanup(func() { check.OK(d, listener.Close()) })
	go func() {
		for {
			here, err := listener.Accept()
			if err != nil {
				return
			}
			d.Cleanup(func() { _ = here.Close() })
			if d.dead.Load() {
				continue
			}
			there, err := net.Dial("tcp", address)
			if err != nil {
				_ = here.Close()
				continue
			}
			go func() { _, _ = io.Copy(there, here); _ = there.Close() }()
			go func() { _, _ = io.Copy(here, there); _ = here.Close() }()
		}
	}()
	return listener.Addr().String()
}

// TestMoveArrivesBeside: many volumes have moved from a node that died then, and which the new node asks in vain. A volume of another node arrives in the
// same pool meanwhile.
func TestMoveArrivesBeside(t *testing.T) {
	w, network, way := newEnvironment(t), &remotetest.Network{}, &dying{TB: t}
	a, b := w.begin(&machine{name: "node-1", ported: true, network: network, via: way.via}), w.begin(&machine{name: "node-2", ported: true, network: network})
	c := w.begin(&machine{name: "node-3", ported: true, network: network})
	s, stop := w.store()
	w.pooled(s, c)
	made := func(name string, m *machine) {
		check.OK(t, second(s.Create(w.ctx, volume.Spec{Name: name, Size: volume.Range{Required: mib}, Access: volume.AccessAny, Nodes: []string{m.name}})))
	}
	var all []string
	for i := range 5 {
		all = append(all, fmt.Sprint("v", i))
		made(all[i], a)
	}
	made("v", c)
	made("u", c)
	moves := func(name string) time.Duration {
		w.movesTo(name, b.name)
		began := time.Now()
		w.eventually(name+" has moved", func() bool { o := w.object(name); return o.Spec.NodeName == b.name && o.Spec.Move == nil })
		return time.Since(began)
	}
	usual := moves("u")
	stop()
	for _, name := range all {
		w.movesTo(name, b.name)
	}
	for _, name := range all {
		w.copied(name)
	}
	way.dead.Store(true)
	a.stop()
	w.store()
	for _, name := range all {
		w.eventually(name+" is of its new node", func() bool { return w.object(name).Spec.NodeName == b.name })
	}
	began := time.Now()
	if took := moves("v"); took > usual+9*time.Second { // a call of a dead node takes ten seconds
		t.Errorf("it took %s, and else %s", took, usual)
	}
	for _, name := range all {
		w.movesays(name, "node-1 is to give its bytes back")
	}
	t.Logf("all have arrived after %s", time.Since(began))
}
