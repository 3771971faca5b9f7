package filesystem_test

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/mount"
)

// TestUsed: a filesystem that was just made was never used; one that was mounted and written to was, whether
// it was unmounted or the power went.
func TestUsed(t *testing.T) {
	drivertest.NeedRoot(t)
	for _, fs := range filesystem.Types {
		for _, zeros := range []bool{true, false} {
			t.Run(string(fs), func(t *testing.T) {
				dir := drivertest.Dir(t)
				image, mnt := filepath.Join(dir, "image"), filepath.Join(dir, "mnt")
				ok(t, os.WriteFile(image, nil, 0o600))
				ok(t, os.Truncate(image, max(fs.MinSize(), 64<<20)))
				ok(t, os.Mkdir(mnt, 0o700))
				expect := func(when string, want bool) {
					t.Helper()
					if used, err := filesystem.Used(image); err != nil || used != want {
						t.Fatalf("%s: used %v, %v; want %v", when, used, err, want)
					}
				}
				expect("before", false)
				device := drivertest.Loop(t, image)
				ok(t, filesystem.Make(t.Context(), fs, device, zeros))
				drivertest.Run(t, "blockdev", "--flushbufs", device)
				expect("made", false)
				ok(t, mount.Filesystem(device, mnt, string(fs), fs.MountOptions(), false))
				ok(t, os.WriteFile(filepath.Join(mnt, "file"), []byte("data"), 0o600))
				f, err := os.Open(filepath.Join(mnt, "file"))
				ok(t, err)
				ok(t, f.Sync())
				ok(t, f.Close())
				drivertest.Run(t, "blockdev", "--flushbufs", device)
				expect("synced, and the power goes", true)
				ok(t, unix.Unmount(mnt, 0))
				drivertest.Run(t, "losetup", "-d", device)
				expect("unmounted", true)
			})
		}
	}
}
