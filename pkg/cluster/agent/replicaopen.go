package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/replicapool"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// A node that is to use a volume with several legs opens those that are current, chooses which of them have everything, and says so in the object before anything is read.

// legPatience is for how many looks (Options.LookEvery) a leg that is current, and does not answer, is waited for before the others go on without it.
const legPatience = 5

// openedLeg is a leg that has been opened for a claim.
type openedLeg struct {
	volume.Leg
	name   string
	device blockdev.Device
	near   bool // it is on this node
}

// Open: see replicapool.Legs. Whoever had the legs before has none of them any more that is opened, and so nothing is acknowledged to him. The list is written before anything is read.
func (l *ReplicaLegs) Open(ctx context.Context, pool string, ref blockdev.Ref) (_ replicapool.Opened, err error) {
	ctx, cancel := context.WithTimeout(ctx, openTime)
	defer cancel()
	v, err := l.replicatedNow(ctx, ref.Key)
	if err != nil {
		return replicapool.Opened{}, err
	}
	if v.Spec.Pool != pool || v.Going() || v.Status.Made == nil {
		return replicapool.Opened{}, fmt.Errorf("%w: replicated volume %s is not there to be used", errdefs.ErrPrecondition, ref.Key)
	}
	opened, away, failed := l.openAll(ctx, v)
	defer func() {
		if err != nil {
			for _, leg := range opened {
				err = errors.Join(err, leg.device.Close())
			}
		}
	}()
	if len(opened) == 0 || ctx.Err() != nil {
		return replicapool.Opened{}, errdefs.Recast(errdefs.ErrUnavailable, failed, "the legs of the replicated volume %s that are current are waited for", ref.Key)
	}
	var others []openedLeg
	if !isLast(v, opened) {
		others = l.askKnown(ctx, v, unlisted(v))
	}
	chosen, err := chooseCurrent(v, opened, others, away, failed)
	if err != nil {
		l.reportOpenWaits(ctx, v, err)
		return replicapool.Opened{}, err
	}
	if err := l.writeList(ctx, v, chosen, opened); err != nil {
		return replicapool.Opened{}, err
	}
	if _, err := l.tellList(ctx, v); err != nil {
		return replicapool.Opened{}, err
	}
	for _, leg := range chosen {
		if err := l.noteBoot(ctx, v, leg); err != nil {
			return replicapool.Opened{}, err
		}
	}
	out := replicapool.Opened{Generation: v.Spec.Claim.Generation, Size: chosen[0].Keeps(v.Spec.Size)}
	for i, leg := range opened {
		if !slices.ContainsFunc(chosen, func(c openedLeg) bool { return c.name == leg.name }) {
			err = errors.Join(err, opened[i].device.Close()) // it joins the mirror later
			continue
		}
		out.Legs = append(out.Legs, leg.device)
	}
	l.note(ref.Key, func(r *replica) { r.claim = 0 })
	return out, err
}

// openAll opens the legs that are current, and returns the near one first. Those that fail are tried again for a while (legPatience); after that, no longer than until one is open. failed says why some are not open. away are those of
// them that may have everything all the same.
func (l *ReplicaLegs) openAll(ctx context.Context, v *v1alpha1.ReplicatedVolume) (opened []openedLeg, away []string, failed error) {
	left := v.Current()
	var end time.Time // whoever asks has less time, and asks again
	l.note(v.Name, func(r *replica) {
		if g := v.Spec.Claim.Generation; r.claim != g {
			r.opens, r.claim = time.Now(), g
		}
		end = r.opens.Add(legPatience * l.options.LookEvery)
	})
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	hasOne := sync.OnceFunc(func() { time.AfterFunc(time.Until(end), cancel) }) // a node that is gone does not answer at all
	for {
		legs, failures := make([]openedLeg, len(left)), make([]error, len(left))
		var all sync.WaitGroup
		for i, name := range left {
			all.Go(func() {
				if legs[i], failures[i] = l.open(ctx, v, name); failures[i] == nil {
					hasOne()
				}
			})
		}
		all.Wait()
		var again []string
		away = nil
		for i, name := range left {
			if failures[i] == nil {
				opened = append(opened, legs[i])
				continue
			}
			again = append(again, name)
			if !errors.Is(failures[i], errdefs.ErrDataLoss) {
				away = append(away, name)
			}
		}
		left, failed = again, errors.Join(failures...)
		if len(away) == 0 || time.Now().After(end) || pause(ctx, l.options.LookEvery) != nil {
			break
		}
	}
	slices.SortStableFunc(opened, func(a, b openedLeg) int { return volume.TrueFirst(a.near, b.near) })
	return opened, away, failed
}

// askPatience is for how many looks (Options.LookEvery) a leg is asked what it knows.
const askPatience = 2

// askKnown returns those of some legs that say what they know of lists, all at once, without their locks. They are not opened.
func (l *ReplicaLegs) askKnown(ctx context.Context, v *v1alpha1.ReplicatedVolume, names []string) (known []openedLeg) {
	ctx, cancel := context.WithTimeout(ctx, askPatience*l.options.LookEvery)
	defer cancel()
	answers := make([]volume.Leg, len(names))
	var all sync.WaitGroup
	for i, name := range names {
		all.Go(func() {
			answers[i], _ = l.leg(ctx, v, name) // without an answer it is left out
		})
	}
	all.Wait()
	for i, leg := range answers {
		if leg.Of == v.Name {
			known = append(known, openedLeg{Leg: leg, name: names[i]})
		}
	}
	return known
}

// unlisted are the legs that are not on the list.
func unlisted(v *v1alpha1.ReplicatedVolume) []string {
	return slices.DeleteFunc(slices.Clone(v.Spec.Legs), func(name string) bool { return slices.Contains(v.Current(), name) })
}

// chooseCurrent says which legs are current from now on, of those that were opened. others are not on the list; away are others that are, of which failed says why they were not. ErrPrecondition, or ErrUnavailable, if none of these is known to have everything.
func chooseCurrent(v *v1alpha1.ReplicatedVolume, opened, others []openedLeg, away []string, failed error) ([]openedLeg, error) {
	latest, err := upToDate(v, opened, others)
	if err != nil {
		return nil, err
	}
	chosen := equalOrBest(latest)
	if best := chosen[0]; best.LostPower() && len(away) > 0 {
		return nil, errdefs.Recast(errdefs.ErrUnavailable, failed, "the machine of leg %s of the replicated volume %s has started anew since it was used, so that what was not flushed may be lost there; leg %s has it, and is waited for", best.name, v.Name, strings.Join(away, ", leg "))
	}
	return chosen, nil
}

// reportOpenWaits says in the object why a volume cannot be used, though a leg answers.
func (l *ReplicaLegs) reportOpenWaits(ctx context.Context, v *v1alpha1.ReplicatedVolume, why error) {
	if err := l.writeReplicas(ctx, v, func(s *v1alpha1.ReplicatedVolumeStatus) { s.Waits = cluster.Limited(errdefs.Words(why)) }); err != nil {
		klog.FromContext(ctx).Error(err, "Could not say in its object why a replicated volume waits", "volume", v.Name)
	}
}

// open opens a leg that is current, as far as the list says, for the claim that there is.
func (l *ReplicaLegs) open(ctx context.Context, v *v1alpha1.ReplicatedVolume, name string) (leg openedLeg, err error) {
	err = l.withLeg(ctx, v, name, func(id volume.ID) error {
		leg, err = l.attach(ctx, v, id)
		if err != nil {
			return err
		}
		if err = isOlder(v, leg, id); err == nil {
			g := v.Spec.Claim.Generation
			err = l.volumes.ChangeLeg(ctx, id, func(s *volume.LegState, _ map[string]string) error {
				s.Sound, s.Opened, s.Closed = g, g, false
				if !leg.LostPower() { // else it is known until the list is written: this try may not get there
					s.Boot = leg.Now
				}
				return nil
			})
		}
		if err != nil {
			err = errors.Join(err, leg.device.Close())
		}
		return err
	})
	return leg, err
}

// noteBoot has the record of a leg that is current say in which start of its machine it is used: from now on, only what another start of that loses counts.
func (l *ReplicaLegs) noteBoot(ctx context.Context, v *v1alpha1.ReplicatedVolume, leg openedLeg) error {
	if !leg.LostPower() {
		return nil
	}
	return l.withLeg(ctx, v, leg.name, func(id volume.ID) error {
		return l.volumes.ChangeLeg(ctx, id, func(s *volume.LegState, _ map[string]string) error {
			s.Boot = leg.Now
			return nil
		})
	})
}

// attach attaches a leg, which is that, of no later claim, and large enough.
func (l *ReplicaLegs) attach(ctx context.Context, v *v1alpha1.ReplicatedVolume, id volume.ID) (leg openedLeg, err error) {
	leg.name = id.Key
	if leg.device, err = l.volumes.OpenLeg(ctx, id); err != nil {
		return leg, err
	}
	if leg.Leg, err = l.volumes.Leg(ctx, id); err == nil {
		size := leg.Keeps(v.Spec.Size)
		switch {
		case leg.Of != v.Name:
			err = fmt.Errorf("%w: %s is a leg of the volume %q, not of %s", errdefs.ErrPrecondition, id, leg.Of, v.Name)
		case leg.Opened > v.Spec.Claim.Generation:
			err = fmt.Errorf("%w: leg %s was opened by claim %d, which is later than %d", errdefs.ErrPrecondition, id, leg.Opened, v.Spec.Claim.Generation)
		case leg.device.Size < size:
			err = fmt.Errorf("%w: leg %s has %d bytes, and is to have %d", errdefs.ErrUnavailable, id, leg.device.Size, size)
		}
	}
	if err != nil {
		return leg, errors.Join(err, leg.device.Close())
	}
	leg.near = l.isNear(ctx, id.Key)
	return leg, nil
}

// equalOrBest says which legs are current from now on: all of them, if nothing can differ; else one, which has everything that was acknowledged, as they all have. One that may have lost with its power what was not flushed is the last.
// If legs that were closed are of different claims, the list is of before the last one: an object that was restored. Then those of the last one have everything.
func equalOrBest(opened []openedLeg) []openedLeg {
	if !slices.ContainsFunc(opened, func(leg openedLeg) bool { return !leg.Closed || leg.Sound != opened[0].Sound }) {
		return opened
	}
	best := slices.MinFunc(opened, func(a, b openedLeg) int {
		return cmp.Or(volume.TrueFirst(!a.LostPower(), !b.LostPower()), cmp.Compare(b.Sound, a.Sound))
	})
	return []openedLeg{best}
}
