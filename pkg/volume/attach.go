package volume

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/ashlar-csi/ashlar/internal/trace"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/device"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// stack returns the devices of a volume.
func (l *Local) stack(id ID) (device.Stack, error) {
	pool, ref, err := l.object(id, blockdev.Volume)
	return l.stacks.Of(pool, ref), err
}

// Attach attaches a volume to this node, to be mounted. The device goes with its last user, which is the mount.
//
// An encrypted volume needs its key, unless it is attached already. ErrNoKey or ErrKey without the right one; nothing has changed then.
//
// The caller has made sure that this node may use the volume. Its export is ended first, and so is the seal of a move that has not come to pass.
func (l *Local) Attach(ctx context.Context, v Volume, key Key) (blockdev.Device, error) {
	if err := l.makeOurs(ctx, v.ID); err != nil {
		return blockdev.Device{}, err
	}
	return l.attach(ctx, v, key, device.Options{})
}

// AttachRaw attaches a volume until Detach, to be handed out to users who are not trusted. If it is writable, the record says before anybody can write
// that the volume is raw: it is never formatted from then on. If not, nobody can write to the device until it is attached to be written to
// (device.Options.ReadOnly). Its export is ended first, as by Attach.
func (l *Local) AttachRaw(ctx context.Context, v Volume, key Key, writable bool) (blockdev.Device, error) {
	if err := l.makeOurs(ctx, v.ID); err != nil {
		return blockdev.Device{}, err
	}
	mark := func() error {
		if state := v.Format.State; writable && (state == Blank || state == Formatting) {
			return l.SetFormat(ctx, v.ID, Format{State: Raw})
		}
		return nil
	}
	if v.Encryption.Scheme == NotEncrypted {
		if err := mark(); err != nil {
			return blockdev.Device{}, err
		}
		return l.attach(ctx, v, nil, device.Options{Keep: true, ReadOnly: !writable})
	}
	if v.separate && !writable { // separate writes to the device
		first, err := l.attach(ctx, v, key, device.Options{})
		if err = errors.Join(err, first.Close()); err != nil {
			return blockdev.Device{}, err
		}
		v.separate = false
	}
	attached, err := l.attach(ctx, v, key, device.Options{Keep: true, ReadOnly: !writable}) // first: a wrong key changes nothing
	if err == nil {
		if err = mark(); err != nil { // nobody was given it yet; the retry, or the unstage, finds it
			err = errors.Join(err, attached.Close())
		}
	}
	return attached, err
}

// attach attaches a volume: options say whether it is kept and read-only, and the volume says the rest.
func (l *Local) attach(ctx context.Context, v Volume, key Key, options device.Options) (_ blockdev.Device, err error) {
	stack, err := l.stack(v.ID)
	if err != nil {
		return blockdev.Device{}, err
	}
	ctx, end := trace.Start(ctx, "attach", "volume", v.ID.String())
	defer func() { end(err) }()
	options.Attributes, options.Seat = queueSettings(v.Mutable), v.Access == AccessAny
	if v.Encryption.Scheme == NotEncrypted {
		return l.layLeg(ctx, v.ID, v.ReplicaOf != "", stack, options)
	}
	if !slices.Contains(Schemes, v.Encryption.Scheme) {
		return blockdev.Device{}, fmt.Errorf("%w: its record says encryption %q, which this driver does not know; use the newer one that made it", errdefs.ErrUnsupported, v.Encryption.Scheme)
	}
	release, err := l.prepareHeader(ctx, &v, key)
	if errors.Is(err, errdefs.ErrDataLoss) { // what is open needs no header, and is all that is left of it: its health says so
		devices, failure := stack.Attached(ctx)
		if failure == nil && slices.ContainsFunc(devices, func(d blockdev.Device) bool { return d.Below != "" }) {
			key, release, err = nil, func() {}, nil
		}
	}
	if err != nil {
		return blockdev.Device{}, err
	}
	defer release()
	options.Encryption = &device.Encryption{Key: key, Discards: v.Encryption.Discards}
	attached, err := l.layLeg(ctx, v.ID, v.ReplicaOf != "", stack, options)
	if err == nil {
		err = l.separate(ctx, v, attached)
	}
	if err != nil {
		return blockdev.Device{}, errors.Join(err, attached.Close())
	}
	return attached, nil
}

// dangling returns ErrPrecondition if a volume has a dangling device (device.Stack.Dangling) that is mounted or open. One that is not is no error: to attach
// the volume removes it.
func (l *Local) dangling(ctx context.Context, id ID) error {
	stack, err := l.stack(id)
	if err != nil {
		return err
	}
	_, err = l.removable(ctx, stack)
	return err
}

// removable reports whether a stack has a dangling device that is neither mounted nor open. For one that is, it returns the error of stack.Dangling.
func (l *Local) removable(ctx context.Context, stack device.Stack) (bool, error) {
	dangling := stack.Dangling(ctx)
	if !errors.Is(dangling, errdefs.ErrPrecondition) {
		return false, dangling
	}
	devices, err := stack.Attached(ctx)
	if err != nil {
		return false, err
	}
	if open, err := stack.Open(); err != nil || open || l.mounted(devices) {
		return false, errors.Join(err, dangling)
	}
	return true, nil
}

// mounted reports whether one of some devices is mounted, or its node is bound somewhere. A device whose node is bound need not be open.
func (l *Local) mounted(devices []blockdev.Device) bool {
	return slices.ContainsFunc(devices, func(d blockdev.Device) bool { return len(l.mounts.Paths(d.Number)) > 0 })
}

// layLeg is lay; a leg gets its marks.
func (l *Local) layLeg(ctx context.Context, id ID, isLeg bool, stack device.Stack, o device.Options) (blockdev.Device, error) {
	if !isLeg {
		return l.lay(ctx, stack, o)
	}
	pool, record, err := l.anyRecord(ctx, id)
	if err != nil {
		return blockdev.Device{}, err
	}
	return l.layMarked(ctx, pool, record, o, func(o device.Options) (blockdev.Device, error) { return l.lay(ctx, stack, o) })
}

// lay is stack.Attach. It first detaches a dangling device that is neither mounted nor open, which a stage that was cut short has left.
func (l *Local) lay(ctx context.Context, stack device.Stack, o device.Options) (blockdev.Device, error) {
	o.Mounted = func(d blockdev.Device) bool { return l.mounted([]blockdev.Device{d}) }
	attached, err := stack.Attach(ctx, o)
	if !errors.Is(err, errdefs.ErrPrecondition) {
		return attached, err
	}
	if removable, _ := l.removable(ctx, stack); !removable {
		return blockdev.Device{}, err
	}
	if err := l.detach(ctx, stack); err != nil {
		return blockdev.Device{}, err
	}
	return stack.Attach(ctx, o)
}

// Attached lists the devices of a volume; it needs no record of it.
func (l *Local) Attached(ctx context.Context, id ID) ([]blockdev.Device, error) {
	stack, err := l.stack(id)
	if err != nil {
		return nil, errdefs.IgnoreNotFound(err)
	}
	return stack.Attached(ctx)
}

// Detach removes the devices of a volume that Attached returns, and their limits. A volume that other nodes read stays attached for them.
func (l *Local) Detach(ctx context.Context, id ID) error {
	stack, err := l.stack(id)
	if err != nil {
		return errdefs.IgnoreNotFound(err)
	}
	if is, err := l.leaveReading(ctx, id); is {
		return err
	}
	return trace.Do(ctx, "detach", func(ctx context.Context) error { return l.detach(ctx, stack) }, "volume", id.String())
}

// detach detaches a stack, and takes the limits of its devices away first: the next device of that number would have them.
func (l *Local) detach(ctx context.Context, stack device.Stack) error {
	devices, err := stack.Attached(ctx)
	if err != nil {
		return err
	}
	_ = l.Unlimit(ctx, blockdev.Numbers(devices)...)
	if len(devices) == 0 { // they may have gone without this driver
		l.unlimitGone(ctx)
	}
	return stack.Detach(ctx)
}

// Used returns how many bytes of a volume take space; known is false if its pool cannot tell.
func (l *Local) Used(ctx context.Context, id ID) (used int64, known bool, err error) {
	pool, ref, err := l.object(id, blockdev.Volume)
	if err != nil {
		return 0, false, err
	}
	measurer, known := blockdev.As[blockdev.Measurer](pool)
	if known {
		used, err = measurer.Used(ctx, ref)
	}
	return used, known, err
}
