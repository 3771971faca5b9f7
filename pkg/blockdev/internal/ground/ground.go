// Package ground finds the block devices that a filesystem is on.
package ground

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/btrfs"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Of returns the numbers (makedev(3)) of the block devices of the filesystem that an open file is in; a btrfs may have several. None if it is on no block
// device, as tmpfs is. The log and realtime devices of an XFS are left out.
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
	case kind.Type == unix.BTRFS_SUPER_MAGIC: // its st_dev is no block device's
		info, err := btrfs.Ask(f)
		if err != nil {
			return nil, fmt.Errorf("ask the btrfs of %s for its identity: %w", f.Name(), errdefs.FromErrno(err))
		}
		return info.Identity.Devices()
	case unix.Major(at.Dev) == 0: // the filesystem is on no block device
		return nil, nil
	}
	return []uint64{at.Dev}, nil
}
