package filepool

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// What is never promised of a filesystem if the URL says nothing, in percent.
const (
	// OwnReserve is that of a filesystem that a pool has for itself: room for its metadata.
	OwnReserve = 5
	// SharedReserve is that of one that others write to. The kubelet evicts pods when 10 % of its own
	// filesystem, or 15 % of that of images, are left, and clears images away from there until 20 % are
	// free (evictionHard, imageGCLowThresholdPercent): volumes leave it that.
	SharedReserve = 20
)

// Reserve returns how much of the filesystem of a file pool is never promised, in percent, and whether the pool
// shares it with others as far as can be seen: a pool has a filesystem for itself if its directory is the root of
// it, and no other mount is of it. In a container, that is all that can be seen of the machine. A directory that is
// not there is shared.
func (l Location) Reserve() (percent float64, shared bool, err error) {
	shared, err = sharesFilesystem(l.Path)
	switch {
	case err != nil:
		return 0, false, err
	case l.ReservePercent != ReserveAuto:
		return l.ReservePercent, shared, nil
	case shared:
		return SharedReserve, true, nil
	}
	return OwnReserve, false, nil
}

func sharesFilesystem(path string) (bool, error) {
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

// mountPoint is a line of mountinfo (proc_pid_mountinfo(5)).
type mountPoint struct {
	id     string
	device string // of the filesystem: on btrfs, the same for each of its subvolumes
	root   string // the directory of the filesystem that is mounted
	// subvolume: it is the root of one of btrfs.
	subvolume bool
}

// btrfsRoot is the inode of each subvolume's root (BTRFS_FIRST_FREE_OBJECTID).
const btrfsRoot = 256

// mountAt returns the mount at a path, and all that there are. It is empty if the path is just a directory of another one.
func mountAt(path string) (at mountPoint, all []mountPoint, err error) {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_MNT_ID|unix.STATX_INO, &st); err != nil {
		return mountPoint{}, nil, err
	}
	if st.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0 {
		return mountPoint{}, nil, nil
	}
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return mountPoint{}, nil, err
	}
	for line := range strings.Lines(string(text)) {
		// ID, parent, device, root within the filesystem, ...
		fields := strings.Fields(line)
		if len(fields) < 4 {
			continue
		}
		m := mountPoint{id: fields[0], device: fields[2], root: fields[3]}
		if m.id == fmt.Sprint(st.Mnt_id) {
			at = m
			at.subvolume = st.Ino == btrfsRoot && strings.Contains(line, " - btrfs ")
		}
		all = append(all, m)
	}
	return at, all, nil
}

// inodes returns how many files a filesystem has room for, and how many more; zero if it does not count them.
func (p *pool) inodes() (total, free uint64, err error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(p.lock.Fd()), &st); err != nil {
		return 0, 0, fmt.Errorf("%w: pool %s at %s: %w", errdefs.ErrUnavailable, p.name, p.location.Path, err)
	}
	return st.Files, st.Ffree, nil
}

// checkInodes returns errdefs.ErrNoSpace if a new object would take inodes of the reserve, which is of them as it is of bytes:
// the kubelet evicts pods when they run out, too.
func (p *pool) checkInodes() error {
	const each = 2 // an image and a record
	total, free, err := p.inodes()
	if err != nil || total == 0 {
		return err
	}
	if left := float64(free) - each; left < float64(total)*p.location.ReservePercent/100 {
		return fmt.Errorf("%w: the filesystem of pool %s at %s has %d of %d inodes left, and %g %% are in reserve; delete volumes or snapshots, or files of others",
			errdefs.ErrNoSpace, p.name, p.location.Path, free, total, p.location.ReservePercent)
	}
	return nil
}
