// Package filepool keeps volumes and snapshots as files on a filesystem, and attaches them as loop devices.
package filepool

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/internal/btrfs"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/directory"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/identity"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/layout"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/recordfile"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/sparse"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/catalog"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/ground"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// pool keeps each object as an image file with a record file beside it:
//
//	DIRECTORY/pool                the identity of the pool (internal/identity)
//	DIRECTORY/lock                flock(2) by the one process that may use the pool
//	DIRECTORY/volumes             flock(2) too: the lock may be removed
//	DIRECTORY/volumes/KEY.rec     the record (internal/recordfile)
//	DIRECTORY/volumes/KEY.img     the bytes
//	DIRECTORY/snapshots/KEY.rec, KEY.img
//	DIRECTORY/marks/KEY.rec, KEY.img
//
// A volume is attached as a loop device. The record goes through creating, ready and
// deleting; an image whose record says creating or deleting belongs to nobody and is
// removed when the pool is opened. An image without a record is never touched.
//
// What is in memory is a cache of the records and of the loop devices, filled when
// the pool is opened and changed only after the disk.
type pool struct {
	name        string
	location    Location
	id          string
	root        *os.Root
	lock        *os.File
	directories map[blockdev.Kind]*os.File // kept open, to be synced
	directoryID map[blockdev.Kind]string
	device      uint64 // st_dev of the directories
	reflink     bool   // the filesystem can share blocks between files
	kind        int64  // of the filesystem, as in statfs(2)
	block       int64  // of the filesystem in bytes, or less
	allocation  string // of a btrfs: the folder in sysfs that says what its space is used for; see given

	*catalog.Catalog[*object]
	// Guarded by Mu of the catalog, or not changed after the pool was opened:
	strays []string                     // images without a record
	loops  map[blockdev.Ref][]knownLoop // loop devices last seen over each object; the slices are replaced, never changed
	seen   uint64                       // the last number of a knownLoop.seen
	space  space
	trial  *trial // the one under way

	// How many such objects there are, so that PoolHealth need not look at each:
	alone   int // whose record is in one of its two slots only
	copying int // whose image btrfs writes to new places (use.copying)
}

// object is what is known of one record file.
type object struct {
	catalog.Entry
	growing            int64               // the size that it grows to; 0: it does not grow
	at                 recordfile.Position // of the record in its file
	cut                time.Time           // of an unfinished copy: the origin's Created
	use                use                 // of the filesystem, by the image
	deletionUnrecorded bool                // it is being deleted, and its record does not say so: that could not be written
}

// size returns how many bytes are promised to an object.
func (o *object) size() int64 { return max(o.Size(), o.growing) }

// Open opens the pool in the directory, and finishes or undoes what a crash left half-done in it. If there is no pool, it makes one where Location.Create
// and known permit that; else errdefs.ErrUnavailable.
func (l Location) Open(ctx context.Context, name string, known blockdev.Known) (_ blockdev.Pool, err error) {
	p := &pool{name: name, location: l, directories: map[blockdev.Kind]*os.File{}, Catalog: catalog.New[*object](name), loops: map[blockdev.Ref][]knownLoop{}, directoryID: map[blockdev.Kind]string{}}
	p.space.survey.most = surveyExtents
	p.space.survey.context, p.space.survey.stop = context.WithCancel(context.WithoutCancel(ctx))
	defer func() {
		if err != nil {
			p.Close()
			err = fmt.Errorf("open pool %s at %s: %w", name, l.Path, err)
		}
	}()
	if err := p.openDirectory(ctx, known); err != nil {
		return nil, err
	}
	if err := p.lookAtFilesystem(ctx); err != nil {
		return nil, err
	}
	then := time.Now().Add(rereadTime)
	for kind := range p.directories {
		if err := p.load(kind, then); err != nil {
			return nil, err
		}
	}
	if err := p.prepareInPlace(ctx); err != nil {
		return nil, err
	}
	if err := p.findLoops(); err != nil {
		return nil, err
	}
	p.completeAllSlots(ctx)
	p.recoverGuards(ctx)
	p.recoverUnfinished(ctx)
	return p, nil
}

// openDirectory opens and locks the directory. If there is no pool, and one may be made, it makes it first.
func (p *pool) openDirectory(ctx context.Context, known blockdev.Known) (err error) {
	var whole bool
	if p.root, p.id, whole, err = p.location.place().Open(ctx, known); err != nil {
		return err
	}
	if p.lock, err = directory.Lock(p.root); err != nil {
		return err
	}
	if err := layout.Complete(p.root); err != nil {
		klog.FromContext(ctx).Error(err, "The pool has no place for what is kept beside volumes; the next start tries again", "pool", p.name)
	}
	for kind, dir := range layout.Directories {
		opened, err := directory.Part(p.root, dir)
		if errors.Is(err, fs.ErrNotExist) && kind == blockdev.Marks {
			continue
		}
		if err != nil {
			return err
		}
		p.directories[kind] = opened
		if p.directoryID[kind], err = directoryID(opened); err != nil {
			return err
		}
	}
	// Locked as well, as somebody may take the lock file for a stale one and remove it.
	if err := directory.Exclusive(p.directories[blockdev.Volume]); err != nil {
		return err
	}
	return p.identify(ctx, whole)
}

// lookAtFilesystem finds out what the filesystem of the directory can do, and how much of it is the reserve.
func (p *pool) lookAtFilesystem(ctx context.Context) (err error) {
	var shared bool
	if p.location.ReservePercent, shared, err = p.location.Reserve(); err != nil {
		return err
	}
	klog.FromContext(ctx).V(2).Info("Reserve of the pool", "pool", p.name, "percent", p.location.ReservePercent, "sharesFilesystem", shared)
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(p.lock.Fd()), &st); err != nil {
		return errdefs.FromErrno(err)
	}
	p.kind, p.block = st.Type, min(st.Bsize, blockdev.Granularity)
	if p.kind == unix.BTRFS_SUPER_MAGIC {
		info, err := btrfs.Ask(p.lock)
		if err != nil {
			return errdefs.FromErrno(err)
		}
		p.allocation = info.Identity.Directory() + "/allocation"
	}
	var lock unix.Stat_t
	if err := unix.Fstat(int(p.lock.Fd()), &lock); err != nil {
		return errdefs.FromErrno(err)
	}
	p.device = lock.Dev
	p.reflink = sparse.CanShare(p.lock)
	return nil
}

// insert adds an object to the catalog, and its size to what is promised. The caller holds Mu, or is alone.
func (p *pool) insert(o *object) {
	p.Put(o)
	p.alone += one(o.at.Alone)
	p.space.promised += o.size()
	o.use.shared = p.reflink && o.Origin() != (blockdev.Ref{})
}

// place notes where the record of an object is. The caller holds Mu.
func (p *pool) place(o *object, at recordfile.Position) {
	p.alone += one(at.Alone) - one(o.at.Alone)
	o.at = at
}

func one(is bool) int {
	if is {
		return 1
	}
	return 0
}

// forget removes an object from the catalog, and its size from what is promised.
func (p *pool) forget(o *object) {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	p.Forget(o)
	p.alone -= one(o.at.Alone)
	p.copying -= one(o.use.copying)
	p.space.promised -= o.size()
	p.space.allocated -= o.use.counted
	if o.use.shared {
		p.space.measured, p.space.survey.due = time.Time{}, true
	}
}

// sweepTime bounds how long a call removes what others left unfinished. The start has five times as long.
const sweepTime = 2 * time.Second

// recoverUnfinished removes objects that are not ready, and finishes growths, when the pool is opened. What fails is left for the next start: it costs
// space, and no data.
func (p *pool) recoverUnfinished(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 5*sweepTime)
	defer cancel()
	p.Sweep(ctx, p.remove)
	p.Mu.Lock()
	grown := map[blockdev.Ref]int64{}
	for ref, o := range p.Objects {
		if o.State == catalog.Ready && o.growing != 0 {
			grown[ref] = o.growing
		}
	}
	p.Mu.Unlock()
	for ref, size := range grown {
		if _, err := p.Expand(ctx, ref, size); err != nil {
			klog.FromContext(ctx).Error(err, "could not finish a growth that was left half-done; the next start tries again", "pool", p.name, "object", ref.String())
		}
	}
}

// sweep is Sweep for at most sweepTime.
func (p *pool) sweep(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, sweepTime)
	defer cancel()
	p.Sweep(ctx, p.remove)
}

func (p *pool) Name() string { return p.name }

func (p *pool) Granularity() int64 { return blockdev.Granularity }

func (p *pool) SetLabels(ctx context.Context, ref blockdev.Ref, change func(map[string]string) error) (blockdev.Record, error) {
	o, _, err := p.Lookup(ref)
	if err != nil {
		return blockdev.Record{}, err
	}
	end, err := p.BeginChange(ctx, o)
	if err != nil {
		return blockdev.Record{}, err
	}
	defer end()
	before := o.Record()
	record, err := catalog.ChangeLabels(before, change)
	switch {
	case err != nil:
	case maps.Equal(record.Labels, before.Labels):
		err = p.completeSlots(o)
	default:
		err = p.save(o, record, catalog.Ready, o.growing)
	}
	if err != nil {
		return blockdev.Record{}, err
	}
	return record, nil
}

func (p *pool) Delete(ctx context.Context, ref blockdev.Ref) error {
	return p.delete(ctx, ref, false)
}

// Erase: see blockdev.Pool. On a filesystem that writes to new places, the old bytes stay on the disk until their place is used again.
func (p *pool) Erase(ctx context.Context, ref blockdev.Ref) error {
	return p.delete(ctx, ref, true)
}

func (p *pool) delete(ctx context.Context, ref blockdev.Ref, erased bool) error {
	o, err := p.BeginDelete(ctx, ref, p.attachedInUse, fmt.Sprintf("look at %s, and remove it and the image by hand if nobody needs them", layout.Record(ref)))
	if o == nil || err != nil {
		return err
	}
	return p.removeAs(ctx, o, erased)
}

// remove removes an object that the caller has claimed: the bytes, then the record. The directory is not synced: should a power cut bring the files back,
// the record still says deleting (or creating), and the next start removes them again.
//
// The object is nobody's from the moment its record says so. If something fails after that, or takes longer than ctx, the next Create or Capacity tries
// again, as the caller may not come back.
func (p *pool) remove(ctx context.Context, o *object) error {
	return p.removeAs(ctx, o, false)
}

// removeAs is remove. With erased, an object that is ready is erased first; an unfinished copy always is (BeginErase).
func (p *pool) removeAs(ctx context.Context, o *object, erased bool) error {
	erase, end, err := p.BeginErase(ctx, o, erased)
	defer end()
	if err == nil {
		err = p.checkNotOnlyOne(o.Ref())
	}
	if err == nil && erase { // before its record says deleting: a start would remove it without that
		err = p.Erased(ctx, o.Ref(), p.erase(ctx, o.Ref()))
	}
	if err == nil {
		err = p.removeFiles(ctx, o)
	}
	if err != nil {
		p.Release(o, false)
		return err
	}
	p.forget(o)
	return nil
}

// removeFiles marks an object as deleted, if it is ready, and removes its image and its record. It works also where a record cannot be changed: on a disk
// that cannot be written to at that place, or on a full filesystem (btrfs, which writes its metadata to new places, can always remove files and not always
// write). Then the image goes without the mark (deletionUnrecorded). Should a crash come in between, the object has lost its bytes, which is reported
// (errdefs.ErrDataLoss), and the retry of the deletion removes the rest. Without the mark both removals are synced before it returns, as no record would
// have them done again.
func (p *pool) removeFiles(ctx context.Context, o *object) error {
	ref := o.Ref()
	o.Copied = 0 // no retry can go on with it any more
	if o.State == catalog.Ready {
		if err := p.condemn(ctx, o); err != nil {
			return err
		}
	}
	if err := p.empty(ctx, ref); err != nil {
		return fmt.Errorf("empty the image of %s in pool %s: %w", ref, p.name, err)
	}
	if err := p.unlink(layout.Image(ref)); err != nil {
		return err
	}
	if p.kind == unix.BTRFS_SUPER_MAGIC { // btrfs counts the space as free only after its next commit
		if err := btrfs.Commit(p.lock); err != nil {
			return fmt.Errorf("sync the filesystem of pool %s: %w", p.name, errdefs.FromErrno(err))
		}
	}
	if err := p.unlink(layout.Record(ref)); err != nil || !o.deletionUnrecorded {
		return err
	}
	if err := p.directories[ref.Kind].Sync(); err != nil {
		return fmt.Errorf("sync the removal of %s from pool %s: %w", ref, p.name, errdefs.FromErrno(err))
	}
	return nil
}

// condemn writes into the record of an object that it is deleted. If the disk or the filesystem cannot take that, it sets deletionUnrecorded instead, and
// returns no error.
func (p *pool) condemn(ctx context.Context, o *object) error {
	err := p.save(o, o.Record(), catalog.Deleting, o.growing)
	if err == nil || !recordfile.Unwritable(err) {
		return err
	}
	klog.FromContext(ctx).Error(err, "Could not write down that an object is deleted; its files are removed all the same", "pool", p.name, "object", o.Ref().String())
	p.Mu.Lock()
	defer p.Mu.Unlock()
	p.Set(o, o.Record(), catalog.Deleting)
	o.deletionUnrecorded = true
	return nil
}

// erase overwrites the beginning of an image, where it has data: nothing else was ever written. Blocks that the image has alone are overwritten in place;
// for those that it shares it gets new ones, and the others keep theirs. errdefs.ErrPrecondition for an image with a second name, which keeps its bytes
// (see empty).
func (p *pool) erase(ctx context.Context, ref blockdev.Ref) error {
	image, err := p.openOwn(ref)
	if image == nil || err != nil {
		return err
	}
	defer image.Close()
	named, err := twice(image)
	if err != nil {
		return err
	}
	if named {
		return fmt.Errorf("%w: %s has a second name, under which somebody keeps it", errdefs.ErrPrecondition, image.Name())
	}
	return sparse.Overwrite(ctx, image, blockdev.HeadSize)
}

// checkNotOnlyOne returns errdefs.ErrPrecondition if what is in the place of an object's image is the image of another object, and has no other name: with the
// object that image would go, too.
func (p *pool) checkNotOnlyOne(ref blockdev.Ref) error {
	image, err := p.openFile(ref, os.O_RDONLY)
	if image == nil || err != nil {
		return nil // it cannot be told; a disk that fails keeps nobody from deleting
	}
	defer image.Close()
	if err := p.checkOwner(ref, image, false); !errors.Is(err, errNotOwn) {
		return nil
	} else if named, failure := twice(image); failure != nil || !named {
		return errdefs.Recast(errdefs.ErrPrecondition, err, "it has no other name, and would be lost with this object; nothing was deleted")
	}
	return nil
}

// openOwn opens the image of an object for writing; nil if there is none, or if what is there is another object's.
func (p *pool) openOwn(ref blockdev.Ref) (*os.File, error) {
	image, err := p.openFile(ref, os.O_RDWR)
	if image == nil || err != nil {
		return nil, err
	}
	if err := p.checkOwner(ref, image, false); errors.Is(err, errNotOwn) {
		return nil, image.Close()
	}
	return image, nil
}

// openFile opens what is in the place of an object's image; nil if there is none, or no regular file.
func (p *pool) openFile(ref blockdev.Ref, flag int) (*os.File, error) {
	info, err := p.root.Lstat(layout.Image(ref))
	if errors.Is(err, fs.ErrNotExist) || err == nil && !info.Mode().IsRegular() {
		return nil, nil
	}
	image, err := p.root.OpenFile(layout.Image(ref), flag, 0)
	if err != nil {
		return nil, p.refused(layout.Image(ref), errdefs.FromErrno(err))
	}
	return image, nil
}

// twice reports whether a file has a second name.
func twice(f *os.File) (bool, error) {
	info, err := f.Stat()
	if err != nil {
		return false, errdefs.FromErrno(err)
	}
	return info.Sys().(*syscall.Stat_t).Nlink > 1, nil
}

// unlink removes a file, if it is there.
func (p *pool) unlink(path string) error {
	if err := p.root.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove %s from pool %s: %w", path, p.name, p.refused(path, errdefs.FromErrno(err)))
	}
	return nil
}

// empty gives back the space of an image, and has done so when it returns: XFS frees an unlinked file in the background, but a truncated one at once. The
// kernel takes some 30 us for each extent, and an image that was written at random has millions of them: so a large one is truncated in steps, between
// which ctx may end it. A retry goes on with what is left. A file that is not the object's image, or that has a second name, keeps its bytes.
func (p *pool) empty(ctx context.Context, ref blockdev.Ref) error {
	image, err := p.openOwn(ref)
	if image == nil || err != nil {
		return err
	}
	defer image.Close()
	info, err := image.Stat()
	if err != nil {
		return errdefs.FromErrno(err)
	}
	if named, err := twice(image); named || err != nil {
		return err
	}
	at := info.Size()
	err = sparse.InSteps(ctx, info.Size(), func(n int64) error {
		if at -= n; at == 0 && p.kind != unix.XFS_SUPER_MAGIC && p.kind != unix.BTRFS_SUPER_MAGIC {
			return nil
		}
		return errdefs.FromErrno(image.Truncate(at))
	})
	if errors.Is(err, errdefs.ErrNoSpace) { // the image can be unlinked all the same
		return nil
	}
	return err
}

func (p *pool) Close() error {
	p.space.survey.close()
	var failures []error
	for _, f := range append(slices.Collect(maps.Values(p.directories)), p.lock) {
		if f != nil {
			failures = append(failures, directory.Free(f), f.Close())
		}
	}
	if p.root != nil {
		failures = append(failures, p.root.Close())
	}
	return errors.Join(failures...)
}

// identify writes the identity of a pool that has none (version 1), or whose file is damaged. That needs room for one small file: without it, the next
// start tries again.
func (p *pool) identify(ctx context.Context, whole bool) error {
	if whole {
		return nil
	}
	id := p.id
	if id == "" {
		id = identity.New()
	}
	if err := identity.Write(p.root, id); errors.Is(err, errdefs.ErrNoSpace) {
		klog.FromContext(ctx).Error(err, "Could not write the identity of the pool; the next start tries again", "pool", p.name)
		return nil
	} else if err != nil {
		return err
	}
	p.id = id
	return nil
}

// ID: see Identified.
func (p *pool) ID() string { return p.id }

// Foundations: see blockdev.Founded.
func (p *pool) Foundations(context.Context) ([]uint64, error) { return ground.Of(p.lock) }
