package volume_test

import (
	"bytes"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// onOldKernel calls do on a thread to which the kernel says that it is Linux 2.6 (UNAME26 of personality(2)).
func onOldKernel(t *testing.T, do func()) {
	t.Helper()
	const uname26, ask = 0x0020000, 0xffffffff
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	personality := func(as uintptr) uintptr {
		before, _, errno := unix.Syscall(unix.SYS_PERSONALITY, as, 0, 0)
		if errno != 0 {
			t.Fatal(errno)
		}
		return before
	}
	before := personality(ask)
	personality(before | uname26)
	defer personality(before)
	do()
}

// TestRawCopies: a raw volume that is made of a snapshot of a btrfs has the bytes of the snapshot, in its pool and in another one, also on kernels on which a
// btrfs gets an identity of its own in a copy. A backup tool reads there what changed between two snapshots. One with a filesystem gets that identity.
func TestRawCopies(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	urls := map[string]string{}
	for _, name := range []string{"a", "b"} {
		check.OK(t, os.Mkdir(filepath.Join(dir, name), 0o700))
		urls[name] = "file://" + filepath.Join(dir, name) + "?reservePercent=0&create=1"
	}
	l, stop := over(t, urls)
	defer stop()
	v, err := l.Create(t.Context(), volume.Spec{Name: "v", Pool: "a", Size: volume.Range{Required: filesystem.Btrfs.MinSize()}, Filesystem: filesystem.Btrfs})
	check.OK(t, err)
	device, err := l.Attach(t.Context(), v, nil)
	check.OK(t, err)
	drivertest.Run(t, "mkfs.btrfs", "-q", device.Path)
	check.OK(t, device.Close())
	s, err := l.CreateSnapshot(t.Context(), "s", v.ID)
	check.OK(t, err)
	held := bytesOf(t, l, s)
	for _, pool := range []string{"a", "b"} {
		for _, kind := range []filesystem.Type{"", filesystem.Btrfs} {
			spec := volume.Spec{Name: pool + string(kind), Pool: pool, Source: s.ID, Filesystem: kind, Size: volume.Range{Required: v.Size}}
			var made volume.Volume
			onOldKernel(t, func() { made, err = l.Create(t.Context(), spec) })
			check.OK(t, err)
			cut, err := l.CreateSnapshot(t.Context(), spec.Name, made.ID)
			check.OK(t, err)
			if same := bytes.Equal(bytesOf(t, l, cut), held); same != (kind == "") {
				t.Errorf("a copy in pool %s with filesystem %q has the bytes of the snapshot: %v", pool, kind, same)
			}
			check.OK(t, l.DeleteSnapshot(t.Context(), cut.ID))
			check.OK(t, l.Delete(t.Context(), made.ID))
		}
	}
	check.OK(t, l.DeleteSnapshot(t.Context(), s.ID))
	check.OK(t, l.Delete(t.Context(), v.ID))
}

// bytesOf returns the bytes of a snapshot.
func bytesOf(t *testing.T, l *volume.Local, s volume.Snapshot) []byte {
	t.Helper()
	origin, err := l.Open(t.Context(), s.ID)
	check.OK(t, err)
	all := make([]byte, s.Size)
	check.OK(t, origin.Read(t.Context(), 0, func(at int64, data []byte) error { copy(all[at:], data); return nil }))
	return all
}
