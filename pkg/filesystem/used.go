package filesystem

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
)

// Used reports whether a device carries a filesystem that was, or may have been, mounted for writing since it was made. Then it has somebody's data, whatever a
// record says. A filesystem as mkfs leaves it, finished or cut short, was not.
func Used(device string) (bool, error) {
	t, err := Probe(device)
	if err != nil || t == "" {
		return false, err
	}
	f, err := os.Open(device)
	if err != nil {
		return false, fmt.Errorf("look whether it was used: %w", err)
	}
	defer f.Close()
	used, err := map[Type]func(io.ReaderAt) (bool, error){Ext4: usedExt4, XFS: usedXFS, Btrfs: usedBtrfs}[t](f)
	if err != nil {
		return false, fmt.Errorf("look whether the %s on %s was used: %w", t, device, err)
	}
	return used, nil
}

// region returns length bytes of a device from an offset on; those beyond its end are zeros.
func region(f io.ReaderAt, offset int64, length int) ([]byte, error) {
	data := make([]byte, length)
	if _, err := f.ReadAt(data, offset); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	return data, nil
}

// usedExt4: the kernel notes the time of each mount for writing (s_mtime), and counts them (s_mnt_count).
func usedExt4(f io.ReaderAt) (bool, error) {
	sb, err := region(f, 1024, 1024)
	if err != nil {
		return false, err
	}
	return binary.LittleEndian.Uint32(sb[44:]) != 0 || binary.LittleEndian.Uint16(sb[52:]) != 0, nil
}

// usedXFS: while mkfs.xfs runs, sb_inprogress is set, and the kernel mounts no such filesystem. It leaves a superblock that was never in the log (sb_lsn of
// struct xfs_dsb is 0), and a log with one record and zeros after it. The record takes a sector or a stripe unit, and at least two blocks of 512 bytes.
func usedXFS(f io.ReaderAt) (bool, error) {
	const logPart = 1 << 20 // how much of the log is read at most, in bytes
	sb, err := region(f, 0, 512)
	if err != nil {
		return false, err
	}
	if sb[126] != 0 {
		return false, nil
	}
	if binary.BigEndian.Uint64(sb[240:]) != 0 {
		return true, nil
	}
	blockSize, groupBlocks := int64(binary.BigEndian.Uint32(sb[4:])), int64(binary.BigEndian.Uint32(sb[84:]))
	start, groupBits := binary.BigEndian.Uint64(sb[48:]), sb[124]
	at := (int64(start>>groupBits)*groupBlocks + int64(start&(1<<groupBits-1))) * blockSize
	first := max(2*512, int64(binary.BigEndian.Uint32(sb[180:])), int64(binary.BigEndian.Uint16(sb[102:])))
	length := min(logPart, int64(binary.BigEndian.Uint32(sb[96:]))*blockSize)
	if at <= 0 || length <= first {
		return true, nil // not as the mkfs of this driver makes it
	}
	log, err := region(f, at+first, int(length-first))
	if err != nil {
		return false, err
	}
	for _, b := range log {
		if b != 0 {
			return true, nil
		}
	}
	return false, nil
}

// usedBtrfs: at the first mount for writing the kernel makes or checks the tree of UUIDs, and the first transaction after that writes uuid_tree_generation into
// the superblock. What was synced before that transaction is in the log (log_root).
func usedBtrfs(f io.ReaderAt) (bool, error) {
	sb, err := region(f, 0x10000, 4096)
	if err != nil {
		return false, err
	}
	return binary.LittleEndian.Uint64(sb[0x233:]) != 0 || binary.LittleEndian.Uint64(sb[0x60:]) != 0, nil
}
