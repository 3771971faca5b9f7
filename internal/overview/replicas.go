package overview

import (
	"fmt"
	"slices"
	"time"
)

// Replicas are the copies of a volume whose bytes are on several nodes (docs/replication.md).
type Replicas struct {
	Wanted  int    `json:"wanted"`          // how many there are to be
	Current int    `json:"current"`         // how many have all that was written
	Lacks   string `json:"lacks,omitempty"` // why there are fewer than there are to be, as no node can have another one
	Legs    []Leg  `json:"legs"`            // in the order in which they were made
}

// Leg is one of these copies: a volume of its own, which is not among Overview.Volumes.
type Leg struct {
	ID    string   `json:"id"`
	Node  string   `json:"node,omitempty"` // empty: it is not made anywhere yet
	Pool  string   `json:"pool,omitempty"`
	Used  *int64   `json:"used,omitempty"` // what it takes of the pool; nil: not known
	State LegState `json:"state"`
	// Message says why it is not current, and what is waited for.
	Message  string     `json:"message,omitempty"`
	Since    *time.Time `json:"since,omitempty"` // when it was current last; nil: not known
	Progress *Progress  `json:"progress,omitempty"`
}

// LegState is how a leg is.
type LegState string

// The states of a leg.
const (
	LegCurrent LegState = "Current" // it has all that was written
	LegJoining LegState = "Joining" // what it lacks is being copied to it
	LegWaiting LegState = "Waiting" // it is not used now
	LegMaking  LegState = "Making"  // it is being made
	LegLeaving LegState = "Leaving" // the volume does without it
	LegLost    LegState = "Lost"    // its bytes, or its object, are missing
)

// String is how many are current of those that there are to be.
func (r *Replicas) String() string { return fmt.Sprintf("%d/%d", r.Current, r.Wanted) }

// Place is a pool of a node.
type Place struct{ Node, Pool string }

// Places are where the bytes of the volume are; one, but of a volume with replicas.
func (v *Volume) Places() []Place {
	if v.Replicas == nil {
		return []Place{{v.Node, v.Pool}}
	}
	var all []Place
	for _, leg := range v.Replicas.Legs {
		if p := (Place{leg.Node, leg.Pool}); p.Node != "" && !slices.Contains(all, p) {
			all = append(all, p)
		}
	}
	return all
}

// On are the nodes that have the volume's bytes.
func (v *Volume) On() (nodes []string) {
	for _, p := range v.Places() {
		if !slices.Contains(nodes, p.Node) {
			nodes = append(nodes, p.Node)
		}
	}
	return nodes
}

// In are the names of the pools that have them.
func (v *Volume) In() (pools []string) {
	for _, p := range v.Places() {
		if !slices.Contains(pools, p.Pool) {
			pools = append(pools, p.Pool)
		}
	}
	return pools
}

// Is reports whether its bytes, or some of its replicas, are in a pool of a name on a node; empty: any.
func (v *Volume) Is(node, pool string) bool {
	return slices.ContainsFunc(v.Places(), func(p Place) bool { return (node == "" || p.Node == node) && (pool == "" || p.Pool == pool) })
}
