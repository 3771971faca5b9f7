// Package fiemap finds where the extents of files are on a disk (FS_IOC_FIEMAP, Documentation/filesystems/fiemap.rst). It counts the blocks that files
// take, each once however many files share it, and tells in which ranges two files have the same blocks.
package fiemap

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"os"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/ioctl"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Blocks is a set of blocks of a disk, in pages with one bit for each block. All pages whose blocks are all in the set are one page in memory: so a disk
// in few pieces takes next to no memory, and the worst one 1/32768 of its size.
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

// NewBlocks returns an empty set of blocks of that many bytes.
func NewBlocks(block int64) *Blocks { return &Blocks{block, map[int64]*blockPage{}} }

// add adds a range of bytes, and returns how many bytes are in blocks that are new.
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
	fiemapExtentCrypted = 0x80
	fiemapExtentCrooked = 0x100 // not aligned to blocks
	fiemapExtentInline  = 0x200
	fiemapExtentTail    = 0x400 // packed with others
	fiemapExtentBlank   = 0x800 // allocated, and reads as zeros
	// fiemapExtentVague is for extents of which the kernel does not say which blocks they take.
	fiemapExtentVague = fiemapExtentUnknown | fiemapExtentDelayed | fiemapExtentEncoded | fiemapExtentCrypted | fiemapExtentCrooked |
		fiemapExtentInline | fiemapExtentTail

	fiemapSync = 0x1 // write out what is cached first
)

// AddFile adds the blocks of a file until it has seen most extents. It returns how many bytes of them are new, and how many extents it saw.
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

// window is how the bytes of a file are stored from an offset on, up to end.
type window struct {
	end     int64 // up to where it is known
	extents []fiemapExtent
}

// windowOf returns the window of a file from an offset on, up to an end at most.
func windowOf(f *os.File, at, end int64) (window, error) {
	request := fiemapRequest{start: uint64(at), length: uint64(end - at), flags: fiemapSync}
	request.extentCount = uint32(len(request.extents))
	if err := ioctl.Pointer(f, fiemapIoctl, unsafe.Pointer(&request)); err != nil {
		return window{}, err
	}
	w := window{end: end, extents: slices.Clone(request.extents[:request.mapped])}
	if n := len(w.extents); n == len(request.extents) {
		last := w.extents[n-1]
		w.end = min(end, int64(last.logical+last.length))
	}
	return w, nil
}

// at returns how the byte at an offset is stored, and up to where that holds. blank: it reads as zeros. physical is the address on the disk if it was
// written; -1 if the kernel does not tell.
func (w *window) at(offset int64) (blank bool, physical, end int64) {
	i, _ := slices.BinarySearchFunc(w.extents, offset, func(x fiemapExtent, offset int64) int {
		if int64(x.logical+x.length) <= offset {
			return -1
		}
		return 1
	})
	switch {
	case i == len(w.extents):
		return true, -1, w.end
	case int64(w.extents[i].logical) > offset: // a hole
		return true, -1, min(w.end, int64(w.extents[i].logical))
	}
	x := w.extents[i]
	end = min(w.end, int64(x.logical+x.length))
	switch {
	case x.flags&fiemapExtentVague != 0:
		return false, -1, end
	case x.flags&fiemapExtentBlank != 0:
		return true, -1, end
	}
	return false, int64(x.physical) + offset - int64(x.logical), end
}

// Apart returns ranges, in order, outside of which two files have the same bytes from an offset on: there both have the same blocks, or none that were
// written. The ranges are complete up to next, as it looks at only as many extents as fit into one answer of the kernel. If the filesystem maps no
// extents, is not believed, or moves them meanwhile, all is apart. Nobody changes the files meanwhile.
func Apart(a, b *os.File, from, end int64) (apart []Range, next int64, err error) {
	if is, err := believed(a); !is {
		return []Range{{from, end}}, end, err
	}
	first, err := windowOf(a, from, end)
	var second, again window
	if err == nil {
		second, err = windowOf(b, from, end)
	}
	if err == nil {
		again, err = windowOf(a, from, end)
	}
	switch {
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOTTY), errors.Is(err, unix.EBADR):
		return []Range{{from, end}}, end, nil
	case err != nil:
		return nil, from, fmt.Errorf("map the extents of %s and %s: %w", a.Name(), b.Name(), errdefs.FromErrno(err))
	}
	next = min(first.end, second.end)
	if !slices.Equal(first.extents, again.extents) || next <= from {
		next = max(next, min(end, from+moved))
		return []Range{{from, next}}, next, nil
	}
	for at := from; at < next; {
		blankA, whereA, endA := first.at(at)
		blankB, whereB, endB := second.at(at)
		stop := min(next, endA, endB)
		same := blankA && blankB || !blankA && !blankB && whereA >= 0 && whereA == whereB
		if n := len(apart); !same && n > 0 && apart[n-1].End == at {
			apart[n-1].End = stop
		} else if !same {
			apart = append(apart, Range{at, stop})
		}
		at = stop
	}
	return apart, next, nil
}

// believed reports whether the filesystem of a file says of the same address, for two files, only if they share the block there. XFS and btrfs do, and are
// where blocks are shared. CIFS says the offset in the file in place of an address (smb3_fiemap in fs/smb/client/smb2ops.c), so any two files would have the
// same blocks; bcachefs says an address on a disk, and not on which of its disks.
func believed(f *os.File) (bool, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return false, fmt.Errorf("find the filesystem of %s: %w", f.Name(), errdefs.FromErrno(err))
	}
	return st.Type == unix.XFS_SUPER_MAGIC || st.Type == unix.BTRFS_SUPER_MAGIC, nil
}

// moved is how much counts as apart when extents were moved meanwhile, in bytes, before the next look.
const moved = 16 << 20

// Range is a range of bytes of a file, from Start to before End.
type Range struct{ Start, End int64 }
