package filesystem

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
)

// Used reports whether a device carries a filesystem that was mounted for writing since it was made,
// or may have been: then it is somebody's, whatever any record says. What mkfs leaves, finished
// or cut short, was not.
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

// region reads part of a device; what is beyond its end reads as zeros.
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

// usedXFS: mkfs.xfs leaves one record in the log, of a sector or a stripe unit but of two blocks of 512 bytes at
// the least, and zeros after it; and a superblock that was never in the log (struct xfs_dsb: sb_lsn). Until it ends,
// sb_inprogress is set, and the kernel mounts nothing that has it.
func usedXFS(f io.ReaderAt) (bool, error) {
	const logPart = 1 << 20 // so much of the log is looked at, in bytes
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
		return true, nil // of no mkfs that this driver runs
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

// usedBtrfs: the first mount for writing has the tree of UUIDs made or looked over, and notes that in the
// superblock (uuid_tree_generation) with the first transaction after it. What was synced before that is in the
// log (log_root).
func usedBtrfs(f io.ReaderAt) (bool, error) {
	sb, err := region(f, 0x10000, 4096)
	if err != nil {
		return false, err
	}
	return binary.LittleEndian.Uint64(sb[0x233:]) != 0 || binary.LittleEndian.Uint64(sb[0x60:]) != 0, nil
}
