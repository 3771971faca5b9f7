package blockdev

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// An attached object is a device of the device mapper: the logical volume itself for
// writing, and a read-only linear device over it for reading. A device that is not to be
// kept is removed while it is held open (DM_DEFERRED_REMOVE), so that it goes away with
// its last user, whatever becomes of the driver.

const readOnlySuffix = "-readonly"

// devices returns the devices of an object, of which either may be nil. The logical
// volume is not listed where it is active only because the read-only device needs it.
func (p *lvmPool) devices(ref Ref) (writable, readOnly *dmDevice, base *dmDevice, err error) {
	if slices.Contains(p.strays, p.path(ref.String())) {
		return nil, nil, nil, nil // another's
	}
	name := p.device(ref.String())
	if readOnly, err = p.own(name + readOnlySuffix); err != nil {
		return nil, nil, nil, err
	}
	if base, err = p.own(name); err != nil {
		return nil, nil, nil, err
	}
	writable = base
	if base != nil && readOnly != nil && base.deferred && base.opens <= 1 {
		writable = nil
	}
	return writable, readOnly, base, nil
}

// own returns a device if it is one of this group. The kernel removes a device a moment
// after its last user is gone; that moment is waited for.
func (p *lvmPool) own(name string) (*dmDevice, error) {
	for try := 0; ; try++ {
		d, err := dmFind(name)
		if err != nil || d == nil || !strings.HasPrefix(d.uuid, "LVM-"+p.uuid) {
			return nil, err
		}
		if !d.deferred || d.opens > 0 || try == detachTries {
			return d, nil
		}
		time.Sleep(time.Millisecond)
	}
}

func (p *lvmPool) Attach(ctx context.Context, ref Ref, how Attachment) (Device, error) {
	o, record, err := p.lookup(ref)
	if err != nil {
		return Device{}, err
	}
	device, err := p.attach(ctx, o, record, how)
	if err != nil {
		return Device{}, fmt.Errorf("attach %s of pool %s: %w", ref, p.name, err)
	}
	if _, err := SetQueue(device, how.Attributes); err != nil {
		return Device{}, errors.Join(err, device.Close())
	}
	return device, nil
}

// attachTries bounds how often a device that goes away while it is opened is looked for
// again.
const attachTries = 5

func (p *lvmPool) attach(ctx context.Context, o *logical, record Record, how Attachment) (Device, error) {
	o.attaching.Lock() // a snapshot may be the source of several copies at once
	defer o.attaching.Unlock()
	if err := p.settle(ctx, o, record); err != nil {
		return Device{}, err
	}
	for try := 0; ; try++ {
		device, err := p.attachOnce(ctx, o, record, how)
		vanished := errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENODEV) || errors.Is(err, os.ErrNotExist)
		if !vanished || try == attachTries {
			return device, err
		}
	}
}

func (p *lvmPool) attachOnce(ctx context.Context, o *logical, record Record, how Attachment) (_ Device, err error) {
	writable, readOnly, base, err := p.devices(record.Ref)
	if err != nil {
		return Device{}, err
	}
	have := writable
	if how.ReadOnly {
		have = readOnly
	}
	if have != nil && have.deferred == how.Keep {
		return Device{}, fmt.Errorf("%w: it is attached as %s for another use (or still held after that)", ErrInUse, have.path())
	}
	if base == nil {
		if base, err = p.activate(ctx, o, record); err != nil {
			return Device{}, err
		}
		defer func() {
			if err != nil { // nobody has it
				_, removed := dmRemove(base.name)
				err = errors.Join(err, removed)
			}
		}()
	}
	held, err := openDM(base, os.O_RDONLY)
	if err != nil {
		return Device{}, err
	}
	size, err := deviceSize(held)
	if err == nil && size < record.Size {
		err = fmt.Errorf("%w: %s has %d bytes, the record says %d; restore it from a backup, or delete the volume", ErrDataLoss, p.path(record.String()), size, record.Size)
	}
	if err == nil && !how.ReadOnly {
		if how.Keep {
			if base.deferred {
				err = dmKeep(base.name)
			}
			// What is to be kept needs no hold.
		} else if !base.deferred {
			_, err = dmRemove(base.name)
		}
	}
	if err != nil || !how.ReadOnly {
		if err != nil {
			held.Close()
			return Device{}, err
		}
		return NewDevice(base.path(), base.number, size, false, held.Close), nil
	}
	defer held.Close() // the device above it holds it from then on
	if readOnly == nil {
		if err := dmLinear(base.name+readOnlySuffix, base.uuid+readOnlySuffix, base.number, size); err != nil {
			return Device{}, err
		}
		if readOnly, err = p.own(base.name + readOnlySuffix); err != nil || readOnly == nil {
			return Device{}, errors.Join(err, unix.ENODEV)
		}
	}
	above, err := openDM(readOnly, os.O_RDONLY)
	if err != nil {
		return Device{}, err
	}
	// The logical volume goes away with the device above it, unless it was attached itself.
	if writable == nil {
		_, err = dmRemove(base.name)
	}
	if err == nil && !how.Keep && !readOnly.deferred {
		_, err = dmRemove(readOnly.name)
	}
	if err != nil {
		above.Close()
		return Device{}, err
	}
	return NewDevice(readOnly.path(), readOnly.number, size, true, above.Close), nil
}

// settle takes away a device that lvm2 brought up after the call that wanted it had failed.
// It would look like one that is to be kept.
func (p *lvmPool) settle(ctx context.Context, o *logical, record Record) error {
	if !o.activating {
		return nil
	}
	err := p.lvm.hold(ctx, func(runLVM) error { return nil }) // until that lvm2 is gone
	if err != nil {
		return err
	}
	d, err := p.own(p.device(record.String()))
	if err == nil && d != nil && !d.deferred && d.opens == 0 {
		_, err = dmRemove(d.name)
	}
	o.activating = err != nil
	return err
}

// activate brings the device of a logical volume up.
func (p *lvmPool) activate(ctx context.Context, o *logical, record Record) (*dmDevice, error) {
	if o.missing {
		return nil, p.gone(o, fmt.Errorf("%w: %s", errNoLV, p.path(record.String())))
	}
	if _, err := p.lvm.run(ctx, "lvchange", "-ay", "-K", p.path(record.String())); err != nil {
		o.activating = o.activating || !lvmAnswered(err)
		return nil, p.gone(o, err)
	}
	d, err := p.own(p.device(record.String()))
	if err == nil && d == nil {
		err = fmt.Errorf("%w: lvm2 activated %s, and there is no device of it", ErrUnavailable, p.path(record.String()))
	}
	return d, err
}

// deviceSize returns the size of an open block device, in bytes.
func deviceSize(f *os.File) (int64, error) {
	size, err := f.Seek(0, 2)
	if err != nil {
		return 0, fmt.Errorf("size of %s: %w", f.Name(), systemError(err))
	}
	return size, nil
}

func (p *lvmPool) Attached(_ context.Context, ref Ref) ([]Device, error) {
	if err := ref.validate(); err != nil {
		return nil, err
	}
	writable, readOnly, _, err := p.devices(ref)
	if err != nil {
		return nil, err
	}
	var devices []Device
	for _, d := range []*dmDevice{writable, readOnly} {
		if d == nil {
			continue
		}
		f, err := openDM(d, os.O_RDONLY)
		if errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENODEV) || errors.Is(err, os.ErrNotExist) {
			continue // it went away meanwhile
		}
		if err != nil {
			return nil, fmt.Errorf("open %s: %w", d.path(), systemError(err))
		}
		size, err := deviceSize(f)
		f.Close()
		if err != nil {
			return nil, err
		}
		devices = append(devices, NewDevice(d.path(), d.number, size, d.readOnly, nil))
	}
	return devices, nil
}

func (p *lvmPool) Detach(ctx context.Context, ref Ref) error {
	if err := ref.validate(); err != nil {
		return err
	}
	return p.detach(ctx, ref)
}

// A device that something looked at when it was closed (udev does) is held for a moment.
const (
	detachTries = 50
	detachPause = 20 * time.Millisecond
)

func (p *lvmPool) detach(ctx context.Context, ref Ref) error {
	_, readOnly, base, err := p.devices(ref)
	if err != nil {
		return err
	}
	var in []string
	for _, d := range []*dmDevice{readOnly, base} {
		if d == nil {
			continue
		}
		held, err := dmRemove(d.name)
		if err != nil {
			return fmt.Errorf("detach %s of pool %s: %w", ref, p.name, err)
		}
		for try := 0; held && try < detachTries && ctx.Err() == nil; try++ {
			time.Sleep(detachPause)
			now, err := dmFind(d.name)
			held = err != nil || now != nil
		}
		if held {
			in = append(in, d.path())
		}
	}
	if len(in) > 0 {
		return fmt.Errorf("%w: %s of pool %s is held as %s; it goes away with its last user", ErrInUse, ref, p.name, strings.Join(in, ", "))
	}
	if base != nil {
		p.removeNodes(ref.String())
	}
	return nil
}

func (p *lvmPool) Orphans(context.Context) (map[Ref][]Device, error) {
	names, err := dmNames(p.device(""))
	if err != nil {
		return nil, err
	}
	found := map[Ref][]Device{}
	for _, name := range names {
		volume := strings.TrimSuffix(strings.TrimPrefix(name, p.device("")), readOnlySuffix)
		kind, key, _ := strings.Cut(volume, ".")
		ref := Ref{Kind(kind), key}
		if p.find(ref) == nil {
			continue
		}
		d, err := p.own(name)
		if err != nil {
			return nil, err
		}
		if d != nil && !d.deferred {
			found[ref] = append(found[ref], NewDevice(d.path(), d.number, 0, d.readOnly, nil))
		}
	}
	return found, nil
}
