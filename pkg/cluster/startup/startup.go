// Package startup takes the startup taint off nodes whose driver is ready, in the controller: pods are kept from such a
// node until then, by who made the node with the taint. docs/install.md says how.
package startup

import (
	"context"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
)

// again is how soon a node is looked at again whose driver is not ready.
const again = 2 * time.Second

// Agents tells of the agents of nodes.
type Agents interface {
	// Patience is how much longer a node's agent may be silent; false for one that never was heard.
	Patience(node string) (left time.Duration, beats bool)
}

// Taints takes the taint off. It learns of nodes from the events of a cache (NodeChanged), and works while it runs. Every
// replica of the controller has one: who comes second finds that it is done.
type Taints struct {
	kube   kube.Connection
	agents Agents
	driver string
	news   chan struct{} // a node has the taint
}

// New returns what takes the taint off nodes that have a CSI driver of this name. Its connection's cache has nodes and pools.
func New(c kube.Connection, agents Agents, driver string) *Taints {
	return &Taints{kube: c, agents: agents, driver: driver, news: make(chan struct{}, 1)}
}

func isStartup(t corev1.Taint) bool { return t.Key == v1alpha1.StartupTaint }

// NodeChanged looks whether a node has the taint.
func (t *Taints) NodeChanged(o client.Object, gone bool) {
	node, ok := o.(*corev1.Node)
	if !ok || gone || !slices.ContainsFunc(node.Spec.Taints, isStartup) {
		return
	}
	select {
	case t.news <- struct{}{}:
	default: // it was told
	}
}

// Run works until the context ends. The cache has been filled. While no node has the taint it asks the API server nothing.
func (t *Taints) Run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.news:
		}
		for t.releaseAll(ctx) > 0 {
			select {
			case <-ctx.Done():
				return
			case <-time.After(again):
			}
		}
	}
}

// releaseAll takes the taint off the nodes that are ready, and returns how many still have it.
func (t *Taints) releaseAll(ctx context.Context) (left int) {
	var nodes corev1.NodeList
	if err := t.kube.Cache.List(ctx, &nodes); err != nil {
		return 1
	}
	for i := range nodes.Items {
		node := &nodes.Items[i]
		if !slices.ContainsFunc(node.Spec.Taints, isStartup) {
			continue
		}
		left++
		if err := t.release(ctx, node); err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Could not take the startup taint off a node; trying again", "node", node.Name)
		}
	}
	return left
}

// release takes the taint off a node, if its driver is ready.
func (t *Taints) release(ctx context.Context, node *corev1.Node) error {
	ready, err := t.ready(ctx, node.Name)
	if err != nil || !ready {
		return err
	}
	before := node.DeepCopy()
	node.Spec.Taints = slices.DeleteFunc(node.Spec.Taints, isStartup)
	if err := t.kube.Live.Patch(ctx, node, kube.LockingPatch(before)); err != nil {
		return kube.IgnoreConflict(err)
	}
	klog.FromContext(ctx).Info("The driver is ready on a new node: took the startup taint off", "node", node.Name, "taint", v1alpha1.StartupTaint)
	return nil
}

// ready: the agent of a node is heard and has measured a pool, and the kubelet knows the driver.
func (t *Taints) ready(ctx context.Context, node string) (bool, error) {
	if left, beats := t.agents.Patience(node); !beats || left <= 0 {
		return false, nil
	}
	var pools v1alpha1.PoolList
	if err := t.kube.Cache.List(ctx, &pools, client.UnsafeDisableDeepCopy); err != nil {
		return false, err
	}
	if !slices.ContainsFunc(pools.Items, func(p v1alpha1.Pool) bool { return p.Spec.NodeName == node && p.Status.Measured != nil }) {
		return false, nil
	}
	known := &storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: node}}
	if err := t.kube.Live.Get(ctx, client.ObjectKeyFromObject(known), known); err != nil {
		return false, client.IgnoreNotFound(err)
	}
	return slices.ContainsFunc(known.Spec.Drivers, func(d storagev1.CSINodeDriver) bool { return d.Name == t.driver }), nil
}
