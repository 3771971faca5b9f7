package v1alpha1

import (
	"fmt"
	"slices"
)

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

// IsToCome: room for what is to move is to be kept on its new node. The figures of the pool there do not have it yet, as its copy has not begun, and the node does not refuse it. s is its status.move, or nil.
func (m *Move) IsToCome(s *MoveStatus) bool {
	return m != nil && !m.Left && (s == nil || s.Node != m.Node || s.Pool != m.Pool || s.Progress == nil && s.Copied == nil && !s.Refused)
}

// OtherLeg is another leg of its volume, among some Volumes, that is on a node or is to move there, and is not being deleted; nil: there is none, or it is no leg itself. Legs of one volume are on different nodes.
func (v *Volume) OtherLeg(node string, all []*Volume) *Volume {
	for _, other := range all {
		if v.Spec.ReplicaOf != "" && other.Spec.ReplicaOf == v.Spec.ReplicaOf && other.Name != v.Name && !Going(other) && other.isOrComes(node) {
			return other
		}
	}
	return nil
}

// isOrComes reports whether a volume is on a node, or is to move there.
func (v *Volume) isOrComes(node string) bool {
	return v.Spec.NodeName == node || v.destination() == node
}

// destination is the node that a volume moves to; without a move, the one that it is on.
func (v *Volume) destination() string {
	if v.Moving() {
		return v.Spec.Move.Node
	}
	return v.Spec.NodeName
}

// NotBeside is why a node cannot have a leg of the volume beside others, in words that follow on the name of the node; empty if it can. Legs are on different nodes, and with a TopologyKey where nodes have different values of that
// label. Where a leg moves away from, was lost, or is to be replaced (leaving), another one may be, but for its node.
func (r *ReplicatedVolume) NotBeside(others []*Volume, leaving []string, node string, labels func(node string) map[string]string) string {
	key := r.Spec.TopologyKey
	value := labels(node)[key]
	if key != "" && value == "" {
		return "has no label " + key + " (parameter replicaTopologyKey)"
	}
	for _, other := range others {
		if other.Spec.NodeName == node && IsLost(other) {
			return fmt.Sprintf("has a replica of the volume that is lost, and gets another one when the volume does without that: kubectl ashlar replicas %s with a smaller number, and then with this one again", r.Name)
		}
		if other.isOrComes(node) {
			return "has another replica of the volume, or gets one"
		}
		if at := other.destination(); key != "" && !IsLost(other) && !slices.Contains(leaving, other.Name) && labels(at)[key] == value {
			return fmt.Sprintf("is where node %s is, which has another replica of the volume, or gets one (parameter replicaTopologyKey=%s)", at, key)
		}
	}
	return ""
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
