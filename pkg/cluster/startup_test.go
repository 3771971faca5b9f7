package cluster_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/store"
)

// taints returns the keys of a node's taints.
func (w *environment) taints(node string) (keys []string) {
	w.Helper()
	n := &corev1.Node{}
	check.OK(w, w.Get(w.ctx, client.ObjectKey{Name: node}, n))
	for _, t := range n.Spec.Taints {
		keys = append(keys, t.Key)
	}
	return keys
}

// taint gives a node these taints and no others: the API server gives one to each new node.
func (w *environment) taint(node string, keys ...string) {
	w.Helper()
	n := &corev1.Node{}
	check.OK(w, w.Get(w.ctx, client.ObjectKey{Name: node}, n))
	n.Spec.Taints = nil
	for _, key := range keys {
		n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: key, Effect: corev1.TaintEffectNoExecute})
	}
	check.OK(w, w.Update(w.ctx, n))
}

// TestStartupTaint: the taint is taken off when the agent is heard, a pool is measured and the kubelet knows the driver; the other taints stay. A
// controller without the option leaves it.
func TestStartupTaint(t *testing.T) {
	w := newEnvironment(t)
	csiNode := func(node, driver string) *storagev1.CSINode {
		return &storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: node}, Spec: storagev1.CSINodeSpec{Drivers: []storagev1.CSINodeDriver{{Name: driver, NodeID: node}}}}
	}
	for node, driver := range map[string]string{nodeName: cluster.DefaultDriver, "silent": cluster.DefaultDriver, "unregistered": "other.example.com"} {
		w.node(node, true)
		w.taint(node, v1alpha1.StartupTaint, "example.com/theirs")
		o := csiNode(node, driver)
		check.OK(t, w.Create(w.ctx, o))
		t.Cleanup(func() { check.OK(t, w.Delete(context.Background(), o)) })
	}
	for _, node := range []string{nodeName, "unregistered"} {
		w.beating(node)
	}
	both, theirs := []string{v1alpha1.StartupTaint, "example.com/theirs"}, []string{"example.com/theirs"}
	w.store() // without the option
	run := func() {
		s, err := store.New(apitest.Get(t).Config("controller"), store.Options{GoneGrace: grace, AbandonGrace: time.Hour, Driver: cluster.DefaultDriver,
			Namespace: leases, SilentAfter: silentAfter, StartupTaint: true})
		check.OK(t, err)
		w.run(s.Run)
	}
	w.eventually("the pools are there", func() bool {
		var pools v1alpha1.PoolList
		check.OK(t, w.List(w.ctx, &pools))
		return len(pools.Items) == 4 && !slices.ContainsFunc(pools.Items, func(p v1alpha1.Pool) bool { return p.Status.Measured == nil })
	})
	if have := w.taints(nodeName); !slices.Equal(have, both) {
		t.Errorf("nobody was asked to, and the taints are %v", have)
	}
	run()
	run() // a second one at the same time
	w.eventually("the taint is off", func() bool { return slices.Equal(w.taints(nodeName), theirs) })
	time.Sleep(3 * time.Second) // longer than between two looks
	for _, node := range []string{"silent", "unregistered"} {
		if have := w.taints(node); !slices.Equal(have, both) {
			t.Errorf("the driver of node %s is not ready, and its taints are %v", node, have)
		}
	}
	o := csiNode("unregistered", cluster.DefaultDriver)
	check.OK(t, w.Delete(w.ctx, csiNode("unregistered", "")))
	check.OK(t, w.Create(w.ctx, o))
	w.eventually("the other one's is off too", func() bool { return slices.Equal(w.taints("unregistered"), theirs) })
}

// TestStartupTaintRights: the controller's account may take the taint off, and change nothing else of a node.
func TestStartupTaintRights(t *testing.T) {
	w := newEnvironment(t)
	w.node(nodeName, true)
	w.taint(nodeName, v1alpha1.StartupTaint, "example.com/theirs")
	config := apitest.Get(t).Config(apitest.Admin)
	config.Impersonate = rest.ImpersonationConfig{UserName: "system:serviceaccount:" + apitest.Namespace + ":ashlar-controller", Groups: []string{"system:masters"}}
	c, err := client.New(config, client.Options{Scheme: w.Scheme()})
	check.OK(t, err)
	c = client.NewDryRunClient(c)
	for name, a := range map[string]struct {
		edit    func(*corev1.Node)
		refused string
	}{
		"taken off":         {func(n *corev1.Node) { n.Spec.Taints = n.Spec.Taints[1:] }, ""},
		"another taken off": {func(n *corev1.Node) { n.Spec.Taints = n.Spec.Taints[:1] }, "changes no other"},
		"both taken off":    {func(n *corev1.Node) { n.Spec.Taints = nil }, "changes no other"},
		"another put on": {func(n *corev1.Node) {
			n.Spec.Taints = append(n.Spec.Taints[1:], corev1.Taint{Key: "a", Effect: "NoSchedule"})
		}, "changes no other"},
		"cordoned":         {func(n *corev1.Node) { n.Spec.Taints, n.Spec.Unschedulable = n.Spec.Taints[1:], true }, "nothing of a node but its startup taint"},
		"labelled":         {func(n *corev1.Node) { n.Spec.Taints, n.Labels = n.Spec.Taints[1:], map[string]string{"a": "b"} }, "changes no label"},
		"annotated":        {func(n *corev1.Node) { n.Spec.Taints, n.Annotations = n.Spec.Taints[1:], map[string]string{"a": "b"} }, "changes no label"},
		"with a finalizer": {func(n *corev1.Node) { n.Spec.Taints, n.Finalizers = n.Spec.Taints[1:], []string{"example.com/theirs"} }, "changes no label"},
	} {
		n := &corev1.Node{}
		check.OK(t, w.Get(w.ctx, client.ObjectKey{Name: nodeName}, n))
		before := n.DeepCopy()
		a.edit(n)
		err := c.Patch(w.ctx, n, client.MergeFrom(before))
		if a.refused == "" && err != nil || a.refused != "" && (!apierrors.IsInvalid(err) || !strings.Contains(err.Error(), a.refused)) {
			t.Errorf("%s: %v, want a refusal that says: %q", name, err, a.refused)
		}
	}
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}}
	status := client.RawPatch("application/merge-patch+json", []byte(`{"status":{"phase":"Terminated"}}`))
	for name, err := range map[string]error{"deleted": c.Delete(w.ctx, n), "created": c.Create(w.ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "new"}}),
		"reported": c.Status().Patch(w.ctx, n, status)} {
		if !apierrors.IsInvalid(err) || errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
