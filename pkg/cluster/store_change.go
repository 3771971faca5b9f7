package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// change changes the spec of a usable volume by compare-and-swap, again and again until
// nobody else changed it meanwhile. edit returns false if there is nothing to change; then, and
// if it refuses, the last look was at the API server itself.
func (s *Store) change(ctx context.Context, id volume.ID, edit func(v *v1alpha1.Volume) (bool, error)) (*v1alpha1.Volume, error) {
	v, err := s.usable(ctx, id)
	for live := false; ; live = true {
		if err != nil {
			return nil, err
		}
		before := v.DeepCopy()
		changed, err2 := edit(v)
		if err2 == nil && changed {
			err2 = s.client.Patch(ctx, v, lockingPatch(before))
			if !apierrors.IsConflict(err2) {
				return v, apiError("change volume "+id.String(), err2)
			}
		} else if live {
			return v, err2
		}
		v = &v1alpha1.Volume{}
		if err = apiError("read volume "+id.String(), s.live.Get(ctx, client.ObjectKey{Name: id.Key}, v)); err == nil &&
			(going(v) || v.Spec.Abandoned) {
			err = fmt.Errorf("%w: volume %s is being deleted", errdefs.ErrPrecondition, id)
		}
	}
}

// Claim: see volume.Store. It takes no node: a claim is a word in the object.
func (s *Store) Claim(ctx context.Context, id volume.ID, claim volume.Claim) error {
	if _, err := s.volume(ctx, id); err != nil {
		return err
	}
	_, limit, err := s.poolsOf(ctx, claim.Node)
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
			if err := s.count(ctx, id.Key, want.Node, limit); err != nil {
				return false, err
			}
			counted = true
		}
		v.Spec.Claim = &want
		return true, nil
	})
	return err
}

// poolsOf returns the pools of a node, and how many volumes it may have; ErrNotFound for a
// node without any.
func (s *Store) poolsOf(ctx context.Context, node string) ([]v1alpha1.Pool, int64, error) {
	var pools v1alpha1.PoolList
	if err := s.client.List(ctx, &pools, client.MatchingFields{byNode: node}); err != nil {
		return nil, 0, apiError("list pools", err)
	}
	if len(pools.Items) == 0 {
		return nil, 0, fmt.Errorf("%w: no node %q has pools", errdefs.ErrNotFound, node)
	}
	return pools.Items, pools.Items[0].Spec.MaxVolumes, nil
}

// count counts the claim of a volume that is about to be made; ErrLimit if the node has all it can. One that
// is on its way may be in the cache already, and counts once. Two stores that count at once may both let the last
// one through: the scheduler counts too.
func (s *Store) count(ctx context.Context, key, node string, limit int64) error {
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
	if err := s.client.List(ctx, &claimed, client.MatchingFields{byClaim: node}, client.UnsafeDisableDeepCopy); err != nil {
		return apiError("count claims", err)
	}
	for i := range claimed.Items {
		all[claimed.Items[i].Name] = true
	}
	if int64(len(all)) >= limit {
		for i := range claimed.Items {
			s.doomed.AddAfter(orphan{aClaim, claimed.Items[i].Name}, s.options.AbandonGrace)
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
			if err := s.client.Patch(ctx, v, lockingPatch(before)); !apierrors.IsConflict(err) {
				return errdefs.IgnoreNotFound(apiError("release volume "+id.String(), err))
			}
		} else if live {
			return nil
		}
		v = &v1alpha1.Volume{}
		err = apiError("read volume "+id.String(), s.live.Get(ctx, client.ObjectKey{Name: id.Key}, v))
	}
}

// Expand: see volume.Store. If the node refuses, the size goes back to what it was.
func (s *Store) Expand(ctx context.Context, id volume.ID, size volume.Range) (volume.Volume, error) {
	w := s.hub.open(volumeNamed(id.Key))
	defer w.close()
	v, err := s.usable(ctx, id)
	if err != nil {
		return volume.Volume{}, err
	}
	have := v.Status.Size
	if size.Limit > 0 && have > size.Limit && size.Required <= size.Limit {
		return volume.Volume{}, fmt.Errorf("%w: volume %s has %d bytes, more than the limit of %d; volumes do not shrink", errdefs.ErrOutOfRange, id, have, size.Limit)
	}
	step, err := s.granularity(ctx, v.Spec.NodeName, v.Spec.Pool)
	if err != nil {
		return volume.Volume{}, err
	}
	want, err := size.Choose(have, step)
	if err != nil {
		return volume.Volume{}, err
	}
	if size.Required == 0 || want <= have {
		return toVolume(v), nil
	}
	return s.carryOut(ctx, w, v, func(v *v1alpha1.Volume) bool {
		changed := v.Spec.Size != want
		v.Spec.Size = want
		return changed
	}, func(v *v1alpha1.Volume) bool { return v.Status.Size >= want })
}

// Modify: see volume.Store. If the node refuses, the parameters go back to what they were.
func (s *Store) Modify(ctx context.Context, id volume.ID, mutable map[string]string) error {
	if err := volume.CheckMutable(mutable); err != nil {
		return err
	}
	w := s.hub.open(volumeNamed(id.Key))
	defer w.close()
	v, err := s.usable(ctx, id)
	if err != nil {
		return err
	}
	holds := func(all map[string]string) bool {
		for key, value := range mutable {
			if have, there := all[key]; !there || have != value {
				return false
			}
		}
		return true
	}
	inForce := func(v *v1alpha1.Volume) bool { return holds(v.Status.Mutable) && holds(v.Spec.Mutable) }
	if inForce(v) { // another store may have changed them since
		now := &v1alpha1.Volume{}
		err := s.live.Get(ctx, client.ObjectKey{Name: id.Key}, now)
		if err != nil || (now.UID == v.UID && inForce(now)) {
			return apiError("read volume "+id.String(), err)
		}
		v = now
	}
	_, err = s.carryOut(ctx, w, v, func(v *v1alpha1.Volume) bool {
		changed := !holds(v.Spec.Mutable)
		if v.Spec.Mutable == nil {
			v.Spec.Mutable = map[string]string{}
		}
		maps.Copy(v.Spec.Mutable, mutable)
		return changed
	}, inForce)
	return err
}

// carryOut makes a change of a volume and waits until its node has carried it out. What
// the node refuses is taken back.
func (s *Store) carryOut(ctx context.Context, w *watch, v *v1alpha1.Volume, edit, done func(*v1alpha1.Volume) bool) (volume.Volume, error) {
	id := volumeID(v)
	if err := s.nodeReady(ctx, v.Spec.NodeName); err != nil {
		return volume.Volume{}, fmt.Errorf("volume %s: %w", id, err)
	}
	if v.Common().Refused(v.Generation) != nil { // of an earlier try, which nobody took back
		if err := s.takeBack(ctx, id); err != nil {
			return volume.Volume{}, err
		}
	}
	v, err := s.change(ctx, id, func(v *v1alpha1.Volume) (bool, error) { return edit(v), nil })
	if err != nil {
		return volume.Volume{}, err
	}
	v, err = wait(ctx, s, w, v, func(v *v1alpha1.Volume) (bool, error) {
		if done(v) {
			return true, nil
		}
		if f := v.Common().Refused(v.Generation); f != nil {
			return false, errorOf(v.Spec.NodeName, f)
		}
		return false, nil
	})
	var refused *refusal
	switch {
	case errors.Is(err, errGone):
		return volume.Volume{}, fmt.Errorf("%w: no volume %s any more", errdefs.ErrNotFound, id)
	case errors.As(err, &refused):
		return volume.Volume{}, errors.Join(fmt.Errorf("volume %s: %w", id, err), s.takeBack(ctx, id))
	case err != nil:
		return volume.Volume{}, fmt.Errorf("volume %s: %w", id, err)
	}
	return toVolume(v), nil
}

// takeBack makes the spec of a volume what it is, if its node refused to change it.
func (s *Store) takeBack(ctx context.Context, id volume.ID) error {
	_, err := s.change(ctx, id, func(v *v1alpha1.Volume) (bool, error) {
		if v.Common().Refused(v.Generation) == nil {
			return false, nil
		}
		changed := v.Spec.Size != v.Status.Size || !maps.Equal(v.Spec.Mutable, v.Status.Mutable)
		v.Spec.Size, v.Spec.Mutable = v.Status.Size, maps.Clone(v.Status.Mutable)
		return changed, nil
	})
	return err
}
