package store

import (
	"context"
	"errors"
	"fmt"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// expandReplicated is Expand for a volume with several legs: all legs grow, then the volume. If a leg refuses, its spec is reverted; legs that have grown
// stay larger than the volume, which does no harm. A leg that is not current and whose node is away grows when that is back.
func (s *Store) expandReplicated(ctx context.Context, r *v1alpha1.ReplicatedVolume, size volume.Range) (volume.Volume, error) {
	if err := usableReplicated(r); err != nil {
		return volume.Volume{}, err
	}
	id, have := cluster.ReplicatedID(r), r.Spec.Size
	if size.Limit > 0 && have > size.Limit && size.Required <= size.Limit {
		return volume.Volume{}, fmt.Errorf("%w: volume %s has %d bytes, more than the limit of %d; volumes do not shrink", errdefs.ErrOutOfRange, id, have, size.Limit)
	}
	legs, err := s.legs(ctx, r)
	if err != nil {
		return volume.Volume{}, err
	}
	step, overhead := int64(blockdev.Granularity), int64(0)
	for _, v := range legs {
		one, err := s.granularity(ctx, v.Spec.NodeName, v.Spec.Pool)
		if err != nil && s.mustFollow(ctx, r, v) {
			return volume.Volume{}, err
		}
		step, overhead = multiple(step, max(one, 1)), cluster.EncryptionOf(v).Scheme.Overhead()
	}
	want, err := size.Choose(have, step, overhead)
	if err != nil {
		return volume.Volume{}, err
	}
	if size.Required == 0 || want <= have {
		return s.getReplicated(ctx, r)
	}
	for _, v := range slices.Backward(legs) { // the first leg grows last: it may still be used without a mirror, and then its users see it grow
		if s.mustFollow(ctx, r, v) {
			w := s.hub.Open(v)
			_, err := s.grow(ctx, w, v, max(want, v.Spec.Size))
			if w.Close(); err != nil {
				return volume.Volume{}, fmt.Errorf("grow volume %s: %w", id, err)
			}
		}
	}
	r, err = s.changeReplicated(ctx, r, func(r *v1alpha1.ReplicatedVolume) (bool, error) {
		changed := r.Spec.Size < want
		r.Spec.Size = max(r.Spec.Size, want)
		return changed, nil
	})
	if err != nil {
		return volume.Volume{}, err
	}
	return s.getReplicated(ctx, r)
}

// mustFollow reports whether a change of a volume waits for a leg: it is current, or it is there and its node is ready.
func (s *Store) mustFollow(ctx context.Context, r *v1alpha1.ReplicatedVolume, v *v1alpha1.Volume) bool {
	if l := r.Leg(v.Name); l != nil && l.Current {
		return true
	}
	return v.Status.Created != nil && !v1alpha1.Going(v) && !v1alpha1.IsLost(v) && s.nodes.Ready(ctx, v.Spec.NodeName) == nil
}

// modifyReplicated is Modify for a volume with several legs: of each leg that must follow (mustFollow).
func (s *Store) modifyReplicated(ctx context.Context, r *v1alpha1.ReplicatedVolume, mutable map[string]string) error {
	if err := usableReplicated(r); err != nil {
		return err
	}
	id := cluster.ReplicatedID(r)
	if err := volume.CheckPlacement(volume.AccessAny, r.Spec.Replicas, mutable); err != nil {
		return fmt.Errorf("modify volume %s: %w", id, err)
	}
	legs, err := s.legs(ctx, r)
	if err != nil {
		return err
	}
	for _, v := range legs {
		if !s.mustFollow(ctx, r, v) {
			continue
		}
		if err := s.modifyOne(ctx, cluster.VolumeID(v), mutable); err != nil {
			return fmt.Errorf("modify volume %s: %w", id, err)
		}
	}
	return nil
}

// deleteReplicated is Delete for a volume with several legs. It writes spec.delete into the ReplicatedVolume, which bars claims, by compare-and-swap; then it
// deletes the legs, and then the object.
func (s *Store) deleteReplicated(ctx context.Context, r *v1alpha1.ReplicatedVolume) error {
	id := cluster.ReplicatedID(r)
	for live := false; !live || !r.Deleting(); live = true { // if the cache says that it is being deleted, there may be a new one of its name
		if c := r.Spec.Claim; c != nil && live {
			s.garbage.ClaimRefused(r.Name)
			return fmt.Errorf("%w: volume %s is claimed by node %s; unpublish it first", errdefs.ErrInUse, id, c.Node)
		}
		if r.Spec.Claim == nil && !r.Deleting() {
			if err := s.mayGo(ctx, r); err != nil {
				return err
			}
			before := r.DeepCopy()
			r.Spec.Delete = r.UID
			err := s.kube.Client.Patch(ctx, r, kube.LockingPatch(before))
			if err == nil {
				break
			}
			if !apierrors.IsConflict(err) {
				return errdefs.IgnoreNotFound(kube.APIError("delete "+id.String(), err))
			}
		}
		var err error
		if r, err = s.liveReplicatedByID(ctx, id); r == nil || err != nil {
			return err
		}
	}
	if err := s.removeReplicated(ctx, r); err != nil {
		return fmt.Errorf("delete %s: %w", id, err)
	}
	return nil
}

// forgotten creates a ReplicatedVolume for legs that have none, so that they can be deleted with it: somebody deleted it, or it was not created yet. It
// returns nil if the ID is that of any other volume, or of none; errLeg if it is that of a leg. ErrInUse if one of them is claimed: only the claims of its legs
// tell now that the volume is in use.
func (s *Store) forgotten(ctx context.Context, id volume.ID) (*v1alpha1.ReplicatedVolume, error) {
	first := &v1alpha1.Volume{}
	err := s.kube.Client.Get(ctx, client.ObjectKey{Name: id.Key}, first)
	switch {
	case client.IgnoreNotFound(err) != nil:
		return nil, kube.APIError("read volume "+id.String(), err)
	case err == nil && (first.Spec.ReplicaOf == "" || first.Named() != id.Pool):
		return nil, nil
	case err == nil && first.Spec.ReplicaOf != id.Key:
		return nil, errLeg
	}
	legs, err := s.legsOf(ctx, id)
	if err != nil || len(legs) == 0 {
		return nil, err
	}
	for _, v := range legs {
		now := &v1alpha1.Volume{}
		err := s.getNow(ctx, v.Name, now)
		if err = errdefs.IgnoreNotFound(err); err != nil {
			return nil, err
		}
		if c := now.Spec.Claim; c != nil && now.Spec.ReplicaOf == id.Key {
			return nil, fmt.Errorf("%w: volume %s is claimed by node %s; unpublish it first", errdefs.ErrInUse, id, c.Node)
		}
	}
	r := cluster.ReplicatedNamed(id.Key)
	// Numbered is more than 1, as of a volume that was created with several legs: 1 is for a volume on one node that gets replicas.
	r.Spec = v1alpha1.ReplicatedVolumeSpec{Name: legs[0].Spec.Name, Pool: id.Pool, Replicas: 1, Size: legs[0].Spec.Size, Numbered: int64(len(legs)) + 1}
	for _, v := range legs[:min(len(legs), v1alpha1.MostReplicas)] {
		r.Spec.Legs = append(r.Spec.Legs, v.Name)
	}
	if err := s.kube.Client.Create(ctx, r); apierrors.IsAlreadyExists(err) {
		if r, err = s.liveReplicated(ctx, id.Key); r != nil && r.Spec.Pool != id.Pool {
			return nil, err // the ID of no volume
		}
		return r, err
	} else if err != nil {
		return nil, kube.APIError("create replicated volume "+r.Name, err)
	}
	return r, nil
}

// mayGo returns ErrInUse if a leg of a volume is being copied, and ErrUnavailable if no current leg is free (oneFree).
func (s *Store) mayGo(ctx context.Context, r *v1alpha1.ReplicatedVolume) error {
	legs, err := s.legs(ctx, r)
	if err == nil {
		err = s.oneFree(ctx, r, legs)
	}
	for _, v := range legs {
		err = errors.Join(err, s.notCopied(ctx, cluster.VolumeID(v)))
	}
	return err
}

// removeReplicated deletes the legs of a volume that has spec.delete, waits for their nodes, and then deletes its object. Once that is gone nobody looks for a
// leg that was used. So it asks the API server for each leg that the object has ever named: the cache may not have one yet that spec.legs names no more.
func (s *Store) removeReplicated(ctx context.Context, r *v1alpha1.ReplicatedVolume) error {
	var list v1alpha1.VolumeList
	if err := s.kube.Client.List(ctx, &list, client.MatchingFields{cluster.ByReplicaOf: r.Name}); err != nil {
		return kube.APIError("list legs of "+r.Name, err)
	}
	names := map[string]bool{}
	for _, name := range slices.Concat(r.Spec.Legs, cluster.NumberedLegs(r)) {
		names[name] = true
	}
	for i := range list.Items { // which a person may have made
		names[list.Items[i].Name] = true
	}
	going := map[*kube.Watch]*v1alpha1.Volume{}
	defer func() {
		for w := range going {
			w.Close()
		}
	}()
	var failures []error
	for name := range names {
		w := s.hub.Open(cluster.VolumeNamed(name))
		v, err := cluster.RemoveLeg(ctx, s.kube, r, name)
		failures = append(failures, err)
		if v == nil {
			w.Close()
			continue
		}
		going[w] = v
	}
	if err := errors.Join(failures...); err != nil {
		return err // the others go meanwhile
	}
	for w, v := range going {
		failures = append(failures, waitGone(ctx, s, w, v))
	}
	if err := errors.Join(failures...); err != nil {
		return err
	}
	return kube.APIError("delete replicated volume "+r.Name, client.IgnoreNotFound(kube.IgnoreConflict(s.kube.Client.Delete(ctx, r, client.Preconditions{UID: &r.UID}))))
}

// healthReplicated is Health for a volume with several legs: the problems of each leg, and those of the volume. While a current leg is well, none is worse
// than Degraded.
func (s *Store) healthReplicated(ctx context.Context, r *v1alpha1.ReplicatedVolume) (all []blockdev.Problem, _ error) {
	if err := thereReplicated(r); err != nil {
		return nil, err
	}
	legs, err := s.legs(ctx, r)
	if err != nil {
		return nil, err
	}
	well := false // a current leg is usable
	for _, v := range legs {
		problems, err := s.healthOf(ctx, v)
		if err != nil {
			return nil, err
		}
		l := r.Leg(v.Name)
		if l != nil && l.Current {
			well = well || worstOf(problems) < blockdev.Inaccessible
		} else {
			problems = append(problems, blockdev.Problem{Severity: blockdev.Degraded, Reason: cluster.ReasonReplicaNotCurrent, Message: notCurrent(v, l)})
		}
		for _, p := range problems {
			p.Message = fmt.Sprintf("replica on node %s: %s", v.Spec.NodeName, p.Message)
			all = append(all, p)
		}
	}
	if missing := r.Spec.Replicas - len(legs); missing > 0 {
		all = append(all, blockdev.Problem{Severity: blockdev.Degraded, Reason: cluster.ReasonReplicaMissing, Message: r.Missing(missing)})
	}
	if differ := r.Differ(); differ != "" {
		all = append(all, blockdev.Problem{Severity: blockdev.Degraded, Reason: v1alpha1.ReasonReplicasDiffer, Message: differ})
	}
	if len(currentLegs(r, legs)) == 0 {
		all = append(all, blockdev.Problem{Severity: blockdev.Inaccessible, Reason: cluster.ReasonNoCurrentReplica, Message: "none of the replicas that have all that was written is there: " + r.Status.Summary})
	}
	for i := range all {
		if well {
			all[i].Severity = min(all[i].Severity, blockdev.Degraded)
		}
	}
	return all, nil
}

func worstOf(problems []blockdev.Problem) (worst blockdev.Severity) {
	for _, p := range problems {
		worst = max(worst, p.Severity)
	}
	return worst
}

// notCurrent says in words why a leg is not current. l is its entry in status.legs, or nil.
func notCurrent(v *v1alpha1.Volume, l *v1alpha1.Leg) string {
	switch {
	case l != nil && l.Message != "":
		return "it does not have all that was written: " + l.Message
	case v.Status.Created == nil:
		return "it is being made"
	}
	return "it does not have all that was written; what it lacks is copied to it while the volume is used"
}

// listReplicated calls add with each volume with several legs whose ID is after the given one. some: there are legs, so if there is no ReplicatedVolume at
// all, it checks that the kind is defined.
func (s *Store) listReplicated(ctx context.Context, after volume.ID, some bool, add func(volume.Volume)) error {
	var list v1alpha1.ReplicatedVolumeList
	if err := s.kube.Client.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		return kube.APIError("list replicated volumes", err)
	}
	if some && len(list.Items) == 0 {
		return s.defined(ctx, &v1alpha1.ReplicatedVolume{})
	}
	for i := range list.Items {
		r := &list.Items[i]
		if r.Status.Made == nil || compareIDs(cluster.ReplicatedID(r), after) <= 0 {
			continue
		}
		legs, err := s.legs(ctx, r)
		if err != nil {
			return err
		}
		var current *v1alpha1.Volume
		if all := currentLegs(r, legs); len(all) > 0 {
			current = all[0]
		}
		add(cluster.ToReplicated(r, current))
	}
	return nil
}
