// Package btrfs asks a btrfs which one it is, and finds what the kernel tells of it in sysfs.
package btrfs

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/ioctl"
)

// Identity is the UUID of a filesystem.
type Identity [16]byte

// Info is what a btrfs says of itself.
type Info struct {
	MaxID    uint64 // the largest ID of a device
	Devices  uint64 // how many there are
	Identity Identity
}

// Ask asks the btrfs that a file is in (linux/btrfs.h: BTRFS_IOC_FS_INFO).
func Ask(f *os.File) (Info, error) {
	const fsInfo = 0x8400941f
	var all struct {
		Info
		_ [1024 - 32]byte
	}
	if err := ioctl.Pointer(f, fsInfo, unsafe.Pointer(&all)); err != nil {
		return Info{}, &fs.PathError{Op: "BTRFS_IOC_FS_INFO", Path: f.Name(), Err: err}
	}
	return all.Info, nil
}

// Commit ends the transaction of the btrfs that a file is in (linux/btrfs.h: BTRFS_IOC_SYNC). Other than syncfs(2) it does not fail
// for what was written to files before.
func Commit(f *os.File) error {
	const sync = 0x9408
	if err := ioctl.Pointer(f, sync, nil); err != nil {
		return &fs.PathError{Op: "BTRFS_IOC_SYNC", Path: f.Name(), Err: err}
	}
	return nil
}

// Directory is where the kernel tells of a btrfs that is mounted.
func (id Identity) Directory() string {
	return fmt.Sprintf("/sys/fs/btrfs/%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:])
}

// Devices returns the numbers (makedev(3)) of the devices that the kernel has for it.
func (id Identity) Devices() (numbers []uint64, err error) {
	devices, err := filepath.Glob(id.Directory() + "/devices/*/dev")
	if err != nil {
		return nil, err
	}
	for _, device := range devices {
		var major, minor uint32
		number, err := os.ReadFile(device)
		if err != nil {
			continue // it was taken away
		}
		if _, err := fmt.Sscanf(string(number), "%d:%d", &major, &minor); err == nil {
			numbers = append(numbers, unix.Mkdev(major, minor))
		}
	}
	return numbers, nil
}
