package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/mirror"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/remotepool"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// How a leg goes out of a mirror: it is found to have failed, taken off the list of current legs, and only then left behind by the mirror.

// legSilence is for how many looks the node of a leg may not answer before the others go on without it.
const legSilence = 5

// dropSilent takes legs that do not answer for too long off the list, and ends the connections to them, if another one is current. They leave the mirror with the next look.
func (m *mirrorReconciler) dropSilent(ctx context.Context) {
	v, is := m.replicated(m.ref.Key)
	if !is || v.Spec.Claim.Generation != m.generation || v.Status.Opened != m.generation {
		return
	}
	s, err := mirror.Look(m.name)
	if err != nil || len(s.Legs) == 0 {
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
		case err == nil && len(now.failing) > 0:
			_, err = m.delist(ctx, now)
		}
	}
	if err != nil {
		m.logOnce(ctx, err)
	}
}

// findFailed finds the legs that the mirror is not to wait for any more, and why: what failed; what does not answer for too long; what is to be a leg no more; and what is listed, and not in the mirror, which nobody may take for current.
func (m *mirrorReconciler) findFailed(now *mirrorView) {
	for _, l := range now.legs() {
		name := now.leg[l.Device]
		switch {
		case name == "": // what it was is listed, and not among these
		case l.Failed:
			now.failing[name] = "what was written to it, or read from it, failed"
		case !slices.Contains(now.v.Spec.Legs, name):
			now.failing[name] = "it is to be a leg no more"
		default:
			if why := m.whyUnreachable(now, name); why != "" {
				now.failing[name] = why
			}
		}
	}
	for _, name := range now.v.Current() {
		if !slices.Contains(now.names(), name) {
			now.failing[name] = "it is not written to"
		}
	}
	m.findUntold(now)
}

// connectionEnded is unreached of a leg that will not be reached any more by this mirror: its machine has started anew, or somebody else has it.
const connectionEnded = "the connection to its node has ended"

// isSevered reports whether each leg that is current has failed what was written, or will not be reached any more, and the kernel may hold what is written all the same. One alone has its users get errors.
func (m *mirrorReconciler) isSevered(now *mirrorView) bool {
	return (now.s.Joining != nil || len(now.s.Legs) > 1) && !slices.ContainsFunc(now.legs(), func(l mirror.Leg) bool {
		return !(l.Failed && !l.OnlyReads) && m.whyUnreachable(now, now.leg[l.Device]) != connectionEnded
	})
}

// onlyReadsFailed reports whether all legs that are current have failed, and took all that was written: nothing is held.
func (n *mirrorView) onlyReadsFailed() bool {
	return !slices.ContainsFunc(n.legs(), func(l mirror.Leg) bool { return !l.OnlyReads })
}

// endSevered has all who use a mirror that is severed get errors. The kernel holds what one leg failed for the others, be it the one that joins, or one of which nobody has noticed that it has ended as nothing comes to it; for ever, and so the volume could not be taken down.
// What is held is not tried again: a disk that has failed a flush takes the next one, and has lost what was written.
func (m *mirrorReconciler) endSevered(ctx context.Context, now *mirrorView) error {
	klog.FromContext(ctx).Info("All legs of a replicated volume that are current have failed, or the connections to them have ended; its users get errors until it is staged again", "current", now.names(), "why", reasons(now.failing))
	return m.changeMirror(ctx, func() error { return mirror.End(ctx, m.name) })
}

// whyUnreachable says why a leg on another node cannot be reached any more, or not for too long; empty: it can.
func (m *mirrorReconciler) whyUnreachable(now *mirrorView, name string) string {
	k := m.stateOf(name)
	if now.device[name] == now.near {
		return ""
	}
	legs, err := m.connections.Legs(blockdev.Ref{Kind: m.ref.Kind, Key: name})
	used := slices.DeleteFunc(legs, func(c remotepool.Leg) bool { return !c.Used })
	switch {
	case err != nil: // nothing is known
	case len(used) == 0:
		return connectionEnded
	case !slices.ContainsFunc(used, func(c remotepool.Leg) bool { return c.Live }):
		if k.silentSince.IsZero() {
			k.silentSince = time.Now()
		}
		if time.Since(k.silentSince) > legSilence*m.options.LookEvery {
			return "its node does not answer on the network"
		}
		return ""
	}
	k.silentSince = time.Time{}
	return ""
}

// dropFailed takes legs off the list, and then out of the mirror, which goes on without them. The last one that is current stays; if it cannot be read, one that joins leaves.
func (m *mirrorReconciler) dropFailed(ctx context.Context, now *mirrorView) error {
	if now.s.Joining != nil && now.onlyReadsFailed() {
		return m.cancelJoin(ctx, now, now.s.Joining.Device, "it got not all, as a part of the others cannot be read")
	}
	devices, err := m.delist(ctx, now)
	if err != nil {
		return err
	}
	for name := range now.failing {
		m.backOff(name)
	}
	if err := m.noteUntold(m.tellAll(ctx, now.v)); err != nil { // else an object of before is taken for this one, and who leaves for current
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

// delist takes legs that have failed off the list, and ends the connections to those that do not answer. It returns the devices that are to leave the mirror.
func (m *mirrorReconciler) delist(ctx context.Context, now *mirrorView) (devices []uint64, err error) {
	rest := slices.DeleteFunc(now.v.Current(), func(name string) bool { return now.failing[name] != "" })
	if len(rest) == 0 {
		return nil, fmt.Errorf("%w: no leg of the replicated volume takes what is written: %s", errdefs.ErrUnavailable, reasons(now.failing))
	}
	before := now.v.ResourceVersion
	if err := m.writeLists(ctx, now.v, nil, func(s *v1alpha1.ReplicatedVolumeStatus) {
		for i := range s.Legs {
			if why := now.failing[s.Legs[i].Name]; why != "" {
				setWaiting(&s.Legs[i], why)
			}
		}
		s.Legs = slices.DeleteFunc(s.Legs, func(leg v1alpha1.Leg) bool { return !leg.Current && !slices.Contains(now.v.Spec.Legs, leg.Name) })
	}); err != nil {
		return nil, m.noteUntold(err)
	}
	devices = now.unknown()
	for name, why := range now.failing {
		if now.v.ResourceVersion != before {
			klog.FromContext(ctx).Info("A leg of a replicated volume is not current any more", "leg", name, "why", why, "current", rest)
		}
		if device, is := now.device[name]; is {
			devices = append(devices, device)
		}
		m.disconnectSilent(ctx, name)
	}
	return devices, nil
}

// disconnectSilent ends the connection to a leg that does not answer: what is on its way there ends with errors, which the mirror holds; else it would be waited for.
func (m *mirrorReconciler) disconnectSilent(ctx context.Context, name string) {
	legs, err := m.connections.Legs(blockdev.Ref{Kind: m.ref.Kind, Key: name})
	for _, c := range legs {
		if !c.Live {
			err = errors.Join(err, m.connections.End(ctx, c.NQN))
		}
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "Could not end the connection to a leg that is not current any more", "leg", name)
	}
}

// releaseLeg lets go of a leg that is not in the mirror any more.
func (m *mirrorReconciler) releaseLeg(ctx context.Context, v *v1alpha1.ReplicatedVolume, name string) {
	if err := m.runWatched(ctx, m.dropSilent, func() error {
		ctx, cancel := context.WithTimeout(ctx, legSilence*m.options.LookEvery) // who has the lock may wait for the mirror
		defer cancel()
		letGo := func() error {
			return m.withLeg(ctx, v, name, func(id volume.ID) error { return m.closeOrDisconnect(ctx, id) })
		}
		if name == m.ref.Key { // it has the lock of the volume
			return m.locked(ctx, name, letGo)
		}
		return letGo()
	}); err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).Info("Could not give back a leg that is not current any more; it is tried again when it is to join", "leg", name, "err", err.Error())
	}
}

// reasons says of legs why they are not current, in their order: what is said again is not told again.
func reasons(failing map[string]string) string {
	var all []string
	for _, name := range slices.Sorted(maps.Keys(failing)) {
		all = append(all, fmt.Sprintf("leg %s: %s", name, failing[name]))
	}
	return strings.Join(all, "; ")
}
