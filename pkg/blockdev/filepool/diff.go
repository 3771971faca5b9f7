package filepool

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/extents"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

func (p *pool) Allocated(ctx context.Context, ref blockdev.Ref, from int64, yield func(blockdev.Extent) error) error {
	_, record, err := p.Lookup(ref)
	if err != nil {
		return err
	}
	f, err := p.openImage(record, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer f.Close()
	forgetCached(f)
	w := &extents.Writer{Yield: yield}
	for offset := from; offset < record.Size; {
		if err := ctx.Err(); err != nil {
			return err
		}
		start, stop, err := dataFrom(f, offset, record.Size)
		if err != nil {
			return err
		}
		if stop > start {
			if err := w.Add(blockdev.Extent{Offset: start, Length: stop - start}); err != nil {
				return err
			}
		}
		offset = stop
	}
	return w.Flush()
}

// Changed reads both images where either has data, and compares.
func (p *pool) Changed(ctx context.Context, base, target blockdev.Ref, from int64, yield func(blockdev.Extent) error) error {
	_, oldRecord, err := p.Lookup(base)
	if err != nil {
		return err
	}
	_, newRecord, err := p.Lookup(target)
	if err != nil {
		return err
	}
	before, err := p.openImage(oldRecord, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer before.Close()
	after, err := p.openImage(newRecord, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer after.Close()

	const block = 64 << 10
	have, want := make([]byte, block), make([]byte, block)
	w := &extents.Writer{Yield: yield}
	for offset := from - from%block; offset < newRecord.Size; {
		if err := ctx.Err(); err != nil {
			return err
		}
		a, _, err := dataFrom(before, min(offset, oldRecord.Size), oldRecord.Size)
		if err != nil {
			return err
		}
		if a >= oldRecord.Size {
			a = newRecord.Size
		}
		b, _, err := dataFrom(after, offset, newRecord.Size)
		if err != nil {
			return err
		}
		if offset = min(a, b) / block * block; offset >= newRecord.Size || min(a, b) >= newRecord.Size {
			break
		}
		n := min(newRecord.Size-offset, block)
		clear(have)
		if _, err := before.ReadAt(have[:n], offset); err != nil && !errors.Is(err, io.EOF) {
			return errdefs.FromErrno(err)
		}
		if _, err := after.ReadAt(want[:n], offset); err != nil {
			return errdefs.FromErrno(err)
		}
		if !bytes.Equal(have[:n], want[:n]) {
			if err := w.Add(blockdev.Extent{Offset: offset, Length: n}); err != nil {
				return err
			}
		}
		offset += n
	}
	return w.Flush()
}
