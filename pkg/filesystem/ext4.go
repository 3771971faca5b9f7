package filesystem

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/internal/command"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/mount"
)

// This file keeps an ext4 from being lost if a tool of e2fsprogs is cut short. Such a tool writes the superblock in parts: each run of words that differ, and
// the checksum last. If it is cut short between two parts, the superblock is torn: its checksum is wrong, and neither the kernel nor e2fsck -p accepts it.
// So before a tool may write, a copy of the superblock is written to the boot block, the 1024 bytes before the superblock. ext4 never uses them, and a
// snapshot has them too. A boot block that is neither blank nor such a copy is somebody's, and stays as it is.
//
// Boot block and superblock are in one block of the filesystem, which may be in the journal: its replay would overwrite the copy. So the journal is replayed
// before, by the kernel, which writes a superblock at once; by e2fsck only if the kernel cannot.

// ext4SuperSize is the size of the boot block, and of the superblock behind it.
const ext4SuperSize = 1024

// ext4Super is the superblock of an ext4, as it is on the disk
// (Documentation/filesystems/ext4/super.rst).
type ext4Super []byte

// Offsets of fields in the superblock, in bytes, and values of the fields.
const (
	ext4BlocksLow, ext4FirstBlock, ext4LogBlockSize, ext4GroupBlocks = 4, 20, 24, 32
	ext4MountTime, ext4MaxMounts, ext4Magic, ext4State               = 44, 54, 56, 58
	ext4CheckInterval, ext4Compat, ext4Incompat, ext4ROCompat        = 68, 92, 96, 100
	ext4UUID, ext4ReservedGDT, ext4JournalInode, ext4JournalDevice   = 104, 206, 224, 228
	ext4LastOrphan, ext4DescSize, ext4BlocksHigh, ext4MountOptions   = 232, 254, 336, 512
	ext4Checksum                                                     = 1020

	ext4IsMagic       = 0xef53
	ext4IsClean       = 1       // ext4State of a filesystem that was unmounted, and has no errors
	ext4HasJournal    = 0x4     // in ext4Compat
	ext4NeedsRecovery = 0x4     // in ext4Incompat
	ext4IsJournal     = 0x8     // in ext4Incompat: the device is the journal of another filesystem
	ext464Bit         = 0x80    // in ext4Incompat
	ext4MultiMount    = 0x100   // in ext4Incompat: mmp
	ext4Checksums     = 0x400   // in ext4ROCompat: metadata_csum
	ext4Orphans       = 0x10000 // in ext4ROCompat: orphan_present
)

func (s ext4Super) short(at int) uint16 { return binary.LittleEndian.Uint16(s[at:]) }
func (s ext4Super) long(at int) uint32  { return binary.LittleEndian.Uint32(s[at:]) }

// sum returns the checksum that the superblock should have.
func (s ext4Super) sum() uint32 {
	return ^crc32.Checksum(s[:ext4Checksum], crc32.MakeTable(crc32.Castagnoli))
}

// checksummed reports whether this is a superblock of an ext4 with checksums. Its own may be right or wrong.
func (s ext4Super) checksummed() bool {
	return s.short(ext4Magic) == ext4IsMagic && s.long(ext4ROCompat)&ext4Checksums != 0
}

// torn reports whether this is a superblock with a wrong checksum.
func (s ext4Super) torn() bool { return s.checksummed() && s.long(ext4Checksum) != s.sum() }

func (s ext4Super) needsRecovery() bool { return s.long(ext4Incompat)&ext4NeedsRecovery != 0 }

// clean reports whether by its superblock a filesystem needs no e2fsck: it was unmounted, has no errors, orphans or journal to replay, and no check is due by
// the number of mounts or the time.
func (s ext4Super) clean() bool {
	return s.short(ext4State) == ext4IsClean && !s.needsRecovery() && s.long(ext4ROCompat)&ext4Orphans == 0 && s.long(ext4LastOrphan) == 0 &&
		int16(s.short(ext4MaxMounts)) <= 0 && s.long(ext4CheckInterval) == 0
}

func (s ext4Super) blockSize() int64 { return 1024 << min(s.long(ext4LogBlockSize), 6) }

func (s ext4Super) blocks() int64 {
	blocks := int64(s.long(ext4BlocksLow))
	if s.long(ext4Incompat)&ext464Bit != 0 {
		blocks |= int64(s.long(ext4BlocksHigh)) << 32
	}
	return blocks
}

// size returns the size of the filesystem in bytes.
func (s ext4Super) size() int64 { return product(uint64(s.blocks()), uint64(s.blockSize())) }

// reach returns the size to which the filesystem can grow without moving blocks, in bytes: as far as there is room for the descriptors of block groups. mke2fs
// leaves room for 1024 times the first size.
func (s ext4Super) reach() int64 {
	perBlock := s.blockSize() / 32
	if s.long(ext4Incompat)&ext464Bit != 0 {
		perBlock = s.blockSize() / int64(max(s.short(ext4DescSize), 32))
	}
	perBlock *= int64(s.long(ext4GroupBlocks)) // how many blocks the descriptors in one block are for
	first := int64(s.long(ext4FirstBlock))
	have := (s.blocks() - first + perBlock - 1) / perBlock
	return (first + (have+int64(s.short(ext4ReservedGDT)))*perBlock) * s.blockSize()
}

// A copy of a superblock is disguised, so that nothing takes it for a superblock, by XOR with one of these texts, over and over. The text says which tool the
// copy was made for.
const (
	ext4Checks = "ashlar e2fsck   "
	ext4Grows  = "ashlar resize2fs"
)

func disguised(block []byte, as string) []byte {
	out := make([]byte, len(block))
	for i := range block {
		out[i] = block[i] ^ as[i%len(as)]
	}
	return out
}

// kept returns the copy of a superblock in a boot block, and its disguise; nil if there is none.
func kept(boot []byte) (ext4Super, string) {
	for _, as := range []string{ext4Checks, ext4Grows} {
		if s := ext4Super(disguised(boot, as)); s.checksummed() && !s.torn() {
			return s, as
		}
	}
	return nil, ""
}

// keep returns a boot block with a copy of this superblock. The copy says that the filesystem is not clean: it is used after a tool was cut short, and then
// everything has to be checked.
func (s ext4Super) keep(as string) []byte {
	s = bytes.Clone(s)
	binary.LittleEndian.PutUint16(s[ext4State:], s.short(ext4State)&^ext4IsClean)
	binary.LittleEndian.PutUint32(s[ext4Checksum:], s.sum())
	return disguised(s, as)
}

// copies reports whether s is a copy of other, or of what other was before it was torn: it is of the same filesystem, which was not mounted for writing since.
func (s ext4Super) copies(other ext4Super) bool {
	return bytes.Equal(s[ext4UUID:ext4UUID+16], other[ext4UUID:ext4UUID+16]) && s.long(ext4MountTime) == other.long(ext4MountTime)
}

// readExt4 reads the boot block and the superblock.
func readExt4(device string) (boot []byte, super ext4Super, err error) {
	f, err := os.Open(device)
	if err != nil {
		return nil, nil, fmt.Errorf("read the superblock of %s: %w", device, err)
	}
	defer f.Close()
	both := make([]byte, 2*ext4SuperSize)
	if _, err := f.ReadAt(both, 0); err != nil {
		return nil, nil, fmt.Errorf("read the superblock of %s: %w", device, err)
	}
	return both[:ext4SuperSize], both[ext4SuperSize:], nil
}

// writeExt4 writes a boot block or a superblock durably, at an offset in bytes.
func writeExt4(device string, block []byte, at int64) error {
	f, err := os.OpenFile(device, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(block, at)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// clearCopy overwrites the boot block with zeros.
func clearCopy(device string) error {
	if err := writeExt4(device, zeroBlock[:ext4SuperSize], 0); err != nil {
		return fmt.Errorf("write the boot block of %s, to take the copy of its superblock away: %w", device, err)
	}
	return nil
}

// guarded runs a tool that may write to an ext4, which is not mounted, with a copy of its superblock in the boot block. The copy stays until the tool has
// succeeded. There is none if the superblock has no checksum, or a wrong one, or if the boot block has something else.
func guarded(device, as string, tool func() error) error {
	boot, super, err := readExt4(device)
	if err != nil {
		return err
	}
	if have, _ := kept(boot); !super.checksummed() || super.torn() || have == nil && !bytes.Equal(boot, zeroBlock[:len(boot)]) {
		return tool()
	}
	if want := super.keep(as); !bytes.Equal(boot, want) {
		if err := writeExt4(device, want, 0); err != nil {
			return fmt.Errorf("write a copy of the superblock of %s to its boot block: %w", device, err)
		}
	}
	if err := tool(); err != nil {
		return err
	}
	if _, super, err = readExt4(device); err != nil {
		return err
	}
	if super.torn() {
		return fmt.Errorf("%s ended as if it had worked, and did not write all of the superblock of %s; the next try puts it back, and checks all", strings.Fields(as)[1], device)
	}
	return clearCopy(device)
}

// checkExt4 is Check without the look at what it leaves. It has the kernel replay the journal, puts back a superblock that a tool has torn, ends a growth that was cut short (endGrowth), and runs
// e2fsck, first without repairs if the filesystem is clean.
func checkExt4(ctx context.Context, device string) error {
	boot, super, err := readExt4(device)
	if err != nil {
		return err
	}
	if super.needsRecovery() && !super.torn() {
		// If the kernel cannot, e2fsck may, or it says what is wrong.
		if err := mount.Recover(device, string(Ext4), Ext4.MountOptions()); err != nil {
			klog.FromContext(ctx).Info("The kernel did not replay the journal of an ext4; leaving it to e2fsck", "device", device, "err", err)
		}
		if err := Inspect(Ext4, device); err != nil { // the journal may have had another superblock in it
			return err
		}
		if boot, super, err = readExt4(device); err != nil {
			return err
		}
	}
	copied, as := kept(boot)
	ours := copied != nil && copied.copies(super) && copied.other() == ""
	if ours && super.torn() {
		klog.FromContext(ctx).Info("A tool was cut short while it wrote the superblock of an ext4; putting it back from the copy in its boot block, and checking all of it", "device", device)
		if err := writeExt4(device, copied, ext4SuperSize); err != nil {
			return fmt.Errorf("put the superblock of %s back: %w", device, err)
		}
		super = copied
	}
	if super.clean() && !super.torn() {
		err := e2fsck(ctx, device, "-n") // writes nothing
		if err == nil && copied != nil {
			return clearCopy(device)
		}
		if !errors.Is(err, errdefs.ErrDataLoss) {
			return err
		}
	}
	if ours && as == ext4Grows && !super.clean() {
		return endGrowth(ctx, device)
	}
	return guarded(device, ext4Checks, func() error { return e2fsck(ctx, device, "-p") })
}

// notOfGrowth matches what e2fsck prints of damage that no growth leaves: to a file (inode 7 is none, it reserves room for group descriptors), of the disk, or
// of where the metadata of groups is.
var notOfGrowth = regexp.MustCompile(`(?i)inode ([0-689]|7[0-9])|error (reading|writing)|relocate`)

// endGrowth repairs what a resize2fs that was cut short has left. That has moved no block of a file, and the filesystem was checked in full before. So what is
// wrong are parts of the new size, and e2fsck may repair all of it, which -p does not. ErrDataLoss, and nothing is written, if e2fsck -n tells of other damage.
func endGrowth(ctx context.Context, device string) error {
	other := ""
	err := command.Lines(ctx, func(line []byte) error {
		if other == "" {
			other = string(notOfGrowth.Find(line))
		}
		return nil
	}, append(slices.Concat([]string{"e2fsck"}, noJournal), "-f", "-n", device)...)
	if other != "" {
		return fmt.Errorf("%w: check %s, whose growth was cut short: there is more damage than that (%q); run e2fsck on it by hand: %w", errdefs.ErrDataLoss, device, other, err)
	}
	var failure *command.Error
	if err != nil && !(errors.As(err, &failure) && failure.Code == leftUnrepaired) { // it has not seen all
		return toolError(fmt.Errorf("check %s, whose growth was cut short: %w", device, err))
	}
	return guarded(device, ext4Grows, func() error { return e2fsck(ctx, device, "-f", "-y") })
}

// noJournal keeps e2fsck from looking for a journal on another device, which it would replay and write to. Inspect has refused such a superblock, but does not
// look at the backup superblocks, which e2fsck may use.
var noJournal = []string{"-j", "/dev/null"}

// leftUnrepaired is the part of e2fsck's exit status that says that it has left something unrepaired (e2fsck(8)).
const leftUnrepaired = 4

// e2fsck runs e2fsck with options. Repairs are success; ErrDataLoss if it left something unrepaired, ErrUnsupported if it is not installed.
func e2fsck(ctx context.Context, device string, options ...string) error {
	_, _, err := command.Run(ctx, append(slices.Concat([]string{"e2fsck"}, noJournal, options), device)...)
	var failure *command.Error
	if errors.As(err, &failure) {
		// The exit status is a sum (e2fsck(8)): 1 repaired, 2 reboot (after repairs of the root filesystem), leftUnrepaired, 8 and up did not work.
		switch {
		case failure.Code >= 1 && failure.Code <= 3:
			return nil
		case failure.Code > 0 && failure.Code&leftUnrepaired != 0:
			return fmt.Errorf("%w: check %s: e2fsck will not repair it by itself; run e2fsck on it by hand: %w", errdefs.ErrDataLoss, device, err)
		}
	}
	if err != nil {
		return toolError(fmt.Errorf("check %s: %w", device, err))
	}
	return nil
}

// growExt4Unmounted grows an ext4 to a size in bytes by resize2fs, but not further than it can grow without moving blocks (reach): if resize2fs is cut short
// while it moves blocks, the filesystem cannot be repaired.
func growExt4Unmounted(ctx context.Context, device string, size int64) error {
	_, super, err := readExt4(device)
	if err != nil {
		return err
	}
	size = min(size, super.reach()) / blockdev.Granularity * blockdev.Granularity
	if super.size() >= size {
		return nil
	}
	// resize2fs demands a filesystem that was checked in full.
	if err := guarded(device, ext4Checks, func() error { return e2fsck(ctx, device, "-p", "-f") }); err != nil {
		return err
	}
	return guarded(device, ext4Grows, func() error {
		if _, _, err := command.Run(ctx, "resize2fs", device, strconv.FormatInt(size/super.blockSize(), 10)); err != nil {
			return toolError(fmt.Errorf("grow %s to %d bytes: %w", device, size, err))
		}
		return nil
	})
}
