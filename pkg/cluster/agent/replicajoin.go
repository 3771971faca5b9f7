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

// How a leg comes into a mirror: the kernel makes it equal to the others, and then it is put on the list of current legs.

// list puts on the list what the mirror waits for, and is not there: somebody has changed the object.
func (t *tender) list(ctx context.Context, now *view) error {
	for _, l := range now.s.Legs {
		name := now.leg[l.Device]
		if leg := now.v.Leg(name); name == "" || leg != nil && leg.Current {
			continue
		}
		if listed, err := t.puts(ctx, now, name, l.Device); err != nil || !listed {
			return err
		}
		if err := t.isCurrent(ctx, now, name); err != nil {
			return err
		}
	}
	return nil
}

// puts puts a leg on the list that the mirror waits for, and that is equal. One that cannot be flushed leaves the mirror instead, and is tried again later.
func (t *tender) puts(ctx context.Context, now *view, name string, device uint64) (listed bool, err error) {
	err = t.meanwhile(ctx, t.dropSilent, func() error {
		return t.complete(ctx, now.v, name, device, func() error {
			return t.writeLists(ctx, now.v, nil, func(s *v1alpha1.ReplicatedVolumeStatus) {
				if now.v.Leg(name) == nil {
					s.Legs = append(s.Legs, v1alpha1.Leg{Name: name})
				}
				setCurrent(now.v.Leg(name), t.generation)
			})
		})
	})
	if !errors.Is(err, errNotFlushed) {
		return err == nil, err
	}
	why := "what it got could not be made durable: " + errdefs.Words(err)
	if slices.Contains(now.v.Current(), name) {
		now.failing[name] = why
		return false, t.leave(ctx, now)
	}
	return false, t.notJoined(ctx, now, device, why)
}

// isCurrent is the end of the way of a leg that has been put on the list.
func (t *tender) isCurrent(ctx context.Context, now *view, name string) error {
	delete(t.joins, name)
	t.equal = equal{written: -1}
	klog.FromContext(ctx).Info("A leg of a replicated volume has everything that was written, and is current", "leg", name)
	return t.tellAll(ctx, now.v) // soon: those who are not told, and leave, know only that it was due
}

// errNotFlushed: the disk of a leg does not make durable what it has taken.
var errNotFlushed = errors.New("it cannot be flushed")

// complete has a leg that is equal be that durably, and its record say so, and what those of the others say of the volume by now. Nobody changes that before it is on the list.
func (t *tender) complete(ctx context.Context, v *v1alpha1.ReplicatedVolume, name string, device uint64, list func() error) error {
	ctx, cancel := context.WithTimeout(ctx, openTime)
	defer cancel()
	if err := mirror.Flush(device); err != nil {
		return errors.Join(errNotFlushed, err)
	}
	return t.withLocks([]string{keylock.Volume(t.ref.Key)}, func() error {
		current, err := t.currentLeg(ctx, v)
		if err != nil {
			return err
		}
		if err := t.withLeg(ctx, v, name, func(id volume.ID) error {
			if err := t.kept(ctx, name, id); err != nil {
				return err
			}
			return t.volumes.ChangeLeg(ctx, id, func(s *volume.LegState, own map[string]string) error {
				if s.Opened != t.generation {
					return fmt.Errorf("%w: leg %s was opened by claim %d, not by %d", errdefs.ErrPrecondition, id, s.Opened, t.generation)
				}
				volume.CarryLabels(current.Data.Labels, own)
				s.Sound = t.generation
				return nil
			})
		}); err != nil {
			return err
		}
		return list()
	})
}

// joining is the step with a leg that the kernel makes equal.
func (t *tender) joining(ctx context.Context, now *view) error {
	name := now.leg[now.s.Joining.Device]
	switch {
	case now.s.Joining.Failed || name == "" || !slices.Contains(now.v.Spec.Legs, name) || t.unreached(now, name) != "":
		t.endSilent(ctx, name)
		return t.notJoined(ctx, now, now.s.Joining.Device, "it failed while it was made equal")
	case now.s.Equal():
		return t.finish(ctx, now, name)
	}
	return t.say(ctx, now.v, name, func(leg *v1alpha1.Leg) {
		if p := leg.Progress; leg.State == v1alpha1.LegJoining && p != nil && p.Total == now.s.Total && abs(now.s.Synced-p.Done) < max(1, p.Total/progressOf) {
			return
		}
		setWaiting(leg, fmt.Sprintf("%s of %s are equal to the others", cluster.Bytes(now.s.Synced), cluster.Bytes(now.s.Total)))
		leg.State, leg.Progress = v1alpha1.LegJoining, &v1alpha1.Progress{Done: now.s.Synced, Total: now.s.Total}
	})
}

// finish puts a leg on the list that has joined, and is equal; then it is made one like the others. Not before: as long as it joins, the kernel acknowledges nothing that it alone has, whichever fails (mirror.Join). A leg is on the list already where a driver has ended between the two.
func (t *tender) finish(ctx context.Context, now *view, name string) error {
	if err := t.learns(ctx, now.v, now.in(), name); err != nil {
		return err
	}
	if s, err := mirror.Look(t.name); err != nil || s.Event != t.seen { // a leg may have failed, which the kernel has forgotten: Watch tells
		return err
	}
	if listed, err := t.puts(ctx, now, name, now.s.Joining.Device); err != nil || !listed {
		return err
	}
	if err := t.change(ctx, func() error { return mirror.Finish(ctx, t.name, now.near) }); err != nil {
		return err
	}
	return t.isCurrent(ctx, now, name)
}

// notJoined takes a leg that is not on the list out of the mirror; it is tried again.
func (t *tender) notJoined(ctx context.Context, now *view, device uint64, why string) error {
	name := now.leg[device]
	if err := t.change(ctx, func() error { return mirror.Leave(ctx, t.name, device) }); err != nil {
		return err
	}
	t.again(name)
	t.giveBack(ctx, now.v, name)
	return t.say(ctx, now.v, name, func(leg *v1alpha1.Leg) { setWaiting(leg, why+", and is tried again") })
}

// say changes what the object says of a leg for people.
func (t *tender) say(ctx context.Context, v *v1alpha1.ReplicatedVolume, name string, edit func(*v1alpha1.Leg)) error {
	return t.writeReplicas(ctx, v, func(s *v1alpha1.ReplicatedVolumeStatus) {
		if v.Leg(name) == nil {
			s.Legs = append(s.Legs, v1alpha1.Leg{Name: name})
		}
		edit(v.Leg(name))
	})
}

// again says when a leg is tried again.
func (t *tender) again(name string) {
	k := t.of(name)
	k.next = time.Now().Add(time.Duration(min(firstJoin<<min(k.many, 16), lastJoin)) * t.options.LookEvery)
	k.many++
}

// join has a leg that is not in the mirror be made equal, one at a time.
func (t *tender) join(ctx context.Context, now *view) error {
	for _, name := range now.v.Spec.Legs {
		if slices.Contains(now.in(), name) || time.Now().Before(t.of(name).next) {
			continue
		}
		if !t.acquireSlot(ctx, now) {
			return t.say(ctx, now.v, name, func(leg *v1alpha1.Leg) {
				setWaiting(leg, "legs of other volumes that this node uses are made equal first")
			})
		}
		tries := t.of(name).many
		t.start(func() func(*view) error {
			err := t.withLocks([]string{keylock.Volume(t.ref.Key)}, func() error { return t.joinLeg(ctx, now, name, tries) })
			return func(now *view) error { return t.joined(ctx, now, name, err) }
		})
		return nil
	}
	return nil
}

// joined is the end of a try of a leg to join.
func (t *tender) joined(ctx context.Context, now *view, name string, err error) error {
	switch {
	case errors.Is(err, errdefs.ErrBusy), errors.Is(err, errOtherMirror):
		t.of(name).next = time.Now().Add(t.options.LookEvery)
		return nil
	case err == nil:
		return nil
	}
	t.again(name)
	return t.say(ctx, now.v, name, func(leg *v1alpha1.Leg) {
		if setWaiting(leg, errdefs.Words(err)); errors.Is(err, errAhead) {
			leg.State = v1alpha1.LegAhead
		}
	})
}

// joinLeg opens a leg and has the kernel copy to it what it lacks. The caller has the lock of the volume.
func (t *tender) joinLeg(ctx context.Context, now *view, name string, tries int) error {
	ctx, cancel := context.WithTimeout(ctx, openTime)
	defer cancel()
	v, err := t.replicatedNow(ctx, t.ref.Key)
	if err != nil {
		return err
	}
	if v.Spec.Claim.Generation != t.generation || v.Status.Opened != t.generation || !slices.Contains(v.Spec.Legs, name) || v.Leg(name) != nil && v.Leg(name).Current {
		return fmt.Errorf("%w: the object of the replicated volume says something else by now", errdefs.ErrBusy)
	}
	if astray, err := t.isAstray(ctx, v); err != nil || astray {
		return cmp.Or(err, fmt.Errorf("%w: the replicated volume is not over its mirror yet", errdefs.ErrBusy))
	}
	current, err := t.currentLeg(ctx, v)
	if err != nil {
		return err
	}
	return t.withLegs(ctx, v, append(now.in(), name), func(legs map[string]volume.ID) error {
		leg, err := t.attach(ctx, v, legs[name])
		if err != nil {
			return err
		}
		if err = isAhead(v, leg); err == nil {
			err = t.volumes.ChangeLeg(ctx, legs[name], func(s *volume.LegState, own map[string]string) error {
				volume.CarryLabels(current.Data.Labels, own)
				s.Opened, s.Closed, s.Boot = t.generation, false, leg.Now // what it was sound of, it stays
				return nil
			})
		}
		var lacks func(context.Context) ([]dm.Range, error)
		if err == nil {
			lacks, err = t.lacks(ctx, v, leg, legs, now.s.Size, tries)
		}
		if err == nil {
			err = mirror.Join(ctx, t.name, leg.device.Number, func(ctx context.Context) ([]dm.Range, error) {
				if err := t.unchanged(now); err != nil { // the marks are those of a leg that was in it
					return nil, err
				}
				return lacks(ctx)
			})
		}
		if s, failure := mirror.Look(t.name); err == nil && failure == nil {
			klog.FromContext(ctx).Info("A leg of a replicated volume is made equal to the others", "leg", name, "bytes", s.Total-s.Synced)
		}
		return errors.Join(err, leg.device.Close())
	})
}

// How often a leg that could not join, or failed while it did, is tried again, in looks (Options.LookEvery), and longer each time.
const (
	firstJoin = 2
	lastJoin  = 64
)
