//go:build e2e

package nodes

import (
	"errors"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// TestNewNode: a node as a new one is, with the startup taint and without the driver, keeps its taint and gets no pods until
// the driver is there.
func TestNewNode(t *testing.T) {
	c := start(t)
	node := c.nodes[len(c.nodes)-1]
	tainted := func() bool {
		n := &corev1.Node{}
		check.OK(t, c.kube.Get(t.Context(), client.ObjectKey{Name: node}, n))
		return slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == v1alpha1.StartupTaint })
	}
	selector := func(patch string) {
		c.run("", "kubectl", "-n", "ashlar-system", "patch", "daemonset", "ashlar-node", "--type=json", "-p", patch)
	}
	// Nodes with this label are those that the driver is on.
	const on = "ashlar-e2e-driver"
	for _, other := range c.nodes[:len(c.nodes)-1] {
		c.run("", "kubectl", "label", "node", other, on+"=on", "--overwrite")
	}
	c.run("", "kubectl", "label", "node", node, on+"-")
	back := func() { c.run("", "kubectl", "label", "node", node, on+"=on", "--overwrite") }
	selector(`[{"op": "add", "path": "/spec/template/spec/nodeSelector/` + on + `", "value": "on"}]`)
	t.Cleanup(func() {
		selector(`[{"op": "remove", "path": "/spec/template/spec/nodeSelector/` + on + `"}]`)
		c.run("", "kubectl", "-n", "ashlar-system", "rollout", "status", "daemonset/ashlar-node", "--timeout=300s")
		c.run("", "kubectl", append(append([]string{"label", "node"}, c.nodes...), on+"-")...)
	})
	t.Cleanup(back)
	c.eventually("the driver is off the node", func() error {
		if registered := c.run("", "kubectl", "get", "csinode", node, "-o", "jsonpath={.spec.drivers[*].name}"); registered != "" {
			return errors.New("registered is " + registered)
		}
		return nil
	})
	c.run("", "kubectl", "taint", "node", node, v1alpha1.StartupTaint+"=:NoExecute")
	c.claim(claim{name: "data"})
	c.pod(pod{name: "data", node: node, claims: []string{"data"}})
	time.Sleep(5 * time.Second) // longer than between two looks
	if p, err := c.getPod("data"); err != nil || p.Spec.NodeName != "" || !tainted() {
		t.Errorf("the driver is not there; the pod is on %q, %v, and the node has its taint: %v", p.Spec.NodeName, err, tainted())
	}
	back()
	c.eventually("the taint goes", func() error {
		if tainted() {
			return errors.New("it is there")
		}
		return nil
	})
	c.runs("data")
	c.onwards("data")
}
