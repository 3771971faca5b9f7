package gc

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
)

// collectClaim takes claims back that no VolumeAttachment is for: somebody took the finalizer
// off that one, so nobody will ever ask for it. Devices that are still there are the node's to see.
func (c *Collector) collectClaim(ctx context.Context, known *census, key string) error {
	v := &v1alpha1.Volume{}
	if err := c.kube.Client.Get(ctx, client.ObjectKey{Name: key}, v); err != nil {
		return client.IgnoreNotFound(err)
	}
	if v.Spec.ReplicaOf != "" {
		return nil // it is claimed as its volume is
	}
	for _, node := range v.Claimants() {
		if err := c.collectClaimOf(ctx, known, v, node); err != nil {
			return kube.IgnoreConflict(err)
		}
	}
	return nil
}

func (c *Collector) collectClaimOf(ctx context.Context, known *census, v *v1alpha1.Volume, node string) error {
	attached, err := known.attached(ctx, v, node)
	if err != nil || attached {
		return err
	}
	// Whoever asked for the claim until now has a VolumeAttachment; whoever asks from now on takes this off.
	before := v.DeepCopy()
	metav1.SetMetaDataAnnotation(&v.ObjectMeta, v1alpha1.DoubtAnnotation, "true")
	if err := c.kube.Client.Patch(ctx, v, kube.LockingPatch(before)); err != nil {
		return err
	}
	attached, err = c.census().attached(ctx, v, node)
	if err != nil || attached {
		return err
	}
	klog.FromContext(ctx).Info("Taking back a claim that no VolumeAttachment is for", "volume", cluster.VolumeID(v).String(), "node", node)
	before = v.DeepCopy()
	v.Unclaim(node)
	delete(v.Annotations, v1alpha1.DoubtAnnotation)
	return c.kube.Client.Patch(ctx, v, kube.LockingPatch(before))
}
