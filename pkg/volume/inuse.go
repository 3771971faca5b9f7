package volume

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ashlar-csi/ashlar/internal/fsync"
	"github.com/ashlar-csi/ashlar/internal/trace"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// A volume may also move while it is used (docs/decisions/moving-in-use.md): its consumer mirrors it to the new node. This file is what the old and the
// new node do for that. The old node describes the volume (Describe), tells which ranges hold data (DataRanges), and seals it when all is copied
// (SealFor); its consumer goes on. The new node makes an empty unfinished copy and exports it to the consumer, for the next generation of the claim
// (Prepare), and makes it whole when all is copied (Complete). After that the move ends like any other: Arrive on the new node, Depart on the old one.

// Describe returns a volume as the origin of a move that begins while the volume is used. Created is now, later than all earlier descriptions and seals.
// Claims is how many claims there were. There is no Read. A seal for the consumer is ended, if the volume stays.
func (l *Local) Describe(ctx context.Context, id ID, claims int64) (Origin, error) {
	pool, record, err := l.finishedRecord(ctx, id)
	if err != nil {
		return Origin{}, err
	}
	now := sealTime(record)
	if err := l.unsealUsed(ctx, pool, record); err != nil {
		return Origin{}, err
	}
	if record, err = pool.SetLabels(ctx, record.Ref, func(labels map[string]string) error { setTold(labels, now); return nil }); err != nil {
		return Origin{}, err
	}
	from, err := l.describe(ctx, pool, record)
	from.Created, from.Claims = now, claims
	return from, err
}

// The bounds of DataRanges: the time that it may take, and the number of ranges that it returns. Beyond them the ranges get coarser.
const (
	rangesTime = 2 * time.Second
	mostRanges = 512
)

// DataRanges returns the ranges of a volume that hold data, in order; what is between them reads as zeros. If the pool cannot tell, or not within
// rangesTime, it returns the whole volume. The consumer holds back its writes from before the call until it keeps account of what it writes.
func (l *Local) DataRanges(ctx context.Context, id ID) ([]blockdev.Extent, error) {
	pool, record, err := l.finishedRecord(ctx, id)
	if err != nil {
		return nil, err
	}
	whole := []blockdev.Extent{{Length: record.Size}}
	differ, ok := blockdev.As[blockdev.Differ](pool)
	if !ok {
		return whole, nil
	}
	short, cancel := context.WithTimeout(ctx, rangesTime)
	defer cancel()
	var ranges []blockdev.Extent
	err = differ.Allocated(short, record.Ref, 0, func(e blockdev.Extent) error {
		if ranges = append(ranges, e); len(ranges) >= 2*mostRanges {
			ranges = coarser(ranges, mostRanges)
		}
		return nil
	})
	if err != nil && short.Err() != nil && ctx.Err() == nil {
		return whole, nil // the pool has to read it all
	}
	return coarser(ranges, mostRanges), err
}

// coarser joins ranges across the smallest gaps until there are no more than allowed.
func coarser(ranges []blockdev.Extent, most int) []blockdev.Extent {
	if len(ranges) <= most {
		return ranges
	}
	gap := func(i int) int64 { return ranges[i].Offset - ranges[i-1].Offset - ranges[i-1].Length }
	gaps := make([]int64, 0, len(ranges)-1)
	for i := 1; i < len(ranges); i++ {
		gaps = append(gaps, gap(i))
	}
	slices.Sort(gaps)
	least := gaps[len(gaps)-most+1] // gaps that are larger stay
	fewer := ranges[:1:1]
	for i := 1; i < len(ranges); i++ {
		if last := &fewer[len(fewer)-1]; gap(i) < least || len(fewer) == most {
			last.Length = ranges[i].Offset + ranges[i].Length - last.Offset
		} else {
			fewer = append(fewer, ranges[i])
		}
	}
	return fewer
}

// SealFor is Seal for a volume in use, whose consumer goes on: the volume is exported to it, or attached on this node if that is the consumer.
// Origin.Created is the time of the seal, the same each time. Origin.Labels are those that move with the volume; they do not change from then on. The seal
// stays until the API server says that the volume stays; for another new home than before it is made anew. ErrPrecondition if another node uses the volume, or
// nobody.
func (l *Local) SealFor(ctx context.Context, id ID, claims int64, to Grant, home string) (Origin, error) {
	pool, record, err := l.finishedRecord(ctx, id)
	if err != nil {
		return Origin{}, err
	}
	if err := l.usedBy(ctx, pool, record, to); err != nil {
		return Origin{}, err
	}
	s, err := sealOf(record)
	if record, err = sealFor(ctx, pool, record, home, err != nil || s.used != to.Generation, seal{claims: claims, used: to.Generation}); err != nil {
		return Origin{}, err
	}
	if s, err = sealOf(record); err != nil {
		return Origin{}, err
	}
	from, err := l.describe(ctx, pool, record)
	from.Created, from.Claims = s.since, s.claims
	if err == nil {
		for _, label := range usedLabels {
			setLabel(from.Labels, label, record.Labels[label])
		}
	}
	return from, err
}

// usedBy returns ErrPrecondition unless the node of a grant uses a volume, and nobody else does: it is exported to that node, or attached here if that is
// this node.
func (l *Local) usedBy(ctx context.Context, pool blockdev.Pool, record blockdev.Record, to Grant) error {
	_, how, err := l.exporter()
	if err != nil {
		return err
	}
	e, is, err := exportOf(record)
	switch {
	case err != nil:
		return err
	case to.Node != l.node && (!is || e.Grant != to || e.boot != how.Boot), to.Node == l.node && is:
		return fmt.Errorf("%w: volume %s is not given to %s", errdefs.ErrPrecondition, record.Key, to)
	case to.Node != l.node:
		return nil
	}
	err = l.unusedHere(ctx, pool, record.Ref)
	switch {
	case errors.Is(err, errdefs.ErrInUse):
		return nil
	case err == nil:
		err = fmt.Errorf("%w: volume %s is not attached on its node %s", errdefs.ErrPrecondition, record.Key, l.node)
	}
	return err
}

// unsealUsed ends a seal for the consumer, if there is one and the volume stays, so that the volume can be changed. Errors are those of unseal.
func (l *Local) unsealUsed(ctx context.Context, pool blockdev.Pool, record blockdev.Record) error {
	if s, err := sealOf(record); err != nil || s.used == 0 {
		return nil
	}
	return l.unseal(ctx, pool, record)
}

// prepared is the label (labelImport) of an unfinished copy that Prepare has made: the generation of the claim that it is exported for, and the time of
// the description that it was made by.
type prepared struct {
	generation int64
	described  time.Time
}

const preparedWord = "inuse"

// roomLabel is the label (labelImport) of what Prepare has not made all of yet: it reads as zeros, and nobody was ever given it. It says nothing of the
// description, which is another one each time that Prepare is called: so a pool that was cut short can go on (blockdev.Pool.Create), however long it takes.
func roomLabel(key string) string { return key + "/room" }

// isRoom reports whether a record is of what Prepare has made for an origin, and not prepared yet.
func isRoom(pool blockdev.Pool, r blockdev.Record, from Origin) bool {
	return r.Labels[labelImport] == roomLabel(r.Key) && r.Size == sizeIn(pool, from)
}

func (p prepared) label(key string) string {
	return key + "/" + p.described.UTC().Format(time.RFC3339Nano) + "/" + preparedWord + "." + strconv.FormatInt(p.generation, 10)
}

// preparedOf returns the prepared in a record; false if Prepare has not made it.
func preparedOf(r blockdev.Record) (p prepared, is bool) {
	parts := strings.Split(r.Labels[labelImport], "/")
	if len(parts) != 3 || parts[0] != r.Key {
		return p, false
	}
	generation, is := strings.CutPrefix(parts[2], preparedWord+".")
	described, err := time.Parse(time.RFC3339Nano, parts[1])
	if err != nil || !is {
		return p, false
	}
	p.described = described
	p.generation, err = strconv.ParseInt(generation, 10, 64)
	return p, err == nil
}

// preparedSince returns the time of the description that a record was prepared by, or of the seal once it is complete; zero for any other record.
func preparedSince(r blockdev.Record) time.Time {
	if p, is := preparedOf(r); is {
		return p.described
	}
	since, _ := copiedInSeal(r)
	return since
}

// Prepare makes room in pool in for a volume that moves here while it is used, as the origin describes it. The room reads as zeros. It is exported for the
// next claim of the consumer; if that is this node, nothing is exported. Called again with the same description, it returns the same export. If that
// export has ended, or the description is later, the room is removed and made anew. If ctx ends while the room is being made, the next call goes on with
// it, as far as the pool can, also with a later description. ErrPrecondition if what is here is of a later description. Nobody but the consumer can use it
// before Complete and Arrive.
func (l *Local) Prepare(ctx context.Context, in, name string, provisioning blockdev.Provisioning, from Origin, to Grant) (_ Exported, err error) {
	if err := from.checkMove(name); err != nil {
		return Exported{}, err
	}
	_, how, err := l.exporter()
	if err != nil {
		return Exported{}, err
	}
	ctx, end := trace.Start(ctx, "prepare for a volume that moves here", "volume", from.ID.String())
	defer func() { end(err) }()
	pool, err := l.pool(in)
	if err != nil {
		return Exported{}, err
	}
	ref := from.ID.ref()
	if err := l.alone(ctx, pool, from); err != nil {
		return Exported{}, err
	}
	want := prepared{to.Generation, from.Created}
	record, err := pool.Get(ctx, ref)
	if err == nil {
		if e, is, unread := exportOf(record); unread == nil && record.Labels[labelImport] == want.label(ref.Key) &&
			(to.Node == l.node && !is || is && e.Grant == to && e.boot == how.Boot) {
			return l.showPrepared(ctx, pool, record, e, from)
		}
		if !isRoom(pool, record, from) {
			err = l.replacePrepared(ctx, pool, record, want, from)
		}
	}
	if errdefs.IgnoreNotFound(err) != nil {
		return Exported{}, err
	}
	e := export{Grant: to}
	labels := maps.Clone(from.Labels)
	labels[labelImport] = want.label(ref.Key)
	if to.Node != l.node {
		e = newExport(to, how.Boot)
		labels[labelExport] = e.label()
	}
	if record, err = l.makeRoom(ctx, pool, name, provisioning, from, labels); err != nil {
		return Exported{}, err
	}
	return l.showPrepared(ctx, pool, record, e, from)
}

// makeRoom makes what Prepare prepares, or goes on with it (roomLabel), and then gives it its labels.
func (l *Local) makeRoom(ctx context.Context, pool blockdev.Pool, name string, provisioning blockdev.Provisioning, from Origin, labels map[string]string) (blockdev.Record, error) {
	ref := from.ID.ref()
	room := map[string]string{labelImport: roomLabel(ref.Key)}
	record, err := l.createMoved(ctx, pool, name, provisioning, from, room)
	if err != nil {
		return record, err
	}
	return pool.SetLabels(ctx, ref, func(all map[string]string) error {
		clear(all)
		maps.Copy(all, labels)
		setLabel(all, labelPool, room[labelPool])
		return nil
	})
}

// replacePrepared removes what is here of a volume, to make room for a later description. ErrPrecondition if it is of a later one itself.
func (l *Local) replacePrepared(ctx context.Context, pool blockdev.Pool, record blockdev.Record, want prepared, from Origin) error {
	if !unfinished(record) {
		return l.dropLeft(ctx, pool, record, from.Labels[labelCame], from.Claims)
	}
	if since := preparedSince(record); since.After(want.described) {
		return fmt.Errorf("%w: node %s has made room for volume %s as it was at %v, and is asked to for %v, which was before; if the clock of its home was set back, take the move back, and ask for it again",
			errdefs.ErrPrecondition, l.node, record.Key, since, want.described)
	}
	return l.dropCopy(ctx, pool, record, from)
}

// showPrepared exports what was prepared, unless the consumer is this node. ErrUnsupported if its sectors are too large for the volume: then it is
// removed.
func (l *Local) showPrepared(ctx context.Context, pool blockdev.Pool, record blockdev.Record, e export, from Origin) (out Exported, err error) {
	id := IDOf(pool.Name(), record)
	sector, err := sectorOf(ctx, pool, record.Ref)
	if err == nil && sector > from.Sector {
		err = fmt.Errorf("%w: the sectors of pool %s have %d bytes, those of volume %s %d, and what was made for these may not be used there", errdefs.ErrUnsupported,
			pool.Name(), sector, id, from.Sector)
	}
	if err != nil {
		return Exported{}, errors.Join(err, l.giveUp(ctx, pool, record.Ref, err))
	}
	if e.Node == l.node {
		return Exported{Grant: e.Grant, Size: record.Size, Record: record}, nil
	}
	return l.export(ctx, pool, record, e)
}

// Complete makes what was prepared a whole copy of the volume as it was sealed, as CopyIn would have made it: it can arrive. The consumer has mirrored the
// volume and nothing is missing. nqn is the export that the consumer is connected to; empty if it is this node. After success all that it wrote is
// durable. ErrNotFound if nothing is here that was prepared for this consumer and export; ErrPrecondition if it is in another pool, or of another size or
// a later time; ErrDataLoss if the disk could not be flushed: the copy is dropped then, unless the consumer is this node, which has to drop it.
func (l *Local) Complete(ctx context.Context, in string, from Origin, to Grant, nqn string) (err error) {
	ctx, end := trace.Start(ctx, "complete a volume that moves here", "volume", from.ID.String())
	defer func() { end(err) }()
	pool, record, e, err := l.preparedFor(ctx, from.ID, to, nqn)
	if err != nil {
		return err
	}
	if pool.Name() != in {
		return fmt.Errorf("%w: what was prepared for volume %s is in pool %s, and it is to be in pool %s", errdefs.ErrPrecondition, from.ID, pool.Name(), in)
	}
	if err := from.checkMove(record.Name, usedLabels...); err != nil {
		return err
	}
	if since := preparedSince(record); since.After(from.Created) {
		return fmt.Errorf("%w: volume %s was sealed at %v, and what is here is of %v", errdefs.ErrPrecondition, from.ID, from.Created, since)
	}
	if sizeIn(pool, from) != record.Size {
		return fmt.Errorf("%w: volume %s has %d bytes, and there is room for %d", errdefs.ErrPrecondition, from.ID, from.Size, record.Size)
	}
	if err := l.syncPrepared(ctx, pool, record.Ref); err != nil {
		err = fmt.Errorf("sync what was copied of volume %s: %w", from.ID, err)
		if errors.Is(err, errdefs.ErrDataLoss) && to.Node != l.node {
			err = errors.Join(err, l.dropUnfinished(ctx, pool, record.Ref))
		}
		return err
	}
	_, err = pool.SetLabels(ctx, record.Ref, func(labels map[string]string) error {
		named := labels[labelPool]
		clear(labels)
		maps.Copy(labels, from.Labels)
		setLabel(labels, labelPool, named)
		setLabel(labels, labelCarried, carriedLabel(from))
		labels[labelImport] = copiedInLabel(record.Key, from.Created)
		if to.Node != l.node {
			labels[labelExport] = e.label()
		}
		return nil
	})
	return err
}

// syncPrepared flushes the disks below what was prepared: the kernel of a consumer with an older driver does not flush what it copies. ErrDataLoss if that
// fails: nobody knows what is missing, and the next flush may succeed.
func (l *Local) syncPrepared(ctx context.Context, pool blockdev.Pool, ref blockdev.Ref) error {
	devices, err := pool.Attached(ctx, ref)
	if err != nil {
		return err
	}
	if len(devices) == 0 {
		attached, err := pool.Attach(ctx, ref, blockdev.Attachment{})
		if err != nil {
			return err
		}
		defer attached.Close()
		devices = append(devices, attached)
	}
	for _, d := range devices {
		if err := fsync.AndClose(os.Open(d.Path)); err != nil {
			return errdefs.Recast(errdefs.ErrDataLoss, err, "%s could not be flushed", d.Path)
		}
	}
	return nil
}

// preparedFor returns what was prepared for a consumer, or completed: it is exported to the consumer as nqn, since this machine has started; not exported
// if the consumer is this node. ErrNotFound if there is no such thing.
func (l *Local) preparedFor(ctx context.Context, id ID, to Grant, nqn string) (blockdev.Pool, blockdev.Record, export, error) {
	_, how, err := l.exporter()
	if err != nil {
		return nil, blockdev.Record{}, export{}, err
	}
	pool, ref, err := l.object(id, blockdev.Volume)
	if err != nil {
		return nil, blockdev.Record{}, export{}, err
	}
	record, err := pool.Get(ctx, ref)
	if err != nil {
		return nil, record, export{}, err
	}
	p, is := preparedOf(record)
	_, whole := copiedInSeal(record)
	e, exported, err := exportOf(record)
	switch {
	case err != nil:
	case is && p.generation != to.Generation || !is && !whole, to.Node == l.node && exported,
		to.Node != l.node && (!exported || e.Grant != to || e.boot != how.Boot || e.nqn(id.Key) != nqn):
		err = fmt.Errorf("%w: what node %s has of volume %s was not prepared for %s", errdefs.ErrNotFound, l.node, id, to)
	}
	return pool, record, e, err
}

// DropPrepared removes what preparedFor returns for a consumer. Anything else stays, and is no error.
func (l *Local) DropPrepared(ctx context.Context, id ID, to Grant, nqn string) error {
	pool, record, _, err := l.preparedFor(ctx, id, to, nqn)
	if err != nil {
		return errdefs.IgnoreNotFound(err)
	}
	return l.dropUnfinished(ctx, pool, record.Ref)
}

// endPrepared ends what keeps a prepared copy in use: its export, or else the device that this node has of it.
func (l *Local) endPrepared(ctx context.Context, pool blockdev.Pool, record blockdev.Record) error {
	e, is, err := exportOf(record)
	if err != nil {
		return err
	}
	if is {
		return l.unexport(ctx, pool, record, e)
	}
	return l.detach(ctx, l.stacks.Of(pool, record.Ref))
}

// SealedSince returns the time of the seal of a volume; false if it is not sealed.
func (l *Local) SealedSince(ctx context.Context, id ID) (time.Time, bool, error) {
	_, record, err := l.finishedRecord(ctx, id)
	if err != nil {
		return time.Time{}, false, err
	}
	s, err := sealOf(record)
	return s.since, err == nil, nil
}
