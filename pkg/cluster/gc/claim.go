package gc

import (
	"context"

	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
)

// collectClaim takes claims back that no VolumeAttachment is for: somebody took the finalizer
// off that one, so nobody will ever ask for it. Devices that are still there are the node's to see.
func (c *Collector) collectClaim(ctx context.Context, known *census, key string) error {
	r := &v1alpha1.ReplicatedVolume{}
	err := c.kube.Client.Get(ctx, client.ObjectKey{Name: key}, r)
	if client.IgnoreNotFound(err) != nil {
		return err
	}
	if err == nil {
		if r.Spec.Claim == nil {
			return nil
		}
		one := claimedVolume{r, cluster.ReplicatedID(r).String(), []string{r.Spec.Name}, func() { r.Spec.Claim = nil }}
		return kube.IgnoreConflict(c.collectClaimOf(ctx, known, one, r.Spec.Claim.Node))
	}
	v := &v1alpha1.Volume{}
	if err := c.kube.Client.Get(ctx, client.ObjectKey{Name: key}, v); err != nil || v.Spec.ReplicaOf != "" { // which is claimed as its volume is
		return client.IgnoreNotFound(err)
	}
	for _, node := range v.Claimants() {
		one := claimedVolume{v, cluster.VolumeID(v).String(), []string{v.Spec.Name, v.Spec.PersistentVolume}, func() { v.Unclaim(node) }}
		if err := c.collectClaimOf(ctx, known, one, node); err != nil {
			return kube.IgnoreConflict(err)
		}
	}
	return nil
}

// claimedVolume is a volume whose claim is looked at: its object, and what it is known by.
type claimedVolume struct {
	client.Object
	id      string
	names   []string
	unclaim func() // takes the claim off the object
}

func (c *Collector) collectClaimOf(ctx context.Context, known *census, v claimedVolume, node string) error {
	attached, err := known.attached(ctx, v.id, node, v.names...)
	if err != nil || attached {
		return err
	}
	// Whoever asked for the claim until now has a VolumeAttachment; whoever asks from now on takes this off.
	before := v.DeepCopyObject().(client.Object)
	cluster.Annotate(v, v1alpha1.DoubtAnnotation, "true")
	if err := c.kube.Client.Patch(ctx, v.Object, kube.LockingPatch(before)); err != nil {
		return err
	}
	attached, err = c.census().attached(ctx, v.id, node, v.names...)
	if err != nil || attached {
		return err
	}
	klog.FromContext(ctx).Info("Taking back a claim that no VolumeAttachment is for", "volume", v.id, "node", node)
	before = v.DeepCopyObject().(client.Object)
	v.unclaim()
	cluster.Annotate(v, v1alpha1.DoubtAnnotation, "")
	return c.kube.Client.Patch(ctx, v.Object, kube.LockingPatch(before))
}
