package store

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// Claim: see volume.Store. It takes no node: a claim is a word in the object.
func (s *Store) Claim(ctx context.Context, id volume.ID, claim volume.Claim) error {
	if _, err := s.volume(ctx, id); err != nil {
		return err
	}
	_, limit, err := s.nodePools(ctx, claim.Node)
	if err != nil {
		return err
	}
	counted := false
	defer func() {
		if counted {
			s.mu.Lock()
			defer s.mu.Unlock()
			delete(s.claiming, id.Key)
		}
	}()
	want := v1alpha1.Claim{Node: claim.Node, ReadOnly: claim.ReadOnly, Mode: claim.Mode}
	_, err = s.change(ctx, id, func(v *v1alpha1.Volume) (bool, error) {
		doubted := v.Annotations[v1alpha1.DoubtAnnotation] != ""
		delete(v.Annotations, v1alpha1.DoubtAnnotation)
		switch have := v.Spec.Claim; {
		case have != nil && *have == want:
			return doubted, nil
		case have != nil && have.Node == want.Node:
			return false, fmt.Errorf("%w: volume %s is published to node %s with mode %s, read-only %v", errdefs.ErrExists, id, have.Node, have.Mode, have.ReadOnly)
		case have != nil:
			return false, fmt.Errorf("%w: volume %s is published to node %s", errdefs.ErrInUse, id, have.Node)
		case v.Spec.NodeName != want.Node:
			return false, fmt.Errorf("%w: volume %s is on node %s and cannot be used on node %s", errdefs.ErrPrecondition, id, v.Spec.NodeName, want.Node)
		}
		if !counted && limit > 0 {
			if err := s.countClaim(ctx, id.Key, want.Node, limit); err != nil {
				return false, err
			}
			counted = true
		}
		v.Spec.Claim = &want
		return true, nil
	})
	return err
}

// nodePools returns the pools of a node, and how many volumes it may have; ErrNotFound for a
// node without any.
func (s *Store) nodePools(ctx context.Context, node string) ([]v1alpha1.Pool, int64, error) {
	var pools v1alpha1.PoolList
	if err := s.kube.Client.List(ctx, &pools, client.MatchingFields{byNode: node}); err != nil {
		return nil, 0, kube.APIError("list pools", err)
	}
	if len(pools.Items) == 0 {
		return nil, 0, fmt.Errorf("%w: no node %q has pools", errdefs.ErrNotFound, node)
	}
	return pools.Items, pools.Items[0].Spec.MaxVolumes, nil
}

// countClaim counts the claim of a volume that is about to be made; ErrLimit if the node has all it can. One that
// is on its way may be in the cache already, and counts once. Two stores that count at once may both let the last
// one through: the scheduler counts too.
func (s *Store) countClaim(ctx context.Context, key, node string, limit int64) error {
	select {
	case s.counting <- struct{}{}: // one after the other
		defer func() { <-s.counting }()
	case <-ctx.Done():
		return fmt.Errorf("%w: count claims: %w", errdefs.ErrUnavailable, ctx.Err())
	}
	all := map[string]bool{}
	s.mu.Lock()
	for key, on := range s.claiming { // before the list, which has those that are done meanwhile
		if on == node {
			all[key] = true
		}
	}
	s.mu.Unlock()
	var claimed v1alpha1.VolumeList
	if err := s.kube.Client.List(ctx, &claimed, client.MatchingFields{byClaim: node}, client.UnsafeDisableDeepCopy); err != nil {
		return kube.APIError("count claims", err)
	}
	for i := range claimed.Items {
		all[claimed.Items[i].Name] = true
	}
	if int64(len(all)) >= limit {
		for i := range claimed.Items {
			s.garbage.ClaimRefused(claimed.Items[i].Name)
		}
		return fmt.Errorf("%w: node %s has %d volumes, the most it can have", errdefs.ErrLimit, node, limit)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.claiming[key] = node
	return nil
}

// Release: see volume.Store. Of a volume that is being deleted too.
func (s *Store) Release(ctx context.Context, id volume.ID, node string) error {
	if id.Kind != blockdev.Volume {
		return nil
	}
	v := &v1alpha1.Volume{}
	err := s.get(ctx, id.Key, v)
	for live := false; ; live = true {
		if err != nil {
			return errdefs.IgnoreNotFound(err)
		}
		if v.Spec.Pool != id.Pool {
			return nil
		}
		if claim := v.Spec.Claim; claim != nil && (node == "" || claim.Node == node) {
			before := v.DeepCopy()
			v.Spec.Claim = nil
			if err := s.kube.Client.Patch(ctx, v, kube.LockingPatch(before)); !apierrors.IsConflict(err) {
				return errdefs.IgnoreNotFound(kube.APIError("release volume "+id.String(), err))
			}
		} else if live {
			return nil
		}
		v = &v1alpha1.Volume{}
		err = kube.APIError("read volume "+id.String(), s.kube.Live.Get(ctx, client.ObjectKey{Name: id.Key}, v))
	}
}
