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

// Origin is a snapshot whose bytes are copied to another pool, of this node or of another one, or what moves.
type Origin struct {
	ID ID
	// Created is when it was cut, or sealed: what another snapshot of that ID has is no part of a copy of this one.
	Created time.Time
	Size    int64 // bytes, as the pool keeps them: with the header of what is encrypted
	Sector  int64 // logical sector of its devices, in bytes
	// Contents is what it carries, or is to carry. Format and Header are what its record says of its bytes.
	Contents
	Format Format
	Header Header
	// Pool where the node that a volume moves from has it; empty: the driver there is one of before volumes were in pools that their IDs do not name.
	Pool string
	// Object is the UID of the object by which a volume moves, as its new node knows it.
	Object string
	// Generation is metadata.generation of that object.
	Generation int64
	// Labels of the record of what moves, which is all of it and no copy; nil of what is copied.
	Labels map[string]string
	// Claims is how many claims of a volume that moves there had been when it was sealed.
	Claims int64
	// Read calls visit with what it holds from an offset on, in order, in pieces of up to ReadSize bytes, of which each begins and
	// ends at a multiple of blockdev.Granularity. What is left out reads as zeros. The data is visit's until it returns.
	Read func(ctx context.Context, from int64, visit func(at int64, data []byte) error) error
}

// SizeOf is the size of the volume that an origin is, or is of, in bytes: without a header.
func SizeOf(o Origin) int64 { return o.Size - o.Scheme.Overhead() }

// smallestSector is that of any disk, in bytes.
const smallestSector = 512

// check is ErrUnsupported for an origin that is like none of this version: what it says goes into records, and another node may have said it.
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

// ReadSize is the most that Origin.Read hands on at once, in bytes.
const ReadSize = 1 << 20

// How far a copy came is noted after checkpoint bytes or checkpointTime, whichever is first, and when it is cut short: so much is copied again after
// a crash.
const (
	checkpoint     = 256 << 20
	checkpointTime = time.Minute
)

// A copy of what is in another pool is an object like any other to its own pool, which is ready, and whose record says that it is not
// whole: this label has the key of its origin, when that was cut, and up to which byte it is copied. It is nobody's until the label is gone.
func importLabel(from Origin, done int64) string {
	return from.ID.Key + "/" + from.Created.UTC().Format(time.RFC3339Nano) + "/" + strconv.FormatInt(done, 10)
}

// unfinished reports whether a volume is a copy that is not whole, or what is here of a volume or snapshot that moves here.
func unfinished(r blockdev.Record) bool { return r.Labels[labelImport] != "" }

// imported is up to which byte an unfinished copy of an origin is done; false if it is of another.
func imported(r blockdev.Record, from Origin) (done int64, of bool) {
	label := r.Labels[labelImport]
	done, err := strconv.ParseInt(label[strings.LastIndexByte(label, '/')+1:], 10, 64)
	return done, err == nil && label == importLabel(from, done) && done >= 0 && done <= from.Size
}

// Import makes a volume of the bytes of a snapshot that is not in one of its pools. It is nobody's before it is whole, and a call that comes
// after one that was cut short goes on where that stopped, also after a crash. Otherwise it is as Create.
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

// importIn is Import in a pool, which may have a part of the copy.
func (l *Local) importIn(ctx context.Context, spec Spec, pool blockdev.Pool, from Origin) (Volume, error) {
	record, err := pool.Get(ctx, blockdev.Ref{Kind: blockdev.Volume, Key: KeyOf(spec.Name)})
	if errors.Is(err, errdefs.ErrNotFound) {
		record, err = l.beginImport(ctx, spec, pool, from)
	}
	if err != nil {
		return Volume{}, err
	}
	whole, err := l.fill(ctx, pool, record, from, func(ctx context.Context, path string) (map[string]string, error) {
		return copied(ctx, path, record.Key, from)
	})
	if err != nil {
		err = fmt.Errorf("copy %s to volume %q in pool %s: %w", from.ID, spec.Name, pool.Name(), err)
		return Volume{}, errors.Join(err, l.giveUp(ctx, pool, record.Ref, err))
	}
	return fromRecord(pool.Name(), l.node, whole), nil
}

// beginImport makes the object that the bytes go into, as zeros.
func (l *Local) beginImport(ctx context.Context, spec Spec, pool blockdev.Pool, from Origin) (blockdev.Record, error) {
	create, err := newVolume(spec, pool, from.Size-from.Scheme.Overhead())
	if err != nil {
		return blockdev.Record{}, err
	}
	create.Sector = from.Sector
	create.Labels[labelSource], create.Labels[labelImport] = spec.Source.String(), importLabel(from, 0)
	return l.create(ctx, pool, create)
}

// copied returns the labels that a copy has once all its bytes are there, at a path; before that the copy gets an identity of its own.
func copied(ctx context.Context, path, key string, from Origin) (map[string]string, error) {
	labels, separate := map[string]string{labelImport: ""}, filesystem.Separate
	copyFormat(labels, from.Format)
	if from.Scheme != NotEncrypted {
		separate = copyHeader(labels, key, from.Header)
	}
	return labels, separate(ctx, path)
}

// fill copies what is not copied yet, and then gives the volume the labels that finish returns, or with an empty one takes it away.
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

// copyFrom writes the bytes of an origin to an open device, from where the record says that an earlier try came. A piece is written while the next one comes.
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

// giveUp removes a copy that failed for good; what may go on stays for the next call.
func (l *Local) giveUp(ctx context.Context, pool blockdev.Pool, ref blockdev.Ref, cause error) error {
	if mayGoOn(cause) {
		return nil
	}
	ctx, cancel := undoing.Context(ctx)
	defer cancel()
	return l.dropUnfinished(ctx, pool, ref)
}

// mayGoOn reports whether an error leaves something that the next call may go on with.
func mayGoOn(cause error) bool {
	for _, passes := range []error{context.Canceled, context.DeadlineExceeded, errdefs.ErrUnavailable, errdefs.ErrBusy, errdefs.ErrInUse} {
		if errors.Is(cause, passes) {
			return true
		}
	}
	return false
}

// dropUnfinished removes a copy that is not whole. What is whole stays.
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

// Open returns a snapshot as the origin of a copy in another pool; ErrNotFound as GetSnapshot.
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

// read opens a device of an object for reading, for as long as use takes.
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

// readAllocated is Origin.Read of an open device.
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

// createElsewhere makes a copy of what is in another pool of this node. Of a volume, which may be in use, a snapshot is cut first, and
// removed when the copy is whole, or has failed for good.
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

// cutName is the name of the snapshot that is cut for a copy of a volume in another pool, by the key of the copy.
func cutName(key string) string { return "copy\x00" + key }

// OpenCut cuts a snapshot of a volume for the copy of a key in another pool, or finds the one that is there, and returns it as the origin of
// the copy. Nobody else sees it. EndCut removes it.
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

// EndCut removes what OpenCut cut of a volume of a pool for the copy of a key; that it is not there is success.
func (l *Local) EndCut(ctx context.Context, pool, key string) error {
	ctx, cancel := undoing.Context(ctx)
	defer cancel()
	p, ref, err := l.object(ID{blockdev.Snapshot, pool, KeyOf(cutName(key))}, blockdev.Snapshot)
	if err != nil {
		return err
	}
	return l.remove(ctx, p, ref)
}
