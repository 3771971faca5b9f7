package lvmpool

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"slices"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/persistent"
)

// The metadata of a thin pool, as far as it is read here (drivers/md/dm-thin-metadata.c). The superblock in block 0 says where the snapshot is, which is
// another superblock. That one has the root of a B-tree of the thin volumes, by number, and each entry there is the root of a B-tree of the volume's blocks.
const (
	thinMagic   = 27022010
	thinVersion = 2

	// Of a superblock.
	magicAt       = 32
	versionAt     = 40
	timeAt        = 44
	heldRootAt    = 56
	mappingRootAt = 320
	dataBlockAt   = 336 // in sectors
	superblockSum = 160774

	// timeBits is how many bits of an entry say when the block was mapped. The others are its number.
	timeBits = 24
)

// metadataFile reads a thin pool's metadata.
type metadataFile struct{ persistent.File }

// openMetadata opens the device with the metadata.
func openMetadata(device string) (metadataFile, error) {
	f, err := persistent.Open(device)
	return metadataFile{f}, err
}

// superblock is what is read of a superblock.
type superblock struct {
	time uint32 // counts the snapshots of volumes
	held uint64 // the block of the snapshot of the metadata; 0: there is none
	root uint64 // of the tree of volumes
	size int64  // of the thin pool's blocks, in bytes
}

func (m metadataFile) superblock(number uint64) (superblock, error) {
	b, err := m.Superblock(number, superblockSum)
	if err != nil {
		return superblock{}, err
	}
	long := func(at int) uint64 { return binary.LittleEndian.Uint64(b[at:]) }
	short := func(at int) uint32 { return binary.LittleEndian.Uint32(b[at:]) }
	if long(magicAt) != thinMagic || short(versionAt) != thinVersion {
		return superblock{}, m.Strange(number, "it is no superblock that this driver knows")
	}
	if short(dataBlockAt) == 0 {
		return superblock{}, m.Strange(number, "blocks of the thin pool have no size")
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
		return view{}, m.Strange(0, "it has no snapshot")
	}
	of, err := m.superblock(now.held)
	return view{now.held, of, now.time - of.time}, err
}

// current returns the snapshot that the metadata on a device has.
func current(metadata string) (view, error) {
	m, err := openMetadata(metadata)
	if err != nil {
		return view{}, err
	}
	defer m.Close()
	return m.view()
}

// walk calls visit with the entries of a tree: see persistent.Tree.Walk. The values are numbers.
func (m metadataFile) walk(root uint64, keys persistent.Span, pass func(number uint64, depth int) bool, visit func(key, value uint64) error) error {
	return m.tree(root).Walk(keys, pass, func(key uint64, value []byte) error {
		return visit(key, binary.LittleEndian.Uint64(value))
	})
}

func (m metadataFile) tree(root uint64) persistent.Tree {
	return persistent.Tree{File: m.File, Root: root, Size: 8}
}

// nodes returns the nodes of a tree below its root that may have keys in a span, sorted. It reads no leaf but the first: all are equally deep.
func (m metadataFile) nodes(root uint64, keys persistent.Span) (all []uint64, err error) {
	leaves, err := m.tree(root).Leaves()
	if err != nil || leaves == 0 {
		return nil, err
	}
	err = m.walk(root, keys, func(number uint64, depth int) bool {
		all = append(all, number)
		return depth >= leaves
	}, func(uint64, uint64) error { return nil })
	slices.Sort(all)
	return all, err
}

// errStopped ends a walk whose entries nobody wants any more.
var errStopped = errors.New("stopped")

// differing calls visit with the keys, in a span and in order, that one of two trees of blocks has and the other one has not, or has for another block. Nodes
// that both have are the same in both, as snapshots share what was not written since; they are not read. After an error it may have passed over some.
func (m metadataFile) differing(before, after uint64, keys persistent.Span, visit func(key uint64) error) error {
	ours, err := m.nodes(before, keys)
	if err != nil {
		return err
	}
	theirs, err := m.nodes(after, keys)
	if err != nil {
		return err
	}
	same := slices.DeleteFunc(ours, func(number uint64) bool {
		_, is := slices.BinarySearch(theirs, number)
		return !is
	})
	both := func(number uint64, _ int) bool {
		_, is := slices.BinarySearch(same, number)
		return is
	}
	var failed error // of reading before
	next, stop := iter.Pull2(func(yield func(key, value uint64) bool) {
		failed = m.walk(before, keys, both, func(key, value uint64) error {
			if !yield(key, value) {
				return errStopped
			}
			return nil
		})
	})
	defer stop()
	old, oldValue, more := next()
	err = m.walk(after, keys, both, func(key, value uint64) error {
		for ; more && old < key; old, oldValue, more = next() {
			if err := visit(old); err != nil {
				return err
			}
		}
		shared := false
		if more && old == key {
			shared = oldValue>>timeBits == value>>timeBits
			old, oldValue, more = next()
		}
		if shared || failed != nil {
			return failed
		}
		return visit(key)
	})
	for ; err == nil && more; old, _, more = next() {
		err = visit(old)
	}
	return cmp.Or(failed, err)
}

// blocksOf returns the root of the tree of a thin volume's blocks, by the volume's number. errdefs.ErrUnsupported if there is no such volume.
func (m metadataFile) blocksOf(seen view, number uint64) (root uint64, err error) {
	err = m.walk(seen.of.root, persistent.Span{First: number, End: number + 1}, nil, func(_, blocks uint64) error {
		root = blocks
		return nil
	})
	if err == nil && root == 0 {
		err = m.Strange(seen.at, fmt.Sprintf("it has no thin volume %d", number))
	}
	return root, err
}

// alone returns the pieces of the first size bytes of a thin volume, by its number, whose blocks no other volume of the thin pool has. It reads the
// snapshot of the metadata on a device, and returns which snapshot that was (seen).
func alone(metadata string, volume uint64, size int64) (pieces []piece, seen view, err error) {
	m, err := openMetadata(metadata)
	if err != nil {
		return nil, view{}, err
	}
	defer m.Close()
	if seen, err = m.view(); err != nil {
		return nil, view{}, err
	}
	block := seen.of.size
	end := uint64((size + block - 1) / block)
	own, others := map[uint64]uint64{}, map[uint64]bool{}
	err = m.walk(seen.of.root, persistent.Span{End: 1 << timeBits}, nil, func(number, blocks uint64) error {
		return m.walk(blocks, persistent.Span{End: end}, nil, func(logical, value uint64) error {
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
