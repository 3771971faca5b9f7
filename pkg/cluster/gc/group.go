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

// collectGroup deletes the members of a group that was never written down in full, so that its
// node waits for the rest: nothing was cut, and whoever wanted it has long stopped asking. If that
// is not so, the next try makes all of it anew.
func (c *Collector) collectGroup(ctx context.Context, key string) error {
	members, err := cluster.Members(ctx, c.kube.Client, key)
	if err != nil || !c.unfinished(members) {
		return err
	}
	members, err = cluster.LiveMembers(ctx, c.kube.Live, key) // what the cache has not heard of counts too
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

// unfinished reports whether a group lacks members, and none was cut, may have been (an object that
// was restored), or is young enough for the rest to be on its way.
func (c *Collector) unfinished(members []v1alpha1.Snapshot) bool {
	return !slices.ContainsFunc(members, func(m v1alpha1.Snapshot) bool {
		return len(members) >= m.Spec.Group.Size || m.Status.Created != nil || !m.Spec.Make || time.Since(m.CreationTimestamp.Time) < c.options.AbandonGrace
	})
}
