// Package mount is the mount(2) family: mount a filesystem, bind, unmount, and see
// what is at a path. It uses the mount API of Linux 5.2 and later (fsopen(2),
// open_tree(2), mount_setattr(2) of 5.12), so that a mount appears with all of its
// attributes or not at all, and the kernel's own words say why it did not.
package mount

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	mountutils "k8s.io/mount-utils"

	"github.com/ashlar-csi/ashlar/internal/ioctl"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Info says what is at a path.
type Info struct {
	// Root: a mount is attached exactly here.
	Root bool
	// Device number of what is here: of a device node the device itself, else that of the
	// filesystem. At the root of a mount it is the block device below (of btrfs, which has
	// several in some places, one of them).
	Device uint64
	// Node: a block device node. Directory: a directory. Neither: a file or something else.
	Node, Directory bool
	// ReadOnly: the mount, or the filesystem below it, takes no writes.
	ReadOnly bool
	// Statfs is what statfs(2) says of the filesystem.
	Statfs unix.Statfs_t
	mount  int // of the mount, in the list of all mounts
}

// At looks at a path without following a symbolic link at its end. A path that does
// not exist gives an error that is fs.ErrNotExist; a mount whose filesystem is gone
// gives an error that Corrupted knows. ErrUnavailable: what is there does not answer.
func At(path string) (Info, error) {
	hanging.Lock()
	hangs := hanging.paths[path]
	hanging.Unlock()
	if hangs {
		return Info{}, fmt.Errorf("%w: the filesystem at %s does not answer", errdefs.ErrUnavailable, path)
	}
	type answer struct {
		info Info
		err  error
	}
	answers := make(chan answer, 1)
	defer holdForks()()
	go func() {
		info, err := at(path)
		hanging.Lock()
		defer hanging.Unlock()
		answers <- answer{info, err}
		delete(hanging.paths, path)
	}()
	select {
	case a := <-answers:
		return a.info, a.err
	case <-time.After(lookTime):
	}
	hanging.Lock()
	defer hanging.Unlock()
	select {
	case a := <-answers:
		return a.info, a.err
	default:
		hanging.paths[path] = true
		return Info{}, fmt.Errorf("%w: the filesystem at %s has not answered for %s", errdefs.ErrUnavailable, path, lookTime)
	}
}

// lookTime is how long somebody who looks at a path waits for its filesystem. Somebody else may have mounted one there whose
// server is away (FUSE, NFS); until it has answered, nobody else waits.
const lookTime = 10 * time.Second

// hanging are the paths of which the filesystem has not answered yet.
var hanging = struct {
	sync.Mutex
	paths map[string]bool
}{paths: map[string]bool{}}

// at is At for as long as it takes. The caller holds back forks, as far as he waits.
func at(path string) (Info, error) {
	fd, err := openPath(path)
	if err != nil {
		return Info{}, err
	}
	defer unix.Close(fd)
	var sx unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_TYPE|unix.STATX_MNT_ID, &sx); err != nil {
		return Info{}, &fs.PathError{Op: "statx", Path: path, Err: err}
	}
	info := Info{
		Root:      sx.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0,
		Device:    unix.Mkdev(sx.Dev_major, sx.Dev_minor),
		Directory: sx.Mode&unix.S_IFMT == unix.S_IFDIR,
		mount:     int(sx.Mnt_id),
	}
	if sx.Mode&unix.S_IFMT == unix.S_IFBLK {
		info.Node, info.Device = true, unix.Mkdev(sx.Rdev_major, sx.Rdev_minor)
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(fd, &st); err != nil {
		return Info{}, &fs.PathError{Op: "statfs", Path: path, Err: err}
	}
	info.ReadOnly, info.Statfs = st.Flags&unix.ST_RDONLY != 0, st
	if st.Type == unix.BTRFS_SUPER_MAGIC && info.Root && !info.Node {
		// btrfs gives each subvolume a device number of its own. To open a pipe waits for who writes to it, and
		// what else there is does not ask btrfs.
		if !info.Directory && sx.Mode&unix.S_IFMT != unix.S_IFREG {
			return Info{}, fmt.Errorf("%w: %s is neither a directory nor a file, so its btrfs cannot be asked for its device", errdefs.ErrUnsupported, path)
		}
		if info.Device, err = btrfsDevice(fd, path); err != nil {
			return Info{}, err
		}
	}
	return info, nil
}

// Resolve returns a path without symbolic links in the directories that lead to its end, as the
// kernel names mounts. A link at the end stays, and so does a path of which not all is there.
func Resolve(path string) string {
	directory, err := filepath.EvalSymlinks(filepath.Dir(path))
	if err != nil {
		return path
	}
	return filepath.Join(directory, filepath.Base(path))
}

// Same reports whether two paths are one place that is seen twice: a directory that is bound elsewhere too shows
// what is mounted in it at both, and it is unmounted at both.
func Same(a, b string) bool {
	if filepath.Base(a) != filepath.Base(b) {
		return false
	}
	one, err := os.Stat(filepath.Dir(a))
	if err != nil {
		return false
	}
	other, err := os.Stat(filepath.Dir(b))
	return err == nil && os.SameFile(one, other)
}

// DeviceOf returns the device of the mount at a path as the list of all mounts has it: also of
// one that is dead, which At cannot look at. 0 if there is none.
func DeviceOf(path string) (uint64, error) {
	mounts, err := mountinfo.GetMounts(nil)
	if err != nil {
		return 0, err
	}
	for _, m := range slices.Backward(mounts) { // of several, one above the other, the last
		if m.Mountpoint == path {
			return tableDevice(m, mounts), nil
		}
	}
	return 0, nil
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

// btrfsDevice returns (one of) the devices of a btrfs, by the names that the kernel has for them.
// BTRFS_IOC_DEV_INFO and the list of mounts only have the path that whoever scanned the device last had for it:
// it may be gone, or be one of another mount namespace. fd is what is at the path, opened with O_PATH.
func btrfsDevice(fd int, path string) (uint64, error) {
	// Whoever has a lease on the file (fcntl(2)) is not waited for.
	fd, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.EAGAIN) {
		return 0, fmt.Errorf("%w: somebody has a lease on %s, so its btrfs cannot be asked for its device", errdefs.ErrUnavailable, path)
	}
	if err != nil {
		return 0, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	info, err := Btrfs(f)
	if err != nil {
		return 0, err
	}
	id := info.Identity
	devices, err := filepath.Glob(fmt.Sprintf("/sys/fs/btrfs/%x-%x-%x-%x-%x/devices/*/dev", id[:4], id[4:6], id[6:8], id[8:10], id[10:]))
	if err != nil {
		return 0, err
	}
	for _, device := range devices {
		var major, minor uint32
		number, err := os.ReadFile(device)
		if err == nil {
			_, err = fmt.Sscanf(string(number), "%d:%d", &major, &minor)
		}
		if err == nil {
			return unix.Mkdev(major, minor), nil
		}
	}
	return 0, fmt.Errorf("%w: /sys/fs/btrfs has no device of the btrfs at %s", errdefs.ErrUnavailable, path)
}

// BtrfsInfo is what btrfs says of its devices.
type BtrfsInfo struct {
	Identity [16]byte
	Devices  uint64 // how many there are
	// Of one that is there:
	ID   uint64
	Path string
	Size int64 // bytes that the filesystem takes of it
}

// Btrfs asks the btrfs that a file is in (linux/btrfs.h: BTRFS_IOC_FS_INFO and
// BTRFS_IOC_DEV_INFO). The IDs of devices begin at 1, and have gaps once one was removed.
func Btrfs(f *os.File) (BtrfsInfo, error) {
	const fsInfo, devInfo, mostTries = 0x8400941f, 0xd000941e, 1 << 16
	ask := func(name string, request uint, arg unsafe.Pointer) error {
		if err := ioctl.Pointer(f, request, arg); err != nil {
			return &fs.PathError{Op: name, Path: f.Name(), Err: err}
		}
		return nil
	}
	var all struct {
		maxID, devices uint64
		identity       [16]byte
		_              [1024 - 32]byte
	}
	if err := ask("BTRFS_IOC_FS_INFO", fsInfo, unsafe.Pointer(&all)); err != nil {
		return BtrfsInfo{}, err
	}
	for tries, id := 0, all.maxID; ; tries, id = tries+1, id-1 {
		var one struct {
			id    uint64
			_     [24]byte
			total uint64
			_     [4096 - 40 - 1024]byte
			path  [1024]byte
		}
		one.id = id
		err := ask("BTRFS_IOC_DEV_INFO", devInfo, unsafe.Pointer(&one))
		if path := unix.ByteSliceToString(one.path[:]); err == nil && strings.HasPrefix(path, "/") { // one that is missing has none
			return BtrfsInfo{Identity: all.identity, Devices: all.devices, ID: id, Path: path, Size: int64(one.total)}, nil
		}
		if err != nil && !errors.Is(err, unix.ENODEV) {
			return BtrfsInfo{}, err
		}
		if id <= 1 || tries == mostTries {
			return BtrfsInfo{}, fmt.Errorf("%w: btrfs knows of no device below %s that is there", errdefs.ErrUnavailable, f.Name())
		}
	}
}

// Corrupted reports whether an error of At means a mount that is there and dead: it
// can only be unmounted.
func Corrupted(err error) bool { return err != nil && mountutils.IsCorruptedMnt(err) }

// Missing reports whether an error means that a path, or a directory on the way to it, is not there.
func Missing(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR)
}

// forgetBtrfs has the kernel forget which btrfs it last saw on a device that is not mounted (linux/btrfs.h:
// BTRFS_IOC_FORGET_DEV, since Linux 5.4). It remembers devices by their numbers, and a loop device's number is given to
// another volume once it is free: where one of several devices of a filesystem was seen there (anybody can make a
// superblock that says so), the next volume of that number cannot be mounted while another of its identity is: its own
// source, say.
func forgetBtrfs(device string) error {
	const forgetDev = 0x50009405
	control, err := os.OpenFile("/dev/btrfs-control", os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENODEV) {
		return nil // btrfs was not used yet
	} else if err != nil {
		return err
	}
	defer control.Close()
	var args struct { // struct btrfs_ioctl_vol_args
		_    int64
		name [4088]byte
	}
	copy(args.name[:len(args.name)-1], device)
	err = ioctl.Pointer(control, forgetDev, unsafe.Pointer(&args))
	if err == nil || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EBUSY) || errors.Is(err, unix.ENOTTY) {
		return nil // it remembers none; it is mounted, which the mount finds; too old
	}
	return &fs.PathError{Op: "BTRFS_IOC_FORGET_DEV", Path: device, Err: err}
}

// attributes are the options that belong to a mount, not to its filesystem.
var attributes = map[string]uint64{
	"nosuid": unix.MOUNT_ATTR_NOSUID, "nodev": unix.MOUNT_ATTR_NODEV, "noexec": unix.MOUNT_ATTR_NOEXEC,
	"noatime": unix.MOUNT_ATTR_NOATIME, "strictatime": unix.MOUNT_ATTR_STRICTATIME, "nodiratime": unix.MOUNT_ATTR_NODIRATIME,
	"relatime": unix.MOUNT_ATTR_RELATIME, "nosymfollow": unix.MOUNT_ATTR_NOSYMFOLLOW,
	"suid": 0, "dev": 0, "exec": 0, "atime": 0, "diratime": 0, "defaults": 0, "rw": 0,
}

// userspace are the options that mount(8) takes for itself.
var userspace = map[string]bool{"auto": true, "noauto": true, "nofail": true, "_netdev": true, "user": true, "nouser": true, "users": true, "group": true, "owner": true}

func forUserspace(option string) bool {
	key, _, _ := strings.Cut(option, "=")
	return userspace[option] || strings.HasPrefix(option, "x-") || strings.HasPrefix(option, "X-") || key == "comment"
}

// refused are the options that would make the mount something else.
var refused = map[string]bool{"bind": true, "rbind": true, "remount": true, "move": true, "shared": true, "rshared": true,
	"slave": true, "rslave": true, "private": true, "rprivate": true, "unbindable": true, "runbindable": true, "loop": true, "offset": true, "sizelimit": true}

// otherDevices are the options that name a device beside the volume's (ext4, XFS, btrfs).
var otherDevices = map[string]bool{"journal_dev": true, "journal_path": true, "logdev": true, "rtdev": true, "device": true}

// deadly are the options with which an error in the filesystem stops the kernel.
var deadly = map[string]bool{"errors=panic": true, "fatal_errors=panic": true}

// Filesystem mounts the filesystem on a block device at a directory. Options are those
// of mount(8). ErrInvalid for an option that the kernel refuses, ErrDataLoss if the
// kernel finds the filesystem damaged, ErrInUse if it finds the device in use; each with
// what the kernel says.
func Filesystem(device, target, fstype string, options []string, readOnly bool) error {
	fail := func(what string, fsfd int, err error) error {
		return fmt.Errorf("mount %s on %s as %s: %s: %w", device, target, fstype, what, withWords(fsfd, err))
	}
	fsfd, what, err := begin(device, fstype)
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
			if err := configure(fsfd, one); err != nil {
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
	if err := create(fsfd); needsLegacy(fstype, options, err) {
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

// create has the kernel open a filesystem that was configured.
func create(fsfd int) error {
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
	return fmt.Errorf("%w; the kernel's log may say more", err) // btrfs says nothing here
}

// Recover has the kernel replay the journal of a filesystem that is not mounted: it opens the
// filesystem, read-only and with options of its own, and mounts it nowhere.
func Recover(device, fstype string, options []string) error {
	fsfd, err := open(device, fstype, options)
	if err != nil {
		return fmt.Errorf("recover %s as %s: %w", device, fstype, err)
	}
	defer waitUnclaimed(device)
	defer holdForks()() // so that this is its last descriptor
	return unix.Close(fsfd)
}

// waitUnclaimed waits until a filesystem that was opened and closed is gone, so that its device can be used at once. A program
// that was being started may have its descriptors still: the kernel lets whoever starts it go on before it closes them
// (begin_new_exec). If that takes long it is somebody else who has the device.
func waitUnclaimed(device string) {
	_ = Unclaimed(context.Background(), device, busyTries, busyPause)
}

// Unclaimed makes sure that nobody has a block device for himself, as who mounts it does: EBUSY (open(2), O_EXCL), which is
// looked at again so many times, that far apart, or until the context ends. It has it itself for a moment, and no program that
// is being started has it for longer.
func Unclaimed(ctx context.Context, device string, tries int, pause time.Duration) error {
	for try := 0; ; try++ {
		err := claim(device)
		if !errors.Is(err, unix.EBUSY) || try >= tries || ctx.Err() != nil {
			return err
		}
		time.Sleep(pause)
	}
}

// claim has a block device for itself, and lets go of it.
func claim(device string) error {
	defer holdForks()()
	fd, err := unix.Open(device, unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// WithRoot opens the filesystem on a device for reading only, mounts it nowhere, and calls visit with
// its root.
func WithRoot(device, fstype string, options []string, visit func(root *os.File) error) error {
	fsfd, err := open(device, fstype, options)
	if err != nil {
		return fmt.Errorf("open the %s of %s: %w", fstype, device, err)
	}
	defer waitUnclaimed(device)
	defer holdForks()() // so that these are its last descriptors
	defer unix.Close(fsfd)
	tree, err := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NODEV)
	if err != nil {
		return fmt.Errorf("open the %s of %s: fsmount: %w", fstype, device, withWords(fsfd, err))
	}
	defer unix.Close(tree)
	fd, err := unix.Openat(tree, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the %s of %s: %w", fstype, device, err)
	}
	root := os.NewFile(uintptr(fd), device)
	return errors.Join(visit(root), root.Close())
}

// begin begins to open the filesystem on a device. The caller closes it, or is told what failed.
func begin(device, fstype string) (fsfd int, what string, err error) {
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
		err = withWords(fsfd, err)
		unix.Close(fsfd)
	}
	return fsfd, what, err
}

// open opens the filesystem on a device for reading only. The caller closes it.
func open(device, fstype string, options []string) (fsfd int, err error) {
	fsfd, what, err := begin(device, fstype)
	if err != nil {
		return -1, fmt.Errorf("%s: %w", what, err)
	}
	err = unix.FsconfigSetFlag(fsfd, "ro")
	for _, option := range options {
		err = errors.Join(err, configure(fsfd, option))
	}
	if err == nil {
		err = create(fsfd)
	}
	if err != nil {
		err = fmt.Errorf("open the filesystem: %w", withWords(fsfd, err))
		unix.Close(fsfd)
	}
	return fsfd, err
}

// configure gives an option to a filesystem that is being opened.
func configure(fsfd int, option string) error {
	key, value, hasValue := strings.Cut(option, "=")
	if hasValue {
		return unix.FsconfigSetString(fsfd, key, strings.Trim(value, `"`))
	}
	return unix.FsconfigSetFlag(fsfd, option)
}

// SplitOptions splits options at commas outside of quotes (SELinux contexts have commas).
func SplitOptions(options ...string) []string {
	var all []string
	for _, option := range options {
		quoted := false
		all = append(all, strings.FieldsFunc(option, func(r rune) bool {
			if r == '"' {
				quoted = !quoted
			}
			return r == ',' && !quoted
		})...)
	}
	return all
}

// CheckOptions returns ErrInvalid for options that no mount of a volume may have.
func CheckOptions(options ...string) error {
	for _, one := range SplitOptions(options...) {
		key, _, _ := strings.Cut(one, "=")
		switch {
		case refused[key]:
			return fmt.Errorf("%w: mount option %s: it would make the mount something else", errdefs.ErrInvalid, one)
		case otherDevices[key]:
			return fmt.Errorf("%w: mount option %s: a volume is one device", errdefs.ErrInvalid, one)
		case deadly[strings.ReplaceAll(one, `"`, "")]:
			return fmt.Errorf("%w: mount option %s: a damaged volume must not take the node down", errdefs.ErrInvalid, one)
		}
	}
	return nil
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

// Bind attaches what is at source, a directory or a device node, at target as well.
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
			try++
		case errors.Is(err, unix.EBUSY):
			return fmt.Errorf("%w: unmount %s: a process has files open there or works in it", errdefs.ErrInUse, path)
		default:
			return fmt.Errorf("unmount %s: %w", path, err)
		}
	}
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
// left; never anything with content: that is somebody's data.
func RemoveTarget(path string) error {
	if err := Unmount(path); err != nil {
		return err
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
	if err := removeNode(nodeBeside(path)); err != nil {
		return fmt.Errorf("remove %s: %w", nodeBeside(path), err)
	}
	return nil
}

// CleanPath checks a path that came with a request: absolute, and the same after
// cleaning, so that it says where it leads.
func CleanPath(path string) error {
	if !filepath.IsAbs(path) || filepath.Clean(path) != path || path == "/" || strings.ContainsRune(path, 0) {
		return fmt.Errorf("%w: %q is not an absolute, clean path", errdefs.ErrInvalid, path)
	}
	return nil
}
