package store

import (
	"context"
	"errors"
	"strconv"
	"strings"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/metrics"
)

// counted is what objects are counted by.
type counted struct {
	node, kind string
	state      string
}

// Samples: see metrics.Source. It reads the cache, and asks the API server for nothing.
func (s *Store) Samples() []metrics.Sample {
	ctx, cancel := context.WithTimeout(context.Background(), metrics.ScrapeTime)
	defer cancel()
	if s.Ready(ctx) != nil {
		return nil
	}
	count := map[counted]int{}
	nodes := map[string]bool{}
	legs := map[string]leg{}
	if errors.Join(
		kube.Each(ctx, s.kube.Cache, &v1alpha1.Pool{}, func(p *v1alpha1.Pool) { // all states of each node with pools are exposed, so that an alert sees a change from 0
			nodes[p.Spec.NodeName] = true
			for _, state := range v1alpha1.States {
				for _, kind := range []string{"volume", "snapshot", "replica"} {
					count[counted{p.Spec.NodeName, kind, state}] += 0
				}
			}
		}),
		kube.Each(ctx, s.kube.Cache, &v1alpha1.Volume{}, func(v *v1alpha1.Volume) {
			nodes[v.Spec.NodeName] = true // also of a node that is gone, and has no Pools
			kind := "volume"
			if v.Spec.ReplicaOf != "" {
				kind = "replica"
				legs[v.Name] = leg{v.Spec.NodeName, v1alpha1.IsLost(v)}
			}
			count[counted{v.Spec.NodeName, kind, v1alpha1.StateOf(v)}]++
		}),
		kube.Each(ctx, s.kube.Cache, &v1alpha1.Snapshot{}, func(o *v1alpha1.Snapshot) {
			nodes[o.Spec.NodeName] = true
			count[counted{o.Spec.NodeName, "snapshot", v1alpha1.StateOf(o)}]++
		})) != nil {
		return nil // the cache has stopped
	}
	var samples []metrics.Sample
	for what, n := range count {
		samples = append(samples, metrics.Objects.At(float64(n), what.node, what.kind, strings.ToLower(what.state)))
	}
	samples = append(samples, s.replicaSamples(ctx, legs, nodes)...)
	for node := range nodes {
		samples = append(samples, metrics.NodeAgentUp.Is(s.nodes.Ready(ctx, node) == nil, node))
	}
	return samples
}

// leg is what is needed of the Volume of a leg.
type leg struct {
	node string
	lost bool
}

// replicaSamples returns the samples of volumes with several legs. legs are all Volumes that are legs, by name; for each of nodes all states are exposed.
func (s *Store) replicaSamples(ctx context.Context, legs map[string]leg, nodes map[string]bool) (samples []metrics.Sample) {
	var list v1alpha1.ReplicatedVolumeList
	if s.kube.Cache.List(ctx, &list, client.UnsafeDisableDeepCopy) != nil {
		return nil // the cache has stopped
	}
	type at struct{ node, state string }
	differ := 0
	volumes, replicas, resync := map[[2]int]int{}, map[at]int{}, map[string]int64{}
	for i := range list.Items {
		r := &list.Items[i]
		if r.Status.Made == nil && !r.StatusLost() || r.Going() {
			continue
		}
		if r.Status.Scrub.Differs() {
			differ++
		}
		current := 0
		for j := range r.Status.Legs {
			l := &r.Status.Legs[j]
			one, there := legs[l.Name]
			switch {
			case !there || one.lost:
			case l.Current:
				current++
				replicas[at{one.node, "current"}]++
			case l.State == v1alpha1.LegJoining:
				replicas[at{one.node, "joining"}]++
				if p := l.Progress; p != nil {
					resync[one.node] += p.Total - p.Done
				}
			default:
				replicas[at{one.node, "waiting"}]++
			}
		}
		volumes[[2]int{r.Spec.Replicas, max(r.Spec.Replicas-current, 0)}]++
	}
	samples = append(samples, metrics.ReplicasDiffer.At(float64(differ)))
	for wanted := 1; wanted <= v1alpha1.MostReplicas; wanted++ {
		for lacking := range wanted + 1 {
			samples = append(samples, metrics.ReplicatedVolumes.At(float64(volumes[[2]int{wanted, lacking}]), strconv.Itoa(wanted), strconv.Itoa(lacking)))
		}
	}
	for node := range nodes {
		for _, state := range []string{"current", "joining", "waiting"} {
			samples = append(samples, metrics.Replicas.At(float64(replicas[at{node, state}]), node, state))
		}
		samples = append(samples, metrics.ReplicaResync.At(float64(resync[node]), node))
	}
	return samples
}
