package lvmpool

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"os"
	"slices"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/direct"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// The metadata of a thin pool, as far as it is read here (drivers/md/dm-thin-metadata.c, drivers/md/persistent-data/dm-btree-internal.h). The superblock
// in block 0 says where the snapshot is, which is another superblock. That one has the root of a B-tree of the thin volumes, by number, and each entry
// there is the root of a B-tree of the volume's blocks. All of it is little-endian, and each block has a checksum.
const (
	metadataBlock = 4096
	thinMagic     = 27022010
	thinVersion   = 2

	// Of any block: its checksum is at 0.
	blockNumberAt = 8
	// Of a superblock.
	magicAt       = 32
	versionAt     = 40
	timeAt        = 44
	heldRootAt    = 56
	mappingRootAt = 320
	dataBlockAt   = 336 // in sectors
	superblockSum = 160774
	// Of a node: the keys are followed by room for as many as there may be, and then by the values.
	flagsAt      = 4
	entriesAt    = 16
	mostAt       = 20
	valueSizeAt  = 24
	keysAt       = 32
	nodeSum      = 121107
	internalNode = 1
	leafNode     = 2

	// timeBits is how many bits of an entry say when the block was mapped. The others are its number.
	timeBits = 24
	// mostDepth is more than the depth of any such tree.
	mostDepth = 16
)

// metadataFile reads the blocks of a thin pool's metadata.
type metadataFile struct {
	file *os.File
	name string
}

// block returns a block. errdefs.ErrUnsupported if its checksum or its number is wrong.
func (m metadataFile) block(number uint64, sum uint32) ([]byte, error) {
	memory, free, err := direct.Memory(metadataBlock)
	if err != nil {
		return nil, err
	}
	defer free()
	if number > 1<<40 {
		return nil, m.strange(number, "it is none")
	}
	if _, err := m.file.ReadAt(memory, int64(number)*metadataBlock); err != nil {
		return nil, fmt.Errorf("read block %d of %s: %w", number, m.name, errdefs.FromErrno(err))
	}
	b := bytes.Clone(memory)
	if have := ^crc32.Checksum(b[4:], crc32.MakeTable(crc32.Castagnoli)) ^ sum; have != binary.LittleEndian.Uint32(b) {
		return nil, m.strange(number, "its sum is wrong")
	}
	if binary.LittleEndian.Uint64(b[blockNumberAt:]) != number {
		return nil, m.strange(number, "it says that it is another")
	}
	return b, nil
}

func (m metadataFile) strange(number uint64, what string) error {
	return fmt.Errorf("%w: block %d of the thin pool's metadata, %s: %s", errdefs.ErrUnsupported, number, m.name, what)
}

// superblock is what is read of a superblock.
type superblock struct {
	time uint32 // counts the snapshots of volumes
	held uint64 // the block of the snapshot of the metadata; 0: there is none
	root uint64 // of the tree of volumes
	size int64  // of the thin pool's blocks, in bytes
}

func (m metadataFile) superblock(number uint64) (superblock, error) {
	b, err := m.block(number, superblockSum)
	if err != nil {
		return superblock{}, err
	}
	long := func(at int) uint64 { return binary.LittleEndian.Uint64(b[at:]) }
	short := func(at int) uint32 { return binary.LittleEndian.Uint32(b[at:]) }
	if long(magicAt) != thinMagic || short(versionAt) != thinVersion {
		return superblock{}, m.strange(number, "it is no superblock that this driver knows")
	}
	if short(dataBlockAt) == 0 {
		return superblock{}, m.strange(number, "blocks of the thin pool have no size")
	}
	return superblock{short(timeAt), long(heldRootAt), long(mappingRootAt), 512 * int64(short(dataBlockAt))}, nil
}

// view is a snapshot of the metadata (at and of are its superblock), and how many snapshots of volumes were made since (behind).
type view struct {
	at     uint64
	of     superblock
	behind uint32
}

// view returns the snapshot that the metadata has.
func (m metadataFile) view() (view, error) {
	now, err := m.superblock(0)
	if err != nil {
		return view{}, err
	}
	if now.held == 0 {
		return view{}, m.strange(0, "it has no snapshot")
	}
	of, err := m.superblock(now.held)
	return view{now.held, of, now.time - of.time}, err
}

// current returns the snapshot that the metadata on a device has.
func current(metadata string) (view, error) {
	file, err := direct.Open(metadata, os.O_RDONLY)
	if err != nil {
		return view{}, err
	}
	defer file.Close()
	return metadataFile{file, metadata}.view()
}

// walk calls visit with the entries of a tree whose keys are below end, in order of the keys.
func (m metadataFile) walk(root, end uint64, depth int, visit func(key, value uint64) error) error {
	b, err := m.block(root, nodeSum)
	if err != nil {
		return err
	}
	number := func(at int) uint64 { return binary.LittleEndian.Uint64(b[at:]) }
	short := func(at int) int { return int(binary.LittleEndian.Uint32(b[at:])) }
	entries, most, flags := short(entriesAt), short(mostAt), short(flagsAt)
	if depth == mostDepth || entries > most || most > (metadataBlock-keysAt)/16 || short(valueSizeAt) != 8 || flags != internalNode && flags != leafNode {
		return m.strange(root, "it is no node that this driver knows")
	}
	for i := range entries {
		key, value := number(keysAt+8*i), number(keysAt+8*(most+i))
		if key >= end {
			return nil
		}
		if flags == leafNode {
			err = visit(key, value)
		} else {
			err = m.walk(value, end, depth+1, visit)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// alone returns the pieces of the first size bytes of a thin volume, by its number, whose blocks no other volume of the thin pool has. It reads the
// snapshot of the metadata on a device, and returns which snapshot that was (seen).
func alone(metadata string, volume uint64, size int64) (pieces []piece, seen view, err error) {
	file, err := direct.Open(metadata, os.O_RDONLY)
	if err != nil {
		return nil, view{}, err
	}
	defer file.Close()
	m := metadataFile{file, metadata}
	if seen, err = m.view(); err != nil {
		return nil, view{}, err
	}
	block := seen.of.size
	end := uint64((size + block - 1) / block)
	own, others := map[uint64]uint64{}, map[uint64]bool{}
	err = m.walk(seen.of.root, 1<<timeBits, 0, func(number, blocks uint64) error {
		return m.walk(blocks, end, 0, func(logical, value uint64) error {
			if number == volume {
				own[value>>timeBits] = logical
			} else {
				others[value>>timeBits] = true
			}
			return nil
		})
	})
	if err != nil {
		return nil, view{}, err
	}
	for at, logical := range own {
		if from := int64(logical) * block; !others[at] {
			pieces = append(pieces, piece{from, int64(at) * block, min(block, size-from)})
		}
	}
	slices.SortFunc(pieces, func(a, b piece) int { return cmp.Compare(a.logical, b.logical) })
	return pieces, seen, nil
}
