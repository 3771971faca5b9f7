package mount

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// busyTries is how often a mount may be busy, busyPause apart, before it is said to be in use. A look at a
// path holds its mount for a moment; and a program that is being started holds copies of
// all files that the driver has open, until it is running.
const (
	busyTries = 25
	busyPause = 10 * time.Millisecond
)

// Unmount takes away whatever is mounted at a path, however often. Nothing there,
// or no such path, is success. ErrInUse if a process still uses it.
func Unmount(path string) error {
	for try := 0; ; {
		info, err := At(path)
		if Missing(err) {
			return nil
		}
		if err != nil && !Corrupted(err) {
			return fmt.Errorf("unmount %s: %w", path, err)
		}
		if err == nil && !info.Root {
			return nil
		}
		switch err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW); {
		case err == nil:
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT):
			return nil // somebody else was faster
		case errors.Is(err, unix.EBUSY) && try < busyTries:
			time.Sleep(busyPause)
			waitForLooks()
			try++
		case errors.Is(err, unix.EBUSY):
			return fmt.Errorf("%w: unmount %s: a process has files open there or works in it", errdefs.ErrInUse, path)
		default:
			return fmt.Errorf("unmount %s: %w", path, err)
		}
	}
}

// waitForLooks waits until this process has ended its looks into mounts that it has begun. They hold back forks (holdForks), and who
// waits to fork goes before those that begin: so does who waits here, and then nobody is in its way for a moment, however many look.
func waitForLooks() {
	syscall.ForkLock.Lock()
	syscall.ForkLock.Unlock() //nolint:staticcheck,gocritic // nothing is done with it
}

// MakeTarget makes the directory, or for a device node the empty file, that a mount
// goes on. It reports whether it made it. ErrPrecondition if something of another kind
// is there, or if the directory above is not.
func MakeTarget(path string, node bool) (made bool, err error) {
	if node {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o660)
		if err == nil {
			return true, f.Close()
		}
		if info, statErr := os.Lstat(path); errors.Is(err, fs.ErrExist) && statErr == nil && !info.IsDir() && info.Mode()&fs.ModeSymlink == 0 {
			return false, nil
		}
		return false, targetError(err)
	}
	err = os.Mkdir(path, 0o750)
	if err == nil {
		return true, nil
	}
	if info, statErr := os.Lstat(path); errors.Is(err, fs.ErrExist) && statErr == nil && info.IsDir() {
		return false, nil
	}
	return false, targetError(err)
}

func targetError(err error) error {
	if errors.Is(err, fs.ErrExist) || Missing(err) || errors.Is(err, unix.EISDIR) {
		err = fmt.Errorf("%w: %w", errdefs.ErrPrecondition, err)
	}
	return fmt.Errorf("make target: %w", err)
}

// RemoveTarget unmounts a path and removes the empty directory or empty file that is
// left, and the device node of a reader; never anything with content: that is somebody's data.
func RemoveTarget(path string) error {
	if err := Unmount(path); err != nil {
		return err
	}
	if err := removeNode(nodeBeside(path)); err != nil {
		return fmt.Errorf("remove %s: %w", nodeBeside(path), err)
	}
	info, err := os.Lstat(path)
	if Missing(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove %s: %w", path, err)
	}
	if !info.IsDir() && (!info.Mode().IsRegular() || info.Size() != 0) {
		return fmt.Errorf("%w: %s is not removed: nothing is mounted there, but it is no empty directory or file", errdefs.ErrPrecondition, path)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		if errors.Is(err, unix.ENOTEMPTY) {
			return fmt.Errorf("%w: %s is not removed: nothing is mounted there, and it has files in it", errdefs.ErrPrecondition, path)
		}
		return fmt.Errorf("remove %s: %w", path, err)
	}
	return nil
}
