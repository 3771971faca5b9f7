package lvmpool_test

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
)

// TestLVMStartsAndTellsNobody: whatever lvm.conf says, a pool's lvm2 starts no dmeventd, calls no lvmdbusd, and writes no copies of the metadata.
func TestLVMStartsAndTellsNobody(t *testing.T) {
	g := drivertest.NewGroup(t, 256<<20)
	thin := g.ThinPool(t, "pool", "-L", "64M")

	dir := os.Getenv("LVM_SYSTEM_DIR")
	file := filepath.Join(dir, "lvm.conf")
	plain, err := os.ReadFile(file)
	check.OK(t, err)
	asked := strings.NewReplacer("monitoring=0", "monitoring=1", "backup=0", "backup=1", "archive=0", "archive=1", "notify_dbus=0", "notify_dbus=1").Replace(string(plain))
	t.Cleanup(func() { check.OK(t, os.WriteFile(file, plain, 0o600)) })
	check.OK(t, os.WriteFile(file, []byte(asked), 0o600))
	told := make(chan struct{}, 1)
	const bus = "/run/dbus/system_bus_socket"
	if _, err := os.Lstat(bus); os.IsNotExist(err) { // otherwise it is the machine's own
		check.OK(t, os.MkdirAll(filepath.Dir(bus), 0o755))
		listener, err := net.Listen("unix", bus)
		check.OK(t, err)
		defer listener.Close()
		go func() {
			for {
				conn, err := listener.Accept()
				if err != nil {
					return
				}
				conn.Close()
				select {
				case told <- struct{}{}:
				default:
				}
			}
		}()
	}

	for _, url := range []string{g.URL(), thin} {
		pool := pooltest.OpenURL(t, url)
		t.Cleanup(func() { check.OK(t, pool.Close()) })
		ref := blockdev.Ref{Kind: blockdev.Volume, Key: strings.Repeat("a", 32)}
		_, err := pool.Create(t.Context(), blockdev.Spec{Ref: ref, Name: "a", Size: pool.Granularity()})
		check.OK(t, err)
		device, err := pool.Attach(t.Context(), ref, blockdev.Attachment{})
		check.OK(t, err)
		_, err = pool.Expand(t.Context(), ref, 2*pool.Granularity())
		check.OK(t, err)
		check.OK(t, device.Close())
		check.OK(t, pool.Delete(t.Context(), ref))
	}
	for _, pattern := range []string{dir + "/backup/*", dir + "/archive/*", "/run/dmeventd-client"} {
		if found, err := filepath.Glob(pattern); err != nil || len(found) > 0 {
			t.Errorf("%s: there is %v %v", pattern, found, err)
		}
	}
	select {
	case <-told:
		t.Error("somebody was told over D-Bus")
	default:
	}
}
