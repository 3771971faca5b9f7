package cluster

import (
	"fmt"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// MayMove reports whether the controller may name the new node of a volume that moves: that node has a full copy, and either nobody uses the volume, or it
// is used by one claim, whose node writes to both copies. A claim, a release, and the end of the move are writes of the same object. So a compare-and-swap
// of the object that was judged here fails if there was one since; and one between copy and judgement shows in the generation.
func MayMove(v *v1alpha1.Volume) bool {
	m, s := v.Spec.Move, v.Status.Move
	return m != nil && !m.Left && s != nil && s.Node == m.Node && s.Pool == m.Pool && s.Copied != nil &&
		copiedAsUsed(v, s.Copied.Claim) && len(v.Spec.Readers)+len(v.Status.Readers) == 0 && s.Copied.Generation == v.Generation &&
		v.Status.Created != nil && v.Spec.Size <= v.Status.Size && s.Copied.Size == v.Status.Size &&
		!v.Spec.Abandoned && !v1alpha1.Going(v)
}

// copiedAsUsed reports whether a volume is used as it was when it was copied: by the claim of a generation, or with 0 by nobody. The new node expects the
// same user with the next generation (Flip), so that has to be the one after claim.
func copiedAsUsed(v *v1alpha1.Volume, claim int64) bool {
	c, e := v.Spec.Claim, v.Status.Export
	if claim == 0 {
		return c == nil && e == nil
	}
	return c != nil && c.Generation == claim && NextClaim(v) == claim+1 && (e == nil || e.Generation == claim && e.Node == c.Node)
}

// NextClaim returns the generation of the next claim of a volume with access any. It is larger than that of all claims before, including those that only
// the volume's node knows of, by its exports.
func NextClaim(v *v1alpha1.Volume) int64 {
	last := v.Spec.Claims
	for _, e := range v.Given() {
		last = max(last, e.Generation)
	}
	return last + 1
}

// Flip writes the new node and pool of a volume that moves into its object, and the old ones into spec.move. A claim gets the next generation, for which
// the new node exports the volume; the old node ends its export as one of an earlier claim.
func Flip(v *v1alpha1.Volume) {
	if c := v.Spec.Claim; c != nil {
		v.Spec.Claims = NextClaim(v)
		c.Generation = v.Spec.Claims
	}
	node, pool, named := v.Spec.Move.Node, v.MovePool(), v.Named()
	left := &v1alpha1.Move{Node: v.Spec.NodeName, Left: true}
	if pool != v.Spec.Pool {
		left.Pool = v.Spec.Pool
	}
	v.Spec.NodeName, v.Spec.Pool, v.Spec.IDPool, v.Spec.Move = node, pool, "", left
	if named != pool {
		v.Spec.IDPool = named
	}
}

// SnapshotMayMove is MayMove of a snapshot: its new node has a full copy. Nobody writes to a snapshot.
func SnapshotMayMove(s *v1alpha1.Snapshot) bool {
	m, far := s.Spec.Move, s.Status.Move
	return m != nil && !m.Left && far != nil && far.Node == m.Node && far.Copied != nil && far.Copied.Generation == s.Generation &&
		s.Status.Created != nil && far.Copied.Size == s.Status.Size && !v1alpha1.Going(s)
}

// FlipSnapshot writes the new node of a snapshot that moves into its object, and the old one into spec.move.
func FlipSnapshot(s *v1alpha1.Snapshot) {
	s.Spec.NodeName, s.Spec.Move = s.Spec.Move.Node, &v1alpha1.Move{Node: s.Spec.NodeName, Left: true}
}

// SnapshotComes returns errdefs.ErrUnavailable for a snapshot that has moved, and that its new node has not taken over yet: until then it cannot be read.
func SnapshotComes(s *v1alpha1.Snapshot) error {
	if m := s.Spec.Move; m == nil || !m.Left || s.Status.Move != nil && s.Status.Move.Arrived {
		return nil
	}
	return fmt.Errorf("%w: snapshot %s has moved from node %s to node %s, which has not taken it over yet", errdefs.ErrUnavailable, SnapshotID(s), s.Spec.Move.Node, s.Spec.NodeName)
}
