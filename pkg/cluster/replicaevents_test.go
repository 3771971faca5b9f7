package cluster_test

import (
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/events"
	"github.com/ashlar-csi/ashlar/pkg/cluster/store"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// replicatedClaim makes a volume with two replicas for a claim, with its PersistentVolume, and claims it for node-1.
func (w *environment) replicatedClaim(s *store.Store) (v volume.Volume, pv *corev1.PersistentVolume, claim *corev1.PersistentVolumeClaim) {
	w.Helper()
	claim = w.claim("data")
	spec := w.specOf(claim)
	spec.Access, spec.Replicas, spec.Nodes = volume.AccessAny, volume.Replicas{Count: 2}, []string{"node-1"}
	v, err := s.Create(w.ctx, spec)
	check.OK(w, err)
	pv = &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: spec.Name}, Spec: corev1.PersistentVolumeSpec{
		Capacity: claim.Spec.Resources.Requests, AccessModes: claim.Spec.AccessModes, ClaimRef: &corev1.ObjectReference{Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID},
		PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: cluster.DefaultDriver, VolumeHandle: v.ID.String()}}}}
	check.OK(w, w.Create(w.ctx, pv))
	pv.Status.Phase = corev1.VolumeBound
	check.OK(w, w.Status().Update(w.ctx, pv))
	claim.Spec.VolumeName = pv.Name
	check.OK(w, w.Update(w.ctx, claim))
	check.OK(w, second(s.Claim(w.ctx, v.ID, on("node-1"))))
	return v, pv, claim
}

// TestReplicaEvents: events on a volume's object, its PersistentVolume and its claim tell that a replica is not current, joins, is current again, differs,
// is lost, was replaced and was removed. Problems of a leg alone are only on its Volume.
func TestReplicaEvents(t *testing.T) {
	w, all, s := legCluster(t, 3)
	v, pv, claim := w.replicatedClaim(s)
	spec := volume.Spec{Name: v.Name}
	object := cluster.ReplicatedNamed(v.ID.Key)
	time.Sleep(time.Second) // creation times have whole seconds
	told := func(reason, says string) { w.Helper(); w.told(reason, says, object, pv, claim) }

	away := w.legsOf(spec.Name)[1]
	set := func(edit func(l *v1alpha1.Leg)) {
		w.says(spec.Name, func(r *v1alpha1.ReplicatedVolume) {
			r.Spec.Claim = w.whole(spec.Name).Spec.Claim
			edit(r.Leg(away.Name))
		})
	}
	set(func(l *v1alpha1.Leg) {
		*l = v1alpha1.Leg{Name: l.Name, State: v1alpha1.LegWaiting, Message: "its node does not answer on the network", Since: new(metav1.Now())}
	})
	told("ReplicaNotCurrent", "replica on node "+away.Spec.NodeName+" does not have all that was written, and is waited for: its node does not answer on the network")
	set(func(l *v1alpha1.Leg) {
		l.State, l.Progress = v1alpha1.LegJoining, &v1alpha1.Progress{Done: 1, Total: 2}
	})
	told(events.ReplicaJoining, "what its replica on node "+away.Spec.NodeName+" lacks is being copied")
	set(func(l *v1alpha1.Leg) { *l = v1alpha1.Leg{Name: l.Name, Current: true, State: v1alpha1.LegCurrent} })
	told(events.ReplicaCurrent, "replica on node "+away.Spec.NodeName+" has all that was written again")

	scrubbed := func(c v1alpha1.Scrub) { w.says(spec.Name, func(r *v1alpha1.ReplicatedVolume) { r.Status.Scrub = &c }) }
	found, differences := metav1.NewTime(time.Now().Add(-2*time.Hour)), &v1alpha1.Differences{Bytes: 4096, Ranges: []v1alpha1.ByteRange{{Offset: 8192, Length: 4096}}}
	scrubbed(v1alpha1.Scrub{Progress: &v1alpha1.Progress{Done: 1, Total: 2}, Found: differences, Turned: &found})
	told(v1alpha1.ReasonReplicasDiffer, "4096 bytes are not the same on all its replicas, by the scrub that is under way, at 8192+4096")
	scrubbed(v1alpha1.Scrub{Last: differences, Ended: new(metav1.Now()), Turned: &found})
	scrubbed(v1alpha1.Scrub{Ended: new(metav1.Now()), Turned: new(metav1.Now())})
	told(events.ReplicasEqual, "its replicas were compared anew, and are equal")
	told(v1alpha1.ReasonReplicasDiffer, "by the scrub that is under way") // still only one event

	m := all[away.Spec.NodeName]
	m.stop()
	check.OK(t, m.local.Delete(w.ctx, legID(away)))
	w.start(m.machine)
	told(events.ReplicaLost, "its replica on node "+away.Spec.NodeName+" is lost, and another one takes its place")
	w.told("VolumeMissing", "does not have this volume any more", cluster.VolumeNamed(away.Name))
	if found := w.eventsOn(claim, "VolumeMissing"); len(found) > 0 {
		t.Errorf("that a leg is missing is told of the claim: %+v", found)
	}
	w.eventually("there is another leg", func() bool {
		legs := w.legsOf(spec.Name)
		return len(legs) == 3 && legs[2].Status.Created != nil
	})
	other := w.legsOf(spec.Name)[2]
	told(events.ReplicaAdded, "another replica was made, on node "+other.Spec.NodeName)
	w.becomes(spec.Name, object.Name, other.Name)
	told(events.ReplicaRemoved, "it does without its replica on node "+away.Spec.NodeName)
	w.eventually("the lost one is gone", func() bool { return len(w.legsOf(spec.Name)) == 2 })
	if removed := w.whole(spec.Name).Spec.Removed; len(removed) != 1 || removed[0].Name != away.Name || removed[0].NodeName != away.Spec.NodeName || time.Since(removed[0].Time.Time) > time.Minute {
		t.Errorf("removed are %+v", removed)
	}
	if found := w.eventsOn(claim, events.ReplicaCurrent); len(found) != 1 {
		t.Errorf("a leg that is gone is current again: %+v", found)
	}

	w.edit(spec.Name, func(r *v1alpha1.ReplicatedVolume) { r.Spec.Replicas = 3 })
	w.eventually("there are three", func() bool { return len(w.legsOf(spec.Name)) == 3 })
	w.becomes(spec.Name, object.Name)
	check.OK(t, w.Delete(w.ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}}))
	told("NoCurrentReplica", "none of its replicas that have all that was written can be used: node node-1: it has no Node object")
	if found := w.eventsOn(claim, "NodeGone"); len(found) > 0 {
		t.Errorf("that the bytes of a leg are nowhere else is told of the claim: %+v", found)
	}
}

// TestReplicatedDeletedEvents: somebody deletes the object of a volume that is used. Events of the PersistentVolume and the claim tell so.
func TestReplicatedDeletedEvents(t *testing.T) {
	w, _, s := legCluster(t, 2)
	v, pv, claim := w.replicatedClaim(s)
	object := cluster.ReplicatedNamed(v.ID.Key)
	w.eventually("its replicas know that they are", func() bool {
		return !slices.ContainsFunc(w.legsOf(v.Name), func(leg *v1alpha1.Volume) bool { return leg.Status.ReplicaOf == "" })
	})
	check.OK(t, w.Delete(w.ctx, object))
	w.told("NoCurrentReplica", "its ReplicatedVolume "+object.Name+" was deleted", object, pv, claim)
}
