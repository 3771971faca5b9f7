package events

import (
	"context"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
)

// lookPause is the least time between two looks at the nodes, lookAgain the longest.
const (
	lookPause = time.Second
	lookAgain = time.Minute
)

// lookAtNodes finds out the states of all nodes that have pools or volumes, or that something moves to or has left, and has the events of changes written.
// It returns after how long to look again: when an agent may count as silent, lookAgain at most.
func (a *Announcer) lookAtNodes(ctx context.Context) time.Duration {
	next, err := a.lookAtEach(ctx)
	if err == nil {
		return next
	}
	if ctx.Err() == nil {
		klog.FromContext(ctx).Error(err, "Could not look at the nodes for events; trying again")
	}
	return lookAgain
}

func (a *Announcer) lookAtEach(ctx context.Context) (next time.Duration, _ error) {
	a.mu.Lock() // before the cache is read, so that a later update never has older objects
	defer a.mu.Unlock()
	has, err := kube.Values(ctx, a.kube.Cache, kube.Index{Of: &v1alpha1.Pool{}, Field: cluster.ByNode}, kube.Index{Of: &v1alpha1.Volume{}, Field: cluster.ByNode},
		kube.Index{Of: &v1alpha1.Volume{}, Field: cluster.ByMove}, kube.Index{Of: &v1alpha1.Snapshot{}, Field: cluster.ByMove})
	if err != nil {
		return 0, err
	}
	for name := range a.nodes {
		if !has[name] {
			a.setNode(kube.Node(name), true, nodeState{}, nil)
		}
	}
	next = lookAgain
	for name := range has {
		node, state, left := a.stateOf(ctx, name)
		if left > 0 {
			next = min(next, left)
		}
		if state != a.nodes[name] {
			its, err := a.waitingFor(ctx, name)
			if err != nil {
				return 0, err
			}
			a.setNode(node, state.reason == NodeGone, state, its)
		}
	}
	return next, nil
}

// waitingFor returns what may wait for a node: the volumes that it has, and the volumes and snapshots that move to it or have left it.
func (a *Announcer) waitingFor(ctx context.Context, node string) (its []cluster.Object, _ error) {
	for _, index := range []string{cluster.ByNode, cluster.ByMove} {
		var list v1alpha1.VolumeList
		if err := a.kube.Cache.List(ctx, &list, client.MatchingFields{index: node}, client.UnsafeDisableDeepCopy); err != nil {
			return nil, err
		}
		for i := range list.Items {
			its = append(its, &list.Items[i])
		}
	}
	var list v1alpha1.SnapshotList
	if err := a.kube.Cache.List(ctx, &list, client.MatchingFields{cluster.ByMove: node}, client.UnsafeDisableDeepCopy); err != nil {
		return nil, err
	}
	for i := range list.Items {
		its = append(its, &list.Items[i])
	}
	return its, nil
}

// setNode sets the state of a node, and has the events of it and of what may wait for it (waitingFor) written. The caller holds the lock.
func (a *Announcer) setNode(node *corev1.Node, gone bool, state nodeState, its []cluster.Object) {
	if a.nodes[node.Name] = state; state.reason == "" {
		delete(a.nodes, node.Name)
	}
	a.update(node, gone, ofNode(node, state))
	for _, one := range its {
		switch o := one.(type) {
		case *v1alpha1.Volume:
			a.updateVolume(o, false)
		case *v1alpha1.Snapshot:
			a.updateSnapshot(o, false)
		}
	}
}

// stateOf returns a node, its state by the cache, and how much longer its agent may be silent; 0 if the agent does not matter for the state. The caller
// holds the lock.
func (a *Announcer) stateOf(ctx context.Context, name string) (*corev1.Node, nodeState, time.Duration) {
	node := kube.Node(name)
	if err := a.kube.Cache.Get(ctx, client.ObjectKey{Name: name}, node); apierrors.IsNotFound(err) {
		return kube.Node(name), nodeState{reason: NodeGone, why: "it has no Node object"}, 0
	} else if err != nil {
		return node, a.nodes[name], 0 // unchanged
	}
	for _, taint := range node.Spec.Taints {
		if taint.Key == v1alpha1.GoneTaint {
			state := nodeState{reason: NodeGone, why: "it has the taint " + v1alpha1.GoneTaint}
			if taint.TimeAdded != nil {
				state.since = taint.TimeAdded.Time
			}
			return node, state, 0
		}
	}
	if state := notReady(node); state.reason != "" {
		return node, state, 0
	}
	left, beats := a.agents.Patience(name)
	if !beats {
		return node, nodeState{}, 0
	}
	if left > 0 {
		return node, nodeState{}, left
	}
	state := nodeState{reason: AgentSilent, why: "nothing is heard of the driver on node " + name}
	lease := &coordinationv1.Lease{}
	if err := a.kube.Cache.Get(ctx, client.ObjectKeyFromObject(cluster.Lease(a.options.Namespace, name)), lease); err == nil && lease.Spec.RenewTime != nil {
		state.since = lease.Spec.RenewTime.Time
		state.why += " since " + state.since.UTC().Format(time.RFC3339)
	}
	return node, state, 0
}

// notReady returns the state of a node by its condition Ready; the zero value if it is ready.
func notReady(node *corev1.Node) nodeState {
	for _, c := range node.Status.Conditions {
		switch {
		case c.Type != corev1.NodeReady:
		case c.Status == corev1.ConditionTrue:
			return nodeState{}
		default:
			return nodeState{NodeNotReady, fmt.Sprintf("it is not ready since %s; bring it back, or if it is gone for good, say so: kubectl taint node %s %s:NoSchedule",
				c.LastTransitionTime.UTC().Format(time.RFC3339), node.Name, v1alpha1.GoneTaint), c.LastTransitionTime.Time}
		}
	}
	return nodeState{NodeNotReady, "it has not said that it is ready", node.CreationTimestamp.Time}
}

// nodeOf returns the name of the node that an object belongs to; empty for a ReplicatedVolume.
func nodeOf(o client.Object) string {
	switch o := o.(type) {
	case *v1alpha1.Volume:
		return o.Spec.NodeName
	case *v1alpha1.Snapshot:
		return o.Spec.NodeName
	case *v1alpha1.Pool:
		return o.Spec.NodeName
	case *corev1.Node:
		return o.Name
	}
	return ""
}
