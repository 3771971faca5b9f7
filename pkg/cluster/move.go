package cluster

import "github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"

// MayMove reports whether the controller may name the new node of a volume that moves: that node has all bytes as they are, and nobody uses the volume. Whoever
// claims the volume, or takes the move back, writes the same object, so nothing can come between this and the write; and what came and went before has left it
// another generation.
func MayMove(v *v1alpha1.Volume) bool {
	m, s := v.Spec.Move, v.Status.Move
	return m != nil && !m.Left && s != nil && s.Node == m.Node && s.Copied != nil &&
		v.Spec.Claim == nil && v.Status.Export == nil && s.Copied.Generation == v.Generation &&
		v.Status.Created != nil && v.Spec.Size <= v.Status.Size && s.Copied.Size == v.Status.Size &&
		!v.Spec.Abandoned && !v1alpha1.Going(v)
}
