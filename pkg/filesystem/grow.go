package filesystem

import (
	"context"
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/capability"
	"github.com/ashlar-csi/ashlar/internal/ioctl"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/mount"
)

// The numbers and structures of ioctls, from linux/ext4.h, xfs_fs.h and linux/btrfs.h.
const (
	ext4ResizeFS  = 0x40086610 // EXT4_IOC_RESIZE_FS
	xfsGeometryV1 = 0x80705864 // XFS_IOC_FSGEOMETRY_V1
	xfsGrowData   = 0x4010586e // XFS_IOC_FSGROWFSDATA
	btrfsResize   = 0x50009403 // BTRFS_IOC_RESIZE

	btrfsExclusive = 8 // BTRFS_ERROR_DEV_EXCL_RUN_IN_PROGRESS: a result of requests, not an error of theirs
)

type xfsGeometry struct {
	blocksize, rtextsize, agblocks, agcount, logblocks, sectsize, inodesize, imaxpct uint32
	datablocks                                                                       uint64
	_                                                                                [72]byte
}

// xfsMinAG is the smallest size of the last allocation group of an XFS, in blocks (XFS_MIN_AG_BLOCKS). Less room than that at the end of a device stays unused.
const xfsMinAG = 64

// Grow makes a filesystem as large as its device, while it is in use. path is a directory of it in a mount for writing. It does nothing if the filesystem is as
// large already. ErrPrecondition for an ext4 if this process does not have CAP_SYS_RESOURCE (GrowsMounted), or that has errors; ErrUnsupported for one with
// features with which the kernel grows none; ErrBusy for a btrfs while it is balanced, or its device is being replaced.
func Grow(t Type, device, path string) error {
	size, err := deviceSize(device)
	if err != nil {
		return err
	}
	f, err := openDirectory(path)
	if err != nil {
		return fmt.Errorf("grow %s: %w", path, err)
	}
	defer f.Close()
	switch t {
	case Ext4:
		err = growExt4(f, device, size)
	case XFS:
		err = growXFS(f, size)
	case Btrfs:
		err = growBtrfs(f, size)
	}
	if err != nil {
		return fmt.Errorf("grow the %s filesystem of %s at %s to %d bytes: %w", t, device, path, size, err)
	}
	return nil
}

func growExt4(f *os.File, device string, size int64) error {
	_, super, err := readExt4(device)
	if err != nil || super.size() >= size/blockdev.Granularity*blockdev.Granularity {
		return err
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return err
	}
	blocks := uint64(size) / uint64(st.Bsize)
	err = ioctl.Pointer(f, ext4ResizeFS, unsafe.Pointer(&blocks))
	if errors.Is(err, unix.EPERM) && GrowsMounted(Ext4) { // ext4_resize_begin in fs/ext4/resize.c
		return fmt.Errorf("%w: the kernel grows no ext4 that has errors, or a damaged superblock: its log says more; end the pods that use it, and when it is staged next it is checked, and grows: %w", errdefs.ErrPrecondition, err)
	}
	if errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("%w: the kernel does not grow an ext4 with these features (dumpe2fs -h %s; sparse_super2, and of older kernels bigalloc) while it is mounted: grow it by hand, with resize2fs, while no pod uses it: %w",
			errdefs.ErrUnsupported, device, err)
	}
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("%w: ext4 grows while mounted only for a process with CAP_SYS_RESOURCE; without, it will grow when the volume is staged next, to %d bytes: %w",
			errdefs.ErrPrecondition, min(size, super.reach()), err)
	}
	return err
}

func growXFS(f *os.File, size int64) error {
	var geometry xfsGeometry
	if err := ioctl.Pointer(f, xfsGeometryV1, unsafe.Pointer(&geometry)); err != nil {
		return err
	}
	data := struct {
		newblocks uint64
		imaxpct   uint32
		_         uint32
	}{newblocks: uint64(size) / uint64(geometry.blocksize), imaxpct: geometry.imaxpct}
	if data.newblocks < geometry.datablocks+xfsMinAG {
		return nil
	}
	return ioctl.Pointer(f, xfsGrowData, unsafe.Pointer(&data))
}

func growBtrfs(f *os.File, size int64) error {
	info, err := mount.Btrfs(f)
	if err != nil || info.Size+blockdev.Granularity > size {
		return err
	}
	args := struct {
		_    int64
		name [4088]byte
	}{}
	copy(args.name[:], fmt.Sprintf("%d:max", info.ID))
	result, err := ioctl.Result(f, btrfsResize, unsafe.Pointer(&args))
	switch {
	case err != nil || result == 0:
		return err
	case result == btrfsExclusive:
		return fmt.Errorf("%w: the btrfs is being changed otherwise (btrfs balance, device, replace), and does not grow before that has ended; "+
			"btrfs balance status shows a balance that runs or is paused, btrfs balance cancel ends it", errdefs.ErrBusy)
	}
	return fmt.Errorf("btrfs answers %d (enum btrfs_err_code)", result)
}

// GrowBeforeMount grows a filesystem that is not mounted if Grow could not once it is mounted: an ext4, if this process does not have CAP_SYS_RESOURCE.
// Otherwise it does nothing. The ext4 has to have been checked, and grows as far as it can without moving blocks.
func GrowBeforeMount(ctx context.Context, t Type, device string) error {
	if t != Ext4 || capability.Has(unix.CAP_SYS_RESOURCE) {
		return nil
	}
	size, err := deviceSize(device)
	if err != nil {
		return err
	}
	return inTime(ctx, device, func(ctx context.Context) error { return growExt4Unmounted(ctx, device, size) })
}

// GrowsMounted reports whether this process may grow a mounted filesystem of the type.
func GrowsMounted(t Type) bool { return t != Ext4 || capability.Has(unix.CAP_SYS_RESOURCE) }

// deviceSize returns the size of a block device in bytes.
func deviceSize(device string) (int64, error) {
	f, err := os.Open(device)
	if err != nil {
		return 0, fmt.Errorf("size of %s: %w", device, err)
	}
	defer f.Close()
	size, err := ioctl.DeviceSize(f)
	if err != nil {
		return 0, fmt.Errorf("size of %s: %w", device, err)
	}
	return size, nil
}
