package filepool

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/layout"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/nocow"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/recordfile"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/catalog"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// load reads all records of a kind.
func (p *pool) load(kind blockdev.Kind) error {
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
	for _, entry := range entries {
		if strings.HasSuffix(entry.Name(), ".rec"+freshRecord) { // a crash came before it took the place of the record
			if err := p.root.Remove(layout.Directories[kind] + "/" + entry.Name()); err != nil {
				return errdefs.FromErrno(err)
			}
		}
		key, ok := strings.CutSuffix(entry.Name(), ".rec")
		ref := blockdev.Ref{Kind: kind, Key: key}
		if !ok || ref.Validate() != nil {
			continue
		}
		s, at, err := recordfile.Read(p.root, layout.Record(ref), ref)
		switch {
		case err == nil:
			p.insert(&object{Entry: catalog.Found(s.Decoded, s.State), growing: s.Growing, at: at})
		case errors.Is(err, recordfile.ErrEmpty) && !images[key]:
			// A crash before the record was on disk; nothing was ever handed out.
			if err := p.root.Remove(layout.Record(ref)); err != nil {
				return errdefs.FromErrno(err)
			}
		case errors.Is(err, errdefs.ErrUnavailable): // it says nothing of the record
			return err
		case errors.Is(err, errdefs.ErrDataLoss):
			p.Damaged[ref] = err
		default:
			p.Damaged[ref] = fmt.Errorf("%w: %w", catalog.ErrRecord, err)
		}
		delete(images, key)
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

// save writes a record over the one of o, on disk and then in memory.
func (p *pool) save(o *object, record blockdev.Record, state catalog.State, growing int64) error {
	at, err := recordfile.Update(p.root, layout.Record(record.Ref), recordfile.New(record, state, growing), o.at)
	p.Mu.Lock()
	defer p.Mu.Unlock()
	o.at = at
	if err != nil {
		return fmt.Errorf("write the record of %s in pool %s: %w", record.Ref, p.name, err)
	}
	p.space.promised -= o.size()
	p.Set(o, record, state)
	o.growing = growing
	p.space.promised += o.size()
	return nil
}

// completeSlots makes sure that both slots have the record of o, before anybody acts on what it says.
func (p *pool) completeSlots(o *object) error {
	if !o.at.Alone {
		return nil
	}
	return p.save(o, o.Record, o.State, o.growing)
}

// completeAllSlots does so for all, when the pool is opened: what a crash left between the slots, what
// rotted, and what is of version 1. Records that cannot be written now (the disk may be full) are
// when they are used.
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

// freshRecord is the end of the name of a record that is being made anew.
const freshRecord = ".new"

// prepareInPlace has new images and records written in place, and makes those records anew
// that are not: a change of a record, and so each deletion, must not need space. What cannot
// be done is left for the next start.
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
			o.copying, err = !inPlace && failure == nil, errors.Join(failure, image.Close())
		}
		if err == nil || errors.Is(err, fs.ErrNotExist) {
			err = p.moveRecord(layout.Record(ref))
		}
		if err != nil {
			klog.FromContext(ctx).Error(err, "could not have a record written in place; the next start tries again", "pool", p.name, "object", ref.String())
		}
	}
	return nil
}

// moveRecord makes a record that is written in place of one that is not.
func (p *pool) moveRecord(path string) error {
	old, err := p.root.Open(path)
	if err != nil {
		return errdefs.FromErrno(err)
	}
	defer old.Close()
	if done, err := nocow.InPlace(old); done || err != nil {
		return err
	}
	slots, err := io.ReadAll(old)
	if err != nil {
		return errdefs.FromErrno(err)
	}
	fresh := path + freshRecord
	if err := p.root.Remove(fresh); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return errdefs.FromErrno(err)
	}
	f, err := p.root.OpenFile(fresh, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return errdefs.FromErrno(err)
	}
	_, err = f.Write(slots)
	if err = errdefs.FromErrno(errors.Join(err, f.Sync(), f.Close())); err == nil {
		err = errdefs.FromErrno(p.root.Rename(fresh, path))
	}
	if err != nil {
		return errors.Join(err, p.root.Remove(fresh))
	}
	return nil
}
