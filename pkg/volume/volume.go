// Package volume defines volumes, snapshots and group snapshots, and the Store that makes, changes and deletes them. Local is the store of one node, over its
// pools; pkg/cluster/store has that of a cluster.
package volume

import (
	"context"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
)

// Store keeps volumes and their snapshots, on one node or in a cluster.
//
// Every call is idempotent: a retry finds what an earlier try did, and to remove what is not there is success. The caller serialises calls for the same
// volume, snapshot or group, also for one that is a source; by its name until it has an ID. An error wraps one of the sentinels of pkg/errdefs, or a context
// error. Only after a context error the work may still go on.
type Store interface {
	// Create makes a volume, or returns the one of that name. ErrExists if that differs from the spec (Spec.Check); ErrNotFound if the source is gone;
	// ErrOutOfRange for a size that can never be served; ErrNoSpace if there is no room for it now; ErrInvalid for a spec that nobody can serve.
	Create(ctx context.Context, spec Spec) (Volume, error)
	// Delete removes a volume. ErrInUse while it is claimed or used.
	Delete(ctx context.Context, id ID) error
	// Get returns a volume. ErrNotFound if there is none, or it is not finished.
	Get(ctx context.Context, id ID) (Volume, error)
	// List returns up to limit (0: all) finished volumes in the order of their IDs (by pool, then by key), from the one after the given ID on, whether that is still
	// there or not.
	List(ctx context.Context, after ID, limit int) ([]Volume, error)
	// Claim gives a volume to a node, for its use (ControllerPublishVolume). Beside it there are at most claims of many readers (Claim.Many), if it is one
	// itself. ErrInUse if another node has a claim that does not allow this one; ErrExists if the node itself has one that differs; ErrPrecondition if the
	// node cannot use the volume; ErrNotFound if there is no such node; ErrLimit if the node has as many volumes as it can. It returns the claim with its
	// generation.
	Claim(ctx context.Context, id ID, claim Claim) (Claim, error)
	// Release ends the claim of a node, or with an empty node all claims, and the exports for them.
	Release(ctx context.Context, id ID, node string) error
	// Expand grows a volume to a size within the range. One that is large enough stays as it is. ErrOutOfRange if the volume is larger than the limit, or no
	// size within it is possible; ErrNoSpace if there is no room for it now.
	Expand(ctx context.Context, id ID, size Range) (Volume, error)
	// Modify sets mutable parameters (MutableParameters). Those that are not given stay. ErrInvalid for values that are not known, or that the node cannot set.
	Modify(ctx context.Context, id ID, mutable map[string]string) error
	// Health returns what is wrong with a volume; nothing if no problem is known.
	Health(ctx context.Context, id ID) ([]blockdev.Problem, error)

	// CreateSnapshot makes a snapshot of a volume as it is at one point in time, also while it is in use, or returns the one of that name. ErrExists if that is
	// of another volume.
	CreateSnapshot(ctx context.Context, name string, source ID) (Snapshot, error)
	// DeleteSnapshot removes a snapshot. ErrInvalid if it is part of a group.
	DeleteSnapshot(ctx context.Context, id ID) error
	// GetSnapshot returns a snapshot. ErrNotFound if there is none, or it is of a group that is not complete.
	GetSnapshot(ctx context.Context, id ID) (Snapshot, error)
	// ListSnapshots is List for snapshots; with a source, for those of that volume.
	ListSnapshots(ctx context.Context, source ID, after ID, limit int) ([]Snapshot, error)
	// CreateGroup makes snapshots of several volumes at one point in time, all or none, or returns the group of that name. ErrExists if that is of other
	// volumes.
	CreateGroup(ctx context.Context, name string, sources []ID) (Group, error)
	// DeleteGroup removes all snapshots of a group.
	DeleteGroup(ctx context.Context, id GroupID) error
	// GetGroup returns a group. ErrNotFound unless all of its snapshots are there.
	GetGroup(ctx context.Context, id GroupID) (Group, error)

	// NodesIn returns the nodes that have all of some labels, as for a zone or region of Kubernetes. ErrNoSpace if there is none; ErrInvalid if the store knows
	// of no labels.
	NodesIn(ctx context.Context, labels map[string]string) ([]string, error)
	// Capacity returns the capacity of the pools of a set (poolset.Set) together, on a node, or with an empty node on all nodes. The empty set is each node's
	// default pool. Nodes that do not have the scheme do not count; MaxVolume is that for volumes with it.
	Capacity(ctx context.Context, pools string, scheme Scheme, node string) (blockdev.Capacity, error)
}

// Reacher is a Store of nodes that can use each other's volumes over a network (AccessAny).
type Reacher interface {
	Store
	// Networks returns the network that each node is in, by the names of nodes. Nodes in the same network reach each other. Nodes in none are left out.
	Networks(ctx context.Context) (map[string]string, error)
	// Places returns the place of each node, by the names of nodes. No two replicas of a volume are in one place. The place is the value of a label of the node;
	// if no label is given, it is the node itself. Nodes that get no replica, because they have no such label or are cordoned, are left out.
	Places(ctx context.Context, label string) (map[string]string, error)
}

// Differ is a Store that can tell which ranges of its snapshots hold data, because it is on their node. Ranges are in bytes, come in order, and end after the
// offset from. An error of yield ends the call, which returns it. ErrUnsupported if the pool cannot tell; ErrBusy while the snapshot is being deleted.
type Differ interface {
	Store
	// Allocated calls yield with the ranges of a snapshot that were ever written.
	Allocated(ctx context.Context, id ID, from int64, yield func(blockdev.Extent) error) error
	// Changed calls yield with the ranges in which target differs from base. ErrNotFound also if base is of another volume (Snapshot.CheckBase); ErrInvalid if it
	// was made after target.
	Changed(ctx context.Context, base, target ID, from int64, yield func(blockdev.Extent) error) error
}

// Volume is a volume with its present state.
type Volume struct {
	ID ID
	// Pool that the volume is in, on its node. The ID names another one if the volume has moved.
	Pool       string
	Name       string
	Size       int64 // bytes
	Thin       bool
	Source     ID
	Filesystem filesystem.Type
	Format     Format
	Encryption Encryption
	Header     Header // of an encrypted volume
	separate   bool   // the filesystem behind the header may still have the identity of that of its source
	Access     Access
	// HomeTimeout is how long I/O on another node waits for a home that does not answer, before it fails; 0: for ever.
	HomeTimeout time.Duration
	// Replicas is how many legs the volume is to have (docs/replication.md); 0: it has none, and is on one node.
	Replicas int
	// ReplicaOf is the key of the volume that this one is a leg of (docs/replication.md); empty: it is no leg.
	ReplicaOf string
	Mutable   map[string]string
	Claim     Claim // zero if it is not claimed, or has Readers
	Exported  Grant // zero if it is not exported to a node for writing
	// Readers are the nodes that have claims of many readers (Claim.Many), as the cluster says.
	Readers []string
	// Read: its record says that many nodes read it, of which this one may be one.
	Read bool
	// Sealed: it is about to move to another node, or has moved (Local.Seal, Local.SealFor).
	Sealed bool
	// Kept: the seal is that of KeepLeftover.
	Kept bool
	// Left is the node to which it has moved (Local.Left); empty if it has not, as far as its record says.
	Left string
	// Stale: this is the last known state, as the node that has the volume does not answer now.
	Stale bool
	Node  string // where it is; of a Local its node, also if the volume is another node's
	// Ephemeral: see Spec.
	Ephemeral string
	// Target is the path at which its node last published it, if no other path is allowed; empty: any path is.
	Target string
	// Flags is a digest of the mount flags with which it was last staged (pkg/node); empty: not known.
	Flags string
	For   Requester
	// Object is the UID of the object for which its node has made it, in a cluster. Empty: not known, as it has moved, or an older driver has made it.
	Object  string
	Created time.Time
}
