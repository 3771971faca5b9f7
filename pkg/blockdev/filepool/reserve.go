package filepool

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/mountpoint"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// How much of a filesystem is never promised if the URL says nothing, in percent.
const (
	// OwnReserve is for a filesystem that a pool has for itself: room for its metadata.
	OwnReserve = 5
	// SharedReserve is for one that others write to. The kubelet evicts pods when 10 % of its own filesystem, or 15 % of that of images, are left, and
	// removes images until 20 % are free (evictionHard, imageGCLowThresholdPercent): volumes leave it that.
	SharedReserve = 20
)

// Reserve returns how much of the filesystem of a file pool is never promised, in percent, and whether the pool shares it, as far as can be seen. A pool
// has a filesystem for itself if its directory is the root of it, and no other mount of it can be seen; in a container, that is all that can be seen of
// the machine. A directory that is not there counts as shared.
func (l Location) Reserve() (percent float64, shared bool, err error) {
	shared, err = mountpoint.Shared(l.Path)
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

// inodes returns how many files the filesystem has room for, and how many of these are free; zero if it does not count them.
func (p *pool) inodes() (total, free uint64, err error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(p.lock.Fd()), &st); err != nil {
		return 0, 0, fmt.Errorf("%w: pool %s at %s: %w", errdefs.ErrUnavailable, p.name, p.location.Path, err)
	}
	return st.Files, st.Ffree, nil
}

// checkInodes returns errdefs.ErrNoSpace if a new object would take inodes of the reserve. The percentage is that of bytes: the kubelet evicts pods when
// inodes run out, too.
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
