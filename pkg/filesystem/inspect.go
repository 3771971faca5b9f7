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

// This file inspects a superblock before a tool or the kernel follows it: somebody who had the volume as a raw device may have written it. A filesystem with
// parts on other devices, which may be volumes of another tenant, is not opened. Nor is one that is larger than its device.

// Inspect returns ErrPrecondition for a filesystem of the type that has parts on another device, or that a volume must not carry (ext4Super.other), and
// ErrDataLoss for one that is larger than its device. It writes nothing.
func Inspect(t Type, device string) error {
	if err := inspectSuper(t, device); err != nil {
		return fmt.Errorf("%w; nothing was mounted", err)
	}
	if t == Btrfs {
		return onlyDevice(device)
	}
	return nil
}

// inspectSuper is Inspect by the superblock alone, on a device or in a file.
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

// inspectExt4 returns the size of an ext4 in bytes, by its superblock, and why a volume must not carry it; empty if it may. The size of a torn superblock is 0.
func inspectExt4(super []byte) (size int64, other string) {
	s := ext4Super(super)
	if !s.torn() { // a torn one may have any size, and Check repairs it
		size = s.size()
	}
	return size, s.other()
}

// other returns what an ext4 has that a volume must not have; empty if nothing: a journal on another device, mount options of its own (s_mount_opts) that
// are not allowed (mount.CheckOptions; they may name a journal too), or multi-mount protection. With that a mount waits for as long as the superblock says,
// up to 18 hours, and nothing can end the wait.
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

// inspectXFS returns the size of an XFS in bytes, by its superblock (struct xfs_dsb of xfs_format.h), and what it has on other devices; empty if nothing.
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

// inspectBtrfs returns the size of a btrfs on its device in bytes, by its superblock (struct btrfs_super_block of linux/btrfs_tree.h), and what it has on
// other devices; empty if nothing.
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

// onlyDevice returns ErrPrecondition if a btrfs has other devices than this one, by its trees, which the kernel follows rather than the superblock. The
// filesystem is opened for that, and nothing is written.
func onlyDevice(device string) error {
	return mount.WithRoot(device, string(Btrfs), []string{"rescue=nologreplay"}, func(root *os.File) error {
		info, err := mount.Btrfs(root)
		if err == nil && info.Devices != 1 {
			err = fmt.Errorf("%w: the btrfs of %s has %d devices; a volume is one device, and nothing was mounted", errdefs.ErrPrecondition, device, info.Devices)
		}
		return err
	})
}

// product returns a times b, or the largest int64 if that is larger.
func product(a, b uint64) int64 {
	if b != 0 && a > (1<<63-1)/b {
		return 1<<63 - 1
	}
	return int64(a * b)
}

// OnlyOn returns ErrPrecondition if the filesystem that was mounted at a path is not on the device of that number: the kernel found another device with a
// filesystem of the same identity.
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

// A device that is in use is looked at unusedTries times again, unusedPause apart: the mounts of a container that has just ended go a moment later.
const (
	unusedTries = 20
	unusedPause = 50 * time.Millisecond
)

// Unused returns ErrInUse if a device is mounted, in whatever mount namespace, or otherwise held by somebody for himself (open(2), O_EXCL).
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
