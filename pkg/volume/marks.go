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

// A leg (docs/replication.md) is attached with a device that marks which blocks are written, and in which era. The device keeps its marks in an object of
// the pool beside the leg (blockdev.Marks), which is made when the leg is attached and deleted with it. The record of the leg (labelMarks) says whether
// every write since the marks were begun is marked. It says so only after that is true, and stops saying so before a write that is not marked. If it does
// not say so, all of the leg counts as written.
//
// Marks that were lost are begun anew. So the number by which other nodes know an era has two parts: the kernel's number of the era, and how often marks were begun. An era of
// lost marks has the number of no present one.

// marksAvailable returns why this machine cannot mark writes. Tests replace it.
var marksAvailable = era.Available

// eraBits is how many of the lower bits of an era's number are the kernel's number.
const eraBits = 20

// spareRoom is how many times its size a leg can grow to before its marks need a larger object.
const spareRoom = 4

// marking is what the record of a leg says of its marks.
type marking struct {
	begun uint32 // how often marks were begun; 1: once, before anything was written
	block int64  // bytes that one mark is for; 0: not all writes are marked, until marks are begun anew
	least uint32 // the kernel's era when the leg was attached last: marks that know only of earlier ones are an older copy; 0: not known
}

// markingOf returns the marking in a record. Without the label marks count as begun once, as something was written without them: the volume was not made
// as a leg, or is a copy.
func markingOf(r blockdev.Record) marking {
	m := marking{begun: 1}
	begun, rest, on := strings.Cut(r.Labels[labelMarks], ":")
	block, least, _ := strings.Cut(rest, ":")
	if n, err := strconv.ParseUint(begun, 10, 32-eraBits); err == nil {
		m.begun = uint32(n)
	}
	if n, err := strconv.ParseInt(block, 10, 64); on && err == nil {
		m.block = n
	}
	if n, err := strconv.ParseUint(least, 10, 32); err == nil && m.block > 0 {
		m.least = uint32(n)
	}
	return m
}

func (m marking) label() string {
	label := strconv.FormatUint(uint64(m.begun), 10)
	if m.block > 0 {
		label += ":" + strconv.FormatInt(m.block, 10)
		if m.least > 0 {
			label += ":" + strconv.FormatUint(uint64(m.least), 10)
		}
	}
	return label
}

// never is the label of a leg that was never written to.
var never = marking{}.label()

// off returns m for a leg to which something is written that is not marked.
func (m marking) off() marking { return marking{begun: max(m.begun, 1)} }

// next returns m with marks begun once more; false if there is no number left for that.
func (m marking) next(block int64) (marking, bool) {
	return marking{begun: m.begun + 1, block: block}, m.begun+1 < 1<<(32-eraBits)
}

// number returns the number by which other nodes know one of the kernel's eras; false if the kernel's number does not fit into eraBits.
func (m marking) number(era uint32) (uint32, bool) { return m.begun<<eraBits | era, era < 1<<eraBits }

// era returns the kernel's era of a number; false if nothing is known since then. Number 0 is from before the first write.
func (m marking) era(number uint32) (uint32, bool) {
	if number == 0 {
		return 1, m.begun == 1
	}
	return number & (1<<eraBits - 1), number>>eraBits == m.begun
}

// marksPrefix begins the name of the marks of a volume; the name of the volume follows.
const marksPrefix = "marks of "

// marksOf returns the object that has the marks of a volume.
func marksOf(ref blockdev.Ref) blockdev.Ref { return blockdev.Ref{Kind: blockdev.Marks, Key: ref.Key} }

// setMarking writes m into the record of a leg, unless it is there.
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

// layMarked attaches a volume by attach; a leg with marks. If marks cannot be had, the leg is attached without them, and its record says so before that.
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

// layWith attaches a leg with the marks that open returns. After that its record says that writes are marked. device.ErrMarks if the marks cannot be had.
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
		if err = l.tellMarks(ctx, pool, record, stack, true); err != nil {
			err = errors.Join(err, attached.Close())
		}
	}
	if err != nil {
		return blockdev.Device{}, err
	}
	return attached, nil
}

// layAgain attaches a leg that is attached already: with marks if it has them, else without. If the marks have no room for a leg that has grown, it ends
// them.
func (l *Local) layAgain(ctx context.Context, pool blockdev.Pool, record *blockdev.Record, stack device.Stack, attach func() (blockdev.Device, error)) (blockdev.Device, error) {
	attached, err := attach()
	if errors.Is(err, device.ErrMarks) {
		if err = l.unmark(ctx, pool, record, stack); err == nil {
			attached, err = attach()
		}
	}
	if err == nil {
		if err = l.tellMarks(ctx, pool, record, stack, false); err != nil {
			err = errors.Join(err, attached.Close())
		}
	}
	if err != nil {
		return blockdev.Device{}, err
	}
	return attached, nil
}

// tellMarks brings the marking in the record of an attached leg to what the kernel says. They differ after a crash. anew: the leg was attached just now, and
// the record says in which era.
func (l *Local) tellMarks(ctx context.Context, pool blockdev.Pool, record *blockdev.Record, stack device.Stack, anew bool) error {
	now, err := stack.Marked(ctx)
	if err != nil {
		return err
	}
	m := markingOf(*record)
	switch next, can := m.next(now.Block); {
	case !now.Kept():
		return setMarking(ctx, pool, record, m.off())
	case m.block == 0 && can:
		m = next
	case m.block == 0:
		return nil
	}
	if anew {
		m.least = now.Era
	}
	return setMarking(ctx, pool, record, m)
}

// unmark ends the marks of an attached leg, which stays in use. Its record says so first.
func (l *Local) unmark(ctx context.Context, pool blockdev.Pool, record *blockdev.Record, stack device.Stack) error {
	if err := setMarking(ctx, pool, record, markingOf(*record).off()); err != nil {
		return err
	}
	klog.FromContext(ctx).Info("Going on without marks of what is written to a leg; they begin anew when it is attached next", "pool", pool.Name(), "volume", record.Key)
	return stack.Unmark()
}

// openMarks opens the marks of a leg whose record says that writes are marked. ErrDataLoss if there are none, or older ones: a backup may have been put back,
// or the disk has lost what was written to it. Eras would be counted anew from there on, and what is marked in one would be taken for all that was written in
// the earlier one of that number.
func (l *Local) openMarks(ctx context.Context, pool blockdev.Pool, record *blockdev.Record) (device.Marking, error) {
	if err := marksAvailable(); err != nil {
		return device.Marking{}, err
	}
	metadata, err := pool.Attach(ctx, marksOf(record.Ref), blockdev.Attachment{})
	if err != nil {
		return device.Marking{}, err
	}
	last, begun, err := era.Last(metadata.Path)
	m := markingOf(*record)
	switch least := m.leastOf(*record); {
	case err != nil:
	case !begun:
		err = fmt.Errorf("%w: there is nothing at %s", errdefs.ErrDataLoss, metadata.Path)
	case last < least:
		err = fmt.Errorf("%w: those at %s are an older copy: they know of era %d, and era %d had begun", errdefs.ErrDataLoss, metadata.Path, last, least)
	}
	if err != nil {
		return device.Marking{}, errors.Join(err, metadata.Close())
	}
	return device.Marking{Metadata: metadata, Block: m.block}, nil
}

// leastOf returns the last of the kernel's eras of which the record of a leg knows that it has begun.
func (m marking) leastOf(r blockdev.Record) uint32 {
	s, err := legStateOf(r)
	if common, known := m.era(s.Era); err == nil && known {
		return max(m.least, common)
	}
	return m.least
}

// newMarks makes the object for the marks of a leg, or takes one that is large enough, and clears it. The record has to say already that not all writes
// are marked.
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
		spec := blockdev.Spec{Ref: ref, Name: marksPrefix + record.Name, Size: size, Provisioning: blockdev.Thick}
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

// deleteMarks deletes the object with the marks of a volume. A leg that stays without it counts as written, all of it.
func deleteMarks(ctx context.Context, pool blockdev.Pool, ref blockdev.Ref) error {
	if ref.Kind != blockdev.Volume {
		return nil
	}
	return pool.Delete(ctx, marksOf(ref))
}

// elsewhere reports whether the volumes of a pool are those of other nodes, which keep the marks themselves.
func elsewhere(pool blockdev.Pool) bool {
	_, is := blockdev.As[blockdev.Marker](pool)
	return is
}

// mostMarked is the most ranges that Marks returns.
const mostMarked = 1 << 14

// Marks returns the ranges of a leg that were written since an era that BeginEra has returned, in order. They may be more than was written: all of the leg
// if that is not known. With since 0 they are all that was ever written or holds data; all else reads as zeros. Writes during the call may be missing.
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

// BeginEra begins an era of the marks of an attached leg, and returns its number. A later Marks with it has every write after this call. ErrUnsupported if
// the writes are not marked, or if the marks are nearly full: these are ended.
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
	case now.Used > now.All/4*3 || now.Era+1 >= 1<<eraBits: // before the marks are full: the kernel would fail writes then
		if err := l.unmark(ctx, pool, &record, stack); err != nil {
			return 0, err
		}
		return 0, fmt.Errorf("%w: there is no room for more of them", errdefs.ErrUnsupported)
	}
	begun, err := stack.BeginEra(ctx)
	if err != nil {
		return 0, err
	}
	number, fits := m.number(begun)
	if !fits {
		return 0, fmt.Errorf("%w: eras are counted up to %d", errdefs.ErrUnsupported, 1<<eraBits)
	}
	return number, nil
}

// SetReplicaOf records durably of which volume a volume is a leg. Its marks begin when it is attached next.
func (l *Local) SetReplicaOf(ctx context.Context, id ID, of string) error {
	return l.setLabels(ctx, id, func(labels map[string]string) error {
		labels[labelReplicaOf] = of
		return nil
	})
}
