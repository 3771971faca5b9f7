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
	// Device number: of a device node the device itself, else that of the filesystem. At the
	// root of a mount it is the block device below (one of them, of a btrfs that has several).
	Device uint64
	// Node: a block device node. Directory: a directory. Neither: a file or something else.
	Node, Directory bool
	// Unlinked: the file has no name any more, so nothing can be mounted on it, and it can be mounted nowhere else.
	Unlinked bool
	// ReadOnly: the mount, or the filesystem below it, takes no writes.
	ReadOnly bool
	// Statfs is what statfs(2) says of the filesystem.
	Statfs unix.Statfs_t
	mount  int // of the mount, in the list of all mounts
}

// At says what is at a path, without following a symbolic link at its end. A path that does
// not exist gives an error that is fs.ErrNotExist; a mount whose filesystem is gone
// gives an error that Corrupted knows. ErrUnavailable: the filesystem does not answer.
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

// answerTime is how long At waits for a filesystem. Somebody may have mounted one whose server is away (FUSE, NFS).
// Until it has answered once, later calls for that path do not wait.
const answerTime = 10 * time.Second

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

// Same reports whether two paths are the same entry of one directory, which is bound to two paths: what is mounted at one
// is seen at both, and unmounted at both.
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
// one that is dead, for which At returns an error. 0 if there is none.
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

func openPath(path string) (int, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return fd, nil
}

// Corrupted reports whether an error of At means a mount that is there and dead: it
// can only be unmounted.
func Corrupted(err error) bool { return err != nil && mountutils.IsCorruptedMnt(err) }

// Starved reports whether an error of At says nothing of what is there: this process, or the machine, has no file
// descriptors or no memory left.
func Starved(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM)
}

// Missing reports whether an error means that a path, or a directory on the way to it, is not there.
func Missing(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR)
}

// CleanPath checks a path that came with a request: absolute, and the same after
// cleaning, so that it says where it leads.
func CleanPath(path string) error {
	if !filepath.IsAbs(path) || filepath.Clean(path) != path || path == "/" || strings.ContainsRune(path, 0) {
		return fmt.Errorf("%w: %q is not an absolute, clean path", errdefs.ErrInvalid, path)
	}
	return nil
}
