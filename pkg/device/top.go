package device

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/luks"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// top is a device of the device mapper over the pool's own, of the same size. It is what everybody above sees, because
//
//   - who has a block device has its ioctls. Of a loop device LOOP_CLR_FD takes the file away, and of a logical volume
//     persistent reservations reach the disk. A top passes none of them down (dm.Show);
//   - it can be suspended, whatever is below it, and without lvm2, which knows nothing of it: lvm2 sends its thin pool no
//     message for a volume that somebody else suspended;
//   - its table can be changed while it is in use;
//   - it can be read-only, whatever is below it, also for who makes a node of it.
//
// One that is not to be kept is removed while it is held open (DM_DEFERRED_REMOVE), so that it goes with its last user, whatever
// becomes of the driver. What is below goes with it: the pool's device is never attached to be kept.
//
// The pool names it, and has none if it cannot.
type top struct {
	stacks *Stacks
	names  blockdev.Stackable
	pool   blockdev.Pool
	ref    blockdev.Ref
}

// find returns the name and UUID of the top, and its device; nil if there is none.
func (t top) find() (name, uuid string, d *dm.Device, err error) { return t.findAs("") }

// findAs is find for the device of a lower layer, whose name is the top's and a suffix. A device of that name with a foreign UUID does not count.
func (t top) findAs(suffix string) (name, uuid string, d *dm.Device, err error) {
	name, uuid, before, err := t.names.Top(t.ref)
	if err != nil {
		return "", "", nil, err
	}
	name += suffix
	d, err = dm.FindUsed(name)
	if d != nil && !strings.HasPrefix(d.UUID, uuid) && d.UUID != before && !isMovable(d.UUID) {
		d = nil // of another with the same name, which does not know of this one
	}
	return name, uuid, d, err
}

func (t top) attach(ctx context.Context, below blockdev.Device, o Options) (_ blockdev.Device, err error) {
	name, uuid, d, err := t.find()
	if err != nil {
		return blockdev.Device{}, err
	}
	if d == nil {
		t.stacks.mark(name, leaving, false)
	} else if fits, err := t.serves(d, o); err != nil {
		return blockdev.Device{}, err
	} else if !fits {
		return blockdev.Device{}, fmt.Errorf("%w: it is attached as %s for another use (or still held after that)", errdefs.ErrInUse, d.Path())
	}
	if d == nil || !d.Live { // without a table: who made it was cut short
		if o.Seat {
			uuid = movable(uuid)
		}
		if d, err = lay(name, d != nil, func() error { return show(name, uuid, below, o.Guarded, o.ReadOnly) }); err != nil {
			return blockdev.Device{}, err
		}
		defer func() {
			if err != nil { // nobody has it
				_, removed := dm.Remove(name)
				err = errors.Join(err, removed)
			}
		}()
	} else if err := errors.Join(t.fit(d, uuid, below, o.ReadOnly), told(d, o.Guarded)); err != nil { // a crash may have come before told
		return blockdev.Device{}, err
	}
	f, err := dm.Open(d, os.O_RDONLY)
	if err != nil {
		return blockdev.Device{}, err
	}
	if !o.Keep && !d.Deferred {
		if _, err := dm.Remove(name); err != nil {
			return blockdev.Device{}, errors.Join(err, f.Close())
		}
	}
	device := blockdev.Device{Path: d.Path(), Number: d.Number, Size: below.Size, Kept: o.Keep, Below: lowest(below)}
	return device.Held(f.Close), nil
}

// lowest returns the path of the lowest device below d, or of d.
func lowest(d blockdev.Device) string { return cmp.Or(d.Below, d.Path) }

// serves reports whether the device that is there fits the options: the same Keep and Guarded, and not leaving.
func (t top) serves(d *dm.Device, o Options) (bool, error) {
	if !d.Live {
		return true, nil
	}
	if d.Deferred == o.Keep || t.stacks.has(d.Name, leaving) {
		return false, nil
	}
	guarded, err := dm.Guarded(d.Name)
	return guarded == o.Guarded, err
}

// lay calls show to make a device, or to give one that is there without a table its table, and returns the device. errdefs.ErrPrecondition if a foreign
// device has the name.
func lay(name string, there bool, show func() error) (*dm.Device, error) {
	if other, err := dm.Find(name); err != nil || !there && other != nil {
		return nil, cmp.Or(err, fmt.Errorf("%w: a device %s is there that is not of this pool; remove or rename it", errdefs.ErrPrecondition, name))
	}
	if err := show(); err != nil {
		return nil, err
	}
	d, err := dm.Find(name)
	if err == nil && d == nil {
		err = unix.ENODEV
	}
	return d, err
}

// fit brings a top to the size of the device below it. One that is read-only becomes writable, unless readOnly.
func (t top) fit(d *dm.Device, uuid string, below blockdev.Device, readOnly bool) error {
	guarded, err := dm.Guarded(d.Name)
	if err != nil {
		return err
	}
	if fits, err := fitsOver(d, below, !guarded); err != nil || fits && (readOnly || !d.ReadOnly) {
		return err
	}
	return show(d.Name, uuid, below, guarded, readOnly && d.ReadOnly)
}

// fitsOver reports whether a device needs no new table: it has the size of the one below, and if flushed is set and that one has to be flushed, so has it.
// The kernel decides the latter when it gets a table, and what is below may since be on another disk with a volatile cache (pvmove).
func fitsOver(d *dm.Device, below blockdev.Device, flushed bool) (bool, error) {
	size, err := d.Size()
	return size == below.Size && (!flushed || dm.Flushed(d.Number) || !dm.Flushed(below.Number)), err
}

// show gives the device a table. A guarded device fails all writes, and the kernel takes a flush for a write. So it is set to have no cache to flush,
// after each table, as the table sets that anew. A device with a read-only table refuses all writes, but for a guarded one, which has to be opened for
// writing.
func show(name, uuid string, below blockdev.Device, guarded, readOnly bool) error {
	if !guarded {
		return dm.Show(name, uuid, below.Number, below.Size, readOnly)
	}
	if err := dm.Guard(name, uuid, below.Number, below.Size); err != nil {
		return err
	}
	d, err := dm.Find(name)
	if err != nil || d == nil {
		return err
	}
	return told(d, true)
}

// told sets the write cache of a guarded device to "write through", so that the kernel sends it no flushes. It does nothing for other devices.
func told(d *dm.Device, guarded bool) error {
	if !guarded {
		return nil
	}
	device := blockdev.Device{Path: d.Path()}
	_, err := device.SetQueue(map[string]string{"write_cache": "write through"})
	return err
}

func (t top) attached(context.Context) (devices []blockdev.Device, below []uint64, err error) {
	_, _, d, err := t.find()
	if err != nil {
		return nil, nil, err
	}
	return shown(d, d != nil && !d.Deferred)
}

// shown returns what layer.attached returns for one device of the device mapper. A nil device, or one without a table, is not attached.
func shown(d *dm.Device, kept bool) (devices []blockdev.Device, below []uint64, err error) {
	if d == nil || !d.Live {
		return nil, nil, nil
	}
	below, err = dm.Below(d.Name)
	size := int64(0)
	if err == nil {
		size, err = d.Size()
	}
	if dm.Vanished(err) {
		return nil, nil, nil
	}
	return []blockdev.Device{{Path: d.Path(), Number: d.Number, Size: size, Kept: kept}}, below, err
}

// below returns the device of the volume's other layers that the top is over: the open device of an encrypted volume, the seat, what marks, or the pool's.
// False if it is over none of them.
func (t top) below(ctx context.Context, d *dm.Device) (blockdev.Device, bool, error) {
	return belowOf(ctx, d, crypt{t}, seat{t}, marked{t}, bottom{t.pool, t.ref})
}

func (t top) grow(ctx context.Context, _ luks.Key) error {
	_, uuid, d, err := t.find()
	if err != nil || d == nil || !d.Live {
		return err
	}
	below, there, err := t.below(ctx, d)
	if err == nil && there {
		err = t.fit(d, uuid, below, true)
	}
	if dm.Vanished(err) {
		return nil
	}
	return err
}

func (t top) suspend(ctx context.Context) (resume func() error, err error) {
	_, _, d, err := t.find()
	if err != nil || d == nil {
		return nil, err
	}
	free, err := dm.LockSuspension(ctx, d.Number)
	if err != nil {
		return nil, fmt.Errorf("wait until a mirror below it has changed: %w", err)
	}
	defer free()
	return t.suspendLocked()
}

func (t top) suspendLocked() (resume func() error, err error) {
	name, uuid, d, err := t.find()
	if err != nil || d == nil || !d.Live || d.Suspended { // if suspended, then by another tool, which may resume it at any time
		return nil, err
	}
	if err := flush(d.Path()); err != nil { // what the page cache of a raw device holds
		return nil, err
	}
	if !strings.HasPrefix(d.UUID, uuid) && !isMovable(d.UUID) { // lvm2 would wait for it, see blockdev.Stackable
		return nil, nil
	}
	return t.stacks.hold(name, 0)
}

// A process that waits for a suspended device cannot be killed. So resuming is tried this often, with this pause.
const (
	resumeTries = 10
	resumePause = 100 * time.Millisecond
)

// hold suspends a device until resume is called, which may be called again. resume also brings a table into effect that was loaded meanwhile. event is
// what udev is told.
func (s *Stacks) hold(name string, event uint32) (resume func() error, err error) {
	s.mark(name, suspended, true)
	if err := dm.Suspend(name); err != nil {
		s.mark(name, suspended, false)
		return nil, err
	}
	return func() (err error) {
		for range resumeTries {
			var now *dm.Device
			if now, err = dm.Find(name); err == nil && now != nil && now.Suspended {
				err = dm.Resume(name, event)
			}
			if err == nil {
				break
			}
			time.Sleep(resumePause)
		}
		s.mark(name, suspended, false)
		return err
	}, nil
}

func (t top) detach(ctx context.Context) error {
	name, _, d, err := t.find()
	if err != nil || d == nil {
		return err
	}
	inUse, err := removed(ctx, d)
	if inUse && !d.Deferred { // a process that was given the device still has it, so nobody may mount it
		t.stacks.mark(name, leaving, true)
	}
	return err
}

// removed removes a device; errdefs.ErrInUse, and true, if it is held open.
func removed(ctx context.Context, d *dm.Device) (inUse bool, err error) {
	inUse, err = dm.RemoveNow(ctx, d.Name)
	if err == nil && inUse {
		err = fmt.Errorf("%w: %s is held open by a process or a mount; it goes away with its last user", errdefs.ErrInUse, d.Path())
	}
	return inUse, err
}

func (t top) health(ctx context.Context) ([]blockdev.Problem, error) { return t.healthOf(ctx, "") }

// A device is suspended for moments whenever its table is replaced, for longer on a busy machine. So one counts as suspended by another tool only if it is at
// all of these looks.
const (
	suspendedLooks = 6
	suspendedPause = 200 * time.Millisecond
)

// healthOf returns the problem of the device with a suffix that another tool has suspended.
func (t top) healthOf(ctx context.Context, suffix string) ([]blockdev.Problem, error) {
	for looks := 1; ; looks++ {
		name, _, d, err := t.findAs(suffix)
		if err != nil || d == nil || !d.Live || !d.Suspended || t.stacks.has(name, suspended) {
			return nil, err
		}
		if looks == suspendedLooks {
			return []blockdev.Problem{{Severity: blockdev.Inaccessible, Reason: "DeviceSuspended", Message: fmt.Sprintf(
				"somebody suspended %s, the device of %s of pool %s, and all who write to it wait; end that with: dmsetup resume %s", d.Path(), t.ref, t.pool.Name(), name)}}, nil
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(suspendedPause):
		}
	}
}

// recover repairs a top after a crash, or one that an older driver made. A loaded table that is not in effect may be of an unfinished growth: it is
// dropped, and grow follows.
func (t top) recover(ctx context.Context) error {
	name, uuid, d, err := t.find()
	if err != nil || d == nil {
		return err
	}
	if !d.Live {
		_, err := dm.Remove(name)
		return err
	}
	if d.Loaded {
		if err := dm.Clear(name); err != nil {
			return err
		}
	}
	if d.Suspended {
		klog.FromContext(ctx).Info("Resuming a device that was left suspended", "pool", t.pool.Name(), "device", name)
		if err := dm.Resume(name, 0); err != nil {
			return err
		}
	}
	if d.Deferred && isHeld(d) {
		t.stacks.mark(name, leaving, true)
	}
	if err := t.seal(ctx, d, uuid); err != nil {
		return err
	}
	return t.grow(ctx, nil)
}

// isHeld reports whether processes have a device open that they were given: it is open, and has no exclusive holder, as a mounted filesystem is one.
func isHeld(d *dm.Device) bool {
	if d.Opens == 0 {
		return false
	}
	f, err := dm.Open(d, os.O_RDONLY|unix.O_EXCL)
	if err == nil {
		_ = f.Close()
	}
	return err == nil
}

// seal gives a top of an older driver, also one in use, a table that passes no ioctls down (dm.Show).
func (t top) seal(ctx context.Context, d *dm.Device, uuid string) error {
	if d.Targets != 1 {
		return nil
	}
	kind, _, err := dm.Target(d.Name)
	if err != nil || kind != "linear" {
		return err
	}
	below, there, err := t.below(ctx, d)
	if err != nil || !there {
		return err
	}
	return dm.Show(d.Name, uuid, below.Number, below.Size, false)
}
