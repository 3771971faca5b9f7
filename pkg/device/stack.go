// Package device is the stack of devices between the bytes of a volume and their users: each device is over the one below it. The lowest is the device
// that the volume's pool attaches (bottom). Over it are, in this order, where the volume has them: a device that marks what is written (marked), for a
// leg; a seat, for a volume that may move while it is used; and the open device of an encrypted volume (crypt). The highest is the top, which is mounted
// or handed out. Without a device mapper the pool's device is the whole stack.
//
// Nothing of a stack is written down. Which layers a volume has follows from the volume, and which of them are up from the kernel. So a crash at any point
// leaves what the next Attach goes on from, or what Recover takes away.
package device

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/internal/fsync"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/luks"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// layer is one device of a stack. Each method may be called again, also after a crash at any point of it.
type layer interface {
	// attach makes the layer's device over the one below, which the caller holds open, or finds the one that is there. The
	// caller holds what it returns until it closes it.
	attach(ctx context.Context, below blockdev.Device, o Options) (blockdev.Device, error)
	// attached returns the layer's devices, and the numbers of the devices that they are over.
	attached(ctx context.Context) (devices []blockdev.Device, below []uint64, err error)
	// grow brings the layer's device to the size of the one below. key is that of an encrypted volume; nil if the caller has none.
	grow(ctx context.Context, key luks.Key) error
	// suspend holds back all writes to the layer's device until resume is called, which may be called again. resume is nil
	// if the layer cannot, or has no device: nothing is held back then.
	suspend(ctx context.Context) (resume func() error, err error)
	// detach removes the layer's devices. errdefs.ErrInUse if one is held open: it then goes with its last user.
	detach(ctx context.Context) error
	// health returns what is wrong with the layer.
	health(ctx context.Context) ([]blockdev.Problem, error)
}

// Stacks are the stacks of the volumes of one node.
type Stacks struct {
	mu     sync.Mutex
	mapper bool                     // the kernel has a device mapper; it is never set back to false
	marks  map[mark]map[string]bool // names of the devices that have a mark
	looks  map[string]*look         // those that are under way, by the names of the devices: see inTime
}

// A name of a device has room for these: else this does not compile.
const _, _, _, _, _, _, _ = uint(blockdev.LayerRoom - len(markedSuffix)), uint(blockdev.LayerRoom - len(seatSuffix)), uint(blockdev.LayerRoom - len(cryptSuffix)),
	uint(blockdev.LayerRoom - len(sinceSuffix)), uint(blockdev.LayerRoom - len(newerSuffix)), uint(blockdev.LayerRoom - len(newSuffix)), uint(blockdev.LayerRoom - len(soundSuffix))

// mark is a fact about a device that the kernel does not tell. It is lost when the driver ends; Recover finds leaving again.
type mark int

const (
	suspended mark = iota // this process has suspended it
	leaving               // it is detached, and a process that was given it holds it open: nobody may attach it
)

// mark sets or takes away a mark of a device.
func (s *Stacks) mark(name string, m mark, is bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if is {
		s.marks[m][name] = true
	} else {
		delete(s.marks[m], name)
	}
}

func (s *Stacks) has(name string, m mark) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.marks[m][name]
}

// New asks the kernel what stacks can be made of. Recover asks again: the first LVM pool that is opened may bring the device mapper.
func New() *Stacks {
	s := &Stacks{marks: map[mark]map[string]bool{suspended: {}, leaving: {}}, looks: map[string]*look{}}
	_ = s.probe() // Recover says why not
	return s
}

// probe looks whether there is a device mapper.
func (s *Stacks) probe() error {
	targets, err := dm.Targets()
	if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM) { // it may be there
		return fmt.Errorf("look for the device mapper: %w", err)
	}
	_, linear := targets["linear"]
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mapper = s.mapper || linear
	return nil
}

func (s *Stacks) hasMapper() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mapper
}

// Stack is the stack of one volume. The caller serialises calls for the same volume, as for blockdev.Pool.
type Stack struct {
	stacks *Stacks
	pool   blockdev.Pool
	ref    blockdev.Ref
}

// Of returns the stack of a volume in a pool. It asks nobody, and the volume need not be there.
func (s *Stacks) Of(pool blockdev.Pool, ref blockdev.Ref) Stack { return Stack{s, pool, ref} }

// layers returns the layers that the volume can have, from the lowest. It does not know whether the volume is encrypted or a leg: only the record says. A
// pool that opens late is asked first, so that it may open; while it is not open, the lowest layer alone is returned, and the pool answers for all.
func (s Stack) layers(ctx context.Context) []layer {
	if blockdev.Unwrap(s.pool) == nil {
		_, _ = s.pool.Attached(ctx, s.ref) // what is wrong is what the lowest layer says
	}
	layers := []layer{bottom{s.pool, s.ref}}
	if names, ok := blockdev.As[blockdev.Stackable](s.pool); ok && s.stacks.hasMapper() {
		t := top{s.stacks, names, s.pool, s.ref}
		layers = append(layers, marked{t}, seat{t}, crypt{t}, t)
	}
	return layers
}

// wanted returns the layers that an attached volume is to have. errdefs.ErrUnsupported if it is encrypted or guarded, and the kernel has no device mapper.
func (s Stack) wanted(ctx context.Context, o Options) ([]layer, error) {
	layers := s.layers(ctx)
	if len(layers) == 1 {
		if o.Encryption != nil {
			return nil, fmt.Errorf("%w: it is encrypted, and the kernel has no device mapper; load the modules dm-mod and dm-crypt", errdefs.ErrUnsupported)
		}
		if o.Guarded {
			return nil, fmt.Errorf("%w: nothing keeps it from being written to: the kernel has no device mapper; load the modules dm-mod and dm-flakey", errdefs.ErrUnsupported)
		}
		return layers, nil
	}
	seated, err := s.has(ctx, layers, isSeat, o.Seat)
	if err != nil {
		return nil, err
	}
	marks, err := s.has(ctx, layers, isMarked, o.Marking != nil)
	return slices.DeleteFunc(layers, func(l layer) bool {
		switch l.(type) {
		case marked:
			return !marks
		case seat:
			return !seated
		case crypt:
			return o.Encryption == nil
		}
		return false
	}), err
}

// has reports whether the volume has an optional layer, or is to get it because it is asked for. A stack that is up above that layer keeps what it has
// until it is detached. layers are all that the volume can have; is recognises the one.
func (s Stack) has(ctx context.Context, layers []layer, is func(layer) bool, asked bool) (bool, error) {
	up := false
	for _, l := range slices.Backward(layers[1:]) {
		devices, _, err := l.attached(ctx)
		if err != nil {
			return false, s.errorOf(l, err)
		}
		if is(l) {
			return len(devices) > 0 || asked && !up, nil
		}
		up = up || len(devices) > 0
	}
	return false, nil
}

// Options say how to attach.
type Options struct {
	// Keep: the device stays until Detach, whoever holds it open and whatever is done to it, so it can be handed out to a user who is not trusted. Without
	// Keep it goes with its last user.
	Keep bool
	// Attributes are settings of the block queue, by their names under /sys/block/DEVICE/queue.
	Attributes map[string]string
	// Encryption of a volume that is encrypted; nil: it is not.
	Encryption *Encryption
	// Seat: the volume gets a seat, so that it may move while it is used (Stack.Mirror), where the kernel has a device mapper. An attached volume stays as
	// it is, with a seat or without.
	Seat bool
	// Marking: what is written to the volume is marked, where the kernel has a device mapper. An attached volume stays as it is, with marks or without.
	Marking *Marking
	// Guarded: the device fails all writes, whoever has it open, because several nodes read the volume.
	Guarded bool
	// Mounted reports whether a device is mounted; nil: none is. A pool's device that was mounted itself, when there was no device mapper, or by an older
	// driver, is used as it is.
	Mounted func(blockdev.Device) bool
	// ReadOnly: nobody can write to the device, whoever has it open, until the volume is attached without ReadOnly. It has no effect where the kernel has no
	// device mapper, nor on a device that is there for writing already.
	ReadOnly bool
}

// Dangling returns errdefs.ErrPrecondition if the volume has a dangling device: one that is there, while the device below it is gone, as after the end of a
// connection. It must not be laid over another device: that would get what its users wrote before. Its users get errors until it is detached.
func (s Stack) Dangling(ctx context.Context) error { return s.dangling(ctx, s.layers(ctx)) }

func (s Stack) dangling(ctx context.Context, layers []layer) error {
	for _, l := range layers[1:] {
		devices, below, err := l.attached(ctx)
		if err != nil {
			return s.errorOf(l, err)
		}
		if len(devices) > 0 && len(below) > 0 && !slices.ContainsFunc(below, present) {
			return fmt.Errorf("%w: what %s is over is gone, and it is there for those who have it mounted or open; end the pods that use %s of pool %s on this node, and unstage it",
				errdefs.ErrPrecondition, devices[0].Path, s.ref, s.pool.Name())
		}
	}
	return nil
}

// Open reports whether the top of the volume is open, as it is while it is mounted. A device that is handed out need not be open.
func (s Stack) Open() (bool, error) {
	t, can := s.top()
	if !can {
		return false, nil
	}
	_, _, d, err := t.find()
	return d != nil && d.Opens > 0, err
}

// present reports whether the kernel still has a device; what a process holds open may be gone for all others.
func present(number uint64) bool {
	_, err := os.Stat(dm.Sysfs(number))
	return !errors.Is(err, os.ErrNotExist)
}

// attachTries is how often Attach looks again for a device that vanishes while it is opened, before it fails.
const attachTries = 5

// Programs of the host may have a new device for themselves for a moment (O_EXCL): udev has the kernel look for parts of a btrfs, and before Linux 6.3 that
// takes it so. Attach waits for them this often, with this pause.
const (
	claimedTries = 10
	claimedPause = 100 * time.Millisecond
)

// Attach makes the volume a device of this machine, or finds the one that is there. The caller closes it to end its hold. Errors, besides those of
// blockdev.Pool.Attach:
//
//   - errdefs.ErrInUse: it is attached with another Keep or Guarded, or another program has its device for itself (O_EXCL);
//   - errdefs.ErrPrecondition: it has a dangling device (Dangling);
//   - errdefs.ErrUnsupported: it is encrypted or guarded, and the kernel has no device mapper;
//   - ErrMarks: only the marks fail.
func (s Stack) Attach(ctx context.Context, o Options) (blockdev.Device, error) {
	for try := 0; ; try++ {
		device, err := s.attach(ctx, o)
		if dm.Vanished(err) && try < attachTries {
			continue
		}
		if errors.Is(err, unix.EBUSY) && try < claimedTries && ctx.Err() == nil {
			time.Sleep(claimedPause)
			continue
		}
		if err != nil {
			return blockdev.Device{}, s.claimed(err)
		}
		if _, err := device.SetQueue(o.Attributes); err != nil {
			return blockdev.Device{}, errors.Join(err, device.Close())
		}
		return device, nil
	}
}

// claimed adds what to do to the error that somebody else has a device of the volume for himself.
func (s Stack) claimed(err error) error {
	if !errors.Is(err, unix.EBUSY) {
		return err
	}
	return fmt.Errorf("%w: another program, or the kernel, has the device for itself: %w; lsblk shows what is over it; what pods write into raw volumes may look to the host like a part of an array (mdadm --stop), "+
		"a cache (bcache) or a volume group", errdefs.ErrInUse, err)
}

func (s Stack) attach(ctx context.Context, o Options) (blockdev.Device, error) {
	layers, err := s.wanted(ctx, o)
	if err == nil {
		err = s.dangling(ctx, layers)
	}
	if err != nil {
		return blockdev.Device{}, err
	}
	if o.Encryption != nil || len(layers) == 1 || o.Guarded {
		return s.attachAll(ctx, layers, o)
	}
	devices, err := s.pool.Attached(ctx, s.ref)
	if err != nil {
		return blockdev.Device{}, err
	}
	lowest := layers[:1]
	if slices.ContainsFunc(devices, func(d blockdev.Device) bool { return d.Kept && !d.ReadOnly }) {
		// It was handed out with nothing over it, when there was no device mapper. It stays so until it is detached.
		return s.attachAll(ctx, lowest, o)
	}
	device, err := s.attachAll(ctx, layers, o)
	if errors.Is(err, unix.EBUSY) && o.Mounted != nil && slices.ContainsFunc(devices, o.Mounted) { // nothing can be laid over it
		return s.attachAll(ctx, lowest, o)
	}
	return device, err
}

// attachAll attaches layers from the lowest, and returns the last one's device. Each holds the one below it. o.Keep is for the last one only.
func (s Stack) attachAll(ctx context.Context, layers []layer, o Options) (blockdev.Device, error) {
	var device blockdev.Device
	seated := slices.ContainsFunc(layers, isSeat)
	for i, l := range layers {
		last := i == len(layers)-1
		above, err := l.attach(ctx, device, Options{Keep: o.Keep && last, Encryption: o.Encryption, Seat: seated, Marking: o.Marking, Guarded: o.Guarded, ReadOnly: o.ReadOnly && last})
		if failure := device.Close(); failure != nil {
			err = errors.Join(err, failure, above.Close())
		}
		if err != nil {
			return blockdev.Device{}, s.errorOf(l, err)
		}
		device = above
	}
	return device, nil
}

// Attached lists the devices of the volume that may be used: those that none of its other devices is over. It asks the kernel, and needs no record.
func (s Stack) Attached(ctx context.Context) ([]blockdev.Device, error) {
	var found []blockdev.Device
	covered := map[uint64]int{} // index in found of what is over a device
	for _, l := range slices.Backward(s.layers(ctx)) {
		devices, below, err := l.attached(ctx)
		if err != nil {
			return nil, s.errorOf(l, err)
		}
		for _, d := range devices {
			if over, is := covered[d.Number]; !is {
				found = append(found, d)
			} else if found[over].Below = d.Below; d.Below == "" {
				found[over].Below = d.Path
			}
		}
		for _, number := range below {
			covered[number] = len(found) - 1
		}
	}
	return found, nil
}

// Grow brings the whole stack to the size of the pool's device. It has to be called after blockdev.Pool.Expand, and again after a crash between the two.
// An encrypted volume that is attached needs its key: luks.ErrNoKey without. ErrMarks if there is no room for the marks of the larger volume.
func (s Stack) Grow(ctx context.Context, key luks.Key) error {
	for _, l := range s.layers(ctx) {
		if err := l.grow(ctx, key); err != nil {
			return s.errorOf(l, err)
		}
	}
	return nil
}

// Suspend holds back all writes to the volume until resume is called, which may be called again. It first writes out the page cache of the device. resume
// is nil where nothing can be held back.
func (s Stack) Suspend(ctx context.Context) (resume func() error, err error) {
	for _, l := range slices.Backward(s.layers(ctx)) {
		if resume, err = l.suspend(ctx); err != nil || resume != nil {
			return resume, s.errorOf(l, err)
		}
	}
	return nil, nil
}

// Flush writes out what the page cache holds of the volume's devices, so that a copy of what is below them has it.
func (s Stack) Flush(ctx context.Context) error {
	devices, err := s.Attached(ctx)
	for _, d := range devices {
		err = errors.Join(err, flush(d.Path))
	}
	return err
}

func flush(path string) error {
	f, err := os.Open(path)
	if dm.Vanished(err) {
		return nil
	}
	if err = fsync.AndClose(f, err); err != nil {
		return fmt.Errorf("flush %s: %w", path, errdefs.FromErrno(err))
	}
	return nil
}

// Detach removes all devices of the volume, from the highest. It needs no record. errdefs.ErrInUse if one is held open: it goes with its last user, and
// what is below it goes too.
func (s Stack) Detach(ctx context.Context) error {
	for _, l := range slices.Backward(s.layers(ctx)) {
		if err := l.detach(ctx); err != nil {
			return s.errorOf(l, err)
		}
	}
	return nil
}

// DetachLowest detaches the pool's device, and what marks over it, after the seat has been switched to other devices.
func (s Stack) DetachLowest(ctx context.Context) error {
	if t, can := s.top(); can {
		m := marked{t}
		if err := m.detach(ctx); err != nil {
			return s.errorOf(m, err)
		}
	}
	return s.pool.Detach(ctx, s.ref)
}

// Health is what is wrong with the volume, by its pool and by its devices; empty means none known. What a disk does not tell within healthPatience is left
// out.
func (s Stack) Health(ctx context.Context) ([]blockdev.Problem, error) {
	var problems []blockdev.Problem
	for _, l := range s.layers(ctx) {
		found, err := l.health(ctx)
		if err != nil {
			return nil, s.errorOf(l, err)
		}
		problems = append(problems, found...)
	}
	return problems, nil
}

// errorOf adds to an error of a layer which volume's device it is of; errors of a pool say it themselves.
func (s Stack) errorOf(l layer, err error) error {
	if _, pools := l.(bottom); err == nil || pools {
		return err
	}
	return fmt.Errorf("the device over %s of pool %s: %w", s.ref, s.pool.Name(), err)
}

// Orphans returns the devices of a pool's volumes that were attached with Keep. The caller knows which of them are still wanted.
func (s *Stacks) Orphans(ctx context.Context, pool blockdev.Pool) (map[blockdev.Ref][]blockdev.Device, error) {
	bare, err := pool.Orphans(ctx)
	if err != nil {
		return nil, err
	}
	found := map[blockdev.Ref][]blockdev.Device{}
	maps.Copy(found, bare)
	tops, err := s.tops(pool)
	for _, t := range tops {
		devices, failure := s.Of(pool, t.ref).Attached(ctx)
		if failure != nil {
			err = errors.Join(err, failure)
			continue
		}
		if devices = slices.DeleteFunc(devices, func(d blockdev.Device) bool { return !d.Kept }); len(devices) > 0 {
			found[t.ref] = devices
		}
	}
	return found, err
}

// Volumes returns the volumes of a pool that have a top, or a pool's device that was kept with nothing over it. It needs no record.
func (s *Stacks) Volumes(ctx context.Context, pool blockdev.Pool) ([]blockdev.Ref, error) {
	bare, err := pool.Orphans(ctx)
	if err != nil {
		return nil, err
	}
	tops, err := s.tops(pool)
	found := slices.Collect(maps.Keys(bare))
	for _, t := range tops {
		found = append(found, t.ref)
	}
	return found, err
}

// Recover repairs what a crash left of the stacks of a pool, before anybody uses them: devices without a table, suspended, of another size than what is
// below them, or with a table of an older driver. A mirror stays one, and goes on. What cannot be repaired is logged.
func (s *Stacks) Recover(ctx context.Context, pool blockdev.Pool) error {
	if err := s.probe(); err != nil {
		return err
	}
	markings, err := s.markings(pool)
	for _, l := range markings { // from the lowest layer, as each grows to the size of the one below
		if err := l.recover(ctx); err != nil {
			klog.FromContext(ctx).Error(err, "Could not put right what marks what is written to a volume; the next attach does, or the next start", "pool", pool.Name(), "object", l.ref.String())
		}
	}
	seats, failure := s.seats(pool)
	err = errors.Join(err, failure)
	for _, l := range seats { // then the seats
		if err := l.recover(ctx); err != nil {
			klog.FromContext(ctx).Error(err, "Could not put right the seat of a volume; the next start tries again", "pool", pool.Name(), "object", l.ref.String())
		}
	}
	crypts, failure := s.crypts(pool)
	err = errors.Join(err, failure)
	for _, c := range crypts { // then the open devices of encrypted volumes
		if err := c.recover(ctx); err != nil {
			klog.FromContext(ctx).Error(err, "Could not put right the open device of an encrypted volume; the next start tries again", "pool", pool.Name(), "object", c.ref.String())
		}
	}
	tops, failure := s.tops(pool)
	err = errors.Join(err, failure)
	for _, t := range tops {
		if err := t.recover(ctx); err != nil {
			klog.FromContext(ctx).Error(err, "Could not put right the device over a volume; the next start tries again", "pool", pool.Name(), "object", t.ref.String())
		}
	}
	return err
}

// tops returns the tops of all volumes of a pool that have one.
func (s *Stacks) tops(pool blockdev.Pool) ([]top, error) {
	stackable, ok := blockdev.As[blockdev.Stackable](pool)
	if !s.hasMapper() || !ok {
		return nil, nil
	}
	names, err := dm.Names("")
	var found []top
	for _, name := range names {
		if ref, ours := stackable.ParseTop(name); ours {
			found = append(found, top{s, stackable, pool, ref})
		}
	}
	return found, err
}

// bottom is the device of a pool.
type bottom struct {
	pool blockdev.Pool
	ref  blockdev.Ref
}

func (b bottom) attach(ctx context.Context, _ blockdev.Device, o Options) (blockdev.Device, error) {
	return b.pool.Attach(ctx, b.ref, blockdev.Attachment{Keep: o.Keep})
}

func (b bottom) attached(ctx context.Context) ([]blockdev.Device, []uint64, error) {
	devices, err := b.pool.Attached(ctx, b.ref)
	return devices, nil, err
}

func (b bottom) grow(context.Context, luks.Key) error          { return nil } // Expand does
func (b bottom) suspend(context.Context) (func() error, error) { return nil, nil }
func (b bottom) detach(ctx context.Context) error              { return b.pool.Detach(ctx, b.ref) }

func (b bottom) health(ctx context.Context) ([]blockdev.Problem, error) {
	return b.pool.Health(ctx, b.ref)
}
