package sparse

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io"
	"os"

	"github.com/ashlar-csi/ashlar/internal/progress"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/fiemap"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/extents"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Zero reports whether the first size bytes of a file are zeros. Holes, and preallocated space that was never written, are; what was written is read.
func Zero(ctx context.Context, f *os.File, size int64) (bool, error) {
	for offset := int64(0); offset < size; {
		start, stop, err := dataFrom(f, offset, size)
		if err != nil {
			return false, err
		}
		if zero, err := readsZero(ctx, f, start, stop); !zero || err != nil {
			return false, err
		}
		offset = stop
	}
	return true, nil
}

// readsZero reports whether a part of a file is zeros. It reads it.
func readsZero(ctx context.Context, f *os.File, start, stop int64) (bool, error) {
	buffer := make([]byte, min(1<<20, stop-start))
	for start < stop {
		if err := ctx.Err(); err != nil {
			return false, err
		}
		part := buffer[:min(int64(len(buffer)), stop-start)]
		if _, err := f.ReadAt(part, start); err != nil {
			return false, errdefs.FromErrno(err)
		}
		if len(bytes.Trim(part, "\x00")) > 0 {
			return false, nil
		}
		start += int64(len(part))
	}
	return true, nil
}

// Allocated passes on where the first size bytes of a file have data, from an offset on. errdefs.ErrDataLoss if somebody cuts the file short meanwhile.
func Allocated(ctx context.Context, f *os.File, size, from int64, yield func(blockdev.Extent) error) error {
	ForgetCached(f)
	w := &extents.Writer{Yield: yield}
	for offset := from; offset < size; {
		if err := ctx.Err(); err != nil {
			return err
		}
		start, stop, err := dataFrom(f, offset, size)
		if err != nil {
			return err
		}
		if stop > start {
			if err := w.Add(blockdev.Extent{Offset: start, Length: stop - start}); err != nil {
				return err
			}
		}
		offset = stop
	}
	if err := StillWhole(f, size); err != nil {
		return err
	}
	return w.Flush()
}

// Changed passes on where two files, which nobody writes to, differ, from an offset on; target is as large as base, or larger. Blocks that they share are
// equal. All else in which either has data is read and compared. It reports its progress. errdefs.ErrDataLoss if somebody cuts one of them short
// meanwhile.
func Changed(ctx context.Context, base, target *os.File, baseSize, size, from int64, yield func(blockdev.Extent) error) error {
	c := &comparison{base: base, target: target, baseSize: baseSize, size: size, far: from, w: &extents.Writer{Yield: yield},
		have: make([]byte, compared), want: make([]byte, compared)}
	ForgetCached(base)
	ForgetCached(target)
	progress.Begin(ctx, from, size)
	if from >= size {
		return ctx.Err()
	}
	start := from - from%compared // ranges begin at multiples of compared, whatever from is
	for offset, done := start, start; offset < size; {
		if err := ctx.Err(); err != nil {
			return err
		}
		apart, next, err := fiemap.Apart(base, target, offset, size)
		if err != nil {
			return err
		}
		for _, r := range apart {
			// A block of which a part is shared is read whole, and once.
			if done, err = c.compare(ctx, max(done, r.Start-r.Start%compared), r.End); err != nil {
				return err
			}
		}
		c.told(ctx, next)
		offset = next
	}
	if err := cmp.Or(StillWhole(base, baseSize), StillWhole(target, size)); err != nil {
		return err
	}
	return c.w.Flush()
}

// compared is the unit of ranges that differ, in bytes.
const compared = 64 << 10

// comparison compares two files.
type comparison struct {
	base, target   *os.File
	baseSize, size int64
	far            int64 // up to where progress was reported
	w              *extents.Writer
	have, want     []byte
}

// told reports the progress up to an offset.
func (c *comparison) told(ctx context.Context, at int64) {
	if at > c.far {
		progress.Skip(ctx, at-c.far)
		c.far = at
	}
}

// compare compares from an offset, a multiple of compared, to an end, and returns up to where it came, which may be beyond end.
func (c *comparison) compare(ctx context.Context, offset, end int64) (int64, error) {
	for offset < end {
		if err := ctx.Err(); err != nil {
			return offset, err
		}
		a, _, err := dataFrom(c.base, min(offset, c.baseSize), c.baseSize)
		if err != nil {
			return offset, err
		}
		if a >= c.baseSize {
			a = c.size
		}
		b, _, err := dataFrom(c.target, offset, c.size)
		if err != nil {
			return offset, err
		}
		if offset = max(offset, min(a, b)/compared*compared); offset >= end || min(a, b) >= c.size {
			return max(offset, end), nil
		}
		n := min(c.size-offset, compared)
		clear(c.have)
		if _, err := c.base.ReadAt(c.have[:n], offset); err != nil && !errors.Is(err, io.EOF) {
			return offset, errdefs.FromErrno(err)
		}
		if _, err := c.target.ReadAt(c.want[:n], offset); err != nil {
			return offset, cmp.Or(StillWhole(c.target, c.size), errdefs.FromErrno(err))
		}
		if !bytes.Equal(c.have[:n], c.want[:n]) {
			if err := c.w.Add(blockdev.Extent{Offset: offset, Length: n}); err != nil {
				return offset, err
			}
		}
		offset += n
		c.told(ctx, offset)
	}
	return offset, nil
}
