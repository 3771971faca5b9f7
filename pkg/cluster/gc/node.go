package gc

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// collectNodes gives up the pools of nodes that have been gone for GoneGrace, and what is to be deleted on them (giveUp). It returns after which time to look
// again; 0: not before something changes. since has when each node was first seen to be gone; collectNodes keeps it up to date.
func (c *Collector) collectNodes(ctx context.Context, since map[string]time.Time) (next time.Duration, err error) {
	names, err := kube.Values(ctx, c.kube.Cache, kube.Index{Of: &v1alpha1.Volume{}, Field: cluster.ByNode}, kube.Index{Of: &v1alpha1.Snapshot{}, Field: cluster.ByNode},
		kube.Index{Of: &v1alpha1.Pool{}, Field: cluster.ByNode}) // only nodes that have objects
	if err != nil {
		return 0, err
	}
	for name := range since {
		if !names[name] {
			delete(since, name)
		}
	}
	for name := range names {
		again, err := c.collectNode(ctx, name, since)
		if err != nil {
			return 0, err
		}
		if again > 0 && (next == 0 || again < next) {
			next = again
		}
	}
	return next, nil
}

// objectsOf returns all volumes, snapshots and pools of a node. They are the cache's own and must not be changed.
func (c *Collector) objectsOf(ctx context.Context, node string) (objects []client.Object, err error) {
	var volumes v1alpha1.VolumeList
	var snapshots v1alpha1.SnapshotList
	var pools v1alpha1.PoolList
	for _, list := range []client.ObjectList{&volumes, &snapshots, &pools} {
		if err := c.kube.Cache.List(ctx, list, client.MatchingFields{cluster.ByNode: node}, client.UnsafeDisableDeepCopy); err != nil {
			return nil, err
		}
	}
	for i := range volumes.Items {
		objects = append(objects, &volumes.Items[i])
	}
	for i := range snapshots.Items {
		objects = append(objects, &snapshots.Items[i])
	}
	for i := range pools.Items {
		objects = append(objects, &pools.Items[i])
	}
	return objects, nil
}

// collectNode is collectNodes for one node.
func (c *Collector) collectNode(ctx context.Context, name string, since map[string]time.Time) (again time.Duration, err error) {
	var node corev1.Node
	if !cluster.IsGone(&node, c.kube.Cache.Get(ctx, client.ObjectKey{Name: name}, &node)) {
		delete(since, name)
		return 0, nil
	}
	if _, known := since[name]; !known {
		since[name] = time.Now()
		klog.FromContext(ctx).Info("A node is gone; what is deleted of it is given up after the grace period", "node", name, "grace", c.options.GoneGrace)
	}
	if wait := c.options.GoneGrace - time.Since(since[name]); wait > 0 {
		return wait, nil
	}
	node = corev1.Node{}
	if !cluster.IsGone(&node, c.kube.Live.Get(ctx, client.ObjectKey{Name: name}, &node)) {
		return 0, nil // the node is back, and the cache does not have it yet
	}
	silent, beats := c.agents.Patience(name)
	lives := beats && silent > 0 // an agent that lives would make its Pools anew each time: they stay
	if lives {
		again = silent
	}
	objects, err := c.objectsOf(ctx, name)
	if err != nil {
		return 0, err
	}
	for _, o := range objects {
		if _, pool := o.(*v1alpha1.Pool); pool && lives {
			continue
		}
		if err := c.giveUp(ctx, name, o, lives); err != nil {
			return 0, err
		}
	}
	return again, nil
}

// giveUp deletes the object of a node that is gone if it is a Pool, or a volume or snapshot that is to be deleted; also a volume that nobody knows of and
// nobody has used (abandoned), unless the agent of the node lives and can say whether it is blank. Their bytes stay on the node.
func (c *Collector) giveUp(ctx context.Context, node string, o client.Object, lives bool) error {
	log := klog.FromContext(ctx).WithValues("node", node, "object", o.GetName())
	if _, pool := o.(*v1alpha1.Pool); pool {
		log.Info("Deleting the Pool of a node that is gone")
		uid := o.GetUID()
		return client.IgnoreNotFound(c.kube.Live.Delete(ctx, o, client.Preconditions{UID: &uid}))
	}
	one := o.DeepCopyObject().(cluster.Object)
	if v, is := one.(*v1alpha1.Volume); !v1alpha1.Going(one) && (lives || !is || !isForsaken(v)) {
		return nil
	}
	log.Info("Giving up what was deleted, or abandoned, on a node that is gone: its bytes are still there, if the node is")
	err := cluster.RemoveObject(ctx, c.kube.Live, one)
	if apierrors.IsConflict(err) {
		c.notifyNodes()
		return nil
	}
	return client.IgnoreNotFound(err)
}

// isForsaken reports whether a volume is abandoned, and nobody ever used it, as far as its object tells. Only with access any its claims are counted.
func isForsaken(v *v1alpha1.Volume) bool {
	return v.Spec.Abandoned && volume.Access(v.Spec.Access) == volume.AccessAny && v.Spec.Claims == 0 && !wanted(v) && !isYounger(v) && !v.Status.Is(v1alpha1.Abandoned, "False")
}
