package store

import (
	"context"
	"strings"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/metrics"
)

// counted is what objects are counted by.
type counted struct {
	node, kind string
	state      string
}

// Samples is a metrics.Source. What it says comes from memory: it asks the API server for nothing.
func (s *Store) Samples() []metrics.Sample {
	ctx, cancel := context.WithTimeout(context.Background(), metrics.ScrapeTime)
	defer cancel()
	if s.Ready(ctx) != nil {
		return nil
	}
	objects, err := cluster.Cached(ctx, s.kube.Cache)
	if err != nil {
		return nil // the cache has stopped
	}
	count := map[counted]int{}
	nodes := map[string]bool{}
	for i := range objects.Pools { // of a node with pools all states are there, so that an alert sees a change from 0
		node := objects.Pools[i].Spec.NodeName
		nodes[node] = true
		for _, state := range v1alpha1.States {
			count[counted{node, "volume", state}] += 0
			count[counted{node, "snapshot", state}] += 0
		}
	}
	for i := range objects.Volumes {
		v := &objects.Volumes[i]
		nodes[v.Spec.NodeName] = true // also if its Pools are gone, as of a node that is
		count[counted{v.Spec.NodeName, "volume", v1alpha1.StateOf(v)}]++
	}
	for i := range objects.Snapshots {
		o := &objects.Snapshots[i]
		nodes[o.Spec.NodeName] = true
		count[counted{o.Spec.NodeName, "snapshot", v1alpha1.StateOf(o)}]++
	}
	var samples []metrics.Sample
	for what, n := range count {
		samples = append(samples, metrics.Objects.At(float64(n), what.node, what.kind, strings.ToLower(what.state)))
	}
	for node := range nodes {
		samples = append(samples, metrics.NodeAgentUp.Is(s.nodes.Ready(ctx, node) == nil, node))
	}
	return samples
}
