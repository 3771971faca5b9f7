package cluster_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// legMadeUp returns the object of the n-th leg of a volume as the agent of a node would make it, whose node was not asked for that leg: its name follows from
// that of the volume, which every agent can read.
func legMadeUp(node, of string, n int) *v1alpha1.Volume {
	v := volumeOn(node, fmt.Sprintf("leg-%d-of-%s", n, volume.KeyOf(of)))
	v.Spec.Access, v.Spec.ReplicaOf, v.Spec.ClaimRef = "any", volume.KeyOf(of), nil
	return v
}

// TestGuardLegs: an agent makes the object of a leg only if the leg had all that was written, or the ReplicatedVolume is lost as well.
func TestGuardLegs(t *testing.T) {
	w := newGuarded(t)
	r := &v1alpha1.ReplicatedVolume{ObjectMeta: metav1.ObjectMeta{Name: volume.KeyOf("v")}, Spec: v1alpha1.ReplicatedVolumeSpec{Name: "v", Pool: "default", Replicas: 3, Size: mib, Numbered: 4}}
	r.Spec.Legs = []string{r.Name}
	for n := 2; n < 5; n++ {
		r.Spec.Legs = append(r.Spec.Legs, legMadeUp(nodeName, "v", n).Name)
	}
	check.OK(t, w.Create(w.ctx, r))
	r.Status.Legs = []v1alpha1.Leg{{Name: r.Spec.Legs[1], Current: true}, {Name: r.Spec.Legs[2], Sound: 1}, {Name: r.Spec.Legs[3]}}
	check.OK(t, w.Status().Update(w.ctx, r))
	const hadAll = "only if the replica had all that was written"
	w.eventually("the policy knows the volume", func() bool {
		c, err := client.New(apitest.Get(t).Agent(t, nodeName), client.Options{Scheme: w.Scheme()})
		check.OK(t, err)
		return client.NewDryRunClient(c).Create(w.ctx, legMadeUp(nodeName, "v", 2)) == nil && client.NewDryRunClient(c).Create(w.ctx, legMadeUp(nodeName, "v", 5)) != nil
	})
	w.try(t, nodeName, []attempt{
		created(w, "one that is current", legMadeUp(nodeName, "v", 2), ""),
		created(w, "one that was current", legMadeUp(nodeName, "v", 3), ""),
		created(w, "one that was never current", legMadeUp(nodeName, "v", 4), hadAll),
		created(w, "one that the volume may get", legMadeUp(nodeName, "v", 5), hadAll),
		created(w, "one of a volume that is lost", legMadeUp(nodeName, "lost", 2), ""),
	})
}

// TestLegOfAnAgent: the agent of a node makes the object of a leg before the controller does. The node does not get the leg: neither of a new volume, nor of one
// that gets another replica.
func TestLegOfAnAgent(t *testing.T) {
	w, all, s := legCluster(t, 4)
	all["node-4"].stop() // from here on it is the thief's
	thief, err := client.New(apitest.Get(t).Agent(t, "node-4"), client.Options{Scheme: w.Scheme()})
	check.OK(t, err)
	steal := func(of string, n int) *v1alpha1.Volume {
		v := legMadeUp("node-4", of, n)
		check.OK(t, thief.Create(w.ctx, v))
		before := v.DeepCopy()
		v.Status.Created, v.Status.Size = new(metav1.NowMicro()), v.Spec.Size
		check.OK(t, thief.Status().Patch(w.ctx, v, client.MergeFrom(before)))
		return v
	}
	none := func(name string) {
		t.Helper()
		for _, leg := range w.legsOf(name) {
			if leg.Spec.NodeName == "node-4" && slices.Contains(w.whole(name).Spec.Legs, leg.Name) {
				t.Errorf("node-4 has a leg of %s", name)
			}
		}
	}

	stolen := steal("v", 2)
	want := replicas("v", 2, "node-1")
	_, err = s.Create(w.ctx, want)
	if !errors.Is(err, errdefs.ErrPrecondition) || !strings.Contains(err.Error(), "node-4") || !strings.Contains(err.Error(), stolen.Name) {
		t.Fatalf("made beside the object of an agent: %v", err)
	}
	if r := w.whole("v"); r != nil && r.Status.Made != nil {
		t.Errorf("it counts as made: %+v", r.Status)
	}
	check.OK(t, w.Delete(w.ctx, stolen))
	v, err := s.Create(w.ctx, want)
	check.OK(t, err)
	w.isMade(t, s, "v", v, 2)

	steal("w", 3)
	want = replicas("w", 2, "node-1")
	check.OK(t, second(s.Create(w.ctx, want)))
	w.edit("w", func(r *v1alpha1.ReplicatedVolume) { r.Spec.Replicas = 3 })
	w.eventually("it gets a third leg", func() bool { return len(w.whole("w").Spec.Legs) == 3 })
	none("w")
}
