package cluster_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"

	"golang.org/x/sys/unix"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/store"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// Times of a heartbeat that are short enough for tests, and long enough for a slow machine.
const (
	leases      = apitest.Namespace
	heartbeat   = 500 * time.Millisecond
	silentAfter = 12 * time.Second
	// briefly is a shorter silentAfter, for tests that may take an agent to be silent that is not.
	briefly = 4 * time.Second
)

// listening starts a store that looks at heartbeats.
func (w *environment) listening(silentAfter time.Duration) *store.Store {
	w.Helper()
	s, err := store.New(wrapped(apitest.Get(w).Config("controller")), store.Options{GoneGrace: grace, AbandonGrace: time.Hour, Driver: cluster.DefaultDriver,
		Namespace: leases, SilentAfter: silentAfter, Agents: w.agents})
	check.OK(w, err)
	w.run(s.Run)
	w.eventually("the store is ready", func() bool { return s.Ready(w.ctx) == nil })
	return s
}

// beating starts a machine whose agent has a heartbeat, also after it is started again (start).
func (w *environment) beating(name string) *machine {
	w.Helper()
	m := w.machine(name)
	m.every = heartbeat
	m.stop()
	w.start(m)
	return m
}

// created creates a volume as the CO does, which repeats a call that fails, as when a machine is slow and its agent not heard.
func (w *environment) created(s *store.Store, one volume.Spec) (v volume.Volume) {
	w.Helper()
	w.eventually("it is made: "+one.Name, func() (made bool) {
		var err error
		if v, err = s.Create(w.ctx, one); err != nil {
			w.Log(err)
			time.Sleep(100 * time.Millisecond)
		}
		return err == nil
	})
	return v
}

func (w *environment) available(s *store.Store, node string) int64 {
	w.Helper()
	c, err := s.Capacity(w.ctx, "", volume.NotEncrypted, node)
	check.OK(w, err)
	return c.Available
}

// TestHeartbeat: a node that is ready, and whose agent is down, offers no room, whatever its Pools say, and is not asked for anything; the health of its
// volumes is only degraded. When the agent is back, so is the room. The clock of the node does not matter.
func TestHeartbeat(t *testing.T) {
	w := newEnvironment(t)
	m := w.beating(nodeName)
	s := w.listening(briefly)
	w.pooled(s, m)
	v := w.created(s, spec("v"))
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: leases, Name: "node." + nodeName}}
	w.eventually("the Lease is there", func() bool { return w.Get(w.ctx, client.ObjectKeyFromObject(lease), lease) == nil })
	if len(lease.OwnerReferences) != 1 || lease.OwnerReferences[0].Name != nodeName {
		t.Errorf("the Lease is owned by %+v", lease.OwnerReferences)
	}
	m.stop()
	w.eventually("its room is gone", func() bool { return w.available(s, nodeName) == 0 })
	one := spec("new")
	one.Nodes = []string{nodeName}
	fails(t, second(s.Create(w.ctx, one)), errdefs.ErrNoSpace)
	if w.object("new") != nil {
		t.Error("an object was made for a node whose agent is down")
	}
	fails(t, second(s.Expand(w.ctx, v.ID, volume.Range{Required: 2 * mib})), errdefs.ErrUnavailable)
	if problems, err := s.Health(w.ctx, v.ID); err != nil || len(problems) != 1 || problems[0].Reason != "AgentSilent" || problems[0].Severity != blockdev.Degraded {
		t.Errorf("health %v, %v", problems, err)
	}
	for _, clock := range []time.Duration{-1000 * time.Hour, 1000 * time.Hour} {
		w.eventually("it is heard", func() bool {
			check.OK(t, w.Get(w.ctx, client.ObjectKeyFromObject(lease), lease))
			renewed := metav1.NewMicroTime(time.Now().Add(clock))
			lease.Spec.RenewTime = &renewed
			check.OK(t, w.Update(w.ctx, lease))
			return w.available(s, nodeName) > 0
		})
		w.eventually("and then is not any more", func() bool { return w.available(s, nodeName) == 0 })
	}
	check.OK(t, w.Delete(w.ctx, lease)) // as Kubernetes does when the Node is deleted
	w.start(m)
	w.eventually("its room is back", func() bool { return w.available(s, nodeName) > 0 })
	w.created(s, one)
	w.eventually("the Lease is there again", func() bool { return w.Get(w.ctx, client.ObjectKeyFromObject(lease), lease) == nil })
	w.tally(m)
}

// TestLeaseEdited: an agent whose Lease was edited by somebody else writes it again, and does not count as silent.
func TestLeaseEdited(t *testing.T) {
	w := newEnvironment(t)
	m := w.beating(nodeName)
	s := w.listening(silentAfter)
	w.pooled(s, m)
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: leases, Name: "node." + nodeName}}
	edited := metav1.NewMicroTime(time.Now().Add(time.Hour))
	w.eventually("it is edited", func() bool {
		if w.Get(w.ctx, client.ObjectKeyFromObject(lease), lease) != nil {
			return false // not there yet
		}
		holder := "somebody"
		lease.Labels, lease.Spec = nil, coordinationv1.LeaseSpec{HolderIdentity: &holder, RenewTime: &edited}
		err := w.Update(w.ctx, lease)
		if !apierrors.IsConflict(err) {
			check.OK(t, err)
		}
		return err == nil
	})
	w.eventually("it is put right", func() bool {
		check.OK(t, w.Get(w.ctx, client.ObjectKeyFromObject(lease), lease))
		return lease.Spec.RenewTime.Time.Before(edited.Add(-time.Minute))
	})
	if *lease.Spec.HolderIdentity != nodeName || len(lease.Labels) == 0 {
		t.Errorf("the Lease is %+v", lease)
	}
	w.eventually("the agent is heard", func() bool { return w.available(s, nodeName) > 0 })
}

// TestTakenBack: a volume was asked of a node that went down before it began, in whatever way. Another node can make it at once, and when the first one is
// back, nothing is left there.
func TestTakenBack(t *testing.T) {
	for what, down := range map[string]func(w *environment, m *machine){
		"not ready": func(w *environment, m *machine) { m.stop(); w.node(m.name, false) },
		"silent":    func(_ *environment, m *machine) { m.stop() },
	} {
		t.Run(what, func(t *testing.T) {
			w := newEnvironment(t)
			a, b := w.beating("node-a"), w.beating("node-b")
			s := w.listening(silentAfter)
			w.pooled(s, a)
			w.pooled(s, b)
			a.stop()
			asked := make(chan error)
			one := spec("v")
			one.Nodes = []string{"node-a"}
			go func() { asked <- second(s.Create(w.ctx, one)) }()
			w.eventually("it was asked for", func() bool { return w.object("v") != nil })
			down(w, a)
			fails(t, <-asked, errdefs.ErrNoSpace)
			if w.object("v") != nil {
				t.Error("the object is still there")
			}
			one.Nodes = []string{"node-b"}
			if v := w.created(s, one); v.Node != "node-b" {
				t.Errorf("it is on %s", v.Node)
			}
			w.node("node-a", true)
			w.start(a)
			one = spec("another")
			one.Nodes = []string{"node-a"}
			w.created(s, one)
			w.tally(a)
			w.tally(b)
		})
	}
}

// TestTakenBackToo: a node has made a volume, and went down before it reported that. The volume can be made on another node, without waiting for the first
// one, also if a controller had asked to delete it, and died. When the first node is back, it removes what it had made.
func TestTakenBackToo(t *testing.T) {
	for what, goes := range map[string]bool{"stays": false, "goes": true} {
		t.Run(what, func(t *testing.T) {
			w := newEnvironment(t)
			a, b := w.machine("node-a"), w.machine("node-b")
			s := w.knowing(a, b)
			a.stop()
			one := spec("v")
			one.Nodes = []string{"node-a"}
			w.asked("its object is there", func(ctx context.Context) error { return second(s.Create(ctx, one)) }, func() bool { return w.object("v") != nil })
			check.OK(t, second(a.local.Create(w.ctx, one))) // as if its agent did that just before it died
			if goes {
				w.edited(volume.KeyOf("v"), func(v *v1alpha1.Volume) { v.Spec.Delete = v.UID })
			}
			w.node("node-a", false)
			one.Nodes = []string{"node-b"}
			w.eventually("another node may be chosen", func() bool { return errors.Is(second(s.Create(soon(t), one)), errdefs.ErrNoSpace) })
			if v := w.created(s, one); v.Node != "node-b" {
				t.Errorf("it is on %s", v.Node)
			}
			w.node("node-a", true)
			w.start(a)
			w.eventually("what it had begun is gone", func() bool {
				_, err := a.local.Get(w.ctx, volume.ID{Kind: blockdev.Volume, Pool: "default", Key: volume.KeyOf("v")})
				return errors.Is(err, errdefs.ErrNotFound)
			})
			w.tally(b)
		})
	}
}

// TestBegunAfterAll: a node has made a volume, and could not report that. When it finds that another node was asked for it, it removes what it made, also
// if its agent died meanwhile. A volume that was formatted stays.
func TestBegunAfterAll(t *testing.T) {
	for what, dies := range map[string]bool{"goes on": false, "dies": true} {
		t.Run(what, func(t *testing.T) {
			w := newEnvironment(t)
			a, b := w.machine("node-a"), w.machine("node-b")
			s := w.knowing(a, b)
			hook, begun, release := creationHeld(t, "v")
			a.stop()
			if !dies {
				a.hook = hook
				w.start(a)
			}
			asked := make(chan error)
			one := spec("v")
			one.Nodes = []string{"node-a"}
			go func() { asked <- second(s.Create(w.ctx, one)) }()
			if dies {
				w.eventually("it was asked for", func() bool { return w.object("v") != nil })
				check.OK(t, second(a.local.Create(w.ctx, one))) // as if its agent did that just before it died
				check.OK(t, second(a.local.Create(w.ctx, spec("used"))))
				check.OK(t, a.local.SetFormat(w.ctx, volume.ID{Kind: blockdev.Volume, Pool: "default", Key: volume.KeyOf("used")}, volume.Format{State: volume.Formatted, Type: "ext4"}))
			} else {
				w.comes(begun, "it is being made")
			}
			w.node("node-a", false)
			fails(t, <-asked, errdefs.ErrNoSpace)
			one.Nodes = []string{"node-b"}
			v, err := s.Create(w.ctx, one)
			check.OK(t, err)
			if dies {
				used := spec("used")
				used.Nodes = []string{"node-b"}
				check.OK(t, second(s.Create(w.ctx, used)))
				w.start(a)
			} else {
				release()
			}
			w.eventually("what was made on node-a is gone", func() bool {
				_, err := a.local.Get(w.ctx, v.ID)
				return errors.Is(err, errdefs.ErrNotFound)
			})
			w.node("node-a", true)
			check.OK(t, second(b.local.Get(w.ctx, v.ID)))
			if dies {
				check.OK(t, second(a.local.Get(w.ctx, volume.ID{Kind: blockdev.Volume, Pool: "default", Key: volume.KeyOf("used")})))
				return
			}
			w.tally(a)
			w.tally(b)
		})
	}
}

// TestNodeDeletedUnderAgent: the Pools of a node whose Node was deleted stay while its agent is heard, and are deleted when it is silent.
func TestNodeDeletedUnderAgent(t *testing.T) {
	w := newEnvironment(t)
	m := w.beating(nodeName)
	s := w.listening(silentAfter)
	w.pooled(s, m)
	var before, now v1alpha1.Pool
	key := client.ObjectKey{Name: overview.PoolName(nodeName, "default")}
	check.OK(t, w.Get(w.ctx, key, &before))
	gone := w.machine("gone") // it has no heartbeat
	w.pooled(s, gone)
	gone.stop()
	check.OK(t, w.DeleteAllOf(w.ctx, &corev1.Node{}))
	there := func(node string) bool {
		return w.Get(w.ctx, client.ObjectKey{Name: overview.PoolName(node, "default")}, &now) == nil
	}
	w.eventually("the Pools of a node without an agent are gone", func() bool { return !there("gone") })
	if !there(nodeName) || now.UID != before.UID {
		t.Errorf("the Pool was %s and is %s", before.UID, now.UID)
	}
	m.stop()
	w.eventually("its Pools are gone", func() bool { return !there(nodeName) })
}

// line is the network to the API server, which can be cut. Then connections are refused, or with waits they wait, as with some load balancers.
type line struct {
	waits bool
	mu    sync.Mutex
	cut   bool
	open  []net.Conn
}

func (l *line) dial(ctx context.Context, network, address string) (net.Conn, error) {
	for {
		if c, err := l.try(ctx, network, address); !l.waits || !errors.Is(err, unix.ECONNREFUSED) {
			return c, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func (l *line) try(ctx context.Context, network, address string) (net.Conn, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cut {
		return nil, unix.ECONNREFUSED
	}
	c, err := (&net.Dialer{}).DialContext(ctx, network, address)
	if err == nil {
		l.open = append(l.open, c)
	}
	return c, err
}

func (l *line) set(cut bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cut = cut
	for _, c := range l.open {
		_ = c.Close()
	}
	l.open = nil
}

// creationHeld returns a hook (machine.hook) that blocks the creation of a volume. begun is closed when the creation begins; it goes on after release.
func creationHeld(t testing.TB, name string) (hook func(operation string, ref blockdev.Ref) error, begun <-chan struct{}, release func()) {
	began, let := make(chan struct{}), make(chan struct{})
	begin := sync.OnceFunc(func() { close(began) })
	return func(operation string, ref blockdev.Ref) error {
		if operation == "Create" && ref.Key == volume.KeyOf(name) {
			begin()
			held(t, let)
		}
		return nil
	}, began, sync.OnceFunc(func() { close(let) })
}

// TestServerAway: while the API server is down, no agent is heard, and when it is back, each has the whole time again: the nodes keep their room, and what
// they were asked for.
func TestServerAway(t *testing.T) {
	w := newEnvironment(t)
	l := &line{}
	answered := make(chan struct{}) // closed when the creation of an object is answered in full
	tell := sync.OnceFunc(func() { close(answered) })
	wrap(t, func(c *rest.Config) {
		c.Dial = l.dial
		c.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return roundTrip(func(q *http.Request) (*http.Response, error) {
				answer, err := next.RoundTrip(q)
				if err != nil || q.Method != http.MethodPost || !strings.HasSuffix(q.URL.Path, "/volumes") {
					return answer, err
				}
				body, err := io.ReadAll(answer.Body)
				answer.Body = io.NopCloser(bytes.NewReader(body))
				tell()
				return answer, err
			})
		})
	})
	hook, begun, release := creationHeld(t, "v")
	defer release()
	m := w.beating(nodeName)
	m.stop()
	m.hook = hook
	w.start(m)
	s := w.listening(silentAfter)
	w.pooled(s, m)
	w.eventually("the agent is heard", func() bool { return w.available(s, nodeName) > 0 })
	ctx, cancel := context.WithCancel(w.ctx)
	defer cancel()
	asked := make(chan error, 1)
	go func() { asked <- second(s.Create(ctx, spec("v"))) }()
	w.comes(begun, "it is being made")
	<-answered // the node may be faster than the answer to the store
	l.set(true)
	back := time.Now().Add(silentAfter + silentAfter/4)
	for end := back.Add(silentAfter / 2); time.Now().Before(end); time.Sleep(heartbeat / 2) {
		if time.Now().After(back) {
			l.set(false)
			back = end
		}
		if c, err := s.Capacity(w.ctx, "", volume.NotEncrypted, nodeName); err == nil && c.Available == 0 {
			t.Fatal("the node has no room any more")
		}
		if w.object("v") == nil {
			t.Fatal("what the node was asked for was taken back")
		}
	}
	release()
	check.OK(t, <-asked)
	w.tally(m)
}

// TestServerHangs: the API server hangs for longer than an agent may be silent, and no connection breaks. When it answers again, what an agent was asked
// for is not taken back before the agent had time to be heard.
func TestServerHangs(t *testing.T) {
	w := newEnvironment(t)
	var pausing atomic.Bool // the agent is between two tries to renew its Lease
	wrap(t, func(c *rest.Config) {
		c.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return roundTrip(func(q *http.Request) (*http.Response, error) {
				if pausing.Load() && q.Method == http.MethodPut {
					return nil, errors.New("it hangs")
				}
				return next.RoundTrip(q)
			})
		})
	})
	hook, begun, release := creationHeld(t, "v")
	defer release()
	m := w.beating(nodeName)
	m.stop()
	m.hook = hook
	w.start(m)
	s := w.listening(silentAfter)
	w.pooled(s, m)
	w.eventually("the agent is heard", func() bool { return w.available(s, nodeName) > 0 })
	ctx, cancel := context.WithCancel(w.ctx)
	defer cancel()
	asked := make(chan error, 1)
	go func() { asked <- second(s.Create(ctx, spec("v"))) }()
	w.comes(begun, "it is being made")
	thaw := apitest.Get(t).Freeze(t)
	pausing.Store(true)
	time.Sleep(silentAfter + heartbeat)
	thaw()
	time.Sleep(heartbeat / 2)
	pausing.Store(false)
	var err error
	select {
	case err = <-asked: // the store has heard nothing for too long, and cannot tell whether the agent is down
	case <-time.After(silentAfter): // the agent was faster than the store
		cancel()
		err = <-asked
	}
	if !errors.Is(err, errdefs.ErrUnavailable) && !errors.Is(err, context.Canceled) {
		t.Errorf("while nobody can tell: %v", err)
	}
	if w.object("v") == nil {
		t.Error("it was taken back")
	}
	release()
	w.created(s, spec("v"))
	w.tally(m)
}

// TestServerBusy: while the API server is too busy to answer requests for the Leases, the agents do not count as silent: the nodes keep their room.
func TestServerBusy(t *testing.T) {
	w := newEnvironment(t)
	m := w.beating(nodeName)
	var busy atomic.Bool
	var refused atomic.Int32
	var mu sync.Mutex
	var open []context.CancelFunc
	wrap(t, func(c *rest.Config) {
		c.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return roundTrip(func(q *http.Request) (*http.Response, error) {
				if !strings.HasSuffix(q.URL.Path, "/leases") {
					return next.RoundTrip(q)
				}
				if busy.Load() {
					refused.Add(1)
					return tooMany(q), nil
				}
				ctx, cancel := context.WithCancel(q.Context())
				mu.Lock()
				open = append(open, cancel)
				mu.Unlock()
				answer, err := next.RoundTrip(q.WithContext(ctx))
				if err == nil {
					answer.Body = ending{ReadCloser: answer.Body, ctx: ctx}
				}
				return answer, err
			})
		})
	})
	s := w.listening(briefly)
	w.pooled(s, m)
	w.eventually("the agent is heard", func() bool { return w.available(s, nodeName) > 0 })
	_, of := w.viewer(s, apitest.Admin)
	left := func() bool { // reports whether a viewer says that all it shows may be old
		o, _ := of("")
		return o.Blind && slices.ContainsFunc(o.Missing, func(one string) bool { return strings.Contains(one, "may be old") })
	}
	w.eventually("all is shown", func() bool { o, _ := of(""); return len(o.Missing) == 0 && !o.Blind })
	busy.Store(true)
	mu.Lock()
	for _, cancel := range open {
		cancel()
	}
	mu.Unlock()
	w.eventually("it is refused", func() bool { return refused.Load() > 0 })
	w.eventually("it is shown that all may be old", left)
	for end := time.Now().Add(2 * briefly); time.Now().Before(end); time.Sleep(heartbeat / 2) {
		if w.available(s, nodeName) == 0 {
			t.Fatal("the node has no room any more")
		}
	}
	busy.Store(false)
	w.eventually("it is new again", func() bool { return !left() })
	m.stop()
	w.eventually("that the agent is down is heard again", func() bool { return w.available(s, nodeName) == 0 })
}

// TestIdleAgent: an agent that has nothing to do sends no requests to the API server but a write of its Lease for each heartbeat.
func TestIdleAgent(t *testing.T) {
	w := newEnvironment(t)
	m := w.machine(nodeName)
	m.stop()
	var count counter
	wrap(t, func(c *rest.Config) { c.Wrap(count.wrap) })
	m.every = 500 * time.Millisecond
	w.start(m)
	beats := func() int {
		count.mu.Lock()
		defer count.mu.Unlock()
		return count.leases
	}
	w.eventually("it has settled", func() bool { return beats() >= 8 })
	w.eventually("it has been idle for a while", func() bool {
		count.take()
		began := beats()
		w.eventually("it goes on", func() bool {
			m.agent.Samples() // a scrape of its metrics costs no request
			return beats() >= began+8
		})
		writes, reads, pools := count.take()
		if writes+reads+pools > 0 { // a Lease that could not be written in time is read
			t.Logf("%d writes, %d reads, %d reports of pools", writes, reads, pools)
		}
		return writes+reads+pools == 0
	})
}
