package device

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/luks"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Mirrored is a volume that moves while it is used, as the kernel tells of it: everything is read from the old leg and copied to the new one, and what is written is
// written to both where that is copied, and to the old one elsewhere. Of a leg that fails the kernel acknowledges no write any more: it holds what it could not
// write to both, until Unmirror or Switch.
type Mirrored struct {
	Old, New             uint64 // device numbers, as in st_rdev (makedev(3))
	Synced, Total        int64  // what is the same on both, and all of it, in bytes
	OldFailed, NewFailed bool
	// Forgot: the kernel may have forgotten that one of the legs had failed, so each of them may lack what is on the other. See Unmirror.
	Forgot bool
	// Back: what only the new leg has is copied to the old one, on its way to Unmirror.
	Back bool
	// Held: nothing is read or written until Unmirror, Switch or ReleaseMirror: see HoldMirror.
	Held bool
}

const (
	// region is what the kernel copies at a time, in bytes.
	region = 512 << 10
	// A range without data is left out of the copy, which costs the kernel a worker and buffers for each: not more of them, and none that is smaller, in bytes.
	mostGaps = 32
	leastGap = 4 << 20
	// longestMirrorHold is how long writes are held back while it is found out which ranges hold data.
	longestMirrorHold = 20 * time.Second

	mirrorTarget = "mirror"
	// How a target begins: what of it is the same on both legs.
	copied = "core 1" // nothing yet
	equal  = "core 2" // all
)

// throttle is the parameter of dm-mirror that Throttle sets.
const throttle = "/sys/module/dm_mirror/parameters/raid1_resync_throttle"

// Throttle says in which part of the time the kernel may copy, in per cent, for all mirrors of the machine: also those of others, pvmove's among them.
// errdefs.ErrUnsupported where the kernel has none.
func Throttle(percent int) error {
	err := os.WriteFile(throttle, fmt.Append(nil, percent), 0)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %w", errdefs.ErrUnsupported, err)
	}
	return err
}

// Mirror has the kernel copy an attached volume to another device, of the same size or larger, while it is used: see Mirrored. That has to be zeros throughout. data is
// asked, while all writes are held back and those before are durable, for the ranges that hold anything but zeros, in order; nil: all may. A mirror to the same device that
// is there stays, whatever data says. The caller holds the device open, and keeps it attached until after Unmirror, Switch or Detach.
//
// errdefs.ErrUnsupported if the volume is attached without a seat, or the kernel has no mirrors; errdefs.ErrPrecondition for a device that is
// too small or has other sectors, or where there is a mirror to another one. With any error, all is as without Mirror.
func (s Stack) Mirror(ctx context.Context, to blockdev.Device, data func(ctx context.Context) ([]blockdev.Extent, error)) error {
	return s.moving("mirror it", func() error { return s.mirror(ctx, to, data) })
}

func (s Stack) mirror(ctx context.Context, to blockdev.Device, data func(ctx context.Context) ([]blockdev.Extent, error)) error {
	d, err := s.seat()
	if err != nil {
		return err
	}
	switch m, is, err := mirrorOf(d.Name); {
	case err != nil:
		return err
	case is && m.New != to.Number:
		return fmt.Errorf("%w: it is mirrored to device %s already", errdefs.ErrPrecondition, dm.Number(m.New))
	case is:
		return settle(d)
	}
	if err := dm.HasTarget(mirrorTarget); err != nil {
		return fmt.Errorf("%w: %w; load the module dm-mirror", errdefs.ErrUnsupported, err)
	}
	t, _ := s.top() // there is one, as there is a seat
	from, there, err := t.underSeat(ctx, d)
	if err == nil && !there {
		err = fmt.Errorf("%w: its seat is not over a device of its pool", errdefs.ErrPrecondition)
	}
	if err != nil {
		return err
	}
	size, err := d.Size()
	if err == nil {
		err = fits(from, to, size)
	}
	if err == nil {
		err = flushes(d, to)
	}
	if err != nil {
		return err
	}
	resume, err := s.stacks.hold(d.Name, dm.NoScan)
	if err != nil {
		return err
	}
	err = s.loadMirror(ctx, d, from, to, size, data)
	if err = errors.Join(err, resume()); err != nil {
		return err
	}
	if m, is, err := mirrorOf(d.Name); err != nil || !is || m.New != to.Number {
		return errors.Join(err, fmt.Errorf("%w: the kernel did not take the mirror; its log says why", errdefs.ErrUnavailable))
	}
	return nil
}

// fits returns an error unless a device can be mirrored to another one.
func fits(from, to blockdev.Device, size int64) error {
	sector, err := sectorOf(from)
	if err != nil {
		return err
	}
	other, err := sectorOf(to)
	if err == nil && (to.Size < size || to.Number == from.Number || other != sector) {
		err = fmt.Errorf("%w: %s, of %d bytes in sectors of %s, is to be mirrored to %s, of %d bytes in sectors of %s",
			errdefs.ErrPrecondition, from.Path, size, sector, to.Path, to.Size, other)
	}
	return err
}

// flushes is ErrUnsupported for a device that has to be flushed below a seat that was made over one that need not. What is over the seat was told so when it was made,
// and the kernel takes the flushes off what it is sent.
func flushes(seat *dm.Device, to blockdev.Device) error {
	if !dm.Flushed(seat.Number) && dm.Flushed(to.Number) {
		return fmt.Errorf("%w: the disk of the volume's node has no cache that could be lost, so what uses the volume does not flush it, and the disk of the new node has one; it moves when it is not used",
			errdefs.ErrUnsupported)
	}
	return nil
}

// sectorOf returns the logical sector of a device, in bytes.
func sectorOf(d blockdev.Device) (string, error) {
	text, err := os.ReadFile("/sys/dev/block/" + dm.Number(d.Number) + "/queue/logical_block_size")
	if err != nil {
		return "", fmt.Errorf("sectors of %s: %w", d.Path, errdefs.FromErrno(err))
	}
	return strings.TrimSpace(string(text)), nil
}

// loadMirror gives a seat that is held the table of a mirror, for when it is resumed.
func (s Stack) loadMirror(ctx context.Context, d *dm.Device, from, to blockdev.Device, size int64, data func(ctx context.Context) ([]blockdev.Extent, error)) error {
	extents := []blockdev.Extent{{Length: size}}
	if data != nil {
		if err := flush(from.Path); err != nil { // those who are asked may look at what is on a disk
			return err
		}
		within, cancel := context.WithTimeout(ctx, longestMirrorHold)
		defer cancel()
		var err error
		if extents, err = data(within); err != nil {
			return fmt.Errorf("ranges that hold data: %w", err)
		}
	}
	return load(d, from.Number, mirrorTable(from.Number, to.Number, size, extents))
}

// mirrorTable is the table of a mirror of which ranges without data count as copied.
func mirrorTable(from, to uint64, size int64, data []blockdev.Extent) (table []dm.Line) {
	add := func(start, end int64, begins string) {
		if start < end {
			table = append(table, mirrorLine(start, end-start, begins, from, to))
		}
	}
	at := int64(0)
	for _, gap := range gaps(size, data) {
		add(at, gap.Offset, copied)
		at = gap.Offset + gap.Length
		add(gap.Offset, at, equal)
	}
	add(at, size, copied)
	return table
}

// mirrorLine is a target of a mirror, at the same place of both legs. The first leg is read from, and copied.
func mirrorLine(start, length int64, begins string, first, second uint64) dm.Line {
	unit := int64(region) // not larger than the range, and a power of two
	for unit > length {
		unit /= 2
	}
	log := fmt.Sprint(begins, " ", unit/512)
	if begins == equal {
		log += " nosync"
	}
	return dm.Line{Start: start, Length: length, Kind: mirrorTarget, Text: fmt.Sprintf("%s 2 %s %d %s %d 1 handle_errors", log, dm.Number(first), start/512, dm.Number(second), start/512)}
}

// gaps returns the largest ranges between those that hold data, in order. They begin and end with a region, or with the volume.
func gaps(size int64, data []blockdev.Extent) (found []blockdev.Extent) {
	at := int64(0)
	for _, e := range append(slices.Clone(data), blockdev.Extent{Offset: size}) {
		start, end := (at+region-1)/region*region, e.Offset/region*region
		if e.Offset == size {
			end = size
		}
		if end-start >= leastGap {
			found = append(found, blockdev.Extent{Offset: start, Length: end - start})
		}
		at = max(at, e.Offset+e.Length)
	}
	slices.SortFunc(found, func(a, b blockdev.Extent) int { return cmp.Compare(b.Length, a.Length) })
	found = found[:min(len(found), mostGaps)]
	slices.SortFunc(found, func(a, b blockdev.Extent) int { return cmp.Compare(a.Offset, b.Offset) })
	return found
}

// Mirrored tells how far a mirror is, from the kernel alone; false if there is none; errdefs.ErrUnsupported if the volume is not attached with a seat.
func (s Stack) Mirrored(context.Context) (m Mirrored, is bool, err error) {
	err = s.moving("look at its mirror", func() error {
		d, err := s.seat()
		if err == nil {
			var all mirror
			all, is, err = mirrorOf(d.Name)
			m = all.Mirrored
		}
		return err
	})
	return m, is, err
}

// HoldMirror has a mirrored volume be neither read nor written, whatever becomes of the driver: after it, Mirrored tells what both legs have for good. What is under way
// ends first, or is held by the mirror.
func (s Stack) HoldMirror(context.Context) error {
	return s.moving("hold its mirror", func() error {
		d, err := s.seat()
		if err != nil {
			return err
		}
		if _, is, err := mirrorOf(d.Name); err != nil || !is {
			return errors.Join(err, fmt.Errorf("%w: it is not mirrored", errdefs.ErrPrecondition))
		}
		return dm.Hold(d.Name)
	})
}

// ReleaseMirror ends HoldMirror.
func (s Stack) ReleaseMirror(context.Context) error {
	return s.moving("go on with its mirror", func() error {
		d, err := s.seat()
		if err == nil && d.Suspended {
			err = dm.Resume(d.Name, dm.NoScan)
		}
		return err
	})
}

// Unmirror has a volume be its old leg alone again. What the mirror holds is written there. Without a mirror it does nothing. What the old leg may lack (Forgot) is copied
// there first: that is errdefs.ErrBusy until it is done.
func (s Stack) Unmirror(context.Context) error {
	return s.moving("end its mirror", func() error {
		d, err := s.seat()
		if err != nil {
			return err
		}
		m, is, err := mirrorOf(d.Name)
		if err != nil || !is {
			return errors.Join(err, settled(d))
		}
		parts, err := m.lacks(d)
		if err == nil && parts != nil {
			err = cmp.Or(m.copyBack(d, parts), fmt.Errorf("%w: what only device %s has is copied to device %s first", errdefs.ErrBusy, dm.Number(m.New), dm.Number(m.Old)))
		}
		if err != nil {
			return err
		}
		return m.leave(d, m.Old)
	})
}

// leave brings a mirror to one of its legs. What the mirror holds is written there.
func (m mirror) leave(d *dm.Device, leg uint64) error {
	size, err := d.Size()
	if err == nil {
		err = dm.Replace(d.Name, dm.Linear(leg, size))
	}
	if err == nil {
		err = forget(d.Name)
	}
	return err
}

// settled puts right what a crash left of a seat that is no mirror.
func settled(d *dm.Device) error { return errors.Join(settle(d), forget(d.Name)) }

// Switch has a volume be its new leg alone, under the names of a stack that is that of another pool, or the same one. The devices stay, for all that holds them. What the
// mirror holds is written to the new leg. It may be called again after a crash at any point of it; errdefs.ErrPrecondition if there was no mirror.
func (s Stack) Switch(ctx context.Context, to Stack) error {
	return s.moving("switch it to where it moves", func() error { return s.switchTo(ctx, to) })
}

func (s Stack) switchTo(ctx context.Context, to Stack) error {
	d, err := s.seat()
	if errors.Is(err, errdefs.ErrUnsupported) {
		if d, err := to.seat(); err == nil { // the last one to be renamed
			return settle(d)
		}
	}
	if err != nil {
		return err
	}
	m, was, err := mirrorOf(d.Name)
	switch {
	case err != nil:
		return err
	case m.Back:
		return fmt.Errorf("%w: it is copied back to where it was", errdefs.ErrPrecondition)
	case was:
		err = m.leave(d, m.New)
	default:
		err = settled(d)
	}
	if err != nil {
		return err
	}
	from, renamed := s.top()
	target, can := to.top()
	if !renamed || !can {
		return fmt.Errorf("%w: pool %s has no names for devices", errdefs.ErrUnsupported, to.pool.Name())
	}
	before, _, _, err := from.names.Top(s.ref)
	if err != nil {
		return err
	}
	after, _, _, err := target.names.Top(to.ref)
	if err != nil || before == after {
		return err
	}
	if !was {
		if _, still, err := from.underSeat(ctx, d); err != nil || still {
			return errors.Join(err, fmt.Errorf("%w: it is not mirrored", errdefs.ErrPrecondition))
		}
	}
	return from.rename(before, after)
}

// rename gives the devices of a stack the names of another one, the seat last: as long as it has its name, Mirrors finds it.
func (t top) rename(before, after string) error {
	if err := t.renameTop(after); err != nil {
		return err
	}
	if err := t.renameCrypt(after); err != nil {
		return err
	}
	return dm.Rename(before+seatSuffix, after+seatSuffix)
}

// renameCrypt gives the open device of an encrypted volume, if it is there, the name that it has below a top of another one.
func (t top) renameCrypt(after string) error {
	name, d, err := crypt{t}.find()
	if err == nil && d != nil {
		err = dm.Rename(name, after+cryptSuffix)
	}
	return errors.Join(err, luks.ForgetNode(name))
}

// renameTop gives the highest device, if it is there, another name.
func (t top) renameTop(after string) error {
	before, _, d, err := t.find()
	if err != nil || d == nil {
		return err
	}
	if t.stacks.has(before, suspended) { // who resumes it, does so by its name
		return fmt.Errorf("%w: writes to it are held back", errdefs.ErrBusy)
	}
	if err := dm.Rename(before, after); err != nil {
		return err
	}
	t.stacks.mark(after, leaving, t.stacks.has(before, leaving))
	t.stacks.mark(before, leaving, false)
	return nil
}

// Mirrors are the volumes of a pool that are mirrored, and those of which Switch was cut short.
func (s *Stacks) Mirrors(ctx context.Context, pool blockdev.Pool) (found []blockdev.Ref, err error) {
	seats, err := s.seats(pool)
	for _, l := range seats {
		is, failure := l.moves(ctx)
		if err = errors.Join(err, failure); is {
			found = append(found, l.ref)
		}
	}
	return found, err
}

// moves reports whether a seat is a mirror, or over a device that is not its pool's.
func (s seat) moves(ctx context.Context) (bool, error) {
	_, _, d, err := s.find()
	if err != nil || d == nil || !d.Live {
		return false, err
	}
	if _, is, err := mirrorOf(d.Name); err != nil || is {
		return is, err
	}
	_, its, err := s.underSeat(ctx, d)
	return err == nil && !its, err
}

// top returns the volume's top, be it there or not; false if it can have none.
func (s Stack) top() (top, bool) {
	names, ok := blockdev.As[blockdev.Stackable](s.pool)
	return top{s.stacks, names, s.pool, s.ref}, ok && s.stacks.hasMapper()
}

// seat returns the volume's; errdefs.ErrUnsupported if it has none.
func (s Stack) seat() (d *dm.Device, err error) {
	t, can := s.top()
	if can {
		_, _, d, err = seat{t}.find()
	}
	if err == nil && (d == nil || !d.Live) {
		err = fmt.Errorf("%w: it is not attached, or was so that it does not move while it is used", errdefs.ErrUnsupported)
	}
	return d, err
}

// moving says of which volume an error is, and what was done.
func (s Stack) moving(what string, do func() error) error {
	if err := do(); err != nil {
		return fmt.Errorf("%s, %s of pool %s: %w", what, s.ref, s.pool.Name(), err)
	}
	return nil
}
