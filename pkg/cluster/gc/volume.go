package gc

import (
	"context"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// collectVolume has a volume deleted that is older than AbandonGrace, and for which there is neither the PersistentVolumeClaim that it was made for nor a
// PersistentVolume with its handle. Its node is asked (spec.abandoned), and deletes it only if it is blank. A volume with several legs is deleted if it was
// never used (wasUsed). What was adopted or restored stays (isYounger). Of a further leg alone: see collectLeg.
func (c *Collector) collectVolume(ctx context.Context, known *census, key string) error {
	v := &v1alpha1.Volume{}
	if err := c.kube.Client.Get(ctx, client.ObjectKey{Name: key}, v); err != nil {
		return client.IgnoreNotFound(err)
	}
	if isUnusedLeg(v) {
		return c.collectLeg(ctx, v)
	}
	whole, err := c.whole(ctx, v)
	if err != nil || whole != nil && whole.Going() {
		return err
	}
	if whole != nil {
		if used, err := c.wasUsed(ctx, whole); err != nil || used {
			return err
		}
	}
	if !provisioned(v) || whole == nil && isYounger(v) { // an earlier object of this name was; or somebody has adopted it, and may have its PersistentVolume made later
		return nil
	}
	if due, err := c.isDue(ctx, v); err != nil || !due {
		return err
	}
	volumes, err := known.volumes(ctx)
	if err != nil {
		return err
	}
	if len(volumes[cluster.VolumeID(v).String()]) > 0 {
		// Who deletes the PersistentVolume deletes the volume. The UID is cloned, as it would keep the whole object in memory.
		c.named.Store(types.UID(strings.Clone(string(v.UID))), true)
		return nil
	}
	pvc := &corev1.PersistentVolumeClaim{}
	err = c.kube.Live.Get(ctx, client.ObjectKey{Namespace: v.Spec.ClaimRef.Namespace, Name: v.Spec.ClaimRef.Name}, pvc)
	if err == nil && cluster.ProvisionedPrefix+string(pvc.UID) == v.Spec.Name {
		c.pending.AddAfter(candidate{aVolume, key}, c.options.AbandonGrace) // its claim is there: it is being provisioned
		return nil
	}
	if client.IgnoreNotFound(err) != nil {
		return err
	}
	if whole != nil {
		klog.FromContext(ctx).Info("Nobody knows of a volume with replicas, which was never used: deleting it", "volume", cluster.VolumeID(v).String(), "claim", v.Spec.ClaimRef.Namespace+"/"+v.Spec.ClaimRef.Name)
		before := whole.DeepCopy()
		whole.Spec.Delete = whole.UID
		return kube.IgnoreConflict(c.kube.Client.Patch(ctx, whole, kube.LockingPatch(before)))
	}
	klog.FromContext(ctx).Info("Nobody knows of a volume: its node deletes it if it is blank", "volume", cluster.VolumeID(v).String(), "claim", v.Spec.ClaimRef.Namespace+"/"+v.Spec.ClaimRef.Name)
	return c.abandon(ctx, v)
}

// collectLeg has a leg deleted that was never used, and whose ReplicatedVolume is gone: that was deleted while the leg was begun, or a person has deleted it.
// Its node is asked, as for a volume.
func (c *Collector) collectLeg(ctx context.Context, v *v1alpha1.Volume) error {
	r := &v1alpha1.ReplicatedVolume{}
	if err := c.kube.Client.Get(ctx, client.ObjectKey{Name: v.Spec.ReplicaOf}, r); !apierrors.IsNotFound(err) {
		return err // who makes and deletes that volume sees to its legs
	}
	if whole, err := c.whole(ctx, v); err != nil || whole != nil || isYounger(v) { // a person may write the ReplicatedVolume of adopted legs anew
		return err
	}
	if due, err := c.isDue(ctx, v); err != nil || !due {
		return err
	}
	klog.FromContext(ctx).Info("The volume of a replica that was never used is gone: its node deletes it if it is blank", "replica", cluster.VolumeID(v).String(), "of", v.Spec.ReplicaOf)
	return c.abandon(ctx, v)
}

// isDue reports whether a volume that may be garbage is old enough, is used by nobody, and its node was not asked yet. One that is too young is queued again.
// It takes back the question that a node has answered with no.
func (c *Collector) isDue(ctx context.Context, v *v1alpha1.Volume) (due bool, err error) {
	switch {
	case v1alpha1.Going(v), v.Status.Is(v1alpha1.Abandoned, "True"):
		return false, nil // its node deletes it
	case v.Status.Is(v1alpha1.Abandoned, "False"):
		if !v.Spec.Abandoned {
			return false, nil // the node has answered: the volume is not blank
		}
		before := v.DeepCopy()
		v.Spec.Abandoned = false
		return false, kube.IgnoreConflict(c.kube.Client.Patch(ctx, v, kube.LockingPatch(before)))
	case v.Spec.Abandoned:
		return false, nil // the node has not answered yet
	case wanted(v): // while it moves, it may be on two nodes
		return false, nil
	}
	if age := time.Since(v.CreationTimestamp.Time); age < c.options.AbandonGrace {
		c.pending.AddAfter(candidate{aVolume, v.Name}, c.options.AbandonGrace-age)
		return false, nil
	}
	return true, nil
}

// abandon asks the node of a volume to delete it, if it is blank.
func (c *Collector) abandon(ctx context.Context, v *v1alpha1.Volume) error {
	before := v.DeepCopy()
	v.Spec.Abandoned = true
	return kube.IgnoreConflict(c.kube.Client.Patch(ctx, v, kube.LockingPatch(before)))
}

// whole returns the ReplicatedVolume that v is a leg of. It is nil if v is no leg, or if that object does not exist: the first leg is made before it.
func (c *Collector) whole(ctx context.Context, v *v1alpha1.Volume) (*v1alpha1.ReplicatedVolume, error) {
	if v.Spec.ReplicaOf == "" {
		return nil, nil
	}
	r := &v1alpha1.ReplicatedVolume{}
	err := c.kube.Live.Get(ctx, client.ObjectKey{Name: v.Spec.ReplicaOf}, r)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return r, err
}

// wasUsed reports whether anybody may have used a volume with several legs: it was claimed or opened once, or a leg of it was. Objects that were adopted or
// restored may not tell: so it is true too if the object of a leg is younger than the leg. No node is asked whether such a volume is blank.
func (c *Collector) wasUsed(ctx context.Context, whole *v1alpha1.ReplicatedVolume) (bool, error) {
	if whole.Spec.Claims+whole.Status.Opened > 0 {
		return true, nil
	}
	var legs v1alpha1.VolumeList
	if err := c.kube.Client.List(ctx, &legs, client.MatchingFields{cluster.ByReplicaOf: whole.Name}, client.UnsafeDisableDeepCopy); err != nil {
		return false, kube.APIError("list the replicas of "+whole.Name, err)
	}
	return slices.ContainsFunc(legs.Items, func(v v1alpha1.Volume) bool { return v.Spec.Claims > 0 || isYounger(&v) }), nil
}

// clocks is how far the clock of a node may be behind that of the API server.
const clocks = time.Minute

// isYounger reports whether the object of a volume is younger than its bytes: it was adopted or restored, and does not tell whether anybody used these. Of an
// adopted one its node says that it was found. One that was restored with its status tells when its bytes were made, by the clock of the node.
func isYounger(v *v1alpha1.Volume) bool {
	made := v.Status.Created
	if made == nil {
		return false
	}
	ready := meta.FindStatusCondition(v.Status.Conditions, v1alpha1.Ready)
	return ready == nil || ready.Reason != cluster.ReasonCreated || made.Time.Before(v.CreationTimestamp.Add(-clocks))
}

// NeverUsed reports whether nobody can have used a volume that CreateVolume asks for: its PersistentVolumeClaim exists and is bound to nothing, and no
// PersistentVolume has its handle. Then it can be made anew with no loss.
func (c *Collector) NeverUsed(ctx context.Context, spec volume.Spec, v *v1alpha1.Volume) (bool, error) {
	if spec.For.Name == "" {
		return false, nil
	}
	pvc := &corev1.PersistentVolumeClaim{}
	err := c.kube.Live.Get(ctx, client.ObjectKey{Namespace: spec.For.Namespace, Name: spec.For.Name}, pvc)
	if err != nil || cluster.ProvisionedPrefix+string(pvc.UID) != v.Spec.Name || pvc.Spec.VolumeName != "" {
		return false, kube.APIError("read claim "+spec.For.Namespace+"/"+spec.For.Name, client.IgnoreNotFound(err))
	}
	volumes, err := c.census().volumes(ctx)
	return err == nil && len(volumes[cluster.VolumeID(v).String()]) == 0, kube.APIError("look for PersistentVolumes", err)
}
