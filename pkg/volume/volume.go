// Package volume is the domain: what a volume, a snapshot and a group snapshot are,
// and the Store that takes them through their lives. Local is the store of one
// machine, over its pools.
package volume

import (
	"context"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
)

// Store keeps volumes and their snapshots, wherever they are.
//
// Every call is idempotent: a retry finds what an earlier try did, and removing
// what is not there is success. The caller serialises calls for the same volume,
// snapshot or group (by name until there is an ID, and as a source too). An error
// wraps one of the sentinels of pkg/errdefs, or a context error, which alone mean
// that the work may still be going on.
type Store interface {
	// Create makes a volume, or returns the one of that name. ErrExists if it differs
	// from the spec; ErrNotFound if its source is gone; ErrOutOfRange or ErrNoSpace if
	// the size cannot be had ever, or now.
	Create(ctx context.Context, spec Spec) (Volume, error)
	// Delete removes a volume; ErrInUse while it is claimed or attached.
	Delete(ctx context.Context, id ID) error
	// Get returns a volume; ErrNotFound if there is none.
	Get(ctx context.Context, id ID) (Volume, error)
	// List returns up to limit (0: all) volumes in the order of their IDs, from the one
	// after the given ID on.
	List(ctx context.Context, after ID, limit int) ([]Volume, error)
	// Claim fences a volume to one node. ErrInUse if another node holds it, ErrExists
	// if this one does in another way, ErrLimit if the node has all it can.
	Claim(ctx context.Context, id ID, claim Claim) error
	// Release gives up the claim of a node, or with an empty node any claim.
	Release(ctx context.Context, id ID, node string) error
	// Expand grows a volume to within the range.
	Expand(ctx context.Context, id ID, size Range) (Volume, error)
	// Modify sets mutable parameters; keys that are not given stay.
	Modify(ctx context.Context, id ID, mutable map[string]string) error
	// Health of a volume; empty means that nothing is known to be wrong.
	Health(ctx context.Context, id ID) ([]blockdev.Problem, error)

	// CreateSnapshot cuts a snapshot: a point in time, also of a mounted volume.
	CreateSnapshot(ctx context.Context, name string, source ID) (Snapshot, error)
	// DeleteSnapshot removes a snapshot; ErrInvalid if it is part of a group.
	DeleteSnapshot(ctx context.Context, id ID) error
	// GetSnapshot returns a snapshot; ErrNotFound if there is none, or if it is of a group that is not complete.
	GetSnapshot(ctx context.Context, id ID) (Snapshot, error)
	// ListSnapshots is like List; a source restricts it to snapshots of that volume.
	ListSnapshots(ctx context.Context, source ID, after ID, limit int) ([]Snapshot, error)
	// CreateGroup cuts snapshots of several volumes at one point in time: all or none.
	CreateGroup(ctx context.Context, name string, sources []ID) (Group, error)
	// DeleteGroup removes all snapshots of a group.
	DeleteGroup(ctx context.Context, id GroupID) error
	// GetGroup returns a group; ErrNotFound unless all of its snapshots are there.
	GetGroup(ctx context.Context, id GroupID) (Group, error)

	// NodesIn returns the nodes that have all of some labels (of Kubernetes: a zone, a region);
	// ErrNoSpace if there is none, ErrInvalid if the store knows of no labels.
	NodesIn(ctx context.Context, labels map[string]string) ([]string, error)
	// Capacity of the pools of a set (poolset.Set) on a node together, or with no node on all, for volumes that are kept by a scheme; the empty
	// set is the default pool.
	Capacity(ctx context.Context, pools string, scheme Scheme, node string) (blockdev.Capacity, error)
}

// Reacher is a Store of nodes that reach each other, and so use each other's volumes (AccessAny).
type Reacher interface {
	Store
	// Networks are the names of the networks in which nodes reach each other, by the names of the nodes; those that are in none are not there.
	Networks(ctx context.Context) (map[string]string, error)
	// Places are where replicas of one volume are apart, by the names of the nodes: the values of a label of theirs, or without one the nodes themselves. Nodes that may get no replica, as they have no such label or are cordoned,
	// are not there.
	Places(ctx context.Context, label string) (map[string]string, error)
}

// Differ is a Store that knows the bytes of its snapshots, as one that is on their node does.
type Differ interface {
	Store
	// Allocated calls yield with the ranges of a snapshot, from an offset on, that were
	// ever written, in order.
	Allocated(ctx context.Context, id ID, from int64, yield func(blockdev.Extent) error) error
	// Changed calls yield with the ranges in which target differs from base.
	Changed(ctx context.Context, base, target ID, from int64, yield func(blockdev.Extent) error) error
}

// Volume is a volume as it is.
type Volume struct {
	ID ID
	// Pool of the node where it is. Its ID may name another one.
	Pool       string
	Name       string
	Size       int64 // bytes
	Thin       bool
	Source     ID
	Filesystem filesystem.Type
	Format     Format
	Encryption Encryption
	Header     Header // of an encrypted volume
	separate   bool   // behind its header there may be the identity of what it is a copy of
	Access     Access
	// HomeTimeout is how long what another node writes and reads waits for a home that is away; 0: for ever.
	HomeTimeout time.Duration
	// Replicas is how many legs it is to have (docs/replication.md); 0: it is one volume, on one node.
	Replicas int
	// ReplicaOf is the key of the volume that it is a leg of (docs/replication.md); empty: it is one of its own.
	ReplicaOf string
	Mutable   map[string]string
	Claim     Claim // of no node if it is not claimed
	Exported  Grant // to no node if it is not exported
	// Readers are the nodes whose claims are those of many (Claim.Many); while there are any, Claim is of none.
	Readers []string
	// Read: many read it on this node, or from here.
	Read bool
	// Sealed: its bytes do not change, as it is about to move to another node, or has moved.
	Sealed bool
	// Kept: it is sealed by KeepLeftover.
	Kept bool
	// Left is the node that it has moved to from here: see Local.Left. Empty: it has not, as far as this node knows.
	Left string
	// Stale: this is as it was last, as the node that has it does not answer now.
	Stale     bool
	Node      string
	Ephemeral string
	// Target is where the node published it last, if that was to be its only target.
	Target string
	// Flags stand for the mount flags that it was staged with last (pkg/node); empty: not known.
	Flags   string
	For     Requester
	Created time.Time
}
