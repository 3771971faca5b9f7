package blockdev

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// copyChunk bounds how much is copied between two looks at the context, in bytes.
const copyChunk = 16 << 20

// canReflink finds out whether the filesystem of an empty file can share blocks between
// files (FICLONE, ioctl_ficlone(2)), by having it share nothing: that needs no space.
func canReflink(empty *os.File) bool {
	return unix.IoctlFileClone(int(empty.Fd()), int(empty.Fd())) == nil
}

// forgetCached drops what reads have left of a file in the page cache: of preallocated space
// that was never written, cached pages count as data.
func forgetCached(f *os.File) { _ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED) }

// dataFrom returns the next stretch of data of a file at or after offset, below end.
// Holes and preallocated space that was never written are no data (lseek(2)).
func dataFrom(f *os.File, offset, end int64) (start, stop int64, err error) {
	start, err = unix.Seek(int(f.Fd()), offset, unix.SEEK_DATA)
	if errors.Is(err, unix.ENXIO) || (err == nil && start >= end) {
		return end, end, nil
	}
	if err != nil {
		return 0, 0, fmt.Errorf("find data in %s: %w", f.Name(), systemError(err))
	}
	stop, err = unix.Seek(int(f.Fd()), start, unix.SEEK_HOLE)
	if err != nil {
		return 0, 0, fmt.Errorf("find a hole in %s: %w", f.Name(), systemError(err))
	}
	return start, min(stop, end), nil
}

// copyData copies the data of src in [offset, end) to the same place in dst, where
// everything that is a hole in src reads as zero already. It returns up to where dst
// is complete, also with an error.
func copyData(ctx context.Context, dst, src *os.File, offset, end int64) (int64, error) {
	for offset < end {
		start, stop, err := dataFrom(src, offset, end)
		if err != nil {
			return offset, err
		}
		offset = start
		for offset < stop {
			if err := ctx.Err(); err != nil {
				return offset, err
			}
			n, err := copyRange(dst, src, offset, min(stop-offset, copyChunk))
			offset += n
			if err != nil {
				return offset, fmt.Errorf("copy %s at byte %d: %w", src.Name(), offset, systemError(err))
			}
		}
	}
	return offset, nil
}

// copyRange copies up to length bytes, in the kernel where it can.
func copyRange(dst, src *os.File, offset, length int64) (int64, error) {
	in, out := offset, offset
	n, err := unix.CopyFileRange(int(src.Fd()), &in, int(dst.Fd()), &out, int(length), 0)
	if n > 0 {
		return int64(n), nil
	}
	if err != nil && !errors.Is(err, unix.EXDEV) && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.ENOSYS) {
		return 0, err
	}
	return io.Copy(io.NewOffsetWriter(dst, offset), io.NewSectionReader(src, offset, length))
}

// settle makes dst equal to src where it differs, and reports whether it did not.
func settle(ctx context.Context, dst, src *os.File, size int64) (same bool, err error) {
	const block = 1 << 20
	forgetCached(src)
	want, have := make([]byte, block), make([]byte, block)
	same = true
	for offset := int64(0); offset < size; {
		if err := ctx.Err(); err != nil {
			return false, err
		}
		a, aEnd, err := dataFrom(src, offset, size)
		if err != nil {
			return false, err
		}
		b, bEnd, err := dataFrom(dst, offset, size)
		if err != nil {
			return false, err
		}
		if offset = min(a, b); offset == size {
			break
		}
		offset -= offset % Granularity
		end := aEnd
		if b < a {
			end = bEnd
		}
		end = min(size, (end+Granularity-1)/Granularity*Granularity)
		n := min(end-offset, block)
		if _, err := src.ReadAt(want[:n], offset); err != nil {
			return false, systemError(err)
		}
		if _, err := dst.ReadAt(have[:n], offset); err != nil {
			return false, systemError(err)
		}
		if !bytes.Equal(want[:n], have[:n]) {
			same = false
			if _, err := dst.WriteAt(want[:n], offset); err != nil {
				return false, systemError(err)
			}
		}
		offset += n
	}
	return same, nil
}

// settleRounds bounds how often a copy of a moving source is looked over again.
const settleRounds = 8

// copyMoving copies a source that others may be writing to. A round that finds
// nothing to change proves the copy to be the source as it was between that round
// and the one before: a point in time.
func copyMoving(ctx context.Context, dst, src *os.File, size int64) error {
	if _, err := copyData(ctx, dst, src, 0, size); err != nil {
		return err
	}
	for range settleRounds {
		if same, err := settle(ctx, dst, src, size); same || err != nil {
			return err
		}
	}
	return fmt.Errorf("%w: the volume is being written to as a raw block device, and its pool cannot copy in an instant; stop the writes, or use a pool on XFS or btrfs", ErrInUse)
}

// extentSet is a set of byte ranges of the disk below a filesystem.
type extentSet struct{ ranges []extentRange }

type extentRange struct{ start, end uint64 }

// fiemap structures, include/uapi/linux/fiemap.h.
type fiemapExtent struct {
	logical, physical, length uint64
	_                         [2]uint64
	flags                     uint32
	_                         [3]uint32
}

type fiemapRequest struct {
	start, length                     uint64
	flags, mapped, extentCount, spare uint32
	extents                           [128]fiemapExtent
}

const (
	fiemapIoctl             = 0xC020660B // FS_IOC_FIEMAP
	fiemapExtentLast        = 0x1
	fiemapExtentUnknown     = 0x2
	fiemapExtentDelayed     = 0x4
	fiemapExtentDataInline  = 0x200
	fiemapExtentUnsupported = fiemapExtentUnknown | fiemapExtentDelayed | fiemapExtentDataInline
)

// add adds the blocks of a file and returns how many bytes of them are new.
func (e *extentSet) add(root *os.Root, path string) (int64, error) {
	f, err := root.Open(path)
	if err != nil {
		return 0, systemError(err)
	}
	defer f.Close()
	var fresh []extentRange
	var request fiemapRequest
	for next, last := uint64(0), false; !last; {
		request = fiemapRequest{start: next, length: ^uint64(0) - next, extentCount: uint32(len(request.extents))}
		if err := ioctlPointer(f.Fd(), fiemapIoctl, unsafe.Pointer(&request)); err != nil {
			return 0, fmt.Errorf("map the extents of %s: %w", path, systemError(err))
		}
		last = request.mapped == 0
		for _, x := range request.extents[:request.mapped] {
			if x.flags&fiemapExtentUnsupported == 0 {
				fresh = append(fresh, extentRange{x.physical, x.physical + x.length})
			}
			next, last = x.logical+x.length, last || x.flags&fiemapExtentLast != 0
		}
	}
	before := e.bytes()
	e.ranges = append(e.ranges, fresh...)
	e.merge()
	return e.bytes() - before, nil
}

func (e *extentSet) merge() {
	slices.SortFunc(e.ranges, func(a, b extentRange) int { return cmp.Compare(a.start, b.start) })
	merged := e.ranges[:0]
	for _, r := range e.ranges {
		if n := len(merged); n > 0 && r.start <= merged[n-1].end {
			merged[n-1].end = max(merged[n-1].end, r.end)
		} else {
			merged = append(merged, r)
		}
	}
	e.ranges = merged
}

func (e *extentSet) bytes() int64 {
	var n int64
	for _, r := range e.ranges {
		n += int64(r.end - r.start)
	}
	return n
}
