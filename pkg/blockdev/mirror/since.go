package mirror

import (
	"fmt"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// The kernel can forget that a leg has failed a flush (Watch). What tells is the count of events of the device over the current legs: a table over equal legs
// has at most one event of its own, soon after it was made, and a failure that is forgotten has two more. So the count at the moment in which the table takes
// effect is kept in a note (dm.Note), which outlives the driver: a driver that was away when it happened is told as one that was there.

// sinceSuffix ends the name of a device's note; sincePrefix begins the note, the UUID of that.
const (
	sinceSuffix = "-since"
	sincePrefix = "ashlar-mirror-since-"
)

// noteEvent notes the count of events of a device, whose next table is about to take effect. The device is suspended, or is yet to be made.
func noteEvent(device string) error {
	d, err := dm.Find(device)
	if err != nil {
		return err
	}
	event := uint32(0)
	if d != nil {
		event = d.Event
	}
	return dm.Note(device+sinceSuffix, fmt.Sprintf("%s%d-%s", sincePrefix, event, device))
}

// makeNoted makes a device, as dm.Make does, and its note before that.
func makeNoted(name, uuid string, table []dm.Line) error {
	if err := noteEvent(name); err != nil {
		return err
	}
	return dm.Make(name, uuid, table)
}

// notedEvent returns the count that is noted of a device; false if none is, as of a mirror that an older driver made.
func notedEvent(device string) (event uint32, is bool, err error) {
	d, err := dm.Find(device + sinceSuffix)
	if err != nil || d == nil {
		return 0, false, err
	}
	if _, err := fmt.Sscanf(d.UUID, sincePrefix+"%d-", &event); err != nil {
		return 0, false, fmt.Errorf("note %s says %q: %w", d.Name, d.UUID, err)
	}
	return event, true, nil
}

// findForgotten finds out whether the kernel has forgotten that a leg has failed; d is the device over the current legs.
func (s *State) findForgotten(d *dm.Device) error {
	if s.Held || s.remembers || len(s.Legs) < 2 || len(s.Failed()) > 0 {
		return nil
	}
	since, is, err := notedEvent(d.Name)
	s.Forgot = is && int32(d.Event-since) > 1
	return err
}

// errForgot is the error of a change that would hide that a leg has failed. Watch has the mirror held.
var errForgot = fmt.Errorf("%w: a leg has failed a flush, and the kernel has forgotten which", errdefs.ErrUnavailable)
