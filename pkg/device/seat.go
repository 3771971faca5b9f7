package device

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/luks"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// seat is a device of the device mapper over the pool's device, or over what marks. While the volume moves it is a mirror of that and of the device that
// the volume moves to (Stack.Mirror). It is below the encryption, so a move needs no key, and all devices above stay as they are.
//
// It goes with its last user, as a crypt does. Its name is the top's and a suffix; a move to another pool changes it (Stack.Switch).
type seat struct{ top }

const seatSuffix = "-seat"

func isSeat(l layer) bool { _, is := l.(seat); return is }

// movable returns a UUID for a seat, or for a top over one: that which the pool gives its tops, and a random suffix. A move changes the device's name and
// not its UUID, so without the suffix a pool could later give another device the same one.
func movable(uuid string) string { return fmt.Sprintf("%s%s%08x", uuid, movableInfix, rand.Uint32()) }

const movableInfix = "-movable-"

var movablePattern = regexp.MustCompile(`^LVM-.+-movable-[0-9a-f]{8}$`)

// isMovable reports whether a UUID is one of movable, of any pool. lvm2 reads no device that has one: see blockdev.Stackable.
func isMovable(uuid string) bool { return movablePattern.MatchString(uuid) }

func (s seat) find() (name, uuid string, d *dm.Device, err error) { return s.findAs(seatSuffix) }

func (s seat) attach(_ context.Context, below blockdev.Device, _ Options) (_ blockdev.Device, err error) {
	name, uuid, d, err := s.find()
	if err != nil {
		return blockdev.Device{}, err
	}
	if d == nil || !d.Live { // without a table: a crash came before it had one
		d, err = lay(name, d != nil, func() error { return dm.Make(name, movable(uuid), dm.Linear(below.Number, below.Size)) })
		if err != nil {
			return blockdev.Device{}, err
		}
		defer func() {
			if err != nil { // nobody has it
				_, removed := dm.Remove(name)
				err = errors.Join(err, removed)
			}
		}()
	} else if err := s.fit(d, below); err != nil && !errors.Is(err, errMoves) { // it grows when it has moved
		return blockdev.Device{}, err
	}
	return passing(d, below)
}

var errMoves = fmt.Errorf("%w: it moves while it is used, and does not grow until that has ended", errdefs.ErrUnavailable)

// fit brings a seat to the size of the device below it. errMoves while it is a mirror, which keeps its size.
func (s seat) fit(d *dm.Device, below blockdev.Device) error {
	if fits, err := fitsOver(d, below, true); err != nil || fits {
		return err
	}
	if _, is, err := mirrorOf(d.Name); err != nil {
		return err
	} else if is {
		return errMoves
	}
	return dm.Make(d.Name, d.UUID, dm.Linear(below.Number, below.Size))
}

func (s seat) attached(context.Context) (devices []blockdev.Device, below []uint64, err error) {
	_, _, d, err := s.find()
	if err != nil {
		return nil, nil, err
	}
	if devices, below, err = shown(d, false); err != nil || len(below) < 2 { // of one device it is no mirror
		return devices, below, err
	}
	over, err := findNewLeg(d.Name)
	for i := range below {
		if over != nil && below[i] == over.Number {
			below[i] = over.leg
		}
	}
	return devices, below, err
}

func (s seat) grow(ctx context.Context, _ luks.Key) error {
	_, _, d, err := s.find()
	if err != nil || d == nil || !d.Live {
		return err
	}
	below, there, err := s.underSeat(ctx, d)
	if err == nil && there {
		err = s.fit(d, below)
	}
	if dm.Vanished(err) {
		return nil
	}
	return err
}

func (s seat) suspend(context.Context) (func() error, error) { return nil, nil } // the top is

func (s seat) detach(ctx context.Context) error {
	name, _, d, err := s.find()
	if err != nil {
		return err
	}
	left, err := findNewLeg(name) // of a mirror that ends with the seat
	if err == nil && d != nil {
		_, err = removed(ctx, d)
	}
	if err != nil {
		return err
	}
	return errors.Join(left.remove(), forget(name))
}

// health leaves out a mirror that is suspended: HoldMirror has done that.
func (s seat) health(ctx context.Context) ([]blockdev.Problem, error) {
	problems, err := s.healthOf(ctx, seatSuffix)
	if err != nil || len(problems) == 0 {
		return nil, err
	}
	name, _, _, err := s.find()
	if err != nil {
		return nil, err
	}
	if _, is, err := mirrorOf(name); err != nil || is {
		return nil, err
	}
	return problems, nil
}

// recover repairs a seat after a crash: a device without a table, or suspended for a table that was not finished, or that does not go with its last user
// yet. A mirror stays one, and stays held if it was: whoever moves the volume decides.
func (s seat) recover(ctx context.Context) error {
	name, _, d, err := s.find()
	if err == nil {
		err = luks.ForgetNode(name)
	}
	if err != nil || d == nil {
		return err
	}
	if _, is, err := mirrorOf(name); err != nil || is {
		if err == nil && d.Loaded {
			err = dm.Clear(name)
		}
		return err
	}
	if err := settled(d); err != nil {
		return err
	}
	if err := s.grow(ctx, nil); !errors.Is(err, errMoves) {
		return err
	}
	return nil
}

// Seated reports whether the kernel has a seat of a volume, of any pool. It is for pools that are not open, and so cannot tell the seat's name.
func (s *Stacks) Seated(ref blockdev.Ref) (bool, error) {
	if !s.hasMapper() {
		return false, nil
	}
	names, err := dm.Names("")
	return slices.ContainsFunc(names, func(name string) bool {
		return strings.Contains(name, ref.Key) && strings.HasSuffix(name, seatSuffix)
	}), err
}

// seats returns the seats of all volumes of a pool that have one.
func (s *Stacks) seats(pool blockdev.Pool) ([]seat, error) {
	tops, err := s.under(pool, seatSuffix)
	var found []seat
	for _, t := range tops {
		found = append(found, seat{t})
	}
	return found, err
}
