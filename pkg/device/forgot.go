package device

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// The kernel can forget that a leg of a mirror has failed: if only a flush failed, the next write clears the failure. From then on a region that is
// written twice goes to one leg alone (docs/decisions/moving-in-use.md). The count of events of the device tells. Each target has one event when it is
// copied, and one for each leg that fails; a target that forgets has the first kind once more. So nothing is forgotten if the events since the mirror was
// loaded are no more than the copied targets and the failed legs. The count at the time of loading is kept in a note, a device without a table that
// outlives the driver.
//
// The note of a table that is not in effect would hide what the one in effect has forgotten. So where one mirror follows another, the note of the new one is
// written when its table is in effect. Until then it is looked at with the older note, and so counts as one that has forgotten.

// A note is named as the top is, and sinceSuffix; newerSuffix before it takes the place of another one.
const (
	sinceSuffix = "-since"
	newerSuffix = "-newer"
)

// notesOf returns the two names that the note of a seat may have.
func notesOf(seat string) (name, newer string) {
	top := strings.TrimSuffix(seat, seatSuffix)
	return top + sinceSuffix, top + newerSuffix
}

const notePrefix = "ashlar-since-"

// note is what is kept of a mirror, in the UUID of a device.
type note struct {
	event uint32 // count of events of the seat when the mirror was loaded
	old   uint64 // its old leg
}

// noteFor returns how the UUID of a seat's note begins. It differs between seats.
func noteFor(d *dm.Device) string { return notePrefix + d.UUID[max(0, len(d.UUID)-8):] }

// write writes the note of a seat. If it takes the place of another one, there is one of the two at any moment.
func (n note) write(d *dm.Device) error {
	name, newer := notesOf(d.Name)
	text := fmt.Sprintf("%s-%d-%s", noteFor(d), n.event, dm.Number(n.old))
	have, err := dm.Find(name)
	if err == nil && have == nil {
		if have, err = dm.Find(newer); err == nil && have != nil { // a crash came when its place was free
			err = dm.Rename(newer, name)
		}
	}
	switch {
	case err != nil || have != nil && have.UUID == text:
		return err
	case have == nil:
		return dm.Note(name, text)
	}
	if err := dm.Note(newer, text); err != nil {
		return err
	}
	if _, err := dm.Remove(name); err != nil {
		return err
	}
	return dm.Rename(newer, name)
}

// readNote returns the note of a mirror; false if there is none, as of a mirror that an older driver made.
func readNote(d *dm.Device) (n note, is bool, err error) {
	name, newer := notesOf(d.Name)
	for _, one := range []string{name, newer} {
		kept, err := dm.Find(one)
		if err != nil {
			return n, false, err
		}
		if kept == nil {
			continue
		}
		var major, minor uint32
		text, is := strings.CutPrefix(kept.UUID, noteFor(d))
		if !is {
			continue
		}
		if _, err := fmt.Sscanf(text, "-%d-%d:%d", &n.event, &major, &minor); err != nil {
			return n, false, fmt.Errorf("note %s says %q: %w", kept.Name, kept.UUID, err)
		}
		n.old = unix.Mkdev(major, minor)
		return n, true, nil
	}
	return n, false, nil
}

// forget removes the note of a seat that is no mirror any more.
func forget(seat string) error {
	name, newer := notesOf(seat)
	_, err := dm.Remove(name)
	_, failure := dm.Remove(newer)
	return errors.Join(err, failure)
}

// begins is how long load waits before it reads the count of events. Targets that are in sync from the start have their event in that time. The event of a
// slower one looks like a forgotten failure, and the mirror begins anew.
const begins = 50 * time.Millisecond

// load loads the table of a mirror into a held seat, for when it is resumed, and returns its note. After an error no table is loaded.
func load(d *dm.Device, old uint64, table []dm.Line) (note, error) {
	if err := dm.Load(d.Name, table); err != nil {
		return note{}, err
	}
	time.Sleep(begins)
	now, err := dm.Find(d.Name)
	if err == nil && now == nil {
		err = unix.ENXIO
	}
	if err != nil {
		return note{}, errors.Join(err, dm.Clear(d.Name))
	}
	return note{now.Event, old}, nil
}

// loadFirst is load for a seat that is no mirror yet. It writes the note.
func loadFirst(d *dm.Device, old uint64, table []dm.Line) error {
	n, err := load(d, old, table)
	if err == nil {
		if err = n.write(d); err != nil {
			err = errors.Join(err, dm.Clear(d.Name))
		}
	}
	return err
}

// part is a target of a mirror.
type part struct {
	dm.Line
	dm.Mirror // without legs: the part is over the old leg alone
}

// from returns the leg that a part is read from, and copied from.
func (p part) from(m mirror) uint64 {
	if len(p.Legs) == 0 {
		return m.Old
	}
	return p.Legs[0].Device
}

// failed reports whether a leg of the part has failed, as far as the kernel says.
func (p part) failed() bool { return len(p.Legs) > 0 && (p.Legs[0].Failed || p.Legs[1].Failed) }

func (p part) synced() bool { return p.Synced == p.Total }

// mirror is what the kernel tells of a seat that is a mirror.
type mirror struct {
	Mirrored
	over  *newLeg // what has its new leg in its table
	parts []part
}

// through returns the device that the table has for the new leg.
func (m mirror) through() uint64 {
	if m.over == nil {
		return m.New
	}
	return m.over.Number
}

// looks is how often mirrorOf reads a mirror that has events while it is read.
const looks = 10

// mirrorOf returns the mirror that a seat is; false if it is none.
func mirrorOf(name string) (m mirror, is bool, err error) {
	d, err := dm.Find(name)
	for range looks {
		if err != nil || d == nil || !d.Live {
			return m, false, err
		}
		m, is, err = readMirror(d)
		if err != nil || !is {
			return m, is, err
		}
		was := d.Event
		if d, err = dm.Find(name); err == nil && d != nil && d.Event == was {
			break
		}
	}
	return m, is, err
}

func readMirror(d *dm.Device) (m mirror, is bool, err error) {
	targets, err := dm.Status(d.Name)
	if err != nil {
		return m, false, err
	}
	if !slices.ContainsFunc(targets, func(l dm.Line) bool { return l.Kind == mirrorTarget }) {
		return m, false, nil
	}
	made, err := dm.Lines(d.Name)
	if err == nil && len(made) != len(targets) {
		err = fmt.Errorf("%w: device %s was given another table meanwhile", errdefs.ErrBusy, d.Name)
	}
	if err != nil {
		return m, false, err
	}
	since, known, err := readNote(d)
	if err != nil {
		return m, false, err
	}
	m.Old, m.Held = since.old, d.Suspended
	events := since.event
	for i, l := range targets {
		p := part{Line: l}
		if l.Kind == mirrorTarget {
			if p.Mirror, err = dm.ParseMirror(l.Text); err == nil && len(p.Legs) != 2 {
				err = fmt.Errorf("%w: device %s is a mirror of %d legs, which is none of ours", errdefs.ErrPrecondition, d.Name, len(p.Legs))
			}
			if err != nil {
				return m, false, err
			}
			if !known && m.Old == 0 {
				m.Old = p.Legs[0].Device
			}
			events += m.add(p, strings.HasPrefix(made[i].Text, copied))
		} else {
			m.Synced, m.Total = m.Synced+l.Length, m.Total+l.Length
		}
		m.parts = append(m.parts, p)
	}
	m.Forgot = !known || int32(d.Event-events) > 0
	over, err := findNewLeg(d.Name)
	if err == nil && over != nil && over.Number == m.New {
		m.over, m.New, m.NewFailed = over, over.leg, m.NewFailed || over.unsound()
	}
	return m, err == nil, err
}

// add adds the state of a part to m. It returns the events of the part that are explained: the end of its copy, and one for each failed leg. toCopy: the
// part was made to be copied.
func (m *mirror) add(p part, toCopy bool) (events uint32) {
	old, second := p.Legs[0], p.Legs[1]
	if old.Device != m.Old {
		m.Back, old, second = true, second, old
	}
	m.New = second.Device
	m.Total += p.Length
	if p.synced() {
		m.Synced += p.Length
	} else {
		m.Synced += p.Length / p.Total * p.Synced
	}
	m.OldFailed, m.NewFailed = m.OldFailed || old.Failed, m.NewFailed || second.Failed
	for _, happened := range []bool{toCopy && p.synced(), old.Failed, second.Failed} {
		if happened {
			events++
		}
	}
	return events
}

// lacks returns which parts of the old leg may lack data that the new leg has; nil if none. errdefs.ErrBusy while such data is copied back. It resumes a
// suspended mirror, which could not be read otherwise.
func (m mirror) lacks(d *dm.Device) (parts []bool, err error) {
	failed := m.OldFailed || m.NewFailed
	switch {
	case m.Back && !m.Forgot && !failed && m.Synced < m.Total:
		return nil, fmt.Errorf("%w: it is copied back to where it is at home: %d of %d bytes", errdefs.ErrBusy, m.Synced, m.Total)
	case !m.Forgot && !(m.Back && failed):
		return nil, nil
	}
	toRead := func(p part) bool { return m.Forgot && len(p.Legs) > 0 && p.synced() && !p.failed() } // others are read from their first leg
	if d.Suspended && slices.ContainsFunc(m.parts, toRead) {                                        // else it stays so: see ReleaseMirror
		if err := dm.Resume(d.Name, dm.NoScan); err != nil {
			return nil, err
		}
	}
	from, unread := make([]uint64, len(m.parts)), make([]error, len(m.parts))
	for i, p := range m.parts {
		if from[i] = p.from(m); toRead(p) {
			from[i], unread[i] = dm.ReadFrom(d, p.Start, p.Legs)
		}
	}
	now, is, err := mirrorOf(d.Name)
	if err != nil || !is || len(now.parts) != len(m.parts) {
		return nil, errors.Join(err, fmt.Errorf("%w: device %s was given another table meanwhile", errdefs.ErrBusy, d.Name))
	}
	parts = make([]bool, len(m.parts))
	for i, p := range now.parts {
		if p.failed() { // the part held what it could not write to both legs; or the leg that it was read from is gone with what only it had
			from[i], unread[i] = p.from(m), nil
		}
		parts[i] = from[i] != m.Old && !(!m.Forgot && p.synced() && !p.failed())
	}
	if err := errors.Join(unread...); err != nil || !slices.Contains(parts, true) {
		return nil, err
	}
	return parts, nil
}

// copyBack has the kernel copy some parts of a mirror from the new leg to the old one. All other parts are over the old leg alone from then on. After an
// error, or a crash, the mirror is as it was, or counts as one that has forgotten.
func (m mirror) copyBack(d *dm.Device, parts []bool) error {
	for _, step := range m.stepsBack(d, parts) {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// stepsBack returns the steps of copyBack.
func (m mirror) stepsBack(d *dm.Device, parts []bool) []func() error {
	var table []dm.Line
	for i, p := range m.parts {
		if parts[i] {
			table = append(table, mirrorLine(p.Start, p.Length, copied, m.through(), m.Old))
		} else {
			table = append(table, dm.Line{Start: p.Start, Length: p.Length, Kind: "linear", Text: fmt.Sprintf("%s %d", dm.Number(m.Old), p.Start/512)})
		}
	}
	var n note
	return []func() error{
		func() error {
			if err := m.over.flush(); err != nil { // all the same, nobody but that leg has it
				return m.over.setSound()
			}
			return nil
		},
		func() error { return dm.Hold(d.Name) },
		func() (err error) {
			if n, err = load(d, m.Old, table); err != nil {
				err = errors.Join(err, dm.Resume(d.Name, dm.NoScan))
			}
			return err
		},
		func() error { return dm.Resume(d.Name, dm.NoScan) },
		func() error { return n.write(d) },
	}
}
