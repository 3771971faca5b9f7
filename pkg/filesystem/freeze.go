package filesystem

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
)

const (
	fiFreeze = 0xc0045877 // FIFREEZE, ioctl_fsfreeze(2)
	fiThaw   = 0xc0045878 // FITHAW
)

// Freeze writes out the filesystem mounted at path and holds back all further writes
// until thaw is called; thaw may be called more than once. A filesystem that somebody
// else froze stays theirs to thaw. A read-only mount has nothing to hold back.
//
// A freeze outlives the process that made it: after a crash call Thaw.
func Freeze(path string) (thaw func() error, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("freeze %s: %w", path, err)
	}
	err = ioctl(f, fiFreeze, nil)
	if errors.Is(err, unix.EBUSY) {
		f.Close()
		return func() error { return nil }, nil
	}
	if err != nil {
		f.Close()
		if errors.Is(err, unix.EOPNOTSUPP) {
			err = fmt.Errorf("%w: the filesystem cannot be frozen: %w", blockdev.ErrUnsupported, err)
		}
		return nil, fmt.Errorf("freeze %s: %w", path, err)
	}
	return func() error {
		if f == nil {
			return nil
		}
		err := ioctl(f, fiThaw, nil)
		f.Close()
		f = nil
		if err != nil && !errors.Is(err, unix.EINVAL) { // EINVAL: not frozen
			return fmt.Errorf("thaw %s: %w; run fsfreeze --unfreeze %s", path, err, path)
		}
		return nil
	}, nil
}

// Thaw ends a freeze that a crash left behind; none is success.
func Thaw(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("thaw %s: %w", path, err)
	}
	defer f.Close()
	if err := ioctl(f, fiThaw, nil); err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("thaw %s: %w; run fsfreeze --unfreeze %s", path, err, path)
	}
	return nil
}
