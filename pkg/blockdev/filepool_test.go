package blockdev_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/command"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
)

// filesystems that a file pool is tested on: without reflinks, with them, and without
// direct I/O.
var filesystems = []string{"ext4", "xfs", "btrfs", "tmpfs"}

// mountNew makes a filesystem and mounts it for the time of a test.
func mountNew(t testing.TB, fs string, megabytes int64) (dir string) {
	t.Helper()
	drivertest.NeedRoot(t)
	base := drivertest.Dir(t)
	dir = filepath.Join(base, "mnt")
	must(t, os.Mkdir(dir, 0o700))
	image := filepath.Join(base, fs+".img")
	source, options := image, "loop"
	if fs == "tmpfs" {
		source, options = "tmpfs", "size=512m"
	} else {
		must(t, os.WriteFile(image, nil, 0o600))
		must(t, os.Truncate(image, megabytes<<20))
		run(t, "mkfs."+fs, map[string]string{"ext4": "-q", "xfs": "-q", "btrfs": "-q"}[fs], image)
	}
	run(t, "mount", "-t", fs, "-o", options, source, dir)
	t.Cleanup(func() { run(t, "umount", dir) })
	return dir
}

func run(t testing.TB, argv ...string) string {
	t.Helper()
	out, _, err := command.Run(context.Background(), argv...) // t.Context() ends before cleanups
	must(t, err)
	return out
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestFilePool(t *testing.T) {
	for _, fs := range filesystems {
		t.Run(fs, func(t *testing.T) {
			t.Parallel()
			mnt := mountNew(t, fs, 1024)
			pooltest.Run(t, func(t testing.TB, dir string) blockdev.Pool {
				pool, err := blockdev.Open(t.Context(), "test", "file://"+filepath.Join(mnt, filepath.Base(dir))+"?reservePercent=0")
				must(t, err)
				return pool
			})
		})
	}
}
