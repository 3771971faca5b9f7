package store

import (
	"context"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// claimReplicated is Claim for a volume with several legs. It claims the ReplicatedVolume, then each leg that can be claimed now; package replicator claims
// the others later. ErrUnavailable if no current leg can be claimed yet.
func (s *Store) claimReplicated(ctx context.Context, r *v1alpha1.ReplicatedVolume, claim volume.Claim) (volume.Claim, error) {
	id := cluster.ReplicatedID(r)
	if claim.Many() {
		return volume.Claim{}, fmt.Errorf("%w: volume %s has replicas, and can be used on one node at a time: publish it with another access mode than that of many readers (ReadOnlyMany)", errdefs.ErrPrecondition, id)
	}
	count, end, err := s.counted(ctx, id.Key, claim.Node)
	if err != nil {
		return volume.Claim{}, err
	}
	defer end()
	want := newClaim(claim)
	r, err = s.changeReplicated(ctx, r, func(r *v1alpha1.ReplicatedVolume) (bool, error) {
		legs, err := s.legs(ctx, r)
		if err != nil {
			return false, err
		}
		changed := cluster.KeepSize(r, legs) || r.Annotations[v1alpha1.DoubtAnnotation] != ""
		delete(r.Annotations, v1alpha1.DoubtAnnotation)
		switch have := r.Spec.Claim; {
		case have != nil && sameUse(*have, want):
			return changed, nil
		case have != nil && have.Node == want.Node:
			return false, fmt.Errorf("%w: volume %s is published to node %s with mode %s, read-only %v", errdefs.ErrExists, id, have.Node, have.Mode, have.ReadOnly)
		case have != nil:
			return false, fmt.Errorf("%w: volume %s is published to node %s", errdefs.ErrInUse, id, have.Node)
		}
		if err = s.mayUseAny(ctx, r, legs, want.Node); err == nil {
			err = s.oneFree(ctx, r, legs)
		}
		if err == nil {
			err = count()
		}
		if err != nil {
			return false, err
		}
		r.Spec.Claims = cluster.NextReplicatedClaim(r, legs)
		r.Spec.Claim = &want
		r.Spec.Claim.Generation = r.Spec.Claims
		return true, nil
	})
	if err != nil {
		return volume.Claim{}, err
	}
	legs, err := s.syncLegs(ctx, r)
	if err != nil {
		return volume.Claim{}, fmt.Errorf("claim the replicas of volume %s for node %s: %w", id, claim.Node, err)
	}
	current := currentLegs(r, legs)
	for _, v := range current {
		if v.Spec.Claim != nil {
			return cluster.ToClaim(r.Spec.Claim), nil
		}
	}
	return volume.Claim{}, fmt.Errorf("%w: volume %s is claimed for node %s, and none of its %d replicas that have all that was written can be yet: their nodes have not ended what they gave before", errdefs.ErrUnavailable, id, claim.Node, len(current))
}

// mayUseAny returns ErrPrecondition if a node can use none of the current legs of a volume, and ErrUnavailable if no current leg is there.
func (s *Store) mayUseAny(ctx context.Context, r *v1alpha1.ReplicatedVolume, legs []*v1alpha1.Volume, node string) error {
	var failures []error
	current := currentLegs(r, legs)
	for _, v := range current {
		err := s.mayUse(ctx, v, node)
		if err == nil {
			return nil
		}
		failures = append(failures, err)
	}
	if len(current) == 0 {
		return fmt.Errorf("%w: volume %s: none of its replicas that have all that was written is there", errdefs.ErrUnavailable, cluster.ReplicatedID(r))
	}
	return errors.Join(failures...)
}

// syncLegs writes the claim and the size of a volume into its legs (cluster.SyncLeg), as far as that is possible now. It returns the legs that are there,
// each as the API server had it last.
func (s *Store) syncLegs(ctx context.Context, r *v1alpha1.ReplicatedVolume) (legs []*v1alpha1.Volume, err error) {
	for _, name := range r.Spec.Legs {
		v, err := s.syncLeg(ctx, r, name)
		if err != nil {
			return nil, err
		}
		if v != nil {
			legs = append(legs, v)
		}
	}
	return legs, nil
}

// syncLeg is syncLegs for one leg. It returns nil if the leg is not there.
func (s *Store) syncLeg(ctx context.Context, r *v1alpha1.ReplicatedVolume, name string) (*v1alpha1.Volume, error) {
	v := &v1alpha1.Volume{}
	err := s.kube.Client.Get(ctx, client.ObjectKey{Name: name}, v)
	for live := false; ; live = true {
		if apierrors.IsNotFound(err) && live || err == nil && v.Spec.ReplicaOf != r.Name {
			return nil, nil
		}
		if client.IgnoreNotFound(err) != nil {
			return nil, kube.APIError("read leg "+name, err)
		}
		if before := v.DeepCopy(); err == nil && cluster.SyncLeg(r, v) {
			err := s.kube.Client.Patch(ctx, v, kube.LockingPatch(before))
			if err == nil {
				return v, nil
			}
			if kube.IgnoreConflict(err) != nil {
				return nil, kube.APIError("change leg "+name, err)
			}
		} else if live {
			return v, nil
		}
		v = &v1alpha1.Volume{}
		err = s.kube.Live.Get(ctx, client.ObjectKey{Name: name}, v)
	}
}

// oneFree is for a volume that nobody has claimed. It returns ErrUnavailable unless a current leg has no export left: from then on the last consumer cannot
// acknowledge anything. It is nil too if there is no current leg whose node may still export it, as all these nodes are gone for good.
func (s *Store) oneFree(ctx context.Context, r *v1alpha1.ReplicatedVolume, legs []*v1alpha1.Volume) error {
	var waits error
	for _, v := range currentLegs(r, legs) {
		to := givenTo(v, "")
		if to == nil {
			return nil
		}
		gone, err := s.isGone(ctx, v.Spec.NodeName)
		if err != nil {
			return err
		}
		if !gone {
			waits = errors.Join(waits, fmt.Errorf("%w: node %s has not ended yet what it gives of volume %s to node %s (claim %d)", errdefs.ErrUnavailable, v.Spec.NodeName, cluster.ReplicatedID(r), to.Node, to.Generation))
		}
	}
	return waits
}

// lookAtNodes is how often a wait for legs looks whether their nodes are ready: no event of a leg tells that.
const lookAtNodes = time.Second

// releaseReplicated is Release for a volume with several legs. It takes the claim off the ReplicatedVolume, so that the consumer cannot write its list of
// current legs any more, then the claims off the legs, and waits until one current leg is free.
func (s *Store) releaseReplicated(ctx context.Context, r *v1alpha1.ReplicatedVolume, node string) error {
	id := cluster.ReplicatedID(r)
	failed := func(err error) error { return fmt.Errorf("release volume %s: %w", id, err) }
	for live := false; ; live = true {
		if c := r.Spec.Claim; c != nil && (node == "" || c.Node == node) {
			before := r.DeepCopy()
			r.Spec.Claim = nil
			err := s.kube.Client.Patch(ctx, r, kube.LockingPatch(before))
			if err == nil {
				break
			}
			if !apierrors.IsConflict(err) {
				return failed(errdefs.IgnoreNotFound(kube.APIError("take its claim off", err)))
			}
		} else if live {
			break
		}
		var err error
		if r, err = s.liveReplicatedByID(ctx, id); r == nil || err != nil {
			return err
		}
	}
	if r.Spec.Claim != nil {
		return nil // another node has claimed it: so a leg was free
	}
	if err := s.waitFree(ctx, r); err != nil {
		return failed(err)
	}
	return nil
}

// releaseForgotten is releaseReplicated for a volume whose ReplicatedVolume was deleted. It is not known which legs are current, so any free leg will do:
// whoever opens the legs next ends all earlier exports of them.
func (s *Store) releaseForgotten(ctx context.Context, id volume.ID, node string) error {
	legs, err := s.legsOf(ctx, id)
	if err != nil {
		return err
	}
	r := cluster.ReplicatedNamed(id.Key)
	r.Spec.Pool = id.Pool
	for i := range legs {
		if c := legs[i].Spec.Claim; c != nil && node != "" && c.Node != node {
			return nil // another node has it
		}
		r.Spec.Legs = append(r.Spec.Legs, legs[i].Name)
	}
	cluster.SetLegs(r, false)
	if err := s.waitFree(ctx, r); err != nil {
		return fmt.Errorf("release volume %s: %w", id, err)
	}
	return nil
}

// waitFree takes the claims off the legs of a volume that nobody has claimed, and waits until one current leg is free (oneFree). It gives up with
// ErrUnavailable when none of the nodes of current legs is ready.
func (s *Store) waitFree(ctx context.Context, r *v1alpha1.ReplicatedVolume) error {
	var watched []client.Object
	for _, name := range r.Spec.Legs {
		watched = append(watched, cluster.VolumeNamed(name))
	}
	w := s.hub.Open(watched...)
	defer w.Close()
	legs, err := s.syncLegs(ctx, r)
	if err != nil {
		return err
	}
	for {
		err := s.oneFree(ctx, r, legs)
		if !errors.Is(err, errdefs.ErrUnavailable) {
			return err
		}
		if !s.anyReady(ctx, currentLegs(r, legs)) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", err, ctx.Err())
		case <-w.Signal:
			w.Take()
		case <-time.After(lookAtNodes):
		}
		if legs, err = s.legs(ctx, r); err != nil {
			return err
		}
	}
}

// anyReady reports whether the node of any leg is ready, and its agent heard.
func (s *Store) anyReady(ctx context.Context, legs []*v1alpha1.Volume) bool {
	for _, v := range legs {
		if s.nodes.Ready(ctx, v.Spec.NodeName) == nil {
			return true
		}
	}
	return false
}
