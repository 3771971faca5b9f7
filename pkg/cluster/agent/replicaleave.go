package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/mirror"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/remotepool"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// How a leg leaves a mirror: it is found to have failed, is taken off the list of current legs, and only then the mirror goes on without it.

// legSilence is for how many looks the node of a leg may not answer before the others go on without it.
const legSilence = 5

// hangTime is for how long requests may be under way to a leg whose node answers, and none of them end, before the others go on without it. The kernel itself
// gives up a request to another node after 30 s (nvme_core.io_timeout), connects anew, and sends it again.
const hangTime = 20 * time.Second

// diskHangs: see findHung.
const diskHangs = "its node answers, and what is written to it, or read from it, does not end: its disk hangs"

// dropSilent takes legs that have failed, or do not answer, off the list, and ends the connections to them, if another leg is current. They leave the mirror
// in the next step. If the mirror has to end (whyEnds), the connections to all legs that do not answer end: else the next step would never come.
func (m *mirrorReconciler) dropSilent(ctx context.Context) {
	s, err := mirror.Look(m.name)
	if err != nil || len(s.Legs) == 0 {
		return
	}
	v, is := m.replicated(m.ref.Key)
	if !is || v.Spec.Claim.Generation != m.generation {
		if v, why, _ := m.whyEnds(ctx, s); why != "" && !m.isReplaced() {
			m.disconnectEnding(ctx, v, s)
		}
		return
	}
	now, err := m.observe(ctx, v.DeepCopy(), s)
	if err == nil {
		m.findFailed(now)
		if s.Joining != nil && m.whyUnreachable(now, now.leg[s.Joining.Device]) != "" {
			m.disconnectSilent(ctx, now.leg[s.Joining.Device])
		}
		before, failure := m.isRestored(ctx, now)
		switch err = failure; {
		case before:
			err = m.restoreList(ctx, now)
		case err == nil:
			if err = m.reportUse(ctx, now); len(now.failing) > 0 {
				_, err = m.delistThere(ctx, now)
			}
		}
	}
	if err != nil {
		m.logOnce(ctx, err)
	}
}

// findFailed fills now.failing with the legs that have to leave, and why: they failed; they do not answer for too long; their disks hang; they are to be legs
// no more, and others stay; or they are listed, and not in the mirror, so that nobody may take them for current.
func (m *mirrorReconciler) findFailed(now *mirrorView) {
	var left []string // to be legs no more
	stays := m.readable(now)
	for _, l := range now.legs() {
		switch name := now.leg[l.Device]; {
		case name == "": // if it is a leg that is listed, that is found below; else it belongs to no leg, and leaves in any case (mirrorView.unknown)
		case l.Failed && name != stays:
			now.failing[name] = "what was written to it, or read from it, failed"
		default:
			if why := m.whyUnreachable(now, name); why != "" {
				now.failing[name] = why
			} else if !slices.Contains(now.v.Spec.Legs, name) {
				left = append(left, name)
			}
		}
	}
	for _, name := range now.v.Current() {
		if !slices.Contains(now.names(), name) {
			now.failing[name] = "it is not written to"
		}
	}
	m.findHung(now)
	m.findLeft(now, left)
	m.findUntold(now)
}

// readable returns the leg that stays of a mirror whose legs have all failed, one at least reads alone: such a leg has everything, in parts that cannot be read
// perhaps. The kernel reads from none of them any more, until the others have left. Empty if it is not so, or as long as a leg joins: that one leaves (dropFailed).
func (m *mirrorReconciler) readable(now *mirrorView) string {
	if now.s.Joining != nil || len(now.s.Failed()) < len(now.s.Legs) {
		return ""
	}
	for _, l := range now.legs() {
		if name := now.leg[l.Device]; l.OnlyReads && slices.Contains(now.v.Current(), name) && m.whyUnreachable(now, name) == "" {
			return name
		}
	}
	return ""
}

// findHung adds the legs to now.failing whose disks hang, if a current leg is left that ends its requests. A leg of this node stays: nothing ends what is
// under way to it, and the mirror waits for that before the leg can leave.
func (m *mirrorReconciler) findHung(now *mirrorView) {
	hung := m.hung(now)
	ends := slices.ContainsFunc(now.v.Current(), func(name string) bool { return now.failing[name] == "" && !m.isStuck(now, name) })
	for name, why := range hung {
		if ends && now.device[name] != now.near {
			now.failing[name] = why
		}
	}
}

// isStuck reports whether a leg in the mirror has ended no request for legSilence, and some are under way. It is taken for stuck until this process has seen it
// go on: its disk may hang since before the driver started.
func (m *mirrorReconciler) isStuck(now *mirrorView, name string) bool {
	device, is := now.device[name]
	return is && now.has(device) && (m.stuckFor(now, device) >= legSilence*m.options.LookEvery || !m.stateOf(name).goesOn)
}

// allStuck reports whether all of some legs are stuck.
func (m *mirrorReconciler) allStuck(now *mirrorView, names []string) bool {
	return !slices.ContainsFunc(names, func(name string) bool { return !m.isStuck(now, name) })
}

// hung returns the legs whose disks hang and that are not to leave, and what that means.
func (m *mirrorReconciler) hung(now *mirrorView) map[string]string {
	hung := map[string]string{}
	for _, l := range now.all() {
		switch name := now.leg[l.Device]; {
		case name == "" || now.failing[name] != "" || m.stuckFor(now, l.Device) <= hangTime:
		case l.Device == now.near:
			hung[name] = fmt.Sprintf("it is on node %s, which uses the volume, and its disk hangs, so that what is written waits until the disk answers or fails; power that node off, and the volume can be used on another one", m.local.Node())
		default:
			hung[name] = diskHangs
		}
	}
	return hung
}

// stuckFor returns for how long requests have been under way to a leg, and none has ended. While its node does not answer it is 0 (whyUnreachable).
func (m *mirrorReconciler) stuckFor(now *mirrorView, device uint64) time.Duration {
	k, io := m.stateOf(now.leg[device]), now.io[device]
	first := k.goesOnAt.IsZero()
	goesOn := io.underWay == 0 || !k.silentSince.IsZero() || io.ended != k.ended && !first
	if first || goesOn {
		k.ended, k.goesOnAt, k.goesOn = io.ended, time.Now(), goesOn
	}
	return time.Since(k.goesOnAt)
}

// findLeft adds the legs to now.failing that are to be legs no more. Those that are current stay as long as no other current leg does: they alone have
// everything, and the others are made equal to them.
func (m *mirrorReconciler) findLeft(now *mirrorView, left []string) {
	current := now.v.Current()
	stays := slices.ContainsFunc(current, func(name string) bool { return now.failing[name] == "" && !slices.Contains(left, name) })
	for _, name := range left {
		if stays || !slices.Contains(current, name) {
			now.failing[name] = "it is to be a leg no more"
		}
	}
}

// connectionEnded is why a leg is unreachable for good, for this mirror: its machine was restarted, or somebody else has it.
const connectionEnded = "the connection to its node has ended"

// isSevered reports whether every current leg has failed a write, or is unreachable for good, while the kernel may hold writes all the same. It does not hold
// those to a single leg: that one's users get errors.
func (m *mirrorReconciler) isSevered(now *mirrorView) bool {
	return (now.s.Joining != nil || len(now.s.Legs) > 1) && !slices.ContainsFunc(now.legs(), func(l mirror.Leg) bool {
		name := now.leg[l.Device]
		switch {
		case l.Failed && !l.OnlyReads:
			return false
		case name == "": // somebody may have deleted its object; the kernel has a device no more whose connection has ended
			_, err := os.Stat(dm.Sysfs(l.Device))
			return err == nil
		}
		return m.whyUnreachable(now, name) != connectionEnded
	})
}

// onlyReadsFailed reports whether all current legs have failed reads alone: no write is held.
func (n *mirrorView) onlyReadsFailed() bool {
	return !slices.ContainsFunc(n.legs(), func(l mirror.Leg) bool { return !l.OnlyReads })
}

// endSevered ends a mirror that is severed: its users get errors. Otherwise the kernel would hold writes for ever, for the sake of a leg that joins, or of
// one whose end it has not noticed, and the volume could not be unstaged. What is held is not tried again: a disk that has failed a flush may take the next
// one, and lack what was written before.
func (m *mirrorReconciler) endSevered(ctx context.Context, now *mirrorView) error {
	klog.FromContext(ctx).Info("All legs of a replicated volume that are current have failed, or the connections to them have ended; its users get errors until it is staged again", "current", now.names(), "why", reasons(now.failing))
	return m.changeMirror(ctx, func() error { return mirror.End(ctx, m.name) })
}

// whyUnreachable returns why a leg on another node is taken for unreachable; empty: it is reachable, or has been silent for less than legSilence.
func (m *mirrorReconciler) whyUnreachable(now *mirrorView, name string) string {
	if now.device[name] == now.near {
		return ""
	}
	legs, err := m.connections.Legs(blockdev.Ref{Kind: m.ref.Kind, Key: name})
	used := slices.DeleteFunc(legs, func(c remotepool.Leg) bool { return !c.Used })
	if err == nil && len(used) == 0 {
		return connectionEnded
	}
	silent := err == nil && !slices.ContainsFunc(used, func(c remotepool.Leg) bool { return c.Live }) // after an error nothing is known
	if m.stateOf(name).silentFor(silent) > legSilence*m.options.LookEvery {
		return "its node does not answer on the network"
	}
	return ""
}

// dropFailed takes the failing legs off the list, and then out of the mirror, with the devices that belong to no leg. The last current one stays. If only
// reads fail, on all of them, the leg that joins leaves instead.
func (m *mirrorReconciler) dropFailed(ctx context.Context, now *mirrorView) error {
	if now.s.Joining != nil && now.onlyReadsFailed() {
		return m.cancelJoin(ctx, now, now.s.Joining.Device, "it got not all, as a part of the others cannot be read")
	}
	devices, err := m.delistThere(ctx, now)
	if err != nil {
		return err
	}
	for name := range now.failing {
		m.backOff(name)
	}
	if err := m.noteUntold(m.tellAll(ctx, now.v)); err != nil { // otherwise an object that is restored to before would pass for this one, and the legs that leave for current
		return err
	}
	if err := m.changeMirror(ctx, func() error { return mirror.Leave(ctx, m.name, devices...) }); err != nil {
		return err
	}
	m.clearUntold()
	for name := range now.failing {
		m.releaseLeg(ctx, now.v, name)
	}
	return nil
}

// delistThere is delist, unless the mirror is gone: then its legs were given back, and what was found of them is no failure. While it is there, none is.
func (m *mirrorReconciler) delistThere(ctx context.Context, now *mirrorView) (devices []uint64, err error) {
	if _, err := mirror.Look(m.name); err != nil {
		return nil, err
	}
	return m.delist(ctx, now)
}

// delist takes the failing legs off the list, ends the connections to those that do not answer, or hang, and returns the devices that have to leave the mirror.
// ErrUnavailable if no current leg would be left that ends its requests: nothing is acknowledged while its disk hangs, and should that not come back, those that
// have failed have everything. ErrBusy if the watch is behind the object, so that a leg that leaves may have been listed meanwhile.
func (m *mirrorReconciler) delist(ctx context.Context, now *mirrorView) (devices []uint64, err error) {
	rest := slices.DeleteFunc(now.v.Current(), func(name string) bool { return now.failing[name] != "" })
	if len(rest) == 0 {
		return nil, fmt.Errorf("%w: no leg of the replicated volume takes what is written: %s", errdefs.ErrUnavailable, reasons(now.failing))
	}
	if m.allStuck(now, rest) {
		return nil, fmt.Errorf("%w: legs of the replicated volume fail, and stay on the list until a disk of the others answers that hangs (%s): %s", errdefs.ErrUnavailable, strings.Join(rest, ", "), reasons(now.failing))
	}
	before := now.v.ResourceVersion
	if err := m.writeLists(ctx, now.v, nil, func(s *v1alpha1.ReplicatedVolumeStatus) {
		for i := range s.Legs {
			if why := now.failing[s.Legs[i].Name]; why != "" {
				setWaiting(&s.Legs[i], why)
			}
		}
		if now.failing[s.Reads] != "" {
			s.Reads = now.reads(func(name string) bool { return slices.Contains(rest, name) })
		}
	}); err != nil {
		return nil, m.noteUntold(err)
	}
	devices = now.unknown()
	if now.v.ResourceVersion == before && (len(devices) > 0 || m.last.get().number == 0) { // nothing was written, which would have shown that now.v is the object
		if _, err := m.notBehind(ctx, now.v); err != nil {
			return nil, err
		}
	}
	for name, why := range now.failing {
		if now.v.ResourceVersion != before {
			klog.FromContext(ctx).Info("A leg of a replicated volume is not current any more", "leg", name, "why", why, "current", rest)
		}
		if device, is := now.device[name]; is {
			devices = append(devices, device)
		}
		m.disconnect(ctx, name, why == diskHangs)
	}
	return devices, nil
}

// forgetLeft takes the legs out of the object's status that are to be legs no more, once they are neither on the list nor in the mirror. Not before: the
// device of a leg is found by its name.
func (m *mirrorReconciler) forgetLeft(ctx context.Context, now *mirrorView) error {
	hasLeft := func(leg v1alpha1.Leg) bool {
		device, is := now.device[leg.Name]
		return !leg.Current && !slices.Contains(now.v.Spec.Legs, leg.Name) && !(is && now.has(device))
	}
	if !slices.ContainsFunc(now.v.Status.Legs, hasLeft) {
		return nil
	}
	return m.writeReplicas(ctx, now.v, func(s *v1alpha1.ReplicatedVolumeStatus) { s.Legs = slices.DeleteFunc(s.Legs, hasLeft) })
}

// disconnectSilent ends the connections to a leg that does not answer: I/O that is under way ends with errors, which the mirror holds. Otherwise it would be
// waited for.
func (m *mirrorReconciler) disconnectSilent(ctx context.Context, name string) {
	m.disconnect(ctx, name, false)
}

// disconnectEnding ends the connections to legs of a mirror, in state s, that has to end, as that would wait for them: to those whose disks hang, and to those that
// have not answered for two looks. If a flush failed at once, what the leg has taken might still be under way to another one: the kernel would forget the failure,
// and acknowledge the next write without that leg (docs/decisions/replicas.md).
func (m *mirrorReconciler) disconnectEnding(ctx context.Context, v *v1alpha1.ReplicatedVolume, s mirror.State) {
	hung := map[string]string{}
	if now, err := m.observe(ctx, v.DeepCopy(), s); err == nil {
		hung = m.hung(now)
	}
	for _, name := range namedLegs(v) {
		legs, err := m.connections.Legs(blockdev.Ref{Kind: m.ref.Kind, Key: name})
		silent := slices.ContainsFunc(legs, func(c remotepool.Leg) bool { return !c.Live })
		switch {
		case err != nil:
		case hung[name] == diskHangs:
			m.disconnect(ctx, name, true)
		case m.stateOf(name).silentFor(silent) >= 2*m.options.LookEvery:
			m.disconnectSilent(ctx, name)
		}
	}
}

// disconnect is disconnectSilent; with all, connections that answer end, too. The kernel gives up what is under way by those after 30 s.
func (m *mirrorReconciler) disconnect(ctx context.Context, name string, all bool) {
	legs, err := m.connections.Legs(blockdev.Ref{Kind: m.ref.Kind, Key: name})
	for _, c := range legs {
		if all || !c.Live {
			err = errors.Join(err, m.connections.End(ctx, c.NQN))
		}
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "Could not end the connection to a leg that is not current any more", "leg", name)
	}
}

// releaseLeg gives a leg that is not in the mirror any more back to its node. A failure is only logged.
func (m *mirrorReconciler) releaseLeg(ctx context.Context, v *v1alpha1.ReplicatedVolume, name string) {
	if err := m.runWatched(ctx, m.dropSilent, func() error {
		ctx, cancel := context.WithTimeout(ctx, legSilence*m.options.LookEvery) // who has the lock may wait for the mirror
		defer cancel()
		letGo := func() error {
			return m.withLeg(ctx, v, name, func(id volume.ID) error { return m.closeOrDisconnect(ctx, id) })
		}
		if name == m.ref.Key { // its lock is that of the volume, which withLeg does not take
			return m.locked(ctx, name, letGo)
		}
		return letGo()
	}); err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).Info("Could not give back a leg that is not current any more; it is tried again when it is to join", "leg", name, "err", err.Error())
	}
}

// reasons returns why legs are not current, as one text, sorted by their names: so the same reasons are the same text.
func reasons(failing map[string]string) string {
	var all []string
	for _, name := range slices.Sorted(maps.Keys(failing)) {
		all = append(all, fmt.Sprintf("replica %s: %s", name, failing[name]))
	}
	return strings.Join(all, "; ")
}
