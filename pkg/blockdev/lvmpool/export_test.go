package lvmpool

import (
	"context"
	"os"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lvm2"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/persistent"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Age makes an LVM pool believe that its last report is old.
func Age(of blockdev.Pool) {
	p := of.(*pool)
	p.Mu.Lock()
	defer p.Mu.Unlock()
	p.space.at = p.space.at.Add(-lvmFresh)
}

// Copied returns how many bytes of an unfinished copy of an LVM pool are in place.
func Copied(of blockdev.Pool, ref blockdev.Ref) int64 {
	p := of.(*pool)
	p.Mu.Lock()
	defer p.Mu.Unlock()
	if o := p.Objects[ref]; o != nil {
		return o.Copied
	}
	return 0
}

// Few bounds how many ranges LVM pools keep in memory at once, until undo is called.
func Few(n int) (undo func()) {
	before := mostRanges
	mostRanges = n
	return func() { mostRanges = before }
}

// Meanwhile runs do between the look of an erasure at the thin pool's metadata and its first write, and makes no write.
func Meanwhile(ctx context.Context, of blockdev.Pool, do func()) error {
	p := of.(*pool)
	return p.withMetadata(ctx, func(metadata string) error {
		_, seen, err := alone(metadata, 0, blockdev.HeadSize)
		if err != nil {
			return err
		}
		do()
		return p.unchanged(metadata, seen)
	})
}

// Locked runs do while the pool has lvm2's lock.
func Locked(ctx context.Context, of blockdev.Pool, do func()) error {
	release, err := of.(*pool).lockGroup(ctx)
	if err == nil {
		do()
		release()
	}
	return err
}

// FailChange has a change of an LVM pool fail after do.
func FailChange(ctx context.Context, of blockdev.Pool, do func()) {
	p := of.(*pool)
	_ = p.lvm.Hold(ctx, func(run lvm2.Run) error {
		if err := p.agree(run); err != nil {
			return err
		}
		return p.changeThin(func() error {
			do()
			return errdefs.ErrUnavailable
		})
	})
}

// CopyDevice is copyDevice.
var CopyDevice = copyDevice

// Differing returns the keys, in a span, that two trees of a thin pool's metadata do not have alike.
func Differing(f *os.File, before, after, first, end uint64) (keys []uint64, err error) {
	m := metadataFile{persistent.File{File: f}}
	err = m.differing(before, after, persistent.Span{First: first, End: end}, func(key uint64) error {
		keys = append(keys, key)
		return nil
	})
	return keys, err
}

// Mapped is the value of a tree of a thin pool's metadata for a block, and when it was mapped.
func Mapped(block, when uint64) uint64 { return block<<timeBits | when }
