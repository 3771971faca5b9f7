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

// Over says what is mounted at an open directory that parent has under some name, and hides what parent has there; empty if nothing is mounted there, or just that directory once more.
func Over(parent, directory *os.File, name string) (what string, err error) {
	var here unix.Statx_t
	if err := unix.Statx(int(directory.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_INO|unix.STATX_MNT_ID, &here); err != nil {
		return "", errdefs.FromErrno(err)
	}
	if here.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0 {
		return "", nil
	}
	if below, err := statBelow(parent, name); err == nil && below.Ino == here.Ino && below.Dev_major == here.Dev_major && below.Dev_minor == here.Dev_minor {
		return "", nil
	}
	at, _, err := find(here)
	if err != nil {
		return "", errdefs.FromErrno(err)
	}
	return fmt.Sprintf("%s (%s)", at.source, at.fs), nil
}

// statBelow looks at what a directory has under a name, whatever is mounted there: in a copy of its mount, with nothing mounted in it (open_tree(2)).
func statBelow(directory *os.File, name string) (st unix.Statx_t, err error) {
	alone, err := unix.OpenTree(int(directory.Fd()), "", unix.AT_EMPTY_PATH|unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return st, err
	}
	err = unix.Statx(alone, name, unix.AT_SYMLINK_NOFOLLOW, unix.STATX_INO, &st)
	return st, errors.Join(err, unix.Close(alone))
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

	fs, source string // its type, and what it is on
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
	return find(st)
}

// find returns the mount of which something is the root, and all that there are.
func find(st unix.Statx_t) (at mount, all []mount, err error) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return mount{}, nil, err
	}
	for line := range strings.Lines(string(text)) {
		// ID, parent, device, root within the filesystem, ... - type, source, ...
		head, tail, _ := strings.Cut(line, " - ")
		fields, of := strings.Fields(head), strings.Fields(tail)
		if len(fields) < 4 || len(of) < 2 {
			continue
		}
		m := mount{id: fields[0], device: fields[2], root: fields[3], fs: of[0], source: of[1]}
		if m.id == fmt.Sprint(st.Mnt_id) {
			at = m
			at.subvolume = st.Ino == btrfsRoot && m.fs == "btrfs"
		}
		all = append(all, m)
	}
	return at, all, nil
}
