package volume

import (
	"context"
	"errors"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/device"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// The mirror of a volume that moves while this node uses it (docs/decisions/moving-in-use.md): writes go to its old home and to the new one, either of which
// may be this node. What is mounted or handed out keeps its device, and the number of that.

// Mirrored is how far a volume is written to both of its homes.
type Mirrored = device.Mirrored

// ErrUnfit is in errors of Everywhere.Mirror: the volume never moves to that device while it stays staged as it is.
var ErrUnfit = device.ErrUnfit

// seated reports whether a volume has a seat among the devices of the pools of l.
func (l *Local) seated(ctx context.Context, id ID) (bool, error) {
	stack, err := l.stack(id)
	if errors.Is(err, errdefs.ErrUnavailable) || errors.Is(err, errdefs.ErrNotFound) {
		return false, nil // no pool of that name here, so no device either
	}
	if err != nil {
		return false, err
	}
	_, _, err = stack.Mirrored(ctx)
	if errors.Is(err, errdefs.ErrUnsupported) || errors.Is(err, errdefs.ErrUnavailable) {
		return false, nil
	}
	return err == nil, err
}

// mayBeSeated reports whether a volume may have a seat among the devices of a pool of l that is not open.
func (l *Local) mayBeSeated(id ID) bool {
	pool, ref, err := l.object(id, blockdev.Volume)
	if err != nil || blockdev.Unwrap(pool) != nil {
		return false
	}
	seated, err := l.stacks.Seated(ref)
	return seated || err != nil
}

// Seats reports where the seat of a volume is that this node uses: among the devices of its own pools (home), or those of volumes of other nodes (away). It
// is in both only if a Switch was cut short. A volume that is not attached has none, nor has one that an older driver attached.
func (e *Everywhere) Seats(ctx context.Context, id ID) (home, away bool, err error) {
	if home, err = e.Local.seated(ctx, id); err == nil {
		away, err = e.others.seated(ctx, id)
	}
	return home, away, err
}

// seatedStack returns the stack of devices that has the seat of a volume.
func (e *Everywhere) seatedStack(ctx context.Context, id ID) (device.Stack, error) {
	home, err := e.Local.seated(ctx, id)
	if err != nil {
		return device.Stack{}, err
	}
	if home {
		return e.Local.stack(id)
	}
	return e.others.stack(id)
}

// Mirrored returns how far the mirror of a volume is, if there is one.
func (e *Everywhere) Mirrored(ctx context.Context, id ID) (Mirrored, bool, error) {
	stack, err := e.seatedStack(ctx, id)
	if err != nil {
		return Mirrored{}, false, err
	}
	return stack.Mirrored(ctx)
}

// CanMirror returns ErrUnsupported if the kernel of this node has no mirrors.
func (e *Everywhere) CanMirror() error { return dm.CanMirror() }

// Mirror makes a mirror of a volume to another device, and has the kernel copy the ranges that data returns: see device.Stack.Mirror.
func (e *Everywhere) Mirror(ctx context.Context, id ID, to blockdev.Device, data func(context.Context) ([]blockdev.Extent, error)) error {
	stack, err := e.seatedStack(ctx, id)
	if err != nil {
		return err
	}
	return stack.Mirror(ctx, to, data)
}

// FlushMirror makes durable what was copied to the new home of a volume: see device.Stack.FlushMirror.
func (e *Everywhere) FlushMirror(ctx context.Context, id ID) error {
	stack, err := e.seatedStack(ctx, id)
	if err != nil {
		return err
	}
	return stack.FlushMirror(ctx)
}

// HoldMirror holds all I/O of a mirrored volume until Unmirror, Switch or ReleaseMirror: see device.Stack.HoldMirror.
func (e *Everywhere) HoldMirror(ctx context.Context, id ID) error {
	stack, err := e.seatedStack(ctx, id)
	if err != nil {
		return err
	}
	return stack.HoldMirror(ctx)
}

// ReleaseMirror ends HoldMirror.
func (e *Everywhere) ReleaseMirror(ctx context.Context, id ID) error {
	stack, err := e.seatedStack(ctx, id)
	if err != nil {
		return err
	}
	return stack.ReleaseMirror(ctx)
}

// Unmirror ends the mirror of a volume and goes on over its old home alone: see device.Stack.Unmirror.
func (e *Everywhere) Unmirror(ctx context.Context, id ID) error {
	stack, err := e.seatedStack(ctx, id)
	if err != nil {
		return err
	}
	return stack.Unmirror(ctx)
}

// Switch ends the mirror of a volume and goes on over its new home alone. home: that is this node. It may be called again, also after a crash at any point
// of it.
func (e *Everywhere) Switch(ctx context.Context, id ID, home bool) error {
	from, err := e.seatedStack(ctx, id)
	if err != nil {
		return err
	}
	at := e.others
	if home {
		at = e.Local
	}
	to, err := at.stack(id)
	if err != nil {
		return err
	}
	return from.Switch(ctx, to)
}

// Mirrors returns the volumes that have a mirror. The IDs of those of other nodes name no pool.
func (e *Everywhere) Mirrors(ctx context.Context) (ids []ID, err error) {
	for _, l := range []*Local{e.Local, e.others} {
		for _, pool := range l.openPools() {
			refs, failure := l.stacks.Mirrors(ctx, pool)
			err = errors.Join(err, failure)
			for _, ref := range refs {
				ids = append(ids, ID{ref.Kind, pool.Name(), ref.Key})
			}
		}
	}
	return ids, err
}

// Throttle sets for how much of the time, in per cent, the kernel may copy: see device.Throttle.
func (e *Everywhere) Throttle(percent int) error { return device.Throttle(percent) }

// AttachLeg attaches the copy in this node's own pool of a volume that moves here. The caller closes the device once the mirror is over it. It is detached
// with the mirror.
func (e *Everywhere) AttachLeg(ctx context.Context, id ID) (blockdev.Device, error) {
	pool, ref, err := e.Local.object(id, blockdev.Volume)
	if err != nil {
		return blockdev.Device{}, err
	}
	return pool.Attach(ctx, ref, blockdev.Attachment{})
}

// DetachLeg detaches the device of this node's own pool after the volume has moved from here, once nothing is over that device any more.
func (e *Everywhere) DetachLeg(ctx context.Context, id ID) error {
	pool, ref, err := e.Local.object(id, blockdev.Volume)
	if err != nil {
		return err
	}
	return e.Local.stacks.Of(pool, ref).DetachLowest(ctx)
}
