package mover

import (
	"context"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
)

// readRetry is how often it is looked whether a snapshot is still being copied to other nodes, from the one that it is to leave.
const readRetry = 5 * time.Second

// SnapshotChanged looks at a snapshot that moves.
func (m *Mover) SnapshotChanged(o client.Object, gone bool) {
	if s, is := o.(*v1alpha1.Snapshot); is && !gone && s.Spec.Move != nil {
		m.snapshots.Add(s.Name)
	}
}

// moveSnapshot is move of a snapshot. Copies of it on other nodes that were begun have its old node in their objects, so it stays there until they are made.
func (m *Mover) moveSnapshot(ctx context.Context, key string) (again time.Duration, err error) {
	s := &v1alpha1.Snapshot{}
	if err := m.kube.Cache.Get(ctx, client.ObjectKey{Name: key}, s); err != nil {
		return 0, client.IgnoreNotFound(err)
	}
	before := s.DeepCopy()
	switch {
	case s.Spec.Move == nil:
		return 0, nil
	case s.Spec.Move.Left:
		ended, err := m.ended(ctx, cluster.SnapshotID(s), s.Spec.Move.Node, s.Status.Move)
		if err != nil || !ended {
			return lastRetry, err
		}
		s.Spec.Move = nil
	case cluster.SnapshotMayMove(s):
		var copies v1alpha1.VolumeList
		if err := m.kube.Cache.List(ctx, &copies, client.MatchingFields{cluster.ByFetched: key}, client.UnsafeDisableDeepCopy); err != nil || len(copies.Items) > 0 {
			return readRetry, err
		}
		if labelled, err := m.labelGroup(ctx, s); err != nil || !labelled {
			return 0, err
		}
		klog.FromContext(ctx).Info("A snapshot moves", "snapshot", cluster.SnapshotID(s).String(), "from", s.Spec.NodeName, "to", s.Spec.Move.Node)
		cluster.FlipSnapshot(s)
	default:
		return 0, nil
	}
	err = kube.IgnoreConflict(m.kube.Client.Patch(ctx, s, kube.LockingPatch(before)))
	return 0, kube.APIError("move snapshot "+key, client.IgnoreNotFound(err))
}

// labelGroup reports whether all members of a snapshot's group are known by their label (v1alpha1.OfGroup), and has those known that were adopted: once one of them has
// moved, nothing else says that the others belong to it.
func (m *Mover) labelGroup(ctx context.Context, s *v1alpha1.Snapshot) (all bool, err error) {
	group := s.Spec.Group
	if group == nil {
		return true, nil
	}
	members, err := cluster.Members(ctx, m.kube.Cache, group.Key)
	if err != nil {
		return false, err
	}
	all = true
	for i := range members {
		one := &members[i]
		if one.Labels[v1alpha1.GroupLabel] == group.Key {
			continue
		}
		all = all && one.Name != s.Name // which is another object from then on, and comes again
		before := one.DeepCopy()
		metav1.SetMetaDataLabel(&one.ObjectMeta, v1alpha1.GroupLabel, group.Key)
		if err := m.kube.Client.Patch(ctx, one, kube.LockingPatch(before)); err != nil {
			return false, kube.APIError("label snapshot "+one.Name, client.IgnoreNotFound(err))
		}
	}
	return all, nil
}
