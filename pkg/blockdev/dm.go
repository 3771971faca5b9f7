package blockdev

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/ioctl"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// The device mapper by ioctl, as in include/uapi/linux/dm-ioctl.h, version 4. lvm2 makes
// and grows devices; here they are looked at, and taken away: the kernel does that by
// itself when nobody has a device open any more (DM_DEFERRED_REMOVE, Linux 3.13), so
// nothing stays behind a driver that dies.

const dmControlPath = "/dev/mapper/control"

// Commands.
const (
	dmListDevices  = 0x02
	dmDevCreate    = 0x03
	dmDevRemove    = 0x04
	dmDevSuspend   = 0x06 // without the flag: resume
	dmDevStatus    = 0x07
	dmTableLoad    = 0x09
	dmTableClear   = 0x0a
	dmTableDeps    = 0x0b
	dmTableStatus  = 0x0c
	dmListVersions = 0x0d
	dmTargetMsg    = 0x0e
)

// Flags.
const (
	dmReadOnly       = 1 << 0
	dmSuspended      = 1 << 1
	dmActive         = 1 << 5 // there is a table in effect
	dmInactive       = 1 << 6 // there is a table for the next resume
	dmBufferFull     = 1 << 8
	dmSkipLockFS     = 1 << 10 // no filesystem is frozen
	dmDeferredRemove = 1 << 17
)

// dmNoScan tells udev's rules to leave a device alone (libdevmapper.h, DM_UDEV_*): to
// look for no filesystem, no volume group and nothing else on what belongs to a tenant.
const dmNoScan = (0x2 | 0x4 | 0x8) << 16

// dmNameSize is the size of the name of a device, with the zero at its end (DM_NAME_LEN).
const dmNameSize = 128

type dmHeader struct {
	version     [3]uint32
	dataSize    uint32
	dataStart   uint32
	targetCount uint32
	openCount   int32
	flags       uint32
	eventNr     uint32
	_           uint32
	dev         uint64
	name        [dmNameSize]byte
	uuid        [129]byte
	_           [7]byte
}

type dmTargetSpec struct {
	start, length uint64
	status        int32
	next          uint32
	kind          [16]byte
}

// dmDevice is what the kernel says of a device.
type dmDevice struct {
	name      string
	uuid      string
	minor     uint32
	opens     int
	targets   int // of the table in effect
	readOnly  bool
	suspended bool
	live      bool // it has a table; without, whoever made it was cut short, and nobody can open it
	loaded    bool // it has a table for the next resume
	deferred  bool // it goes away with its last user
	number    uint64
}

func (d dmDevice) path() string { return fmt.Sprint("/dev/dm-", d.minor) }

// dmCall runs one command; data goes after the header and comes back as the answer's.
func dmCall(command uint, prepare func(h *dmHeader), data []byte) (dmHeader, []byte, error) {
	control, err := os.OpenFile(dmControlPath, os.O_RDWR, 0)
	if err != nil {
		return dmHeader{}, nil, fmt.Errorf("%w: %w; load the kernel's module dm-mod", errdefs.ErrUnavailable, err)
	}
	defer control.Close()
	const head = int(unsafe.Sizeof(dmHeader{}))
	for room := 16 << 10; ; room *= 4 {
		buffer := make([]byte, head+max(room, len(data)))
		h := (*dmHeader)(unsafe.Pointer(&buffer[0]))
		h.version, h.dataSize, h.dataStart = [3]uint32{4, 0, 0}, uint32(len(buffer)), uint32(head)
		prepare(h)
		copy(buffer[head:], data)
		if err := ioctl.Pointer(control, 0xC138FD00|command, unsafe.Pointer(&buffer[0])); err != nil {
			return dmHeader{}, nil, err
		}
		if h.flags&dmBufferFull == 0 || room > 64<<20 {
			return *h, buffer[min(int(h.dataStart), len(buffer)):min(max(int(h.dataSize), int(h.dataStart)), len(buffer))], nil
		}
	}
}

func dmNamed(name string) func(h *dmHeader) {
	return func(h *dmHeader) { copy(h.name[:len(h.name)-1], name) }
}

// dmFind returns a device by its name; nil if there is none.
func dmFind(name string) (*dmDevice, error) {
	h, _, err := dmCall(dmDevStatus, dmNamed(name), nil)
	if errors.Is(err, unix.ENXIO) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("status of device %s: %w", name, errdefs.FromErrno(err))
	}
	number := decodeDevice(h.dev)
	return &dmDevice{name: name, uuid: cString(h.uuid[:]), minor: unix.Minor(number), number: number, opens: int(h.openCount), targets: int(h.targetCount),
		readOnly: h.flags&dmReadOnly != 0, suspended: h.flags&dmSuspended != 0, live: h.flags&dmActive != 0, loaded: h.flags&dmInactive != 0, deferred: h.flags&dmDeferredRemove != 0}, nil
}

func cString(b []byte) string {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}

// dmRemove takes a device away: now, or with its last user (held). One that is not there
// is no error.
func dmRemove(name string) (held bool, err error) {
	h, _, err := dmCall(dmDevRemove, func(h *dmHeader) {
		dmNamed(name)(h)
		h.flags = dmDeferredRemove
	}, nil)
	if errors.Is(err, unix.ENXIO) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("remove device %s: %w", name, errdefs.FromErrno(err))
	}
	return h.flags&dmDeferredRemove != 0, nil
}

// dmSuspend holds back all that is written to a device, once what is under way is written.
// It freezes no filesystem: the kernel knows how to only for some (not btrfs), and before
// 6.8 not for one that is frozen already.
func dmSuspend(name string) error {
	_, _, err := dmCall(dmDevSuspend, func(h *dmHeader) {
		dmNamed(name)(h)
		h.flags = dmSuspended | dmSkipLockFS
	}, nil)
	if err != nil {
		return fmt.Errorf("suspend device %s: %w", name, errdefs.FromErrno(err))
	}
	return nil
}

// dmResume ends the suspension of a device, and brings a table that was loaded into
// effect. event is what udev is told (dmNoScan).
func dmResume(name string, event uint32) error {
	_, _, err := dmCall(dmDevSuspend, func(h *dmHeader) {
		dmNamed(name)(h)
		h.flags, h.eventNr = dmSkipLockFS, event
	}, nil)
	if err != nil {
		return fmt.Errorf("resume device %s: %w", name, errdefs.FromErrno(err))
	}
	return nil
}

// dmClear forgets a table that was loaded and not brought into effect.
func dmClear(name string) error {
	if _, _, err := dmCall(dmTableClear, dmNamed(name), nil); err != nil {
		return fmt.Errorf("clear the loaded table of device %s: %w", name, errdefs.FromErrno(err))
	}
	return nil
}

// dmLinear makes a device that shows another one, or brings it to its size (bytes).
func dmLinear(name, uuid string, under uint64, size int64, readOnly bool) error {
	var flags uint32
	if readOnly {
		flags = dmReadOnly
	}
	_, _, err := dmCall(dmDevCreate, func(h *dmHeader) {
		dmNamed(name)(h)
		copy(h.uuid[:len(h.uuid)-1], uuid)
		h.flags = flags
	}, nil)
	made := err == nil
	if err != nil && !errors.Is(err, unix.EBUSY) { // EBUSY: it is there
		return fmt.Errorf("make device %s: %w", name, errdefs.FromErrno(err))
	}
	targets, table := dmShow(under, size)
	_, _, err = dmCall(dmTableLoad, func(h *dmHeader) {
		dmNamed(name)(h)
		h.flags, h.targetCount = flags, targets
	}, table)
	if err == nil {
		err = dmResume(name, dmNoScan)
	}
	if err != nil && made {
		_, undone := dmRemove(name)
		err = errors.Join(err, undone)
	}
	if err != nil {
		return fmt.Errorf("load the table of device %s: %w", name, errdefs.FromErrno(err))
	}
	return nil
}

// dmShow is the table of a device that shows another one, and passes none of the ioctls down
// that the kernel does not know itself: it does so only for a table of one target that can
// (dm_prepare_ioctl in drivers/md/dm.c; persistent reservations, dm_call_pr). So there are two
// linear targets, side by side; for what is too small to be split, a single stripe, which cannot.
func dmShow(under uint64, size int64) (targets uint32, table []byte) {
	const sector = 512
	device := fmt.Sprintf("%d:%d", unix.Major(under), unix.Minor(under))
	split := (size - Granularity) / sector
	if split <= 0 {
		return 1, dmTargetOf(0, size/sector, "striped", fmt.Sprintf("1 %d %s 0", size/sector, device))
	}
	return 2, append(dmTargetOf(0, split, "linear", device+" 0"),
		dmTargetOf(split, Granularity/sector, "linear", fmt.Sprintf("%s %d", device, split))...)
}

// dmTargetOf is one target of a table, as dmTableLoad takes it; start and length in sectors of 512 bytes.
func dmTargetOf(start, length int64, kind, arguments string) []byte {
	spec := dmTargetSpec{start: uint64(start), length: uint64(length)}
	copy(spec.kind[:], kind)
	const size = int(unsafe.Sizeof(dmTargetSpec{}))
	spec.next = uint32(size+len(arguments)+8) &^ 7 // with the zero at the end of the arguments
	target := make([]byte, spec.next)
	copy(target, unsafe.Slice((*byte)(unsafe.Pointer(&spec)), size))
	copy(target[size:], arguments)
	return target
}

// dmBelow returns the numbers of the devices that the table in effect of a device uses.
func dmBelow(name string) ([]uint64, error) {
	_, data, err := dmCall(dmTableDeps, dmNamed(name), nil)
	if err != nil {
		return nil, fmt.Errorf("devices below device %s: %w", name, errdefs.FromErrno(err))
	}
	if len(data) < 8 {
		return nil, nil
	}
	var devices []uint64 // u32 count, 4 bytes of nothing, the numbers
	for count, at := *(*uint32)(unsafe.Pointer(&data[0])), 8; count > 0 && at+8 <= len(data); count, at = count-1, at+8 {
		devices = append(devices, decodeDevice(*(*uint64)(unsafe.Pointer(&data[at]))))
	}
	return devices, nil
}

// dmTarget returns the first target of a device, and what it says of itself.
func dmTarget(name string) (kind, status string, err error) {
	h, data, err := dmCall(dmTableStatus, dmNamed(name), nil)
	if err != nil {
		return "", "", fmt.Errorf("status of the target of device %s: %w", name, err)
	}
	const size = int(unsafe.Sizeof(dmTargetSpec{}))
	if h.targetCount == 0 || len(data) < size {
		return "", "", nil
	}
	spec := (*dmTargetSpec)(unsafe.Pointer(&data[0]))
	return cString(spec.kind[:]), cString(data[size:]), nil
}

// dmMessage tells the first target of a device something.
func dmMessage(name, message string) error {
	at := make([]byte, 8) // struct dm_target_msg: u64 sector, the message
	if _, _, err := dmCall(dmTargetMsg, dmNamed(name), append(at, message+"\x00"...)); err != nil {
		return fmt.Errorf("tell device %s %q: %w", name, message, errdefs.FromErrno(err))
	}
	return nil
}

// dmNames returns the names of all devices that begin with a prefix.
func dmNames(prefix string) ([]string, error) {
	_, data, err := dmCall(dmListDevices, func(*dmHeader) {}, nil)
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

// DeviceMapperTargets returns the targets that the kernel has loaded, with their
// versions; errdefs.ErrUnavailable without a device mapper.
func DeviceMapperTargets() (map[string]string, error) {
	_, data, err := dmCall(dmListVersions, func(*dmHeader) {}, nil)
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

// vanished reports whether an error means that a device went away, with its last user, before
// it was opened.
func vanished(err error) bool {
	return errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENODEV) || errors.Is(err, os.ErrNotExist)
}

// openDM opens a device, and makes its node where /dev is not kept by devtmpfs.
func openDM(d *dmDevice, flags int) (*os.File, error) {
	f, err := os.OpenFile(d.path(), flags, 0)
	if errors.Is(err, os.ErrNotExist) {
		if err := unix.Mknod(d.path(), unix.S_IFBLK|0o660, int(d.number)); err != nil && !errors.Is(err, unix.EEXIST) {
			return nil, fmt.Errorf("mknod %s: %w", d.path(), errdefs.FromErrno(err))
		}
		f, err = os.OpenFile(d.path(), flags, 0)
	}
	return f, errdefs.FromErrno(err)
}
