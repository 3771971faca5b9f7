package main

import (
	"context"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// TestScrub: each call asks for one compare more, and prints what is known.
func TestScrub(t *testing.T) {
	e := newEnvironment(t)
	key := volume.KeyOf("pvc-1")
	e.add(movable("pvc-1", "n1", 50*mib, func(v *v1alpha1.Volume) { v.Spec.ReplicaOf = key }))
	e.add(movable("pvc-2", "n1", 50*mib, nil))
	r := &v1alpha1.ReplicatedVolume{ObjectMeta: metav1.ObjectMeta{Name: key}, Spec: v1alpha1.ReplicatedVolumeSpec{Name: "pvc-1", Pool: "default", Replicas: 2, Size: 50 * mib, Numbered: 1, Legs: []string{key}}}
	e.add(r)
	run(t, apitest.Admin, "scrub", "pvc-2").refused(t, "pvc-2 has no replicas, so there is nothing to compare; to give it one more: kubectl ashlar replicas pvc-2 2")
	run(t, apitest.Admin, "scrub", "nobody").refused(t, `there is no volume "nobody"`)
	run(t, apitest.Admin, "scrub", "pvc-1").says(t, "nobody uses it now: its replicas are compared when somebody does.\nThey were not compared yet.\n")
	check.OK(t, e.Get(t.Context(), client.ObjectKeyFromObject(r), r))
	r.Status.Scrub = &v1alpha1.Scrub{Asked: 1, Ended: new(metav1.NewTime(time.Unix(1e9, 0))), Progress: &v1alpha1.Progress{Done: 1, Total: 4}}
	check.OK(t, e.Status().Update(t.Context(), r))
	run(t, apitest.Admin, "scrub", r.ID()).says(t, "By the scrub that ended at 2001-09-09T01:46:40Z they are equal; one is under way, at 25 %, which ends first.\n")
	check.OK(t, e.Get(t.Context(), client.ObjectKeyFromObject(r), r))
	r.Spec.Claims, r.Spec.Claim = 1, &v1alpha1.Claim{Node: "n7", Mode: "mount", Generation: 1}
	check.OK(t, e.Update(t.Context(), r))
	r.Status.Scrub.Last = &v1alpha1.Differences{Bytes: 4096, Ranges: []v1alpha1.ByteRange{{Offset: 8192, Length: 4096}}}
	check.OK(t, e.Status().Update(t.Context(), r))
	run(t, apitest.Admin, "scrub", key).says(t, "node n7 compares its replicas", "4096 bytes are not the same on all its replicas, by the scrub that ended at 2001-09-09T01:46:40Z, at 8192+4096; one is under way")
	check.OK(t, e.Get(t.Context(), client.ObjectKeyFromObject(r), r))
	if r.Spec.Scrubs != 3 {
		t.Errorf("it was asked for %d times", r.Spec.Scrubs)
	}
	r.Spec.Claim, r.Spec.Delete = nil, r.UID
	check.OK(t, e.Update(t.Context(), r))
	run(t, apitest.Admin, "scrub", "pvc-1").refused(t, "ask for the replicas of pvc-1 to be compared: it is being deleted")
}

// TestScrubOfOlderDefinitions: with CRDs that do not know the request, it is not said that the replicas are compared.
func TestScrubOfOlderDefinitions(t *testing.T) {
	e := newEnvironment(t)
	key := volume.KeyOf("pvc-1")
	e.add(movable("pvc-1", "n1", 50*mib, func(v *v1alpha1.Volume) { v.Spec.ReplicaOf = key }))
	r := &v1alpha1.ReplicatedVolume{ObjectMeta: metav1.ObjectMeta{Name: key}, Spec: v1alpha1.ReplicatedVolumeSpec{Name: "pvc-1", Pool: "default", Replicas: 2, Size: 50 * mib, Numbered: 1, Legs: []string{key}}}
	e.add(r)
	server := apitest.Get(t)
	t.Cleanup(func() { check.OK(t, server.Define(context.Background())) })
	check.OK(t, server.Redefine(t.Context(), "replicatedvolumes.ashlar.dev", func(crd *unstructured.Unstructured) {
		versions, _, _ := unstructured.NestedSlice(crd.Object, "spec", "versions")
		spec := versions[0].(map[string]any)["schema"].(map[string]any)["openAPIV3Schema"].(map[string]any)["properties"].(map[string]any)["spec"].(map[string]any)
		delete(spec, "x-kubernetes-validations")
		delete(spec["properties"].(map[string]any), "scrubs")
		check.OK(t, unstructured.SetNestedSlice(crd.Object, versions, "spec", "versions"))
	}))
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		try := r.DeepCopy()
		try.Spec.Scrubs = 1
		check.OK(t, e.Patch(t.Context(), try, client.MergeFrom(r), client.DryRunAll))
		if try.Spec.Scrubs == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the older definitions are not in force")
		}
	}
	run(t, apitest.Admin, "scrub", "pvc-1").refused(t, "know no such request", "deploy/kubernetes/crds")
}
