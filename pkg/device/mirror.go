package device

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/luks"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Mirrored is what the kernel tells of the mirror of a volume that moves while it is used. Reads go to the old leg, which the kernel copies to the new
// one. Writes go to both legs where the copy is done, and elsewhere to the old one. After a leg has failed the kernel acknowledges no write that it could
// not make to both: it holds such writes until Unmirror or Switch.
type Mirrored struct {
	Old, New             uint64 // device numbers, as in st_rdev (makedev(3))
	Synced, Total        int64  // bytes that are the same on both legs, and all bytes
	OldFailed, NewFailed bool
	// Forgot: the kernel may have forgotten that a leg had failed, so each leg may lack what is on the other. See Unmirror.
	Forgot bool
	// Back: the kernel copies what only the new leg has to the old one, which Unmirror has begun.
	Back bool
	// Held: all I/O waits until Unmirror, Switch or ReleaseMirror: see HoldMirror.
	Held bool
}

const (
	// region is what the kernel copies at a time, in bytes.
	region = 512 << 10
	// Ranges without data are left out of the copy. Each costs the kernel a worker and buffers, so there are at most mostGaps, of at least leastGap bytes.
	mostGaps = 32
	leastGap = 4 << 20
	// longestMirrorHold is how long writes are held back while data returns the ranges that hold data.
	longestMirrorHold = 20 * time.Second

	mirrorTarget = "mirror"
	// The first words of a target: what is the same on both legs at its beginning.
	copied = "core 1" // nothing yet
	equal  = "core 2" // all
)

// throttle is the parameter of dm-mirror that Throttle sets.
const throttle = "/sys/module/dm_mirror/parameters/raid1_resync_throttle"

// Throttle sets in which part of the time the kernel may copy, in per cent. It is for all mirrors of the machine, those of others too, as pvmove's.
// errdefs.ErrUnsupported if dm-mirror is not loaded, or has no such parameter.
func Throttle(percent int) error {
	err := os.WriteFile(throttle, fmt.Append(nil, percent), 0)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %w", errdefs.ErrUnsupported, err)
	}
	return err
}

// ErrUnfit is in errors of Mirror for a device that this volume is never mirrored to, while it stays attached as it is. The text says why.
var ErrUnfit = errors.New("it does not move there while it is used")

// Mirror has the kernel copy an attached volume to another device while the volume is used: see Mirrored. That device has to be as large or larger, and
// zeros throughout. data returns the ranges that hold anything but zeros, in order. It is called while all writes are held back and earlier ones are
// durable; nil: all is copied. If there is a mirror to the same device, it stays. The caller holds the device open, and keeps it attached until after
// Unmirror, Switch or Detach.
//
// errdefs.ErrUnsupported if the volume is attached without a seat, if the kernel has no mirrors, or if the device has to be flushed and the seat does not
// pass flushes (ErrUnfit); errdefs.ErrPrecondition for a device that is too small or has other sectors (ErrUnfit), or if there is a mirror to another one. With
// any error all is as without Mirror.
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
	if err := dm.CanMirror(); err != nil {
		return err
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
	over, err := makeNewLeg(d, to.Number, size)
	if err != nil {
		return err
	}
	resume, err := s.stacks.hold(d.Name, dm.NoScan)
	if err == nil {
		err = s.loadMirror(ctx, d, from, over, size, data)
		err = errors.Join(err, resume())
	}
	if err != nil {
		return errors.Join(err, over.remove())
	}
	if m, is, err := mirrorOf(d.Name); err != nil || !is || m.New != to.Number {
		return errors.Join(err, fmt.Errorf("%w: the kernel did not take the mirror; its log says why", errdefs.ErrUnavailable))
	}
	return nil
}

// fits returns errdefs.ErrPrecondition if a device cannot be the new leg: it is too small, the same, or has other sectors (ErrUnfit).
func fits(from, to blockdev.Device, size int64) error {
	sector, err := dm.SectorSize(from.Number)
	if err != nil {
		return err
	}
	other, err := dm.SectorSize(to.Number)
	if err != nil || to.Size >= size && to.Number != from.Number && other == sector {
		return err
	}
	err = fmt.Errorf("%s, of %d bytes in sectors of %d, is to be mirrored to %s, of %d bytes in sectors of %d", from.Path, size, sector, to.Path, to.Size, other)
	if other != sector {
		err = fmt.Errorf("%w: %w", ErrUnfit, err)
	}
	return fmt.Errorf("%w: %w", errdefs.ErrPrecondition, err)
}

// flushes returns ErrUnsupported and ErrUnfit if the new leg has to be flushed, and the seat was made over a device that need not be. What is over the seat was told
// then that there is no cache, so the kernel drops its flushes.
func flushes(seat *dm.Device, to blockdev.Device) error {
	if !dm.Flushed(seat.Number) && dm.Flushed(to.Number) {
		return fmt.Errorf("%w: %w: the disk of the volume's node has no cache that could be lost, so what uses the volume does not flush it, and the disk of the new node has one; it moves when it is not used",
			errdefs.ErrUnsupported, ErrUnfit)
	}
	return nil
}

// loadMirror loads the table of a mirror into a held seat, for when it is resumed. The device over the new leg goes with that from then on.
func (s Stack) loadMirror(ctx context.Context, d *dm.Device, from blockdev.Device, over *newLeg, size int64, data func(ctx context.Context) ([]blockdev.Extent, error)) error {
	extents := []blockdev.Extent{{Length: size}}
	if data != nil {
		if err := flush(from.Path); err != nil { // data may read what is on the disk
			return err
		}
		within, cancel := context.WithTimeout(ctx, longestMirrorHold)
		defer cancel()
		var err error
		if extents, err = data(within); err != nil {
			return fmt.Errorf("ranges that hold data: %w", err)
		}
	}
	if err := loadFirst(d, from.Number, mirrorTable(from.Number, over.Number, size, extents)); err != nil {
		return err
	}
	_, err := dm.Remove(over.Name)
	if err != nil {
		err = errors.Join(err, dm.Clear(d.Name))
	}
	return err
}

// mirrorTable returns the table of a mirror. Ranges without data count as copied.
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

// mirrorLine returns one target of a mirror, at the same place of both legs. The first leg is read, and copied to the second.
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

// gaps returns the largest ranges without data, in order. They begin and end at a region, or at the end of the volume.
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

// Mirrored returns the mirror of a volume, from the kernel alone; false if there is none. errdefs.ErrUnsupported if the volume is not attached with a
// seat.
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

// FlushMirror makes durable what the new leg of a mirror has, and has it flushed from now on whenever the old one is. Before, the kernel takes flushes of the
// new leg for carried out. It waits for the leg's disk, and for the connection to it to end if that is silent. After an error the new leg counts as failed
// (NewFailed), for good. errdefs.ErrPrecondition if there is no mirror, or not all is copied.
func (s Stack) FlushMirror(context.Context) error {
	return s.moving("flush where it moves to", func() error {
		_, err := s.flushedMirror()
		return err
	})
}

// flushedMirror returns the seat of a mirror whose legs are equal, and are both flushed.
func (s Stack) flushedMirror() (*dm.Device, error) {
	d, err := s.seat()
	if err != nil {
		return nil, err
	}
	m, is, err := mirrorOf(d.Name)
	switch {
	case err != nil:
		return nil, err
	case !is:
		return nil, fmt.Errorf("%w: it is not mirrored", errdefs.ErrPrecondition)
	case m.Synced < m.Total:
		return nil, fmt.Errorf("%w: %d of %d bytes are copied", errdefs.ErrPrecondition, m.Synced, m.Total)
	}
	return d, m.over.flush()
}

// HoldMirror holds all I/O of a mirrored volume, also after the driver has ended. I/O under way ends first, or is held by the mirror. So what Mirrored
// returns after it does not change any more. Both legs have what was flushed: it is FlushMirror too, with the errors of that.
func (s Stack) HoldMirror(context.Context) error {
	return s.moving("hold its mirror", func() error {
		d, err := s.flushedMirror()
		if err != nil {
			return err
		}
		return dm.Hold(d.Name)
	})
}

// ReleaseMirror ends HoldMirror. It is not for a mirror of which one leg has failed: the kernel would begin to copy what that leg lacks, and after a failed flush
// neither Unmirror nor Switch would ever end. These two also end HoldMirror.
func (s Stack) ReleaseMirror(context.Context) error {
	return s.moving("go on with its mirror", func() error {
		d, err := s.seat()
		if err == nil && d.Suspended {
			err = dm.Resume(d.Name, dm.NoScan)
		}
		return err
	})
}

// Unmirror brings a volume back to its old leg alone. Writes that the mirror holds go there, unless that leg has failed a write or a flush: then they fail,
// as they would without a mirror. What the old leg may lack (Forgot) is copied there first: errdefs.ErrBusy until that is done. Without a mirror it only
// repairs what a crash left of one.
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
		return m.leaveForOld(d)
	})
}

// leaveForOld is leave for the old leg. A flush that this leg has failed is not given to it again: a disk tells only once what it has lost, and may take the
// second one. Of a mirror that is Held it is given to it all the same: the kernel keeps it for the next table.
func (m mirror) leaveForOld(d *dm.Device) error {
	if m.oldLacks() {
		return m.leave(d, m.Old, dm.ReplaceFailing)
	}
	return m.leave(d, m.Old, dm.Replace)
}

// oldLacks reports whether the old leg has failed a write or a flush, as far as the kernel says.
func (m mirror) oldLacks() bool {
	return slices.ContainsFunc(m.parts, func(p part) bool {
		return slices.ContainsFunc(p.Legs, func(l dm.Leg) bool { return l.Device == m.Old && l.Failed && !l.OnlyReads })
	})
}

// leave replaces a mirror by one of its legs. What happens to writes that the mirror holds is for replace: dm.Replace or dm.ReplaceFailing.
func (m mirror) leave(d *dm.Device, leg uint64, replace func(name string, table []dm.Line) error) error {
	size, err := d.Size()
	if err == nil {
		err = replace(d.Name, dm.Linear(leg, size))
	}
	if err == nil {
		err = errors.Join(m.over.remove(), forget(d.Name))
	}
	return err
}

// settled repairs what a crash left of a seat that is no mirror.
func settled(d *dm.Device) error {
	left, err := findNewLeg(d.Name)
	return errors.Join(settle(d), err, left.remove(), forget(d.Name))
}

// Switch brings a volume to its new leg alone, and gives its devices the names of the stack to, of another pool or the same one. The devices stay what
// they are for all who hold them. Writes that the mirror holds go to the new leg. It may be called again after a crash at any point of it.
// errdefs.ErrPrecondition if there was no mirror.
func (s Stack) Switch(ctx context.Context, to Stack) error {
	return s.moving("switch it to where it moves", func() error { return s.switchTo(ctx, to) })
}

func (s Stack) switchTo(ctx context.Context, to Stack) error {
	d, err := s.seat()
	if errors.Is(err, errdefs.ErrUnsupported) {
		if d, err := to.seat(); err == nil { // the seat is renamed last, so all else is done
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
		if err = m.over.flush(); err == nil { // HoldMirror has done that
			err = m.leave(d, m.New, dm.Replace)
		}
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

// rename gives the devices of a stack the name of another top. The seat is the last: as long as it has its old name, Mirrors finds it.
func (t top) rename(before, after string) error {
	if err := t.renameTop(after); err != nil {
		return err
	}
	if err := t.renameCrypt(after); err != nil {
		return err
	}
	return dm.Rename(before+seatSuffix, after+seatSuffix)
}

// renameCrypt renames the open device of an encrypted volume, if there is one, to fit a top called after.
func (t top) renameCrypt(after string) error {
	name, d, err := crypt{t}.find()
	if err == nil && d != nil {
		err = dm.Rename(name, after+cryptSuffix)
	}
	return errors.Join(err, luks.ForgetNode(name))
}

// renameTop renames the top, if there is one. errdefs.ErrBusy while this process holds its writes back.
func (t top) renameTop(after string) error {
	before, _, d, err := t.find()
	if err != nil || d == nil {
		return err
	}
	if t.stacks.has(before, suspended) { // it is resumed by its name
		return fmt.Errorf("%w: writes to it are held back", errdefs.ErrBusy)
	}
	if err := dm.Rename(before, after); err != nil {
		return err
	}
	t.stacks.mark(after, leaving, t.stacks.has(before, leaving))
	t.stacks.mark(before, leaving, false)
	return nil
}

// Mirrors returns the volumes of a pool that have a mirror, and those whose Switch was cut short.
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

// moves reports whether a seat is a mirror, or is over a device that is not of its pool.
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

// top returns the volume's top, whether it is attached or not; false if it cannot have one.
func (s Stack) top() (top, bool) {
	names, ok := blockdev.As[blockdev.Stackable](s.pool)
	return top{s.stacks, names, s.pool, s.ref}, ok && s.stacks.hasMapper()
}

// seat returns the volume's seat; errdefs.ErrUnsupported if it has none.
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

// moving adds to an error of do what was being done, and to which volume.
func (s Stack) moving(what string, do func() error) error {
	if err := do(); err != nil {
		return fmt.Errorf("%s, %s of pool %s: %w", what, s.ref, s.pool.Name(), err)
	}
	return nil
}
