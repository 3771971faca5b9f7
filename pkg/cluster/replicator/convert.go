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

// convert makes a volume on one node that is asked to have replicas (spec.replicas) the first leg of a ReplicatedVolume, which has its name and ID. Each
// step is a write that is refused if the object was changed meanwhile, and a repetition goes on where an earlier try has stopped:
//
//  1. The Volume says that it is a leg (spec.replicaOf). From then on it cannot be claimed by itself; a claim that it has stays until the ReplicatedVolume has
//     it too.
//  2. The ReplicatedVolume is created. It has this one leg, the number of legs that it is to have, and the claim.
//  3. When the volume's node has written into the volume's record that it is a leg, it is not used there by itself any more. Then the status of the
//     ReplicatedVolume says that the leg is current, as there was no other. From then on the ReplicatedVolume can be claimed, and the node that uses it puts a
//     mirror over the leg (package agent).
//  4. The request (spec.replicas) is taken off. Now it is a volume that has fewer legs than it is to have.
//
// A ReplicatedVolume that has had only one leg so far (spec.numbered is 1) was always made this way.
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
	case whole && r.Status.Made == nil && (err != nil || v1alpha1.Going(v)): // the Volume was deleted meanwhile
		err := p.kube.Client.Delete(ctx, r, client.Preconditions{UID: &r.UID, ResourceVersion: &r.ResourceVersion})
		return kube.APIError("take back replicated volume "+key, client.IgnoreNotFound(kube.IgnoreConflict(err)))
	case err != nil || v.Spec.Replicas == 0 && (!whole || r.Status.Made != nil || r.Spec.Numbered != 1 || v.Spec.ReplicaOf != key): // if the request was taken back between 2 and 3, it is carried out all the same: it is a leg
		return nil
	case !whole && v.Status.Created == nil: // it is not made yet; or it was restored without its status, and so without its size
		return nil // there is an event when its node has reported it
	case v.Spec.ReplicaOf == "":
		if whole {
			return nil
		}
		if why, _ := v.WhyNotReplicated(p.maker.Mirrors(ctx)); why != "" {
			return nil // there is an event when the reason ends, or convertAsked looks again
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
				return nil // the event of that object comes
			}
			return kube.APIError("create replicated volume "+key, err)
		}
	}
	if r.Status.Made == nil && v.Status.ReplicaOf != v.Name {
		return nil // there is an event when its node has written it
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

// converted returns the ReplicatedVolume whose first leg a volume has become. Its further legs are in pools of the same name as the volume's; legs that
// are not current are replaced after the usual time.
func converted(v *v1alpha1.Volume) *v1alpha1.ReplicatedVolume {
	r := cluster.ReplicatedNamed(v.Name)
	r.Spec = v1alpha1.ReplicatedVolumeSpec{Name: v.Spec.Name, Pool: v.Named(), Pools: v.Spec.Pool, Replicas: v.Spec.Replicas, ReplaceAfter: int64(volume.UsualReplaceAfter / time.Second),
		Size: v.Status.Size, Legs: []string{v.Name}, Numbered: 1, Claims: v.Spec.Claims, Claim: v.Spec.Claim.DeepCopy()}
	return r
}
