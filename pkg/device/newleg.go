package device

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/ashlar-csi/ashlar/internal/fsync"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// While the kernel copies to the new leg of a mirror, it does not flush that: after a failed flush it never copies a region that is just being written to, and
// such a mirror never ends (docs/decisions/replicas.md, "Copies that the kernel never ends"). Nobody relies on the new leg yet. So a mirror is over a device
// over its new leg, which takes flushes for carried out until Stack.FlushMirror. A setting of the leg itself would be lost when its connection comes back.
//
// The device goes with the mirror. Its name is the top's, and newSuffix. With soundSuffix the leg is flushed as the old one is, and has all that was flushed
// before. One that takes flushes and has newSuffix was flushed in vain, or that was cut short: nobody knows what the leg lacks.
const (
	newSuffix   = "-new"
	soundSuffix = "-sound"
)

// newLeg is the device over the new leg of a mirror. A nil one is of a mirror that an older driver made: its new leg is flushed as the old one is.
type newLeg struct {
	*dm.Device
	leg   uint64 // number of the leg itself
	sound bool   // see soundSuffix
}

// makeNewLeg makes the device over a new leg. It stays until it is removed.
func makeNewLeg(seat *dm.Device, to uint64, size int64) (*newLeg, error) {
	left, err := findNewLeg(seat.Name) // by a crash
	if err == nil {
		err = left.remove()
	}
	if err != nil {
		return nil, err
	}
	name := strings.TrimSuffix(seat.Name, seatSuffix) + newSuffix
	pools, _, _ := strings.Cut(seat.UUID, movableInfix)
	d, err := lay(name, false, func() error { return dm.Make(name, movable(pools), dm.Linear(to, size)) })
	if err != nil {
		return nil, err
	}
	l := &newLeg{Device: d, leg: to}
	if dm.Flushed(d.Number) {
		if err := dm.SetFlushed(d.Number, false); err != nil {
			return nil, errors.Join(err, l.remove())
		}
	}
	return l, nil
}

// findNewLeg returns the device over the new leg of a seat; nil if there is none.
func findNewLeg(seat string) (*newLeg, error) {
	for _, suffix := range []string{newSuffix, soundSuffix} {
		name := strings.TrimSuffix(seat, seatSuffix) + suffix
		d, err := dm.Find(name)
		if err != nil {
			return nil, err
		}
		if d == nil {
			continue
		}
		below, err := dm.Below(name)
		if dm.Vanished(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		return &newLeg{d, append(below, 0)[0], suffix == soundSuffix}, nil // without a table it is over nothing: a crash came before that
	}
	return nil, nil
}

// unsound reports whether the leg was flushed in vain, or that was cut short.
func (l *newLeg) unsound() bool { return l != nil && !l.sound && dm.Flushed(l.Number) }

// flush has the leg flushed from now on, and what it has. After an error it is unsound.
func (l *newLeg) flush() error {
	if l == nil || l.sound {
		return nil
	}
	if l.unsound() {
		return fmt.Errorf("%w: device %s could not be flushed, or that was cut short", errdefs.ErrUnavailable, dm.Number(l.leg))
	}
	if err := dm.TakeFlushes(l.Name); err != nil {
		return err
	}
	if err := fsync.AndClose(dm.Open(l.Device, os.O_RDONLY)); err != nil {
		return fmt.Errorf("flush device %s: %w", dm.Number(l.leg), errdefs.FromErrno(err))
	}
	return l.setSound()
}

// setSound notes that the leg is flushed, as the old one is.
func (l *newLeg) setSound() error {
	return dm.Rename(l.Name, strings.TrimSuffix(l.Name, newSuffix)+soundSuffix)
}

// The kernel removes the device in the background, after the mirror has let go of it. That is looked for this often, with this pause.
const (
	removeTries = 100
	removePause = 10 * time.Millisecond
)

// remove removes the device, which no mirror is over any more, and waits until the leg is free.
func (l *newLeg) remove() error {
	if l == nil {
		return nil
	}
	if _, err := dm.RemoveNow(context.Background(), l.Name); err != nil {
		return err
	}
	for try := 0; try < removeTries && present(l.Number); try++ {
		time.Sleep(removePause)
	}
	return nil
}
