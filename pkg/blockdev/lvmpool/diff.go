package lvmpool

import (
	"bytes"
	"context"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/extents"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// diffBlock is what ranges are made of, in bytes.
const diffBlock = 64 << 10

func (p *pool) Allocated(ctx context.Context, ref blockdev.Ref, from int64, yield func(blockdev.Extent) error) error {
	return p.compare(ctx, blockdev.Ref{}, ref, from, yield)
}

func (p *pool) Changed(ctx context.Context, base, target blockdev.Ref, from int64, yield func(blockdev.Extent) error) error {
	if _, _, err := p.Lookup(base); err != nil {
		return err
	}
	return p.compare(ctx, base, target, from, yield)
}

// compare reads two objects and calls yield for where they differ; the zero Ref is all
// zeros.
func (p *pool) compare(ctx context.Context, base, target blockdev.Ref, from int64, yield func(blockdev.Extent) error) error {
	after, size, err := p.openForReading(ctx, target)
	if err != nil {
		return err
	}
	defer after.Close()
	var before *os.File
	var beforeSize int64
	if base != (blockdev.Ref{}) && base != target {
		if before, beforeSize, err = p.openForReading(ctx, base); err != nil {
			return err
		}
		defer before.Close()
	}
	if base == target {
		return ctx.Err()
	}
	memory, free, err := alignedMemory(2 * copyBlock)
	if err != nil {
		return err
	}
	defer free()
	w := &extents.Writer{Yield: yield}
	for at := from - from%diffBlock; at < size; at += copyBlock {
		if err := ctx.Err(); err != nil {
			return err
		}
		have, want := memory[:copyBlock], memory[copyBlock:][:min(copyBlock, size-at)]
		clear(have)
		if n := min(copyBlock, beforeSize-at); n > 0 {
			if _, err := before.ReadAt(have[:n], at); err != nil {
				return fmt.Errorf("read %s at byte %d: %w", base, at, errdefs.FromErrno(err))
			}
		}
		if _, err := after.ReadAt(want, at); err != nil {
			return fmt.Errorf("read %s at byte %d: %w", target, at, errdefs.FromErrno(err))
		}
		if err := addChanges(w, at, have, want); err != nil {
			return err
		}
	}
	return w.Flush()
}

// addChanges adds the blocks that differ of what two objects have at an offset.
func addChanges(w *extents.Writer, at int64, have, want []byte) error {
	for i := int64(0); i < int64(len(want)); i += diffBlock {
		j := min(i+diffBlock, int64(len(want)))
		if bytes.Equal(have[i:j], want[i:j]) {
			continue
		}
		if err := w.Add(blockdev.Extent{Offset: at + i, Length: j - i}); err != nil {
			return err
		}
	}
	return nil
}

// openForReading opens an object past the page cache; nothing but the file holds it.
func (p *pool) openForReading(ctx context.Context, ref blockdev.Ref) (*os.File, int64, error) {
	device, err := p.Attach(ctx, ref, blockdev.Attachment{ReadOnly: true})
	if err != nil {
		return nil, 0, err
	}
	defer device.Close()
	f, err := os.OpenFile(device.Path, os.O_RDONLY|unix.O_DIRECT, 0)
	if err != nil {
		return nil, 0, fmt.Errorf("open %s: %w", device.Path, errdefs.FromErrno(err))
	}
	return f, device.Size, nil
}
