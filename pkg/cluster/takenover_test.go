package cluster_test

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/lost"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// takenOver is an attacker who has the token of the agent of a node, and writes what that may.
type takenOver struct {
	*environment
	client.Client
	node string
}

func (w *environment) takenOver(t *testing.T, node string) takenOver {
	c, err := client.New(apitest.Get(t).Agent(t, node), client.Options{Scheme: w.Scheme()})
	check.OK(t, err)
	return takenOver{w, c, node}
}

// has creates the object of a volume or snapshot on its node, and reports that it was made.
func (x takenOver) has(o cluster.Object, size int64) {
	x.Helper()
	check.OK(x, x.Create(x.ctx, o))
	before := o.DeepCopyObject().(client.Object)
	now := metav1.NowMicro()
	o.Common().Created, o.Common().Size = &now, size
	meta.SetStatusCondition(&o.Common().Conditions, metav1.Condition{Type: v1alpha1.Ready, Status: metav1.ConditionTrue, Reason: cluster.ReasonCreated})
	check.OK(x, x.Client.Status().Patch(x.ctx, o, client.MergeFrom(before)))
}

// TestGroupTakenOver: an attacker writes snapshots of a taken-over node that name a group of another node. They do not belong to it: the group can be
// read, asked for again, and deleted.
func TestGroupTakenOver(t *testing.T) {
	w, m, s := newCluster(t)
	x := w.takenOver(t, "node-2")
	v, err := s.Create(w.ctx, spec("a"))
	check.OK(t, err)
	v2, err := s.Create(w.ctx, spec("b"))
	check.OK(t, err)
	sources := []volume.ID{v.ID, v2.ID}
	group, err := s.CreateGroup(w.ctx, "group", sources)
	check.OK(t, err)

	fake := snapshotOn("node-2", "fake")
	fake.Spec.Name, fake.Spec.Group = "group", &v1alpha1.Group{Key: group.ID.Key, Size: 2}
	x.has(fake, mib)
	alone := snapshotOn("node-2", "alone")
	x.has(alone, mib)
	w.eventually("the store has heard of both", func() bool { return second(s.GetSnapshot(w.ctx, cluster.SnapshotID(alone))) == nil })
	w.eventually("those of the group, and the one of node-2 that is of none, are listed", func() bool {
		there, err := s.ListSnapshots(w.ctx, volume.ID{}, volume.ID{}, 0)
		return err == nil && len(there) == 3
	})
	fails(t, second(s.GetSnapshot(w.ctx, cluster.SnapshotID(fake))), errdefs.ErrNotFound)
	for _, of := range []func() (volume.Group, error){
		func() (volume.Group, error) { return s.GetGroup(w.ctx, group.ID) },
		func() (volume.Group, error) { return s.CreateGroup(w.ctx, "group", sources) },
	} {
		if again, err := of(); err != nil || !reflect.DeepEqual(again, group) {
			t.Errorf("%+v, %v\nwas %+v", again, err, group)
		}
	}
	for _, one := range group.Snapshots {
		check.OK(t, second(s.GetSnapshot(w.ctx, one.ID)))
	}
	check.OK(t, s.DeleteGroup(w.ctx, group.ID))
	check.OK(t, errors.Join(s.Delete(w.ctx, v.ID), s.Delete(w.ctx, v2.ID)))
	w.tally(m)
}

// TestCollectorTakenOver: while the collector waits for an abandoned volume to be deleted, an attacker creates its object again without the claim that it
// was for. That is not taken to be abandoned, and the collector goes on with others.
func TestCollectorTakenOver(t *testing.T) {
	w := newEnvironment(t)
	w.node("node-2", true)
	x := w.takenOver(t, "node-2")
	s, _ := w.sweeping()
	name := cluster.ProvisionedPrefix + "00000000-0000-0000-0000-000000000000"
	x.has(volumeOn("node-2", name), mib)
	w.eventually("its node is asked to delete it", func() bool { v := w.object(name); return v != nil && v.Spec.Abandoned })
	check.OK(t, x.Delete(w.ctx, w.object(name)))
	again := volumeOn("node-2", name)
	again.Spec.ClaimRef = nil
	check.OK(t, x.Create(w.ctx, again))
	other := volumeOn("node-2", cluster.ProvisionedPrefix+"11111111-1111-1111-1111-111111111111") // the collector looks at it after the first one
	x.has(other, mib)
	w.eventually("the collector goes on", func() bool { return w.object(other.Spec.Name).Spec.Abandoned })
	if w.object(name).Spec.Abandoned {
		t.Error("what is for no claim is taken to be abandoned")
	}
	check.OK(t, s.Ready(w.ctx))
}

// TestEventsTakenOver: an attacker cannot cause events on the claims and PersistentVolumes of other nodes' volumes, whatever objects it creates that name
// them.
func TestEventsTakenOver(t *testing.T) {
	w, _, s := newCluster(t)
	w.node("node-2", true)
	x := w.takenOver(t, "node-2")
	_, bound, pv := w.claimed(s, "bound")
	pending := w.claim("pending")
	says := func(name string, claim *corev1.PersistentVolumeClaim, persistentVolume string) *v1alpha1.Volume {
		v := volumeOn("node-2", name)
		v.Spec.ClaimRef, v.Spec.PersistentVolume = &v1alpha1.ClaimRef{Namespace: claim.Namespace, Name: claim.Name}, persistentVolume
		x.has(v, mib)
		before := v.DeepCopy()
		v.Status.Health = []v1alpha1.Problem{{Severity: "DataLoss", Reason: "DataLoss", Message: "all is lost"}}
		check.OK(t, x.Client.Status().Patch(w.ctx, v, client.MergeFrom(before)))
		return v
	}
	for _, v := range []*v1alpha1.Volume{says("as-"+pv.Name, bound, pv.Name), says("as-pvc-"+string(pending.UID), pending, ""),
		says("own", bound, "")} {
		w.told("DataLoss", "all is lost", v)
	}
	last := says("last", bound, pv.Name)
	w.told("DataLoss", "all is lost", last) // the events of the earlier ones are written by then
	for _, claim := range []*corev1.PersistentVolumeClaim{bound, pending} {
		if all := w.eventsOn(claim, ""); len(all) > 0 {
			t.Errorf("on claim %s: %s", claim.Name, all[0].Message)
		}
	}
	if all := w.eventsOn(pv, ""); len(all) > 0 {
		t.Errorf("on %s: %s", pv.Name, all[0].Message)
	}
}

// TestLargeObjects: the definitions limit the size of objects, whoever writes them, as the controllers have all of them in memory, and etcd on its disk.
func TestLargeObjects(t *testing.T) {
	w := newEnvironment(t)
	x := w.takenOver(t, nodeName)
	v, p := volumeOn(nodeName, "a"), poolOn(nodeName, "default")
	x.has(v, mib)
	check.OK(t, x.Create(w.ctx, p))
	long := strings.Repeat("x", 1<<20)
	problems := make([]v1alpha1.Problem, 1000)
	for i := range problems {
		problems[i] = v1alpha1.Problem{Severity: "Degraded", Reason: "x", Message: "x"}
	}
	conditions := []metav1.Condition{{Type: "Healthy", Status: "False", Reason: "x", Message: long[:30000], LastTransitionTime: metav1.Now()}}
	for what, edit := range map[string]func(*v1alpha1.Volume){
		"PersistentVolume": func(o *v1alpha1.Volume) { o.Spec.PersistentVolume = long },
		"claim":            func(o *v1alpha1.Volume) { o.Spec.ClaimRef.Name = long },
		"namespace":        func(o *v1alpha1.Volume) { o.Spec.ClaimRef.Namespace = long },
		"parameter":        func(o *v1alpha1.Volume) { o.Spec.Mutable = map[string]string{"a": long} },
	} {
		o := volumeOn(nodeName, "new")
		edit(o)
		if err := x.Create(w.ctx, o); !apierrors.IsInvalid(err) {
			t.Errorf("a volume with a large %s: %v", what, err)
		}
	}
	for what, edit := range map[string]func(*v1alpha1.VolumeStatus){
		"list of problems":      func(s *v1alpha1.VolumeStatus) { s.Health = problems },
		"message of a problem":  func(s *v1alpha1.VolumeStatus) { s.Health = []v1alpha1.Problem{{Severity: "Degraded", Message: long}} },
		"reason of a problem":   func(s *v1alpha1.VolumeStatus) { s.Health = []v1alpha1.Problem{{Severity: "Degraded", Reason: long}} },
		"condition":             func(s *v1alpha1.VolumeStatus) { s.Conditions = conditions },
		"failure":               func(s *v1alpha1.VolumeStatus) { s.Failure = &v1alpha1.Failure{Message: long} },
		"summary":               func(s *v1alpha1.VolumeStatus) { s.Summary.State = long },
		"parameter in force":    func(s *v1alpha1.VolumeStatus) { s.Mutable = map[string]string{long: ""} },
		"size less than 0, not": func(s *v1alpha1.VolumeStatus) { s.Size = -1 },
	} {
		o := v.DeepCopy()
		edit(&o.Status)
		if err := x.Client.Status().Patch(w.ctx, o, client.MergeFrom(v)); !apierrors.IsInvalid(err) {
			t.Errorf("a volume with a large %s: %v", what, err)
		}
	}
	for what, edit := range map[string]func(*v1alpha1.PoolStatus){
		"list of strays":        func(s *v1alpha1.PoolStatus) { s.Strays = make([]v1alpha1.Stray, 1000) },
		"name of a stray":       func(s *v1alpha1.PoolStatus) { s.Strays = []v1alpha1.Stray{{Name: long}} },
		"list of problems":      func(s *v1alpha1.PoolStatus) { s.Health = problems },
		"condition":             func(s *v1alpha1.PoolStatus) { s.Conditions = conditions },
		"kind":                  func(s *v1alpha1.PoolStatus) { s.Kind = long },
		"size less than 0, not": func(s *v1alpha1.PoolStatus) { s.Total = -1 },
	} {
		o := p.DeepCopy()
		edit(&o.Status)
		if err := x.Client.Status().Patch(w.ctx, o, client.MergeFrom(p)); !apierrors.IsInvalid(err) {
			t.Errorf("a pool with a large %s: %v", what, err)
		}
	}
}

// TestManyProblems: if a volume has more problems than its object can hold, the least severe are left out.
func TestManyProblems(t *testing.T) {
	w, m, s := newCluster(t)
	v, err := s.Create(w.ctx, spec("a"))
	check.OK(t, err)
	var all []blockdev.Problem
	for i := range 40 {
		all = append(all, blockdev.Problem{Severity: blockdev.Degraded, Reason: fmt.Sprint("Reason", i), Message: strings.Repeat("ü", 10000)})
	}
	m.disks[0].Ail(ref(v), append(all, blockdev.Problem{Severity: blockdev.DataLoss, Reason: "Worst", Message: "it is gone"})...)
	w.touch(w.object(v.Name))
	w.eventually("it is reported", func() bool {
		health := w.object(v.Name).Status.Health
		return len(health) == 16 && health[0].Reason == "Worst"
	})
}

// TestLostTakenOver: when the PersistentVolumes and claims of a cluster are made anew (package lost), an attacker cannot put bytes of its own in the place
// of others', nor use others' PersistentVolumes.
func TestLostTakenOver(t *testing.T) {
	w, m, s := newCluster(t)
	x := w.takenOver(t, "node-2")
	of := func(name, claim string) volume.Spec {
		one := spec(name)
		one.For = volume.Requester{Namespace: "default", Name: claim, PersistentVolume: name}
		return one
	}
	mine, err := s.Create(w.ctx, of("pvc-taken-1", "data"))
	check.OK(t, err)
	undisputed, err := s.Create(w.ctx, of("pvc-taken-2", "logs"))
	check.OK(t, err)
	for _, v := range []volume.Volume{mine, undisputed} { // blank ones would count as abandoned
		check.OK(t, m.local.SetFormat(w.ctx, v.ID, volume.Format{State: volume.Raw}))
	}
	snapshot, err := s.CreateSnapshot(w.ctx, "snapshot-1", mine.ID)
	check.OK(t, err)
	_, bound, pv := w.claimed(s, "bound")
	says := func(name, claim, persistentVolume string) *v1alpha1.Volume {
		v := volumeOn("node-2", name)
		v.Spec.ClaimRef, v.Spec.PersistentVolume = &v1alpha1.ClaimRef{Namespace: "default", Name: claim}, persistentVolume
		x.has(v, mib)
		return v
	}
	fakes := map[string]string{ // the names of their PersistentVolumes, by volume ID
		says("another", "data", "pvc-another").ID():      "pvc-another",
		says("of the bound", bound.Name, "pvc-new").ID(): "pvc-new",
		says("name taken", "loot", pv.Name).ID():         volume.KeyOf("name taken"),
		says("name wanted", "data", "pvc-taken-1").ID():  volume.KeyOf("name wanted"),
	}
	fake := snapshotOn("node-2", "fake-snapshot")
	fake.Spec.Source = mine.ID.Key
	x.has(fake, mib)

	objects, doubts, err := lost.Find(w.ctx, w, lost.Options{Driver: cluster.DefaultDriver, Class: "c", AccessMode: "ReadWriteOnce", Namespace: "nowhere"})
	check.OK(t, err)
	for _, o := range objects {
		switch o := o.(type) {
		case *corev1.PersistentVolume:
			id, claim := o.Spec.CSI.VolumeHandle, o.Spec.ClaimRef
			switch {
			case id == undisputed.ID.String():
				if claim == nil || claim.Name != "logs" || o.Name != "pvc-taken-2" {
					t.Errorf("of a volume that nobody else says to be: %+v", o)
				}
			case id == mine.ID.String(), fakes[id] == o.Name && claim == nil:
				if claim != nil || o.Name == "pvc-taken-1" { // a claim may name that PersistentVolume
					t.Errorf("%s is for a claim that several volumes say that they were made for", o.Name)
				}
			case fakes[id] == o.Name && claim.Name == "loot": // there is no such claim
			default:
				t.Errorf("%s of %s for %v", o.Name, id, claim)
			}
		case *corev1.PersistentVolumeClaim:
			if o.Name != "logs" && (o.Name != "loot" || o.Spec.VolumeName == pv.Name) {
				t.Errorf("claim %s of %s", o.Name, o.Spec.VolumeName)
			}
		default:
			if name := o.GetName(); o.GetNamespace() != "" && (o.GetNamespace() == "default") != (name == "snapshot-1") {
				t.Errorf("%s in namespace %s", name, o.GetNamespace())
			}
		}
	}
	if all := strings.Join(doubts, "\n"); len(doubts) != 4 || !strings.Contains(all, "PersistentVolume "+mine.ID.Key+" ("+mine.ID.String()+" on node node-1) is for no claim") ||
		!strings.Contains(all, "PersistentVolume pvc-another") || !strings.Contains(all, "default/bound, for which it was made") {
		t.Errorf("doubts:\n%s", all)
	}
	check.OK(t, s.DeleteSnapshot(w.ctx, snapshot.ID))
}

// boundTo returns the affinity of a PersistentVolume whose volume is on a node.
func boundTo(node string) *corev1.VolumeNodeAffinity {
	return &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
		MatchExpressions: []corev1.NodeSelectorRequirement{{Key: v1alpha1.TopologyKey, Operator: corev1.NodeSelectorOpIn, Values: []string{node}}}}}}}
}

// TestStraysTakenOver: an attacker reports strays with the IDs of volumes and groups of other nodes. Deletions of these succeed all the same, also
// repeated ones.
func TestStraysTakenOver(t *testing.T) {
	w, _, s := newCluster(t)
	x := w.takenOver(t, "node-2")
	v, _, pv := w.claimed(s, "data")
	pv.Spec.NodeAffinity = boundTo(nodeName)
	check.OK(t, w.Update(w.ctx, pv))
	group, err := s.CreateGroup(w.ctx, "group", []volume.ID{v.ID})
	check.OK(t, err)
	p := poolOn("node-2", "default")
	check.OK(t, x.Create(w.ctx, p))
	before := p.DeepCopy()
	p.Status.StrayCount, p.Status.Strays = 2, []v1alpha1.Stray{{ID: v.ID.String()}, {ID: "snap.default." + volume.KeyOf("x"), Group: group.ID.String()}}
	check.OK(t, x.Client.Status().Patch(w.ctx, p, client.MergeFrom(before)))
	w.eventually("the store has heard of it", func() bool {
		return errors.Is(s.DeleteGroup(w.ctx, volume.GroupID{Key: volume.KeyOf("x")}), nil) && errors.Is(s.DeleteSnapshot(w.ctx, volume.ID{Kind: blockdev.Snapshot, Pool: "default", Key: volume.KeyOf("x")}), errdefs.ErrUnavailable)
	})
	check.OK(t, s.DeleteGroup(w.ctx, group.ID))
	for range 2 {
		check.OK(t, s.Delete(w.ctx, v.ID))
	}
}

// TestMovedStray: the object of a volume that other nodes can use was deleted after the volume had moved. Its PersistentVolume names the node that it was made on,
// and the network. So its deletion is not answered as done while another node of that network reports its bytes, or may have them and has reported none.
func TestMovedStray(t *testing.T) {
	w, _, s := newCluster(t)
	x := w.takenOver(t, "node-2")
	_, _, pv := w.claimed(s, "data")
	gone := volume.ID{Kind: blockdev.Volume, Pool: "default", Key: volume.KeyOf("gone")}
	moved := pv.DeepCopy()
	moved.ObjectMeta, moved.Spec.ClaimRef = metav1.ObjectMeta{Name: "gone"}, nil
	moved.Spec.CSI.VolumeHandle, moved.Spec.NodeAffinity = gone.String(), boundTo(nodeName)
	network := boundTo("storage").Required.NodeSelectorTerms
	network[0].MatchExpressions[0].Key = v1alpha1.NetworkKey
	moved.Spec.NodeAffinity.Required.NodeSelectorTerms = append(moved.Spec.NodeAffinity.Required.NodeSelectorTerms, network...)
	check.OK(t, w.Create(w.ctx, moved))
	check.OK(t, s.Delete(w.ctx, gone))
	p := poolOn("node-2", "default")
	check.OK(t, x.Create(w.ctx, p))
	for _, is := range []struct {
		network, says string
		strays        []v1alpha1.Stray
		accounted     bool
	}{
		{network: "storage", says: "has not reported yet"},
		{network: "storage", says: "its bytes are still on node node-2", strays: []v1alpha1.Stray{{ID: gone.String()}}, accounted: true},
		{network: "another", strays: []v1alpha1.Stray{{ID: gone.String()}}, accounted: true},
		{network: "storage", accounted: true},
	} {
		before := p.DeepCopy()
		p.Status.Network, p.Status.Strays = &v1alpha1.Network{Name: is.network, Address: "10.0.0.2:4420"}, is.strays
		p.Status.StrayCount = len(is.strays)
		if is.accounted {
			meta.SetStatusCondition(&p.Status.Conditions, metav1.Condition{Type: v1alpha1.Accounted, Status: metav1.ConditionTrue, Reason: "NoStrays"})
		}
		check.OK(t, x.Client.Status().Patch(w.ctx, p, client.MergeFrom(before)))
		var err error
		w.eventually(fmt.Sprintf("the store has heard of %+v", is), func() bool {
			err = s.Delete(w.ctx, gone)
			return is.says == "" && err == nil || is.says != "" && errors.Is(err, errdefs.ErrUnavailable) && strings.Contains(err.Error(), is.says)
		})
		if t.Failed() {
			t.Fatalf("the deletion was answered with %v", err)
		}
	}
	check.OK(t, w.Client.Delete(w.ctx, moved))
}

// TestViewTakenOver: the overview does not show what an attacker says of others' volumes: a snapshot is not shown as one of such a volume, nor a volume as
// that of another one's claim.
func TestViewTakenOver(t *testing.T) {
	w, _, s := newCluster(t)
	x := w.takenOver(t, "node-2")
	v, claim, _ := w.claimed(s, "data")
	fake := volumeOn("node-2", "fake")
	fake.Spec.ClaimRef = &v1alpha1.ClaimRef{Namespace: claim.Namespace, Name: claim.Name}
	x.has(fake, mib)
	copied := snapshotOn("node-2", "copied")
	copied.Spec.Source = v.ID.Key
	x.has(copied, mib)
	o := w.view()
	if len(o.Volumes) != 2 || len(o.Snapshots) != 1 || o.Snapshots[0].Source != "" {
		t.Errorf("%+v\n%+v", o.Volumes, o.Snapshots)
	}
	for _, one := range o.Volumes {
		if (one.Claim != nil) != (one.ID == v.ID.String()) {
			t.Errorf("volume %s of node %s is shown for claim %v", one.ID, one.Node, one.Claim)
		}
	}
}
