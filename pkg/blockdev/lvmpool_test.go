package blockdev_test

import (
	"testing"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
)

func openURL(t testing.TB, url string) blockdev.Pool {
	t.Helper()
	pool, err := blockdev.Open(t.Context(), "p", url)
	must(t, err)
	return pool
}

// TestLVMPool: LVM pools keep the contract of blockdev.Pool.
func TestLVMPool(t *testing.T) {
	for _, kind := range []string{"linear", "thin"} {
		t.Run(kind, func(t *testing.T) {
			g := drivertest.NewGroup(t, 768*mib)
			url := g.URL()
			if kind == "thin" {
				url = g.ThinPool(t, "tp", "-L", "512M", "--poolmetadatasize", "16M")
			}
			pooltest.Run(t, func(t testing.TB, _ string) blockdev.Pool { return openURL(t, url) })
			if volumes := g.Volumes(t); len(volumes) > 1 || (kind == "linear" && len(volumes) > 0) {
				t.Errorf("left behind: %v", volumes)
			}
		})
	}
}
