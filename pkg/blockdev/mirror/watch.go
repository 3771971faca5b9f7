package mirror

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
)

// forgetTime is how long Watch waits before it takes a failure for one that the kernel forgets: the kernel shows a moment later which region a failed
// write was in, and forgets no failure that has one.
const forgetTime = 20 * time.Millisecond

// Watch waits until something has happened to a mirror since the event seen, and returns its state then: a leg has failed, the one that joins is equal or has
// failed, or nothing that matters. seen is of a look after the caller's last change. errdefs.ErrNotFound once there is no mirror.
//
// Whoever uses a mirror has to watch it. If a flush fails alone, the kernel soon forgets on which leg, and then acknowledges what is on one leg only. Watch
// prevents that: it has the mirror held, with the legs that may lack something as failed, until Leave, also for a driver that starts later. If the kernel has
// forgotten already, whenever that was (since.go), those are all legs but the one that is read from, which has everything.
func Watch(ctx context.Context, name string, seen Event) (s State, err error) {
	var last Event
	first := true
	err = dm.Await(ctx, func() (bool, error) { // events are those of any device
		now, err := events(name)
		if err == nil && now == last && !first {
			return false, nil
		}
		first, last = false, now
		s, err = Look(name)
		return err != nil || s.Event != seen || s.forgets(), err
	})
	if err != nil {
		return s, err
	}
	time.Sleep(forgetTime)
	err = change(name, "see to what has happened", func() error {
		if s, err = state(name); err != nil {
			return err
		}
		return s.holdForgotten(context.WithoutCancel(ctx), name)
	})
	return s, err
}

// events returns the kernel's counts of events of the devices of a mirror.
func events(name string) (e Event, err error) {
	for part, n := range map[string]*uint32{name: &e.Top, name + baseSuffix: &e.Base} {
		d, err := dm.Find(part)
		if err != nil {
			return e, err
		}
		if d != nil {
			*n = d.Event
		}
	}
	return e, nil
}

// forgets reports whether the kernel has forgotten that a leg has failed, or is about to.
func (s *State) forgets() bool {
	failed := len(s.Failed())
	return s.Forgot || !s.Held && !s.remembers && failed < len(s.Legs) && slices.ContainsFunc(s.Legs, func(l Leg) bool { return l.Failed && !l.OnlyReads })
}

// holdForgotten suspends a mirror if the kernel has forgotten that a leg has failed, or is about to, and reads its state anew. Then it is Held, with a
// table loaded over a leg that has everything.
func (s *State) holdForgotten(ctx context.Context, name string) (err error) {
	if !s.forgets() {
		return nil
	}
	has := s.one()[0]
	if s.Forgot {
		if has, err = s.readFrom(); err != nil {
			return err
		}
	}
	if err := s.hold(ctx, name, []uint64{has}); err != nil {
		return err
	}
	*s, err = state(name)
	return err
}

// hold suspends a mirror, if it is not, with a table loaded over some of its legs: it is Held until the others leave.
func (s *State) hold(ctx context.Context, name string, stay []uint64) error {
	if err := s.current(ctx, name, stay, func(table []dm.Line) error { return dm.Load(s.inner, table) }); err != nil {
		return err
	}
	if err := dm.HoldNow(s.inner); err != nil {
		return errors.Join(err, dm.Clear(s.inner))
	}
	return nil
}

// readFrom returns the leg that the kernel reads from. That is the one that it writes to alone.
func (s *State) readFrom() (uint64, error) {
	d, err := dm.Find(s.inner)
	if err != nil || d == nil {
		return 0, err
	}
	return dm.ReadFrom(d, 0, s.Legs)
}
