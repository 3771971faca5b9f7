package volume

import "time"

// Access says which nodes can use a volume.
type Access string

// The ways of access.
const (
	AccessNode Access = ""    // the node that has it
	AccessAny  Access = "any" // all nodes of the network of the node that has it, which is its home
)

// String is the access as it is called in a class.
func (a Access) String() string {
	if a == AccessNode {
		return "node"
	}
	return string(a)
}

// homeTimeoutOf reads what homeTimeoutLabel wrote; 0 for anything else.
func homeTimeoutOf(label string) time.Duration {
	d, err := time.ParseDuration(label)
	if err != nil {
		return 0
	}
	return d
}

// homeTimeoutLabel is a HomeTimeout as a record has it; empty for none.
func homeTimeoutLabel(d time.Duration) string {
	if d == 0 {
		return ""
	}
	return d.String()
}
