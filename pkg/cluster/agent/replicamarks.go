package agent

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/mirror"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// A leg that comes back gets what was written while it was away, and not the whole volume (docs/replication.md, docs/decisions/replicas.md). The node of each leg marks what is written to it. What may differ between two legs was
// written to one of them since they were equal last; that moment has a name, which is in the records of all legs, each with an era of its own marks that began before it.

const (
	// commonEvery is how often, in looks (Options.LookEvery), it is written down that all legs are equal, if anything was written since.
	commonEvery = 60
	// marksTime is how long the nodes of legs may take to tell their marks while nothing can be written.
	marksTime = 5 * time.Second
	// marksTries is how often a leg tries to join by marks that cannot be read, before it gets all.
	marksTries = 4
)

// missingRanges finds what a leg that joins may not have, and returns what the mirror asks for when nothing is under way (mirror.Join). legs are those in the mirror and the one that joins, by their names; the caller has their locks.
//
// Two legs that were equal once differ where one of them was written to since. So it takes the marks of the leg that joins, and of one of the others. Two that were made empty differ where one was ever written to.
func (m *mirrorReconciler) missingRanges(ctx context.Context, v *v1alpha1.ReplicatedVolume, joins openedLeg, legs map[string]volume.ID, size int64, tries int) (func(context.Context) ([]dm.Range, error), error) {
	all := func(context.Context) ([]dm.Range, error) { return []dm.Range{{Length: size}}, nil }
	listed := v.Leg(joins.name)
	known := joins.Sound > 0
	if known && listed == nil || listed != nil && joins.Sound < listed.Sound { // it is an older copy
		return all, nil
	}
	last, err := m.missingByMarks(ctx, joins, legs, known)
	if err != nil && !errors.Is(err, errdefs.ErrUnsupported) && tries < marksTries {
		return nil, err
	}
	getsAll := func(err error) {
		klog.FromContext(ctx).Info("What a leg lacks is not known; it gets all", "leg", joins.name, "tries", tries, "why", fmt.Sprint(err))
	}
	if last == nil || err != nil {
		getsAll(err)
		return all, nil
	}
	return func(ctx context.Context) ([]dm.Range, error) {
		differs, err := last(ctx)
		if err != nil && tries >= marksTries {
			getsAll(err)
			return all(ctx)
		}
		return differs, err
	}, nil
}

// missingByMarks is lacks of a leg that is no older copy; nil if no leg was equal to it last at one moment.
func (m *mirrorReconciler) missingByMarks(ctx context.Context, joins openedLeg, legs map[string]volume.ID, known bool) (func(context.Context) ([]dm.Range, error), error) {
	differs, err := m.marks(ctx, legs[joins.name], joins.Era)
	if err != nil {
		return nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(legs)) {
		if name == joins.name {
			continue
		}
		more, era, same, failure := m.marksOf(ctx, legs[name], joins, known)
		if failure != nil || !same {
			err = errors.Join(err, failure)
			continue
		}
		return func(ctx context.Context) ([]dm.Range, error) {
			ctx, cancel := context.WithTimeout(ctx, marksTime)
			defer cancel()
			last, err := m.marks(ctx, legs[name], era)
			return slices.Concat(differs, more, last), err
		}, nil
	}
	return nil, err
}

// marksOf are the marks of a leg that is in the mirror since it was equal to one that joins, or if that is not known since ever, and an era that begins before they are asked for; same: not if the two were not equal last at one moment.
func (m *mirrorReconciler) marksOf(ctx context.Context, id volume.ID, joins openedLeg, known bool) (ranges []dm.Range, era uint32, same bool, err error) {
	leg, err := m.volumes.Leg(ctx, id)
	if err != nil || known && leg.Common != joins.Common {
		return nil, 0, false, err
	}
	since := uint32(0)
	if known {
		since = leg.Era
	}
	if era, err = m.volumes.BeginEra(ctx, id); err == nil {
		err = mirror.Still(m.name) // what was under way is there, and so among what holds data
	}
	if err == nil {
		ranges, err = m.marks(ctx, id, since)
	}
	return ranges, era, true, err
}

func (m *mirrorReconciler) marks(ctx context.Context, id volume.ID, since uint32) (ranges []dm.Range, err error) {
	written, err := m.volumes.Marks(ctx, id, since)
	for _, e := range written {
		ranges = append(ranges, dm.Range(e))
	}
	return ranges, err
}

// commonMoment is what is known of the moments in which all legs were equal.
type commonMoment struct {
	next    time.Time // when the next one is to be written down
	written int64     // what had been written to the mirror by the last one, in bytes; -1: that does not matter
}

// isCommonDue reports whether it is to be written down that all legs are equal.
func (m *mirrorReconciler) isCommonDue(now *mirrorView) bool {
	current := now.v.Current()
	if len(current) != len(now.v.Spec.Legs) || len(current) != len(now.s.Legs) || time.Now().Before(m.common.next) {
		return false
	}
	d, err := dm.Find(m.name)
	if err != nil || d == nil {
		return false
	}
	written, err := d.Written()
	if err != nil || written == m.common.written {
		return false
	}
	m.common = commonMoment{time.Now().Add(commonEvery * m.options.LookEvery), written}
	return true
}

// recordCommon writes down a moment in which all legs were equal, durably. What differs later was written since.
func (m *mirrorReconciler) recordCommon(ctx context.Context, now *mirrorView) error {
	ctx, cancel := context.WithTimeout(ctx, openTime)
	defer cancel()
	return m.withLocks([]string{keylock.Volume(m.ref.Key)}, func() error {
		return m.withLegs(ctx, now.v, now.names(), func(legs map[string]volume.ID) error { return m.writeCommon(ctx, now, legs) })
	})
}

func (m *mirrorReconciler) writeCommon(ctx context.Context, now *mirrorView, legs map[string]volume.ID) (err error) {
	eras := map[volume.ID]uint32{}
	for _, id := range legs {
		switch eras[id], err = m.volumes.BeginEra(ctx, id); {
		case errors.Is(err, errdefs.ErrUnsupported):
			eras[id] = volume.NoEra
		case err != nil:
			return err
		}
	}
	if err := mirror.Still(m.name); err != nil { // what was marked before the eras is on all legs
		return err
	}
	for _, l := range now.s.Legs {
		if err := mirror.Flush(l.Device); err != nil {
			return err
		}
	}
	for name, id := range legs {
		if err := m.checkNotRestarted(ctx, name, id); err != nil {
			return err
		}
	}
	if err := m.checkUnchanged(now); err != nil {
		return err
	}
	name := rand.Text()
	for _, id := range legs {
		if err := m.volumes.ChangeLeg(ctx, id, func(s *volume.LegState, _ map[string]string) error {
			if s.Opened != m.generation || s.Sound != m.generation {
				return fmt.Errorf("%w: leg %s was opened by claim %d, not by %d", errdefs.ErrPrecondition, id, s.Opened, m.generation)
			}
			s.Common, s.Era = name, eras[id]
			return nil
		}); err != nil {
			return err // the others have another name for it, so that none is taken for equal to them
		}
	}
	return nil
}

// errMirrorChanged: what was found out of a mirror is not so any more. It is found out anew.
var errMirrorChanged = fmt.Errorf("%w: the mirror is another one by now", errdefs.ErrUnavailable)

// checkUnchanged is errOtherMirror if anything has happened to the mirror since a look at it: other legs are in it, or one has failed, which the kernel may have forgotten.
func (m *mirrorReconciler) checkUnchanged(now *mirrorView) error {
	s, err := mirror.Look(m.name)
	if err == nil && (s.Event != now.s.Event || s.Held || s.Joining != nil || len(s.Failed()) > 0 || !slices.EqualFunc(s.Legs, now.s.Legs, func(a, b mirror.Leg) bool { return a.Device == b.Device })) {
		err = errMirrorChanged
	}
	return err
}

// checkNotRestarted makes sure that the machine of a leg has not started anew since it was opened: what it said of a flush may not be so (docs/reliability.md).
func (m *mirrorReconciler) checkNotRestarted(ctx context.Context, name string, id volume.ID) error {
	leg, err := m.volumes.Leg(ctx, id)
	if err == nil && leg.LostPower() {
		err = fmt.Errorf("%w: the machine of leg %s has started anew", errdefs.ErrUnavailable, name)
	}
	return err
}
