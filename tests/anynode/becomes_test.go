package anynode

import (
	"context"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// TestBecomesReplicas: a volume on one node is asked to have two replicas while another node writes to it, and gets them when it is released. What was written to it before is on both, and is read on each node from its own.
func TestBecomesReplicas(t *testing.T) {
	c := newNodes(t)
	for _, kind := range []struct {
		name, filesystem string
		encrypted        bool
	}{{"block", co.Block, false}, {"ext4", "ext4", false}, {"encrypted", "ext4", true}} {
		t.Run(kind.name, func(t *testing.T) {
			in := *c
			in.TB = t
			u := in.writtenTo("becomes-"+kind.name, consumers[1], kind.filesystem, kind.encrypted)
			in.cordon(consumers[1], true) // so that the other one has the second replica
			o := u.volume.object()
			o.Spec.Replicas = 2
			check.OK(t, in.kube.Update(t.Context(), o))
			u.goesOn()
			m := &mirrored{volume: u.volume, key: u.key(), on: []string{home, consumers[0]}}
			if err := in.kube.Get(t.Context(), client.ObjectKey{Name: m.key}, &v1alpha1.ReplicatedVolume{}); err == nil {
				t.Error("it became one with replicas while it was used")
			}
			u.writer.end()
			check.OK(t, u.writer.err)
			finds := func(node string) {
				t.Helper()
				m.claims(node)
				m.again("stage it on "+node, func(ctx context.Context) error { return m.up(ctx, node) })
				have, err := read(u.path(node))
				check.OK(t, err)
				check.OK(t, u.writer.lost(have))
				check.OK(t, u.content.In(u.beside(node)))
			}
			leaves := func(node string) {
				t.Helper()
				m.again("take it down on "+node, func(ctx context.Context) error { return m.down(ctx, node) })
				m.releases(node)
			}
			leaves(consumers[1])
			in.eventually("it has two replicas", func() bool {
				r := &v1alpha1.ReplicatedVolume{}
				if err := in.kube.Get(t.Context(), client.ObjectKey{Name: m.key}, r); err != nil || r.Status.Made == nil || len(r.Spec.Legs) != 2 {
					return false
				}
				m.legs = r.Spec.Legs
				leg := &v1alpha1.Volume{}
				return in.kube.Get(t.Context(), client.ObjectKey{Name: r.Spec.Legs[1]}, leg) == nil && leg.Status.Created != nil && leg.Spec.NodeName == consumers[0]
			})
			in.cordon(consumers[1], false)
			finds(consumers[1])
			m.current(m.legs...)
			leaves(consumers[1])
			for _, node := range m.on { // each reads what it has itself
				finds(node)
				leaves(node)
			}
			m.delete()
		})
	}
}
