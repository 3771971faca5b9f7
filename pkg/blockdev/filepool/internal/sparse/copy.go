package sparse

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/progress"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/direct"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

const (
	// copyChunk bounds how much is copied between two looks at the context, in bytes.
	copyChunk = 16 << 20
	// copyBlock is how much is read at once past the page cache, while the block before it is written, in bytes.
	copyBlock = 512 << 10
	// directLeast is the length from which on data goes past the page cache, in bytes. Past it each block is waited for, which is slow for scattered data.
	directLeast = 64 << 10
	// directAlignment is an alignment that all disks take for I/O past the page cache, in bytes.
	directAlignment = 4096
)

// Copy copies the data of src in [offset, end) to the same place in dst, which has to read as zeros where src has holes. It returns up to where dst is
// complete, also with an error. It reports its progress.
//
// Long stretches of data go past the page cache, if the filesystem can: a large copy would push everything else on the node out of it.
func Copy(ctx context.Context, dst, src *os.File, offset, end int64) (int64, error) {
	c := newCopier(dst, src)
	defer c.close()
	for offset < end {
		start, stop, err := dataFrom(src, offset, end)
		if err != nil {
			return offset, err
		}
		progress.Skip(ctx, start-offset)
		offset = start
		for offset < stop {
			if err := ctx.Err(); err != nil {
				return offset, err
			}
			n, err := c.copy(offset, min(stop-offset, copyChunk))
			offset += n
			progress.Add(ctx, n)
			if err != nil {
				return offset, fmt.Errorf("copy %s at byte %d: %w", src.Name(), offset, errdefs.FromErrno(err))
			}
		}
	}
	return offset, nil
}

// copier copies parts of a file to the same place in another one.
type copier struct {
	dst, src *os.File
	// Both files opened past the page cache, and the writer there; nil if that cannot be done.
	in, out *os.File
	writing *direct.Behind
	end     func() // ends writing
}

func newCopier(dst, src *os.File) *copier {
	c := &copier{dst: dst, src: src}
	var err error
	if c.in, err = again(src, os.O_RDONLY); err != nil {
		return c
	}
	if c.out, err = again(dst, os.O_RDWR); err == nil {
		c.writing, c.end, err = direct.WriteBehind(c.out, copyBlock)
	}
	if err != nil {
		c.close()
	}
	return c
}

// again opens an open file once more, past the page cache.
func again(f *os.File, flags int) (*os.File, error) {
	return direct.Open(fmt.Sprintf("/proc/self/fd/%d", f.Fd()), flags)
}

// close closes what is open past the page cache.
func (c *copier) close() {
	if c.end != nil {
		c.end()
	}
	c.in.Close()
	c.out.Close()
	c.in, c.out, c.writing, c.end = nil, nil, nil, nil
}

// copy copies up to length bytes, and returns how many.
func (c *copier) copy(offset, length int64) (int64, error) {
	if c.writing != nil && length >= directLeast && (offset|length)%directAlignment == 0 {
		err := c.past(offset, length)
		if err == nil {
			return length, nil
		}
		if !errors.Is(err, unix.EINVAL) {
			return 0, err
		}
		c.close() // open(2): some filesystems refuse direct I/O only here
	}
	return copyRange(c.dst, c.src, offset, length)
}

// past copies length bytes past the page cache.
func (c *copier) past(offset, length int64) error {
	for at, end := offset, offset+length; at < end; {
		piece := c.writing.Next()[:min(copyBlock, end-at)]
		n, err := c.in.ReadAt(piece, at)
		if errors.Is(err, io.EOF) {
			return errShort(c.src, at+int64(n))
		}
		if err != nil {
			return err
		}
		if err := c.writing.Write(n, at); err != nil {
			return err
		}
		at += int64(n)
	}
	return c.writing.Wait()
}

// copyRange copies up to length bytes through the page cache, in the kernel where it can.
func copyRange(dst, src *os.File, offset, length int64) (int64, error) {
	in, out := offset, offset
	n, err := unix.CopyFileRange(int(src.Fd()), &in, int(dst.Fd()), &out, int(length), 0)
	if n > 0 {
		return int64(n), nil
	}
	if err != nil && !errors.Is(err, unix.EXDEV) && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.ENOSYS) {
		return 0, err
	}
	copied, err := io.Copy(io.NewOffsetWriter(dst, offset), io.NewSectionReader(src, offset, length))
	if err == nil && copied == 0 {
		err = errShort(src, offset)
	}
	return copied, err
}

// correct makes dst equal to src where it differs. same: it did not differ.
func correct(ctx context.Context, dst, src *os.File, size int64) (same bool, err error) {
	const block = 1 << 20
	ForgetCached(src)
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
		offset -= offset % blockdev.Granularity
		end := aEnd
		if b < a {
			end = bEnd
		}
		end = min(size, (end+blockdev.Granularity-1)/blockdev.Granularity*blockdev.Granularity)
		n := min(end-offset, block)
		if _, err := src.ReadAt(want[:n], offset); errors.Is(err, io.EOF) {
			return false, errShort(src, offset)
		} else if err != nil {
			return false, errdefs.FromErrno(err)
		}
		if _, err := dst.ReadAt(have[:n], offset); err != nil {
			return false, errdefs.FromErrno(err)
		}
		if !bytes.Equal(want[:n], have[:n]) {
			same = false
			if _, err := dst.WriteAt(want[:n], offset); err != nil {
				return false, errdefs.FromErrno(err)
			}
		}
		offset += n
	}
	return same, StillWhole(src, size)
}

// copyRounds bounds how often a copy of a source that is written to is compared again.
const copyRounds = 8

// CopyMoving copies a source that others may be writing to. It compares the two, and corrects the copy, until a round finds no difference: that proves
// that the copy is the source at one moment, between that round and the one before. errdefs.ErrInUse if that does not happen within copyRounds.
func CopyMoving(ctx context.Context, dst, src *os.File, size int64) error {
	if _, err := Copy(ctx, dst, src, 0, size); err != nil {
		return err
	}
	for range copyRounds {
		if same, err := correct(ctx, dst, src, size); same || err != nil {
			return err
		}
	}
	return fmt.Errorf("%w: the volume is being written to as a raw block device, and its pool cannot copy in an instant; stop the writes, or use a pool on XFS or btrfs", errdefs.ErrInUse)
}

// StayEqual returns errdefs.ErrInUse if a source differs from the copy that CopyMoving or ShareMoving made of it. It may change the copy then.
func StayEqual(ctx context.Context, dst, src *os.File, size int64) error {
	if same, err := correct(ctx, dst, src, size); same || err != nil {
		return err
	}
	return fmt.Errorf("%w: the volume was written to as a raw block device while others were cut at the same moment, and its writers cannot be held back; stop the writes, or use a pool on XFS or btrfs, on a kernel with a device mapper", errdefs.ErrInUse)
}
