package v1alpha1

import (
	"crypto/sha256"
	"fmt"
	"slices"
	"strings"
)

// MostReaders is how many nodes can read a volume at once.
const MostReaders = 64

// readerPrefix is what the labels of ReaderLabel begin with.
const readerPrefix = "reader.ashlar.dev/"

// ReaderLabel is on the Volumes that a node reads beside others (spec.readers), so that its agent can watch those. Names of nodes are longer than labels can be.
func ReaderLabel(node string) string {
	sum := sha256.Sum256([]byte(node))
	return fmt.Sprintf("%s%x", readerPrefix, sum[:16])
}

// ClaimOf returns the claim of a node, be it of one that reads beside others; nil if there is none.
func (v *Volume) ClaimOf(node string) *Claim {
	if c := v.Spec.Claim; c != nil && c.Node == node {
		return c
	}
	if i := slices.IndexFunc(v.Spec.Readers, func(c Claim) bool { return c.Node == node }); i >= 0 {
		return &v.Spec.Readers[i]
	}
	return nil
}

// Claimants are the nodes that have claims.
func (v *Volume) Claimants() (nodes []string) {
	if c := v.Spec.Claim; c != nil {
		nodes = append(nodes, c.Node)
	}
	for _, c := range v.Spec.Readers {
		nodes = append(nodes, c.Node)
	}
	return nodes
}

// Given are the nodes that the volume's own one gives it to, and for which claims.
func (v *Volume) Given() (all []Export) {
	if e := v.Status.Export; e != nil {
		all = append(all, *e)
	}
	return append(all, v.Status.Readers...)
}

// IsUsed reports whether any node has a claim, or is given the volume still.
func (v *Volume) IsUsed() bool { return len(v.Claimants()) > 0 || len(v.Given()) > 0 }

// Unclaim takes the claims of a node off, or with none all, and reports whether there were any.
func (v *Volume) Unclaim(node string) (changed bool) {
	if c := v.Spec.Claim; c != nil && (node == "" || c.Node == node) {
		v.Spec.Claim, changed = nil, true
	}
	if slices.ContainsFunc(v.Spec.Readers, func(c Claim) bool { return node == "" || c.Node == node }) {
		v.SetReaders(slices.DeleteFunc(slices.Clone(v.Spec.Readers), func(c Claim) bool { return node == "" || c.Node == node }))
		changed = true
	}
	return changed
}

// SetReaders says who reads the volume beside others, with the labels by which their agents find it.
func (v *Volume) SetReaders(readers []Claim) {
	if v.Spec.Readers = readers; len(readers) == 0 {
		v.Spec.Readers = nil
	}
	for label := range v.Labels {
		if strings.HasPrefix(label, readerPrefix) {
			delete(v.Labels, label)
		}
	}
	for _, c := range readers {
		if v.Labels == nil {
			v.Labels = map[string]string{}
		}
		v.Labels[ReaderLabel(c.Node)] = ""
	}
}
