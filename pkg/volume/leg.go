package volume

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"strconv"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/device"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// A volume with several legs (docs/replication.md) is used through a mirror over them. A leg is a volume of its own, of this node or of another one. What follows is what the node with the mirror needs of a leg,
// wherever that is: its device, and what its record says of it. What the volume carries is in the records of the legs as in that of any volume.

// LegState is what the record of a leg says of it. The node that has the mirror alone writes it. Generations are those of claims of the volume, not of the leg.
type LegState struct {
	Sound  int64  // by which it was current last; 0: none yet
	Opened int64  // for which it was opened last; 0: none yet
	Closed bool   // since then it was closed, equal to all legs that were current
	Boot   string // the word of the start of its machine in which it was opened
	Common string // the name of a moment in which all legs were equal, durably; empty: that in which they were made
	Era    uint32 // one of its marks, which began before that moment: what was written since then is since that. 0: whatever was ever written
	List   int64  // the count of the last list of current legs that has it, and was written, as far as it was told; 0: none
	Listed int    // how many legs that list has
	Due    int64  // the count of a later one, which was about to be written, and perhaps never was, or without it; 0: none
	After  int64  // the count of the one that was the last then, as far as was known; less than Due
	More   bool   // that one had not all legs of the one that was due
}

// Knows is the count of the last list of current legs that was written for sure, with this leg or without it, as far as it was told.
func (s LegState) Knows() int64 { return max(s.List, s.After) }

// NoEra is an era of no marks: all of a leg counts as written since, also when marks are kept later.
const NoEra = 1

var legPattern = regexp.MustCompile(`^([0-9]{1,19}):([0-9]{1,19}):(open|closed):([0-9a-f-]{0,36})(?::([0-9A-Z]{1,32}):([0-9]{1,10}))?(?::list\.([0-9]{1,19})\.([0-9]))?(?::(due|more)\.([0-9]{1,19})(?:\.([0-9]{1,19}))?)?$`)

func (s LegState) label() string {
	word := "open"
	if s.Closed {
		word = "closed"
	}
	label := fmt.Sprintf("%d:%d:%s:%s", s.Sound, s.Opened, word, s.Boot)
	if s.Common != "" {
		label += fmt.Sprintf(":%s:%d", s.Common, s.Era)
	}
	if s.List > 0 {
		label += fmt.Sprintf(":list.%d.%d", s.List, s.Listed)
	}
	if s.Due > 0 {
		word = "due"
		if s.More {
			word = "more"
		}
		label += fmt.Sprintf(":%s.%d", word, s.Due)
		if s.After != s.Due-1 {
			label += fmt.Sprintf(".%d", s.After)
		}
	}
	return label
}

// legStateOf is what a record says; of a leg that nobody has opened yet, that it is closed.
func legStateOf(r blockdev.Record) (s LegState, err error) {
	label := r.Labels[labelLeg]
	if label == "" {
		return LegState{Closed: true}, nil
	}
	parts := legPattern.FindStringSubmatch(label)
	if parts != nil {
		s.Closed, s.Boot, s.Common, s.More = parts[3] == "closed", parts[4], parts[5], parts[9] == "more"
		var failures [7]error
		s.Sound, failures[0] = strconv.ParseInt(parts[1], 10, 64)
		s.Opened, failures[1] = strconv.ParseInt(parts[2], 10, 64)
		var era uint64
		era, failures[2] = strconv.ParseUint(cmp.Or(parts[6], "0"), 10, 32)
		s.List, failures[3] = strconv.ParseInt(cmp.Or(parts[7], "0"), 10, 64)
		s.Listed, failures[4] = strconv.Atoi(cmp.Or(parts[8], "0"))
		s.Due, failures[5] = strconv.ParseInt(cmp.Or(parts[10], "0"), 10, 64)
		s.After, failures[6] = strconv.ParseInt(cmp.Or(parts[11], strconv.FormatInt(max(0, s.Due-1), 10)), 10, 64)
		s.Era, err = uint32(era), errors.Join(failures[:]...)
	}
	if parts == nil || err != nil {
		return LegState{}, fmt.Errorf("%w: the record of the leg %s says of it %q, which is not understood; another version of the driver may have written it", errdefs.ErrDataLoss, r.Ref, label)
	}
	return s, nil
}

// Leg is a leg, as the node has it that keeps its bytes.
type Leg struct {
	LegState
	Of   string          // the key of its volume
	Now  string          // the word of this start of its machine; empty: not known
	Data blockdev.Record // as its user may see it
}

// LostPower reports whether a leg may lack what was written to it, acknowledged, and not flushed.
func (l Leg) LostPower() bool { return !l.Closed && (l.Boot == "" || l.Boot != l.Now) }

// leg reads the record of a leg.
func (l *Local) leg(ctx context.Context, id ID) (leg Leg, err error) {
	pool, ref, err := l.object(id, blockdev.Volume)
	if err != nil {
		return Leg{}, err
	}
	if leg.Data, err = pool.Get(ctx, ref); err != nil {
		return Leg{}, err
	}
	if unfinished(leg.Data) {
		return Leg{}, fmt.Errorf("%w: leg %s is being copied", errdefs.ErrNotFound, id)
	}
	if leg.Data.Stale {
		return Leg{}, fmt.Errorf("%w: the node that has leg %s does not answer", errdefs.ErrUnavailable, id)
	}
	leg.Of, leg.Now = leg.Data.Labels[labelReplicaOf], leg.Data.Labels[labelBoot]
	if how, _ := l.exporting(); leg.Now == "" {
		leg.Now = how.Boot
	}
	leg.LegState, err = legStateOf(leg.Data)
	leg.Data = shown(leg.Data)
	return leg, err
}

// attachLeg makes a leg a device of this node, with nothing of its volume over it. ErrInUse while somebody has it open, as who had the volume before there were others may: he would write past them.
func (l *Local) attachLeg(ctx context.Context, id ID) (blockdev.Device, error) {
	if err := l.makeOurs(ctx, id); err != nil {
		return blockdev.Device{}, err
	}
	stack, err := l.stack(id)
	if err != nil {
		return blockdev.Device{}, err
	}
	if open, err := stack.Open(); err != nil || open {
		return blockdev.Device{}, cmp.Or(err, fmt.Errorf("%w: the device of leg %s is held open on node %s by a process, or by a device over it; end the pod that used its volume", errdefs.ErrInUse, id, l.node))
	}
	return l.layLeg(ctx, id, true, stack, device.Options{Seat: true})
}

// Leg returns a leg as its node has it, also if its claim is news. The caller has the lock of the leg, as for all calls for one.
func (e *Everywhere) Leg(ctx context.Context, id ID) (Leg, error) {
	at := e.plain(ctx, id)
	leg, err := at.leg(ctx, id)
	if !e.isUnknown(at, err) {
		return leg, err
	}
	if err := e.isNews(ctx, id, err); err != nil {
		return Leg{}, err
	}
	return e.others.leg(ctx, id)
}

// isUnknown reports whether this node was asked for a leg that it has not, as far as that is known: its claim for this node may be news.
func (e *Everywhere) isUnknown(at *Local, err error) bool {
	return at == e.Local && (errors.Is(err, errdefs.ErrNotFound) || errors.Is(err, errdefs.ErrUnavailable))
}

// isNews waits until the claim of a leg that is unknown is heard of; without one it returns why that is unknown, or cannot be found out.
func (e *Everywhere) isNews(ctx context.Context, id ID, unknown error) error {
	if there, err := e.elsewhere.Find(ctx, id); err != nil || !there {
		return cmp.Or(err, unknown)
	}
	return nil
}

// OpenLeg makes a leg a device of this node, as Attach does, with nothing of its volume over it: on the node that has it, or over the network. Whoever had it before has it no more. It goes with its last user; on another node it stays until CloseLeg.
// ErrInUse while somebody has it open; ErrUnavailable if it is another node's, and not claimed for this one yet.
func (e *Everywhere) OpenLeg(ctx context.Context, id ID) (blockdev.Device, error) {
	at := e.plain(ctx, id)
	if _, err := at.Record(ctx, id); e.isUnknown(at, err) {
		if err := e.isNews(ctx, id, err); err != nil {
			return blockdev.Device{}, errdefs.Recast(errdefs.ErrUnavailable, err, "leg %s is not claimed for node %s yet", id, e.Node())
		}
		at = e.others
	}
	return at.attachLeg(ctx, id)
}

// LegDevices are the devices of a leg on this node; it needs no record.
func (e *Everywhere) LegDevices(ctx context.Context, id ID) ([]blockdev.Device, error) {
	return e.plain(ctx, id).Attached(ctx, id)
}

// CloseLeg takes the devices of a leg away, and gives it back to its node.
func (e *Everywhere) CloseLeg(ctx context.Context, id ID) error {
	return e.plain(ctx, id).Detach(ctx, id)
}

// GrowLeg brings the devices of a leg to its size.
func (e *Everywhere) GrowLeg(ctx context.Context, id ID) error {
	_, err := e.plain(ctx, id).Grow(ctx, id, nil)
	return err
}

// ChangeLeg changes what the record of a leg says, durably: of the leg, and of what its volume carries; labels that are no user's stay. Of all calls it alone needs no lock: what has to be written down before the writes to a volume go on must not wait for
// who has its lock, and waits for such a write.
func (e *Everywhere) ChangeLeg(ctx context.Context, id ID, change func(s *LegState, labels map[string]string) error) error {
	return e.plain(ctx, id).setLabels(ctx, id, func(labels map[string]string) error {
		s, err := legStateOf(blockdev.Record{Ref: id.ref(), Labels: labels})
		if err != nil {
			return err
		}
		if err := change(&s, labels); err != nil {
			return err
		}
		setLabel(labels, labelLeg, s.label())
		return nil
	})
}

// CarryLabels gives the labels of one leg what those of another one say of what their volume carries.
func CarryLabels(from, to map[string]string) {
	for _, label := range userLabels {
		if label != labelLeg {
			setLabel(to, label, from[label])
		}
	}
}

// Keeps is how many bytes a leg keeps of a volume of a size, which is without what encryption keeps beside it.
func (l Leg) Keeps(size int64) int64 { return size + schemeOf(l.Data).Overhead() }

// RecordOf is the record of the volume of a leg, by that of the leg.
func (l Leg) RecordOf(ref blockdev.Ref, name string, size int64) blockdev.Record {
	r := l.Data
	r.Ref, r.Name, r.Size = ref, name, l.Keeps(size)
	r.Labels = maps.Clone(l.Data.Labels)
	for _, label := range legsOwn {
		delete(r.Labels, label)
	}
	return r
}

// legsOwn are labels of a leg that say nothing of its volume. That the volume can be used on any node, needs nothing of this one.
var legsOwn = []string{labelReplicaOf, labelLeg, labelBoot, labelPool, labelAccess, labelTimeout}
