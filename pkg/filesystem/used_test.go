package filesystem_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/mount"
)

// TestUsed: a filesystem that was just made was not used; one that was mounted and written to was, after an unmount and without it, as after a power failure.
func TestUsed(t *testing.T) {
	drivertest.NeedRoot(t)
	for _, fs := range filesystem.Types {
		for _, zeros := range []bool{true, false} {
			t.Run(string(fs), func(t *testing.T) {
				dir := drivertest.Dir(t)
				image, mnt := filepath.Join(dir, "image"), filepath.Join(dir, "mnt")
				check.OK(t, os.WriteFile(image, nil, 0o600))
				check.OK(t, os.Truncate(image, max(fs.MinSize(), 64<<20)))
				check.OK(t, os.Mkdir(mnt, 0o700))
				expect := func(when string, want bool) {
					t.Helper()
					if used, err := filesystem.Used(image); err != nil || used != want {
						t.Fatalf("%s: used %v, %v; want %v", when, used, err, want)
					}
				}
				expect("before", false)
				device := drivertest.Loop(t, image)
				check.OK(t, filesystem.Make(t.Context(), fs, device, zeros))
				drivertest.Run(t, "blockdev", "--flushbufs", device)
				expect("made", false)
				check.OK(t, mount.Filesystem(device, mnt, string(fs), fs.MountOptions(), false))
				check.OK(t, os.WriteFile(filepath.Join(mnt, "file"), []byte("data"), 0o600))
				f, err := os.Open(filepath.Join(mnt, "file"))
				check.OK(t, err)
				check.OK(t, f.Sync())
				check.OK(t, f.Close())
				drivertest.Run(t, "blockdev", "--flushbufs", device)
				expect("synced, and the power goes", true)
				drivertest.Unmount(t, mnt)
				drivertest.Run(t, "losetup", "-d", device)
				expect("unmounted", true)
			})
		}
	}
}
