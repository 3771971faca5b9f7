package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/mirror"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// How a leg joins a mirror: the kernel makes it equal to the others, and then it is put on the list of current legs.

// listUnlisted puts legs of the mirror on the list that are not there, as somebody has changed the object.
func (m *mirrorReconciler) listUnlisted(ctx context.Context, now *mirrorView) error {
	for _, l := range now.s.Legs {
		name := now.leg[l.Device]
		if leg := now.v.Leg(name); name == "" || leg != nil && leg.Current {
			continue
		}
		if listed, err := m.putOnList(ctx, now, name, l.Device); err != nil || !listed {
			return err
		}
		if err := m.noteCurrent(ctx, now, name); err != nil {
			return err
		}
	}
	return nil
}

// putOnList puts a leg on the list that is in the mirror and equal. If it cannot be flushed it leaves the mirror instead, and is tried again later.
func (m *mirrorReconciler) putOnList(ctx context.Context, now *mirrorView, name string, device uint64) (listed bool, err error) {
	err = m.runWatched(ctx, m.dropSilent, func() error {
		return m.complete(ctx, now.v, name, device, func() error {
			return m.writeLists(ctx, now.v, nil, func(s *v1alpha1.ReplicatedVolumeStatus) {
				if now.v.Leg(name) == nil {
					s.Legs = append(s.Legs, v1alpha1.Leg{Name: name})
				}
				setCurrent(now.v.Leg(name), m.generation)
				if device == now.near { // it becomes the first one (mirror.Finish)
					s.Reads = name
				}
			})
		})
	})
	if !errors.Is(err, errNotFlushed) {
		return err == nil, err
	}
	why := "what it got could not be made durable: " + errdefs.Words(err)
	if slices.Contains(now.v.Current(), name) {
		now.failing[name] = why
		return false, m.dropFailed(ctx, now)
	}
	return false, m.cancelJoin(ctx, now, device, why)
}

// noteCurrent resets what is remembered of a leg that was put on the list, and tells all legs of the new list.
func (m *mirrorReconciler) noteCurrent(ctx context.Context, now *mirrorView, name string) error {
	m.legStates[name] = &legState{goesOnAt: time.Now(), goesOn: true} // it was just flushed
	m.common = commonMoment{written: -1}
	klog.FromContext(ctx).Info("A leg of a replicated volume has everything that was written, and is current", "leg", name)
	return m.tellAll(ctx, now.v) // at once: a leg that leaves before it is told knows only that the list was due
}

// errNotFlushed: the disk of a leg could not make durable what was written to it.
var errNotFlushed = errors.New("it cannot be flushed")

// complete flushes a leg that is equal, writes into its record that it is sound, with the labels of the current legs, and calls list, all under the lock of
// the volume: so the labels stay the same until the leg is on the list. errNotFlushed if it cannot be flushed.
func (m *mirrorReconciler) complete(ctx context.Context, v *v1alpha1.ReplicatedVolume, name string, device uint64, list func() error) error {
	ctx, cancel := context.WithTimeout(ctx, openTime)
	defer cancel()
	if err := mirror.FlushLeg(m.name, device); err != nil {
		return errors.Join(errNotFlushed, err)
	}
	return m.withLocks([]string{keylock.Volume(m.ref.Key)}, func() error {
		current, err := m.currentLeg(ctx, v)
		if err != nil {
			return err
		}
		if err := m.withLeg(ctx, v, name, func(id volume.ID) error {
			if err := m.checkNotRestarted(ctx, name, id); err != nil {
				return err
			}
			return m.volumes.ChangeLeg(ctx, id, func(s *volume.LegState, own map[string]string) error {
				if s.Opened != m.generation {
					return fmt.Errorf("%w: leg %s was opened by claim %d, not by %d", errdefs.ErrPrecondition, id, s.Opened, m.generation)
				}
				volume.CarryLabels(current.Data.Labels, own)
				s.Sound = m.generation
				return nil
			})
		}); err != nil {
			return err
		}
		return list()
	})
}

// stepJoining is the step while the kernel makes a leg equal.
func (m *mirrorReconciler) stepJoining(ctx context.Context, now *mirrorView) error {
	name := now.leg[now.s.Joining.Device]
	switch {
	case now.s.Joining.Failed || name == "" || !slices.Contains(now.v.Spec.Legs, name) || m.whyUnreachable(now, name) != "":
		m.disconnectSilent(ctx, name)
		return m.cancelJoin(ctx, now, now.s.Joining.Device, "it failed while it was made equal")
	case now.s.Equal():
		return m.finishJoin(ctx, now, name)
	}
	return m.reportLeg(ctx, now.v, name, func(leg *v1alpha1.Leg) {
		if p := leg.Progress; leg.State == v1alpha1.LegJoining && p != nil && p.Total == now.s.Total && abs(now.s.Synced-p.Done) < max(1, p.Total/progressOf) {
			return
		}
		setWaiting(leg, fmt.Sprintf("%s of %s are equal to the others", cluster.Bytes(now.s.Synced), cluster.Bytes(now.s.Total)))
		leg.State, leg.Progress = v1alpha1.LegJoining, &v1alpha1.Progress{Done: now.s.Synced, Total: now.s.Total}
	})
}

// finishJoin puts a leg on the list that is equal, and then makes it a leg of the mirror like the others. The order matters: as long as it joins, the kernel
// acknowledges nothing that it alone has, whichever leg fails (mirror.Join). It may be on the list already, if an earlier process ended in between.
func (m *mirrorReconciler) finishJoin(ctx context.Context, now *mirrorView, name string) error {
	if err := m.tellLastList(ctx, now.v, now.names(), name); err != nil {
		return err
	}
	if s, err := mirror.Look(m.name); err != nil || s.Event != m.seenEvent { // a leg may have failed, and the kernel may have forgotten that: Watch tells
		return err
	}
	if listed, err := m.putOnList(ctx, now, name, now.s.Joining.Device); err != nil || !listed {
		return err
	}
	if err := m.changeMirror(ctx, func() error { return mirror.Finish(ctx, m.name, now.near) }); err != nil {
		return err
	}
	return m.noteCurrent(ctx, now, name)
}

// cancelJoin takes a leg that is not on the list out of the mirror. It is tried again later, unless its device belongs to no leg.
func (m *mirrorReconciler) cancelJoin(ctx context.Context, now *mirrorView, device uint64, why string) error {
	name := now.leg[device]
	if err := m.changeMirror(ctx, func() error { return mirror.Leave(ctx, m.name, device) }); err != nil {
		return err
	}
	if name == "" {
		return nil
	}
	m.backOff(name)
	m.releaseLeg(ctx, now.v, name)
	return m.reportLeg(ctx, now.v, name, func(leg *v1alpha1.Leg) { setWaiting(leg, why+", and is tried again") })
}

// reportLeg edits what the object says of a leg.
func (m *mirrorReconciler) reportLeg(ctx context.Context, v *v1alpha1.ReplicatedVolume, name string, edit func(*v1alpha1.Leg)) error {
	return m.writeReplicas(ctx, v, func(s *v1alpha1.ReplicatedVolumeStatus) {
		if v.Leg(name) == nil {
			s.Legs = append(s.Legs, v1alpha1.Leg{Name: name})
		}
		edit(v.Leg(name))
	})
}

// backOff sets when a leg is tried again, later each time.
func (m *mirrorReconciler) backOff(name string) {
	k := m.stateOf(name)
	k.retryAt = time.Now().Add(time.Duration(min(firstJoinBackoff<<min(k.tries, 16), longestJoinBackoff)) * m.options.LookEvery)
	k.tries++
}

// startJoin starts to join the first leg that is not in the mirror and is due, in the background.
func (m *mirrorReconciler) startJoin(ctx context.Context, now *mirrorView) error {
	for _, name := range now.v.Spec.Legs {
		if slices.Contains(now.names(), name) || slices.Contains(now.absent, name) || time.Now().Before(m.stateOf(name).retryAt) {
			continue
		}
		if !m.acquireSlot(ctx, now) {
			return m.reportLeg(ctx, now.v, name, func(leg *v1alpha1.Leg) {
				setWaiting(leg, "legs of other volumes that this node uses are made equal first")
				leg.State = v1alpha1.LegQueued
			})
		}
		tries, began := m.stateOf(name).tries, time.Now()
		m.startBackground(func() func(*mirrorView) error {
			err := m.withLocks([]string{keylock.Volume(m.ref.Key)}, func() error { return m.joinLeg(ctx, now, name, tries) })
			took := time.Since(began)
			return func(now *mirrorView) error { return m.endJoin(ctx, now, name, took, err) }
		})
		return nil
	}
	return nil
}

// endJoin takes the result of joinLeg, and how long that took: after an error the leg is tried again later, and the object says why. A try that has waited for
// somebody else has had the lock of the volume meanwhile: for as long as that calls have it now.
func (m *mirrorReconciler) endJoin(ctx context.Context, now *mirrorView, name string, took time.Duration, err error) error {
	switch {
	case errors.Is(err, errdefs.ErrBusy), errors.Is(err, errMirrorChanged):
		m.stateOf(name).retryAt = time.Now().Add(max(took, m.options.LookEvery))
		return nil
	case err == nil:
		return nil
	}
	m.backOff(name)
	return m.reportLeg(ctx, now.v, name, func(leg *v1alpha1.Leg) {
		setWaiting(leg, errdefs.Words(err))
		switch {
		case errors.Is(err, errAhead):
			leg.State = v1alpha1.LegAhead
		case errors.Is(err, mirror.ErrUnfit):
			leg.State = v1alpha1.LegUnfit
		}
	})
}

// joinLeg opens a leg, and has the kernel start to copy what it lacks. The caller has the lock of the volume. ErrBusy or errMirrorChanged if it is to be
// tried again soon.
func (m *mirrorReconciler) joinLeg(ctx context.Context, now *mirrorView, name string, tries int) error {
	ctx, cancel := context.WithTimeout(ctx, openTime)
	defer cancel()
	v, err := m.replicatedNow(ctx, m.ref.Key)
	if err != nil {
		return err
	}
	if v.Spec.Claim.Generation != m.generation || v.Status.Opened != m.generation || !slices.Contains(v.Spec.Legs, name) || v.Leg(name) != nil && v.Leg(name).Current {
		return fmt.Errorf("%w: the object of the replicated volume says something else by now", errdefs.ErrBusy)
	}
	if astray, err := m.bypassesMirror(ctx, v); err != nil || astray {
		return cmp.Or(err, fmt.Errorf("%w: the replicated volume is not over its mirror yet", errdefs.ErrBusy))
	}
	current, err := m.currentLeg(ctx, v)
	if err != nil {
		return err
	}
	return m.withLegs(ctx, v, append(now.names(), name), func(legs map[string]volume.ID) error {
		opened := m.reportHang(ctx, v, name, func(ctx context.Context, now *v1alpha1.ReplicatedVolume, why string) {
			_ = m.reportLeg(ctx, now, name, func(leg *v1alpha1.Leg) { setWaiting(leg, why) }) // it is tried again
		})
		defer opened()
		leg, err := m.attach(ctx, v, legs[name])
		if errors.Is(err, errLaterClaim) {
			return m.whyLater(ctx, v, cmp.Or(isAhead(v, leg), err))
		}
		if err != nil {
			return err
		}
		if err = isAhead(v, leg); err == nil {
			err = m.volumes.ChangeLeg(ctx, legs[name], func(s *volume.LegState, own map[string]string) error {
				volume.CarryLabels(current.Data.Labels, own)
				s.Opened, s.Closed, s.Boot = m.generation, false, leg.Now // s.Sound stays as it is
				return nil
			})
		}
		opened()
		var lacks func(context.Context) ([]dm.Range, error)
		if err == nil {
			lacks, err = m.missingRanges(ctx, v, leg, legs, now.s.Size, tries)
		}
		if err == nil {
			err = mirror.Join(ctx, m.name, leg.device.Number, func(ctx context.Context) ([]dm.Range, error) {
				if err := m.checkUnchanged(now); err != nil { // the marks are of a leg that was in the mirror then
					return nil, err
				}
				return lacks(ctx)
			})
		}
		if s, failure := mirror.Look(m.name); err == nil && failure == nil {
			klog.FromContext(ctx).Info("A leg of a replicated volume is made equal to the others", "leg", name, "bytes", s.Total-s.Synced)
		}
		return errors.Join(err, leg.device.Close())
	})
}

// How often a leg that could not join, or failed while it did, is tried again, in looks (Options.LookEvery), and longer each time.
const (
	firstJoinBackoff   = 2
	longestJoinBackoff = 64
)
