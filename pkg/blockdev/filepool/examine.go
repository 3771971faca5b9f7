package filepool

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/machine"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/directory"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/layout"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/ground"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Examine: see blockdev.Examiner. A file pool needs a directory, and what its filesystem can do.
func (l Location) Examine(ctx context.Context, report blockdev.Report) {
	at, info, err := nearest(l.Path)
	switch {
	case err != nil:
		report.Failure("%v", err)
		return
	case !info.IsDir():
		report.Failure("%s is no directory; give the pool another one", at)
		return
	}
	var st unix.Statfs_t
	if err := unix.Statfs(at, &st); err != nil {
		report.Failure("look at the filesystem of %s: %v", at, err)
		return
	}
	m, err := machine.MountOf(at)
	if err != nil {
		report.Failure("%v", err)
		return
	}
	if st.Flags&unix.ST_RDONLY != 0 {
		report.Failure("%s is on a read-only mount (%s at %s); mount it writable, or give the pool another directory", at, m.FsType, m.MountPoint)
		return
	}
	if err := unix.Access(at, unix.W_OK|unix.X_OK); err != nil {
		report.Failure("%s cannot be written: %v", at, err)
		return
	}
	where := fmt.Sprintf("on %s mounted at %s", m.FsType, m.MountPoint)
	switch {
	case at != l.Path:
		report.OK("%s is not there yet and can be made, %s", l.Path, where)
		l.examineIdentity(ctx, report)
	case locked(filepath.Join(at, directory.LockFile)):
		report.OK("%s, %s, in use by a running driver", l.Path, where)
	default:
		report.OK("%s, %s, in use by nobody", l.Path, where)
		l.examineIdentity(ctx, report)
	}
	if m.FsType == "tmpfs" || m.FsType == "overlay" {
		report.Warning("what is on %s goes with the machine's restart or with the container; give the pool a directory on a disk", m.FsType)
	}
	l.examineParts(report)
	examineFilesystem(report, at)
	l.examineSpace(report, st)
}

// examineIdentity reports which pool is at the place, or why none would be made there by a driver without a cluster.
func (l Location) examineIdentity(ctx context.Context, report blockdev.Report) {
	switch id, err := l.place().Identify(ctx); {
	case err != nil:
		report.Warning("%v", err)
	case id != "":
		report.OK("it has the identity %s", id)
	}
}

// examineParts tells which of the pool's directories cannot be used, as when something is mounted over one.
func (l Location) examineParts(report blockdev.Report) {
	root, err := os.OpenRoot(l.Path)
	if err != nil {
		return // there is no pool yet
	}
	defer root.Close()
	for _, name := range slices.Sorted(maps.Values(layout.Directories)) {
		part, err := directory.Part(root, name)
		switch {
		case err == nil:
			part.Close()
		case !errors.Is(err, fs.ErrNotExist):
			report.Failure("%s", errdefs.Words(err))
		}
	}
}

// examineFilesystem reports what the filesystem of a directory can do, by trying.
func examineFilesystem(report blockdev.Report, path string) {
	switch shared, err := machine.Reflinks(path); {
	case err != nil:
		report.Failure("make a file in %s: %v", path, err)
		return
	case shared:
		report.OK("reflinks: snapshots and clones share blocks, and take no time")
	default:
		report.OK("no reflinks: snapshots and clones are copies that keep holes; a directory on XFS or btrfs makes them instant")
	}
	switch direct, err := machine.DirectIO(path); {
	case err != nil:
		report.Failure("open a file in %s: %v", path, err)
	case direct:
		report.OK("direct I/O: nothing is cached twice")
	default:
		report.Warning("no direct I/O: what volumes hold is cached twice; use a directory on ext4, XFS or btrfs")
	}
}

// examineSpace reports what the driver would promise.
func (l Location) examineSpace(report blockdev.Report, st unix.Statfs_t) {
	total, free := int64(st.Blocks)*st.Frsize, int64(st.Bavail)*st.Frsize
	var promised, taken int64
	for _, kind := range layout.Directories {
		images, _ := filepath.Glob(filepath.Join(l.Path, kind, "*.img"))
		for _, image := range images {
			var st unix.Stat_t
			if unix.Stat(image, &st) == nil {
				promised, taken = promised+st.Size, taken+st.Blocks*512
			}
		}
	}
	given := l.ReservePercent != ReserveAuto
	reserve, shared, err := l.Reserve()
	if err != nil {
		report.Failure("%v", err)
		return
	}
	switch {
	case !shared:
		report.OK("its filesystem is for it alone, as far as can be seen from here")
	case given && reserve < SharedReserve:
		report.Warning("others write to its filesystem, too, and only %g %% of it are in reserve: a kubelet there evicts pods when 10 or 15 %% are left; give the pool a disk, or leave reservePercent to the driver",
			reserve)
	default:
		report.OK("others write to its filesystem, too: %g %% of it are in reserve (a disk for the pool alone would need less)", reserve)
	}
	usable := float64(free) + float64(taken) - float64(total)*reserve/100
	left := int64(usable*l.Overprovision) - promised
	say, advice := report.OK, ""
	if left < blockdev.Granularity {
		say, advice, left = report.Warning, "; make room, or lower reservePercent", 0
	}
	say("%s of %s are free; %s are promised to volumes and snapshots, %s can be (reservePercent=%g, overprovision=%g)%s",
		machine.Size(free), machine.Size(total), machine.Size(promised), machine.Size(left), reserve, l.Overprovision, advice)
}

// nearest returns a path, or the nearest directory above it that exists.
func nearest(path string) (string, os.FileInfo, error) {
	for {
		info, err := os.Stat(path)
		// ENOTDIR: a file is above, and will be found to be one.
		if err == nil || (!errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR)) || path == "/" {
			return path, info, err
		}
		path = filepath.Dir(path)
	}
}

// Foundations: see blockdev.Founded. If there is no pool yet, they are those of the place that it would have.
func (l Location) Foundations(context.Context) ([]uint64, error) {
	at, _, err := nearest(l.Path)
	if err != nil {
		return nil, err
	}
	f, err := os.Open(at)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return ground.Of(f)
}

// locked reports whether another process holds the lock of a pool. It takes a shared lock, which ends with the file.
func locked(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	return errors.Is(unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB), unix.EWOULDBLOCK)
}
