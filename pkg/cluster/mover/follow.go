package mover

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/gc"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// follows reports whether a volume is to be where it is used, and is not.
func follows(v *v1alpha1.Volume) bool {
	c := v.Spec.Claim
	return c != nil && v.Spec.ReplicaOf == "" && c.Node != v.Spec.NodeName && volume.Access(v.Spec.Access) == volume.AccessAny && volume.Follows(v.Spec.Mutable) &&
		v.Status.Created != nil && !v.Spec.Abandoned && !v1alpha1.Going(v)
}

// followsNoMore reports whether a volume is about to move to where it was used, and is used elsewhere by now or is to stay. Nobody uses it for a moment when its pod
// comes back: then the move goes on.
func followsNoMore(v *v1alpha1.Volume) bool {
	m, c := v.Spec.Move, v.Spec.Claim
	return m != nil && m.Follows && !m.Left && (c != nil && c.Node != m.Node || !volume.Follows(v.Spec.Mutable))
}

// follow reports whether a volume that follows is to move to the node that uses it: it has been used there for long enough, and could come. again is when to
// look again if not: what keeps it from coming says nothing to this object.
func (m *Mover) follow(ctx context.Context, v *v1alpha1.Volume) (follow bool, again time.Duration, err error) {
	if since := v.Spec.Claim.Since; since != nil { // one of an older controller is as old as that
		if left := m.after - time.Since(since.Time); left > 0 {
			return false, left, nil
		}
	}
	why, err := m.stays(ctx, v)
	if err != nil {
		return false, 0, err
	}
	if why != "" {
		klog.FromContext(ctx).V(2).Info("A volume that is to be where it is used stays for now", "volume", cluster.VolumeID(v).String(), "why", why)
		return false, lastRetry, nil
	}
	return true, 0, nil
}

// stays is why a volume cannot come to the node that uses it; empty if it can.
func (m *Mover) stays(ctx context.Context, v *v1alpha1.Volume) (why string, err error) {
	to := v.Spec.Claim.Node
	var pools [2]v1alpha1.Pool // of its home, and there
	for i, node := range []string{v.Spec.NodeName, to} {
		name := overview.PoolName(node, v.Spec.Pool)
		if err := m.kube.Cache.Get(ctx, client.ObjectKey{Name: name}, &pools[i]); err != nil {
			return "there is no pool " + name, client.IgnoreNotFound(err)
		}
		if pools[i].Status.Network == nil {
			return "node " + node + " is in no network", nil
		}
	}
	home, pool := &pools[0], &pools[1]
	switch need := cluster.Keeps(v); {
	case pool.Status.Network.Name != home.Status.Network.Name:
		return "the nodes are in different networks", nil
	case len(pool.Status.Health) > 0:
		return "pool " + pool.Name + " is not well", nil
	case need > min(pool.Status.Available, pool.Status.MaxVolume):
		return fmt.Sprintf("pool %s has no room for %d bytes", pool.Name, need), nil
	}
	node := &corev1.Node{}
	err = m.kube.Live.Get(ctx, client.ObjectKey{Name: to}, node)
	switch {
	case client.IgnoreNotFound(err) != nil:
		return "", kube.APIError("look at node "+to, err)
	case gc.IsGone(node, err):
		return "node " + to + " is gone", nil
	case node.Spec.Unschedulable:
		return "node " + to + " is cordoned", nil
	}
	return "", nil
}
