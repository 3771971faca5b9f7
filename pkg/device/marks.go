package device

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/era"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/luks"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Marking says where the marks of a volume are kept: what was written to it, and in which era (package era).
type Marking struct {
	Metadata blockdev.Device // the caller holds it open
	Block    int64           // bytes that one mark is for
}

// ErrMarks is in errors of Attach and Grow that are of the marks alone: without Marking, or after Unmark, the call succeeds.
var ErrMarks = errors.New("marks of what is written")

// ReasonMarksLost is the reason of the problem of a volume that is attached with marks, and whose marks are not kept any more. All else is well.
const ReasonMarksLost = "MarksLost"

// Marked is how a volume is attached, and the state of its marks.
type Marked struct {
	Attached bool // for writing; a pool's device counts only if it is kept, as no user was given another one
	era.State
}

// Kept reports whether all writes are marked, and the marks can be read.
func (m Marked) Kept() bool { return m.Block > 0 }

// marked is a device of the device mapper over the pool's device that marks what is written to it. It is the lowest of ours, so writes through any device
// above are marked.
//
// It goes with its last user, as a crypt does. Its name is the top's and a suffix. After Unmark, where marks could not be kept any more, it only shows
// what is below it.
type marked struct{ top }

const markedSuffix = "-marks"

func isMarked(l layer) bool { _, is := l.(marked); return is }

func (m marked) find() (name, uuid string, d *dm.Device, err error) {
	name, uuid, d, err = m.findAs(markedSuffix)
	return name, uuid + markedSuffix, d, err
}

// ofMarks marks an error as one of the marks (ErrMarks). That a device has vanished stays as it is.
func ofMarks(err error) error {
	if err == nil || dm.Vanished(err) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrMarks, err)
}

func (m marked) attach(_ context.Context, below blockdev.Device, o Options) (_ blockdev.Device, err error) {
	name, uuid, d, err := m.find()
	if err == nil && d != nil && !d.Live { // who made it was cut short
		_, err = dm.Remove(name)
		d = nil
	}
	if err == nil && d == nil && o.Marking == nil { // it was there a moment ago (Stack.has), and is not wanted otherwise
		err = fmt.Errorf("device %s went away with its last user: %w", name, unix.ENXIO)
	}
	if err != nil {
		return blockdev.Device{}, err
	}
	if d == nil {
		d, err = lay(name, false, func() error {
			return era.Make(name, uuid, below.Size, o.Marking.Block, o.Marking.Metadata.Number, below.Number)
		})
		if err != nil {
			if taken := unclaimed(below); taken != nil { // the kernel says no more than that it is invalid
				return blockdev.Device{}, fmt.Errorf("%w: %w", taken, err)
			}
			return blockdev.Device{}, ofMarks(err)
		}
		defer func() {
			if err != nil { // nobody has it
				_, removed := dm.Remove(name)
				err = errors.Join(err, removed)
			}
		}()
	} else if err := errors.Join(m.fit(d, below), m.seal(d)); err != nil {
		return blockdev.Device{}, err
	}
	return passing(d, below)
}

// unclaimed returns unix.EBUSY if somebody has a device for himself.
func unclaimed(d blockdev.Device) error {
	f, err := os.OpenFile(d.Path, os.O_RDONLY|unix.O_EXCL, 0)
	if !errors.Is(err, unix.EBUSY) {
		_ = f.Close() // of no harm if it is nil
		return nil
	}
	return err
}

// fit brings the device to the size of the one below.
func (m marked) fit(d *dm.Device, below blockdev.Device) error {
	if fits, err := fitsOver(d, below, true); err != nil || fits {
		return err
	}
	marks, err := m.marks(d)
	switch {
	case err != nil:
		return err
	case !marks:
		return dm.Make(d.Name, "", dm.Linear(below.Number, below.Size))
	}
	return ofMarks(era.Grow(d.Name, below.Size))
}

// marks reports whether the device marks writes; after Unmark it only shows what is below it.
func (m marked) marks(d *dm.Device) (bool, error) {
	kind, _, err := dm.Table(d.Name) // the table can be read also while the device is suspended
	return kind != "linear", err
}

// seal has the device pass no discards down: of a discard only the first block would be marked.
func (m marked) seal(d *dm.Device) error {
	if marks, err := m.marks(d); err != nil || !marks {
		return err
	}
	return ofMarks(era.NoDiscards(d.Name))
}

func (m marked) attached(context.Context) (devices []blockdev.Device, below []uint64, err error) {
	_, _, d, err := m.find()
	if err != nil {
		return nil, nil, err
	}
	return shown(d, false)
}

func (m marked) grow(ctx context.Context, _ luks.Key) error {
	_, _, d, err := m.find()
	if err != nil || d == nil || !d.Live {
		return err
	}
	below, there, err := belowOf(ctx, d, bottom{m.pool, m.ref})
	if err == nil && there {
		err = m.fit(d, below)
	}
	if dm.Vanished(err) {
		return nil
	}
	return err
}

func (m marked) suspend(context.Context) (func() error, error) { return nil, nil } // the top is

func (m marked) detach(ctx context.Context) error {
	_, _, d, err := m.find()
	if err != nil || d == nil {
		return err
	}
	_, err = removed(ctx, d)
	return err
}

func (m marked) health(ctx context.Context) ([]blockdev.Problem, error) {
	if problems, err := m.healthOf(ctx, markedSuffix); err != nil || len(problems) > 0 {
		return problems, err
	}
	name, _, d, err := m.find()
	if err != nil || d == nil || !d.Live {
		return nil, err
	}
	_, known, err := inTime(ctx, m.stacks, name, healthPatience, func() (era.State, error) { return era.StateOf(name) })
	if !known {
		return nil, err
	}
	if err == nil || dm.Vanished(err) {
		return nil, nil
	}
	return []blockdev.Problem{{Severity: blockdev.Degraded, Reason: ReasonMarksLost, Message: fmt.Sprintf(
		"what is written to %s of pool %s is not marked any more (%v): should it be away for a while, all of it is copied; marks begin anew when it is attached next", m.ref, m.pool.Name(), err)}}, nil
}

// recover repairs the device after a crash, as crypt.recover does.
func (m marked) recover(ctx context.Context) error {
	_, _, d, err := m.find()
	if err != nil || d == nil {
		return err
	}
	if err := settle(d); err != nil || !d.Live {
		return err
	}
	return errors.Join(m.grow(ctx, nil), m.seal(d))
}

// markings returns the devices that mark writes, of all volumes of a pool that have one.
func (s *Stacks) markings(pool blockdev.Pool) ([]marked, error) {
	tops, err := s.under(pool, markedSuffix)
	var found []marked
	for _, t := range tops {
		found = append(found, marked{t})
	}
	return found, err
}

// Marked returns how a volume is attached and the state of its marks, from the kernel alone. Without marks the state is zero. errdefs.ErrUnavailable if the
// disk does not answer.
func (s Stack) Marked(ctx context.Context) (m Marked, err error) {
	for _, l := range s.layers(ctx) {
		devices, _, err := l.attached(ctx)
		if err != nil {
			return Marked{}, s.errorOf(l, err)
		}
		_, pools := l.(bottom)
		m.Attached = m.Attached || slices.ContainsFunc(devices, func(d blockdev.Device) bool { return !d.ReadOnly && (!pools || d.Kept) })
	}
	t, can := s.top()
	if !can || !m.Attached {
		return m, nil
	}
	name, _, d, err := marked{t}.find()
	if err != nil || d == nil || !d.Live {
		return m, err
	}
	state, err := s.stacks.stateOf(ctx, name)
	if errors.Is(err, errdefs.ErrUnavailable) || ctx.Err() != nil {
		return m, s.errorOf(marked{t}, err)
	}
	if err == nil { // else none are kept
		m.State = state
	}
	return m, nil
}

// marks returns the name of the device that marks writes to an attached volume; ErrUnsupported if there is none.
func (s Stack) marks() (name string, err error) {
	t, can := s.top()
	var d *dm.Device
	if can {
		name, _, d, err = marked{t}.find()
	}
	if err == nil && (d == nil || !d.Live) {
		err = fmt.Errorf("%w: it is not attached, or was without marks", errdefs.ErrUnsupported)
	}
	return name, err
}

// BeginEra begins an era of the marks of a volume: see era.Begin. errdefs.ErrUnavailable if the disk does not answer; the era may begin all the same.
func (s Stack) BeginEra(ctx context.Context) (number uint32, err error) {
	err = s.moving("begin an era", func() error {
		name, err := s.marks()
		if err == nil {
			number, err = s.stacks.beginEra(ctx, name)
		}
		return err
	})
	return number, err
}

// Written returns what was written to a volume since an era: see era.Since. errdefs.ErrPrecondition for an era that has not begun; that of ctx if this ends
// before the disk answers.
func (s Stack) Written(ctx context.Context, since uint32) (written []blockdev.Extent, err error) {
	err = s.moving("look at what was written to it", func() error {
		name, err := s.marks()
		if err != nil {
			return err
		}
		state, err := s.stacks.stateOf(ctx, name)
		if err == nil && since > state.Era {
			err = fmt.Errorf("%w: it is in era %d, and %d was asked for", errdefs.ErrPrecondition, state.Era, since)
		}
		if err != nil {
			return err
		}
		ranges, err := s.stacks.written(ctx, name, since)
		for _, r := range ranges {
			written = append(written, blockdev.Extent(r))
		}
		return err
	})
	return written, err
}

// Unmark ends the marks of an attached volume, which stays in use. Without marks it does nothing.
func (s Stack) Unmark() error {
	return s.moving("end its marks", func() error {
		t, can := s.top()
		if !can {
			return nil
		}
		_, _, d, err := marked{t}.find()
		if err != nil || d == nil || !d.Live {
			return err
		}
		return era.End(d.Name)
	})
}

// underSeat returns the device of the volume's own that a seat is over: the one that marks, or the pool's. False if it is over neither.
func (t top) underSeat(ctx context.Context, seat *dm.Device) (blockdev.Device, bool, error) {
	return belowOf(ctx, seat, marked{t}, bottom{t.pool, t.ref})
}
