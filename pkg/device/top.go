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
//   - its table can be changed while it is in use.
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

// find returns the name and UUID of the top, and its device; nil if that is not there.
func (t top) find() (name, uuid string, d *dm.Device, err error) { return t.findAs("") }

// findAs is find, of the device that is called as the top is, and a suffix.
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
		if d, err = lay(name, d != nil, func() error { return show(name, uuid, below, o.Guarded) }); err != nil {
			return blockdev.Device{}, err
		}
		defer func() {
			if err != nil { // nobody has it
				_, removed := dm.Remove(name)
				err = errors.Join(err, removed)
			}
		}()
	} else if err := errors.Join(t.fit(d, uuid, below), told(d, o.Guarded)); err != nil { // who made it may have been cut short before it was told
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

// lowest is the path of the lowest device of a stack up to one of its devices.
func lowest(d blockdev.Device) string { return cmp.Or(d.Below, d.Path) }

// serves reports whether a device that is there can be had as is asked for.
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

// lay makes a device, or gives the one that is there and has none a table.
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

// fit brings a top to the size of the device that it is over.
func (t top) fit(d *dm.Device, uuid string, below blockdev.Device) error {
	guarded, err := dm.Guarded(d.Name)
	if err != nil {
		return err
	}
	if fits, err := fitsOver(d, below, !guarded); err != nil || fits {
		return err
	}
	return show(d.Name, uuid, below, guarded)
}

// fitsOver reports whether a device is as large as what it is over, and, if it is to be flushed, is where that is. The kernel finds that out when it gets a table; what is below may be on another disk since, which has a cache that could be lost (pvmove).
func fitsOver(d *dm.Device, below blockdev.Device, flushed bool) (bool, error) {
	size, err := d.Size()
	return size == below.Size && (!flushed || dm.Flushed(d.Number) || !dm.Flushed(below.Number)), err
}

// show gives the device a table. To one that is guarded nothing is written that could be flushed: as the kernel takes a flush for a write, it is told that there is
// no cache, each time, for a table says what there is.
func show(name, uuid string, below blockdev.Device, guarded bool) error {
	if !guarded {
		return dm.Show(name, uuid, below.Number, below.Size, false)
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

// told has a device that is guarded have no cache.
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

// shown is layer.attached of a device of the device mapper; nil, or without a table, it is not attached.
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

// below returns what a top is over: the volume's open device if it is encrypted, or else its seat, what marks, or the pool's device; false if none is it.
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
		err = t.fit(d, uuid, below)
	}
	if dm.Vanished(err) {
		return nil
	}
	return err
}

func (t top) suspend(context.Context) (resume func() error, err error) {
	name, uuid, d, err := t.find()
	if err != nil || d == nil || !d.Live || d.Suspended { // suspended by somebody else, who ends it when he likes
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

// A device that stays suspended cannot be written to, and nobody who waits for it can be killed, so it is tried to resume it this
// often.
const (
	resumeTries = 10
	resumePause = 100 * time.Millisecond
)

// hold suspends a device until resume is called, which may be called again. It brings a table into effect that was loaded meanwhile. event
// is what udev is told.
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
	if inUse && !d.Deferred { // whoever was given it has it still, so nobody may mount it
		t.stacks.mark(name, leaving, true)
	}
	return err
}

// removed takes a device away; errdefs.ErrInUse if it is held.
func removed(ctx context.Context, d *dm.Device) (inUse bool, err error) {
	inUse, err = dm.RemoveNow(ctx, d.Name)
	if err == nil && inUse {
		err = fmt.Errorf("%w: %s is held open by a process or a mount; it goes away with its last user", errdefs.ErrInUse, d.Path())
	}
	return inUse, err
}

func (t top) health(context.Context) ([]blockdev.Problem, error) { return t.healthOf("") }

// healthOf is the health of the device that is called as the top is, and a suffix.
func (t top) healthOf(suffix string) ([]blockdev.Problem, error) {
	name, _, d, err := t.findAs(suffix)
	for range 2 { // we may have resumed it since
		if err != nil || d == nil || !d.Live || !d.Suspended || t.stacks.has(name, suspended) {
			return nil, err
		}
		_, _, d, err = t.findAs(suffix)
	}
	if err != nil || d == nil {
		return nil, err
	}
	return []blockdev.Problem{{Severity: blockdev.Inaccessible, Reason: "DeviceSuspended", Message: fmt.Sprintf(
		"somebody suspended %s, the device of %s of pool %s, and all who write to it wait; end that with: dmsetup resume %s", d.Path(), t.ref, t.pool.Name(), name)}}, nil
}

// recover puts right what a crash, or an older driver, left of a top. A table that was loaded and not brought into effect may be of a
// growth that was not finished, so what is in effect stays, and grow comes after it.
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

// isHeld reports whether a device is open, and nothing that needs it for itself alone has it, as a filesystem does that is mounted: a process was given it.
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

// seal brings a top that an older driver made, with a single target, to a table that passes no ioctls down (dm.Show); also one that
// is in use.
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
