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

// How a node opens a volume with several legs for a claim: it opens the current legs, chooses those that have everything, and writes them down as current
// before anything is read.

// legPatience is for how many looks (Options.LookEvery) a current leg that does not answer is waited for, before the volume is opened without it.
const legPatience = 5

// openedLeg is a leg that has been opened for a claim.
type openedLeg struct {
	volume.Leg
	name   string
	device blockdev.Device
	near   bool // it is on this node
}

// Open: see replicapool.Legs. A leg that is opened is fenced from its earlier user, to whom nothing is acknowledged any more. The list is written before
// anything is read.
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
	if len(v.Current()) == 0 {
		return replicapool.Opened{}, noneCurrent(v)
	}
	opened, away, failed := l.openAll(ctx, v)
	defer func() {
		if err != nil {
			for _, leg := range opened {
				err = errors.Join(err, leg.device.Close())
			}
		}
	}()
	if errors.Is(failed, errLaterClaim) { // such a leg may have what those that were opened lack
		if err := l.whyLater(ctx, v, failed); !errors.Is(err, errLaterClaim) {
			return replicapool.Opened{}, err
		}
		err := errdefs.Recast(errdefs.ErrUnavailable, failed, "the replicated volume %s cannot be used", ref.Key)
		l.reportOpenWaits(ctx, v, err)
		return replicapool.Opened{}, err
	}
	if len(opened) == 0 || ctx.Err() != nil {
		return replicapool.Opened{}, errdefs.Recast(errdefs.ErrUnavailable, cmp.Or(failed, ctx.Err()), "the legs of the replicated volume %s that are current are waited for", ref.Key)
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

// openAll opens the current legs, and returns that of this node first. Those that fail are tried again for legPatience, and then until one is open;
// those that do not answer are waited for as patience says. failed is why some are not open, errLaterClaim at once; away are the names of those of them that
// may have everything all the same.
func (l *ReplicaLegs) openAll(ctx context.Context, v *v1alpha1.ReplicatedVolume) (opened []openedLeg, away []string, failed error) {
	left := v.Current()
	var end time.Time // also over several calls: a caller has less time, and calls again
	l.note(v.Name, func(r *replica) {
		if g := v.Spec.Claim.Generation; r.claim != g {
			r.opens, r.claim = time.Now(), g
		}
		end = r.opens.Add(legPatience * l.options.LookEvery)
	})
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var one sync.Once // a node that is gone never answers
	for {
		legs, failures := make([]openedLeg, len(left)), make([]error, len(left))
		var all sync.WaitGroup
		for i, name := range left {
			all.Go(func() {
				if legs[i], failures[i] = l.open(ctx, v, name); failures[i] == nil {
					one.Do(func() { time.AfterFunc(l.patience(legs[i], end), cancel) })
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
		if len(away) == 0 || errors.Is(failed, errLaterClaim) || time.Now().After(end) || pause(ctx, l.options.LookEvery) != nil {
			break
		}
	}
	slices.SortStableFunc(opened, func(a, b openedLeg) int { return volume.TrueFirst(a.near, b.near) })
	return opened, away, failed
}

// patience returns how long the others are waited for from now on when a leg is open: until end. Each call gives them some time after that, too: they may be
// back since an earlier call, and not as quick. It is more if the leg that is open has lost power, as it is not used without them.
func (l *ReplicaLegs) patience(leg openedLeg, end time.Time) time.Duration {
	least := l.options.LookEvery
	if leg.LostPower() {
		least *= legPatience
	}
	return max(time.Until(end), least)
}

// askPatience is for how many looks (Options.LookEvery) askKnown waits for answers.
const askPatience = 2

// askKnown asks legs at once, without their locks, what their records know of lists, and returns those that answer. They are not opened.
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

// unlisted returns the legs that are not on the list.
func unlisted(v *v1alpha1.ReplicatedVolume) []string {
	return slices.DeleteFunc(slices.Clone(v.Spec.Legs), func(name string) bool { return slices.Contains(v.Current(), name) })
}

// chooseCurrent chooses which of the opened legs are current from now on. others are legs that are not on the list; away are listed ones that are not open,
// for the reason failed. ErrPrecondition or ErrUnavailable if none of the opened ones is known to have everything.
func chooseCurrent(v *v1alpha1.ReplicatedVolume, opened, others []openedLeg, away []string, failed error) ([]openedLeg, error) {
	latest, err := upToDate(v, opened, others)
	if err != nil {
		return nil, err
	}
	chosen := equalOrBest(slices.SortedStableFunc(slices.Values(latest), func(a, b openedLeg) int { // one that is to be a leg no more is the worse choice; what the last user has read is not taken back
		return cmp.Or(volume.TrueFirst(slices.Contains(v.Spec.Legs, a.name), slices.Contains(v.Spec.Legs, b.name)), volume.TrueFirst(a.name == v.Status.Reads, b.name == v.Status.Reads))
	}))
	if best := chosen[0]; best.LostPower() && len(away) > 0 {
		return nil, errdefs.Recast(errdefs.ErrUnavailable, failed, "the machine of leg %s of the replicated volume %s has started anew since it was used, or its disk could not be flushed, so that what was not flushed may be lost there; leg %s has it, and is waited for", best.name, v.Name, strings.Join(away, ", leg "))
	}
	return chosen, nil
}

// reportOpenWaits writes into the object why a volume cannot be opened, though a leg answers.
func (l *ReplicaLegs) reportOpenWaits(ctx context.Context, v *v1alpha1.ReplicatedVolume, why error) {
	if err := l.writeReplicas(ctx, v, func(s *v1alpha1.ReplicatedVolumeStatus) { s.Waits = cluster.Limited(errdefs.Words(why)) }); err != nil {
		klog.FromContext(ctx).Error(err, "Could not say in its object why a replicated volume waits", "volume", v.Name)
	}
}

// open opens a leg that is on the list, for the claim that v has.
func (l *ReplicaLegs) open(ctx context.Context, v *v1alpha1.ReplicatedVolume, name string) (leg openedLeg, err error) {
	err = l.withLeg(ctx, v, name, func(id volume.ID) error {
		defer l.reportHang(ctx, v, name, func(ctx context.Context, now *v1alpha1.ReplicatedVolume, why string) {
			l.reportOpenWaits(ctx, now, fmt.Errorf("%w: replica %s: %s", errdefs.ErrUnavailable, name, why))
		})()
		leg, err = l.attach(ctx, v, id)
		if err != nil {
			return err
		}
		if err = isOlder(v, leg, id); err == nil {
			g := v.Spec.Claim.Generation
			err = l.volumes.ChangeLeg(ctx, id, func(s *volume.LegState, _ map[string]string) error {
				s.Sound, s.Opened, s.Closed = g, g, false
				if !leg.LostPower() { // that it did stays on record until the list is written: this call may fail before
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

// openSilence is for how many looks (Options.LookEvery) the disk of a leg on this node may not answer while that is opened, before the object says so.
const openSilence = 20

// reportHang calls report, again and again from openSilence on until stop has returned, with the object of now and why a leg of this node is not open yet: its disk does not
// answer, and what waits for a disk in the kernel ends with no context.
func (l *ReplicaLegs) reportHang(ctx context.Context, v *v1alpha1.ReplicatedVolume, name string, report func(ctx context.Context, now *v1alpha1.ReplicatedVolume, why string)) (stop func()) {
	if !l.isNear(ctx, name) {
		return func() {}
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	key, generation := v.Name, v.Spec.Claim.Generation
	why := fmt.Sprintf("it is on node %s, which opens it, and its disk has not answered since %s; all calls for this volume wait there until it does, or fails; power that node off, and the volume can be used on another one",
		l.local.Node(), time.Now().UTC().Format(time.RFC3339))
	var reporting sync.WaitGroup
	reporting.Go(func() {
		for pause(ctx, openSilence*l.options.LookEvery) == nil {
			asking, answered := context.WithTimeout(ctx, homeTime)
			if now, err := l.replicatedNow(asking, key); err == nil && now.Spec.Claim.Generation == generation {
				report(asking, now, why)
			}
			answered()
		}
	})
	return func() {
		cancel()
		reporting.Wait()
	}
}

// noteBoot writes the present boot ID of its machine into the record of a current leg that had lost power: from now on only a later loss counts.
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

// errLaterClaim: a leg was opened by a later claim than the object of its volume has, as that was read before: see whyLater.
var errLaterClaim = errors.New("the object was put back to what it was before")

// whyLater tells the two reasons of errLaterClaim apart. If the object still has the claim that v has, it was restored: then it returns later, the error for
// that. Otherwise ErrBusy: the volume was claimed anew, and the leg opened for that, after v was read. Or an error of the API server.
func (l *ReplicaLegs) whyLater(ctx context.Context, v *v1alpha1.ReplicatedVolume, later error) error {
	now, err := l.replicatedNow(ctx, v.Name)
	if err == nil && now.Spec.Claim.Generation == v.Spec.Claim.Generation {
		return later
	}
	if err == nil || errors.Is(err, errdefs.ErrPrecondition) { // it is not claimed for this node any more
		return fmt.Errorf("%w: the replicated volume %s was claimed anew while its legs were opened for claim %d", errdefs.ErrBusy, v.Name, v.Spec.Claim.Generation)
	}
	return err
}

// attach attaches a leg, and checks that it is one of the volume, was opened by no later claim (errLaterClaim), and is large enough. An error comes with what
// is known of the leg, without the device.
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
			err = fmt.Errorf("%w: leg %s was opened by claim %d, which is later than claim %d of the replicated volume %s: %w; have its claims counted from there on (spec.claims; docs/runbooks/replicas-missing.md)",
				errdefs.ErrPrecondition, id, leg.Opened, v.Spec.Claim.Generation, v.Name, errLaterClaim)
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

// equalOrBest returns all legs, if they were closed by the same claim, so that they are equal. Otherwise it returns one: each of them has everything that was
// acknowledged, but they may differ in what was not. A leg whose machine has lost power comes last, as it may lack what was not flushed. Of legs of different
// claims, those of the last one have everything: the object was restored, and its list is older. One that was closed comes before one that was not, which
// may be an older copy, of when the volume was used by that claim. Of what is left it is the first one.
func equalOrBest(opened []openedLeg) []openedLeg {
	if !slices.ContainsFunc(opened, func(leg openedLeg) bool { return !leg.Closed || leg.Sound != opened[0].Sound }) {
		return opened
	}
	best := slices.MinFunc(opened, func(a, b openedLeg) int {
		return cmp.Or(volume.TrueFirst(!a.LostPower(), !b.LostPower()), cmp.Compare(b.Sound, a.Sound), volume.TrueFirst(a.Closed, b.Closed))
	})
	return []openedLeg{best}
}
