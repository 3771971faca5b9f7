package v1alpha1

// Moves is how the volume is to move, and how far that is; nil for what there is not.
func (v *Volume) Moves() (*Move, *MoveStatus) { return v.Spec.Move, v.Status.Move }

// Moves is how the snapshot is to move, and how far that is; nil for what there is not.
func (s *Snapshot) Moves() (*Move, *MoveStatus) { return s.Spec.Move, s.Status.Move }

// SetMove asks for the volume to move; nil: not any more.
func (v *Volume) SetMove(m *Move) { v.Spec.Move = m }

// SetMove asks for the snapshot to move; nil: not any more.
func (s *Snapshot) SetMove(m *Move) { s.Spec.Move = m }

// SetMoveStatus says how far the move of the volume is.
func (v *Volume) SetMoveStatus(s *MoveStatus) { v.Status.Move = s }

// SetMoveStatus says how far the move of the snapshot is.
func (s *Snapshot) SetMoveStatus(far *MoveStatus) { s.Status.Move = far }

// OtherLeg is another leg of its volume, among some Volumes, that is on a node or is to move there, and is not being deleted; nil: there is none, or it is no leg itself. Legs of one volume are on different nodes.
func (v *Volume) OtherLeg(node string, all []*Volume) *Volume {
	for _, other := range all {
		if v.Spec.ReplicaOf != "" && other.Spec.ReplicaOf == v.Spec.ReplicaOf && other.Name != v.Name && !Going(other) && (other.Spec.NodeName == node || other.Moving() && other.Spec.Move.Node == node) {
			return other
		}
	}
	return nil
}

// Moving: it is asked to move, and has not yet.
func (v *Volume) Moving() bool { return v.Spec.Move != nil && !v.Spec.Move.Left }

// Pointers are its items, which are not copied.
func (l *VolumeList) Pointers() (all []*Volume) {
	for i := range l.Items {
		all = append(all, &l.Items[i])
	}
	return all
}
