package device_test

import (
	"bytes"
	"errors"
	"os"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/direct"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/device"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Requests of linux/fs.h. The argument is a pair of offset and length in bytes.
const (
	blkDiscard       = 0x1277
	blkSecureDiscard = 0x127d
	blkZeroOut       = 0x127f
)

// attacks are all ways in which who has a device open for writing changes what is on it.
var attacks = map[string]func(f *os.File, at int64) error{
	"write": func(f *os.File, at int64) error {
		_, err := f.WriteAt(bytes.Repeat([]byte{7}, blockdev.Granularity), at)
		return errors.Join(err, f.Sync())
	},
	"discard":        func(f *os.File, at int64) error { return ranged(f, blkDiscard, at) },
	"secure discard": func(f *os.File, at int64) error { return ranged(f, blkSecureDiscard, at) },
	"zero":           func(f *os.File, at int64) error { return ranged(f, blkZeroOut, at) },
	"punch": func(f *os.File, at int64) error {
		return unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, at, blockdev.Granularity)
	},
}

func ranged(f *os.File, request uintptr, at int64) error {
	span := [2]uint64{uint64(at), blockdev.Granularity}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, uintptr(unsafe.Pointer(&span))); errno != 0 {
		return errno
	}
	return nil
}

// TestGuarded: what is guarded can be opened for writing, and nothing that is done to it, at its beginning or at its end, comes through; also after it has grown, and
// after a start. A flush is nothing to fail.
func TestGuarded(t *testing.T) {
	overEach(t, func(f *fixture) {
		d := f.attach(device.Options{Keep: true})
		f.writes(d.Path)
		content := bytes.Repeat([]byte("ashlar.."), blockdev.Granularity/8)
		file, err := os.OpenFile(d.Path, os.O_RDWR|unix.O_SYNC, 0)
		check.OK(f, err)
		places := []int64{0, size / 2, size - 2*blockdev.Granularity, size - blockdev.Granularity}
		for _, at := range places {
			_, err := file.WriteAt(content, at)
			check.OK(f, err)
		}
		_, err = f.stack().Attach(f.Context(), device.Options{Keep: true, Guarded: true})
		pooltest.Fails(f, err, errdefs.ErrInUse, "guarded while it is written to")
		check.OK(f, errors.Join(file.Close(), d.Close(), f.stack().Detach(f.Context())))

		guarded := f.attach(device.Options{Keep: true, Guarded: true})
		check.OK(f, guarded.Close())
		f.recover()
		f.unwritable(content, places...)
		_, err = f.stack().Attach(f.Context(), device.Options{Keep: true})
		pooltest.Fails(f, err, errdefs.ErrInUse, "written to while it is guarded")
		_, err = f.pool.Expand(f.Context(), f.ref, 2*size)
		check.OK(f, err)
		check.OK(f, f.stack().Grow(f.Context(), nil))
		f.recover()
		f.unwritable(content, places...)
		f.unwritable(make([]byte, blockdev.Granularity), 2*size-blockdev.Granularity)
		f.is(guarded, 2*size, "grown")

		check.OK(f, f.stack().Detach(f.Context()))
		f.gone()
		f.writes(f.attach(device.Options{}).Path)
	})
}

// unwritable attacks the volume's device, which holds content at some places.
func (f *fixture) unwritable(content []byte, places ...int64) {
	f.Helper()
	d := f.attached()[0]
	for name, attack := range attacks {
		for _, at := range places {
			file, err := os.OpenFile(d.Path, os.O_RDWR, 0)
			check.OK(f, err)
			if err := attack(file, at); err == nil {
				f.Errorf("%s at %d went through", name, at)
			}
			_ = file.Close() // what it could not write out it says again
		}
	}
	file, err := os.OpenFile(d.Path, os.O_RDWR, 0)
	check.OK(f, err)
	check.OK(f, errors.Join(file.Sync(), file.Close()))
	for _, at := range places {
		f.holds(d.Path, at, content)
	}
}

// holds makes sure of what a device has at a place, whatever the page cache says.
func (f *fixture) holds(path string, at int64, content []byte) {
	f.Helper()
	file, err := direct.Open(path, os.O_RDONLY)
	check.OK(f, err)
	defer file.Close()
	have, free, err := direct.Memory(len(content))
	check.OK(f, err)
	defer free()
	_, err = file.ReadAt(have, at)
	check.OK(f, err)
	if !bytes.Equal(have, content) {
		f.Errorf("%s has other bytes at %d", path, at)
	}
}

// TestGuardedAlone: without a device mapper nothing is read by many.
func TestGuardedAlone(t *testing.T) {
	pool := pooltest.OpenedFiles(t, t.TempDir())
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: size})
	_, err := (&device.Stacks{}).Of(pool, pooltest.Vol("a")).Attach(t.Context(), device.Options{Keep: true, Guarded: true})
	pooltest.Fails(t, err, errdefs.ErrUnsupported, "guarded without a device mapper")
}
