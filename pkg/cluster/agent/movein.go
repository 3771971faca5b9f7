package agent

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/internal/progress"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/cluster/transfer"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// The new node's part in the move of a volume: it copies the bytes, and takes the volume over once the controller has named it.

// copyIn copies a volume that moves here, and reports when all of it is here.
func (a *Agent) copyIn(ctx context.Context, r request, v *v1alpha1.Volume) error {
	if cluster.MayMove(v) {
		return nil // it is the controller's turn
	}
	if err := checkUnclaimed(v); err != nil {
		return err // before the claim's event ends what it finds at work
	}
	ended, err := a.copyingIn.acquire(v.Spec.NodeName, v.Spec.Pool)
	if err != nil {
		return err
	}
	defer ended()
	working, end := a.making(ctx, r)
	defer end()
	if err := a.checkMayCome(working, v); err != nil {
		return err
	}
	agent, err := a.agentOf(working, v.Spec.NodeName)
	if err != nil {
		return err
	}
	from, err := askMove(working, agent, v)
	if err != nil {
		return fmt.Errorf("ask node %s for volume %s: %w", v.Spec.NodeName, cluster.VolumeID(v), err)
	}
	if err := errors.Join(checkKnowsPools(v, from), checkSize(v, from)); err != nil {
		return err
	}
	defer a.Changed()
	if err := a.withYieldingLocks(working, []string{keylock.Volume(v.Name)}, nil, func(ctx context.Context) error {
		defer a.followMove(ctx, v)()
		return a.local.CopyIn(ctx, v.MovePool(), v.Spec.Name, blockdev.Provisioning(v.Spec.Provisioning), from)
	}); err != nil {
		return err
	}
	return a.reportCopiedIn(working, v, agent, from.Created)
}

// checkMayCome is ErrUnavailable while a volume cannot move to this node.
func (a *Agent) checkMayCome(ctx context.Context, v *v1alpha1.Volume) error {
	id := cluster.VolumeID(v)
	home, there, err := poolNow(ctx, a.kube.Live, overview.PoolName(v.Spec.NodeName, v.Spec.Pool))
	if err != nil {
		return err
	}
	switch n := home.Status.Network; {
	case v.Status.Created == nil:
		return fmt.Errorf("%w: volume %s is not made yet", errWaits, id)
	case !there || n == nil || n.Name != a.options.Network.Name:
		return fmt.Errorf("%w: volume %s stays on node %s: that is not in the network %q, as node %s is, and who uses the volume may need it to be", errdefs.ErrUnavailable,
			id, v.Spec.NodeName, a.options.Network.Name, a.local.Node())
	}
	return a.checkApart(ctx, v)
}

// checkApart is errWaits for a leg that is to move to this node, if another leg of its volume is here: legs are on different nodes.
func (a *Agent) checkApart(ctx context.Context, v *v1alpha1.Volume) error {
	if v.Spec.ReplicaOf == "" {
		return nil
	}
	var here v1alpha1.VolumeList
	if err := a.kube.Client.List(ctx, &here, client.UnsafeDisableDeepCopy); err != nil {
		return kube.APIError("list the volumes of node "+a.local.Node(), err)
	}
	switch other := v.OtherLeg(a.local.Node(), here.Pointers()); {
	case other == nil:
		return nil
	case other.Spec.NodeName != a.local.Node():
		return fmt.Errorf("%w: replica %s of its volume, on node %s, is to move to node %s as well: take one of the two moves back", errWaits, other.Name, other.Spec.NodeName, a.local.Node())
	default:
		return fmt.Errorf("%w: node %s has another replica of its volume, %s", errWaits, a.local.Node(), other.Name)
	}
}

// checkKnowsPools is ErrUnavailable if a volume is to move to a pool of another name, and the driver of its home, or of the node that uses it, is too old for
// that. from is what that driver has said of the volume.
func checkKnowsPools(v *v1alpha1.Volume, from volume.Origin) error {
	if v.Spec.Move.Pool == "" || from.Pool == v.Spec.Pool {
		return nil
	}
	return fmt.Errorf("%w: volume %s is to move to a pool of another name, and the driver of its node %s, or of the node that uses it, does not know of that: bring all nodes to one version", errWaits,
		cluster.VolumeID(v), v.Spec.NodeName)
}

// reportCopiedIn writes that all bytes of a volume are here (status.move.copied). If somebody used the volume since the object was read, the write is
// refused, as the object has changed. If somebody used it before that, the home has another seal by now: ErrUnavailable.
func (a *Agent) reportCopiedIn(ctx context.Context, v *v1alpha1.Volume, agent grpc.ClientConnInterface, sealed time.Time) error {
	now, err := stillMoves(ctx, a, v, &v1alpha1.Volume{}, func(now cluster.Object) bool { return now.Node() == v.Node() && a.movesHere(now) })
	if err != nil {
		return err
	}
	if err := checkUnclaimed(now); err != nil {
		return err
	}
	again, err := askMove(ctx, agent, v)
	if err != nil {
		return err
	}
	if !again.Created.Equal(sealed) || volume.SizeOf(again) != now.Status.Size {
		return fmt.Errorf("%w: volume %s was used, or has grown, while it was copied; it is copied anew", errdefs.ErrUnavailable, v.Name)
	}
	if here, err := a.local.IsCopiedIn(ctx, cluster.VolumeID(now), sealed); err != nil || !here { // it may have been removed, when the move was taken back and asked for again
		return errors.Join(err, fmt.Errorf("%w: the copy of volume %s is gone; it is copied anew", errdefs.ErrUnavailable, v.Name))
	}
	return a.reportMove(ctx, now, func(s *v1alpha1.MoveStatus) {
		s.Copied, s.Progress = &v1alpha1.MoveCopied{Generation: now.Generation, Size: now.Status.Size, Sealed: metav1.NewMicroTime(sealed)}, nil
		s.Waits, s.Message = false, "all bytes are on node "+a.local.Node()
	})
}

// followMove reports the progress of the copy of a volume that moves here, until end is called.
func (a *Agent) followMove(ctx context.Context, v *v1alpha1.Volume) (end func()) {
	return a.followCopy(ctx, v, v.MovePool(), func(ctx context.Context, far progress.Copy) error {
		now := &v1alpha1.Volume{}
		if err := a.moves.Cache.Get(ctx, client.ObjectKeyFromObject(v), now); err != nil || !a.movesHere(now) {
			return err
		}
		return a.reportMove(ctx, now, func(s *v1alpha1.MoveStatus) { setCopyProgress(s, far, v.Spec.NodeName) })
	})
}

// setCopyProgress says how far the copy of what moves here is, if that is news.
func setCopyProgress(s *v1alpha1.MoveStatus, far progress.Copy, from string) {
	if was := s.Progress; was != nil && was.Total == far.Total && abs(far.Done-was.Done) < max(1, far.Total/progressOf) {
		return
	}
	s.Waits, s.Progress, s.Copied = false, &v1alpha1.Progress{Done: far.Done, Total: far.Total}, nil
	s.Message = fmt.Sprintf("%s of %s are copied from node %s", cluster.Bytes(far.Done), cluster.Bytes(far.Total), from)
}

// followCopy has write write down how far the copy of an object that moves to a pool here is, again and again, until end is called.
func (a *Agent) followCopy(ctx context.Context, o cluster.Object, pool string, write func(context.Context, progress.Copy) error) (end func()) {
	ctx, cancel := context.WithCancel(ctx)
	var done sync.WaitGroup
	done.Go(func() {
		tick := time.NewTicker(a.options.ProgressEvery)
		defer tick.Stop()
		for told := false; ; {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			far, running := a.progressIn(pool, o)
			if !running {
				continue
			}
			err := write(ctx, far)
			if err == nil && !told {
				told = true
				a.Changed() // the pool has it now, so no room is kept for it beside that
			}
			if err != nil {
				klog.FromContext(ctx).V(2).Info("Could not write down how far a move is", "object", o.GetName(), "err", err)
			}
		}
	})
	return func() {
		cancel()
		done.Wait()
	}
}

// copyRest makes sure that all bytes of a volume that has moved here are here, and returns their seal; zero if they are a volume already. What is sealed
// here, or is in another pool, is left of an earlier move, and does not count.
//
// As a rule all bytes are here. If not (the disk of the copy failed, or the API server was restored to an earlier move), the node that the volume has left
// still has them, and is asked. If that one does not answer, or cannot read them, what the object says of the copy holds. If the object says nothing (it was
// restored without its status), and the old node has bytes that its user went on from, the copy has to be of just those. ErrNotFound if neither node has the
// bytes; errPoolBusy as of arrival.withoutSlot.
func (a *Agent) copyRest(ctx context.Context, r request, v *v1alpha1.Volume, one *arrival) (sealed metav1.MicroTime, err error) {
	id := cluster.VolumeID(v)
	have, err := a.local.Get(ctx, id)
	if left := err == nil && (have.Sealed || have.Pool != v.Spec.Pool); !left && !errors.Is(err, errdefs.ErrNotFound) {
		return sealed, err
	}
	var copied *v1alpha1.MoveCopied
	if s := v.Status.Move; s != nil {
		copied = s.Copied
	}
	if copied != nil && copied.Claim != 0 {
		return a.checkCopiedInUse(ctx, v, copied.Sealed, one)
	}
	working, end := a.making(ctx, r)
	defer end()
	var from volume.Origin
	if failure := one.withoutSlot(func() { from, err = a.askLeft(working, v) }); failure != nil {
		return sealed, failure
	}
	if err == nil {
		err = a.withYieldingLocks(working, []string{keylock.Volume(v.Name)}, nil, func(ctx context.Context) error {
			return a.local.CopyIn(ctx, v.Spec.Pool, v.Spec.Name, blockdev.Provisioning(v.Spec.Provisioning), from)
		})
		return metav1.NewMicroTime(from.Created), err
	}
	if mayKnowBetter(err) {
		since, is, failure := a.local.CopiedInSeal(ctx, id)
		if is {
			return a.checkCopiedInUse(ctx, v, metav1.NewMicroTime(since), one)
		}
		return sealed, errors.Join(err, failure)
	}
	if copied != nil && working.Err() == nil {
		if here, failure := a.local.IsCopiedIn(ctx, id, copied.Sealed.Time); here || failure != nil {
			return copied.Sealed, failure
		}
	}
	return sealed, err
}

// mayKnowBetter reports whether the node that a volume has left answered err because the volume is used there, or needed now: then what the object says of
// the copy may be out of date. If that node does not answer, has nothing, or cannot read what it has, it holds.
func mayKnowBetter(err error) bool {
	return errors.Is(err, errdefs.ErrBusy) || errors.Is(err, errdefs.ErrInUse) || errors.Is(err, errdefs.ErrPrecondition)
}

// askLeft asks the node that a volume has left for what it has of it.
func (a *Agent) askLeft(ctx context.Context, v *v1alpha1.Volume) (volume.Origin, error) {
	agent, err := a.agentOf(ctx, v.Spec.Move.Node)
	if err != nil {
		return volume.Origin{}, err
	}
	return askMove(ctx, agent, v)
}

// askMove is transfer.OpenMove for at most homeTime: a node whose disk hangs does not delay moves from other nodes.
func askMove(ctx context.Context, agent grpc.ClientConnInterface, v *v1alpha1.Volume) (volume.Origin, error) {
	ctx, cancel := context.WithTimeout(ctx, homeTime)
	defer cancel()
	from, err := transfer.OpenMove(ctx, agent, v.Name)
	return limitTo(v, from), err
}

// limitTo sets in from, which another node has said of a volume that moves here, what only the object may decide.
func limitTo(v *v1alpha1.Volume, from volume.Origin) volume.Origin {
	from.Object, from.Generation, from.Claims = string(v.UID), v.Generation, min(from.Claims, v.Spec.Claims)
	return from
}

// checkSize is ErrUnavailable unless a volume that moves here is said to have the size that its object has: no other node decides how much room is made here.
func checkSize(v *v1alpha1.Volume, from volume.Origin) error {
	if size := volume.SizeOf(from); size != v.Status.Size {
		return fmt.Errorf("%w: volume %s has %d bytes by its object, and is said to have %d; if it has just grown, ask again", errdefs.ErrUnavailable, cluster.VolumeID(v), v.Status.Size, size)
	}
	return nil
}

// takeOver takes over a volume that has moved here. ErrNotFound if its bytes are nowhere; errPoolBusy as of beginArrival.
func (a *Agent) takeOver(ctx context.Context, r request, v *v1alpha1.Volume) error {
	one, err := a.beginArrival(v)
	if err != nil {
		return err
	}
	defer one.end()
	sealed, err := a.copyRest(ctx, r, v, one)
	if err == nil {
		return a.arrive(ctx, v, sealed)
	}
	if errors.Is(err, errdefs.ErrNotFound) || errors.Is(err, errdefs.ErrBusy) || errors.Is(err, errPoolBusy) || ctx.Err() != nil {
		return err
	}
	return errors.Join(err, a.reportWaits(ctx, v, notAllHere, err))
}

const notAllHere = "moved; not all bytes are here: "

// arrive makes the copy of a volume that has moved here the volume, and writes that (status.move.arrived).
func (a *Agent) arrive(ctx context.Context, v *v1alpha1.Volume, sealed metav1.MicroTime) error {
	return a.withLocks([]string{keylock.Volume(v.Name)}, func() error {
		now, err := stillMoves(ctx, a, v, &v1alpha1.Volume{}, a.isArriving)
		if err != nil {
			return err
		}
		// Written first: afterwards nothing here tells by which seal it came, and the old node deletes only what has that seal.
		if s := now.Status.Move; !sealed.IsZero() && (s == nil || s.Copied == nil || !s.Copied.Sealed.Equal(&sealed)) {
			if err := a.reportMove(ctx, now, func(s *v1alpha1.MoveStatus) {
				s.Copied = &v1alpha1.MoveCopied{Generation: now.Generation, Sealed: sealed, Size: max(now.Status.Size, now.Spec.Size)}
			}); err != nil {
				return err
			}
		}
		if err := a.local.Arrive(ctx, cluster.VolumeID(now)); err != nil {
			return err
		}
		// Its user may be connected here already. What the old node gave is not what counts any more.
		to, is, err := a.currentExport(ctx, cluster.VolumeID(now))
		if err != nil {
			return err
		}
		klog.FromContext(ctx).Info("A volume has moved here", "volume", cluster.VolumeID(now).String(), "from", now.Spec.Move.Node)
		defer a.Changed()
		err = report(ctx, a, now, func(v *v1alpha1.Volume) {
			setExport(v, to, is)
			if v.Status.Move == nil { // it was restored without its status
				v.Status.Move = &v1alpha1.MoveStatus{Node: a.local.Node()}
			}
			v.Status.Move.Arrived, v.Status.Move.Waits, v.Status.Move.Message = true, false, "moved; node "+v.Spec.Move.Node+" is to give its bytes back"
		})
		*v = *now
		return err
	})
}

// checkTakenOver is ErrUnavailable for a volume that has moved to this node, and is not taken over yet: until then nobody uses it.
func (a *Agent) checkTakenOver(v *v1alpha1.Volume) error {
	if !a.isArriving(v) {
		return nil
	}
	return fmt.Errorf("%w: volume %s has moved here from node %s, and node %s has not taken it over yet", errdefs.ErrUnavailable, cluster.VolumeID(v), v.Spec.Move.Node, a.local.Node())
}
