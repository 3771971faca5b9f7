// Package filesystem makes, checks, grows, freezes and measures the filesystems that volumes carry: ext4, XFS and btrfs. It makes and checks them by the tools
// of each filesystem, and freezes and grows mounted ones by system calls.
package filesystem

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/command"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/mount"
)

// Type is the type of a filesystem, as mount(8) names it.
type Type string

// The filesystems that volumes can carry.
const (
	Ext4  Type = "ext4"
	XFS   Type = "xfs"
	Btrfs Type = "btrfs"
)

// Types are all of them, the default first.
var Types = []Type{Ext4, XFS, Btrfs}

// ParseType returns the type of a name; the empty name is ext4. ErrInvalid for others.
func ParseType(name string) (Type, error) {
	if name == "" {
		return Ext4, nil
	}
	if !slices.Contains(Types, Type(name)) {
		return "", fmt.Errorf("%w: filesystem %q; ext4, xfs and btrfs can be had", errdefs.ErrInvalid, name)
	}
	return Type(name), nil
}

// TypeOf returns the type of a mounted filesystem, by its number in statfs(2); empty if it is none of Types.
func TypeOf(magic int64) Type {
	switch magic {
	case unix.EXT4_SUPER_MAGIC:
		return Ext4
	case unix.XFS_SUPER_MAGIC:
		return XFS
	case unix.BTRFS_SUPER_MAGIC:
		return Btrfs
	}
	return ""
}

// MinSize returns the size of the smallest device for a filesystem, in bytes. mke2fs needs room for a journal; mkfs.xfs refuses less than 300 MiB. mkfs.btrfs
// needs only 109 MiB, but such a btrfs could not grow to less than 256 MiB (btrfs_ioctl_resize).
func (t Type) MinSize() int64 {
	switch t {
	case XFS:
		return 300 << 20
	case Btrfs:
		return 256 << 20
	default:
		return 8 << 20
	}
}

// signature is the magic number of a filesystem, and its offset in bytes.
type signature struct {
	fs     Type
	offset int64
	magic  []byte
}

var signatures = []signature{
	{Ext4, 1024 + 56, []byte{0x53, 0xef}},
	{XFS, 0, []byte("XFSB")},
	{Btrfs, 0x10000 + 64, []byte("_BHRfS_M")},
}

// Probe returns which filesystem a device carries, by its magic number; empty if it is none of Types.
func Probe(device string) (Type, error) {
	f, err := os.Open(device)
	if err != nil {
		return "", fmt.Errorf("look for a filesystem: %w", err)
	}
	defer f.Close()
	for _, s := range signatures {
		if found, err := carries(f, s.offset, s.magic); found || err != nil {
			return s.fs, err
		}
	}
	return "", nil
}

// carries reports whether there is a signature at an offset.
func carries(f *os.File, offset int64, magic []byte) (bool, error) {
	have := make([]byte, len(magic))
	if _, err := f.ReadAt(have, offset); err != nil && !errors.Is(err, io.EOF) {
		return false, fmt.Errorf("look for signatures on %s: %w", f.Name(), err)
	}
	return bytes.Equal(have, magic), nil
}

// Where Blank looks for signatures. Filesystems, RAID, LVM, LUKS, swap, partition tables and bcache have theirs within the first or last 4 MiB (blankEdge).
// btrfs has copies at the offsets blankCopies.
const blankEdge = 4 << 20

var blankCopies = []int64{64 << 20, 256 << 30}

// Blank reports whether a device, from an offset on, has nothing but zeros where a signature of any kind could be. It is an error if the device cannot be
// read, or ends before the offset.
func Blank(ctx context.Context, device string, from int64) (bool, error) {
	f, err := os.Open(device)
	if err != nil {
		return false, fmt.Errorf("read %s: %w", device, err)
	}
	defer f.Close()
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return false, fmt.Errorf("read the size of %s: %w", device, err)
	}
	if size <= from {
		return false, fmt.Errorf("%w: %s has %d bytes, and what is to be read begins at byte %d", errdefs.ErrDataLoss, device, size, from)
	}
	for _, at := range blankCopies {
		if zero, err := zeros(ctx, f, from+at, min(from+at+blockdev.Granularity, size)); !zero || err != nil {
			return false, err
		}
	}
	edge := min(from+blankEdge, size)
	for _, part := range [][2]int64{{from, edge}, {max(size-blankEdge, edge), size}} {
		if zero, err := zeros(ctx, f, part[0], part[1]); !zero || err != nil {
			return false, err
		}
	}
	return true, nil
}

// Zeros reports whether a device has nothing but zeros from the offset start to the offset end.
func Zeros(ctx context.Context, device string, start, end int64) (bool, error) {
	f, err := os.Open(device)
	if err != nil {
		return false, fmt.Errorf("read %s: %w", device, err)
	}
	defer f.Close()
	return zeros(ctx, f, start, end)
}

var zeroBlock [256 << 10]byte

// zeros is Zeros for an open device. It leaves nothing of what it reads in the page cache of the device: somebody who uses a device above this one writes past
// that cache, which would be out of date then.
func zeros(ctx context.Context, f *os.File, start, end int64) (bool, error) {
	defer func() { _ = unix.Fadvise(int(f.Fd()), start, max(end-start, 0), unix.FADV_DONTNEED) }()
	buffer := make([]byte, len(zeroBlock))
	for start < end {
		if err := ctx.Err(); err != nil {
			return false, err
		}
		n, err := f.ReadAt(buffer[:min(int64(len(buffer)), end-start)], start)
		if n == 0 {
			return false, fmt.Errorf("read %s at %d: %w", f.Name(), start, err)
		}
		if !bytes.Equal(buffer[:n], zeroBlock[:n]) {
			return false, nil
		}
		start += int64(n)
	}
	return true, nil
}

// foreigners are signatures, beside those of Types, that none of the tools of Make writes: see include/uapi/linux/raid/md_p.h, and the on-disk formats of LUKS,
// LVM2, swap, and DOS and GPT partition tables.
var foreigners = []struct {
	name   string
	offset int64
	magic  []byte
}{
	{"LUKS", 0, []byte("LUKS\xba\xbe")},
	{"LVM", 512, []byte("LABELONE")},
	{"RAID", 0, []byte("\xfc\x4e\x2b\xa9")},
	{"RAID", 4096, []byte("\xfc\x4e\x2b\xa9")},
	{"swap", 4086, []byte("SWAPSPACE2")},
	{"a partition table", 510, []byte("\x55\xaa")},
	{"a partition table", 512, []byte("EFI PART")},
}

// Foreign returns what a device carries that is not a filesystem of the given type, finished or not; empty if nothing was found. With an empty type each
// filesystem is foreign.
func Foreign(device string, t Type) (string, error) {
	have, err := Probe(device)
	if err != nil || (have != "" && have != t) {
		return string(have), err
	}
	f, err := os.Open(device)
	if err != nil {
		return "", fmt.Errorf("look for signatures: %w", err)
	}
	defer f.Close()
	for _, s := range foreigners {
		if found, err := carries(f, s.offset, s.magic); found || err != nil {
			return s.name, err
		}
	}
	return "", nil
}

// mkfsTries is how often mkfs.btrfs is run if it fails because another loop device of the machine has just gone: it looks at all of them before it writes.
const mkfsTries = 5

// Make makes a filesystem that the running kernel can mount. It gives no space back (nodiscard), so that preallocated space stays. zeros: the device reads as
// zeros throughout, so that nothing has to be zeroed; otherwise it may carry an unfinished filesystem, which is overwritten. ErrUnsupported if the tool is
// not installed.
func Make(ctx context.Context, t Type, device string, zeros bool) error {
	argv, err := commandHere(ctx, t, zeros)
	if err != nil {
		return toolError(fmt.Errorf("make %s on %s: find out which features it would have: %w", t, device, err))
	}
	if !zeros {
		argv = append(argv, map[Type]string{Ext4: "-F", XFS: "-f", Btrfs: "-f"}[t])
	}
	argv = append(argv, device)
	_, _, err = command.Run(ctx, argv...)
	for tries := 1; err != nil && tries < mkfsTries && strings.Contains(err.Error(), "cannot check mount status"); tries++ {
		_, _, err = command.Run(ctx, argv...)
	}
	if err != nil {
		return toolError(fmt.Errorf("make %s on %s: %w", t, device, err))
	}
	// A volume that is recorded as formatted is never formatted again. So it is not enough that the tool reported success.
	if have, err := Probe(device); err != nil || have != t {
		return errors.Join(fmt.Errorf("make %s on %s: %s ended as if it had, and there is none", t, device, argv[0]), err)
	}
	return nil
}

// makeCommand returns the command that makes a filesystem which the kernel can mount; its device is to be added. tool is the version of that command, or zero:
// then it is told nothing that older ones do not know. zeros: the device reads as zeros.
func makeCommand(t Type, kernel, tool version, zeros bool) []string {
	var argv []string
	switch t {
	case XFS:
		// Sectors of 4 KiB, also on a device with sectors of 512 bytes: so the volume can be moved to a disk that has no smaller ones.
		argv = []string{"mkfs.xfs", "-q", "-K", "-s", "size=4096"}
	case Btrfs:
		argv = []string{"mkfs.btrfs", "-q", "-K"}
	default:
		// Blocks of 4 KiB, also on a small volume, as it may grow.
		extended := "nodiscard"
		if zeros && !tool.before(1, 47) { // then it writes neither inode tables nor journal, nor does the kernel later
			extended += ",assume_storage_prezeroed=1"
		}
		argv = []string{"mkfs.ext4", "-q", "-b", "4096", "-m", "0", "-E", extended}
	}
	for _, f := range newFeatures[t] {
		if kernel.before(f.kernel.major, f.kernel.minor) && !tool.before(f.tool.major, f.tool.minor) {
			argv = append(argv, f.without...)
		}
	}
	return argv
}

// feature is one that newer tools give a filesystem unless they are told not to, and with which older kernels do not mount it for writing.
type feature struct {
	kernel  version  // the first that can
	tool    version  // older ones do not give it, and may end with an error if they are told about it
	without []string // tells the tool not to give it
}

var newFeatures = map[Type][]feature{
	Ext4:  {{version{5, 15}, version{1, 47}, []string{"-O", "^orphan_file"}}},
	XFS:   {{version{5, 19}, version{5, 19}, []string{"-i", "nrext64=0"}}, {version{6, 10}, version{6, 18}, []string{"-i", "exchange=0", "-n", "parent=0"}}},
	Btrfs: {{version{6, 1}, version{6, 19}, []string{"-O", "^block-group-tree"}}},
}

// commandHere is makeCommand for the kernel that runs and the tool that is installed. It is an error if that does not run, and may give what the kernel lacks.
func commandHere(ctx context.Context, t Type, zeros bool) ([]string, error) {
	kernel, tool := kernelVersion(), version{}
	lacks := slices.ContainsFunc(newFeatures[t], func(f feature) bool { return kernel.before(f.kernel.major, f.kernel.minor) })
	if lacks || t == Ext4 && zeros {
		var err error
		if tool, err = tools.version(ctx, t); err != nil && lacks {
			return nil, err
		}
	}
	return makeCommand(t, kernel, tool, zeros), nil
}

// toolVersions are the versions of the programs that make filesystems. Each is asked until it has told.
type toolVersions struct {
	mu    sync.Mutex
	known map[Type]version
}

var tools = toolVersions{known: map[Type]version{}}

// versionCommands print the version of a tool, on standard output or error: as "mke2fs 1.47.0 (5-Feb-2023)", "mkfs.xfs version 6.1.0" and "mkfs.btrfs, part of
// btrfs-progs v6.2".
var versionCommands = map[Type][]string{Ext4: {"mkfs.ext4", "-V"}, XFS: {"mkfs.xfs", "-V"}, Btrfs: {"mkfs.btrfs", "--version"}}

// version returns the version of the tool for a type; zero if it does not tell.
func (k *toolVersions) version(ctx context.Context, t Type) (version, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if known, is := k.known[t]; is {
		return known, nil
	}
	out, warnings, err := command.Run(ctx, versionCommands[t]...)
	if err != nil {
		return version{}, err
	}
	v := toolVersion(out + warnings)
	if v != (version{}) {
		k.known[t] = v
	}
	return v, nil
}

// versionSaid matches what a tool says of its version (versionCommands).
var versionSaid = regexp.MustCompile(`(?:mke2fs|mkfs\.xfs version|btrfs-progs) v?(\d+\.\d+)`)

// toolVersion returns the version in what a tool says of itself; zero if there is none.
func toolVersion(said string) version {
	found := versionSaid.FindStringSubmatch(said)
	if found == nil {
		return version{}
	}
	return parseVersion(found[1])
}

// Check checks an ext4 before it is mounted, and repairs what is safe to repair (checkExt4). It writes nothing to a clean one, save that it removes a copy of
// the superblock from the boot block. XFS and btrfs need no check: they recover when they are mounted. ErrDataLoss if somebody has to repair the filesystem
// by hand, also ErrEndless if no tool comes to an end with it; ErrUnsupported if the tool is not installed.
//
// The superblock may be another one afterwards, from the journal or from a copy of it, and somebody may have written these byte by byte, too. So errors are also
// those of Inspect.
func Check(ctx context.Context, t Type, device string) error {
	if t != Ext4 {
		return nil
	}
	if err := inTime(ctx, device, func(ctx context.Context) error { return checkExt4(ctx, device) }); err != nil {
		return err
	}
	return Inspect(t, device)
}

// Settle prepares a filesystem that is not mounted for mounts that write nothing (UnwrittenOptions). It inspects and checks the filesystem, replays its
// journal, and grows it to its device, an ext4 without CAP_SYS_RESOURCE as far as GrowBeforeMount can. Errors are those of Inspect and Check.
func Settle(ctx context.Context, t Type, device string) error {
	if err := Inspect(t, device); err != nil {
		return err
	}
	if err := Check(ctx, t, device); err != nil {
		return err
	}
	if err := GrowBeforeMount(ctx, t, device); err != nil {
		return err
	}
	if !GrowsMounted(t) {
		return mount.Recover(device, string(t), t.MountOptions())
	}
	return mount.WithWritableRoot(device, string(t), t.MountOptions(), func(root *os.File) error {
		return Grow(t, device, fmt.Sprintf("/proc/self/fd/%d", root.Fd()))
	})
}

// UnwrittenOptions returns the options with which a read-only mount of a filesystem writes nothing at all to its device. So the journal is not replayed, which
// has to be done before (Settle).
func (t Type) UnwrittenOptions() []string {
	return map[Type][]string{Ext4: {"noload"}, XFS: {"norecovery"}, Btrfs: {"rescue=nologreplay"}}[t]
}

// toolError returns ErrUnsupported if a command failed because its tool is not installed; any other error as it is.
func toolError(err error) error {
	var failure *command.Error
	if errors.As(err, &failure) && errors.Is(failure.Err, os.ErrNotExist) || strings.Contains(err.Error(), "executable file not found") {
		return fmt.Errorf("%w: install the filesystem's tools: %w", errdefs.ErrUnsupported, err)
	}
	return err
}

// Separate gives a copy of a filesystem, in a file or on a device that is not mounted, an identity of its own, so that it can be mounted beside its source.
// Only btrfs before Linux 6.7 needs that: the kernel takes two devices of one identity for one filesystem, and refuses the second. (XFS is mounted with nouuid;
// for ext4 the identity does not matter.) A btrfs with a log to replay stays as it is, as btrfstune would break it; so does one with several devices.
func Separate(ctx context.Context, path string) error {
	if !kernelVersion().before(6, 7) {
		return nil
	}
	t, err := Probe(path)
	if err != nil || t != Btrfs {
		return err
	}
	// btrfstune would write to all devices of the filesystem.
	if err := inspectSuper(t, path); errors.Is(err, errdefs.ErrPrecondition) {
		return nil
	}
	if log, err := btrfsLog(path); err != nil || log {
		return err
	}
	if _, _, err := command.Run(ctx, "btrfstune", "-f", "-m", path); err != nil {
		return toolError(fmt.Errorf("give the btrfs copy an identity of its own: %w", err))
	}
	return nil
}

// btrfsLog reports whether a btrfs has a log tree, which the next mount will replay: log_root of its superblock (btrfs documentation, On-disk Format).
func btrfsLog(path string) (bool, error) {
	f, err := os.Open(path)
	if err != nil {
		return false, err
	}
	defer f.Close()
	root := make([]byte, 8)
	if _, err := f.ReadAt(root, 0x10000+96); err != nil {
		return false, fmt.Errorf("read the superblock of %s: %w", path, err)
	}
	return binary.LittleEndian.Uint64(root) != 0, nil
}

// MountOptions returns the options that each mount of a filesystem has, before all others. XFS can be mounted beside others of its UUID. ext4 becomes read-only
// after an error, whatever its superblock says; XFS and btrfs need no option for that: XFS shuts itself down, and btrfs becomes read-only.
func (t Type) MountOptions() []string {
	switch t {
	case Ext4:
		return []string{"errors=remount-ro"}
	case XFS:
		return []string{"nouuid"}
	}
	return nil
}

// Usage is how much of a filesystem is used, in bytes and in inodes. All numbers of inodes are 0 for a filesystem that has no fixed number of them (btrfs).
type Usage struct {
	Total, Used, Available              int64
	Inodes, InodesUsed, InodesAvailable int64
}

// UsageOf returns the usage of a filesystem by what statfs(2) has returned.
func UsageOf(st unix.Statfs_t) Usage {
	block := st.Frsize
	return Usage{
		Total: int64(st.Blocks) * block, Available: int64(st.Bavail) * block, Used: int64(st.Blocks-st.Bfree) * block,
		Inodes: int64(st.Files), InodesAvailable: int64(st.Ffree), InodesUsed: int64(st.Files - st.Ffree),
	}
}

// version is the first two numbers of a version.
type version struct{ major, minor int }

func (v version) before(major, minor int) bool {
	return v.major < major || (v.major == major && v.minor < minor)
}

func parseVersion(text string) (v version) {
	_, _ = fmt.Sscanf(text, "%d.%d", &v.major, &v.minor)
	return v
}

func kernelVersion() version {
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return version{}
	}
	return parseVersion(unix.ByteSliceToString(uts.Release[:]))
}
