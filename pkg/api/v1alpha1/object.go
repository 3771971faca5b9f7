package v1alpha1

// Common is the part of the status that volumes and snapshots share.
func (v *Volume) Common() *ObjectStatus { return &v.Status.ObjectStatus }

// Node that has it.
func (v *Volume) Node() string { return v.Spec.NodeName }

// In is the pool of that node.
func (v *Volume) In() string { return v.Spec.Pool }

// Common is the part of the status that volumes and snapshots share.
func (s *Snapshot) Common() *ObjectStatus { return &s.Status.ObjectStatus }

// Node that has it.
func (s *Snapshot) Node() string { return s.Spec.NodeName }

// In is the pool of that node.
func (s *Snapshot) In() string { return s.Spec.Pool }

// Is reports whether a condition is there, and has a status of True, False or Unknown.
func (s *ObjectStatus) Is(condition, status string) bool {
	for _, c := range s.Conditions {
		if c.Type == condition {
			return string(c.Status) == status
		}
	}
	return false
}

// Refused is the node's final answer to the spec of a generation, or nil. A later generation is that of
// another object, of which this one is a copy.
func (s *ObjectStatus) Refused(generation int64) *Failure {
	if s.ObservedGeneration == generation {
		return s.Failure
	}
	return nil
}

// May is what may be done to its bytes.
func (v *Volume) May() *Intent { return &v.Spec.Intent }

// May is what may be done to its bytes.
func (s *Snapshot) May() *Intent { return &s.Spec.Intent }

// Deleting: its bytes may be deleted.
func (v *Volume) Deleting() bool { return v.Spec.Delete != "" && v.Spec.Delete == v.UID }

// Deleting: its bytes may be deleted.
func (s *Snapshot) Deleting() bool { return s.Spec.Delete != "" && s.Spec.Delete == s.UID }
