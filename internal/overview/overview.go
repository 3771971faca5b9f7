// Package overview describes nodes, their pools, volumes and snapshots, and their problems, as operators see them. The page, the commands of driver and the
// plugin of kubectl show it; they find out nothing else.
package overview

import (
	"slices"
	"time"
)

// Overview is everything at one time. All sizes are in bytes, all times in UTC. Lists are never nil, and sorted: problems by severity (the worst first), then
// by subject; everything else by node, pool and name (Finish).
type Overview struct {
	Taken   time.Time `json:"taken"`
	Cluster bool      `json:"cluster"` // true: of a cluster; false: of one machine
	Driver  string    `json:"driver"`  // name of the driver
	Version string    `json:"version"` // of the program that made this
	// Missing says what is left out, and why, as "pods: ..." if the user may not list pods.
	Missing []string `json:"missing,omitempty"`
	// Blind: the state of nodes or agents could not be read, or not fully. Then that no problem of them is listed does not mean that there is none.
	Blind bool `json:"blind,omitempty"`

	Problems  []Problem  `json:"problems"` // of everything below
	Nodes     []Node     `json:"nodes"`
	Volumes   []Volume   `json:"volumes"`
	Snapshots []Snapshot `json:"snapshots"`
	Classes   []Class    `json:"classes,omitempty"` // StorageClasses of the driver; only of a cluster
	Uses      []Use      `json:"uses,omitempty"`    // only of one machine; each volume once
}

// Use is a volume that a machine uses and whose bytes are not in its own pools alone: it is on another node, or on several.
type Use struct {
	Key     string   `json:"key"` // last part of its ID
	Devices []string `json:"devices,omitempty"`
	Mounts  []string `json:"mounts,omitempty"`
}

// Class is a StorageClass.
type Class struct {
	Name string `json:"name"`
	Pool string `json:"pool,omitempty"` // a set of pools (poolset.Set); empty: each node's default one
	// Nodes are the nodes that its allowedTopologies allow, with access=any without those that are in no network, with encryption without those that cannot
	// encrypt; nil: all nodes.
	Nodes []string `json:"nodes"`
	// Header is how many bytes a pool keeps of each volume besides its size, as it is encrypted.
	Header int64 `json:"header,omitempty"`
	// Replicas is how many replicas each volume has; 0: its bytes are on one node.
	Replicas int `json:"replicas,omitempty"`
	// Sites are the sites of nodes, by their names; only with replicas. Nodes that can have no replica are left out.
	Sites map[string]Site `json:"sites,omitempty"`
}

// Site is where a replica can be. All replicas of a volume are in one network, and no two in one site.
type Site struct {
	Network string `json:"network"`
	Name    string `json:"name"` // a node, or the value of the label that keeps replicas apart
}

// Allows reports whether volumes of the class may be on a node.
func (c *Class) Allows(node string) bool { return c.Nodes == nil || slices.Contains(c.Nodes, node) }

// Problem is something that is wrong and that a person should act on.
type Problem struct {
	Severity Severity `json:"severity"`
	Reason   string   `json:"reason"`  // one CamelCase word
	Message  string   `json:"message"` // what is wrong and what to do, without the name of the subject
	Subject  Subject  `json:"subject"`
	Runbook  string   `json:"runbook"` // address of its runbook
}

// Severity of a problem.
type Severity string

// The severities, the worst first. The first three are those of CSI (VolumeHealth). Warning is for what becomes worse if nobody acts.
const (
	DataLoss     Severity = "DataLoss"
	Inaccessible Severity = "Inaccessible"
	Degraded     Severity = "Degraded"
	Warning      Severity = "Warning"
)

// Subject is what a problem is about.
type Subject struct {
	Kind string `json:"kind"` // Node, Pool, Volume or Snapshot
	Name string `json:"name"` // of a pool NODE.POOL, of a volume or snapshot its ID
}

// Ref names a namespaced object of Kubernetes.
type Ref struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
}

// Node is a node that has pools, or had some.
type Node struct {
	Name     string    `json:"name"`
	Ready    bool      `json:"ready"` // the driver of the node answers, as far as is known
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

	Total     int64 `json:"total"`     // size of all volumes and snapshots that it may have
	Promised  int64 `json:"promised"`  // size of those that it has
	Available int64 `json:"available"` // size of those that it may have besides
	Used      int64 `json:"used"`      // bytes of the disk that these take; 0: not known
	MaxVolume int64 `json:"maxVolume"` // size of the largest volume that can be made now

	Volumes    int       `json:"volumes"`
	Snapshots  int       `json:"snapshots"`
	Problems   []Problem `json:"problems"`
	Strays     []Stray   `json:"strays"`     // volumes and snapshots without an object; the first hundred
	StrayCount int       `json:"strayCount"` // how many there are
}

// Stray is a volume or snapshot in a pool that has no object.
type Stray struct {
	ID   string `json:"id"`
	Name string `json:"name,omitempty"`
	Size int64  `json:"size"`
	// Claim and PersistentVolume are those that it was made for, if its record has them.
	Claim            *Ref   `json:"claim,omitempty"`
	PersistentVolume string `json:"persistentVolume,omitempty"`
}

// State of a volume or a snapshot.
type State string

// The states.
const (
	Making   State = "Making" // it is being made, copied or zeroed
	Ready    State = "Ready"
	Deleting State = "Deleting"
	Failed   State = "Failed" // the last change was refused; see Failure
	Lost     State = "Lost"   // its bytes are missing
)

// Volume is a volume.
type Volume struct {
	ID   string `json:"id"`
	Name string `json:"name"` // its CSI name
	Node string `json:"node"`
	Pool string `json:"pool"`

	Size       int64     `json:"size"`
	Used       *int64    `json:"used,omitempty"`       // bytes that it takes of the pool; nil: not known
	Filesystem string    `json:"filesystem,omitempty"` // empty: a raw block device
	Encryption string    `json:"encryption,omitempty"` // scheme of its bytes in the pool; empty: not encrypted
	Thin       bool      `json:"thin,omitempty"`
	Created    time.Time `json:"created"`

	Claim            *Ref   `json:"claim,omitempty"` // the PersistentVolumeClaim that it was made for
	PersistentVolume string `json:"persistentVolume,omitempty"`
	Pods             []Ref  `json:"pods,omitempty"`      // the pods that use it
	Published        string `json:"published,omitempty"` // the node that it is published to
	Source           string `json:"source,omitempty"`    // ID of the volume or snapshot that it was copied from
	// Settings are the mutable parameters in force: limits, and settings of its device.
	Settings map[string]string `json:"settings,omitempty"`

	// Awaits says, for people, which replicas it is to get, and what that waits for; empty: none.
	Awaits string `json:"awaits,omitempty"`
	// Replicas is set if its bytes are on several nodes. Then Node and Pool are those of a current replica, if there is one, else of any.
	Replicas *Replicas `json:"replicas,omitempty"`

	// Devices of the volume, and where they are mounted or bound. Only its own machine knows them.
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
	Source  string    `json:"source"`          // ID of its volume
	Group   string    `json:"group,omitempty"` // ID of the group snapshot that it is part of; empty: none
	Size    int64     `json:"size"`
	Created time.Time `json:"created"` // its point in time

	State    State     `json:"state"`
	Failure  string    `json:"failure,omitempty"`
	Moving   string    `json:"moving,omitempty"` // where it is moved to, or has come from, and how far that is, for people; empty: it does not move
	Progress *Progress `json:"progress,omitempty"`
	Problems []Problem `json:"problems"`
}

// Progress is the progress of a copy, in bytes.
type Progress struct {
	Done  int64 `json:"done"`
	Total int64 `json:"total"`
}
