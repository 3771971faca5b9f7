// Package layout has the paths in the directory of a file pool.
package layout

import (
	"errors"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/fsync"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Sync makes durable which files there are in a directory.
func Sync(root *os.Root) error {
	return errdefs.FromErrno(fsync.AndClose(root.Open(".")))
}

// Directories has the directory of each kind of object. Pools that older drivers made have none for marks.
var Directories = map[blockdev.Kind]string{blockdev.Volume: "volumes", blockdev.Snapshot: "snapshots", blockdev.Marks: "marks"}

// Complete makes the directories that a pool of an older driver lacks.
func Complete(root *os.Root) error {
	err := root.Mkdir(Directories[blockdev.Marks], 0o700)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err != nil {
		return errdefs.FromErrno(err)
	}
	return Sync(root)
}

// Record returns the path of the record of an object.
func Record(ref blockdev.Ref) string { return Directories[ref.Kind] + "/" + ref.Key + ".rec" }

// Image returns the path of the bytes of an object.
func Image(ref blockdev.Ref) string { return Directories[ref.Kind] + "/" + ref.Key + ".img" }

// Open opens a file for reading. It does not wait for the writer of a FIFO.
func Open(root *os.Root, path string) (*os.File, error) {
	return root.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
}
