package volume

import (
	"context"
	"errors"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/device"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// A volume moves while this node uses it (docs/decisions/moving-in-use.md): what is written goes to its old home and to the new one, each of which may be this
// node. What is mounted or handed out stays, and so does the number of its device.

// Mirrored is how far a volume is written to both of its homes.
type Mirrored = device.Mirrored

// seated reports whether the devices of a volume are called as those of the pools of l, and have a seat.
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

// mayBeSeated reports whether a volume may have a seat that is called as those of a pool of l, which is not open, so that nobody knows what that is.
func (l *Local) mayBeSeated(id ID) bool {
	pool, ref, err := l.object(id, blockdev.Volume)
	if err != nil || blockdev.Unwrap(pool) != nil {
		return false
	}
	seated, err := l.stacks.Seated(ref)
	return seated || err != nil
}

// Seats says where the seat of a volume is that this node uses: among its own devices (home), or those of volumes of other nodes (away). A volume that is not
// attached, or was by a driver of before seats, has none. It has both only where a switch from one to the other was cut short.
func (e *Everywhere) Seats(ctx context.Context, id ID) (home, away bool, err error) {
	if home, err = e.Local.seated(ctx, id); err == nil {
		away, err = e.others.seated(ctx, id)
	}
	return home, away, err
}

// carried is the stack of a volume that has a seat.
func (e *Everywhere) carried(ctx context.Context, id ID) (device.Stack, error) {
	home, err := e.Local.seated(ctx, id)
	if err != nil {
		return device.Stack{}, err
	}
	if home {
		return e.Local.stack(id)
	}
	return e.others.stack(id)
}

// Mirrored is how far the mirror of a volume is, if there is one.
func (e *Everywhere) Mirrored(ctx context.Context, id ID) (Mirrored, bool, error) {
	stack, err := e.carried(ctx, id)
	if err != nil {
		return Mirrored{}, false, err
	}
	return stack.Mirrored(ctx)
}

// Mirror has all that is written to a volume be written to another device too, and copies the ranges that data tells: see device.Stack.Mirror.
func (e *Everywhere) Mirror(ctx context.Context, id ID, to blockdev.Device, data func(context.Context) ([]blockdev.Extent, error)) error {
	stack, err := e.carried(ctx, id)
	if err != nil {
		return err
	}
	return stack.Mirror(ctx, to, data)
}

// HoldMirror has a mirrored volume be neither read nor written until Unmirror, Switch or ReleaseMirror: see device.Stack.HoldMirror.
func (e *Everywhere) HoldMirror(ctx context.Context, id ID) error {
	stack, err := e.carried(ctx, id)
	if err != nil {
		return err
	}
	return stack.HoldMirror(ctx)
}

// ReleaseMirror ends HoldMirror.
func (e *Everywhere) ReleaseMirror(ctx context.Context, id ID) error {
	stack, err := e.carried(ctx, id)
	if err != nil {
		return err
	}
	return stack.ReleaseMirror(ctx)
}

// Unmirror goes on over the old home alone: see device.Stack.Unmirror.
func (e *Everywhere) Unmirror(ctx context.Context, id ID) error {
	stack, err := e.carried(ctx, id)
	if err != nil {
		return err
	}
	return stack.Unmirror(ctx)
}

// Switch goes on over the new home alone, which is this node (home) or not. It may be called again, also after a crash at any point of it.
func (e *Everywhere) Switch(ctx context.Context, id ID, home bool) error {
	from, err := e.carried(ctx, id)
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

// Mirrors are the volumes that have a mirror. The pool of one of another node has no name.
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

// Throttle says in which part of the time the kernel may copy: see device.Throttle.
func (e *Everywhere) Throttle(percent int) error { return device.Throttle(percent) }

// AttachLeg attaches what this node's own pool has of a volume that moves here. The caller closes it once there is something over it, with which it goes.
func (e *Everywhere) AttachLeg(ctx context.Context, id ID) (blockdev.Device, error) {
	pool, ref, err := e.Local.object(id, blockdev.Volume)
	if err != nil {
		return blockdev.Device{}, err
	}
	return pool.Attach(ctx, ref, blockdev.Attachment{})
}

// DetachLeg takes the device of this node's own pool away that nothing is over any more, as the volume has moved from here.
func (e *Everywhere) DetachLeg(ctx context.Context, id ID) error {
	pool, ref, err := e.Local.object(id, blockdev.Volume)
	if err != nil {
		return err
	}
	return e.Local.stacks.Of(pool, ref).DetachLowest(ctx)
}
