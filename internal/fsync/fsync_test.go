package fsync_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/fsync"
)

// TestAndClose: it takes files and directories, returns each error, and leaves nothing open.
func TestAndClose(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	check.OK(t, os.WriteFile(path, nil, 0o600))
	check.OK(t, fsync.AndClose(os.Open(path)))
	check.OK(t, fsync.AndClose(os.Open(dir)))
	if err := fsync.AndClose(os.Open(path + "-not")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("of a file that is not there: %v", err)
	}

	r, w, err := os.Pipe() // it cannot be synced
	check.OK(t, err)
	defer r.Close()
	if err := fsync.AndClose(w, nil); !errors.Is(err, unix.EINVAL) {
		t.Errorf("of a pipe: %v", err)
	}
	if err := w.Close(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("it was left open: %v", err)
	}
}
