package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/liveness"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// newSnapshot returns the object of a new snapshot of the volume with an ID, taken from cut: that volume, or a leg of it. With group it is a member of that
// group.
func newSnapshot(name string, id volume.ID, cut *v1alpha1.Volume, group *v1alpha1.Group) *v1alpha1.Snapshot {
	o := cluster.SnapshotNamed(volume.KeyOf(name))
	if group != nil {
		o = cluster.SnapshotNamed(volume.KeyOf(cluster.MemberName(name, id)))
	}
	o.Labels = map[string]string{v1alpha1.SourceLabel: cut.Name}
	if group != nil {
		o.Labels[v1alpha1.GroupLabel] = group.Key
	}
	o.Spec = v1alpha1.SnapshotSpec{Intent: v1alpha1.Intent{Make: true}, NodeName: cut.Spec.NodeName, Pool: cut.Spec.Pool, Name: name, Source: id.Key, Encryption: cut.Spec.Encryption, Group: group}
	if cut.Name != id.Key {
		o.Spec.Leg = cut.Name
	}
	if id.Pool != cut.Spec.Pool {
		o.Spec.SourcePool = id.Pool
	}
	return o
}

// sameSnapshot reports whether two objects are of the same snapshot: by name, group and source.
func sameSnapshot(a, b *v1alpha1.Snapshot) bool {
	if (a.Spec.Group == nil) != (b.Spec.Group == nil) || (a.Spec.Group != nil && *a.Spec.Group != *b.Spec.Group) {
		return false
	}
	return a.Spec.Name == b.Spec.Name && cluster.SnapshotSource(a) == cluster.SnapshotSource(b)
}

// getOrCreateSnapshot creates the object of a snapshot, or returns the one that is there. One that the node has refused, or that is to be taken of another
// leg of the volume than want, is deleted first. ErrExists for another snapshot of the name.
func (s *Store) getOrCreateSnapshot(ctx context.Context, w *kube.Watch, want *v1alpha1.Snapshot) (*v1alpha1.Snapshot, error) {
	return getOrCreate(ctx, s, w, want.Name,
		func() (*v1alpha1.Snapshot, error) { return want.DeepCopy(), nil },
		func(have *v1alpha1.Snapshot) (bool, error) {
			if !sameSnapshot(have, want) {
				return false, fmt.Errorf("%w: snapshot %q (%s) is of volume %s, not %s", errdefs.ErrExists, have.Spec.Name, cluster.SnapshotID(have), cluster.SnapshotSource(have), cluster.SnapshotSource(want))
			}
			if v1alpha1.LostUnmade(have) {
				return false, cluster.ErrorOf(have.Spec.NodeName, have.Status.Failure)
			}
			if have.Status.Created == nil && (have.Common().Refused(have.Generation) != nil || have.Spec.Group == nil && isOfAnotherLeg(have, want)) {
				return false, discard(ctx, s, w, have, true)
			}
			return true, nil
		})
}

// isOfAnotherLeg reports whether a snapshot that is not taken yet is to be taken of another leg than want: that one is not current any more.
func isOfAnotherLeg(have, want *v1alpha1.Snapshot) bool {
	return have.Status.Created == nil && have.Spec.Make && have.Spec.Leg != want.Spec.Leg
}

// CreateSnapshot: see volume.Store.
func (s *Store) CreateSnapshot(ctx context.Context, name string, source volume.ID) (volume.Snapshot, error) {
	if err := s.Ready(ctx); err != nil {
		return volume.Snapshot{}, err
	}
	w := s.hub.Open(cluster.SnapshotNamed(volume.KeyOf(name)))
	defer w.Close()
	// A snapshot that is taken needs no source any more. If the cache has one, or there cannot be a new one, it is read at the API server: another controller may
	// have deleted it since, or made it.
	err := s.kube.Client.Get(ctx, client.ObjectKey{Name: volume.KeyOf(name)}, &v1alpha1.Snapshot{})
	have := &v1alpha1.Snapshot{}
	var want *v1alpha1.Snapshot
	if apierrors.IsNotFound(err) {
		want, _ = s.planSnapshot(ctx, name, source, have) // what fails is tried again below
	}
	if want == nil {
		err = client.IgnoreNotFound(s.kube.Live.Get(ctx, client.ObjectKey{Name: volume.KeyOf(name)}, have))
		if err != nil {
			return volume.Snapshot{}, kube.APIError(fmt.Sprintf("snapshot %q", name), err)
		}
		if !v1alpha1.Going(have) && have.Status.Created != nil {
			return existingSnapshot(name, source, have)
		}
		if want, err = s.planSnapshot(ctx, name, source, have); err != nil {
			if have.Spec.Name == name && have.Spec.Group == nil && cluster.SnapshotSource(have) == source {
				err = s.takeBackCuts(ctx, []v1alpha1.Snapshot{*have}, err)
			}
			return volume.Snapshot{}, fmt.Errorf("snapshot %q: %w", name, err)
		}
	}
	have, err = s.cut(ctx, w, want)
	if errors.Is(err, errdefs.ErrUnavailable) && ctx.Err() == nil { // the leg may lack what another one has, as only its node knows
		for _, other := range s.otherCuts(ctx, source, want) {
			if cut, failure := s.cut(ctx, w, other); failure == nil {
				have, err = cut, nil
				break
			}
		}
	}
	if err != nil {
		return volume.Snapshot{}, sayOnce(err, "snapshot %q of volume %s", name, source)
	}
	return cluster.ToSnapshot(have), nil
}

// cut has a snapshot taken. One that an earlier try has asked of a leg whose node is down now is taken back, if it is to be taken of another leg.
func (s *Store) cut(ctx context.Context, w *kube.Watch, want *v1alpha1.Snapshot) (*v1alpha1.Snapshot, error) {
	for {
		have, err := s.getOrCreateSnapshot(ctx, w, want)
		var down *liveness.NodeDown
		if errors.As(err, &down) && have != nil && isOfAnotherLeg(have, want) {
			if err = s.withdrawCut(ctx, have, down); err == nil {
				continue
			}
		}
		if err != nil {
			return nil, err
		}
		return waitMade(ctx, s, w, have)
	}
}

// withdrawCut deletes the object of a snapshot that its node, which is down, has not reported, also if it is to be deleted. It returns down if the snapshot
// was reported, the object changed meanwhile, or the node is alive. Should the node have taken the snapshot all the same, that is a stray there.
func (s *Store) withdrawCut(ctx context.Context, have *v1alpha1.Snapshot, down error) error {
	now := &v1alpha1.Snapshot{}
	err := s.kube.Live.Get(ctx, client.ObjectKeyFromObject(have), now)
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil, now.UID != have.UID, now.Status.Created != nil, !now.Spec.Make, now.DeletionTimestamp != nil, s.nodes.Alive(ctx, now.Spec.NodeName):
		return down
	}
	if client.IgnoreNotFound(s.kube.Client.Delete(ctx, now, client.Preconditions{UID: &now.UID, ResourceVersion: &now.ResourceVersion})) != nil {
		return down
	}
	klog.FromContext(ctx).Info("Took back a snapshot that a node which is down was to take of its replica; it is taken of another one", "snapshot", cluster.SnapshotID(now).String(), "node", now.Spec.NodeName)
	return nil
}

// existingSnapshot returns a snapshot that is taken; ErrExists if it is of another volume, or of a group.
func existingSnapshot(name string, source volume.ID, have *v1alpha1.Snapshot) (volume.Snapshot, error) {
	if have.Spec.Name != name || have.Spec.Group != nil || cluster.SnapshotSource(have) != source {
		return volume.Snapshot{}, fmt.Errorf("%w: snapshot %q (%s) is of volume %s, not %s", errdefs.ErrExists, name, cluster.SnapshotID(have), cluster.SnapshotSource(have), source)
	}
	return cluster.ToSnapshot(have), nil
}

// planSnapshot returns the object of a new snapshot; of a volume with several legs it is taken from a current one: that of an earlier try (begun), if it still
// is current and its node ready, else the best (stands). It fails if its node is not ready (homeReady).
func (s *Store) planSnapshot(ctx context.Context, name string, source volume.ID, begun *v1alpha1.Snapshot) (*v1alpha1.Snapshot, error) {
	r, err := s.replicated(ctx, source)
	if err == nil && r != nil {
		err = usableReplicated(r)
	}
	if err != nil {
		return nil, err
	}
	var v *v1alpha1.Volume
	if r == nil {
		v, err = s.usable(ctx, source)
	} else {
		v, err = s.legToCut(ctx, r, begun)
	}
	if err == nil {
		err = s.homeReady(ctx, v.Spec.NodeName)
	}
	if err != nil {
		return nil, err
	}
	return newSnapshot(name, source, v, nil), nil
}

// legToCut returns the leg that a snapshot of a volume is taken of: see planSnapshot.
func (s *Store) legToCut(ctx context.Context, r *v1alpha1.ReplicatedVolume, begun *v1alpha1.Snapshot) (*v1alpha1.Volume, error) {
	legs, err := s.legs(ctx, r)
	if err != nil {
		return nil, err
	}
	for _, v := range currentLegs(r, legs) {
		if begun.Spec.Source == r.Name && v.Name == cmp.Or(begun.Spec.Leg, r.Name) && s.nodes.Ready(ctx, v.Spec.NodeName) == nil {
			return v, nil
		}
	}
	return s.stands(ctx, r)
}

// otherCuts returns the objects of a new snapshot that is taken from another current leg than want is; none of a volume without legs.
func (s *Store) otherCuts(ctx context.Context, source volume.ID, want *v1alpha1.Snapshot) (others []*v1alpha1.Snapshot) {
	r, err := s.replicated(ctx, source)
	if err != nil || r == nil {
		return nil
	}
	legs, err := s.legs(ctx, r)
	if err != nil {
		return nil
	}
	for _, v := range currentLegs(r, legs) {
		if v.Name != cmp.Or(want.Spec.Leg, r.Name) && s.nodes.Ready(ctx, v.Spec.NodeName) == nil {
			others = append(others, newSnapshot(want.Spec.Name, source, v, nil))
		}
	}
	return others
}

// DeleteSnapshot: see volume.Store.
func (s *Store) DeleteSnapshot(ctx context.Context, id volume.ID) error {
	if id.Kind != blockdev.Snapshot {
		return nil
	}
	have := cluster.SnapshotNamed(id.Key)
	return deleteByID(ctx, s, id, have, true, func(live bool) error { // only if unchanged: the change may be a move
		if group := have.Spec.Group; group != nil {
			return fmt.Errorf("%w: snapshot %s is part of %s and is deleted with it", errdefs.ErrInvalid, id, volume.GroupID{Key: group.Key})
		}
		if have.Deleting() {
			return nil
		}
		if err := cluster.Leaving("snapshot", id, have.Spec.Move); err != nil {
			if !live {
				return errStale // the old node may have given the bytes back since
			}
			return err
		}
		return s.notCopied(ctx, id)
	})
}

// GetSnapshot: see volume.Store. A member of a group is there if the group is whole.
func (s *Store) GetSnapshot(ctx context.Context, id volume.ID) (volume.Snapshot, error) {
	have, err := s.snapshot(ctx, id)
	if err != nil {
		return volume.Snapshot{}, err
	}
	return cluster.ToSnapshot(have), nil
}

// readableSnapshot is GetSnapshot for a snapshot whose bytes are to be read: ErrUnavailable while it has moved and not arrived (cluster.SnapshotComes).
func (s *Store) readableSnapshot(ctx context.Context, id volume.ID) (volume.Snapshot, error) {
	have, err := s.snapshot(ctx, id)
	if err == nil {
		err = cluster.SnapshotComes(have)
	}
	if err != nil {
		return volume.Snapshot{}, err
	}
	return cluster.ToSnapshot(have), nil
}

// snapshot returns the object of a snapshot that is taken, and whose group, if it has one, is whole; else ErrNotFound.
func (s *Store) snapshot(ctx context.Context, id volume.ID) (*v1alpha1.Snapshot, error) {
	if id.Kind != blockdev.Snapshot {
		return nil, fmt.Errorf("%w: %s is no snapshot", errdefs.ErrNotFound, id)
	}
	have := &v1alpha1.Snapshot{}
	if err := s.get(ctx, id, have); err != nil {
		return nil, fmt.Errorf("snapshot %s: %w", id, err)
	}
	if have.Named() == id.Pool && v1alpha1.LostUnmade(have) {
		return nil, cluster.ErrorOf(have.Spec.NodeName, have.Status.Failure)
	}
	there := have.Named() == id.Pool && have.Status.Created != nil
	if there && have.Spec.Group != nil {
		members, err := s.membersNow(ctx, have.Spec.Group.Key)
		if err != nil {
			return nil, err
		}
		there = wholeWith(members, have)
	}
	if !there {
		return nil, fmt.Errorf("%w: no snapshot %s", errdefs.ErrNotFound, id)
	}
	return have, nil
}

// ListSnapshots: see volume.Store.
func (s *Store) ListSnapshots(ctx context.Context, source, after volume.ID, limit int) ([]volume.Snapshot, error) {
	if err := s.Ready(ctx); err != nil {
		return nil, err
	}
	found := firsts[volume.Snapshot]{id: func(s volume.Snapshot) volume.ID { return s.ID }, limit: limit}
	groups := map[string][]string{} // by key: the names of the members, if the group is whole
	var failure error
	visit := func(o *v1alpha1.Snapshot) {
		if failure != nil || o.Status.Created == nil || compareIDs(cluster.SnapshotID(o), after) <= 0 || (source != (volume.ID{}) && cluster.SnapshotSource(o) != source) {
			return
		}
		var there bool
		if there, failure = s.isThere(ctx, o, groups); there {
			found.add(cluster.ToSnapshot(o))
		}
	}
	if err := s.eachSnapshot(ctx, source, visit); err != nil {
		return nil, kube.APIError("list snapshots", err)
	}
	return found.cut(), failure
}

// eachSnapshot calls visit with each snapshot whose source has the key of a volume; with no volume, with each snapshot.
func (s *Store) eachSnapshot(ctx context.Context, source volume.ID, visit func(*v1alpha1.Snapshot)) error {
	if source == (volume.ID{}) {
		return each(ctx, s, &v1alpha1.Snapshot{}, visit)
	}
	var list v1alpha1.SnapshotList
	if err := s.kube.Client.List(ctx, &list, client.MatchingFields{cluster.BySource: source.Key}, client.UnsafeDisableDeepCopy); err != nil {
		return err
	}
	for i := range list.Items {
		visit(&list.Items[i])
	}
	if len(list.Items) > 0 {
		return nil
	}
	return s.defined(ctx, &v1alpha1.Snapshot{})
}

// isThere reports whether a snapshot is in no group, or in one that is whole. groups keeps the names of the members of groups that were looked up.
func (s *Store) isThere(ctx context.Context, o *v1alpha1.Snapshot, groups map[string][]string) (bool, error) {
	if o.Spec.Group == nil {
		return true, nil
	}
	names, known := groups[o.Spec.Group.Key]
	if !known {
		members, err := s.members(ctx, o.Spec.Group.Key)
		if err != nil {
			return false, err
		}
		if whole(members) {
			for i := range members {
				names = append(names, members[i].Name)
			}
		}
		groups[o.Spec.Group.Key] = names
	}
	return slices.Contains(names, o.Name), nil
}
