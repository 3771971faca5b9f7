// Package fsync calls fsync(2) where that is all that a file is opened for.
package fsync

import (
	"errors"
	"os"
)

// AndClose makes durable what was written to a file or a block device, or which files there are in a directory, and closes it. It takes what a call like
// os.Open returns: fsync.AndClose(os.Open(path)). An error of that is returned as it is.
func AndClose(f *os.File, err error) error {
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
