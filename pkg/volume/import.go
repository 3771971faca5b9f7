package volume

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ashlar-csi/ashlar/internal/ioctl"
	"github.com/ashlar-csi/ashlar/internal/progress"
	"github.com/ashlar-csi/ashlar/internal/trace"
	"github.com/ashlar-csi/ashlar/internal/undoing"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/direct"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
)

// Origin is what is copied to another pool, of this node or of another one: a snapshot that a volume is made from, or a volume or snapshot that moves.
type Origin struct {
	ID ID
	// Created is when it was cut, or sealed. An unfinished copy is resumed only for the same ID and Created.
	Created time.Time
	Size    int64 // bytes that the pool has for it: with the header if it is encrypted
	Sector  int64 // logical sector of its devices, in bytes
	// Contents is what it carries, or is to carry. Format and Header are those of its record.
	Contents
	Format Format
	Header Header
	// Pool that it is in, on the node that it moves from. Empty if that node's driver is older than volumes in pools that their IDs do not name.
	Pool string
	// Object is the UID of the object by which a volume moves, as its new node knows it.
	Object string
	// Generation is metadata.generation of that object.
	Generation int64
	// Labels that the record of what moves takes along; nil for what is copied.
	Labels map[string]string
	// Claims is how many claims there had been of a volume that moves when it was sealed.
	Claims int64
	// Read calls visit with the data from an offset on, in order, in pieces of up to ReadSize bytes. Each piece begins and ends at a multiple of
	// blockdev.Granularity. What is left out reads as zeros. visit may use data only until it returns.
	Read func(ctx context.Context, from int64, visit func(at int64, data []byte) error) error
}

// SizeOf returns the size of the volume that an origin is, or is a snapshot of, in bytes: without a header.
func SizeOf(o Origin) int64 { return o.Size - o.Scheme.Overhead() }

// smallestSector is the smallest logical sector of a disk, in bytes.
const smallestSector = 512

// check returns ErrUnsupported for an origin with values that this version does not know. They go into records, and another node may have sent them.
func (o Origin) check() error {
	known := func(t filesystem.Type) bool { return t == "" || slices.Contains(filesystem.Types, t) }
	states := []FormatState{Blank, Formatting, Formatted, Raw}
	switch {
	case o.Size <= 0 || o.Size > blockdev.MaxSize || o.Size%blockdev.Granularity != 0,
		o.Sector < smallestSector || o.Sector > blockdev.Granularity || o.Sector&(o.Sector-1) != 0,
		!slices.Contains(states, o.Format.State) || !known(o.Format.Type) || !known(o.Filesystem),
		o.Scheme != NotEncrypted && !slices.Contains(Schemes, o.Scheme), o.Size <= o.Scheme.Overhead(), !slices.Contains(states[:3], o.Header.State):
		return fmt.Errorf("%w: its origin %s says that it has %d bytes in sectors of %d, is %q, carries %q, has encryption %q and a header that is %q; no snapshot that this version knows of is so",
			errdefs.ErrUnsupported, o.ID, o.Size, o.Sector, o.Format.label(), o.Filesystem, o.Scheme, o.Header.State)
	}
	return nil
}

// ReadSize is the most bytes that Origin.Read passes to visit at once.
const ReadSize = 1 << 20

// The progress of a copy is recorded after checkpoint bytes or checkpointTime, whichever is first, and when the copy is cut short. After a crash at most
// that much is copied again.
const (
	checkpoint     = 256 << 20
	checkpointTime = time.Minute
)

// importLabel returns the label of an unfinished copy: the key of its origin, when that was cut, and up to which byte it is copied. To its pool an
// unfinished copy is an object like any other, and ready. Nobody can use it until the label is gone.
func importLabel(from Origin, done int64) string {
	return from.ID.Key + "/" + from.Created.UTC().Format(time.RFC3339Nano) + "/" + strconv.FormatInt(done, 10)
}

// unfinished reports whether a record has that label: it is of an unfinished copy, or of what moves here and has not arrived.
func unfinished(r blockdev.Record) bool { return r.Labels[labelImport] != "" }

// imported returns up to which byte an unfinished copy is copied; false if it is a copy of another origin.
func imported(r blockdev.Record, from Origin) (done int64, of bool) {
	label := r.Labels[labelImport]
	done, err := strconv.ParseInt(label[strings.LastIndexByte(label, '/')+1:], 10, 64)
	return done, err == nil && label == importLabel(from, done) && done >= 0 && done <= from.Size
}

// Import is Create for a volume that is copied from an origin in another pool, or on another node. Nobody can use the volume before it is whole. After a
// call that was cut short, also by a crash, the next one resumes the copy.
func (l *Local) Import(ctx context.Context, spec Spec, from Origin) (Volume, error) {
	if err := errors.Join(from.check(), l.check(spec), spec.CheckSource(from.Contents)); err != nil {
		return Volume{}, err
	}
	pools, err := l.poolsOf(spec.Pool)
	if err != nil {
		return Volume{}, err
	}
	in, record, err := l.named(ctx, blockdev.Volume, spec.Name)
	switch {
	case err == nil && !unfinished(record):
		v := fromRecord(in.Name(), l.node, record)
		return v, spec.Check(v)
	case err == nil:
		if _, of := imported(record, from); of && spec.Check(fromRecord(in.Name(), l.node, record)) == nil {
			pools = slices.DeleteFunc(slices.Clone(pools), func(p blockdev.Pool) bool { return p.Name() != in.Name() })
		} else if err := l.dropUnfinished(ctx, in, record.Ref); err != nil { // nobody ever saw it
			return Volume{}, err
		}
	case !errors.Is(err, errdefs.ErrNotFound):
		return Volume{}, err
	}
	importIn := func(ctx context.Context, spec Spec, pool blockdev.Pool) (Volume, error) {
		return l.importIn(ctx, spec, pool, from)
	}
	if len(pools) == 1 {
		return importIn(ctx, spec, pools[0])
	}
	return l.createPlaced(ctx, spec, pools, from.Size-from.Scheme.Overhead(), importIn)
}

// importIn is Import in one pool, which may have the unfinished copy.
func (l *Local) importIn(ctx context.Context, spec Spec, pool blockdev.Pool, from Origin) (Volume, error) {
	record, err := pool.Get(ctx, blockdev.Ref{Kind: blockdev.Volume, Key: KeyOf(spec.Name)})
	if errors.Is(err, errdefs.ErrNotFound) {
		record, err = l.beginImport(ctx, spec, pool, from)
	}
	if err != nil {
		return Volume{}, err
	}
	whole, err := l.fill(ctx, pool, record, from, func(ctx context.Context, path string) (map[string]string, error) {
		return copied(ctx, path, record.Key, spec, from)
	})
	if err != nil {
		err = fmt.Errorf("copy %s to volume %q in pool %s: %w", from.ID, spec.Name, pool.Name(), err)
		return Volume{}, errors.Join(err, l.giveUp(ctx, pool, record.Ref, err))
	}
	return fromRecord(pool.Name(), l.node, whole), nil
}

// beginImport makes the object that the bytes are copied to, as zeros.
func (l *Local) beginImport(ctx context.Context, spec Spec, pool blockdev.Pool, from Origin) (blockdev.Record, error) {
	create, err := newVolume(spec, pool, from.Size-from.Scheme.Overhead())
	if err != nil {
		return blockdev.Record{}, err
	}
	create.Sector = from.Sector
	create.Labels[labelSource], create.Labels[labelImport] = spec.Source.String(), importLabel(from, 0)
	return l.create(ctx, pool, create)
}

// copied gives a whole copy of a spec, in the device at path, an identity of its own, and returns the labels that its record then gets.
func copied(ctx context.Context, path, key string, spec Spec, from Origin) (map[string]string, error) {
	labels, separate := map[string]string{labelImport: ""}, separateOf(spec)
	copyFormat(labels, from.Format)
	if from.Scheme != NotEncrypted {
		separate = copyHeader(labels, key, from.Header)
	}
	if separate == nil {
		return labels, nil
	}
	return labels, separate(ctx, path)
}

// fill copies what is not copied yet. Then it sets the labels that finish returns in the record; a label without a value is deleted. ErrUnsupported if the
// pool has larger sectors than the origin.
func (l *Local) fill(ctx context.Context, pool blockdev.Pool, record blockdev.Record, from Origin,
	finish func(ctx context.Context, path string) (map[string]string, error)) (_ blockdev.Record, err error) {
	ctx, span := trace.Start(ctx, "copy from another pool", "pool", pool.Name(), "object", record.Ref.String(), "origin", from.ID.String())
	defer func() { span(err) }()
	ctx, end := l.progress.Track(ctx, pool.Name(), record.Ref.String())
	defer end()
	device, err := pool.Attach(ctx, record.Ref, blockdev.Attachment{})
	if err != nil {
		return record, err
	}
	defer device.Close()
	target, err := direct.Open(device.Path, os.O_RDWR)
	if err != nil {
		return record, err
	}
	defer target.Close()
	if sector, err := ioctl.SectorSize(target); err != nil {
		return record, fmt.Errorf("sector of %s: %w", device.Path, errdefs.FromErrno(err))
	} else if int64(sector) > from.Sector {
		return record, fmt.Errorf("%w: the sectors of pool %s have %d bytes, those of its origin %d, and what was made for these may not be mounted there; choose another pool",
			errdefs.ErrUnsupported, pool.Name(), sector, from.Sector)
	}
	if err := l.copyFrom(ctx, pool, record, from, target); err != nil {
		return record, err
	}
	labels, err := finish(ctx, device.Path)
	if err != nil {
		return record, err
	}
	if err := target.Sync(); err != nil {
		return record, fmt.Errorf("sync %s: %w", device.Path, errdefs.FromErrno(err))
	}
	return pool.SetLabels(ctx, record.Ref, func(all map[string]string) error {
		for label, value := range labels {
			setLabel(all, label, value)
		}
		return nil
	})
}

// copyFrom copies the bytes of an origin to an open device, from where the record says that the copy is. It writes a piece while it reads the next one.
func (l *Local) copyFrom(ctx context.Context, pool blockdev.Pool, record blockdev.Record, from Origin, target *os.File) error {
	done, _ := imported(record, from)
	writing, end, err := direct.WriteBehind(target, ReadSize)
	if err != nil {
		return err
	}
	defer end()
	progress.Begin(ctx, done, from.Size)
	at, noted, when := done, done, time.Now()
	note := func(ctx context.Context) error {
		if err := writing.Wait(); err != nil {
			return err
		}
		if err := target.Sync(); err != nil {
			return fmt.Errorf("sync %s: %w", target.Name(), errdefs.FromErrno(err))
		}
		noted, when = at, time.Now()
		return changeLabel(ctx, pool, record.Ref, labelImport, importLabel(from, at))
	}
	err = from.Read(ctx, done, func(offset int64, data []byte) error {
		end := offset + int64(len(data))
		if offset < at || end > from.Size || len(data) == 0 || len(data) > ReadSize || offset%blockdev.Granularity != 0 || len(data)%blockdev.Granularity != 0 {
			return fmt.Errorf("%w: its origin sent bytes %d to %d after byte %d of %d", errdefs.ErrUnavailable, offset, end, at, from.Size)
		}
		if err := writing.Write(copy(writing.Next(), data), offset); err != nil {
			return err
		}
		progress.Skip(ctx, offset-at)
		progress.Add(ctx, end-offset)
		if at = end; at-noted < checkpoint && time.Since(when) < checkpointTime {
			return ctx.Err()
		}
		return note(ctx)
	})
	switch failed := writing.Wait(); {
	case failed != nil && !errors.Is(err, failed):
		return errors.Join(err, failed)
	case err == nil:
		progress.Skip(ctx, from.Size-at)
	case failed == nil && at > noted && mayGoOn(err):
		ctx, cancel := undoing.Context(ctx)
		defer cancel()
		return errors.Join(err, note(ctx))
	}
	return err
}

// giveUp removes a copy that failed with cause, unless the next call may resume it (mayGoOn).
func (l *Local) giveUp(ctx context.Context, pool blockdev.Pool, ref blockdev.Ref, cause error) error {
	if mayGoOn(cause) {
		return nil
	}
	ctx, cancel := undoing.Context(ctx)
	defer cancel()
	return l.dropUnfinished(ctx, pool, ref)
}

// mayGoOn reports whether the next call may resume what failed with cause.
func mayGoOn(cause error) bool {
	for _, passes := range []error{context.Canceled, context.DeadlineExceeded, errdefs.ErrUnavailable, errdefs.ErrBusy, errdefs.ErrInUse} {
		if errors.Is(cause, passes) {
			return true
		}
	}
	return false
}

// dropUnfinished removes an unfinished copy. An object that is whole stays, and is no error.
func (l *Local) dropUnfinished(ctx context.Context, pool blockdev.Pool, ref blockdev.Ref) error {
	record, err := pool.Get(ctx, ref)
	if err != nil || !unfinished(record) {
		return errdefs.IgnoreNotFound(err)
	}
	if err := l.endPrepared(ctx, pool, record); err != nil {
		return err
	}
	return l.remove(ctx, pool, ref)
}

// Open returns a snapshot as the origin of a copy in another pool. ErrNotFound as for GetSnapshot; ErrUnsupported if its pool cannot list what its
// snapshots hold.
func (l *Local) Open(ctx context.Context, id ID) (Origin, error) {
	if _, err := l.GetSnapshot(ctx, id); err != nil {
		return Origin{}, err
	}
	return l.open(ctx, id)
}

func (l *Local) open(ctx context.Context, id ID) (Origin, error) {
	pool, ref, err := l.object(id, blockdev.Snapshot)
	if err != nil {
		return Origin{}, err
	}
	differ, ok := blockdev.As[blockdev.Differ](pool)
	if !ok {
		return Origin{}, fmt.Errorf("%w: pool %s cannot list what its snapshots hold, so they are not copied to other pools", errdefs.ErrUnsupported, pool.Name())
	}
	record, err := pool.Get(ctx, ref)
	if err != nil {
		return Origin{}, err
	}
	sector := int64(0)
	if err := read(ctx, pool, ref, func(f *os.File) error {
		size, err := ioctl.SectorSize(f)
		sector = int64(size)
		return errdefs.FromErrno(err)
	}); err != nil {
		return Origin{}, err
	}
	return Origin{ID: id, Created: snapshotFromRecord(pool.Name(), l.node, record).Created, Size: record.Size, Sector: sector,
		Contents: contentsOf(record), Format: parseFormat(record.Labels[labelFormat]), Header: parseHeader(record.Labels[labelHeader]),
		Read: func(ctx context.Context, from int64, visit func(int64, []byte) error) error {
			release, err := l.holdSource(id)
			if err != nil {
				return err
			}
			defer release()
			return read(ctx, pool, ref, func(f *os.File) error { return readAllocated(ctx, differ, ref, f, record.Size, from, visit) })
		}}, nil
}

// read calls use with a device of an object that is open for reading.
func read(ctx context.Context, pool blockdev.Pool, ref blockdev.Ref, use func(f *os.File) error) error {
	device, err := pool.Attach(ctx, ref, blockdev.Attachment{ReadOnly: true})
	if err != nil {
		return err
	}
	defer device.Close()
	f, err := direct.Open(device.Path, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer f.Close()
	return use(f)
}

// readAllocated is Origin.Read for an open device.
func readAllocated(ctx context.Context, differ blockdev.Differ, ref blockdev.Ref, f *os.File, size, from int64, visit func(int64, []byte) error) error {
	memory, free, err := direct.Memory(ReadSize)
	if err != nil {
		return err
	}
	defer free()
	at := from
	return differ.Allocated(ctx, ref, from, func(e blockdev.Extent) error {
		const g = blockdev.Granularity
		end := min((e.Offset+e.Length+g-1)/g*g, size)
		for at = max(at, e.Offset/g*g); at < end; {
			if err := ctx.Err(); err != nil {
				return err
			}
			piece := memory[:min(ReadSize, end-at)]
			if _, err := f.ReadAt(piece, at); err != nil {
				return fmt.Errorf("read %s at byte %d: %w", ref, at, errdefs.FromErrno(err))
			}
			if err := visit(at, piece); err != nil {
				return err
			}
			at += int64(len(piece))
		}
		return nil
	})
}

// createElsewhere makes a volume as a copy of a volume or snapshot in another pool of this node. If the source is a volume, which may be in use, it cuts a
// snapshot first. That is removed when the copy is whole, or has failed for good.
func (l *Local) createElsewhere(ctx context.Context, spec Spec) (Volume, error) {
	if spec.Source.Kind == blockdev.Snapshot {
		from, err := l.Open(ctx, spec.Source)
		if err != nil {
			return Volume{}, err
		}
		return l.Import(ctx, spec, from)
	}
	key := KeyOf(spec.Name)
	from, err := l.OpenCut(ctx, spec.Source, key)
	if err != nil {
		return Volume{}, err
	}
	v, err := l.Import(ctx, spec, from)
	if err != nil && mayGoOn(err) {
		return v, err
	}
	return v, errors.Join(err, l.EndCut(ctx, l.placeOf(spec.Source), key))
}

// cutName returns the name of the snapshot that is cut of a volume for a copy in another pool. key is that of the copy.
func cutName(key string) string { return "copy\x00" + key }

// OpenCut returns a snapshot of a volume as the origin of a copy in another pool. It cuts the snapshot, or takes the one that an earlier call cut for the
// copy of that key. Nobody else sees the snapshot. EndCut removes it.
func (l *Local) OpenCut(ctx context.Context, id ID, key string) (Origin, error) {
	snapshot, err := l.existing(ctx, cutName(key), id)
	if err == nil && snapshot.Name == "" {
		var o origin
		if o, err = l.snapshotSource(ctx, id); err == nil {
			snapshot, err = l.snapshot(ctx, o, cutName(key), map[string]string{labelCutFor: key})
		}
	}
	if err != nil {
		return Origin{}, fmt.Errorf("cut volume %s, to copy it to another pool: %w", id, err)
	}
	return l.open(ctx, snapshot.ID)
}

// EndCut removes the snapshot that OpenCut has cut for the copy of a key. pool is the pool of the source. Success if there is none.
func (l *Local) EndCut(ctx context.Context, pool, key string) error {
	ctx, cancel := undoing.Context(ctx)
	defer cancel()
	p, ref, err := l.object(ID{blockdev.Snapshot, pool, KeyOf(cutName(key))}, blockdev.Snapshot)
	if err != nil {
		return err
	}
	return l.remove(ctx, p, ref)
}
