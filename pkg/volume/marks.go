package volume

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/era"
	"github.com/ashlar-csi/ashlar/pkg/device"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// A leg (docs/replication.md) is attached with a device that marks what is written to it, and since which era. What that needs to know is in an object of the pool beside the volume
// (blockdev.Marks), which is made when the leg is attached, and deleted with it. The record says whether all that was ever written since its marks were begun is marked (labelMarks): it says so after that is
// true, and ceases to before anything is written that is not. So a leg of which nothing else is known counts as written, all of it.
//
// Marks may be begun anew, as often as they are lost. So an era that is told to others has a number in which is, which time that was; an era of another time is none of now.

// marksAvailable is why this machine marks nothing; tests have others.
var marksAvailable = era.Available

// eraBits are those of an era's number that are the kernel's.
const eraBits = 20

// spareRoom is how many times its size a leg can grow before there is no room for its marks.
const spareRoom = 4

// marking is what the record of a leg says of its marks.
type marking struct {
	begun uint32 // how often they were begun; the first time, before anything was written
	block int64  // what is marked at a time, in bytes; 0: not all that is written is marked, until they are begun again
}

// markingOf is what a record says of marks. A volume that was not made as a leg, or is a copy, was written to without.
func markingOf(r blockdev.Record) marking {
	m := marking{begun: 1}
	begun, block, on := strings.Cut(r.Labels[labelMarks], ":")
	if n, err := strconv.ParseUint(begun, 10, 32-eraBits); err == nil {
		m.begun = uint32(n)
	}
	if n, err := strconv.ParseInt(block, 10, 64); on && err == nil {
		m.block = n
	}
	return m
}

func (m marking) label() string {
	label := strconv.FormatUint(uint64(m.begun), 10)
	if m.block > 0 {
		label += ":" + strconv.FormatInt(m.block, 10)
	}
	return label
}

// never is the label of a volume that nobody has written to yet.
var never = marking{}.label()

// off is m, once something is written that is not marked.
func (m marking) off() marking { return marking{begun: max(m.begun, 1)} }

// next is m, begun again; false if that cannot be told in a number any more.
func (m marking) next(block int64) (marking, bool) {
	return marking{m.begun + 1, block}, m.begun+1 < 1<<(32-eraBits)
}

// number is that of an era, as others know it; false if the kernel has counted too far for that.
func (m marking) number(era uint32) (uint32, bool) { return m.begun<<eraBits | era, era < 1<<eraBits }

// era is the kernel's, of a number; false if nothing is known since that. Since 0, all that was ever written counts.
func (m marking) era(number uint32) (uint32, bool) {
	if number == 0 {
		return 1, m.begun == 1
	}
	return number & (1<<eraBits - 1), number>>eraBits == m.begun
}

// marksOf is the object beside a volume.
func marksOf(ref blockdev.Ref) blockdev.Ref { return blockdev.Ref{Kind: blockdev.Marks, Key: ref.Key} }

// setMarking changes what the record of a leg says of its marks, if it says anything else.
func setMarking(ctx context.Context, pool blockdev.Pool, record *blockdev.Record, m marking) error {
	if m == markingOf(*record) && record.Labels[labelMarks] != "" {
		return nil
	}
	now, err := pool.SetLabels(ctx, record.Ref, func(labels map[string]string) error {
		labels[labelMarks] = m.label()
		return nil
	})
	if err == nil {
		*record = now
	}
	return err
}

// layMarked attaches a volume of a pool by attach, if it is a leg with marks. For want of them nothing fails: the leg is attached without, and the record says so first.
func (l *Local) layMarked(ctx context.Context, pool blockdev.Pool, record blockdev.Record, o device.Options, attach func(o device.Options) (blockdev.Device, error)) (blockdev.Device, error) {
	if record.Labels[labelReplicaOf] == "" || unfinished(record) || elsewhere(pool) {
		return attach(o)
	}
	stack := l.stacks.Of(pool, record.Ref)
	now, err := stack.Marked(ctx)
	if err != nil {
		return blockdev.Device{}, err
	}
	if now.Attached {
		return l.layAgain(ctx, pool, &record, stack, func() (blockdev.Device, error) { return attach(o) })
	}
	with := func(open func(context.Context, blockdev.Pool, *blockdev.Record) (device.Marking, error)) (blockdev.Device, error) {
		return l.layWith(ctx, pool, &record, stack, open, func(m device.Marking) (blockdev.Device, error) {
			o.Marking = &m
			return attach(o)
		})
	}
	if m := markingOf(record); m.block > 0 {
		attached, err := with(l.openMarks)
		if !errors.Is(err, device.ErrMarks) {
			return attached, err
		}
		klog.FromContext(ctx).Error(err, "The marks of what was written to a leg are lost, so all of it counts", "pool", pool.Name(), "volume", record.Key)
		if err := setMarking(ctx, pool, &record, marking{begun: m.begun}); err != nil {
			return blockdev.Device{}, err
		}
	}
	attached, err := with(l.newMarks)
	if !errors.Is(err, device.ErrMarks) {
		return attached, err
	}
	klog.FromContext(ctx).Info("What is written to a leg is not marked, so all of it counts as written", "pool", pool.Name(), "volume", record.Key, "why", err.Error())
	if err := setMarking(ctx, pool, &record, markingOf(record).off()); err != nil {
		return blockdev.Device{}, err
	}
	o.Marking = nil
	return attach(o)
}

// layWith attaches a leg with marks; device.ErrMarks if they cannot be had. The record says that they are kept, once they are.
func (l *Local) layWith(ctx context.Context, pool blockdev.Pool, record *blockdev.Record, stack device.Stack, open func(context.Context, blockdev.Pool, *blockdev.Record) (device.Marking, error),
	attach func(device.Marking) (blockdev.Device, error)) (_ blockdev.Device, err error) {
	m, err := open(ctx, pool, record)
	if err != nil {
		if ctx.Err() != nil {
			return blockdev.Device{}, err
		}
		return blockdev.Device{}, fmt.Errorf("%w: %w", device.ErrMarks, err)
	}
	defer func() { err = errors.Join(err, m.Metadata.Close()) }()
	attached, err := attach(m)
	if err == nil {
		if err = l.tellMarks(ctx, pool, record, stack); err != nil {
			err = errors.Join(err, attached.Close())
		}
	}
	if err != nil {
		return blockdev.Device{}, err
	}
	return attached, nil
}

// layAgain attaches what is attached already: with marks, or without. Where these have no room for what has grown, it goes on without.
func (l *Local) layAgain(ctx context.Context, pool blockdev.Pool, record *blockdev.Record, stack device.Stack, attach func() (blockdev.Device, error)) (blockdev.Device, error) {
	attached, err := attach()
	if errors.Is(err, device.ErrMarks) {
		if err = l.unmark(ctx, pool, record, stack); err == nil {
			attached, err = attach()
		}
	}
	if err == nil {
		if err = l.tellMarks(ctx, pool, record, stack); err != nil {
			err = errors.Join(err, attached.Close())
		}
	}
	if err != nil {
		return blockdev.Device{}, err
	}
	return attached, nil
}

// tellMarks has the record of a leg that is attached say what the kernel does: a crash may have come between the two.
func (l *Local) tellMarks(ctx context.Context, pool blockdev.Pool, record *blockdev.Record, stack device.Stack) error {
	now, err := stack.Marked(ctx)
	if err != nil {
		return err
	}
	m := markingOf(*record)
	switch next, can := m.next(now.Block); {
	case !now.Kept():
		return setMarking(ctx, pool, record, m.off())
	case m.block == 0 && can:
		return setMarking(ctx, pool, record, next)
	}
	return nil
}

// unmark has a leg that is attached go on without marks.
func (l *Local) unmark(ctx context.Context, pool blockdev.Pool, record *blockdev.Record, stack device.Stack) error {
	if err := setMarking(ctx, pool, record, markingOf(*record).off()); err != nil {
		return err
	}
	klog.FromContext(ctx).Info("Going on without marks of what is written to a leg; they begin anew when it is attached next", "pool", pool.Name(), "volume", record.Key)
	return stack.Unmark()
}

// openMarks opens what the marks of a leg are in, which its record says are kept.
func (l *Local) openMarks(ctx context.Context, pool blockdev.Pool, record *blockdev.Record) (device.Marking, error) {
	if err := marksAvailable(); err != nil {
		return device.Marking{}, err
	}
	metadata, err := pool.Attach(ctx, marksOf(record.Ref), blockdev.Attachment{})
	if err != nil {
		return device.Marking{}, err
	}
	begun, err := era.Begun(metadata.Path)
	if err == nil && !begun {
		err = fmt.Errorf("%w: there is nothing at %s", errdefs.ErrDataLoss, metadata.Path)
	}
	if err != nil {
		return device.Marking{}, errors.Join(err, metadata.Close())
	}
	return device.Marking{Metadata: metadata, Block: markingOf(*record).block}, nil
}

// newMarks makes room for marks of a leg, and has them be none yet. The record says that none are kept.
func (l *Local) newMarks(ctx context.Context, pool blockdev.Pool, record *blockdev.Record) (device.Marking, error) {
	if err := marksAvailable(); err != nil {
		return device.Marking{}, err
	}
	block := era.Block(record.Size)
	if _, can := markingOf(*record).next(block); !can {
		return device.Marking{}, fmt.Errorf("%w: they were begun %d times", errdefs.ErrLimit, markingOf(*record).begun)
	}
	ref, g := marksOf(record.Ref), pool.Granularity()
	size := (era.Room(spareRoom*record.Size, block) + g - 1) / g * g
	have, err := pool.Get(ctx, ref)
	if err == nil && have.Size < era.Room(record.Size, block) || errors.Is(err, errdefs.ErrDataLoss) {
		if err = pool.Delete(ctx, ref); err == nil {
			err = fmt.Errorf("%w: it was too small", errdefs.ErrNotFound)
		}
	}
	if errors.Is(err, errdefs.ErrNotFound) {
		spec := blockdev.Spec{Ref: ref, Name: "marks of " + record.Name, Size: size, Provisioning: blockdev.Thick}
		if _, err = l.create(ctx, pool, spec); errors.Is(err, errdefs.ErrUnsupported) {
			spec.Provisioning = blockdev.AnyProvisioning
			_, err = l.create(ctx, pool, spec)
		}
	}
	if err != nil {
		return device.Marking{}, err
	}
	metadata, err := pool.Attach(ctx, ref, blockdev.Attachment{})
	if err == nil {
		err = era.Clear(metadata.Path)
	}
	if err != nil {
		return device.Marking{}, errors.Join(err, metadata.Close())
	}
	return device.Marking{Metadata: metadata, Block: block}, nil
}

// deleteMarks removes what is beside a volume; a leg that goes on without it counts as written, all of it.
func deleteMarks(ctx context.Context, pool blockdev.Pool, ref blockdev.Ref) error {
	if ref.Kind != blockdev.Volume {
		return nil
	}
	return pool.Delete(ctx, marksOf(ref))
}

// elsewhere reports whether the volumes of a pool are other nodes', which keep their marks.
func elsewhere(pool blockdev.Pool) bool {
	_, is := blockdev.As[blockdev.Marker](pool)
	return is
}

// mostMarked is how many ranges Marks tells at the most.
const mostMarked = 1 << 14

// Marks is what was written to a leg since an era that BeginEra has told, in order, and perhaps more: all of it, where that is not known. Since 0 it is what was ever written, or holds data: all else reads as zeros.
// What is written meanwhile may be missing.
func (l *Local) Marks(ctx context.Context, id ID, since uint32) ([]blockdev.Extent, error) {
	pool, record, err := l.finishedRecord(ctx, id)
	if err != nil {
		return nil, err
	}
	var written []blockdev.Extent
	if marker, is := blockdev.As[blockdev.Marker](pool); is {
		written, err = marker.Marks(ctx, record.Ref, since)
	} else if m := markingOf(record); m.block == 0 {
		err = fmt.Errorf("%w: they are not kept", errdefs.ErrUnsupported)
	} else if era, known := m.era(since); !known {
		err = fmt.Errorf("%w: they were lost since", errdefs.ErrUnsupported)
	} else if written, err = l.stacks.Of(pool, record.Ref).Written(ctx, era); err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).Error(err, "Could not find out what was written to a leg: all of it counts", "volume", id.String())
		err = errdefs.Recast(errdefs.ErrUnsupported, err, "they cannot be read")
	}
	switch _, remote := blockdev.As[blockdev.Marker](pool); {
	case errors.Is(err, errdefs.ErrUnsupported) && since == 0 && !remote:
		return l.DataRanges(ctx, id)
	case errors.Is(err, errdefs.ErrUnsupported):
		return []blockdev.Extent{{Length: record.Size}}, nil
	case err != nil:
		return nil, fmt.Errorf("marks of volume %s: %w", id, err)
	}
	return coarser(written, mostMarked), nil
}

// BeginEra begins an era of the marks of a leg, which is attached, and returns its number: what is written from now on is written since it. ErrUnsupported where no marks are kept.
func (l *Local) BeginEra(ctx context.Context, id ID) (number uint32, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("begin an era of the marks of volume %s: %w", id, err)
		}
	}()
	pool, record, err := l.finishedRecord(ctx, id)
	if err != nil {
		return 0, err
	}
	if marker, is := blockdev.As[blockdev.Marker](pool); is {
		return marker.BeginEra(ctx, record.Ref)
	}
	m, stack := markingOf(record), l.stacks.Of(pool, record.Ref)
	now, err := stack.Marked(ctx)
	switch {
	case err != nil:
		return 0, err
	case m.block == 0 || !now.Kept():
		return 0, fmt.Errorf("%w: they are not kept", errdefs.ErrUnsupported)
	case now.Used > now.All/4*3 || now.Era+1 >= 1<<eraBits: // before it is full, and the kernel fails what is written
		if err := l.unmark(ctx, pool, &record, stack); err != nil {
			return 0, err
		}
		return 0, fmt.Errorf("%w: there is no room for more of them", errdefs.ErrUnsupported)
	}
	begun, err := stack.BeginEra()
	if err != nil {
		return 0, err
	}
	number, told := m.number(begun)
	if !told {
		return 0, fmt.Errorf("%w: eras are counted up to %d", errdefs.ErrUnsupported, 1<<eraBits)
	}
	return number, nil
}

// SetReplicaOf says of which volume a volume is a leg of from now on, durably. Its marks begin when it is attached next.
func (l *Local) SetReplicaOf(ctx context.Context, id ID, of string) error {
	return l.setLabels(ctx, id, func(labels map[string]string) error {
		labels[labelReplicaOf] = of
		return nil
	})
}
