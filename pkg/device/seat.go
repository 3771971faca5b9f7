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

// seat is a device of the device mapper that shows the pool's own, or, while the volume moves, is a mirror of that and of the device it moves to
// (Stack.Mirror). It is below the encryption, so that a move needs no key, and all above it stays what it is.
//
// It goes with its last user, as a crypt does. It is called as the top is, and a suffix; a move to another pool changes the names (Stack.Switch).
type seat struct{ top }

const seatSuffix = "-seat"

func isSeat(l layer) bool { _, is := l.(seat); return is }

// movable is the UUID of a seat, or of a top over one, of a pool that gives tops this UUID. A move leaves it as it is: it is said of another pool then, and that pool
// may give a device the same one.
func movable(uuid string) string { return fmt.Sprintf("%s-movable-%08x", uuid, rand.Uint32()) }

var movablePattern = regexp.MustCompile(`^LVM-.+-movable-[0-9a-f]{8}$`)

// isMovable reports whether a UUID is one that movable gives, for whatever pool. lvm2 reads no device that has it: see blockdev.Stackable.
func isMovable(uuid string) bool { return movablePattern.MatchString(uuid) }

func (s seat) find() (name, uuid string, d *dm.Device, err error) { return s.findAs(seatSuffix) }

func (s seat) attach(_ context.Context, below blockdev.Device, _ Options) (_ blockdev.Device, err error) {
	name, uuid, d, err := s.find()
	if err != nil {
		return blockdev.Device{}, err
	}
	if d == nil || !d.Live { // without a table: who made it was cut short
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

// fit brings a seat to the size of the device that it is over; errMoves while it is a mirror, which keeps its size.
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
	return shown(d, false)
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
	if err == nil && d != nil {
		_, err = removed(ctx, d)
	}
	if err != nil {
		return err
	}
	return forget(name)
}

// health: a mirror that is held is ours.
func (s seat) health(context.Context) ([]blockdev.Problem, error) {
	problems, err := s.healthOf(seatSuffix)
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

// recover puts right what a crash left: a device without a table, suspended for a table that was not finished, or not yet to go with its last user. A
// mirror stays one, and stays held if it was: who carries the volume knows what it waits for.
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

// Seated reports whether the kernel has a seat of a volume, of whatever pool: also of one that is not open, and so cannot say what that is called.
func (s *Stacks) Seated(ref blockdev.Ref) (bool, error) {
	if !s.hasMapper() {
		return false, nil
	}
	names, err := dm.Names("")
	return slices.ContainsFunc(names, func(name string) bool {
		return strings.Contains(name, ref.Key) && strings.HasSuffix(name, seatSuffix)
	}), err
}

// seats returns those of all volumes of a pool that have one.
func (s *Stacks) seats(pool blockdev.Pool) ([]seat, error) {
	tops, err := s.under(pool, seatSuffix)
	var found []seat
	for _, t := range tops {
		found = append(found, seat{t})
	}
	return found, err
}
