// Package dm is the device mapper by ioctl, as in include/uapi/linux/dm-ioctl.h, version 4. It makes devices (Make), also such that
// show another one (Show), and looks at devices, suspends, renames and removes them, whoever made them. Remove may be asked
// for while a device is open: the kernel then removes it when nobody has it open any more (DM_DEFERRED_REMOVE, Linux
// 3.13), so nothing stays behind a driver that dies.
package dm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/ioctl"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/held"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

const controlPath = "/dev/mapper/control"

// Commands.
const (
	listDevices  = 0x02
	devCreate    = 0x03
	devRemove    = 0x04
	devRename    = 0x05
	devSuspend   = 0x06 // without the flag: resume
	devStatus    = 0x07
	tableLoad    = 0x09
	tableClear   = 0x0a
	tableDeps    = 0x0b
	tableStatus  = 0x0c
	listVersions = 0x0d
	targetMsg    = 0x0e
	armPoll      = 0x10 // Linux 4.14
	getVersion   = 0x11 // of one target; Linux 5.4
)

// Flags.
const (
	flagReadOnly       = 1 << 0
	flagSuspended      = 1 << 1
	flagTable          = 1 << 4 // tableStatus tells the table, not how it does
	flagActive         = 1 << 5 // there is a table in effect
	flagInactive       = 1 << 6 // there is a table for the next resume
	flagBufferFull     = 1 << 8
	flagSkipLockFS     = 1 << 10 // no filesystem is frozen
	flagNoFlush        = 1 << 11 // what a target holds back is given to the next table, and not failed
	flagQueryInactive  = 1 << 12 // of the table for the next resume
	flagDeferredRemove = 1 << 17
)

// NoScan tells udev's rules to leave a device alone (libdevmapper.h, DM_UDEV_*): to
// look for no filesystem, no volume group and nothing else on what belongs to a tenant.
const NoScan = (0x2 | 0x4 | 0x8) << 16

// NameSize is the size of the name of a device, with the zero at its end (DM_NAME_LEN).
const NameSize = 128

type header struct {
	version     [3]uint32
	dataSize    uint32
	dataStart   uint32
	targetCount uint32
	openCount   int32
	flags       uint32
	eventNr     uint32
	_           uint32
	dev         uint64
	name        [NameSize]byte
	uuid        [129]byte
	_           [7]byte
}

type targetSpec struct {
	start, length uint64
	status        int32
	next          uint32
	kind          [16]byte
}

// Device is what the kernel says of a device.
type Device struct {
	Name      string
	UUID      string
	minor     uint32
	Opens     int
	Targets   int // of the table in effect
	ReadOnly  bool
	Suspended bool
	Live      bool // it has a table; without, whoever made it was cut short, and nobody can open it
	Loaded    bool // it has a table for the next resume
	Deferred  bool // it goes away with its last user
	Number    uint64
	Event     uint32 // how often a target of it has told of something; it only grows
}

// Range is a part of a device, in bytes.
type Range struct{ Offset, Length int64 }

// Path returns /dev/dm-N.
func (d Device) Path() string { return fmt.Sprint("/dev/dm-", d.minor) }

// Size of what the device shows, in bytes, without opening it (sysfs counts in sectors of 512 bytes).
func (d Device) Size() (int64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/sys/block/dm-%d/size", d.minor))
	if err != nil {
		return 0, fmt.Errorf("size of device %s: %w", d.Name, errdefs.FromErrno(err))
	}
	sectors, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("size of device %s: %w", d.Name, err)
	}
	return sectors * sector, nil
}

// control is what all commands go through, once it could be opened; it stays open.
var control struct {
	mu   sync.Mutex
	file *os.File
}

func shared() (*os.File, error) {
	control.mu.Lock()
	defer control.mu.Unlock()
	if control.file == nil {
		fd, err := unix.Open(controlPath, unix.O_RDWR|unix.O_CLOEXEC, 0) // os.OpenFile has it not block, and Fd undoes that each time
		if err != nil {
			return nil, noControl(err)
		}
		control.file = os.NewFile(uintptr(fd), controlPath)
	}
	return control.file, nil
}

func noControl(err error) error {
	return fmt.Errorf("%w: open %s: %w; load the kernel's module dm-mod", errdefs.ErrUnavailable, controlPath, err)
}

// call runs one command; data goes after the header and comes back as the answer's.
func call(command uint, prepare func(h *header), data []byte) (header, []byte, error) {
	control, err := shared()
	if err != nil {
		return header{}, nil, err
	}
	const head = int(unsafe.Sizeof(header{}))
	for room := 16 << 10; ; room *= 4 {
		buffer := make([]byte, head+max(room, len(data)))
		h := (*header)(unsafe.Pointer(&buffer[0]))
		h.version, h.dataSize, h.dataStart = [3]uint32{4, 0, 0}, uint32(len(buffer)), uint32(head)
		prepare(h)
		copy(buffer[head:], data)
		ask := func() error { return ioctl.Pointer(control, 0xC138FD00|command, unsafe.Pointer(&buffer[0])) }
		if command == devSuspend {
			// A suspension that a signal cuts short is undone, and what a target had given back until then ends with errors (dm_handle_requeue in drivers/md/dm.c).
			err = ioctl.Uninterrupted(ask)
		} else {
			err = ask()
		}
		if err != nil {
			return header{}, nil, err
		}
		if h.flags&flagBufferFull == 0 || room > 64<<20 {
			return *h, buffer[min(int(h.dataStart), len(buffer)):min(max(int(h.dataSize), int(h.dataStart)), len(buffer))], nil
		}
	}
}

func named(name string) func(h *header) {
	return func(h *header) { copy(h.name[:len(h.name)-1], name) }
}

// Find returns a device by its name; nil if there is none.
func Find(name string) (*Device, error) {
	h, _, err := call(devStatus, named(name), nil)
	if errors.Is(err, unix.ENXIO) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("status of device %s: %w", name, errdefs.FromErrno(err))
	}
	number := ioctl.DeviceNumber(h.dev)
	return &Device{Name: name, UUID: cString(h.uuid[:]), minor: unix.Minor(number), Number: number, Opens: int(h.openCount), Targets: int(h.targetCount),
		ReadOnly: h.flags&flagReadOnly != 0, Suspended: h.flags&flagSuspended != 0, Live: h.flags&flagActive != 0, Loaded: h.flags&flagInactive != 0, Deferred: h.flags&flagDeferredRemove != 0, Event: h.eventNr}, nil
}

func cString(b []byte) string {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}

// FindUsed is Find, but for a device that nobody uses any more, which the kernel removes a moment after its last user is
// gone: that moment is waited for.
func FindUsed(name string) (*Device, error) {
	for try := 0; ; try++ {
		d, err := Find(name)
		if err != nil || d == nil || !d.Deferred || d.Opens > 0 || try == held.Tries {
			return d, err
		}
		time.Sleep(time.Millisecond)
	}
}

// RemoveNow is Remove, and waits for a moment for those who only look at the device.
func RemoveNow(ctx context.Context, name string) (inUse bool, err error) {
	inUse, err = Remove(name)
	for try := 0; err == nil && inUse && try < held.Tries && ctx.Err() == nil; try++ {
		time.Sleep(held.Pause)
		var now *Device
		now, err = Find(name)
		inUse = now != nil
	}
	return inUse, err
}

// Remove takes a device away: now, or, if somebody has it open (held), with its last user. One that is not there
// is no error.
func Remove(name string) (held bool, err error) {
	h, _, err := call(devRemove, func(h *header) {
		named(name)(h)
		h.flags = flagDeferredRemove
	}, nil)
	if errors.Is(err, unix.ENXIO) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("remove device %s: %w", name, errdefs.FromErrno(err))
	}
	return h.flags&flagDeferredRemove != 0, nil
}

// Suspend holds back all that is written to a device, once what is under way is written.
// It freezes no filesystem: the kernel knows how to only for some (not btrfs), and before
// 6.8 not for one that is frozen already.
func Suspend(name string) error {
	_, _, err := call(devSuspend, func(h *header) {
		named(name)(h)
		h.flags = flagSuspended | flagSkipLockFS
	}, nil)
	if err != nil {
		return fmt.Errorf("suspend device %s: %w", name, errdefs.FromErrno(err))
	}
	return nil
}

// Hold is Suspend, but for what the targets of the device hold back themselves, or could not write: that waits as well, for the table of the resume. Suspend has it fail. It waits before for what is under way in a mirror (answered).
func Hold(name string) error {
	answered(name)
	return HoldNow(name)
}

// HoldNow is Hold of a mirror that is to be held this very moment, as what it does next may be wrong.
func HoldNow(name string) error {
	_, _, err := call(devSuspend, func(h *header) {
		named(name)(h)
		h.flags = flagSuspended | flagSkipLockFS | flagNoFlush
	}, nil)
	if err != nil {
		return fmt.Errorf("hold device %s: %w", name, errdefs.FromErrno(err))
	}
	return nil
}

// Resume ends the suspension of a device, and brings a table that was loaded into
// effect. event is what udev is told (NoScan).
func Resume(name string, event uint32) error {
	_, _, err := call(devSuspend, func(h *header) {
		named(name)(h)
		h.flags, h.eventNr = flagSkipLockFS, event
	}, nil)
	if err != nil {
		return fmt.Errorf("resume device %s: %w", name, errdefs.FromErrno(err))
	}
	return nil
}

// Clear forgets a table that was loaded and not brought into effect.
func Clear(name string) error {
	if _, _, err := call(tableClear, named(name), nil); err != nil {
		return fmt.Errorf("clear the loaded table of device %s: %w", name, errdefs.FromErrno(err))
	}
	return nil
}

// Line is one of a table: a range of the device, in bytes, and the target that serves it.
type Line struct {
	Start, Length int64
	Kind          string
	Text          string // what the target is made with, or what it says of itself (Status)
}

const sector = 512 // what the kernel counts in, in bytes

// Linear is the table of a device that is another one, from its beginning up to a size in bytes. With a single target it
// passes down the ioctls that the kernel does not know itself: see Show.
func Linear(under uint64, size int64) []Line {
	return []Line{{Length: size, Kind: "linear", Text: Number(under) + " 0"}}
}

// Number is how a table names a device.
func Number(device uint64) string {
	return fmt.Sprintf("%d:%d", unix.Major(device), unix.Minor(device))
}

// Show makes a device of a name that shows another one, from its beginning up to a size in bytes, and passes no ioctls down.
// One that is there gets that table, also while it is in use; what it was made with otherwise (its UUID) stays.
func Show(name, uuid string, under uint64, size int64, readOnly bool) error {
	var flags uint32
	if readOnly {
		flags = flagReadOnly
	}
	return makeWith(name, uuid, flags, showTable(under, size))
}

// Guard is Show of a device that can be opened for writing, and fails all that is written to it: also what is discarded, or zeroed. (One that is
// read-only cannot be opened for writing, as the kernel's NVMe target does with all that it exports.) errdefs.ErrUnsupported without the target for that.
func Guard(name, uuid string, under uint64, size int64) error {
	if err := HasTarget(guards); err != nil {
		return fmt.Errorf("%w: %w; load the kernel's module dm-flakey", errdefs.ErrUnsupported, err)
	}
	table, err := guardTable(under, size)
	if err != nil {
		return err
	}
	return Make(name, uuid, table)
}

// guards is the target that fails writes. It is for tests, of filesystems mostly; nothing else of the kernel can be opened for writing and refuses it.
const guards = "flakey"

// Guarded reports whether a device is one of Guard.
func Guarded(name string) (bool, error) {
	kind, _, err := Target(name)
	return kind == guards, err
}

// guardTable is as showTable. It lets reads through and fails the rest, for all of each second: 0 seconds up, 1 down.
func guardTable(under uint64, size int64) ([]Line, error) {
	const tail = 4096 // what the second target shows, as in showTable
	split := (size - tail) / sector * sector
	if split <= 0 {
		return nil, fmt.Errorf("%w: a device of %d bytes cannot be kept from being written to; more than %d can", errdefs.ErrUnsupported, size, tail)
	}
	part := func(from, length int64) Line {
		return Line{Start: from, Length: length, Kind: guards, Text: fmt.Sprintf("%s %d 0 1 1 error_writes", Number(under), from/sector)}
	}
	return []Line{part(0, split), part(split, tail)}, nil
}

// Make makes a device with a table. One that is there gets that table, as with Show.
func Make(name, uuid string, table []Line) error { return makeWith(name, uuid, 0, table) }

func makeWith(name, uuid string, flags uint32, table []Line) error {
	made, err := create(name, uuid, flags)
	if err != nil {
		return err
	}
	if err = load(name, flags, table); err == nil {
		err = Resume(name, NoScan)
	}
	if err != nil && made {
		_, undone := Remove(name)
		err = errors.Join(err, undone)
	}
	return err
}

// create makes a device without a table; false if one of the name is there.
func create(name, uuid string, flags uint32) (made bool, err error) {
	_, _, err = call(devCreate, func(h *header) {
		named(name)(h)
		copy(h.uuid[:len(h.uuid)-1], uuid)
		h.flags = flags
	}, nil)
	if err != nil && !errors.Is(err, unix.EBUSY) { // EBUSY: it is there
		return false, fmt.Errorf("make device %s: %w", name, errdefs.FromErrno(err))
	}
	return err == nil, nil
}

// Note has the kernel remember a UUID by a name, in place of what it had there: a device without a table, which nobody can open. Remove forgets it.
func Note(name, uuid string) error {
	if _, err := Remove(name); err != nil {
		return err
	}
	made, err := create(name, uuid, 0)
	if err == nil && !made {
		err = fmt.Errorf("%w: a device %s is there, or another one of its UUID", errdefs.ErrExists, name)
	}
	return err
}

// Load gives a device a table for the next resume, in place of one that it may have for that.
func Load(name string, table []Line) error { return load(name, 0, table) }

func load(name string, flags uint32, table []Line) error {
	var targets []byte
	for _, l := range table {
		targets = append(targets, l.encode()...)
	}
	_, _, err := call(tableLoad, func(h *header) {
		named(name)(h)
		h.flags, h.targetCount = flags, uint32(len(table))
	}, targets)
	if err != nil {
		return fmt.Errorf("load the table of device %s: %w", name, errdefs.FromErrno(err))
	}
	return nil
}

// Replace brings a table into effect. What the targets of the one before it hold back, as a mirror does with what one of its legs did not take, is given
// to the new one; a suspension of any other kind has them fail it.
func Replace(name string, table []Line) error { return replace(name, flagNoFlush, table) }

// ReplaceFailing is Replace that has the targets fail what they hold back, also flushes, which a new one may have nothing to do for.
func ReplaceFailing(name string, table []Line) error { return replace(name, 0, table) }

func replace(name string, flags uint32, table []Line) error {
	answered(name)
	if err := Load(name, table); err != nil {
		return err
	}
	_, _, err := call(devSuspend, func(h *header) {
		named(name)(h)
		h.flags, h.eventNr = flagSkipLockFS|flags, NoScan
	}, nil)
	if err != nil {
		return errors.Join(fmt.Errorf("replace the table of device %s: %w", name, errdefs.FromErrno(err)), Clear(name))
	}
	return nil
}

// Rename gives a device another name. Its number, its UUID, and all that holds it stay. errdefs.ErrPrecondition if a device has that name.
func Rename(name, to string) error {
	_, _, err := call(devRename, func(h *header) {
		named(name)(h)
		h.eventNr = NoScan
	}, []byte(to+"\x00"))
	if errors.Is(err, unix.EBUSY) {
		err = fmt.Errorf("%w: a device of that name is there: %w", errdefs.ErrPrecondition, err)
	}
	if err != nil {
		return fmt.Errorf("rename device %s to %s: %w", name, to, errdefs.FromErrno(err))
	}
	return nil
}

// showTable is the table of a device that shows another one, and passes none of the ioctls down
// that the kernel does not know itself: it does so only for a table of one target that can
// (dm_prepare_ioctl in drivers/md/dm.c; persistent reservations, dm_call_pr). So there are two
// linear targets, side by side; for what is too small to be split, a single stripe, which cannot.
func showTable(under uint64, size int64) []Line {
	const tail = 4096 // what the second target shows
	split := (size - tail) / sector * sector
	if split <= 0 {
		return []Line{{Length: size, Kind: "striped", Text: fmt.Sprintf("1 %d %s 0", size/sector, Number(under))}}
	}
	return []Line{
		{Length: split, Kind: "linear", Text: Number(under) + " 0"},
		{Start: split, Length: tail, Kind: "linear", Text: fmt.Sprintf("%s %d", Number(under), split/sector)},
	}
}

// encode is the line as tableLoad takes it.
func (l Line) encode() []byte {
	spec := targetSpec{start: uint64(l.Start / sector), length: uint64(l.Length / sector)}
	copy(spec.kind[:], l.Kind)
	const size = int(unsafe.Sizeof(targetSpec{}))
	spec.next = uint32(size+len(l.Text)+8) &^ 7 // with the zero at the end of the text
	target := make([]byte, spec.next)
	copy(target, unsafe.Slice((*byte)(unsafe.Pointer(&spec)), size))
	copy(target[size:], l.Text)
	return target
}

// Below returns the numbers of the devices that the table in effect of a device uses.
func Below(name string) ([]uint64, error) {
	_, data, err := call(tableDeps, named(name), nil)
	if err != nil {
		return nil, fmt.Errorf("devices below device %s: %w", name, errdefs.FromErrno(err))
	}
	if len(data) < 8 {
		return nil, nil
	}
	var devices []uint64 // u32 count, 4 bytes of nothing, the numbers
	for count, at := *(*uint32)(unsafe.Pointer(&data[0])), 8; count > 0 && at+8 <= len(data); count, at = count-1, at+8 {
		devices = append(devices, ioctl.DeviceNumber(*(*uint64)(unsafe.Pointer(&data[at]))))
	}
	return devices, nil
}

// Target returns the first target of a device, and what it says of itself.
func Target(name string) (kind, status string, err error) { return first(Status(name)) }

// Table returns the first target of a device, and what it was made with. Of dm-crypt that may be the key: it is for no error and no log.
func Table(name string) (kind, arguments string, err error) { return first(lines(name, flagTable)) }

func first(table []Line, err error) (kind, text string, _ error) {
	if err != nil || len(table) == 0 {
		return "", "", err
	}
	return table[0].Kind, table[0].Text, nil
}

// Status returns the table in effect of a device, with what each target says of itself.
func Status(name string) ([]Line, error) { return lines(name, 0) }

// Lines returns the table in effect of a device, with what each target was made with: see Table.
func Lines(name string) ([]Line, error) { return lines(name, flagTable) }

// Next returns the table of a device that is loaded for the next resume, with what each target is made with: see Table.
func Next(name string) ([]Line, error) { return lines(name, flagTable|flagQueryInactive) }

func lines(name string, flags uint32) (table []Line, err error) {
	h, data, err := call(tableStatus, func(h *header) {
		named(name)(h)
		h.flags = flags
	}, nil)
	if err != nil {
		return nil, fmt.Errorf("status of the targets of device %s: %w", name, errdefs.FromErrno(err))
	}
	const size = int(unsafe.Sizeof(targetSpec{}))
	for at := 0; len(table) < int(h.targetCount) && at+size <= len(data); {
		spec := (*targetSpec)(unsafe.Pointer(&data[at]))
		table = append(table, Line{int64(spec.start) * sector, int64(spec.length) * sector, cString(spec.kind[:]), cString(data[at+size:])})
		at = max(int(spec.next), at+size) // from the first of them
	}
	return table, nil
}

// Await calls look until that says that it is done, or fails: at once, and each time that the Event of any device may have changed.
func Await(ctx context.Context, look func() (done bool, err error)) error {
	control, err := os.OpenFile(controlPath, os.O_RDWR, 0) // one of its own: what it was told of is known for each, and it is waited for with all else that this process waits for
	if err != nil {
		return noControl(err)
	}
	defer control.Close()
	waiter, err := control.SyscallConn()
	if err != nil {
		return fmt.Errorf("wait for events of devices: %w", err)
	}
	defer context.AfterFunc(ctx, func() { _ = control.SetReadDeadline(time.Unix(1, 0)) })() // one that is closed waits no more
	var failed error
	err = waiter.Read(func(fd uintptr) (done bool) {
		h := header{version: [3]uint32{4, 0, 0}, dataSize: uint32(unsafe.Sizeof(header{}))}
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, 0xC138FD00|armPoll, uintptr(unsafe.Pointer(&h))); errno != 0 {
			failed = fmt.Errorf("wait for events of devices: %w", errdefs.FromErrno(errno))
			return true
		}
		done, failed = look()
		return done || failed != nil
	})
	switch {
	case failed != nil || err == nil:
		return failed
	case ctx.Err() != nil:
		return ctx.Err()
	}
	return fmt.Errorf("wait for events of devices: %w", err)
}

// Message tells the first target of a device something.
func Message(name, message string) error {
	at := make([]byte, 8) // struct dm_target_msg: u64 sector, the message
	if _, _, err := call(targetMsg, named(name), append(at, message+"\x00"...)); err != nil {
		return fmt.Errorf("tell device %s %q: %w", name, message, errdefs.FromErrno(err))
	}
	return nil
}

// Names returns the names of all devices that begin with a prefix.
func Names(prefix string) ([]string, error) {
	_, data, err := call(listDevices, func(*header) {}, nil)
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", errdefs.FromErrno(err))
	}
	var names []string
	// Each: u64 number, u32 offset of the next (0: none), the name.
	for len(data) > 12 {
		next := *(*uint32)(unsafe.Pointer(&data[8]))
		if name := cString(data[12:]); strings.HasPrefix(name, prefix) {
			names = append(names, name)
		}
		if next == 0 || int(next) > len(data) {
			break
		}
		data = data[next:]
	}
	return names, nil
}

// Targets returns the targets that the kernel has loaded, with their
// versions; errdefs.ErrUnavailable without a device mapper.
func Targets() (map[string]string, error) {
	_, data, err := call(listVersions, func(*header) {}, nil)
	if err != nil {
		return nil, err
	}
	targets := map[string]string{}
	// Each: u32 offset of the next (0: none), three u32 of the version, the name.
	for len(data) > 16 {
		words := (*[4]uint32)(unsafe.Pointer(&data[0]))
		targets[cString(data[16:])] = fmt.Sprintf("%d.%d.%d", words[1], words[2], words[3])
		if words[0] == 0 || int(words[0]) > len(data) {
			break
		}
		data = data[words[0]:]
	}
	return targets, nil
}

// HasTarget returns an error unless the kernel has a target, of which it loads the module if it has to.
func HasTarget(name string) error {
	_, _, err := call(getVersion, named(name), nil)
	if errors.Is(err, unix.ENOTTY) { // an older kernel tells only what is loaded
		targets, failure := Targets()
		if _, loaded := targets[name]; loaded || failure != nil {
			return failure
		}
	}
	if err != nil {
		return fmt.Errorf("the kernel has no target %s of the device mapper: %w", name, err)
	}
	return nil
}

// Vanished reports whether an error means that a device went away, with its last user, before
// it was opened.
func Vanished(err error) bool {
	return errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENODEV) || errors.Is(err, os.ErrNotExist)
}

// Open opens a device, and makes its node where /dev is not kept by devtmpfs. A device that went away leaves its number to the next one that is
// made, which may be anybody's: so what was opened is looked at again, now that it stays, and is closed if it is not the one that was found.
func Open(d *Device, flags int) (*os.File, error) {
	f, err := os.OpenFile(d.Path(), flags, 0)
	if errors.Is(err, os.ErrNotExist) {
		if err := unix.Mknod(d.Path(), unix.S_IFBLK|0o660, int(d.Number)); err != nil && !errors.Is(err, unix.EEXIST) {
			return nil, fmt.Errorf("mknod %s: %w", d.Path(), errdefs.FromErrno(err))
		}
		f, err = os.OpenFile(d.Path(), flags, 0)
	}
	if err == nil {
		err = d.is(f)
	}
	if err != nil {
		_ = f.Close() // of no harm if it is nil
		return nil, errdefs.FromErrno(err)
	}
	return f, nil
}

// is returns an error that Vanished knows if a file is open on another device than d.
func (d Device) is(f *os.File) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return err
	}
	now, err := Find(d.Name)
	if err == nil && (now == nil || now.UUID != d.UUID || now.Number != st.Rdev) {
		err = fmt.Errorf("device %s went away, and %s is another one now: %w", d.Name, d.Path(), unix.ENXIO)
	}
	return err
}
