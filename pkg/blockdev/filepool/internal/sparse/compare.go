package sparse

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/extents"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Zero tells whether the first bytes of a file are nothing but zeros. Holes, and preallocated space that was never written, are;
// what was written is read.
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

// readsZero tells whether a part of a file has nothing but zeros in it.
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

// Allocated passes on where the first bytes of a file have data, from an offset on.
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
	return w.Flush()
}

// Changed passes on where two files differ, from an offset on: it reads both where either has data, and compares. The target is
// as large as the base, or larger.
func Changed(ctx context.Context, base, target *os.File, baseSize, size, from int64, yield func(blockdev.Extent) error) error {
	const block = 64 << 10
	have, want := make([]byte, block), make([]byte, block)
	w := &extents.Writer{Yield: yield}
	for offset := from - from%block; offset < size; {
		if err := ctx.Err(); err != nil {
			return err
		}
		a, _, err := dataFrom(base, min(offset, baseSize), baseSize)
		if err != nil {
			return err
		}
		if a >= baseSize {
			a = size
		}
		b, _, err := dataFrom(target, offset, size)
		if err != nil {
			return err
		}
		if offset = min(a, b) / block * block; offset >= size || min(a, b) >= size {
			break
		}
		n := min(size-offset, block)
		clear(have)
		if _, err := base.ReadAt(have[:n], offset); err != nil && !errors.Is(err, io.EOF) {
			return errdefs.FromErrno(err)
		}
		if _, err := target.ReadAt(want[:n], offset); err != nil {
			return errdefs.FromErrno(err)
		}
		if !bytes.Equal(have[:n], want[:n]) {
			if err := w.Add(blockdev.Extent{Offset: offset, Length: n}); err != nil {
				return err
			}
		}
		offset += n
	}
	return w.Flush()
}
