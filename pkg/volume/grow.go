package volume

import (
	"context"
	"fmt"

	"github.com/ashlar-csi/ashlar/internal/trace"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Expand: see Store.
func (l *Local) Expand(ctx context.Context, id ID, size Range) (_ Volume, err error) {
	v, err := l.Get(ctx, id)
	if err != nil {
		return Volume{}, err
	}
	if size.Limit > 0 && v.Size > size.Limit && size.Required <= size.Limit {
		return Volume{}, fmt.Errorf("%w: volume %s has %d bytes, more than the limit of %d; volumes do not shrink", errdefs.ErrOutOfRange, id, v.Size, size.Limit)
	}
	pool, ref, err := l.object(id, blockdev.Volume)
	if err != nil {
		return Volume{}, err
	}
	want, err := size.Choose(v.Size, pool.Granularity())
	if err != nil {
		return Volume{}, err
	}
	if size.Required == 0 {
		want = v.Size
	}
	ctx, span := trace.Start(ctx, "grow", "pool", pool.Name(), "object", ref.String())
	defer func() { span(err) }()
	tracked, end := l.progress.Track(ctx, pool.Name(), ref.String())
	record, err := pool.Expand(tracked, ref, want)
	end()
	if err == nil { // also with nothing to grow: a retry may come after a crash between the two
		err = l.stacks.Of(pool, ref).Grow(ctx)
	}
	if err != nil {
		return Volume{}, err
	}
	return fromRecord(pool.Name(), l.node, record), nil
}

// Range of sizes in bytes; 0 means not limited on that side.
type Range struct{ Required, Limit int64 }

// DefaultSize is what a volume gets that nobody gave a size, in bytes.
const DefaultSize = 1 << 30

// Choose returns the size for a range: the smallest multiple of step (bytes) that is at
// least the required size and the floor. A range that requires nothing gets DefaultSize,
// or its limit. ErrOutOfRange if there is no such size.
func (r Range) Choose(floor, step int64) (int64, error) {
	if r.Required < 0 || r.Limit < 0 || (r.Limit > 0 && r.Required > r.Limit) {
		return 0, fmt.Errorf("%w: required %d, limit %d", errdefs.ErrInvalid, r.Required, r.Limit)
	}
	size := r.Required
	if size == 0 {
		size = max(DefaultSize, floor)
		if r.Limit > 0 {
			size = min(size, r.Limit/step*step)
		}
	}
	size = max(size, floor)
	if size > blockdev.MaxSize/step*step {
		return 0, fmt.Errorf("%w: %d bytes; %d is the most", errdefs.ErrOutOfRange, size, blockdev.MaxSize/step*step)
	}
	size = (size + step - 1) / step * step
	if r.Limit > 0 && size > r.Limit {
		return 0, fmt.Errorf("%w: no multiple of %d bytes from %d up to the limit of %d", errdefs.ErrOutOfRange, step, max(r.Required, floor), r.Limit)
	}
	return size, nil
}

// includes reports whether an existing size serves a range.
func (r Range) includes(size int64) bool {
	return size >= r.Required && (r.Limit == 0 || size <= r.Limit)
}
