package cluster_test

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// cordoned says whether pods may come to a node.
func (w *environment) cordoned(name string, is bool) {
	w.Helper()
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	check.OK(w, w.Get(w.ctx, client.ObjectKeyFromObject(n), n))
	before := n.DeepCopy()
	n.Spec.Unschedulable = is
	check.OK(w, w.Patch(w.ctx, n, client.MergeFrom(before)))
}

// TestFollow: a volume that is to follow its pod is asked to move when it has been used on another node for some time, and not before; nor to a cordoned
// node. A volume that is to stay is not moved, until its parameter is changed.
func TestFollow(t *testing.T) {
	w, a, b := twoOf(t)
	w.follow = 6 * time.Second // longer than the steps before that take
	s := w.calling(a)
	w.pooled(s, b)
	v, err := s.Create(w.ctx, volume.Spec{Name: "v", Access: volume.AccessAny, Nodes: []string{a.name}, Filesystem: "ext4", Size: volume.Range{Required: 64 * mib},
		Mutable: map[string]string{volume.ParameterPlacement: string(volume.PlacementFollow)}})
	check.OK(t, err)
	w.node(a.name, true)
	w.node(b.name, true)
	stays, err := s.Create(w.ctx, volume.Spec{Name: "stays", Filesystem: "ext4", Size: volume.Range{Required: 64 * mib}, Access: volume.AccessAny, Nodes: []string{a.name}})
	check.OK(t, err)
	claim := volume.Claim{Node: b.name, Mode: "m"}
	check.OK(t, second(s.Claim(w.ctx, v.ID, claim)))
	check.OK(t, second(s.Claim(w.ctx, stays.ID, claim)))
	was := w.object("v").Spec.Claim
	if was.Since == nil || time.Since(was.Since.Time) > time.Minute {
		t.Fatalf("the claim is since %v", was.Since)
	}
	check.OK(t, second(s.Claim(w.ctx, v.ID, claim))) // repeated
	if now := w.object("v").Spec.Claim; !now.Since.Equal(was.Since) || now.Generation != was.Generation {
		t.Errorf("the claim is %+v, it was %+v", now, was)
	}
	if m := w.object("v").Spec.Move; m != nil {
		t.Fatalf("it is asked for on %s at once", m.Node)
	}
	w.cordoned(b.name, true)
	time.Sleep(w.follow + time.Second) // nothing shows that the mover has looked at it
	if m := w.object("v").Spec.Move; m != nil {
		t.Fatalf("it is asked for on %s, which is cordoned", m.Node)
	}
	w.told("MoveWaits", "it is to follow its pod to node "+b.name+", and cannot yet: node "+b.name+" is cordoned: kubectl uncordon "+b.name, w.object("v"))
	w.cordoned(b.name, false)
	w.touched("v")
	w.eventually("it follows", func() bool {
		m := w.object("v").Spec.Move
		return m != nil && m.Node == b.name
	})
	check.OK(t, s.Release(w.ctx, v.ID, b.name))
	w.moved("v", a, b)

	fails(t, s.Modify(w.ctx, stays.ID, map[string]string{volume.ParameterPlacement: "away"}), errdefs.ErrInvalid)
	if m := w.object("stays").Spec.Move; m != nil {
		t.Fatalf("what stays is asked for on %s", m.Node)
	}
	check.OK(t, s.Modify(w.ctx, stays.ID, map[string]string{volume.ParameterPlacement: string(volume.PlacementFollow)}))
	asked := func() bool { return w.object("stays").Spec.Move != nil }
	w.eventually("it follows now", asked)
	w.claimFor(stays.ID, a.name)
	w.eventually("its pod has gone back, so it stays", func() bool { return !asked() })
	w.claimFor(stays.ID, b.name)
	w.eventually("it follows again", asked)
	check.OK(t, s.Modify(w.ctx, stays.ID, map[string]string{volume.ParameterPlacement: string(volume.PlacementStay)}))
	w.eventually("it is to stay", func() bool { return !asked() })
	o := w.object("stays")
	before := o.DeepCopy()
	o.Spec.Move = &v1alpha1.Move{Node: b.name}
	check.OK(t, w.Patch(w.ctx, o, client.MergeFrom(before)))
	w.claimFor(stays.ID, a.name)
	time.Sleep(time.Second) // nothing shows that the mover has looked at it
	if !asked() {
		t.Error("what somebody has asked for was taken back")
	}

	local, err := s.Create(w.ctx, volume.Spec{Name: "local", Filesystem: "ext4", Size: volume.Range{Required: 64 * mib}, Nodes: []string{a.name}})
	check.OK(t, err)
	fails(t, s.Modify(w.ctx, local.ID, map[string]string{volume.ParameterPlacement: string(volume.PlacementFollow)}), errdefs.ErrInvalid)
}
