package drivertest

import (
	"os/exec"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/filesystem"
)

// ClearAway removes by force the mounts and devices that a failed test left below a directory.
func ClearAway(dir string) {
	Clear(func() []string { return Leftovers(dir) })
}

// Clear removes by force what list returns, in the form of Leftovers.
func Clear(list func() []string) {
	for range 4 { // filesystems on devices on files
		left := list()
		for i := len(left) - 1; i >= 0; i-- {
			kind, rest, _ := strings.Cut(left[i], " ")
			switch kind {
			case "mount":
				_ = filesystem.Thaw(rest) // it may not be frozen
				_ = unix.Unmount(rest, unix.MNT_DETACH)
			case "loop":
				_ = exec.Command("losetup", "-d", "/dev/"+strings.Fields(rest)[1]).Run()
			case "mapper":
				_ = exec.Command("dmsetup", "remove", "--deferred", strings.Fields(rest)[1]).Run()
			}
		}
	}
}
