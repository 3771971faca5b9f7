package store

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/gc"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// Claim: see volume.Store. It takes no node: a claim is a word in the object.
func (s *Store) Claim(ctx context.Context, id volume.ID, claim volume.Claim) error {
	if r, err := s.replicated(ctx, id); r != nil || err != nil {
		if err != nil {
			return err
		}
		return s.claimReplicated(ctx, r, claim)
	}
	if _, err := s.volume(ctx, id); err != nil {
		return err
	}
	count, end, err := s.counted(ctx, id.Key, claim.Node)
	if err != nil {
		return err
	}
	defer end()
	want := newClaim(claim)
	_, err = s.change(ctx, id, func(v *v1alpha1.Volume) (bool, error) {
		doubted := v.Annotations[v1alpha1.DoubtAnnotation] != ""
		delete(v.Annotations, v1alpha1.DoubtAnnotation)
		many := claim.Many() && volume.Access(v.Spec.Access) == volume.AccessAny
		switch have := v.ClaimOf(want.Node); {
		case have != nil && sameUse(*have, want):
			return doubted, nil
		case have != nil:
			return false, fmt.Errorf("%w: volume %s is published to node %s with mode %s, read-only %v", errdefs.ErrExists, id, have.Node, have.Mode, have.ReadOnly)
		}
		if err := beside(v, many); err != nil {
			return false, err
		}
		if err := s.mayUse(ctx, v, want.Node); err != nil {
			return false, err
		}
		if err := count(); err != nil {
			return false, err
		}
		if many {
			v.SetReaders(append(v.Spec.Readers, *claimed(v, want)))
		} else {
			v.Spec.Claim = claimed(v, want)
		}
		return true, nil
	})
	return err
}

// beside is an error unless a further node may have a claim: for one of many that read, while nobody has another claim; for one that may write, while nobody has any.
func beside(v *v1alpha1.Volume, many bool) error {
	id := cluster.VolumeID(v)
	switch {
	case v.Spec.Claim != nil:
		return fmt.Errorf("%w: volume %s is published to node %s", errdefs.ErrInUse, id, v.Spec.Claim.Node)
	case many && v.Spec.Encryption != "":
		return fmt.Errorf("%w: volume %s is encrypted, and can be used on one node at a time: publish it with another access mode than that of many readers (ReadOnlyMany)", errdefs.ErrPrecondition, id)
	case many && len(v.Spec.Readers) >= v1alpha1.MostReaders:
		return fmt.Errorf("%w: volume %s is read on %d nodes, the most that can", errdefs.ErrInUse, id, v1alpha1.MostReaders)
	case !many && len(v.Spec.Readers) > 0:
		return fmt.Errorf("%w: volume %s is read on node %s and others, %d in all, and nobody else may use it meanwhile", errdefs.ErrInUse, id, v.Spec.Readers[0].Node, len(v.Spec.Readers))
	}
	return nil
}

// sameUse reports whether two claims differ in nothing but their generations and times, which nobody asks for.
func sameUse(a, b v1alpha1.Claim) bool {
	a.Generation, b.Generation = 0, 0
	a.Since, b.Since = nil, nil
	return a == b
}

// mayUse is ErrPrecondition if a node cannot use a volume.
func (s *Store) mayUse(ctx context.Context, v *v1alpha1.Volume, node string) error {
	home := v.Spec.NodeName
	if home == node {
		return nil
	}
	cannot := fmt.Sprintf("volume %s is on node %s and cannot be used on node %s", cluster.VolumeID(v), home, node)
	if volume.Access(v.Spec.Access) != volume.AccessAny {
		return fmt.Errorf("%w: %s", errdefs.ErrPrecondition, cannot)
	}
	networks, err := s.Networks(ctx)
	if err != nil {
		return err
	}
	for _, one := range []string{home, node} {
		if networks[one] == "" {
			return fmt.Errorf("%w: %s: node %s is in no network; start its driver with --remote-address, on a kernel that has NVMe over TCP", errdefs.ErrPrecondition, cannot, one)
		}
	}
	if networks[home] != networks[node] {
		return fmt.Errorf("%w: %s: they are in the networks %q and %q (--remote-network)", errdefs.ErrPrecondition, cannot, networks[home], networks[node])
	}
	return nil
}

// claimed is a claim as the object of a volume is to have it. That of a volume with access any gets a generation that no claim had before, also
// none that only the home knows of, as after an object was restored; but if that gives the volume to the very node, its users go on.
func claimed(v *v1alpha1.Volume, want v1alpha1.Claim) *v1alpha1.Claim {
	if volume.Access(v.Spec.Access) != volume.AccessAny {
		return &want
	}
	if e := v.Status.Export; e != nil && e.Node == want.Node && e.Generation > v.Spec.Claims && !cluster.ToClaim(&want).Many() && len(v.Status.Readers) == 0 {
		v.Spec.Claims = e.Generation // the same generation again
	} else {
		v.Spec.Claims = cluster.NextClaim(v)
	}
	want.Generation = v.Spec.Claims
	return &want
}

// nodePools returns the pools of a node, and how many volumes it may have; ErrNotFound for a
// node without any.
func (s *Store) nodePools(ctx context.Context, node string) ([]v1alpha1.Pool, int64, error) {
	var pools v1alpha1.PoolList
	if err := s.kube.Client.List(ctx, &pools, client.MatchingFields{cluster.ByNode: node}); err != nil {
		return nil, 0, kube.APIError("list pools", err)
	}
	if len(pools.Items) == 0 {
		if err := s.told(ctx); err != nil {
			return nil, 0, err
		}
		return nil, 0, fmt.Errorf("%w: no node %q has pools", errdefs.ErrNotFound, node)
	}
	return pools.Items, pools.Items[0].Spec.MaxVolumes, nil
}

// claiming is a claim that is about to be made: of a volume, by its key, for a node.
type claiming struct{ key, node string }

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
	for one := range s.claiming { // before the list, which has those that are done meanwhile
		if one.node == node {
			all[one.key] = true
		}
	}
	s.mu.Unlock()
	var claimed v1alpha1.VolumeList
	if err := s.kube.Client.List(ctx, &claimed, client.MatchingFields{byClaim: node}, client.UnsafeDisableDeepCopy); err != nil {
		return kube.APIError("count claims", err)
	}
	var replicated v1alpha1.ReplicatedVolumeList
	if err := s.kube.Client.List(ctx, &replicated, client.MatchingFields{byClaim: node}, client.UnsafeDisableDeepCopy); err != nil {
		return kube.APIError("count claims", err)
	}
	for i := range claimed.Items {
		all[claimed.Items[i].Name] = true
	}
	for i := range replicated.Items {
		all[replicated.Items[i].Name] = true
	}
	if int64(len(all)) >= limit {
		for name := range all {
			s.garbage.ClaimRefused(name)
		}
		return fmt.Errorf("%w: node %s has %d volumes, the most it can have", errdefs.ErrLimit, node, limit)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.claiming[claiming{key, node}] = true
	return nil
}

// counted prepares to count the claim of a volume that is about to be made for a node: count does, once, and end is to be called when the claim is in the cache, or was not made.
func (s *Store) counted(ctx context.Context, key, node string) (count func() error, end func(), err error) {
	_, limit, err := s.nodePools(ctx, node)
	if err != nil {
		return nil, nil, err
	}
	is := false
	count = func() (err error) {
		if !is && limit > 0 {
			err = s.countClaim(ctx, key, node, limit)
			is = err == nil
		}
		return err
	}
	end = func() {
		if !is {
			return
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.claiming, claiming{key, node})
	}
	return count, end, nil
}

// newClaim is a claim that is made now, as objects have it.
func newClaim(c volume.Claim) v1alpha1.Claim {
	return v1alpha1.Claim{Node: c.Node, ReadOnly: c.ReadOnly, Mode: c.Mode, Since: new(metav1.Now())}
}

// Release: see volume.Store. Of a volume that is being deleted too. One that other nodes can use is released when its home gives it to nobody
// any more; ErrUnavailable while it does.
func (s *Store) Release(ctx context.Context, id volume.ID, node string) error {
	if id.Kind != blockdev.Volume {
		return nil
	}
	switch r, err := s.replicated(ctx, id); {
	case errors.Is(err, errLeg):
		return nil
	case errors.Is(err, errForgotten):
		return s.releaseForgotten(ctx, id, node)
	case err != nil:
		return fmt.Errorf("release volume %s: %w", id, err)
	case r != nil:
		return s.releaseReplicated(ctx, r, node)
	}
	w := s.hub.Open(cluster.VolumeNamed(id.Key))
	defer w.Close()
	v := &v1alpha1.Volume{}
	err := s.get(ctx, id.Key, v)
	for live := false; ; live = true {
		if err != nil {
			return errdefs.IgnoreNotFound(err)
		}
		if v.Named() != id.Pool {
			return nil
		}
		if v.Spec.ReplicaOf != "" { // since it was looked up: its claim is that of the volume that it becomes a leg of
			return fmt.Errorf("release volume %s: %w", id, getsReplicas(id))
		}
		if before := v.DeepCopy(); released(v, node) {
			err := s.kube.Client.Patch(ctx, v, kube.LockingPatch(before))
			if err == nil {
				return s.waitReturned(ctx, w, v, node)
			}
			if !apierrors.IsConflict(err) {
				return errdefs.IgnoreNotFound(kube.APIError("release volume "+id.String(), err))
			}
		} else if live {
			return s.waitReturned(ctx, w, v, node)
		}
		v = &v1alpha1.Volume{}
		err = kube.APIError("read volume "+id.String(), s.kube.Live.Get(ctx, client.ObjectKey{Name: id.Key}, v))
	}
}

// released takes the claim of a node, or with none any claim, off an object, and reports whether that changes it. What its home still gives away
// counts as claimed before, also if the object is an older one that did not know of it: so the home sees that it is to end that.
func released(v *v1alpha1.Volume, node string) (changed bool) {
	changed = v.Unclaim(node)
	if e := givenTo(v, node); e != nil && v.Spec.Claim == nil && e.Generation > v.Spec.Claims {
		v.Spec.Claims, changed = e.Generation, true
	}
	return changed
}

// givenTo is what the home of a volume gives to a node, or with none to any, for which there is no claim; nil if nothing.
func givenTo(v *v1alpha1.Volume, node string) *v1alpha1.Export {
	for _, e := range v.Given() {
		if node != "" && e.Node != node {
			continue
		}
		if claim := v.ClaimOf(e.Node); claim == nil || claim.Generation != e.Generation {
			return &e
		}
	}
	return nil
}

// waitReturned waits until the home of a volume that was released does not give it to a node any more. A home that is gone for good is not
// waited for: nobody reaches its disks but itself.
func (s *Store) waitReturned(ctx context.Context, w *kube.Watch, v *v1alpha1.Volume, node string) error {
	if returned(v, node) {
		return nil
	}
	if gone, err := s.isGone(ctx, v.Spec.NodeName); gone || err != nil {
		return err
	}
	_, err := wait(ctx, s, w, v, func(v *v1alpha1.Volume) (bool, error) { return returned(v, node), nil })
	if err == nil || errors.Is(err, errGone) {
		return nil
	}
	to, claim := node, v.Spec.Claims
	if e := givenTo(v, node); e != nil {
		to, claim = e.Node, e.Generation
	}
	return fmt.Errorf("release volume %s: wait for its node %s to end what it gives to node %s (claim %d): %w", cluster.VolumeID(v), v.Spec.NodeName, to, claim, err)
}

// returned reports whether the home of a volume gives it to a node no more. One that the volume has moved to while it was used says to whom it gives it when it has taken it
// over.
func returned(v *v1alpha1.Volume, node string) bool {
	m, s := v.Spec.Move, v.Status.Move
	coming := m != nil && m.Left && s != nil && !s.Arrived && s.Copied != nil && s.Copied.Claim != 0
	return givenTo(v, node) == nil && !(coming && v.Spec.Claim == nil)
}

// isGone reports whether a node is gone for good.
func (s *Store) isGone(ctx context.Context, name string) (bool, error) {
	node := &corev1.Node{}
	err := s.kube.Live.Get(ctx, client.ObjectKey{Name: name}, node)
	return gc.IsGone(node, err), kube.APIError("look at node "+name, client.IgnoreNotFound(err))
}
