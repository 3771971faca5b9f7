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

// lacks finds what a leg that joins may not have, and returns what the mirror asks for when nothing is under way (mirror.Join). legs are those in the mirror and the one that joins, by their names; the caller has their locks.
//
// Two legs that were equal once differ where one of them was written to since. So it takes the marks of the leg that joins, and of one of the others. Two that were made empty differ where one was ever written to.
func (t *tender) lacks(ctx context.Context, v *v1alpha1.ReplicatedVolume, joins openedLeg, legs map[string]volume.ID, size int64, tries int) (func(context.Context) ([]dm.Range, error), error) {
	all := func(context.Context) ([]dm.Range, error) { return []dm.Range{{Length: size}}, nil }
	listed := v.Leg(joins.name)
	known := joins.Sound > 0
	if known && listed == nil || listed != nil && joins.Sound < listed.Sound { // it is an older copy
		return all, nil
	}
	last, err := t.byMarks(ctx, joins, legs, known)
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

// byMarks is lacks of a leg that is no older copy; nil if no leg was equal to it last at one moment.
func (t *tender) byMarks(ctx context.Context, joins openedLeg, legs map[string]volume.ID, known bool) (func(context.Context) ([]dm.Range, error), error) {
	differs, err := t.marks(ctx, legs[joins.name], joins.Era)
	if err != nil {
		return nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(legs)) {
		if name == joins.name {
			continue
		}
		more, era, same, failure := t.marksOf(ctx, legs[name], joins, known)
		if failure != nil || !same {
			err = errors.Join(err, failure)
			continue
		}
		return func(ctx context.Context) ([]dm.Range, error) {
			ctx, cancel := context.WithTimeout(ctx, marksTime)
			defer cancel()
			last, err := t.marks(ctx, legs[name], era)
			return slices.Concat(differs, more, last), err
		}, nil
	}
	return nil, err
}

// marksOf are the marks of a leg that is in the mirror since it was equal to one that joins, or if that is not known since ever, and an era that begins before they are asked for; same: not if the two were not equal last at one moment.
func (t *tender) marksOf(ctx context.Context, id volume.ID, joins openedLeg, known bool) (ranges []dm.Range, era uint32, same bool, err error) {
	leg, err := t.volumes.Leg(ctx, id)
	if err != nil || known && leg.Common != joins.Common {
		return nil, 0, false, err
	}
	since := uint32(0)
	if known {
		since = leg.Era
	}
	if era, err = t.volumes.BeginEra(ctx, id); err == nil {
		err = mirror.Still(t.name) // what was under way is there, and so among what holds data
	}
	if err == nil {
		ranges, err = t.marks(ctx, id, since)
	}
	return ranges, era, true, err
}

func (t *tender) marks(ctx context.Context, id volume.ID, since uint32) (ranges []dm.Range, err error) {
	written, err := t.volumes.Marks(ctx, id, since)
	for _, e := range written {
		ranges = append(ranges, dm.Range(e))
	}
	return ranges, err
}

// equal is what is known of the moments in which all legs were equal.
type equal struct {
	next    time.Time // when the next one is to be written down
	written int64     // what had been written to the mirror by the last one, in bytes; -1: that does not matter
}

// due reports whether it is to be written down that all legs are equal.
func (t *tender) due(now *view) bool {
	current := now.v.Current()
	if len(current) != len(now.v.Spec.Legs) || len(current) != len(now.s.Legs) || time.Now().Before(t.equal.next) {
		return false
	}
	d, err := dm.Find(t.name)
	if err != nil || d == nil {
		return false
	}
	written, err := d.Written()
	if err != nil || written == t.equal.written {
		return false
	}
	t.equal = equal{time.Now().Add(commonEvery * t.options.LookEvery), written}
	return true
}

// common writes down a moment in which all legs were equal, durably. What differs later was written since.
func (t *tender) common(ctx context.Context, now *view) error {
	ctx, cancel := context.WithTimeout(ctx, openTime)
	defer cancel()
	return t.withLocks([]string{keylock.Volume(t.ref.Key)}, func() error {
		return t.withLegs(ctx, now.v, now.in(), func(legs map[string]volume.ID) error { return t.commonOf(ctx, now, legs) })
	})
}

func (t *tender) commonOf(ctx context.Context, now *view, legs map[string]volume.ID) (err error) {
	eras := map[volume.ID]uint32{}
	for _, id := range legs {
		switch eras[id], err = t.volumes.BeginEra(ctx, id); {
		case errors.Is(err, errdefs.ErrUnsupported):
			eras[id] = volume.NoEra
		case err != nil:
			return err
		}
	}
	if err := mirror.Still(t.name); err != nil { // what was marked before the eras is on all legs
		return err
	}
	for _, l := range now.s.Legs {
		if err := mirror.Flush(l.Device); err != nil {
			return err
		}
	}
	for name, id := range legs {
		if err := t.kept(ctx, name, id); err != nil {
			return err
		}
	}
	if err := t.unchanged(now); err != nil {
		return err
	}
	name := rand.Text()
	for _, id := range legs {
		if err := t.volumes.ChangeLeg(ctx, id, func(s *volume.LegState, _ map[string]string) error {
			if s.Opened != t.generation || s.Sound != t.generation {
				return fmt.Errorf("%w: leg %s was opened by claim %d, not by %d", errdefs.ErrPrecondition, id, s.Opened, t.generation)
			}
			s.Common, s.Era = name, eras[id]
			return nil
		}); err != nil {
			return err // the others have another name for it, so that none is taken for equal to them
		}
	}
	return nil
}

// errOtherMirror: what was found out of a mirror is not so any more. It is found out anew.
var errOtherMirror = fmt.Errorf("%w: the mirror is another one by now", errdefs.ErrUnavailable)

// unchanged is errOtherMirror if anything has happened to the mirror since a look at it: other legs are in it, or one has failed, which the kernel may have forgotten.
func (t *tender) unchanged(now *view) error {
	s, err := mirror.Look(t.name)
	if err == nil && (s.Event != now.s.Event || s.Held || s.Joining != nil || len(s.Failed()) > 0 || !slices.EqualFunc(s.Legs, now.s.Legs, func(a, b mirror.Leg) bool { return a.Device == b.Device })) {
		err = errOtherMirror
	}
	return err
}

// kept makes sure that the machine of a leg has not started anew since it was opened: what it said of a flush may not be so (docs/reliability.md).
func (t *tender) kept(ctx context.Context, name string, id volume.ID) error {
	leg, err := t.volumes.Leg(ctx, id)
	if err == nil && leg.LostPower() {
		err = fmt.Errorf("%w: the machine of leg %s has started anew", errdefs.ErrUnavailable, name)
	}
	return err
}
