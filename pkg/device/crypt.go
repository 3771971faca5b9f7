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

// Encryption says how to open a volume that is encrypted.
type Encryption struct {
	// Key opens it. What is open needs none, and grows only with one.
	Key luks.Key
	// Discards are passed on to the pool's device.
	Discards bool
}

// crypt is a device of the device mapper that shows what is behind the LUKS2 header of the pool's device. cryptsetup makes it, as the
// kernel has the key from there. There is always a top over it, which passes no ioctls down, and can be suspended.
//
// It is removed while it is held open (DM_DEFERRED_REMOVE), and so goes with the top: the kernel forgets the key then, whatever
// becomes of the driver. It is called as the top is, and a suffix; what it is over follows from its table. So it is found
// without a record of the volume, and without a key.
type crypt struct{ top }

const cryptSuffix = "-crypt"

// find returns the name of the device, and the device; nil if it is not there.
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
	if d != nil && !d.Live { // who made it was cut short
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
	} else if key := o.Encryption.Key; len(key) > 0 { // without, it stays as it is: publishing brings none
		if err := c.fit(ctx, d, below, key); err != nil {
			return blockdev.Device{}, err
		}
	}
	return passing(d, below)
}

// passing returns a device that goes with its last user, with a hold on it.
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

// open makes the device.
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

// remove takes the device away, now or with its last user, and the node that cryptsetup may have left.
func (c crypt) remove(name string) error {
	_, err := dm.Remove(name)
	return errors.Join(err, luks.ForgetNode(name))
}

// size is what the device has to have over one of some bytes.
func (c crypt) size(below int64) int64 { return below - luks.HeaderSize }

// fit brings the device to the size of what it is over.
func (c crypt) fit(ctx context.Context, d *dm.Device, below blockdev.Device, key luks.Key) error {
	size, err := d.Size()
	if err != nil || size == c.size(below.Size) {
		return err
	}
	if len(key) == 0 {
		return fmt.Errorf("%w: %w, which it needs to grow while it is open", errdefs.ErrPrecondition, luks.ErrNoKey)
	}
	if err := luks.Resize(ctx, d.Name, key); err != nil {
		return err
	}
	if size, err = d.Size(); err == nil && size != c.size(below.Size) {
		err = fmt.Errorf("grow device %s behind its LUKS2 header: cryptsetup ended as if it had, and it has %d bytes over %d", d.Name, size, below.Size)
	}
	return err
}

// below returns what the device is over: the volume's seat, or else what marks, or the pool's device; false if none is it.
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

// health: while it is open, nothing reads the header, and one that is gone or damaged would be found out too late.
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
	err = luks.Check(below.Path)
	if err == nil || dm.Vanished(err) {
		return nil, nil
	}
	return []blockdev.Problem{{Severity: blockdev.DataLoss, Reason: "HeaderLost", Message: fmt.Sprintf(
		"%s of pool %s: %v; once it is unstaged no key opens it any more: copy what is on it elsewhere while it is in use", c.ref, c.pool.Name(), err)}}, nil
}

// recover puts right what a crash left: a device without a table, suspended for a growth that was not finished, or not yet to go with its
// last user.
func (c crypt) recover(ctx context.Context) error {
	name, d, err := c.find()
	if err != nil || d == nil {
		return errors.Join(err, luks.ForgetNode(name))
	}
	return errors.Join(settle(d), luks.ForgetNode(name))
}

// settle puts right what a crash left of a device that is to go with its last user: the table in effect stays.
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

// belowOf returns the device of a layer that a device of the device mapper is over; false if it is over none of it.
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

// crypts returns those of all volumes of a pool that have one, or a node of one.
func (s *Stacks) crypts(pool blockdev.Pool) ([]crypt, error) {
	tops, err := s.under(pool, cryptSuffix)
	var found []crypt
	for _, t := range tops {
		found = append(found, crypt{t})
	}
	return found, err
}

// under returns the tops, be they there or not, of all volumes of a pool that have a device that is called as that and a suffix, or a node of one.
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
