package drivertest

import (
	"os"
	"os/exec"
	"strings"

	"golang.org/x/sys/unix"
)

// ClearAway takes away by force what a failed test left below a folder.
func ClearAway(dir string) {
	for range 4 { // filesystems upon devices upon files
		left := Leftovers(dir)
		for i := len(left) - 1; i >= 0; i-- {
			kind, rest, _ := strings.Cut(left[i], " ")
			switch kind {
			case "mount":
				if f, err := os.Open(rest); err == nil {
					_ = unix.IoctlSetInt(int(f.Fd()), 0xc0045878, 0) // FITHAW
					_ = f.Close()
				}
				_ = unix.Unmount(rest, unix.MNT_DETACH)
			case "loop":
				_ = exec.Command("losetup", "-d", "/dev/"+strings.Fields(rest)[1]).Run()
			case "mapper":
				_ = exec.Command("dmsetup", "remove", "--deferred", strings.Fields(rest)[1]).Run()
			}
		}
	}
}
