// Package persistent reads the metadata that targets of the device mapper keep on a device by the kernel's library persistent-data
// (drivers/md/persistent-data): thin pools do, and devices that mark what is written. It is in blocks of 4 KiB. All numbers are little-endian, and each
// block has a checksum and its own number. The caller sees to it that what it reads does not change meanwhile, by a snapshot of the metadata.
package persistent

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"os"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/direct"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// BlockSize is the size of a block of the metadata, in bytes.
const BlockSize = 4096

const (
	// Where the number of a block is; its checksum is at 0. Blocks of arrays have it elsewhere.
	numberAt      = 8
	arrayNumberAt = 16
	// Of a node of a tree (dm-btree-internal.h): the keys are followed by room for as many as there may be, and then by the values.
	flagsAt      = 4
	entriesAt    = 16
	mostAt       = 20
	valueSizeAt  = 24
	keysAt       = 32
	nodeSum      = 121107
	internalNode = 1
	leafNode     = 2
	// childSize is the size of the values of nodes that are no leaves: numbers of blocks.
	childSize = 8
	// mostDepth is more than the depth of any tree.
	mostDepth = 16
	// Of a block of an array (dm-array.c).
	arrayMostAt    = 4
	arrayEntriesAt = 8
	arraySizeAt    = 12
	arrayValuesAt  = 24
	arraySum       = 595846735
)

// File is a device with metadata.
type File struct{ *os.File }

// Open opens a device with metadata past the page cache, as the kernel writes there.
func Open(device string) (File, error) {
	f, err := direct.Open(device, os.O_RDONLY)
	return File{f}, err
}

// Superblock returns a block that is a superblock. sum is what the target mixes into its checksum. errdefs.ErrUnsupported if its checksum or its number is
// wrong.
func (f File) Superblock(number uint64, sum uint32) ([]byte, error) {
	return f.block(number, sum, numberAt)
}

func (f File) block(number uint64, sum uint32, at int) ([]byte, error) {
	memory, free, err := direct.Memory(BlockSize)
	if err != nil {
		return nil, err
	}
	defer free()
	if number > 1<<40 {
		return nil, f.Strange(number, "it is none")
	}
	if _, err := f.ReadAt(memory, int64(number)*BlockSize); err != nil {
		return nil, fmt.Errorf("read block %d of %s: %w", number, f.Name(), errdefs.FromErrno(err))
	}
	b := bytes.Clone(memory)
	if have := ^crc32.Checksum(b[4:], crc32.MakeTable(crc32.Castagnoli)) ^ sum; have != binary.LittleEndian.Uint32(b) {
		return nil, f.Strange(number, "its sum is wrong")
	}
	if binary.LittleEndian.Uint64(b[at:]) != number {
		return nil, f.Strange(number, "it says that it is another")
	}
	return b, nil
}

// Strange returns errdefs.ErrUnsupported for a block that is not as it should be.
func (f File) Strange(number uint64, what string) error {
	return fmt.Errorf("%w: block %d of the metadata on %s: %s", errdefs.ErrUnsupported, number, f.Name(), what)
}

// node is a node of a tree.
type node struct {
	b                   []byte
	entries, most, size int
	leaf                bool
}

func (n node) key(i int) uint64 { return binary.LittleEndian.Uint64(n.b[keysAt+8*i:]) }

func (n node) value(i int) []byte { return n.b[keysAt+8*n.most+n.size*i:][:n.size] }

// child returns the block of a node below one that is no leaf.
func (n node) child(i int) uint64 { return binary.LittleEndian.Uint64(n.value(i)) }

// node returns the node in a block, of a tree whose values have a size. errdefs.ErrUnsupported if there is none that this driver knows.
func (f File) node(number uint64, size int) (node, error) {
	b, err := f.block(number, nodeSum, numberAt)
	if err != nil {
		return node{}, err
	}
	short := func(at int) int { return int(binary.LittleEndian.Uint32(b[at:])) }
	n := node{b, short(entriesAt), short(mostAt), short(valueSizeAt), short(flagsAt) == leafNode}
	if !n.leaf {
		size = childSize
	}
	if n.size != size || n.entries > n.most || n.most > (BlockSize-keysAt)/(8+size) || !n.leaf && (short(flagsAt) != internalNode || n.entries == 0) {
		return node{}, f.Strange(number, "it is no node that this driver knows")
	}
	return n, nil
}

// Span is a range of keys of a tree, from First to before End.
type Span struct{ First, End uint64 }

// Tree is a B-tree (dm-btree.c), whose values have a size in bytes.
type Tree struct {
	File File
	Root uint64
	Size int
}

// Walk calls visit with the entries whose keys are in a span, in order of the keys. Nodes below the root for which pass returns true, by their block and
// their depth, are left out with all that is below them; nil: none.
func (t Tree) Walk(keys Span, pass func(number uint64, depth int) bool, visit func(key uint64, value []byte) error) error {
	return t.walk(t.Root, keys, 0, pass, visit)
}

func (t Tree) walk(root uint64, keys Span, depth int, pass func(number uint64, depth int) bool, visit func(key uint64, value []byte) error) error {
	n, err := t.File.node(root, t.Size)
	if err == nil && depth == mostDepth {
		err = t.File.Strange(root, "the tree is too deep")
	}
	if err != nil {
		return err
	}
	for i := range n.entries {
		switch {
		case n.key(i) >= keys.End:
			return nil
		case n.leaf && n.key(i) < keys.First, !n.leaf && i+1 < n.entries && n.key(i+1) <= keys.First:
		case n.leaf:
			err = visit(n.key(i), n.value(i))
		case pass == nil || !pass(n.child(i), depth+1):
			err = t.walk(n.child(i), keys, depth+1, pass, visit)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Leaves returns how deep the leaves are: all are equally deep. 0: the root is one.
func (t Tree) Leaves() (depth int, err error) {
	n, err := t.File.node(t.Root, t.Size)
	for ; err == nil && !n.leaf && depth < mostDepth; depth++ {
		n, err = t.File.node(n.child(0), t.Size)
	}
	return depth, err
}

// Array calls visit with the values of an array (dm-array.c), in order, each with its index. size is that of a value, in bytes. errdefs.ErrUnsupported
// unless there are count of them: each has a place, so one that is missing is damage.
func (f File) Array(root uint64, size int, count uint64, visit func(index uint64, value []byte) error) error {
	next, most := uint64(0), uint64((BlockSize-arrayValuesAt)/size)
	err := Tree{f, root, childSize}.Walk(Span{0, 1 << 32}, nil, func(key uint64, value []byte) error {
		number := binary.LittleEndian.Uint64(value)
		b, err := f.block(number, arraySum, arrayNumberAt)
		if err != nil {
			return err
		}
		short := func(at int) uint64 { return uint64(binary.LittleEndian.Uint32(b[at:])) }
		entries := short(arrayEntriesAt)
		if next != key*most || entries > most || short(arrayMostAt) != most || short(arraySizeAt) != uint64(size) {
			return f.Strange(number, "it is no block of an array that this driver knows")
		}
		for i := range entries {
			if err := visit(next, b[arrayValuesAt+int(i)*size:][:size]); err != nil {
				return err
			}
			next++
		}
		return nil
	})
	if err == nil && next != count {
		err = f.Strange(root, fmt.Sprintf("the array has %d values, and should have %d", next, count))
	}
	return err
}
