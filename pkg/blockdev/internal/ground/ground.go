// Package ground finds the block devices that a filesystem is on.
package ground

import (
	"fmt"
	"os"
	"path/filepath"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/ioctl"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Of returns the numbers (makedev(3)) of the block devices of the filesystem that an open file is in; several of a btrfs. None: it is on
// no block device, as tmpfs is. The log and realtime devices of an XFS are not told.
func Of(f *os.File) ([]uint64, error) {
	var at unix.Stat_t
	var kind unix.Statfs_t
	if err := unix.Fstat(int(f.Fd()), &at); err != nil {
		return nil, fmt.Errorf("look at %s: %w", f.Name(), errdefs.FromErrno(err))
	}
	if err := unix.Fstatfs(int(f.Fd()), &kind); err != nil {
		return nil, fmt.Errorf("look at the filesystem of %s: %w", f.Name(), errdefs.FromErrno(err))
	}
	switch {
	case kind.Type == unix.BTRFS_SUPER_MAGIC: // its st_dev is of no device
		return ofBtrfs(f)
	case unix.Major(at.Dev) == 0: // as those of no device are
		return nil, nil
	}
	return []uint64{at.Dev}, nil
}

// ofBtrfs asks btrfs which one it is (linux/btrfs.h: BTRFS_IOC_FS_INFO), and the kernel for the devices of that.
func ofBtrfs(f *os.File) (numbers []uint64, err error) {
	const fsInfo = 0x8400941f
	var info struct {
		maxID, devices uint64
		identity       [16]byte
		_              [1024 - 32]byte
	}
	if err := ioctl.Pointer(f, fsInfo, unsafe.Pointer(&info)); err != nil {
		return nil, fmt.Errorf("ask the btrfs of %s for its identity: %w", f.Name(), errdefs.FromErrno(err))
	}
	id := info.identity
	devices, err := filepath.Glob(fmt.Sprintf("/sys/fs/btrfs/%x-%x-%x-%x-%x/devices/*/dev", id[:4], id[4:6], id[6:8], id[8:10], id[10:]))
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
