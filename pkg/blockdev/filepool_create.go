package blockdev

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

func (p *filePool) Create(ctx context.Context, spec Spec) (Record, error) {
	if err := p.validate(spec); err != nil {
		return Record{}, err
	}
	if err := p.alive(); err != nil {
		return Record{}, err
	}
	p.sweepAbandoned(ctx)

	p.mu.Lock()
	damaged, o := p.damaged[spec.Ref], p.objects[spec.Ref]
	busy := o != nil && o.active
	if o != nil {
		o.active = o.stored.State != ready
	}
	p.mu.Unlock()
	if damaged != nil {
		return Record{}, fmt.Errorf("create %q in pool %s: %w", spec.Name, p.name, damaged)
	}
	if busy {
		return Record{}, fmt.Errorf("create %q in pool %s: %w", spec.Name, p.name, errdefs.ErrBusy)
	}
	if o != nil && o.stored.State == ready {
		if err := p.secure(o); err != nil {
			return Record{}, err
		}
		return sameObject(p.name, o.stored.decoded, spec)
	}
	if o != nil && !o.resumable(spec) {
		if err := p.remove(ctx, spec.Ref); err != nil {
			return Record{}, err
		}
		o = nil
	}
	if o == nil {
		var err error
		if o, err = p.begin(ctx, spec); err != nil {
			return Record{}, fmt.Errorf("create %q in pool %s: %w", spec.Name, p.name, err)
		}
	}
	record, err := p.fill(ctx, o, spec)
	if err != nil {
		err = fmt.Errorf("create %q in pool %s: %w", spec.Name, p.name, err)
		p.giveUp(ctx, o, spec)
		return Record{}, err
	}
	return record, nil
}

// resumable reports whether an unfinished object is one that a spec can go on with.
func (o *object) resumable(spec Spec) bool {
	r := o.stored.decoded
	return o.stored.State == creating && o.copied > 0 && r.Name == spec.Name && r.Size == spec.Size && r.Thin == (spec.Provisioning == Thin) &&
		r.Origin == spec.Origin && maps.Equal(r.Labels, spec.Labels)
}

func (p *filePool) validate(spec Spec) error {
	if err := spec.validate(); err != nil {
		return err
	}
	if spec.Size <= 0 || spec.Size%Granularity != 0 || spec.Size > MaxSize {
		return fmt.Errorf("%w: %d bytes; a multiple of %d up to %d can be had", errdefs.ErrOutOfRange, spec.Size, Granularity, int64(MaxSize))
	}
	if spec.Origin == (Ref{}) {
		return nil
	}
	_, origin, err := p.lookup(spec.Origin)
	if err != nil {
		return err
	}
	if spec.Size < origin.Size {
		return fmt.Errorf("%w: %d bytes are less than the %d of %s", errdefs.ErrOutOfRange, spec.Size, origin.Size, spec.Origin)
	}
	return nil
}

// sameObject checks that an existing object is the one asked for.
func sameObject(pool string, have Record, spec Spec) (Record, error) {
	if have.Name != spec.Name || have.Origin != spec.Origin {
		return Record{}, fmt.Errorf("%w: %s in pool %s is %q made from %s", errdefs.ErrExists, have.Ref, pool, have.Name, have.Origin)
	}
	return copyOf(have), nil
}

// begin promises the space and writes the record. An image that is there already is of a volume
// that lost its record, and is not taken over.
func (p *filePool) begin(ctx context.Context, spec Spec) (o *object, err error) {
	if _, err := p.root.Lstat(imagePath(spec.Ref)); err == nil {
		return nil, fmt.Errorf("%w: look at %s, and bring its record back from a backup, or move it away", errNoRecord, imagePath(spec.Ref))
	} else if !errors.Is(err, fs.ErrNotExist) {
		return nil, errdefs.FromErrno(err)
	}
	if err := p.checkInodes(); err != nil {
		return nil, err
	}
	var sector int64
	if spec.Origin != (Ref{}) {
		_, origin, err := p.lookup(spec.Origin)
		if err != nil {
			return nil, err
		}
		sector = origin.Sector
	}
	o = &object{active: true}
	o.stored = newStored(Record{Ref: spec.Ref, Name: spec.Name, Size: spec.Size, Thin: spec.Provisioning == Thin, Sector: sector, Origin: spec.Origin,
		Created: time.Now().UTC(), Labels: maps.Clone(spec.Labels)}, creating, 0)
	if err := p.reserve(ctx, spec.Size, func() error {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.insert(o)
		return nil
	}); err != nil {
		return nil, err
	}
	at, err := createRecord(p.root, recordPath(spec.Ref), o.stored)
	p.mu.Lock()
	o.at = at // health looks at it
	p.mu.Unlock()
	if err != nil {
		p.giveUp(ctx, o, spec)
		return nil, err
	}
	return o, nil
}

// giveUp undoes an unfinished object, unless a retry can go on with its copy.
func (p *filePool) giveUp(ctx context.Context, o *object, spec Spec) {
	if o.copied > 0 && spec.Origin.Kind == Snapshot {
		p.mu.Lock()
		defer p.mu.Unlock()
		o.touched, o.active = time.Now(), false
		p.space.unfinished[spec.Ref] = true
		return
	}
	// Some caller may still hold back writes, so what takes long is left to the next call.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), sweepTime)
	defer cancel()
	_ = p.remove(ctx, spec.Ref) // a failure has its own next try
}

// fill makes the bytes, and then the object ready.
func (p *filePool) fill(ctx context.Context, o *object, spec Spec) (Record, error) {
	image, err := p.root.OpenFile(imagePath(spec.Ref), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return Record{}, errdefs.FromErrno(err)
	}
	defer image.Close()
	if err := p.makeInPlace(image); err != nil {
		return Record{}, err
	}
	if err := p.checkOwner(spec.Ref, image, true); err != nil {
		return Record{}, err
	}
	cut := o.stored.Created
	if spec.Origin == (Ref{}) {
		err = p.allocate(ctx, o, image, spec.Size, spec.Provisioning == Thin)
	} else {
		cut, err = p.copyOrigin(ctx, o, image, spec)
	}
	if err == nil && spec.Cut != nil {
		err = spec.Cut(ctx)
	}
	if err != nil {
		return Record{}, err
	}
	if err := image.Sync(); err != nil {
		return Record{}, fmt.Errorf("sync the image: %w", errdefs.FromErrno(err))
	}
	if spec.Prepare != nil {
		if err := spec.Prepare(ctx, p.location.Path+"/"+imagePath(spec.Ref)); err != nil {
			return Record{}, err
		}
	}
	if err := p.folders[spec.Kind].Sync(); err != nil {
		return Record{}, fmt.Errorf("sync the folder: %w", errdefs.FromErrno(err))
	}
	record := o.stored.decoded
	record.Created = cut
	if spec.Origin == (Ref{}) {
		record.Sector = directSector(image)
	}
	if err := p.save(o, newStored(record, ready, 0)); err != nil {
		return Record{}, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.space.unfinished, spec.Ref)
	o.active = false
	return copyOf(o.stored.decoded), nil
}

// allocate gives an image its size: space of its own, which reads as zero until it
// is written (fallocate(2)), or a hole. An image with holes in many places takes long, so it
// goes in steps, between which the context may end it, and others may look at the account.
func (p *filePool) allocate(ctx context.Context, o *object, image *os.File, size int64, thin bool) error {
	if thin {
		if err := image.Truncate(size); err != nil {
			return fmt.Errorf("set the size of the image: %w", errdefs.FromErrno(err))
		}
		return nil
	}
	offset := int64(0)
	return inSteps(ctx, size, func(n int64) error {
		p.space.allocating.RLock()
		defer p.space.allocating.RUnlock()
		err := p.took(o, image, func() error { return p.fallocate(image, offset, n) })
		offset += n
		return err
	})
}

// fallocate has an image take the space of a range.
func (p *filePool) fallocate(image *os.File, offset, length int64) error {
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

// copyOrigin makes image a copy of the origin and returns the moment of the cut.
func (p *filePool) copyOrigin(ctx context.Context, o *object, image *os.File, spec Spec) (time.Time, error) {
	_, origin, err := p.lookup(spec.Origin)
	if err != nil {
		return time.Time{}, err
	}
	source, err := p.openImage(spec.Origin, origin, os.O_RDONLY)
	if err != nil {
		return time.Time{}, err
	}
	defer source.Close()
	if err := p.checkLength(origin, source); err != nil {
		return time.Time{}, err
	}
	forgetCached(source)
	moving, err := p.flushDevices(ctx, spec)
	if err != nil {
		return time.Time{}, err
	}
	shares, err := p.inPlace(source) // what is not in place cannot share with what is
	if err != nil {
		return time.Time{}, err
	}
	if shares = shares && p.reflink; shares {
		return p.shareOrigin(ctx, o, image, source, spec, moving)
	}
	cut, err := p.copyBytes(ctx, o, image, source, spec, moving)
	return cut, errors.Join(err, p.took(o, image, func() error { return nil }))
}

// sparse reports whether an object takes only the space of its data. Snapshots never grow.
func (s Spec) sparse() bool { return s.Provisioning == Thin || s.Kind == Snapshot }

// shareOrigin makes image share the blocks of its source, and returns the moment of the cut.
func (p *filePool) shareOrigin(ctx context.Context, o *object, image, source *os.File, spec Spec, moving bool) (time.Time, error) {
	shared, origin, err := p.lookup(spec.Origin)
	if err != nil {
		return time.Time{}, err
	}
	info, err := source.Stat()
	if err != nil {
		return time.Time{}, errdefs.FromErrno(err)
	}
	p.mu.Lock()
	shared.use.shared, p.space.survey.due = true, true
	p.mu.Unlock()
	cut := time.Now().UTC()
	if moving {
		err = cloneMoving(image, source)
	} else {
		err = cloneData(ctx, image, source, info.Size())
	}
	if err != nil {
		return time.Time{}, err
	}
	// The image of an origin that grew half-way may be longer than its record.
	if err := image.Truncate(origin.Size); err != nil {
		return time.Time{}, fmt.Errorf("set the size of the image: %w", errdefs.FromErrno(err))
	}
	if spec.Size == origin.Size && spec.sparse() {
		return cut, nil
	}
	return cut, p.allocate(ctx, o, image, spec.Size, spec.sparse())
}

// copyBytes makes image a copy of its source, and returns the moment of the cut.
func (p *filePool) copyBytes(ctx context.Context, o *object, image, source *os.File, spec Spec, moving bool) (time.Time, error) {
	_, origin, err := p.lookup(spec.Origin)
	if err != nil {
		return time.Time{}, err
	}
	if !o.cut.Equal(origin.Created) {
		// Nothing yet, or of another origin of that name: begin anew.
		if err := image.Truncate(0); err != nil {
			return time.Time{}, fmt.Errorf("set the size of the image: %w", errdefs.FromErrno(err))
		}
		o.copied, o.cut = 0, origin.Created
	}
	if o.copied == 0 {
		if err := image.Truncate(spec.Size); err != nil {
			return time.Time{}, fmt.Errorf("set the size of the image: %w", errdefs.FromErrno(err))
		}
		if !spec.sparse() {
			if err := p.allocate(ctx, o, image, spec.Size, false); err != nil {
				return time.Time{}, err
			}
		}
	}
	if moving {
		return time.Now().UTC(), copyMoving(ctx, image, source, origin.Size)
	}
	cut := time.Now().UTC()
	done, err := copyData(ctx, image, source, o.copied, origin.Size)
	if short := stillWhole(source, origin.Size); short != nil { // what is copied may be of no use
		done, err = 0, short
	}
	if spec.Origin.Kind == Snapshot {
		o.copied = done // a snapshot stays as it is: a retry may go on here
	}
	return cut, err
}

// flushDevices writes out what the page caches of the origin's devices still hold,
// and reports whether somebody may be writing to one of them.
func (p *filePool) flushDevices(ctx context.Context, spec Spec) (moving bool, err error) {
	devices, err := p.Attached(ctx, spec.Origin)
	if err != nil {
		return false, err
	}
	for _, device := range devices {
		f, err := os.Open(device.Path)
		if err != nil {
			return false, fmt.Errorf("open %s: %w", device.Path, errdefs.FromErrno(err))
		}
		err = f.Sync()
		f.Close()
		if err != nil {
			return false, fmt.Errorf("flush %s: %w", device.Path, errdefs.FromErrno(err))
		}
		moving = moving || !device.ReadOnly
	}
	return moving && !spec.Quiesced, nil
}

// errNotOwn is what is in the place of an image, and is not it.
var errNotOwn = fmt.Errorf("%w: not its image", errdefs.ErrDataLoss)

// openImage opens the bytes of an object and makes sure that they are its own, and all there.
func (p *filePool) openImage(ref Ref, s *stored, flags int) (*os.File, error) {
	info, err := p.root.Lstat(imagePath(ref))
	if err == nil && !info.Mode().IsRegular() { // not opened: who opens a FIFO waits, and a link leads to another's image
		return nil, fmt.Errorf("%w: %s of pool %s is no file (%s); restore the image from a backup, or delete the volume", errNotOwn, imagePath(ref), p.name, info.Mode())
	}
	f, err := p.root.OpenFile(imagePath(ref), flags, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: the image %s of pool %s is missing; restore it from a backup, or delete the volume", errdefs.ErrDataLoss, imagePath(ref), p.name)
	}
	if err != nil {
		return nil, fmt.Errorf("open image: %w", errdefs.FromErrno(err))
	}
	if err = p.checkOwner(ref, f, flags != os.O_RDONLY); err == nil {
		info, err = f.Stat()
	}
	if err != nil {
		f.Close()
		return nil, errdefs.FromErrno(err)
	}
	if info.Size() < s.Size {
		f.Close()
		return nil, fmt.Errorf("%w: the image %s of pool %s has %d bytes, its record says %d; restore it from a backup, or delete the volume",
			errdefs.ErrDataLoss, imagePath(ref), p.name, info.Size(), s.Size)
	}
	return f, nil
}

// imageOwner is the attribute of an image (xattr(7)) that says whose it is, as its name may come to be
// wrong: whoever brings images back from lost+found or a backup may mix them up, or give one two names.
const imageOwner = "user.ashlar.object"

// checkOwner makes sure that an open image is that of an object. Those of older drivers do not say whose they are;
// with give they do from then on, as far as the filesystem has attributes, and room for one.
func (p *filePool) checkOwner(ref Ref, image *os.File, give bool) error {
	have := make([]byte, 64)
	n, err := unix.Fgetxattr(int(image.Fd()), imageOwner, have)
	if err == nil && string(have[:n]) != ref.String() || errors.Is(err, unix.ERANGE) {
		return fmt.Errorf("%w: %s of pool %s says that it is the image of %q; put the right one there, or if this is it, say so: setfattr -x %s %s",
			errNotOwn, imagePath(ref), p.name, have[:max(n, 0)], imageOwner, imagePath(ref))
	}
	if errors.Is(err, unix.ENODATA) && give {
		err = unix.Fsetxattr(int(image.Fd()), imageOwner, []byte(ref.String()), 0)
	}
	if errors.Is(err, unix.ENODATA) || errors.Is(err, unix.ENOTSUP) || errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return nil
	}
	return errdefs.FromErrno(err)
}

func (p *filePool) Expand(ctx context.Context, ref Ref, size int64) (Record, error) {
	o, s, err := p.lookup(ref)
	if err != nil {
		return Record{}, err
	}
	if size > MaxSize || size%Granularity != 0 {
		return Record{}, fmt.Errorf("%w: %d bytes; a multiple of %d up to %d can be had", errdefs.ErrOutOfRange, size, Granularity, int64(MaxSize))
	}
	if ref.Kind != Volume {
		return Record{}, fmt.Errorf("%w: a snapshot does not grow", errdefs.ErrInvalid)
	}
	size = max(size, s.Growing)
	if size > s.Size {
		if err := p.grow(ctx, o, s, size); err != nil {
			return Record{}, fmt.Errorf("expand %s in pool %s to %d bytes: %w", ref, p.name, size, err)
		}
	}
	// Also with nothing to grow: a retry may come after a crash between the two.
	if err := p.resizeLoops(ctx, ref); err != nil {
		return Record{}, err
	}
	return copyOf(o.stored.decoded), nil
}

// grow writes down where it is heading, takes the space, and then says it is there. An image that is
// longer than its record says (the record may be an older one) is never cut.
func (p *filePool) grow(ctx context.Context, o *object, s *stored, size int64) error {
	ref := s.decoded.Ref
	image, err := p.openImage(ref, s, os.O_RDWR)
	if err != nil {
		return err
	}
	defer image.Close()
	info, err := image.Stat()
	if err != nil {
		return errdefs.FromErrno(err)
	}
	if size > o.size() {
		if err := p.reserve(ctx, size-o.size(), func() error {
			return p.save(o, newStored(s.decoded, ready, size))
		}); err != nil {
			return err
		}
	}
	if err := errors.Join(p.allocate(ctx, o, image, max(size, info.Size()), s.Thin), image.Sync()); err != nil {
		// Take the promise back; what was allocated beyond the size goes with it.
		return errors.Join(errdefs.FromErrno(err), image.Truncate(info.Size()), p.save(o, newStored(s.decoded, ready, s.Growing)))
	}
	record := s.decoded
	record.Size = size
	return p.save(o, newStored(record, ready, 0))
}

// checkLength returns errdefs.ErrPrecondition for an image that is longer than its record says: a copy of what the
// record says would lack the end of it.
func (p *filePool) checkLength(s *stored, image *os.File) error {
	info, err := image.Stat()
	if err != nil {
		return errdefs.FromErrno(err)
	}
	if have := info.Size(); have > max(s.Size, s.Growing) {
		return fmt.Errorf("%w: the image %s of pool %s has %d bytes, its record says %d, as an older one does; expand the volume to %d bytes, and the record has them again",
			errdefs.ErrPrecondition, imagePath(s.decoded.Ref), p.name, have, s.Size, (have+Granularity-1)/Granularity*Granularity)
	}
	return nil
}
