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

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/held"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lvm2"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// An object is attached for writing as the device of its logical volume, over which there is always a top (pkg/device). For reading it is attached as a
// linear device of our own over that of the logical volume, which is read-only for everybody.
//
// The logical volume's device and the one for reading are removed while they are held open (DM_DEFERRED_REMOVE): so they go with their last user, also if
// the driver has ended.
const (
	topSuffix      = "-writable"
	readOnlySuffix = "-readonly"
)

// Top: see blockdev.Stackable.
func (p *pool) Top(ref blockdev.Ref) (name, uuid, before string, err error) {
	base, err := p.base(ref)
	if err != nil {
		return "", "", "", err
	}
	uuid = "LVM-" + p.uuid
	if base != nil {
		uuid = base.UUID + topSuffix
	}
	return p.device(ref.String()) + topSuffix, uuid, uuid, nil
}

// ParseTop: see blockdev.Stackable.
func (p *pool) ParseTop(name string) (blockdev.Ref, bool) {
	volume, ours := strings.CutPrefix(name, p.device(""))
	volume, top := strings.CutSuffix(volume, topSuffix)
	ref := blockdev.ParseRef(volume)
	return ref, ours && top && p.Find(ref) != nil && !p.stray(ref)
}

// stray reports whether a volume that has the name of an object is another's.
func (p *pool) stray(ref blockdev.Ref) bool { return slices.Contains(p.strays, p.path(ref.String())) }

// base returns the device of an object's logical volume; nil if there is none.
func (p *pool) base(ref blockdev.Ref) (*dm.Device, error) {
	if p.stray(ref) {
		return nil, nil
	}
	return p.own(p.device(ref.String()))
}

// devices returns the devices that an object is attached as; nil if it is not. writable is the logical volume's device, if anything but the one for
// reading has it open.
func (p *pool) devices(ref blockdev.Ref) (writable, readOnly *dm.Device, err error) {
	if p.stray(ref) {
		return nil, nil, nil
	}
	if readOnly, err = p.own(p.device(ref.String()) + readOnlySuffix); err != nil {
		return nil, nil, err
	}
	if readOnly != nil && !readOnly.Live {
		readOnly = nil
	}
	base, err := p.base(ref)
	readers := 0
	if readOnly != nil {
		readers = 1
	}
	if err == nil && base != nil && base.Live && base.Opens > readers {
		writable = base
	}
	return writable, readOnly, err
}

// devicesInUse is devices, but waits a moment for a writable device without a top: something may only look at it (udev does), or have just closed it. What
// it returns is in use.
func (p *pool) devicesInUse(ctx context.Context, ref blockdev.Ref) (writable, readOnly *dm.Device, err error) {
	for try := 0; ; try++ {
		writable, readOnly, err = p.devices(ref)
		if err != nil || writable == nil || try == held.Tries || ctx.Err() != nil {
			return writable, readOnly, err
		}
		if top, err := p.own(writable.Name + topSuffix); err != nil || top != nil && top.Live {
			return writable, readOnly, err
		}
		time.Sleep(held.Pause)
	}
}

// own is dm.FindUsed for a device of this group; nil if the device is another's.
func (p *pool) own(name string) (*dm.Device, error) {
	d, err := dm.FindUsed(name)
	if d != nil && !strings.HasPrefix(d.UUID, "LVM-"+p.uuid) {
		d = nil
	}
	return d, err
}

func (p *pool) Attach(ctx context.Context, ref blockdev.Ref, how blockdev.Attachment) (blockdev.Device, error) {
	o, record, err := p.Lookup(ref)
	if err == nil && how.Keep {
		err = fmt.Errorf("%w: what is to stay is the device over that of a logical volume", errdefs.ErrUnsupported)
	}
	if err != nil {
		return blockdev.Device{}, err
	}
	device, err := p.attach(ctx, o, record, how)
	if err != nil {
		return blockdev.Device{}, fmt.Errorf("attach %s of pool %s: %w", ref, p.name, err)
	}
	return device, nil
}

// attachTries bounds how often a device is looked for again that went away while it was opened.
const attachTries = 5

func (p *pool) attach(ctx context.Context, o *logical, record blockdev.Record, how blockdev.Attachment) (blockdev.Device, error) {
	end, err := p.attaching.Begin(ctx, o)
	if err != nil {
		return blockdev.Device{}, fmt.Errorf("wait for another who brings its device up: %w", err)
	}
	defer end()
	for try := 0; ; try++ {
		device, err := p.attachOnce(ctx, o, record, how)
		if !dm.Vanished(err) || try == attachTries {
			return device, err
		}
	}
}

func (p *pool) attachOnce(ctx context.Context, o *logical, record blockdev.Record, how blockdev.Attachment) (blockdev.Device, error) {
	var d *dm.Device
	var err error
	if how.ReadOnly {
		d, err = p.own(p.device(record.String()) + readOnlySuffix)
	}
	if err == nil && (d == nil || !d.Live) {
		if d, err = p.activateObject(ctx, o, record.Ref); err != nil {
			return blockdev.Device{}, err
		}
		if how.ReadOnly {
			d, err = p.makeReader(d)
		}
	}
	if err != nil {
		return blockdev.Device{}, err
	}
	f, err := dm.Open(d, os.O_RDONLY)
	if !d.Deferred { // from here on it goes with its last user, also if it could not be opened
		_, failure := dm.Remove(d.Name)
		err = errors.Join(err, failure)
	}
	var size int64
	if err == nil {
		size, err = blockdev.DeviceSize(f)
	}
	if err == nil && size < record.Size {
		err = p.truncated(record, size)
	}
	if err != nil {
		_ = f.Close() // of no harm if it is nil
		return blockdev.Device{}, err
	}
	return blockdev.Device{Path: d.Path(), Number: d.Number, Size: size, ReadOnly: how.ReadOnly}.Held(f.Close), nil
}

func (p *pool) truncated(record blockdev.Record, size int64) error {
	return fmt.Errorf("%w: %s has %d bytes, the record says %d; restore it from a backup, or delete the volume", errdefs.ErrDataLoss, p.path(record.String()), size, record.Size)
}

// makeReader makes the device for reading over that of a logical volume, which goes with it.
func (p *pool) makeReader(base *dm.Device) (*dm.Device, error) {
	held, err := dm.Open(base, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer func() { _ = held.Close() }() // from then on the device over it holds it
	if !base.Deferred {
		if _, err := dm.Remove(base.Name); err != nil {
			return nil, err
		}
	}
	size, err := blockdev.DeviceSize(held)
	if err != nil {
		return nil, err
	}
	name := base.Name + readOnlySuffix
	if err := dm.Show(name, base.UUID+readOnlySuffix, base.Number, size, true); err != nil {
		return nil, err
	}
	d, err := p.own(name)
	if err == nil && d == nil {
		err = unix.ENODEV
	}
	return d, err
}

// activateObject is activate for an object. errdefs.ErrDataLoss if its logical volume is gone.
func (p *pool) activateObject(ctx context.Context, o *logical, ref blockdev.Ref) (*dm.Device, error) {
	if p.known(o).missing { // a volume of its name is another's
		return nil, p.gone(o, fmt.Errorf("%w: %s", lvm2.ErrNoLV, p.path(ref.String())))
	}
	d, err := p.activate(ctx, ref.String())
	return d, p.gone(o, err)
}

// activate returns the device of a logical volume; if there is none, lvm2 activates the volume. errdefs.ErrUnavailable if the thin pool is down;
// errdefs.ErrDataLoss if it is another volume by now than the object of its name had (isStill).
func (p *pool) activate(ctx context.Context, volume string) (*dm.Device, error) {
	d, err := p.active(ctx, volume)
	if err != nil {
		return nil, err
	}
	// Of the device itself: the name may have become another's a moment ago.
	if err := p.isStill(volume, strings.TrimPrefix(d.UUID, "LVM-"+p.uuid)); err != nil {
		_, failure := dm.Remove(d.Name) // with its last user, as all devices of logical volumes go
		return nil, errors.Join(err, failure)
	}
	return d, nil
}

// active is activate for whatever volume has the name.
func (p *pool) active(ctx context.Context, volume string) (*dm.Device, error) {
	d, err := p.own(p.device(volume))
	if err != nil || d != nil && d.Live {
		return d, err
	}
	if d != nil { // an lvm2 that was cut short left it; the table that it may have loaded may be out of date
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

func (p *pool) Attached(_ context.Context, ref blockdev.Ref) ([]blockdev.Device, error) {
	if err := ref.Validate(); err != nil {
		return nil, err
	}
	writable, readOnly, err := p.devices(ref)
	if err != nil {
		return nil, err
	}
	return described(writable, readOnly)
}

// attachedInUse is Attached, but waits a moment for what goes by itself: see devicesInUse.
func (p *pool) attachedInUse(ctx context.Context, ref blockdev.Ref) ([]blockdev.Device, error) {
	writable, readOnly, err := p.devicesInUse(ctx, ref)
	if err != nil {
		return nil, err
	}
	return described(writable, readOnly)
}

// described returns what Attached returns of devices. Those that are nil, or have just gone, are left out.
func described(all ...*dm.Device) (devices []blockdev.Device, err error) {
	for _, d := range all {
		if d == nil {
			continue
		}
		size, err := d.Size()
		if dm.Vanished(err) { // it went with its last user
			continue
		}
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
	if p.stray(ref) {
		return nil
	}
	var in []string
	// The logical volume's device may be there alone, left by an activation that was cut short.
	for _, name := range []string{p.device(ref.String()) + readOnlySuffix, p.device(ref.String())} {
		d, err := p.own(name)
		inUse := false
		if err == nil && d != nil {
			inUse, err = dm.RemoveNow(ctx, name)
		}
		if err != nil {
			return fmt.Errorf("detach %s of pool %s: %w", ref, p.name, err)
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

// Orphans: see blockdev.Pool. There are none, as nothing is attached with Keep.
func (p *pool) Orphans(context.Context) (map[blockdev.Ref][]blockdev.Device, error) { return nil, nil }
