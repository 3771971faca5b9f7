// Package mirror makes and changes the mirror that the consumer of a volume with several legs has (docs/replication.md, docs/decisions/replicas.md): a
// device over the block devices of the legs, by the target mirror of the device mapper. Nothing else in the driver makes such a device for legs.
//
// All state is in the kernel, under the name of the device, and none in this package: a driver that starts finds what an earlier one left (Look).
// State.Legs are current as far as the kernel is concerned: it acknowledges a write when the write is on all of them. If a leg fails, the kernel holds the
// writes that this leg did not take, and does not acknowledge them, until Leave. A mirror belongs to its caller alone. Calls that change the same mirror
// wait for each other.
package mirror

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/turns"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

const (
	// region is the size of the regions of a mirror whose legs are equal, in bytes. No request goes from one region into the next.
	region = 512 << 10
	// While a leg joins (Join) there are two more devices: baseSuffix ends the name of the one over the current legs, joinsSuffix that of the one over the
	// leg that joins.
	baseSuffix  = "-base"
	joinsSuffix = "-joins"

	target   = "mirror"
	logged   = "disk"   // the kind of log while a leg joins
	ended    = "error"  // the target of a mirror that has ended
	fails    = "flakey" // the target behind it, which fails flushes: see failing
	features = " 1 handle_errors"
)

// Leg is a leg of a mirror.
type Leg = dm.Leg

// State is what the kernel says of a mirror.
type State struct {
	Size          int64 // bytes
	Legs          []Leg // the current ones; the first is read from, and another one if that has failed; none after End
	Joining       *Leg  // the leg that is being made equal; nil: none
	Synced, Total int64 // bytes that are equal on Joining, and all bytes
	Held          bool  // nothing is read or written until Leave is called for all legs that failed: see Watch
	Forgot        bool  // the kernel has forgotten that a leg has failed, and what it acknowledges may be on one leg alone, until Watch or Recover has it Held
	Event         Event

	inner     string // the device over Legs alone: the mirror itself; while a leg joins, the one of baseSuffix
	remembers bool   // a region is out of sync, as a leg failed: the kernel forgets no failure, and holds writes until there is another table
	again     bool   // it is suspended, and a table over the same legs is loaded, of another size or in another order: who loaded it was cut short
}

// Event is the kernel's counts of events of a mirror: those of its device (Top), and, while a leg joins, those of the device over the current legs (Base).
type Event struct{ Top, Base uint32 }

// Failed returns the device numbers of the current legs that have failed.
func (s State) Failed() (devices []uint64) {
	for _, l := range s.Legs {
		if l.Failed {
			devices = append(devices, l.Device)
		}
	}
	return devices
}

// Equal reports whether a leg joins and is equal to the others now, so that Finish can be called.
func (s State) Equal() bool { return s.Joining != nil && !s.Joining.Failed && s.Synced == s.Total }

func (s State) devices() (devices []uint64) {
	for _, l := range s.Legs {
		devices = append(devices, l.Device)
	}
	return devices
}

// Make makes a mirror of size bytes over legs that are equal, current and at least as large. One leg alone is a mirror too. Reads go to the first leg, so
// the near one comes first. Nothing is written to the legs. If the mirror is there already, with the same size and legs in the same order, it stays as it
// is, also if legs have failed; with others, errdefs.ErrExists. A crash may leave a device without a table, of which the next Make makes the mirror.
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
		return flat(ctx, name, size, legs, func(table []dm.Line) error { return makeNoted(name, uuid, table) })
	})
}

// flat calls bring with the table of a mirror whose legs are equal, or of the device over its current legs: of a single leg it is linear. name is that of the mirror.
func flat(ctx context.Context, name string, size int64, legs []uint64, bring func(table []dm.Line) error) error {
	line := dm.Line{Length: size, Kind: target, Text: fmt.Sprintf("core 2 %d nosync%s%s", fit(region, size)/512, over(legs), features)}
	if len(legs) == 1 {
		line = dm.Linear(legs[0], size)[0]
	}
	return tailed(ctx, name, line, bring)
}

// fit halves unit, a power of two, until it is not larger than size.
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

// Look returns the state of a mirror; errdefs.ErrNotFound if there is none. It does not wait for a change that is under way, and returns the state before
// or after that.
func Look(name string) (s State, err error) {
	err = of(name, "look at it", func() error {
		s, err = state(name)
		return err
	})
	return s, err
}

// state returns the state of a mirror at one moment. It has to ask the kernel several times: if this package changed the mirror in between, it asks again.
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

// parts is what each change by this package alters of the three devices of a mirror, so that a difference shows a change.
type parts [3]struct {
	number                  uint64
	live, suspended, loaded bool
	table                   string
}

// partsOf leaves out what it cannot read: stateNow returns the error of that.
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

// stateNow is state, if nothing changes the mirror meanwhile.
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
	return s, s.findOutcome(d)
}

// findOutcome finds out what became of failures of the current legs; d is the device over them.
func (s *State) findOutcome(d *dm.Device) error {
	if err := s.findHeld(d); err != nil {
		return err
	}
	return s.findForgotten(d)
}

// readJoin fills in the state of a mirror that a leg joins. Its table has two legs: the device over the current legs, and the device over the leg that
// joins. The mirror of an older driver may lack these devices, and so the region that is never in sync: then the kernel may forget failures
// (docs/decisions/replicas.md). The leg that joins such a mirror counts as failed, so that it begins anew.
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
	return s.findOutcome(base)
}

// readJoiner fills in the leg that joins, by the device over it: second is that device as a leg of the mirror. The leg is equal once all regions but the
// last are in sync. The last one is behind the volume: the copy of it always fails, which is no failure of the leg.
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

// findHeld finds out whether a mirror is held: d, the device over its current legs, is suspended and has a table loaded. The legs that are not in that
// table count as failed. If the table is one that Join has loaded, or has all legs, the mirror is not held.
func (s *State) findHeld(d *dm.Device) error {
	if !d.Suspended || !d.Loaded {
		return nil
	}
	next, err := dm.Next(d.Name)
	if err != nil || slices.ContainsFunc(next, func(line dm.Line) bool { return strings.HasPrefix(line.Text, logged+" ") }) {
		return err
	}
	lacks := func(l Leg) bool {
		return !slices.ContainsFunc(next, func(line dm.Line) bool { return slices.Contains(strings.Fields(line.Text), dm.Number(l.Device)) })
	}
	s.Held = slices.ContainsFunc(s.Legs, lacks)
	if s.again = !s.Held; s.again {
		return nil
	}
	for i, l := range s.Legs {
		s.Legs[i].Failed = lacks(l)
	}
	return nil
}

// Size returns the size of a mirror's volume in bytes. The kernel's device may be larger.
func Size(name string) (int64, error) {
	s, err := Look(name)
	return s.Size, err
}

// read returns the status of the table in effect of a device, and the size of the volume in it, without the tail. A linear table has one leg, which is in
// sync; that of a mirror that has ended has none. errdefs.ErrPrecondition if no mirror has such a table.
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

// single returns the status of a mirror of one leg, by its linear table.
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

// Leave takes legs out of a mirror, whole or failed, current or joining. Those that are current have to be off the volume's list before the call: what the
// mirror held is now written to the others, and acknowledged. If the mirror is Held, all legs that failed have to leave in one call; else
// errdefs.ErrPrecondition. Legs that are not in the mirror are ignored. If one of those that are to stay has failed by then, errdefs.ErrUnavailable, unless
// all of them had before: it has to leave, too.
//
// The last current leg leaves only if the leg that joins is Equal, which has to be on the volume's list then; else errdefs.ErrPrecondition. A leg that joins
// leaves only together with the current ones that have failed a write: errdefs.ErrUnavailable. After a crash the mirror is as it was or as it is to be, or some
// of the legs have left, or it is suspended until Recover; and Leave is called again.
func Leave(ctx context.Context, name string, legs ...uint64) error {
	return change(name, "take "+numbers(legs)+" out of it", func() error {
		s, err := state(name)
		if err != nil {
			return err
		}
		rest := slices.DeleteFunc(s.devices(), func(l uint64) bool { return slices.Contains(legs, l) })
		joins := s.Joining != nil && slices.Contains(legs, s.Joining.Device)
		stays := rest
		switch {
		case s.Held && slices.ContainsFunc(s.Failed(), func(l uint64) bool { return slices.Contains(rest, l) }):
			return fmt.Errorf("%w: it is held until all of %s leave it", errdefs.ErrPrecondition, numbers(s.Failed()))
		case len(rest) > 0:
		case joins || !s.Equal():
			return fmt.Errorf("%w: the last leg that is current cannot leave", errdefs.ErrPrecondition)
		default:
			rest, stays, joins = []uint64{s.Joining.Device}, s.one(), true
		}
		checked := rest
		if len(s.lacking(rest)) == len(rest) {
			checked = nil // none is better
		}
		if s.Joining != nil && len(stays) < len(s.Legs) { // first of all: a suspension of the mirror waits for what they hold
			if err := s.current(ctx, name, stays, func(table []dm.Line) error { return switched(ctx, name, s.inner, checked, table) }); err != nil {
				return err
			}
		}
		switch d, err := dm.Find(name); {
		case joins || s.Joining == nil && len(rest) < len(s.Legs):
			return replaceAndCleanUp(ctx, name, s.Size, rest, checked)
		case s.Joining != nil && d != nil && d.Suspended: // see switched
			return dm.Resume(name, dm.NoScan)
		default:
			return err
		}
	})
}

// one returns one of the current legs, which has not failed if there is such a one. A single leg holds nothing.
func (s State) one() []uint64 {
	i := max(0, slices.IndexFunc(s.Legs, func(l Leg) bool { return !l.Failed }))
	return s.devices()[i : i+1]
}

// Yield takes a leg that joins, and lacks something still, out of a mirror, so that this can have another size. errdefs.ErrUnavailable if the leg has everything,
// as it may be on the volume's list then, or if a leg has failed. If none joins, it does nothing.
func Yield(ctx context.Context, name string) error {
	return change(name, "take out the leg that joins it", func() error {
		s, err := state(name)
		if err != nil || s.Joining == nil {
			return err
		}
		if s.Joining.Failed || s.Equal() || len(s.Failed()) > 0 || s.Held {
			return fmt.Errorf("%w: leg %s has just become equal, or a leg has failed", errdefs.ErrUnavailable, dm.Number(s.Joining.Device))
		}
		return replaceAndCleanUp(ctx, name, s.Size, s.devices(), s.devices())
	})
}

// replaceAndCleanUp is replace, and removes the devices of a join.
func replaceAndCleanUp(ctx context.Context, name string, size int64, legs, stay []uint64) error {
	if err := replace(ctx, name, size, legs, stay); err != nil {
		return err
	}
	return removeBelow(ctx, name)
}

// removeBelow removes the devices beside a mirror that only a join needs.
func removeBelow(ctx context.Context, name string) (err error) {
	for _, suffix := range []string{baseSuffix, joinsSuffix, baseSuffix + sinceSuffix} {
		_, failure := dm.RemoveNow(ctx, name+suffix)
		err = errors.Join(err, failure)
	}
	return err
}

// replace gives a mirror the table of legs that are equal. errdefs.ErrUnavailable if one of stay has failed by then: see switched.
func replace(ctx context.Context, name string, size int64, legs, stay []uint64) error {
	return flat(ctx, name, size, legs, func(table []dm.Line) error { return switched(ctx, name, name, stay, table) })
}

// switched brings a table into effect, of a device that is the mirror, or the one over its current legs; stay are legs that stay in the mirror. What these have
// failed until then is not tried again: a disk tells only once what it could not flush, and nothing would tell any more. So if one of them has failed,
// errdefs.ErrUnavailable: the mirror is Held until that one leaves; or, if a leg joins and the device is the mirror, it is suspended until then. If the kernel
// has forgotten which has failed, the same error, and the device goes on until Watch. A crash may leave the device suspended, until Recover.
func switched(ctx context.Context, name, device string, stay []uint64, table []dm.Line) error {
	if err := dm.Hold(device); err != nil {
		return err
	}
	s, err := state(name)
	if err != nil {
		return errors.Join(err, dm.Resume(device, dm.NoScan))
	}
	if failed := s.lacking(stay); len(failed) > 0 {
		err := fmt.Errorf("%w: leg %s has failed", errdefs.ErrUnavailable, numbers(failed))
		lost := s.lacking(s.devices())
		whole := slices.DeleteFunc(s.devices(), func(l uint64) bool { return slices.Contains(lost, l) })
		if s.inner == device && len(whole) > 0 {
			err = errors.Join(err, s.hold(ctx, name, whole))
		}
		return err
	}
	if s.Forgot {
		return errors.Join(errForgot, dm.Resume(device, dm.NoScan))
	}
	if err = noteEvent(device); err == nil {
		err = dm.Load(device, table)
	}
	if err != nil {
		return errors.Join(err, dm.Clear(device), s.resume(ctx, device))
	}
	return dm.Resume(device, dm.NoScan)
}

// lacking returns those of some legs, current or joining, that have failed a write or a flush.
func (s State) lacking(legs []uint64) (failed []uint64) {
	all := s.Legs
	if s.Joining != nil {
		all = append(slices.Clone(all), *s.Joining)
	}
	for _, l := range all {
		if l.Failed && !l.OnlyReads && slices.Contains(legs, l.Device) {
			failed = append(failed, l.Device)
		}
	}
	return failed
}

// End makes all I/O of a mirror fail, also what it holds, and lets go of its legs: it is for a mirror that nobody may use any more. The device stays for
// those who have it open, until Remove. Its State has no legs.
func End(ctx context.Context, name string) error {
	return change(name, "end it", func() error {
		s, err := state(name)
		if err != nil || len(s.Legs) == 0 && s.Joining == nil {
			return err
		}
		return s.end(ctx, name)
	})
}

func (s State) end(ctx context.Context, name string) error {
	if s.Joining != nil { // first of all: a suspension of the mirror waits for what the legs hold
		if err := failing(ctx, s.Size, func(table []dm.Line) error {
			last := table[len(table)-1]
			if at := last.Start + last.Length; at < joinSize(s.Size) {
				table = append(table, dm.Line{Start: at, Length: joinSize(s.Size) - at, Kind: ended})
			}
			return dm.ReplaceFailing(s.inner, table)
		}); err != nil {
			return err
		}
	}
	if err := failing(ctx, s.Size, func(table []dm.Line) error { return dm.ReplaceFailing(name, table) }); err != nil {
		return err
	}
	return removeBelow(ctx, name)
}

// Resize gives a mirror another size, which all its legs must have already. What is new counts as equal. errdefs.ErrUnavailable while a leg joins or has
// failed. A crash may leave the mirror suspended, until Recover.
func Resize(ctx context.Context, name string, size int64) error {
	return change(name, "resize it", func() error {
		s, err := state(name)
		if err != nil || s.Size == size {
			return err
		}
		if err := s.checkWhole(); err != nil {
			return err
		}
		return replace(ctx, name, size, s.devices(), s.devices())
	})
}

// checkWhole returns errdefs.ErrUnavailable while a leg joins or has failed, or the mirror is held.
func (s State) checkWhole() error {
	switch {
	case s.Joining != nil:
		return fmt.Errorf("%w: leg %s joins it", errdefs.ErrUnavailable, dm.Number(s.Joining.Device))
	case len(s.Failed()) > 0 || s.Held:
		return fmt.Errorf("%w: leg %s has failed", errdefs.ErrUnavailable, numbers(s.Failed()))
	case s.Forgot:
		return errForgot
	}
	return nil
}

// Remove removes a mirror, now or with its last user (inUse); the legs stay. Its users have to have flushed it. If there is no such mirror, it does
// nothing.
func Remove(ctx context.Context, name string) (inUse bool, err error) {
	err = change(name, "remove it", func() error {
		if inUse, err = dm.RemoveNow(ctx, name); err != nil || inUse {
			return err
		}
		_, err = dm.Remove(name + sinceSuffix)
		return errors.Join(err, removeBelow(ctx, name))
	})
	return inUse, err
}

// Recover repairs a mirror after a crash within a change by this package. Unless it is Held, a suspended mirror is resumed, or is Held if a leg has failed, and a table that is loaded for
// no suspension is dropped, as is one that has the same legs: the change is repeated. The devices of a join are removed if no leg joins. End and Finish are finished.
// What the kernel has forgotten meanwhile, it sees to as Watch does.
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
		if d.Suspended && s.again && s.inner == name {
			err = dm.Clear(name)
		}
		if base, failure := dm.Find(name + baseSuffix); failure == nil && base != nil && base.Suspended && !s.Held {
			err = dm.Resume(base.Name, dm.NoScan)
		}
		switch {
		case err != nil:
		case s.Joining != nil && len(s.Legs) == 0:
			err = s.end(ctx, name)
		case d.Suspended && !s.Held:
			err = s.resume(ctx, name)
		case d.Loaded && !s.Held:
			err = dm.Clear(name)
		}
		if err == nil {
			s, err = state(name)
		}
		if s.Joining == nil && err == nil {
			err = removeBelow(ctx, name)
		}
		if err == nil {
			err = s.recoverForgotten(ctx, name)
		}
		return err
	})
}

// recoverForgotten has a mirror held if the kernel has forgotten that a leg has failed. The mirror of an older driver gets a note, and is taken for one of which
// nothing was forgotten.
func (s *State) recoverForgotten(ctx context.Context, name string) error {
	d, err := dm.Find(s.inner)
	if err != nil || d == nil || d.Suspended {
		return err
	}
	if _, is, err := notedEvent(d.Name); err != nil || !is {
		return errors.Join(err, noteEvent(d.Name))
	}
	if !s.forgets() {
		return nil
	}
	time.Sleep(forgetTime)
	if *s, err = state(name); err != nil {
		return err
	}
	return s.holdForgotten(context.WithoutCancel(ctx), name)
}

// changing lets one call at a time change a mirror, by its name.
var changing turns.Table[string]

// lock waits until nobody else changes the mirror, and keeps others from changing it until unlock.
func lock(name string) (unlock func()) {
	unlock, _ = changing.Begin(context.Background(), name) // a context that does not end has no error
	return unlock
}

// change calls do with the mirror locked. Its error is as of says.
func change(name, what string, do func() error) error {
	defer lock(name)()
	return of(name, what, do)
}

// of calls do, and adds to its error which mirror it is of, and what was being done. errdefs.ErrNotFound if the device went away meanwhile.
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
