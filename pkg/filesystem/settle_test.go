package filesystem_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/mount"
)

// TestSettle: a filesystem was copied to a larger device while it was in use. After Settle it can be mounted on the device while that takes no writes, with all
// that was synced, and is as large as the device.
func TestSettle(t *testing.T) {
	for _, fs := range filesystem.Types {
		t.Run(string(fs), func(t *testing.T) {
			source, target := newDisk(t, 320*miB), newDisk(t, 400*miB)
			check.OK(t, filesystem.Make(t.Context(), fs, source.device, true))
			source.mount(t, fs)
			put := filepath.Join(source.path, "file")
			f, err := os.Create(put)
			check.OK(t, err)
			_, err = f.WriteString("content")
			check.OK(t, errors.Join(err, f.Sync())) // in the log alone, perhaps
			drivertest.Run(t, "dd", "if="+source.image, "of="+target.device, "bs=1M", "conv=fsync", "status=none")
			check.OK(t, errors.Join(f.Close(), mount.Unmount(source.path)))

			readOnly := func() error {
				drivertest.Run(t, "blockdev", "--setro", target.device)
				defer drivertest.Run(t, "blockdev", "--setrw", target.device)
				if err := mount.Filesystem(target.device, target.path, string(fs), append(fs.UnwrittenOptions(), fs.MountOptions()...), true); err != nil {
					return err
				}
				var st unix.Statfs_t
				have, err := os.ReadFile(filepath.Join(target.path, "file"))
				if err == nil && string(have) != "content" {
					err = errors.New("it has " + string(have))
				}
				check.OK(t, errors.Join(unix.Statfs(target.path, &st), mount.Unmount(target.path)))
				if int64(st.Blocks)*st.Bsize < 330*miB {
					err = errors.Join(err, errors.New("it has not grown"))
				}
				return err
			}
			if err := readOnly(); err == nil {
				t.Error("there was nothing to settle")
			}
			for range 2 { // Settle may be called again
				check.OK(t, filesystem.Settle(t.Context(), fs, target.device))
				check.OK(t, readOnly())
			}
		})
	}
}
