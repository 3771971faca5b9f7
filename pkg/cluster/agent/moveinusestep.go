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

// isToMove reports whether a volume is claimed for this node, and is to move. A leg does not move while it is used: its volume gets another one (package
// replicator).
func (c *inUseMover) isToMove(v *v1alpha1.Volume) bool {
	return c.isClaimedHere(v) && v.Spec.ReplicaOf == "" && v.Spec.Move != nil && !v.Spec.Move.Left && v.Spec.Move.Node != v.Spec.NodeName && !v1alpha1.Going(v) && !v.Spec.Abandoned
}

// isClaimedHere reports whether a volume, which may be nil, is claimed for this node.
func (c *inUseMover) isClaimedHere(v *v1alpha1.Volume) bool {
	return v != nil && v.Spec.Claim != nil && v.Spec.Claim.Node == c.local.Node()
}

// stepUnmirrored is the step of a volume without a mirror: it starts one if the volume is to move.
func (c *inUseMover) stepUnmirrored(ctx context.Context, now *observed) (again time.Duration, err error) {
	if !c.isClaimedHere(now.v) {
		c.forget(now.id.Key)
		return 0, nil
	}
	if err := c.cleanUp(ctx, now); err != nil {
		return 0, err
	}
	if pinned(now.v) {
		// Its devices are gone. Whoever uses the volume next waits until the pin is taken away, or the volume has moved.
		v, err := c.live(ctx, now.id.Key)
		if err != nil || v == nil || !c.isClaimedHere(v) || !pinned(v) {
			return 0, err
		}
		now.v, now.generation = v, v.Spec.Claim.Generation
		return c.options.LookEvery, c.unpin(ctx, now, fmt.Errorf("%w: node %s has taken the volume down", errdefs.ErrUnavailable, c.local.Node()))
	}
	if !c.isToMove(now.v) {
		c.forget(now.id.Key)
		return 0, nil
	}
	known := c.stateOf(now.id.Key)
	if wait := time.Until(known.retryAt); wait > 0 && (known.unfit == 0 || known.unfit == now.v.Generation) {
		return wait, nil
	}
	if !c.starting.TryLock() {
		return c.options.LookEvery, nil
	}
	defer c.starting.Unlock()
	mirrors, err := c.volumes.Mirrors(ctx)
	if err != nil {
		return 0, err
	}
	switch others, err := c.beingCopied(ctx, mirrors, now.id.Key); {
	case err != nil:
		return 0, err
	case len(others) >= cmp.Or(c.options.MoveCopies, moveCopies):
		return firstBackoff * c.options.LookEvery, c.reportInUseWaits(ctx, now.v, fmt.Errorf("%w: node %s copies another volume now: %s", errdefs.ErrUnavailable, c.local.Node(), others[0].Key))
	}
	err = c.startMirror(ctx, now)
	switch {
	case err == nil:
		return c.options.LookEvery / shortestLook, nil
	case errors.Is(err, errGaveWay):
		return yieldRetry, nil
	case errors.Is(err, errdefs.ErrBusy) || ctx.Err() != nil:
		return 0, err
	}
	c.update(now.id.Key, func(k *inUseMove) {
		if k.unfit = 0; errors.Is(err, volume.ErrUnfit) {
			k.unfit = now.v.Generation
		}
	})
	return c.endTry(now.id.Key), c.reportInUseWaits(ctx, now.v, err)
}

// endTry forgets a move that ended, or could not start, and returns when to try it again.
func (c *inUseMover) endTry(key string) (pause time.Duration) {
	c.update(key, func(k *inUseMove) {
		k.to, k.unpinned = "", false
		pause = c.backOff(k)
	})
	return pause
}

// backOff sets when to try again, later each time, and returns how long that is.
func (c *inUseMover) backOff(k *inUseMove) (pause time.Duration) {
	pause = min(firstBackoff*c.options.LookEvery<<min(k.tries, 16), longestBackoff)
	if k.unfit != 0 {
		pause = unfitBackoff
	}
	k.retryAt, k.heldSince = time.Now().Add(pause), time.Time{}
	k.tries++
	return pause
}

// cleanUp removes what a crash or an earlier step left of a volume without a mirror: unused connections of other claims, and device names from before the
// volume moved.
func (c *inUseMover) cleanUp(ctx context.Context, now *observed) error {
	home, away, err := c.volumes.Seats(ctx, now.id)
	if err != nil {
		return err
	}
	legs, err := c.legs.Legs(now.ref())
	if err != nil {
		return err
	}
	claim := now.v.Spec.Claim.Generation
	return c.withVolumeLock(now.id.Key, false, func() error {
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
		if v, err := c.live(ctx, now.id.Key); err != nil || !c.isClaimedHere(v) || (v.Spec.NodeName == c.local.Node()) != here {
			return err
		}
		err = c.volumes.Switch(ctx, now.id, here)
		if errors.Is(err, errdefs.ErrPrecondition) { // it is that of a claim of before
			return nil
		}
		return err
	})
}

// startMirror has the new home prepare an import, and mirrors the volume to it (steps 2 and 3).
func (c *inUseMover) startMirror(ctx context.Context, now *observed) error {
	if home, away, err := c.volumes.Seats(ctx, now.id); err != nil {
		return err
	} else if !home && !away {
		return c.whyNoSeat(ctx, now)
	}
	if err := c.volumes.CanMirror(); err != nil { // before the new home makes room; that does not refuse the volume, which it gets when nobody uses it
		return errdefs.Recast(errdefs.ErrUnavailable, errors.New(errdefs.Words(err)), "node %s cannot copy the volume while it uses it", c.local.Node())
	}
	v, err := c.live(ctx, now.id.Key)
	if err != nil {
		return err
	}
	if !c.isToMove(v) || v.Generation != now.v.Generation || v.Spec.Size > v.Status.Size || v.Status.Created == nil {
		return fmt.Errorf("%w: the object of volume %s says something else by now", errdefs.ErrBusy, now.id)
	}
	if err := c.withVolumeLock(now.id.Key, false, func() error { return c.growToSize(ctx, now) }); err != nil {
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
		err = fmt.Errorf("have node %s make room for the volume: %w", v.Spec.Move.Node, err)
		if errors.Is(err, errdefs.ErrBusy) { // it may be so for long
			err = errors.Join(err, kube.IgnoreConflict(c.reportMoveInUse(ctx, v, func(s *v1alpha1.MoveStatus) {
				s.Waits, s.Progress, s.Message = false, nil, "node "+v.Spec.Move.Node+" makes room for it"
			})))
		}
		return err
	}
	err = c.withVolumeLock(now.id.Key, false, func() error {
		to, err := c.attachNewLeg(ctx, now, v, room)
		if err != nil {
			return err
		}
		holding, cancel := context.WithTimeout(ctx, longestSwitch)
		defer cancel()
		err = c.volumes.Mirror(holding, now.id, to, func(ctx context.Context) ([]blockdev.Extent, error) { return old.Ranges(ctx, of) })
		return errors.Join(err, to.Close())
	})
	if err != nil {
		c.dropNewLeg(ctx, now, v.Spec.Move.Node, of, room.NQN)
		return err
	}
	c.update(now.id.Key, func(k *inUseMove) {
		k.to, k.pool, k.unpinned, k.unfit, k.lookedAt = v.Spec.Move.Node, v.Spec.Move.Pool, true, 0, time.Now()
	})
	if m, is, err := c.volumes.Mirrored(ctx, now.id); err == nil && is { // what holds no data needs no copy
		c.gauges.mirror(now.id.Key, m.Synced, m.Total)
	}
	klog.FromContext(ctx).Info("A volume moves while it is used here", "id", now.id.String(), "from", v.Spec.NodeName, "to", v.Spec.Move.Node)
	return nil
}

// growToSize grows the seat of a volume to the volume's size, which is larger if the volume has moved in use to a pool of coarser granularity. The part of an
// encrypted volume that needs its key to grow stays as it is until the volume is staged again.
func (c *inUseMover) growToSize(ctx context.Context, now *observed) error {
	_, err := c.volumes.Grow(ctx, now.id, nil)
	if err != nil && !errors.Is(err, volume.ErrNoKey) {
		return fmt.Errorf("bring the devices of volume %s on node %s to its size: %w", now.id, c.local.Node(), err)
	}
	return nil
}

// whyNoSeat returns why a volume cannot be mirrored; ErrBusy if it was being staged or unstaged, and has a seat by now.
func (c *inUseMover) whyNoSeat(ctx context.Context, now *observed) error {
	return c.withVolumeLock(now.id.Key, false, func() error {
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

// attachNewLeg attaches what the new home has prepared. The caller closes the device.
func (c *inUseMover) attachNewLeg(ctx context.Context, now *observed, v *v1alpha1.Volume, room export.Opened) (blockdev.Device, error) {
	if v.Spec.Move.Node == c.local.Node() {
		return c.volumes.AttachLeg(ctx, now.id)
	}
	return c.legs.Second(ctx, now.ref(), connectionTo(v, room))
}

// dropNewLeg disconnects from a new home, and has it drop its import. A failure is only logged: a new home drops by itself what nobody asks for.
func (c *inUseMover) dropNewLeg(ctx context.Context, now *observed, node string, of move.Of, nqn string) {
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

// stepMirrored is the step of a volume with a mirror: it follows the copy, pins the volume, and switches over or undoes the move.
func (c *inUseMover) stepMirrored(ctx context.Context, now *observed) (again time.Duration, err error) {
	if done := now.m.Synced >= now.m.Total && !now.m.OldFailed && !now.m.NewFailed; done || !c.stateOf(now.id.Key).unpinned {
		if now.v, err = c.live(ctx, now.id.Key); err != nil { // nothing changes: writes wait for the API server only if a leg has failed
			klog.FromContext(ctx).Info("Whether a volume has moved is not known now", "err", err.Error())
			return c.options.LookEvery, nil
		}
	}
	moved, known, err := c.hasMoved(ctx, now)
	switch {
	case err != nil:
		return 0, err
	case !known: // both legs end with their exports, and then nothing is acknowledged any more
		if now.m.Held {
			err = c.volumes.ReleaseMirror(ctx, now.id)
		}
		return searchEvery, err
	case moved:
		if v, err := c.live(ctx, now.id.Key); err != nil || v == nil || v.Spec.NodeName != now.v.Spec.NodeName { // what was read may be out of date
			return c.options.LookEvery, err
		}
		return 0, c.switchOver(ctx, now)
	}
	why := c.checkMirror(now)
	if now.v != nil && pinned(now.v) {
		anew := c.checkPin(now)
		if why == nil && anew == nil {
			return c.options.LookEvery, nil
		}
		if err := c.unpin(ctx, now, cmp.Or(why, anew)); err != nil {
			return 0, err
		}
	}
	switch {
	case why != nil:
		return c.undoMove(ctx, now, why)
	case now.m.Held:
		return c.releasePinned(ctx, now)
	case now.m.Synced < now.m.Total:
		at := time.Now()
		c.throttle.report(ctx, throttledCopy{copyOfMove, now.id.Key}, now.m.Synced, at)
		return c.stepCopying(ctx, now, at)
	}
	if wait := time.Until(c.stateOf(now.id.Key).retryAt); wait > 0 {
		return min(wait, c.options.LookEvery), nil
	}
	if now.v.Spec.Size > now.v.Status.Size {
		return c.options.LookEvery, c.reportInUseWaits(ctx, now.v, fmt.Errorf("%w: all is copied, and volume %s is to grow first, or node %s to refuse that", errdefs.ErrUnavailable, now.id, now.v.Spec.NodeName))
	}
	err = c.pin(ctx, now)
	if errors.Is(err, errdefs.ErrDataLoss) { // what the new home lacks, nobody knows
		return c.undoMove(ctx, now, err)
	}
	if err != nil && !errors.Is(err, errdefs.ErrBusy) && ctx.Err() == nil {
		err = errors.Join(err, c.reportInUseWaits(ctx, now.v, err))
	}
	return c.options.LookEvery, err
}

// checkPin returns why the pin of a volume is to be taken away; nil: it stays.
func (c *inUseMover) checkPin(now *observed) (why error) {
	if now.v.Status.Move.Copied.Generation != now.v.Generation || !now.m.Held { // an older driver did not hold it
		return errChanged
	}
	c.update(now.id.Key, func(k *inUseMove) {
		if k.heldSince.IsZero() {
			k.heldSince = time.Now()
		}
		if time.Since(k.heldSince) > longestSwitch {
			why = fmt.Errorf("%w: all is copied, and the controller has not said for %s that volume %s has moved; who uses it does not wait longer, and it is tried again", errdefs.ErrUnavailable, longestSwitch, now.id)
		}
	})
	return why
}

// releasePinned lets I/O to both homes go on, of a volume that was held and has not moved. The next try to pin it is later.
func (c *inUseMover) releasePinned(ctx context.Context, now *observed) (again time.Duration, err error) {
	if !c.stateOf(now.id.Key).unpinned { // a write that pins it may still be under way
		if err := c.unpin(ctx, now, errChanged); err != nil {
			return 0, err
		}
	}
	if err := c.withVolumeLock(now.id.Key, true, func() error { return c.volumes.ReleaseMirror(ctx, now.id) }); err != nil {
		return 0, err
	}
	c.update(now.id.Key, func(k *inUseMove) { again = c.backOff(k) })
	return again, nil
}

// errChanged is why a pin is taken away of an object that is another one than when it was pinned.
var errChanged = fmt.Errorf("%w: the volume's object was changed", errdefs.ErrUnavailable)

// hasMoved reports whether a mirrored volume has moved to the new home, by its object. That is not known if an earlier process made the mirror, and the claim
// that it was made for has ended: then either home may have the volume.
func (c *inUseMover) hasMoved(ctx context.Context, now *observed) (moved, known bool, err error) {
	v := now.v
	switch to := c.stateOf(now.id.Key).to; {
	case v == nil:
		return false, true, nil
	case now.home:
		return v.Spec.NodeName != c.local.Node(), true, nil
	case now.here:
		return v.Spec.NodeName == c.local.Node(), true, nil
	case to != "":
		return v.Spec.NodeName == to, true, nil
	case c.isClaimedHere(v) && v.Spec.Claim.Generation == now.generation:
		return false, true, nil
	case now.new == nil || !c.isClaimedHere(v) || v.Spec.Claim.Generation != now.new.Generation:
		return false, false, nil
	}
	// It may have moved, or be claimed anew at the old home: the node that has it knows what it exports.
	opened, err := homes{c.Agent}.Open(ctx, v.Named(), now.ref())
	same := err == nil && opened.NQN == now.new.NQN // another NQN is of a home that was restarted, or of a new claim: neither leg is exported any more
	return same, same, err
}

// checkMirror returns why the move is to be undone; nil: it goes on.
func (c *inUseMover) checkMirror(now *observed) error {
	known := c.stateOf(now.id.Key)
	v := now.v
	switch {
	case !c.isToMove(v) || v.Spec.Claim.Generation != now.generation || known.to != "" && (v.Spec.Move.Node != known.to || v.Spec.Move.Pool != known.pool):
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

// undoMove goes on over the old home alone, and has the new one drop its import. It makes sure first that the volume is not pinned, now or later.
func (c *inUseMover) undoMove(ctx context.Context, now *observed, why error) (again time.Duration, err error) {
	known := c.stateOf(now.id.Key)
	if !known.unpinned && now.v != nil {
		if err := c.unpin(ctx, now, why); err != nil {
			return 0, err
		}
	}
	if now.away && !now.m.Back { // what is on its way there ends with errors, which the kernel holds; else it would be waited for
		if err := c.legs.End(ctx, now.new.NQN); err != nil {
			return 0, err
		}
	}
	if err := c.withVolumeLock(now.id.Key, now.away || now.m.NewFailed || now.m.OldFailed || now.m.Held, func() error { return c.volumes.Unmirror(ctx, now.id) }); err != nil {
		if now.m.Back && errors.Is(err, errdefs.ErrBusy) && c.isToMove(now.v) {
			return c.options.LookEvery, c.reportInUseWaits(ctx, now.v, why)
		}
		return 0, err
	}
	klog.FromContext(ctx).Info("A volume that was moving while it is used goes on at its old home", "id", now.id.String(), "why", why.Error())
	pause := c.endTry(now.id.Key)
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
	c.dropNewLeg(ctx, now, node, of, nqn)
	if !c.isToMove(now.v) {
		return 0, nil
	}
	return pause, c.reportInUseWaits(ctx, now.v, why)
}

// unpin writes that the new home does not have everything (it takes status.move.copied away). The caller has just read the object. The write always changes
// it, so a write that pins it, and is still under way, is refused. If the object has another move or claim by now, it has changed already, and nothing is
// written.
func (c *inUseMover) unpin(ctx context.Context, now *observed, why error) error {
	v := now.v
	if !c.isToMove(v) || v.Spec.Claim.Generation != now.generation {
		c.update(now.id.Key, func(k *inUseMove) { k.unpinned = true })
		return nil
	}
	err := c.reportMoveInUse(ctx, v, func(s *v1alpha1.MoveStatus) {
		s.Copied, s.Undone = nil, s.Undone+1
		s.Waits, s.Message, s.Progress = true, cluster.Limited(errdefs.Words(why)), nil
	})
	if err == nil {
		c.update(v.Name, func(k *inUseMove) { k.unpinned = true })
	}
	return err
}

// stepCopying is the step of a mirror that the kernel is copying, which was observed at a time: it writes the progress down.
func (c *inUseMover) stepCopying(ctx context.Context, now *observed, at time.Time) (again time.Duration, err error) {
	tell := false
	c.update(now.id.Key, func(k *inUseMove) {
		again = untilNextLook(c.options.LookEvery, at.Sub(k.lookedAt), now.copied, now.m.Total-now.m.Synced)
		k.lookedAt = at
		if k.reportedAt.IsZero() { // the first look is not worth a write
			k.reportedAt = at
		}
		if tell = at.Sub(k.reportedAt) >= c.options.LookEvery; tell {
			k.reportedAt = at
		}
	})
	if !tell {
		return again, nil
	}
	return again, c.reportCopied(ctx, now)
}

// untilNextLook returns when to look at a copy again: when it should be complete, if took was needed for copied bytes and left bytes are left; but after
// every at the latest, and after every/shortestLook at the soonest.
func untilNextLook(every, took time.Duration, copied, left int64) time.Duration {
	if copied <= 0 {
		return every / shortestLook
	}
	rest := float64(took) * float64(left) / float64(copied)
	return time.Duration(min(max(rest, float64(every/shortestLook)), float64(every)))
}

// reportCopied writes down how far the copy is, if that differs enough from what the object says.
func (c *inUseMover) reportCopied(ctx context.Context, now *observed) error {
	done, total := now.m.Synced, now.m.Total
	return kube.IgnoreConflict(c.reportMoveInUse(ctx, now.v, func(s *v1alpha1.MoveStatus) {
		if was := s.Progress; !s.Waits && was != nil && was.Total == total && abs(done-was.Done) < max(1, total/progressOf) {
			return
		}
		s.Waits, s.Progress = false, &v1alpha1.Progress{Done: done, Total: total}
		s.Message = fmt.Sprintf("%s of %s are copied while node %s uses the volume", cluster.Bytes(done), cluster.Bytes(total), c.local.Node())
	}))
}

// flushNewHome makes durable what the new home has, which was not flushed before. Nobody waits for it. It ends when the new home is away for too long.
func (c *inUseMover) flushNewHome(ctx context.Context, now *observed) error {
	return c.runWatched(ctx, func(ctx context.Context) {
		look := *now
		if err := c.findLegs(ctx, &look); err == nil && look.away {
			_ = c.legs.End(ctx, look.new.NQN) // it is looked again
		}
	}, func() error { return c.volumes.FlushMirror(ctx, now.id) })
}

// pin has the new home make durable what it has, the old one seal the volume, and the new one complete its copy. Then it holds the volume, and writes that both
// have everything (steps 5 and 6). From then on no leg is dropped before the object says which home has the volume.
func (c *inUseMover) pin(ctx context.Context, now *observed) error {
	if err := c.flushNewHome(ctx, now); err != nil {
		return err
	}
	return c.withVolumeLock(now.id.Key, false, func() error {
		v, err := c.live(ctx, now.id.Key)
		if err != nil {
			return err
		}
		if !c.isToMove(v) || v.Generation != now.v.Generation {
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
		if err := c.holdMirror(ctx, now); err != nil {
			return err
		}
		c.update(now.id.Key, func(k *inUseMove) { k.unpinned, k.heldSince = false, time.Now() })
		return c.reportMoveInUse(ctx, v, func(s *v1alpha1.MoveStatus) {
			s.Copied = &v1alpha1.MoveCopied{Generation: v.Generation, Claim: of.Claim, Sealed: metav1.NewMicroTime(sealed.Created), Size: v.Status.Size}
			s.Waits, s.Progress, s.Message = false, nil, "nodes "+v.Spec.NodeName+" and "+v.Spec.Move.Node+" have all bytes"
		})
	})
}

// holdMirror holds all I/O of a volume until it has moved, or the pin is taken away: so a leg that fails from now on loses nothing. It then looks once more
// whether both legs have everything; ErrBusy if not. Then the I/O goes on, or, if a leg has failed, waits until the move is undone, which is the next step.
func (c *inUseMover) holdMirror(ctx context.Context, now *observed) error {
	if now.new != nil { // the hold waits for I/O that is under way, and the new home may not answer by now
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
	if err != nil || !m.OldFailed && !m.NewFailed { // see device.Stack.ReleaseMirror
		err = errors.Join(err, c.volumes.ReleaseMirror(ctx, now.id))
	}
	return errors.Join(err, fmt.Errorf("%w: the mirror of volume %s is not whole any more", errdefs.ErrBusy, now.id))
}

// switchOver goes on over the new home alone, and gives the old one back (step 8).
func (c *inUseMover) switchOver(ctx context.Context, now *observed) error {
	here := now.v.Spec.NodeName == c.local.Node()
	err := c.withVolumeLock(now.id.Key, now.m.OldFailed || now.m.NewFailed || now.m.Held, func() error {
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
			err = homes{c.Agent}.Close(ctx, now.ref(), now.old.Generation, now.old.NQN)
		}
	}
	if err != nil && ctx.Err() == nil { // the old home ends it by itself
		klog.FromContext(ctx).Info("Could not end the use of what a node had of a volume that has moved", "err", err.Error())
	}
	return nil
}
