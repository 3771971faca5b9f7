package mirror

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/loop"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

const (
	// unit is what is copied at a time to a leg that joins, at least. It is larger for a volume of which there would be too many: the kernel writes all of the log each time.
	unit      = 1 << 20
	mostUnits = 1 << 16
)

func unitOf(size int64) int64 {
	u := int64(unit)
	for size/u > mostUnits {
		u *= 2
	}
	return fit(u, size)
}

// unitsOf is of how many units a volume is, of which the last may be larger than what is left.
func unitsOf(size int64) int64 { return (size + unitOf(size) - 1) / unitOf(size) }

// Join has a leg made equal to those that are current: the kernel copies the ranges that differ, in whole units of 1 MiB or more, while the mirror is used. What is written where it is equal goes to the leg as well, what
// is written where it is not yet goes to the others alone, and is copied. When all is equal, State.Equal, Finish makes it one of the legs; before that nobody may take it for current. If it fails, or another leg does, writes are
// held as ever, until Leave.
//
// differs tells the ranges while the mirror is held, with nothing under way: whatever was written before is on all that are current, and whatever is written after goes to the leg. It should take no longer than its users can wait.
//
// A leg that joins or is in the mirror already stays as it is. errdefs.ErrUnavailable while another one joins, or a leg has failed. A crash leaves a mirror that it joins, or as it was; perhaps held, until Recover.
func Join(ctx context.Context, name string, leg uint64, differs func(context.Context) ([]dm.Range, error)) error {
	return change(name, "have "+dm.Number(leg)+" join it", func() error {
		s, err := state(name)
		if err != nil || slices.Contains(s.devices(), leg) || s.Joining != nil && s.Joining.Device == leg {
			return err
		}
		if err := s.whole(); err != nil {
			return err
		}
		err = join(ctx, name, s, leg, differs)
		if now, failure := state(name); failure == nil && now.Joining == nil {
			err = errors.Join(err, removeBelow(ctx, name))
		}
		return err
	})
}

func join(ctx context.Context, name string, s State, leg uint64, differs func(context.Context) ([]dm.Range, error)) error {
	d, err := dm.Find(name)
	if err != nil || d == nil {
		return errors.Join(err, unix.ENXIO)
	}
	if err := steady(append(s.devices(), leg)); err != nil { // also of a driver of before
		return err
	}
	uuid := func(suffix string) string {
		if d.UUID == "" {
			return ""
		}
		return d.UUID + suffix
	}
	s.Joining = &Leg{Device: leg}
	if err := s.current(ctx, s.devices(), func(table []dm.Line) error { return dm.Make(name+baseSuffix, uuid(baseSuffix), table) }); err != nil {
		return err
	}
	all := unitsOf(s.Size) * unitOf(s.Size)
	if err := spare(ctx, dm.Linear(leg, s.Size), all, unitOf(s.Size), func(table []dm.Line) error {
		return dm.Make(name+joinsSuffix, uuid(joinsSuffix), append(table, dm.Line{Start: all, Length: unitOf(s.Size), Kind: ended}))
	}); err != nil {
		return err
	}
	var legs []uint64
	for _, suffix := range []string{baseSuffix, joinsSuffix} {
		d, err := dm.Find(name + suffix)
		if err != nil || d == nil {
			return errors.Join(err, unix.ENXIO)
		}
		legs = append(legs, d.Number)
	}
	return still(name, func() error {
		ranges, err := differs(ctx)
		if err != nil {
			return err
		}
		log, number, err := inMemory(ctx, logOf(s.Size, ranges))
		if err != nil {
			return err
		}
		line := dm.Line{Length: all + unitOf(s.Size), Kind: target, Text: fmt.Sprintf("%s 2 %s %d%s%s", logged, dm.Number(number), unitOf(s.Size)/512, over(legs), features)}
		err = flushed(ctx, line, legs, func(table []dm.Line) error { return dm.Load(name, table) })
		return errors.Join(err, log.Close()) // the log goes with the table
	})
}

// current has the table be brought of what is current in a mirror, to the device that is over that alone: while a leg joins it is larger than the volume, by the rest of its last unit and one more.
func (s State) current(ctx context.Context, legs []uint64, bring func(table []dm.Line) error) error {
	if s.Joining == nil {
		return flat(ctx, s.Size, legs, bring)
	}
	return flat(ctx, s.Size, legs, func(table []dm.Line) error {
		return spare(ctx, table, (unitsOf(s.Size)+1)*unitOf(s.Size), unitOf(s.Size), bring)
	})
}

// spare has a table be brought that was made larger, by memory that nobody uses: a unit of it, or as much as one of a large volume may take, again and again.
func spare(ctx context.Context, table []dm.Line, size, piece int64, bring func(table []dm.Line) error) error {
	piece = min(piece, 16<<20)
	held, number, err := inMemory(ctx, make([]byte, piece))
	if err != nil {
		return err
	}
	for {
		last := table[len(table)-1]
		at := last.Start + last.Length
		if at >= size {
			break
		}
		table = append(table, dm.Line{Start: at, Length: min(piece, size-at), Kind: "linear", Text: dm.Number(number) + " 0"})
	}
	return errors.Join(bring(table), held.Close()) // it goes with the table
}

// Still waits until nothing that is being written to a mirror is under way: all of it is on all legs, or is held as one of them has failed. What comes meanwhile waits. errdefs.ErrUnavailable while a leg joins or has failed. It ends when the last leg
// has answered, or the connection to it has ended. A crash may leave the mirror held, until Recover.
func Still(name string) error {
	return change(name, "wait for what is under way", func() error {
		s, err := state(name)
		if err == nil {
			err = s.whole()
		}
		if err != nil {
			return err
		}
		return still(name, func() error { return nil })
	})
}

// still does something while a mirror is held, and resumes it: with the table that was loaded meanwhile, if that is without an error.
func still(name string, do func() error) error {
	if err := dm.Hold(name); err != nil {
		return err
	}
	err := do()
	if err != nil {
		err = errors.Join(err, dm.Clear(name))
	}
	return errors.Join(err, dm.Resume(name, dm.NoScan))
}

// inMemory makes a device of what is in memory alone. It goes with its last user.
func inMemory(ctx context.Context, bytes []byte) (held *os.File, number uint64, err error) {
	fd, err := unix.MemfdCreate("ashlar-mirror", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, 0, fmt.Errorf("memory for a device: %w", errdefs.FromErrno(err))
	}
	memory := os.NewFile(uintptr(fd), "memory for a device")
	defer memory.Close()
	if _, err := memory.Write(bytes); err != nil {
		return nil, 0, errdefs.FromErrno(err)
	}
	held, n, err := loop.Attach(ctx, memory, loop.Config{Label: "ashlar-mirror", Autoclear: true})
	return held, unix.Mkdev(loop.Major, uint32(n)), err
}

// logOf is a log as drivers/md/dm-log.c has it: a header, and from 1 KiB on a bit for each unit that is in sync. The last is behind the volume, and is not.
func logOf(size int64, differs []dm.Range) []byte {
	const magic, version, bits = 0x4D695272, 2, 1024
	u, units := unitOf(size), unitsOf(size)
	text := make([]byte, (bits+(units+1+63)/64*8+4095)/4096*4096)
	binary.LittleEndian.PutUint32(text, magic)
	binary.LittleEndian.PutUint32(text[4:], version)
	binary.LittleEndian.PutUint64(text[8:], uint64(units+1))
	for i := range units {
		text[bits+i/8] |= 1 << (i % 8)
	}
	for _, r := range differs {
		for i := max(0, r.Offset) / u; r.Length > 0 && i < units && i*u < r.Offset+r.Length; i++ {
			text[bits+i/8] &^= 1 << (i % 8)
		}
	}
	return text
}

// Finish makes the leg that joined, and is on the volume's list, one of those that are current, and the one called near, if it is among them, the first that is read from. errdefs.ErrUnavailable
// while it is not equal, or if it has failed. If none joins, it does nothing but for the order.
func Finish(ctx context.Context, name string, near uint64) error {
	return change(name, "finish the leg that joins it", func() error {
		s, err := state(name)
		if err != nil {
			return err
		}
		if len(s.Failed()) > 0 || s.Held || s.Joining != nil && !s.Equal() {
			return fmt.Errorf("%w: not all its legs are equal, and whole", errdefs.ErrUnavailable)
		}
		legs := s.devices()
		if s.Joining != nil {
			legs = append(legs, s.Joining.Device)
		}
		if i := slices.Index(legs, near); i > 0 {
			legs = slices.Insert(slices.Delete(legs, i, i+1), 0, near)
		}
		if slices.Equal(legs, s.devices()) {
			return nil
		}
		return settle(ctx, name, s.Size, legs)
	})
}
