package device

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// A volume in use can become one of a pool that builds its device of other volumes; the first of these is the volume as it was until then. HandOver gives
// its devices to the stack of that pool, and Reseat there brings the seat over the new pool's own device. Users notice nothing: their devices are over the
// same bytes at any moment.

// HandOver gives the devices of an attached volume the names of another stack. The seat is the first, the top the last: while the top has its old name,
// the devices are still for this stack to detach. It may be called again after a crash at any point of it. errdefs.ErrUnsupported if the volume is
// attached without a seat, or its users do not flush it; errdefs.ErrPrecondition if it moves.
func (s Stack) HandOver(ctx context.Context, to Stack) error {
	return s.moving("hand its devices over", func() error { return s.handOver(ctx, to) })
}

func (s Stack) handOver(ctx context.Context, to Stack) error {
	from, can := s.top()
	target, could := to.top()
	if !can || !could {
		return fmt.Errorf("%w: there is no device of ours over it", errdefs.ErrUnsupported)
	}
	d, err := s.seat()
	switch {
	case errors.Is(err, errdefs.ErrUnsupported):
		if _, gone := to.seat(); gone != nil { // the seat is renamed first, so it may have its new name
			return err
		}
	case err != nil:
		return err
	default:
		if _, moves, err := mirrorOf(d.Name); err != nil || moves {
			return errors.Join(err, fmt.Errorf("%w: it moves", errdefs.ErrPrecondition))
		}
		if !dm.Flushed(d.Number) { // see flushes
			return fmt.Errorf("%w: its disk has no cache that could be lost, so what uses it does not flush it, and other disks may have one; it is to be staged again", errdefs.ErrUnsupported)
		}
	}
	after, _, _, err := target.names.Top(to.ref)
	if err != nil {
		return err
	}
	return from.renameUp(after)
}

// renameUp gives the devices of a stack the name of another top, from the lowest.
func (t top) renameUp(after string) error {
	name, _, d, err := seat{t}.find()
	if err == nil && d != nil {
		err = dm.Rename(name, after+seatSuffix)
	}
	if err != nil {
		return err
	}
	if err := t.renameCrypt(after); err != nil {
		return err
	}
	return t.renameTop(after)
}

// Reseat brings the seat of a volume that was handed over (HandOver) over the device of its own pool, which it attaches. For any other volume it does
// nothing. It may be called again. errdefs.ErrPrecondition if that device is too small.
func (s Stack) Reseat(ctx context.Context) error {
	return s.moving("bring its devices over that of its pool", func() error { return s.reseat(ctx) })
}

func (s Stack) reseat(ctx context.Context) (err error) {
	adopted, astray, err := s.Adopted(ctx)
	if err != nil || !adopted || !astray {
		return err
	}
	d, err := s.seat()
	if err != nil {
		return err
	}
	below, err := s.pool.Attach(ctx, s.ref, blockdev.Attachment{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, below.Close()) }()
	size, err := d.Size()
	if err == nil && below.Size < size {
		err = fmt.Errorf("%w: %s has %d bytes, and what it is to be below has %d", errdefs.ErrPrecondition, below.Path, below.Size, size)
	}
	if err != nil {
		return err
	}
	return dm.Make(d.Name, d.UUID, dm.Linear(below.Number, size)) // the seat keeps its size; Grow is for growing
}

// Adopted reports whether the volume has a seat, and so was handed over by another stack (adopted), and whether that is not over the device of its own
// pool yet (astray). It may be called only for pools whose volumes never move.
func (s Stack) Adopted(ctx context.Context) (adopted, astray bool, err error) {
	d, err := s.seat()
	if errors.Is(err, errdefs.ErrUnsupported) {
		return false, false, nil
	}
	if err != nil {
		return false, false, err
	}
	below, err := dm.Below(d.Name)
	if dm.Vanished(err) {
		return false, false, nil
	}
	if err != nil {
		return false, false, err
	}
	own, err := s.pool.Attached(ctx, s.ref)
	return true, !slices.ContainsFunc(own, func(d blockdev.Device) bool { return slices.Contains(below, d.Number) }), err
}
