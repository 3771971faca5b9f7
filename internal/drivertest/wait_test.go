package drivertest_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

// TestUnmount: what has a file open for a moment longer, as a program that is just being started has, does not fail it.
func TestUnmount(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	check.OK(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"))
	f, err := os.Create(filepath.Join(dir, "file"))
	check.OK(t, err)
	time.AfterFunc(300*time.Millisecond, func() { check.OK(t, f.Close()) })
	drivertest.Unmount(t, dir)
}
