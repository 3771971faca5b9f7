package cluster_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"

	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/store"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// breaker is a connection to the API server whose watch of volumes can be broken. When it is mended, the history is gone (410 Gone), so that all is listed
// anew.
type breaker struct {
	next http.RoundTripper

	mu          sync.Mutex
	broken      bool
	expired     bool
	afterDelete bool // it breaks with the next deletion of a volume
	watches     []context.CancelFunc
}

func (b *breaker) wrap(next http.RoundTripper) http.RoundTripper {
	b.next = next
	return b
}

func (b *breaker) RoundTrip(r *http.Request) (*http.Response, error) {
	of, volumes := strings.CutPrefix(r.URL.Path, "/apis/ashlar.dev/v1alpha1/volumes")
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case volumes && r.Method == http.MethodDelete && b.afterDelete:
		b.cut()
	case volumes && of == "" && r.Method == http.MethodGet && b.broken:
		return nil, errors.New("the network is cut")
	case volumes && of == "" && r.URL.Query().Get("watch") != "" && r.URL.Query().Get("sendInitialEvents") == "":
		if b.expired {
			b.expired = false
			return &http.Response{StatusCode: http.StatusGone, Status: "410 Gone", Request: r, Header: http.Header{"Content-Type": {"application/json"}},
				Body: io.NopCloser(strings.NewReader(`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Expired","code":410}`))}, nil
		}
		fallthrough
	case volumes && of == "" && r.Method == http.MethodGet:
		ctx, cancel := context.WithCancel(r.Context())
		b.watches = append(b.watches, cancel)
		r = r.WithContext(ctx)
	}
	b.mu.Unlock()
	defer b.mu.Lock()
	return b.next.RoundTrip(r)
}

// cut breaks the watch. The caller holds the lock.
func (b *breaker) cut() {
	b.broken, b.expired, b.afterDelete = true, true, false
	for _, cancel := range b.watches {
		cancel()
	}
	b.watches = nil
}

func (b *breaker) mend() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.broken = false
}

// TestBrokenWatch: an object that a controller or an agent has written, and that was deleted while its watch was broken, makes no event, and is not waited
// for.
func TestBrokenWatch(t *testing.T) {
	t.Run("controller", func(t *testing.T) {
		w := newEnvironment(t)
		m := w.machine(nodeName)
		var watch breaker
		config := apitest.Get(t).Config("controller")
		config.Wrap(watch.wrap)
		s, err := store.New(config, store.Options{GoneGrace: grace, AbandonGrace: time.Hour, Driver: cluster.DefaultDriver})
		check.OK(t, err)
		w.run(s.Run)
		w.eventually("the store is ready", func() bool { return s.Ready(w.ctx) == nil })
		w.pooled(s, m)
		m.stop()
		watch.mu.Lock()
		watch.cut()
		watch.mu.Unlock()
		w.asked("it was asked for", func(ctx context.Context) error { return second(s.Create(ctx, spec("gone"))) },
			func() bool { return w.object("gone") != nil })
		check.OK(t, w.Delete(w.ctx, w.object("gone")))
		watch.mend()
		w.eventually("all can be listed", func() bool {
			ctx, cancel := context.WithTimeout(w.ctx, time.Second)
			defer cancel()
			return second(s.List(ctx, volume.ID{}, 0)) == nil
		})
		w.start(m)
		check.OK(t, second(s.Create(w.ctx, spec("v"))))
	})
	t.Run("agent", func(t *testing.T) {
		w := newEnvironment(t)
		s, _ := w.store() // its watch does not break
		var watch breaker
		wrap(t, func(c *rest.Config) { c.Wrap(watch.wrap) })
		m := w.machine(nodeName)
		w.pooled(s, m)
		v, err := s.Create(w.ctx, spec("v"))
		check.OK(t, err)
		watch.mu.Lock()
		watch.afterDelete = true
		watch.mu.Unlock()
		check.OK(t, s.Delete(w.ctx, v.ID))
		asked := make(chan error)
		go func() { asked <- second(s.Create(w.ctx, spec("v"))) }()
		w.eventually("it is asked for again", func() bool { return w.object("v") != nil })
		watch.mend()
		w.eventually("it is made", func() bool { o := w.object("v"); return o != nil && o.Status.Created != nil })
		check.OK(t, <-asked)
	})
}

// TestDeletionTakenBackUnheard: a volume is to be deleted while it is in use, and a person takes that back while the watch of its node is broken. Its bytes
// stay when it is in use no more.
func TestDeletionTakenBackUnheard(t *testing.T) {
	w := newEnvironment(t)
	s, _ := w.store() // its watch does not break
	var watch breaker
	wrap(t, func(c *rest.Config) { c.Wrap(watch.wrap) })
	m := w.machine(nodeName)
	w.pooled(s, m)
	v, err := s.Create(w.ctx, spec("v"))
	check.OK(t, err)
	device, err := m.local.Attach(w.ctx, v, nil)
	check.OK(t, err)
	w.edited(v.ID.Key, func(v *v1alpha1.Volume) { v.Spec.Delete = v.UID })
	w.eventually("it is in use", func() bool { f := w.object("v").Status.Failure; return f != nil && f.Reason == "InUse" })
	watch.mu.Lock()
	watch.cut()
	watch.mu.Unlock()
	w.edited(v.ID.Key, func(v *v1alpha1.Volume) { v.Spec.Delete = "" })
	check.OK(t, errors.Join(device.Close(), m.local.Detach(w.ctx, v.ID)))
	time.Sleep(3 * time.Second) // so that the agent can do what is wrong
	check.OK(t, second(m.local.Get(w.ctx, v.ID)))
	watch.mend()
	w.eventually("its node has heard of it", func() bool { return w.object("v").Status.Failure == nil })
	check.OK(t, second(m.local.Get(w.ctx, v.ID)))
	check.OK(t, s.Delete(w.ctx, v.ID))
	w.tally(m)
}

// lagging is a connection to the API server whose watches can be held back, by its lock.
type lagging struct {
	sync.Mutex
	seen []byte // what all watches have delivered
}

// saw reports whether a watch has delivered an object of a resourceVersion.
func (l *lagging) saw(version string) bool {
	l.Lock()
	defer l.Unlock()
	return bytes.Contains(l.seen, []byte(`"resourceVersion":"`+version+`"`))
}

func (l *lagging) wrap(next http.RoundTripper) http.RoundTripper {
	return roundTrip(func(r *http.Request) (*http.Response, error) {
		answer, err := next.RoundTrip(r)
		if err == nil && r.URL.Query().Get("watch") != "" {
			answer.Body = late{ReadCloser: answer.Body, by: l}
		}
		return answer, err
	})
}

type late struct {
	io.ReadCloser
	by *lagging
}

func (l late) Read(p []byte) (int, error) {
	n, err := l.ReadCloser.Read(p)
	l.by.Lock()
	defer l.by.Unlock()
	l.by.seen = append(l.by.seen, p[:n]...)
	return n, err
}

// hold holds the watches back until catchUp is called.
func (l *lagging) hold() (catchUp func()) {
	l.Lock()
	return sync.OnceFunc(l.Unlock)
}

// behind starts a store whose watches can be held back.
func (w *environment) behind() (*store.Store, *lagging) {
	w.Helper()
	lag := &lagging{}
	config := apitest.Get(w).Config("controller")
	config.Wrap(lag.wrap)
	s, err := store.New(config, store.Options{GoneGrace: grace, AbandonGrace: time.Hour, Driver: cluster.DefaultDriver})
	check.OK(w, err)
	w.run(s.Run)
	return s, lag
}

// knownTo makes a volume, and a snapshot and a group of another one (of), all of one name, and waits until a store that is behind knows them.
func (w *environment) knownTo(behind, s *store.Store, name string, of volume.ID) (volume.Volume, volume.Snapshot, volume.Group) {
	w.Helper()
	v, err := s.Create(w.ctx, spec(name))
	check.OK(w, err)
	snapshot, err := s.CreateSnapshot(w.ctx, name, of)
	check.OK(w, err)
	group, err := s.CreateGroup(w.ctx, name, []volume.ID{of})
	check.OK(w, err)
	w.eventually("it knows of all that", func() bool {
		return errors.Join(second(behind.Get(w.ctx, v.ID)), second(behind.GetSnapshot(w.ctx, snapshot.ID)), second(behind.GetGroup(w.ctx, group.ID))) == nil
	})
	return v, snapshot, group
}

// TestLaggingReplica: a controller whose watches are behind does not answer that something exists, or is done, that another one has deleted or changed
// since.
func TestLaggingReplica(t *testing.T) {
	w, m, s := newCluster(t)
	behind, lag := w.behind()
	w.pooled(behind, m)
	v, err := s.Create(w.ctx, spec("v"))
	check.OK(t, err)
	check.OK(t, s.Modify(w.ctx, v.ID, map[string]string{"readAheadKiB": "64"}))
	gone, snapshot, group := w.knownTo(behind, s, "gone", v.ID)
	catchUp := lag.hold()
	defer catchUp()
	check.OK(t, errors.Join(s.Delete(w.ctx, gone.ID), s.DeleteSnapshot(w.ctx, snapshot.ID), s.DeleteGroup(w.ctx, group.ID)))
	check.OK(t, s.Modify(w.ctx, v.ID, map[string]string{"readAheadKiB": "128"}))
	made, err := s.CreateGroup(w.ctx, "new", []volume.ID{v.ID})
	check.OK(t, err)
	check.OK(t, second(behind.GetGroup(w.ctx, made.ID)))
	calls := map[string]func(context.Context) error{
		"create":          func(ctx context.Context) error { return second(behind.Create(ctx, spec("gone"))) },
		"create snapshot": func(ctx context.Context) error { return second(behind.CreateSnapshot(ctx, "gone", v.ID)) },
		"create group":    func(ctx context.Context) error { return second(behind.CreateGroup(ctx, "gone", []volume.ID{v.ID})) },
		"delete group":    func(ctx context.Context) error { return behind.DeleteGroup(ctx, made.ID) },
		"modify": func(ctx context.Context) error {
			return behind.Modify(ctx, v.ID, map[string]string{"readAheadKiB": "64"})
		},
	}
	for what, call := range calls {
		if err := call(soon(t)); !errors.Is(err, errdefs.ErrUnavailable) {
			t.Errorf("%s: %v", what, err)
		}
	}
	catchUp()
	for what, call := range calls {
		if err := call(w.ctx); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	check.OK(t, errors.Join(second(m.local.Get(w.ctx, gone.ID)), second(m.local.GetSnapshot(w.ctx, snapshot.ID)), second(m.local.GetGroup(w.ctx, group.ID))))
	fails(t, second(m.local.GetGroup(w.ctx, made.ID)), errdefs.ErrNotFound)
	if have, err := m.local.Get(w.ctx, v.ID); err != nil || have.Mutable["readAheadKiB"] != "64" {
		t.Errorf("%+v, %v", have, err)
	}
	w.tally(m)
}

// TestLaggingReplicaDeletes: a controller whose watches are behind deletes what it is asked to, although another one has deleted it and made it anew
// since.
func TestLaggingReplicaDeletes(t *testing.T) {
	w, m, s := newCluster(t)
	behind, lag := w.behind()
	w.pooled(behind, m)
	v, err := s.Create(w.ctx, spec("v"))
	check.OK(t, err)
	anew, snapshot, group := w.knownTo(behind, s, "anew", v.ID)
	catchUp := lag.hold()
	defer catchUp()
	check.OK(t, errors.Join(s.Delete(w.ctx, anew.ID), s.DeleteSnapshot(w.ctx, snapshot.ID), s.DeleteGroup(w.ctx, group.ID)))
	check.OK(t, second(s.Create(w.ctx, spec("anew"))))
	check.OK(t, second(s.CreateSnapshot(w.ctx, "anew", v.ID)))
	check.OK(t, second(s.CreateGroup(w.ctx, "anew", []volume.ID{v.ID})))
	for what, call := range map[string]func() error{
		"volume":   func() error { return behind.Delete(soon(t), anew.ID) },
		"snapshot": func() error { return behind.DeleteSnapshot(soon(t), snapshot.ID) },
		"group":    func() error { return behind.DeleteGroup(soon(t), group.ID) },
	} {
		if err := call(); !errors.Is(err, errdefs.ErrUnavailable) { // its watch does not tell that it is gone
			t.Errorf("%s: %v", what, err)
		}
	}
	catchUp()
	check.OK(t, errors.Join(behind.Delete(w.ctx, anew.ID), behind.DeleteSnapshot(w.ctx, snapshot.ID), behind.DeleteGroup(w.ctx, group.ID)))
	check.OK(t, s.Delete(w.ctx, v.ID))
	if left := w.objects(); len(left) > 0 {
		t.Errorf("%d objects are left", len(left))
	}
	w.tally(m)
}

// TestLaggingReplicaDeletesAgain: a controller knows of a deletion, but not yet that it has ended, and that another one has made the volume anew since. A
// further deletion is for the new one.
func TestLaggingReplicaDeletesAgain(t *testing.T) {
	w, m, s := newCluster(t)
	behind, lag := w.behind()
	w.pooled(behind, m)
	v, err := s.Create(w.ctx, spec("v"))
	check.OK(t, err)
	anew, err := s.Create(w.ctx, spec("anew"))
	check.OK(t, err)
	snapshot, err := s.CreateSnapshot(w.ctx, "anew", v.ID)
	check.OK(t, err)
	w.eventually("it knows of all that", func() bool {
		return errors.Join(second(behind.Get(w.ctx, anew.ID)), second(behind.GetSnapshot(w.ctx, snapshot.ID))) == nil
	})
	m.stop()
	calls := []func(context.Context) error{
		func(ctx context.Context) error { return behind.Delete(ctx, anew.ID) },
		func(ctx context.Context) error { return behind.DeleteSnapshot(ctx, snapshot.ID) },
	}
	for _, call := range calls {
		fails(t, call(soon(t)), errdefs.ErrUnavailable)
	}
	catchUp := lag.hold()
	defer catchUp()
	w.start(m)
	check.OK(t, errors.Join(s.Delete(w.ctx, anew.ID), s.DeleteSnapshot(w.ctx, snapshot.ID)))
	check.OK(t, errors.Join(second(s.Create(w.ctx, spec("anew"))), second(s.CreateSnapshot(w.ctx, "anew", v.ID))))
	answers := make(chan error, len(calls))
	for _, call := range calls {
		go func() { answers <- call(w.ctx) }()
	}
	time.Sleep(500 * time.Millisecond)
	catchUp()
	check.OK(t, errors.Join(<-answers, <-answers))
	check.OK(t, s.Delete(w.ctx, v.ID))
	if left := w.objects(); len(left) > 0 {
		t.Errorf("%d objects are left", len(left))
	}
	w.tally(m)
}

// TestLaggingReplicaRefuses: a controller whose watches are behind does not refuse a call because of a claim that another one has released since.
func TestLaggingReplicaRefuses(t *testing.T) {
	w, m, s := newCluster(t)
	behind, lag := w.behind()
	w.pooled(behind, m)
	ids := map[string]volume.ID{}
	for _, name := range []string{"deleted", "claimed"} {
		v, err := s.Create(w.ctx, spec(name))
		check.OK(t, err)
		check.OK(t, second(s.Claim(w.ctx, v.ID, volume.Claim{Node: nodeName, Mode: "m", ReadOnly: true})))
		w.eventually("it knows of the claim", func() bool {
			v, err := behind.Get(w.ctx, v.ID)
			return err == nil && v.Claim.ReadOnly
		})
		ids[name] = v.ID
	}
	catchUp := lag.hold()
	defer catchUp()
	for _, id := range ids {
		check.OK(t, s.Release(w.ctx, id, nodeName))
	}
	check.OK(t, second(behind.Claim(w.ctx, ids["claimed"], volume.Claim{Node: nodeName, Mode: "m"})))
	answer := make(chan error, 1)
	go func() { answer <- behind.Delete(w.ctx, ids["deleted"]) }()
	w.eventually("it is deleted", func() bool { return len(answer) > 0 || w.object("deleted") == nil })
	catchUp()
	check.OK(t, <-answer)
	fails(t, s.Delete(w.ctx, ids["claimed"]), errdefs.ErrInUse)
	w.tally(m)
}

// ending is the body of a watch that ends properly (io.EOF) when its context does.
type ending struct {
	io.ReadCloser
	ctx context.Context
}

func (e ending) Read(p []byte) (int, error) {
	n, err := e.ReadCloser.Read(p)
	if e.ctx.Err() != nil {
		return 0, io.EOF
	}
	return n, err
}

// tooMany returns the answer of an API server that is too busy.
func tooMany(q *http.Request) *http.Response {
	return &http.Response{StatusCode: http.StatusTooManyRequests, Status: "429 Too Many Requests", Request: q, Header: http.Header{"Content-Type": {"application/json"}},
		Body: io.NopCloser(strings.NewReader(`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"TooManyRequests","code":429}`))}
}

// TestBusyServer: a watch that the API server refuses, as it is too busy, goes on later from where it was. Nothing is listed anew, which would make the
// server busier.
func TestBusyServer(t *testing.T) {
	w := newEnvironment(t)
	m := w.machine(nodeName)
	var busy atomic.Bool
	var refused, whole atomic.Int32
	var mu sync.Mutex
	var open []context.CancelFunc
	wrap(t, func(c *rest.Config) {
		c.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return roundTrip(func(q *http.Request) (*http.Response, error) {
				query := q.URL.Query()
				if q.Method != http.MethodGet || !strings.HasSuffix(q.URL.Path, "/volumes") {
					return next.RoundTrip(q)
				}
				if busy.Load() {
					if refused.Add(1); query.Get("fieldSelector") != "metadata.name=-" && (!query.Has("watch") || query.Has("sendInitialEvents")) {
						whole.Add(1)
					}
					return tooMany(q), nil
				}
				if query.Has("watch") {
					ctx, cancel := context.WithCancel(q.Context())
					mu.Lock()
					open = append(open, cancel)
					mu.Unlock()
					answer, err := next.RoundTrip(q.WithContext(ctx))
					if err == nil {
						answer.Body = ending{ReadCloser: answer.Body, ctx: ctx}
					}
					return answer, err
				}
				return next.RoundTrip(q)
			})
		})
	})
	s, _ := w.store()
	w.pooled(s, m)
	// client-go lists anew after a watch that ends right after it began, whatever the error.
	time.Sleep(1500 * time.Millisecond)
	check.OK(t, second(s.Create(w.ctx, spec("v"))))
	busy.Store(true)
	mu.Lock()
	for _, cancel := range open {
		cancel()
	}
	mu.Unlock()
	w.eventually("it is refused again", func() bool { return refused.Load() >= 3 })
	busy.Store(false)
	if n := whole.Load(); n > 0 {
		t.Errorf("%d of %d requests were for all objects", n, refused.Load())
	}
	w.again("a volume is made", func(ctx context.Context) error { return second(s.Create(ctx, spec("new"))) })
}

// TestConflictsBehind: an agent whose watch is behind does not repeat a write of an object that somebody else has changed again and again, and goes on as
// soon as it knows of the change.
func TestConflictsBehind(t *testing.T) {
	w := newEnvironment(t)
	s, _ := w.store()
	var lag lagging
	var requests atomic.Int32
	wrap(t, func(c *rest.Config) {
		c.Wrap(lag.wrap)
		c.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return roundTrip(func(q *http.Request) (*http.Response, error) {
				if strings.Contains(q.URL.Path, "/volumes/") {
					requests.Add(1)
				}
				return next.RoundTrip(q)
			})
		})
	})
	hook, begun, release := creationHeld(t, "v")
	defer release()
	m := w.machineWith(nodeName, hook)
	w.pooled(s, m)
	asked := make(chan error, 1)
	go func() { asked <- second(s.Create(w.ctx, spec("v"))) }()
	w.comes(begun, "it is being made")
	catchUp := lag.hold()
	defer catchUp()
	o := w.object("v")
	before := o.DeepCopy()
	o.Labels = map[string]string{"changed": "true"}
	check.OK(t, w.Patch(w.ctx, o, client.MergeFrom(before)))
	release()
	w.eventually("it was tried", func() bool { return requests.Load() >= 2 })
	time.Sleep(3 * time.Second)
	// Each try is a write, and a read whether the object still exists; there are 4 tries at most.
	if n := requests.Load(); n > 10 {
		t.Errorf("%d requests", n)
	}
	catchUp()
	check.OK(t, <-asked)
	w.tally(m)
}
