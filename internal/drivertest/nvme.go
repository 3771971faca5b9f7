package drivertest

import (
	"os"
	"testing"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvme"
)

// NeedNVMe skips a test where the kernel has no NVMe over TCP: `make test-any` runs it in a virtual machine, and fails if it was
// not run.
func NeedNVMe(t testing.TB) {
	t.Helper()
	NeedRoot(t)
	if err := nvme.Available(); err != nil {
		if os.Getenv("ASHLAR_NVME") == "1" {
			t.Fatal(err)
		}
		t.Skip("this kernel has no NVMe over TCP; make test-any runs this in a virtual machine")
	}
}
