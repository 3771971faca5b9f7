package directory

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
)

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
