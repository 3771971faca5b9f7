package directory

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// TestLookedAt: who only looks for a moment whether a pool is locked, as driver doctor does, keeps nobody from locking it; who has it does.
func TestLookedAt(t *testing.T) {
	root, err := os.OpenRoot(t.TempDir())
	check.OK(t, err)
	defer root.Close()
	look, err := root.OpenFile(LockFile, os.O_RDWR|os.O_CREATE, 0o600)
	check.OK(t, err)
	defer look.Close()
	check.OK(t, unix.Flock(int(look.Fd()), unix.LOCK_SH|unix.LOCK_NB))
	ended := make(chan error, 1)
	time.AfterFunc(50*time.Millisecond, func() { ended <- Free(look) })
	lock, err := Lock(root)
	check.OK(t, err)
	check.OK(t, <-ended)
	defer lock.Close()
	if _, err := Lock(root); !errors.Is(err, errdefs.ErrInUse) {
		t.Errorf("locked twice: %v", err)
	}
}

// TestMadeIsNamed: what fails in a pool that was made just now is said of the path that it has.
func TestMadeIsNamed(t *testing.T) {
	parent := t.TempDir()
	check.OK(t, os.WriteFile(filepath.Join(parent, "a file"), nil, 0o600))
	path := filepath.Join(parent, "pool")
	root, id, whole, err := Place{Path: path, Create: Auto}.Open(t.Context(), nil)
	check.OK(t, err)
	f, err := root.Open("volumes")
	check.OK(t, err)
	if id == "" || !whole || f.Name() != path+"/volumes" {
		t.Errorf("pool %q, whole %v, has %s", id, whole, f.Name())
	}
	check.OK(t, errors.Join(f.Close(), root.Close()))
}
