package lvmpool

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/ioctl"
	"github.com/ashlar-csi/ashlar/internal/progress"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/direct"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lvm2"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// zeroChunk bounds how much is zeroed at once, in bytes. Between two of them ctx may end it.
const zeroChunk = 64 << 20

// zeroRange zeroes the bytes from one offset to another of a block device (BLKZEROOUT, blkdev_issue_zeroout): the device does so itself if it guarantees
// zeros, otherwise the kernel writes them.
func zeroRange(ctx context.Context, f *os.File, from, to int64) error {
	_, err := zeroFrom(ctx, f, from, to)
	return err
}

// zeroFrom is zeroRange, and returns up to where it came, also with an error. It reports its progress, as copyDevice does.
func zeroFrom(ctx context.Context, f *os.File, from, to int64) (int64, error) {
	for at := from; at < to; {
		if err := ctx.Err(); err != nil {
			return at, fmt.Errorf("zero %s: %w", f.Name(), err)
		}
		span := [2]uint64{uint64(at), uint64(min(zeroChunk, to-at))}
		if err := ioctl.Pointer(f, unix.BLKZEROOUT, unsafe.Pointer(&span)); err != nil {
			return at, fmt.Errorf("zero %s from byte %d: %w", f.Name(), at, errdefs.FromErrno(err))
		}
		at += int64(span[1])
		progress.Add(ctx, int64(span[1]))
	}
	return to, nil
}

// writtenZeros returns the physical volumes of a report to which the kernel has to write zeros, as they have no command for that
// (queue/write_zeroes_max_bytes, sysfs-block(5)).
func writtenZeros(rows []lvm2.Row) (devices []string) {
	for _, r := range rows {
		if r["pv_name"] == "" {
			continue
		}
		path, err := filepath.EvalSymlinks(r["pv_name"])
		if err != nil {
			continue // it is missing
		}
		sys := "/sys/class/block/" + filepath.Base(path)
		most, err := os.ReadFile(sys + "/queue/write_zeroes_max_bytes")
		if err != nil { // the queue of a partition is its disk's
			most, err = os.ReadFile(sys + "/../queue/write_zeroes_max_bytes")
		}
		if err != nil || strings.TrimSpace(string(most)) == "0" {
			devices = append(devices, r["pv_name"])
		}
	}
	return devices
}

// copyBlock is how much is read at once, in bytes.
const copyBlock = 1 << 20

// copyDevice copies the bytes of a block device from an offset to an end to the same place of another one; both are open with O_DIRECT. Ranges that read
// as zeros are zeroed, so holes stay holes where the device has such. It returns up to where the copy is complete, also with an error.
func copyDevice(ctx context.Context, to, from *os.File, offset, end int64) (int64, error) {
	writing, free, err := direct.WriteBehind(to, copyBlock)
	if err != nil {
		return offset, err
	}
	defer free()
	zeros := make([]byte, copyBlock)
	done := offset  // up to here the target is complete, when the write that is under way has ended
	under := offset // where that write begins
	ended := func(err error) (int64, error) {
		switch failed := writing.Wait(); {
		case failed == nil:
			return done, err
		case errors.Is(err, failed):
			return under, err
		default:
			return under, errors.Join(failed, err)
		}
	}
	for at := offset; at < end; {
		if err := ctx.Err(); err != nil {
			return ended(fmt.Errorf("copy %s: %w", from.Name(), err))
		}
		block := writing.Next()[:min(copyBlock, end-at)]
		if _, err := from.ReadAt(block, at); err != nil {
			return ended(fmt.Errorf("read %s at byte %d: %w", from.Name(), at, errdefs.FromErrno(err)))
		}
		next := at + int64(len(block))
		if !bytes.Equal(block, zeros[:len(block)]) {
			if err := zeroRange(ctx, to, done, at); err != nil {
				return ended(err)
			}
			if err := writing.Write(len(block), at); err != nil {
				return ended(err)
			}
			progress.Add(ctx, next-at)
			under, done = at, next
		} else if next-done >= zeroChunk || next == end {
			if err := zeroRange(ctx, to, done, next); err != nil {
				return ended(err)
			}
			done = next
		}
		at = next
	}
	return ended(nil)
}
