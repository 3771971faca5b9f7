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

// TestUnmount: a file that is open for a moment longer, as by a program that is being started, does not make it fail.
func TestUnmount(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	check.OK(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"))
	f, err := os.Create(filepath.Join(dir, "file"))
	check.OK(t, err)
	time.AfterFunc(300*time.Millisecond, func() { check.OK(t, f.Close()) })
	drivertest.Unmount(t, dir)
}
