package gc

import (
	"context"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// collectGroup deletes the objects of a group of which some members were never created. No snapshot of it was taken: the node waits for the missing
// objects, and AbandonGrace has passed, so nobody asks for the group any more. If somebody does, the next CreateVolumeGroupSnapshot makes all of it anew.
func (c *Collector) collectGroup(ctx context.Context, key string) error {
	members, err := cluster.Members(ctx, c.kube.Client, key)
	if err != nil || !c.unfinished(members) {
		return err
	}
	members, err = cluster.LiveMembers(ctx, c.kube.Live, key) // the cache may lack members
	if err != nil || !c.unfinished(members) {
		return err
	}
	for i := range members {
		m := &members[i]
		if v1alpha1.Going(m) {
			continue
		}
		klog.FromContext(ctx).Info("Nobody asks any more for a group of which a part was written down; deleting that", "group", volume.GroupID{Key: key}.String(), "snapshot", cluster.SnapshotID(m).String())
		if err := kube.IgnoreConflict(cluster.IntendDeletion(ctx, c.kube.Client, m, true)); err != nil {
			return err
		}
	}
	return nil
}

// unfinished reports whether a group lacks objects of members and can be deleted. It is false if a snapshot was taken, if one may have been (an object without
// spec.make, which was restored), or if a member is younger than AbandonGrace: the rest may be on its way.
func (c *Collector) unfinished(members []v1alpha1.Snapshot) bool {
	return !slices.ContainsFunc(members, func(m v1alpha1.Snapshot) bool {
		return len(members) >= m.Spec.Group.Size || m.Status.Created != nil || !m.Spec.Make || time.Since(m.CreationTimestamp.Time) < c.options.AbandonGrace
	})
}
