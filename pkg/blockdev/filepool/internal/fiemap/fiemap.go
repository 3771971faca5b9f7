// Package fiemap counts the blocks that files take of a disk, each once however many files share it, by the extents of the files
// (FS_IOC_FIEMAP, Documentation/filesystems/fiemap.rst).
package fiemap

import (
	"context"
	"fmt"
	"math/bits"
	"os"
	"unsafe"

	"github.com/ashlar-csi/ashlar/internal/ioctl"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Blocks is a set of blocks of a disk: pages of one bit for each. A page of which all
// blocks are there is the same for all, so what is in one piece takes next to no memory, and
// the worst 1/32768 of the disk.
type Blocks struct {
	block int64 // bytes
	pages map[int64]*blockPage
}

const blocksOfPage = 32768

type blockPage [blocksOfPage / 64]uint64

var fullPage = func() *blockPage {
	var page blockPage
	for i := range page {
		page[i] = ^uint64(0)
	}
	return &page
}()

// NewBlocks returns the empty set of blocks of that many bytes.
func NewBlocks(block int64) *Blocks { return &Blocks{block, map[int64]*blockPage{}} }

// add adds a range of bytes, and returns how many of them are new.
func (s *Blocks) add(start, length int64) int64 {
	fresh := int64(0)
	end := (start + length + s.block - 1) / s.block
	for at := start / s.block; at < end; {
		number, from := at/blocksOfPage, at%blocksOfPage
		to := min(blocksOfPage, from+end-at)
		fresh += s.addToPage(number, from, to)
		at += to - from
	}
	return fresh * s.block
}

func (s *Blocks) addToPage(number, from, to int64) (fresh int64) {
	page := s.pages[number]
	switch {
	case page == fullPage:
		return 0
	case page == nil && to-from == blocksOfPage:
		s.pages[number] = fullPage
		return blocksOfPage
	case page == nil:
		page = &blockPage{}
		s.pages[number] = page
	}
	for from < to {
		word, bit := from/64, from%64
		n := min(64-bit, to-from)
		mask := (^uint64(0) >> (64 - n)) << bit
		fresh += int64(bits.OnesCount64(mask &^ page[word]))
		page[word] |= mask
		from += n
	}
	return fresh
}

// The structures of FIEMAP, include/uapi/linux/fiemap.h.
type fiemapExtent struct {
	logical, physical, length uint64
	_                         [2]uint64
	flags                     uint32
	_                         [3]uint32
}

type fiemapRequest struct {
	start, length                     uint64
	flags, mapped, extentCount, spare uint32
	extents                           [1024]fiemapExtent
}

const (
	fiemapIoctl         = 0xC020660B // FS_IOC_FIEMAP
	fiemapExtentLast    = 0x1
	fiemapExtentUnknown = 0x2
	fiemapExtentDelayed = 0x4
	fiemapExtentEncoded = 0x8
	fiemapExtentInline  = 0x200
	// fiemapExtentVague are those of which the kernel does not say which blocks they take.
	fiemapExtentVague = fiemapExtentUnknown | fiemapExtentDelayed | fiemapExtentEncoded | fiemapExtentInline
)

// AddFile adds the blocks of a file, of up to a number of extents, and returns how many bytes of them are new, and how many
// extents it saw.
func (s *Blocks) AddFile(ctx context.Context, f *os.File, most int) (fresh int64, extents int, err error) {
	var request fiemapRequest
	for next, last := uint64(0), false; !last && extents < most; {
		if err := ctx.Err(); err != nil {
			return 0, 0, err
		}
		request = fiemapRequest{start: next, length: ^uint64(0) - next, extentCount: uint32(len(request.extents))}
		if err := ioctl.Pointer(f, fiemapIoctl, unsafe.Pointer(&request)); err != nil {
			return 0, 0, fmt.Errorf("map the extents of %s: %w", f.Name(), errdefs.FromErrno(err))
		}
		last = request.mapped == 0
		for _, x := range request.extents[:request.mapped] {
			if x.flags&fiemapExtentVague == 0 {
				fresh += s.add(int64(x.physical), int64(x.length))
			}
			next, last = x.logical+x.length, last || x.flags&fiemapExtentLast != 0
		}
		extents += int(request.mapped)
	}
	return fresh, extents, nil
}
