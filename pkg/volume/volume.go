// Package volume is the domain: what a volume, a snapshot and a group snapshot are,
// and the Store that takes them through their lives. Local is the store of one
// machine, over its pools.
package volume

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
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
	GetSnapshot(ctx context.Context, id ID) (Snapshot, error)
	// ListSnapshots is like List; a source restricts it to snapshots of that volume.
	ListSnapshots(ctx context.Context, source ID, after ID, limit int) ([]Snapshot, error)
	// CreateGroup cuts snapshots of several volumes at one point in time: all or none.
	CreateGroup(ctx context.Context, name string, sources []ID) (Group, error)
	DeleteGroup(ctx context.Context, id GroupID) error
	GetGroup(ctx context.Context, id GroupID) (Group, error)
	// Allocated calls yield with the ranges of a snapshot, from an offset on, that were
	// ever written, in order.
	Allocated(ctx context.Context, id ID, from int64, yield func(blockdev.Extent) error) error
	// Changed calls yield with the ranges in which target differs from base.
	Changed(ctx context.Context, base, target ID, from int64, yield func(blockdev.Extent) error) error

	// NodesIn returns the nodes that have all of some labels (of Kubernetes: a zone, a region);
	// ErrNoSpace if there is none, ErrInvalid if the store knows of no labels.
	NodesIn(ctx context.Context, labels map[string]string) ([]string, error)
	// Capacity of a pool on a node; an empty pool is the default one.
	Capacity(ctx context.Context, pool, node string) (blockdev.Capacity, error)
}

// Spec says what volume to create.
type Spec struct {
	Name string
	Pool string // empty: the source's, or else the default
	Size Range
	// Provisioning: AnyProvisioning takes the pool's own way.
	Provisioning blockdev.Provisioning
	// Source to copy: a volume or a snapshot; the zero ID for an empty volume.
	Source ID
	// Filesystem that it will carry; empty for raw block.
	Filesystem filesystem.Type
	Mutable    map[string]string
	// Nodes that it has to be usable on, the best first; empty: any.
	Nodes []string
	// Ephemeral: it belongs to the pod whose volume is published at this path, and goes
	// with it.
	Ephemeral string
	// For is who asked for it, as far as the CO says; it makes no difference to the volume.
	For Requester
}

// Requester is whom the CO made a volume for: of Kubernetes, the namespace and the name of a
// PersistentVolumeClaim, and the name of the PersistentVolume. Each may be empty: unknown.
// It is for people, and for those who look for the volume's objects when these are lost.
type Requester struct{ Namespace, Name, PersistentVolume string }

// Volume is a volume as it is.
type Volume struct {
	ID         ID
	Name       string
	Size       int64 // bytes
	Thin       bool
	Source     ID
	Filesystem filesystem.Type
	Format     Format
	Mutable    map[string]string
	Claim      Claim // of no node if it is not claimed
	Node       string
	Ephemeral  string
	// Target is where the node published it last, if that was to be its only target.
	Target string
	// Flags stand for the mount flags that it was staged with last (pkg/node); empty: not known.
	Flags   string
	For     Requester
	Created time.Time
}

// Claim fences a volume to a node.
type Claim struct {
	Node     string
	ReadOnly bool
	// Mode is the CSI access mode, and whether it is for block or mount access.
	Mode string
}

// Format is what the record says about the bytes of a volume. Only a blank volume
// is ever formatted (pkg/node).
type Format struct {
	State FormatState
	Type  filesystem.Type // of Formatting and Formatted
}

// FormatState is how far a volume is from blank.
type FormatState string

// The states: a new volume is Blank; Formatting until mkfs is known to have ended;
// then Formatted. Raw volumes were handed out as block devices, so their bytes are
// the user's, whatever they look like.
const (
	Blank      FormatState = ""
	Formatting FormatState = "formatting"
	Formatted  FormatState = "formatted"
	Raw        FormatState = "raw"
)

// Snapshot is a snapshot as it is: ready to use.
type Snapshot struct {
	ID      ID
	Name    string
	Source  ID
	Size    int64     // bytes; also the smallest volume that it can be restored to
	Created time.Time // the moment of the cut
	Group   GroupID   // zero if it is its own
	Node    string
}

// Group is a group snapshot as it is: complete.
type Group struct {
	ID        GroupID
	Created   time.Time
	Snapshots []Snapshot
}

// NewGroup makes a group of its members: in the order of their sources, and as old as the
// first that was cut (the writes to all were held back then).
func NewGroup(id GroupID, members []Snapshot) Group {
	group := Group{ID: id, Snapshots: slices.Clone(members)}
	slices.SortFunc(group.Snapshots, func(a, b Snapshot) int { return strings.Compare(a.Source.String(), b.Source.String()) })
	for _, m := range members {
		if group.Created.IsZero() || m.Created.Before(group.Created) {
			group.Created = m.Created
		}
	}
	return group
}

// GroupSources returns the sources of a group in their order; ErrInvalid if there are none,
// or one is there twice.
func GroupSources(sources []ID) ([]ID, error) {
	sorted := slices.Clone(sources)
	slices.SortFunc(sorted, func(a, b ID) int { return strings.Compare(a.String(), b.String()) })
	if len(sorted) == 0 || len(slices.Compact(slices.Clone(sorted))) != len(sorted) {
		return nil, fmt.Errorf("%w: name each source volume once", errdefs.ErrInvalid)
	}
	return sorted, nil
}

// Range of sizes in bytes; 0 means not limited on that side.
type Range struct{ Required, Limit int64 }

// DefaultSize is what a volume gets that nobody gave a size, in bytes.
const DefaultSize = 1 << 30

// Choose returns the size for a range: the smallest multiple of step (bytes) that is at
// least the required size and the floor. A range that requires nothing gets DefaultSize,
// or its limit. ErrOutOfRange if there is no such size.
func (r Range) Choose(floor, step int64) (int64, error) {
	if r.Required < 0 || r.Limit < 0 || (r.Limit > 0 && r.Required > r.Limit) {
		return 0, fmt.Errorf("%w: required %d, limit %d", errdefs.ErrInvalid, r.Required, r.Limit)
	}
	size := r.Required
	if size == 0 {
		size = max(DefaultSize, floor)
		if r.Limit > 0 {
			size = min(size, r.Limit/step*step)
		}
	}
	size = max(size, floor)
	if size > blockdev.MaxSize/step*step {
		return 0, fmt.Errorf("%w: %d bytes; %d is the most", errdefs.ErrOutOfRange, size, blockdev.MaxSize/step*step)
	}
	size = (size + step - 1) / step * step
	if r.Limit > 0 && size > r.Limit {
		return 0, fmt.Errorf("%w: no multiple of %d bytes from %d up to the limit of %d", errdefs.ErrOutOfRange, step, max(r.Required, floor), r.Limit)
	}
	return size, nil
}

// includes reports whether an existing size serves a range.
func (r Range) includes(size int64) bool {
	return size >= r.Required && (r.Limit == 0 || size <= r.Limit)
}

// Mutable parameters, and the settings of the block queue that they are.
var mutableSettings = map[string]struct {
	setting string
	check   func(string) error
}{
	"readAheadKiB": {"read_ahead_kb", func(v string) error {
		n, err := strconv.ParseUint(v, 10, 32)
		if err != nil || n > 65536 || v != strconv.FormatUint(n, 10) || n%4 != 0 {
			return fmt.Errorf("%w: readAheadKiB=%q is not a multiple of 4 from 0 to 65536", errdefs.ErrInvalid, v)
		}
		return nil
	}},
	"ioScheduler": {"scheduler", func(v string) error {
		if !slices.Contains([]string{"none", "mq-deadline", "kyber", "bfq"}, v) {
			return fmt.Errorf("%w: ioScheduler=%q; none, mq-deadline, kyber and bfq are known", errdefs.ErrInvalid, v)
		}
		return nil
	}},
}

// CheckMutable returns ErrInvalid for mutable parameters that are unknown or out of
// range.
func CheckMutable(mutable map[string]string) error {
	for key, value := range mutable {
		parameter, known := mutableSettings[key]
		if !known {
			return fmt.Errorf("%w: unknown mutable parameter %q; readAheadKiB and ioScheduler are known", errdefs.ErrInvalid, key)
		}
		if err := parameter.check(value); err != nil {
			return err
		}
	}
	return nil
}

// queueSettings are the mutable parameters as settings of the block queue.
func queueSettings(mutable map[string]string) map[string]string {
	settings := map[string]string{}
	for key, value := range mutable {
		settings[mutableSettings[key].setting] = value
	}
	return settings
}

// Labels that the record of a volume or snapshot carries for this package.
const (
	labelFilesystem = "fs"
	labelFormat     = "format" // STATE or STATE:TYPE
	labelClaimNode  = "claim.node"
	labelClaimMode  = "claim.mode"
	labelClaimRO    = "claim.readonly"
	labelEphemeral  = "ephemeral"
	labelTarget     = "target"
	labelFlags      = "flags"
	labelFrozen     = "frozen" // by this driver, for a cut
	labelGroup      = "group"
	labelGroupSize  = "group.size"
	labelGroupWhole = "group.whole" // all of the group was cut: a member that is missing was lost
	labelMutable    = "mutable."    // + key
	labelNamespace  = "pvc.namespace"
	labelClaim      = "pvc.name"
	labelPV         = "pv.name"
)

func setLabel(labels map[string]string, key, value string) {
	if value == "" {
		delete(labels, key)
	} else {
		labels[key] = value
	}
}

func (f Format) label() string {
	if f.Type == "" {
		return string(f.State)
	}
	return string(f.State) + ":" + string(f.Type)
}

func parseFormat(label string) Format {
	state, fs, _ := strings.Cut(label, ":")
	return Format{FormatState(state), filesystem.Type(fs)}
}

// fromRecord reads a volume out of its record.
func fromRecord(pool, node string, r blockdev.Record) Volume {
	v := Volume{ID: ID{r.Kind, pool, r.Key}, Name: r.Name, Size: r.Size, Thin: r.Thin, Node: node, Created: r.Created,
		Filesystem: filesystem.Type(r.Labels[labelFilesystem]), Format: parseFormat(r.Labels[labelFormat]),
		Claim:     Claim{r.Labels[labelClaimNode], r.Labels[labelClaimRO] != "", r.Labels[labelClaimMode]},
		Ephemeral: r.Labels[labelEphemeral], Target: r.Labels[labelTarget], Flags: r.Labels[labelFlags], Mutable: map[string]string{},
		For: Requester{r.Labels[labelNamespace], r.Labels[labelClaim], r.Labels[labelPV]}}
	if r.Origin != (blockdev.Ref{}) {
		v.Source = ID{r.Origin.Kind, pool, r.Origin.Key}
	}
	for key, value := range r.Labels {
		if name, ok := strings.CutPrefix(key, labelMutable); ok {
			v.Mutable[name] = value
		}
	}
	return v
}

func snapshotFromRecord(pool, node string, r blockdev.Record) Snapshot {
	return Snapshot{ID: ID{r.Kind, pool, r.Key}, Name: r.Name, Source: ID{r.Origin.Kind, pool, r.Origin.Key},
		Size: r.Size, Created: r.Created, Group: GroupID{r.Labels[labelGroup]}, Node: node}
}

// labels of a new volume.
func (s Spec) labels() map[string]string {
	labels := map[string]string{}
	setLabel(labels, labelFilesystem, string(s.Filesystem))
	setLabel(labels, labelEphemeral, s.Ephemeral)
	setLabel(labels, labelNamespace, s.For.Namespace)
	setLabel(labels, labelClaim, s.For.Name)
	setLabel(labels, labelPV, s.For.PersistentVolume)
	for key, value := range s.Mutable {
		labels[labelMutable+key] = value
	}
	return labels
}

// Check compares an existing volume with what was asked for; ErrExists if it is
// another one.
func (s Spec) Check(v Volume) error {
	differs := func(what string, have, want any) error {
		return fmt.Errorf("%w: volume %q (%s) has %s %v, not %v", errdefs.ErrExists, s.Name, v.ID, what, have, want)
	}
	switch {
	case v.Name != s.Name:
		return differs("name", v.Name, s.Name)
	case s.Pool != "" && v.ID.Pool != s.Pool:
		return differs("pool", v.ID.Pool, s.Pool)
	case !s.Size.includes(v.Size):
		return differs("size", v.Size, s.Size)
	case s.Provisioning != blockdev.AnyProvisioning && blockdev.ProvisioningOf(v.Thin) != s.Provisioning:
		return differs("provisioning", blockdev.ProvisioningOf(v.Thin), s.Provisioning)
	case v.Source != s.Source:
		return differs("source", v.Source, s.Source)
	case v.Filesystem != s.Filesystem:
		return differs("filesystem", v.Filesystem, s.Filesystem)
	case v.Ephemeral != s.Ephemeral:
		return differs("pod", v.Ephemeral, s.Ephemeral)
	}
	return nil
}

// CheckSource returns ErrInvalid if the volume cannot be a copy of what carries a filesystem
// (empty: raw, or not known): a copy carries what its source does.
func (s Spec) CheckSource(carried filesystem.Type) error {
	if s.Filesystem == "" || carried == "" || s.Filesystem == carried {
		return nil
	}
	return fmt.Errorf("%w: source %s carries %s, so its copy %q cannot be %s", errdefs.ErrInvalid, s.Source, carried, s.Name, s.Filesystem)
}

// merged returns the mutable parameters with changes made.
func merged(mutable, changes map[string]string) map[string]string {
	all := maps.Clone(mutable)
	maps.Copy(all, changes)
	return all
}
