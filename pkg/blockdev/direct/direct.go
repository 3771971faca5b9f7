// Package direct has memory and files for I/O past the page cache (O_DIRECT, open(2)).
package direct

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Memory returns size bytes of memory that O_DIRECT takes: it begins at a page, and is zeros.
func Memory(size int) (memory []byte, free func(), err error) {
	memory, err = unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, nil, fmt.Errorf("map %d bytes of memory: %w", size, errdefs.FromErrno(err))
	}
	return memory, func() { _ = unix.Munmap(memory) }, nil
}

// Open opens a device or a file past the page cache, with os.O_RDONLY or os.O_RDWR.
func Open(path string, flags int) (*os.File, error) {
	f, err := os.OpenFile(path, flags|unix.O_DIRECT, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, errdefs.FromErrno(err))
	}
	return f, nil
}
