// Package nocow makes btrfs write files in place.
//
// btrfs writes what is overwritten to a new place, and keeps the whole old extent while any block of it is still in use: so a file may take many times its
// size. Only a file with the attribute C (chattr(1)) is written in place, without checksums or compression. The attribute can be given to empty files, and
// is inherited from the directory. Two things remain:
//
//   - Blocks that two files share (FICLONE) are copied at the first write after that. The account counts both files in full, so the space for it is there.
//   - Holes that are punched into an extent free nothing as long as a block of it is left, and take new space when they are written. So devices over files
//     on btrfs take no discards.
package nocow

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

const (
	attributeInPlace  = 0x00800000 // FS_NOCOW_FL, include/uapi/linux/fs.h
	attributeCompress = 0x00000004 // FS_COMPR_FL; no file can have both
)

// InPlace reports whether a file is written in place. On filesystems other than btrfs it always is.
func InPlace(f *os.File) (bool, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return false, fmt.Errorf("look at the filesystem of %s: %w", f.Name(), errdefs.FromErrno(err))
	}
	if st.Type != unix.BTRFS_SUPER_MAGIC {
		return true, nil
	}
	attributes, err := unix.IoctlGetUint32(int(f.Fd()), unix.FS_IOC_GETFLAGS)
	if err != nil {
		return false, fmt.Errorf("read the attributes of %s: %w", f.Name(), errdefs.FromErrno(err))
	}
	return attributes&attributeInPlace != 0, nil
}

// Set makes btrfs write an empty file in place, or all new files in a directory. errdefs.ErrUnsupported if btrfs cannot do that (on zoned disks).
func Set(f *os.File) error {
	done, err := InPlace(f)
	if done || err != nil {
		return err
	}
	attributes, err := unix.IoctlGetUint32(int(f.Fd()), unix.FS_IOC_GETFLAGS)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, int(attributes&^attributeCompress|attributeInPlace))
	}
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EPERM) {
		return fmt.Errorf("%w: btrfs does not write %s in place (chattr +C): %w", errdefs.ErrUnsupported, f.Name(), err)
	}
	if err != nil {
		return fmt.Errorf("set the attributes of %s: %w", f.Name(), errdefs.FromErrno(err))
	}
	if done, err = InPlace(f); err == nil && !done {
		err = fmt.Errorf("%w: btrfs did not take the attribute C (chattr +C) for %s", errdefs.ErrUnsupported, f.Name())
	}
	return err
}
