package overview

import (
	"fmt"
	"slices"
	"time"
)

// Replicas describes a volume whose bytes are on several nodes (docs/replication.md).
type Replicas struct {
	Wanted  int    `json:"wanted"`          // how many legs it is to have
	Current int    `json:"current"`         // how many legs have all that was written
	Lacks   string `json:"lacks,omitempty"` // why it has fewer than it is to have: no node can have a further one
	Legs    []Leg  `json:"legs"`            // those of spec.legs in their order, then others that still exist
}

// Leg is one replica: a volume of its own, which is not in Overview.Volumes.
type Leg struct {
	ID    string   `json:"id"`
	Node  string   `json:"node,omitempty"` // empty: it has no Volume object (yet)
	Pool  string   `json:"pool,omitempty"`
	Used  *int64   `json:"used,omitempty"` // bytes that it takes of the pool; nil: not known
	State LegState `json:"state"`
	// Message says why it is not current, and what it waits for.
	Message  string     `json:"message,omitempty"`
	Since    *time.Time `json:"since,omitempty"` // when it was last current; nil: not known
	Progress *Progress  `json:"progress,omitempty"`
}

// LegState is the state of a leg.
type LegState string

// The states of a leg.
const (
	LegCurrent LegState = "Current" // it has all that was written
	LegJoining LegState = "Joining" // what it lacks is copied to it
	LegWaiting LegState = "Waiting" // what it lacks is not copied now
	LegMaking  LegState = "Making"  // it is being made
	LegLeaving LegState = "Leaving" // it is being removed
	LegLost    LegState = "Lost"    // its bytes or its object are missing
)

// String returns CURRENT/WANTED.
func (r *Replicas) String() string { return fmt.Sprintf("%d/%d", r.Current, r.Wanted) }

// Place is a pool of a node.
type Place struct{ Node, Pool string }

// Places returns where the bytes of the volume are: in one pool, or with replicas in several.
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

// On returns the nodes that have bytes of the volume.
func (v *Volume) On() (nodes []string) {
	for _, p := range v.Places() {
		if !slices.Contains(nodes, p.Node) {
			nodes = append(nodes, p.Node)
		}
	}
	return nodes
}

// In returns the names of the pools that have bytes of the volume.
func (v *Volume) In() (pools []string) {
	for _, p := range v.Places() {
		if !slices.Contains(pools, p.Pool) {
			pools = append(pools, p.Pool)
		}
	}
	return pools
}

// Is reports whether bytes of the volume are in a pool with a name on a node. An empty node or pool stands for any.
func (v *Volume) Is(node, pool string) bool {
	return slices.ContainsFunc(v.Places(), func(p Place) bool { return (node == "" || p.Node == node) && (pool == "" || p.Pool == pool) })
}
