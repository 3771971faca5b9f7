package v1alpha1

import "time"

// What others than controller and agents have to know to read the objects: it is here, and nowhere else, as this package builds on
// every system (kubectl ashlar runs on people's machines), and the driver's own on Linux only.
const (
	// DefaultDriver is the name of the CSI driver unless somebody gave it another.
	DefaultDriver = "block.csi.ashlar.dev"
	// TopologyKey is the segment of a topology, and the label of a Node, that names the node.
	TopologyKey = "topology.ashlar.dev/node"
	// NetworkKey is the segment and the label that names the network in which the node reaches others; nodes that are in none have none.
	NetworkKey = "topology.ashlar.dev/network"
	// HeartbeatLabel with the value HeartbeatOfAgent is on the Leases of agents, whose holder is the node's name.
	HeartbeatLabel   = "ashlar.dev/heartbeat"
	HeartbeatOfAgent = "agent"
	// SilentAfter is how long a Lease is not renewed before its agent is taken to be down.
	SilentAfter = 40 * time.Second
)

// ID of the volume, as CSI has it.
func (v *Volume) ID() string { return "vol." + v.Named() + "." + v.Name }

// ID of the snapshot, as CSI has it.
func (s *Snapshot) ID() string { return "snap." + s.Spec.Pool + "." + s.Name }

// SourceID is the ID of the volume that it is of.
func (s *Snapshot) SourceID() string { return "vol." + s.SourceNamed() + "." + s.Spec.Source }

// ID of the group snapshot, as CSI has it.
func (g *Group) ID() string { return "group." + g.Key }
