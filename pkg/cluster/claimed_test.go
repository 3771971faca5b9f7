package cluster_test

import (
	"testing"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// TestClaimed: an agent tells its node's calls what it last knew of a claim, and that it knows nothing
// as long as no API server has answered.
func TestClaimed(t *testing.T) {
	w, m, s := newCluster(t)
	v, err := s.Create(w.ctx, spec("v"))
	must(t, err)
	claim := volume.Claim{Node: nodeName, Mode: "m", ReadOnly: true}
	expect := func(a *cluster.Agent, id volume.ID, want volume.Claim, wantKnown bool) {
		t.Helper()
		if have, known := a.Claimed(w.ctx, id); have != want || known != wantKnown {
			t.Fatalf("claimed %+v, known %v; want %+v, %v", have, known, want, wantKnown)
		}
	}
	expect(m.agent, v.ID, volume.Claim{}, true)
	for range 20 { // a claim that was made is there, whatever the watch has seen
		must(t, s.Claim(w.ctx, v.ID, claim))
		expect(m.agent, v.ID, claim, true)
		must(t, s.Release(w.ctx, v.ID, nodeName))
		w.eventually("the release is known", func() bool {
			have, known := m.agent.Claimed(soon(t), v.ID)
			return known && have == volume.Claim{}
		})
	}
	expect(m.agent, volume.ID{Kind: v.ID.Kind, Pool: "b", Key: v.ID.Key}, volume.Claim{}, false)
	expect(m.agent, volume.ID{Kind: v.ID.Kind, Pool: v.ID.Pool, Key: volume.KeyOf("none")}, volume.Claim{}, false)

	must(t, s.Claim(w.ctx, v.ID, claim))
	expect(m.agent, v.ID, claim, true)
	stopped, err := cluster.NewAgent(apitest.Get(w).Config("agent"), cluster.DefaultDriver, m.local, nil, m.locks, 0)
	must(t, err)
	expect(stopped, v.ID, volume.Claim{}, false)
}
