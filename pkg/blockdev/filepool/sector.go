package filepool

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/ioctl"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/recordfile"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// A volume's logical sector is chosen when the volume is made, and is in its record: a partition table counts in sectors, and a filesystem whose blocks
// are smaller than a sector does not mount. The kernel's own choice for a loop device is what the file needs for direct I/O, and that changes: XFS asks
// for 4096 bytes once blocks of the file are shared (FICLONE). From then on a device of 512 goes through the page cache.

// directSector returns the smallest sector with which a new file takes direct I/O (statx(2), Linux 6.1), in bytes; 0 if that is the usual one, or there is
// none.
func directSector(f *os.File) int64 {
	var st unix.Statx_t
	if err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st); err != nil || st.Mask&unix.STATX_DIOALIGN == 0 {
		return 0
	}
	if align := int64(st.Dio_offset_align); align > recordfile.SmallestSector && recordfile.ValidSector(align) {
		return align
	}
	return 0
}

// sectorSize returns the logical sector of an open device, in bytes.
func sectorSize(f *os.File) (uint32, error) {
	size, err := ioctl.SectorSize(f)
	if err != nil {
		return 0, fmt.Errorf("sector of %s: %w", f.Name(), errdefs.FromErrno(err))
	}
	return size, nil
}
