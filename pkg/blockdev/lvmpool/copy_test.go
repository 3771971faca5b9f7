package lvmpool_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lvmpool"
)

// TestCopyDeviceFails: the target of a copy takes no more writes. copyDevice returns up to where the copy is complete, and not further, so a retry can go
// on there.
func TestCopyDeviceFails(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	check.OK(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=8m"))
	t.Cleanup(func() { drivertest.Unmount(t, dir) })
	data := bytes.Repeat([]byte("some text "), 1<<20)[:6<<20]
	check.OK(t, os.WriteFile(filepath.Join(dir, "source"), data, 0o600))
	from, err := os.Open(filepath.Join(dir, "source"))
	check.OK(t, err)
	defer from.Close()
	to, err := os.Create(filepath.Join(dir, "target"))
	check.OK(t, err)
	defer to.Close()
	done, err := lvmpool.CopyDevice(t.Context(), to, from, 0, int64(len(data)))
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("no error is about space: %v", err)
	}
	have, err := os.ReadFile(to.Name())
	check.OK(t, err)
	if int64(len(have)) < done || !bytes.Equal(have[:done], data[:done]) {
		t.Errorf("%d bytes are said to be copied, and are not", done)
	}
	if done < 1<<20 {
		t.Errorf("%d bytes are said to be copied; the target had room for 2 MiB", done)
	}
}
