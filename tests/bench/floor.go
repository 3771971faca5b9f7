package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// The steps of a life on the floor: what it takes at the least, by bare system calls.
const (
	stepImage   = "open, fallocate, fsync"
	stepLoop    = "LOOP_CONFIGURE"
	stepMkfs    = "mkfs.ext4"
	stepMount   = "mount"
	stepBind    = "mkdir, bind mount"
	stepUnbind  = "umount of the bind, rmdir"
	stepUnmount = "umount, loop device gone"
	stepUnlink  = "unlink"
	stepRecord  = "record" // of a floor that keeps them
)

// floorOf is which steps a call stands for.
var floorOf = map[string][]string{
	"CreateVolume":        {stepImage},
	"NodeStageVolume":     {stepLoop, stepMkfs, stepMount},
	"NodePublishVolume":   {stepBind},
	"NodeUnpublishVolume": {stepUnbind},
	"NodeUnstageVolume":   {stepUnmount},
	"DeleteVolume":        {stepUnlink},
}

// mkfsCommand is the one of the driver, for a device of zeros; sameFilesystem makes sure.
func mkfsCommand() []string {
	extended := "nodiscard"
	var major, minor int
	if _, err := fmt.Sscanf(mkfsVersion(), "mke2fs %d.%d", &major, &minor); err == nil && (major > 1 || minor >= 47) {
		extended += ",assume_storage_prezeroed=1"
	}
	return []string{"mkfs.ext4", "-q", "-b", "4096", "-m", "0", "-E", extended}
}

func mkfsVersion() string {
	out, _ := exec.Command("mkfs.ext4", "-V").CombinedOutput()
	line, _, _ := strings.Cut(string(out), "\n")
	return strings.TrimSpace(line)
}

// floor does what the driver does, and no more.
type floor struct {
	dir  string // with the images
	mkfs []string
	thin bool
	size int64

	directory *os.File // nil: no records are kept
}

func newFloor(dir string, size int64, thin bool) (*floor, error) {
	return &floor{dir: dir, mkfs: mkfsCommand(), thin: thin, size: size}, os.MkdirAll(dir, 0o700)
}

// recording is a floor in a directory of its own that also keeps what no driver can do without that keeps the guarantees of this one: a record
// of two slots, written and synced one after the other wherever the driver has to have it on the disk before it goes on or answers.
func (f *floor) recording() (*floor, error) {
	r := *f
	r.dir += "-records"
	if err := os.MkdirAll(r.dir, 0o700); err != nil {
		return nil, err
	}
	var err error
	r.directory, err = os.Open(r.dir)
	return &r, err
}

func loopPath(n int) string { return fmt.Sprintf("/dev/loop%d", n) }

// floorLife is a life on the floor.
type floorLife struct {
	*floor
	path, staged, published string

	image, device *os.File // while they are open
	number        int      // of the loop device
}

// life is one whole life; the directory staged exists, published does not. meanwhile is
// called in the middle of it, with the image.
func (f *floor) life(ctx context.Context, name, staged, published string, r *recorder, meanwhile func(image string) error) error {
	l := &floorLife{floor: f, path: filepath.Join(f.dir, name), staged: staged, published: published}
	defer func() {
		// They may be closed, or nil.
		l.image.Close()
		l.device.Close()
	}()
	if err := l.up(ctx, r); err != nil {
		return err
	}
	if meanwhile != nil {
		if err := meanwhile(l.path); err != nil {
			return err
		}
	}
	return l.down(ctx, r)
}

// up makes a volume and publishes it. Records say that it is being made, is there, is claimed, is being formatted, and is formatted.
func (l *floorLife) up(ctx context.Context, r *recorder) error {
	return r.all(l.kept(
		step{stepRecord, l.begin},
		step{stepImage, l.make},
		step{stepRecord, func() error { return errors.Join(l.directory.Sync(), l.record()) }},
		step{stepRecord, l.record},
		step{stepLoop, l.attach},
		step{stepRecord, l.record},
		step{stepMkfs, func() error { return run(ctx, append(slices.Clone(l.mkfs), loopPath(l.number))...) }},
		step{stepRecord, l.record},
		step{stepMount, l.mount},
		step{stepBind, func() error { return bind(l.staged, l.published) }})...)
}

// down takes it back to nothing. Records say that it is claimed by nobody, and is being deleted.
func (l *floorLife) down(ctx context.Context, r *recorder) error {
	return r.all(l.kept(
		step{stepUnbind, func() error { return errors.Join(unix.Unmount(l.published, 0), os.Remove(l.published)) }},
		step{stepUnmount, func() error { return l.unmount(ctx) }},
		step{stepRecord, l.record},
		step{stepRecord, l.record},
		step{stepUnlink, func() error { return os.Remove(l.path) }},
		step{stepRecord, func() error { return os.Remove(l.recordPath()) }})...)
}

// kept leaves out the steps of records where none are kept.
func (l *floorLife) kept(steps ...step) []step {
	if l.directory != nil {
		return steps
	}
	return slices.DeleteFunc(steps, func(s step) bool { return s.name == stepRecord })
}

func (l *floorLife) recordPath() string { return l.path + ".rec" }

// recordSlot is how many bytes a slot of a record has, as the driver's.
const recordSlot = 8192

// begin makes the record, both slots at once.
func (l *floorLife) begin() error {
	f, err := os.OpenFile(l.recordPath(), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.Write(make([]byte, 2*recordSlot))
	return errors.Join(err, f.Sync())
}

// record changes the record, one slot after the other.
func (l *floorLife) record() error {
	f, err := os.OpenFile(l.recordPath(), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	for slot := range int64(2) {
		if _, err := f.WriteAt(make([]byte, recordSlot), slot*recordSlot); err != nil {
			return err
		}
		if err := unix.Fdatasync(int(f.Fd())); err != nil {
			return err
		}
	}
	return nil
}

func (l *floorLife) make() (err error) {
	if l.image, err = os.OpenFile(l.path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600); err != nil {
		return err
	}
	if l.thin {
		err = l.image.Truncate(l.size)
	} else {
		err = unix.Fallocate(int(l.image.Fd()), 0, 0, l.size)
	}
	return errors.Join(err, l.image.Sync())
}

func (l *floorLife) attach() (err error) {
	l.device, l.number, err = attach(l.image)
	l.image.Close()
	return err
}

func (l *floorLife) mount() error {
	err := unix.Mount(loopPath(l.number), l.staged, "ext4", 0, "")
	l.device.Close()
	return err
}

func (l *floorLife) unmount(ctx context.Context) error {
	if err := unix.Unmount(l.staged, 0); err != nil {
		return err
	}
	// Autoclear has taken it away, unless something still holds it.
	for ctx.Err() == nil {
		if read(fmt.Sprintf("/sys/block/loop%d/loop/backing_file", l.number)) != l.path {
			return nil
		}
	}
	return ctx.Err()
}

// bind mounts a directory at another one, which is made.
func bind(from, to string) error {
	if err := os.Mkdir(to, 0o750); err != nil {
		return err
	}
	return unix.Mount(from, to, "", unix.MS_BIND, "")
}

// run runs a program.
func run(ctx context.Context, argv ...string) error {
	if out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, out)
	}
	return nil
}

// attach puts a loop device over an image; it goes away with its last user.
func attach(image *os.File) (*os.File, int, error) {
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, 0, err
	}
	defer control.Close()
	for {
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, 0, err
		}
		device, err := os.OpenFile(loopPath(n), os.O_RDWR, 0)
		if err != nil {
			return nil, 0, err
		}
		err = unix.IoctlLoopConfigure(int(device.Fd()), &unix.LoopConfig{Fd: uint32(image.Fd()),
			Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_DIRECT_IO | unix.LO_FLAGS_AUTOCLEAR}})
		if err == nil {
			// It may still be as read-only as its last user made it.
			err = unix.IoctlSetPointerInt(int(device.Fd()), unix.BLKROSET, 0)
		}
		if err == nil {
			return device, n, nil
		}
		device.Close()
		if !errors.Is(err, unix.EBUSY) {
			return nil, 0, err
		}
	}
}

// shape is what mkfs made of an image, without what differs from one filesystem to the
// next (ext4's Documentation/filesystems/ext4/super.rst and group_descr.rst).
func shape(image string) (string, error) {
	f, err := os.Open(image)
	if err != nil {
		return "", err
	}
	defer f.Close()
	first := make([]byte, 8192)
	if _, err := f.ReadAt(first, 0); err != nil {
		return "", err
	}
	super, group := first[1024:2048], first[4096:]
	return fmt.Sprintf("inodes %x, blocks %x, features %x, inode size %x, flags of the first group %x",
		super[0:4], super[4:8], super[92:104], super[88:90], group[18:20]), nil
}
