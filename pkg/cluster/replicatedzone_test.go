package cluster_test

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// TestReplicatorReplacesInZone: a volume has a replica in each zone that there is (replicaTopologyKey). One that is away for too long, or whose node is gone
// for good, is replaced by one on another node of its own zone.
func TestReplicatorReplacesInZone(t *testing.T) {
	for what, goes := range map[string]func(w *environment, node string){
		"it is away for too long": func(w *environment, _ string) {
			w.edit("v", func(r *v1alpha1.ReplicatedVolume) { r.Spec.ReplaceAfter = 2 })
		},
		"its node is gone": func(w *environment, node string) {
			n := &corev1.Node{}
			check.OK(w, w.Get(w.ctx, client.ObjectKey{Name: node}, n))
			n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: v1alpha1.GoneTaint, Effect: corev1.TaintEffectNoExecute})
			check.OK(w, w.Update(w.ctx, n))
		},
	} {
		t.Run(what, func(t *testing.T) {
			w, all, s := legCluster(t, 4)
			w.zones(s, map[string]string{"node-1": "a", "node-2": "b", "node-3": "b", "node-4": "a"})
			spec := replicas("v", 2, "node-1")
			spec.Replicas.TopologyKey = "zone"
			v, err := s.Create(w.ctx, spec)
			check.OK(t, err)
			check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-1"))))
			old := w.legsOf("v")[1]
			all[old.Spec.NodeName].stop()
			goes(w, old.Spec.NodeName)
			w.becomes("v", w.whole("v").Name)
			other := map[string]string{"node-2": "node-3", "node-3": "node-2"}[old.Spec.NodeName]
			w.eventually("there is another one in its zone", func() bool {
				legs := w.legsOf("v")
				return len(legs) == 3 && legs[2].Spec.NodeName == other && legs[2].Status.Created != nil
			})
			names := w.whole("v").Spec.Legs
			w.becomes("v", names[0], names[2])
			w.eventually("the volume is without the old one", func() bool { return slices.Equal(w.whole("v").Spec.Legs, []string{names[0], names[2]}) })
		})
	}
}
