package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/remotepool/remotetest"
	"github.com/ashlar-csi/ashlar/pkg/cluster/events"
	"github.com/ashlar-csi/ashlar/pkg/cluster/store"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
	"github.com/ashlar-csi/ashlar/pkg/volume/storetest"
)

// movesTo asks for a volume to be moved to a node; with an empty node it takes the move back.
func (w *environment) movesTo(name, node string) {
	w.Helper()
	w.movesToPool(name, node, "")
}

// movesToPool is movesTo for a pool of another name.
func (w *environment) movesToPool(name, node, pool string) {
	w.Helper()
	v := w.object(name)
	before := v.DeepCopy()
	if v.Spec.Move = nil; node != "" {
		v.Spec.Move = &v1alpha1.Move{Node: node, Pool: pool}
	}
	check.OK(w, w.Patch(w.ctx, v, client.MergeFrom(before)))
}

// moved waits until a volume has moved to a machine, and its old node has given its bytes back. It shows that nothing is left.
func (w *environment) moved(name string, from, to *machine) {
	w.Helper()
	w.eventually("volume "+name+" has moved", func() bool {
		v := w.object(name)
		return v.Spec.NodeName == to.name && v.Spec.Move == nil && v.Status.Move == nil && v.Status.Created != nil
	})
	_, err := from.local.Get(w.ctx, volume.ID{Kind: blockdev.Volume, Pool: "default", Key: volume.KeyOf(name)})
	fails(w, err, errdefs.ErrNotFound)
	for _, m := range []*machine{from, to} {
		w.eventually("nothing is left on "+m.name, func() bool { return len(w.leftovers(m)) == 0 })
		w.tally(m)
	}
}

// movesays waits until the message about its move in the object of a volume (status.move) has some text.
func (w *environment) movesays(name, part string) {
	w.Helper()
	w.eventually("the move of "+name+" says "+part, func() bool {
		s := w.object(name).Status.Move
		return s != nil && strings.Contains(s.Message, part)
	})
}

// TestMove: a volume that nobody uses moves to another node, with its bytes and all its properties, and back. It can be used wherever it is, from each of
// the nodes, and deleted.
func TestMove(t *testing.T) {
	w, a, b, s, v, dir := reached(t, volume.Spec{Name: "v", Filesystem: "ext4", Size: volume.Range{Required: 64 * mib}})
	was := w.object("v")
	w.claimFor(v.ID, a.name)
	target := w.staged(a, dir, v.ID, mounted)
	check.OK(t, os.WriteFile(filepath.Join(target, "file"), []byte("from node-1"), 0o600))
	check.OK(t, a.unstage(w.ctx, dir, v.ID))
	w.claimFor(v.ID, "")
	before, err := a.local.Get(w.ctx, v.ID)
	check.OK(t, err)
	want := w.content(a, v.ID)

	w.movesTo("v", b.name)
	w.moved("v", a, b)
	after, err := b.local.Get(w.ctx, v.ID)
	check.OK(t, err)
	before.Node, before.Flags, before.Object = b.name, "", "" // these do not move
	if !reflect.DeepEqual(after, before) {
		t.Errorf("the volume is %+v, before it was %+v", after, before)
	}
	if have := w.content(b, v.ID); string(have) != string(want) {
		t.Error("its bytes are others")
	}
	if now := w.object("v"); !now.Status.Created.Equal(was.Status.Created) || now.UID != was.UID || now.Status.Size != was.Status.Size {
		t.Errorf("its object says %+v, before %+v", now.Status, was.Status)
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
	w.movesTo("v", a.name)
	w.moved("v", b, a)
	check.OK(t, s.Delete(w.ctx, v.ID))
	w.tally(a)
	w.tally(b)
}

// thinly is a pool whose volumes are thin, unless they are asked to be thick.
type thinly struct{ *memory.Pool }

func (p thinly) Create(ctx context.Context, spec blockdev.Spec) (blockdev.Record, error) {
	if spec.Provisioning == blockdev.AnyProvisioning {
		spec.Provisioning = blockdev.Thin
	}
	return p.Pool.Create(ctx, spec)
}

// TestMoveThin: a volume that moves to a pool of thin volumes is thin there, and thick again where it moves back; its object says so.
func TestMoveThin(t *testing.T) {
	w, network := newEnvironment(t), &remotetest.Network{}
	a := w.begin(&machine{name: "node-1", ported: true, network: network})
	b := w.begin(&machine{name: "node-2", ported: true, network: network, wrap: func(p *memory.Pool) blockdev.Pool { return thinly{p} }})
	s, _ := w.store()
	w.pooled(s, b)
	v, err := s.Create(w.ctx, volume.Spec{Name: "v", Size: volume.Range{Required: mib}, Access: volume.AccessAny, Nodes: []string{a.name}})
	check.OK(t, err)
	for _, way := range []struct {
		from, to *machine
		thin     bool
	}{{a, b, true}, {b, a, false}} {
		w.movesTo("v", way.to.name)
		w.moved("v", way.from, way.to)
		w.eventually(fmt.Sprintf("it is thin: %v", way.thin), func() bool {
			have, err := s.Get(w.ctx, v.ID)
			return err == nil && have.Thin == way.thin && w.object("v").Status.Thin == way.thin
		})
	}
}

// slowly returns a cluster of two nodes in a network, and a volume of the first with data at some MiB. The pool of the first node is a halting one, which
// waits for let.
func slowly(t *testing.T, at ...int64) (w *environment, a, b *machine, s *store.Store, v volume.Volume, let chan struct{}, dir string) {
	t.Helper()
	drivertest.NeedRoot(t)
	w = newEnvironment(t)
	let = make(chan struct{}, 1)
	network := &remotetest.Network{}
	a = w.begin(&machine{name: "node-1", ported: true, network: network, wrap: func(p *memory.Pool) blockdev.Pool { return &halting{p, let} }})
	b = w.begin(&machine{name: "node-2", ported: true, network: network})
	s = w.calling(a)
	w.pooled(s, b)
	v, err := s.Create(w.ctx, volume.Spec{Name: "v", Filesystem: "ext4", Size: volume.Range{Required: 64 * mib}, Access: volume.AccessAny, Nodes: []string{a.name}})
	check.OK(t, err)
	w.write(a, v.ID, at...)
	return w, a, b, s, v, let, drivertest.Dir(t)
}

// write writes to a volume of a machine at some MiB.
func (w *environment) write(m *machine, id volume.ID, at ...int64) {
	w.Helper()
	for _, offset := range at {
		check.OK(w, storetest.WriteTo(m.disks[0].Open("default", nil))(w.ctx, id, offset*mib, []byte("data")))
	}
}

// TestMoveClaimed: a volume that is claimed while it is copied can be used at once, and what is written then moves too.
func TestMoveClaimed(t *testing.T) {
	w, a, b, s, v, let, dir := slowly(t, 8, 40)
	w.movesTo("v", b.name)
	let <- struct{}{}
	w.movesays("v", "are copied from node node-1")
	check.OK(t, second(s.Claim(w.ctx, v.ID, volume.Claim{Node: a.name, Mode: "m"})))
	target := w.staged(a, dir, v.ID, mounted)
	w.movesays("v", "is used on node node-1")
	check.OK(t, os.WriteFile(filepath.Join(target, "file"), []byte("meanwhile"), 0o600))
	check.OK(t, a.unstage(w.ctx, dir, v.ID))
	close(let)
	check.OK(t, s.Release(w.ctx, v.ID, a.name))
	w.moved("v", a, b)
	check.OK(t, second(s.Claim(w.ctx, v.ID, volume.Claim{Node: b.name, Mode: "m"})))
	target = w.staged(b, dir, v.ID, mounted)
	if have, err := os.ReadFile(filepath.Join(target, "file")); err != nil || string(have) != "meanwhile" {
		t.Errorf("it has %q, %v", have, err)
	}
	check.OK(t, b.unstage(w.ctx, dir, v.ID))
	check.OK(t, s.Release(w.ctx, v.ID, b.name))
	check.OK(t, s.Delete(w.ctx, v.ID))
}

// TestMoveWaitsForUser: the move of a volume that is used says so each time that it is asked for.
func TestMoveWaitsForUser(t *testing.T) {
	w, a, b, s, v, _ := reached(t, volume.Spec{Name: "v", Size: volume.Range{Required: mib}})
	w.claimFor(v.ID, a.name)
	for range 20 {
		w.movesTo("v", b.name)
		w.movesays("v", "is used on node node-1")
		w.movesTo("v", "")
		w.eventually("it is not asked for any more", func() bool { return w.object("v").Status.Move == nil })
	}
	w.claimFor(v.ID, "")
	check.OK(t, s.Delete(w.ctx, v.ID))
}

// TestMoveUndone: a move that is taken back leaves nothing on the new node, and the volume as it was. The move of a volume that is deleted leaves nothing
// either.
func TestMoveUndone(t *testing.T) {
	w, a, b, s, v, let, dir := slowly(t, 8, 40)
	copying := func() {
		t.Helper()
		w.movesTo("v", b.name)
		let <- struct{}{}
		w.eventually("what it was let is copied", func() bool { return len(let) == 0 }) // otherwise the next copy may copy two ranges
		w.movesays("v", "are copied from node node-1")
		if left := w.leftovers(b); len(left) != 1 {
			t.Fatalf("node-2 has %v", left)
		}
	}
	copying()
	w.movesTo("v", "")
	w.eventually("nothing is left", func() bool { return len(w.leftovers(b)) == 0 && w.object("v").Status.Move == nil })
	check.OK(t, second(s.Claim(w.ctx, v.ID, volume.Claim{Node: a.name, Mode: "m"})))
	w.staged(a, dir, v.ID, mounted)
	check.OK(t, a.unstage(w.ctx, dir, v.ID))
	check.OK(t, s.Release(w.ctx, v.ID, a.name))
	copying()
	check.OK(t, s.Delete(w.ctx, v.ID))
	w.eventually("nothing is left", func() bool { return len(w.leftovers(b)) == 0 })
	w.tally(a)
	w.tally(b)
}

// TestMoveUndoneUnseals: when a move is taken back, the old home unseals the volume by itself, so that it can be used without the API server from then on.
// It does not unseal it while the move is asked for.
func TestMoveUndoneUnseals(t *testing.T) {
	w, a, b, s, v, let, dir := slowly(t, 8, 40)
	sealed := func() bool {
		have, err := a.local.Get(w.ctx, v.ID)
		check.OK(t, err)
		return have.Sealed
	}
	w.movesTo("v", b.name)
	let <- struct{}{}
	w.movesays("v", "are copied from node node-1")
	w.touched("v")
	time.Sleep(200 * time.Millisecond) // so that the agent can do what is wrong
	if !sealed() {
		t.Error("it is not sealed while it moves")
	}
	w.movesTo("v", "")
	w.eventually("it is not sealed any more", func() bool { return !sealed() })
	a.stop()
	device, err := a.local.Attach(w.ctx, v, nil)
	check.OK(t, errors.Join(err, device.Close(), a.local.Detach(w.ctx, v.ID)))
	w.start(a)
	w.movesTo("v", b.name)
	close(let)
	w.moved("v", a, b)
	w.claimFor(v.ID, b.name)
	w.staged(b, dir, v.ID, mounted)
	check.OK(t, b.unstage(w.ctx, dir, v.ID))
	w.claimFor(v.ID, "")
	check.OK(t, s.Delete(w.ctx, v.ID))
}

// TestMoveLeftNetwork: a node that a volume has left, and that is in no network any more after a restart, gives the bytes back all the same. No volume
// moves to it.
func TestMoveLeftNetwork(t *testing.T) {
	w, a, b, v, want := aboutToMove(t)
	a.stop()
	s := w.flipped("v", b)
	w.eventually("it has arrived", func() bool { m := w.object("v").Status.Move; return m != nil && m.Arrived })
	network := a.network
	a.network = nil
	w.start(a)
	w.moved("v", a, b)
	if have := w.content(b, v.ID); string(have) != string(want) {
		t.Error("its bytes are others")
	}
	w.movesTo("v", a.name)
	w.movesays("v", "node node-1 is in no network")
	if left, s := w.leftovers(a), w.object("v").Status.Move; len(left) > 0 || !s.Waits || s.Copied != nil {
		t.Errorf("it comes to a node in no network: %v, %+v", left, s)
	}
	a.stop()
	a.network = network
	w.start(a)
	w.moved("v", b, a)
	check.OK(t, s.Delete(w.ctx, v.ID))
}

// TestMoveFenced: a node that a volume has left does not use the bytes that it still has, although it was not told that the volume has left. It keeps them
// until the new node has taken the volume over.
func TestMoveFenced(t *testing.T) {
	drivertest.NeedRoot(t)
	w, network := newEnvironment(t), &remotetest.Network{}
	a, b := w.begin(&machine{name: "node-1", ported: true, network: network}), w.begin(&machine{name: "node-2", ported: true, network: network})
	s, stop := w.store()
	w.pooled(s, b)
	v, err := s.Create(w.ctx, volume.Spec{Name: "v", Filesystem: "ext4", Size: volume.Range{Required: 64 * mib}, Access: volume.AccessAny, Nodes: []string{a.name}})
	check.OK(t, err)
	w.write(a, v.ID, 8)
	stop()
	w.movesTo("v", b.name)
	w.movesays("v", "all bytes are on node node-2")
	here, err := a.local.Get(w.ctx, v.ID)
	check.OK(t, err)
	_, err = a.local.Attach(w.ctx, here, nil) // without a claim
	fails(t, err, errdefs.ErrUnavailable)
	a.stop()
	b.stop()
	s, _ = w.store()
	w.eventually("it is of node-2", func() bool { return w.object("v").Spec.NodeName == b.name })
	for _, claim := range []string{"", a.name} {
		w.claimFor(v.ID, claim)
		if _, err = a.local.Attach(w.ctx, here, nil); !errors.Is(err, errdefs.ErrPrecondition) || !strings.Contains(err.Error(), "it is on node node-2 now") {
			t.Errorf("claimed for %q, the old bytes are attached: %v", claim, err)
		}
		_, err = a.local.Export(w.ctx, v.ID, volume.Grant{Generation: 7, Node: "node-3"})
		fails(t, err, errdefs.ErrPrecondition)
	}
	w.eventually("the store knows of the claim", func() bool { return errors.Is(s.Delete(w.ctx, v.ID), errdefs.ErrInUse) })
	w.claimFor(v.ID, "")
	w.eventually("the store knows of its end", func() bool { return errors.Is(s.Delete(w.ctx, v.ID), errdefs.ErrUnavailable) })
	w.start(a)
	time.Sleep(time.Second) // so that the agent can do what is wrong
	check.OK(t, second(a.local.Get(w.ctx, v.ID)))
	w.start(b)
	w.moved("v", a, b)
	check.OK(t, s.Delete(w.ctx, v.ID))
	w.tally(b)
}

// breaking counts the writes of all parts of the driver, and cuts the part that makes a certain one off from the API server for good, as if it had died
// there.
type breaking struct {
	mu    sync.Mutex
	left  int    // how many writes are left until that one, which counts; 0: no part is cut off
	after bool   // the part is cut off after that write is done, else before
	dead  string // the part that is cut off
	hit   chan string
}

func (b *breaking) arm(n int, after bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.left, b.after, b.dead, b.hit = n, after, "", make(chan string, 1)
}

// of returns how the connection of a part is changed (wrap).
func (b *breaking) of(part string) func(*rest.Config) {
	return func(c *rest.Config) {
		c.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return tripper(func(r *http.Request) (*http.Response, error) { return b.ask(part, next, r) })
		})
	}
}

var errCut = errors.New("the wire is cut")

func (b *breaking) ask(part string, next http.RoundTripper, r *http.Request) (*http.Response, error) {
	b.mu.Lock()
	breaks := false
	if r.Method == http.MethodPatch && (strings.Contains(r.URL.Path, "/volumes/") || strings.Contains(r.URL.Path, "/snapshots/")) && b.left > 0 {
		b.left--
		breaks = b.left == 0
	}
	if breaks {
		b.dead = part
		b.hit <- part
	}
	dead := b.dead == part
	b.mu.Unlock()
	if dead && !(breaks && b.after) {
		return nil, errCut
	}
	answer, err := next.RoundTrip(r)
	if err == nil && breaks {
		err = errors.Join(errCut, answer.Body.Close())
	}
	if err != nil {
		return nil, err
	}
	return answer, nil
}

type tripper func(*http.Request) (*http.Response, error)

func (t tripper) RoundTrip(r *http.Request) (*http.Response, error) { return t(r) }

// onTheWay is a volume or snapshot that moves between two machines.
type onTheWay struct {
	id    volume.ID
	ask   func(to *machine)       // asks for its move
	over  func(to *machine) bool  // reports whether it has moved, and the move has ended
	moved func(from, to *machine) // waits for that, and shows that nothing is left
}

// cutShort makes a volume or snapshot (begin) on one of two nodes, and moves it to and fro, once for each write of a move: before or after that write the
// part of the driver that makes it dies. It shows that each move ends when that part is back, and that all bytes are there. It returns on which machine it
// is then.
func cutShort(t *testing.T, network *remotetest.Network, begin func(w *environment, s *store.Store, at *machine) onTheWay) (w *environment, s *store.Store, at, other *machine, what onTheWay) {
	t.Helper()
	w, cut := newEnvironment(t), &breaking{}
	connect := func(part string) { wrap(t, cut.of(part)) }
	connect("node-1")
	from := w.begin(&machine{name: "node-1", ported: true, network: network})
	connect("node-2")
	to := w.begin(&machine{name: "node-2", ported: true, network: network})
	connect("store")
	s, stop := w.store()
	w.pooled(s, to)
	w.pooled(s, from)
	what = begin(w, s, from)
	want := w.content(from, what.id)
	for _, after := range []bool{false, true} {
		n := 0
		for more := true; more; {
			n++
			cut.arm(n, after)
			what.ask(to)
			w.eventually("it breaks, or it has moved", func() bool { return len(cut.hit) > 0 || what.over(to) })
			if more = len(cut.hit) > 0; more {
				part := <-cut.hit
				t.Logf("write %d, done: %v: %s dies", n, after, part)
				connect(part)
				if part == "store" {
					stop()
					cut.arm(0, false)
					s, stop = w.store()
				} else {
					m := map[string]*machine{from.name: from, to.name: to}[part]
					m.stop()
					cut.arm(0, false)
					w.start(m)
				}
			}
			what.moved(from, to)
			if have := w.content(to, what.id); string(have) != string(want) {
				t.Fatalf("write %d, done: %v: the bytes are others", n, after)
			}
			from, to = to, from
		}
		if n < 5 {
			t.Errorf("a move had %d writes", n-1)
		}
	}
	cut.arm(0, false)
	return w, s, from, to, what
}

// TestMoveCutShort: at whichever write of a move the part of the driver dies that makes it, before or after it is done, the move ends when that part is
// back, and the volume has all its bytes.
func TestMoveCutShort(t *testing.T) {
	drivertest.NeedRoot(t)
	w, s, at, other, v := cutShort(t, &remotetest.Network{}, func(w *environment, s *store.Store, at *machine) onTheWay {
		v, err := s.Create(w.ctx, volume.Spec{Name: "v", Size: volume.Range{Required: mib}, Access: volume.AccessAny, Nodes: []string{at.name}})
		check.OK(t, err)
		check.OK(t, storetest.WriteTo(at.disks[0].Open("default", nil))(w.ctx, v.ID, 64<<10, []byte("data")))
		return onTheWay{v.ID, func(to *machine) { w.movesTo("v", to.name) }, func(to *machine) bool {
			o := w.object("v")
			return o.Spec.NodeName == to.name && o.Spec.Move == nil && o.Status.Move == nil
		}, func(from, to *machine) { w.moved("v", from, to) }}
	})
	w.eventually("the store knows where it is", func() bool {
		have, err := s.Get(w.ctx, v.id)
		return err == nil && have.Node == at.name
	})
	check.OK(t, s.Delete(w.ctx, v.id))
	w.tally(at)
	w.tally(other)
}

// TestMoveTold: events on a volume and its claim tell that it moves, why that does not go on, and that it has moved.
func TestMoveTold(t *testing.T) {
	w, network := newEnvironment(t), &remotetest.Network{}
	let := make(chan struct{}, 1)
	a := w.begin(&machine{name: "node-1", ported: true, network: network, wrap: func(p *memory.Pool) blockdev.Pool { return &halting{p, let} }})
	b := w.begin(&machine{name: "node-2", ported: true, network: network})
	s := w.calling(a)
	w.pooled(s, b)
	claim := w.claim("v")
	of := w.specOf(claim)
	of.Access, of.Nodes, of.Size = volume.AccessAny, []string{a.name}, volume.Range{Required: 64 * mib}
	v, err := s.Create(w.ctx, of)
	check.OK(t, err)
	w.write(a, v.ID, 8, 40)
	a.stop()
	w.movesTo(of.Name, b.name)
	w.told(events.MoveWaits, "connection refused", w.object(of.Name), claim)
	w.start(a)
	let <- struct{}{}
	w.told(events.Moving, "it is being moved to node node-2", w.object(of.Name), claim)
	close(let)
	w.told(events.Moved, "it has moved here from node node-1", w.object(of.Name), claim)
	w.moved(of.Name, a, b)
	check.OK(t, s.Delete(w.ctx, v.ID))
}
