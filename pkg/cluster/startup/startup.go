// Package startup takes the startup taint (v1alpha1.StartupTaint) off nodes whose driver is ready, in the controller. Nodes may be created with that
// taint, so that no pods are scheduled there before: docs/install.md says how.
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

// again is the pause between two looks while a node has the taint.
const again = 2 * time.Second

// Agents knows which agents are heard.
type Agents interface {
	// Patience returns how much longer the agent of a node may be silent; 0 or less if it has been silent for too long. beats is false if no Lease of it is
	// known.
	Patience(node string) (left time.Duration, beats bool)
}

// Taints takes the taint off nodes. The events of a cache tell it of nodes (NodeChanged); Run does the work. Every replica of the controller has one: a
// second write of the same change fails with a conflict, and does no harm.
type Taints struct {
	kube   kube.Connection
	agents Agents
	driver string
	news   chan struct{} // of one element; has it while a look at the nodes is due
}

// New returns a Taints for the CSI driver of a name. The cache of its connection has to have Nodes and Pools.
func New(c kube.Connection, agents Agents, driver string) *Taints {
	return &Taints{kube: c, agents: agents, driver: driver, news: make(chan struct{}, 1)}
}

func isStartup(t corev1.Taint) bool { return t.Key == v1alpha1.StartupTaint }

// NodeChanged has the nodes looked at if a node has the taint.
func (t *Taints) NodeChanged(o client.Object, gone bool) {
	node, ok := o.(*corev1.Node)
	if !ok || gone || !slices.ContainsFunc(node.Spec.Taints, isStartup) {
		return
	}
	select {
	case t.news <- struct{}{}:
	default: // a look is due already
	}
}

// Run does the work until the context ends. The cache has to be filled before. While no node has the taint it asks the API server nothing.
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

// releaseAll takes the taint off the nodes whose driver is ready. It returns how many nodes had the taint, so that the caller looks again if there were
// any.
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

// ready reports whether the driver of a node is ready: its agent is heard and has measured a pool, and the kubelet has registered the driver (CSINode).
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
