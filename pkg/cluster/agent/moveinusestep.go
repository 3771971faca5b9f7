package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/export"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/cluster/move"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// asks reports whether an object says that a volume which this node uses is to move. Legs do not while they are used: their volume gets others (package replicator).
func (c *inUseMover) asks(v *v1alpha1.Volume) bool {
	return c.uses(v) && v.Spec.ReplicaOf == "" && v.Spec.Move != nil && !v.Spec.Move.Left && v.Spec.Move.Node != v.Spec.NodeName && !v1alpha1.Going(v) && !v.Spec.Abandoned
}

// uses reports whether a volume is claimed for this node.
func (c *inUseMover) uses(v *v1alpha1.Volume) bool {
	return v != nil && v.Spec.Claim != nil && v.Spec.Claim.Node == c.local.Node()
}

// idle is the step with a volume that has no mirror.
func (c *inUseMover) idle(ctx context.Context, now *observed) (again time.Duration, err error) {
	if !c.uses(now.v) {
		c.forget(now.id.Key)
		return 0, nil
	}
	if err := c.settle(ctx, now); err != nil {
		return 0, err
	}
	if pinned(now.v) {
		// What was written to both went with its devices. Who uses the volume next waits for the object to say nothing of it, or to say that it has moved.
		v, err := c.live(ctx, now.id.Key)
		if err != nil || v == nil || !c.uses(v) || !pinned(v) {
			return 0, err
		}
		now.v, now.generation = v, v.Spec.Claim.Generation
		return c.options.LookEvery, c.unpin(ctx, now, fmt.Errorf("%w: node %s has taken the volume down", errdefs.ErrUnavailable, c.local.Node()))
	}
	if !c.asks(now.v) {
		c.forget(now.id.Key)
		return 0, nil
	}
	if wait := time.Until(c.knownOf(now.id.Key).rest); wait > 0 {
		return wait, nil
	}
	if !c.beginning.TryLock() {
		return c.options.LookEvery, nil
	}
	defer c.beginning.Unlock()
	mirrors, err := c.volumes.Mirrors(ctx)
	if err != nil {
		return 0, err
	}
	switch others, err := c.copied(ctx, mirrors, now.id.Key); {
	case err != nil:
		return 0, err
	case len(others) >= cmp.Or(c.options.MoveCopies, moveCopies):
		return firstBackoff * c.options.LookEvery, c.saysWaits(ctx, now.v, fmt.Errorf("node %s copies another volume now: %s", c.local.Node(), others[0].Key))
	}
	err = c.begin(ctx, now)
	switch {
	case err == nil:
		return c.options.LookEvery / shortestLook, nil
	case errors.Is(err, errdefs.ErrBusy) || ctx.Err() != nil:
		return 0, err
	}
	return c.rests(now.id.Key), c.saysWaits(ctx, now.v, err)
}

// rests says when a copy that was ended, or could not begin, begins anew.
func (c *inUseMover) rests(key string) (pause time.Duration) {
	c.note(key, func(k *inUseMove) {
		k.to, k.sure = "", false
		pause = c.pauses(k)
	})
	return pause
}

// pauses has a volume be tried again later, and later each time.
func (c *inUseMover) pauses(k *inUseMove) (pause time.Duration) {
	pause = min(firstBackoff*c.options.LookEvery<<min(k.tries, 16), longestBackoff)
	k.rest, k.held = time.Now().Add(pause), time.Time{}
	k.tries++
	return pause
}

// settle ends what a crash, or an earlier step, left of a volume that is not mirrored: names of its devices as they were before it moved, and connections that
// nothing is over and that are of no claim of now.
func (c *inUseMover) settle(ctx context.Context, now *observed) error {
	home, away, err := c.volumes.Seats(ctx, now.id)
	if err != nil {
		return err
	}
	legs, err := c.legs.Legs(now.ref())
	if err != nil {
		return err
	}
	claim := now.v.Spec.Claim.Generation
	return c.withVolume(now.id.Key, false, func() error {
		for _, leg := range legs {
			if !leg.Used && leg.Generation != claim {
				if err := c.legs.Drop(ctx, leg.NQN); err != nil {
					return err
				}
			}
		}
		here := now.v.Spec.NodeName == c.local.Node()
		if !(home && !here) && !(away && here) {
			return nil
		}
		if v, err := c.live(ctx, now.id.Key); err != nil || !c.uses(v) || (v.Spec.NodeName == c.local.Node()) != here {
			return err
		}
		err = c.volumes.Switch(ctx, now.id, here)
		if errors.Is(err, errdefs.ErrPrecondition) { // it is that of a claim of before
			return nil
		}
		return err
	})
}

// begin has the new home make room, and mirrors the volume there.
func (c *inUseMover) begin(ctx context.Context, now *observed) error {
	if home, away, err := c.volumes.Seats(ctx, now.id); err != nil {
		return err
	} else if !home && !away {
		return c.notMovable(ctx, now)
	}
	v, err := c.live(ctx, now.id.Key)
	if err != nil {
		return err
	}
	if !c.asks(v) || v.Generation != now.v.Generation || v.Spec.Size > v.Status.Size || v.Status.Created == nil {
		return fmt.Errorf("%w: the object of volume %s says something else by now", errdefs.ErrBusy, now.id)
	}
	if err := c.withVolume(now.id.Key, false, func() error { return c.whole(ctx, now) }); err != nil {
		return err
	}
	of := move.Of{ID: now.id, Claim: v.Spec.Claim.Generation, Object: v.Generation}
	old, next := c.oldHome(v.Spec.NodeName), c.newHome(v.Spec.Move.Node)
	from, err := old.Describe(ctx, of)
	if err != nil {
		return fmt.Errorf("ask node %s for what it has of the volume: %w", v.Spec.NodeName, err)
	}
	room, err := next.Prepare(ctx, of, from)
	if err != nil {
		return fmt.Errorf("have node %s make room for the volume: %w", v.Spec.Move.Node, err)
	}
	err = c.withVolume(now.id.Key, false, func() error {
		to, err := c.leg(ctx, now, v, room)
		if err != nil {
			return err
		}
		holding, cancel := context.WithTimeout(ctx, longestSwitch)
		defer cancel()
		err = c.volumes.Mirror(holding, now.id, to, func(ctx context.Context) ([]blockdev.Extent, error) { return old.Ranges(ctx, of) })
		return errors.Join(err, to.Close())
	})
	if err != nil {
		c.leave(ctx, now, v.Spec.Move.Node, of, room.NQN)
		return err
	}
	c.note(now.id.Key, func(k *inUseMove) {
		k.to, k.pool, k.sure, k.looked = v.Spec.Move.Node, v.Spec.Move.Pool, true, time.Now()
	})
	if m, is, err := c.volumes.Mirrored(ctx, now.id); err == nil && is { // what holds no data needs no copy
		c.gauges.mirror(now.id.Key, m.Synced, m.Total)
	}
	klog.FromContext(ctx).Info("A volume moves while it is used here", "id", now.id.String(), "from", v.Spec.NodeName, "to", v.Spec.Move.Node)
	return nil
}

// whole brings the seat of a volume to the volume's size: that is larger if it has moved, while it was used, to a pool that has coarser sizes. What is above the header of an
// encrypted one stays smaller until it is staged again, with its key.
func (c *inUseMover) whole(ctx context.Context, now *observed) error {
	_, err := c.volumes.Grow(ctx, now.id, nil)
	if err != nil && !errors.Is(err, volume.ErrNoKey) {
		return fmt.Errorf("bring the devices of volume %s on node %s to its size: %w", now.id, c.local.Node(), err)
	}
	return nil
}

// notMovable says why a volume has no seat. Whoever stages it, or takes it down, has devices of it for a moment that have none.
func (c *inUseMover) notMovable(ctx context.Context, now *observed) error {
	return c.withVolume(now.id.Key, false, func() error {
		devices, err := c.volumes.Attached(ctx, now.id)
		if err != nil {
			return err
		}
		if len(devices) == 0 {
			return fmt.Errorf("%w: volume %s is claimed for node %s, and not staged there yet", errdefs.ErrUnavailable, now.id, c.local.Node())
		}
		switch home, away, err := c.volumes.Seats(ctx, now.id); {
		case err != nil:
			return err
		case home || away:
			return fmt.Errorf("%w: volume %s was staged just now", errdefs.ErrBusy, now.id)
		}
		return fmt.Errorf("%w: volume %s was staged on node %s by an older driver, or without a device mapper, and so moves when it is not used, or was staged again", errdefs.ErrUnavailable, now.id, c.local.Node())
	})
}

// leg attaches what the new home has prepared.
func (c *inUseMover) leg(ctx context.Context, now *observed, v *v1alpha1.Volume, room export.Opened) (blockdev.Device, error) {
	if v.Spec.Move.Node == c.local.Node() {
		return c.volumes.AttachLeg(ctx, now.id)
	}
	return c.legs.Second(ctx, now.ref(), connectionTo(v, room))
}

// leave gives up a leg to a new home that nothing is over, and tells that home. Should it not hear of it, it drops what nobody wants by itself.
func (c *inUseMover) leave(ctx context.Context, now *observed, node string, of move.Of, nqn string) {
	var err error
	if nqn != "" {
		err = c.legs.Drop(ctx, nqn)
	}
	if err == nil && node != "" {
		err = c.newHome(node).Drop(ctx, of, nqn)
	}
	if err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).Info("Could not take back what a node had prepared for a volume that does not move there now", "node", node, "err", err.Error())
	}
}

// follow is the step with a volume that has a mirror.
func (c *inUseMover) follow(ctx context.Context, now *observed) (again time.Duration, err error) {
	if done := now.m.Synced >= now.m.Total && !now.m.OldFailed && !now.m.NewFailed; done || !c.knownOf(now.id.Key).sure {
		if now.v, err = c.live(ctx, now.id.Key); err != nil { // it goes on as it is: who writes waits for the API server only if a leg has failed
			klog.FromContext(ctx).Info("Whether a volume has moved is not known now", "err", err.Error())
			return c.options.LookEvery, nil
		}
	}
	moved, known, err := c.hasMoved(ctx, now)
	switch {
	case err != nil:
		return 0, err
	case !known: // whoever has the volume takes both legs away, and nothing is acknowledged then
		if now.m.Held {
			err = c.volumes.ReleaseMirror(ctx, now.id)
		}
		return searchEvery, err
	case moved:
		if v, err := c.live(ctx, now.id.Key); err != nil || v == nil || v.Spec.NodeName != now.v.Spec.NodeName { // what was read may be of before
			return c.options.LookEvery, err
		}
		return 0, c.switchOver(ctx, now)
	}
	why := c.broken(now)
	if now.v != nil && pinned(now.v) {
		anew := c.unsaid(now)
		if why == nil && anew == nil {
			return c.options.LookEvery, nil
		}
		if err := c.unpin(ctx, now, cmp.Or(why, anew)); err != nil {
			return 0, err
		}
	}
	switch {
	case why != nil:
		return c.giveUp(ctx, now, why)
	case now.m.Held:
		return c.release(ctx, now)
	case now.m.Synced < now.m.Total:
		at := time.Now()
		c.pace.copied(ctx, paced{pacedMove, now.id.Key}, now.m.Synced, at)
		return c.copying(ctx, now, at)
	}
	if wait := time.Until(c.knownOf(now.id.Key).rest); wait > 0 {
		return min(wait, c.options.LookEvery), nil
	}
	if now.v.Spec.Size > now.v.Status.Size {
		return c.options.LookEvery, c.saysWaits(ctx, now.v, fmt.Errorf("%w: all is copied, and volume %s is to grow first, or node %s to refuse that", errdefs.ErrUnavailable, now.id, now.v.Spec.NodeName))
	}
	err = c.pin(ctx, now)
	if err != nil && !errors.Is(err, errdefs.ErrBusy) && ctx.Err() == nil {
		err = errors.Join(err, c.saysWaits(ctx, now.v, err))
	}
	return c.options.LookEvery, err
}

// unsaid is why a volume that is pinned is pinned anew, if it is.
func (c *inUseMover) unsaid(now *observed) (why error) {
	if now.v.Status.Move.Copied.Generation != now.v.Generation || !now.m.Held { // an older driver did not hold it
		return errChanged
	}
	c.note(now.id.Key, func(k *inUseMove) {
		if k.held.IsZero() {
			k.held = time.Now()
		}
		if time.Since(k.held) > longestSwitch {
			why = fmt.Errorf("%w: all is copied, and the controller has not said for %s that volume %s has moved; who uses it does not wait longer, and it is tried again", errdefs.ErrUnavailable, longestSwitch, now.id)
		}
	})
	return why
}

// release goes on with both homes after a volume that was held until it has moved has not. It is not held again at once.
func (c *inUseMover) release(ctx context.Context, now *observed) (again time.Duration, err error) {
	if !c.knownOf(now.id.Key).sure { // that all is copied may be heard yet
		if err := c.unpin(ctx, now, errChanged); err != nil {
			return 0, err
		}
	}
	if err := c.withVolume(now.id.Key, true, func() error { return c.volumes.ReleaseMirror(ctx, now.id) }); err != nil {
		return 0, err
	}
	c.note(now.id.Key, func(k *inUseMove) { again = c.pauses(k) })
	return again, nil
}

// errChanged is why what was said before is said anew.
var errChanged = fmt.Errorf("%w: the volume's object was changed", errdefs.ErrUnavailable)

// hasMoved reports whether the object says that a mirrored volume has moved to the new home. It is not known where a driver of before has mirrored it, and the
// claim is gone: then it may be at either.
func (c *inUseMover) hasMoved(ctx context.Context, now *observed) (moved, known bool, err error) {
	v := now.v
	switch to := c.knownOf(now.id.Key).to; {
	case v == nil:
		return false, true, nil
	case now.home:
		return v.Spec.NodeName != c.local.Node(), true, nil
	case now.here:
		return v.Spec.NodeName == c.local.Node(), true, nil
	case to != "":
		return v.Spec.NodeName == to, true, nil
	case c.uses(v) && v.Spec.Claim.Generation == now.generation:
		return false, true, nil
	case now.new == nil || !c.uses(v) || v.Spec.Claim.Generation != now.new.Generation:
		return false, false, nil
	}
	// It may have moved, or be claimed anew at the old home: the node that has it knows what it gives.
	opened, err := homes{c.Agent}.Open(ctx, v.Named(), now.ref())
	same := err == nil && opened.NQN == now.new.NQN // another one is of a home that has started anew, or of a new claim: neither leg is given any more
	return same, same, err
}

// broken is why a mirror cannot go on, if it cannot.
func (c *inUseMover) broken(now *observed) error {
	known := c.knownOf(now.id.Key)
	v := now.v
	switch {
	case !c.asks(v) || v.Spec.Claim.Generation != now.generation || known.to != "" && (v.Spec.Move.Node != known.to || v.Spec.Move.Pool != known.pool):
		return fmt.Errorf("%w: volume %s does not move there any more", errdefs.ErrBusy, now.id)
	case now.away:
		return fmt.Errorf("%w: node %s, to which it is copied, is away; the copy begins anew when it is back", errdefs.ErrUnavailable, v.Spec.Move.Node)
	case now.m.Back:
		return fmt.Errorf("%w: what was written to node %s alone is copied back to node %s, which has volume %s", errdefs.ErrUnavailable, v.Spec.Move.Node, v.Spec.NodeName, now.id)
	case now.m.Forgot:
		return fmt.Errorf("%w: node %s or %s could not flush what was written to volume %s; look at the disks of both; the copy begins anew", errdefs.ErrUnavailable, v.Spec.NodeName, v.Spec.Move.Node, now.id)
	case now.m.NewFailed || !now.here && now.new == nil:
		return fmt.Errorf("%w: what was written to node %s failed; the copy begins anew", errdefs.ErrUnavailable, v.Spec.Move.Node)
	case now.m.OldFailed:
		return fmt.Errorf("%w: what was read from or written to node %s, which has the volume, failed; the copy begins anew", errdefs.ErrUnavailable, v.Spec.NodeName)
	case v.Status.Size+volume.Scheme(v.Status.Encryption).Overhead() != now.m.Total: // that it is to grow is not enough: its home may refuse that
		return fmt.Errorf("%w: volume %s has grown; the copy begins anew", errdefs.ErrUnavailable, now.id)
	}
	return nil
}

// giveUp goes on over the old home alone. Nobody says meanwhile, or later, that the new one has all.
func (c *inUseMover) giveUp(ctx context.Context, now *observed, why error) (again time.Duration, err error) {
	known := c.knownOf(now.id.Key)
	if !known.sure && now.v != nil {
		if err := c.unpin(ctx, now, why); err != nil {
			return 0, err
		}
	}
	if now.away && !now.m.Back { // what is on its way there ends with errors, which the kernel holds; else it would be waited for
		if err := c.legs.End(ctx, now.new.NQN); err != nil {
			return 0, err
		}
	}
	if err := c.withVolume(now.id.Key, now.away || now.m.NewFailed || now.m.OldFailed || now.m.Held, func() error { return c.volumes.Unmirror(ctx, now.id) }); err != nil {
		if now.m.Back && errors.Is(err, errdefs.ErrBusy) && c.asks(now.v) {
			return c.options.LookEvery, c.saysWaits(ctx, now.v, why)
		}
		return 0, err
	}
	klog.FromContext(ctx).Info("A volume that was moving while it is used goes on at its old home", "id", now.id.String(), "why", why.Error())
	pause := c.rests(now.id.Key)
	nqn, node := "", known.to
	if now.new != nil {
		nqn = now.new.NQN
	}
	if node == "" && now.v != nil && now.v.Spec.Move != nil {
		node = now.v.Spec.Move.Node
	}
	of := move.Of{ID: now.id, Claim: now.generation}
	if now.v != nil {
		of.Object = now.v.Generation
	}
	c.leave(ctx, now, node, of, nqn)
	if !c.asks(now.v) {
		return 0, nil
	}
	return pause, c.saysWaits(ctx, now.v, why)
}

// unpin has the object, which was just read, say that the volume is at its old home alone. It changes the object, so that a word to the contrary which is on its way is
// refused; where the move or the claim is another, it has changed since, and what it says is not of this one.
func (c *inUseMover) unpin(ctx context.Context, now *observed, why error) error {
	v := now.v
	if !c.asks(v) || v.Spec.Claim.Generation != now.generation {
		c.note(now.id.Key, func(k *inUseMove) { k.sure = true })
		return nil
	}
	err := c.reportMoveInUse(ctx, v, func(s *v1alpha1.MoveStatus) {
		s.Copied, s.Undone = nil, s.Undone+1
		s.Waits, s.Message, s.Progress = true, cluster.Limited(errdefs.Words(why)), nil
	})
	if err == nil {
		c.note(v.Name, func(k *inUseMove) { k.sure = true })
	}
	return err
}

// copying is the step with a mirror that the kernel is copying, as it was found at a time.
func (c *inUseMover) copying(ctx context.Context, now *observed, at time.Time) (again time.Duration, err error) {
	tell := false
	c.note(now.id.Key, func(k *inUseMove) {
		again = soon(c.options.LookEvery, at.Sub(k.looked), now.copied, now.m.Total-now.m.Synced)
		k.looked = at
		if k.told.IsZero() { // what is copied by then is not worth a write
			k.told = at
		}
		if tell = at.Sub(k.told) >= c.options.LookEvery; tell {
			k.told = at
		}
	})
	if !tell {
		return again, nil
	}
	return again, c.reportFar(ctx, now)
}

// soon is when to look again at what is being copied, of which so many bytes were copied in so long, and so many are left: when it should be whole, but no later
// than after every, and no sooner than after the shortestLook-th part of that.
func soon(every, took time.Duration, copied, left int64) time.Duration {
	if copied <= 0 {
		return every / shortestLook
	}
	rest := float64(took) * float64(left) / float64(copied)
	return time.Duration(min(max(rest, float64(every/shortestLook)), float64(every)))
}

// reportFar writes down how far the copy is, if that is news.
func (c *inUseMover) reportFar(ctx context.Context, now *observed) error {
	done, total := now.m.Synced, now.m.Total
	return kube.IgnoreConflict(c.reportMoveInUse(ctx, now.v, func(s *v1alpha1.MoveStatus) {
		if was := s.Progress; !s.Waits && was != nil && was.Total == total && abs(done-was.Done) < max(1, total/progressOf) {
			return
		}
		s.Waits, s.Progress = false, &v1alpha1.Progress{Done: done, Total: total}
		s.Message = fmt.Sprintf("%s of %s are copied while node %s uses the volume", cluster.Bytes(done), cluster.Bytes(total), c.local.Node())
	}))
}

// pin has both homes seal what they have, and the object say so: from then on neither of them is left before it says which one has the volume.
func (c *inUseMover) pin(ctx context.Context, now *observed) error {
	return c.withVolume(now.id.Key, false, func() error {
		v, err := c.live(ctx, now.id.Key)
		if err != nil {
			return err
		}
		if !c.asks(v) || v.Generation != now.v.Generation {
			return fmt.Errorf("%w: the object of volume %s was changed meanwhile", errdefs.ErrBusy, now.id)
		}
		of := move.Of{ID: now.id, Claim: v.Spec.Claim.Generation, Object: v.Generation}
		sealed, err := c.oldHome(v.Spec.NodeName).Seal(ctx, of)
		if err != nil {
			return fmt.Errorf("seal the volume on node %s: %w", v.Spec.NodeName, err)
		}
		if sealed.Size != now.m.Total {
			return fmt.Errorf("%w: volume %s has grown meanwhile", errdefs.ErrUnavailable, now.id)
		}
		nqn := ""
		if now.new != nil {
			nqn = now.new.NQN
		}
		if err := c.newHome(v.Spec.Move.Node).Complete(ctx, of, nqn, sealed); err != nil {
			return fmt.Errorf("have node %s complete what it has of the volume: %w", v.Spec.Move.Node, err)
		}
		if err := c.hold(ctx, now); err != nil {
			return err
		}
		c.note(now.id.Key, func(k *inUseMove) { k.sure, k.held = false, time.Now() })
		return c.reportMoveInUse(ctx, v, func(s *v1alpha1.MoveStatus) {
			s.Copied = &v1alpha1.MoveCopied{Generation: v.Generation, Claim: of.Claim, Sealed: metav1.NewMicroTime(sealed.Created), Size: v.Status.Size}
			s.Waits, s.Progress, s.Message = false, nil, "nodes "+v.Spec.NodeName+" and "+v.Spec.Move.Node+" have all bytes"
		})
	})
}

// hold has a volume be neither read nor written until the object says whether it has moved: a leg that fails from now on loses nothing, whoever is there to see it. It
// looks once more whether both homes have all.
func (c *inUseMover) hold(ctx context.Context, now *observed) error {
	if now.new != nil { // what is under way is waited for, and the new home may be away by now
		end := time.AfterFunc(longestSwitch, func() { _ = c.legs.End(ctx, now.new.NQN) })
		defer end.Stop()
	}
	if err := c.volumes.HoldMirror(ctx, now.id); err != nil {
		return err
	}
	m, is, err := c.volumes.Mirrored(ctx, now.id)
	want := now.m
	want.Held = true
	if err == nil && is && m == want {
		return nil
	}
	return errors.Join(err, c.volumes.ReleaseMirror(ctx, now.id), fmt.Errorf("%w: the mirror of volume %s is not whole any more", errdefs.ErrBusy, now.id))
}

// switchOver goes on over the new home alone.
func (c *inUseMover) switchOver(ctx context.Context, now *observed) error {
	here := now.v.Spec.NodeName == c.local.Node()
	err := c.withVolume(now.id.Key, now.m.OldFailed || now.m.NewFailed || now.m.Held, func() error {
		if err := c.volumes.Switch(ctx, now.id, here); err != nil {
			return err
		}
		if now.new != nil {
			c.legs.Take(now.new.NQN, now.v.Spec.NodeName)
		}
		return nil
	})
	if err != nil {
		return err
	}
	klog.FromContext(ctx).Info("A volume that is used here has moved", "id", now.id.String(), "to", now.v.Spec.NodeName)
	c.forget(now.id.Key)
	switch {
	case now.home:
		err = c.volumes.DetachLeg(ctx, now.id)
	case now.old != nil:
		err = c.legs.Drop(ctx, now.old.NQN)
		if err == nil {
			err = homes{c.Agent}.Close(ctx, now.ref(), now.old.Generation)
		}
	}
	if err != nil && ctx.Err() == nil { // the old home ends it by itself
		klog.FromContext(ctx).Info("Could not end the use of what a node had of a volume that has moved", "err", err.Error())
	}
	return nil
}
