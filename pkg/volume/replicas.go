package volume

import "time"

// UsualReplaceAfter is how long a replica may be away, as a rule: longer than a node takes to restart.
const UsualReplaceAfter = 10 * time.Minute

// Replicas says on how many nodes the bytes of a volume are to be (docs/replication.md).
type Replicas struct {
	// Count of them; 0 and 1: on one, and it is no volume with legs.
	Count int
	// TopologyKey is the label of nodes by which they are apart; empty: they are different nodes.
	TopologyKey string
	// ReplaceAfter is how long until one that cannot be used is replaced; 0: it never is.
	ReplaceAfter time.Duration
}

// Legs is how many legs the volume is to have; 0: it has none, as it is on one node.
func (r Replicas) Legs() int {
	if r.Count > 1 {
		return r.Count
	}
	return 0
}
