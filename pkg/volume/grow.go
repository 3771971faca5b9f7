package volume

import (
	"context"
	"errors"
	"fmt"

	"github.com/ashlar-csi/ashlar/internal/trace"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/device"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Expand: see Store. The open device of an encrypted volume stays as it is until Grow is called with the key. ErrInUse for a volume that many nodes read.
func (l *Local) Expand(ctx context.Context, id ID, size Range) (Volume, error) {
	v, err := l.expand(ctx, id, size, nil)
	if errors.Is(err, ErrNoKey) {
		return l.Get(ctx, id)
	}
	return v, err
}

// Grow brings the devices of a volume to its size, which Expand has set, and tells the consumer of an exported volume. The open device of an encrypted volume
// needs its key to grow: ErrNoKey without.
func (l *Local) Grow(ctx context.Context, id ID, key Key) (Volume, error) {
	return l.expand(ctx, id, Range{}, key)
}

// expand grows a volume to within a range, and brings its devices to its size. The zero Range leaves the size as it is.
func (l *Local) expand(ctx context.Context, id ID, size Range, key Key) (_ Volume, err error) {
	pool, record, err := l.finishedRecord(ctx, id)
	if err != nil {
		return Volume{}, err
	}
	v := fromRecord(pool.Name(), l.node, record)
	if size.Limit > 0 && v.Size > size.Limit && size.Required <= size.Limit {
		return Volume{}, fmt.Errorf("%w: volume %s has %d bytes, more than the limit of %d; volumes do not shrink", errdefs.ErrOutOfRange, id, v.Size, size.Limit)
	}
	if err := l.unsealUsed(ctx, pool, record); err != nil {
		return Volume{}, err
	}
	overhead := v.Encryption.Scheme.Overhead()
	want, err := size.Choose(v.Size, pool.Granularity(), overhead)
	if err != nil {
		return Volume{}, err
	}
	if size.Required == 0 {
		want = v.Size
	}
	if want > v.Size && v.Read {
		return Volume{}, fmt.Errorf("%w: volume %s is read by many, which would not see it grow; end the pods that read it", errdefs.ErrInUse, id)
	}
	ctx, span := trace.Start(ctx, "grow", "pool", pool.Name(), "object", record.Ref.String())
	defer func() { span(err) }()
	tracked, end := l.progress.Track(ctx, pool.Name(), record.Ref.String())
	record, err = pool.Expand(tracked, record.Ref, want+overhead)
	end()
	if err == nil { // also if the object did not grow: an earlier call may have been cut short after that
		err = l.growStack(ctx, pool, record, key)
	}
	if err == nil {
		err = l.resized(ctx, id, record)
	}
	if err != nil {
		return Volume{}, err
	}
	return fromRecord(pool.Name(), l.node, record), nil
}

// growStack is stack.Grow. A leg goes on without marks if its pool has no room for those of the larger leg.
func (l *Local) growStack(ctx context.Context, pool blockdev.Pool, record blockdev.Record, key Key) error {
	stack := l.stacks.Of(pool, record.Ref)
	err := stack.Grow(ctx, key)
	if errors.Is(err, device.ErrMarks) {
		if err = l.unmark(ctx, pool, &record, stack); err == nil {
			err = stack.Grow(ctx, key)
		}
	}
	return err
}

// Range is a range of sizes, in bytes, as in a CapacityRange of CSI. 0 is no limit on that side.
type Range struct{ Required, Limit int64 }

// DefaultSize is the size of a volume for which no size is required, in bytes.
const DefaultSize = 1 << 30

// Choose returns the size of a volume for a range: the smallest that is at least the required size and floor, and of which the sum with overhead
// (Scheme.Overhead) is a multiple of step. All are bytes. A range that requires nothing gets DefaultSize, or its limit if that is less. ErrOutOfRange if
// there is no such size within the limit and blockdev.MaxSize; ErrInvalid for a range with a negative number, or with a limit below the required size.
func (r Range) Choose(floor, step, overhead int64) (int64, error) {
	up := func(size int64) int64 { return (size+overhead+step-1)/step*step - overhead }
	down := func(size int64) int64 { return (size+overhead)/step*step - overhead }
	most := blockdev.MaxSize/step*step - overhead
	if r.Required < 0 || r.Limit < 0 || (r.Limit > 0 && r.Required > r.Limit) {
		return 0, fmt.Errorf("%w: required %d, limit %d", errdefs.ErrInvalid, r.Required, r.Limit)
	}
	size := r.Required
	if size == 0 {
		size = max(DefaultSize, floor)
		if r.Limit > 0 {
			size = min(size, down(r.Limit))
		}
	}
	size = max(size, floor)
	if size > most {
		return 0, fmt.Errorf("%w: %d bytes; %d is the most", errdefs.ErrOutOfRange, size, most)
	}
	size = up(size)
	if r.Limit > 0 && size > r.Limit {
		return 0, fmt.Errorf("%w: no size in steps of %d bytes from %d up to the limit of %d", errdefs.ErrOutOfRange, step, max(r.Required, floor), r.Limit)
	}
	return size, nil
}

// includes reports whether an existing size serves a range.
func (r Range) includes(size int64) bool {
	return size >= r.Required && (r.Limit == 0 || size <= r.Limit)
}
