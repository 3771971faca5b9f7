package filesystem

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/ioctl"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

const (
	fiFreeze = 0xc0045877 // FIFREEZE, ioctl_fsfreeze(2)
	fiThaw   = 0xc0045878 // FITHAW
)

// Freeze writes out the filesystem mounted at path, a directory, and holds back all further writes
// until thaw is called; thaw may be called more than once. ErrUnavailable from thaw: somebody
// else ended the freeze, so writes were not held back until then. A filesystem that somebody else froze
// is ErrBusy, and stays theirs to thaw, at any time. A read-only mount has nothing to hold back, nor has a
// filesystem that stopped writing after an error and says so. One that cannot be written out is ErrPrecondition.
//
// The kernel waits for writes that are under way, for ever if it has to: a pod that splices from a pipe into a
// file keeps one open for as long as it likes. When ctx ends first, the error is its cause; the kernel goes on, new writes are held
// back all the same, and thaw, which is given too then, waits for it and ends it. (Else there is none with an error.)
//
// A freeze outlives the process that made it: after a crash call Thaw.
func Freeze(ctx context.Context, path string) (thaw func() error, err error) {
	f, err := openDirectory(path)
	if err != nil {
		return nil, fmt.Errorf("freeze %s: %w", path, err)
	}
	frozen := make(chan error, 1)
	go func() { frozen <- ioctl.Pointer(f, fiFreeze, nil) }()
	select {
	case err = <-frozen:
		return freezeAnswer(f, path, err)
	case <-ctx.Done():
	}
	return func() error {
		thaw, err := freezeAnswer(f, path, <-frozen)
		if err != nil {
			return nil // it is not frozen
		}
		return thaw()
	}, fmt.Errorf("freeze %s: %w", path, context.Cause(ctx))
}

// openDirectory opens a directory of a filesystem, to ask things of the filesystem. It opens nothing else: a pod may have made a
// pipe, on which an open waits for ever, or a device, on which it may do anything.
func openDirectory(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY, 0)
}

// freezeAnswer is what Freeze returns once the kernel has answered.
func freezeAnswer(f *os.File, path string, err error) (thaw func() error, _ error) {
	if err == nil {
		return thawOnce(f, path), nil
	}
	f.Close()
	switch {
	case errors.Is(err, unix.EROFS):
		return func() error { return nil }, nil
	case errors.Is(err, unix.EBUSY):
		err = fmt.Errorf("%w: somebody else froze the filesystem", errdefs.ErrBusy)
	case errors.Is(err, unix.EOPNOTSUPP):
		err = fmt.Errorf("%w: the filesystem cannot be frozen: %w", errdefs.ErrUnsupported, err)
	case errors.Is(err, unix.EIO):
		err = fmt.Errorf("%w: the filesystem cannot be written out: %w; look at the kernel's log, stop the pods that use it, and when it is staged again it is checked", errdefs.ErrPrecondition, err)
	}
	return nil, fmt.Errorf("freeze %s: %w", path, err)
}

// thawOnce returns what ends the freeze of the filesystem that a file is in. It closes the file.
func thawOnce(f *os.File, path string) func() error {
	return func() error {
		if f == nil {
			return nil
		}
		err := ioctl.Pointer(f, fiThaw, nil)
		f.Close()
		f = nil
		switch {
		case errors.Is(err, unix.EINVAL): // not frozen
			return fmt.Errorf("%w: somebody else ended the freeze of %s while it was needed (fsfreeze, a backup tool); keep them from it, and try again", errdefs.ErrUnavailable, path)
		case err != nil:
			return fmt.Errorf("thaw %s: %w; run fsfreeze --unfreeze %s", path, err, path)
		}
		return nil
	}
}

// Thaw ends a freeze that a crash left behind; none is success.
func Thaw(path string) error {
	f, err := openDirectory(path)
	if err != nil {
		return fmt.Errorf("thaw %s: %w", path, err)
	}
	defer f.Close()
	if err := ioctl.Pointer(f, fiThaw, nil); err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("thaw %s: %w; run fsfreeze --unfreeze %s", path, err, path)
	}
	return nil
}
