package mover

import (
	"context"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// readRetry is the pause between two looks whether a snapshot is still being copied to volumes on other nodes, before it leaves its node.
const readRetry = 5 * time.Second

// SnapshotChanged has a snapshot looked at, if it moves, or names a group whose label it does not have.
func (m *Mover) SnapshotChanged(o client.Object, gone bool) {
	if s, is := o.(*v1alpha1.Snapshot); is && !gone && (s.Spec.Move != nil || s.Spec.Group != nil && !s.InGroup()) {
		m.snapshots.Add(s.Name)
	}
}

// moveSnapshot is move for a snapshot. Volumes on other nodes that are being copied from it name its node in their objects, so it stays until these copies
// are complete.
func (m *Mover) moveSnapshot(ctx context.Context, key string) (again time.Duration, err error) {
	s := &v1alpha1.Snapshot{}
	if err := m.kube.Cache.Get(ctx, client.ObjectKey{Name: key}, s); err != nil {
		return 0, client.IgnoreNotFound(err)
	}
	before := s.DeepCopy()
	switch {
	case s.Spec.Move == nil:
		return 0, m.labelAdopted(ctx, s)
	case s.Spec.Move.Left:
		ended, err := m.hasEnded(ctx, cluster.SnapshotID(s), s.Spec.Move.Node, s.Status.Move)
		if err != nil || !ended {
			return lastRetry, err
		}
		s.Spec.Move = nil
	case cluster.SnapshotMayMove(s):
		if gone, err := m.gone(ctx, cluster.SnapshotID(s), s.Spec.Move.Node); err != nil || gone {
			return lastRetry, err
		}
		var copies v1alpha1.VolumeList
		if err := m.kube.Cache.List(ctx, &copies, client.MatchingFields{cluster.ByFetched: key}, client.UnsafeDisableDeepCopy); err != nil || len(copies.Items) > 0 {
			return readRetry, err
		}
		if labelled, err := m.labelGroup(ctx, s); err != nil || !labelled {
			return 0, err
		}
		klog.FromContext(ctx).Info("A snapshot moves", "snapshot", cluster.SnapshotID(s).String(), "from", s.Spec.NodeName, "to", s.Spec.Move.Node)
		if err := m.labelSource(ctx, s); err != nil {
			return 0, err
		}
		cluster.FlipSnapshot(s)
	default:
		return 0, nil
	}
	err = kube.IgnoreConflict(m.kube.Client.Patch(ctx, s, kube.LockingPatch(before)))
	return 0, kube.APIError("move snapshot "+key, client.IgnoreNotFound(err))
}

// labelSource gives a snapshot that is about to leave the node of its volume the label that names the volume, if they belong together
// (v1alpha1.Snapshot.Of). Adopted snapshots do not have it. It changes s only; the caller writes that.
func (m *Mover) labelSource(ctx context.Context, s *v1alpha1.Snapshot) error {
	v := &v1alpha1.Volume{}
	err := m.kube.Cache.Get(ctx, client.ObjectKey{Name: s.Spec.Source}, v)
	if err == nil && s.Of(v) {
		metav1.SetMetaDataLabel(&s.ObjectMeta, v1alpha1.SourceLabel, v.Name)
	}
	return client.IgnoreNotFound(err)
}

// labelSnapshots gives the snapshots of a volume that is about to leave their node the label that names the volume (v1alpha1.Snapshot.Of), if they do not
// have it, as they were adopted.
func (m *Mover) labelSnapshots(ctx context.Context, v *v1alpha1.Volume) error {
	var list v1alpha1.SnapshotList
	if err := m.kube.Cache.List(ctx, &list, client.MatchingFields{cluster.BySource: v.Name}); err != nil {
		return err
	}
	for i := range list.Items {
		if s := &list.Items[i]; s.Labels[v1alpha1.SourceLabel] == "" && s.Of(v) {
			if err := m.label(ctx, s, v1alpha1.SourceLabel, v.Name); err != nil {
				return err
			}
		}
	}
	return nil
}

// label writes a label of a snapshot. It succeeds if the snapshot is gone, and fails with a conflict if it was changed.
func (m *Mover) label(ctx context.Context, s *v1alpha1.Snapshot, label, value string) error {
	before := s.DeepCopy()
	metav1.SetMetaDataLabel(&s.ObjectMeta, label, value)
	return kube.APIError("label snapshot "+s.Name, client.IgnoreNotFound(m.kube.Client.Patch(ctx, s, kube.LockingPatch(before))))
}

// labelGroup gives the members of a snapshot's group the label of the group, if they do not have it, as they were adopted: once one of them has moved,
// nothing else says that they belong together (v1alpha1.OfGroup). If more snapshots name the group than it has members, it labels none, as nothing tells
// which are the members. all is false if s itself got its label now.
func (m *Mover) labelGroup(ctx context.Context, s *v1alpha1.Snapshot) (all bool, err error) {
	group := s.Spec.Group
	if group == nil {
		return true, nil
	}
	members, err := cluster.Members(ctx, m.kube.Cache, group.Key)
	if err != nil || len(members) > group.Size {
		return err == nil, err
	}
	all = !slices.ContainsFunc(members, func(one v1alpha1.Snapshot) bool { return one.Name == s.Name && !one.InGroup() }) // the label changes s, whose event comes
	return all, m.labelMembers(ctx, members)
}

// labelMembers gives the members of a group its label, if they do not have it.
func (m *Mover) labelMembers(ctx context.Context, members []v1alpha1.Snapshot) error {
	for i := range members {
		one := &members[i]
		if one.InGroup() {
			continue
		}
		if err := m.label(ctx, one, v1alpha1.GroupLabel, one.Spec.Group.Key); err != nil {
			return err
		}
	}
	return nil
}

// labelAdopted gives the members of a group of which some were adopted the label of the group, once all of them are there, on whatever nodes. It does so
// only if the number of snapshots that name the group is its size, all have been taken, and each has the name of a member. So nothing else that a node
// claims to be of the group gets into it, and nothing gets into one that the controller is taking.
func (m *Mover) labelAdopted(ctx context.Context, s *v1alpha1.Snapshot) error {
	group := s.Spec.Group
	if group == nil || s.InGroup() {
		return nil
	}
	var list v1alpha1.SnapshotList
	if err := m.kube.Cache.List(ctx, &list, client.MatchingFields{cluster.ByGroup: group.Key}); err != nil || len(list.Items) != group.Size {
		return err
	}
	for i := range list.Items {
		one := &list.Items[i]
		if one.Status.Created == nil || v1alpha1.Going(one) || *one.Spec.Group != *group || group.Key != volume.KeyOf(one.Spec.Name) ||
			one.Name != volume.KeyOf(cluster.MemberName(one.Spec.Name, cluster.SnapshotSource(one))) {
			return nil
		}
	}
	return kube.IgnoreConflict(m.labelMembers(ctx, list.Items))
}
