package cluster_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/port"
	"github.com/ashlar-csi/ashlar/pkg/cluster/store"
	"github.com/ashlar-csi/ashlar/pkg/cluster/transfer"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
	"github.com/ashlar-csi/ashlar/pkg/volume/storetest"
)

// leftovers returns the leftovers in the pools of a machine.
func (w *environment) leftovers(m *machine) (all []volume.Leftover) {
	w.Helper()
	for i, name := range []string{"default", "b"} {
		left, err := m.local.Leftovers(w.ctx, m.disks[i].Open(name, nil))
		check.OK(w, err)
		all = append(all, left...)
	}
	return all
}

// TestLeftovers: what is left of a copy to another pool is removed if no object asks for the copy.
func TestLeftovers(t *testing.T) {
	w, m, s := newCluster(t)
	promised := m.capacity(t).Promised
	v, err := s.Create(w.ctx, spec("source"))
	check.OK(t, err)
	w.eventually("the pool tells of the volume", func() bool { // so that the pool is not looked at again before Changed
		return w.pool(m.name, "default").Status.Promised == promised+mib
	})
	from, err := m.local.OpenCut(w.ctx, v.ID, volume.KeyOf("copy"))
	check.OK(t, err)
	from.Read = func(context.Context, int64, func(int64, []byte) error) error { return errdefs.ErrUnavailable }
	copied := volume.Spec{Name: "copy", Pool: "b", Source: v.ID, Size: volume.Range{Required: 1}}
	fails(t, second(m.local.Import(w.ctx, copied, from)), errdefs.ErrUnavailable)
	if left := w.leftovers(m); len(left) != 2 {
		t.Fatalf("left are %v", left)
	}
	m.agent.Changed()
	w.eventually("nothing is left", func() bool { return len(w.leftovers(m)) == 0 })
	// A copy that is asked for is made.
	made, err := s.Create(w.ctx, copied)
	check.OK(t, err)
	if made.ID.Pool != "b" || made.Source != v.ID || made.ID.Kind != blockdev.Volume {
		t.Errorf("made %+v", made)
	}
	if left := w.leftovers(m); len(left) != 0 {
		t.Errorf("after that, left are %v", left)
	}
	w.tally(m)
}

// TestLeftoverStays: a leftover of a copy that cannot be removed does not keep its pool from being reported. It is removed when that is possible.
func TestLeftoverStays(t *testing.T) {
	w := newEnvironment(t)
	var broken atomic.Bool
	broken.Store(true)
	m := w.machineWith(nodeName, func(operation string, ref blockdev.Ref) error {
		if operation == "Delete" && ref.Key == volume.KeyOf("copy") && broken.Load() {
			return errors.New("input/output error")
		}
		return nil
	})
	s, _ := w.store()
	w.pooled(s, m)
	v, err := s.Create(w.ctx, spec("source"))
	check.OK(t, err)
	from, err := m.local.OpenCut(w.ctx, v.ID, "0123456789abcdef0123456789abcdef")
	check.OK(t, err)
	check.OK(t, m.local.EndCut(w.ctx, v.ID.Pool, "0123456789abcdef0123456789abcdef"))
	from.Read = func(context.Context, int64, func(int64, []byte) error) error { return errdefs.ErrUnavailable }
	fails(t, second(m.local.Import(w.ctx, volume.Spec{Name: "copy", Pool: "default", Source: v.ID, Size: volume.Range{Required: 1}}, from)), errdefs.ErrUnavailable)
	before := m.capacity(t).Promised
	check.OK(t, second(s.Create(w.ctx, volume.Spec{Name: "another", Size: volume.Range{Required: 8 * mib}})))
	w.eventually("the pool tells of the volume", func() bool {
		var p v1alpha1.Pool
		return w.Get(w.ctx, client.ObjectKey{Name: overview.PoolName(nodeName, "default")}, &p) == nil && p.Status.Promised == before+8*mib
	})
	broken.Store(false)
	m.agent.Changed()
	w.eventually("nothing is left", func() bool { return len(w.leftovers(m)) == 0 })
}

// twoNodes returns a cluster of two nodes, whose agents have ports, and a store.
func twoNodes(t *testing.T) (w *environment, a, b *machine, s *store.Store) {
	t.Helper()
	w = newEnvironment(t)
	a, b = w.begin(&machine{name: "node-1", ported: true}), w.begin(&machine{name: "node-2", ported: true})
	s = w.calling(a)
	w.pooled(s, b)
	return w, a, b, s
}

// elsewhere returns the spec of a copy that is to be on a machine.
func elsewhere(name string, source volume.ID, m *machine) volume.Spec {
	return volume.Spec{Name: name, Source: source, Copies: volume.CopiesAnywhere, Nodes: []string{m.name}, Size: volume.Range{Required: 80 * mib}}
}

// content returns the bytes of a volume or snapshot of a machine.
func (w *environment) content(m *machine, id volume.ID) []byte {
	w.Helper()
	pool := id.Pool
	if v, err := m.local.Get(w.ctx, id); err == nil {
		pool = v.Pool
	}
	device, err := m.disks[map[string]int{"default": 0, "b": 1}[pool]].Open(pool, nil).Attach(w.ctx, blockdev.Ref{Kind: id.Kind, Key: id.Key}, blockdev.Attachment{ReadOnly: true})
	check.OK(w, err)
	all, err := os.ReadFile(device.Path)
	check.OK(w, errors.Join(err, device.Close()))
	return all
}

// TestCopyElsewhere: snapshots are restored, and volumes cloned, on another node, with all bytes. If another node is not required, copies are on the node
// of their source.
func TestCopyElsewhere(t *testing.T) {
	w, a, b, s := twoNodes(t)
	v, snapshot := w.snapshotOf(s, a, "v", 3, 17, 1000)
	want := w.content(a, snapshot.ID)
	for name, source := range map[string]volume.ID{"restored": snapshot.ID, "cloned": v.ID} {
		copied, err := s.Create(w.ctx, elsewhere(name, source, b))
		check.OK(t, err)
		if copied.Node != b.name || copied.Source != source || copied.Size != 80*mib || copied.ID.Pool != "default" {
			t.Errorf("%s is %+v", name, copied)
		}
		again, err := s.Create(w.ctx, elsewhere(name, source, b))
		if check.OK(t, err); again.ID != copied.ID {
			t.Errorf("%s again is %+v", name, again)
		}
		have := w.content(b, copied.ID)
		if !bytes.Equal(have[:len(want)], want) || !bytes.Equal(have[len(want):], make([]byte, len(have)-len(want))) {
			t.Errorf("%s holds other bytes", name)
		}
	}
	a.agent.Changed()
	w.eventually("what the clone was cut from is gone", func() bool { return len(w.leftovers(a)) == 0 })
	stays := elsewhere("stays", snapshot.ID, b)
	stays.Nodes = nil
	if copied, err := s.Create(w.ctx, stays); err != nil || copied.Node != a.name {
		t.Errorf("a copy that may be anywhere is %+v, %v", copied, err)
	}
	stays.Name, stays.Nodes = "stays too", []string{a.name, b.name}
	if copied, err := s.Create(w.ctx, stays); err != nil || copied.Node != a.name {
		t.Errorf("a copy that is best at its source is %+v, %v", copied, err)
	}
	local := elsewhere("local", snapshot.ID, b)
	local.Copies = volume.CopiesLocal
	fails(t, second(s.Create(w.ctx, local)), errdefs.ErrNoSpace)
	check.OK(t, errors.Join(s.DeleteSnapshot(w.ctx, snapshot.ID), s.Delete(w.ctx, v.ID)))
	w.tally(a)
	w.tally(b)
}

// TestCopyElsewhereCutShort: a copy on another node goes on after either agent was stopped, and its source cannot be deleted meanwhile. A copy that is not
// wanted any more leaves nothing.
func TestCopyElsewhereCutShort(t *testing.T) {
	w, a, b, s := twoNodes(t)
	v, snapshot := w.snapshotOf(s, a, "v", 3)
	for _, source := range []volume.ID{snapshot.ID, v.ID} {
		a.stop()
		spec := elsewhere("copy of "+source.String(), source, b)
		w.asked("the copy is begun", func(ctx context.Context) error { return second(s.Create(ctx, spec)) }, func() bool { return w.object(spec.Name) != nil })
		remove := func() error { return s.DeleteSnapshot(w.ctx, source) }
		if source.Kind == blockdev.Volume {
			remove = func() error { return s.Delete(w.ctx, source) }
		}
		fails(t, remove(), errdefs.ErrInUse)
		b.stop()
		w.start(b)
		w.start(a)
		var copied volume.Volume
		w.eventually("the copy is made", func() (made bool) {
			var err error
			copied, err = s.Create(w.ctx, spec)
			return err == nil
		})
		if copied.Node != b.name {
			t.Errorf("the copy is %+v", copied)
		}
		unwanted := elsewhere("unwanted "+source.String(), source, b)
		a.stop()
		w.asked("the other copy is begun", func(ctx context.Context) error { return second(s.Create(ctx, unwanted)) }, func() bool { return w.object(unwanted.Name) != nil })
		check.OK(t, s.Delete(w.ctx, volume.ID{Kind: blockdev.Volume, Pool: "default", Key: volume.KeyOf(unwanted.Name)}))
		w.start(a)
		check.OK(t, s.Delete(w.ctx, copied.ID))
	}
	check.OK(t, errors.Join(s.DeleteSnapshot(w.ctx, snapshot.ID), s.Delete(w.ctx, v.ID)))
	for _, m := range []*machine{a, b} {
		m.agent.Changed()
		w.eventually("nothing is left on "+m.name, func() bool { return len(w.leftovers(m)) == 0 })
		w.tally(m)
	}
}

// halting is a pool that lists a range of its snapshots' data only when the test lets it.
type halting struct {
	*memory.Pool
	let chan struct{} // one for each range, or closed
}

func (h *halting) Allocated(ctx context.Context, ref blockdev.Ref, from int64, yield func(blockdev.Extent) error) error {
	return h.Pool.Allocated(ctx, ref, from, func(e blockdev.Extent) error {
		select {
		case <-h.let:
			return yield(e)
		case <-ctx.Done():
			return ctx.Err()
		}
	})
}

// TestCopyElsewhereTold: the object of a copy on another node, and events on it and its claim, tell that it waits and why, that it goes on, and that it is
// complete.
func TestCopyElsewhereTold(t *testing.T) {
	w := newEnvironment(t)
	let := make(chan struct{}, 1)
	a := w.begin(&machine{name: "node-1", ported: true, wrap: func(p *memory.Pool) blockdev.Pool { return &halting{p, let} }})
	b := w.begin(&machine{name: "node-2", ported: true})
	s := w.calling(a)
	w.pooled(s, b)
	_, snapshot := w.snapshotOf(s, a, "v", 3, 1000)
	claim := w.claim("copy")
	of := w.specOf(claim)
	of.Source, of.Copies, of.Nodes, of.Size = snapshot.ID, volume.CopiesAnywhere, []string{b.name}, volume.Range{Required: 80 * mib}
	says := func(status metav1.ConditionStatus, reason, part string) {
		t.Helper()
		w.eventually("the copy says "+reason, func() bool {
			v := w.object(of.Name)
			if v == nil {
				return false
			}
			c := meta.FindStatusCondition(v.Status.Conditions, v1alpha1.Copied)
			return c != nil && c.Status == status && c.Reason == reason && strings.Contains(c.Message, part)
		})
		w.told(reason, snapshot.ID.String(), w.object(of.Name), claim)
	}
	a.stop()
	w.asked("the copy is begun", func(ctx context.Context) error { return second(s.Create(ctx, of)) }, func() bool { return w.object(of.Name) != nil })
	says(metav1.ConditionFalse, v1alpha1.ReasonCopyWaits, "connection refused")
	w.start(a)
	let <- struct{}{}
	says(metav1.ConditionFalse, v1alpha1.ReasonCopying, "are copied from node node-1")
	close(let)
	says(metav1.ConditionTrue, v1alpha1.ReasonCopied, "all of "+snapshot.ID.String())
	check.OK(t, second(s.Create(w.ctx, of)))
}

// TestCopyElsewherePlaced: a copy that may be anywhere is on another node if the node of its source has no room, or is cordoned.
func TestCopyElsewherePlaced(t *testing.T) {
	w, a, b, s := twoNodes(t)
	_, snapshot := w.snapshotOf(s, a, "v", 3)
	anywhere := func(name string, want *machine) {
		t.Helper()
		of := elsewhere(name, snapshot.ID, b)
		of.Nodes = nil
		copied, err := s.Create(w.ctx, of)
		if check.OK(t, err); copied.Node != want.name {
			t.Errorf("%s is on %s, want %s", name, copied.Node, want.name)
		}
	}
	cordon := func(is bool) {
		t.Helper()
		w.cordoned(a.name, is)
		places := map[string]string{a.name: a.name, b.name: b.name}
		if is {
			delete(places, a.name)
		}
		w.places(s, "", places)
	}
	anywhere("free", a)
	cordon(true)
	anywhere("cordoned", b)
	cordon(false)
	c, err := s.Capacity(w.ctx, "default", volume.NotEncrypted, a.name)
	check.OK(t, err)
	check.OK(t, second(s.Create(w.ctx, volume.Spec{Name: "filler", Nodes: []string{a.name}, Size: volume.Range{Required: c.Available / mib * mib}})))
	anywhere("full", b)
}

// TestCopyElsewhereTakenBack: the node of a copy goes down in the middle. When it is down for longer than it had copied, or its Node is deleted, the copy
// is made on another node; until then it is waited for. When the node is back, it removes what it had copied, also if it was only cut off from the API
// server and has completed the copy.
func TestCopyElsewhereTakenBack(t *testing.T) {
	for _, how := range []string{"dead", "deleted", "cut off"} {
		t.Run(how, func(t *testing.T) { copyElsewhereTakenBack(t, how) })
	}
}

func copyElsewhereTakenBack(t *testing.T, how string) {
	w := newEnvironment(t)
	let := make(chan struct{}, 1)
	a := w.begin(&machine{name: "node-1", ported: true, wrap: func(p *memory.Pool) blockdev.Pool { return &halting{p, let} }})
	c := w.begin(&machine{name: "node-3", ported: true})
	w.calling(a)
	s := w.listening(briefly)
	toAPI := &line{}
	wrap(t, func(c *rest.Config) { c.Dial = toAPI.dial })
	b := w.begin(&machine{name: "node-2", ported: true, every: heartbeat})
	for _, m := range []*machine{a, b, c} {
		w.pooled(s, m)
	}
	v, err := s.Create(w.ctx, volume.Spec{Name: "v", Size: volume.Range{Required: 64 * mib}, Nodes: []string{a.name}})
	check.OK(t, err)
	const last = 1000 * 64 << 10
	for _, at := range []int64{3 * 64 << 10, last} {
		check.OK(t, storetest.WriteTo(a.disks[0].Open("default", nil))(w.ctx, v.ID, at, []byte("some")))
	}
	of := elsewhere("copy", v.ID, b)
	begun := time.Now()
	let <- struct{}{}
	w.asked("a part is copied", func(ctx context.Context) error { return second(s.Create(ctx, of)) }, func() bool {
		now := w.object(of.Name)
		return now != nil && now.Status.Progress != nil && len(w.leftovers(b)) == 1 && time.Since(begun) > 3*briefly
	})
	if how == "cut off" {
		toAPI.set(true)
	} else {
		b.stop()
	}
	w.eventually("its node is down", func() bool { return w.available(s, b.name) == 0 })
	if err := second(s.Create(w.ctx, of)); !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), "is waited for") {
		t.Errorf("asked again while its node is down for less than it copied: %v", err)
	}
	if how == "deleted" {
		check.OK(t, w.Delete(w.ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: b.name}}))
	}
	w.eventually("it is taken back", func() bool {
		err := second(s.Create(w.ctx, of))
		time.Sleep(100 * time.Millisecond)
		return errors.Is(err, errdefs.ErrNoSpace)
	})
	close(let)
	if how == "cut off" {
		w.eventually("it went on", func() bool {
			return bytes.HasPrefix(w.content(b, volume.ID{Kind: blockdev.Volume, Pool: "default", Key: volume.KeyOf(of.Name)})[last:], []byte("some"))
		})
		toAPI.set(false)
	}
	of.Nodes = []string{c.name}
	copied := w.created(s, of)
	have := w.content(c, copied.ID)
	if want := w.content(a, v.ID); copied.Node != c.name || !bytes.Equal(have[:len(want)], want) {
		t.Errorf("the copy is %+v, or has other bytes", copied)
	}
	w.node(b.name, true)
	if how != "cut off" {
		w.start(b)
	}
	for _, m := range []*machine{a, b, c} {
		m.agent.Changed()
		w.eventually("nothing is left on "+m.name, func() bool { return len(w.leftovers(m)) == 0 })
		w.tally(m)
	}
}

// badNetwork is a network that harms connections, one after the other, each in its own way.
type badNetwork struct {
	*testing.T
	harm  []func(to, from net.Conn, next []byte) // what happens to the first connections, with the bytes that come next; later ones are good
	after int64                                  // how many bytes a connection carries before that

	mu sync.Mutex
	n  int // how many connections have carried so much
}

// via returns an address that leads to another one over the network.
func (b *badNetwork) via(address string) string {
	b.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check.OK(b, err)
	b.Cleanup(func() { check.OK(b, listener.Close()) })
	go func() {
		for {
			here, err := listener.Accept()
			if err != nil {
				return
			}
			there, err := net.Dial("tcp", address)
			if err != nil {
				_ = here.Close()
				continue
			}
			go func() { _, _ = io.Copy(there, here) }()
			go b.carry(here, there)
		}
	}()
	return listener.Addr().String()
}

// carry carries the bytes of one direction of a connection.
func (b *badNetwork) carry(to, from net.Conn) {
	defer to.Close()
	defer from.Close()
	if n, err := io.CopyN(to, from, b.after); err != nil || n < b.after {
		return
	}
	b.mu.Lock()
	n := b.n
	b.n++
	b.mu.Unlock()
	if n < len(b.harm) {
		next := make([]byte, 4096)
		n1, _ := from.Read(next)
		b.harm[n](to, from, next[:n1])
		return
	}
	_, _ = io.Copy(to, from)
}

// TestCopyElsewhereNetwork: over a network that breaks a connection, changes bytes, and does not deliver any more, a copy goes on where it was, and has
// all bytes in the end.
func TestCopyElsewhereNetwork(t *testing.T) {
	w := newEnvironment(t)
	silent := make(chan struct{})
	bad := &badNetwork{T: t, after: 600 << 10, harm: []func(to, from net.Conn, next []byte){
		func(net.Conn, net.Conn, []byte) {}, // cut
		func(to, from net.Conn, next []byte) { // changed
			next[len(next)/2] ^= 1
			_, _ = to.Write(next)
			_, _ = io.Copy(to, from)
		},
		func(net.Conn, net.Conn, []byte) { <-silent }, // half open
	}}
	a, b := w.begin(&machine{name: "node-1", ported: true, via: bad.via}), w.begin(&machine{name: "node-2", ported: true})
	s := w.calling(a)
	w.pooled(s, b)
	defer close(silent)
	v, err := s.Create(w.ctx, volume.Spec{Name: "v", Size: volume.Range{Required: 64 * mib}, Nodes: []string{a.name}})
	check.OK(t, err)
	for n := range int64(60) {
		some := bytes.Repeat([]byte{byte(n + 1)}, 100<<10)
		check.OK(t, storetest.WriteTo(a.disks[0].Open("default", nil))(w.ctx, v.ID, n*mib, some))
	}
	want := w.content(a, v.ID)
	of := elsewhere("copy", v.ID, b)
	var copied volume.Volume
	w.eventually("the copy is made", func() (made bool) {
		copied, err = s.Create(w.ctx, of)
		return err == nil
	})
	if bad.mu.Lock(); bad.n < len(bad.harm)+1 {
		t.Errorf("%d connections came to harm, of %d", bad.n, len(bad.harm))
	}
	bad.mu.Unlock()
	if have := w.content(b, copied.ID); !bytes.Equal(have[:len(want)], want) {
		t.Error("the copy holds other bytes")
	}
}

// TestCopyElsewhereHangs: copies from a node that does not send do not use all makers: other volumes are made meanwhile.
func TestCopyElsewhereHangs(t *testing.T) {
	w := newEnvironment(t)
	let := make(chan struct{})
	a := w.begin(&machine{name: "node-1", ported: true, wrap: func(p *memory.Pool) blockdev.Pool { return &halting{p, let} }})
	b := w.begin(&machine{name: "node-2", ported: true})
	s := w.calling(a)
	w.pooled(s, b)
	v, err := s.Create(w.ctx, spec("v"))
	check.OK(t, err)
	check.OK(t, storetest.WriteTo(a.disks[0].Open("default", nil))(w.ctx, v.ID, 0, []byte("bytes")))
	snapshot, err := s.CreateSnapshot(w.ctx, "s", v.ID)
	check.OK(t, err)
	const many = 70 // more than there are makers
	var asking sync.WaitGroup
	ctx, cancel := context.WithCancel(w.ctx)
	for i := range many {
		asking.Go(func() {
			copied := elsewhere(fmt.Sprint("copy ", i), snapshot.ID, b)
			copied.Size.Required = mib
			_, _ = s.Create(ctx, copied)
		})
	}
	w.eventually("all are begun", func() bool {
		var all v1alpha1.VolumeList
		check.OK(t, w.List(w.ctx, &all))
		return len(all.Items) == many+1
	})
	made := make(chan error, 1)
	go func() {
		here := spec("here")
		here.Nodes = []string{b.name}
		made <- second(s.Create(w.ctx, here))
	}()
	select {
	case err := <-made:
		check.OK(t, err)
	case <-time.After(time.Minute):
		t.Error("a volume of a node is not made while it fetches others")
	}
	cancel()
	close(let)
	asking.Wait()
}

// TestCopyElsewhereWhole: a complete copy does not need the node of its source any more, also if its agent died before it could report it, or the object
// was restored to before that: the copy is found, and neither made again nor deleted.
func TestCopyElsewhereWhole(t *testing.T) {
	for _, gone := range []bool{false, true} {
		t.Run(fmt.Sprint("source gone: ", gone), func(t *testing.T) { copyElsewhereWhole(t, gone) })
	}
}

func copyElsewhereWhole(t *testing.T, gone bool) {
	w, a, b, s := twoNodes(t)
	v, snapshot := w.snapshotOf(s, a, "v", 3)
	b.stop()
	of := elsewhere("copy", snapshot.ID, b)
	w.asked("the copy is begun", func(ctx context.Context) error { return second(s.Create(ctx, of)) }, func() bool { return w.object(of.Name) != nil })
	from, err := a.local.Open(w.ctx, snapshot.ID)
	check.OK(t, err)
	whole, err := b.local.Import(w.ctx, volume.Spec{Name: of.Name, Pool: "default", Source: snapshot.ID, Size: of.Size}, from)
	check.OK(t, err)
	check.OK(t, storetest.WriteTo(b.disks[0].Open("default", nil))(w.ctx, whole.ID, 0, []byte("of a pod")))
	if gone { // as if the copy had been reported, its source deleted, and then the object of the copy restored
		check.OK(t, a.local.DeleteSnapshot(w.ctx, snapshot.ID))
	} else {
		a.stop()
	}
	w.start(b)
	copied, err := s.Create(w.ctx, of)
	check.OK(t, err)
	if have := w.content(b, copied.ID); copied.ID != whole.ID || !bytes.HasPrefix(have, []byte("of a pod")) {
		t.Errorf("%+v was made, and %+v was there", copied, whole)
	}
	if !gone {
		w.start(a)
	}
	check.OK(t, errors.Join(s.Delete(w.ctx, copied.ID), s.DeleteSnapshot(w.ctx, snapshot.ID), s.Delete(w.ctx, v.ID)))
}

// TestCopyElsewhereCallers: an agent sends bytes only to the agent of the node that is to make the copy, and only until that is made.
func TestCopyElsewhereCallers(t *testing.T) {
	w, a, b, s := twoNodes(t)
	_, snapshot := w.snapshotOf(s, a, "v", 3)
	_, other := w.snapshotOf(s, a, "other", 3)
	b.stop() // otherwise it makes the copy
	spec := elsewhere("copy", snapshot.ID, b)
	w.asked("the copy is begun", func(ctx context.Context) error { return second(s.Create(ctx, spec)) }, func() bool { return w.object("copy") != nil })
	ask := func(config *rest.Config, key string) error {
		calls, err := port.NewCallers(config)
		check.OK(t, err)
		defer calls.Close()
		agent, err := calls.Agent(a.name, *a.port.Endpoint())
		check.OK(t, err)
		_, err = transfer.Open(w.ctx, agent, key)
		return err
	}
	key := volume.KeyOf("copy")
	check.OK(t, ask(apitest.Get(t).Agent(t, b.name), key))
	for what, c := range map[string]struct {
		config *rest.Config
		key    string
	}{
		"the agent of a third node":         {apitest.Get(t).Agent(t, "node-3"), key},
		"the source's own agent":            {apitest.Get(t).Agent(t, a.name), key},
		"the controller":                    {apitest.Get(t).Controller(t), key},
		"for a volume that is not there":    {apitest.Get(t).Agent(t, b.name), volume.KeyOf("x")},
		"for one that is no copy":           {apitest.Get(t).Agent(t, b.name), volume.KeyOf("other")},
		"for what is no key":                {apitest.Get(t).Agent(t, b.name), "../" + other.ID.Key},
		"for a snapshot and not for a copy": {apitest.Get(t).Agent(t, b.name), other.ID.Key},
	} {
		if err := ask(c.config, c.key); err == nil {
			t.Errorf("%s is given bytes", what)
		}
	}
	w.start(b)
	w.eventually("the copy is made", func() bool { return second(s.Create(w.ctx, spec)) == nil })
	if err := ask(apitest.Get(t).Agent(t, b.name), key); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("asked again for a copy that is made: %v", err)
	}
}

// TestGroupCopied: a group is not deleted while one of its snapshots is being copied to another node.
func TestGroupCopied(t *testing.T) {
	w, _, s := newCluster(t)
	v := w.created(s, spec("v"))
	group, err := s.CreateGroup(w.ctx, "g", []volume.ID{v.ID})
	check.OK(t, err)
	o := volumeOn("node-2", "copy")
	o.Spec.Make, o.Spec.Source = true, &v1alpha1.Source{Kind: string(blockdev.Snapshot), Key: group.Snapshots[0].ID.Key, NodeName: nodeName}
	check.OK(t, w.Create(w.ctx, o))
	w.created(s, spec("later")) // when the store knows of this volume, it knows of the copy too
	fails(t, s.DeleteGroup(w.ctx, group.ID), errdefs.ErrInUse)
	check.OK(t, second(s.GetGroup(w.ctx, group.ID)))
	check.OK(t, w.Delete(w.ctx, o))
	w.eventually("it can be deleted", func() bool { return s.DeleteGroup(w.ctx, group.ID) == nil })
}

// scheduled returns what external-provisioner asks for a claim of a class whose pod is scheduled to a machine. The class need not exist.
func (w *environment) scheduled(name, class string, m *machine) volume.Spec {
	w.Helper()
	claim := w.claim(name)
	claim.Spec.StorageClassName = &class
	claim.Annotations = map[string]string{"volume.kubernetes.io/selected-node": m.name}
	check.OK(w, w.Update(w.ctx, claim))
	one := w.specOf(claim)
	one.Nodes = []string{m.name}
	return one
}

// TestCopyWithoutClassOrNode: if the class of a claim, or the node of the source, does not exist, a copy is not answered with NotFound, as if the source
// did not exist: the error says what is missing. A copy that was begun on a node that is gone is withdrawn, wherever the claim is scheduled now.
func TestCopyWithoutClassOrNode(t *testing.T) {
	w, a, b, s := twoNodes(t)
	v, snapshot := w.snapshotOf(s, a, "v", 3)
	class := &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "copies"}, Provisioner: cluster.DefaultDriver}
	waits := func(what string, of volume.Spec, says string) {
		t.Helper()
		if err := second(s.Create(w.ctx, of)); !errors.Is(err, errdefs.ErrUnavailable) || errors.Is(err, errdefs.ErrNotFound) || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", what, err)
		}
	}
	clone, restored := w.scheduled("clone", class.Name, b), w.scheduled("restored", class.Name, b)
	clone.Source, restored.Source = v.ID, snapshot.ID
	clone.Size, restored.Size = volume.Range{Required: 80 * mib}, volume.Range{Required: 80 * mib}
	waits("a clone, without its class", clone, "StorageClass copies")
	waits("a restore, without its class", restored, "StorageClass copies")
	check.OK(t, w.Create(w.ctx, class))
	t.Cleanup(func() { check.OK(t, w.Delete(context.Background(), class)) })

	begun := w.scheduled("begun", class.Name, b)
	begun.Source, begun.Copies, begun.Size = snapshot.ID, volume.CopiesAnywhere, clone.Size
	o := volumeOn("node-gone", begun.Name)
	o.Spec.Make, o.Spec.Size, o.Spec.Source = true, 80*mib, &v1alpha1.Source{Kind: string(snapshot.ID.Kind), Key: snapshot.ID.Key, NodeName: a.name}
	check.OK(t, w.Create(w.ctx, o))
	w.eventually("the store knows it", func() bool { return second(s.Get(w.ctx, cluster.VolumeID(o))) != nil })
	if err := second(s.Create(w.ctx, begun)); !errors.Is(err, errdefs.ErrNoSpace) || !strings.Contains(err.Error(), "node-gone") {
		t.Errorf("begun on a node that is gone: %v", err)
	}
	if made, err := s.Create(w.ctx, begun); err != nil || made.Node != b.name {
		t.Errorf("asked again it is %+v, %v", made, err)
	}

	check.OK(t, w.Delete(w.ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: a.name}}))
	w.eventually("the store has heard of it", func() bool { return w.available(s, a.name) == 0 })
	waits("a clone, without its node", clone, "there is no node "+a.name)
	waits("a restore, without its node", restored, "there is no node "+a.name)
	w.node(a.name, true)
}
