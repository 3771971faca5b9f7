// Package overview is what there is, and what is wrong with it: nodes, their pools, volumes and snapshots, as an operator
// wants to see them. The page, the commands and the plugin of kubectl show it; none of them finds out anything by itself.
package overview

import (
	"slices"
	"time"
)

// Overview is everything at one moment. All sizes are bytes; all times are UTC. Lists are never nil, and sorted: problems
// by severity (the worst first), then by what they are about; everything else by node, pool and name.
type Overview struct {
	Taken   time.Time `json:"taken"`
	Cluster bool      `json:"cluster"` // of a cluster; else of one machine
	Driver  string    `json:"driver"`  // its name
	Version string    `json:"version"` // of what made this
	// Missing says what is left out, and why: "pods: ..." of what the user may not list, say.
	Missing []string `json:"missing,omitempty"`
	// Blind: nodes or agents could not be looked at, or not now. That nothing is said of them is then no proof that they are well.
	Blind bool `json:"blind,omitempty"`

	Problems  []Problem  `json:"problems"` // of everything below
	Nodes     []Node     `json:"nodes"`
	Volumes   []Volume   `json:"volumes"`
	Snapshots []Snapshot `json:"snapshots"`
	Classes   []Class    `json:"classes,omitempty"` // StorageClasses of the driver; of a cluster only
	Uses      []Use      `json:"uses,omitempty"`    // of one machine only; each volume once
}

// Use is a volume that a machine uses, and whose bytes are not in a pool of that alone: another node has it, or several have.
type Use struct {
	Key     string   `json:"key"` // the last part of its ID
	Devices []string `json:"devices,omitempty"`
	Mounts  []string `json:"mounts,omitempty"`
}

// Class is a StorageClass.
type Class struct {
	Name string `json:"name"`
	Pool string `json:"pool,omitempty"` // a set of pools (poolset.Set); empty: each node's default one
	// Nodes are those that its allowedTopologies name, and with access=any those of them that are in a network; nil: all will do.
	Nodes []string `json:"nodes"`
	// Replicas that each volume has; 0: it has no others.
	Replicas int `json:"replicas,omitempty"`
	// Sites are where replicas are apart, by node; only with replicas. Nodes that may get none are not there.
	Sites map[string]Site `json:"sites,omitempty"`
}

// Site is where a replica is, beside which no other one of the volume may be: all of them are in one network.
type Site struct {
	Network string `json:"network"`
	Name    string `json:"name"` // a node, or what the label of nodes says that keeps them apart
}

// Allows reports whether the volumes of a class may be on a node.
func (c *Class) Allows(node string) bool { return c.Nodes == nil || slices.Contains(c.Nodes, node) }

// Problem is something wrong that somebody should do something about.
type Problem struct {
	Severity Severity `json:"severity"`
	Reason   string   `json:"reason"`  // one CamelCase word
	Message  string   `json:"message"` // what is wrong and what to do, without the name of the subject
	Subject  Subject  `json:"subject"`
	Runbook  string   `json:"runbook"` // address of the page that says what to do
}

// Severity of a problem.
type Severity string

// The severities, from the worst. The first three are those of CSI (VolumeHealth); Warning is what will become one of them
// if nobody does anything.
const (
	DataLoss     Severity = "DataLoss"
	Inaccessible Severity = "Inaccessible"
	Degraded     Severity = "Degraded"
	Warning      Severity = "Warning"
)

// Subject is what a problem is of.
type Subject struct {
	Kind string `json:"kind"` // Node, Pool, Volume or Snapshot
	Name string `json:"name"` // of a pool NODE.POOL, of a volume or snapshot its ID
}

// Ref names an object of Kubernetes that has a namespace.
type Ref struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
}

// Node is a node that has pools, or had them.
type Node struct {
	Name     string    `json:"name"`
	Ready    bool      `json:"ready"` // the node's driver answers, as far as one knows
	Problems []Problem `json:"problems"`
	Pools    []Pool    `json:"pools"`
}

// Pool is a pool of a node.
type Pool struct {
	Node    string `json:"node"`
	Name    string `json:"name"`
	Kind    string `json:"kind"` // file, lvm or lvmthin
	Default bool   `json:"default"`
	UUID    string `json:"uuid,omitempty"`

	Total     int64 `json:"total"`     // what it may promise in all
	Promised  int64 `json:"promised"`  // the sizes of its volumes and snapshots
	Available int64 `json:"available"` // what it may still promise
	Used      int64 `json:"used"`      // what its volumes and snapshots take of the disk; 0 if that is not known
	MaxVolume int64 `json:"maxVolume"` // the largest volume that could be made now

	Volumes    int       `json:"volumes"`
	Snapshots  int       `json:"snapshots"`
	Problems   []Problem `json:"problems"`
	Strays     []Stray   `json:"strays"`     // what it keeps that no object is for: the first hundred
	StrayCount int       `json:"strayCount"` // how many there are in all
}

// Stray is a volume or a snapshot that no object is for.
type Stray struct {
	ID   string `json:"id"`
	Name string `json:"name,omitempty"`
	Size int64  `json:"size"`
	// Claim and PersistentVolume that it was made for, if its record says.
	Claim            *Ref   `json:"claim,omitempty"`
	PersistentVolume string `json:"persistentVolume,omitempty"`
}

// State of a volume or a snapshot.
type State string

// The states.
const (
	Making   State = "Making" // it is being made: copied, zeroed
	Ready    State = "Ready"
	Deleting State = "Deleting"
	Failed   State = "Failed" // what was asked for last was refused; see Failure
	Lost     State = "Lost"   // its bytes are missing
)

// Volume is a volume.
type Volume struct {
	ID   string `json:"id"`
	Name string `json:"name"` // the CSI name
	Node string `json:"node"`
	Pool string `json:"pool"`

	Size       int64     `json:"size"`
	Used       *int64    `json:"used,omitempty"`       // what it takes of the pool; nil: not known
	Filesystem string    `json:"filesystem,omitempty"` // empty: a raw block device
	Encryption string    `json:"encryption,omitempty"` // of what the pool keeps; empty: it is not encrypted
	Thin       bool      `json:"thin,omitempty"`
	Created    time.Time `json:"created"`

	Claim            *Ref   `json:"claim,omitempty"` // the PersistentVolumeClaim that it was made for
	PersistentVolume string `json:"persistentVolume,omitempty"`
	Pods             []Ref  `json:"pods,omitempty"`      // that use it
	Published        string `json:"published,omitempty"` // the node that may use it
	Source           string `json:"source,omitempty"`    // the ID of what it was copied from
	// Settings are the mutable parameters that are in force: limits, and what its device is set to.
	Settings map[string]string `json:"settings,omitempty"`

	// Awaits is what was asked for and the volume is to have, and what that waits for, for people: replicas.
	Awaits string `json:"awaits,omitempty"`
	// Replicas: its bytes are on several nodes, and Node and Pool are those of one that has all of them; nil: they are on that node alone.
	Replicas *Replicas `json:"replicas,omitempty"`

	// Devices of it, and where they are mounted or bound; only its own machine knows.
	Devices []string `json:"devices,omitempty"`
	Mounts  []string `json:"mounts,omitempty"`

	State    State     `json:"state"`
	Failure  string    `json:"failure,omitempty"`
	Moving   string    `json:"moving,omitempty"` // where it is moved to, or has come from, and how far that is, for people; empty: it does not move
	Progress *Progress `json:"progress,omitempty"`
	Problems []Problem `json:"problems"`
}

// Snapshot is a snapshot of a volume.
type Snapshot struct {
	ID      string    `json:"id"`
	Name    string    `json:"name"`
	Node    string    `json:"node"`
	Pool    string    `json:"pool"`
	Source  string    `json:"source"`          // the ID of the volume
	Group   string    `json:"group,omitempty"` // the ID of the group that it was cut with
	Size    int64     `json:"size"`
	Created time.Time `json:"created"` // when it was cut

	State    State     `json:"state"`
	Failure  string    `json:"failure,omitempty"`
	Moving   string    `json:"moving,omitempty"` // where it is moved to, or has come from, and how far that is, for people; empty: it does not move
	Progress *Progress `json:"progress,omitempty"`
	Problems []Problem `json:"problems"`
}

// Progress of what takes long.
type Progress struct {
	Done  int64 `json:"done"`
	Total int64 `json:"total"`
}
