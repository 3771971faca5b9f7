package anynode

import (
	"context"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// TestBecomesReplicas: a volume on one node is asked to have two replicas while its own node, or another one, writes to it. It gets them meanwhile: its writer goes on, it grows and is cut as before, and when it was taken down it is read on each node from its
// own replica.
func TestBecomesReplicas(t *testing.T) {
	c := newNodes(t)
	for _, kind := range []struct {
		name, filesystem string
		encrypted        bool
		user             string
	}{
		{"block", co.Block, false, consumers[1]}, {"ext4", "ext4", false, home}, {"encrypted", "ext4", true, consumers[1]},
		{"block-at-home", co.Block, false, home}, {"ext4-elsewhere", "ext4", false, consumers[1]}, {"encrypted-at-home", co.Block, true, home},
	} {
		t.Run(kind.name, func(t *testing.T) {
			in := *c
			in.TB = t
			u := in.writtenTo("becomes-"+kind.name, kind.user, kind.filesystem, kind.encrypted)
			in.cordon(consumers[1], true) // so that the other one has the second replica
			m := u.becomes(home, consumers[0])
			in.cordon(consumers[1], false)
			u.goesOn()
			u.writer.end()
			check.OK(t, u.writer.err)
			finds := func(node string) {
				t.Helper()
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
			finds(kind.user)
			leaves(kind.user)
			for _, node := range append(m.on, consumers[1]) { // two read what they have themselves
				m.claims(node)
				m.again("stage it on "+node, func(ctx context.Context) error { return m.up(ctx, node) })
				m.current(m.legs...)
				finds(node)
				leaves(node)
			}
			m.delete()
		})
	}
}

// asksFor asks for so many replicas of a volume on one node.
func (v *volume) asksFor(replicas int) {
	v.Helper()
	v.eventually("it is asked to have replicas", func() bool {
		o := v.object()
		o.Spec.Replicas = replicas
		return v.kube.Update(v.Context(), o) == nil
	})
}

// becomes asks for two replicas of a volume that is used, and waits until they are current, on two nodes.
func (u *goingOn) becomes(on ...string) *mirrored {
	u.Helper()
	u.asksFor(len(on))
	m := &mirrored{volume: u.volume, key: u.key(), on: on}
	u.eventually("it has as many replicas", func() bool {
		r := &v1alpha1.ReplicatedVolume{}
		if err := m.kube.Get(m.Context(), client.ObjectKey{Name: m.key}, r); err != nil || r.Status.Made == nil || len(r.Spec.Legs) != len(on) {
			return false
		}
		m.legs = r.Spec.Legs
		return true
	})
	m.current(m.legs...)
	for i, name := range m.legs {
		leg := &v1alpha1.Volume{}
		if check.OK(u, m.kube.Get(m.Context(), client.ObjectKey{Name: name}, leg)); leg.Spec.NodeName != on[i] {
			u.Fatalf("replica %d is on node %s, not on %s", i, leg.Spec.NodeName, on[i])
		}
	}
	return m
}
