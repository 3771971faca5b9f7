package volume

import "time"

// Access says which nodes can use a volume.
type Access string

// The ways of access.
const (
	AccessNode Access = ""    // only the node that has it, its home
	AccessAny  Access = "any" // all nodes in the network of its home
)

// String returns the access as the parameter of a class has it.
func (a Access) String() string {
	if a == AccessNode {
		return "node"
	}
	return string(a)
}

// homeTimeoutOf is the inverse of homeTimeoutLabel; 0 for any other text.
func homeTimeoutOf(label string) time.Duration {
	d, err := time.ParseDuration(label)
	if err != nil {
		return 0
	}
	return d
}

// homeTimeoutLabel returns a HomeTimeout as a label; empty for 0.
func homeTimeoutLabel(d time.Duration) string {
	if d == 0 {
		return ""
	}
	return d.String()
}
