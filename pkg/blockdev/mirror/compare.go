package mirror

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/direct"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Chunk is how much is compared at a time, in bytes.
const Chunk = 1 << 20

const block = 4 << 10 // the unit of the ranges that Compare returns

// Compare reads all legs of a mirror that is in use, in chunks from an offset on. It returns the ranges, in blocks of 4 KiB, in which the bytes of a leg
// differ from those of the first. Legs differ for a moment while a write is under way: so ranges that differ are read again while the mirror is held
// (milliseconds for each MiB), and count only if they differ then.
//
// pace is called before each chunk, with its offset and what was found so far, and may wait. Compare ends with the first error, and returns what it has
// found until then. errdefs.ErrUnavailable while a leg joins or has failed, and when the mirror gets other legs. A crash may leave the mirror suspended,
// until Recover.
func Compare(ctx context.Context, name string, from int64, pace func(ctx context.Context, at int64, differ []dm.Range) error) (differ []dm.Range, err error) {
	err = of(name, "compare its legs", func() error {
		s, err := state(name)
		if err != nil {
			return err
		}
		legs, free, err := comparedLegs{}.allocate(s.devices())
		defer func() { free() }()
		for at := from; err == nil && at < s.Size; at += Chunk {
			if err = errors.Join(ctx.Err(), pace(ctx, at, differ)); err != nil {
				return err
			}
			var found []dm.Range
			if found, err = legs.compare(ctx, name, at, min(Chunk, s.Size-at)); err != nil {
				return err
			}
			for _, r := range found {
				if n := len(differ); n > 0 && differ[n-1].Offset+differ[n-1].Length == r.Offset {
					differ[n-1].Length += r.Length
					continue
				}
				differ = append(differ, r)
			}
		}
		return err
	})
	return differ, err
}

// comparedLeg is a leg that is compared, with memory for a chunk. Its device is open only while it is read, so that a leg that leaves can be given back.
type comparedLeg struct {
	leg    uint64
	f      *os.File
	memory []byte
}

type comparedLegs []comparedLeg

// allocate returns the legs of devices, each with memory that is theirs until free is called. free is never nil.
func (legs comparedLegs) allocate(devices []uint64) (_ comparedLegs, free func(), err error) {
	var ends []func()
	free = func() {
		for _, end := range ends {
			end()
		}
	}
	for _, device := range devices {
		memory, end, err := direct.Memory(Chunk)
		if err != nil {
			return nil, free, err
		}
		ends, legs = append(ends, end), append(legs, comparedLeg{leg: device, memory: memory})
	}
	return legs, free, nil
}

// check returns errdefs.ErrUnavailable unless a mirror has just these legs, and all of them are whole.
func (legs comparedLegs) check(name string) error {
	s, err := state(name)
	if err == nil {
		err = s.checkWhole()
	}
	if err == nil && !slices.EqualFunc(legs, s.devices(), func(l comparedLeg, device uint64) bool { return l.leg == device }) {
		err = fmt.Errorf("%w: it has other legs by now", errdefs.ErrUnavailable)
	}
	return err
}

// compare returns the blocks of a range in which the legs differ, also while the mirror is held.
func (legs comparedLegs) compare(ctx context.Context, name string, at, length int64) (found []dm.Range, err error) {
	if err := legs.check(name); err != nil {
		return nil, err
	}
	defer legs.close()
	for i := range legs {
		if legs[i].f, err = openNumber(legs[i].leg); err != nil {
			return nil, err
		}
	}
	found, err = legs.differ(at, length)
	if err == nil && len(found) > 0 {
		found, err = legs.differHeld(ctx, name, at, length)
	}
	return found, err
}

// close closes all legs that are open. They were only read, so errors do not matter.
func (legs comparedLegs) close() {
	for i := range legs {
		if legs[i].f != nil {
			_ = legs[i].f.Close()
			legs[i].f = nil
		}
	}
}

// openNumber opens a block device by its number, for reads past the page cache. errdefs.ErrUnavailable if the device's node is another one's.
func openNumber(number uint64) (*os.File, error) {
	name, err := os.Readlink(dm.Sysfs(number))
	if err != nil {
		return nil, fmt.Errorf("leg %s: %w", dm.Number(number), errdefs.FromErrno(err))
	}
	f, err := direct.Open("/dev/"+filepath.Base(name), os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	err = unix.Fstat(int(f.Fd()), &st)
	if err == nil && st.Rdev != number {
		err = fmt.Errorf("%w: %s is another device", errdefs.ErrUnavailable, f.Name())
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("leg %s: %w", dm.Number(number), err)
	}
	return f, nil
}

// differ returns the blocks of a range in which a leg has other bytes than the first.
func (legs comparedLegs) differ(at, length int64) (found []dm.Range, err error) {
	for _, l := range legs {
		if _, err := l.f.ReadAt(l.memory[:length], at); err != nil && !errors.Is(err, io.EOF) {
			return nil, fmt.Errorf("read leg %s at %d: %w", dm.Number(l.leg), at, errdefs.FromErrno(err))
		}
	}
	for from := int64(0); from < length; from += block {
		to := min(from+block, length)
		for _, l := range legs[1:] {
			if !bytes.Equal(l.memory[from:to], legs[0].memory[from:to]) {
				found = append(found, dm.Range{Offset: at + from, Length: to - from})
				break
			}
		}
	}
	return found, nil
}

// differHeld is differ while the mirror is held, so that no write is under way.
func (legs comparedLegs) differHeld(ctx context.Context, name string, at, length int64) (found []dm.Range, err error) {
	defer lock(name)()
	if err := legs.check(name); err != nil {
		return nil, err
	}
	err = still(ctx, name, func() error {
		found, err = legs.differ(at, length)
		return err
	})
	return found, err
}
