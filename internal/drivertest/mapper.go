package drivertest

import (
	"testing"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
)

// NeedMapper skips a test if the kernel has no device mapper. `make test-lvm-pools` runs such tests in a virtual machine.
func NeedMapper(t testing.TB) {
	t.Helper()
	if _, err := dm.Targets(); err != nil {
		t.Skipf("no device mapper (make test-lvm-pools): %v", err)
	}
}
