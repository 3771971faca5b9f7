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

// A volume with several legs (docs/replication.md) is used through a mirror over them. A leg is a volume of its own, of this node or of another one. This
// file is what the consumer needs of a leg, wherever that is: its device and its record. What the volume carries (format, header, target) is in the
// records of the legs, as in the record of any volume.

// LegState is the state of a leg in its record. Only the consumer, which has the mirror, writes it. Generations are those of the claims of the volume, not
// of the leg. A list is one of the current legs, in the status of the volume's object; lists are counted.
type LegState struct {
	Sound  int64  // generation of the last claim by which it was current; 0: none yet
	Opened int64  // generation of the last claim that it was opened for; 0: none yet
	Closed bool   // it was closed after that, when it was equal to all legs that were current
	Boot   string // boot ID of its machine when it was opened
	Common string // the name of the last common moment: all legs were equal, durably; empty: the moment in which they were made
	Era    uint32 // an era of its marks that began before Common, so it has all writes since then; 0: before the first write
	List   int64  // the last list that has this leg and that it was told is written; 0: none
	Listed int    // how many legs List has
	Due    int64  // a later list that was about to be written: it may never have been, or not with this leg; 0: none
	After  int64  // the last list before Due, as far as was known; less than Due
	More   bool   // Due has legs that After has not
}

// Knows returns the last list, with this leg or without it, that the leg was told is written.
func (s LegState) Knows() int64 { return max(s.List, s.After) }

// NoEra is an era that no marks have: since then all of a leg counts as written, also if marks are begun later.
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

// legStateOf returns the state in the record of a leg. A leg that was never opened is closed. ErrDataLoss if the label cannot be read.
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

// Leg is a leg as its own node knows it.
type Leg struct {
	LegState
	Of   string          // the key of its volume
	Now  string          // boot ID of its machine now; empty: not known
	Data blockdev.Record // its record, as its consumer may see it
}

// LostPower reports whether a leg may lack writes that it acknowledged and had not flushed: its machine was restarted while it was open, or its disk could not
// be flushed (noteLoss).
func (l Leg) LostPower() bool { return !l.Closed && (l.Boot == "" || l.Boot != l.Now) }

// noteLoss writes into the record of an object that its disk could not be flushed, if it is a leg that is not closed. A disk tells only once what it could not
// flush.
func noteLoss(ctx context.Context, pool blockdev.Pool, ref blockdev.Ref) error {
	_, err := pool.SetLabels(ctx, ref, func(labels map[string]string) error {
		s, err := legStateOf(blockdev.Record{Ref: ref, Labels: labels})
		if err != nil || s.Closed {
			return err
		}
		s.Boot = ""
		setLabel(labels, labelLeg, s.label())
		return nil
	})
	return err
}

// leg returns a leg by its record. ErrNotFound while it is being copied; ErrUnavailable if its node does not answer.
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

// Lists tells which legs of a volume are current.
type Lists interface {
	// ListOf returns the list of current legs of a volume. of and leg are the keys of the volume and of the leg. ErrNotCurrent if the leg is not on that list,
	// ErrUnavailable if that is not known now.
	ListOf(ctx context.Context, of, leg string) (List, error)
}

// List is what the object of a volume says of its current legs, and of one of these.
type List struct {
	Number int64 // another one whenever the list changes
	Legs   int   // how many it has
	Closed bool  // all of them were closed, and none was opened since
	Sound  int64 // generation of the last claim by which that one was current; 0: none yet, or a person has put it on the list
}

// IsOlder reports whether a leg on a list is an older copy, by the state in its record: that knows nothing of the list, or of the claim by which the leg was
// current last.
func (s LegState) IsOlder(on List) bool {
	return s.Sound < on.Sound || on.Sound > 0 && s.Knows() < on.Number && s.Due != on.Number
}

// ErrNotCurrent is the ErrUnavailable of a copy of a leg that does not have all that was written to its volume, or may not. Another leg has it.
var ErrNotCurrent = fmt.Errorf("%w: it does not have all that was written to its volume", errdefs.ErrUnavailable)

// SetLists sets the Lists. It has to be called before anything is copied. Without it a leg is copied whether it is current or not.
func (l *Local) SetLists(x Lists) { l.lists = x }

// attachLeg attaches a leg, with nothing of its volume over it. ErrInUse while its device is open: whoever used the volume before it had several legs
// would write past the mirror.
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

// Leg returns a leg. If the leg is not known here, it asks whether there is a claim of it for this node. The caller has the lock of the leg, as for all
// calls for a leg but ChangeLeg.
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

// isUnknown reports whether err says that this node's own pools do not have a leg. Another node may have it, by a claim that this node has not heard of
// yet.
func (e *Everywhere) isUnknown(at *Local, err error) bool {
	return at == e.Local && (errors.Is(err, errdefs.ErrNotFound) || errors.Is(err, errdefs.ErrUnavailable))
}

// isNews returns nil if a leg that is unknown here is claimed for this node. Without a claim it returns unknown; an error of its own if that cannot be
// found out.
func (e *Everywhere) isNews(ctx context.Context, id ID, unknown error) error {
	if there, err := e.elsewhere.Find(ctx, id); err != nil || !there {
		return cmp.Or(err, unknown)
	}
	return nil
}

// OpenLeg attaches a leg to this node, with nothing of its volume over it: from its own pool, or over the network. Nobody else has it from then on. A
// device of this node's own goes with its last user, one of another node stays until CloseLeg. ErrInUse while somebody has it open; ErrUnavailable if
// another node has the leg, and it is not claimed for this node yet.
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

// LegDevices returns the devices of a leg on this node. It needs no record.
func (e *Everywhere) LegDevices(ctx context.Context, id ID) ([]blockdev.Device, error) {
	return e.plain(ctx, id).Attached(ctx, id)
}

// CloseLeg detaches a leg from this node. Another node's leg is given back to that node.
func (e *Everywhere) CloseLeg(ctx context.Context, id ID) error {
	return e.plain(ctx, id).Detach(ctx, id)
}

// GrowLeg brings the devices of a leg to the size of the leg.
func (e *Everywhere) GrowLeg(ctx context.Context, id ID) error {
	_, err := e.plain(ctx, id).Grow(ctx, id, nil)
	return err
}

// ChangeLeg changes the state of a leg and the labels of what its volume carries, durably. Of the labels change may alter userLabels alone. Unlike all
// other calls it needs no lock: the volume's writes may wait for this change, and the holder of the lock for those writes.
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

// CarryLabels copies the labels of what the volume carries from one leg to another; not the state of the leg.
func CarryLabels(from, to map[string]string) {
	for _, label := range userLabels {
		if label != labelLeg {
			setLabel(to, label, from[label])
		}
	}
}

// Keeps returns how many bytes a leg has for a volume of some size: that and the overhead of encryption.
func (l Leg) Keeps(size int64) int64 { return size + schemeOf(l.Data).Overhead() }

// RecordOf returns the record of the volume that a leg is of, made from that of the leg.
func (l Leg) RecordOf(ref blockdev.Ref, name string, size int64) blockdev.Record {
	r := l.Data
	r.Ref, r.Name, r.Size = ref, name, l.Keeps(size)
	r.Labels = maps.Clone(l.Data.Labels)
	for _, label := range legsOwn {
		delete(r.Labels, label)
	}
	return r
}

// legsOwn are the labels of a leg that say nothing of its volume. labelAccess is one: that a volume with legs can be used on any node does not depend on
// this leg.
var legsOwn = []string{labelReplicaOf, labelLeg, labelBoot, labelPool, labelAccess, labelTimeout}
