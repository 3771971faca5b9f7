// Package sparse copies, shares and compares files with holes without filling the holes, and finds out where they have data.
package sparse

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/progress"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// FirstStep is how much of an image one system call works on at first, in bytes, if its time depends on the number of extents. It has at most 16384 of
// them.
const FirstStep = 64 << 20

// quickStep is the time within which a step has to end for the next one to be twice as large.
const quickStep = 50 * time.Millisecond

// InSteps calls work for n bytes in parts, between which ctx may end it: small parts if they take long, and ever larger ones if not.
func InSteps(ctx context.Context, n int64, work func(n int64) error) error {
	for step := int64(FirstStep); n > 0; {
		if err := ctx.Err(); err != nil {
			return err
		}
		began, part := time.Now(), min(step, n)
		if err := work(part); err != nil {
			return err
		}
		n -= part
		if time.Since(began) < quickStep {
			step *= 2
		} else {
			step = FirstStep
		}
	}
	return nil
}

// CanShare reports whether the filesystem of an empty file can share blocks between files (FICLONE, ioctl_ficlone(2)). It tries that with the file itself,
// which needs no space.
func CanShare(empty *os.File) bool {
	return unix.IoctlFileClone(int(empty.Fd()), int(empty.Fd())) == nil
}

// ForgetCached drops what the page cache has of a file: cached pages of preallocated space that was never written would count as data.
func ForgetCached(f *os.File) { _ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED) }

// dataFrom returns the next stretch of data of a file at or after offset, and below end; from end to end if there is none. Holes and preallocated space
// that was never written are no data (lseek(2)).
func dataFrom(f *os.File, offset, end int64) (start, stop int64, err error) {
	start, err = unix.Seek(int(f.Fd()), offset, unix.SEEK_DATA)
	if errors.Is(err, unix.ENXIO) || (err == nil && start >= end) {
		return end, end, nil
	}
	if err != nil {
		return 0, 0, fmt.Errorf("find data in %s: %w", f.Name(), errdefs.FromErrno(err))
	}
	stop, err = unix.Seek(int(f.Fd()), start, unix.SEEK_HOLE)
	if err != nil {
		return 0, 0, fmt.Errorf("find a hole in %s: %w", f.Name(), errdefs.FromErrno(err))
	}
	return start, min(stop, end), nil
}

// Overwrite writes zeros over all data in the first n bytes of a file, durably. Holes stay.
func Overwrite(ctx context.Context, f *os.File, n int64) error {
	info, err := f.Stat()
	if err != nil {
		return errdefs.FromErrno(err)
	}
	n = min(n, info.Size())
	zeros := make([]byte, 1<<20)
	for offset := int64(0); offset < n; {
		if err := ctx.Err(); err != nil {
			return err
		}
		start, stop, err := dataFrom(f, offset, n)
		if err != nil {
			return err
		}
		offset = min(stop, start+int64(len(zeros)))
		if _, err := f.WriteAt(zeros[:offset-start], start); err != nil {
			return fmt.Errorf("overwrite %s at byte %d: %w", f.Name(), start, errdefs.FromErrno(err))
		}
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("sync %s: %w", f.Name(), errdefs.FromErrno(err))
	}
	return nil
}

// errShort returns the errdefs.ErrDataLoss for a source that ends too early.
func errShort(src *os.File, at int64) error {
	return fmt.Errorf("%w: %s ends at byte %d, and should be longer; somebody cut it short: restore it from a backup, or delete the volume", errdefs.ErrDataLoss, src.Name(), at)
}

// StillWhole returns errdefs.ErrDataLoss if src has less than n bytes: what somebody cut off looks like a hole to a search for data.
func StillWhole(src *os.File, n int64) error {
	info, err := src.Stat()
	if err == nil && info.Size() < n {
		err = errShort(src, info.Size())
	}
	return errdefs.FromErrno(err)
}

// Share makes dst share the blocks of the first n bytes of src, which nobody writes to meanwhile. The kernel takes some 50 us for each extent: so it goes
// in steps, between which ctx may end it. It reports its progress.
func Share(ctx context.Context, dst, src *os.File, n int64) error {
	offset := int64(0)
	return InSteps(ctx, n, func(n int64) error {
		err := unix.IoctlFileCloneRange(int(dst.Fd()), &unix.FileCloneRange{Src_fd: int64(src.Fd()), Src_offset: uint64(offset), Src_length: uint64(n), Dest_offset: uint64(offset)})
		if err != nil {
			return cmp.Or(StillWhole(src, offset+n), fmt.Errorf("clone %s at byte %d: %w", src.Name(), offset, errdefs.FromErrno(err)))
		}
		offset += n
		progress.Skip(ctx, n)
		return nil
	})
}

// ShareMoving is Share for a source that others may be writing to, in one step, so that it is of one moment. Writers wait for it.
func ShareMoving(dst, src *os.File) error {
	if err := unix.IoctlFileClone(int(dst.Fd()), int(src.Fd())); err != nil {
		return fmt.Errorf("clone %s: %w", src.Name(), errdefs.FromErrno(err))
	}
	return nil
}
