package volume

import "time"

// UsualReplaceAfter is the default of Replicas.ReplaceAfter: longer than a node takes to restart.
const UsualReplaceAfter = 10 * time.Minute

// Replicas says on how many nodes the bytes of a volume are to be (docs/replication.md).
type Replicas struct {
	// Count of the nodes; with 0 and 1 the volume has no legs.
	Count int
	// TopologyKey is a label of nodes: no two replicas are on nodes with the same value of it. Empty: no two are on one node.
	TopologyKey string
	// ReplaceAfter is how long a replica may be unusable before it is replaced; 0: it is never replaced.
	ReplaceAfter time.Duration
}

// Legs returns how many legs the volume is to have; 0: it has none, and is on one node.
func (r Replicas) Legs() int {
	if r.Count > 1 {
		return r.Count
	}
	return 0
}
