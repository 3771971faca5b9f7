// Package doctor is "driver doctor".
package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/capability"
	"github.com/ashlar-csi/ashlar/internal/command"
	"github.com/ashlar-csi/ashlar/internal/machine"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lvmpool"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pools"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
)

// Pool is a pool that is to be checked.
type Pool struct {
	Name     string
	Location pools.Location
}

// Run checks this machine and the places of pools, and prints a line for each thing: ok, warning or failure. An error if there
// is a failure. It changes nothing.
func Run(ctx context.Context, all []Pool) error {
	x := &examination{ctx: ctx}
	x.privileges()
	x.kernel()
	x.loopDevices()
	x.tools()
	x.filesystems()
	for _, pool := range all {
		x.pool(pool)
	}
	x.propagation()
	if x.failures > 0 {
		return fmt.Errorf("the driver will not work on this machine as it is; failures: %d", x.failures)
	}
	return ctx.Err()
}

// examination prints what it finds.
type examination struct {
	ctx      context.Context
	failures int
}

func (x *examination) print(verdict, format string, args ...any) {
	fmt.Printf("%-7s %s\n", verdict, fmt.Sprintf(format, args...))
}

func (x *examination) ok(format string, args ...any) { x.print("ok", format, args...) }

func (x *examination) warning(format string, args ...any) { x.print("warning", format, args...) }

func (x *examination) failure(format string, args ...any) {
	x.failures++
	x.print("failure", format, args...)
}

func (x *examination) privileges() {
	if os.Geteuid() == 0 {
		x.ok("user: root")
	} else {
		x.failure("user: %d; the driver attaches and mounts devices: run it as root", os.Geteuid())
	}
	if capability.Has(unix.CAP_SYS_ADMIN) {
		x.ok("capability CAP_SYS_ADMIN")
	} else {
		x.failure("capability CAP_SYS_ADMIN is missing: mounts and loop devices need it; in a container, make it privileged")
	}
	if capability.Has(unix.CAP_SYS_RESOURCE) {
		x.ok("capability CAP_SYS_RESOURCE: ext4 grows while it is mounted")
	} else {
		x.warning("capability CAP_SYS_RESOURCE is missing: ext4 does not grow while it is mounted, only when it is staged next (XFS and btrfs do); in a container, add it")
	}
}

// kernel asks for the newest of the system calls that the driver uses; distributions
// bring some to older kernels.
func (x *examination) kernel() {
	err := unix.MountSetattr(-1, "", unix.AT_EMPTY_PATH, &unix.MountAttr{})
	if errors.Is(err, unix.ENOSYS) {
		x.failure("kernel %s: it has no mount_setattr(2); Linux 5.12 or later is needed", machine.KernelRelease())
		return
	}
	x.ok("kernel %s: it has mount_setattr (Linux 5.12) and with it LOOP_CONFIGURE (5.8)", machine.KernelRelease())
}

func (x *examination) loopDevices() {
	const control = "/dev/loop-control"
	f, err := os.OpenFile(control, os.O_RDWR, 0)
	if err != nil {
		x.failure("loop control: %v; modprobe loop, or in a container mount the host's /dev", err)
		return
	}
	defer f.Close()
	x.ok("loop control: %s opens", control)
	existing, _ := filepath.Glob("/sys/block/loop*")
	used, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	n, err := unix.IoctlRetInt(int(f.Fd()), unix.LOOP_CTL_GET_FREE)
	if err != nil {
		x.failure("free loop device: %v; detach some that nobody needs (losetup -l), or look at the kernel's log", err)
	} else {
		x.ok("free loop device: /dev/loop%d; %d are in use, and the kernel makes more as they are needed", n, len(used))
		if !slices.Contains(existing, fmt.Sprintf("/sys/block/loop%d", n)) {
			_ = unix.IoctlSetInt(int(f.Fd()), unix.LOOP_CTL_REMOVE, n) // it was made for the answer
		}
	}
	if most, err := machine.ReadNumber("/sys/module/loop/parameters/max_loop"); err != nil || most == 0 {
		x.ok("loop module: max_loop is not set, the number of devices is not limited")
	} else {
		x.ok("loop module: max_loop=%d is how many devices there are from the start; it limits nothing", most)
	}
	m, err := machine.MountOf("/dev")
	switch node := fmt.Sprintf("/dev/loop%d", n); {
	case err == nil && m.FsType == "devtmpfs":
		x.ok("/dev is devtmpfs: the kernel keeps the nodes of loop devices")
	case capability.Has(unix.CAP_MKNOD):
		x.ok("/dev is %s: the driver makes the nodes of loop devices that are missing", m.FsType)
	case machine.Exists(node):
		x.warning("/dev is %s, and CAP_MKNOD is missing: there are nodes for some loop devices only; in a container, mount the host's /dev", m.FsType)
	default:
		x.failure("/dev is %s, without %s, and CAP_MKNOD is missing; in a container, mount the host's /dev", m.FsType, node)
	}
}

// programs that the driver runs, or its user after damage.
var programs = []struct {
	name string
	flag string // prints the version; empty: being called without arguments does
	pkg  string // of Debian
	fs   filesystem.Type
	use  string
}{
	{"mkfs.ext4", "-V", "e2fsprogs", filesystem.Ext4, "makes ext4"},
	{"e2fsck", "-V", "e2fsprogs", filesystem.Ext4, "checks ext4 before it is mounted"},
	{"resize2fs", "", "e2fsprogs", filesystem.Ext4, "grows ext4 that is not mounted"},
	{"mkfs.xfs", "-V", "xfsprogs", filesystem.XFS, "makes XFS"},
	{"xfs_repair", "-V", "xfsprogs", filesystem.XFS, "for you, should an XFS be damaged"},
	{"mkfs.btrfs", "-V", "btrfs-progs", filesystem.Btrfs, "makes btrfs"},
	{"btrfstune", "", "btrfs-progs", filesystem.Btrfs, "tells copies of btrfs apart, before Linux 6.7"},
}

// PackageOf returns the package of Debian that has a program.
func PackageOf(program string) string {
	for _, p := range programs {
		if p.name == program {
			return p.pkg
		}
	}
	return program
}

// versionPattern finds the version in what a program prints.
var versionPattern = regexp.MustCompile(`\bv?(\d+\.\d+(\.\d+)?)\b`)

func (x *examination) tools() {
	for _, p := range programs {
		argv := []string{p.name}
		if p.flag != "" {
			argv = append(argv, p.flag)
		}
		// Not all have a way to tell their version that is no error.
		stdout, stderr, err := command.Run(x.ctx, argv...)
		if errors.Is(err, exec.ErrNotFound) {
			say := x.warning
			if p.fs == filesystem.Ext4 {
				say = x.failure
			}
			say("%s (%s) is not there; apt-get install %s", p.name, p.use, p.pkg)
			continue
		}
		version := ""
		if found := versionPattern.FindStringSubmatch(stdout + stderr); found != nil {
			version = " " + found[1]
		}
		x.ok("%s%s: %s", p.name, version, p.use)
	}
}

func (x *examination) filesystems() {
	known, err := os.ReadFile("/proc/filesystems")
	if err != nil {
		x.failure("filesystems that the kernel knows: %v", err)
		return
	}
	words := strings.Fields(string(known))
	for _, t := range filesystem.Types {
		name := string(t)
		if slices.Contains(words, name) {
			x.ok("filesystem %s: the kernel has it", name)
		} else if _, _, err := command.Run(x.ctx, "modprobe", "-n", "-q", name); err == nil {
			x.ok("filesystem %s: the kernel has a module for it, which it loads when it is needed", name)
		} else if t == filesystem.Ext4 {
			x.failure("filesystem %s, the default: this kernel does not have it; modprobe %s, or install its module", name, name)
		} else {
			x.warning("filesystem %s: this kernel does not have it, so no volume can carry it; modprobe %s, or install its module", name, name)
		}
	}
}

// pool checks the place of a pool without opening it.
func (x *examination) pool(p Pool) {
	switch location := p.Location.(type) {
	case filepool.Location:
		x.files(p.Name, location)
	case lvmpool.Location:
		x.lvm(p.Name, location)
	}
}

// files checks what a file pool needs: a folder, and what its filesystem can do.
func (x *examination) files(name string, location filepool.Location) {
	folder, info, err := nearest(location.Path)
	switch {
	case err != nil:
		x.failure("pool %s: %v", name, err)
		return
	case !info.IsDir():
		x.failure("pool %s: %s is no folder; give the pool another one", name, folder)
		return
	}
	var st unix.Statfs_t
	if err := unix.Statfs(folder, &st); err != nil {
		x.failure("pool %s: look at the filesystem of %s: %v", name, folder, err)
		return
	}
	m, err := machine.MountOf(folder)
	if err != nil {
		x.failure("pool %s: %v", name, err)
		return
	}
	if st.Flags&unix.ST_RDONLY != 0 {
		x.failure("pool %s: %s is on a read-only mount (%s at %s); mount it writable, or give the pool another folder", name, folder, m.FsType, m.MountPoint)
		return
	}
	if err := unix.Access(folder, unix.W_OK|unix.X_OK); err != nil {
		x.failure("pool %s: %s cannot be written: %v", name, folder, err)
		return
	}
	where := fmt.Sprintf("on %s mounted at %s", m.FsType, m.MountPoint)
	switch {
	case folder != location.Path:
		x.ok("pool %s: %s is not there yet and can be made, %s", name, location.Path, where)
		x.becomes(name, location)
	case locked(filepath.Join(folder, "lock")):
		x.ok("pool %s: %s, %s, in use by a running driver", name, location.Path, where)
	default:
		x.ok("pool %s: %s, %s, in use by nobody", name, location.Path, where)
		x.becomes(name, location)
	}
	if m.FsType == "tmpfs" || m.FsType == "overlay" {
		x.warning("pool %s: what is on %s goes with the machine's restart or with the container; give the pool a folder on a disk", name, m.FsType)
	}
	x.abilities(name, folder)
	x.space(name, location, st)
}

// becomes tells which pool is at a place, or whether a driver without a cluster would make one there.
func (x *examination) becomes(name string, location filepool.Location) {
	switch id, err := location.Identify(x.ctx); {
	case err != nil:
		x.warning("pool %s: %v", name, err)
	case id != "":
		x.ok("pool %s: it has the identity %s", name, id)
	}
}

// lvm checks what an LVM pool needs: lvm2, the kernel's targets, and the volume group.
func (x *examination) lvm(name string, location lvmpool.Location) {
	stdout, _, err := command.Run(x.ctx, "lvm", "version")
	if errors.Is(err, exec.ErrNotFound) {
		x.failure("pool %s: lvm2 is not there; apt-get install lvm2", name)
		return
	}
	version := versionPattern.FindString(stdout)
	x.ok("pool %s: lvm2 %s", name, version)
	if location.Thin != "" {
		if _, _, err := command.Run(x.ctx, "thin_check", "-V"); errors.Is(err, exec.ErrNotFound) {
			x.failure("pool %s: thin_check is not there, and lvm2 activates no thin pool without it; apt-get install thin-provisioning-tools", name)
		} else {
			x.ok("pool %s: thin-provisioning-tools", name)
		}
	}
	targets, err := dm.Targets()
	if err != nil {
		x.failure("pool %s: device mapper: %v", name, err)
		return
	}
	needed := map[string]string{"linear": "dm-mod", "snapshot-origin": "dm-snapshot"}
	if location.Thin != "" {
		needed = map[string]string{"linear": "dm-mod", "thin-pool": "dm-thin-pool"}
	}
	for _, target := range slices.Sorted(maps.Keys(needed)) {
		module := needed[target]
		if have := targets[target]; have != "" {
			x.ok("pool %s: device mapper target %s %s", name, target, have)
		} else if _, _, err := command.Run(x.ctx, "modprobe", "-n", "-q", module); err == nil {
			x.ok("pool %s: device mapper target %s: the kernel has a module for it, which lvm2 loads when it is needed", name, target)
		} else {
			x.failure("pool %s: device mapper target %s: this kernel does not have it; modprobe %s, or install its module", name, target, module)
		}
	}
	survey, err := location.Survey(x.ctx)
	switch {
	case err != nil:
		x.failure("pool %s: %s: %v", name, location, err)
		return
	case survey.Problem != "":
		x.failure("pool %s: %s", name, survey.Problem)
	case survey.Missing > 0:
		x.warning("pool %s: %d physical volumes are missing; lvm2 changes nothing in the group until they are back", name, survey.Missing)
	}
	if location.Thin != "" {
		x.ok("pool %s: thin pool of %s in a group of %s; %s are promised to %d volumes and snapshots of this driver (overprovision=%g, dataWatermark=%g, metadataWatermark=%g)",
			name, machine.Size(survey.ThinSize), machine.Size(survey.Size), machine.Size(survey.Promised), survey.Volumes, location.Overprovision, location.DataWatermark, location.MetadataWatermark)
		return
	}
	x.ok("pool %s: %s of %s are free, in extents of %s; %s are promised to %d volumes and snapshots of this driver (reservePercent=%g)",
		name, machine.Size(survey.Free), machine.Size(survey.Size), machine.Size(survey.Extent), machine.Size(survey.Promised), survey.Volumes, location.ReservePercent)
	for _, device := range survey.Written {
		x.ok("pool %s: zeros are written to %s, block by block, before a volume on it is handed out: it has no command that guarantees them", name, device)
	}
}

// abilities of the filesystem under a pool, by trying.
func (x *examination) abilities(name, folder string) {
	switch shared, err := machine.Reflinks(folder); {
	case err != nil:
		x.failure("pool %s: make a file in %s: %v", name, folder, err)
		return
	case shared:
		x.ok("pool %s: reflinks: snapshots and clones share blocks, and take no time", name)
	default:
		x.ok("pool %s: no reflinks: snapshots and clones are copies that keep holes; a folder on XFS or btrfs makes them instant", name)
	}
	switch direct, err := machine.DirectIO(folder); {
	case err != nil:
		x.failure("pool %s: open a file in %s: %v", name, folder, err)
	case direct:
		x.ok("pool %s: direct I/O: nothing is cached twice", name)
	default:
		x.warning("pool %s: no direct I/O: what volumes hold is cached twice; use a folder on ext4, XFS or btrfs", name)
	}
}

// space works out what the driver would promise.
func (x *examination) space(name string, location filepool.Location, st unix.Statfs_t) {
	total, free := int64(st.Blocks)*st.Frsize, int64(st.Bavail)*st.Frsize
	var promised, taken int64
	for _, folder := range []string{"volumes", "snapshots"} {
		images, _ := filepath.Glob(filepath.Join(location.Path, folder, "*.img"))
		for _, image := range images {
			var st unix.Stat_t
			if unix.Stat(image, &st) == nil {
				promised, taken = promised+st.Size, taken+st.Blocks*512
			}
		}
	}
	given := location.ReservePercent != filepool.ReserveAuto
	reserve, shared, err := location.Reserve()
	if err != nil {
		x.failure("pool %s: %v", name, err)
		return
	}
	switch {
	case !shared:
		x.ok("pool %s: its filesystem is for it alone, as far as can be seen from here", name)
	case given && reserve < filepool.SharedReserve:
		x.warning("pool %s: others write to its filesystem, too, and only %g %% of it are in reserve: a kubelet there evicts pods when 10 or 15 %% are left; give the pool a disk, or leave reservePercent to the driver",
			name, reserve)
	default:
		x.ok("pool %s: others write to its filesystem, too: %g %% of it are in reserve (a disk for the pool alone would need less)", name, reserve)
	}
	usable := float64(free) + float64(taken) - float64(total)*reserve/100
	left := int64(usable*location.Overprovision) - promised
	say, advice := x.ok, ""
	if left < blockdev.Granularity {
		say, advice, left = x.warning, "; make room, or lower reservePercent", 0
	}
	say("pool %s: %s of %s are free; %s are promised to volumes and snapshots, %s can be (reservePercent=%g, overprovision=%g)%s",
		name, machine.Size(free), machine.Size(total), machine.Size(promised), machine.Size(left), reserve, location.Overprovision, advice)
}

// nearest returns a path, or the first above it that exists.
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

// locked reports whether another process holds the lock of a pool. It asks for a
// shared lock, and gives it back with the file.
func locked(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	return errors.Is(unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB), unix.EWOULDBLOCK)
}

// propagation: what the driver mounts in its container has to appear on the host, and
// in the containers of pods.
func (x *examination) propagation() {
	paths := []string{"/"}
	if kubelet := "/var/lib/kubelet"; machine.Exists(kubelet) {
		paths = append(paths, kubelet)
	}
	for _, path := range paths {
		m, err := machine.MountOf(path)
		if err != nil {
			x.failure("mount propagation of %s: %v", path, err)
			continue
		}
		if slices.ContainsFunc(m.OptionalFields, func(field string) bool { return strings.HasPrefix(field, "shared:") }) {
			x.ok("mount propagation of %s: shared (the mount at %s)", path, m.MountPoint)
			continue
		}
		x.warning("mount propagation of %s: the mount at %s is not shared: containers do not see what is mounted here later; on a host, mount --make-rshared %s; in a pod, mountPropagation: Bidirectional (without containers it does not matter)",
			path, m.MountPoint, m.MountPoint)
	}
}
