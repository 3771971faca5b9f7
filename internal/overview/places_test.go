package overview_test

import (
	"slices"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/overview"
)

// TestPlaces: the problems of a volume include that its node or pool is away, but no other problems of these. Among all problems each is listed once.
func TestPlaces(t *testing.T) {
	found := func(severity overview.Severity, reason, kind, name string) overview.Problem {
		return overview.Found(severity, reason, "it is so", kind, name)
	}
	o := &overview.Overview{
		Nodes: []overview.Node{
			{Name: "a", Problems: []overview.Problem{found(overview.Degraded, overview.AgentSilent, overview.KindNode, "a")}, Pools: []overview.Pool{
				{Node: "a", Name: "p", Problems: []overview.Problem{found(overview.Warning, overview.Strays, overview.KindPool, "a.p"), found(overview.Inaccessible, overview.PoolMissing, overview.KindPool, "a.p")}},
				{Node: "a", Name: "q", Problems: []overview.Problem{found(overview.Degraded, overview.PoolFull, overview.KindPool, "a.q")}}}},
			{Name: "a.p", Problems: []overview.Problem{found(overview.Inaccessible, overview.NodeGone, overview.KindNode, "a.p")}}, // a node with the name of a pool
			{Name: "b", Pools: []overview.Pool{{Node: "b", Name: "p"}}}},
		Volumes: []overview.Volume{
			{ID: "1", Node: "a", Pool: "p", Problems: []overview.Problem{found(overview.Degraded, "Own", overview.KindVolume, "1")}},
			{ID: "2", Node: "a", Pool: "q"}, {ID: "3", Node: "b", Pool: "p"}, {ID: "4", Node: "a.p", Pool: "p"}}}
	o.Finish()
	if len(o.Problems) != 6 {
		t.Errorf("%d problems in all", len(o.Problems))
	}
	places := o.Places()
	for i, want := range [][]string{{overview.PoolMissing, "Own", overview.AgentSilent}, {overview.AgentSilent}, {}, {overview.NodeGone}} {
		got := []string{}
		for _, p := range places.Of(&o.Volumes[slices.IndexFunc(o.Volumes, func(v overview.Volume) bool { return v.ID == string(rune('1'+i)) })]) {
			got = append(got, p.Reason)
		}
		if !slices.Equal(got, want) {
			t.Errorf("volume %d: %q, want %q", i+1, got, want)
		}
	}
	if own := o.Volumes[0].Problems; len(own) != 1 {
		t.Errorf("the volume's own are %+v", own)
	}
}
