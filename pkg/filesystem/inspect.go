package filesystem

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/mount"
)

// Whoever had a volume as a raw device wrote its superblock. So before a tool or the kernel
// follows what that says, it is looked at: a filesystem that has parts on other devices (another
// volume's, maybe another tenant's) is not opened, and neither is one that is larger than its device.

// Inspect returns ErrPrecondition for a filesystem of the type that has parts on another device,
// and ErrDataLoss for one that does not fit its device. It writes nothing.
func Inspect(t Type, device string) error {
	if err := inspectSuper(t, device); err != nil {
		return fmt.Errorf("%w; nothing was mounted", err)
	}
	if t == Btrfs {
		return onlyDevice(device)
	}
	return nil
}

// inspectSuper is Inspect as far as the superblock tells, of a device or a file.
func inspectSuper(t Type, path string) error {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("inspect %s: %w", path, err)
	}
	defer f.Close()
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return fmt.Errorf("inspect %s: %w", path, err)
	}
	where := map[Type][2]int64{Ext4: {ext4SuperSize, ext4SuperSize}, XFS: {0, 512}, Btrfs: {0x10000, 4096}}[t]
	super := make([]byte, where[1])
	if _, err := f.ReadAt(super, where[0]); err != nil {
		return fmt.Errorf("inspect %s: read the superblock: %w", path, err)
	}
	have, other := map[Type]func([]byte) (int64, string){Ext4: inspectExt4, XFS: inspectXFS, Btrfs: inspectBtrfs}[t](super)
	if have > size {
		return fmt.Errorf("%w: the %s of %s says that it has %d bytes, and the device has %d: restore it from a snapshot or a backup", errdefs.ErrDataLoss, t, path, have, size)
	}
	if other != "" {
		return fmt.Errorf("%w: the %s of %s has %s; a volume is one device", errdefs.ErrPrecondition, t, path, other)
	}
	return nil
}

// inspectExt4 returns the size of an ext4 by its superblock, and what it has on other devices.
func inspectExt4(super []byte) (size int64, other string) {
	s := ext4Super(super)
	if !s.torn() { // what was cut short may say any size, and Check puts it right
		size = s.size()
	}
	return size, s.other()
}

// other says what an ext4 has on other devices, or for other nodes; empty if nothing. Its own mount options
// (s_mount_opts) may name a journal too. Multi-mount protection has whoever mounts it wait for as long as it says, up to 18 hours,
// where nothing ends the wait.
func (s ext4Super) other() string {
	options, _, _ := bytes.Cut(s[ext4MountOptions:ext4MountOptions+64], []byte{0})
	own := mount.CheckOptions(strings.ReplaceAll(string(options), `"`, ""))
	journal := s.long(ext4Compat)&ext4HasJournal != 0
	switch {
	case s.long(ext4JournalDevice) != 0, journal && s.long(ext4JournalInode) == 0, s.long(ext4Incompat)&ext4IsJournal != 0:
		return "its journal on another device"
	case s.long(ext4Incompat)&ext4MultiMount != 0:
		return "multi-mount protection (tune2fs -O ^mmp takes it away)"
	case own != nil:
		return "mount options of its own that are not allowed: " + strings.ToValidUTF8(string(options), "?")
	}
	return ""
}

// inspectXFS returns the size of an XFS by its superblock (struct xfs_dsb of xfs_format.h), and
// what it has on other devices.
func inspectXFS(super []byte) (size int64, other string) {
	long := func(at int) uint64 { return binary.BigEndian.Uint64(super[at:]) }
	blockSize, blocks, realtime, log := uint64(binary.BigEndian.Uint32(super[4:])), long(8), long(16), long(48)
	switch {
	case log == 0:
		other = "its log on another device"
	case realtime != 0:
		other = "a realtime part on another device"
	}
	return product(blocks, blockSize), other
}

// inspectBtrfs returns the size of a btrfs on its device by its superblock (struct
// btrfs_super_block of linux/btrfs_tree.h), and what it has on other devices.
func inspectBtrfs(super []byte) (size int64, other string) {
	long := func(at int) uint64 { return binary.LittleEndian.Uint64(super[at:]) }
	const flags, devices, deviceSize, seeding = 56, 136, 201 + 8, 1 << 32
	switch {
	case long(devices) != 1:
		other = fmt.Sprintf("%d devices", long(devices))
	case long(flags)&seeding != 0:
		other = "others that grow from it (it is a seed)"
	}
	return int64(min(long(deviceSize), 1<<63-1)), other
}

// onlyDevice makes sure that a btrfs has no other device than this one, whatever its superblock says: what
// counts is in its trees, which the kernel reads. It is opened for that without writing anything.
func onlyDevice(device string) error {
	return mount.WithRoot(device, string(Btrfs), []string{"rescue=nologreplay"}, func(root *os.File) error {
		info, err := mount.Btrfs(root)
		if err == nil && info.Devices != 1 {
			err = fmt.Errorf("%w: the btrfs of %s has %d devices; a volume is one device, and nothing was mounted", errdefs.ErrPrecondition, device, info.Devices)
		}
		return err
	})
}

// product is that of two numbers, or the largest there is.
func product(a, b uint64) int64 {
	if b != 0 && a > (1<<63-1)/b {
		return 1<<63 - 1
	}
	return int64(a * b)
}

// OnlyOn makes sure that the filesystem mounted at a path is that of a device: ErrPrecondition if it
// is another's, which says that it is the same.
func OnlyOn(device uint64, path string) error {
	info, err := mount.At(path)
	if err != nil {
		return fmt.Errorf("look at what was mounted: %w", err)
	}
	if info.Device != device {
		return fmt.Errorf("%w: the kernel mounted the filesystem of another device (%d:%d), which says that it is the same", errdefs.ErrPrecondition, unix.Major(info.Device), unix.Minor(info.Device))
	}
	return nil
}

// unusedTries is how often a device may be found in use before it is taken for that: the mounts
// of a container that has just ended go a moment later.
const (
	unusedTries = 20
	unusedPause = 50 * time.Millisecond
)

// Unused makes sure that nothing has a device mounted, in whatever mount namespace: ErrInUse.
func Unused(ctx context.Context, device string) error {
	err := mount.Unclaimed(ctx, device, unusedTries, unusedPause)
	if errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("%w: %s is mounted, where this process does not see it, or used by the kernel otherwise", errdefs.ErrInUse, device)
	}
	if err != nil {
		return fmt.Errorf("open %s: %w", device, err)
	}
	return nil
}
