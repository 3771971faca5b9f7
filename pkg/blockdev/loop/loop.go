// Package loop makes, finds and removes loop devices by ioctl, as in loop(4) and include/uapi/linux/loop.h. A loop device is known by the device and inode
// numbers of its backing file. Nothing else is safe: its number soon goes to another one, the path that sysfs shows may be of another mount namespace, and
// everybody who can write to the device can change its label.
package loop

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/ioctl"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/held"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/queue"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Major is the major number of all loop devices.
const Major = 7

const (
	controlPath = "/dev/loop-control"
	nameSize    = unix.LO_NAME_SIZE - 1
)

// Backing is what the kernel says about a configured loop device.
type Backing struct {
	Number    int    // N of /dev/loopN
	Device    uint64 // st_dev of the backing file
	Inode     uint64
	Node      uint64 // device number of a backing file that is a device node; else 0
	Label     string
	Flags     uint32
	Offset    uint64
	SizeLimit uint64
}

// Path returns /dev/loopN.
func Path(n int) string { return "/dev/loop" + strconv.Itoa(n) }

// ReadOnly reports whether the device takes no writes.
func (b Backing) ReadOnly() bool { return b.Flags&unix.LO_FLAGS_READ_ONLY != 0 }

// Stays reports whether the device keeps its backing file when nobody has it open any more.
func (b Backing) Stays() bool { return b.Flags&unix.LO_FLAGS_AUTOCLEAR == 0 }

// Open opens /dev/loopN, and makes the node where no devtmpfs keeps /dev.
func Open(n int, flags int) (*os.File, error) {
	f, err := os.OpenFile(Path(n), flags, 0)
	if errors.Is(err, os.ErrNotExist) {
		if err := unix.Mknod(Path(n), unix.S_IFBLK|0o660, int(unix.Mkdev(Major, uint32(n)))); err != nil && !errors.Is(err, unix.EEXIST) {
			return nil, fmt.Errorf("mknod %s: %w", Path(n), err)
		}
		f, err = os.OpenFile(Path(n), flags, 0)
	}
	return f, err
}

// Going reports whether a loop device could not be opened because it is just losing its backing file, or is being removed (lo_open in
// drivers/block/loop.c).
func Going(err error) bool { return errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENODEV) }

// Status returns the backing of an open loop device; ENXIO if it has none.
func Status(f *os.File, n int) (Backing, error) {
	var info unix.LoopInfo64
	if err := ioctl.Pointer(f, unix.LOOP_GET_STATUS64, unsafe.Pointer(&info)); err != nil {
		return Backing{}, err
	}
	label := string(info.File_name[:])
	if i := strings.IndexByte(label, 0); i >= 0 {
		label = label[:i]
	}
	return Backing{Number: n, Device: ioctl.DeviceNumber(info.Device), Inode: info.Inode, Node: ioctl.DeviceNumber(info.Rdevice), Label: label,
		Flags: info.Flags, Offset: info.Offset, SizeLimit: info.Sizelimit}, nil
}

// Configured returns the numbers of all loop devices that have a backing file.
func Configured() ([]int, error) {
	found, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil, err
	}
	var numbers []int
	for _, path := range found {
		if n, err := strconv.Atoi(strings.TrimPrefix(strings.Split(path, "/")[3], "loop")); err == nil {
			numbers = append(numbers, n)
		}
	}
	return numbers, nil
}

// minors is how many minor numbers a major one has (MINORBITS of linux/kdev_t.h). A loop device that may have partitions takes as many of them as max_part
// of the module says, rounded up to a power of two.
const minors = 1 << 20

// Free returns how many more loop devices with a backing file the kernel can have.
func Free() (int, error) {
	used, err := Configured()
	if err != nil {
		return 0, err
	}
	each := 1
	if text, err := os.ReadFile("/sys/module/loop/parameters/max_part"); err == nil {
		most, _ := strconv.Atoi(strings.TrimSpace(string(text)))
		for each <= most {
			each *= 2
		}
	}
	return minors/each - len(used), nil
}

// Config says how to configure a loop device.
type Config struct {
	Label     string
	ReadOnly  bool
	Autoclear bool   // it goes away with its last user
	Sector    uint32 // bytes of a logical sector; 0: the kernel's choice
	Discards  bool   // false: it takes no discards, and nothing else that punches holes
	Limit     uint64 // bytes that it shows; 0: all
}

// busyOften is how often a free loop device may be refused before it is left alone: then nobody is just faster, but somebody has it open for himself
// (O_EXCL), for an unknown time.
const busyOften = 10

// free returns the number of a loop device without a backing file, other than those that were refused busyOften times. The kernel names the first free one
// each time, also if it is one of these.
func free(control *os.File, refused map[int]int) (int, error) {
	n, err := ioctl.Value(control, unix.LOOP_CTL_GET_FREE, 0)
	if err != nil || refused[n] < busyOften {
		return n, err
	}
	for taken := true; taken; taken = refused[n] >= busyOften || hasBacking(n) {
		n++
	}
	if _, err = ioctl.Value(control, unix.LOOP_CTL_ADD, uintptr(n)); errors.Is(err, unix.EEXIST) {
		err = nil
	}
	return n, err
}

func hasBacking(n int) bool {
	_, _, err := BackingName(n)
	return err == nil
}

// Attach makes a loop device over an open file (LOOP_CTL_GET_FREE and LOOP_CONFIGURE), with the next free number if somebody else was faster. The file
// that it returns holds the device, and until it is closed a lock of the device: udev does not look at what is on it meanwhile, and so gives it to no mdadm
// before the caller has laid something over it (worker_lock_whole_disk of systemd-udevd; systemd.io/BLOCK_DEVICE_LOCKING). errdefs.ErrUnavailable if there are no loop devices; errdefs.ErrInvalid for a label that is too long.
func Attach(ctx context.Context, backing *os.File, c Config) (*os.File, int, error) {
	if len(c.Label) > nameSize {
		return nil, 0, fmt.Errorf("%w: loop label %q is longer than %d", errdefs.ErrInvalid, c.Label, nameSize)
	}
	control, err := os.OpenFile(controlPath, os.O_RDWR, 0)
	if err != nil {
		return nil, 0, fmt.Errorf("%w: open %s: %w (modprobe loop; in a container, mount the host's /dev)", errdefs.ErrUnavailable, controlPath, err)
	}
	defer control.Close()
	flags := os.O_RDWR
	if c.ReadOnly {
		flags = os.O_RDONLY
	}
	refused := map[int]int{}
	for waited := 0; ; {
		if err := ctx.Err(); err != nil {
			return nil, 0, err
		}
		n, err := free(control, refused)
		if err != nil {
			return nil, 0, fmt.Errorf("find a free loop device: %w", errdefs.FromErrno(err))
		}
		if c.Discards && stopped(n) && waited < held.Tries {
			if !ForgetStopped(n) { // somebody has it open
				time.Sleep(held.Pause)
				waited++
			}
			continue
		}
		f, err := Open(n, flags)
		if Going(err) {
			continue
		}
		if err != nil {
			return nil, 0, fmt.Errorf("open loop device: %w", errdefs.FromErrno(err))
		}
		_ = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) // if somebody has it, then udev, which looks at a device without a file
		if err = configure(f, backing, c); err == nil {
			if err := setUp(f, n, c); err != nil {
				return nil, 0, err
			}
			return f, n, nil
		}
		f.Close()
		if !errors.Is(err, unix.EBUSY) {
			return nil, 0, fmt.Errorf("configure %s: %w", Path(n), errdefs.FromErrno(err))
		}
		refused[n]++
	}
}

// setUp resets what an earlier user of the number has left set: read-only, discards, the queue. After an error the device is gone, and f is closed.
func setUp(f *os.File, n int, c Config) error {
	err := setReadOnly(f, c.ReadOnly)
	if err == nil && !c.Discards {
		err = StopDiscards(n)
	}
	if err != nil {
		_, _ = ioctl.Value(f, unix.LOOP_CLR_FD, 0)
		f.Close()
		return fmt.Errorf("set up %s: %w", Path(n), errdefs.FromErrno(err))
	}
	resetQueue(n)
	return nil
}

// configure has the kernel configure the device, with direct I/O if the filesystem has it (tmpfs and some overlays do not). The kernel leaves that out if
// the sector is smaller than what the file takes.
func configure(f, backing *os.File, c Config) error {
	config := unix.LoopConfig{Fd: uint32(backing.Fd()), Size: c.Sector, Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_DIRECT_IO, Sizelimit: c.Limit}}
	if c.ReadOnly {
		config.Info.Flags |= unix.LO_FLAGS_READ_ONLY
	}
	if c.Autoclear {
		config.Info.Flags |= unix.LO_FLAGS_AUTOCLEAR
	}
	copy(config.Info.File_name[:], c.Label)
	err := ioctl.Pointer(f, unix.LOOP_CONFIGURE, unsafe.Pointer(&config))
	if errors.Is(err, unix.EINVAL) {
		config.Info.Flags &^= unix.LO_FLAGS_DIRECT_IO
		err = ioctl.Pointer(f, unix.LOOP_CONFIGURE, unsafe.Pointer(&config))
	}
	return err
}

// setReadOnly makes the device read-only or writable: it keeps the mode that an earlier user set with blockdev(8), across detach and attach.
func setReadOnly(f *os.File, readOnly bool) error {
	var now, want int32
	if readOnly {
		want = 1
	}
	if err := ioctl.Pointer(f, unix.BLKROGET, unsafe.Pointer(&now)); err != nil || now == want {
		return err
	}
	return ioctl.Pointer(f, unix.BLKROSET, unsafe.Pointer(&want))
}

// resetQueue resets the I/O scheduler of the device, which outlives the user that it was chosen for, and the read-ahead, which does so before Linux 6.10.
// Where /sys cannot be written to, nobody can have set them.
func resetQueue(n int) {
	_, _ = queue.Set(queue.Setting{Device: Path(n), Name: "scheduler", Value: "none"}) // a new loop device has none
	if ahead, err := number(n, "read_ahead_kb"); err == nil && ahead != readAhead && !aheadOfKernel(n, ahead) {
		_ = queue.Write(Path(n), "read_ahead_kb", strconv.Itoa(readAhead))
	}
}

// readAhead is the read-ahead of a new loop device, in KiB (VM_READAHEAD_PAGES).
const readAhead = 128

// aheadOfKernel reports whether a read-ahead (KiB) may be the kernel's own choice for a device with its backing file: twice the optimal size of requests,
// or, if that is not known, twice the largest (block/blk-settings.c, blk_apply_bdi_limits).
func aheadOfKernel(n, ahead int) bool {
	if best, err := number(n, "optimal_io_size"); err != nil || best > 0 {
		return err == nil && ahead == 2*best>>10
	}
	most, err := number(n, "max_sectors_kb")
	return err == nil && ahead == 2*most
}

// number returns a setting of a device's queue that is a number.
func number(n int, setting string) (int, error) {
	text, err := queue.Read(Path(n), setting)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(text)
}

// StopDiscards makes a loop device refuse discards, and all else that it would hand down by fallocate(2): punched holes, and ranges to be zeroed (Linux
// 5.19), which the kernel then writes as zeros. That cannot be undone (Linux 6.18) but by removing the device. errdefs.ErrPrecondition if /sys cannot be
// written to.
func StopDiscards(n int) error {
	if noDiscards(n, "discard_max_bytes") {
		return nil
	}
	if err := queue.Write(Path(n), "discard_max_bytes", "0"); err != nil {
		return fmt.Errorf("%w: switch discards of %s off, without which btrfs may need more space than a volume has: %s (in a container, mount /sys for writing)", errdefs.ErrPrecondition, Path(n), err.Error())
	}
	return nil
}

// noDiscards reports whether a setting is 0: discard_max_bytes is what a device takes, discard_max_hw_bytes what it could take.
func noDiscards(n int, setting string) bool {
	most, err := queue.Read(Path(n), setting)
	return err == nil && most == "0"
}

// stopped reports whether StopDiscards was called for a device. One that never had a backing file, or has one without holes, takes no discards either, but
// could not take any.
func stopped(n int) bool {
	return noDiscards(n, "discard_max_bytes") && !noDiscards(n, "discard_max_hw_bytes")
}

// ForgetStopped removes a loop device that StopDiscards was called for, if nobody uses it: the next user of its number then has discards. It reports
// whether it did.
func ForgetStopped(n int) bool {
	if !stopped(n) {
		return false
	}
	control, err := os.OpenFile(controlPath, os.O_RDWR, 0)
	if err != nil {
		return false
	}
	defer control.Close()
	_, err = ioctl.Value(control, unix.LOOP_CTL_REMOVE, uintptr(n)) // EBUSY while it is in use
	return err == nil
}

// detachWait is how long WaitGone waits for a device that something still holds.
const detachWait = 2 * time.Second

// Detach removes the backing file of an open loop device, and waits until it is gone (WaitGone): LOOP_CLR_FD succeeds at once for a device in use, and
// only marks it. It closes f.
//
// What was written to the device and not synced is written out first: a device that is to go with its last user takes nothing any more, and the kernel
// would drop that without a word.
func Detach(ctx context.Context, f *os.File, was Backing) error {
	if err := f.Sync(); err != nil && !was.ReadOnly() {
		if _, now := Status(f, was.Number); !errors.Is(now, unix.ENXIO) { // otherwise somebody else removed it meanwhile
			f.Close()
			return fmt.Errorf("write out what was written to %s: %w", Path(was.Number), errdefs.FromErrno(err))
		}
	}
	_, err := ioctl.Value(f, unix.LOOP_CLR_FD, 0)
	f.Close()
	if err != nil && !errors.Is(err, unix.ENXIO) {
		return fmt.Errorf("detach %s: %w", Path(was.Number), errdefs.FromErrno(err))
	}
	err = WaitGone(ctx, was)
	if err == nil {
		ForgetStopped(was.Number)
	}
	return err
}

// WaitGone waits until a loop device has lost its backing file. errdefs.ErrInUse after detachWait. The kernel has no event for it that can be waited for
// with a deadline, so it looks, ever more rarely; mostly the first look is enough. Only the pauses count, and not how late they end: on a machine that
// stalls, whoever holds the device has stalled too.
func WaitGone(ctx context.Context, was Backing) error {
	for pause, waited := time.Millisecond, time.Duration(0); ; waited += pause {
		gone, err := gone(was)
		if gone || err != nil {
			return err
		}
		if waited >= detachWait {
			return fmt.Errorf("%w: %s is held open by a process or a mount; it goes away with its last user", errdefs.ErrInUse, Path(was.Number))
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
			pause = min(2*pause, 100*time.Millisecond)
		}
	}
}

// gone reports whether a loop device has another backing file than it had, or none.
func gone(was Backing) (bool, error) {
	// sysfs first: it mostly answers without the device being opened, and so held.
	backing, err := os.ReadFile(fmt.Sprintf("/sys/block/loop%d/loop/backing_file", was.Number))
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENODEV) || (err == nil && len(backing) == 0) {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("look at loop%d: %w", was.Number, err)
	}
	f, err := Open(was.Number, os.O_RDONLY)
	if Going(err) {
		return false, nil // the kernel may still hold the file
	}
	if err != nil {
		return false, fmt.Errorf("look at loop%d: %w", was.Number, err)
	}
	defer f.Close()
	now, err := Status(f, was.Number)
	if errors.Is(err, unix.ENXIO) {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("look at loop%d: %w", was.Number, err)
	}
	return now.Device != was.Device || now.Inode != was.Inode || now.Node != was.Node, nil
}

// BackingName returns the path of a loop device's backing file, as the kernel shows it, and whether it is unlinked. The directories in it may be those of
// another mount namespace.
func BackingName(n int) (name string, unlinked bool, err error) {
	b, err := os.ReadFile(fmt.Sprintf("/sys/block/loop%d/loop/backing_file", n))
	name, unlinked = strings.CutSuffix(strings.TrimSpace(string(b)), " (deleted)")
	return name, unlinked, err
}

// Unlinked reports whether the backing file of a loop device has no name any more.
func Unlinked(n int) bool {
	_, unlinked, err := BackingName(n)
	return err == nil && unlinked
}
