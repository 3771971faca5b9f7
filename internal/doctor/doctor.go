// Package doctor implements "driver doctor".
package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
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
	"github.com/ashlar-csi/ashlar/pkg/blockdev/disks"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/luks"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvme"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvmet"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pools"
	"github.com/ashlar-csi/ashlar/pkg/cgroup"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
)

// Pool is a pool to check.
type Pool struct {
	Name     string
	Location pools.Location
}

// Run checks this machine and the locations of pools, and prints a line for each thing: ok, warning or failure. It changes nothing. It returns an error if
// there is a failure, or a line could not be printed.
func Run(ctx context.Context, to io.Writer, all []Pool) error {
	x := &examination{ctx: ctx, to: to}
	x.privileges()
	x.kernel()
	x.loopDevices()
	x.deviceMapper()
	x.limits()
	x.encryption()
	x.otherNodes()
	x.replicas()
	x.encryptedNetwork()
	x.flushes()
	x.manyReaders()
	x.tools()
	x.filesystems()
	for _, pool := range all {
		x.pool(pool)
		x.disks(pool)
	}
	x.propagation()
	if x.failures > 0 {
		return errors.Join(fmt.Errorf("the driver will not work on this machine as it is; failures: %d", x.failures), x.unprinted)
	}
	return cmp.Or(x.unprinted, ctx.Err())
}

// examination checks, and prints a line for each result.
type examination struct {
	ctx       context.Context
	to        io.Writer
	failures  int
	unprinted error // error of the first line that could not be printed
}

func (x *examination) print(verdict blockdev.Verdict, message string) {
	if verdict == blockdev.Failure {
		x.failures++
	}
	if _, err := fmt.Fprintf(x.to, "%-7s %s\n", verdict, message); x.unprinted == nil {
		x.unprinted = err
	}
}

func (x *examination) ok(format string, args ...any) { blockdev.Report(x.print).OK(format, args...) }

func (x *examination) warning(format string, args ...any) {
	blockdev.Report(x.print).Warning(format, args...)
}

func (x *examination) failure(format string, args ...any) {
	blockdev.Report(x.print).Failure(format, args...)
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

// kernel checks for the newest system call that the driver uses, and not for the version: distributions bring calls to older kernels.
func (x *examination) kernel() {
	err := unix.MountSetattr(-1, "", unix.AT_EMPTY_PATH, &unix.MountAttr{})
	if errors.Is(err, unix.ENOSYS) {
		x.failure("kernel %s: it has no mount_setattr(2); Linux 5.12 or later is needed", machine.KernelRelease())
		return
	}
	x.ok("kernel %s: it has mount_setattr (Linux 5.12) and with it LOOP_CONFIGURE (5.8)", machine.KernelRelease())
}

// deviceMapper reports the device mapper for file pools, which work without it. LVM pools check for it themselves.
func (x *examination) deviceMapper() {
	if _, err := dm.Targets(); err == nil {
		x.ok("device mapper: each volume has a device over its pool's, which keeps pods from the ioctls of what is below, and raw volumes are held still while they are copied")
	} else {
		x.ok("no device mapper: loop devices are used as they are, and those of raw volumes are guarded by a second one; raw volumes are not held still while they are copied (modprobe dm-mod)")
	}
}

// limits checks for limits of I/O. Without them only volumes with limits are refused, so it is a warning.
func (x *examination) limits() {
	if err := cgroup.Supported(); err != nil {
		x.warning("limits of I/O (readIOPS, writeBandwidth, ...) are refused: %v", err)
		return
	}
	x.ok("limits of I/O: the control group of pods has the io controller")
}

// encryption checks for LUKS. Without it only encrypted volumes are refused, so it is a warning.
func (x *examination) encryption() {
	if err := luks.Available(); err != nil {
		x.warning("no volume is encrypted here (encryption=luks2): %v", err)
		return
	}
	version, err := dm.Targets()
	if err != nil {
		x.warning("encryption: %v", err)
		return
	}
	x.ok("encryption: device mapper target crypt %s, and cryptsetup", version["crypt"])
	if features, err := machine.CPUFeatures(); err == nil && !slices.Contains(features, "aes") {
		x.warning("encryption: the processor has no instructions for AES: encrypted volumes are several times slower than others, and take its time")
	} else if err == nil {
		x.ok("encryption: the processor has instructions for AES")
	}
}

// moduleHelp says how to get the modules of otherNodes. The driver's container does not show which distribution the node has, so it lists all.
const moduleHelp = "modprobe it; Debian's kernels have it; Ubuntu: apt-get install linux-modules-extra-$(uname -r); Fedora and RHEL: dnf install kernel-modules (or kernel-modules-extra); " +
	"Talos: nvme-tcp is built in, nvmet-tcp (1.8) a line of machine.kernel.modules; Flatcar: releases since June 2026"

// otherNodes checks for NVMe over TCP and dm-mirror. Without them only volumes that are used on other nodes than their own are missing, so it is ok.
func (x *examination) otherNodes() {
	for _, side := range []struct {
		what, module, option string
		is                   func() (authenticates bool, err error)
	}{
		{"volumes of this node for others (access=any)", "nvmet-tcp", "CONFIG_NVME_TARGET_AUTH", nvmet.Available},
		{"volumes of other nodes for this one (access=any)", "nvme-tcp", "CONFIG_NVME_HOST_AUTH", nvme.Authenticates},
	} {
		authenticates, err := side.is()
		_, _, missing := command.Run(x.ctx, "modprobe", "-n", "-q", side.module)
		switch {
		case err == nil && authenticates:
			x.ok("%s: the kernel has %s, with authentication", side.what, side.module)
		case err == nil:
			x.warning("%s: the kernel has %s, but without authentication (%s, Linux 6.0)", side.what, side.module, side.option)
		case missing == nil:
			x.ok("%s: the kernel has a module for it, which is not loaded; modprobe %s, and a line with it in /etc/modules-load.d/ashlar.conf", side.what, side.module)
		default:
			x.ok("%s: not without the module %s, which this kernel has not loaded; %s", side.what, side.module, moduleHelp)
		}
	}
	const mirrors = "volumes that this node uses while they move (access=any)"
	if err := dm.HasTarget("mirror"); err != nil {
		x.ok("%s: not without the module dm-mirror, so they move when nobody uses them: %v", mirrors, err)
	} else {
		x.ok("%s: the kernel has dm-mirror", mirrors)
	}
}

// How to get the modules for replicas.
const (
	mirrorHelp = "modprobe dm-mirror; Debian's kernels and Talos have it; Ubuntu: apt-get install linux-modules-extra-$(uname -r), if linux-modules has it not; Fedora and RHEL: dnf install kernel-modules"
	eraHelp    = "modprobe dm-era; Debian's kernels have it; Ubuntu: apt-get install linux-modules-extra-$(uname -r), if linux-modules has it not; Fedora and RHEL: dnf install kernel-modules (or kernel-modules-extra); Talos has none"
)

// replicas checks what volumes with replicas need. Without it they cannot be used here, or more is copied, so it is ok.
func (x *examination) replicas() {
	x.replicated(dm.HasTarget("mirror"), dm.HasTarget("era"))
}

// replicated reports what the errors mean with which the kernel's mirror and era were looked for.
func (x *examination) replicated(mirror, era error) {
	const use, have = "volumes with replicas that this node uses (replicas=2)", "replicas that this node has (replicas=2)"
	if mirror != nil {
		x.ok("%s: not without the module dm-mirror: their pods do not start here (%v); %s", use, mirror, mirrorHelp)
	} else {
		x.ok("%s: the kernel has dm-mirror", use)
	}
	if era != nil {
		x.ok("%s: without the module dm-era nothing is known of what was written to them while others were away, so these are copied as a whole (%v); %s", have, era, eraHelp)
	} else {
		x.ok("%s: the kernel has dm-era: it is known what was written to them while others were away", have)
	}
}

// encryptedNetwork checks for --remote-tls. Without it only that is missing, so it is ok.
func (x *examination) encryptedNetwork() {
	const what = "TLS for volumes that cross the network (--remote-tls)"
	if err := cmp.Or(nvmet.TLS(), nvme.TLS()); err != nil {
		x.ok("%s: not here: %v", what, err)
		return
	}
	x.ok("%s: the kernel's host and target have it, and tlshd runs", what)
}

// flushes warns of nvme_core.multipath, with which a sync to a volume of another node may succeed although its data is lost.
func (x *examination) flushes() {
	if nvme.Multipath() {
		x.warning("volumes of other nodes for this one (access=any): with nvme_core.multipath the kernel answers a sync that is under way when the volume's node loses its power with success, and it may be lost; " +
			"echo 'options nvme_core multipath=N' >/etc/modprobe.d/ashlar.conf (or nvme_core.multipath=N on the kernel's command line), and reboot")
	}
}

// manyReaders checks for dm-flakey. Without it only volumes of this node that many nodes read are missing, so it is ok.
func (x *examination) manyReaders() {
	const what = "volumes of this node that many read at once (access=any, ReadOnlyMany)"
	if err := dm.HasTarget("flakey"); err != nil {
		x.ok("%s: not without the module dm-flakey, which fails all writes to them: %v; %s", what, err, moduleHelp)
		return
	}
	x.ok("%s: the kernel has the device mapper's target flakey, which fails all writes to them", what)
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
			_ = unix.IoctlSetInt(int(f.Fd()), unix.LOOP_CTL_REMOVE, n) // the request has made it
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

// programs are those that the driver runs, or its user after damage.
var programs = []struct {
	name string
	flag string // prints the version; empty: it does so without arguments
	pkg  string // package of Debian
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
	{"cryptsetup", "--version", "cryptsetup-bin", "", "makes and opens encrypted volumes"},
	{"smartctl", "--version", "smartmontools", "", "asks the disks below pools how they are; without it nobody hears that one is about to die"},
}

// PackageOf returns the package of Debian that has a program; the name itself if that is not known.
func PackageOf(program string) string {
	for _, p := range programs {
		if p.name == program {
			return p.pkg
		}
	}
	return program
}

// versionPattern matches the version in the output of a program.
var versionPattern = regexp.MustCompile(`\bv?(\d+\.\d+(\.\d+)?)\b`)

func (x *examination) tools() {
	for _, p := range programs {
		argv := []string{p.name}
		if p.flag != "" {
			argv = append(argv, p.flag)
		}
		// The error is not looked at: some programs print their version only with a usage error.
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

// filesystems asks the kernel for each one, which has it load its module: in the driver's image there are neither modules nor modprobe.
func (x *examination) filesystems() {
	for _, t := range filesystem.Types {
		name := string(t)
		fd, err := unix.Fsopen(name, unix.FSOPEN_CLOEXEC)
		switch {
		case err == nil:
			_ = unix.Close(fd)
			x.ok("filesystem %s: the kernel has it", name)
		case !errors.Is(err, unix.ENODEV):
			x.warning("filesystem %s: the kernel does not say whether it has it: %v", name, err)
		case t == filesystem.Ext4:
			x.failure("filesystem %s, the default: this kernel does not have it; modprobe %s, or install its module", name, name)
		default:
			x.warning("filesystem %s: this kernel does not have it, so no volume can carry it; modprobe %s, or install its module", name, name)
		}
	}
}

// pool lets the location of a pool report what it needs and has, if it can.
func (x *examination) pool(p Pool) {
	if location, can := p.Location.(blockdev.Examiner); can {
		location.Examine(x.ctx, func(verdict blockdev.Verdict, message string) {
			x.print(verdict, "pool "+p.Name+": "+message)
		})
	}
}

// disks lists the disks below a pool that are there, and which of them are asked for their state.
func (x *examination) disks(p Pool) {
	location, can := p.Location.(blockdev.Founded)
	if !can {
		return
	}
	numbers, err := location.Foundations(x.ctx)
	if err != nil {
		return // pool has reported that already
	}
	for _, disk := range disks.Below(numbers...) {
		if disk.Physical {
			x.ok("pool %s: disk %s: it is asked every %s how it is", p.Name, disk.Name, disks.Every)
		} else {
			x.ok("pool %s: disk %s: it is virtual, or of a kind that smartctl does not know: nothing is asked of it", p.Name, disk.Name)
		}
	}
}

// propagation checks that mounts of the driver appear on the host, and in the containers of pods.
func (x *examination) propagation() {
	// What pods see is mounted below the kubelet's directory. The root of a container is never shared.
	path := "/var/lib/kubelet"
	if !machine.Exists(path) {
		path = "/"
	}
	m, err := machine.MountOf(path)
	switch {
	case err != nil:
		x.failure("mount propagation of %s: %v", path, err)
	case slices.ContainsFunc(m.OptionalFields, func(field string) bool { return strings.HasPrefix(field, "shared:") }):
		x.ok("mount propagation of %s: shared (the mount at %s)", path, m.MountPoint)
	default:
		x.warning("mount propagation of %s: the mount at %s is not shared: containers do not see what is mounted here later; on a host, mount --make-rshared %s; in a pod, mountPropagation: Bidirectional (without containers it does not matter)",
			path, m.MountPoint, m.MountPoint)
	}
}
