package cluster_test

import (
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// TestLostOfTwo: of a volume with replicas on all nodes that there are, one is lost. The object says how its node gets another one
// (docs/runbooks/replicas-missing.md): the volume is to have one less, and then as many again.
func TestLostOfTwo(t *testing.T) {
	for what, used := range map[string]bool{"used": true, "not used": false} {
		t.Run(what, func(t *testing.T) {
			w, all, s := legCluster(t, 2)
			v, err := s.Create(w.ctx, replicas("v", 2, "node-1"))
			check.OK(t, err)
			lost, names := w.legsOf("v")[1], w.whole("v").Spec.Legs
			if used {
				check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-1"))))
				w.becomes("v", names[0])
			}
			m := all[lost.Spec.NodeName]
			m.stop()
			check.OK(t, m.local.Delete(w.ctx, legID(lost)))
			w.start(m.machine)
			w.eventually("the object says what to do", func() bool {
				return strings.Contains(w.whole("v").Status.Lacks, "node node-2 has a replica of the volume that is lost, and gets another one when the volume does without that: kubectl ashlar replicas "+v.ID.Key)
			})
			w.edit("v", func(r *v1alpha1.ReplicatedVolume) { r.Spec.Replicas = 1 })
			w.eventually("the lost one is gone", func() bool {
				return slices.Equal(w.whole("v").Spec.Legs, names[:1]) && w.Get(w.ctx, client.ObjectKeyFromObject(lost), &v1alpha1.Volume{}) != nil
			})
			w.edit("v", func(r *v1alpha1.ReplicatedVolume) { r.Spec.Replicas = 2 })
			w.eventually("there is another one", func() bool {
				legs := w.legsOf("v")
				return len(legs) == 2 && legs[1].Name != lost.Name && legs[1].Spec.NodeName == "node-2" && legs[1].Status.Created != nil
			})
			w.eventually("it lacks none", func() bool { return w.whole("v").Status.Lacks == "" })
		})
	}
}
