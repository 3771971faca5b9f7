package ioctl_test

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/ioctl"
)

// TestEncodedNumber: a number is the same after both ways, and encoded as huge_encode_dev of the kernel does.
func TestEncodedNumber(t *testing.T) {
	for device, encoded := range map[uint64]uint64{unix.Mkdev(253, 7): 0xfd07, unix.Mkdev(259, 0): 0x10300, unix.Mkdev(253, 0x12345): 0x1230fd45, unix.Mkdev(0xfff, 0xfffff): 0xffffffff} {
		if got := ioctl.EncodedNumber(device); got != encoded || ioctl.DeviceNumber(got) != device {
			t.Errorf("%#x is encoded as %#x, not %#x, and decoded as %#x", device, got, encoded, ioctl.DeviceNumber(got))
		}
	}
}
