package filepool

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/layout"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/nocow"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/recordfile"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/catalog"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// load reads all records of a kind into the catalog, when the pool is opened. An image without a record is a stray. Records that the disk cannot read are
// read again until then.
func (p *pool) load(kind blockdev.Kind, then time.Time) error {
	entries, err := fs.ReadDir(p.root.FS(), layout.Directories[kind])
	if err != nil {
		return errdefs.FromErrno(err)
	}
	images := map[string]bool{}
	for _, entry := range entries {
		if key, ok := strings.CutSuffix(entry.Name(), ".img"); ok {
			images[key] = true
		}
	}
	var refs []blockdev.Ref
	for _, entry := range entries {
		if strings.HasSuffix(entry.Name(), ".rec"+freshRecord) { // a crash came before the rename: see saveAnew
			if err := p.root.Remove(layout.Directories[kind] + "/" + entry.Name()); err != nil {
				return errdefs.FromErrno(err)
			}
		}
		key, ok := strings.CutSuffix(entry.Name(), ".rec")
		if ref := (blockdev.Ref{Kind: kind, Key: key}); ok && ref.Validate() == nil {
			refs = append(refs, ref)
		}
	}
	for some := range slices.Chunk(refs, readAtOnce) {
		for i, r := range p.readRecords(some, then) {
			if err := p.found(some[i], r, images[some[i].Key]); err != nil {
				return err
			}
			delete(images, some[i].Key)
		}
	}
	for key := range images {
		ref := blockdev.Ref{Kind: kind, Key: key}
		p.strays = append(p.strays, layout.Directories[kind]+"/"+key+".img")
		if ref.Validate() == nil {
			p.Damaged[ref] = recordfile.ErrNoRecord
		}
	}
	return nil
}

// readAtOnce is how many records are read in parallel: a disk that nothing was read from yet is fastest with many requests.
const readAtOnce = 32

// stored is what a record file has, or the error of reading it.
type stored struct {
	record *recordfile.Record
	at     recordfile.Position
	err    error
}

// A disk may be away for a moment (a cable, a path to it), and fail all reads meanwhile. A record that cannot be read when the pool is opened counts as
// damaged until it is opened next. So it is read again, every rereadPause, and for all records together no longer than rereadTime.
const (
	rereadPause = 500 * time.Millisecond
	rereadTime  = 5 * time.Second
)

// readRecords reads the records of objects, in parallel; those that the disk cannot read again until then.
func (p *pool) readRecords(refs []blockdev.Ref, then time.Time) []stored {
	read := make([]stored, len(refs))
	var readers sync.WaitGroup
	for i, ref := range refs {
		readers.Go(func() {
			r := &read[i]
			r.record, r.at, r.err = recordfile.Read(p.root, layout.Record(ref), ref)
			for errdefs.OfDisk(r.err) && time.Now().Before(then) {
				time.Sleep(rereadPause)
				r.record, r.at, r.err = recordfile.Read(p.root, layout.Record(ref), ref)
			}
		})
	}
	readers.Wait()
	return read
}

// found puts an object into the catalog by what its record has, or notes it as damaged. image: it has one. The error is for what is no fault of the
// record.
func (p *pool) found(ref blockdev.Ref, r stored, image bool) error {
	switch {
	case r.err == nil:
		p.insert(&object{Entry: catalog.Found(r.record.Decoded, r.record.State), growing: r.record.Growing, at: r.at})
	case errors.Is(r.err, recordfile.ErrEmpty) && !image:
		// A crash before the record was on disk; nothing was ever handed out. If there was more once, it is lost: then the image is, too.
		klog.Background().Info("Removing a record that has nothing in it, and no image", "pool", p.name, "object", ref.String(), "file", layout.Record(ref))
		return errdefs.FromErrno(p.root.Remove(layout.Record(ref)))
	case errors.Is(r.err, errdefs.ErrUnavailable): // the filesystem's fault, not the record's
		return r.err
	case errors.Is(r.err, errdefs.ErrDataLoss):
		p.Damaged[ref] = r.err
	default:
		p.Damaged[ref] = fmt.Errorf("%w: %w", catalog.ErrRecord, r.err)
	}
	return nil
}

// save writes a new record of o to the disk, and then into the catalog. If somebody removed the file, or the disk takes no writes to it, a new file takes
// its place: the catalog has all that was ever answered, so nothing is lost. The caller is the object's worker.
func (p *pool) save(o *object, record blockdev.Record, state catalog.State, growing int64) error {
	path, written := layout.Record(record.Ref), recordfile.New(record, state, growing)
	at, err := recordfile.Update(p.root, path, written, o.at)
	switch {
	case err == nil && o.at.Alone: // its file may be a new one, of which the directory was not synced
		at, err = p.syncName(record.Kind, at)
	case errors.Is(err, fs.ErrNotExist):
		if err = p.alive(); err == nil {
			at, err = p.saveAnew(written, record.Ref, at)
		}
	case recordfile.Unwritable(err):
		anew, failure := p.saveAnew(written, record.Ref, at)
		if at = anew; failure == nil {
			err = nil
		} else {
			err = fmt.Errorf("%w; nor can a new file take its place: %s", err, failure.Error())
		}
	}
	p.Mu.Lock()
	defer p.Mu.Unlock()
	p.place(o, at)
	if err != nil {
		return fmt.Errorf("write the record of %s in pool %s: %w", record.Ref, p.name, p.refused(path, err))
	}
	p.space.promised -= o.size()
	p.Set(o, record, state)
	o.growing = growing
	p.space.promised += o.size()
	return nil
}

// saveAnew writes a record into a new file, which takes the place of the record of ref durably. That needs space. at is the position of the present file.
// The position that it returns is right also with an error: a record is alone as long as a power cut could bring the file before it back.
func (p *pool) saveAnew(s *recordfile.Record, ref blockdev.Ref, at recordfile.Position) (recordfile.Position, error) {
	path := layout.Record(ref)
	fresh := path + freshRecord
	made, err := recordfile.Create(p.root, fresh, s)
	if err == nil {
		err = errdefs.FromErrno(p.root.Rename(fresh, path))
	}
	if err != nil {
		return at, errors.Join(err, p.unlink(fresh))
	}
	return p.syncName(ref.Kind, made)
}

// syncName syncs a directory, in which a file has the record that is at some position. The record is alone if that fails.
func (p *pool) syncName(kind blockdev.Kind, at recordfile.Position) (recordfile.Position, error) {
	err := p.directories[kind].Sync()
	at.Alone = at.Alone || err != nil
	return at, errdefs.FromErrno(err)
}

// completeBeside is completeSlots beside calls that may change the record. It waits for these.
func (p *pool) completeBeside(ctx context.Context, o *object) error {
	end, err := p.BeginChange(ctx, o)
	if err != nil {
		return err
	}
	defer end()
	return p.completeSlots(o)
}

// completeSlots writes the record of o again if only one slot has it. Callers do that before they act on what it says. The caller is the only one who changes
// the record.
func (p *pool) completeSlots(o *object) error {
	if !o.at.Alone {
		return nil
	}
	return p.save(o, o.Record(), o.State, o.growing)
}

// completeAllSlots calls completeSlots for all objects, when the pool is opened: after a crash between the two slots, for a slot that rotted, and for
// records of version 1. A record that cannot be written now (the disk may be full) is written when it is used.
func (p *pool) completeAllSlots(ctx context.Context) {
	log := klog.FromContext(ctx)
	var anew []string
	for ref, o := range p.Objects {
		if !o.at.Alone {
			continue
		}
		if err := p.completeSlots(o); err != nil {
			log.Error(err, "One of the two slots of a record could not be written; it is tried again when the record is used", "pool", p.name, "object", ref.String())
		} else {
			anew = append(anew, ref.String())
		}
	}
	if len(anew) > 0 {
		log.Info("Records whose slots were not alike, or of an older version, were written anew", "pool", p.name, "count", len(anew), "first", anew[0])
	}
}

// freshRecord ends the name of the file that saveAnew writes.
const freshRecord = ".new"

// prepareInPlace makes btrfs write images and records in place (package nocow). New ones are by their directory. Records that are not in place are made
// anew: a change of a record, and so each deletion, must not need space. Images stay as they are, and are counted (copying). What cannot be done is left
// for the next start.
func (p *pool) prepareInPlace(ctx context.Context) error {
	if p.kind != unix.BTRFS_SUPER_MAGIC {
		return nil
	}
	for _, dir := range p.directories {
		if err := nocow.Set(dir); err != nil {
			return err
		}
	}
	for ref, o := range p.Objects {
		image, err := layout.Open(p.root, layout.Image(ref))
		if err == nil {
			inPlace, failure := nocow.InPlace(image)
			o.use.copying, err = !inPlace && failure == nil, errors.Join(failure, image.Close())
			p.copying += one(o.use.copying)
		}
		if err == nil || errors.Is(err, fs.ErrNotExist) {
			err = p.moveRecord(o)
		}
		if err != nil {
			klog.FromContext(ctx).Error(err, "could not have a record written in place; the next start tries again", "pool", p.name, "object", ref.String())
		}
	}
	return nil
}

// moveRecord makes a record anew that is not written in place: see prepareInPlace.
func (p *pool) moveRecord(o *object) error {
	old, err := p.root.Open(layout.Record(o.Record().Ref))
	if err != nil {
		return errdefs.FromErrno(err)
	}
	inPlace, err := nocow.InPlace(old)
	if err = errors.Join(err, old.Close()); inPlace || err != nil {
		return err
	}
	at, err := p.saveAnew(recordfile.New(o.Record(), o.State, o.growing), o.Record().Ref, o.at)
	p.place(o, at)
	return err
}
