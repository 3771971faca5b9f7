package cluster_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/remotepool/remotetest"
	"github.com/ashlar-csi/ashlar/pkg/cluster/export"
	"github.com/ashlar-csi/ashlar/pkg/cluster/move"
	"github.com/ashlar-csi/ashlar/pkg/cluster/port"
	"github.com/ashlar-csi/ashlar/pkg/cluster/store"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// consumer stands for the node that uses a volume while it moves: it calls the two homes over their ports, and writes the object, with the account of that
// node's agent. In place of the kernel's mirror it copies the bytes of the old home.
type consumer struct {
	*environment
	as      client.Client // with that account
	name    string        // of the node
	old     move.Old
	fresh   move.New
	home    export.Home
	newHome export.Home
	a, b    *machine
	id      volume.ID
}

// newConsumer returns a consumer: a volume of the first of two nodes is used by a third one, and is to move to the second. The controller, which writes
// the new node into the object, is stopped.
func newConsumer(t *testing.T) (c *consumer, stop func()) {
	t.Helper()
	return newConsumerTo(t, "")
}

// newConsumerTo is newConsumer for a volume that moves to a pool of another name.
func newConsumerTo(t *testing.T, pool string) (c *consumer, stop func()) {
	t.Helper()
	drivertest.NeedRoot(t)
	w, network := newEnvironment(t), &remotetest.Network{}
	a, b := w.begin(&machine{name: "node-1", ported: true, network: network}), w.begin(&machine{name: "node-2", ported: true, network: network})
	w.node("node-3", true)
	s, stop := w.store()
	w.pooled(s, b)
	v, err := s.Create(w.ctx, volume.Spec{Name: "v", Size: volume.Range{Required: mib}, Access: volume.AccessAny, Nodes: []string{a.name}})
	check.OK(t, err)
	w.write(a, v.ID, 0)
	stop()
	c = &consumer{environment: w, name: "node-3", a: a, b: b, id: v.ID}
	c.as, err = client.New(apitest.Get(t).Agent(t, c.name), client.Options{Scheme: w.Scheme()})
	check.OK(t, err)
	c.call()
	w.claimFor(v.ID, c.name)
	_, err = c.home.Open(w.ctx, v.ID, 1)
	check.OK(t, err)
	w.movesToPool("v", b.name, pool)
	w.movesays("v", "is used on node node-3")
	t.Cleanup(func() {
		for _, m := range []*machine{a, b} {
			check.OK(t, errors.Join(m.local.Unexport(w.ctx, v.ID, 0), m.local.DropLeftover(w.ctx, volume.Leftover{ID: v.ID, Pool: cmp.Or(pool, "default"), For: v.ID.Key})))
		}
	})
	return c, stop
}

// call connects to the two nodes; a busy one is asked again (patient).
func (c *consumer) call() {
	c.Helper()
	calls, err := port.NewCallers(wrapped(apitest.Get(c).Agent(c, c.name)))
	check.OK(c, err)
	c.Cleanup(func() { check.OK(c, calls.Close()) })
	old, err := calls.Agent(c.a.name, *c.a.port.Endpoint())
	check.OK(c, err)
	fresh, err := calls.Agent(c.b.name, *c.b.port.Endpoint())
	check.OK(c, err)
	c.old, c.fresh, c.home, c.newHome = move.OldAt(patient{old}), move.NewAt(patient{fresh}), export.HomeAt(patient{old}), export.HomeAt(patient{fresh})
}

// of returns the move for which calls are made, by the present object.
func (c *consumer) of() move.Of {
	c.Helper()
	v := c.object("v")
	of := move.Of{ID: c.id, Object: v.Generation}
	if v.Spec.Claim != nil {
		of.Claim = v.Spec.Claim.Generation
	}
	return of
}

// prepare calls Describe of the old home, and Prepare of the new one.
func (c *consumer) prepare() (from volume.Origin, room export.Opened) {
	c.Helper()
	from, err := c.old.Describe(c.ctx, c.of())
	check.OK(c, err)
	room, err = c.fresh.Prepare(c.ctx, c.of(), from)
	check.OK(c, err)
	return from, room
}

// mirror copies the bytes of the old home to what the new one has prepared.
func (c *consumer) mirror(room export.Opened) {
	c.Helper()
	ranges, err := c.old.Ranges(c.ctx, c.of())
	check.OK(c, err)
	all, err := c.a.network.Exports(c.ctx)
	check.OK(c, err)
	var into string
	for _, e := range all {
		if e.NQN == room.NQN {
			into = e.Device
		}
	}
	f, err := os.OpenFile(into, os.O_RDWR, 0)
	check.OK(c, err)
	defer f.Close()
	want := c.content(c.a, c.id)
	for _, e := range ranges {
		_, err := f.WriteAt(want[e.Offset:e.Offset+e.Length], e.Offset)
		check.OK(c, err)
	}
}

// complete calls Seal of the old home, and Complete of the new one.
func (c *consumer) complete(room export.Opened) (sealed volume.Origin) {
	c.Helper()
	sealed, err := c.old.Seal(c.ctx, c.of())
	check.OK(c, err)
	check.OK(c, c.fresh.Complete(c.ctx, c.of(), room.NQN, sealed))
	return sealed
}

// pin writes into the object, as it was read, that the new home has all bytes.
func (c *consumer) pin(v *v1alpha1.Volume, sealed volume.Origin) error {
	before := v.DeepCopy()
	if v.Status.Move == nil {
		v.Status.Move = &v1alpha1.MoveStatus{Node: c.b.name, Pool: v.Spec.Move.Pool}
	}
	v.Status.Move.Claim, v.Status.Move.Waits = v.Spec.Claim.Generation, false
	v.Status.Move.Copied = &v1alpha1.MoveCopied{Generation: v.Generation, Claim: v.Spec.Claim.Generation, Sealed: metav1.NewMicroTime(sealed.Created), Size: v.Status.Size}
	return c.as.Status().Patch(c.ctx, v, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
}

// pinned takes all steps before that of the controller.
func (c *consumer) pinned() (room export.Opened, sealed volume.Origin) {
	c.Helper()
	_, room = c.prepare()
	c.mirror(room)
	c.eventually("all of it is there", func() bool {
		now := c.object("v")
		sealed = c.complete(room)
		return c.pin(now, sealed) == nil // agents may have written the object meanwhile
	})
	return room, sealed
}

// unpin takes back what pin has written, and reports whether it was in time.
func (c *consumer) unpin() bool {
	c.Helper()
	done := false
	c.eventually("it is taken back, or too late", func() bool {
		v := c.object("v")
		if v.Spec.NodeName != c.a.name {
			return true
		}
		before := v.DeepCopy()
		v.Status.Move.Copied = nil
		v.Status.Move.Undone++
		done = c.as.Status().Patch(c.ctx, v, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})) == nil
		return done
	})
	return done
}

// over waits until the move is over, and shows that the new node has all bytes.
func (c *consumer) over(want []byte) {
	c.Helper()
	c.moved("v", c.a, c.b)
	if have := c.content(c.b, c.id); string(have) != string(want) {
		c.Error("its bytes are others")
	}
}

// released releases the volume, and deletes it.
func (c *consumer) released(s *store.Store) {
	c.Helper()
	c.again("it is released", func(ctx context.Context) error { return s.Release(ctx, c.id, c.name) })
	c.exported("v", nil)
	c.again("it is deleted", func(ctx context.Context) error { return s.Delete(ctx, c.id) })
	c.tally(c.a)
	c.tally(c.b)
}

// TestMoveInUse: a volume moves while a third node uses it. That node goes on with the next generation of its claim, over the export that was prepared,
// and the labels that it has written are in the record.
func TestMoveInUse(t *testing.T) {
	c, _ := newConsumer(t)
	check.OK(t, second(c.home.SetLabels(c.ctx, c.id, 1, nil, map[string]string{"target": "/pod"})))
	want := c.content(c.a, c.id)
	room, sealed := c.pinned()
	s := c.flipped("v", c.b)
	now := c.object("v")
	if claim := now.Spec.Claim; claim == nil || claim.Node != c.name || claim.Generation != 2 || now.Spec.Claims != 2 || claim.Mode != "m" {
		t.Errorf("its claim is %+v, of %d", claim, now.Spec.Claims)
	}
	c.over(want)
	c.exported("v", &volume.Grant{Generation: 2, Node: c.name})
	again, err := c.newHome.Open(c.ctx, c.id, 2)
	check.OK(t, err)
	if again.NQN != room.NQN || again.Record.Labels["target"] != "/pod" {
		t.Errorf("opened again it is %s of %v, before %s", again.NQN, again.Record.Labels, room.NQN)
	}
	if names := c.a.network.Exported(); len(names) != 1 || names[0] != room.NQN {
		t.Errorf("exported are %v", names)
	}
	// Late calls are refused.
	late := move.Of{ID: c.id, Claim: 1, Object: now.Generation}
	_, err = c.old.Seal(c.ctx, late)
	fails(t, err, errdefs.ErrPrecondition)
	fails(t, c.fresh.Complete(c.ctx, late, room.NQN, sealed), errdefs.ErrPrecondition)
	fails(t, c.fresh.Drop(c.ctx, late, room.NQN), errdefs.ErrPrecondition)
	_, err = c.home.Open(c.ctx, c.id, 1)
	fails(t, err, errdefs.ErrNotFound)
	c.released(s)
}

// TestMoveInUseSteps: each call may be repeated. It is refused to other nodes, and for another claim or an earlier object.
func TestMoveInUseSteps(t *testing.T) {
	c, _ := newConsumer(t)
	of := c.of()
	from, room := c.prepare()
	for name, other := range map[string]move.Of{
		"another claim":  {ID: of.ID, Claim: of.Claim + 1, Object: of.Object},
		"another object": {ID: of.ID, Claim: of.Claim, Object: of.Object - 1},
		"another pool":   {ID: volume.ID{Kind: of.ID.Kind, Pool: "b", Key: of.ID.Key}, Claim: of.Claim, Object: of.Object},
	} {
		elsewhere := from
		elsewhere.ID = other.ID
		for call, err := range map[string]error{
			"Describe": second(c.old.Describe(c.ctx, other)), "Ranges": second(c.old.Ranges(c.ctx, other)), "Seal": second(c.old.Seal(c.ctx, other)),
			"Prepare": second(c.fresh.Prepare(c.ctx, other, elsewhere)), "Complete": c.fresh.Complete(c.ctx, other, room.NQN, elsewhere), "Drop": c.fresh.Drop(c.ctx, other, room.NQN),
		} {
			if !errors.Is(err, errdefs.ErrPrecondition) {
				t.Errorf("%s of %s: %v", call, name, err)
			}
		}
	}
	stranger := &consumer{environment: c.environment, name: c.b.name, a: c.a, b: c.b, id: c.id}
	stranger.call()
	for call, err := range map[string]error{
		"Describe": second(stranger.old.Describe(c.ctx, of)), "Ranges": second(stranger.old.Ranges(c.ctx, of)), "Seal": second(stranger.old.Seal(c.ctx, of)),
		"Prepare": second(stranger.fresh.Prepare(c.ctx, of, from)), "Complete": stranger.fresh.Complete(c.ctx, of, room.NQN, from), "Drop": stranger.fresh.Drop(c.ctx, of, room.NQN),
	} {
		if !errors.Is(err, errdefs.ErrPrecondition) {
			t.Errorf("%s by another node: %v", call, err)
		}
	}
	fails(t, second(stranger.old.Sealed(c.ctx, c.id)), errdefs.ErrNotFound) // it has not moved
	larger := from
	larger.Created, larger.Size = time.Now(), 64*mib
	fails(t, second(c.fresh.Prepare(c.ctx, of, larger)), errdefs.ErrUnavailable) // the object has another size
	for range 2 {
		again, err := c.fresh.Prepare(c.ctx, of, from)
		if check.OK(t, err); again.NQN != room.NQN || again.Secret != room.Secret {
			t.Errorf("prepared again it is %v, before %v", again, room)
		}
		c.mirror(room)
		sealed := c.complete(room)
		check.OK(t, c.fresh.Complete(c.ctx, of, room.NQN, sealed))
		check.OK(t, c.fresh.Drop(c.ctx, of, room.NQN))
		check.OK(t, c.fresh.Drop(c.ctx, of, room.NQN))
		if left := c.leftovers(c.b); len(left) != 0 {
			t.Errorf("dropped, node-2 has %v", left)
		}
		fails(t, c.fresh.Complete(c.ctx, of, room.NQN, sealed), errdefs.ErrNotFound) // the copy is gone
		from, room = c.prepare()
	}
	want := c.content(c.a, c.id)
	_, _ = c.pinned()
	fails(t, c.fresh.Drop(c.ctx, of, room.NQN), errdefs.ErrPrecondition)
	fails(t, second(c.fresh.Prepare(c.ctx, of, from)), errdefs.ErrPrecondition)
	s := c.flipped("v", c.b)
	c.over(want)
	c.released(s)
}

// TestMoveInUsePinned: from when the object says that the new home has all bytes (pinned), until the controller has changed the node or that is taken
// back, nothing of the volume changes at its old home.
func TestMoveInUsePinned(t *testing.T) {
	c, _ := newConsumer(t)
	room, _ := c.pinned()
	swap := func(from, to string) error {
		before := map[string]string{}
		if from != "" {
			before["target"] = from
		}
		return second(c.home.SetLabels(c.ctx, c.id, 1, before, map[string]string{"target": to}))
	}
	for name, change := range map[string]func() error{
		"labels":     func() error { return swap("", "/pod") },
		"open":       func() error { return second(c.home.Open(c.ctx, c.id, 1)) },
		"growth":     func() error { return second(c.a.local.Expand(c.ctx, c.id, volume.Range{Required: 2 * mib})) },
		"a snapshot": func() error { return second(c.a.local.CreateSnapshot(c.ctx, "cut", c.id)) },
	} {
		if err := change(); !errors.Is(err, errdefs.ErrUnavailable) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if !c.unpin() {
		t.Fatal("nobody names the new node, and it is too late")
	}
	stale := c.object("v")
	sealed, err := c.old.Seal(c.ctx, c.of())
	check.OK(t, err)
	check.OK(t, swap("", "/pod")) // a change after the seal, so that the pin below is refused
	if err := c.pin(stale, sealed); err == nil {
		t.Error("what was changed since is said to be there")
	}
	if again, err := c.old.Seal(c.ctx, c.of()); err != nil || !again.Created.After(sealed.Created) || again.Labels["target"] != "/pod" {
		t.Errorf("sealed again it is %+v, %v; it was %+v", again, err, sealed)
	}
	check.OK(t, second(c.home.Open(c.ctx, c.id, 1)))
	if now := c.object("v"); now.Status.Move.Undone < 3 {
		t.Errorf("its object says %+v", now.Status.Move)
	}
	// A pinned volume that is to grow does not move.
	c.eventually("all of it is there", func() bool {
		now := c.object("v")
		return c.pin(now, c.complete(room)) == nil
	})
	o := c.object("v")
	before := o.DeepCopy()
	o.Spec.Size = 2 * mib
	check.OK(t, c.Patch(c.ctx, o, client.MergeFrom(before)))
	s, _ := c.store()
	time.Sleep(time.Second)
	if at := c.object("v").Spec.NodeName; at != c.a.name {
		t.Fatalf("it is of %s, and was to grow", at)
	}
	c.unpin()
	c.eventually("it has grown", func() bool { return c.object("v").Status.Size == 2*mib })
	want := c.content(c.a, c.id)
	c.pinned()
	c.over(want)
	c.released(s)
}

// TestMoveInUseReleased: the volume is released after each of the steps before the controller's. What was prepared is not used. The volume moves as one
// that nobody uses, or is claimed anew, and moves in use by that claim.
func TestMoveInUseReleased(t *testing.T) {
	for step, reach := range map[string]func(c *consumer) export.Opened{
		"prepared": func(c *consumer) export.Opened { _, room := c.prepare(); return room },
		"sealed": func(c *consumer) export.Opened {
			_, room := c.prepare()
			check.OK(c, second(c.old.Seal(c.ctx, c.of())))
			return room
		},
		"complete": func(c *consumer) export.Opened { _, room := c.prepare(); c.complete(room); return room },
		"pinned":   func(c *consumer) export.Opened { room, _ := c.pinned(); return room },
	} {
		for _, claimed := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s,claimed=%v", step, claimed), func(t *testing.T) {
				c, _ := newConsumer(t)
				room := reach(c)
				of := c.of()
				c.claimFor(c.id, "")
				if claimed {
					c.claimFor(c.id, c.name)
				}
				// Only the old home has what is written from now on.
				check.OK(t, c.a.local.Unexport(c.ctx, c.id, 1))
				c.write(c.a, c.id, 0)
				want := c.content(c.a, c.id)
				fails(t, c.fresh.Complete(c.ctx, of, room.NQN, volume.Origin{ID: c.id, Created: time.Now(), Size: mib, Labels: map[string]string{}}), errdefs.ErrPrecondition)
				s, _ := c.store()
				if claimed {
					time.Sleep(500 * time.Millisecond)
					if at := c.object("v").Spec.NodeName; at != c.a.name {
						t.Fatalf("it is of %s", at)
					}
					c.eventually("it is opened", func() bool { return second(c.home.Open(c.ctx, c.id, 2)) == nil })
					if again, _ := c.pinned(); again.NQN == room.NQN {
						t.Error("another claim is given what was prepared for the one before")
					}
				}
				c.over(want)
				if claimed {
					c.exported("v", &volume.Grant{Generation: 3, Node: c.name})
				} else if names := c.a.network.Exported(); len(names) != 0 {
					t.Errorf("exported are %v", names)
				}
				c.released(s)
			})
		}
	}
}

// TestMoveInUseTakenBack: the move is taken back before or after the volume is pinned, and asked for again. What was prepared is removed, and late calls
// and writes for the first move are refused.
func TestMoveInUseTakenBack(t *testing.T) {
	c, _ := newConsumer(t)
	for _, pin := range []bool{false, true} {
		_, room := c.prepare()
		c.mirror(room)
		before := c.object("v")
		of, sealed := c.of(), c.complete(room)
		if pin {
			c.eventually("all of it is there", func() bool {
				now := c.object("v")
				return c.pin(now, sealed) == nil
			})
		}
		c.movesTo("v", "")
		c.eventually("nothing is left", func() bool { return len(c.leftovers(c.b)) == 0 && c.object("v").Status.Move == nil })
		check.OK(t, second(c.home.SetLabels(c.ctx, c.id, 1, nil, map[string]string{"flags": fmt.Sprint(pin)})))
		check.OK(t, second(c.home.SetLabels(c.ctx, c.id, 1, map[string]string{"flags": fmt.Sprint(pin)}, nil)))
		c.movesTo("v", c.b.name)
		if err := c.pin(before, sealed); err == nil {
			t.Error("what was taken back is said to be all there")
		}
		fails(t, c.fresh.Complete(c.ctx, of, room.NQN, sealed), errdefs.ErrPrecondition)
		fails(t, second(c.old.Seal(c.ctx, of)), errdefs.ErrPrecondition)
		c.movesays("v", "is used on node node-3")
	}
	want := c.content(c.a, c.id)
	c.pinned()
	s := c.flipped("v", c.b)
	c.over(want)
	c.released(s)
}

// TestMoveInUseTakenBackAtStart: the move is taken back while the agent of the new node starts, after it has looked at its leftovers, and before it
// watches moves. What was prepared is removed soon all the same.
func TestMoveInUseTakenBackAtStart(t *testing.T) {
	c, _ := newConsumer(t)
	c.prepare()
	c.b.stop()
	looked, watch := make(chan struct{}, 1), make(chan struct{})
	wrap(t, func(config *rest.Config) {
		config.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return roundTrip(func(q *http.Request) (*http.Response, error) {
				if strings.Contains(q.URL.Query().Get("fieldSelector"), "spec.move.node=") && strings.HasSuffix(q.URL.Path, "/volumes") {
					held(t, watch)
				}
				answer, err := next.RoundTrip(q)
				if strings.HasSuffix(q.URL.Path, "/volumes/"+c.id.Key) {
					select {
					case looked <- struct{}{}:
					default: // not the first time
					}
				}
				return answer, err
			})
		})
	})
	c.start(c.b)
	c.comes(looked, "it looks at what it has")
	c.movesTo("v", "")
	close(watch)
	began := time.Now()
	c.eventually("nothing is left", func() bool { return len(c.leftovers(c.b)) == 0 })
	if took := time.Since(began); took > 45*time.Second { // the regular look is after a minute
		t.Errorf("that took %v", took)
	}
}

// TestMoveInUseTakenBackBusy: what was prepared is removed soon, also if the lock of the volume is held when the new node looks.
func TestMoveInUseTakenBackBusy(t *testing.T) {
	c, _ := newConsumer(t)
	c.prepare()
	unlock := check.Locked(t, c.b.locks, keylock.Volume(c.id.Key))
	c.movesTo("v", "")
	time.Sleep(3 * time.Second) // meanwhile it looks, and does not get the lock
	unlock()
	for end := time.Now().Add(45 * time.Second); len(c.leftovers(c.b)) > 0; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("what was prepared is still there")
		}
	}
}

// TestMoveInUseEnds: a volume is released right after its node has changed, while the agent of the new node is down. The release waits until that has
// taken the volume over and ended its export.
func TestMoveInUseEnds(t *testing.T) {
	c, _ := newConsumer(t)
	want := c.content(c.a, c.id)
	c.pinned()
	c.b.stop()
	s := c.flipped("v", c.b)
	_, err := c.b.local.Get(c.ctx, c.id)
	fails(t, err, errdefs.ErrNotFound)
	c.asked("its claim is off", func(ctx context.Context) error { return s.Release(ctx, c.id, c.name) }, func() bool {
		if c.object("v").Spec.Claim != nil {
			return false
		}
		time.Sleep(time.Second) // the release does not end meanwhile: the new node may export the volume
		return true
	})
	c.start(c.b)
	c.over(want)
	c.released(s)
}

// TestMoveInUseOldNodeAway: the old node dies when the volume changes its node. The new one takes the volume over, and the user goes on. The old one gives
// its bytes back when it is back.
func TestMoveInUseOldNodeAway(t *testing.T) {
	c, _ := newConsumer(t)
	want := c.content(c.a, c.id)
	c.pinned()
	c.a.stop()
	s := c.flipped("v", c.b)
	c.exported("v", &volume.Grant{Generation: 2, Node: c.name})
	if names := c.a.network.Exported(); len(names) != 2 {
		t.Errorf("exported are %v", names) // that of the old node is not used any more
	}
	c.start(c.a)
	c.over(want)
	c.released(s)
}

// TestMoveInUseCopyLost: the copy on the new node is gone when the volume has changed its node. It is not copied from the old node again, which lacks what
// was written since. The volume is reported as lost.
func TestMoveInUseCopyLost(t *testing.T) {
	c, _ := newConsumer(t)
	c.pinned()
	c.b.stop()
	check.OK(t, c.b.local.DropLeftover(c.ctx, c.leftovers(c.b)[0]))
	c.flipped("v", c.b)
	c.start(c.b)
	c.eventually("it is lost", func() bool {
		h := c.object("v").Status.Health
		return len(h) == 1 && h[0].Reason == "VolumeMissing" && strings.Contains(h[0].Message, "node "+c.a.name+", which the volume has left, may still have all of its bytes")
	})
	if v := c.object("v"); v.Status.Move.Arrived {
		t.Errorf("it has arrived: %+v", v.Status.Move)
	}
	check.OK(t, second(c.a.local.Get(c.ctx, c.id)))
}

// usedSince moves the volume while the agent of its new node is stopped, and writes to it there, as its user does.
func (c *consumer) usedSince() *store.Store {
	c.Helper()
	c.pinned()
	c.b.stop()
	s := c.flipped("v", c.b)
	device, err := c.b.disks[0].Open("default", nil).Attached(c.ctx, blockdev.Ref{Kind: c.id.Kind, Key: c.id.Key})
	check.OK(c, err)
	f, err := os.OpenFile(device[0].Path, os.O_WRONLY|os.O_SYNC, 0)
	check.OK(c, err)
	_, err = f.WriteAt([]byte("since"), 128<<10)
	check.OK(c, errors.Join(err, f.Close()))
	return s
}

// isStray waits until a node reports the volume as a stray.
func (c *consumer) isStray(m *machine) {
	c.Helper()
	c.eventually("it is a stray of "+m.name, func() bool {
		m.agent.Changed()
		return c.pool(m.name, "default").Status.StrayCount == 1
	})
}

// keptSince shows that the new node has what was written since the volume has moved, and still exports it to its user. It returns all bytes.
func (c *consumer) keptSince() []byte {
	c.Helper()
	have := c.content(c.b, c.id)
	if string(have[128<<10:][:5]) != "since" || len(c.b.network.Exported()) != 2 {
		c.Errorf("it has not what was written since, or its user is cut off: %v", c.b.network.Exported())
	}
	return have
}

// TestMoveInUseOlderAdopted: the object of a volume that has moved in use is deleted, and the older bytes of the old node are adopted before the agent of
// the new node is back. The new node keeps what was written since, and says so.
func TestMoveInUseOlderAdopted(t *testing.T) {
	c, _ := newConsumer(t)
	s := c.usedSince()
	check.OK(t, c.Delete(c.ctx, c.object("v")))
	c.isStray(c.a)
	c.adoptOn(c.a.name, "default", c.id.String())
	c.eventually("it has an object again", func() bool {
		have, err := s.Get(c.ctx, c.id)
		return err == nil && have.Node == c.a.name
	})
	c.start(c.b)
	c.isStray(c.b)
	c.keptSince()
	c.eventually("what node-2 has is said to be newer, perhaps", func() bool {
		said := meta.FindStatusCondition(c.pool(c.b.name, "default").Status.Conditions, v1alpha1.Accounted)
		return said != nil && strings.Contains(said.Message, "its object says pool default of node node-1: if that is wrong, delete that object first") &&
			strings.Contains(said.Message, "it has come here while it was used, and may have what was written last")
	})
	// The adopted volume is to move there. The new node does not prepare it in place of its own, whatever the caller says about its claims.
	c.call()
	generation := c.claimFor(c.id, c.name)
	check.OK(t, second(c.home.Open(c.ctx, c.id, generation)))
	c.movesTo("v", c.b.name)
	from, err := c.old.Describe(c.ctx, c.of())
	check.OK(t, err)
	for _, from.Claims = range []int64{from.Claims, math.MaxInt64} {
		fails(t, second(c.fresh.Prepare(c.ctx, c.of(), from)), errdefs.ErrExists)
	}
	c.keptSince()
}

// TestMoveInUseObjectDeleted: the object of a volume that has moved in use is deleted before the new node has taken the volume over. The new node keeps
// all bytes, and its user goes on. It can be adopted there.
func TestMoveInUseObjectDeleted(t *testing.T) {
	c, _ := newConsumer(t)
	s := c.usedSince()
	check.OK(t, c.Delete(c.ctx, c.object("v")))
	c.start(c.b)
	for _, m := range []*machine{c.a, c.b} {
		c.isStray(m)
	}
	want := c.keptSince()
	c.adoptOn(c.b.name, "default", c.id.String())
	c.eventually("it has an object again", func() bool {
		have, err := s.Get(c.ctx, c.id)
		return err == nil && have.Node == c.b.name
	})
	if have := c.content(c.b, c.id); string(have) != string(want) {
		t.Error("its bytes are others")
	}
	c.call()
	c.claimFor(c.id, c.name)
	c.eventually("it is opened", func() bool { return second(c.newHome.Open(c.ctx, c.id, c.of().Claim)) == nil })
	check.OK(t, second(c.a.local.Get(c.ctx, c.id))) // a person decides about the old bytes
}

// TestMoveInUseRestored: the object is restored to when the volume was pinned, which was taken back since, and the volume was used at its old home. The
// new node asks the old one before it takes the volume over, and does not, as the old one has newer bytes.
func TestMoveInUseRestored(t *testing.T) {
	c, _ := newConsumer(t)
	_, sealed := c.pinned()
	c.unpin()
	check.OK(t, second(c.home.Open(c.ctx, c.id, 1))) // as when its user stages it again
	c.eventually("the API server is back where it was", func() bool { return c.pin(c.object("v"), sealed) == nil })
	c.flipped("v", c.b)
	c.movesays("v", "its bytes are newer")
	_, err := c.b.local.Get(c.ctx, c.id)
	fails(t, err, errdefs.ErrNotFound)
	check.OK(t, second(c.a.local.Get(c.ctx, c.id)))
	if names := c.a.network.Exported(); len(names) != 2 {
		t.Errorf("exported are %v", names)
	}
}

// TestMovedAndStaged: a volume that has moved, and was not taken over yet, cannot be used on its new node or on others until then: ErrUnavailable, and not
// as if it were missing.
func TestMovedAndStaged(t *testing.T) {
	w, a, b, v, _ := aboutToMove(t)
	b.stop()
	var stuck atomic.Bool
	stuck.Store(true)
	b.hook = func(operation string, _ blockdev.Ref) error {
		if operation == "SetLabels" && stuck.Load() {
			return errdefs.ErrUnavailable
		}
		return nil
	}
	s := w.flipped("v", b)
	w.start(b)
	w.claimFor(v.ID, b.name)
	_, err := b.uses.Get(w.ctx, v.ID)
	fails(t, err, errdefs.ErrUnavailable)
	generation := w.claimFor(v.ID, a.name)
	home := w.homeOf(b, a)
	for call, ask := range map[string]func() error{
		"Open":   func() error { return second(home.Open(w.ctx, v.ID, generation)) },
		"Record": func() error { return second(home.Record(w.ctx, v.ID, generation)) },
	} {
		if err := ask(); !errors.Is(err, errdefs.ErrUnavailable) {
			t.Errorf("%s: %v", call, err)
		}
	}
	w.claimFor(v.ID, "")
	stuck.Store(false)
	w.moved("v", a, b)
	w.claimFor(v.ID, b.name)
	check.OK(t, second(b.uses.Get(w.ctx, v.ID)))
	w.claimFor(v.ID, "")
	check.OK(t, s.Delete(w.ctx, v.ID))
}
