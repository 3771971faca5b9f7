package v1alpha1

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Common is the part of the status that volumes and snapshots share.
func (v *Volume) Common() *ObjectStatus { return &v.Status.ObjectStatus }

// Node that has it.
func (v *Volume) Node() string { return v.Spec.NodeName }

// In is the pool of that node.
func (v *Volume) In() string { return v.Spec.Pool }

// Named is the pool that its ID names.
func (v *Volume) Named() string { return cmp.Or(v.Spec.IDPool, v.Spec.Pool) }

// MovePool is the pool of the node of its move.
func (v *Volume) MovePool() string { return cmp.Or(v.Spec.Move.Pool, v.Spec.Pool) }

// Common is the part of the status that volumes and snapshots share.
func (s *Snapshot) Common() *ObjectStatus { return &s.Status.ObjectStatus }

// Node that has it.
func (s *Snapshot) Node() string { return s.Spec.NodeName }

// In is the pool of that node.
func (s *Snapshot) In() string { return s.Spec.Pool }

// Named is the pool that its ID names.
func (s *Snapshot) Named() string { return s.Spec.Pool }

// SourceNamed is the pool that the ID of its volume names.
func (s *Snapshot) SourceNamed() string { return cmp.Or(s.Spec.SourcePool, s.Spec.Pool) }

// EncryptionHeader is how many bytes a pool keeps of an encrypted volume or snapshot besides its size: luks.HeaderSize, which is written here once more, as
// package luks builds on Linux only (TestEncryptionHeader of package view).
const EncryptionHeader = 16 << 20

// Keeps returns how many bytes its pool has of it, or is to have: its size, and the header of its encryption.
func (v *Volume) Keeps() int64 { return keeps(v.Spec.Size, v.Spec.Encryption) }

// Keeps returns how many bytes its pool has of it: its size, and the header of its encryption.
func (s *Snapshot) Keeps() int64 { return keeps(s.Status.Size, s.Spec.Encryption) }

func keeps(size int64, encryption string) int64 {
	if encryption == "" {
		return size
	}
	return size + EncryptionHeader
}

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

// Strict: it is another thing without a field that older definitions do not know.
func (v *Volume) Strict() bool { return v.Spec.Encryption != "" || v.Spec.Access != "" }

// Strict: it is another thing without a field that older definitions do not know.
func (s *Snapshot) Strict() bool {
	return s.Spec.Encryption != "" || s.Spec.SourcePool != "" || s.Spec.Leg != ""
}

// May is what may be done to its bytes.
func (v *Volume) May() *Intent { return &v.Spec.Intent }

// May is what may be done to its bytes.
func (s *Snapshot) May() *Intent { return &s.Spec.Intent }

// Deleting: its bytes may be deleted.
func (v *Volume) Deleting() bool { return v.Spec.Delete != "" && v.Spec.Delete == v.UID }

// Deleting: its bytes may be deleted.
func (s *Snapshot) Deleting() bool { return s.Spec.Delete != "" && s.Spec.Delete == s.UID }

// object is a Volume or a Snapshot.
type object interface {
	metav1.Object
	Common() *ObjectStatus
	May() *Intent
	Deleting() bool
}

// Going: it is being deleted, with its bytes or without them.
func Going(o object) bool { return o.Deleting() || o.GetDeletionTimestamp() != nil }

// IsLost: the bytes of an object were there, and are missing or damaged.
func IsLost(o object) bool {
	return o.Common().Is(Ready, "False") && o.Common().Created != nil || LostUnmade(o)
}

// LostUnmade: its bytes may not be made, and its node has not found any.
func LostUnmade(o object) bool {
	f := o.Common().Refused(o.GetGeneration())
	return o.Common().Created == nil && !o.May().Make && f != nil && f.Reason == ReasonDataLoss
}

// StateOf is how an object is: one of the States.
func StateOf(o object) string {
	switch {
	case Going(o):
		return StateDeleting
	case IsLost(o):
		return StateLost
	case o.Common().Refused(o.GetGeneration()) != nil:
		return StateFailed
	case o.Common().Created == nil:
		return StateMaking
	}
	return StateReady
}

// OfGroup returns those of the snapshots that say that they belong to a group which do: those that the controller gave its label (GroupLabel), wherever they have moved since; and if these are
// not all, what else is on the node of the oldest of them, which may have been adopted. Of a group that has no labels yet, as it was adopted, they are on the node of the oldest. Whoever
// has the account of another node can write objects that name the group, too.
func OfGroup(members []Snapshot) []Snapshot {
	if len(members) == 0 {
		return nil
	}
	rank := func(s *Snapshot) int {
		if s.InGroup() {
			return 0
		}
		return 1
	}
	first := slices.MinFunc(members, func(a, b Snapshot) int {
		return cmp.Or(cmp.Compare(rank(&a), rank(&b)), a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	labelled := 0
	for i := range members {
		labelled += 1 - rank(&members[i])
	}
	all := labelled > 0 && labelled >= first.Spec.Group.Size
	return slices.DeleteFunc(members, func(m Snapshot) bool { return !m.InGroup() && (all || m.Spec.NodeName != first.Spec.NodeName) })
}

// Of reports whether a snapshot is of a volume: it says so, and is on its node, or the controller says so too (SourceLabel). Whoever has the account of another node can write objects that
// name the volume as well.
func (s *Snapshot) Of(v *Volume) bool {
	return s.SourceID() == v.ID() && (s.Spec.NodeName == v.Spec.NodeName || s.Labels[SourceLabel] == v.Name)
}

// InGroup reports whether a snapshot has the label of the group that it says it belongs to.
func (s *Snapshot) InGroup() bool {
	return s.Spec.Group != nil && s.Labels[GroupLabel] == s.Spec.Group.Key
}

// NotInSteps is why the pool cannot keep a volume of exactly so many bytes, in words; empty if it can.
func (p *Pool) NotInSteps(bytes int64) string {
	if bytes%max(p.Status.Granularity, 1) == 0 {
		return ""
	}
	return fmt.Sprintf("pool %s keeps volumes in steps of %d bytes, and this one has %d", p.Name, p.Status.Granularity, bytes)
}

// Adopting returns what AdoptAnnotation of a pool asks for.
func (p *Pool) Adopting() []string {
	return strings.FieldsFunc(p.Annotations[AdoptAnnotation], func(c rune) bool { return c == ',' || c == ' ' })
}
