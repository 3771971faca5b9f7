// Package mount is the mount(2) family: mount a filesystem, bind, unmount, and see
// what is at a path. It uses the mount API of Linux 5.2 and later (fsopen(2),
// open_tree(2), mount_setattr(2) of 5.12), so that a mount appears with all of its
// attributes or not at all, and the kernel's own words say why it did not.
package mount

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	mountutils "k8s.io/mount-utils"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
)

// Info says what is at a path.
type Info struct {
	// Root: a mount is attached exactly here.
	Root bool
	// Device number of what is here: of a device node the device itself, else the
	// block device below the filesystem.
	Device uint64
	// Node: a block device node. Folder: a folder. Neither: a file or something else.
	Node, Folder bool
	// ReadOnly: the mount, or the filesystem below it, takes no writes.
	ReadOnly bool
	// Filesystem is the type of the filesystem, as in statfs(2).
	Filesystem int64
}

// At looks at a path without following a symbolic link at its end. A path that does
// not exist gives an error that is fs.ErrNotExist; a mount whose filesystem is gone
// gives an error that Corrupted knows.
func At(path string) (Info, error) {
	defer holdForks()()
	fd, err := openPath(path)
	if err != nil {
		return Info{}, err
	}
	defer unix.Close(fd)
	var sx unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_TYPE, &sx); err != nil {
		return Info{}, &fs.PathError{Op: "statx", Path: path, Err: err}
	}
	info := Info{
		Root:   sx.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0,
		Device: unix.Mkdev(sx.Dev_major, sx.Dev_minor),
		Folder: sx.Mode&unix.S_IFMT == unix.S_IFDIR,
	}
	if sx.Mode&unix.S_IFMT == unix.S_IFBLK {
		info.Node, info.Device = true, unix.Mkdev(sx.Rdev_major, sx.Rdev_minor)
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(fd, &st); err != nil {
		return Info{}, &fs.PathError{Op: "statfs", Path: path, Err: err}
	}
	info.ReadOnly, info.Filesystem = st.Flags&unix.ST_RDONLY != 0, st.Type
	if st.Type == unix.BTRFS_SUPER_MAGIC && !info.Node {
		// btrfs gives each subvolume a device number of its own.
		if info.Device, err = btrfsDevice(path); err != nil {
			return Info{}, err
		}
	}
	return info, nil
}

// holdForks keeps programs from being started until the function that it returns is
// called. A child has copies of all file descriptors until it executes its program, those
// into mounts included, and meanwhile nobody can unmount them. So descriptors into mounts
// are held only under it, and only for a moment. It does not nest.
func holdForks() (release func()) {
	syscall.ForkLock.RLock()
	return syscall.ForkLock.RUnlock
}

func openPath(path string) (int, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return fd, nil
}

// btrfsDevice asks btrfs for its (first) device: BTRFS_IOC_DEV_INFO, linux/btrfs.h.
func btrfsDevice(path string) (uint64, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	var info struct {
		devid uint64
		_     [4096 - 8 - 1024]byte
		path  [1024]byte
	}
	info.devid = 1
	const btrfsDevInfo = 0xd000941e
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), btrfsDevInfo, uintptr(unsafe.Pointer(&info))); errno != 0 {
		return 0, &fs.PathError{Op: "BTRFS_IOC_DEV_INFO", Path: path, Err: errno}
	}
	device := string(info.path[:])
	if i := strings.IndexByte(device, 0); i >= 0 {
		device = device[:i]
	}
	var st unix.Stat_t
	if err := unix.Stat(device, &st); err != nil {
		return 0, &fs.PathError{Op: "stat", Path: device, Err: err}
	}
	return st.Rdev, nil
}

// Corrupted reports whether an error of At means a mount that is there and dead: it
// can only be unmounted.
func Corrupted(err error) bool { return err != nil && mountutils.IsCorruptedMnt(err) }

// attributes are the options that belong to a mount, not to its filesystem.
var attributes = map[string]uint64{
	"nosuid": unix.MOUNT_ATTR_NOSUID, "nodev": unix.MOUNT_ATTR_NODEV, "noexec": unix.MOUNT_ATTR_NOEXEC,
	"noatime": unix.MOUNT_ATTR_NOATIME, "strictatime": unix.MOUNT_ATTR_STRICTATIME, "nodiratime": unix.MOUNT_ATTR_NODIRATIME,
	"relatime": unix.MOUNT_ATTR_RELATIME, "nosymfollow": unix.MOUNT_ATTR_NOSYMFOLLOW,
	"suid": 0, "dev": 0, "exec": 0, "atime": 0, "diratime": 0, "defaults": 0, "rw": 0,
}

// userspace are the options that mount(8) takes for itself.
var userspace = map[string]bool{"auto": true, "noauto": true, "nofail": true, "_netdev": true, "user": true, "nouser": true, "users": true, "group": true, "owner": true}

// refused are the options that would make the mount something else.
var refused = map[string]bool{"bind": true, "rbind": true, "remount": true, "move": true, "shared": true, "rshared": true,
	"slave": true, "rslave": true, "private": true, "rprivate": true, "unbindable": true, "runbindable": true, "loop": true, "offset": true, "sizelimit": true}

// Filesystem mounts the filesystem on a block device at a folder. Options are those
// of mount(8). ErrInvalid for an option that the kernel refuses, ErrDataLoss if the
// kernel finds the filesystem damaged, ErrInUse if it finds the device in use; each with
// what the kernel says.
func Filesystem(device, target, fstype string, options []string, readOnly bool) error {
	fail := func(what string, fsfd int, err error) error {
		return fmt.Errorf("mount %s on %s as %s: %s: %w", device, target, fstype, what, withWords(fsfd, err))
	}
	fsfd, err := unix.Fsopen(fstype, unix.FSOPEN_CLOEXEC)
	if err != nil {
		if errors.Is(err, unix.ENODEV) {
			err = fmt.Errorf("%w: this kernel has no %s (modprobe %s)", blockdev.ErrUnsupported, fstype, fstype)
		}
		return fail("fsopen", -1, err)
	}
	defer unix.Close(fsfd)
	if err := unix.FsconfigSetString(fsfd, "source", device); err != nil {
		return fail("source", fsfd, err)
	}
	var attr uint64
	for _, option := range options {
		for _, one := range splitOptions(option) {
			a, known := attributes[one]
			key, value, hasValue := strings.Cut(one, "=")
			switch {
			case known:
				attr |= a
			case one == "ro":
				readOnly = true
			case userspace[one] || strings.HasPrefix(one, "x-") || strings.HasPrefix(one, "X-") || key == "comment":
			case refused[key]:
				return fail("option "+one, -1, blockdev.ErrInvalid)
			default:
				var err error
				if hasValue {
					err = unix.FsconfigSetString(fsfd, key, strings.Trim(value, `"`))
				} else {
					err = unix.FsconfigSetFlag(fsfd, one)
				}
				if err != nil {
					return fail("option "+one, fsfd, fmt.Errorf("%w: %w", blockdev.ErrInvalid, err))
				}
			}
		}
	}
	if readOnly {
		attr |= unix.MOUNT_ATTR_RDONLY
		if err := unix.FsconfigSetFlag(fsfd, "ro"); err != nil {
			return fail("ro", fsfd, err)
		}
	}
	if err := unix.FsconfigCreate(fsfd); err != nil {
		switch {
		case errors.Is(err, unix.EUCLEAN), errors.Is(err, unix.EBADMSG):
			err = fmt.Errorf("%w: the filesystem is damaged, check it by hand: %w", blockdev.ErrDataLoss, err)
		case errors.Is(err, unix.EBUSY):
			err = fmt.Errorf("%w: somebody else uses the device: %w", blockdev.ErrInUse, err)
		default:
			err = fmt.Errorf("%w; the kernel's log may say more", err) // btrfs says nothing here
		}
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

// Recover has the kernel replay the journal of a filesystem that is not mounted: it opens the
// filesystem, read-only, and mounts it nowhere.
func Recover(device, fstype string) error {
	fsfd, err := unix.Fsopen(fstype, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return fmt.Errorf("recover %s as %s: fsopen: %w", device, fstype, err)
	}
	err = errors.Join(unix.FsconfigSetString(fsfd, "source", device), unix.FsconfigSetFlag(fsfd, "ro"))
	if err == nil {
		err = unix.FsconfigCreate(fsfd)
	}
	if err != nil {
		err = fmt.Errorf("recover %s as %s: open the filesystem: %w", device, fstype, withWords(fsfd, err))
	}
	defer holdForks()() // so that this is its last descriptor
	return errors.Join(err, unix.Close(fsfd))
}

// splitOptions splits at commas outside of quotes (SELinux contexts have commas).
func splitOptions(options string) []string {
	quoted := false
	return strings.FieldsFunc(options, func(r rune) bool {
		if r == '"' {
			quoted = !quoted
		}
		return r == ',' && !quoted
	})
}

// withWords adds to an error what the filesystem says of it.
func withWords(fsfd int, err error) error {
	if said := kernelSays(fsfd); said != "" {
		return fmt.Errorf("%w (%s)", err, said)
	}
	return err
}

// kernelSays reads the messages that a filesystem left for its opener.
func kernelSays(fsfd int) string {
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

// attachTree attaches a detached mount at a path whose last part is no symbolic link.
func attachTree(tree int, target string) error {
	fd, err := openPath(target)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.MoveMount(tree, "", fd, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
}

// Bind attaches what is at source, a folder or a device node, at target as well.
// A read-only bind is read-only from its first moment.
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

// busyTime is how long a mount may be busy before it is said to be in use. A look at a
// path holds its mount for a moment; and a program that is being started holds copies of
// all files that the driver has open, until it is running.
const busyTime = 200 * time.Millisecond

// Unmount takes away whatever is mounted at a path, however often. Nothing there,
// or no such path, is success. ErrInUse if a process still uses it.
func Unmount(path string) error {
	pause, deadline := time.Millisecond, time.Now().Add(busyTime)
	for {
		info, err := At(path)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
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
		case errors.Is(err, unix.EBUSY) && time.Now().Before(deadline):
			time.Sleep(pause)
			pause *= 2
		case errors.Is(err, unix.EBUSY):
			return fmt.Errorf("%w: unmount %s: a process has files open there or works in it", blockdev.ErrInUse, path)
		default:
			return fmt.Errorf("unmount %s: %w", path, err)
		}
	}
}

// MakeTarget makes the folder, or for a device node the empty file, that a mount
// goes on. It reports whether it made it. ErrPrecondition if something of another kind
// is there, or if the folder above is not.
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
	if errors.Is(err, fs.ErrExist) || errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.EISDIR) {
		err = fmt.Errorf("%w: %w", blockdev.ErrPrecondition, err)
	}
	return fmt.Errorf("make target: %w", err)
}

// RemoveTarget unmounts a path and removes the empty folder or empty file that is
// left; never anything with content: that is somebody's data.
func RemoveTarget(path string) error {
	if err := Unmount(path); err != nil {
		return err
	}
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove %s: %w", path, err)
	}
	if !info.IsDir() && (!info.Mode().IsRegular() || info.Size() != 0) {
		return fmt.Errorf("%w: %s is not removed: nothing is mounted there, but it is no empty folder or file", blockdev.ErrPrecondition, path)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		if errors.Is(err, unix.ENOTEMPTY) {
			return fmt.Errorf("%w: %s is not removed: nothing is mounted there, and it has files in it", blockdev.ErrPrecondition, path)
		}
		return fmt.Errorf("remove %s: %w", path, err)
	}
	return nil
}

// CleanPath checks a path that came with a request: absolute, and the same after
// cleaning, so that it says where it leads.
func CleanPath(path string) error {
	if !filepath.IsAbs(path) || filepath.Clean(path) != path || path == "/" || strings.ContainsRune(path, 0) {
		return fmt.Errorf("%w: %q is not an absolute, clean path", blockdev.ErrInvalid, path)
	}
	return nil
}
