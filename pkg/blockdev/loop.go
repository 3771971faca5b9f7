package blockdev

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/ioctl"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Loop devices by ioctl, as in loop(4) and include/uapi/linux/loop.h. A loop device is
// known by the device and inode numbers of its backing file. Its number is soon another's,
// the path that sysfs shows may be of another mount namespace, and its label can be changed
// by everybody who can write to the device.

const (
	loopMajor       = 7
	loopControlPath = "/dev/loop-control"
	loopNameSize    = unix.LO_NAME_SIZE - 1
)

// loopBacking is what the kernel says about a configured loop device.
type loopBacking struct {
	number    int    // N of /dev/loopN
	device    uint64 // of the filesystem that the backing file is on
	inode     uint64
	node      uint64 // the device number of a backing file that is a device node; else 0
	label     string
	flags     uint32
	offset    uint64
	sizeLimit uint64
}

func loopPath(n int) string { return "/dev/loop" + strconv.Itoa(n) }

func (b loopBacking) readOnly() bool { return b.flags&unix.LO_FLAGS_READ_ONLY != 0 }
func (b loopBacking) stays() bool    { return b.flags&unix.LO_FLAGS_AUTOCLEAR == 0 }

// decodeDevice makes a device number of the kernel's encoding in ioctls (huge_encode_dev).
func decodeDevice(dev uint64) uint64 {
	return unix.Mkdev(uint32(dev>>8&0xfff), uint32(dev&0xff|dev>>12&0xfff00))
}

// openLoop opens /dev/loopN, and makes the node where /dev is not kept by devtmpfs.
func openLoop(n int, flags int) (*os.File, error) {
	f, err := os.OpenFile(loopPath(n), flags, 0)
	if errors.Is(err, os.ErrNotExist) {
		if err := unix.Mknod(loopPath(n), unix.S_IFBLK|0o660, int(unix.Mkdev(loopMajor, uint32(n)))); err != nil && !errors.Is(err, unix.EEXIST) {
			return nil, fmt.Errorf("mknod %s: %w", loopPath(n), err)
		}
		f, err = os.OpenFile(loopPath(n), flags, 0)
	}
	return f, err
}

// goingLoop reports whether a loop device could not be opened because it is losing its backing file, or is
// removed, in this moment (lo_open in drivers/block/loop.c).
func goingLoop(err error) bool { return errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENODEV) }

// loopStatus returns the backing of an open loop device; ENXIO if it has none.
func loopStatus(f *os.File, n int) (loopBacking, error) {
	var info unix.LoopInfo64
	if err := ioctl.Pointer(f, unix.LOOP_GET_STATUS64, unsafe.Pointer(&info)); err != nil {
		return loopBacking{}, err
	}
	label := string(info.File_name[:])
	if i := strings.IndexByte(label, 0); i >= 0 {
		label = label[:i]
	}
	return loopBacking{number: n, device: decodeDevice(info.Device), inode: info.Inode, node: decodeDevice(info.Rdevice), label: label,
		flags: info.Flags, offset: info.Offset, sizeLimit: info.Sizelimit}, nil
}

// configuredLoops returns the numbers of all loop devices that have a backing file.
func configuredLoops() ([]int, error) {
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

// loopConfig says how to configure a loop device.
type loopConfig struct {
	label     string
	readOnly  bool
	autoclear bool   // it goes away with its last user
	sector    uint32 // bytes of a logical sector; 0: the kernel's choice
	discards  bool   // else it takes none, nor anything else that punches holes
	limit     uint64 // bytes that it shows; 0: all
}

// busyOften is how often a free loop device may be refused before it is left alone: somebody is not faster
// all the time, but has it open for himself (O_EXCL), who knows for how long.
const busyOften = 10

// freeLoop returns the number of a loop device without a backing file, other than those that were refused
// too often. The kernel always names the first one, held or not.
func freeLoop(control *os.File, refused map[int]int) (int, error) {
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
	_, _, err := backingName(n)
	return err == nil
}

// attachLoop puts a loop device over an open file: LOOP_CTL_GET_FREE and LOOP_CONFIGURE,
// again with the next free number when somebody else was faster. The returned file holds
// the device.
func attachLoop(ctx context.Context, backing *os.File, c loopConfig) (*os.File, int, error) {
	if len(c.label) > loopNameSize {
		return nil, 0, fmt.Errorf("%w: loop label %q is longer than %d", errdefs.ErrInvalid, c.label, loopNameSize)
	}
	control, err := os.OpenFile(loopControlPath, os.O_RDWR, 0)
	if err != nil {
		return nil, 0, fmt.Errorf("%w: open %s: %w (modprobe loop; in a container, mount the host's /dev)", errdefs.ErrUnavailable, loopControlPath, err)
	}
	defer control.Close()
	flags := os.O_RDWR
	if c.readOnly {
		flags = os.O_RDONLY
	}
	refused := map[int]int{}
	for held := 0; ; {
		if err := ctx.Err(); err != nil {
			return nil, 0, err
		}
		n, err := freeLoop(control, refused)
		if err != nil {
			return nil, 0, fmt.Errorf("find a free loop device: %w", errdefs.FromErrno(err))
		}
		if c.discards && stopped(n) && held < heldTries {
			if !forgetStopped(n) { // somebody looks at it
				time.Sleep(heldPause)
				held++
			}
			continue
		}
		f, err := openLoop(n, flags)
		if goingLoop(err) {
			continue
		}
		if err != nil {
			return nil, 0, fmt.Errorf("open loop device: %w", errdefs.FromErrno(err))
		}
		if err = configureLoop(f, backing, c); err == nil {
			err := setReadOnly(f, c.readOnly)
			if err == nil && !c.discards {
				err = stopDiscards(n)
			}
			if err != nil {
				_, _ = ioctl.Value(f, unix.LOOP_CLR_FD, 0)
				f.Close()
				return nil, 0, fmt.Errorf("set up %s: %w", loopPath(n), errdefs.FromErrno(err))
			}
			resetQueue(n)
			return f, n, nil
		}
		f.Close()
		if !errors.Is(err, unix.EBUSY) {
			return nil, 0, fmt.Errorf("configure %s: %w", loopPath(n), errdefs.FromErrno(err))
		}
		refused[n]++
	}
}

// configureLoop asks for direct I/O, which not all filesystems have (tmpfs, some overlays).
// The kernel leaves it out where the sector is smaller than what the file takes.
func configureLoop(f, backing *os.File, c loopConfig) error {
	config := unix.LoopConfig{Fd: uint32(backing.Fd()), Size: c.sector, Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_DIRECT_IO, Sizelimit: c.limit}}
	if c.readOnly {
		config.Info.Flags |= unix.LO_FLAGS_READ_ONLY
	}
	if c.autoclear {
		config.Info.Flags |= unix.LO_FLAGS_AUTOCLEAR
	}
	copy(config.Info.File_name[:], c.label)
	err := ioctl.Pointer(f, unix.LOOP_CONFIGURE, unsafe.Pointer(&config))
	if errors.Is(err, unix.EINVAL) {
		config.Info.Flags &^= unix.LO_FLAGS_DIRECT_IO
		err = ioctl.Pointer(f, unix.LOOP_CONFIGURE, unsafe.Pointer(&config))
	}
	return err
}

// setReadOnly: a loop device keeps the mode that an earlier user set with
// blockdev(8), across detach and attach.
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

// resetQueue: as the mode does, the I/O scheduler of a device outlives the user that it
// was chosen for (the kernel itself resets the read-ahead). Where /sys cannot be written
// to, nobody can have chosen one.
func resetQueue(n int) {
	_, _ = SetQueue(Device{Path: loopPath(n)}, map[string]string{"scheduler": "none"}) // as loop devices begin
}

// stopDiscards has a loop device take no discards. It then refuses all that it would hand down by
// fallocate(2): holes that are punched and ranges that are zeroed too (Linux 5.19), which the
// kernel writes as zeros then. There is no way back (Linux 6.18) but to remove the device.
func stopDiscards(n int) error {
	path := fmt.Sprintf("/sys/block/loop%d/queue/discard_max_bytes", n)
	if noDiscards(n, "discard_max_bytes") {
		return nil
	}
	if err := writeSetting(path, "0"); err != nil {
		return fmt.Errorf("%w: switch discards of %s off, without which btrfs may need more space than a volume has: %s (in a container, mount /sys for writing)", errdefs.ErrPrecondition, loopPath(n), err.Error())
	}
	return nil
}

// noDiscards: "discard_max_bytes" is what a device takes, "discard_max_hw_bytes" what it could.
func noDiscards(n int, setting string) bool {
	most, err := queueSetting(fmt.Sprintf("/sys/block/loop%d/queue/%s", n, setting))
	return err == nil && most == "0"
}

// stopped reports whether stopDiscards was here. A device that never had a backing takes no discards
// either, and one with a backing that has no holes; but neither could.
func stopped(n int) bool {
	return noDiscards(n, "discard_max_bytes") && !noDiscards(n, "discard_max_hw_bytes")
}

// forgetStopped removes a loop device that stopDiscards left, if nobody uses it, so that the next
// user of its number, whoever that is, has discards. It reports whether it did.
func forgetStopped(n int) bool {
	if !stopped(n) {
		return false
	}
	control, err := os.OpenFile(loopControlPath, os.O_RDWR, 0)
	if err != nil {
		return false
	}
	defer control.Close()
	_, err = ioctl.Value(control, unix.LOOP_CTL_REMOVE, uintptr(n)) // EBUSY while it is in use
	return err == nil
}

// detachWait is how long a device that something still holds gets to go away.
const detachWait = 2 * time.Second

// detachLoop takes the backing away from an open loop device and makes sure of it:
// LOOP_CLR_FD succeeds at once on a device in use and only marks it. It closes f.
//
// What was written to the device and not synced goes to its image first: a device that was told to
// go by its last user takes nothing any more, and the kernel then drops it without a word.
func detachLoop(ctx context.Context, f *os.File, was loopBacking) error {
	if err := f.Sync(); err != nil && !was.readOnly() {
		if _, now := loopStatus(f, was.number); !errors.Is(now, unix.ENXIO) { // else somebody else took it away
			f.Close()
			return fmt.Errorf("write out what was written to %s: %w", loopPath(was.number), errdefs.FromErrno(err))
		}
	}
	_, err := ioctl.Value(f, unix.LOOP_CLR_FD, 0)
	f.Close()
	if err != nil && !errors.Is(err, unix.ENXIO) {
		return fmt.Errorf("detach %s: %w", loopPath(was.number), errdefs.FromErrno(err))
	}
	err = waitLoopGone(ctx, was)
	if err == nil {
		forgetStopped(was.number)
	}
	return err
}

// waitLoopGone waits for a loop device to lose its backing. The kernel gives no
// event for it that can be waited on with a deadline, so this looks, ever more
// rarely; mostly the first look is enough. Only the pauses count, not how late they end: on a machine that
// stalls, whoever holds the device has stalled too.
func waitLoopGone(ctx context.Context, was loopBacking) error {
	for pause, waited := time.Millisecond, time.Duration(0); ; waited += pause {
		gone, err := loopGone(was)
		if gone || err != nil {
			return err
		}
		if waited >= detachWait {
			return fmt.Errorf("%w: %s is held open by a process or a mount; it goes away with its last user", errdefs.ErrInUse, loopPath(was.number))
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
			pause = min(2*pause, 100*time.Millisecond)
		}
	}
}

func loopGone(was loopBacking) (bool, error) {
	// sysfs first: mostly the answer is there without opening, and so holding, the device.
	backing, err := os.ReadFile(fmt.Sprintf("/sys/block/loop%d/loop/backing_file", was.number))
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENODEV) || (err == nil && len(backing) == 0) {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("look at loop%d: %w", was.number, err)
	}
	f, err := openLoop(was.number, os.O_RDONLY)
	if goingLoop(err) {
		return false, nil // the kernel may still hold its image
	}
	if err != nil {
		return false, fmt.Errorf("look at loop%d: %w", was.number, err)
	}
	defer f.Close()
	now, err := loopStatus(f, was.number)
	if errors.Is(err, unix.ENXIO) {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("look at loop%d: %w", was.number, err)
	}
	return now.device != was.device || now.inode != was.inode || now.node != was.node, nil
}

// schedulers are those that the kernel was once seen to have.
var schedulers sync.Map

// HasScheduler reports whether the kernel has an I/O scheduler loaded, as any block
// device lists it. True if no device can be asked. It looks at the devices only for a
// name that it has not seen before.
func HasScheduler(name string) bool {
	if _, seen := schedulers.Load(name); seen {
		return true
	}
	lists, err := filepath.Glob("/sys/block/*/queue/scheduler")
	if err != nil {
		return true
	}
	asked := false
	for _, path := range lists {
		list, err := os.ReadFile(path)
		if err != nil || len(strings.Fields(string(list))) < 2 {
			continue // "none" alone: a device that takes no scheduler
		}
		asked = true
		for _, one := range strings.Fields(string(list)) {
			schedulers.Store(strings.Trim(one, "[]"), true)
		}
		if _, seen := schedulers.Load(name); seen {
			return true
		}
	}
	return !asked
}

// SetQueue writes settings of a device's block queue, by their name under
// /sys/block/DEVICE/queue: all of them, or, with an error, none. errdefs.ErrInvalid if the
// kernel refuses a value or has no such setting. undo writes back what was there.
func SetQueue(device Device, settings map[string]string) (undo func() error, err error) {
	var undos []func() error
	undo = func() error {
		var failures []error
		for _, one := range slices.Backward(undos) {
			failures = append(failures, one())
		}
		return errors.Join(failures...)
	}
	for name, value := range settings {
		path := filepath.Join("/sys/block", filepath.Base(device.queue(name)), "queue", filepath.Base(name))
		before, err := queueSetting(path)
		if err == nil && before == value {
			continue
		}
		if err == nil {
			err = writeSetting(path, value)
		}
		if err != nil {
			if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
				err = fmt.Errorf("%w: the kernel says: %w", errdefs.ErrInvalid, err)
			}
			return nil, errors.Join(fmt.Errorf("set %s of %s to %q: %w", name, device.Path, value, err), undo())
		}
		undos = append(undos, func() error { return writeSetting(path, before) })
	}
	return undo, nil
}

// queueSetting reads a setting. Of a choice ("none [bfq]") it is what is in brackets.
func queueSetting(path string) (string, error) {
	b, err := os.ReadFile(path)
	value := strings.TrimSpace(string(b))
	if _, rest, found := strings.Cut(value, "["); found {
		value, _, _ = strings.Cut(rest, "]")
	}
	return value, err
}

// writeSetting does not create the file, as os.WriteFile would.
func writeSetting(path, value string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}
