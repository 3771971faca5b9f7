package mirror

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/direct"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

const (
	chunk = 1 << 20 // what is compared at a time
	block = 4 << 10 // what is told of
)

// Compare reads all legs of a mirror that is in use, side by side, and returns the ranges, in blocks of 4 KiB, in which one has other bytes than the first. What is being written differs for a moment; so what differs is
// read again with the mirror held for that (milliseconds for each MiB), and is told only if it does then. pace is called before each MiB, and may wait. Which leg is right nobody can tell from the bytes.
// It ends with the first error, with what it has found until then. errdefs.ErrUnavailable while a leg joins or has failed. A crash may leave the mirror held, until Recover.
func Compare(ctx context.Context, name string, pace func(context.Context) error) (differ []dm.Range, err error) {
	err = of(name, "compare its legs", func() error {
		s, err := state(name)
		if err != nil {
			return err
		}
		if err := s.whole(); err != nil {
			return err
		}
		legs, end, err := s.open()
		if err != nil {
			return err
		}
		defer end()
		for at := int64(0); at < s.Size; at += chunk {
			if err := errors.Join(ctx.Err(), pace(ctx)); err != nil {
				return err
			}
			length := min(chunk, s.Size-at)
			found, err := legs.differ(at, length)
			if err == nil && len(found) > 0 {
				found, err = legs.differHeld(name, at, length)
			}
			if err != nil {
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
		return nil
	})
	return differ, err
}

// compared is a leg that is open for reading, and memory for a chunk of it.
type compared struct {
	leg    uint64
	f      *os.File
	memory []byte
}

type side []compared

func (s State) open() (legs side, end func(), err error) {
	var ends []func()
	end = func() {
		for _, e := range ends {
			e()
		}
	}
	for _, l := range s.Legs {
		f, err := openNumber(l.Device)
		if err == nil {
			ends = append(ends, func() { _ = f.Close() }) // it was read only
			var memory []byte
			var free func()
			if memory, free, err = direct.Memory(chunk); err == nil {
				ends = append(ends, free)
				legs = append(legs, compared{l.Device, f, memory})
			}
		}
		if err != nil {
			end()
			return nil, nil, err
		}
	}
	return legs, end, nil
}

// Flush has what a leg has acknowledged be durable.
func Flush(leg uint64) error {
	f, err := openNumber(leg)
	if err == nil {
		err = errdefs.FromErrno(errors.Join(f.Sync(), f.Close()))
	}
	if err != nil {
		return fmt.Errorf("flush leg %s: %w", dm.Number(leg), err)
	}
	return nil
}

// openNumber opens a block device by its number, past the page cache.
func openNumber(number uint64) (*os.File, error) {
	name, err := os.Readlink("/sys/dev/block/" + dm.Number(number))
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
func (legs side) differ(at, length int64) (found []dm.Range, err error) {
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

// differHeld is differ while nothing is under way.
func (legs side) differHeld(name string, at, length int64) (found []dm.Range, err error) {
	defer lock(name)()
	s, err := state(name)
	if err == nil {
		err = s.whole()
	}
	if err == nil {
		err = dm.Hold(name)
	}
	if err != nil {
		return nil, err
	}
	found, err = legs.differ(at, length)
	return found, errors.Join(err, dm.Resume(name, dm.NoScan))
}
