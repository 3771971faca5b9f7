package volume

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/ashlar-csi/ashlar/internal/trace"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvmet"
	"github.com/ashlar-csi/ashlar/pkg/device"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
)

// A volume of this node may be read by many nodes at once (docs/decisions/many-readers.md). It then has one device, which fails all writes
// (device.Options.Guarded). Pods of this node use that device, and it is exported to the other nodes. So nobody writes, whatever a reader does.
//
// The record says that the volume is read (labelRead), from before the device is there until it is gone. To which nodes it is exported, the kernel tells,
// as long as the machine runs. So any number of readers fits into a record.

// Many reports whether a claim is one of many: its node reads the volume beside others, and nobody writes.
func (c Claim) Many() bool { return strings.HasSuffix(c.Mode, ","+manyReaders) }

// manyReaders is the CSI access mode of such claims, in Claim.Mode.
const manyReaders = "MULTI_NODE_READER_ONLY"

// ReadByMany reports whether many nodes may read this volume at once. Not if it is encrypted: its home, which has no key, could not replay the journal.
func (v Volume) ReadByMany() bool {
	return v.Access == AccessAny && v.Encryption.Scheme == NotEncrypted
}

// reading is the label of a volume that many nodes read. It does not outlive the start of the machine, nor do the exports.
type reading struct {
	word string // random; all exports for this reading have it
	boot string // the word of the machine's start (Exporting.Boot)
	here bool   // this node reads it too
}

var readingPattern = regexp.MustCompile(`^([0-9a-f]{16}):([0-9a-f-]{1,36})(:here)?$`)

func (r reading) label() string {
	label := r.word + ":" + r.boot
	if r.here {
		label += ":here"
	}
	return label
}

// export returns the export to a reader.
func (r reading) export(to Grant) export { return export{to, r.word, r.boot} }

// readingOf returns the reading in a record; false if there is none, or it is of an earlier start of the machine than boot. ErrDataLoss if the label
// cannot be read.
func readingOf(r blockdev.Record, boot string) (reading, bool, error) {
	label := r.Labels[labelRead]
	if label == "" {
		return reading{}, false, nil
	}
	parts := readingPattern.FindStringSubmatch(label)
	if parts == nil {
		return reading{}, false, fmt.Errorf("%w: the record of %s says that it is read, and not how; another version of the driver may have written it: restart the node, with that version", errdefs.ErrDataLoss, r.Ref)
	}
	return reading{parts[1], parts[2], parts[3] != ""}, parts[2] == boot, nil
}

// AttachToRead attaches a volume that many nodes read. The device fails all writes, and stays until Detach. What the volume carries can be mounted without
// a journal to be replayed. An export for writing is ended first. ErrInUse while it is attached here for writing; ErrPrecondition if it was never written;
// ErrUnsupported if this node cannot make a device that fails writes.
func (l *Local) AttachToRead(ctx context.Context, v Volume, _ bool) (_ blockdev.Device, err error) {
	ctx, end := trace.Start(ctx, "attach to read", "volume", v.ID.String())
	defer func() { end(err) }()
	pool, record, err := l.finishedRecord(ctx, v.ID)
	if err == nil {
		_, err = l.beginReading(ctx, pool, record, true)
	}
	if err != nil {
		return blockdev.Device{}, err
	}
	return l.attachGuarded(ctx, pool, record)
}

func (l *Local) attachGuarded(ctx context.Context, pool blockdev.Pool, record blockdev.Record) (blockdev.Device, error) {
	v := fromRecord(pool.Name(), l.node, record)
	return l.stacks.Of(pool, record.Ref).Attach(ctx, device.Options{Keep: true, Guarded: true, Attributes: queueSettings(v.Mutable)})
}

// ExportToRead exports a volume to a node that reads it beside others, or finds the export. Errors are those of Export and AttachToRead.
func (l *Local) ExportToRead(ctx context.Context, id ID, to Grant) (_ Exported, err error) {
	if err := l.mayExport(id, to); err != nil {
		return Exported{}, err
	}
	exporter, how, err := l.exporter()
	if err != nil { // before anything changes
		return Exported{}, err
	}
	ctx, end := trace.Start(ctx, "export to read", "volume", id.String())
	defer func() { end(err) }()
	pool, record, err := l.finishedRecord(ctx, id)
	if err != nil {
		return Exported{}, err
	}
	r, err := l.beginReading(ctx, pool, record, false)
	if err != nil {
		return Exported{}, err
	}
	attached, err := l.attachGuarded(ctx, pool, record)
	if err == nil {
		defer func() { err = errors.Join(err, attached.Close()) }()
		var out Exported
		if out, err = r.export(to).exported(exporter, how, record, attached.Size).add(ctx, exporter, attached.Path, r.export(to).psk(how.Key, record.Key)); err == nil {
			l.setFailed(place{id, pool.Name()}, nil)
			l.setGiven(id, out.NQN, out.Host)
			return out, nil
		}
	}
	return Exported{}, fmt.Errorf("export volume %s for reading to %s: %w", id, to, err)
}

// beginReading records that a volume is read, here or by other nodes, after it has made sure that nobody writes to it (settle).
func (l *Local) beginReading(ctx context.Context, pool blockdev.Pool, record blockdev.Record, here bool) (reading, error) {
	_, how, err := l.exporter()
	if err != nil {
		return reading{}, err
	}
	r, is, err := readingOf(record, how.Boot)
	if err != nil || is && (r.here || !here) {
		return r, err
	}
	if !is {
		if err := l.settle(ctx, pool, record); err != nil {
			return reading{}, fmt.Errorf("have volume %s read by many: %w", IDOf(pool.Name(), record), err)
		}
		word := make([]byte, 8)
		_, _ = rand.Read(word) // it never fails
		r = reading{word: hex.EncodeToString(word), boot: how.Boot}
	}
	r.here = r.here || here
	return r, changeLabel(ctx, pool, record.Ref, labelRead, r.label())
}

// settle ends what writes to a volume that nobody reads yet: its export, and the seal of a move. It then replays the journal and grows the filesystem, so
// that this can be mounted without a write.
func (l *Local) settle(ctx context.Context, pool blockdev.Pool, record blockdev.Record) (err error) {
	v := fromRecord(pool.Name(), l.node, record)
	switch {
	case !v.ReadByMany():
		return fmt.Errorf("%w: it is for one node at a time: access %s, encryption %q", errdefs.ErrPrecondition, v.Access, v.Encryption.Scheme)
	case v.Format.State == Blank || v.Format.State == Formatting:
		return fmt.Errorf("%w: nothing was ever written to it; make it from a snapshot or a volume, or write it first, by another claim", errdefs.ErrPrecondition)
	}
	if err := l.makeOurs(ctx, v.ID); err != nil {
		return err
	}
	if err := l.unusedHere(ctx, pool, record.Ref); err != nil || v.Filesystem == "" {
		return err
	}
	attached, err := l.layMarked(ctx, pool, record, device.Options{}, func(o device.Options) (blockdev.Device, error) {
		return l.stacks.Of(pool, record.Ref).Attach(ctx, o)
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, attached.Close()) }()
	if err := filesystem.Unused(ctx, attached.Path); err != nil {
		return err
	}
	if err := v.carries(attached, v.Filesystem); err != nil {
		return err
	}
	return l.endless.Do(v.ID.String(), func() error { return filesystem.Settle(ctx, v.Filesystem, attached.Path) })
}

// Readers returns the generations of the claims for which a volume is exported for reading.
func (l *Local) Readers(ctx context.Context, id ID) (generations []int64, err error) {
	all, _, err := l.readersNow(ctx, id)
	for _, one := range all {
		generations = append(generations, one.generation)
	}
	slices.Sort(generations)
	return generations, err
}

// IsReader reports whether a volume is exported for reading to a node, for a generation.
func (l *Local) IsReader(ctx context.Context, id ID, to Grant) (bool, error) {
	all, host, err := l.readersNow(ctx, id)
	return slices.ContainsFunc(all, func(one reader) bool { return one.generation == to.Generation && one.Host == host(to) }), err
}

// readersNow returns the exports of a volume for reading, and what returns the name of the host of a grant.
func (l *Local) readersNow(ctx context.Context, id ID) (all []reader, host func(Grant) string, err error) {
	_, record, err := l.finishedRecord(ctx, id)
	if err != nil || record.Labels[labelRead] == "" {
		return nil, nil, err
	}
	exporter, how, unavailable := l.exporter()
	if how.Boot == "" {
		return nil, nil, unavailable
	}
	r, is, err := readingOf(record, how.Boot)
	if err != nil || !is {
		return nil, nil, err
	}
	if unavailable != nil {
		return nil, nil, unavailable
	}
	all, err = l.readers(ctx, exporter, id, r)
	return all, func(to Grant) string { return r.export(to).host(how.Key, id.Key) }, err
}

// reader is an export of a volume for reading that the kernel has, or should have: another tool may have removed it.
type reader struct {
	nvmet.Export
	generation int64
}

func (l *Local) readers(ctx context.Context, exporter Exporter, id ID, r reading) (found []reader, err error) {
	all, err := exporter.Exports(ctx)
	given := l.givenOf(id)
	for _, e := range all {
		if host, known := given[e.NQN]; known {
			e.Host = host
			delete(given, e.NQN)
		}
		if generation, is := r.reader(id.Key, e.NQN); is {
			found = append(found, reader{e, generation})
		}
	}
	for nqn, host := range given {
		if generation, is := r.reader(id.Key, nqn); is {
			found = append(found, reader{nvmet.Export{NQN: nqn, Host: host}, generation})
		}
	}
	return found, err
}

// noteReaders remembers what the kernel exports of a volume for reading, so that it is exported again if another tool removes it.
func (l *Local) noteReaders(ctx context.Context, pool blockdev.Pool, record blockdev.Record) error {
	exporter, how, err := l.exporter()
	if how.Open == nil {
		return nil // nothing is exported
	}
	if err != nil {
		return err
	}
	r, is, err := readingOf(record, how.Boot)
	if err != nil || !is {
		return err
	}
	id := IDOf(pool.Name(), record)
	all, err := l.readers(ctx, exporter, id, r)
	for _, one := range all {
		if one.Host != "" {
			l.setGiven(id, one.NQN, one.Host)
		}
	}
	if err == nil {
		l.setFailed(place{id, pool.Name()}, nil)
	}
	return err
}

// readAgain attaches a volume and adds to b the exports for reading that are to be made again; given are their hosts by name.
func (l *Local) readAgain(ctx context.Context, b *batch, pool blockdev.Pool, record blockdev.Record, given map[string]string) error {
	exporter, how, err := l.exporter()
	if err != nil {
		return err
	}
	r, is, err := readingOf(record, how.Boot)
	if err != nil || !is {
		return err
	}
	for nqn, host := range given {
		generation, is := r.reader(record.Key, nqn)
		if !is {
			continue
		}
		attached, err := l.attachGuarded(ctx, pool, record)
		if err != nil {
			return err
		}
		one := again{r.export(Grant{Generation: generation}).exported(exporter, how, record, attached.Size), place{IDOf(pool.Name(), record), pool.Name()}, attached}
		one.Host = host // the Grant has no node, as the host's name has only a hash of it
		b.all = append(b.all, one)
	}
	return nil
}

// reader returns the generation of an export by its name; false if it is not of this reading and of the volume with that key.
func (r reading) reader(key, nqn string) (generation int64, is bool) {
	rest, of := strings.CutPrefix(nqn, nvmet.Prefix+key+":")
	number, word, _ := strings.Cut(rest, ":")
	generation, err := strconv.ParseInt(number, 10, 64)
	return generation, of && err == nil && word == r.word
}

// EndReaders ends the exports of a volume for reading, except those of generations for which keep returns true. After success no I/O of them arrives any
// more, and a volume that nobody reads is detached. After an error it has to be called again.
func (l *Local) EndReaders(ctx context.Context, id ID, keep func(generation int64) bool) error {
	pool, record, err := l.finishedRecord(ctx, id)
	if err != nil || record.Labels[labelRead] == "" {
		return errdefs.IgnoreNotFound(err)
	}
	return trace.Do(ctx, "end readers", func(ctx context.Context) error { return l.endReading(ctx, pool, record, keep, false) }, "volume", id.String())
}

// EndReadingHere detaches a volume that this node itself reads without a claim: nobody unstages what could not be staged. What is mounted, bound or open
// stays.
func (l *Local) EndReadingHere(ctx context.Context, id ID) error {
	pool, record, err := l.finishedRecord(ctx, id)
	if err != nil || record.Labels[labelRead] == "" {
		return errdefs.IgnoreNotFound(err)
	}
	devices, err := l.stacks.Of(pool, record.Ref).Attached(ctx)
	if err != nil {
		return err
	}
	if l.mounted(devices) {
		return nil
	}
	if err := l.endReading(ctx, pool, record, func(int64) bool { return true }, true); !errors.Is(err, errdefs.ErrInUse) {
		return err
	}
	return nil
}

// endAllReading ends all reading of a volume, elsewhere and here. ErrInUse while somebody here has the device.
func (l *Local) endAllReading(ctx context.Context, id ID) error {
	if _, is := l.exporting(); !is { // then nobody is given anything to read
		return nil
	}
	pool, record, err := l.finishedRecord(ctx, id)
	if err != nil || record.Labels[labelRead] == "" {
		return errdefs.IgnoreNotFound(err) // whoever uses the volume finds that it is missing
	}
	devices, err := l.stacks.Of(pool, record.Ref).Attached(ctx)
	for _, d := range devices { // a device that is bound need not be open
		if paths := l.mounts.Paths(d.Number); len(paths) > 0 {
			return fmt.Errorf("%w: volume %s is read on its node %s, at %v; end the pods that use it there", errdefs.ErrInUse, id, l.node, paths)
		}
	}
	if err != nil {
		return err
	}
	return l.endReading(ctx, pool, record, func(int64) bool { return false }, true)
}

// endReading ends exports for reading, except those that keep wants; with here also what this node itself reads. If nobody reads the volume then, it is
// detached.
func (l *Local) endReading(ctx context.Context, pool blockdev.Pool, record blockdev.Record, keep func(generation int64) bool, here bool) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("end what reads volume %s: %w", IDOf(pool.Name(), record), err)
		}
	}()
	exporter, how, unavailable := l.exporter()
	if how.Boot == "" {
		return unavailable
	}
	r, is, err := readingOf(record, how.Boot)
	if err != nil {
		return err
	}
	id, left := IDOf(pool.Name(), record), 0
	if is {
		if unavailable != nil {
			return unavailable
		}
		all, err := l.readers(ctx, exporter, id, r)
		if err != nil {
			return err
		}
		for _, one := range all {
			if keep(one.generation) {
				left++
				continue
			}
			l.ending(place{id, pool.Name()}, one.NQN)
			if err := exporter.Remove(ctx, one.NQN); err != nil {
				return err
			}
		}
		if left > 0 && r.here && here {
			r.here = false
			return changeLabel(ctx, pool, record.Ref, labelRead, r.label())
		}
		if left > 0 || r.here && !here {
			return nil
		}
	}
	if err := l.detach(ctx, l.stacks.Of(pool, record.Ref)); err != nil {
		return err
	}
	return changeLabel(ctx, pool, record.Ref, labelRead, "")
}

// leaveReading is Detach for a volume that many nodes read: the others go on. It reports whether it has done so; if not, the volume is detached as any other.
func (l *Local) leaveReading(ctx context.Context, id ID) (is bool, err error) {
	how, is := l.exporting()
	if !is {
		return false, nil
	}
	pool, record, err := l.finishedRecord(ctx, id)
	if err != nil || record.Labels[labelRead] == "" {
		return false, nil // a device is taken away without a record
	}
	if _, now, _ := readingOf(record, how.Boot); now && how.Open == nil {
		return false, nil // whether others go on is not known
	}
	return true, l.endReading(ctx, pool, record, func(int64) bool { return true }, true)
}

// notRead returns ErrInUse if many nodes read a volume, or are about to.
func notRead(r blockdev.Record) error {
	if r.Labels[labelRead] == "" {
		return nil
	}
	return fmt.Errorf("%w: %s is read by many, so nothing of it changes; end the pods that read it", errdefs.ErrInUse, r.Ref)
}
