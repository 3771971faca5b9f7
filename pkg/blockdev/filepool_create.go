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
		return Record{}, fmt.Errorf("create %q in pool %s: %w", spec.Name, p.name, ErrBusy)
	}
	if o != nil && o.stored.State == ready {
		return sameObject(p.name, o.stored.decoded, spec)
	}
	if o != nil && !o.resumable(spec) {
		if err := p.remove(spec.Ref); err != nil {
			return Record{}, err
		}
		o = nil
	}
	if o == nil {
		var err error
		if o, err = p.begin(spec); err != nil {
			return Record{}, fmt.Errorf("create %q in pool %s: %w", spec.Name, p.name, err)
		}
	}
	record, err := p.fill(ctx, o, spec)
	if err != nil {
		err = fmt.Errorf("create %q in pool %s: %w", spec.Name, p.name, err)
		p.giveUp(o, spec)
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
		return fmt.Errorf("%w: %d bytes; a multiple of %d up to %d can be had", ErrOutOfRange, spec.Size, Granularity, int64(MaxSize))
	}
	if spec.Origin == (Ref{}) {
		return nil
	}
	_, origin, err := p.lookup(spec.Origin)
	if err != nil {
		return err
	}
	if spec.Size < origin.Size {
		return fmt.Errorf("%w: %d bytes are less than the %d of %s", ErrOutOfRange, spec.Size, origin.Size, spec.Origin)
	}
	return nil
}

// sameObject checks that an existing object is the one asked for.
func sameObject(pool string, have Record, spec Spec) (Record, error) {
	if have.Name != spec.Name || have.Origin != spec.Origin {
		return Record{}, fmt.Errorf("%w: %s in pool %s is %q made from %s", ErrExists, have.Ref, pool, have.Name, have.Origin)
	}
	return copyOf(have), nil
}

// begin promises the space and writes the record.
func (p *filePool) begin(spec Spec) (*object, error) {
	o := &object{active: true}
	o.stored = newStored(Record{Ref: spec.Ref, Name: spec.Name, Size: spec.Size, Thin: spec.Provisioning == Thin, Origin: spec.Origin,
		Created: time.Now().UTC(), Labels: maps.Clone(spec.Labels)}, creating, 0)
	if err := p.reserve(spec.Size, func() error {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.insert(o)
		return nil
	}); err != nil {
		return nil, err
	}
	generation, err := createRecord(p.root, recordPath(spec.Ref), o.stored)
	if err != nil {
		p.giveUp(o, spec)
		return nil, err
	}
	o.generation = generation
	return o, nil
}

// giveUp undoes an unfinished object, unless a retry can go on with its copy.
func (p *filePool) giveUp(o *object, spec Spec) {
	if o.copied > 0 && spec.Origin.Kind == Snapshot {
		p.mu.Lock()
		defer p.mu.Unlock()
		o.touched, o.active = time.Now(), false
		p.space.unfinished[spec.Ref] = true
		return
	}
	_ = p.remove(spec.Ref) // a failure has its own next try
}

// fill makes the bytes, and then the object ready.
func (p *filePool) fill(ctx context.Context, o *object, spec Spec) (Record, error) {
	image, err := p.root.OpenFile(imagePath(spec.Ref), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return Record{}, systemError(err)
	}
	defer image.Close()
	cut := o.stored.Created
	if spec.Origin == (Ref{}) {
		err = p.allocate(image, spec.Size, spec.Provisioning == Thin)
	} else {
		cut, err = p.copyOrigin(ctx, o, image, spec)
	}
	if err != nil {
		return Record{}, err
	}
	if err := image.Sync(); err != nil {
		return Record{}, fmt.Errorf("sync the image: %w", systemError(err))
	}
	if spec.Prepare != nil {
		if err := spec.Prepare(ctx, p.location.Path+"/"+imagePath(spec.Ref)); err != nil {
			return Record{}, err
		}
	}
	if err := p.folders[spec.Kind].Sync(); err != nil {
		return Record{}, fmt.Errorf("sync the folder: %w", systemError(err))
	}
	if err := p.account(o); err != nil {
		return Record{}, err
	}
	record := o.stored.decoded
	record.Created = cut
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
// is written (fallocate(2)), or a hole.
func (p *filePool) allocate(image *os.File, size int64, thin bool) error {
	p.space.allocating.RLock()
	defer p.space.allocating.RUnlock()
	if thin {
		if err := image.Truncate(size); err != nil {
			return fmt.Errorf("set the size of the image: %w", systemError(err))
		}
		return nil
	}
	for {
		err := unix.Fallocate(int(image.Fd()), 0, 0, size)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if errors.Is(err, unix.EOPNOTSUPP) {
			return fmt.Errorf("%w: the filesystem at %s cannot preallocate; use provisioning=thin there", ErrUnsupported, p.location.Path)
		}
		if err != nil {
			return fmt.Errorf("allocate %d bytes: %w", size, systemError(err))
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
	forgetCached(source)
	moving, err := p.flushDevices(ctx, spec)
	if err != nil {
		return time.Time{}, err
	}
	// Snapshots never grow, so they get no more space than they have data.
	thin := spec.Provisioning == Thin || spec.Kind == Snapshot
	if p.reflink {
		cut := time.Now().UTC()
		if err := unix.IoctlFileClone(int(image.Fd()), int(source.Fd())); err != nil {
			return time.Time{}, fmt.Errorf("clone %s: %w", spec.Origin, systemError(err))
		}
		// The image of an origin that grew half-way may be longer than its record.
		if err := image.Truncate(origin.Size); err != nil {
			return time.Time{}, fmt.Errorf("set the size of the image: %w", systemError(err))
		}
		if spec.Size == origin.Size && thin {
			return cut, nil
		}
		return cut, p.allocate(image, spec.Size, thin)
	}
	if !o.cut.Equal(origin.Created) {
		// Nothing yet, or of another origin of that name: begin anew.
		if err := image.Truncate(0); err != nil {
			return time.Time{}, fmt.Errorf("set the size of the image: %w", systemError(err))
		}
		o.copied, o.cut = 0, origin.Created
	}
	if o.copied == 0 {
		if err := image.Truncate(spec.Size); err != nil {
			return time.Time{}, fmt.Errorf("set the size of the image: %w", systemError(err))
		}
		if !thin {
			if err := p.allocate(image, spec.Size, false); err != nil {
				return time.Time{}, err
			}
		}
	}
	if moving {
		return time.Now().UTC(), copyMoving(ctx, image, source, origin.Size)
	}
	cut := time.Now().UTC()
	done, err := copyData(ctx, image, source, o.copied, origin.Size)
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
			return false, fmt.Errorf("open %s: %w", device.Path, systemError(err))
		}
		err = f.Sync()
		f.Close()
		if err != nil {
			return false, fmt.Errorf("flush %s: %w", device.Path, systemError(err))
		}
		moving = moving || !device.ReadOnly
	}
	return moving && !spec.Quiesced, nil
}

// openImage opens the bytes of an object and makes sure that they are all there.
func (p *filePool) openImage(ref Ref, s *stored, flags int) (*os.File, error) {
	f, err := p.root.OpenFile(imagePath(ref), flags, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: the image %s of pool %s is missing; restore it from a backup, or delete the volume", ErrDataLoss, imagePath(ref), p.name)
	}
	if err != nil {
		return nil, fmt.Errorf("open image: %w", systemError(err))
	}
	info, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, systemError(err)
	}
	if !info.Mode().IsRegular() || info.Size() < s.Size {
		f.Close()
		return nil, fmt.Errorf("%w: the image %s of pool %s has %d bytes, its record says %d; restore it from a backup, or delete the volume",
			ErrDataLoss, imagePath(ref), p.name, info.Size(), s.Size)
	}
	return f, nil
}

func (p *filePool) Expand(ctx context.Context, ref Ref, size int64) (Record, error) {
	o, s, err := p.lookup(ref)
	if err != nil {
		return Record{}, err
	}
	if size > MaxSize || size%Granularity != 0 {
		return Record{}, fmt.Errorf("%w: %d bytes; a multiple of %d up to %d can be had", ErrOutOfRange, size, Granularity, int64(MaxSize))
	}
	if ref.Kind != Volume {
		return Record{}, fmt.Errorf("%w: a snapshot does not grow", ErrInvalid)
	}
	size = max(size, s.Growing)
	if size > s.Size {
		if err := p.grow(o, s, size); err != nil {
			return Record{}, fmt.Errorf("expand %s in pool %s to %d bytes: %w", ref, p.name, size, err)
		}
	}
	// Also with nothing to grow: a retry may come after a crash between the two.
	if err := p.resizeLoops(ctx, ref); err != nil {
		return Record{}, err
	}
	return copyOf(o.stored.decoded), nil
}

// grow writes down where it is heading, takes the space, and then says it is there.
func (p *filePool) grow(o *object, s *stored, size int64) error {
	ref := s.decoded.Ref
	image, err := p.openImage(ref, s, os.O_RDWR)
	if err != nil {
		return err
	}
	defer image.Close()
	if size > o.size() {
		if err := p.reserve(size-o.size(), func() error {
			return p.save(o, newStored(s.decoded, ready, size))
		}); err != nil {
			return err
		}
	}
	if err := errors.Join(p.allocate(image, size, s.Thin), image.Sync()); err != nil {
		// Take the promise back; what was allocated beyond the size goes with it.
		return errors.Join(systemError(err), image.Truncate(s.Size), p.save(o, newStored(s.decoded, ready, 0)))
	}
	if err := p.account(o); err != nil {
		return err
	}
	record := s.decoded
	record.Size = size
	return p.save(o, newStored(record, ready, 0))
}
