package gc

import (
	"context"

	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
)

// collectClaim takes back the claims of a volume for which there is no VolumeAttachment: its finalizer was removed by hand, so nobody will ever ask for the
// release. Whether the node still has devices of the volume is not looked at here: the node does that.
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
	if err := c.kube.Client.Get(ctx, client.ObjectKey{Name: key}, v); err != nil || v.Spec.ReplicaOf != "" { // a leg is claimed with its ReplicatedVolume
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

// claimedVolume is a Volume or ReplicatedVolume whose claim is looked at.
type claimedVolume struct {
	client.Object
	id      string
	names   []string // of PersistentVolumes that it may have, besides those that have its ID as their handle
	unclaim func()   // takes the claim off the object
}

// collectClaimOf takes back the claim of a volume for a node, if neither known nor a new census has a VolumeAttachment for it. It fails with a conflict if the
// object was changed meanwhile.
func (c *Collector) collectClaimOf(ctx context.Context, known *census, v claimedVolume, node string) error {
	attached, err := known.attached(ctx, v.id, node, v.names...)
	if err != nil || attached {
		return err
	}
	// Whoever asked for the claim before this write has a VolumeAttachment, which the second census finds. Whoever asks for it later takes the annotation
	// off, and the last write conflicts.
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
