package mount

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	mountutils "k8s.io/mount-utils"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Info says what is at a path.
type Info struct {
	// Root: a mount is attached exactly here.
	Root bool
	// Device is a device number (makedev(3)): of a block device node the device itself, otherwise that of the filesystem. A btrfs has device numbers of its
	// own: at the root of a mount it is the number of its block device, or of one of them.
	Device uint64
	// Node: a block device node. Directory: a directory. Neither: a file or something else.
	Node, Directory bool
	// Unlinked: the file has no name any more. Then the kernel mounts nothing on it, and binds it nowhere else.
	Unlinked bool
	// ReadOnly: the mount, or the filesystem below it, takes no writes.
	ReadOnly bool
	// Statfs is what statfs(2) says of the filesystem.
	Statfs unix.Statfs_t
	mount  int // ID of the mount, as in the list of all mounts (proc_pid_mountinfo(5))
}

// At returns what is at a path, without following a symbolic link at its end. Missing, Corrupted and Starved tell errors apart: the path does not exist; the
// mount there is dead; this process has no resources left. ErrUnavailable if the filesystem does not answer within answerTime, or a btrfs does not tell its
// device now. ErrUnsupported at the root of a mount of a btrfs that is neither a directory nor a file, as it does not lead to the device.
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
	case <-time.After(answerTime):
	}
	hanging.Lock()
	defer hanging.Unlock()
	select {
	case a := <-answers:
		return a.info, a.err
	default:
		hanging.paths[path] = true
		return Info{}, fmt.Errorf("%w: the filesystem at %s has not answered for %s", errdefs.ErrUnavailable, path, answerTime)
	}
}

// answerTime is how long At waits for a filesystem: somebody may have mounted one whose server does not answer (FUSE, NFS). Until it has answered, later calls
// for that path fail at once.
const answerTime = 10 * time.Second

// hanging are the paths whose filesystem has not answered yet.
var hanging = struct {
	sync.Mutex
	paths map[string]bool
}{paths: map[string]bool{}}

// at is At without a limit of time. The caller holds forks back (holdForks) while he waits for it.
func at(path string) (Info, error) {
	fd, err := openPath(path)
	if err != nil {
		return Info{}, err
	}
	defer unix.Close(fd)
	var sx unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_TYPE|unix.STATX_NLINK|unix.STATX_MNT_ID, &sx); err != nil {
		return Info{}, &fs.PathError{Op: "statx", Path: path, Err: err}
	}
	info := Info{
		Root:      sx.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0,
		Device:    unix.Mkdev(sx.Dev_major, sx.Dev_minor),
		Directory: sx.Mode&unix.S_IFMT == unix.S_IFDIR,
		Unlinked:  sx.Mask&unix.STATX_NLINK != 0 && sx.Nlink == 0,
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
		// btrfs gives each subvolume a device number of its own. Only a directory or a file is opened to ask it: an open of a pipe could wait for ever, and a
		// socket or a device does not lead to the btrfs.
		if !info.Directory && sx.Mode&unix.S_IFMT != unix.S_IFREG {
			return Info{}, fmt.Errorf("%w: %s is neither a directory nor a file, so its btrfs cannot be asked for its device", errdefs.ErrUnsupported, path)
		}
		if info.Device, err = btrfsDevice(fd, path); err != nil {
			return Info{}, err
		}
	}
	return info, nil
}

// Resolve returns a path without symbolic links in its directories, as the kernel names mounts. A link at its end stays. A path whose directory does not
// exist is returned as it is.
func Resolve(path string) string {
	directory, err := filepath.EvalSymlinks(filepath.Dir(path))
	if err != nil {
		return path
	}
	return filepath.Join(directory, filepath.Base(path))
}

// Same reports whether two paths are the same entry of one directory, which has two paths (a bind mount, or a link). What is mounted at one is as a rule
// seen at the other, and unmounted there too.
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

// DeviceOf returns the device of the mount at a path, by the list of all mounts: also of a dead one, for which At returns an error. 0 if nothing is mounted
// there, or the device is not known.
func DeviceOf(path string) (uint64, error) {
	mounts, err := mountinfo.GetMounts(nil)
	if err != nil {
		return 0, err
	}
	for _, m := range slices.Backward(mounts) { // of several mounts at the path, the last is on top
		if m.Mountpoint == path {
			return tableDevice(m, mounts), nil
		}
	}
	return 0, nil
}

// openPath opens a path with O_PATH, without following a symbolic link at its end. The caller closes it.
func openPath(path string) (int, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return fd, nil
}

// Corrupted reports whether an error of At means a dead mount, which can only be unmounted (mount-utils: IsCorruptedMnt).
func Corrupted(err error) bool { return err != nil && mountutils.IsCorruptedMnt(err) }

// Starved reports whether an error of At says nothing of the path, as this process or the machine has no file descriptors or no memory left.
func Starved(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM)
}

// Missing reports whether an error means that a path, or a directory on the way to it, is not there.
func Missing(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR)
}

// CleanPath returns ErrInvalid unless a path is absolute, the same after filepath.Clean, and not the root.
func CleanPath(path string) error {
	if !filepath.IsAbs(path) || filepath.Clean(path) != path || path == "/" || strings.ContainsRune(path, 0) {
		return fmt.Errorf("%w: %q is not an absolute, clean path", errdefs.ErrInvalid, path)
	}
	return nil
}
