package volume

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// A volume without legs can get some while this node uses it (docs/replication.md). To everybody but the kernel of this node it has several legs from then
// on. Here its devices are still those of its first leg, and all calls go to them, until Adopt has laid them over a mirror.

// alone reports whether a volume with several legs is used here by the devices of its first leg: they are mounted, or kept for a user of this node. No leg
// is mounted or handed out otherwise. A device that is kept for an export does not count. Nor does a bare connection that nobody has mounted: if an earlier
// process made it, it passes for one that is kept, and is that of a leg. Once the mirror is here, it has the users, also when it has ended.
func (e *Everywhere) alone(ctx context.Context, id ID) bool {
	if e.hasMirror(ctx, id) {
		return false
	}
	at := e.plain(ctx, id)
	devices, err := at.Attached(ctx, id)
	if err != nil || at.mounted(devices) {
		return err == nil
	}
	devices = slices.DeleteFunc(devices, func(d blockdev.Device) bool { return !d.Kept || d.ReadOnly })
	if at == e.Local {
		return len(devices) > 0 && !e.gives(ctx, id)
	}
	bare, err := at.pools[0].Attached(ctx, id.ref())
	return err == nil && slices.ContainsFunc(devices, func(d blockdev.Device) bool {
		return !slices.ContainsFunc(bare, func(b blockdev.Device) bool { return b.Number == d.Number })
	})
}

// hasMirror reports whether the mirror of a volume is here.
func (e *Everywhere) hasMirror(ctx context.Context, id ID) bool {
	if e.replicated == nil {
		return false
	}
	devices, err := e.replicated.pools[0].Attached(ctx, id.ref())
	return err == nil && len(devices) > 0
}

// gives reports whether this node exports one of its volumes.
func (e *Everywhere) gives(ctx context.Context, id ID) bool {
	_, given, err := e.ExportOf(ctx, id)
	return err == nil && given
}

// isReplicated reports whether calls for a volume go to the mirror that it has here, or is to have. A volume whose Adopt was cut short is known by its
// devices, also if its claim is not known or has ended.
func (e *Everywhere) isReplicated(ctx context.Context, id ID) bool {
	if e.replicated == nil {
		return false
	}
	if !e.legs.Has(id) {
		if adopted, _, err := e.Adopted(ctx, id); err != nil || !adopted {
			return false
		}
	}
	return !e.alone(ctx, id)
}

// lingers returns ErrInUse while somebody holds open the device that a volume had before it got several legs. That device goes with its last user. A node
// without the pool that the ID of the volume names has none.
func (e *Everywhere) lingers(ctx context.Context, id ID) error {
	at := e.plain(ctx, id)
	stack, err := at.stack(id)
	if err != nil {
		return nil
	}
	if at == e.Local && e.gives(ctx, id) { // the node that it is given to has it
		return nil
	}
	open, err := stack.Open()
	if err == nil && open {
		err = fmt.Errorf("%w: volume %s has got replicas since, and the device that it had before is held open by a process or a mount; it goes away with its last user", errdefs.ErrInUse, id)
	}
	return err
}

// Adopt lays the devices of a volume that got several legs while it was used here over a mirror. What is mounted or handed out stays, with the same device
// number. For any other volume it does nothing. It may be called again after a crash at any point of it. The caller has the lock of the volume.
// ErrUnsupported if the volume was attached by a driver that gave devices no seat: it has to be staged again.
func (e *Everywhere) Adopt(ctx context.Context, id ID) error {
	to, err := e.replicated.stack(id)
	if err != nil {
		return err
	}
	if e.alone(ctx, id) {
		from, err := e.plain(ctx, id).stack(id)
		if err == nil {
			err = from.HandOver(ctx, to)
		}
		if err != nil {
			return err
		}
	}
	return to.Reseat(ctx)
}

// settled is of for a volume that is to be attached. It first finishes an Adopt that was cut short, so that no device of the volume is beside its mirror.
func (e *Everywhere) settled(ctx context.Context, id ID) (*Local, error) {
	at := e.of(ctx, id)
	if at != e.replicated || at == nil {
		return at, nil
	}
	return at, e.Adopt(ctx, id)
}

// Adopted reports whether a volume was adopted since it was attached. astray: its devices are not over the mirror yet, as Adopt was cut short. It has to
// be called again.
func (e *Everywhere) Adopted(ctx context.Context, id ID) (adopted, astray bool, err error) {
	stack, err := e.replicated.stack(id)
	if err != nil {
		return false, false, err
	}
	return stack.Adopted(ctx)
}

// Replicated returns what this node can do with the volumes with several legs that it uses, for those who copy, limit and modify them.
func (e *Everywhere) Replicated() Replicated { return Replicated{e} }

// Replicated is what a node can do with the volumes with several legs that it uses.
type Replicated struct{ everywhere *Everywhere }

// Hold: see Local. ErrUnavailable while the devices of the volume are not over its mirror yet (Adopted): the home holds writes back below the mirror, and
// these would not reach it.
func (r Replicated) Hold(ctx context.Context, id ID) (release func() error, err error) {
	at := r.everywhere.of(ctx, id)
	if at == r.everywhere.replicated {
		_, astray, err := r.everywhere.Adopted(ctx, id)
		if err == nil && astray {
			err = fmt.Errorf("%w: volume %s has got replicas, and what uses it is not over its mirror yet; ask again", errdefs.ErrUnavailable, id)
		}
		if err != nil {
			return nil, err
		}
	}
	return at.Hold(ctx, id)
}

// LongestHold: see Local.
func (r Replicated) LongestHold() time.Duration { return r.everywhere.LongestHold() }

// LimitAgain: see Local.
func (r Replicated) LimitAgain(ctx context.Context, id ID, mutable map[string]string) {
	r.everywhere.of(ctx, id).LimitAgain(ctx, id, mutable)
}

// Modified: see Local.
func (r Replicated) Modified(ctx context.Context, id ID, mutable map[string]string) error {
	return r.everywhere.of(ctx, id).Modified(ctx, id, mutable)
}
