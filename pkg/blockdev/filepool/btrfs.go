package filepool

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// What a btrfs gives to files is free for statfs(2) until it runs the references of its extents, at the end of the transaction at the latest: for half a
// minute. What images have taken is counted at once, so that would be there twice. The kernel tells of it in /sys/fs/btrfs (fs/btrfs/space-info.h): what
// was given to files is bytes_reserved, and what pages in memory are to get is bytes_may_use. Where data and metadata are mixed, that is of metadata too.

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
		if err != nil {
			return 0, err
		}
		n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
		if err != nil {
			return 0, err
		}
		bytes += n
	}
	return bytes, nil
}
