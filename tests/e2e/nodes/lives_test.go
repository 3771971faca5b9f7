//go:build e2e

package nodes

import (
	"context"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
)

// TestCopies: a clone and a restore are with their source, so their pods have to be placed
// there, by a scheduler that would rather have them elsewhere.
func TestCopies(t *testing.T) {
	c := start(t)
	home := c.nodes[1]
	c.claim(claim{name: "source"})
	c.pod(pod{name: "source", node: home, claims: []string{"source"}})
	c.runs("source")
	c.onwards("source")
	// Half of that node is taken; there is room for more.
	c.pod(pod{name: "busy", node: home, command: "sleep", cpu: "1"})
	c.runs("busy")

	c.apply(`{apiVersion: snapshot.storage.k8s.io/v1, kind: VolumeSnapshot, metadata: {name: cut},
		spec: {volumeSnapshotClassName: ashlar, source: {persistentVolumeClaimName: source}}}`)
	c.eventually("the snapshot is ready", func() error {
		if out := c.kubectl("get", "volumesnapshot", "cut", "-o", "jsonpath={.status.readyToUse}"); out != "true" {
			return fmt.Errorf("readyToUse is %q", out)
		}
		return nil
	})
	least := c.safe("source")
	c.onwards("source")
	c.claim(claim{name: "clone", source: "PersistentVolumeClaim/source"})
	c.claim(claim{name: "restore", source: "VolumeSnapshot/cut"})
	for _, name := range []string{"clone", "restore"} {
		c.pod(pod{name: name, claims: []string{name}, tag: "source"})
	}
	for _, name := range []string{"clone", "restore"} {
		if node := c.runs(name); node != home {
			t.Errorf("%s is on %s, not on %s", name, node, home)
		}
		c.onwards(name)
	}
	c.look(least, pod{name: "clone", claims: []string{"clone"}, tag: "source"})
	c.onwards("source") // none of it is the others'
	c.delete("pod", "source", "clone", "restore", "busy")
	c.has(0, pod{name: "look", claims: []string{"source"}, tag: "source"})
	c.delete("volumesnapshot", "cut")
}

// static makes a PersistentVolume by hand, of a volume that is there.
func (c *cluster) static(name, handle, node string, policy corev1.PersistentVolumeReclaimPolicy) {
	c.Helper()
	pv := &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{"pv.kubernetes.io/provisioned-by": driverName}},
		Spec: corev1.PersistentVolumeSpec{
			Capacity:                      corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("64Mi")},
			AccessModes:                   []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			StorageClassName:              "ashlar",
			PersistentVolumeReclaimPolicy: policy,
			PersistentVolumeSource:        corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: driverName, VolumeHandle: handle, FSType: "ext4"}},
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: csimap.TopologyKey, Operator: corev1.NodeSelectorOpIn, Values: []string{node}}}}}}},
		},
	}
	check.OK(c, c.kube.Create(context.Background(), pv))
	c.Cleanup(func() { _ = client.IgnoreNotFound(c.kube.Delete(context.Background(), pv)) })
}

// TestRetained: a volume whose claim is deleted is kept (reclaimPolicy Retain), is bound to
// another claim, then by another PersistentVolume that was written by hand; and goes at last.
func TestRetained(t *testing.T) {
	c := start(t)
	c.claim(claim{name: "first"})
	c.pod(pod{name: "first", claims: []string{"first"}, tag: "kept"})
	home := c.runs("first")
	c.onwards("first")
	pv := c.pv("first")
	c.kubectl("patch", "pv", pv.Name, "-p", `{"spec": {"persistentVolumeReclaimPolicy": "Retain"}}`)
	least := c.safe("first")
	c.delete("pod", "first")
	c.delete("pvc", "first")
	c.eventually("the volume is released", func() error {
		check.OK(t, c.kube.Get(t.Context(), client.ObjectKey{Name: pv.Name}, &pv))
		if pv.Status.Phase != corev1.VolumeReleased {
			return fmt.Errorf("it is %s", pv.Status.Phase)
		}
		return nil
	})

	// As docs/operate/static-volumes.md says: it is another claim's at once, and nobody else's.
	c.kubectl("patch", "pv", pv.Name, "--type=json", "-p", `[{"op": "replace", "path": "/spec/claimRef", "value": {"namespace": "`+c.ns+`", "name": "second"}}]`)
	c.claim(claim{name: "stranger"})
	c.pod(pod{name: "stranger", node: home, claims: []string{"stranger"}, tag: "stranger"})
	c.runs("stranger")
	if other := c.pv("stranger"); other.Name == pv.Name {
		t.Fatal("a claim that was not meant has the volume")
	}
	c.claim(claim{name: "second", volume: pv.Name})
	c.has(least, pod{name: "second", claims: []string{"second"}, tag: "kept"})
	c.delete("pvc", "second")
	c.delete("pv", pv.Name)

	c.static(c.ns+"-third", pv.Spec.CSI.VolumeHandle, home, corev1.PersistentVolumeReclaimRetain)
	c.claim(claim{name: "third", volume: c.ns + "-third"})
	c.has(least, pod{name: "third", claims: []string{"third"}, tag: "kept"})
	c.pod(pod{name: "again", claims: []string{"third"}, tag: "kept"})
	if node := c.runs("again"); node != home {
		t.Errorf("it is on %s, not on %s", node, home)
	}
	c.onwards("again")
	least = c.safe("again")
	c.delete("pod", "again")
	c.has(least, pod{name: "all", claims: []string{"third"}, tag: "kept"})
	c.kubectl("patch", "pv", c.ns+"-third", "-p", `{"spec": {"persistentVolumeReclaimPolicy": "Delete"}}`)
	c.delete("pvc", "third")
}

// TestStaticElsewhere: a PersistentVolume written by hand that says that a volume is on a
// node where it is not does not get it from its own; and one of a volume that was never
// there makes none.
func TestStaticElsewhere(t *testing.T) {
	c := start(t)
	c.claim(claim{name: "data"})
	c.pod(pod{name: "data", node: c.nodes[0], claims: []string{"data"}})
	c.runs("data")
	c.onwards("data")
	handle, never := c.pv("data").Spec.CSI.VolumeHandle, "vol.default.00000000000000000000000000000000"
	for name, wrong := range map[string]string{"wrong": handle, "none": never} {
		c.static(c.ns+"-"+name, wrong, c.nodes[2], corev1.PersistentVolumeReclaimRetain)
		c.claim(claim{name: name, volume: c.ns + "-" + name})
		c.pod(pod{name: name, claims: []string{name}, tag: "data"})
	}
	for _, name := range []string{"wrong", "none"} {
		c.eventually(name+" is refused", func() error {
			p, err := c.getPod(name)
			check.OK(t, err)
			if isReady(&p) {
				t.Fatalf("%s runs on %s", name, p.Spec.NodeName)
			}
			if said := c.events(name); said == "map[]" {
				return fmt.Errorf("nothing is said, and it is %s", p.Status.Phase)
			}
			return nil
		})
		t.Logf("%s: %s", name, c.events(name))
	}
	c.onwards("data")
	c.used(c.nodes[2], never)
	c.delete("pod", "wrong", "none")
	c.delete("pvc", "wrong", "none")
	c.onwards("data")
	c.delete("pod", "data")
	c.has(0, pod{name: "look", claims: []string{"data"}, tag: "data"})
}
