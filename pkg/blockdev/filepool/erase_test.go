package filepool_test

import (
	"bytes"
	"context"
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

// TestErased: objects that share blocks are erased, in whatever order, and copies are cut short. Their beginnings are nowhere on the disk, and no other
// object loses a byte.
func TestErased(t *testing.T) {
	drivertest.NeedRoot(t)
	const size = 8 * pooltest.MiB
	head, rest := bytes.Repeat([]byte("the head of it  "), blockdev.HeadSize/16), bytes.Repeat([]byte("the rest of it  "), (size-blockdev.HeadSize)/16)
	a, b, c, d := pooltest.Vol("a"), pooltest.Snap("b"), pooltest.Vol("c"), pooltest.Vol("d")
	for _, fs := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fs, func(t *testing.T) {
			dir := filepath.Join(drivertest.Dir(t), "d")
			disk := drivertest.MountNew(t, fs, dir, 512*pooltest.MiB)
			pool := pooltest.OpenFiles(t, filepath.Join(dir, "pool"))
			defer func() { check.OK(t, pool.Close()) }()
			ctx := t.Context()
			begin := func() {
				pooltest.Create(t, pool, blockdev.Spec{Ref: a, Size: size})
				device := pooltest.Attach(t, pool, a, blockdev.Attachment{})
				pooltest.WriteTo(t, device.Path, 0, append(bytes.Clone(head), rest...))
				check.OK(t, device.Close())
				pooltest.Create(t, pool, blockdev.Spec{Ref: b, Size: size, Origin: a})
			}
			// cutShort leaves a copy of a snapshot that has all its bytes, and one of a volume, which is removed at once.
			cutShort := func() {
				for ref, origin := range map[blockdev.Ref]blockdev.Ref{c: b, d: a} {
					_, err := pool.Create(ctx, blockdev.Spec{Ref: ref, Name: "cut short", Size: size, Origin: origin, Prepare: func(context.Context, string) error { return context.Canceled }})
					pooltest.Fails(t, err, context.Canceled, "Create")
				}
			}
			erased := func(what string) {
				t.Helper()
				mnt, err := os.Open(dir)
				check.OK(t, errors.Join(err, unix.Syncfs(int(mnt.Fd())), mnt.Close()))
				if at := find(t, disk, head[:64]); at >= 0 { // Linux 6.1 leaks 32 bytes of its memory into an inode in the log of btrfs
					t.Errorf("%s: its beginning is on the disk still, at byte %d", what, at)
				}
				if find(t, disk, rest[:64]) < 0 {
					t.Errorf("%s: nothing of it is on the disk, so this shows nothing", what)
				}
			}
			begin()
			cutShort()
			check.OK(t, pool.Delete(ctx, c))
			check.OK(t, errors.Join(pool.Erase(ctx, b), pool.Erase(ctx, a)))
			erased("a copy deleted")

			begin()
			cutShort()
			check.OK(t, pool.Close())
			pool = pooltest.OpenFiles(t, filepath.Join(dir, "pool"))
			if _, err := os.Stat(path(filepath.Join(dir, "pool"), c, ".img")); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the start left a copy that was cut short: %v", err)
			}
			check.OK(t, errors.Join(pool.Erase(ctx, a), pool.Erase(ctx, b)))
			erased("a copy found by a start")

			begin()
			pooltest.Create(t, pool, blockdev.Spec{Ref: c, Size: size, Origin: b})
			check.OK(t, errors.Join(pool.Erase(ctx, a), pool.Erase(ctx, b)))
			device := pooltest.Attach(t, pool, c, blockdev.Attachment{})
			have, err := os.ReadFile(device.Path)
			check.OK(t, errors.Join(err, device.Close()))
			if !bytes.Equal(have, append(bytes.Clone(head), rest...)) {
				t.Error("a copy lost bytes with its origins")
			}
			check.OK(t, errors.Join(pool.Erase(ctx, c), pool.Erase(ctx, c)))
			erased("a copy")

			begin()
			all := []blockdev.Ref{a, b}
			check.OK(t, errors.Join(pooltest.AtOnce(len(all), func(i int) error { return pool.Erase(ctx, all[i]) })...))
			erased("two at once")
		})
	}
}

// find returns the first offset of some bytes in a file; -1 if they are nowhere. It reads piece by piece, as a whole disk is too much for the race
// detector.
func find(t testing.TB, path string, text []byte) int64 {
	t.Helper()
	f, err := os.Open(path)
	check.OK(t, err)
	defer f.Close()
	buffer := make([]byte, pooltest.MiB)
	for at := int64(0); ; at += int64(len(buffer) - len(text) + 1) {
		n, err := f.ReadAt(buffer, at)
		if found := bytes.Index(buffer[:n], text); found >= 0 {
			return at + int64(found)
		}
		if errors.Is(err, io.EOF) {
			return -1
		}
		check.OK(t, err)
	}
}

// TestEraseInUse: nothing of an object in use is overwritten.
func TestEraseInUse(t *testing.T) {
	drivertest.NeedRoot(t)
	pool := pooltest.OpenURL(t, "file://"+drivertest.Dir(t)+"/pool?reservePercent=0")
	t.Cleanup(func() { check.OK(t, pool.Close()) })
	content := bytes.Repeat([]byte("the head of it  "), pooltest.MiB/16)
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: pooltest.MiB})
	device := pooltest.Attach(t, pool, pooltest.Vol("a"), blockdev.Attachment{})
	pooltest.WriteTo(t, device.Path, 0, content)
	pooltest.Fails(t, pool.Erase(t.Context(), pooltest.Vol("a")), errdefs.ErrInUse, "Erase")
	have, err := os.ReadFile(device.Path)
	check.OK(t, err)
	if !bytes.Equal(have, content) {
		t.Error("what is in use was overwritten")
	}
	check.OK(t, device.Close())
	check.OK(t, pool.Erase(t.Context(), pooltest.Vol("a")))
}

// TestEraseSecondName: an image with a second name, of another object or of a backup, keeps its bytes. Images of older drivers do not say whose they are.
func TestEraseSecondName(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t) + "/pool"
	pool := pooltest.OpenURL(t, "file://"+dir+"?reservePercent=0")
	t.Cleanup(func() { check.OK(t, pool.Close()) })
	content := bytes.Repeat([]byte("the head of it  "), pooltest.MiB/16)
	a, b := pooltest.Vol("a"), pooltest.Vol("b")
	for _, ref := range []blockdev.Ref{a, b} {
		pooltest.Create(t, pool, blockdev.Spec{Ref: ref, Size: pooltest.MiB})
	}
	device := pooltest.Attach(t, pool, a, blockdev.Attachment{})
	pooltest.WriteTo(t, device.Path, 0, content)
	check.OK(t, device.Close())
	check.OK(t, errors.Join(unix.Removexattr(path(dir, a, ".img"), "user.ashlar.object"), os.Remove(path(dir, b, ".img")), os.Link(path(dir, a, ".img"), path(dir, b, ".img"))))
	check.OK(t, pool.Erase(t.Context(), b))
	have, err := os.ReadFile(path(dir, a, ".img"))
	check.OK(t, err)
	if !bytes.Equal(have, content) {
		t.Error("another volume was overwritten")
	}
}

// TestEraseCopied: an object is not erased while it is copied.
func TestEraseCopied(t *testing.T) {
	drivertest.NeedRoot(t)
	pool := pooltest.OpenURL(t, "file://"+drivertest.Dir(t)+"/pool?reservePercent=0")
	t.Cleanup(func() { check.OK(t, pool.Close()) })
	a, b := pooltest.Vol("a"), pooltest.Vol("b")
	pooltest.Create(t, pool, blockdev.Spec{Ref: a, Size: pooltest.MiB})
	pooltest.Create(t, pool, blockdev.Spec{Ref: b, Size: pooltest.MiB, Origin: a, Prepare: func(ctx context.Context, _ string) error {
		pooltest.Fails(t, pool.Erase(ctx, a), errdefs.ErrBusy, "Erase")
		return nil
	}})
	check.OK(t, pool.Erase(t.Context(), a))
}
