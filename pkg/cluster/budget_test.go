package cluster_test

import (
	"fmt"
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
	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/agent"
	"github.com/ashlar-csi/ashlar/pkg/cluster/store"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// counter counts the requests of a client, apart from watches and lists.
type counter struct {
	mu            sync.Mutex
	writes, reads int
	pools         int // writes of Pool objects
	leases        int // writes of Leases
}

func (c *counter) wrap(next http.RoundTripper) http.RoundTripper {
	return roundTrip(func(r *http.Request) (*http.Response, error) {
		c.mu.Lock()
		switch {
		case r.Method != http.MethodGet && strings.Contains(r.URL.Path, "/pools"):
			c.pools++
		case r.Method != http.MethodGet && strings.Contains(r.URL.Path, "/leases"):
			c.leases++
		case r.Method != http.MethodGet:
			c.writes++
		case len(strings.Split(r.URL.Path, "/")) > 5: // of one object
			c.reads++
		}
		c.mu.Unlock()
		return next.RoundTrip(r)
	})
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func (c *counter) take() (writes, reads, pools int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	writes, reads, pools = c.writes, c.reads, c.pools
	c.writes, c.reads, c.pools = 0, 0, 0
	return writes, reads, pools
}

// comes waits until there were so many requests, for a minute at most.
func (c *counter) comes(writes, reads int) {
	fewer := func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.writes < writes || c.reads < reads
	}
	for end := time.Now().Add(time.Minute); fewer() && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
	}
}

// TestBudget: each call costs the requests that docs/cluster.md says, and pools are not reported more often than it says.
func TestBudget(t *testing.T) {
	w := newEnvironment(t)
	var count counter
	wrap(t, func(c *rest.Config) { c.Wrap(count.wrap) })
	m := w.begin(&machine{name: nodeName, with: func(o *agent.Options) { o.ProgressEvery = 0 }}) // the usual time, as each report of progress costs a write
	s, err := store.New(wrapped(apitest.Get(t).Config("controller")), store.Options{GoneGrace: grace, AbandonGrace: time.Hour, Driver: cluster.DefaultDriver})
	check.OK(t, err)
	w.run(s.Run)
	w.eventually("the store is ready", func() bool { return s.Ready(w.ctx) == nil })
	w.pooled(s, m)
	var v volume.Volume
	var snapshot volume.Snapshot
	time.Sleep(1500 * time.Millisecond) // the pools are reported after they were made
	count.take()
	started, pools := time.Now(), 0
	for _, step := range []struct {
		what          string
		writes, reads int
		do            func() error
	}{
		{"create", 3, 0, func() (err error) { v, err = s.Create(w.ctx, spec("v")); return err }},
		{"create again", 0, 1, func() error { return second(s.Create(w.ctx, spec("v"))) }},
		{"get", 0, 0, func() error { return second(s.Get(w.ctx, v.ID)) }},
		{"list", 0, 0, func() error { return second(s.List(w.ctx, volume.ID{}, 0)) }},
		{"claim", 1, 0, func() error { return second(s.Claim(w.ctx, v.ID, volume.Claim{Node: nodeName, Mode: "m"})) }},
		{"claim again", 0, 1, func() error { return second(s.Claim(w.ctx, v.ID, volume.Claim{Node: nodeName, Mode: "m"})) }},
		{"expand", 2, 0, func() error { return second(s.Expand(w.ctx, v.ID, volume.Range{Required: 2 * mib})) }},
		{"modify", 2, 0, func() error { return s.Modify(w.ctx, v.ID, map[string]string{"readAheadKiB": "64"}) }},
		{"modify again", 0, 1, func() error { return s.Modify(w.ctx, v.ID, map[string]string{"readAheadKiB": "64"}) }},
		{"snapshot", 3, 0, func() (err error) { snapshot, err = s.CreateSnapshot(w.ctx, "s", v.ID); return err }},
		{"snapshot again", 0, 1, func() error { return second(s.CreateSnapshot(w.ctx, "s", v.ID)) }},
		{"group", 3, 0, func() error { return second(s.CreateGroup(w.ctx, "g", []volume.ID{v.ID})) }},
		{"delete group", 2, 0, func() error { return s.DeleteGroup(w.ctx, volume.GroupID{Key: volume.KeyOf("g")}) }},
		{"delete snapshot", 2, 0, func() error { return s.DeleteSnapshot(w.ctx, snapshot.ID) }},
		{"release", 1, 0, func() error { return s.Release(w.ctx, v.ID, nodeName) }},
		{"delete", 2, 0, func() error { return s.Delete(w.ctx, v.ID) }},
	} {
		began := time.Now()
		check.OK(t, step.do())
		took := time.Since(began)
		count.comes(step.writes, step.reads) // the call may end before the agent's last request
		time.Sleep(50 * time.Millisecond)
		writes, reads, reports := count.take()
		pools += reports
		t.Logf("%-16s %d writes, %d reads, %s", step.what, writes, reads, took.Round(100*time.Microsecond))
		if writes != step.writes || reads != step.reads {
			t.Errorf("%s: %d writes and %d reads, want %d and %d", step.what, writes, reads, step.writes, step.reads)
		}
	}
	last := time.Now()
	w.eventually("two seconds without any request", func() bool {
		if writes, reads, reports := count.take(); writes+reads+reports > 0 {
			t.Logf("at rest: %d writes, %d reads, %d reports", writes, reads, reports)
			pools += reports
			last = time.Now()
		}
		return time.Since(last) >= 2*time.Second
	})
	// Each of the two pools is reported once a second at most, and once more at each end.
	if most := 2 * (2 + int(last.Sub(started)/time.Second)); pools > most {
		t.Errorf("the pools were reported %d times, %d are the most", pools, most)
	}
}

// TestStraysBudget: an agent whose pool has many volumes without objects does not ask the API server for each of them whenever something changes, and
// never for ephemeral ones.
func TestStraysBudget(t *testing.T) {
	w := newEnvironment(t)
	m := w.machine(nodeName)
	const strays = 30
	for i := range strays {
		check.OK(t, second(m.local.Create(w.ctx, spec(fmt.Sprint("stray", i)))))
	}
	for i := range strays {
		own := spec(fmt.Sprint("own", i))
		own.Ephemeral = t.TempDir() + "/x"
		check.OK(t, second(m.local.Create(w.ctx, own)))
	}
	m.stop()
	var count counter
	wrap(t, func(c *rest.Config) { c.Wrap(count.wrap) })
	w.start(m)
	w.strays("default", strays)
	if _, reads, _ := count.take(); reads >= 2*strays {
		t.Errorf("%d reads at the start", reads)
	}
	s, _ := w.store()
	w.pooled(s, m)
	count.take()
	for i := range 4 {
		v, err := s.Create(w.ctx, spec(fmt.Sprint("v", i)))
		check.OK(t, err)
		w.eventually("the pool is reported", func() bool {
			p := &v1alpha1.Pool{}
			check.OK(t, w.Get(w.ctx, client.ObjectKey{Name: overview.PoolName(nodeName, "default")}, p))
			return !p.Status.Measured.Time.Before(v.Created)
		})
	}
	if _, reads, _ := count.take(); reads >= strays {
		t.Errorf("%d reads", reads)
	}
	w.strays("default", strays)
	w.adopt("default", "all")
	w.strays("default", 0)
	check.OK(t, w.Delete(w.ctx, w.object("stray1")))
	w.strays("default", 1)
}

// TestCensusBudget: to find out for several volumes, one after the other, whether they are abandoned does not take a list of all PersistentVolumes for
// each.
func TestCensusBudget(t *testing.T) {
	w, _, s := newCluster(t)
	var lists atomic.Int32
	wrap(t, func(c *rest.Config) {
		c.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return roundTrip(func(q *http.Request) (*http.Response, error) {
				if strings.HasSuffix(q.URL.Path, "/persistentvolumes") {
					lists.Add(1)
				}
				return next.RoundTrip(q)
			})
		})
	})
	const volumes, old = 12, 12 * time.Second
	var ids []volume.ID
	for i := range volumes {
		one := spec(fmt.Sprint("pvc-", i))
		one.For = volume.Requester{Namespace: "default", Name: "claim"}
		v, err := s.Create(w.ctx, one)
		check.OK(t, err)
		w.persistentVolume(fmt.Sprint("pv-census-", i), cluster.DefaultDriver, v.ID)
		o := w.object(one.Name)
		before := o.DeepCopy()
		o.Spec.Claim = &v1alpha1.Claim{Node: nodeName, Mode: "m"}
		check.OK(t, w.Patch(w.ctx, o, client.MergeFrom(before)))
		ids = append(ids, v.ID)
	}
	time.Sleep(old + time.Second) // as long as they are claimed, they are not looked for
	s, _ = w.storeWith(old)
	began := time.Now()
	for _, id := range ids {
		check.OK(t, s.Release(w.ctx, id, nodeName))
		time.Sleep(150 * time.Millisecond)
	}
	w.eventually("it has looked", func() bool { return lists.Load() > 0 })
	time.Sleep(old / 10)
	if n, most := int(lists.Load()), 1+int(time.Since(began)/(old/20)); n > most {
		t.Errorf("%d lists, %d are the most", n, most)
	}
}
