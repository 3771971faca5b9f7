package era

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"

	"github.com/ashlar-csi/ashlar/internal/turns"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/persistent"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// The metadata, as far as they are read here (drivers/md/dm-era-target.c, struct superblock_disk). They are read from a snapshot, which has a superblock of its
// own. The kernel ends an era when it makes one, so all eras of the snapshot have ended. Their marks are in two places. Those of each of the last eras are
// a set of bits, one for each block, which a B-tree has by the number of the era. The others the kernel has moved to an array that has, for each block, the
// last era in which it was written. Until a set is moved as a whole it stays in the tree.
const (
	magic         = 2126579579
	version       = 1
	superblockSum = 146538381

	// Of a superblock. The numbers are not aligned.
	magicAt         = 32
	versionAt       = 40
	blockSizeAt     = 172 // in sectors
	blocksAt        = 180
	eraAt           = 184
	writesetsRootAt = 200
	arrayRootAt     = 208

	// writesetSize is the size of an entry of the tree: how many bits the set has, and the root of the array that has them.
	writesetSize = 12
)

// Since returns what was written to a device since an era, in order, in whole blocks; since era 0 it is all of it. The device may be in use: writes during the
// call may be missing. After any error nothing is known, and all may have been written. A crash leaves a snapshot of the metadata, which the next call
// removes. Calls for one device wait for each other.
//
// It reads the metadata itself. era_invalidate of thin-provisioning-tools 1.0.7 to 1.2.1 takes what follows --metadata-snapshot for its value, so that it can
// be told no device.
func Since(ctx context.Context, name string, era uint32) (written []dm.Range, err error) {
	end, err := reading.Begin(ctx, name)
	if err != nil {
		return nil, err
	}
	defer end()
	d, err := dm.Find(name)
	if err == nil && d == nil {
		err = fmt.Errorf("%w: there is no such device", errdefs.ErrNotFound)
	}
	var t table
	if err == nil {
		t, err = tableOf(name)
	}
	var size int64
	if err == nil {
		size, err = d.Size()
	}
	var path string
	if err == nil {
		path, err = pathOf(t.metadata)
	}
	if err == nil {
		err = errors.Join(drop(name), tell(name, "take_metadata_snap"))
	}
	if err != nil {
		return nil, fmt.Errorf("marks of device %s: %w", name, err)
	}
	defer func() { err = errors.Join(err, drop(name)) }()
	at, err := snapshot(name)
	if err == nil {
		written, err = read(ctx, path, at, era, t.block, size)
	}
	if err == nil {
		err = still(name, at)
	}
	if err != nil {
		return nil, fmt.Errorf("marks of device %s since era %d: %w", name, era, err)
	}
	return written, nil
}

// reading has the turns of those who read the marks of a device, by its name: there can be one snapshot of its metadata.
var reading turns.Table[string]

// snapshot returns the block of the snapshot of the metadata; 0: there is none.
func snapshot(name string) (at uint64, err error) {
	_, text, err := status(name) // "8 15/512 6 -", or a number in place of the "-"
	if err != nil {
		return 0, err
	}
	words := strings.Fields(text)
	if len(words) != 4 {
		return 0, fmt.Errorf("%w: the kernel says of it %q", errdefs.ErrDataLoss, text)
	}
	if words[3] == "-" {
		return 0, nil
	}
	_, err = fmt.Sscan(words[3], &at)
	return at, err
}

// errReleased: what was read of the snapshot may have been overwritten meanwhile.
var errReleased = fmt.Errorf("%w: somebody released the snapshot of the metadata while that was read", errdefs.ErrUnavailable)

// still returns errReleased unless the metadata have a snapshot in a block.
func still(name string, at uint64) error {
	now, err := snapshot(name)
	if err == nil && now != at {
		err = errReleased
	}
	return err
}

// drop removes the snapshot of the metadata, if there is one.
func drop(name string) error {
	at, err := snapshot(name)
	if err != nil || at == 0 {
		return err
	}
	return tell(name, "drop_metadata_snap")
}

// read reads what was written since an era by the snapshot of the metadata whose superblock is in a block, of a device that has a size and marks so many
// bytes at a time.
func read(ctx context.Context, path string, at uint64, era uint32, block, size int64) ([]dm.Range, error) {
	f, err := persistent.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	s, err := superblockAt(f, at)
	if err != nil {
		return nil, err
	}
	if s.block != block || int64(s.blocks) < (size+block-1)/block { // more: it has grown meanwhile
		return nil, f.Strange(at, fmt.Sprintf("it is for %d blocks of %d bytes, and the device has %d bytes in blocks of %d", s.blocks, s.block, size, block))
	}
	marks := make([]bool, s.blocks)
	err = f.Array(s.array, 4, uint64(s.blocks), func(index uint64, value []byte) error {
		marks[index] = binary.LittleEndian.Uint32(value) >= era
		return ctx.Err()
	})
	if err != nil {
		return nil, err
	}
	sets := persistent.Tree{File: f, Root: s.writesets, Size: writesetSize}
	err = sets.Walk(persistent.Span{First: uint64(era), End: 1 << 32}, nil, func(_ uint64, value []byte) error {
		bits, root := binary.LittleEndian.Uint32(value), binary.LittleEndian.Uint64(value[4:])
		return f.Array(root, 8, (uint64(bits)+63)/64, func(index uint64, value []byte) error {
			mark(marks, index*64, binary.LittleEndian.Uint64(value))
			return ctx.Err()
		})
	})
	if err != nil {
		return nil, err
	}
	if now, err := superblockAt(f, at); err != nil || now != s { // another snapshot may be in the same block
		return nil, cmp.Or(err, errReleased)
	}
	return ranges(marks, block, size), nil
}

// mark sets the marks of up to 64 blocks, from one on, that have a bit set. A set of an era in which the device was larger has bits for which there is no
// block any more.
func mark(marks []bool, first, bits uint64) {
	for ; bits != 0 && first < uint64(len(marks)); first, bits = first+1, bits>>1 {
		marks[first] = marks[first] || bits&1 != 0
	}
}

// ranges returns the blocks that have a mark, as ranges of a device of a size.
func ranges(marks []bool, block, size int64) (all []dm.Range) {
	for i, is := range marks {
		if !is {
			continue
		}
		at := int64(i) * block
		length := min(block, size-at)
		if length <= 0 {
			break
		}
		if last := len(all) - 1; last >= 0 && all[last].Offset+all[last].Length == at {
			all[last].Length += length
		} else {
			all = append(all, dm.Range{Offset: at, Length: length})
		}
	}
	return all
}

// superblock is what is read of a superblock.
type superblock struct {
	block            int64 // bytes that one mark is for
	blocks, era      uint32
	writesets, array uint64
}

func superblockAt(f persistent.File, number uint64) (superblock, error) {
	b, err := f.Superblock(number, superblockSum)
	if err != nil {
		return superblock{}, err
	}
	long := func(at int) uint64 { return binary.LittleEndian.Uint64(b[at:]) }
	short := func(at int) uint32 { return binary.LittleEndian.Uint32(b[at:]) }
	if long(magicAt) != magic || short(versionAt) != version {
		return superblock{}, f.Strange(number, "it is no superblock that this driver knows")
	}
	return superblock{512 * int64(short(blockSizeAt)), short(blocksAt), short(eraAt), long(writesetsRootAt), long(arrayRootAt)}, nil
}
