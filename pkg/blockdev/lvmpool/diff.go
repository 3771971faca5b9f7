package lvmpool

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"

	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/internal/progress"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/direct"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/extents"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// diffBlock is the unit of ranges that are found by reading, in bytes.
const diffBlock = 64 << 10

func (p *pool) Allocated(ctx context.Context, ref blockdev.Ref, from int64, yield func(blockdev.Extent) error) error {
	return p.ranges(ctx, blockdev.Ref{}, ref, from, yield)
}

func (p *pool) Changed(ctx context.Context, base, target blockdev.Ref, from int64, yield func(blockdev.Extent) error) error {
	if _, _, err := p.Lookup(base); err != nil {
		return err
	}
	return p.ranges(ctx, base, target, from, yield)
}

// ranges passes on where base and target differ, from an offset on; the zero Ref as base is all zeros. It asks the thin pool's metadata, and reads the
// objects if that cannot be asked.
func (p *pool) ranges(ctx context.Context, base, target blockdev.Ref, from int64, yield func(blockdev.Extent) error) error {
	_, record, err := p.Lookup(target)
	if err != nil {
		return err
	}
	if base == target {
		return ctx.Err()
	}
	if p.location.Thin != "" {
		from, err = p.mapped(ctx, base, target, record.Size, from, yield)
		var cannot cannotRead
		if !errors.As(err, &cannot) || ctx.Err() != nil {
			return err
		}
		klog.FromContext(ctx).Info("The metadata of the thin pool cannot be read, so the volumes are, which takes longer", "pool", p.name, "err", cannot.Error())
	}
	return p.compare(ctx, base, target, from, yield)
}

// compare reads two objects and passes on where they differ; the zero Ref as base is all zeros.
func (p *pool) compare(ctx context.Context, base, target blockdev.Ref, from int64, yield func(blockdev.Extent) error) error {
	after, size, err := p.openForReading(ctx, target)
	if err != nil {
		return err
	}
	defer after.Close()
	var before *os.File
	var beforeSize int64
	if base != (blockdev.Ref{}) {
		if before, beforeSize, err = p.openForReading(ctx, base); err != nil {
			return err
		}
		defer before.Close()
	}
	memory, free, err := direct.Memory(2 * copyBlock)
	if err != nil {
		return err
	}
	defer free()
	w := &extents.Writer{Yield: yield}
	progress.Begin(ctx, from, size)
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
		progress.Skip(ctx, int64(len(want)))
	}
	return w.Flush()
}

// addChanges adds the blocks in which have and want differ, which two objects have at an offset.
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

// openForReading opens an object for reading past the page cache, and returns its size. The device goes with the file.
func (p *pool) openForReading(ctx context.Context, ref blockdev.Ref) (*os.File, int64, error) {
	device, err := p.Attach(ctx, ref, blockdev.Attachment{ReadOnly: true})
	if err != nil {
		return nil, 0, err
	}
	defer device.Close()
	f, err := direct.Open(device.Path, os.O_RDONLY)
	return f, device.Size, err
}
