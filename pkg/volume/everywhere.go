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

// Elsewhere knows which volumes of other nodes this one uses.
type Elsewhere interface {
	// Has reports whether a volume is another node's and this one's to use: it is claimed for it, as far as that is known, or connected. It asks
	// nobody but the kernel.
	Has(id ID) bool
	// Find is Has for a volume of which nothing is known here: it asks those who know, and if it finds it, Has does. ErrUnavailable if they do not answer.
	Find(ctx context.Context, id ID) (bool, error)
}

// Everywhere are the volumes that a node can use: its own, and those of other nodes that are claimed for it. All calls of a volume that is used
// go to where that is; to make volumes and delete them is for the node that has them.
type Everywhere struct {
	*Local
	others     *Local
	elsewhere  Elsewhere
	replicated *Local // nil: none can be used
	legs       Elsewhere
}

// NewEverywhere returns the volumes of local, and those of others, which are over a pool of volumes that are elsewhere. The name of a volume's
// pool says nothing of where it is: each node may have a pool of that name.
func NewEverywhere(local, others *Local, elsewhere Elsewhere) *Everywhere {
	return &Everywhere{Local: local, others: others, elsewhere: elsewhere}
}

// Replicate has the node use volumes with several legs too (docs/replication.md), which are over a pool of those. known knows which ones are claimed for this node, or have a mirror here.
func (e *Everywhere) Replicate(replicated *Local, known Elsewhere) {
	e.replicated, e.legs = replicated, known
}

// of is where a volume is. One that was another node's may have its devices here still, over a connection that has ended under them with its claim; one that
// has moved while it was used, as they were before: until they are called as those of its new home, all calls find them by that. If the pool that they are called by
// is not open, no call finds them: with others beside them, a volume would have two devices that know nothing of each other.
func (e *Everywhere) of(ctx context.Context, id ID) *Local {
	if e.isReplicated(ctx, id) {
		return e.replicated
	}
	return e.plain(ctx, id)
}

// plain is of, for a volume of one leg, or a leg.
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

// Get returns a volume; ErrUnavailable also if it may be another node's and that cannot be found out now. ErrPrecondition of one whose devices here are over a connection
// that has ended: they have to be taken down first.
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

// whole returns the volume that a leg is of. A leg by itself is nobody's: what was written to it the others would lack.
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

// getPlain is Get of a volume of one leg, or a leg.
func (e *Everywhere) getPlain(ctx context.Context, id ID) (Volume, error) {
	at := e.plain(ctx, id)
	v, err := at.Get(ctx, id)
	if at == e.others && err == nil {
		err = at.severed(ctx, id)
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

// AttachToRead attaches a volume that many read: see Local. What is another node's that keeps from being written to; raw: it is handed out.
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

// Uses are the volumes that this node uses through devices of its own, and does not have, or not alone, as the kernel says. What it does not tell is left out.
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

// Marks: see Local; of a leg. Of what is another node's that one is asked.
func (e *Everywhere) Marks(ctx context.Context, id ID, since uint32) ([]blockdev.Extent, error) {
	return e.plain(ctx, id).Marks(ctx, id, since)
}

// BeginEra: see Local; of a leg. Of what is another node's that one is asked.
func (e *Everywhere) BeginEra(ctx context.Context, id ID) (uint32, error) {
	return e.plain(ctx, id).BeginEra(ctx, id)
}

// Attached: see Local.
func (e *Everywhere) Attached(ctx context.Context, id ID) ([]blockdev.Device, error) {
	return e.of(ctx, id).Attached(ctx, id)
}

// Detach: see Local. A mirror goes with all else.
func (e *Everywhere) Detach(ctx context.Context, id ID) error {
	at := e.of(ctx, id)
	err := at.Detach(ctx, id)
	switch {
	case err != nil:
	case at == e.Local: // of one that was moving from here, a leg
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

// PoolHealth is what is wrong with the pools of this node, and with the way to those of others.
func (e *Everywhere) PoolHealth(ctx context.Context) []blockdev.Problem {
	return append(e.Local.PoolHealth(ctx), e.others.PoolHealth(ctx)...)
}
