// Package mirror is the mirror that the consumer of a volume with several legs has (docs/replication.md, docs/decisions/replicas.md): a device over the
// block devices of the legs. It is the target of that name of the device mapper, and nothing else in the driver makes one for legs.
//
// All state is the kernel's, under the name of the device; there is none in this package, and a driver that starts finds what its predecessor left (State). The legs of State are
// current to the kernel: a write is acknowledged when it is on all of them. When one fails, what it did not take is held, acknowledged to nobody, until Leave. A mirror is nobody's but the
// caller's; calls that change one wait for each other.
package mirror

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/turns"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

const (
	// region is the unit of a mirror whose legs are equal: no request crosses one.
	region = 512 << 10
	// While a leg joins: baseSuffix is of the device over what is current, joinsSuffix of that over the leg. See Join.
	baseSuffix  = "-base"
	joinsSuffix = "-joins"

	target   = "mirror"
	logged   = "disk"   // the log of one that a leg joins
	ended    = "error"  // the target of a mirror that has ended
	fails    = "flakey" // that of what fails flushes, behind it
	features = " 1 handle_errors"
)

// Leg is one of a mirror.
type Leg = dm.Leg

// State is what the kernel says of a mirror.
type State struct {
	Size          int64 // bytes
	Legs          []Leg // those that are current, in the order in which they are read from: the first, and another one if that has failed; none after End
	Joining       *Leg  // the one that is being made equal; nil: none
	Synced, Total int64 // bytes that are equal on Joining, and all
	Held          bool  // nothing is read or written until Leave is called for all that failed: see Watch
	Event         Event

	inner     string // the device that is over Legs alone: the mirror itself, or one below it while a leg joins
	remembers bool   // it has a region of which a leg failed: the kernel holds what is written, until there is another table
}

// Event is how many things have happened to a mirror, by the kernel's count: to the device, and to that of what is current, which there is while a leg joins.
type Event struct{ Top, Base uint32 }

// Failed are the legs that have failed, Joining not among them.
func (s State) Failed() (devices []uint64) {
	for _, l := range s.Legs {
		if l.Failed {
			devices = append(devices, l.Device)
		}
	}
	return devices
}

// Equal reports whether the leg that joins is equal to the others, and Finish can be called.
func (s State) Equal() bool { return s.Joining != nil && !s.Joining.Failed && s.Synced == s.Total }

func (s State) devices() (devices []uint64) {
	for _, l := range s.Legs {
		devices = append(devices, l.Device)
	}
	return devices
}

// Available returns errdefs.ErrUnsupported unless the kernel has what it takes, with what to load.
func Available() error {
	if err := dm.HasTarget(target); err != nil {
		return fmt.Errorf("%w: %w; load the module dm-mirror", errdefs.ErrUnsupported, err)
	}
	return nil
}

// Make makes a mirror over legs that are equal and current, and of this size at least. They are read from in this order, so the near one comes first. One alone is a mirror too. Nothing is written to the
// legs. A mirror of that name over the same legs stays as it is, with whatever has failed; over others it is errdefs.ErrExists. A crash leaves a device of the name, of which Make makes the mirror when it is called again.
func Make(ctx context.Context, name, uuid string, size int64, legs ...uint64) error {
	return change(name, "make it", func() error {
		d, err := dm.Find(name)
		if err != nil {
			return err
		}
		if d != nil && d.Live {
			s, err := state(name)
			if err == nil && (s.Size != size || !slices.Equal(s.devices(), legs)) {
				err = fmt.Errorf("%w: it is over %s", errdefs.ErrExists, numbers(s.devices()))
			}
			return err
		}
		if err := requireStableWrites(legs); err != nil {
			return err
		}
		return flat(ctx, size, legs, func(table []dm.Line) error { return dm.Make(name, uuid, table) })
	})
}

// flat has the table of a mirror whose legs are equal be brought to a device.
func flat(ctx context.Context, size int64, legs []uint64, bring func(table []dm.Line) error) error {
	line := dm.Line{Length: size, Kind: target, Text: fmt.Sprintf("core 2 %d nosync%s%s", fit(region, size)/512, over(legs), features)}
	if len(legs) == 1 {
		line = dm.Linear(legs[0], size)[0]
	}
	return flushed(ctx, line, legs, bring)
}

// fit is a unit that is a power of two, and not larger than the device.
func fit(unit, size int64) int64 {
	for unit > size {
		unit /= 2
	}
	return unit
}

func over(legs []uint64) string {
	text := fmt.Sprintf(" %d", len(legs))
	for _, l := range legs {
		text += " " + dm.Number(l) + " 0"
	}
	return text
}

func numbers(legs []uint64) string {
	var all []string
	for _, l := range legs {
		all = append(all, dm.Number(l))
	}
	return strings.Join(all, ", ")
}

// Look returns how a mirror is; errdefs.ErrNotFound if there is none. It does not wait for a step that is under way, and sees how it is before that or after it.
func Look(name string) (s State, err error) {
	err = of(name, "look at it", func() error {
		s, err = state(name)
		return err
	})
	return s, err
}

// state is how a mirror is at one moment. It takes several questions to the kernel: if a step of this package came between them, they are asked again.
func state(name string) (State, error) {
	for before := partsOf(name); ; {
		s, err := stateNow(name)
		after := partsOf(name)
		if after == before {
			return s, err
		}
		before = after
	}
}

// parts are what steps of this package change of a mirror, and of the devices below it.
type parts [3]struct {
	number                  uint64
	live, suspended, loaded bool
	table                   string
}

// partsOf returns nothing of what cannot be read: that is an error of stateNow.
func partsOf(name string) (p parts) {
	for i, part := range []string{name, name + baseSuffix, name + joinsSuffix} {
		d, err := dm.Find(part)
		if err != nil || d == nil {
			continue
		}
		p[i].number, p[i].live, p[i].suspended, p[i].loaded = d.Number, d.Live, d.Suspended, d.Loaded
		_, p[i].table, _ = dm.Table(part)
	}
	return p
}

func stateNow(name string) (s State, err error) {
	d, err := dm.Find(name)
	if err != nil {
		return s, err
	}
	if d == nil || !d.Live {
		return s, fmt.Errorf("%w: there is no such device", errdefs.ErrNotFound)
	}
	s.Event.Top, s.inner = d.Event, name
	top, size, err := read(name)
	if err != nil {
		return s, err
	}
	s.Size = size
	s.Legs, s.Synced, s.Total = top.Legs, s.Size, s.Size
	if top.Logged {
		return s, s.readJoin(name, top)
	}
	s.remembers = top.Synced < top.Total
	return s, s.findHeld(d)
}

// readJoin fills in a mirror that a leg joins: it has two legs, what is current and that one. Of a driver before this one it may have them without what is
// written at Join: then the kernel does with failures what that is against, so the leg that joins counts as failed, and begins anew.
func (s *State) readJoin(name string, top dm.Mirror) error {
	if len(top.Legs) != 2 {
		return fmt.Errorf("%w: it has %d legs and a log, which is none of ours", errdefs.ErrPrecondition, len(top.Legs))
	}
	first, second := top.Legs[0], top.Legs[1]
	s.Legs, s.Joining, s.Synced = []Leg{first}, &Leg{Device: second.Device, Failed: true}, 0
	base, err := dm.Find(name + baseSuffix)
	if err != nil || base == nil || base.Number != first.Device {
		return err
	}
	below, size, err := read(base.Name)
	if err != nil {
		return err
	}
	if len(below.Legs) == 1 {
		below.Legs[0].Failed, below.Legs[0].OnlyReads = first.Failed, first.OnlyReads
	}
	s.Size, s.Total, s.Event.Base = size, size, base.Event
	s.Legs, s.inner, s.remembers = below.Legs, base.Name, below.Synced < below.Total
	if err := s.readJoiner(name, second, top); err != nil {
		return err
	}
	return s.findHeld(base)
}

// readJoiner fills in the leg that joins, by the device over it. It is equal once all regions are in sync but the last one, which is never copied.
func (s *State) readJoiner(name string, second Leg, top dm.Mirror) error {
	d, err := dm.Find(name + joinsSuffix)
	if err != nil || d == nil || d.Number != second.Device {
		return err
	}
	leg, _, err := read(d.Name)
	if err != nil {
		return err
	}
	all := top.Total - 1
	if s.Synced = s.Size; top.Synced < all {
		s.Synced = s.Size / all * top.Synced
	}
	s.Joining = &Leg{Device: leg.Legs[0].Device, Failed: second.Failed && !(second.NotCopied && top.Synced == all)}
	return nil
}

// findHeld finds out whether a mirror is held, and marks the legs as failed that are not in the table for the next resume. If that table is one of Join, it
// is not held.
func (s *State) findHeld(d *dm.Device) error {
	if !d.Suspended || !d.Loaded {
		return nil
	}
	next, err := dm.Next(d.Name)
	if err != nil || slices.ContainsFunc(next, func(line dm.Line) bool { return strings.HasPrefix(line.Text, logged+" ") }) {
		return err
	}
	s.Held = true
	for i, l := range s.Legs {
		s.Legs[i].Failed = !slices.ContainsFunc(next, func(line dm.Line) bool { return slices.Contains(strings.Fields(line.Text), dm.Number(l.Device)) })
	}
	return nil
}

// Size is that of the volume of a mirror, in bytes. What the kernel has it as large as may be more.
func Size(name string) (int64, error) {
	s, err := Look(name)
	return s.Size, err
}

// read returns what a device says of its table in effect (one leg, which is in sync, or those of the target mirror), and how many of its bytes are the
// volume's, without the tail.
func read(name string) (m dm.Mirror, size int64, err error) {
	table, err := dm.Status(name)
	if err != nil || len(table) == 0 {
		return m, 0, errors.Join(err, unix.ENXIO)
	}
	switch size = table[0].Length; table[0].Kind {
	case ended:
	case target:
		m, err = dm.ParseMirror(table[0].Text)
	case "linear":
		m, err = single(name)
	default:
		err = fmt.Errorf("%w: device %s is none of ours: its target is %s", errdefs.ErrPrecondition, name, table[0].Kind)
	}
	return m, size, err
}

// single is a mirror of one leg.
func single(name string) (m dm.Mirror, err error) {
	_, text, err := dm.Table(name)
	if err != nil {
		return m, err
	}
	var major, minor uint32
	if _, err := fmt.Sscanf(text, "%d:%d 0", &major, &minor); err != nil {
		return m, fmt.Errorf("%w: device %s is none of ours: it is over %q", errdefs.ErrPrecondition, name, text)
	}
	return dm.Mirror{Legs: []Leg{{Device: unix.Mkdev(major, minor)}}}, nil
}

// Leave takes legs out of a mirror, be they whole or not, current or joining. Those that are current have to be off the volume's list before: what the mirror held is written to the others, and
// acknowledged. If it is Held, that is all that failed. Legs that are not in it are of no account. errdefs.ErrPrecondition for the last one that is current, unless the one that joins is equal, which has to be on the volume's list before.
// After a crash it has been done, or has not; then it is to be called again.
func Leave(ctx context.Context, name string, legs ...uint64) error {
	return change(name, "take "+numbers(legs)+" out of it", func() error {
		s, err := state(name)
		if err != nil {
			return err
		}
		if s.Joining != nil && slices.Contains(legs, s.Joining.Device) {
			if err := replaceAndCleanUp(ctx, name, s.Size, s.devices()); err != nil {
				return err
			}
			s.Joining = nil
		}
		rest := slices.DeleteFunc(s.devices(), func(l uint64) bool { return slices.Contains(legs, l) })
		switch {
		case s.Held && slices.ContainsFunc(s.Failed(), func(l uint64) bool { return slices.Contains(rest, l) }):
			return fmt.Errorf("%w: it is held until all of %s leave it", errdefs.ErrPrecondition, numbers(s.Failed()))
		case len(rest) == len(s.Legs):
			return nil
		case len(rest) == 0 && s.Equal():
			return replaceAndCleanUp(ctx, name, s.Size, []uint64{s.Joining.Device})
		case len(rest) == 0:
			return fmt.Errorf("%w: the last leg that is current cannot leave", errdefs.ErrPrecondition)
		case s.Joining != nil:
			return s.current(ctx, rest, func(table []dm.Line) error { return dm.Replace(s.inner, table) })
		}
		return replaceAndCleanUp(ctx, name, s.Size, rest)
	})
}

// replaceAndCleanUp makes a mirror one of legs that are equal, and removes the devices of a join.
func replaceAndCleanUp(ctx context.Context, name string, size int64, legs []uint64) error {
	if err := replace(ctx, name, size, legs); err != nil {
		return err
	}
	return removeBelow(ctx, name)
}

// removeBelow removes the devices that there are while a leg joins.
func removeBelow(ctx context.Context, name string) error {
	_, err := dm.RemoveNow(ctx, name+baseSuffix)
	_, failure := dm.RemoveNow(ctx, name+joinsSuffix)
	return errors.Join(err, failure)
}

func replace(ctx context.Context, name string, size int64, legs []uint64) error {
	return flat(ctx, size, legs, func(table []dm.Line) error { return dm.Replace(name, table) })
}

// End has all that is read from a mirror and written to it end with errors, what it holds as well, and lets go of its legs: nobody may use it any more. It stays, for those who have it open, until Remove. State has no legs then.
func End(ctx context.Context, name string) error {
	return change(name, "end it", func() error {
		s, err := state(name)
		if err != nil || len(s.Legs) == 0 {
			return err
		}
		if err := failing(ctx, s.Size, func(table []dm.Line) error { return dm.ReplaceFailing(name, table) }); err != nil {
			return err
		}
		return removeBelow(ctx, name)
	})
}

// Resize gives a mirror another size, after all its legs have it. What is new counts as equal. errdefs.ErrUnavailable while a leg joins, and if one has failed.
func Resize(ctx context.Context, name string, size int64) error {
	return change(name, "resize it", func() error {
		s, err := state(name)
		if err != nil || s.Size == size {
			return err
		}
		if err := s.checkWhole(); err != nil {
			return err
		}
		return replace(ctx, name, size, s.devices())
	})
}

// checkWhole is errdefs.ErrUnavailable unless all legs are equal, and whole.
func (s State) checkWhole() error {
	switch {
	case s.Joining != nil:
		return fmt.Errorf("%w: leg %s joins it", errdefs.ErrUnavailable, dm.Number(s.Joining.Device))
	case len(s.Failed()) > 0 || s.Held:
		return fmt.Errorf("%w: leg %s has failed", errdefs.ErrUnavailable, numbers(s.Failed()))
	}
	return nil
}

// Remove takes a mirror away, with its last user; the legs stay. Its users have to have flushed it. If there is none it does nothing. inUse: somebody has it open.
func Remove(ctx context.Context, name string) (inUse bool, err error) {
	err = change(name, "remove it", func() error {
		if inUse, err = dm.RemoveNow(ctx, name); err != nil || inUse {
			return err
		}
		return removeBelow(ctx, name)
	})
	return inUse, err
}

// Recover puts right what a crash left: a mirror that was suspended for a step of this package that was not finished, unless it is Held, and a device that nothing uses.
func Recover(ctx context.Context, name string) error {
	return change(name, "recover it", func() error {
		d, err := dm.Find(name)
		if err != nil || d == nil || !d.Live {
			return err
		}
		s, err := state(name)
		if err != nil {
			return err
		}
		switch {
		case d.Suspended && !s.Held:
			err = dm.Resume(name, dm.NoScan)
		case d.Loaded && !s.Held:
			err = dm.Clear(name)
		}
		if s.Joining == nil && err == nil {
			err = removeBelow(ctx, name)
		}
		return err
	})
}

// changing has one change made to a mirror at a time, by its name.
var changing turns.Table[string]

// lock waits until nobody else changes a mirror.
func lock(name string) (unlock func()) {
	unlock, _ = changing.Begin(context.Background(), name) // a context that does not end has no error
	return unlock
}

// change is of, for what changes a mirror.
func change(name, what string, do func() error) error {
	defer lock(name)()
	return of(name, what, do)
}

// of says of which mirror an error is, and what was done.
func of(name, what string, do func() error) error {
	err := do()
	if dm.Vanished(err) {
		err = errors.Join(errdefs.ErrNotFound, err)
	}
	if err != nil {
		return fmt.Errorf("mirror %s: %s: %w", name, what, err)
	}
	return nil
}
