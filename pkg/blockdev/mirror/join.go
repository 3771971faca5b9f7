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
	// unit is the least that is copied at a time to a leg that joins, in bytes. It is doubled until a volume has no more than mostUnits: the kernel writes
	// the whole log each time.
	unit      = 1 << 20
	mostUnits = 1 << 16
)

// unitOf returns the unit of a volume of size bytes.
func unitOf(size int64) int64 {
	u := int64(unit)
	for size/u > mostUnits {
		u *= 2
	}
	return fit(u, size)
}

// unitsOf returns how many units a volume has; the last one may end behind the volume.
func unitsOf(size int64) int64 { return (size + unitOf(size) - 1) / unitOf(size) }

// joinSize returns the size of the devices below a mirror of size bytes that a leg joins: whole units, and one more.
func joinSize(size int64) int64 { return (unitsOf(size) + 1) * unitOf(size) }

// Join begins to make a leg equal to those that are current: the kernel copies the ranges that differ, in whole units of 1 MiB or more, while the mirror
// is used. A write to a part that is equal already goes to the joining leg as well; a write to any other part goes to the current legs alone, and is
// copied later. When all is equal (State.Equal), Finish makes it one of the legs; before that nobody may take it for current. If a leg fails meanwhile,
// writes are held until Leave.
//
// The joining leg is not flushed until FlushLeg. If a flush fails, the kernel never begins to copy a unit that is next to be copied and is being written to
// (dm_rh_dec in drivers/md/dm-region-hash.c does not look for that), and each suspension waits for that copy, for ever: no leg could leave any more.
//
// differs returns the ranges. It is called while the mirror is held and no write is under way: what was written before is on all current legs, and what is
// written later goes to the joining leg too. Users of the mirror wait until it returns.
//
// If the leg joins or is in the mirror already, nothing changes. errdefs.ErrUnavailable while another leg joins, or one has failed; ErrUnfit if its logical
// sectors are larger than the mirror's, which would get them: what is over it may write smaller parts, as XFS does. After a crash the leg
// joins or does not, and the mirror may be suspended until Recover.
func Join(ctx context.Context, name string, leg uint64, differs func(context.Context) ([]dm.Range, error)) error {
	return change(name, "have "+dm.Number(leg)+" join it", func() error {
		s, err := state(name)
		if err != nil || slices.Contains(s.devices(), leg) || s.Joining != nil && s.Joining.Device == leg {
			return err
		}
		if err := s.checkWhole(); err != nil {
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
	if err := checkSectors(d.Number, leg); err != nil {
		return err
	}
	if err := requireStableWrites(append(s.devices(), leg)); err != nil { // also for a mirror that an older driver made
		return err
	}
	uuid := func(suffix string) string {
		if d.UUID == "" {
			return ""
		}
		return d.UUID + suffix
	}
	s.Joining = &Leg{Device: leg}
	if err := s.current(ctx, name, s.devices(), func(table []dm.Line) error { return makeNoted(name+baseSuffix, uuid(baseSuffix), table) }); err != nil {
		return err
	}
	all := unitsOf(s.Size) * unitOf(s.Size)
	if err := extended(ctx, dm.Linear(leg, s.Size), all, unitOf(s.Size), func(table []dm.Line) error {
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
	if err := dm.SetFlushed(legs[1], false); err != nil {
		return err
	}
	return still(ctx, name, func() error {
		ranges, err := differs(ctx)
		if err != nil {
			return err
		}
		log, number, err := inMemory(ctx, logOf(s.Size, ranges), 0)
		if err != nil {
			return err
		}
		line := dm.Line{Length: all + unitOf(s.Size), Kind: target, Text: fmt.Sprintf("%s 2 %s %d%s%s", logged, dm.Number(number), unitOf(s.Size)/512, over(legs), features)}
		err = tailed(ctx, name, line, func(table []dm.Line) error { return dm.Load(name, table) })
		return errors.Join(err, log.Close()) // the log goes with the table
	})
}

// current calls bring with the table of the device over some current legs alone (inner). While a leg joins, that device is larger than the volume: by the
// rest of the last unit, and by one more unit.
func (s State) current(ctx context.Context, name string, legs []uint64, bring func(table []dm.Line) error) error {
	if s.Joining == nil {
		return flat(ctx, name, s.Size, legs, bring)
	}
	return flat(ctx, name, s.Size, legs, func(table []dm.Line) error {
		return extended(ctx, table, joinSize(s.Size), unitOf(s.Size), bring)
	})
}

// extended calls bring with table, extended to size by memory that nobody uses: one piece of at most 16 MiB, mapped again and again.
func extended(ctx context.Context, table []dm.Line, size, piece int64, bring func(table []dm.Line) error) error {
	piece = min(piece, 16<<20)
	held, number, err := inMemory(ctx, make([]byte, piece), 0)
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

// Still waits until no write to a mirror is under way: each is on all legs, or is held as a leg has failed. Later writes wait meanwhile. It ends when the
// last leg has answered, or the connection to it has ended. errdefs.ErrUnavailable while a leg joins or has failed; if one fails meanwhile, the mirror is Held.
// A crash may leave the mirror suspended, until Recover.
func Still(ctx context.Context, name string) error {
	return change(name, "wait for what is under way", func() error {
		s, err := state(name)
		if err == nil {
			err = s.checkWhole()
		}
		if err != nil {
			return err
		}
		return still(ctx, name, func() error { return nil })
	})
}

// still calls do while a mirror is held, and then resumes it: with the table that do has loaded, or, if do fails or loads none, with the present one. If a leg
// has failed by then, do is not called, and the mirror stays held: see resume.
func still(ctx context.Context, name string, do func() error) error {
	if err := dm.Hold(name); err != nil {
		return err
	}
	s, err := state(name)
	if err == nil && len(s.Failed()) > 0 {
		return errors.Join(s.resume(ctx, name), fmt.Errorf("%w: leg %s has failed", errdefs.ErrUnavailable, numbers(s.Failed())))
	}
	if err == nil && s.Forgot {
		err = errForgot
	}
	if err == nil {
		err = do()
	}
	if err != nil {
		err = errors.Join(err, dm.Clear(name))
	}
	return errors.Join(err, dm.Resume(name, dm.NoScan))
}

// resume resumes a mirror with its present table, unless some of its legs have failed: then it is Held, until these leave. With that table the kernel would begin
// to copy to them what they lack, and if one has failed a flush, no later table would ever take effect (docs/decisions/replicas.md).
func (s State) resume(ctx context.Context, name string) error {
	failed := s.Failed()
	whole := slices.DeleteFunc(s.devices(), func(l uint64) bool { return slices.Contains(failed, l) })
	if s.Joining != nil || len(failed) == 0 || len(whole) == 0 {
		return dm.Resume(name, dm.NoScan)
	}
	return s.current(ctx, name, whole, func(table []dm.Line) error { return dm.Load(name, table) })
}

// inMemory makes a loop device over bytes in memory, which takes flushes and no discards. The device goes with its last user; the caller is one until it closes held.
func inMemory(ctx context.Context, bytes []byte, sectors uint32) (held *os.File, number uint64, err error) {
	fd, err := unix.MemfdCreate("ashlar-mirror", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, 0, fmt.Errorf("memory for a device: %w", errdefs.FromErrno(err))
	}
	memory := os.NewFile(uintptr(fd), "memory for a device")
	defer memory.Close()
	if _, err := memory.Write(bytes); err != nil {
		return nil, 0, errdefs.FromErrno(err)
	}
	held, n, err := loop.Attach(ctx, memory, loop.Config{Label: "ashlar-mirror", Autoclear: true, Sector: sectors})
	return held, unix.Mkdev(loop.Major, uint32(n)), err
}

// logOf returns a log in the format of drivers/md/dm-log.c: a header, and from 1 KiB on a bit for each unit that is in sync. Units of the volume are in
// sync but for those in differs. The last unit is behind the volume, and is not in sync.
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

// FlushLeg makes durable what a leg has, of the mirror or the one that joins. The latter has to be equal, and is flushed from now on as the others are: it may
// be put on the volume's list then. It waits for what is under way to that leg, for as long as that does not answer. An error if the leg could not be
// flushed, or has failed: a disk tells only once what it could not flush, and that may have been another one's flush, which the mirror holds.
func FlushLeg(name string, leg uint64) error {
	return of(name, "flush "+dm.Number(leg), func() error {
		steps := []func() error{
			func() error { return takeFlushes(name) },
			func() error { return flush(leg) },
			func() error { return takeFlushes(name) }, // all flushes that were under way beside this one have been told
		}
		for _, step := range steps {
			if err := step(); err != nil {
				return err
			}
		}
		s, err := state(name)
		if err == nil && (slices.Contains(s.Failed(), leg) || s.Joining != nil && s.Joining.Device == leg && s.Joining.Failed) {
			err = fmt.Errorf("%w: it has failed", errdefs.ErrUnavailable)
		}
		return err
	})
}

// takeFlushes has the leg that joins flushed, if there is one, and waits for what is under way to it.
func takeFlushes(name string) error {
	d, err := dm.Find(name + joinsSuffix)
	if err != nil || d == nil {
		return err
	}
	return dm.TakeFlushes(d.Name)
}

// Finish makes the leg that joins one of the current legs. It has to be on the volume's list. The leg near, if it is among them, becomes the first, which
// is read from. If no leg joins, only that order may change. errdefs.ErrUnavailable while the joining leg is not equal, or a leg has failed. A
// crash may leave the mirror suspended, until Recover.
func Finish(ctx context.Context, name string, near uint64) error {
	return change(name, "finish the leg that joins it", func() error {
		s, err := state(name)
		if err != nil {
			return err
		}
		if len(s.Failed()) > 0 || s.Held || s.Forgot || s.Joining != nil && !s.Equal() {
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
		return replaceAndCleanUp(ctx, name, s.Size, legs, legs)
	})
}
