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

// Freeze writes out the filesystem mounted at path, a directory, and holds back all further writes until thaw is called. It succeeds, and thaw does nothing,
// for a filesystem that takes no writes (EROFS), as one that stopped after an error. ErrBusy if somebody else froze the filesystem: it stays frozen, and they
// may thaw it at any time. ErrPrecondition if it cannot be written out; ErrUnsupported if it cannot be frozen.
//
// thaw returns ErrUnavailable if somebody else ended the freeze, so that writes were not held back until then. Further calls of it do nothing.
//
// The kernel waits for writes that are under way, maybe for ever: a pod that splices from a pipe into a file can keep one open for as long as it likes. If ctx
// ends first, the error is its cause. The kernel goes on to freeze then, and holds new writes back meanwhile. In this case thaw is returned with the error, and
// has to be called, once only: it waits for the freeze and ends it. With any other error thaw is nil.
//
// A freeze outlives the process that made it: after a crash, Thaw ends it.
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
			return nil // the freeze failed, so there is nothing to end
		}
		return thaw()
	}, fmt.Errorf("freeze %s: %w", path, context.Cause(ctx))
}

// openDirectory opens a directory, for ioctls on its filesystem. It opens nothing else: a pod may have put a pipe there, where an open waits for ever, or a
// device, where an open may do anything.
func openDirectory(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY, 0)
}

// freezeAnswer returns the results of Freeze for an answer of the kernel. f is of the filesystem; it is closed here or by thaw.
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
	case errdefs.OfDisk(err):
		err = fmt.Errorf("%w: the filesystem cannot be written out: %w; look at the kernel's log, stop the pods that use it, and when it is staged again it is checked", errdefs.ErrPrecondition, err)
	}
	return nil, fmt.Errorf("freeze %s: %w", path, err)
}

// thawOnce returns a function that ends the freeze of the filesystem of f, and closes f, when it is called first.
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

// Thaw ends a freeze that was left by a crash. Success if the filesystem is not frozen.
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
