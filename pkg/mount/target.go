package mount

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// A mount that is busy is tried busyTries times again, busyPause apart, before it counts as in use. At keeps a mount busy for a moment, and so does a program
// that is being started, which has copies of all file descriptors of the driver.
const (
	busyTries = 25
	busyPause = 10 * time.Millisecond
)

// Unmount unmounts whatever is mounted at a path, also several mounts on top of each other. Success if nothing is mounted there, or there is no such path.
// ErrInUse if a process uses a mount; other errors are those of At.
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
			return nil // somebody else has unmounted it
		case errors.Is(err, unix.EBUSY) && try < busyTries:
			time.Sleep(busyPause)
			waitForLooks()
			try++
		case errors.Is(err, unix.EBUSY):
			return fmt.Errorf("%w: unmount %s: %s", errdefs.ErrInUse, path, busyWith(path))
		default:
			return fmt.Errorf("unmount %s: %w", path, err)
		}
	}
}

// busyWith says what keeps a mount from being unmounted: a mount in it, as a pod can make one there that is also seen outside (mountPropagation:
// Bidirectional), or a process.
func busyWith(path string) string {
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(path))
	if err == nil {
		for _, m := range slices.Backward(mounts) {
			if m.Mountpoint != path {
				return fmt.Sprintf("%s is mounted in it, by a pod or by hand; unmount that", m.Mountpoint)
			}
		}
	}
	return "a process has files open there or works in it"
}

// waitForLooks waits until all calls of At that this process has begun have ended. They hold forks back (holdForks), and a fork that waits goes before those
// that begin later. So does this wait: after it there is a moment without such calls, however many there are.
func waitForLooks() {
	syscall.ForkLock.Lock()
	syscall.ForkLock.Unlock() //nolint:staticcheck,gocritic // nothing is done with it
}

// MakeTarget makes the directory, or for a device node the empty file, to mount on. It reports whether it made it; a directory, or for a node anything but a
// directory or a link, may be there already. ErrPrecondition if something else is there, or the directory above is not.
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

// RemoveTarget unmounts a path (Unmount), and removes the empty directory or empty file that is left, and the device node of a reader. Anything else stays, as
// it is somebody's data: ErrPrecondition. Success if the path is not there.
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
