package main

import (
	"encoding/json"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// legOf returns a replica of a volume on a node.
func legOf(name, leg, node string, size int64) *v1alpha1.Volume {
	return movable(leg, node, size, func(v *v1alpha1.Volume) { v.Spec.ReplicaOf = volume.KeyOf(name) })
}

// replicated returns a volume with replicas on some nodes, all of which are current. The first one has the name of the volume.
func (e *environment) replicated(name string, size int64, on ...string) *v1alpha1.ReplicatedVolume {
	e.Helper()
	r := &v1alpha1.ReplicatedVolume{ObjectMeta: metav1.ObjectMeta{Name: volume.KeyOf(name)}, Spec: v1alpha1.ReplicatedVolumeSpec{Name: name, Pool: "default", Pools: "default", Replicas: len(on), Size: size, Numbered: int64(len(on))},
		Status: v1alpha1.ReplicatedVolumeStatus{Made: new(metav1.NowMicro())}}
	for i, node := range on {
		leg := name
		if i > 0 {
			leg = name + "-leg-" + node
		}
		v := legOf(name, leg, node, size)
		e.add(v)
		r.Spec.Legs = append(r.Spec.Legs, v.Name)
		r.Status.Legs = append(r.Status.Legs, v1alpha1.Leg{Name: v.Name, Current: true, State: v1alpha1.LegCurrent})
	}
	e.add(r)
	return r
}

// says writes status and spec of a volume with replicas, as the controller and the node of its claim do.
func (e *environment) says(r *v1alpha1.ReplicatedVolume, edit func(*v1alpha1.ReplicatedVolume)) {
	e.Helper()
	check.OK(e, retry.RetryOnConflict(retry.DefaultBackoff, func() error { // the program may write meanwhile
		if err := e.Get(e.Context(), client.ObjectKeyFromObject(r), r); err != nil {
			return err
		}
		edit(r)
		status := r.Status.DeepCopy()
		if err := e.Update(e.Context(), r); err != nil {
			return err
		}
		r.Status = *status
		return e.Status().Update(e.Context(), r)
	}))
}

// becomes waits until an object is as expected after a write of the program.
func becomes[T client.Object](e *environment, o T, is func(o T) bool) {
	e.Helper()
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		check.OK(e, e.Get(e.Context(), client.ObjectKeyFromObject(o), o))
		if is(o) {
			return
		}
		if time.Now().After(end) {
			e.Fatalf("it is %+v", o)
		}
	}
}

// TestReplicas: a volume is asked for more and for fewer replicas, and the output says how far that is.
func TestReplicas(t *testing.T) {
	e := newEnvironment(t)
	nodes(e)
	hasten(t)
	r := e.replicated("pvc-1", 100*mib, "n1", "n3")

	run(t, apitest.Admin, "replicas", "pvc-1", "2").says(t, "pvc-1: it has 2 replicas, and each has all that was written.\n")
	run(t, apitest.Admin, "replicas", "pvc-1", "0").refused(t, "give 1 to 3")
	run(t, apitest.Admin, "replicas", "pvc-1", "4").refused(t, "give 1 to 3")
	run(t, apitest.Admin, "replicas", "pvc-1").refused(t, "give one volume")
	run(t, apitest.Admin, "replicas", "nobody", "2").refused(t, `there is no volume "nobody"`)
	run(t, apitest.Admin, "replicas", r.Spec.Legs[1], "2").refused(t, "is a replica of volume pvc-1 ("+r.ID()+")")

	program := start(t, apitest.Admin, "replicas", "pvc-1", "3")
	becomes(e, r, func(r *v1alpha1.ReplicatedVolume) bool { return r.Spec.Replicas == 3 })
	leg := legOf("pvc-1", "pvc-1-third", "n4", 100*mib)
	e.says(r, func(r *v1alpha1.ReplicatedVolume) {
		r.Spec.Claims, r.Spec.Claim = 1, &v1alpha1.Claim{Node: "n1", Mode: "m", Generation: 1}
		r.Status.Lacks = "no room now"
	})
	program.saying(t, "no room now\n")
	e.add(leg)
	e.says(r, func(r *v1alpha1.ReplicatedVolume) {
		r.Spec.Legs, r.Spec.Numbered, r.Status.Lacks = append(r.Spec.Legs, leg.Name), 3, ""
		r.Status.Legs = append(r.Status.Legs, v1alpha1.Leg{Name: leg.Name, State: v1alpha1.LegJoining, Progress: &v1alpha1.Progress{Done: 30, Total: 100}})
	})
	program.saying(t, "node n4: 30 %\n")
	e.says(r, func(r *v1alpha1.ReplicatedVolume) { r.Status.Legs[2] = v1alpha1.Leg{Name: leg.Name, Current: true} })
	have := program.ended(t)
	check.OK(t, have.err)
	have.says(t, "pvc-1: it has had 2 replicas, and is to have 3: each further node makes room for it now, and gets its bytes when it is used.\n", "pvc-1: it waits: no room now\n",
		"pvc-1: 2 of 3 replicas have all that was written; node n4: 30 %\n", "pvc-1: it has 3 replicas, and each has all that was written.\n")

	run(t, apitest.Admin, "replicas", "pvc-1", "1", "--wait=false").says(t, "those that are too many go", "pvc-1: 3 of its 3 replicas have all that was written, and 2 are to go\n")
	e.says(r, func(r *v1alpha1.ReplicatedVolume) { r.Spec.Replicas, r.Spec.Claim, r.Status.Opened = 3, nil, 1 })
	run(t, apitest.Admin, "replicas", "pvc-1", "1", "--wait=false").says(t, "those that are too many go when it is used again")
	e.says(r, func(r *v1alpha1.ReplicatedVolume) {
		r.Spec.Replicas, r.Spec.Legs, r.Spec.Claim = 2, r.Spec.Legs[:2], nil
		r.Status.Legs = r.Status.Legs[:2]
		r.Status.Legs[1].Current = false
	})
	check.OK(t, e.Delete(t.Context(), leg))
	run(t, apitest.Admin, "replicas", "pvc-1", "2").says(t, "pvc-1: it has 2 replicas, and what 1 of them lack is copied when the volume is used.\n")

	p := &v1alpha1.Pool{ObjectMeta: metav1.ObjectMeta{Name: overview.PoolName("n4", "default")}}
	health := func(health ...v1alpha1.Problem) {
		check.OK(t, e.Get(t.Context(), client.ObjectKeyFromObject(p), p))
		p.Status.Health = health
		check.OK(t, e.Status().Update(t.Context(), p))
	}
	health(v1alpha1.Problem{Severity: "Inaccessible", Reason: "PoolReadOnly", Message: "it takes nothing"})
	run(t, apitest.Admin, "replicas", "pvc-1", "3").refused(t, "there are 0", "pool n4.default is not well: PoolReadOnly: it takes nothing")
	health(v1alpha1.Problem{Severity: "Degraded", Reason: "ImagesFragmented", Message: "it is slow"})
	run(t, apitest.Admin, "replicas", "pvc-1", "3", "--wait=false").says(t, "and is to have 3")
	e.says(r, func(r *v1alpha1.ReplicatedVolume) { r.Spec.Replicas = 2 })
	granularity := func(bytes int64) {
		check.OK(t, e.Get(t.Context(), client.ObjectKeyFromObject(p), p))
		p.Status.Granularity = bytes
		check.OK(t, e.Status().Update(t.Context(), p))
	}
	granularity(8 * mib)
	run(t, apitest.Admin, "replicas", "pvc-1", "3").refused(t, "there are 0", "pool n4.default keeps volumes in steps of 8388608 bytes, and this one has 104857600")
	granularity(4 * mib)
	run(t, apitest.Admin, "replicas", "pvc-1", "3", "--wait=false").says(t, "and is to have 3")
	e.says(r, func(r *v1alpha1.ReplicatedVolume) { r.Spec.Replicas, r.Spec.TopologyKey = 2, "zone" })
	run(t, apitest.Admin, "replicas", "pvc-1", "3").refused(t, "each replica needs a value of the label zone (parameter replicaTopologyKey) of its own, and of 1 further values that are needed there are 0", "node n4 has no label zone")
	n := node("n4", corev1.ConditionTrue)
	check.OK(t, e.Get(t.Context(), client.ObjectKeyFromObject(n), n))
	metav1.SetMetaDataLabel(&n.ObjectMeta, "zone", "four")
	check.OK(t, e.Update(t.Context(), n))
	run(t, apitest.Admin, "replicas", "pvc-1", "3", "--wait=false").says(t, "and is to have 3")
	e.says(r, func(r *v1alpha1.ReplicatedVolume) { r.Spec.Replicas, r.Spec.TopologyKey = 2, "" })

	run(t, apitest.Admin, "volumes").says(t, "pvc-1", "1/2", "n1,n3")
	run(t, apitest.Admin, "describe", "pvc-1").says(t, "Replicas: 1 of 2 current", "n3", "Waiting")
	run(t, apitest.Admin, "move", "pvc-1", "--to=n4").refused(t, "pvc-1 has replicas; say which one is to move, with --from NODE: there is one on n1, n3")
	run(t, apitest.Admin, "move", "pvc-1", "--cancel").refused(t, "has replicas; say which one")
	e.says(r, func(r *v1alpha1.ReplicatedVolume) { r.Spec.Size = 600 * mib })
	run(t, apitest.Admin, "replicas", "pvc-1", "3").refused(t, "each replica needs a node of its own, and of 1 further nodes that are needed there are 0", "node n2 is cordoned", "pool n4.default has no room for 600Mi")
	e.says(r, func(r *v1alpha1.ReplicatedVolume) { r.Spec.Delete = r.UID })
	run(t, apitest.Admin, "replicas", "pvc-1", "3").refused(t, "it is being deleted")
}

// TestFirstReplicas: a volume on one node is asked for replicas. It gets them when it is released, or at once if the node that uses it can mirror; the request
// can be taken back.
func TestFirstReplicas(t *testing.T) {
	e := newEnvironment(t)
	nodes(e)
	hasten(t)
	v := movable("pvc-1", "n1", 100*mib, func(v *v1alpha1.Volume) {
		v.Spec.Claims, v.Spec.Claim = 1, &v1alpha1.Claim{Node: "n3", Mode: "m", Generation: 1}
	})
	e.add(v)
	e.add(movable("alone", "n1", 100*mib, func(v *v1alpha1.Volume) { v.Spec.Access = "" }))
	e.add(movable("follows", "n1", 100*mib, func(v *v1alpha1.Volume) { v.Spec.Mutable = map[string]string{"placement": "follow"} }))
	e.add(movable("large", "n1", 600*mib, nil))
	e.add(movable("encrypted", "n1", 100*mib, func(v *v1alpha1.Volume) { v.Spec.Encryption = string(volume.LUKS2) }))
	run(t, apitest.Admin, "replicas", "alone", "2").refused(t, "it has access=node", "restore it by a class with access: any and replicas")
	run(t, apitest.Admin, "replicas", "alone", "1").says(t, "alone: it is on node n1 alone.\n")
	run(t, apitest.Admin, "replicas", "follows", "2").refused(t, "it has placement=follow")
	run(t, apitest.Admin, "replicas", "large", "2").refused(t, "of 1 further nodes that are needed there are 0")
	run(t, apitest.Admin, "replicas", "encrypted", "2").refused(t, "of 1 further nodes that are needed there are 0", "node n3 cannot encrypt (luks2)")

	used := "pvc-1: it is used on node n3, which cannot mirror what it uses already: its driver is older, or its kernel has no dm-mirror: end what uses it (a Deployment or StatefulSet: scale it to 0), and it gets its replicas when it is released\n"
	run(t, apitest.Admin, "replicas", "pvc-1", "2", "--wait=false").says(t, "pvc-1: it is on node n1, and is to have 2 replicas", used)
	check.OK(t, e.Get(t.Context(), client.ObjectKeyFromObject(v), v))
	if v.Spec.Replicas != 2 {
		t.Fatalf("it is asked for %d", v.Spec.Replicas)
	}
	run(t, apitest.Admin, "describe", "pvc-1").says(t, "2 replicas, when this is over: it is used on node n3")
	run(t, apitest.Admin, "replicas", "pvc-1", "1").says(t, "the request for replicas was taken back")
	check.OK(t, e.Get(t.Context(), client.ObjectKeyFromObject(v), v))
	if v.Spec.Replicas != 0 {
		t.Fatalf("it was taken back, and is asked for %d", v.Spec.Replicas)
	}

	can := movable("pvc-2", "n1", 100*mib, func(v *v1alpha1.Volume) {
		v.Spec.Claims, v.Spec.Claim = 1, &v1alpha1.Claim{Node: "n4", Mode: "m", Generation: 1}
	})
	e.add(can)
	p := &v1alpha1.Pool{ObjectMeta: metav1.ObjectMeta{Name: overview.PoolName("n4", "default")}}
	check.OK(t, e.Get(t.Context(), client.ObjectKeyFromObject(p), p))
	p.Status.Network.Mirrors = true
	check.OK(t, e.Status().Update(t.Context(), p))
	run(t, apitest.Admin, "replicas", "pvc-2", "2", "--wait=false").says(t, "and is to have 2 replicas: it becomes a volume with replicas, of which that is the first", "pvc-2: it becomes a volume with replicas\n")

	program := start(t, apitest.Admin, "replicas", "pvc-1", "2")
	becomes(e, v, func(v *v1alpha1.Volume) bool { return v.Spec.Replicas == 2 })
	program.saying(t, used)
	e.edited(v, func(v *v1alpha1.Volume) { v.Spec.Claim = nil })
	program.saying(t, "it becomes a volume with replicas\n")
	e.edited(v, func(v *v1alpha1.Volume) { v.Spec.ReplicaOf = v.Name })
	leg := legOf("pvc-1", "pvc-1-second", "n4", 100*mib)
	e.add(leg)
	r := &v1alpha1.ReplicatedVolume{ObjectMeta: metav1.ObjectMeta{Name: v.Name}, Spec: v1alpha1.ReplicatedVolumeSpec{Name: "pvc-1", Pool: "default", Replicas: 2, Size: 100 * mib, Legs: []string{v.Name, leg.Name}, Numbered: 2},
		Status: v1alpha1.ReplicatedVolumeStatus{Made: new(metav1.NowMicro()), Legs: []v1alpha1.Leg{{Name: v.Name, Current: true}}}}
	e.add(r)
	have := program.ended(t)
	check.OK(t, have.err)
	have.says(t, "pvc-1: it becomes a volume with replicas\n", "pvc-1: it has 2 replicas, and what 1 of them lack is copied when the volume is used.\n")
}

// TestReplicasOfDeleted: a volume that is becoming one with replicas is deleted while the program waits. Its ReplicatedVolume stays for a moment, and has no
// leg any more.
func TestReplicasOfDeleted(t *testing.T) {
	e := newEnvironment(t)
	nodes(e)
	hasten(t)
	v := movable("pvc-1", "n1", 100*mib, nil)
	e.add(v)
	program := start(t, apitest.Admin, "replicas", "pvc-1", "2")
	becomes(e, v, func(v *v1alpha1.Volume) bool { return v.Spec.Replicas == 2 })
	program.saying(t, "it becomes a volume with replicas\n")
	e.edited(v, func(v *v1alpha1.Volume) { v.Spec.ReplicaOf = v.Name })
	e.add(&v1alpha1.ReplicatedVolume{ObjectMeta: metav1.ObjectMeta{Name: v.Name}, Spec: v1alpha1.ReplicatedVolumeSpec{Name: "pvc-1", Pool: "default", Replicas: 2, Size: 100 * mib, Legs: []string{v.Name}, Numbered: 1}})
	e.remove(v)
	program.ended(t).refused(t, "pvc-1: it was deleted meanwhile")
}

// TestReplicaCapacity: the room for a class with replicas is what fits into as many places of one network as it has replicas, with the first one where its
// allowedTopologies are. If it is encrypted, only the nodes that can encrypt count, and each volume has a header besides.
func TestReplicaCapacity(t *testing.T) {
	e := newEnvironment(t)
	for name, zone := range map[string]string{"n1": "a", "n2": "a", "n3": "b", "n4": "", "n5": "c", "n6": "d", "n7": "e"} { // n4 has no zone, n5 is cordoned, n6 alone in its network, n7 in none
		n, p := node(name, corev1.ConditionTrue), networked(name, 100*mib)
		if zone != "" {
			metav1.SetMetaDataLabel(&n.ObjectMeta, "zone", zone)
		}
		n.Spec.Unschedulable = name == "n5"
		if name == "n6" {
			p.Status.Network.Name = "alone"
		}
		if name == "n1" || name == "n3" { // the others cannot encrypt
			p.Status.Encryption = []string{string(volume.LUKS2)}
		}
		if name == "n7" {
			p.Status.Network = nil
		}
		e.add(n)
		e.add(p)
	}
	class := func(name, replicas, key string, on ...string) {
		c := &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Provisioner: v1alpha1.DefaultDriver, Parameters: map[string]string{"access": "any", "replicas": replicas}}
		if key != "" {
			c.Parameters["replicaTopologyKey"] = key
		}
		if len(on) > 0 {
			c.AllowedTopologies = []corev1.TopologySelectorTerm{{MatchLabelExpressions: []corev1.TopologySelectorLabelRequirement{{Key: v1alpha1.TopologyKey, Values: on}}}}
		}
		e.add(c)
	}
	encrypted := func(name, replicas string) {
		e.add(&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Provisioner: v1alpha1.DefaultDriver, Parameters: map[string]string{"access": "any", "replicas": replicas, "encryption": string(volume.LUKS2)}})
	}
	encrypted("encrypted", "1")
	encrypted("encrypted-two", "2")
	class("one", "1", "")
	class("none", "1", "", "n7")
	class("two", "2", "")
	class("three", "3", "")
	class("zones", "2", "zone") // every volume has a replica on n3
	class("more-zones", "3", "zone")
	class("first-on-n1", "2", "", "n1")
	class("first-alone", "2", "", "n6")
	r := run(t, apitest.Admin, "capacity", "-o", "json")
	check.OK(t, r.err)
	var have struct {
		Classes []struct {
			Class              string
			Available, Largest int64
		}
	}
	check.OK(t, json.Unmarshal([]byte(r.stdout), &have))
	want := map[string][2]int64{"one": {600, 100}, "none": {}, "two": {200, 100}, "three": {400 / 3, 100}, "zones": {100, 100}, "more-zones": {}, "first-on-n1": {100, 100}, "first-alone": {},
		"encrypted": {200, 84}, "encrypted-two": {100, 84}}
	for _, one := range have.Classes {
		if found := [2]int64{one.Available / mib, one.Largest / mib}; found != want[one.Class] {
			t.Errorf("%s: there is room for %v MiB, want %v", one.Class, found, want[one.Class])
		}
		delete(want, one.Class)
	}
	if len(want) > 0 {
		t.Errorf("not shown: %v", want)
	}
}
