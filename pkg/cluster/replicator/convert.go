package replicator

import (
	"context"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// convert makes a volume on one node that is asked to have replicas (spec.replicas) the first leg of one, which has its name and ID. Each step is a write that is refused if the object was changed, and finds what an
// earlier try has done:
//
//  1. The volume says that it is a leg. From then on nobody can claim it by itself, and the claim that it has stays until there is an object that has it too.
//  2. A ReplicatedVolume has this one leg, says how many there are to be, and has the claim.
//  3. When the volume's node has written into its record that it is a leg, so that it is not used there by itself any more, the status says that the leg is current, as it is the only one there ever was. From then on it can be claimed, and the node that
//     uses it lays it over a mirror (package agent).
//  4. The request goes. Now it is a volume that has fewer legs than it is to have.
//
// None but a volume that was made so has an object that has ever had one leg.
func (p *Replicator) convert(ctx context.Context, key string) error {
	v := &v1alpha1.Volume{}
	err := p.kube.Live.Get(ctx, client.ObjectKey{Name: key}, v)
	if client.IgnoreNotFound(err) != nil {
		return kube.APIError("read volume "+key, err)
	}
	r := &v1alpha1.ReplicatedVolume{}
	there := p.kube.Live.Get(ctx, client.ObjectKey{Name: key}, r)
	if client.IgnoreNotFound(there) != nil {
		return kube.APIError("read replicated volume "+key, there)
	}
	whole := there == nil
	switch {
	case whole && r.Status.Made == nil && (err != nil || v1alpha1.Going(v)): // it was deleted meanwhile
		err := p.kube.Client.Delete(ctx, r, client.Preconditions{UID: &r.UID, ResourceVersion: &r.ResourceVersion})
		return kube.APIError("take back replicated volume "+key, client.IgnoreNotFound(kube.IgnoreConflict(err)))
	case err != nil || v.Spec.Replicas == 0 && (!whole || r.Status.Made != nil || r.Spec.Numbered != 1 || v.Spec.ReplicaOf != key): // a wish that was taken back between 2 and 3 comes true: it is a leg
		return nil
	case v.Spec.ReplicaOf == "":
		if whole {
			return nil
		}
		if why, _ := v.WhyNotReplicated(p.maker.Mirrors(ctx)); why != "" {
			return nil // its event comes when that is over
		}
		before := v.DeepCopy()
		v.Spec.ReplicaOf = v.Name
		if err := p.kube.Client.Patch(ctx, v, kube.LockingPatch(before)); err != nil {
			return kube.APIError("make volume "+key+" a replica", client.IgnoreNotFound(kube.IgnoreConflict(err)))
		}
		klog.FromContext(ctx).Info("A volume gets replicas", "volume", cluster.VolumeID(v).String(), "replicas", v.Spec.Replicas)
	}
	if !whole {
		r = converted(v)
		if err := p.kube.Client.Create(ctx, r, client.FieldValidation(metav1.FieldValidationStrict)); err != nil {
			if apierrors.IsAlreadyExists(err) {
				return nil // it is seen again
			}
			return kube.APIError("create replicated volume "+key, err)
		}
	}
	if r.Status.Made == nil && v.Status.ReplicaOf != v.Name {
		return nil // its event comes
	}
	if r.Status.Made == nil {
		before := r.DeepCopy()
		cluster.SetLegs(r, false)
		if err := p.kube.Client.Status().Patch(ctx, r, kube.LockingPatch(before)); err != nil {
			return kube.APIError("write down that volume "+key+" is made", client.IgnoreNotFound(kube.IgnoreConflict(err)))
		}
	}
	before := v.DeepCopy()
	v.Spec.Replicas = 0
	return kube.APIError("change leg "+key, client.IgnoreNotFound(kube.IgnoreConflict(p.kube.Client.Patch(ctx, v, kube.LockingPatch(before)))))
}

// converted is the object of a volume whose first leg a volume has become. Its further legs are in pools of the name that it is in, and are replaced as those of a class that does not say when.
func converted(v *v1alpha1.Volume) *v1alpha1.ReplicatedVolume {
	r := cluster.ReplicatedNamed(v.Name)
	r.Spec = v1alpha1.ReplicatedVolumeSpec{Name: v.Spec.Name, Pool: v.Named(), Pools: v.Spec.Pool, Replicas: v.Spec.Replicas, ReplaceAfter: int64(volume.UsualReplaceAfter / time.Second),
		Size: v.Status.Size, Legs: []string{v.Name}, Numbered: 1, Claims: v.Spec.Claims, Claim: v.Spec.Claim.DeepCopy()}
	return r
}
