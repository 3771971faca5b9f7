package agent

import (
	"context"
	"errors"

	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// A volume that this node uses can become one with several legs meanwhile (package replicator). Its object is claimed for this node then, and its devices are still those of its one leg: they are to be laid over a mirror.

// adopter has such volumes be used through a mirror.
type adopter struct {
	*ReplicaLegs
	told map[string]string // why it could not be done, last, by the names of the objects
}

// look adopts those that are to be. mirrored are the volumes that have a mirror here.
func (a *adopter) look(ctx context.Context, mirrored map[blockdev.Ref]int64) {
	if !a.replicas.read.Load() {
		return
	}
	var list v1alpha1.ReplicatedVolumeList
	if err := a.replicas.kube.Cache.List(ctx, &list); err != nil {
		return // it is memory
	}
	there := map[string]string{}
	for i := range list.Items {
		v := &list.Items[i]
		id := cluster.ReplicatedID(v)
		if c := v.Spec.Claim; c == nil || c.Node != a.local.Node() || v.Status.Made == nil || v.Going() {
			continue
		}
		if _, is := mirrored[blockdev.Ref{Kind: id.Kind, Key: id.Key}]; is {
			if _, astray, err := a.volumes.Adopted(ctx, id); err != nil || !astray {
				continue
			}
		}
		err := a.withLocks([]string{keylock.Volume(v.Name)}, func() error { return a.volumes.Adopt(ctx, id) })
		if err != nil && !errors.Is(err, errdefs.ErrBusy) && ctx.Err() == nil {
			there[v.Name] = errdefs.Words(err)
			a.waits(ctx, v.DeepCopy(), err)
		}
	}
	a.told = there
}

// waits says once why a volume is used without a mirror: in the log, and in the object, of each leg that waits for that.
func (a *adopter) waits(ctx context.Context, v *v1alpha1.ReplicatedVolume, err error) {
	why := errdefs.Words(err)
	if a.told[v.Name] == why {
		return
	}
	klog.FromContext(ctx).Error(err, "Could not lay a volume that got replicas while it is used over a mirror; trying again", "volume", v.Name)
	if failure := a.writeReplicas(ctx, v, func(s *v1alpha1.ReplicatedVolumeStatus) {
		for _, name := range v.Spec.Legs {
			leg := v.Leg(name)
			if leg == nil {
				s.Legs = append(s.Legs, v1alpha1.Leg{Name: name})
				leg = v.Leg(name)
			}
			if !leg.Current {
				setWaiting(leg, "node "+a.local.Node()+" uses the volume without a mirror still: "+why)
			}
		}
	}); failure != nil && !errors.Is(failure, errdefs.ErrBusy) {
		klog.FromContext(ctx).Error(failure, "Could not say in its object why a replicated volume waits", "volume", v.Name)
	}
}

// isAstray reports whether what is written to a volume may not come to its mirror, as it is not adopted yet: then no leg joins.
func (t *tender) isAstray(ctx context.Context, v *v1alpha1.ReplicatedVolume) (bool, error) {
	_, astray, err := t.volumes.Adopted(ctx, cluster.ReplicatedID(v))
	return astray, err
}

// comparable reports whether the legs of a volume can be compared: not if it was mounted when it had one, as the filesystem then changes pages while they are written, which each leg takes at another moment.
func (t *tender) comparable(ctx context.Context, v *v1alpha1.ReplicatedVolume) bool {
	adopted, _, err := t.volumes.Adopted(ctx, cluster.ReplicatedID(v))
	return err == nil && !adopted
}
