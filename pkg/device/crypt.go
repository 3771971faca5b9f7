package device

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/luks"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Encryption is how to open an encrypted volume.
type Encryption struct {
	// Key opens the volume. A device that is open already needs none, but grows only with one.
	Key luks.Key
	// Discards are passed on to the pool's device.
	Discards bool
}

// crypt is a device of the device mapper that shows what is behind the LUKS2 header of the device below it. cryptsetup makes it, and gives the kernel the
// key. There is always a top over it, which passes no ioctls down, and can be suspended.
//
// It is removed while it is held open (DM_DEFERRED_REMOVE), and so goes with the top: the kernel then forgets the key, also if the driver has ended. Its
// name is the top's and a suffix, and its table tells what it is over. So it is found without a record of the volume, and without a key.
type crypt struct{ top }

const cryptSuffix = "-crypt"

// find returns the name of the device, and the device; nil if there is none. A device of that name that cryptsetup did not make does not count.
func (c crypt) find() (name string, d *dm.Device, err error) {
	top, _, _, err := c.names.Top(c.ref)
	if err != nil {
		return "", nil, err
	}
	name = top + cryptSuffix
	d, err = dm.FindUsed(name)
	if d != nil && !strings.HasPrefix(d.UUID, luks.UUIDPrefix) {
		d = nil // of another with the same name
	}
	return name, d, err
}

func (c crypt) attach(ctx context.Context, below blockdev.Device, o Options) (_ blockdev.Device, err error) {
	name, d, err := c.find()
	if err != nil {
		return blockdev.Device{}, err
	}
	if d != nil && !d.Live { // a crash came before it had a table
		if err := c.remove(name); err != nil {
			return blockdev.Device{}, err
		}
		d = nil
	}
	if d == nil {
		if d, err = c.open(ctx, name, below, *o.Encryption); err != nil {
			return blockdev.Device{}, err
		}
		defer func() {
			if err != nil { // nobody has it
				err = errors.Join(err, c.remove(name))
			}
		}()
	} else if key := o.Encryption.Key; len(key) > 0 { // without a key it keeps its size: publishing has none
		if err := c.fit(ctx, d, below, key); err != nil {
			return blockdev.Device{}, err
		}
	}
	return passing(d, below)
}

// passing opens a device and returns it with that hold. It has the kernel remove the device with its last user.
func passing(d *dm.Device, below blockdev.Device) (blockdev.Device, error) {
	f, err := dm.Open(d, os.O_RDONLY)
	if err != nil {
		return blockdev.Device{}, err
	}
	if !d.Deferred {
		_, err = dm.Remove(d.Name)
	}
	size, failure := d.Size()
	if err = errors.Join(err, failure); err != nil {
		return blockdev.Device{}, errors.Join(err, f.Close())
	}
	return blockdev.Device{Path: d.Path(), Number: d.Number, Size: size, Below: lowest(below)}.Held(f.Close), nil
}

// open makes the device with cryptsetup.
func (c crypt) open(ctx context.Context, name string, below blockdev.Device, how Encryption) (*dm.Device, error) {
	if len(how.Key) == 0 {
		return nil, fmt.Errorf("%w: %w", errdefs.ErrInvalid, luks.ErrNoKey)
	}
	if err := luks.Available(); err != nil {
		return nil, err
	}
	if other, err := dm.Find(name); err != nil {
		return nil, err
	} else if other != nil {
		return nil, fmt.Errorf("%w: a device %s is there that is not of this pool; remove or rename it", errdefs.ErrPrecondition, name)
	}
	err := luks.Open(ctx, below.Path, name, how.Key, how.Discards)
	var d *dm.Device
	if err == nil {
		if d, err = dm.Find(name); err == nil && d == nil {
			err = unix.ENODEV
		}
	}
	if err != nil { // also of a cryptsetup that was killed
		return nil, errors.Join(err, c.remove(name))
	}
	return d, nil
}

// remove removes the device, now or with its last user, and the node that cryptsetup may have left in /dev.
func (c crypt) remove(name string) error {
	_, err := dm.Remove(name)
	return errors.Join(err, luks.ForgetNode(name))
}

// size returns the size that the device has to have over one of below bytes.
func (c crypt) size(below int64) int64 { return below - luks.HeaderSize }

// fit brings the device to the size that fits the one below. errdefs.ErrPrecondition and luks.ErrNoKey if it has to grow and there is no key.
func (c crypt) fit(ctx context.Context, d *dm.Device, below blockdev.Device, key luks.Key) error {
	size, err := d.Size()
	if err != nil || size == c.size(below.Size) {
		return err
	}
	if len(key) == 0 {
		return fmt.Errorf("%w: %w, which it needs to grow while it is open", errdefs.ErrPrecondition, luks.ErrNoKey)
	}
	if err := luks.Resize(ctx, below.Path, d.Name, key); err != nil {
		return err
	}
	if size, err = d.Size(); err == nil && size != c.size(below.Size) {
		err = fmt.Errorf("grow device %s behind its LUKS2 header: cryptsetup ended as if it had, and it has %d bytes over %d", d.Name, size, below.Size)
	}
	return err
}

// below returns the device of the volume's other layers that the device is over: the seat, what marks, or the pool's. False if it is over none of them.
func (c crypt) below(ctx context.Context, d *dm.Device) (blockdev.Device, bool, error) {
	return belowOf(ctx, d, seat(c), marked(c), bottom{c.pool, c.ref})
}

func (c crypt) attached(context.Context) (devices []blockdev.Device, below []uint64, err error) {
	_, d, err := c.find()
	if err != nil {
		return nil, nil, err
	}
	return shown(d, false)
}

func (c crypt) grow(ctx context.Context, key luks.Key) error {
	_, d, err := c.find()
	if err != nil || d == nil || !d.Live {
		return err
	}
	below, there, err := c.below(ctx, d)
	if err == nil && there {
		err = c.fit(ctx, d, below, key)
	}
	if dm.Vanished(err) {
		return nil
	}
	return err
}

func (c crypt) suspend(context.Context) (func() error, error) { return nil, nil } // the top is

func (c crypt) detach(ctx context.Context) error {
	name, d, err := c.find()
	if err != nil || d == nil {
		return err
	}
	_, err = removed(ctx, d)
	return errors.Join(err, luks.ForgetNode(name))
}

// health reads the header: nothing else does while the device is open, so a header that is gone or damaged would be noticed too late.
func (c crypt) health(ctx context.Context) ([]blockdev.Problem, error) {
	_, d, err := c.find()
	if err != nil || d == nil || !d.Live {
		return nil, err
	}
	if _, _, under, err := seat(c).find(); err != nil || under != nil && under.Suspended { // nothing can be read
		return nil, err
	}
	below, there, err := c.below(ctx, d)
	if err != nil || !there {
		return nil, err
	}
	_, known, err := inTime(ctx, c.stacks, d.Name, healthPatience, func() (struct{}, error) { return struct{}{}, luks.Check(below.Path) })
	if !known {
		return nil, err
	}
	if err == nil || dm.Vanished(err) {
		return nil, nil
	}
	return []blockdev.Problem{{Severity: blockdev.DataLoss, Reason: "HeaderLost", Message: fmt.Sprintf(
		"%s of pool %s: %v; once it is unstaged no key opens it any more: copy what is on it elsewhere while it is in use", c.ref, c.pool.Name(), err)}}, nil
}

// recover repairs the device after a crash: without a table, suspended for an unfinished growth, or not yet to go with its last user.
func (c crypt) recover(ctx context.Context) error {
	name, d, err := c.find()
	if err != nil || d == nil {
		return errors.Join(err, luks.ForgetNode(name))
	}
	return errors.Join(settle(d), luks.ForgetNode(name))
}

// settle repairs, after a crash, a device that is to go with its last user. A table that is loaded and not in effect is dropped.
func settle(d *dm.Device) (err error) {
	if d.Loaded && d.Live {
		err = dm.Clear(d.Name)
	}
	if err == nil && d.Suspended && d.Live {
		err = dm.Resume(d.Name, dm.NoScan)
	}
	if err == nil && !d.Deferred {
		_, err = dm.Remove(d.Name)
	}
	return err
}

// belowOf returns the device of one of the layers that d is directly over; false if it is over none of theirs.
func belowOf(ctx context.Context, d *dm.Device, layers ...layer) (blockdev.Device, bool, error) {
	numbers, err := dm.Below(d.Name)
	if dm.Vanished(err) {
		return blockdev.Device{}, false, nil
	}
	for _, l := range layers {
		if err != nil {
			break
		}
		var devices []blockdev.Device
		devices, _, err = l.attached(ctx)
		if i := slices.IndexFunc(devices, func(one blockdev.Device) bool { return slices.Contains(numbers, one.Number) }); i >= 0 && err == nil {
			return devices[i], true, nil
		}
	}
	return blockdev.Device{}, false, err
}

// crypts returns the open devices of all encrypted volumes of a pool, also where only a node in /dev is left of one.
func (s *Stacks) crypts(pool blockdev.Pool) ([]crypt, error) {
	tops, err := s.under(pool, cryptSuffix)
	var found []crypt
	for _, t := range tops {
		found = append(found, crypt{t})
	}
	return found, err
}

// under returns the tops, whether they are attached or not, of all volumes of a pool that have a device with the suffix, or a node in /dev that is left of
// one.
func (s *Stacks) under(pool blockdev.Pool, suffix string) ([]top, error) {
	stackable, ok := blockdev.As[blockdev.Stackable](pool)
	if !s.hasMapper() || !ok {
		return nil, nil
	}
	names, err := dm.Names("")
	left, failure := luks.Nodes()
	if err = errors.Join(err, failure); err != nil {
		return nil, err
	}
	var found []top
	names = append(names, left...)
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		over, is := strings.CutSuffix(name, suffix)
		if ref, ours := stackable.ParseTop(over); is && ours {
			found = append(found, top{s, stackable, pool, ref})
		}
	}
	return found, nil
}
