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

// Space that a btrfs has given to files stays free for statfs(2) until the references of the extents are run, for half a minute at most, when the
// transaction ends. The account counts it with the images at once, so it would be there twice. The kernel shows it in /sys/fs/btrfs
// (fs/btrfs/space-info.h): bytes_reserved is what was given to files, bytes_may_use what pages in memory will get. Where data and metadata are mixed, the
// counts include metadata.

// given returns how many bytes are taken that statfs(2) still counts as free, or some more. It has to be called before statfs(2).
func (p *pool) given() (bytes int64, err error) {
	if p.kind != unix.BTRFS_SUPER_MAGIC {
		return 0, nil
	}
	for _, of := range []string{"data/bytes_may_use", "data/bytes_reserved", "mixed/bytes_reserved"} { // in the order in which bytes go from one to the next
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
