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
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// Claim: see volume.Store. It waits for no node: a claim is a write of the object.
func (s *Store) Claim(ctx context.Context, id volume.ID, claim volume.Claim) (volume.Claim, error) {
	if r, err := s.replicated(ctx, id); r != nil || err != nil {
		if err != nil {
			return volume.Claim{}, err
		}
		return s.claimReplicated(ctx, r, claim)
	}
	if _, err := s.volume(ctx, id); err != nil {
		return volume.Claim{}, err
	}
	count, end, err := s.counted(ctx, id.Key, claim.Node)
	if err != nil {
		return volume.Claim{}, err
	}
	defer end()
	want := newClaim(claim)
	v, err := s.change(ctx, id, func(v *v1alpha1.Volume) (bool, error) {
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
	if err != nil {
		return volume.Claim{}, err
	}
	return cluster.ClaimOn(v, want.Node), nil
}

// beside returns an error unless a further claim of a volume is possible. With many, for one of many readers, nobody may have a claim for writing; otherwise
// nobody may have any claim.
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

// sameUse reports whether two claims differ in nothing but their generations and times, which no caller asks for.
func sameUse(a, b v1alpha1.Claim) bool {
	a.Generation, b.Generation = 0, 0
	a.Since, b.Since = nil, nil
	return a == b
}

// mayUse returns ErrPrecondition if a node cannot use a volume: it is neither the volume's home nor, with access any, in the same network.
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

// claimed returns a claim as it is written into the object of a volume, and counts it there (spec.claims). With access any it has a generation that no claim
// had before, including one that only the home knows of, as after a restore of the object. But if the home exports the volume to the same node for such a
// generation, the claim gets that one, so that its users go on.
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

// nodePools returns the pools of a node, and how many volumes it may have; ErrNotFound if it has no pools.
func (s *Store) nodePools(ctx context.Context, node string) ([]v1alpha1.Pool, int64, error) {
	var pools v1alpha1.PoolList
	if err := s.kube.Client.List(ctx, &pools, client.MatchingFields{cluster.ByNode: node}); err != nil {
		return nil, 0, kube.APIError("list pools", err)
	}
	if len(pools.Items) == 0 {
		if err := s.reported(ctx); err != nil {
			return nil, 0, err
		}
		return nil, 0, fmt.Errorf("%w: no node %q has pools", errdefs.ErrNotFound, node)
	}
	return pools.Items, pools.Items[0].Spec.MaxVolumes, nil
}

// claiming is a claim that is about to be written: of a volume, by its key, for a node.
type claiming struct{ key, node string }

// countClaim counts a claim that is about to be written, with those in the cache and those in s.claiming, each volume once; ErrLimit if the node has limit
// volumes. Two controllers that count at once may exceed the limit by one each: the scheduler counts too.
func (s *Store) countClaim(ctx context.Context, key, node string, limit int64) error {
	select {
	case s.counting <- struct{}{}: // one after the other
		defer func() { <-s.counting }()
	case <-ctx.Done():
		return fmt.Errorf("%w: count claims: %w", errdefs.ErrUnavailable, ctx.Err())
	}
	all := map[string]bool{}
	s.mu.Lock()
	for one := range s.claiming { // before the list: a claim that leaves this map later is in the list
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

// counted returns a function that counts a claim that is about to be written; it may be called again, and counts once. end has to be called when the claim is
// in the cache, or was not written.
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

// newClaim returns a claim as objects have it, made now.
func newClaim(c volume.Claim) v1alpha1.Claim {
	return v1alpha1.Claim{Node: c.Node, ReadOnly: c.ReadOnly, Mode: c.Mode, Since: new(metav1.Now())}
}

// Release: see volume.Store. It releases a volume that is being deleted, too. It waits until the home has ended its export to the node; ErrUnavailable until
// then.
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
	err := s.get(ctx, id, v)
	for live := false; ; live = true {
		if err != nil {
			return errdefs.IgnoreNotFound(err)
		}
		if v.Named() != id.Pool {
			return nil
		}
		if v.Spec.ReplicaOf != "" { // it has become a leg meanwhile: its claim is that of its ReplicatedVolume
			return fmt.Errorf("release volume %s: %w", id, getsReplicas(id))
		}
		if before := v.DeepCopy(); released(v, node) {
			revert(v) // see change
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

// released takes the claim of a node off an object, or with no node all claims, and reports whether that changes the object. If the home exports the volume
// for a later generation than spec.claims, as the object was restored, spec.claims is raised to that: so the home sees that the export has to end.
func released(v *v1alpha1.Volume, node string) (changed bool) {
	changed = v.Unclaim(node)
	if e := givenTo(v, node); e != nil && v.Spec.Claim == nil && e.Generation > v.Spec.Claims {
		v.Spec.Claims, changed = e.Generation, true
	}
	return changed
}

// givenTo returns an export of a volume to a node, or with no node to any node, for which there is no claim; nil if there is none.
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

// waitReturned waits until the home of a released volume has ended its export to a node. It does not wait for a home that is gone for good: no other node
// reaches its disks.
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

// returned reports whether the home of a volume has no export to a node for which there is no claim. If the volume has moved while it was used, the new home
// reports its exports only when it has taken the volume over: until then it is false, unless there is a claim.
func returned(v *v1alpha1.Volume, node string) bool {
	m, s := v.Spec.Move, v.Status.Move
	coming := m != nil && m.Left && s != nil && !s.Arrived && s.Copied != nil && s.Copied.Claim != 0
	return givenTo(v, node) == nil && !(coming && v.Spec.Claim == nil)
}

// isGone reports whether a node is gone for good.
func (s *Store) isGone(ctx context.Context, name string) (bool, error) {
	node := &corev1.Node{}
	err := s.kube.Live.Get(ctx, client.ObjectKey{Name: name}, node)
	return cluster.IsGone(node, err), kube.APIError("look at node "+name, client.IgnoreNotFound(err))
}
