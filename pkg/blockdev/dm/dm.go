// Package dm drives the device mapper by ioctl, as in include/uapi/linux/dm-ioctl.h, version 4. It makes devices (Make), among them devices that show
// another one (Show). It reads, suspends, renames and removes devices, whoever made them. Remove works also while a device is open: the kernel then
// removes it with its last user (DM_DEFERRED_REMOVE, Linux 3.13). So a driver that is killed leaves no device behind that was to go.
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
	flagTable          = 1 << 4 // tableStatus returns the arguments of the targets, not their status
	flagActive         = 1 << 5 // a table is in effect
	flagInactive       = 1 << 6 // a table is loaded for the next resume
	flagBufferFull     = 1 << 8
	flagSkipLockFS     = 1 << 10 // freeze no filesystem
	flagNoFlush        = 1 << 11 // what a target holds back goes to the next table, in place of failing
	flagQueryInactive  = 1 << 12 // of the table that is loaded for the next resume
	flagDeferredRemove = 1 << 17
)

// NoScan tells udev's rules to leave a device alone (libdevmapper.h, DM_UDEV_*): what belongs to a tenant is not searched for a filesystem, a volume group
// or anything else.
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

// Device is what the kernel said of a device when it was looked up (Find).
type Device struct {
	Name      string
	UUID      string
	minor     uint32
	Opens     int
	Targets   int // of the table in effect
	ReadOnly  bool
	Suspended bool
	Live      bool // a table is in effect; without one nobody can open it: see Note, or a crash came before its table
	Loaded    bool // a table is loaded for the next resume
	Deferred  bool // it is removed with its last user
	Number    uint64
	Event     uint32 // the kernel's count of events of its targets; it only grows
}

// Range is a part of a device, in bytes.
type Range struct{ Offset, Length int64 }

// Path returns /dev/dm-N.
func (d Device) Path() string { return fmt.Sprint("/dev/dm-", d.minor) }

// Size returns the size of the device in bytes, without opening it. (sysfs counts in sectors of 512 bytes.)
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

// control has the open control device, which all commands but Await share. It is opened by the first command (shared), and stays open.
var control struct {
	mu   sync.Mutex
	file *os.File
}

func shared() (*os.File, error) {
	control.mu.Lock()
	defer control.mu.Unlock()
	if control.file == nil {
		fd, err := unix.Open(controlPath, unix.O_RDWR|unix.O_CLOEXEC, 0) // os.OpenFile makes it non-blocking, and Fd would undo that each time
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

// call runs one command and returns the header and the data of the answer. data follows the header of the request. If the answer does not fit, the command
// is repeated with more room, up to 64 MiB. ErrUnavailable without a device mapper; all other errors are the kernel's, as they are.
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
			// A suspension that a signal interrupts is undone, and what a target had given back until then fails (dm_handle_requeue in drivers/md/dm.c).
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

// named sets the name in a request. A name that the kernel does not take is that of no device; without one it refuses to make a device.
func named(name string) func(h *header) {
	return func(h *header) {
		if len(name) < NameSize {
			copy(h.name[:], name)
		}
	}
}

// numbered sets the number of a device in a request, in place of its name.
func numbered(device uint64) func(h *header) {
	return func(h *header) { h.dev = ioctl.EncodedNumber(device) }
}

// Find returns a device by its name; nil if there is none.
func Find(name string) (*Device, error) {
	d, err := find(named(name))
	if err != nil {
		return nil, fmt.Errorf("status of device %s: %w", name, errdefs.FromErrno(err))
	}
	return d, nil
}

func find(device func(h *header)) (*Device, error) {
	h, _, err := call(devStatus, device, nil)
	if errors.Is(err, unix.ENXIO) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	number := ioctl.DeviceNumber(h.dev)
	return &Device{Name: cString(h.name[:]), UUID: cString(h.uuid[:]), minor: unix.Minor(number), Number: number, Opens: int(h.openCount), Targets: int(h.targetCount),
		ReadOnly: h.flags&flagReadOnly != 0, Suspended: h.flags&flagSuspended != 0, Live: h.flags&flagActive != 0, Loaded: h.flags&flagInactive != 0, Deferred: h.flags&flagDeferredRemove != 0, Event: h.eventNr}, nil
}

func cString(b []byte) string {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}

// FindUsed is Find, but if the last user of a device has just gone, so that the kernel is about to remove it (Deferred), it waits a moment for that.
func FindUsed(name string) (*Device, error) {
	for try := 0; ; try++ {
		d, err := Find(name)
		if err != nil || d == nil || !d.Deferred || d.Opens > 0 || try == held.Tries {
			return d, err
		}
		time.Sleep(time.Millisecond)
	}
}

// RemoveNow removes a device as Remove does, and waits a moment for those who only look at it. inUse: somebody has it open still, or ctx has ended; it is
// removed with its last user.
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

// Remove removes a device now, or with its last user if somebody has it open (held). No error if there is no such device.
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

// Suspend waits until all I/O that is under way to a device has ended, and holds back all later I/O until Resume. It freezes no filesystem: the kernel can
// do that only for some (not btrfs), and before 6.8 not for one that is frozen already.
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

// Hold suspends a device as Suspend does, but what its targets hold back themselves, or could not write, waits too, for the table of the resume. (Suspend
// has it fail.) Before it suspends a mirror, it waits for what is under way (answered, gated).
func Hold(name string) error {
	answered(name)
	return gated(name, func() error { return HoldNow(name) })
}

// HoldNow is Hold without that wait: for a mirror that has to be held at once, as what it acknowledges next may be wrong.
func HoldNow(name string) error {
	if err := hold(named(name)); err != nil {
		return fmt.Errorf("hold device %s: %w", name, errdefs.FromErrno(err))
	}
	return nil
}

func hold(device func(h *header)) error {
	_, _, err := call(devSuspend, func(h *header) {
		device(h)
		h.flags = flagSuspended | flagSkipLockFS | flagNoFlush
	}, nil)
	return err
}

// Resume ends the suspension of a device, and brings a table that is loaded into effect. event is what udev is told (NoScan).
func Resume(name string, event uint32) error {
	if err := resume(named(name), event); err != nil {
		return fmt.Errorf("resume device %s: %w", name, errdefs.FromErrno(err))
	}
	return nil
}

func resume(device func(h *header), event uint32) error {
	_, _, err := call(devSuspend, func(h *header) {
		device(h)
		h.flags, h.eventNr = flagSkipLockFS, event
	}, nil)
	return err
}

// Clear drops a table that is loaded and not in effect.
func Clear(name string) error {
	if _, _, err := call(tableClear, named(name), nil); err != nil {
		return fmt.Errorf("clear the loaded table of device %s: %w", name, errdefs.FromErrno(err))
	}
	return nil
}

// Line is one line of a table: a range of the device, in bytes, and the target that serves it.
type Line struct {
	Start, Length int64
	Kind          string
	Text          string // the target's arguments, or its status (Status)
}

const sector = 512 // the kernel's unit, in bytes

// Linear returns the table of a device that shows the first size bytes of another one. As it has a single target, the device passes down the ioctls that
// the kernel does not know itself; one of Show does not.
func Linear(under uint64, size int64) []Line {
	return []Line{{Length: size, Kind: "linear", Text: Number(under) + " 0"}}
}

// Number returns MAJOR:MINOR, as tables name a device.
func Number(device uint64) string {
	return fmt.Sprintf("%d:%d", unix.Major(device), unix.Minor(device))
}

// Sysfs returns the directory of a block device in sysfs: sysfs-block of Documentation/ABI.
func Sysfs(device uint64) string { return "/sys/dev/block/" + Number(device) }

// SectorSize returns the logical sector of a block device of any kind, in bytes.
func SectorSize(device uint64) (int, error) {
	text, err := os.ReadFile(Sysfs(device) + "/queue/logical_block_size")
	if err != nil {
		return 0, fmt.Errorf("logical sector of %s: %w", Number(device), errdefs.FromErrno(err))
	}
	return strconv.Atoi(strings.TrimSpace(string(text)))
}

// Show makes a device that shows the first size bytes of another one, and passes no ioctls down. If a device of that name is there, it gets that table,
// also while it is in use; its UUID stays as it is.
func Show(name, uuid string, under uint64, size int64, readOnly bool) error {
	var flags uint32
	if readOnly {
		flags = flagReadOnly
	}
	return makeWith(name, uuid, flags, showTable(under, size))
}

// Guard is Show of a device that can be opened for writing but fails each write, discard and request for zeros. (The kernel's NVMe target opens all that
// it exports for writing, which a device that is read-only refuses.) errdefs.ErrUnsupported if the kernel has no target for that, or the device is too
// small.
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

// guards is the target that fails writes. It is made for tests, mostly of filesystems; but no other target of the kernel can be opened for writing and
// fails writes.
const guards = "flakey"

// Guarded reports whether Guard made a device what it is: its first target is the one that fails writes.
func Guarded(name string) (bool, error) {
	kind, _, err := Target(name)
	return kind == guards, err
}

// guardTable returns the table of Guard: showTable's, with targets that pass reads and fail all else. Of each second they are up for 0 s and down for 1 s.
// errdefs.ErrUnsupported if the device is too small for two targets.
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

// Make makes a device with a table in effect. If a device of that name is there, it gets that table, as with Show. After an error, a device that was made
// is removed again.
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

// create makes a device without a table. made is false if there is one of that name or that UUID.
func create(name, uuid string, flags uint32) (made bool, err error) {
	if len(name) >= NameSize {
		return false, fmt.Errorf("%w: make device %s: its name has %d bytes, and the kernel takes %d", errdefs.ErrUnsupported, name, len(name), NameSize-1)
	}
	_, _, err = call(devCreate, func(h *header) {
		named(name)(h)
		copy(h.uuid[:len(h.uuid)-1], uuid)
		h.flags = flags
	}, nil)
	if err != nil && !errors.Is(err, unix.EBUSY) { // EBUSY: one is there
		return false, fmt.Errorf("make device %s: %w", name, errdefs.FromErrno(err))
	}
	return err == nil, nil
}

// Note has the kernel keep a UUID under a name until Remove: as a device without a table, which nobody can open. It replaces what the name had before.
// errdefs.ErrExists if another device has that UUID.
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

// Load loads a table for the next resume of a device, in place of one that is loaded already.
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

// Replace brings a table into effect. What the old table's targets hold back goes to the new one: a mirror holds back what one of its legs did not take.
// (Any other suspension has that fail.) Of a mirror it waits first for what is under way (answered, gated).
func Replace(name string, table []Line) error { return replace(name, flagNoFlush, table) }

// ReplaceFailing is Replace, but what the old table's targets hold back fails. That includes flushes: a new table may have no device to flush, and would
// acknowledge them at once.
func ReplaceFailing(name string, table []Line) error { return replace(name, 0, table) }

func replace(name string, flags uint32, table []Line) error {
	answered(name)
	if err := Load(name, table); err != nil {
		return err
	}
	err := gated(name, func() error {
		_, _, err := call(devSuspend, func(h *header) {
			named(name)(h)
			h.flags, h.eventNr = flagSkipLockFS|flags, NoScan
		}, nil)
		return err
	})
	if err != nil {
		return errors.Join(fmt.Errorf("replace the table of device %s: %w", name, errdefs.FromErrno(err)), Clear(name))
	}
	return nil
}

// Rename gives a device another name. Its number, its UUID and its users stay. errdefs.ErrPrecondition if a device has the new name already.
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

// showTable returns the table of a device that shows another one and passes no ioctls down that the kernel does not know itself. The kernel passes them
// down only through a table with one single target, of a kind that can (dm_prepare_ioctl in drivers/md/dm.c; persistent reservations, dm_call_pr). So
// there are two linear targets, side by side. A device that is too small to be split has one target striped, which cannot.
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

// encode returns the line as tableLoad takes it.
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

// Target returns the first target of a device, and its status.
func Target(name string) (kind, status string, err error) { return first(Status(name)) }

// Table returns the first target of a device, and its arguments. Those of dm-crypt may have the key: they must be in no error and no log.
func Table(name string) (kind, arguments string, err error) { return first(lines(name, flagTable)) }

func first(table []Line, err error) (kind, text string, _ error) {
	if err != nil || len(table) == 0 {
		return "", "", err
	}
	return table[0].Kind, table[0].Text, nil
}

// Status returns the table in effect of a device, with the status of each target.
func Status(name string) ([]Line, error) { return lines(name, 0) }

// Lines returns the table in effect of a device, with the arguments of each target: see Table.
func Lines(name string) ([]Line, error) { return lines(name, flagTable) }

// Next returns the table that is loaded for the next resume of a device, with the arguments of each target: see Table.
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
		at = max(int(spec.next), at+size) // an offset from the first target
	}
	return table, nil
}

// Await calls look at once, and again each time that the Event of any device may have changed, until look is done or fails. It returns the error of look,
// or that of ctx once that has ended.
func Await(ctx context.Context, look func() (done bool, err error)) error {
	// A descriptor of its own: the kernel remembers for each which events it was told of. Go's poller waits for it, so it takes no thread.
	control, err := os.OpenFile(controlPath, os.O_RDWR, 0)
	if err != nil {
		return noControl(err)
	}
	defer control.Close()
	waiter, err := control.SyscallConn()
	if err != nil {
		return fmt.Errorf("wait for events of devices: %w", err)
	}
	defer context.AfterFunc(ctx, func() { _ = control.SetReadDeadline(time.Unix(1, 0)) })() // an error says that it is closed, and nobody waits
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

// Message sends a message to the first target of a device.
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

// HasTarget returns an error unless the kernel has a target. The kernel loads its module if it has to; before Linux 5.4 only a target that is loaded
// counts.
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

// Vanished reports whether an error means that a device went away, with its last user, before it was opened.
func Vanished(err error) bool {
	return errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENODEV) || errors.Is(err, os.ErrNotExist)
}

// Open opens a device, and makes its node where no devtmpfs keeps /dev. The number of a device that went away goes to the next one that is made, which may
// be anybody's. So Open checks what it has opened: if that is not d, it closes it and returns an error that Vanished knows.
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

// is returns an error that Vanished knows if f is open on another device than d.
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
