package main

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// TestManifests: the objects that a cluster has lost are printed in a form that the API server takes; when they are there, they are not printed.
func TestManifests(t *testing.T) {
	server := apitest.Get(t)
	scheme := runtime.NewScheme()
	no := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	no(v1alpha1.AddToScheme(scheme))
	no(corev1.AddToScheme(scheme))
	no(storagev1.AddToScheme(scheme))
	kube, err := client.New(server.Config(apitest.Admin), client.Options{Scheme: scheme})
	no(err)
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	no(server.Kubeconfig(server.Config(apitest.Admin), kubeconfig))
	var made []client.Object
	t.Cleanup(func() {
		for _, o := range made {
			if err := client.IgnoreNotFound(kube.Delete(context.Background(), o)); err != nil {
				t.Error(err)
			}
		}
	})
	now := metav1.NowMicro()
	add := func(name, fs string, ref *v1alpha1.ClaimRef, pv string, created bool) string {
		v := &v1alpha1.Volume{ObjectMeta: metav1.ObjectMeta{Name: volume.KeyOf(name)}, Spec: v1alpha1.VolumeSpec{NodeName: "node-9", Pool: "default", Name: name,
			Size: 1 << 20, Filesystem: fs, ClaimRef: ref, PersistentVolume: pv}}
		no(kube.Create(t.Context(), v))
		made = append(made, v)
		if created {
			v.Status.Created, v.Status.Size = &now, 1<<20
			no(kube.Status().Update(t.Context(), v))
		}
		return "vol.default." + v.Name
	}
	a := add("pvc-a", "xfs", &v1alpha1.ClaimRef{Namespace: "default", Name: "a"}, "pv-a", true)
	b := add("Named by Somebody", "", nil, "", true)
	encrypted := &v1alpha1.Volume{ObjectMeta: metav1.ObjectMeta{Name: volume.KeyOf("pvc-e")}, Spec: v1alpha1.VolumeSpec{NodeName: "node-9", Pool: "default", Name: "pvc-e", Size: 1 << 20, Filesystem: "xfs",
		PersistentVolume: "pv-e", Encryption: "luks2"}}
	class := &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "fast"}, Provisioner: cluster.DefaultDriver,
		Parameters: map[string]string{"csi.storage.k8s.io/node-stage-secret-name": "${pv.name}-key", "csi.storage.k8s.io/node-stage-secret-namespace": "keys"}}
	for _, o := range []client.Object{encrypted, class} {
		no(kube.Create(t.Context(), o))
		made = append(made, o)
	}
	encrypted.Status.Created, encrypted.Status.Size = &now, 1<<20
	no(kube.Status().Update(t.Context(), encrypted))
	add("unmade", "ext4", nil, "", false)
	snapshot := func(name string, group *v1alpha1.Group) string {
		key := volume.KeyOf(name)
		s := &v1alpha1.Snapshot{ObjectMeta: metav1.ObjectMeta{Name: key}, Spec: v1alpha1.SnapshotSpec{NodeName: "node-9", Pool: "default", Name: name,
			Source: volume.KeyOf("pvc-a"), Group: group}}
		no(kube.Create(t.Context(), s))
		made = append(made, s)
		s.Status.Created = &now
		no(kube.Status().Update(t.Context(), s))
		return "snap.default." + key
	}
	single := snapshot("snapshot-1", nil)
	member := snapshot("group-1", &v1alpha1.Group{Key: volume.KeyOf("g"), Size: 1})
	snapshot("part", &v1alpha1.Group{Key: volume.KeyOf("h"), Size: 2})

	run := func() []*unstructured.Unstructured {
		t.Helper()
		r := drive(t, "manifests", "--kubeconfig="+kubeconfig, "--storage-class=fast")
		if r.code != 0 {
			t.Fatalf("%+v", r)
		}
		var objects []*unstructured.Unstructured
		for _, text := range strings.Split(r.stdout, "---\n") {
			o := &unstructured.Unstructured{}
			if no(yaml.Unmarshal([]byte(text), &o.Object)); len(o.Object) > 0 {
				objects = append(objects, o)
			}
		}
		return objects
	}
	var kinds []string
	for _, o := range run() {
		kinds = append(kinds, o.GetKind()+" "+o.GetName())
		text := fmt.Sprint(o.Object)
		switch o.GetKind() {
		case "PersistentVolume", "PersistentVolumeClaim":
			no(client.WithFieldValidation(kube, metav1.FieldValidationStrict).Create(t.Context(), o))
			made = append(made, o)
		case "VolumeSnapshotContent":
			if !strings.Contains(text, "snapshotHandle:"+single) || !strings.Contains(text, "deletionPolicy:Retain") {
				t.Error(text)
			}
		case "VolumeGroupSnapshotContent":
			if !strings.Contains(text, "volumeGroupSnapshotHandle:group."+volume.KeyOf("g")) || !strings.Contains(text, "volumeSnapshotHandles:["+member+"]") {
				t.Error(text)
			}
		}
	}
	want := []string{"PersistentVolume " + volume.KeyOf("Named by Somebody"), "PersistentVolume pv-a", "PersistentVolume pv-e", "PersistentVolumeClaim a", "VolumeGroupSnapshot group-1",
		"VolumeGroupSnapshotContent group-1", "VolumeSnapshot snapshot-1", "VolumeSnapshotContent snapshot-1"}
	for _, one := range want {
		if !strings.Contains(" "+strings.Join(kinds, " | ")+" ", one) {
			t.Errorf("%s is missing in %v", one, kinds)
		}
	}
	if len(kinds) != len(want) {
		t.Errorf("printed are %v", kinds)
	}
	pv := &corev1.PersistentVolume{}
	no(kube.Get(t.Context(), client.ObjectKey{Name: "pv-a"}, pv))
	terms := pv.Spec.NodeAffinity.Required.NodeSelectorTerms
	if c := pv.Spec.CSI; c.Driver != cluster.DefaultDriver || c.VolumeHandle != a || c.FSType != "xfs" || pv.Spec.StorageClassName != "fast" ||
		pv.Spec.ClaimRef.Name != "a" || pv.Spec.Capacity.Storage().Value() != 1<<20 || pv.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimRetain ||
		terms[0].MatchExpressions[0].Values[0] != "node-9" {
		t.Errorf("%+v", pv.Spec)
	}
	no(kube.Get(t.Context(), client.ObjectKey{Name: volume.KeyOf("Named by Somebody")}, pv))
	if *pv.Spec.VolumeMode != corev1.PersistentVolumeBlock || pv.Spec.CSI.VolumeHandle != b || pv.Spec.ClaimRef != nil {
		t.Errorf("%+v", pv.Spec)
	}
	no(kube.Get(t.Context(), client.ObjectKey{Name: "pv-e"}, pv))
	if s := pv.Spec.CSI.NodeStageSecretRef; s == nil || *s != (corev1.SecretReference{Namespace: "keys", Name: "pv-e-key"}) {
		t.Errorf("%+v", pv.Spec.CSI)
	}
	for _, o := range run() {
		if strings.HasPrefix(o.GetKind(), "Persistent") {
			t.Errorf("printed again: %s %s", o.GetKind(), o.GetName())
		}
	}
}
