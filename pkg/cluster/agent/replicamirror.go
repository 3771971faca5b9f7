package agent

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/mirror"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// While a volume with several legs is used here, somebody has to look after its mirror: take legs that fail off the list, and then out of the mirror (replicaleave.go); have legs that lack something made equal, and put
// them on the list (replicajoin.go). What the kernel holds until then, and what it forgets, is told in package mirror. Each look finds anew, in the kernel and in the object, how it stands.

// Mirrors are those of this node: replicapool.Pool.
type Mirrors interface {
	// Mirrors are the volumes that have one, with the generation of the claim by which it was made.
	Mirrors() (map[blockdev.Ref]int64, error)
	Mirror(ref blockdev.Ref) (name string)
}

// ReconcileMirrors looks after the mirrors of this node until ctx ends.
func (l *ReplicaLegs) ReconcileMirrors(ctx context.Context, mirrors Mirrors) {
	var tended sync.WaitGroup
	defer tended.Wait()
	var mu sync.Mutex
	tending := map[blockdev.Ref]bool{}
	adopter := l.adopter()
	defer adopter.adopts.Wait()
	for {
		found, err := mirrors.Mirrors()
		if err != nil {
			klog.FromContext(ctx).Error(err, "Could not look for the mirrors of replicated volumes; trying again")
		}
		mu.Lock()
		for ref, generation := range found {
			if tending[ref] {
				continue
			}
			tending[ref] = true
			tended.Go(func() {
				t := &mirrorReconciler{ReplicaLegs: l, ref: ref, name: mirrors.Mirror(ref), generation: generation, legStates: map[string]*legState{}}
				t.common.next = time.Now().Add(commonEvery * l.options.LookEvery)
				t.run(klog.NewContext(ctx, klog.FromContext(ctx).WithValues("volume", ref.Key)))
				mu.Lock()
				defer mu.Unlock()
				delete(tending, ref)
			})
		}
		mu.Unlock()
		if err == nil {
			adopter.startDue(ctx, found)
		}
		if pause(ctx, l.options.LookEvery) != nil {
			return
		}
	}
}

// mirrorReconciler looks after one mirror.
type mirrorReconciler struct {
	*ReplicaLegs
	ref        blockdev.Ref
	name       string
	generation int64 // of the claim by which it was made
	legStates  map[string]*legState
	common     commonMoment
	last       lastList                     // of which all its legs were told; none: it is not known
	seenEvent  mirror.Event                 // the event of the mirror (mirror.State) up to which all is seen to, or is of a change that was made here
	background chan func(*mirrorView) error // what is being done beside the looks, at its end; nil: nothing
	logged     string                       // why it could not be looked after, last

	appliedMutable map[string]string // the mutable parameters that were set last
	hasApplied     bool              // some were, by this process
}

// run looks until the mirror is gone, whenever something happens to it, and each second.
func (m *mirrorReconciler) run(ctx context.Context) {
	defer func() {
		if m.background != nil {
			waitForEnd(ctx, m.background)
		}
	}()
	if err := mirror.Recover(ctx, m.name); err != nil && !errors.Is(err, errdefs.ErrNotFound) {
		klog.FromContext(ctx).Error(err, "Could not put right what a driver before this one may have left of a mirror")
	}
	defer m.runAlongside(ctx, m.runScrubs)()
	defer m.releaseSlot(ctx)
	m.markSeen()
	for ctx.Err() == nil {
		s, err := mirror.Look(m.name)
		if errors.Is(err, errdefs.ErrNotFound) {
			return
		}
		if err == nil {
			err = m.step(ctx, s)
		}
		m.logOnce(ctx, err)
		waiting, cancel := context.WithTimeout(ctx, m.options.LookEvery)
		next := make(chan mirror.State, 1)
		seen := m.seenEvent
		err = m.runWatched(ctx, m.dropSilent, func() error {
			s, err := mirror.Watch(waiting, m.name, seen)
			next <- s
			return err
		})
		late := waiting.Err() != nil
		cancel()
		switch {
		case err == nil:
			m.seenEvent = (<-next).Event // not that of any look: what the kernel forgets between two is to be told by Watch
		case !late:
			_ = pause(ctx, busyRetry)
		}
	}
}

// markSeen: what has happened to the mirror until now is no news.
func (m *mirrorReconciler) markSeen() {
	if s, err := mirror.Look(m.name); err == nil {
		m.seenEvent = s.Event
	}
}

// runWatched does something that waits for what is under way in the mirror, and so perhaps for a leg that does not answer; only the end of the connection to that ends it. So that is looked for meanwhile.
// When the driver is to end, it is not waited for any longer: then it is the kernel's, and is finished, or put right (mirror.Recover), by the next one.
func (m *mirrorReconciler) runWatched(ctx context.Context, look func(context.Context), work func() error) error {
	done := make(chan error, 1)
	go func() { done <- work() }()
	for {
		select {
		case err := <-done:
			return err
		case <-ctx.Done():
			err, ended := waitForEnd(ctx, done)
			if !ended {
				err = ctx.Err()
			}
			return err
		case <-time.After(2 * m.options.LookEvery):
			look(ctx)
		}
	}
}

// endTime is how long what is under way is waited for when the driver is to end.
const endTime = 2 * time.Second

// waitForEnd waits for what is under way; once the context has ended, no longer than endPatience.
func waitForEnd[T any](ctx context.Context, done <-chan T) (result T, ended bool) {
	select {
	case result = <-done:
		return result, true
	case <-ctx.Done():
	}
	select {
	case result = <-done:
		return result, true
	case <-time.After(endTime):
		return result, false
	}
}

// changeMirror is meanwhile, of a step that changes the mirror.
func (m *mirrorReconciler) changeMirror(ctx context.Context, step func() error) error {
	defer m.markSeen()
	return m.runWatched(ctx, m.dropSilent, step)
}

// logOnce logs why a mirror could not be looked after, once.
func (m *mirrorReconciler) logOnce(ctx context.Context, err error) {
	text := ""
	if err != nil && !errors.Is(err, errdefs.ErrBusy) && !errors.Is(err, errdefs.ErrNotFound) && ctx.Err() == nil {
		text = errdefs.Words(err)
	}
	if text != "" && text != m.logged {
		klog.FromContext(ctx).Error(err, "Could not look after the legs of a replicated volume; trying again")
	}
	m.logged = text
}

// mirrorView is one look at a mirror.
type mirrorView struct {
	v       *v1alpha1.ReplicatedVolume
	s       mirror.State
	device  map[string]uint64 // of the legs that are attached here, by their names
	leg     map[uint64]string
	near    uint64 // the device of the leg that this node has; 0: none
	failing map[string]string
	last    *lastList // what recall has found; nil: nothing yet
}

// step takes the next step. Without the claim by which the mirror was made, it ends; as long as that is not known it does nothing: whatever failed is held, and what did not is fenced by the nodes of the legs.
func (m *mirrorReconciler) step(ctx context.Context, s mirror.State) error {
	v, is := m.replicated(m.ref.Key)
	switch {
	case len(s.Legs) == 0:
		return nil // it has ended
	case !is || v.Spec.Claim.Generation != m.generation:
		return m.endUnclaimed(ctx)
	case v.Status.Opened != m.generation:
		return nil
	}
	now, err := m.observe(ctx, v.DeepCopy(), s)
	if err != nil {
		return err
	}
	m.findFailed(now)
	if m.isSevered(now) {
		return m.endSevered(ctx, now)
	}
	if before, err := m.isRestored(ctx, now); err != nil {
		return err
	} else if before {
		return m.restoreList(ctx, now)
	}
	if len(now.failing) > 0 {
		return m.dropFailed(ctx, now)
	}
	if s.Held {
		return nil
	}
	m.throttleJoin(ctx, s)
	m.applyMutable(ctx, now.v)
	if err := m.listUnlisted(ctx, now); err != nil {
		return err
	}
	if err := m.endBackground(now); err != nil {
		return err
	}
	if s.Joining != nil {
		return m.stepJoining(ctx, now)
	}
	return m.startNext(ctx, now)
}

// startNext begins what is to be done for a mirror in which no leg joins, one thing at a time.
func (m *mirrorReconciler) startNext(ctx context.Context, now *mirrorView) error {
	switch {
	case m.background != nil:
	case m.last.number != now.v.Status.Lists: // a driver before this one may have written it, and not told them
		m.startBackground(func() func(*mirrorView) error {
			due, err := m.tellList(ctx, now.v)
			return func(then *mirrorView) error {
				switch {
				case err != nil || then.v.Status.Lists != now.v.Status.Lists:
				case due:
					err = m.tellAll(ctx, then.v)
				default:
					m.last = lastList{now.v.Status.Lists, now.v.Current()}
				}
				return err
			}
		})
	case m.isCommonDue(now):
		m.startBackground(func() func(*mirrorView) error {
			err := m.recordCommon(ctx, now)
			return func(*mirrorView) error {
				if err != nil {
					m.common.written = -1 // also if nothing more is written: the legs may have different names for it
				}
				if errors.Is(err, errMirrorChanged) {
					m.common.next, err = time.Time{}, nil
				}
				return err
			}
		})
	default:
		return m.startJoin(ctx, now)
	}
	return nil
}

// startBackground does something beside the looks: it waits for what is under way in the mirror, and so perhaps for a leg that does not answer, which they find out. Its end is told to the next one.
func (m *mirrorReconciler) startBackground(work func() (end func(*mirrorView) error)) {
	done := make(chan func(*mirrorView) error, 1)
	m.background = done
	go func() { done <- work() }()
}

// endBackground is the end of what was done beside the looks, if it has ended.
func (m *mirrorReconciler) endBackground(now *mirrorView) error {
	select {
	case end := <-m.background:
		m.background = nil
		return end(now)
	default:
		return nil
	}
}

// endUnclaimed ends a mirror whose claim has ended, as the API server says itself: nothing that its users write will ever be on what is current. They get errors, and the leg of this node is free for who uses the volume now.
func (m *mirrorReconciler) endUnclaimed(ctx context.Context) error {
	asking, cancel := context.WithTimeout(ctx, homeTime)
	defer cancel()
	v := &v1alpha1.ReplicatedVolume{}
	if err := m.kube.Live.Get(asking, client.ObjectKey{Name: m.ref.Key}, v); err != nil {
		return nil // not known now
	}
	if c := v.Spec.Claim; v.Spec.Claims < m.generation || c != nil && c.Node == m.local.Node() && c.Generation == m.generation {
		return nil // the object is one of before the claim, or the watch is
	}
	klog.FromContext(ctx).Info("The claim of a replicated volume has ended, and it is still used here; its users get errors from now on", "claim", m.generation, "claims", v.Spec.Claims)
	endSilent := func(ctx context.Context) {
		for _, name := range v.Spec.Legs {
			m.disconnectSilent(ctx, name)
		}
	}
	endSilent(ctx)
	if err := m.runWatched(ctx, endSilent, func() error { return mirror.End(ctx, m.name) }); err != nil {
		return err
	}
	for _, name := range v.Spec.Legs {
		m.releaseLeg(ctx, v, name)
	}
	return nil
}

// observe finds which device is which leg.
func (m *mirrorReconciler) observe(ctx context.Context, v *v1alpha1.ReplicatedVolume, s mirror.State) (*mirrorView, error) {
	now := &mirrorView{v: v, s: s, device: map[string]uint64{}, leg: map[uint64]string{}, failing: map[string]string{}}
	names := slices.Clone(v.Spec.Legs)
	for _, leg := range v.Status.Legs {
		if !slices.Contains(names, leg.Name) {
			names = append(names, leg.Name)
		}
	}
	for _, name := range names {
		id, err := m.legID(ctx, v, name)
		if err != nil {
			return nil, err
		}
		devices, err := m.volumes.LegDevices(ctx, id)
		if err != nil {
			return nil, err
		}
		for _, d := range devices {
			if _, is := now.device[name]; !is || now.has(d.Number) {
				now.device[name] = d.Number
			}
			now.leg[d.Number] = name
		}
		if m.isNear(ctx, name) {
			now.near = now.device[name]
		}
	}
	return now, nil
}

// has reports whether a device is one of the mirror's.
func (n *mirrorView) has(device uint64) bool {
	return slices.ContainsFunc(n.s.Legs, func(l mirror.Leg) bool { return l.Device == device }) || n.s.Joining != nil && n.s.Joining.Device == device
}

// legs are those that the mirror waits for, and that are, or may be, on the list: also one that joins, once it is equal, and listed.
func (n *mirrorView) legs() []mirror.Leg {
	if n.s.Equal() {
		if leg := n.v.Leg(n.leg[n.s.Joining.Device]); leg != nil && leg.Current {
			return append(slices.Clone(n.s.Legs), *n.s.Joining)
		}
	}
	return n.s.Legs
}

// names are the names of the legs that the mirror waits for.
func (n *mirrorView) names() (names []string) {
	for _, l := range n.legs() {
		names = append(names, n.leg[l.Device])
	}
	return names
}

// unknown are the devices of the mirror that are no leg's.
func (n *mirrorView) unknown() (devices []uint64) {
	for _, l := range n.s.Legs {
		if n.leg[l.Device] == "" {
			devices = append(devices, l.Device)
		}
	}
	return devices
}

// legState is how it goes with a leg of a mirror: how often it has tried to join, and since when its node does not do its part.
type legState struct {
	tries       int
	retryAt     time.Time
	silentSince time.Time // since when its node does not answer; zero: it does
	untoldSince time.Time // since when its record cannot be written, while others are to leave; zero: it can, as far as is known
}

// stateOf returns the tries of a leg.
func (m *mirrorReconciler) stateOf(name string) *legState {
	if m.legStates[name] == nil {
		m.legStates[name] = &legState{}
	}
	return m.legStates[name]
}
