package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// A volume with several legs (docs/replication.md) is a ReplicatedVolume, and a Volume for each leg. Calls name the ReplicatedVolume. Its legs are made,
// changed and deleted like any volume.

// errLeg: the ID is that of a leg.
var errLeg = fmt.Errorf("%w: it is a part of a volume with replicas", errdefs.ErrNotFound)

// errForgotten: somebody deleted the ReplicatedVolume, and legs of it are there.
var errForgotten = fmt.Errorf("%w: somebody deleted its object", errdefs.ErrNotFound)

// replicated returns the ReplicatedVolume with an ID, and nil for the ID of a volume on one node, or of none. The error is errLeg for the ID of a leg, also
// of a volume that is not made yet; errForgotten (withoutWhole); or ErrUnavailable for a volume that is getting replicas. It reads the cache, and the API
// server if the cache has no object, or one that is not made.
func (s *Store) replicated(ctx context.Context, id volume.ID) (*v1alpha1.ReplicatedVolume, error) {
	if err := s.Ready(ctx); err != nil || id.Kind != blockdev.Volume {
		return nil, err
	}
	r, key := &v1alpha1.ReplicatedVolume{}, client.ObjectKey{Name: id.Key}
	err := s.kube.Client.Get(ctx, key, r)
	leg, becomes := false, false
	if apierrors.IsNotFound(err) {
		v := &v1alpha1.Volume{}
		err = client.IgnoreNotFound(s.kube.Client.Get(ctx, key, v))
		becomes = v.Spec.Replicas > 0
		if leg = v.Spec.ReplicaOf != ""; err != nil || v.Name != "" && !leg {
			return nil, kube.APIError("read volume "+id.String(), err)
		}
	}
	if err == nil && r.Status.Made == nil {
		if r, err = s.liveReplicated(ctx, id.Key); r == nil && err == nil && leg {
			if becomes {
				return nil, getsReplicas(id)
			}
			return nil, s.withoutWhole(ctx, id, errLeg)
		}
		if r == nil && err == nil {
			return nil, s.withoutWhole(ctx, id, nil)
		}
	}
	if err != nil || r == nil || r.Spec.Pool != id.Pool {
		return nil, kube.APIError("read volume "+id.String(), err)
	}
	return r, nil
}

// withoutWhole returns errForgotten for an ID without a ReplicatedVolume that must have had one: there are several legs of it, or one that was claimed.
// Otherwise it returns the given error.
func (s *Store) withoutWhole(ctx context.Context, id volume.ID, otherwise error) error {
	legs, err := s.legsOf(ctx, id)
	if err != nil {
		return err
	}
	another := slices.ContainsFunc(legs, func(v v1alpha1.Volume) bool { return v.Name == id.Key && v.Named() != id.Pool })
	if !another && (len(legs) > 1 || len(legs) == 1 && legs[0].Spec.Claims > 0) {
		otherwise = fmt.Errorf("%w, and %d of its replicas are there: restore ReplicatedVolume %s from a backup of it, with its status", errForgotten, len(legs), id.Key)
	}
	if otherwise != nil {
		otherwise = fmt.Errorf("volume %s: %w", id, otherwise)
	}
	return otherwise
}

// legsOf returns the Volumes that say that they are legs of the volume with an ID.
func (s *Store) legsOf(ctx context.Context, id volume.ID) ([]v1alpha1.Volume, error) {
	var legs v1alpha1.VolumeList
	err := s.kube.Cache.List(ctx, &legs, client.MatchingFields{cluster.ByReplicaOf: id.Key})
	return legs.Items, kube.APIError("list legs of "+id.String(), err)
}

// getsReplicas is the error for a volume on one node that is becoming one with several legs (package replicator), which takes a moment.
func getsReplicas(id volume.ID) error { return becoming{id} }

// becoming is the error of getsReplicas.
type becoming struct{ id volume.ID }

func (b becoming) Error() string {
	return fmt.Sprintf("%s: volume %s is getting replicas; ask again", errdefs.ErrUnavailable, b.id)
}

func (b becoming) Unwrap() error { return errdefs.ErrUnavailable }

// liveReplicated reads a ReplicatedVolume at the API server itself; nil if there is none.
func (s *Store) liveReplicated(ctx context.Context, key string) (*v1alpha1.ReplicatedVolume, error) {
	r := &v1alpha1.ReplicatedVolume{}
	err := s.kube.Live.Get(ctx, client.ObjectKey{Name: key}, r)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return r, kube.APIError("read replicated volume "+key, err)
}

// liveReplicatedByID is liveReplicated, and nil for a volume of the same name with another ID.
func (s *Store) liveReplicatedByID(ctx context.Context, id volume.ID) (*v1alpha1.ReplicatedVolume, error) {
	r, err := s.liveReplicated(ctx, id.Key)
	if r != nil && r.Spec.Pool != id.Pool {
		r = nil
	}
	return r, err
}

// thereReplicated returns errdefs.ErrNotFound for a volume that is not made yet; errdefs.ErrUnavailable if it was a volume on one node before.
func thereReplicated(r *v1alpha1.ReplicatedVolume) error {
	if r.Status.Made == nil && r.Spec.Numbered == 1 {
		return getsReplicas(cluster.ReplicatedID(r))
	}
	switch id := cluster.ReplicatedID(r); {
	case r.StatusLost():
		return fmt.Errorf("%w: volume %s: %s", errdefs.ErrNotFound, id, r.WhyStatusLost())
	case r.Status.Made == nil:
		return fmt.Errorf("%w: no volume %s", errdefs.ErrNotFound, id)
	}
	return nil
}

// usableReplicated is thereReplicated, and errdefs.ErrPrecondition for a volume that is being deleted.
func usableReplicated(r *v1alpha1.ReplicatedVolume) error {
	if err := thereReplicated(r); err != nil {
		return err
	}
	if r.Going() {
		return fmt.Errorf("%w: volume %s is being deleted", errdefs.ErrPrecondition, cluster.ReplicatedID(r))
	}
	return nil
}

// changeReplicated is change for a volume with several legs.
func (s *Store) changeReplicated(ctx context.Context, r *v1alpha1.ReplicatedVolume, edit func(r *v1alpha1.ReplicatedVolume) (bool, error)) (*v1alpha1.ReplicatedVolume, error) {
	id := cluster.ReplicatedID(r)
	for live := false; ; live = true {
		if err := usableReplicated(r); err != nil {
			return nil, err
		}
		before := r.DeepCopy()
		changed, err := edit(r)
		if err == nil && changed {
			if err = s.kube.Client.Patch(ctx, r, kube.LockingPatch(before)); !apierrors.IsConflict(err) {
				return r, kube.APIError("change volume "+id.String(), err)
			}
		} else if live {
			return r, err
		}
		if r, err = s.liveReplicatedByID(ctx, id); err != nil {
			return nil, err
		}
		if r == nil {
			return nil, fmt.Errorf("%w: no volume %s any more", errdefs.ErrNotFound, id)
		}
	}
}

// legs returns the Volumes that spec.legs names, as far as they are there, in that order.
func (s *Store) legs(ctx context.Context, r *v1alpha1.ReplicatedVolume) (legs []*v1alpha1.Volume, err error) {
	for _, name := range r.Spec.Legs {
		v := &v1alpha1.Volume{}
		err := s.kube.Client.Get(ctx, client.ObjectKey{Name: name}, v)
		if client.IgnoreNotFound(err) != nil {
			return nil, kube.APIError("read leg "+name, err)
		}
		if err == nil && v.Spec.ReplicaOf == r.Name {
			legs = append(legs, v)
		}
	}
	return legs, nil
}

// currentLegs returns the legs that are current, by status.legs.
func currentLegs(r *v1alpha1.ReplicatedVolume, legs []*v1alpha1.Volume) (current []*v1alpha1.Volume) {
	for _, v := range legs {
		if l := r.Leg(v.Name); l != nil && l.Current {
			current = append(current, v)
		}
	}
	return current
}

// stands returns the leg that represents a volume where one node is needed: the first current one whose node is ready, else the first current one.
// ErrUnavailable if no current leg is there.
func (s *Store) stands(ctx context.Context, r *v1alpha1.ReplicatedVolume) (*v1alpha1.Volume, error) {
	legs, err := s.legs(ctx, r)
	if err != nil {
		return nil, err
	}
	current := currentLegs(r, legs)
	if len(current) == 0 {
		return nil, fmt.Errorf("%w: volume %s: none of its replicas that have all that was written is there (kubectl get replicatedvolumes.ashlar.dev %s -o yaml)", errdefs.ErrUnavailable, cluster.ReplicatedID(r), r.Name)
	}
	for _, v := range current {
		if s.nodes.Ready(ctx, v.Spec.NodeName) == nil {
			return v, nil
		}
	}
	return current[0], nil
}

// getReplicated is Get for a volume with several legs.
func (s *Store) getReplicated(ctx context.Context, r *v1alpha1.ReplicatedVolume) (volume.Volume, error) {
	if err := thereReplicated(r); err != nil {
		return volume.Volume{}, err
	}
	leg, err := s.stands(ctx, r)
	if err != nil {
		return volume.Volume{}, err
	}
	return cluster.ToReplicated(r, leg), nil
}

// createReplicated is Create for a volume with several legs. It makes the first leg like any volume, then the ReplicatedVolume, then the other legs, and then
// reports the volume as made. Each step finds what an earlier try has done. If a leg can be made nowhere, all of the volume is deleted.
func (s *Store) createReplicated(ctx context.Context, spec volume.Spec) (volume.Volume, error) {
	key := volume.KeyOf(spec.Name)
	for {
		r, err := s.liveReplicated(ctx, key)
		switch {
		case err != nil:
			return volume.Volume{}, err
		case r != nil && r.Spec.Name != spec.Name:
			return volume.Volume{}, fmt.Errorf("%w: volume %q has the key of volume %q", errdefs.ErrExists, r.Spec.Name, spec.Name)
		case r != nil && r.Going():
			if err := s.removeReplicated(ctx, r); err != nil {
				return volume.Volume{}, err
			}
			continue
		case r != nil && r.Status.Made != nil:
			return s.sameReplicated(ctx, spec, r)
		}
		first, err := s.createFirst(ctx, spec)
		if err == nil && r == nil {
			if r, err = s.createObject(ctx, spec, first); r == nil && err == nil {
				continue // another controller was first
			}
		}
		if err != nil {
			return volume.Volume{}, err
		}
		if err := s.createLegs(ctx, r, first); err != nil {
			return volume.Volume{}, err
		}
		made, err := s.setMade(ctx, r, spec.Source != (volume.ID{}))
		if err != nil {
			return volume.Volume{}, err
		}
		if made != nil {
			return s.getReplicated(ctx, made)
		}
	}
}

// sameReplicated returns the volume that is there already, and an error if it is not that of the spec (volume.Spec.Check).
func (s *Store) sameReplicated(ctx context.Context, spec volume.Spec, r *v1alpha1.ReplicatedVolume) (volume.Volume, error) {
	have, err := s.getReplicated(ctx, r)
	if err == nil {
		err = spec.Check(have)
	}
	return have, err
}

// createFirst makes the first leg, if it is not there yet. Before it begins, there has to be room for all legs (roomForAll).
func (s *Store) createFirst(ctx context.Context, spec volume.Spec) (*v1alpha1.Volume, error) {
	first := spec
	first.Replicas, first.ReplicaOf = volume.Replicas{}, volume.KeyOf(spec.Name)
	unfit := refusals{}
	err := s.kube.Client.Get(ctx, client.ObjectKey{Name: first.ReplicaOf}, &v1alpha1.Volume{})
	if apierrors.IsNotFound(err) {
		unfit, err = s.roomForAll(ctx, spec)
	}
	if err != nil {
		return nil, err
	}
	return s.createAnywhere(ctx, first, unfit)
}

// createObject creates the ReplicatedVolume of a volume whose first leg is there; nil without an error if it exists.
func (s *Store) createObject(ctx context.Context, spec volume.Spec, first *v1alpha1.Volume) (*v1alpha1.ReplicatedVolume, error) {
	r := cluster.ReplicatedNamed(first.Name)
	r.Spec = v1alpha1.ReplicatedVolumeSpec{Name: spec.Name, Pool: first.Named(), Pools: poolsOfLegs(spec, first), Replicas: spec.Replicas.Count, TopologyKey: spec.Replicas.TopologyKey,
		ReplaceAfter: int64(spec.Replicas.ReplaceAfter / time.Second), Size: first.Status.Size, Legs: []string{first.Name}, Numbered: 1}
	for range spec.Replicas.Count - 1 {
		cluster.AddLeg(r)
	}
	err := s.kube.Client.Create(ctx, r, client.FieldValidation(metav1.FieldValidationStrict))
	switch {
	case apierrors.IsAlreadyExists(err):
		return nil, nil
	case apierrors.IsBadRequest(err):
		return nil, errdefs.Recast(cluster.ErrDefinitions, err, "create replicated volume %s", r.Name)
	}
	return r, kube.APIError("create replicated volume "+r.Name, err)
}

// createLegs makes the legs that spec.legs names, but the first. If a node refuses one for good, or no node has room, all of the volume is deleted.
func (s *Store) createLegs(ctx context.Context, r *v1alpha1.ReplicatedVolume, first *v1alpha1.Volume) error {
	for _, name := range r.Spec.Legs {
		if name == r.Name {
			continue
		}
		err := s.createLeg(ctx, r, name, first)
		var refusal *cluster.Refusal
		switch {
		case err == nil:
			continue
		case !errors.Is(err, errdefs.ErrNoSpace) && !errors.As(err, &refusal):
			return err
		}
		klog.FromContext(ctx).Info("Taking back a volume of which not all replicas can be made", "volume", cluster.ReplicatedID(r).String(), "why", err.Error())
		before := r.DeepCopy()
		r.Spec.Delete = r.UID
		undone := kube.APIError("take back volume "+r.Name, s.kube.Client.Patch(ctx, r, kube.LockingPatch(before)))
		if undone == nil {
			undone = s.removeReplicated(ctx, r)
		}
		if undone != nil {
			return errors.Join(errdefs.Recast(errdefs.ErrUnavailable, undone, "it is to be taken back"), errors.New(err.Error()))
		}
		return err
	}
	return nil
}

// setMade reports in the status that the volume is made, with its list of current legs; of a copy only the first is current. It returns nil without an error
// if the object was changed meanwhile. ErrDataLoss if the volume was claimed before: then its object was restored without its status, and the legs may
// differ.
func (s *Store) setMade(ctx context.Context, r *v1alpha1.ReplicatedVolume, copied bool) (*v1alpha1.ReplicatedVolume, error) {
	legs, err := s.legs(ctx, r)
	if err != nil {
		return nil, err
	}
	if r.Spec.Claims > 0 || slices.ContainsFunc(legs, func(v *v1alpha1.Volume) bool { return v.Spec.Claims > 0 }) {
		return nil, fmt.Errorf("%w: volume %s was used, and its object does not say any more which of its replicas have all that was written (status.legs): restore that from a backup of it", errdefs.ErrDataLoss, cluster.ReplicatedID(r))
	}
	before := r.DeepCopy()
	cluster.SetLegs(r, copied)
	err = s.kube.Client.Status().Patch(ctx, r, kube.LockingPatch(before))
	if err != nil {
		return nil, kube.APIError("write down that volume "+r.Name+" is made", kube.IgnoreConflict(err))
	}
	return r, nil
}
