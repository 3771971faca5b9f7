//go:build e2e

package nodes

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// down kills a node, and starts it again at the end of the test, unless the test did.
func (c *cluster) down(node string) {
	c.Helper()
	c.power("kill", node)
	c.Cleanup(func() {
		if _, err := c.try("", "kubectl", "--request-timeout=5s", "get", "node", node); err != nil || !c.alive(node) {
			c.up(node)
		}
	})
}

func (c *cluster) alive(node string) bool {
	_, err := c.try("", os.Getenv("CLUSTER"), "on", node, "true")
	return err == nil
}

// notReady waits until the cluster knows that a node is down.
func (c *cluster) notReady(node string) {
	c.Helper()
	c.eventually("the cluster knows that "+node+" is down", func() error {
		var n corev1.Node
		check.OK(c, c.kube.Get(context.Background(), client.ObjectKey{Name: node}, &n))
		for _, condition := range n.Status.Conditions {
			if condition.Type == corev1.NodeReady && condition.Status != corev1.ConditionTrue {
				return nil
			}
		}
		return errors.New("it counts as ready")
	})
}

// outOfService says that a node that is down stays so for long: what was on it is detached.
func (c *cluster) outOfService(node string) {
	c.Helper()
	c.run("", "kubectl", "taint", "node", node, "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute")
	c.Cleanup(func() {
		_, _ = c.try("", "kubectl", "taint", "node", node, "node.kubernetes.io/out-of-service:NoExecute-")
	})
}

// TestNodesKilled: each node dies in turn, with volumes in use on all of them. The others do
// not notice. When it is back, its pods go on with all that was safe.
func TestNodesKilled(t *testing.T) {
	c := start(t)
	var names []string
	for i, node := range c.nodes {
		for _, suffix := range []string{"", "!"} {
			name := map[string]string{"": "files", "!": "raw"}[suffix] + fmt.Sprint("-", i)
			c.claim(claim{name: name, block: suffix != ""})
			c.pod(pod{name: name, node: node, claims: []string{name + suffix}})
			names = append(names, name)
		}
	}
	c.runs(names...)
	c.onwards(names...)
	for i, node := range c.nodes {
		var own, others []string
		for j, name := range names {
			if j/2 == i {
				own = append(own, name)
			} else {
				others = append(others, name)
			}
		}
		least := map[string]int{}
		for _, name := range own {
			least[name] = c.safe(name)
		}
		c.down(node)
		c.onwards(others...)
		c.up(node)
		for _, name := range own {
			c.eventually(name+" runs again", func() error {
				p, err := c.getPod(name)
				if err == nil && (!isReady(&p) || p.Status.ContainerStatuses[0].RestartCount == 0) {
					err = fmt.Errorf("it is %s: %s", p.Status.Phase, c.events(name))
				}
				return err
			})
		}
		c.onwards(names...)
		for _, name := range own {
			if now := c.safe(name); now <= least[name] {
				t.Errorf("%s goes on at %d, and %d was safe", name, now, least[name])
			}
		}
		for _, name := range others {
			if n := c.restarts(name); n > int32(i) {
				t.Errorf("%s was restarted %d times", name, n)
			}
		}
	}
	for i, name := range names {
		least := c.safe(name)
		claim := name
		if i%2 == 1 {
			claim += "!"
		}
		c.delete("pod", name)
		c.has(least, pod{name: "look-" + name, claims: []string{claim}, tag: name})
	}
}

// TestNodeGone: a node dies, and its object is deleted. Volumes on it that are deleted are
// given up; those that nobody deleted stay, and can be used again when it is back. Pods that
// were on the way to it when it died, and have nothing there yet, go elsewhere.
func TestNodeGone(t *testing.T) {
	c := start(t)
	node := c.nodes[2]
	for _, name := range []string{"kept", "deleted"} {
		c.claim(claim{name: name})
		c.pod(pod{name: name, node: node, claims: []string{name}})
	}
	c.runs("kept", "deleted")
	c.onwards("kept", "deleted")
	least := c.safe("kept")
	stray := c.volume("deleted").Name
	c.down(node)

	// The scheduler does not know yet: these are meant for that node.
	var late []string
	meant := 0
	for i := range 6 {
		name := fmt.Sprintf("late-%d", i)
		c.claim(claim{name: name})
		c.pod(pod{name: name, prefers: node, claims: []string{name}})
		late = append(late, name)
	}
	for _, name := range late {
		var pvc corev1.PersistentVolumeClaim
		c.eventually(name+" has a node", func() error {
			check.OK(t, c.kube.Get(t.Context(), client.ObjectKey{Namespace: c.ns, Name: name}, &pvc))
			if pvc.Annotations["volume.kubernetes.io/selected-node"] == "" {
				return errors.New(c.events(name))
			}
			return nil
		})
		if pvc.Annotations["volume.kubernetes.io/selected-node"] == node {
			meant++
		}
	}
	t.Logf("%d of %d were meant for %s", meant, len(late), node)
	if meant == 0 {
		t.Error("none was meant for the node that is down, so this shows nothing of it")
	}
	c.notReady(node)
	for _, name := range late {
		if on := c.runs(name); on == node {
			t.Errorf("%s is on %s", name, on)
		}
	}
	c.onwards(late...)
	c.delete("pod", late...)
	c.delete("pvc", late...)

	c.kubectl("delete", "pvc", "deleted", "--wait=false")
	for _, name := range []string{"kept", "deleted"} {
		c.kubectl("delete", "pod", name, "--wait=false")
	}
	// What Kubernetes wants to hear of a node that is down, else it waits for six minutes before it detaches.
	c.outOfService(node)
	c.eventually("its volumes are detached", func() error {
		if left := c.attachments(c.pv("kept").Name); len(left) > 0 {
			return fmt.Errorf("%s is there", left[0].Name)
		}
		return nil
	})
	c.run("", "kubectl", "delete", "node", node)
	c.eventually("what was deleted is given up", func() error {
		err := c.kube.Get(t.Context(), client.ObjectKey{Name: stray}, &v1alpha1.Volume{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return errors.Join(errors.New("its object is there"), err)
	})
	if v := c.volume("kept"); v.DeletionTimestamp != nil {
		t.Errorf("what nobody deleted is deleted since %v", v.DeletionTimestamp)
	}

	c.up(node)
	c.eventually("the pool says what nobody knows of", func() error {
		var pool v1alpha1.Pool
		if err := c.kube.Get(t.Context(), client.ObjectKey{Name: node + ".default"}, &pool); err != nil {
			return err
		}
		for _, condition := range pool.Status.Conditions {
			if condition.Type == v1alpha1.Accounted && condition.Status == metav1.ConditionFalse && strings.Contains(condition.Message, stray) {
				return nil
			}
		}
		return fmt.Errorf("%+v", pool.Status.Conditions)
	})
	c.has(least, pod{name: "look", claims: []string{"kept"}, tag: "kept"})
	c.pod(pod{name: "again", claims: []string{"kept"}, tag: "kept"})
	c.runs("again")
	c.onwards("again")
	// An administrator who knows that nobody wants it takes it away.
	c.on(node, "sh", "-c", "rm /var/lib/ashlar/volumes/"+stray+".*")
}

// TestDrained: the nodes of a StatefulSet are drained in turn, as for an upgrade. Its pod
// waits for the volume's node; the others write on.
func TestDrained(t *testing.T) {
	c := start(t)
	template := (&pod{name: "set", claims: []string{"data"}}).spec()
	template["volumes"] = template["volumes"].([]any)[:1] // the claim comes with the pod
	template["terminationGracePeriodSeconds"] = 1
	template["affinity"] = map[string]any{"podAntiAffinity": map[string]any{"requiredDuringSchedulingIgnoredDuringExecution": []any{map[string]any{
		"topologyKey": "kubernetes.io/hostname", "labelSelector": map[string]any{"matchLabels": map[string]any{"app": "set"}}}}}}
	c.object("apps/v1", "StatefulSet", "set", map[string]any{
		"replicas": len(c.nodes), "serviceName": "set", "podManagementPolicy": "Parallel",
		"selector": map[string]any{"matchLabels": map[string]any{"app": "set"}},
		"template": map[string]any{"metadata": map[string]any{"labels": map[string]any{"app": "set"}}, "spec": template},
		"volumeClaimTemplates": []any{map[string]any{"metadata": map[string]any{"name": "data"}, "spec": map[string]any{
			"storageClassName": "ashlar", "accessModes": []string{"ReadWriteOnce"}, "resources": map[string]any{"requests": map[string]any{"storage": "64Mi"}}}}},
	})
	names := []string{"set-0", "set-1", "set-2"}
	home := map[string]string{}
	for _, name := range names {
		c.eventually(name+" is there", func() error { _, err := c.getPod(name); return err })
		home[name] = c.runs(name)
	}
	c.onwards(names...)
	for _, name := range names {
		least := c.safe(name)
		p, err := c.getPod(name)
		check.OK(t, err)
		c.Cleanup(func() { _, _ = c.try("", "kubectl", "uncordon", home[name]) })
		c.kubectl("drain", home[name], "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout="+patience.String())
		c.eventually(name+" waits for its node", func() error {
			next, err := c.getPod(name)
			if err == nil && (next.UID == p.UID || next.Status.Phase != corev1.PodPending || c.events(name) == "map[]") {
				err = fmt.Errorf("it is %s on %q: %s", next.Status.Phase, next.Spec.NodeName, c.events(name))
			}
			return err
		})
		for _, other := range names {
			if other != name {
				c.onwards(other)
			}
		}
		c.kubectl("uncordon", home[name])
		if node := c.runs(name); node != home[name] {
			t.Errorf("%s is on %s, and its volume on %s", name, node, home[name])
		}
		c.onwards(names...)
		if now := c.safe(name); now <= least {
			t.Errorf("%s goes on at %d, and %d was safe", name, now, least)
		}
	}
	c.delete("statefulset", "set")
}

// TestStaleAttachments: what VolumeAttachments and claims of volumes say about each other
// goes wrong in all ways that people know: a node dies with its pods and is declared out of
// service; an attachment is made by hand for another node; one is deleted without the
// attacher.
func TestStaleAttachments(t *testing.T) {
	c := start(t)
	node, other := c.nodes[0], c.nodes[1]
	c.claim(claim{name: "data"})
	c.pod(pod{name: "data", node: node, claims: []string{"data"}})
	c.runs("data")
	c.onwards("data")
	pv := c.pv("data").Name

	t.Log("an attachment by hand, to another node")
	stale := &storagev1.VolumeAttachment{ObjectMeta: metav1.ObjectMeta{Name: c.ns},
		Spec: storagev1.VolumeAttachmentSpec{Attacher: driverName, NodeName: other, Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: &pv}}}
	check.OK(t, c.kube.Create(t.Context(), stale))
	c.eventually("it is refused", func() error {
		check.OK(t, c.kube.Get(t.Context(), client.ObjectKeyFromObject(stale), stale))
		if stale.Status.Attached {
			t.Fatalf("%s is attached to %s", pv, other)
		}
		if stale.Status.AttachError == nil {
			return errors.New("nothing is said")
		}
		return nil
	})
	t.Log(stale.Status.AttachError.Message)
	check.OK(t, client.IgnoreNotFound(c.kube.Delete(t.Context(), stale)))
	c.eventually("it goes", func() error {
		err := c.kube.Get(t.Context(), client.ObjectKeyFromObject(stale), stale)
		if apierrors.IsNotFound(err) {
			return nil
		}
		return errors.Join(fmt.Errorf("it is there: %+v", stale), err)
	})
	if v := c.volume("data"); v.Spec.Claim == nil || v.Spec.Claim.Node != node {
		t.Fatalf("the volume's claim is %+v", v.Spec.Claim)
	}
	c.onwards("data")

	t.Log("the node dies and is out of service; its pod is another one when it is back")
	least := c.safe("data")
	c.down(node)
	c.notReady(node)
	c.outOfService(node)
	c.kubectl("wait", "--for=delete", "pod/data", "--timeout="+patience.String())
	c.eventually("its volume is detached", func() error {
		if v := c.volume("data"); v.Spec.Claim != nil {
			return fmt.Errorf("it is claimed by %+v", v.Spec.Claim)
		}
		return nil
	})
	c.up(node)
	c.run("", "kubectl", "taint", "node", node, "node.kubernetes.io/out-of-service:NoExecute-")
	c.has(least, pod{name: "look", claims: []string{"data"}, tag: "data"})
	c.pod(pod{name: "data", claims: []string{"data"}})
	c.runs("data")
	c.onwards("data")

	t.Log("the attachment is deleted by hand under the pod, past the attacher")
	for _, a := range c.attachments(pv) {
		before := a.DeepCopy()
		a.Finalizers = nil
		check.OK(t, c.kube.Patch(t.Context(), &a, client.MergeFrom(before)))
		check.OK(t, client.IgnoreNotFound(c.kube.Delete(t.Context(), &a)))
	}
	c.onwards("data")
	least = c.safe("data")
	c.delete("pod", "data")
	c.has(least, pod{name: "look", claims: []string{"data"}, tag: "data"})
	c.delete("pvc", "data")
	c.eventually("the volume goes with its claim", func() error {
		return client.IgnoreNotFound(c.stillThere(pv))
	})
}

func (c *cluster) stillThere(pv string) error {
	err := c.kube.Get(context.Background(), client.ObjectKey{Name: pv}, &corev1.PersistentVolume{})
	if err == nil {
		err = errors.New("it is there")
	}
	return err
}

// attachments returns those of a PersistentVolume.
func (c *cluster) attachments(pv string) []storagev1.VolumeAttachment {
	c.Helper()
	var all storagev1.VolumeAttachmentList
	var of []storagev1.VolumeAttachment
	check.OK(c, c.kube.List(context.Background(), &all))
	for _, a := range all.Items {
		if *a.Spec.Source.PersistentVolumeName == pv {
			of = append(of, a)
		}
	}
	return of
}

// TestForgottenAttachment: an attachment loses its finalizer by hand, so that nobody tells
// the driver that the volume is free. Its claim is deleted all the same: the controller takes
// its word for the node back (--abandon-grace) after the deletion was refused.
func TestForgottenAttachment(t *testing.T) {
	c := start(t)
	c.claim(claim{name: "data"})
	c.pod(pod{name: "data", claims: []string{"data"}})
	c.runs("data")
	c.onwards("data")
	pv := c.pv("data").Name
	c.run("", "kubectl", "-n", "ashlar-system", "scale", "deployment", "ashlar-controller", "--replicas=0")
	back := func() {
		c.run("", "kubectl", "-n", "ashlar-system", "scale", "deployment", "ashlar-controller", "--replicas=2")
	}
	c.Cleanup(back)
	c.delete("pod", "data")
	c.eventually("its attachment is to go", func() error {
		for _, a := range c.attachments(pv) {
			if a.DeletionTimestamp == nil {
				return errors.New("not yet")
			}
			before := a.DeepCopy()
			a.Finalizers = nil
			check.OK(t, client.IgnoreNotFound(c.kube.Patch(t.Context(), &a, client.MergeFrom(before))))
		}
		return nil
	})
	back()
	c.delete("pvc", "data")
	c.eventually("the volume goes with its claim", func() error {
		return client.IgnoreNotFound(c.stillThere(pv))
	})
}
