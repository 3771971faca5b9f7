package filesystem_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
)

// totalOf returns the size of the filesystem that is mounted at a path.
func totalOf(t *testing.T, path string) int64 {
	t.Helper()
	var st unix.Statfs_t
	check.OK(t, unix.Statfs(path, &st))
	return filesystem.UsageOf(st).Total
}

// TestGrowBalanced: a btrfs that is being balanced does not grow. The kernel says so by a result that is no error; it must not count as growth.
func TestGrowBalanced(t *testing.T) {
	const size, more = 2048 * miB, 512 * miB
	d := newDisk(t, size)
	check.OK(t, filesystem.Make(t.Context(), filesystem.Btrfs, d.device, true))
	d.mount(t, filesystem.Btrfs)
	for n := range 8 {
		check.OK(t, os.WriteFile(filepath.Join(d.path, string(rune('a'+n))), make([]byte, 64*miB), 0o600))
	}
	drivertest.Run(t, "sync", "-f", d.path)
	d.resize(t, size+more)
	paused := func() bool {
		drivertest.Run(t, "btrfs", "balance", "start", "--background", "--full-balance", d.path)
		_ = exec.Command("btrfs", "balance", "pause", d.path).Run() // it may have ended
		said, _ := exec.Command("btrfs", "balance", "status", d.path).Output()
		return strings.Contains(string(said), "is paused")
	}
	if !slices.ContainsFunc(make([]bool, 20), func(bool) bool { return paused() }) {
		t.Fatal("no balance was paused before it ended")
	}
	before := totalOf(t, d.path)
	if err := filesystem.Grow(filesystem.Btrfs, d.device, d.path); !errors.Is(err, errdefs.ErrBusy) || !strings.Contains(err.Error(), "balance") {
		t.Errorf("while it is balanced: %v; from %d to %d", err, before, totalOf(t, d.path))
	}
	drivertest.Run(t, "btrfs", "balance", "cancel", d.path)
	check.OK(t, filesystem.Grow(filesystem.Btrfs, d.device, d.path))
	if now := totalOf(t, d.path); now != before+more {
		t.Errorf("grown from %d to %d", before, now)
	}
}

// TestGrowWithErrors: an ext4 with errors does not grow, and the error does not blame a capability that the process has.
func TestGrowWithErrors(t *testing.T) {
	if !filesystem.GrowsMounted(filesystem.Ext4) {
		t.Skip("without CAP_SYS_RESOURCE no ext4 grows while it is mounted")
	}
	d := newDisk(t, 64*miB)
	check.OK(t, filesystem.Make(t.Context(), filesystem.Ext4, d.device, true))
	d.mountWith(t, filesystem.Ext4, "errors=continue")
	check.OK(t, os.WriteFile(filepath.Join("/sys/fs/ext4", filepath.Base(d.device), "trigger_fs_error"), []byte("for a test"), 0))
	d.resize(t, 128*miB)
	err := filesystem.Grow(filesystem.Ext4, d.device, d.path)
	if !errors.Is(err, errdefs.ErrPrecondition) || strings.Contains(err.Error(), "CAP_SYS_RESOURCE") || !strings.Contains(err.Error(), "has errors") {
		t.Errorf("with errors: %v", err)
	}
}
