package mount

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/btrfs"
	"github.com/ashlar-csi/ashlar/internal/ioctl"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// btrfsDevice returns a device of a btrfs, one of them if it has several, by sysfs. BTRFS_IOC_DEV_INFO and the list of mounts have only the path by which the
// device was scanned last, which may be gone or be of another mount namespace. fd is the path, opened with O_PATH. ErrUnavailable if the device cannot be
// found now.
func btrfsDevice(fd int, path string) (uint64, error) {
	// O_NONBLOCK: an open does not wait for somebody who has a lease on the file (fcntl(2)).
	fd, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.EAGAIN) {
		return 0, fmt.Errorf("%w: somebody has a lease on %s, so its btrfs cannot be asked for its device", errdefs.ErrUnavailable, path)
	}
	if err != nil {
		return 0, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	info, err := Btrfs(f)
	if err != nil {
		return 0, err
	}
	devices, err := info.Identity.Devices()
	if err != nil {
		return 0, err
	}
	if len(devices) > 0 {
		return devices[0], nil
	}
	return 0, fmt.Errorf("%w: /sys/fs/btrfs has no device of the btrfs at %s", errdefs.ErrUnavailable, path)
}

// BtrfsInfo is what btrfs says of its devices.
type BtrfsInfo struct {
	Identity btrfs.Identity
	Devices  uint64 // how many it has, with those that are missing
	// Of one device that is not missing:
	ID   uint64
	Path string // by which it was scanned last
	Size int64  // bytes of it that the filesystem uses
}

// Btrfs asks the btrfs that a file is in (linux/btrfs.h: BTRFS_IOC_FS_INFO and BTRFS_IOC_DEV_INFO). The IDs of devices begin at 1, and have gaps once one
// was removed. ErrUnavailable if all devices are missing.
func Btrfs(f *os.File) (BtrfsInfo, error) {
	const devInfo, mostTries = 0xd000941e, 1 << 16
	all, err := btrfs.Ask(f)
	if err != nil {
		return BtrfsInfo{}, err
	}
	for tries, id := 0, all.MaxID; ; tries, id = tries+1, id-1 {
		var one struct {
			id    uint64
			_     [24]byte
			total uint64
			_     [4096 - 40 - 1024]byte
			path  [1024]byte
		}
		one.id = id
		err := ioctl.Pointer(f, devInfo, unsafe.Pointer(&one))
		if path := unix.ByteSliceToString(one.path[:]); err == nil && strings.HasPrefix(path, "/") { // a missing device has no path
			return BtrfsInfo{Identity: all.Identity, Devices: all.Devices, ID: id, Path: path, Size: int64(one.total)}, nil
		}
		if err != nil && !errors.Is(err, unix.ENODEV) {
			return BtrfsInfo{}, &fs.PathError{Op: "BTRFS_IOC_DEV_INFO", Path: f.Name(), Err: err}
		}
		if id <= 1 || tries == mostTries {
			return BtrfsInfo{}, fmt.Errorf("%w: btrfs knows of no device below %s that is there", errdefs.ErrUnavailable, f.Name())
		}
	}
}

// forgetBtrfs has the kernel forget which btrfs it last saw on a device that is not mounted (linux/btrfs.h: BTRFS_IOC_FORGET_DEV, since Linux 5.4).
//
// The kernel remembers that by the number of the device, and the number of a loop device that is removed is given to another volume. If what was seen was one
// of several devices of a filesystem (by its superblock, which anybody can write), then the next volume with that number could not be mounted while a
// filesystem of the same identity is mounted, such as the source of a copy.
func forgetBtrfs(device string) error {
	const forgetDev = 0x50009405
	control, err := os.OpenFile("/dev/btrfs-control", os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENODEV) {
		return nil // btrfs was not used yet
	} else if err != nil {
		return err
	}
	defer control.Close()
	var args struct { // struct btrfs_ioctl_vol_args
		_    int64
		name [4088]byte
	}
	copy(args.name[:len(args.name)-1], device)
	err = ioctl.Pointer(control, forgetDev, unsafe.Pointer(&args))
	if err == nil || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EBUSY) || errors.Is(err, unix.ENOTTY) {
		return nil // in this order: nothing to forget; it is mounted, which the mount will find; the kernel is older
	}
	return &fs.PathError{Op: "BTRFS_IOC_FORGET_DEV", Path: device, Err: err}
}
