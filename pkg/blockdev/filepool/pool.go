// Package filepool is pools of files on a filesystem, which are attached as loop devices.
package filepool

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/layout"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/recordfile"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/catalog"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// pool keeps each object as an image file with a record file beside it:
//
//	FOLDER/pool                the identity of the pool (place.go)
//	FOLDER/lock                flock(2) by the one process that may use the pool
//	FOLDER/volumes             flock(2) too: the lock may be removed
//	FOLDER/volumes/KEY.rec     the record (record.go)
//	FOLDER/volumes/KEY.img     the bytes
//	FOLDER/snapshots/KEY.rec, KEY.img
//
// A volume is attached as a loop device. The record goes through creating, ready and
// deleting; an image whose record says creating or deleting belongs to nobody and is
// removed when the pool is opened. An image without a record is never touched.
//
// What is in memory is a cache of the records and of the loop devices, filled when
// the pool is opened and changed only after the disk.
type pool struct {
	name     string
	location Location
	id       string
	root     *os.Root
	lock     *os.File
	folders  map[blockdev.Kind]*os.File // held to be synced
	folderID map[blockdev.Kind]string
	device   uint64 // that the folders are on
	mapper   bool   // the kernel has a device mapper
	reflink  bool   // the filesystem can share blocks between files
	kind     int64  // of the filesystem, as in statfs(2)
	block    int64  // of the filesystem in bytes, or less

	mu sync.Mutex
	catalog.Index[*object]
	damaged map[blockdev.Ref]error       // records that cannot be read
	strays  []string                     // images without a record
	loops   map[blockdev.Ref][]knownLoop // loop devices last seen over the object; its slices are never changed
	seen    uint64                       // see knownLoop
	covered map[blockdev.Ref]bool        // objects that may have a device over their loop device

	space space
}

// object is what is known of one record file.
type object struct {
	stored  *recordfile.Record
	at      recordfile.Position
	copied  int64     // bytes of an unfinished copy that are in place
	cut     time.Time // of the origin of that copy
	active  bool      // somebody is making it ready, or removing it
	touched time.Time // of an unfinished copy: when it was last worked on; zero if only its removal is left
	copying bool      // btrfs writes the image to new places (an older driver made it)
	use     use       // of the filesystem
}

func (o *object) size() int64 { return max(o.stored.Size, o.stored.Growing) }

// Open opens the pool in the directory, and finishes or undoes what a crash left half-done in it. Where there is none, one is made if
// Location.Create, or what is known of it, lets it; else it is errdefs.ErrUnavailable.
func (l Location) Open(ctx context.Context, name string, known blockdev.Known) (_ blockdev.Pool, err error) {
	p := &pool{name: name, location: l, folders: map[blockdev.Kind]*os.File{}, Index: catalog.NewIndex[*object](), damaged: map[blockdev.Ref]error{}, loops: map[blockdev.Ref][]knownLoop{}, covered: map[blockdev.Ref]bool{}, folderID: map[blockdev.Kind]string{}}
	p.space.unfinished = map[blockdev.Ref]bool{}
	p.space.survey.most = surveyExtents
	p.space.survey.context, p.space.survey.stop = context.WithCancel(context.WithoutCancel(ctx))
	defer func() {
		if err != nil {
			p.Close()
			err = fmt.Errorf("open pool %s at %s: %w", name, l.Path, err)
		}
	}()
	var whole bool
	if p.root, p.id, whole, err = openPlace(ctx, l, known); err != nil {
		return nil, err
	}
	if p.lock, err = lockPool(p.root); err != nil {
		return nil, err
	}
	for kind, folder := range layout.Folders {
		if p.folders[kind], err = p.root.Open(folder); err != nil {
			return nil, errdefs.FromErrno(err)
		}
		if p.folderID[kind], err = folderID(p.folders[kind]); err != nil {
			return nil, err
		}
	}
	// Somebody may take the lock file for a stale one, and remove it.
	if err := exclusive(p.folders[blockdev.Volume]); err != nil {
		return nil, err
	}
	var shared bool
	if p.location.ReservePercent, shared, err = l.Reserve(); err != nil {
		return nil, err
	}
	klog.FromContext(ctx).V(2).Info("Reserve of the pool", "pool", name, "percent", p.location.ReservePercent, "sharesFilesystem", shared)
	if err := p.identify(ctx, whole); err != nil {
		return nil, err
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(p.lock.Fd()), &st); err != nil {
		return nil, errdefs.FromErrno(err)
	}
	p.kind, p.block = st.Type, min(st.Bsize, blockdev.Granularity)
	var folder unix.Stat_t
	if err := unix.Fstat(int(p.lock.Fd()), &folder); err != nil {
		return nil, errdefs.FromErrno(err)
	}
	p.device = folder.Dev
	p.reflink = canReflink(p.lock)
	for kind := range layout.Folders {
		if err := p.load(kind); err != nil {
			return nil, err
		}
	}
	if err := p.prepareInPlace(ctx); err != nil {
		return nil, err
	}
	if err := p.findLoops(); err != nil {
		return nil, err
	}
	p.secureAll(ctx)
	if err := p.recoverGuards(ctx); err != nil {
		return nil, err
	}
	p.sweep(ctx)
	return p, nil
}

// load reads all records of a kind.
func (p *pool) load(kind blockdev.Kind) error {
	entries, err := fs.ReadDir(p.root.FS(), layout.Folders[kind])
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
			if err := p.root.Remove(layout.Folders[kind] + "/" + entry.Name()); err != nil {
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
			p.insert(&object{stored: s, at: at})
		case errors.Is(err, recordfile.ErrEmpty) && !images[key]:
			// A crash before the record was on disk; nothing was ever handed out.
			if err := p.root.Remove(layout.Record(ref)); err != nil {
				return errdefs.FromErrno(err)
			}
		case errors.Is(err, errdefs.ErrUnavailable): // it says nothing of the record
			return err
		case errors.Is(err, errdefs.ErrDataLoss):
			p.damaged[ref] = err
		default:
			p.damaged[ref] = fmt.Errorf("%w: %w", catalog.ErrRecord, err)
		}
		delete(images, key)
	}
	for key := range images {
		ref := blockdev.Ref{Kind: kind, Key: key}
		p.strays = append(p.strays, layout.Folders[kind]+"/"+key+".img")
		if ref.Validate() == nil {
			p.damaged[ref] = recordfile.ErrNoRecord
		}
	}
	return nil
}

// insert adds an object to the index and to what is promised. The caller holds mu,
// or is alone.
func (p *pool) insert(o *object) {
	p.Put(o.stored.Decoded.Ref, o)
	p.space.promised += o.size()
	o.use.shared = p.reflink && o.stored.Origin != ""
}

func (p *pool) forget(ref blockdev.Ref) {
	p.mu.Lock()
	defer p.mu.Unlock()
	o := p.Objects[ref]
	p.Index.Remove(ref)
	delete(p.space.unfinished, ref)
	p.space.promised -= o.size()
	p.space.allocated -= o.use.counted
	if o.use.shared {
		p.space.measured, p.space.survey.due = time.Time{}, true
	}
}

// sweepTime bounds how long a call works on what others have left, and the start on all of it.
const sweepTime = 2 * time.Second

// sweep finishes what a crash, or a caller that never came back, left half-done.
// A failure is left for the next sweep: it costs space, not data.
func (p *pool) sweep(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 5*sweepTime)
	defer cancel()
	p.mu.Lock()
	var unfinished []blockdev.Ref
	for ref, o := range p.Objects {
		if o.stored.State != catalog.Ready {
			unfinished = append(unfinished, ref)
		} else if o.stored.Growing != 0 {
			unfinished = append(unfinished, ref)
		}
	}
	p.mu.Unlock()
	for _, ref := range unfinished {
		var err error
		if o := p.find(ref); o.stored.State == catalog.Ready {
			_, err = p.Expand(ctx, ref, o.stored.Growing)
		} else {
			err = p.remove(ctx, ref)
		}
		if err != nil {
			klog.FromContext(ctx).Error(err, "could not finish what was left half-done; the next start tries again", "pool", p.name, "object", ref.String())
		}
	}
}

// sweepAbandoned gives up unfinished copies that nobody works on any more, and ends
// removals that failed half-way.
func (p *pool) sweepAbandoned(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, sweepTime)
	defer cancel()
	p.mu.Lock()
	var abandoned []blockdev.Ref
	for ref := range p.space.unfinished {
		if o := p.Objects[ref]; o != nil && !o.active && time.Since(o.touched) > catalog.AbandonedAfter {
			o.active = true
			abandoned = append(abandoned, ref)
		}
	}
	p.mu.Unlock()
	for _, ref := range abandoned {
		if err := p.remove(ctx, ref); err != nil {
			klog.FromContext(ctx).Error(err, "could not remove what is left of an object; the next call tries again", "pool", p.name, "object", ref.String())
		}
	}
}

func (p *pool) Name() string { return p.name }

func (p *pool) Granularity() int64 { return blockdev.Granularity }

func (p *pool) find(ref blockdev.Ref) *object {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.Objects[ref]
}

// lookup returns a ready object and its record; a stored is never changed, only
// replaced.
func (p *pool) lookup(ref blockdev.Ref) (*object, *recordfile.Record, error) {
	if err := ref.Validate(); err != nil {
		return nil, nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.damaged[ref]; err != nil {
		return nil, nil, fmt.Errorf("pool %s: %w", p.name, err)
	}
	o := p.Objects[ref]
	if o == nil || o.stored.State != catalog.Ready {
		return nil, nil, fmt.Errorf("%w: no %s in pool %s", errdefs.ErrNotFound, ref, p.name)
	}
	return o, o.stored, nil
}

func (p *pool) Get(_ context.Context, ref blockdev.Ref) (blockdev.Record, error) {
	_, s, err := p.lookup(ref)
	if err != nil {
		return blockdev.Record{}, err
	}
	return catalog.Copy(s.Decoded), nil
}

func (p *pool) List(_ context.Context, kind blockdev.Kind, after string, limit int) ([]blockdev.Record, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.Page(kind, after, limit, func(o *object) blockdev.Record { return o.stored.Decoded }), nil
}

// save writes a record over the one of o, on disk and then in memory.
func (p *pool) save(o *object, s *recordfile.Record) error {
	at, err := recordfile.Update(p.root, layout.Record(s.Decoded.Ref), s, o.at)
	p.mu.Lock()
	defer p.mu.Unlock()
	o.at = at
	if err != nil {
		return fmt.Errorf("write the record of %s in pool %s: %w", s.Decoded.Ref, p.name, err)
	}
	p.space.promised -= o.size()
	o.stored = s
	p.space.promised += o.size()
	return nil
}

// secure makes sure that both slots have the record of o, before anybody acts on what it says.
func (p *pool) secure(o *object) error {
	p.mu.Lock()
	s, alone := o.stored, o.at.Alone
	p.mu.Unlock()
	if !alone {
		return nil
	}
	return p.save(o, s)
}

// secureAll does so for all, when the pool is opened: what a crash left between the slots, what
// rotted, and what is of version 1. Records that cannot be written now (the disk may be full) are
// when they are used.
func (p *pool) secureAll(ctx context.Context) {
	log := klog.FromContext(ctx)
	var anew []string
	for ref, o := range p.Objects {
		if !o.at.Alone {
			continue
		}
		if err := p.secure(o); err != nil {
			log.Error(err, "One of the two slots of a record could not be written; it is tried again when the record is used", "pool", p.name, "object", ref.String())
		} else {
			anew = append(anew, ref.String())
		}
	}
	if len(anew) > 0 {
		log.Info("Records whose slots were not alike, or of an older version, were written anew", "pool", p.name, "count", len(anew), "first", anew[0])
	}
}

func (p *pool) SetLabels(_ context.Context, ref blockdev.Ref, change func(map[string]string) error) (blockdev.Record, error) {
	o, s, err := p.lookup(ref)
	if err != nil {
		return blockdev.Record{}, err
	}
	record, err := catalog.ChangeLabels(s.Decoded, change)
	if err != nil {
		return record, err
	}
	if maps.Equal(record.Labels, s.Labels) {
		return record, p.secure(o)
	}
	if err := p.save(o, recordfile.New(record, catalog.Ready, s.Growing)); err != nil {
		return blockdev.Record{}, err
	}
	return catalog.Copy(record), nil
}

func (p *pool) Delete(ctx context.Context, ref blockdev.Ref) error {
	if err := ref.Validate(); err != nil {
		return err
	}
	p.mu.Lock()
	damaged, o := p.damaged[ref], p.Objects[ref]
	p.mu.Unlock()
	if damaged != nil {
		return errdefs.Recast(errdefs.ErrPrecondition, damaged, "%s in pool %s is not deleted, because its record cannot be read; look at %s, and remove it and the image by hand if nobody needs them",
			ref, p.name, layout.Record(ref))
	}
	if o == nil {
		return nil
	}
	if devices, err := p.Attached(ctx, ref); err != nil {
		return err
	} else if len(devices) > 0 {
		return fmt.Errorf("%w: %s in pool %s is attached as %s", errdefs.ErrInUse, ref, p.name, devices[0].Path)
	}
	p.mu.Lock()
	busy := o.active
	o.active = true
	p.mu.Unlock()
	if busy {
		return fmt.Errorf("delete %s in pool %s: %w", ref, p.name, errdefs.ErrBusy)
	}
	return p.remove(ctx, ref)
}

// remove takes the bytes away, then the record. Unlinked files need no sync of the
// folder: should a power cut bring them back, the record still says deleting (or
// creating) and the next start removes them again.
//
// The object is nobody's from the moment its record says so. What fails after that, or takes
// longer than the context, is tried again by the next Create or Capacity, as the caller may
// not come back.
func (p *pool) remove(ctx context.Context, ref blockdev.Ref) error {
	o := p.find(ref)
	if o == nil {
		return nil
	}
	if err := p.removeFiles(ctx, ref, o); err != nil {
		p.mu.Lock()
		defer p.mu.Unlock()
		o.active, o.touched = false, time.Time{}
		if o.stored.State != catalog.Ready {
			p.space.unfinished[ref] = true
		}
		return err
	}
	p.forget(ref)
	return nil
}

// removeFiles: a filesystem may be so full that it takes no change of a record (btrfs, which
// writes its own metadata to new places, can always remove files and not always write). Then
// the image goes without that; should a crash come in between, the object has lost its bytes,
// which is reported (errdefs.ErrDataLoss), and the retry of the deletion removes the rest.
func (p *pool) removeFiles(ctx context.Context, ref blockdev.Ref, o *object) error {
	o.copied = 0 // there is nothing to go on with any more
	if o.stored.State == catalog.Ready {
		if err := p.save(o, recordfile.New(o.stored.Decoded, catalog.Deleting, o.stored.Growing)); err != nil && !errors.Is(err, errdefs.ErrNoSpace) {
			return err
		}
	}
	if err := p.empty(ctx, ref); err != nil {
		return fmt.Errorf("empty the image of %s in pool %s: %w", ref, p.name, err)
	}
	if err := p.unlink(layout.Image(ref)); err != nil {
		return err
	}
	if p.kind == unix.BTRFS_SUPER_MAGIC { // it counts space as free from its next commit on
		if err := unix.Syncfs(int(p.lock.Fd())); err != nil {
			return fmt.Errorf("sync the filesystem of pool %s: %w", p.name, errdefs.FromErrno(err))
		}
	}
	return p.unlink(layout.Record(ref))
}

// unlink removes a file, if it is there.
func (p *pool) unlink(path string) error {
	if err := p.root.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove %s from pool %s: %w", path, p.name, errdefs.FromErrno(err))
	}
	return nil
}

// empty gives back what an image takes. That is said only when it is so: XFS frees unlinked
// files in the background, but a truncated one at once. Each extent takes the kernel some
// 30 us, and an image that was written at random has millions of them: so large ones go in
// steps, between which the context may end it. A retry goes on with what is left.
// What is there and is not the object's image, or has a second name, keeps its bytes.
func (p *pool) empty(ctx context.Context, ref blockdev.Ref) error {
	info, err := p.root.Lstat(layout.Image(ref))
	if errors.Is(err, fs.ErrNotExist) || err == nil && !info.Mode().IsRegular() {
		return nil
	}
	image, err := p.root.OpenFile(layout.Image(ref), os.O_WRONLY, 0)
	if err != nil {
		return errdefs.FromErrno(err)
	}
	defer image.Close()
	if err := p.checkOwner(ref, image, false); errors.Is(err, errNotOwn) {
		return nil
	}
	if info, err = image.Stat(); err != nil {
		return errdefs.FromErrno(err)
	}
	if info.Sys().(*syscall.Stat_t).Nlink > 1 {
		return nil
	}
	at := info.Size()
	err = inSteps(ctx, info.Size(), func(n int64) error {
		if at -= n; at == 0 && p.kind != unix.XFS_SUPER_MAGIC && p.kind != unix.BTRFS_SUPER_MAGIC {
			return nil
		}
		return errdefs.FromErrno(image.Truncate(at))
	})
	if errors.Is(err, errdefs.ErrNoSpace) { // to unlink it always works
		return nil
	}
	return err
}

// firstStep is how much of an image a system call is to work on whose time depends on the
// number of extents, in bytes: at most 16384 of them.
const firstStep = 64 << 20

// quickStep is the time of a step after which the next one may be twice as large.
const quickStep = 50 * time.Millisecond

// inSteps has n bytes worked on in parts, between which the context may end it: small ones
// where they take long, and ever larger ones otherwise.
func inSteps(ctx context.Context, n int64, work func(n int64) error) error {
	for step := int64(firstStep); n > 0; {
		if err := ctx.Err(); err != nil {
			return err
		}
		began, part := time.Now(), min(step, n)
		if err := work(part); err != nil {
			return err
		}
		n -= part
		if time.Since(began) < quickStep {
			step *= 2
		} else {
			step = firstStep
		}
	}
	return nil
}

func (p *pool) Close() error {
	p.space.survey.close()
	var failures []error
	if p.lock != nil {
		failures = append(failures, p.lock.Close())
	}
	for _, folder := range p.folders {
		if folder != nil {
			failures = append(failures, folder.Close())
		}
	}
	if p.root != nil {
		failures = append(failures, p.root.Close())
	}
	return errors.Join(failures...)
}
