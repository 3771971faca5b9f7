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
)

// Loop devices by ioctl, as in loop(4) and include/uapi/linux/loop.h. Nothing here
// goes by the name that sysfs shows: a loop device is known by the device and inode
// numbers of its backing file and by the label that was set when it was configured.

const (
	loopMajor       = 7
	loopControlPath = "/dev/loop-control"
	loopNameSize    = unix.LO_NAME_SIZE - 1
)

// loopBacking is what the kernel says about a configured loop device.
type loopBacking struct {
	number    int // N of /dev/loopN
	device    uint64
	inode     uint64
	label     string
	flags     uint32
	sizeLimit uint64
}

func loopPath(n int) string { return "/dev/loop" + strconv.Itoa(n) }

func (b loopBacking) readOnly() bool { return b.flags&unix.LO_FLAGS_READ_ONLY != 0 }
func (b loopBacking) keep() bool     { return b.flags&unix.LO_FLAGS_AUTOCLEAR == 0 }

func ioctlPointer(fd uintptr, request uint, arg unsafe.Pointer) error {
	for {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, uintptr(request), uintptr(arg))
		if errno == 0 {
			return nil
		}
		if errno != unix.EINTR {
			return errno
		}
	}
}

func ioctlValue(fd uintptr, request uint, arg uintptr) (int, error) {
	for {
		r, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, uintptr(request), arg)
		if errno == 0 {
			return int(r), nil
		}
		if errno != unix.EINTR {
			return 0, errno
		}
	}
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

// loopStatus returns the backing of an open loop device; ENXIO if it has none.
func loopStatus(f *os.File, n int) (loopBacking, error) {
	var info unix.LoopInfo64
	if err := ioctlPointer(f.Fd(), unix.LOOP_GET_STATUS64, unsafe.Pointer(&info)); err != nil {
		return loopBacking{}, err
	}
	label := string(info.File_name[:])
	if i := strings.IndexByte(label, 0); i >= 0 {
		label = label[:i]
	}
	return loopBacking{number: n, device: info.Device, inode: info.Inode, label: label, flags: info.Flags, sizeLimit: info.Sizelimit}, nil
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

// attachLoop puts a loop device over an open image: LOOP_CTL_GET_FREE and
// LOOP_CONFIGURE, again with the next free number when somebody else was faster.
// The returned file holds the device.
func attachLoop(ctx context.Context, image *os.File, label string, how Attachment) (*os.File, int, error) {
	if len(label) > loopNameSize {
		return nil, 0, fmt.Errorf("%w: loop label %q is longer than %d", ErrInvalid, label, loopNameSize)
	}
	control, err := os.OpenFile(loopControlPath, os.O_RDWR, 0)
	if err != nil {
		return nil, 0, fmt.Errorf("%w: open %s: %w (modprobe loop; in a container, mount the host's /dev)", ErrUnavailable, loopControlPath, err)
	}
	defer control.Close()

	flags, open := uint32(unix.LO_FLAGS_DIRECT_IO), os.O_RDWR
	if how.ReadOnly {
		flags, open = flags|unix.LO_FLAGS_READ_ONLY, os.O_RDONLY
	}
	if !how.Keep {
		flags |= unix.LO_FLAGS_AUTOCLEAR
	}
	for {
		if err := ctx.Err(); err != nil {
			return nil, 0, err
		}
		n, err := ioctlValue(control.Fd(), unix.LOOP_CTL_GET_FREE, 0)
		if err != nil {
			return nil, 0, fmt.Errorf("find a free loop device: %w", systemError(err))
		}
		f, err := openLoop(n, open)
		if errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENODEV) {
			continue // removed meanwhile (LOOP_CTL_REMOVE)
		}
		if err != nil {
			return nil, 0, fmt.Errorf("open loop device: %w", systemError(err))
		}
		config := unix.LoopConfig{Fd: uint32(image.Fd()), Size: 0, Info: unix.LoopInfo64{Flags: flags}}
		copy(config.Info.File_name[:], label)
		err = ioctlPointer(f.Fd(), unix.LOOP_CONFIGURE, unsafe.Pointer(&config))
		if errors.Is(err, unix.EINVAL) && flags&unix.LO_FLAGS_DIRECT_IO != 0 {
			// The filesystem below has no direct I/O (tmpfs, some overlays).
			flags &^= unix.LO_FLAGS_DIRECT_IO
			config.Info.Flags = flags
			err = ioctlPointer(f.Fd(), unix.LOOP_CONFIGURE, unsafe.Pointer(&config))
		}
		if err == nil {
			if err := setReadOnly(f, how.ReadOnly); err != nil {
				_, _ = ioctlValue(f.Fd(), unix.LOOP_CLR_FD, 0)
				f.Close()
				return nil, 0, fmt.Errorf("set the mode of %s: %w", loopPath(n), systemError(err))
			}
			resetQueue(n)
			return f, n, nil
		}
		f.Close()
		if !errors.Is(err, unix.EBUSY) {
			return nil, 0, fmt.Errorf("configure %s: %w", loopPath(n), systemError(err))
		}
	}
}

// setReadOnly: a loop device keeps the mode that an earlier user set with
// blockdev(8), across detach and attach.
func setReadOnly(f *os.File, readOnly bool) error {
	var now, want int32
	if readOnly {
		want = 1
	}
	if err := ioctlPointer(f.Fd(), unix.BLKROGET, unsafe.Pointer(&now)); err != nil || now == want {
		return err
	}
	return ioctlPointer(f.Fd(), unix.BLKROSET, unsafe.Pointer(&want))
}

// resetQueue: as the mode does, the I/O scheduler of a device outlives the user that it
// was chosen for (the kernel itself resets the read-ahead). Where /sys cannot be written
// to, nobody can have chosen one.
func resetQueue(n int) {
	_, _ = SetQueue(Device{Path: loopPath(n)}, map[string]string{"scheduler": "none"}) // as loop devices begin
}

// detachWait is how long a device that something still holds gets to go away.
const detachWait = 2 * time.Second

// detachLoop takes the backing away from an open loop device and makes sure of it:
// LOOP_CLR_FD succeeds at once on a device in use and only marks it. It closes f.
func detachLoop(ctx context.Context, f *os.File, was loopBacking) error {
	_, err := ioctlValue(f.Fd(), unix.LOOP_CLR_FD, 0)
	f.Close()
	if err != nil && !errors.Is(err, unix.ENXIO) {
		return fmt.Errorf("detach %s: %w", loopPath(was.number), systemError(err))
	}
	return waitLoopGone(ctx, was)
}

// waitLoopGone waits for a loop device to lose its backing. The kernel gives no
// event for it that can be waited on with a deadline, so this looks, ever more
// rarely; mostly the first look is enough.
func waitLoopGone(ctx context.Context, was loopBacking) error {
	pause, deadline := time.Millisecond, time.Now().Add(detachWait)
	for {
		gone, err := loopGone(was)
		if gone || err != nil {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%w: %s is held open by a process or a mount; it goes away with its last user", ErrInUse, loopPath(was.number))
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
	return now.device != was.device || now.inode != was.inode, nil
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
// /sys/block/DEVICE/queue: all of them, or, with an error, none. ErrInvalid if the
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
		path := filepath.Join("/sys/block", filepath.Base(device.Path), "queue", filepath.Base(name))
		before, err := queueSetting(path)
		if err == nil && before == value {
			continue
		}
		if err == nil {
			err = writeSetting(path, value)
		}
		if err != nil {
			if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
				err = fmt.Errorf("%w: the kernel says: %w", ErrInvalid, err)
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
