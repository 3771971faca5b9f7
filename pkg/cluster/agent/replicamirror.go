package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/mirror"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// The mirror of a volume with several legs that is used here is reconciled: a leg that fails is taken off the list of current legs, and then out of the
// mirror (replicaleave.go); a leg that lacks something is resynchronised, and then put on the list (replicajoin.go). What the kernel holds until then, and
// what it forgets, is told in package mirror. Each step finds out anew, from the kernel and the object, what there is.

// Mirrors are the mirrors of replicated volumes on this node: replicapool.Pool.
type Mirrors interface {
	// Mirrors returns the volumes that have a mirror, with the generation of the claim that it was made for.
	Mirrors() (map[blockdev.Ref]int64, error)
	// Generation returns the generation of the claim that the mirror of a volume was made for; false if there is no mirror.
	Generation(ref blockdev.Ref) (generation int64, is bool, err error)
	Mirror(ref blockdev.Ref) (name string)
}

// ReconcileMirrors reconciles the mirrors of this node, and adopts volumes that are to have one, until ctx ends.
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
				t := &mirrorReconciler{ReplicaLegs: l, made: mirrors, ref: ref, name: mirrors.Mirror(ref), generation: generation, legStates: map[string]*legState{}}
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

// mirrorReconciler reconciles one mirror.
type mirrorReconciler struct {
	*ReplicaLegs
	made       Mirrors // that there are
	ref        blockdev.Ref
	name       string
	generation int64 // of the claim that the mirror was made for
	legStates  map[string]*legState
	common     commonMoment
	last       toldList
	seen       *v1alpha1.ReplicatedVolume // the object as the last step has seen it with the mirror's claim; nil: none has
	reported   reportedUse
	seenEvent  mirror.Event                 // the last event of the mirror (mirror.State) that was handled, or that a change from here has caused
	background chan func(*mirrorView) error // yields what is to be done at the end of the task in the background; nil: there is none
	logged     string                       // the last error that was logged

	appliedMutable map[string]string // the mutable parameters that were applied last
	hasApplied     bool              // this process has applied some
}

// isReplaced reports whether the mirror is another one by now, which was made under the same name for another claim.
func (m *mirrorReconciler) isReplaced() bool {
	generation, is, err := m.made.Generation(m.ref)
	return err == nil && is && generation != m.generation
}

// run takes steps until the mirror is gone, or is another one, or ctx ends: whenever something happens to it, and every Options.LookEvery.
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
	defer m.runAlongside(ctx, m.holdForgotten)()
	defer m.releaseSlot(ctx)
	m.markSeen()
	for ctx.Err() == nil {
		s, err := mirror.Look(m.name)
		if errors.Is(err, errdefs.ErrNotFound) || m.isReplaced() {
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
			m.seenEvent = (<-next).Event // not the event of a later Look: Watch has to tell what the kernel forgets in between
		case !late:
			_ = pause(ctx, busyRetry)
		}
	}
}

// holdForgotten has what the kernel forgets held at once (mirror.Watch), also while a step waits for the API server, or for a leg.
func (m *mirrorReconciler) holdForgotten(ctx context.Context) {
	var seen mirror.Event
	for ctx.Err() == nil {
		s, err := mirror.Watch(ctx, m.name, seen)
		switch {
		case errors.Is(err, errdefs.ErrNotFound):
			return
		case err != nil:
			_ = pause(ctx, busyRetry)
		default:
			seen = s.Event
		}
	}
}

// markSeen has Watch report only what happens to the mirror from now on.
func (m *mirrorReconciler) markSeen() {
	if s, err := mirror.Look(m.name); err == nil {
		m.seenEvent = s.Event
	}
}

// changeMirror is runWatched for a step that changes the mirror, and marks the events of that as seen.
func (m *mirrorReconciler) changeMirror(ctx context.Context, step func() error) error {
	defer m.markSeen()
	return m.runWatched(ctx, m.dropSilent, step)
}

// logOnce logs why a step failed, unless that was logged last.
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

// mirrorView is what a step finds of a mirror, in the kernel and in the object.
type mirrorView struct {
	v       *v1alpha1.ReplicatedVolume
	s       mirror.State
	device  map[string]uint64 // of the legs that are attached here, by their names
	leg     map[uint64]string
	near    uint64              // the device of the leg that this node has; 0: none
	absent  []string            // the names that are of no Volume of a leg
	io      map[uint64]ioCounts // of the mirror's devices
	failing map[string]string
	last    *lastList // what lastKnownList has found; nil: nothing yet
}

// ioCounts are how many requests are under way to a device, and how many have ended so far: dm.UnderWay.
type ioCounts struct{ underWay, ended int64 }

// countIO returns the counts of a device. Tests replace it.
var countIO = func(device uint64) ioCounts {
	underWay, ended := dm.UnderWay(device)
	return ioCounts{underWay, ended}
}

// step takes the next step with the mirror in state s. If the claim that it was made for has ended, the mirror ends; as long as that is not known nothing is
// done: what failed is held by the kernel, and the rest is fenced by the nodes of the legs.
func (m *mirrorReconciler) step(ctx context.Context, s mirror.State) error {
	v, is := m.replicated(m.ref.Key)
	switch {
	case len(s.Legs) == 0:
		return nil // it has ended
	case !is || v.Spec.Claim.Generation != m.generation:
		return m.endUnclaimed(ctx, s)
	}
	m.seen = v
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
	err = m.reportUse(ctx, now)
	if len(now.failing) > 0 || len(now.unknown()) > 0 {
		return m.dropFailed(ctx, now)
	}
	if err != nil && !errors.Is(err, errdefs.ErrBusy) {
		return err
	}
	if s.Held {
		return nil
	}
	m.clearUntold() // nothing waits for that any more: a leg that fails much later must not take those along that were away now
	if err := m.forgetLeft(ctx, now); err != nil {
		return err
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

// startNext starts the next task in the background, of a mirror in which no leg joins; one at a time.
func (m *mirrorReconciler) startNext(ctx context.Context, now *mirrorView) error {
	switch {
	case m.background != nil:
	case m.last.get().number != now.v.Status.Lists: // an earlier process may have written it, and not told the legs
		m.startBackground(func() func(*mirrorView) error {
			due, err := m.tellList(ctx, now.v)
			return func(then *mirrorView) error {
				switch {
				case err != nil || then.v.Status.Lists != now.v.Status.Lists:
				case due:
					err = m.tellAll(ctx, then.v)
				default:
					m.last.set(lastList{now.v.Status.Lists, now.v.Current()})
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

// startBackground runs a task beside the steps: it may wait for a leg that does not answer, which only a step finds out. What work returns is called by a
// later step, with what that one has found.
func (m *mirrorReconciler) startBackground(work func() (end func(*mirrorView) error)) {
	done := make(chan func(*mirrorView) error, 1)
	m.background = done
	go func() { done <- work() }()
}

// endBackground ends the task in the background, if its work has ended.
func (m *mirrorReconciler) endBackground(now *mirrorView) error {
	select {
	case end := <-m.background:
		m.background = nil
		return end(now)
	default:
		return nil
	}
}

// endUnclaimed ends a mirror if the API server itself says that its claim has ended (whyEnds). Its users get errors, and the leg of this node is free for the
// next user of the volume.
func (m *mirrorReconciler) endUnclaimed(ctx context.Context, s mirror.State) error {
	v, why, err := m.whyEnds(ctx, s)
	if err != nil || why == "" {
		return err
	}
	klog.FromContext(ctx).Info("The users of a replicated volume that is used here get errors from now on", "why", why, "claim", m.generation, "claims", v.Spec.Claims)
	endSilent := func(ctx context.Context) { m.disconnectEnding(ctx, v, s) }
	endSilent(ctx)
	if m.isReplaced() { // meanwhile, and the legs are those of the later claim
		return nil
	}
	if err := m.runWatched(ctx, endSilent, func() error { return mirror.End(ctx, m.name) }); err != nil {
		return err
	}
	for _, name := range v.Spec.Legs {
		m.releaseLeg(ctx, v, name)
	}
	return nil
}

// whyEnds returns why a mirror has to end whose claim is not the one that is watched, and the object as far as it is known; empty: the claim holds, or may do so
// again, or nothing is known. If the claim has ended, nothing that its users write will ever count. If the object was deleted, or restored to before the claim,
// the users go on until a leg has to leave (holdsWrites): no list without that leg can be written then, so what they write would be held for ever, and the
// volume could not be unstaged. The error is that it was deleted.
func (m *mirrorReconciler) whyEnds(ctx context.Context, s mirror.State) (v *v1alpha1.ReplicatedVolume, why string, err error) {
	ctx, cancel := context.WithTimeout(ctx, homeTime)
	defer cancel()
	v = &v1alpha1.ReplicatedVolume{}
	err = m.kube.Live.Get(ctx, client.ObjectKey{Name: m.ref.Key}, v)
	deleted := kube.IsDeleted(err)
	if err != nil && !deleted {
		return v, "", nil // not known now
	}
	switch c, restored := v.Spec.Claim, v.Spec.Claims < m.generation; {
	case c != nil && c.Node == m.local.Node() && c.Generation == m.generation:
		return v, "", nil
	case !deleted && !restored:
		return v, "the claim has ended", nil
	}
	if v = m.seen; v == nil {
		v = m.ofLegs(ctx)
	}
	switch holds := m.holdsWrites(ctx, v, s); {
	case holds && deleted:
		return v, "the object was deleted, and a leg has failed, or hangs", nil
	case holds:
		return v, "the object was put back to before the claim, and a leg has failed, or hangs", nil
	case deleted:
		err = fmt.Errorf("%w: the object of the replicated volume %s was deleted while it is used here: when a leg fails its users get errors; restore the object, with its status (docs/runbooks/replicas-missing.md)", errdefs.ErrPrecondition, m.ref.Key)
	}
	return v, "", err
}

// ofLegs returns the object of the volume, which this process has not seen before it was deleted or restored, as far as the objects of the legs that are used here tell.
func (m *mirrorReconciler) ofLegs(ctx context.Context) *v1alpha1.ReplicatedVolume {
	v := cluster.ReplicatedNamed(m.ref.Key)
	var own v1alpha1.VolumeList
	err := m.kube.Cache.List(ctx, &own)
	others, failure := m.allUsedHere(ctx)
	if err = errors.Join(err, failure); err != nil {
		m.logOnce(ctx, fmt.Errorf("find the legs of the replicated volume %s, whose object was deleted or restored: %w", v.Name, err))
	}
	for _, leg := range append(own.Items, others...) {
		if leg.Spec.ReplicaOf != v.Name || slices.Contains(v.Spec.Legs, leg.Name) { // see allUsedHere
			continue
		}
		if v.Spec.Legs = append(v.Spec.Legs, leg.Name); leg.Name == v.Name {
			v.Spec.Pool = leg.Named()
		}
	}
	return v
}

// holdsWrites reports whether what is written to a mirror waits until a leg leaves, or would if anything was written: a leg has failed, or does not answer, or
// its disk hangs, as findHung has it. Nothing waits for the sake of a single leg.
func (m *mirrorReconciler) holdsWrites(ctx context.Context, v *v1alpha1.ReplicatedVolume, s mirror.State) bool {
	legs := s.Legs
	if s.Joining != nil {
		legs = append(slices.Clone(legs), *s.Joining)
	}
	if len(legs) < 2 {
		return false
	}
	now, err := m.observe(ctx, v.DeepCopy(), s)
	if s.Held || slices.ContainsFunc(legs, func(l mirror.Leg) bool {
		if l.Failed && !l.OnlyReads {
			return true
		}
		return err == nil && now.leg[l.Device] != "" && m.whyUnreachable(now, now.leg[l.Device]) != ""
	}) {
		return true
	}
	if err != nil {
		return false
	}
	hung := m.hung(now)
	return slices.ContainsFunc(legs, func(l mirror.Leg) bool { return hung[now.leg[l.Device]] == diskHangs }) &&
		slices.ContainsFunc(s.Legs, func(l mirror.Leg) bool { return now.leg[l.Device] != "" && !m.isStuck(now, now.leg[l.Device]) })
}

// observe finds out which device is which leg. A leg without a Volume has no device: it is not made yet, as perhaps no node can make it, or its Volume is
// gone. If it is still in the mirror, its device is unknown, unless it is this node's own (ownLegID). A leg may be in a pool that is not there, as its disk is dead, or this node may have none of
// that name, and no claim of the leg: if such a leg has a device, that is known by its name.
func (m *mirrorReconciler) observe(ctx context.Context, v *v1alpha1.ReplicatedVolume, s mirror.State) (*mirrorView, error) {
	now := &mirrorView{v: v, s: s, device: map[string]uint64{}, leg: map[uint64]string{}, failing: map[string]string{}, io: map[uint64]ioCounts{}}
	for _, l := range now.all() {
		now.io[l.Device] = countIO(l.Device)
	}
	for _, name := range namedLegs(v) {
		id, err := m.legID(ctx, v, name)
		if errors.Is(err, errdefs.ErrNotFound) {
			id, err = m.ownLegID(ctx, now, name)
		}
		if errors.Is(err, errdefs.ErrNotFound) {
			now.absent = append(now.absent, name)
			continue
		}
		if err != nil {
			return nil, err
		}
		devices, err := m.volumes.LegDevices(ctx, id)
		if errors.Is(err, errdefs.ErrUnavailable) {
			devices, err = now.namedAfter(name), nil
		}
		if err != nil {
			return nil, err
		}
		for _, d := range devices {
			if _, is := now.device[name]; !is || now.has(d.Number) {
				now.device[name] = d.Number
			}
			now.leg[d.Number] = name
		}
		if m.hasLeg(ctx, now, name) {
			now.near = now.device[name]
		}
	}
	return now, nil
}

// namedLegs returns the names of the legs of a volume, also of those that are to be legs no more and may be in its mirror.
func namedLegs(v *v1alpha1.ReplicatedVolume) []string {
	names := slices.Clone(v.Spec.Legs)
	for _, leg := range v.Status.Legs {
		if !slices.Contains(names, leg.Name) {
			names = append(names, leg.Name)
		}
	}
	return names
}

// hasLeg reports whether a leg that is used here is on this node: by its object, or, as somebody may have deleted that, by the record of a pool, if there is no
// connection to it.
func (m *mirrorReconciler) hasLeg(ctx context.Context, now *mirrorView, name string) bool {
	if m.isNear(ctx, name) {
		return true
	}
	connected, err := m.connections.Legs(blockdev.Ref{Kind: m.ref.Kind, Key: name})
	if _, is := now.device[name]; !is || err != nil || len(connected) > 0 {
		return false
	}
	_, err = m.ownLegID(ctx, now, name)
	return err == nil
}

// ownLegID returns the ID of a leg in the mirror that this node has, though somebody has deleted its object. ErrNotFound if it is none.
func (m *mirrorReconciler) ownLegID(ctx context.Context, now *mirrorView, name string) (id volume.ID, err error) {
	for _, pool := range m.options.Pools {
		record, err := pool.Get(ctx, blockdev.Ref{Kind: m.ref.Kind, Key: name})
		if err != nil {
			continue
		}
		id = volume.IDOf(pool.Name(), record)
		devices, err := m.volumes.LegDevices(ctx, id)
		if err == nil && slices.ContainsFunc(devices, func(d blockdev.Device) bool { return now.has(d.Number) }) {
			m.note(m.ref.Key, func(r *replica) { r.legs[name] = id })
			return id, nil
		}
	}
	return id, fmt.Errorf("%w: leg %s", errdefs.ErrNotFound, name)
}

// namedAfter returns the device of the mirror that has the key of a leg in its name, as all devices over one of this node have. It needs no pool.
func (n *mirrorView) namedAfter(leg string) (devices []blockdev.Device) {
	for _, l := range n.all() {
		if name, err := os.ReadFile(dm.Sysfs(l.Device) + "/dm/name"); err == nil && strings.Contains(string(name), leg) {
			devices = append(devices, blockdev.Device{Number: l.Device})
		}
	}
	return devices
}

// has reports whether a device is one of the mirror's.
func (n *mirrorView) has(device uint64) bool {
	return slices.ContainsFunc(n.all(), func(l mirror.Leg) bool { return l.Device == device })
}

// all returns all legs of the mirror, also one that joins.
func (n *mirrorView) all() []mirror.Leg {
	if n.s.Joining == nil {
		return n.s.Legs
	}
	return append(slices.Clone(n.s.Legs), *n.s.Joining)
}

// reportUse has the object say how the volume is used, as the mirror shows it: it is not closed, which leg is read, and whether what is written waits for a disk.
// The object may have been restored, or an older driver may have opened the volume; and a late write of when the volume was closed by the same claim may have
// come.
func (m *mirrorReconciler) reportUse(ctx context.Context, now *mirrorView) error {
	reads := now.reads(func(name string) bool { return slices.Contains(now.v.Current(), name) })
	want := reportedUse{now.v.ResourceVersion, cmp.Or(reads, now.v.Status.Reads), cluster.Limited(reasons(m.hung(now)))}
	if want == m.reported {
		return nil // if the object does not say so, older definitions have dropped it
	}
	err := m.writeReplicas(ctx, now.v, func(s *v1alpha1.ReplicatedVolumeStatus) { s.Closed, s.Reads, s.Waits = 0, want.reads, want.waits })
	if err == nil {
		want.version = now.v.ResourceVersion
		m.reported = want
	}
	return err
}

// reportedUse is what reportUse has written last, and the resourceVersion that the object has since.
type reportedUse struct{ version, reads, waits string }

// reads returns the leg that the mirror reads from if it has no others than those that stay.
func (n *mirrorView) reads(stays func(name string) bool) string {
	for _, l := range n.s.Legs {
		if name := n.leg[l.Device]; stays(name) {
			return name
		}
	}
	return ""
}

// legs returns the legs whose writes the mirror waits for: all but one that joins, and that one too once it is equal and on the list.
func (n *mirrorView) legs() []mirror.Leg {
	if n.s.Equal() {
		if leg := n.v.Leg(n.leg[n.s.Joining.Device]); leg != nil && leg.Current {
			return append(slices.Clone(n.s.Legs), *n.s.Joining)
		}
	}
	return n.s.Legs
}

// names returns the names of those legs.
func (n *mirrorView) names() (names []string) {
	for _, l := range n.legs() {
		names = append(names, n.leg[l.Device])
	}
	return names
}

// unknown returns the devices of the mirror that belong to no leg, as far as can be found, without one that joins. As long as findFailed finds nothing they
// are no current legs either: it finds each leg that is listed, and whose device is none of the mirror's.
func (n *mirrorView) unknown() (devices []uint64) {
	for _, l := range n.s.Legs {
		if n.leg[l.Device] == "" {
			devices = append(devices, l.Device)
		}
	}
	return devices
}

// legState is what this process remembers of a leg: how often it has tried to join, and since when its node, or its disk, fails to do its part.
type legState struct {
	tries       int
	retryAt     time.Time
	silentSince time.Time // since when its node does not answer; zero: it answers
	ended       int64     // how many requests to it had ended at goesOnAt
	goesOnAt    time.Time // when no request to it was under way, or one had just ended; if goesOn is false, when it was looked at first; zero: never
	goesOn      bool      // this process has seen a request to it end, or none under way
	untoldSince time.Time // since when its record cannot be written, which others that are to leave wait for; zero: it can be, as far as is known
}

// silentFor notes whether the node of a leg is silent, and returns for how long it has been.
func (k *legState) silentFor(silent bool) time.Duration {
	switch {
	case !silent:
		k.silentSince = time.Time{}
		return 0
	case k.silentSince.IsZero():
		k.silentSince = time.Now()
	}
	return time.Since(k.silentSince)
}

// stateOf returns the state of a leg, by its name.
func (m *mirrorReconciler) stateOf(name string) *legState {
	if m.legStates[name] == nil {
		m.legStates[name] = &legState{}
	}
	return m.legStates[name]
}
