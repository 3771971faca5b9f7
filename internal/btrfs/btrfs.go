// Package btrfs identifies a btrfs, and finds its devices in sysfs.
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

// Info is what a btrfs reports of itself.
type Info struct {
	MaxID    uint64 // the largest ID of a device
	Devices  uint64 // number of devices
	Identity Identity
}

// Ask returns the Info of the btrfs that a file is in (linux/btrfs.h: BTRFS_IOC_FS_INFO).
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

// Commit commits the transaction of the btrfs that a file is in (linux/btrfs.h: BTRFS_IOC_SYNC). Unlike syncfs(2) it does not fail for earlier errors of writes
// to files.
func Commit(f *os.File) error {
	const sync = 0x9408
	if err := ioctl.Pointer(f, sync, nil); err != nil {
		return &fs.PathError{Op: "BTRFS_IOC_SYNC", Path: f.Name(), Err: err}
	}
	return nil
}

// Directory returns the directory of a mounted btrfs in sysfs.
func (id Identity) Directory() string {
	return fmt.Sprintf("/sys/fs/btrfs/%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:])
}

// Devices returns the numbers (makedev(3)) of the devices of a mounted btrfs.
func (id Identity) Devices() (numbers []uint64, err error) {
	devices, err := filepath.Glob(id.Directory() + "/devices/*/dev")
	if err != nil {
		return nil, err
	}
	for _, device := range devices {
		var major, minor uint32
		number, err := os.ReadFile(device)
		if err != nil {
			continue // removed meanwhile
		}
		if _, err := fmt.Sscanf(string(number), "%d:%d", &major, &minor); err == nil {
			numbers = append(numbers, unix.Mkdev(major, minor))
		}
	}
	return numbers, nil
}
