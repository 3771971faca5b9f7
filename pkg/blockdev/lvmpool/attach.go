package lvmpool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/held"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lvm2"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// An attached object is a linear device of our own over the logical volume, one for writing
// and one for reading. So they can be suspended without lvm2, which knows nothing of them,
// and read-only is read-only.
//
// A device that is not to be kept is removed while it is held open (DM_DEFERRED_REMOVE), so
// that it goes away with its last user, whatever becomes of the driver; and so does the
// logical volume's device, with the last of the two over it.
const (
	writableSuffix = "-writable"
	readOnlySuffix = "-readonly"
)

// devices returns the devices of an object, either of which may be nil.
func (p *pool) devices(ref blockdev.Ref) (writable, readOnly *dm.Device, err error) {
	if slices.Contains(p.strays, p.path(ref.String())) {
		return nil, nil, nil // another's
	}
	name := p.device(ref.String())
	if writable, err = p.own(name + writableSuffix); err == nil {
		readOnly, err = p.own(name + readOnlySuffix)
	}
	return writable, readOnly, err
}

// own returns a device if it is one of this group. The kernel removes a device a moment
// after its last user is gone; that moment is waited for.
func (p *pool) own(name string) (*dm.Device, error) {
	for try := 0; ; try++ {
		d, err := dm.Find(name)
		if err != nil || d == nil || !strings.HasPrefix(d.UUID, "LVM-"+p.uuid) {
			return nil, err
		}
		if !d.Deferred || d.Opens > 0 || try == held.Tries {
			return d, nil
		}
		time.Sleep(time.Millisecond)
	}
}

func (p *pool) Attach(ctx context.Context, ref blockdev.Ref, how blockdev.Attachment) (blockdev.Device, error) {
	o, record, err := p.Lookup(ref)
	if err != nil {
		return blockdev.Device{}, err
	}
	device, err := p.attach(ctx, o, record, how)
	if err != nil {
		return blockdev.Device{}, fmt.Errorf("attach %s of pool %s: %w", ref, p.name, err)
	}
	if _, err := device.SetQueue(how.Attributes); err != nil {
		return blockdev.Device{}, errors.Join(err, device.Close())
	}
	return device, nil
}

// attachTries bounds how often a device that goes away while it is opened is looked for
// again.
const attachTries = 5

func (p *pool) attach(ctx context.Context, o *logical, record blockdev.Record, how blockdev.Attachment) (blockdev.Device, error) {
	o.attaching.Lock() // a snapshot may be the source of several copies at once
	defer o.attaching.Unlock()
	for try := 0; ; try++ {
		device, err := p.attachOnce(ctx, o, record, how)
		if !dm.Vanished(err) || try == attachTries {
			return device, err
		}
	}
}

func (p *pool) attachOnce(ctx context.Context, o *logical, record blockdev.Record, how blockdev.Attachment) (_ blockdev.Device, err error) {
	suffix := writableSuffix
	if how.ReadOnly {
		suffix = readOnlySuffix
	}
	d, err := p.own(p.device(record.String()) + suffix)
	if err != nil {
		return blockdev.Device{}, err
	}
	if d != nil && !d.Live { // who made it was cut short
		d = nil
	}
	if d != nil && d.Deferred == how.Keep {
		return blockdev.Device{}, fmt.Errorf("%w: it is attached as %s for another use (or still held after that)", errdefs.ErrInUse, d.Path())
	}
	if d == nil {
		if d, err = p.makeDevice(ctx, o, record, suffix); err != nil {
			return blockdev.Device{}, err
		}
		defer func() {
			if err != nil { // nobody has it
				_, removed := dm.Remove(d.Name)
				err = errors.Join(err, removed)
			}
		}()
	}
	f, err := dm.Open(d, os.O_RDONLY)
	if err != nil {
		return blockdev.Device{}, err
	}
	size, err := blockdev.DeviceSize(f)
	if err == nil && size < record.Size {
		err = p.truncated(record, size)
	}
	if err == nil && !how.Keep && !d.Deferred {
		_, err = dm.Remove(d.Name)
	}
	if err != nil {
		f.Close()
		return blockdev.Device{}, err
	}
	return blockdev.Device{Path: d.Path(), Number: d.Number, Size: size, ReadOnly: how.ReadOnly}.Held(f.Close), nil
}

func (p *pool) truncated(record blockdev.Record, size int64) error {
	return fmt.Errorf("%w: %s has %d bytes, the record says %d; restore it from a backup, or delete the volume", errdefs.ErrDataLoss, p.path(record.String()), size, record.Size)
}

// makeDevice makes a device over a logical volume, which it activates first.
func (p *pool) makeDevice(ctx context.Context, o *logical, record blockdev.Record, suffix string) (*dm.Device, error) {
	base, err := p.activateObject(ctx, o, record.Ref)
	if err != nil {
		return nil, err
	}
	held, err := dm.Open(base, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer func() { _ = held.Close() }() // the device above it holds it from then on
	if !base.Deferred {
		if _, err := dm.Remove(base.Name); err != nil {
			return nil, err
		}
	}
	size, err := blockdev.DeviceSize(held)
	if err == nil && size < record.Size {
		err = p.truncated(record, size)
	}
	if err != nil {
		return nil, err
	}
	if err := dm.Show(base.Name+suffix, base.UUID+suffix, base.Number, size, suffix == readOnlySuffix); err != nil {
		return nil, err
	}
	d, err := p.own(base.Name + suffix)
	if err == nil && d == nil {
		err = unix.ENODEV
	}
	return d, err
}

// activateObject is activate for an object, whose logical volume has to be there.
func (p *pool) activateObject(ctx context.Context, o *logical, ref blockdev.Ref) (*dm.Device, error) {
	if p.known(o).missing { // so what has its name is another's
		return nil, p.gone(o, fmt.Errorf("%w: %s", lvm2.ErrNoLV, p.path(ref.String())))
	}
	d, err := p.activate(ctx, ref.String())
	return d, p.gone(o, err)
}

// activate returns the device of a logical volume, which it brings up if it is not.
func (p *pool) activate(ctx context.Context, volume string) (*dm.Device, error) {
	d, err := p.own(p.device(volume))
	if err != nil || d != nil && d.Live {
		return d, err
	}
	if d != nil { // an lvm2 that was cut short made it; what it may have loaded may not be true any more
		if err := p.discard(d.Name); err != nil {
			return nil, err
		}
	}
	if err := p.checkThinPoolActive(ctx); err != nil {
		return nil, err
	}
	if _, err := p.lvm.Run(ctx, "lvchange", "-ay", "-K", p.path(volume)); err != nil {
		return nil, err
	}
	d, err = p.own(p.device(volume))
	if err == nil && d == nil {
		err = fmt.Errorf("%w: lvm2 activated %s, and there is no device of it", errdefs.ErrUnavailable, p.path(volume))
	}
	return d, err
}

// splitTables brings devices that an older driver made, over a single target, to a table that passes no
// ioctls down (dm.showTable); also those that are in use.
func (p *pool) splitTables(ctx context.Context) {
	all, err := p.allAttached()
	for ref, devices := range all {
		for _, d := range devices {
			if !d.Live || d.Targets != 1 {
				continue
			}
			kind, _, failure := dm.Target(d.Name)
			if failure == nil && kind == "linear" {
				failure = p.resize(ref, p.Find(ref))
			}
			err = errors.Join(err, failure)
		}
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "could not make sure that devices of an older driver pass no ioctls down; the next start tries again", "pool", p.name)
	}
}

func (p *pool) Attached(_ context.Context, ref blockdev.Ref) ([]blockdev.Device, error) {
	if err := ref.Validate(); err != nil {
		return nil, err
	}
	writable, readOnly, err := p.devices(ref)
	if err != nil {
		return nil, err
	}
	var devices []blockdev.Device
	for _, d := range []*dm.Device{writable, readOnly} {
		if d == nil || !d.Live {
			continue
		}
		f, err := dm.Open(d, os.O_RDONLY)
		if dm.Vanished(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		size, err := blockdev.DeviceSize(f)
		f.Close()
		if err != nil {
			return nil, err
		}
		devices = append(devices, blockdev.Device{Path: d.Path(), Number: d.Number, Size: size, ReadOnly: d.ReadOnly})
	}
	return devices, nil
}

func (p *pool) Detach(ctx context.Context, ref blockdev.Ref) error {
	if err := ref.Validate(); err != nil {
		return err
	}
	writable, readOnly, err := p.devices(ref)
	if err != nil {
		return err
	}
	// It is nobody's without the others; an activation that was cut short leaves one.
	base, err := p.own(p.device(ref.String()))
	if err != nil {
		return err
	}
	var in []string
	for _, d := range []*dm.Device{writable, readOnly, base} {
		if d == nil {
			continue
		}
		inUse, err := dm.Remove(d.Name)
		if err != nil {
			return fmt.Errorf("detach %s of pool %s: %w", ref, p.name, err)
		}
		for try := 0; inUse && try < held.Tries && ctx.Err() == nil; try++ {
			time.Sleep(held.Pause)
			now, err := dm.Find(d.Name)
			inUse = err != nil || now != nil
		}
		if inUse {
			in = append(in, d.Path())
		}
	}
	if len(in) > 0 {
		return fmt.Errorf("%w: %s of pool %s is in use as %s; it goes away with its last user", errdefs.ErrInUse, ref, p.name, strings.Join(in, ", "))
	}
	p.removeNodes(ref.String())
	return nil
}

func (p *pool) Orphans(context.Context) (map[blockdev.Ref][]blockdev.Device, error) {
	all, err := p.allAttached()
	if err != nil {
		return nil, err
	}
	found := map[blockdev.Ref][]blockdev.Device{}
	for ref, devices := range all {
		for _, d := range devices {
			if !d.Deferred {
				found[ref] = append(found[ref], blockdev.Device{Path: d.Path(), Number: d.Number, ReadOnly: d.ReadOnly})
			}
		}
	}
	return found, nil
}

// allAttached returns the devices of all objects.
func (p *pool) allAttached() (map[blockdev.Ref][]*dm.Device, error) {
	names, err := dm.Names(p.device(""))
	if err != nil {
		return nil, err
	}
	found := map[blockdev.Ref][]*dm.Device{}
	for _, name := range names {
		volume, suffix, _ := strings.Cut(strings.TrimPrefix(name, p.device("")), "-")
		if suffix = "-" + suffix; suffix != writableSuffix && suffix != readOnlySuffix {
			continue
		}
		ref := blockdev.ParseRef(volume)
		if p.Find(ref) == nil {
			continue
		}
		d, err := p.own(name)
		if err != nil {
			return nil, err
		}
		if d != nil {
			found[ref] = append(found[ref], d)
		}
	}
	return found, nil
}
