package volume

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
)

// Elsewhere knows which volumes of other nodes this node uses.
type Elsewhere interface {
	// Has reports whether a volume of another node is this node's to use: it is known to be claimed for this node, or is connected. It asks only the
	// kernel.
	Has(id ID) bool
	// Find is Has for a volume of which nothing is known here: it asks the API server. If it returns true, so does Has. ErrUnavailable if there is no
	// answer.
	Find(ctx context.Context, id ID) (bool, error)
}

// Everywhere are the volumes that a node can use: its own, and those of other nodes that are claimed for it. Calls that use a volume go to the Local that
// has it. Volumes are made and deleted only by the node that has them.
type Everywhere struct {
	*Local
	others     *Local
	elsewhere  Elsewhere
	replicated *Local // volumes with several legs; nil: this node cannot use any
	legs       Elsewhere
}

// NewEverywhere returns the volumes of local and those of others, whose one pool stands for the volumes of other nodes. A pool's name does not tell which
// node has a volume: each node may have a pool of that name.
func NewEverywhere(local, others *Local, elsewhere Elsewhere) *Everywhere {
	return &Everywhere{Local: local, others: others, elsewhere: elsewhere}
}

// Replicate lets the node use volumes with several legs too (docs/replication.md). replicated is over the pool of those. known knows which of them are
// claimed for this node, or have a mirror here.
func (e *Everywhere) Replicate(replicated *Local, known Elsewhere) {
	e.replicated, e.legs = replicated, known
}

// of returns the Local that has the devices of a volume. A volume that has moved may still have devices here by the name of its old home: over a
// connection that has ended, or, if it moved while it was used, in use. All calls go to those until they are renamed. If the pool in their name is not
// open, calls fail; otherwise the volume would get a second device beside the one in use.
func (e *Everywhere) of(ctx context.Context, id ID) *Local {
	if e.isReplicated(ctx, id) {
		return e.replicated
	}
	return e.plain(ctx, id)
}

// plain is of for a leg, or a volume that has no legs.
func (e *Everywhere) plain(ctx context.Context, id ID) *Local {
	if e.elsewhere.Has(id) {
		if home, away, err := e.Seats(ctx, id); err == nil && !away && (home || e.Local.mayBeSeated(id)) {
			return e.Local
		}
		return e.others
	}
	if devices, err := e.others.Attached(ctx, id); err == nil && len(devices) > 0 {
		return e.others
	}
	return e.Local
}

// Get returns a volume. ErrUnavailable also if another node may have it, and that cannot be found out now. ErrPrecondition if its devices here are over a
// connection that has ended: they have to be detached first.
func (e *Everywhere) Get(ctx context.Context, id ID) (Volume, error) {
	if e.isReplicated(ctx, id) {
		return e.replicated.Get(ctx, id)
	}
	v, err := e.getPlain(ctx, id)
	if err == nil && v.ReplicaOf != "" && !e.alone(ctx, id) {
		return e.whole(ctx, v)
	}
	return v, err
}

// whole returns the volume that a leg is of, if it is claimed for this node; else ErrPrecondition. A leg is never used by itself: the other legs would
// lack what is written to it.
func (e *Everywhere) whole(ctx context.Context, leg Volume) (Volume, error) {
	if e.replicated == nil || leg.ReplicaOf != leg.ID.Key {
		return Volume{}, fmt.Errorf("%w: %s is a leg of the replicated volume %s, and is not used by itself", errdefs.ErrPrecondition, leg.ID, leg.ReplicaOf)
	}
	switch there, err := e.legs.Find(ctx, leg.ID); {
	case err != nil:
		return Volume{}, err
	case there:
		return e.replicated.Get(ctx, leg.ID)
	}
	return Volume{}, fmt.Errorf("%w: the replicated volume %s is not claimed for node %s", errdefs.ErrPrecondition, leg.ID, e.Node())
}

// getPlain is Get for a leg, or a volume that has no legs.
func (e *Everywhere) getPlain(ctx context.Context, id ID) (Volume, error) {
	at := e.plain(ctx, id)
	v, err := at.Get(ctx, id)
	if at == e.others && err == nil {
		err = at.dangling(ctx, id)
	}
	if at == e.others || !errors.Is(err, errdefs.ErrNotFound) && !errors.Is(err, errdefs.ErrUnavailable) {
		return v, err
	}
	switch there, failure := e.elsewhere.Find(ctx, id); {
	case failure != nil:
		return Volume{}, failure
	case there:
		return e.others.Get(ctx, id)
	}
	return v, err
}

// Grow: see Local.
func (e *Everywhere) Grow(ctx context.Context, id ID, key Key) (Volume, error) {
	return e.of(ctx, id).Grow(ctx, id, key)
}

// Used: see Local.
func (e *Everywhere) Used(ctx context.Context, id ID) (used int64, known bool, err error) {
	return e.of(ctx, id).Used(ctx, id)
}

// SetTarget: see Local.
func (e *Everywhere) SetTarget(ctx context.Context, id ID, target string) error {
	return e.of(ctx, id).SetTarget(ctx, id, target)
}

// SetFlags: see Local.
func (e *Everywhere) SetFlags(ctx context.Context, id ID, flags string) error {
	return e.of(ctx, id).SetFlags(ctx, id, flags)
}

// Attach: see Local.
func (e *Everywhere) Attach(ctx context.Context, v Volume, key Key) (blockdev.Device, error) {
	at, err := e.settled(ctx, v.ID)
	if err != nil {
		return blockdev.Device{}, err
	}
	return at.Attach(ctx, v, key)
}

// AttachRaw: see Local.
func (e *Everywhere) AttachRaw(ctx context.Context, v Volume, key Key, writable bool) (blockdev.Device, error) {
	at, err := e.settled(ctx, v.ID)
	if err != nil {
		return blockdev.Device{}, err
	}
	return at.AttachRaw(ctx, v, key, writable)
}

// AttachToRead attaches a volume that many nodes read: see Local. If another node has the volume, that node's export takes no writes. raw: the device is
// to be handed out, not mounted.
func (e *Everywhere) AttachToRead(ctx context.Context, v Volume, raw bool) (blockdev.Device, error) {
	switch at := e.of(ctx, v.ID); {
	case at != e.others:
		return at.AttachToRead(ctx, v, raw)
	case raw:
		return at.AttachRaw(ctx, v, nil, false)
	default:
		return at.Attach(ctx, v, nil)
	}
}

// Format: see Local.
func (e *Everywhere) Format(ctx context.Context, v *Volume, device blockdev.Device, want filesystem.Type, flags string) (made bool, err error) {
	return e.of(ctx, v.ID).Format(ctx, v, device, want, flags)
}

// Uses returns the volumes of other nodes, and those with several legs, that have devices here, as the kernel says. It leaves out what the kernel does not
// tell.
func (e *Everywhere) Uses(ctx context.Context) (uses []overview.Use) {
	for _, l := range []*Local{e.replicated, e.others} { // of a volume with replicas the other node's leg has the same key
		if l == nil {
			continue
		}
		refs, err := l.stacks.Volumes(ctx, l.pools[0])
		if err != nil {
			continue
		}
		for _, ref := range refs {
			if slices.ContainsFunc(uses, func(u overview.Use) bool { return u.Key == ref.Key }) {
				continue
			}
			u := overview.Use{Key: ref.Key}
			if u.Devices, u.Mounts = l.where(ctx, l.stacks.Of(l.pools[0], ref)); len(u.Devices) > 0 {
				uses = append(uses, u)
			}
		}
	}
	return uses
}

// Marks: see Local. If another node has the leg, that node is asked.
func (e *Everywhere) Marks(ctx context.Context, id ID, since uint32) ([]blockdev.Extent, error) {
	return e.plain(ctx, id).Marks(ctx, id, since)
}

// BeginEra: see Local. If another node has the leg, that node is asked.
func (e *Everywhere) BeginEra(ctx context.Context, id ID) (uint32, error) {
	return e.plain(ctx, id).BeginEra(ctx, id)
}

// Attached: see Local.
func (e *Everywhere) Attached(ctx context.Context, id ID) ([]blockdev.Device, error) {
	return e.of(ctx, id).Attached(ctx, id)
}

// Detach: see Local. It also detaches what else is here of the volume: the mirror, and the copy of one that was moving from here.
func (e *Everywhere) Detach(ctx context.Context, id ID) error {
	at := e.of(ctx, id)
	err := at.Detach(ctx, id)
	switch {
	case err != nil:
	case at == e.Local: // the new leg of a volume that was moving from here
		err = e.others.Detach(ctx, id)
	case at == e.replicated:
		err = e.lingers(ctx, id)
	}
	return err
}

// Health: see Store.
func (e *Everywhere) Health(ctx context.Context, id ID) ([]blockdev.Problem, error) {
	return e.of(ctx, id).Health(ctx, id)
}

// PoolHealth returns what is wrong with the pools of this node, and with the way to those of other nodes.
func (e *Everywhere) PoolHealth(ctx context.Context) []blockdev.Problem {
	return append(e.Local.PoolHealth(ctx), e.others.PoolHealth(ctx)...)
}
