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

// An object is attached for writing as the device of its logical volume, over which there is another one (Top), and for reading as a
// linear device of our own over it, so that read-only is read-only.
//
// The logical volume's device and that for reading are removed while they are held open (DM_DEFERRED_REMOVE), so that they go with
// their last user, whatever becomes of the driver.
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

// stray reports whether what has the name of an object is another's.
func (p *pool) stray(ref blockdev.Ref) bool { return slices.Contains(p.strays, p.path(ref.String())) }

// base returns the device of the logical volume of an object; nil if there is none.
func (p *pool) base(ref blockdev.Ref) (*dm.Device, error) {
	if p.stray(ref) {
		return nil, nil
	}
	return p.own(p.device(ref.String()))
}

// devices returns the devices that an object is attached as, either of which may be nil. The logical volume's is one of them if
// anything but the one for reading has it open.
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

// devicesInUse is devices without that of the logical volume if something only looks at it (udev does), or has just closed it: in use
// is what has a top, or is still open after a moment.
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

// own is dm.FindUsed for a device of this group.
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

// attachTries bounds how often a device that goes away while it is opened is looked for
// again.
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
	if !d.Deferred { // from here on it goes with its last user; also if nobody could open it
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

// makeReader makes the device for reading over that of a logical volume.
func (p *pool) makeReader(base *dm.Device) (*dm.Device, error) {
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

// attachedInUse is Attached of what is in use (devicesInUse).
func (p *pool) attachedInUse(ctx context.Context, ref blockdev.Ref) ([]blockdev.Device, error) {
	writable, readOnly, err := p.devicesInUse(ctx, ref)
	if err != nil {
		return nil, err
	}
	return described(writable, readOnly)
}

// described leaves out devices that are nil, or have gone.
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
	// An activation that was cut short leaves the logical volume's without another.
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

// Orphans: nothing is attached here to be kept.
func (p *pool) Orphans(context.Context) (map[blockdev.Ref][]blockdev.Device, error) { return nil, nil }
