package main

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// TestMoveReplicas: replicas of a volume are evacuated to nodes without one, as its class allows. A replica of a volume in use stays until another one has
// taken its place.
func TestMoveReplicas(t *testing.T) {
	e := newEnvironment(t)
	hasten(t)
	for name, zone := range map[string]string{"n1": "a", "n2": "b", "n3": "b", "n4": "c", "n5": "a"} {
		n := node(name, corev1.ConditionTrue)
		metav1.SetMetaDataLabel(&n.ObjectMeta, "zone", zone)
		e.add(n)
		e.add(networked(name, map[string]int64{"n5": 400, "n3": 300}[name]*mib+100*mib))
	}
	key := volume.KeyOf("pvc-1")
	of := func(name, node string, used bool) *v1alpha1.Volume {
		return movable(name, node, 50*mib, func(v *v1alpha1.Volume) {
			v.Spec.ReplicaOf, v.Spec.ClaimRef = key, &v1alpha1.ClaimRef{Namespace: "shop", Name: "data"}
			if used {
				v.Spec.Claims, v.Spec.Claim = 1, &v1alpha1.Claim{Node: "n4", Mode: "mount", Generation: 1}
			}
		})
	}
	first, second := of("pvc-1", "n1", false), of("leg-2", "n2", true)
	whole := &v1alpha1.ReplicatedVolume{ObjectMeta: metav1.ObjectMeta{Name: key}, Spec: v1alpha1.ReplicatedVolumeSpec{Name: "pvc-1", Pool: "default", Replicas: 2, TopologyKey: "zone", Size: 50 * mib, Numbered: 2, Legs: []string{first.Name, second.Name}}}
	e.add(first)
	e.add(second)
	e.add(whole)

	for _, name := range []string{"pvc-1", "shop/data", first.ID(), first.Name} { // all are names of the volume, and of its first replica
		run(t, apitest.Admin, "move", name, "--to=n4").refused(t, "shop/data has replicas; say which one is to move, with --from NODE: there is one on n1, n2")
		run(t, apitest.Admin, "move", name, "--to=n4", "--from=n3").refused(t, "shop/data has no replica on node n3; it has some on n1, n2")
	}
	run(t, apitest.Admin, "move", second.Name, "--to=n4", "--from=n1").refused(t, "--from n1: it is on node n2")
	run(t, apitest.Admin, "move", first.ID(), "--to=n2", "--from=n1").refused(t, "move shop/data, replica on n1 to node n2: it has another replica of the volume")
	run(t, apitest.Admin, "move", "shop/data", "--cancel", "--from=n2").refused(t, "take back the move of shop/data, replica on n2: it does not move")
	run(t, apitest.Admin, "move", first.ID(), "--to=n4", "--from=n1", "--wait=false").says(t, "shop/data, replica on n1: ")
	run(t, apitest.Admin, "move", first.ID(), "--to=n5", "--from=n1").refused(t, "kubectl ashlar move "+first.ID()+" --from n1 --cancel")
	run(t, apitest.Admin, "move", first.ID(), "--cancel", "--from=n1").says(t, "it stays on node n1.\n")
	run(t, apitest.Admin, "move", first.Name, "--to=n3", "--from=n1").refused(t, "it is where node n2 is, which has another replica of the volume", "replicaTopologyKey=zone")
	run(t, apitest.Admin, "evacuate", "n1", "--dry-run").says(t, "shop/data, replica on n1  50Mi  n5  -\n")

	e.drivers("")
	r := run(t, apitest.Admin, "evacuate", "n1")
	check.OK(t, r.err)
	r.says(t, "shop/data, replica on n1: it is on node n5\n", "No volume is left on node n1.\n")

	coarse := networked("n3", 0)
	granularity := func(bytes int64) {
		check.OK(t, e.Get(t.Context(), client.ObjectKeyFromObject(coarse), coarse))
		coarse.Status.Granularity = bytes
		check.OK(t, e.Status().Update(t.Context(), coarse))
	}
	granularity(64 * mib)
	run(t, apitest.Admin, "move", second.Name, "--to=n3", "--wait=false").refused(t, "pool n3.default keeps volumes in steps of 67108864 bytes, and this one has 52428800")
	granularity(mib)

	third := of("leg-3", "n3", true)
	program := start(t, apitest.Admin, "evacuate", "n2")
	becomes(e, second, (*v1alpha1.Volume).Moving)
	if second.Spec.Move.Node != "n3" {
		t.Errorf("it is to move to %+v", second.Spec.Move)
	}
	program.saying(t, "used on node n4; another replica takes its place\n")
	e.add(third)
	check.OK(t, e.Get(t.Context(), client.ObjectKeyFromObject(whole), whole))
	whole.Spec.Legs, whole.Spec.Numbered = append(whole.Spec.Legs, third.Name), 3
	check.OK(t, e.Update(t.Context(), whole))
	whole.Status.Legs = []v1alpha1.Leg{{Name: first.Name, Current: true}, {Name: third.Name, State: v1alpha1.LegJoining, Message: "25Mi of 50Mi are equal to the others"}}
	check.OK(t, e.Status().Update(t.Context(), whole))
	program.saying(t, "25Mi of 50Mi are equal to the others\n")
	large := movable("large", "n4", 380*mib, nil)
	e.add(large) // the figures of the pool of node n3, 400 MiB, have the replica that takes the place of the other one
	run(t, apitest.Admin, "move", large.ID(), "--to=n3", "--wait=false").says(t, "large: ")
	whole.Spec.Legs = slices.DeleteFunc(whole.Spec.Legs, func(name string) bool { return name == second.Name })
	check.OK(t, e.Update(t.Context(), whole))
	program.saying(t, "this one is being deleted\n")
	check.OK(t, e.Delete(t.Context(), second))
	r = program.ended(t)
	check.OK(t, r.err)
	r.says(t, ": another replica on node n3: 25Mi of 50Mi are equal to the others\n", ": another replica has everything; this one is being deleted\n",
		"shop/data, replica on n2: another replica has taken its place\n", "No volume is left on node n2.\n")

	program = start(t, apitest.Admin, "move", third.Name, "--to=n2")
	becomes(e, third, (*v1alpha1.Volume).Moving)
	program.saying(t, "used on node n4; the volume is to get another replica on node n2")
	fourth := of("leg-4", "n2", true) // has taken the place of the first one, which was to move there as well
	e.add(fourth)
	check.OK(t, e.Get(t.Context(), client.ObjectKeyFromObject(whole), whole))
	whole.Spec.Legs, whole.Spec.Numbered = []string{third.Name, fourth.Name}, 4
	check.OK(t, e.Update(t.Context(), whole))
	whole.Status.Legs = []v1alpha1.Leg{{Name: third.Name, Current: true}, {Name: fourth.Name, Current: true}}
	check.OK(t, e.Status().Update(t.Context(), whole))
	program.saying(t, "node n2 has another replica of its volume by now, so it stays")
	check.OK(t, e.Get(t.Context(), client.ObjectKeyFromObject(whole), whole))
	whole.Spec.Delete = whole.UID // the claim of the volume was deleted, with all replicas
	check.OK(t, e.Update(t.Context(), whole))
	check.OK(t, e.Delete(t.Context(), third))
	if r = program.ended(t); r.err == nil || !strings.Contains(r.err.Error(), "it was deleted meanwhile") {
		t.Errorf("of a volume that is deleted: %v\n%s", r.err, r.stdout)
	}
}
