// Package mount mounts filesystems, binds, unmounts, and tells what is at a path. It uses the mount API of Linux 5.2 and later (fsopen(2), open_tree(2),
// mount_setattr(2) of 5.12): a mount appears with all of its attributes or not at all, and an error has the kernel's messages (docs/decisions/mounts.md).
package mount

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Filesystem mounts the filesystem on a block device at a directory. Options are those of mount(8). ErrInvalid for an option that a volume may not have
// (CheckOptions) or that the kernel refuses, ErrDataLoss if the kernel finds the filesystem damaged, ErrInUse if it finds the device in use, or for btrfs
// another filesystem of the same identity mounted, ErrUnsupported if the kernel does not have the filesystem. Errors have the kernel's messages.
func Filesystem(device, target, fstype string, options []string, readOnly bool) error {
	fail := func(what string, fsfd int, err error) error {
		return fmt.Errorf("mount %s on %s as %s: %s: %w", device, target, fstype, what, withMessages(fsfd, err))
	}
	fsfd, what, err := newContext(device, fstype)
	if err != nil {
		return fail(what, -1, err)
	}
	defer unix.Close(fsfd)
	var attr uint64
	for _, one := range SplitOptions(options...) {
		a, known := attributes[one]
		switch {
		case known:
			attr |= a
		case one == "ro":
			readOnly = true
		case forUserspace(one):
		default:
			if err := CheckOptions(one); err != nil {
				return fail("option "+one, -1, err)
			}
			if err := setOption(fsfd, one); err != nil {
				return fail("option "+one, fsfd, fmt.Errorf("%w: %w", errdefs.ErrInvalid, err))
			}
		}
	}
	if readOnly {
		attr |= unix.MOUNT_ATTR_RDONLY
		if err := unix.FsconfigSetFlag(fsfd, "ro"); err != nil {
			return fail("ro", fsfd, err)
		}
	}
	if err := createSuperblock(fsfd); needsLegacy(fstype, options, err) {
		return legacy(device, target, fstype, options, readOnly)
	} else if err != nil {
		return fail("open the filesystem", fsfd, err)
	}
	defer holdForks()()
	tree, err := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, int(attr))
	if err != nil {
		return fail("fsmount", fsfd, err)
	}
	defer unix.Close(tree)
	if err := attachTree(tree, target); err != nil {
		return fail("attach", fsfd, err)
	}
	return nil
}

// createSuperblock has the kernel open a filesystem whose context has its source and options. Errors are those of Filesystem.
func createSuperblock(fsfd int) error {
	err := unix.FsconfigCreate(fsfd)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.EUCLEAN), errors.Is(err, unix.EBADMSG):
		return fmt.Errorf("%w: the filesystem is damaged, check it by hand: %w", errdefs.ErrDataLoss, err)
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("%w: somebody else uses the device: %w", errdefs.ErrInUse, err)
	case errors.Is(err, unix.EEXIST): // btrfs
		return fmt.Errorf("%w: another filesystem of this identity is mounted: %w", errdefs.ErrInUse, err)
	}
	return fmt.Errorf("%w; the kernel's log may say more", err) // btrfs leaves no messages
}

// Recover has the kernel replay the journal of a filesystem that is not mounted. It opens the filesystem, read-only and with options of the filesystem, and
// mounts it nowhere. When it returns, it does not hold the device any more.
func Recover(device, fstype string, options []string) error {
	fsfd, err := open(device, fstype, options, true)
	if err != nil {
		return fmt.Errorf("recover %s as %s: %w", device, fstype, err)
	}
	defer waitUnclaimed(device)
	return unix.Close(fsfd)
}

// waitUnclaimed waits until a filesystem that was opened, mounted nowhere, and closed does not hold its device any more. Forks are not held back while it is
// open, nor while the kernel closes it: that takes as long as the disk takes for what there is to write, and all other volumes would wait too. So a program that
// was being started may have its descriptors until it executes, which is waited for first. In execve(2) the kernel lets the parent of a vfork(2) go on before it
// closes them (begin_new_exec). So then it looks whether the device is free, for 250 ms at most: after that somebody else has it.
func waitUnclaimed(device string) {
	holdForks()()
	_ = Unclaimed(context.Background(), device, busyTries, busyPause)
}

// Unclaimed returns unix.EBUSY if somebody has a block device for himself (open(2), O_EXCL), as a mount does. While that is so it looks again, tries more
// times, with a pause before each, or until ctx ends. To find out it has the device for itself for a moment.
func Unclaimed(ctx context.Context, device string, tries int, pause time.Duration) error {
	for try := 0; ; try++ {
		err := claim(device)
		if !errors.Is(err, unix.EBUSY) || try >= tries || ctx.Err() != nil {
			return err
		}
		time.Sleep(pause)
	}
}

// claim opens a block device for itself alone, and closes it. No program that is being started gets the descriptor, and so has it for longer.
func claim(device string) error {
	defer holdForks()()
	fd, err := unix.Open(device, unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// WithRoot opens the filesystem on a device for reading only, mounts it nowhere, and calls visit with its root directory. The kernel replays a journal, unless
// the options keep it from that. When it returns, it does not hold the device any more.
func WithRoot(device, fstype string, options []string, visit func(root *os.File) error) error {
	return withRoot(device, fstype, options, true, visit)
}

// WithWritableRoot is WithRoot for reading and writing.
func WithWritableRoot(device, fstype string, options []string, visit func(root *os.File) error) error {
	return withRoot(device, fstype, options, false, visit)
}

func withRoot(device, fstype string, options []string, readOnly bool, visit func(root *os.File) error) error {
	fsfd, err := open(device, fstype, options, readOnly)
	if err != nil {
		return fmt.Errorf("open the %s of %s: %w", fstype, device, err)
	}
	defer waitUnclaimed(device)
	defer unix.Close(fsfd)
	attr := unix.MOUNT_ATTR_NODEV
	if readOnly {
		attr |= unix.MOUNT_ATTR_RDONLY
	}
	tree, err := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, attr)
	if err != nil {
		return fmt.Errorf("open the %s of %s: fsmount: %w", fstype, device, withMessages(fsfd, err))
	}
	defer unix.Close(tree)
	fd, err := unix.Openat(tree, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the %s of %s: %w", fstype, device, err)
	}
	root := os.NewFile(uintptr(fd), device)
	return errors.Join(visit(root), root.Close())
}

// newContext makes a filesystem context (fsopen(2)) with a device as its source. The caller closes it. With an error there is none, and what is the step that
// failed. ErrUnsupported if the kernel does not have the filesystem.
func newContext(device, fstype string) (fsfd int, what string, err error) {
	fsfd, err = unix.Fsopen(fstype, unix.FSOPEN_CLOEXEC)
	if err != nil {
		if errors.Is(err, unix.ENODEV) {
			err = fmt.Errorf("%w: this kernel has no %s (modprobe %s)", errdefs.ErrUnsupported, fstype, fstype)
		}
		return -1, "fsopen", err
	}
	if fstype == "btrfs" {
		what, err = "forget what was on the device", forgetBtrfs(device)
	}
	if err == nil {
		what, err = "source", unix.FsconfigSetString(fsfd, "source", device)
	}
	if err != nil {
		err = withMessages(fsfd, err)
		unix.Close(fsfd)
	}
	return fsfd, what, err
}

// open opens the filesystem on a device, for reading only or not, and returns its context. The caller closes it; with an error there is none.
func open(device, fstype string, options []string, readOnly bool) (fsfd int, err error) {
	fsfd, what, err := newContext(device, fstype)
	if err != nil {
		return -1, fmt.Errorf("%s: %w", what, err)
	}
	if readOnly {
		err = unix.FsconfigSetFlag(fsfd, "ro")
	}
	for _, option := range options {
		err = errors.Join(err, setOption(fsfd, option))
	}
	if err == nil {
		err = createSuperblock(fsfd)
	}
	if err != nil {
		err = fmt.Errorf("open the filesystem: %w", withMessages(fsfd, err))
		unix.Close(fsfd)
	}
	return fsfd, err
}

// setOption sets an option, KEY or KEY=VALUE, in the context of a filesystem that is not open yet.
func setOption(fsfd int, option string) error {
	key, value, hasValue := strings.Cut(option, "=")
	if hasValue {
		return unix.FsconfigSetString(fsfd, key, strings.Trim(value, `"`))
	}
	return unix.FsconfigSetFlag(fsfd, option)
}

// withMessages adds to an error the messages in a filesystem context. -1 stands for no context.
func withMessages(fsfd int, err error) error {
	if said := kernelMessages(fsfd); said != "" {
		return fmt.Errorf("%w (%s)", err, said)
	}
	return err
}

// kernelMessages reads the messages that the kernel left in a filesystem context: the first 16 at most.
func kernelMessages(fsfd int) string {
	var messages []string
	buffer := make([]byte, 1024)
	for fsfd >= 0 && len(messages) < 16 {
		n, err := unix.Read(fsfd, buffer)
		if err != nil || n <= 0 {
			break
		}
		// "e ext4: ..." (error), "w ..." (warning), "i ..." (information)
		messages = append(messages, strings.TrimSpace(string(buffer[min(2, n):n])))
	}
	return strings.Join(messages, "; ")
}

// attachTree attaches a detached mount at a path. It does not follow a symbolic link at its end.
func attachTree(tree int, target string) error {
	fd, err := openPath(target)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.MoveMount(tree, "", fd, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
}

// Bind attaches what is at source, a directory or a device node, at target as well, without mounts below it. A read-only bind is read-only from its first
// moment. A read-only bind of a device node can still be opened for writing: see BindReader.
func Bind(source, target string, readOnly bool) error {
	fail := func(what string, err error) error {
		return fmt.Errorf("bind %s to %s: %s: %w", source, target, what, err)
	}
	defer holdForks()()
	tree, err := unix.OpenTree(unix.AT_FDCWD, source, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return fail("open_tree", err)
	}
	defer unix.Close(tree)
	if readOnly {
		if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}); err != nil {
			return fail("mount_setattr", err)
		}
	}
	if err := attachTree(tree, target); err != nil {
		return fail("attach", err)
	}
	return nil
}

// holdForks keeps this process from starting programs until release is called. A child has copies of all file descriptors until it executes its program; with
// a descriptor into a mount it would keep that mount busy. So this package opens descriptors into mounts only under holdForks, and only for a moment. The
// one of legacy is only closed under it, and those into what is mounted nowhere are waited for (waitUnclaimed). Calls do not nest: a second one would wait for
// ever if somebody waits to fork (sync.RWMutex).
func holdForks() (release func()) {
	syscall.ForkLock.RLock()
	return syscall.ForkLock.RUnlock
}
