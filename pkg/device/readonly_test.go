package device_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/device"
)

// TestReadOnly: nobody writes to a device that is read-only, also by a node of his own, as a container runtime makes it; nor does anything that he tries show
// to those who read the device through the page cache. It stays so when it has grown, and after a start. It ends when the volume is attached to be written to.
func TestReadOnly(t *testing.T) {
	overEach(t, func(f *fixture) {
		content := bytes.Repeat([]byte("ashlar.."), blockdev.Granularity/8)
		places := []int64{0, size - blockdev.Granularity}
		d := f.attach(device.Options{Keep: true})
		for _, at := range places {
			check.OK(f, writeAt(d.Path, content, at))
		}
		same := f.attach(device.Options{Keep: true, ReadOnly: true})
		check.OK(f, writeAt(same.Path, content, 0)) // who has it for writing keeps it
		check.OK(f, errors.Join(d.Close(), same.Close(), f.stack().Detach(f.Context())))

		readOnly := device.Options{Keep: true, ReadOnly: true}
		d = f.attach(readOnly)
		check.OK(f, d.Close())
		f.recover()
		f.unwritten(content, places...)
		_, err := f.pool.Expand(f.Context(), f.ref, 2*size)
		check.OK(f, err)
		check.OK(f, f.stack().Grow(f.Context(), nil))
		f.recover()
		d = f.attach(readOnly)
		check.OK(f, d.Close())
		f.unwritten(content, places...)
		f.is(f.attached()[0], 2*size, "grown")

		d = f.attach(device.Options{Keep: true})
		check.OK(f, writeAt(d.Path, content, 2*size-blockdev.Granularity))
		check.OK(f, errors.Join(d.Close(), f.stack().Detach(f.Context())))
		f.gone()
	})
}

// writeAt writes to a device, and syncs it.
func writeAt(path string, content []byte, at int64) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(content, at)
	return errors.Join(err, f.Sync(), f.Close())
}

// unwritten attacks the volume's device by a node of its own. The device holds content at some places, and is read through the page cache.
func (f *fixture) unwritten(content []byte, places ...int64) {
	f.Helper()
	node := filepath.Join(f.TempDir(), "node")
	check.OK(f, unix.Mknod(node, unix.S_IFBLK|0o600, int(f.attached()[0].Number)))
	reader, err := os.Open(node)
	check.OK(f, err)
	defer reader.Close()
	for name, attack := range attacks {
		for _, at := range places {
			if file, err := os.OpenFile(node, os.O_RDWR, 0); err == nil {
				if err := attack(file, at); err == nil {
					f.Errorf("%s at %d went through", name, at)
				}
				_ = file.Close() // what it could not write out it says again
			}
			have := make([]byte, len(content))
			_, err := reader.ReadAt(have, at)
			check.OK(f, err)
			if !bytes.Equal(have, content) {
				f.Errorf("after %s a reader sees other bytes at %d", name, at)
			}
		}
	}
	if file, err := os.OpenFile(node, os.O_RDWR, 0); err == nil {
		if memory, err := unix.Mmap(int(file.Fd()), 0, blockdev.Granularity, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
			f.Error("it can be mapped to be written to")
			_ = unix.Munmap(memory)
		}
		_ = file.Close()
	}
}
