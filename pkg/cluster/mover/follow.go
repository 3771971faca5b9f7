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
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// isToFollow reports whether a volume is to move to the node that uses it (it follows its pod), and is not there.
func isToFollow(v *v1alpha1.Volume) bool {
	c := v.Spec.Claim
	return c != nil && v.Spec.ReplicaOf == "" && c.Node != v.Spec.NodeName && volume.Access(v.Spec.Access) == volume.AccessAny && volume.Follows(v.Spec.Mutable) &&
		v.Status.Created != nil && !v.Spec.Abandoned && !v1alpha1.Going(v)
}

// isNotToFollow reports whether a volume is about to follow its pod to a node, and is used on another one by now, or is not to follow any more. A volume that
// is not used for a moment, as its pod restarts, still follows.
func isNotToFollow(v *v1alpha1.Volume) bool {
	m, c := v.Spec.Move, v.Spec.Claim
	return m != nil && m.Follows && !m.Left && (c != nil && c.Node != m.Node || !volume.Follows(v.Spec.Mutable))
}

// follow reports whether a volume that is to follow can move now: it was used on that node for long enough, and nothing keeps it from moving. If not, again
// is when to look again, as no event of the object will tell.
func (m *Mover) follow(ctx context.Context, v *v1alpha1.Volume) (follow bool, again time.Duration, err error) {
	if since := v.Spec.Claim.Since; since != nil { // claims of older controllers have no time: they are old enough
		if left := m.after - time.Since(since.Time); left > 0 {
			return false, left, nil
		}
	}
	why, err := m.whyNotFollow(ctx, v)
	if err != nil {
		return false, 0, err
	}
	if why != "" {
		klog.FromContext(ctx).V(2).Info("A volume that is to be where it is used stays for now", "volume", cluster.VolumeID(v).String(), "why", why)
		m.stays(v, why)
		return false, lastRetry, nil
	}
	return true, 0, nil
}

// whyNotFollow returns why a volume cannot move to the node that uses it, and what to do; empty if it can.
func (m *Mover) whyNotFollow(ctx context.Context, v *v1alpha1.Volume) (why string, err error) {
	to := v.Spec.Claim.Node
	var pools [2]v1alpha1.Pool // of its home, and of the node that uses it
	for i, node := range []string{v.Spec.NodeName, to} {
		name := overview.PoolName(node, v.Spec.Pool)
		if err := m.kube.Cache.Get(ctx, client.ObjectKey{Name: name}, &pools[i]); err != nil {
			return fmt.Sprintf("node %s has no pool %s: start its driver with one (--pool)", node, v.Spec.Pool), client.IgnoreNotFound(err)
		}
		if pools[i].Status.Network == nil {
			return "node " + node + " is in no network: start its driver with --remote-address", nil
		}
	}
	home, pool := &pools[0], &pools[1]
	switch need := v.Keeps(); {
	case pool.Status.Network.Name != home.Status.Network.Name:
		return fmt.Sprintf("node %s is in the network %q, and not in the network %q of node %s: start their drivers in one (--remote-network)", to, pool.Status.Network.Name, home.Status.Network.Name, v.Spec.NodeName), nil
	case len(pool.Status.Health) > 0:
		return fmt.Sprintf("pool %s is not well (%s): mend that first", pool.Name, pool.Status.Health[0].Reason), nil
	case need > min(pool.Status.Available, pool.Status.MaxVolume):
		return fmt.Sprintf("pool %s has no room for its %s: make room there", pool.Name, cluster.Bytes(need)), nil
	}
	node := &corev1.Node{}
	err = m.kube.Live.Get(ctx, client.ObjectKey{Name: to}, node)
	switch {
	case client.IgnoreNotFound(err) != nil:
		return "", kube.APIError("look at node "+to, err)
	case cluster.IsGone(node, err):
		return "node " + to + " is gone for good: the volume moves when it is used on another one", nil
	case node.Spec.Unschedulable:
		return "node " + to + " is cordoned: kubectl uncordon " + to, nil
	}
	return "", nil
}
