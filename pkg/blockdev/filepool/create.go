package filepool

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/fsync"
	"github.com/ashlar-csi/ashlar/internal/progress"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/layout"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/nocow"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/recordfile"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/sparse"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/catalog"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/loop"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

func (p *pool) Create(ctx context.Context, spec blockdev.Spec) (blockdev.Record, error) {
	if err := p.validate(spec); err != nil {
		return blockdev.Record{}, err
	}
	if err := p.alive(); err != nil {
		return blockdev.Record{}, err
	}
	p.sweep(ctx)
	if spec.Provisioning == blockdev.AnyProvisioning {
		spec.Provisioning = blockdev.Thick
	}
	o, ready, err := p.Begin(ctx, spec, p.remove)
	if err != nil {
		return blockdev.Record{}, err
	}
	if ready {
		return o.Record(), p.completeBeside(ctx, o)
	}
	if o == nil {
		if o, err = p.begin(ctx, spec); err != nil {
			return blockdev.Record{}, fmt.Errorf("create %q in pool %s: %w", spec.Name, p.name, err)
		}
	}
	record := blockdev.Record{}
	if err = p.OriginStays(o); err == nil {
		record, err = p.fill(ctx, o, spec)
	}
	if err != nil {
		p.giveUp(ctx, o, spec)
		return blockdev.Record{}, fmt.Errorf("create %q in pool %s: %w", spec.Name, p.name, err)
	}
	return record, nil
}

func (p *pool) validate(spec blockdev.Spec) error {
	if err := spec.Validate(); err != nil {
		return err
	}
	if p.directories[spec.Kind] == nil {
		return fmt.Errorf("%w: the directory %s of the pool could not be made when it was opened", errdefs.ErrNoSpace, layout.Directories[spec.Kind])
	}
	if spec.Size <= 0 || spec.Size%blockdev.Granularity != 0 || spec.Size > blockdev.MaxSize {
		return fmt.Errorf("%w: %d bytes; a multiple of %d up to %d can be had", errdefs.ErrOutOfRange, spec.Size, blockdev.Granularity, int64(blockdev.MaxSize))
	}
	if spec.Origin == (blockdev.Ref{}) {
		return nil
	}
	_, origin, err := p.Lookup(spec.Origin)
	if err != nil {
		return err
	}
	if spec.Size < origin.Size {
		return fmt.Errorf("%w: %d bytes are less than the %d of %s", errdefs.ErrOutOfRange, spec.Size, origin.Size, spec.Origin)
	}
	return nil
}

// begin promises the space of a new object and writes its record. catalog.ErrRecord if there is an image already: it is of a volume that lost its record,
// and is not taken over.
func (p *pool) begin(ctx context.Context, spec blockdev.Spec) (o *object, err error) {
	if _, err := p.root.Lstat(layout.Image(spec.Ref)); err == nil {
		return nil, fmt.Errorf("%w: look at %s, and bring its record back from a backup, or move it away", recordfile.ErrNoRecord, layout.Image(spec.Ref))
	} else if !errors.Is(err, fs.ErrNotExist) {
		return nil, errdefs.FromErrno(err)
	}
	if err := p.checkInodes(); err != nil {
		return nil, err
	}
	sector := spec.Sector
	if spec.Origin != (blockdev.Ref{}) {
		_, origin, err := p.Lookup(spec.Origin)
		if err != nil {
			return nil, err
		}
		sector = origin.Sector
	}
	o = &object{Entry: catalog.Begun(blockdev.Record{Ref: spec.Ref, Name: spec.Name, Size: spec.Size, Thin: spec.Provisioning == blockdev.Thin, Sector: sector, Origin: spec.Origin,
		Created: time.Now().UTC(), Labels: maps.Clone(spec.Labels)})}
	if err := p.reserve(ctx, spec.Size, func() error {
		p.Mu.Lock()
		defer p.Mu.Unlock()
		p.insert(o)
		return nil
	}); err != nil {
		return nil, err
	}
	at, err := recordfile.Create(p.root, layout.Record(spec.Ref), recordfile.New(o.Record(), o.State, 0))
	p.Mu.Lock()
	p.place(o, at)
	p.Mu.Unlock()
	if err != nil {
		p.giveUp(ctx, o, spec)
		return nil, p.refused(layout.Record(spec.Ref), err)
	}
	return o, nil
}

// giveUp removes an unfinished object after an error, or releases it if a retry can go on with it.
func (p *pool) giveUp(ctx context.Context, o *object, spec blockdev.Spec) {
	if o.Copied > 0 && spec.Origin.Kind != blockdev.Volume {
		p.Release(o, true)
		return
	}
	// The caller may still hold back writes: what takes long is left to the next call.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), sweepTime)
	defer cancel()
	_ = p.remove(ctx, o) // the next sweep tries again
}

// fill makes the image of a new object, and then the object ready.
func (p *pool) fill(ctx context.Context, o *object, spec blockdev.Spec) (blockdev.Record, error) {
	image, err := p.root.OpenFile(layout.Image(spec.Ref), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return blockdev.Record{}, p.refused(layout.Image(spec.Ref), errdefs.FromErrno(err))
	}
	defer image.Close()
	if err := nocow.Set(image); err != nil {
		return blockdev.Record{}, err
	}
	if err := p.checkOwner(spec.Ref, image, true); err != nil {
		return blockdev.Record{}, err
	}
	cut := o.Record().Created
	if spec.Origin == (blockdev.Ref{}) {
		err = p.allocateNew(ctx, o, image, spec)
	} else {
		cut, err = p.copyOrigin(ctx, o, image, spec)
	}
	if err == nil && spec.Cut != nil {
		err = spec.Cut(ctx)
	}
	if err != nil {
		return blockdev.Record{}, err
	}
	if err := image.Sync(); err != nil {
		o.Copied = 0 // the kernel reports only once that writes were lost, so a retry must begin anew
		return blockdev.Record{}, fmt.Errorf("sync the image: %w", errdefs.FromErrno(err))
	}
	if spec.Prepare != nil {
		if err := spec.Prepare(ctx, p.location.Path+"/"+layout.Image(spec.Ref)); err != nil {
			return blockdev.Record{}, err
		}
	}
	if err := p.directories[spec.Kind].Sync(); err != nil {
		return blockdev.Record{}, fmt.Errorf("sync the directory: %w", errdefs.FromErrno(err))
	}
	record := o.Record()
	record.Created = cut
	if spec.Origin == (blockdev.Ref{}) && spec.Sector == 0 {
		record.Sector = directSector(image)
	}
	if err := p.save(o, record, catalog.Ready, 0); err != nil {
		return blockdev.Record{}, err
	}
	record = o.Record()
	p.Release(o, false)
	return record, nil
}

// allocateNew makes the image of an object without an origin. If ctx ends first, a retry goes on with what is allocated: it begins at the beginning again, as
// somebody may have cut the image short, and fallocate(2) passes quickly over what is there.
func (p *pool) allocateNew(ctx context.Context, o *object, image *os.File, spec blockdev.Spec) error {
	o.Copied = 0
	err := p.allocate(ctx, o, image, spec.Size, keepsHoles(spec))
	if err != nil && errors.Is(err, ctx.Err()) {
		if info, failure := image.Stat(); failure == nil {
			o.Copied = info.Size()
		}
	}
	return err
}

// allocate gives an image its size: as a hole if thin, else with space of its own, which reads as zeros until it is written (fallocate(2)). An image with
// holes in many places takes long: so it goes in steps, between which ctx may end it, and others may look at the account.
func (p *pool) allocate(ctx context.Context, o *object, image *os.File, size int64, thin bool) error {
	if thin {
		if err := image.Truncate(size); err != nil {
			return fmt.Errorf("set the size of the image: %w", errdefs.FromErrno(err))
		}
		return nil
	}
	offset := int64(0)
	return sparse.InSteps(ctx, size, func(n int64) error {
		take := func() error { return p.countAllocated(o, image, func() error { return p.fallocate(image, offset, n) }) }
		p.space.allocating.RLock()
		err := take()
		p.space.allocating.RUnlock()
		if errors.Is(err, unix.ENOSPC) && p.kind == unix.BTRFS_SUPER_MAGIC {
			// Deleted space counts as free, but can be had only after a commit. And several allocations at once may keep the last space from each other.
			p.space.allocating.Lock()
			if err = unix.Syncfs(int(image.Fd())); err == nil {
				err = take()
			}
			p.space.allocating.Unlock()
		}
		offset += n
		return err
	})
}

// fallocate allocates the space of a range of an image. errdefs.ErrUnsupported if the filesystem cannot.
func (p *pool) fallocate(image *os.File, offset, length int64) error {
	for {
		err := unix.Fallocate(int(image.Fd()), 0, offset, length)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if errors.Is(err, unix.EOPNOTSUPP) {
			return fmt.Errorf("%w: the filesystem at %s cannot preallocate; use provisioning=thin there", errdefs.ErrUnsupported, p.location.Path)
		}
		if err != nil {
			return fmt.Errorf("allocate %d bytes: %w", length, errdefs.FromErrno(err))
		}
		return nil
	}
}

// copyOrigin makes image a copy of the origin, by sharing blocks or by copying bytes, and returns the moment of the cut.
func (p *pool) copyOrigin(ctx context.Context, o *object, image *os.File, spec blockdev.Spec) (time.Time, error) {
	from, origin, err := p.Lookup(spec.Origin)
	if err != nil {
		return time.Time{}, err
	}
	source, err := p.openImage(origin, os.O_RDONLY)
	if err != nil {
		return time.Time{}, err
	}
	defer source.Close()
	if err := p.checkLength(origin, from.growing, source); err != nil {
		return time.Time{}, err
	}
	sparse.ForgetCached(source)
	moving, err := p.flushDevices(ctx, spec)
	if err != nil {
		return time.Time{}, err
	}
	shares, err := nocow.InPlace(source) // btrfs shares no blocks between a file that is written in place and one that is not
	if err != nil {
		return time.Time{}, err
	}
	if shares = shares && p.reflink; shares {
		return p.shareOrigin(ctx, o, image, source, spec, moving)
	}
	cut, err := p.copyBytes(ctx, o, image, source, spec, moving)
	return cut, errors.Join(err, p.countAllocated(o, image, func() error { return nil }))
}

// CutsAtOnce: see blockdev.Cutter. False for images that an older driver made on btrfs: their bytes are copied.
func (p *pool) CutsAtOnce(origin blockdev.Ref) bool {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	o := p.Objects[origin]
	return p.reflink && o != nil && !o.use.copying
}

// keepsHoles reports whether a new object takes only the space of its data: a thin one, and each snapshot, as it never grows.
func keepsHoles(s blockdev.Spec) bool {
	return s.Provisioning == blockdev.Thin || s.Kind == blockdev.Snapshot
}

// shareOrigin makes image share the blocks of source, and returns the moment of the cut. moving: others may be writing to the source.
func (p *pool) shareOrigin(ctx context.Context, o *object, image, source *os.File, spec blockdev.Spec, moving bool) (time.Time, error) {
	shared, origin, err := p.Lookup(spec.Origin)
	if err != nil {
		return time.Time{}, err
	}
	info, err := source.Stat()
	if err != nil {
		return time.Time{}, errdefs.FromErrno(err)
	}
	p.Mu.Lock()
	shared.use.shared, p.space.survey.due = true, true
	p.Mu.Unlock()
	cut := time.Now().UTC()
	if moving {
		err = sparse.ShareMoving(image, source)
	} else {
		progress.Begin(ctx, 0, info.Size())
		err = sparse.Share(ctx, image, source, info.Size())
	}
	if err != nil {
		return time.Time{}, err
	}
	// An origin whose growth was not finished may have an image that is longer than its record says.
	if err := image.Truncate(origin.Size); err != nil {
		return time.Time{}, fmt.Errorf("set the size of the image: %w", errdefs.FromErrno(err))
	}
	if spec.Size == origin.Size && keepsHoles(spec) {
		return cut, nil
	}
	return cut, p.allocate(ctx, o, image, spec.Size, keepsHoles(spec))
}

// copyBytes makes image a copy of source, or goes on with one, and returns the moment of the cut. moving: others may be writing to the source.
func (p *pool) copyBytes(ctx context.Context, o *object, image, source *os.File, spec blockdev.Spec, moving bool) (time.Time, error) {
	_, origin, err := p.Lookup(spec.Origin)
	if err != nil {
		return time.Time{}, err
	}
	if !o.cut.Equal(origin.Created) || sparse.StillWhole(image, spec.Size) != nil {
		// Begin anew: nothing is copied yet, or it is of another origin of that name, or somebody cut it short.
		if err := image.Truncate(0); err != nil {
			return time.Time{}, fmt.Errorf("set the size of the image: %w", errdefs.FromErrno(err))
		}
		o.Copied, o.cut = 0, origin.Created
	}
	if o.Copied == 0 {
		if err := image.Truncate(spec.Size); err != nil {
			return time.Time{}, fmt.Errorf("set the size of the image: %w", errdefs.FromErrno(err))
		}
		if !keepsHoles(spec) {
			if err := p.allocate(ctx, o, image, spec.Size, false); err != nil {
				return time.Time{}, err
			}
		}
	}
	progress.Begin(ctx, o.Copied, origin.Size)
	if moving {
		return time.Now().UTC(), sparse.CopyMoving(ctx, image, source, origin.Size)
	}
	cut := time.Now().UTC()
	done, err := sparse.Copy(ctx, image, source, o.Copied, origin.Size)
	if short := sparse.StillWhole(source, origin.Size); short != nil { // a cut source reads as a hole, so what was copied is worth nothing
		done, err = 0, short
	}
	if spec.Origin.Kind == blockdev.Snapshot { // a snapshot does not change: a retry may go on, with what is on the disk
		if err != nil && image.Sync() != nil {
			done = 0
		}
		o.Copied = done
	}
	return cut, err
}

// Unchanged: see blockdev.Comparer.
func (p *pool) Unchanged(ctx context.Context, copied, origin blockdev.Ref) error {
	_, record, err := p.Lookup(origin)
	if err != nil {
		return err
	}
	if _, err := p.flushDevices(ctx, blockdev.Spec{Origin: origin}); err != nil {
		return err
	}
	source, err := p.openImage(record, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer source.Close()
	image, err := p.root.OpenFile(layout.Image(copied), os.O_RDWR, 0)
	if err != nil {
		return p.refused(layout.Image(copied), errdefs.FromErrno(err))
	}
	defer image.Close()
	return sparse.StayEqual(ctx, image, source, record.Size)
}

// flushDevices writes out the page caches of the origin's devices. moving: somebody may be writing to one of them (it is writable, and spec is not
// Quiesced).
func (p *pool) flushDevices(ctx context.Context, spec blockdev.Spec) (moving bool, err error) {
	devices, err := p.Attached(ctx, spec.Origin)
	if err != nil {
		return false, err
	}
	for _, device := range devices {
		if err := fsync.AndClose(os.Open(device.Path)); err != nil {
			return false, fmt.Errorf("flush %s: %w", device.Path, errdefs.FromErrno(err))
		}
		moving = moving || !device.ReadOnly
	}
	return moving && !spec.Quiesced, nil
}

// errNotOwn is the error for a file in the place of an image that is not the object's.
var errNotOwn = fmt.Errorf("%w: not its image", errdefs.ErrDataLoss)

// openImage opens the image of an object. errdefs.ErrDataLoss if it is missing, too short, another object's (errNotOwn), or not the file that the object's
// devices write to (errReplaced).
func (p *pool) openImage(record blockdev.Record, flags int) (*os.File, error) {
	ref := record.Ref
	info, err := p.root.Lstat(layout.Image(ref))
	if err == nil && !info.Mode().IsRegular() { // opening a FIFO would wait, and a link may lead to another image
		return nil, fmt.Errorf("%w: %s of pool %s is no file (%s); restore the image from a backup, or delete the volume", errNotOwn, layout.Image(ref), p.name, info.Mode())
	}
	f, err := p.root.OpenFile(layout.Image(ref), flags, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, p.missing(ref)
	}
	if err != nil {
		return nil, fmt.Errorf("open image: %w", p.refused(layout.Image(ref), errdefs.FromErrno(err)))
	}
	if err = p.checkOwner(ref, f, flags != os.O_RDONLY); err == nil {
		info, err = f.Stat()
	}
	if err == nil {
		err = p.checkReplaced(ref, info)
	}
	if err != nil {
		f.Close()
		return nil, errdefs.FromErrno(err)
	}
	if info.Size() < record.Size {
		f.Close()
		return nil, fmt.Errorf("%w: the image %s of pool %s has %d bytes, its record says %d; restore it from a backup, or delete the volume",
			errdefs.ErrDataLoss, layout.Image(ref), p.name, info.Size(), record.Size)
	}
	return f, nil
}

// refused adds to the error of opening, making or removing a file what to do, and errdefs.ErrPrecondition, if it is EPERM. Root has that only for a file
// with an attribute (chattr(1)), or in a directory with one.
func (p *pool) refused(path string, err error) error {
	if errors.Is(err, unix.EPERM) {
		file := p.location.Path + "/" + path
		return fmt.Errorf("%w: %w: somebody protected it, or its directory; take that back with chattr -i -a %s %s", errdefs.ErrPrecondition, err, file, filepath.Dir(file))
	}
	return err
}

// errReplaced is the error for an image that is not the file which the object's devices write to.
var errReplaced = fmt.Errorf("%w: the image was replaced while it is in use", errdefs.ErrDataLoss)

// checkReplaced returns errReplaced unless writes to the devices of an object go to its image. Somebody who puts a copy in the place of an image in use
// has a file that lacks all later writes.
func (p *pool) checkReplaced(ref blockdev.Ref, image fs.FileInfo) error {
	device, err := p.beside(ref, image)
	if err != nil || device == "" {
		return err
	}
	return fmt.Errorf("%w: %s", errReplaced, p.nameless(ref, device))
}

// missing returns the error for an object without an image; errdefs.ErrUnavailable if all of the pool is gone.
func (p *pool) missing(ref blockdev.Ref) error {
	if err := p.alive(); err != nil {
		return err
	}
	device, err := p.beside(ref, nil)
	if err != nil {
		return err
	}
	if device != "" {
		return fmt.Errorf("%w: the image was removed while it is in use: %s", errdefs.ErrDataLoss, p.nameless(ref, device))
	}
	return fmt.Errorf("%w: the image %s of pool %s is missing; restore it from a backup, or delete the volume", errdefs.ErrDataLoss, layout.Image(ref), p.name)
}

// beside returns the writable device of an object that is over another file than image (nil: there is no image); empty if there is none.
func (p *pool) beside(ref blockdev.Ref, image fs.FileInfo) (device string, err error) {
	p.Mu.Lock()
	may := slices.ContainsFunc(p.loops[ref], func(l knownLoop) bool {
		return !l.keeper && (image == nil || !isImage(image, loop.Backing{Device: l.device, Inode: l.inode}))
	})
	p.Mu.Unlock()
	if !may { // the usual case: no device has to be opened
		return "", nil
	}
	loops, err := p.openLoops(ref)
	if err != nil {
		return "", err
	}
	defer closeLoops(loops)
	for _, l := range loops {
		if !l.ReadOnly() && (image == nil || !isImage(image, l.Backing)) {
			return loop.Path(l.Number), nil
		}
	}
	return "", nil
}

// nameless returns, for an error, what becomes of writes to such a device, and what to do.
func (p *pool) nameless(ref blockdev.Ref, device string) string {
	return fmt.Sprintf("what is written to %s goes to a file without a name, and is lost when its users end; stop what they write, copy %s to another file, end them, and put that in the place of %s of pool %s",
		device, device, layout.Image(ref), p.name)
}

// imageOwner is the extended attribute of an image (xattr(7)) with the object that it belongs to. Its name may become wrong: somebody who brings images
// back from lost+found or a backup may mix them up, or give one two names.
const imageOwner = "user.ashlar.object"

// checkOwner returns errNotOwn if an open image says that it is of another object. Images of older drivers say nothing: with give it writes the attribute,
// if the filesystem has attributes, and room for one.
func (p *pool) checkOwner(ref blockdev.Ref, image *os.File, give bool) error {
	have := make([]byte, 64)
	n, err := unix.Fgetxattr(int(image.Fd()), imageOwner, have)
	if err == nil && string(have[:n]) != ref.String() || errors.Is(err, unix.ERANGE) {
		return fmt.Errorf("%w: %s of pool %s says that it is the image of %q; put the right one there, or if this is it, say so: setfattr -x %s %s",
			errNotOwn, layout.Image(ref), p.name, have[:max(n, 0)], imageOwner, layout.Image(ref))
	}
	if errors.Is(err, unix.ENODATA) && give {
		err = unix.Fsetxattr(int(image.Fd()), imageOwner, []byte(ref.String()), 0)
	}
	if errors.Is(err, unix.ENODATA) || errors.Is(err, unix.ENOTSUP) || errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return nil
	}
	return errdefs.FromErrno(err)
}

func (p *pool) Expand(ctx context.Context, ref blockdev.Ref, size int64) (blockdev.Record, error) {
	o, record, err := p.Lookup(ref)
	if err != nil {
		return blockdev.Record{}, err
	}
	if size > blockdev.MaxSize || size%blockdev.Granularity != 0 {
		return blockdev.Record{}, fmt.Errorf("%w: %d bytes; a multiple of %d up to %d can be had", errdefs.ErrOutOfRange, size, blockdev.Granularity, int64(blockdev.MaxSize))
	}
	if ref.Kind != blockdev.Volume {
		return blockdev.Record{}, fmt.Errorf("%w: a snapshot does not grow", errdefs.ErrInvalid)
	}
	promised, growing := p.promisedTo(o)
	want := max(size, growing)
	if want > record.Size {
		err := p.grow(ctx, o, record, promised, growing, want)
		if errors.Is(err, errdefs.ErrNoSpace) && record.Size < size && size < want { // what a crash cut short has no room any more, and this may have
			want = size
			err = p.grow(ctx, o, record, promised, growing, want)
		}
		if err != nil {
			return blockdev.Record{}, fmt.Errorf("expand %s in pool %s to %d bytes: %w", ref, p.name, want, err)
		}
	}
	// Also with nothing to grow: a crash may have come between the growth and this.
	if err := p.resizeLoops(ref); err != nil {
		return blockdev.Record{}, err
	}
	return p.Get(ctx, ref)
}

// promisedTo returns how many bytes are promised to an object, and the size that it grows to, or 0.
func (p *pool) promisedTo(o *object) (size, growing int64) {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	return o.size(), o.growing
}

// saveSize saves the size of an object, and the size that it grows to, or 0.
func (p *pool) saveSize(ctx context.Context, o *object, size, growing int64) error {
	end, err := p.BeginChange(ctx, o)
	if err != nil {
		return err
	}
	defer end()
	record := o.Record()
	record.Size = size
	return p.save(o, record, catalog.Ready, growing)
}

// grow writes the new size into the record as growing, allocates the space, and then makes it the size. before is the growing of the record until now;
// after an error it is restored, and if it is larger than size it stays. An image that is longer than its record says, as that may be an older one, is
// never cut.
func (p *pool) grow(ctx context.Context, o *object, record blockdev.Record, promised, before, size int64) error {
	image, err := p.openImage(record, os.O_RDWR)
	if err != nil {
		return err
	}
	defer image.Close()
	info, err := image.Stat()
	if err != nil {
		return errdefs.FromErrno(err)
	}
	if size > promised {
		if err := p.reserve(ctx, size-promised, func() error {
			return p.saveSize(ctx, o, record.Size, size)
		}); err != nil {
			return err
		}
	}
	err = errors.Join(p.allocate(ctx, o, image, max(size, info.Size()), record.Thin), image.Sync())
	ctx = context.WithoutCancel(ctx) // what was begun has to be written down
	if err != nil {
		// Take the promise back, and with it what was allocated beyond the size.
		return errors.Join(errdefs.FromErrno(err), image.Truncate(info.Size()), p.saveSize(ctx, o, record.Size, before))
	}
	if before <= size {
		before = 0
	}
	return p.saveSize(ctx, o, size, before)
}

// checkLength returns errdefs.ErrPrecondition for an image that is longer than its record says: a copy by that record would lack the end of it.
func (p *pool) checkLength(record blockdev.Record, growing int64, image *os.File) error {
	info, err := image.Stat()
	if err != nil {
		return errdefs.FromErrno(err)
	}
	if have := info.Size(); have > max(record.Size, growing) {
		return fmt.Errorf("%w: the image %s of pool %s has %d bytes, its record says %d, as an older one does; expand the volume to %d bytes, and the record has them again",
			errdefs.ErrPrecondition, layout.Image(record.Ref), p.name, have, record.Size, (have+blockdev.Granularity-1)/blockdev.Granularity*blockdev.Granularity)
	}
	return nil
}
