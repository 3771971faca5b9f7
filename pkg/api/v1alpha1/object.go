package v1alpha1

// Common is the part of the status that volumes and snapshots share.
func (v *Volume) Common() *ObjectStatus { return &v.Status.ObjectStatus }

// Node that has it.
func (v *Volume) Node() string { return v.Spec.NodeName }

// Common is the part of the status that volumes and snapshots share.
func (s *Snapshot) Common() *ObjectStatus { return &s.Status.ObjectStatus }

// Node that has it.
func (s *Snapshot) Node() string { return s.Spec.NodeName }

// Is reports whether a condition is there, and has a status of True, False or Unknown.
func (s *ObjectStatus) Is(condition, status string) bool {
	for _, c := range s.Conditions {
		if c.Type == condition {
			return string(c.Status) == status
		}
	}
	return false
}

// Refused is the node's final answer to the spec of a generation, or nil.
func (s *ObjectStatus) Refused(generation int64) *Failure {
	if s.ObservedGeneration >= generation {
		return s.Failure
	}
	return nil
}
