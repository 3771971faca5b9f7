// Package mountpoint finds out what is mounted at a path (statx(2), proc_pid_mountinfo(5)).
package mountpoint

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Shared reports whether others may write to the filesystem of a directory, as far as can be seen: the directory is not the root of it, or there is
// another mount of it. A directory that is not there counts as shared.
func Shared(path string) (bool, error) {
	at, all, err := mountAt(path)
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	if err != nil {
		return false, errdefs.FromErrno(err)
	}
	if at.root != "/" {
		return true, nil
	}
	for _, m := range all {
		if m.id != at.id && m.device == at.device {
			return true, nil
		}
	}
	return false, nil
}

// At reports whether something is mounted at an open directory.
func At(directory *os.File) (bool, error) {
	var st unix.Statx_t
	err := unix.Statx(int(directory.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_INO, &st)
	return st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0, errdefs.FromErrno(err)
}

// IsFilesystem reports whether the root of a filesystem is mounted at a directory, or that of a btrfs subvolume. In a container other directories are
// mounts as well.
func IsFilesystem(path string) (bool, error) {
	at, _, err := mountAt(path)
	return at.root == "/" || at.subvolume, errdefs.FromErrno(err)
}

// mount is a line of mountinfo (proc_pid_mountinfo(5)).
type mount struct {
	id     string
	device string // of the filesystem: on btrfs, the same for each of its subvolumes
	root   string // the directory of the filesystem that is mounted
	// subvolume: the root of a subvolume of btrfs is mounted.
	subvolume bool
}

// btrfsRoot is the inode of the root of each subvolume (BTRFS_FIRST_FREE_OBJECTID).
const btrfsRoot = 256

// mountAt returns the mount at a path, and all mounts. Both are empty if nothing is mounted at the path.
func mountAt(path string) (at mount, all []mount, err error) {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_MNT_ID|unix.STATX_INO, &st); err != nil {
		return mount{}, nil, err
	}
	if st.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0 {
		return mount{}, nil, nil
	}
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return mount{}, nil, err
	}
	for line := range strings.Lines(string(text)) {
		// ID, parent, device, root within the filesystem, ...
		fields := strings.Fields(line)
		if len(fields) < 4 {
			continue
		}
		m := mount{id: fields[0], device: fields[2], root: fields[3]}
		if m.id == fmt.Sprint(st.Mnt_id) {
			at = m
			at.subvolume = st.Ino == btrfsRoot && strings.Contains(line, " - btrfs ")
		}
		all = append(all, m)
	}
	return at, all, nil
}
