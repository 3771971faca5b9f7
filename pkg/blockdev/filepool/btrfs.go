package filepool

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/ioctl"
)

// What a btrfs gives to files is free for statfs(2) until it runs the references of its extents, at the end of the transaction at the latest: for half a
// minute. What images have taken is counted at once, so that would be there twice. The kernel tells of it in /sys/fs/btrfs (fs/btrfs/space-info.h): what
// was given to files is bytes_reserved, and what pages in memory are to get is bytes_may_use. Where data and metadata are mixed, that is of metadata too.

// allocationOf returns the directory in which the kernel tells what space of the btrfs is for.
func allocationOf(f *os.File) (string, error) {
	const fsInfo = 0x8400941f // linux/btrfs.h: BTRFS_IOC_FS_INFO
	var info struct {
		_  [16]byte
		id [16]byte
		_  [1024 - 32]byte
	}
	if err := ioctl.Pointer(f, fsInfo, unsafe.Pointer(&info)); err != nil {
		return "", &fs.PathError{Op: "BTRFS_IOC_FS_INFO", Path: f.Name(), Err: err}
	}
	id := info.id
	return fmt.Sprintf("/sys/fs/btrfs/%x-%x-%x-%x-%x/allocation", id[:4], id[4:6], id[6:8], id[8:10], id[10:]), nil
}

// given returns how many bytes are taken that statfs(2) does not know of, or a few more, if it is asked afterwards.
func (p *pool) given() (bytes int64, err error) {
	if p.kind != unix.BTRFS_SUPER_MAGIC {
		return 0, nil
	}
	for _, of := range []string{"data/bytes_may_use", "data/bytes_reserved", "mixed/bytes_reserved"} { // in the order in which they become each other
		text, err := os.ReadFile(filepath.Join(p.allocation, of))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		n, err2 := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
		if err := errors.Join(err, err2); err != nil {
			return 0, err
		}
		bytes += n
	}
	return bytes, nil
}
