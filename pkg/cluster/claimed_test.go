package cluster_test

import (
	"context"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"

	"k8s.io/client-go/rest"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/agent"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// claimWait is how long an agent waits for a claim that its watch has not seen.
const claimWait = 2 * time.Second

// TestClaimed: an agent knows the claims of its volumes, and waits for one that its watch has not seen. It knows none of other pools and unknown volumes,
// and none at all as long as no API server has answered.
func TestClaimed(t *testing.T) {
	w, m, s := newCluster(t)
	v, err := s.Create(w.ctx, spec("v"))
	check.OK(t, err)
	claim := volume.Claim{Node: nodeName, Mode: "m", ReadOnly: true}
	expect := func(a *agent.Agent, id volume.ID, want volume.Claim, wantKnown bool) {
		t.Helper()
		if have, known := a.Claimed(w.ctx, id, true); have != want || known != wantKnown {
			t.Fatalf("claimed %+v, known %v; want %+v, %v", have, known, want, wantKnown)
		}
	}
	expect(m.agent, v.ID, volume.Claim{}, true)
	claimed := func() { // claims the volume; the agent waits for that claim, whatever its watch has seen
		t.Helper()
		check.OK(t, second(s.Claim(w.ctx, v.ID, claim)))
		w.eventually("the claim is known", func() bool {
			asked := time.Now()
			have, known := m.agent.Claimed(w.ctx, v.ID, true)
			if waited := time.Since(asked); have != claim && waited < claimWait {
				t.Fatalf("claimed %+v, known %v, after %s", have, known, waited)
			}
			return have == claim && known
		})
	}
	for range 20 {
		claimed()
		check.OK(t, s.Release(w.ctx, v.ID, nodeName))
		w.eventually("the release is known", func() bool {
			have, known := m.agent.Claimed(soon(t), v.ID, true)
			return known && have == volume.Claim{}
		})
	}
	expect(m.agent, volume.ID{Kind: v.ID.Kind, Pool: "b", Key: v.ID.Key}, volume.Claim{}, false)
	expect(m.agent, volume.ID{Kind: v.ID.Kind, Pool: v.ID.Pool, Key: volume.KeyOf("none")}, volume.Claim{}, false)

	claimed()
	stopped, err := agent.New(apitest.Get(w).Agent(w, m.name), m.local, agent.Options{Driver: cluster.DefaultDriver, Locks: m.locks})
	check.OK(t, err)
	expect(stopped, v.ID, volume.Claim{}, false)
}

// TestClaimedWhileWriting: a claim is known while a write of the agent to the volume's object is not answered.
func TestClaimedWhileWriting(t *testing.T) {
	var hang atomic.Bool
	begun, let := make(chan struct{}, 100), make(chan struct{})
	wrap(t, func(c *rest.Config) {
		c.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return roundTrip(func(q *http.Request) (*http.Response, error) {
				if hang.Load() && q.Method == http.MethodPatch && strings.Contains(q.URL.Path, "/volumes/") && strings.HasSuffix(q.URL.Path, "/status") {
					begun <- struct{}{}
					held(t, let)
				}
				return next.RoundTrip(q)
			})
		})
	})
	w, m, s := newCluster(t)
	v, err := s.Create(w.ctx, spec("v"))
	check.OK(t, err)
	claim := volume.Claim{Node: nodeName, Mode: "m", ReadOnly: true}
	check.OK(t, second(s.Claim(w.ctx, v.ID, claim)))
	w.eventually("the claim is known", func() bool {
		have, known := m.agent.Claimed(w.ctx, v.ID, true)
		return known && have == claim
	})
	hang.Store(true)
	w.asked("it grows", func(ctx context.Context) error { return second(s.Expand(ctx, v.ID, volume.Range{Required: 2 * mib})) }, func() bool {
		select {
		case <-begun:
			return true
		default:
			return false
		}
	})
	have, known := m.agent.Claimed(w.ctx, v.ID, false)
	hang.Store(false)
	close(let)
	if have != claim || !known {
		t.Errorf("claimed %+v, known %v", have, known)
	}
}

// restartLagging restarts the agent of a machine with watches that the test can stop.
func (w *environment) restartLagging(t *testing.T, m *machine) *lagging {
	m.stop()
	lag := &lagging{}
	wrap(t, func(c *rest.Config) { c.Wrap(lag.wrap) })
	w.start(m)
	return lag
}

// TestClaimedBehind: a claim is known to an agent whose watch is behind.
func TestClaimedBehind(t *testing.T) {
	w, m, s := newCluster(t)
	v, err := s.Create(w.ctx, spec("v"))
	check.OK(t, err)
	lag := w.restartLagging(t, m)
	w.eventually("the agent knows the volume", func() bool {
		_, known := m.agent.Claimed(soon(t), v.ID, true)
		return known
	})
	lag.Lock()
	defer lag.Unlock()
	claim := volume.Claim{Node: nodeName, Mode: "m"}
	check.OK(t, second(s.Claim(w.ctx, v.ID, claim)))
	w.eventually("the claim is known", func() bool {
		have, known := m.agent.Claimed(w.ctx, v.ID, true)
		return known && have == claim
	})
}

// TestClaimedAnew: a volume was claimed for reading, and is claimed for writing now. The agent finds that out, however far its watch is behind.
func TestClaimedAnew(t *testing.T) {
	w, m, s := newCluster(t)
	v, err := s.Create(w.ctx, spec("v"))
	check.OK(t, err)
	check.OK(t, second(s.Claim(w.ctx, v.ID, volume.Claim{Node: nodeName, Mode: "m", ReadOnly: true})))
	lag := w.restartLagging(t, m)
	w.eventually("the claim is known", func() bool {
		have, known := m.agent.Claimed(soon(t), v.ID, true)
		return known && have.ReadOnly
	})
	lag.Lock()
	defer lag.Unlock()
	check.OK(t, s.Release(w.ctx, v.ID, nodeName))
	claim := volume.Claim{Node: nodeName, Mode: "m"}
	check.OK(t, second(s.Claim(w.ctx, v.ID, claim)))
	w.eventually("the new claim is known", func() bool { // repeated, as the API server may take longer to answer than the agent waits
		have, known := m.agent.Claimed(w.ctx, v.ID, false)
		return have == claim && known
	})
}
