package cluster

import "github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"

// MayMove reports whether the controller may name the new node of a volume that moves: that node has all bytes as they are, and nobody uses the volume. As each claim
// is counted in the object, and whoever claims the volume writes the same object, no claim can come between this and the write.
func MayMove(v *v1alpha1.Volume) bool {
	m, s := v.Spec.Move, v.Status.Move
	return m != nil && !m.Left && s != nil && s.Node == m.Node && s.Copied != nil &&
		v.Spec.Claim == nil && v.Status.Export == nil && s.Copied.Claims == v.Spec.Claims &&
		v.Status.Created != nil && v.Spec.Size <= v.Status.Size && s.Copied.Size == v.Status.Size &&
		!v.Spec.Abandoned && !v1alpha1.Going(v)
}
