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

// A leg that comes back gets what was written while it was away, and not the whole volume (docs/replication.md, "Resynchronisation"). The node of each leg
// marks what is written to it. Two legs can differ only where one of them was written to since they were equal. Such a common moment has a name, which is in
// the records of all legs; beside it each record has the number of an era of the leg's own marks that began before the moment.

const (
	// commonEvery is how often, in looks (Options.LookEvery), a common moment is recorded, if anything was written since the last one.
	commonEvery = 60
	// marksTime is how long the nodes of legs may take to tell their marks while nothing can be written.
	marksTime = 5 * time.Second
	// marksTries is how often a leg tries to join by marks that cannot be read, before it gets all.
	marksTries = 4
)

// missingRanges reads what a leg that joins may lack, and returns a function that completes this while all writes are held (mirror.Join). legs are the IDs of
// those in the mirror and of the one that joins, by name; the caller has their locks.
//
// Two legs that were equal differ only where one of them was written to since: that is in the marks of the leg that joins, and of one of the others. Two that
// were made empty differ only where one was ever written to.
func (m *mirrorReconciler) missingRanges(ctx context.Context, v *v1alpha1.ReplicatedVolume, joins openedLeg, legs map[string]volume.ID, size int64, tries int) (func(context.Context) ([]dm.Range, error), error) {
	all := func(context.Context) ([]dm.Range, error) { return []dm.Range{{Length: size}}, nil }
	listed := v.Leg(joins.name)
	known := joins.Sound > 0
	if known && listed == nil || listed != nil && joins.Sound < listed.Sound { // an older copy
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

// missingByMarks is missingRanges by the marks; nil if no leg of the mirror has the last common moment of the leg that joins.
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

// marksOf returns the marks of a leg of the mirror since its last common moment with the one that joins, or since ever if that was never current (known is
// false). era begins before the marks are read, so what is written later is in the marks since era. same is false if the two have no last common moment.
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
		err = mirror.Still(ctx, m.name) // I/O that was under way is done, and so among what holds data
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

// commonMoment is what this process remembers of the common moments of the legs.
type commonMoment struct {
	next    time.Time // when the next one may be recorded
	written int64     // bytes written to the mirror by the last one; -1: the next one is recorded in any case
}

// isCommonDue reports whether a common moment is to be recorded now: all legs are current and in the mirror, and something was written since the last one. A
// single leg has no such moment, and is not flushed: the driver would be told what its disk has lost, and the users would not.
func (m *mirrorReconciler) isCommonDue(now *mirrorView) bool {
	current := now.v.Current()
	if len(current) < 2 || len(current) != len(now.v.Spec.Legs) || len(current) != len(now.s.Legs) || time.Now().Before(m.common.next) {
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

// recordCommon records a common moment in the records of all legs (docs/replication.md): what differs later was written since.
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
	if err := mirror.Still(ctx, m.name); err != nil { // what was marked before these eras is on all legs then
		return err
	}
	if err := mirror.FlushAll(ctx, m.name); err != nil {
		return err
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
			return err // the records have different names then, and no leg is taken for equal to those
		}
	}
	return nil
}

// errMirrorChanged: the mirror has changed since it was looked at. The caller starts over.
var errMirrorChanged = fmt.Errorf("%w: the mirror is another one by now", errdefs.ErrUnavailable)

// checkUnchanged returns errMirrorChanged if anything has happened to the mirror since now: it has other legs, or one has failed, which the kernel may
// have forgotten, or it has another size.
func (m *mirrorReconciler) checkUnchanged(now *mirrorView) error {
	s, err := mirror.Look(m.name)
	if err == nil && (s.Event != now.s.Event || s.Size != now.s.Size || s.Held || s.Joining != nil || len(s.Failed()) > 0 || !slices.EqualFunc(s.Legs, now.s.Legs, func(a, b mirror.Leg) bool { return a.Device == b.Device })) {
		err = errMirrorChanged
	}
	return err
}

// checkNotRestarted returns ErrUnavailable if the machine of a leg was restarted since the leg was opened: what it had acknowledged and flushed may be
// lost (docs/reliability.md).
func (m *mirrorReconciler) checkNotRestarted(ctx context.Context, name string, id volume.ID) error {
	leg, err := m.volumes.Leg(ctx, id)
	if err == nil && leg.LostPower() {
		err = fmt.Errorf("%w: the machine of leg %s has started anew", errdefs.ErrUnavailable, name)
	}
	return err
}
