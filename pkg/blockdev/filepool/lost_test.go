package filepool_test

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// TestLostWrites: the disk does not take all that a copy wrote. The retry copies it again. The kernel reports that once, when the image is synced, and
// shows the bytes until it drops them from its cache. (A full disk that is thinner than it says loses new bytes.)
func TestLostWrites(t *testing.T) {
	drivertest.NeedRoot(t)
	base := drivertest.Dir(t)
	below, dir := filepath.Join(base, "below"), filepath.Join(base, "mnt")
	check.OK(t, os.Mkdir(below, 0o700))
	check.OK(t, os.Mkdir(dir, 0o700))
	run(t, "mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", below)
	t.Cleanup(func() { drivertest.Unmount(t, below) })
	disk := filepath.Join(below, "disk")
	check.OK(t, os.WriteFile(disk, nil, 0o600))
	check.OK(t, os.Truncate(disk, 1<<30))
	run(t, "mkfs.ext4", "-q", "-O", "^has_journal", "-E", "lazy_itable_init=0,nodiscard", disk)
	device := drivertest.Loop(t, disk)
	run(t, "mount", "-t", "ext4", device, dir)
	t.Cleanup(func() { drivertest.Unmount(t, dir) })
	run(t, "losetup", "-d", device) // it goes with the mount

	pool := pooltest.OpenedFiles(t, dir+"/pool")
	const apart = 32 << 10 // such small pieces are copied through the page cache
	spec := blockdev.Spec{Ref: pooltest.Vol("1"), Name: "a", Size: 16 * pooltest.MiB, Provisioning: blockdev.Thin}
	pooltest.Create(t, pool, spec)
	a := pooltest.Attach(t, pool, spec.Ref, blockdev.Attachment{})
	want := bytes.Repeat([]byte("ashlar42"), 4096/8)
	for at := int64(0); at < spec.Size; at += apart {
		pooltest.WriteTo(t, a.Path, at, want)
	}
	check.OK(t, a.Close())
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Snap("2"), Name: "s", Size: spec.Size, Origin: spec.Ref})

	fill, err := os.Create(filepath.Join(below, "fill"))
	check.OK(t, err)
	size, err := io.Copy(fill, zeros{})
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	check.OK(t, fill.Truncate(size-512<<10)) // room for the record, and for some of the bytes
	restored := blockdev.Spec{Ref: pooltest.Vol("3"), Name: "b", Size: spec.Size, Provisioning: blockdev.Thin, Origin: pooltest.Snap("2")}
	if _, err := pool.Create(t.Context(), restored); !errors.Is(err, errdefs.ErrNoSpace) && !errors.Is(err, unix.EIO) { // by what the disk below says
		t.Errorf("a restore to a disk that takes no more: %v", err)
	}
	check.OK(t, fill.Close())
	check.OK(t, os.Remove(fill.Name()))
	check.OK(t, pooltest.Second(pool.Create(t.Context(), restored)))
	image, err := os.Open(path(dir+"/pool", restored.Ref, ".img"))
	check.OK(t, err)
	defer image.Close()
	check.OK(t, unix.Fadvise(int(image.Fd()), 0, 0, unix.FADV_DONTNEED))
	for at := int64(0); at < spec.Size; at += apart {
		have := make([]byte, len(want))
		if _, err := image.ReadAt(have, at); err != nil || !bytes.Equal(have, want) {
			t.Fatalf("the restored volume has lost what the snapshot has at byte %d: %v, %q", at, err, have[:8])
		}
	}
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }
