// Package memory is a pool in memory: its records are in a map, and its bytes in memory files (memfd_create(2)) that are attached as loop devices. It is
// for tests of what is above pools. They can let any of its operations fail.
package memory

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/progress"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Disk is the storage of a pool, and outlives it. Attached devices stay in the kernel.
type Disk struct {
	size int64
	id   string

	mu      sync.Mutex
	objects map[blockdev.Ref]*object
	loops   map[blockdev.Ref][]loop // some may be gone already
	ills    map[blockdev.Ref][]blockdev.Problem
	behind  time.Duration // see SetBehind
}

type object struct {
	record blockdev.Record
	image  *os.File
}

// loop is a loop device that was made over an image.
type loop struct {
	number int
	inode  uint64
}

// NewDisk returns an empty disk of a size in bytes.
func NewDisk(size int64) *Disk {
	return &Disk{size: size, id: rand.Text(), objects: map[blockdev.Ref]*object{}, loops: map[blockdev.Ref][]loop{}, ills: map[blockdev.Ref][]blockdev.Problem{}}
}

// Ail sets the problems that Health returns for an object, or PoolHealth for the zero Ref.
func (d *Disk) Ail(ref blockdev.Ref, problems ...blockdev.Problem) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ills[ref] = problems
}

// Hook is called at the start of each operation of a pool, with its name as in blockdev.Pool, and its object (for List, Capacity and Orphans at most the
// kind). If it returns an error, the operation returns that and does nothing.
type Hook func(operation string, ref blockdev.Ref) error

// Pool is a blockdev.Pool, blockdev.Identified, a blockdev.Measurer and a blockdev.Differ.
type Pool struct {
	*Disk
	name string
	hook Hook
}

var (
	_ blockdev.Pool       = (*Pool)(nil)
	_ blockdev.Identified = (*Pool)(nil)
	_ blockdev.Measurer   = (*Pool)(nil)
	_ blockdev.Differ     = (*Pool)(nil)
)

// SetBehind sets how far the clock of the disk's machine is behind.
func (d *Disk) SetBehind(by time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.behind = by
}

// Open opens the pool that is on a disk; hook may be nil.
func (d *Disk) Open(name string, hook Hook) *Pool {
	if hook == nil {
		hook = func(string, blockdev.Ref) error { return nil }
	}
	return &Pool{d, name, hook}
}

// ID: see blockdev.Identified.
func (d *Disk) ID() string { return d.id }

// Name of the pool.
func (p *Pool) Name() string { return p.name }

// Granularity: see blockdev.Pool.
func (p *Pool) Granularity() int64 { return blockdev.Granularity }

// enter is the beginning of every operation on one object: it checks the Ref, and calls the hook.
func (p *Pool) enter(operation string, ref blockdev.Ref) error {
	if err := ref.Validate(); err != nil {
		return err
	}
	return p.hook(operation, ref)
}

// ready returns a ready object. The caller holds mu.
func (d *Disk) ready(ref blockdev.Ref) (*object, error) {
	if o := d.objects[ref]; o != nil && o.record.Ready {
		return o, nil
	}
	return nil, fmt.Errorf("%w: no %s", errdefs.ErrNotFound, ref)
}

// promised returns the sum of all sizes. The caller holds mu.
func (d *Disk) promised() (n int64) {
	for _, o := range d.objects {
		n += o.record.Size
	}
	return n
}

// used returns how much memory all images take, in bytes. The caller holds mu.
func (d *Disk) used() (n int64, err error) {
	for _, o := range d.objects {
		var st unix.Stat_t
		if err := unix.Fstat(int(o.image.Fd()), &st); err != nil {
			return 0, errdefs.FromErrno(err)
		}
		n += st.Blocks * 512
	}
	return n, nil
}

func (d *Disk) checkSize(size, have int64) error {
	if size <= 0 || size > blockdev.MaxSize || size%blockdev.Granularity != 0 {
		return fmt.Errorf("%w: %d bytes", errdefs.ErrOutOfRange, size)
	}
	if left := d.size - d.promised(); size-have > left {
		return fmt.Errorf("%w: %d bytes are left, %d are needed", errdefs.ErrNoSpace, left, size-have)
	}
	return nil
}

func copyOf(r blockdev.Record) blockdev.Record {
	r.Labels = maps.Clone(r.Labels)
	return r
}

// Create: see blockdev.Pool.
func (p *Pool) Create(ctx context.Context, spec blockdev.Spec) (blockdev.Record, error) {
	if err := p.enter("Create", spec.Ref); err != nil {
		return blockdev.Record{}, err
	}
	o, origin, err := p.begin(spec)
	if err != nil || o.record.Ready {
		return copyOf(o.record), err
	}
	if err = p.fill(ctx, o, origin, spec); err == nil && spec.Prepare != nil {
		err = spec.Prepare(ctx, fmt.Sprintf("/proc/self/fd/%d", o.image.Fd()))
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		delete(p.objects, spec.Ref)
		return blockdev.Record{}, errors.Join(fmt.Errorf("create %q: %w", spec.Name, err), o.image.Close())
	}
	o.record.Ready = true
	return copyOf(o.record), nil
}

// begin returns the object of a spec, or makes an unfinished one.
func (p *Pool) begin(spec blockdev.Spec) (o, origin *object, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	none := &object{}
	if spec.Origin != (blockdev.Ref{}) {
		if err := p.enter("", spec.Origin); err != nil {
			return none, nil, err
		}
	}
	if o := p.objects[spec.Ref]; o != nil {
		if !o.record.Ready {
			return none, nil, errdefs.ErrBusy
		}
		if o.record.Name != spec.Name || o.record.Origin != spec.Origin {
			return none, nil, fmt.Errorf("%w: %s is %q made from %q", errdefs.ErrExists, spec.Ref, o.record.Name, o.record.Origin)
		}
		return o, nil, nil
	}
	if spec.Origin != (blockdev.Ref{}) {
		if origin, err = p.ready(spec.Origin); err != nil {
			return none, nil, err
		}
		if spec.Size < origin.record.Size {
			return none, nil, fmt.Errorf("%w: %d bytes are less than the %d of %s", errdefs.ErrOutOfRange, spec.Size, origin.record.Size, spec.Origin)
		}
	}
	if err := p.checkSize(spec.Size, 0); err != nil {
		return none, nil, err
	}
	fd, err := unix.MemfdCreate(spec.Ref.String(), unix.MFD_CLOEXEC)
	if err != nil {
		return none, nil, fmt.Errorf("%w: %w", errdefs.ErrUnavailable, err)
	}
	image := os.NewFile(uintptr(fd), spec.Ref.String())
	if err := image.Truncate(spec.Size); err != nil {
		return none, nil, errors.Join(err, image.Close())
	}
	o = &object{image: image, record: blockdev.Record{Ref: spec.Ref, Name: spec.Name, Size: spec.Size, Thin: spec.Provisioning == blockdev.Thin,
		Origin: spec.Origin, Created: time.Now().Add(-p.behind).UTC(), Labels: maps.Clone(spec.Labels)}}
	p.objects[spec.Ref] = o
	return o, origin, nil
}

// copyRounds bounds how often a copy of a source that is written to is compared again.
const copyRounds = 8

func (p *Pool) fill(ctx context.Context, o, origin *object, spec blockdev.Spec) error {
	if origin == nil {
		return ctx.Err()
	}
	devices, err := p.devices(spec.Origin, false)
	if err != nil {
		return err
	}
	moving := false
	for _, d := range devices {
		if err := errors.Join(d.file.Sync(), d.file.Close()); err != nil {
			return err
		}
		moving = moving || (!d.readOnly() && !spec.Quiesced)
	}
	progress.Begin(ctx, 0, origin.record.Size)
	for range copyRounds {
		// A round that finds no difference proves that the copy is of one moment, before that round.
		same := true
		err := compare(ctx, origin.image, o.image, 0, origin.record.Size, func(at int64, want []byte) error {
			same = false
			_, err := o.image.WriteAt(want, at)
			return err
		})
		progress.Add(ctx, origin.record.Size)
		if err != nil || same || !moving {
			return err
		}
	}
	return fmt.Errorf("%w: it is being written to", errdefs.ErrInUse)
}

// Unchanged: see blockdev.Comparer.
func (p *Pool) Unchanged(ctx context.Context, copied, origin blockdev.Ref) error {
	p.mu.Lock()
	a, b := p.objects[origin], p.objects[copied]
	p.mu.Unlock()
	if a == nil || b == nil {
		return fmt.Errorf("%w: %s or %s", errdefs.ErrNotFound, origin, copied)
	}
	devices, err := p.devices(origin, false)
	if err != nil {
		return err
	}
	for _, d := range devices {
		err = errors.Join(err, d.file.Sync(), d.file.Close())
	}
	return errors.Join(err, compare(ctx, a.image, b.image, 0, a.record.Size, func(int64, []byte) error {
		return fmt.Errorf("%w: it was written to while others were cut", errdefs.ErrInUse)
	}))
}

// block is the unit of comparisons, in bytes.
const block = 64 << 10

// compare calls differs with each block of a that is not the same in b, from an offset
// on; a nil b is all zeros, as is what comes after the end of b.
func compare(ctx context.Context, a, b *os.File, from, size int64, differs func(at int64, bytes []byte) error) error {
	have, want := make([]byte, block), make([]byte, block)
	for at := from / block * block; at < size; at += block {
		if err := ctx.Err(); err != nil {
			return err
		}
		n := min(block, size-at)
		if _, err := a.ReadAt(have[:n], at); err != nil {
			return err
		}
		clear(want)
		if b != nil {
			if _, err := b.ReadAt(want[:n], at); err != nil && !errors.Is(err, io.EOF) {
				return err
			}
		}
		if !bytes.Equal(have[:n], want[:n]) {
			if err := differs(at, have[:n]); err != nil {
				return err
			}
		}
	}
	return nil
}

// Delete: see blockdev.Pool.
func (p *Pool) Delete(_ context.Context, ref blockdev.Ref) error {
	if err := p.enter("Delete", ref); err != nil {
		return err
	}
	attached, err := p.devices(ref, true)
	if err != nil {
		return err
	}
	if len(attached) > 0 {
		return fmt.Errorf("%w: %s is attached as %s", errdefs.ErrInUse, ref, attached[0].path())
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	o := p.objects[ref]
	if o == nil {
		return nil
	}
	delete(p.objects, ref)
	return o.image.Close()
}

// Erase: see blockdev.Pool. Memory that is given back is never read again.
func (p *Pool) Erase(ctx context.Context, ref blockdev.Ref) error { return p.Delete(ctx, ref) }

// Get: see blockdev.Pool.
func (p *Pool) Get(_ context.Context, ref blockdev.Ref) (blockdev.Record, error) {
	if err := p.enter("Get", ref); err != nil {
		return blockdev.Record{}, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	o, err := p.ready(ref)
	if err != nil {
		return blockdev.Record{}, err
	}
	return copyOf(o.record), nil
}

// List: see blockdev.Pool.
func (p *Pool) List(_ context.Context, kind blockdev.Kind, after string, limit int) ([]blockdev.Record, error) {
	if err := p.hook("List", blockdev.Ref{Kind: kind}); err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	var records []blockdev.Record
	for ref, o := range p.objects {
		if ref.Kind == kind && ref.Key > after && o.record.Ready {
			records = append(records, copyOf(o.record))
		}
	}
	slices.SortFunc(records, func(a, b blockdev.Record) int { return cmp.Compare(a.Key, b.Key) })
	if limit > 0 && len(records) > limit {
		records = records[:limit]
	}
	return records, nil
}

// SetLabels: see blockdev.Pool.
func (p *Pool) SetLabels(_ context.Context, ref blockdev.Ref, change func(map[string]string) error) (blockdev.Record, error) {
	if err := p.enter("SetLabels", ref); err != nil {
		return blockdev.Record{}, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	o, err := p.ready(ref)
	if err != nil {
		return blockdev.Record{}, err
	}
	labels := map[string]string{}
	maps.Copy(labels, o.record.Labels)
	if err := change(labels); err != nil {
		return blockdev.Record{}, err
	}
	o.record.Labels = maps.Clone(labels)
	return copyOf(o.record), nil
}

// Expand: see blockdev.Pool.
func (p *Pool) Expand(_ context.Context, ref blockdev.Ref, size int64) (blockdev.Record, error) {
	if err := p.enter("Expand", ref); err != nil {
		return blockdev.Record{}, err
	}
	record, err := p.grow(ref, size)
	if err != nil {
		return blockdev.Record{}, err
	}
	devices, err := p.devices(ref, false)
	for _, d := range devices {
		err = errors.Join(err, unix.IoctlSetInt(int(d.file.Fd()), unix.LOOP_SET_CAPACITY, 0), d.file.Close())
	}
	return record, err
}

func (d *Disk) grow(ref blockdev.Ref, size int64) (blockdev.Record, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	o, err := d.ready(ref)
	if err != nil {
		return blockdev.Record{}, err
	}
	if ref.Kind != blockdev.Volume {
		return blockdev.Record{}, fmt.Errorf("%w: a snapshot does not grow", errdefs.ErrInvalid)
	}
	if size > o.record.Size {
		if err := d.checkSize(size, o.record.Size); err != nil {
			return blockdev.Record{}, err
		}
		if err := o.image.Truncate(size); err != nil {
			return blockdev.Record{}, err
		}
		o.record.Size = size
	}
	return copyOf(o.record), nil
}

// device is an open loop device that is known to be over an object.
type device struct {
	loop
	flags uint32
	file  *os.File
}

func (d device) path() string   { return fmt.Sprintf("/dev/loop%d", d.number) }
func (d device) readOnly() bool { return d.flags&unix.LO_FLAGS_READ_ONLY != 0 }
func (d device) keep() bool     { return d.flags&unix.LO_FLAGS_AUTOCLEAR == 0 }

func (d device) public(hold func() error) (blockdev.Device, error) {
	size, err := d.file.Seek(0, io.SeekEnd)
	return blockdev.Device{Path: d.path(), Number: unix.Mkdev(7, uint32(d.number)), Size: size, ReadOnly: d.readOnly(), Kept: d.keep()}.Held(hold), err
}

// devices returns the devices over an object, by the kernel. They are open, unless closed.
func (d *Disk) devices(ref blockdev.Ref, closed bool) ([]device, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var found []device
	var loops []loop
	for _, l := range d.loops[ref] {
		file, err := os.Open(fmt.Sprintf("/dev/loop%d", l.number))
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENXIO) {
			continue
		}
		if err != nil {
			return nil, err
		}
		status, err := unix.IoctlLoopGetStatus64(int(file.Fd()))
		if err != nil || status.Inode != l.inode {
			// Its number may be another device's by now.
			file.Close()
			continue
		}
		loops, found = append(loops, l), append(found, device{l, status.Flags, file})
		if closed {
			file.Close()
		}
	}
	d.loops[ref] = loops
	return found, nil
}

// Attach: see blockdev.Pool.
func (p *Pool) Attach(_ context.Context, ref blockdev.Ref, how blockdev.Attachment) (blockdev.Device, error) {
	if err := p.enter("Attach", ref); err != nil {
		return blockdev.Device{}, err
	}
	attached, err := p.attach(ref, how)
	if err != nil {
		return blockdev.Device{}, fmt.Errorf("attach %s: %w", ref, err)
	}
	public, err := attached.public(attached.file.Close)
	if err != nil {
		attached.file.Close()
		return blockdev.Device{}, err
	}
	return public, nil
}

func (d *Disk) attach(ref blockdev.Ref, how blockdev.Attachment) (device, error) {
	existing, err := d.devices(ref, false)
	if err != nil {
		return device{}, err
	}
	for i, e := range existing {
		if e.readOnly() == how.ReadOnly && e.keep() == how.Keep {
			for _, other := range slices.Delete(existing, i, i+1) {
				other.file.Close()
			}
			return e, nil
		}
	}
	for _, e := range existing {
		e.file.Close()
		if !e.readOnly() && !how.ReadOnly {
			err = fmt.Errorf("%w: it is attached as %s", errdefs.ErrInUse, e.path())
		}
	}
	if err != nil {
		return device{}, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	o, err := d.ready(ref)
	if err != nil {
		return device{}, err
	}
	made, err := configure(o.image, how)
	if err == nil {
		d.loops[ref] = append(d.loops[ref], made.loop)
	}
	return made, err
}

// configure makes the next free loop device one over an image.
func configure(image *os.File, how blockdev.Attachment) (device, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(image.Fd()), &st); err != nil {
		return device{}, err
	}
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return device{}, fmt.Errorf("%w: %w", errdefs.ErrUnavailable, err)
	}
	defer control.Close()
	mode, readOnly, flags := os.O_RDWR, 0, uint32(0)
	if how.ReadOnly {
		mode, readOnly, flags = os.O_RDONLY, 1, unix.LO_FLAGS_READ_ONLY
	}
	if !how.Keep {
		flags |= unix.LO_FLAGS_AUTOCLEAR
	}
	for {
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return device{}, err
		}
		file, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", n), mode, 0)
		if err != nil {
			return device{}, err
		}
		err = unix.IoctlLoopConfigure(int(file.Fd()), &unix.LoopConfig{Fd: uint32(image.Fd()), Info: unix.LoopInfo64{Flags: flags}})
		if err == nil { // an earlier user may have left it read-only
			err = unix.IoctlSetPointerInt(int(file.Fd()), unix.BLKROSET, readOnly)
		}
		if err == nil {
			return device{loop{n, st.Ino}, flags, file}, nil
		}
		file.Close()
		if !errors.Is(err, unix.EBUSY) {
			return device{}, err
		}
	}
}

// Attached: see blockdev.Pool.
func (p *Pool) Attached(_ context.Context, ref blockdev.Ref) ([]blockdev.Device, error) {
	if err := p.enter("Attached", ref); err != nil {
		return nil, err
	}
	return p.public(ref, func(device) bool { return true })
}

// public returns the devices of an object that want selects, without a hold on them.
func (d *Disk) public(ref blockdev.Ref, want func(device) bool) ([]blockdev.Device, error) {
	devices, err := d.devices(ref, false)
	var found []blockdev.Device
	for _, one := range devices {
		described, failure := one.public(nil)
		if err = errors.Join(err, failure, one.file.Close()); want(one) {
			found = append(found, described)
		}
	}
	return found, err
}

// detachLooks is how often Detach looks, every millisecond, whether a device that something holds has gone.
const detachLooks = 1000

// Detach: see blockdev.Pool.
func (p *Pool) Detach(ctx context.Context, ref blockdev.Ref) error {
	if err := p.enter("Detach", ref); err != nil {
		return err
	}
	devices, err := p.devices(ref, false)
	for _, d := range devices {
		err = errors.Join(err, unix.IoctlSetInt(int(d.file.Fd()), unix.LOOP_CLR_FD, 0), d.file.Close())
	}
	for looks := 0; err == nil && len(devices) > 0; time.Sleep(time.Millisecond) {
		if looks++; looks > detachLooks {
			return fmt.Errorf("%w: %s is held as %s", errdefs.ErrInUse, ref, devices[0].path())
		}
		if err = ctx.Err(); err == nil {
			devices, err = p.devices(ref, true)
		}
	}
	return err
}

// Capacity: see blockdev.Pool.
func (p *Pool) Capacity(context.Context) (blockdev.Capacity, error) {
	if err := p.hook("Capacity", blockdev.Ref{}); err != nil {
		return blockdev.Capacity{}, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	left := max(0, p.size-p.promised()) / blockdev.Granularity * blockdev.Granularity
	used, err := p.used()
	return blockdev.Capacity{Total: p.size, Promised: p.promised(), Used: used, Available: left, MaxVolume: min(left, blockdev.MaxSize), MinVolume: blockdev.Granularity}, err
}

// Health: see blockdev.Pool.
func (p *Pool) Health(_ context.Context, ref blockdev.Ref) ([]blockdev.Problem, error) {
	if err := p.enter("Health", ref); err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	_, err := p.ready(ref)
	return slices.Clone(p.ills[ref]), err
}

// PoolHealth: see blockdev.Pool. It returns what a test has set (Disk.Ail).
func (p *Pool) PoolHealth(context.Context) []blockdev.Problem {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.ills[blockdev.Ref{}])
}

// Used: see blockdev.Measurer.
func (p *Pool) Used(_ context.Context, ref blockdev.Ref) (int64, error) {
	if err := p.enter("Used", ref); err != nil {
		return 0, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	o, err := p.ready(ref)
	if err != nil {
		return 0, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(o.image.Fd()), &st); err != nil {
		return 0, err
	}
	return min(st.Blocks*512, o.record.Size), nil
}

// Orphans: see blockdev.Pool.
func (p *Pool) Orphans(context.Context) (map[blockdev.Ref][]blockdev.Device, error) {
	if err := p.hook("Orphans", blockdev.Ref{}); err != nil {
		return nil, err
	}
	p.mu.Lock()
	refs := slices.Collect(maps.Keys(p.loops))
	p.mu.Unlock()
	orphans := map[blockdev.Ref][]blockdev.Device{}
	for _, ref := range refs {
		devices, err := p.public(ref, device.keep)
		if err != nil {
			return nil, err
		}
		if len(devices) > 0 {
			orphans[ref] = devices
		}
	}
	return orphans, nil
}

// DetachAll detaches what would outlive the process. Errors are those of Orphans and Detach.
func (p *Pool) DetachAll(ctx context.Context) error {
	orphans, err := p.Orphans(ctx)
	for ref := range orphans {
		err = errors.Join(err, p.Detach(ctx, ref))
	}
	return err
}

// Close releases the pool; what is on its disk stays.
func (p *Pool) Close() error { return nil }

// Allocated: see blockdev.Differ.
func (p *Pool) Allocated(ctx context.Context, ref blockdev.Ref, from int64, yield func(blockdev.Extent) error) error {
	if err := p.enter("Allocated", ref); err != nil {
		return err
	}
	return p.extents(ctx, nil, &ref, from, yield)
}

// Changed: see blockdev.Differ.
func (p *Pool) Changed(ctx context.Context, base, target blockdev.Ref, from int64, yield func(blockdev.Extent) error) error {
	for _, ref := range []blockdev.Ref{base, target} {
		if err := p.enter("Changed", ref); err != nil {
			return err
		}
	}
	return p.extents(ctx, &base, &target, from, yield)
}

func (d *Disk) extents(ctx context.Context, base, target *blockdev.Ref, from int64, yield func(blockdev.Extent) error) error {
	images := make([]*os.File, 2)
	size := int64(0)
	for i, ref := range []*blockdev.Ref{base, target} {
		if ref == nil {
			continue
		}
		d.mu.Lock()
		o, err := d.ready(*ref)
		d.mu.Unlock()
		if err != nil {
			return err
		}
		images[i], size = o.image, o.record.Size
	}
	var pending blockdev.Extent
	err := compare(ctx, images[1], images[0], from, size, func(at int64, b []byte) (err error) {
		if pending.Length > 0 && pending.Offset+pending.Length != at {
			err = yield(pending)
			pending.Length = 0
		}
		if pending.Length == 0 {
			pending.Offset = at
		}
		pending.Length += int64(len(b))
		return err
	})
	if err != nil || pending.Length == 0 {
		return err
	}
	return yield(pending)
}
