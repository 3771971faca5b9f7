package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/cluster/port"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// The old node's part in the move of a volume: it seals the volume, sends its bytes, and deletes them once the new node has them ("gives them back").

// openMove seals a volume that moves from here, for the agent of its new node, which may then read it. ErrNotFound if the object says nothing of that move.
func (a *Agent) openMove(ctx context.Context, key string) (volume.Origin, error) {
	v, err := a.leavesFor(ctx, key, port.CallerNode(ctx))
	if err != nil {
		return volume.Origin{}, err
	}
	claims := v.Spec.Claims
	if v.Spec.Move.Left {
		claims = volume.AnyClaims // there may be claims already that are for its new node
	}
	var from volume.Origin
	lock := keylock.Volume(key)
	switch err := a.withLocks([]string{lock}, func() (err error) {
		from, err = a.local.Seal(ctx, cluster.VolumeID(v), claims, port.CallerNode(ctx))
		return err
	}); {
	case err != nil && v.Spec.Move.Left:
		return volume.Origin{}, err // its kind tells the caller whether this node has the volume (mayKnowBetter)
	case err != nil:
		return volume.Origin{}, errdefs.Recast(errdefs.ErrUnavailable, err, "seal volume %s on node %s", cluster.VolumeID(v), a.local.Node())
	}
	read := from.Read
	from.Read = func(ctx context.Context, at int64, visit func(int64, []byte) error) error {
		err := a.withYieldingLocks(ctx, []string{lock}, nil, func(ctx context.Context) error { return read(ctx, at, visit) })
		if errors.Is(err, errdefs.ErrBusy) {
			err = errdefs.Recast(errdefs.ErrUnavailable, err, "volume %s is needed on node %s", cluster.VolumeID(v), a.local.Node())
		}
		return err
	}
	return from, nil
}

// leavesFor returns the object, from the API server, of a volume that moves from here to node and is not used, or that has moved there and not arrived yet.
// ErrNotFound if it does not; errWaits while it is used.
func (a *Agent) leavesFor(ctx context.Context, key, node string) (*v1alpha1.Volume, error) {
	v := &v1alpha1.Volume{}
	err := a.kube.Live.Get(ctx, client.ObjectKey{Name: key}, v)
	if client.IgnoreNotFound(err) != nil {
		return nil, kube.APIError("read volume "+key, err)
	}
	if m := v.Spec.Move; err == nil && node != "" && m != nil && m.Left && m.Node == a.local.Node() && v.Spec.NodeName == node && !hasArrived(v) {
		return v, nil
	}
	if m := v.Spec.Move; err != nil || node == "" || v.Spec.NodeName != a.local.Node() || m == nil || m.Left || m.Node != node || v1alpha1.Going(v) || v.Spec.Abandoned {
		return nil, fmt.Errorf("%w: no volume %s of node %s moves to node %q", errdefs.ErrNotFound, key, a.local.Node(), node)
	}
	return v, checkUnclaimed(v)
}

// Stays: see volume.Moves. A claim in the object keeps the controller from naming the new node until that one has the bytes written by then. Without a claim
// it is refused: the new node may be about to report that it has everything. The claim of the consumer that copies the volume itself is not enough, as that
// may be about to pin it: so its pin is taken away, which refuses that write.
func (a *Agent) Stays(ctx context.Context, id volume.ID, pool string, s volume.Sealing) error {
	v, err := a.hereNow(ctx, id, pool, s)
	if err != nil || v.Spec.Move == nil || len(v.Spec.Readers) > 0 {
		return err
	}
	switch c := v.Spec.Claim; {
	case c == nil:
		return fmt.Errorf("%w: it is asked for on node %s, and no claim keeps it here", errdefs.ErrUnavailable, v.Spec.Move.Node)
	case pinned(v):
		return fmt.Errorf("%w: all of it is on node %s, which is about to have it", errdefs.ErrUnavailable, v.Spec.Move.Node)
	case s.Used == c.Generation:
		return a.undo(ctx, v)
	}
	return nil
}

// unsealStaying unseals a volume whose move was taken back, so that its next use does not have to ask the API server and the node that it was sealed for.
// errAwaited while one of these does not answer.
func (a *Agent) unsealStaying(ctx context.Context, v *v1alpha1.Volume, have volume.Volume) error {
	if !have.Sealed || v.Spec.Move != nil {
		return nil
	}
	err := a.withLocks([]string{keylock.Volume(v.Name)}, func() error { return a.local.Unseal(ctx, cluster.VolumeID(v)) })
	unanswered := errors.Is(err, errdefs.ErrUnavailable)
	if !unanswered && !errors.Is(err, errdefs.ErrPrecondition) { // ErrPrecondition: it has left this node; the cache may be behind
		return err
	}
	klog.FromContext(ctx).V(2).Info("A volume that nothing moves stays sealed for now", "volume", v.Name, "err", err.Error())
	if unanswered {
		return errAwaited
	}
	return nil
}

// IsHere: see volume.Moves.
func (a *Agent) IsHere(ctx context.Context, id volume.ID, pool string, s volume.Sealing) error {
	_, err := a.hereNow(ctx, id, pool, s)
	return err
}

// hereNow returns the object of a volume of a pool of this node, from the API server. ErrPrecondition if the volume is on another node or in another pool:
// then what this pool has was left there. ErrUnavailable if the object cannot be read, or does not exist. Errors are also those of notTaken.
func (a *Agent) hereNow(ctx context.Context, id volume.ID, pool string, s volume.Sealing) (*v1alpha1.Volume, error) {
	v := &v1alpha1.Volume{}
	if err := a.kube.Live.Get(ctx, client.ObjectKey{Name: id.Key}, v); err != nil {
		return nil, errdefs.Recast(errdefs.ErrUnavailable, err, "read volume %s", id.Key)
	}
	if v.Spec.NodeName != a.local.Node() || v.In() != pool || cluster.VolumeID(v) != id {
		return nil, fmt.Errorf("%w: it is on node %s now, in pool %s", errdefs.ErrPrecondition, v.Spec.NodeName, v.In())
	}
	return v, a.notTaken(ctx, id, s)
}

// notTaken asks the node that a volume of this node was sealed for, whether it has taken the volume over. It has if the API server was restored to before the
// move, and this node was away when the volume moved, so that its record does not say that yet: ErrPrecondition, and the record says so from now on.
// ErrUnavailable if that node does not answer, but its agent is alive. One that is down is not waited for: it would take a volume with it that was only about
// to move there. The caller holds the lock of the volume.
func (a *Agent) notTaken(ctx context.Context, id volume.ID, s volume.Sealing) error {
	if s.For == "" || s.For == a.local.Node() || s.Since.IsZero() || a.options.Agents == nil {
		return nil
	}
	asking, cancel := context.WithTimeout(ctx, homeTime)
	defer cancel()
	took, err := otherHome{a, s.For}.Took(asking, id, s.Since)
	switch {
	case err == nil && took:
		return cmp.Or(a.local.Left(ctx, id, s.Since, s.For), fmt.Errorf("%w: it has moved to node %s, and the API server went back to before that", errdefs.ErrPrecondition, s.For))
	case err == nil || errors.Is(err, errdefs.ErrUnknownCall): // an older driver does not know
		return nil
	}
	alive, failure := a.isAlive(ctx, s.For)
	if failure == nil && !alive {
		klog.FromContext(ctx).Info("A volume that was about to move is used, though its new node does not say that it has not moved: that node is down", "id", id.String(), "node", s.For, "err", err.Error())
		return nil
	}
	return errdefs.Recast(errdefs.ErrUnavailable, cmp.Or(failure, err), "node %s has to say that volume %s has not moved there; if it is gone for good, delete its Node object", s.For, id)
}

// isAlive reports whether the agent of a node has renewed its Lease of late; false where agents have none.
func (a *Agent) isAlive(ctx context.Context, node string) (bool, error) {
	if a.options.Namespace == "" {
		return false, nil
	}
	lease := cluster.Lease(a.options.Namespace, node)
	err := a.kube.Live.Get(ctx, client.ObjectKeyFromObject(lease), lease)
	if client.IgnoreNotFound(err) != nil {
		return false, kube.APIError("read the Lease of node "+node, err)
	}
	return err == nil && lease.Spec.RenewTime != nil && time.Since(lease.Spec.RenewTime.Time) < cluster.SilentAfter, nil
}

// giveBack deletes the bytes of a volume that has left this node, once the new node has taken it over. Before that it notes in the record that the volume has
// left.
func (a *Agent) giveBack(ctx context.Context, v *v1alpha1.Volume) (reconcile.Result, error) {
	if !hasArrived(v) {
		err := a.noteLeft(ctx, v)
		if errors.Is(err, errdefs.ErrBusy) {
			return reconcile.Result{RequeueAfter: inUseRetry}, nil
		}
		return reconcile.Result{}, err
	}
	return giveBack(ctx, a, v, &v1alpha1.Volume{}, keylock.Volume(v.Name), func(v *v1alpha1.Volume) error { return a.depart(ctx, v, copiedAt(v)) })
}

// copiedAt returns when the volume that was copied was sealed; zero, which matches no seal, if its object does not say.
func copiedAt(v *v1alpha1.Volume) time.Time {
	if s := v.Status.Move; s != nil && s.Copied != nil {
		return s.Copied.Sealed.Time
	}
	return time.Time{}
}

// noteLeft writes into the record of a volume that it has left this node (Local.Left). It does so as soon as the API server says it: a user may write to
// the volume on the new node before that has taken it over. errPoolBusy as from giveBack.
func (a *Agent) noteLeft(ctx context.Context, v *v1alpha1.Volume) error {
	end, err := a.leaving.acquire(a.local.Node(), oldPool(v))
	if err != nil {
		return err
	}
	defer end()
	if have, err := a.local.Get(ctx, cluster.VolumeID(v)); err != nil || have.Left != "" {
		return errdefs.IgnoreNotFound(err)
	}
	return a.withLocks([]string{keylock.Volume(v.Name)}, func() error {
		now, err := stillMoves(ctx, a, v, &v1alpha1.Volume{}, a.hasLeft)
		if err != nil {
			return err
		}
		return a.local.Left(ctx, cluster.VolumeID(now), copiedAt(now), now.Spec.NodeName)
	})
}

// giveBack calls depart, which deletes the bytes of a volume or snapshot that has left this node, once the new node has taken it over, and reports that.
// It holds the lock meanwhile, and passes the object as it is at the API server, which it reads into now. errPoolBusy if too many of the pool are given
// back at once.
func giveBack[T cluster.Object](ctx context.Context, a *Agent, o, now T, lock string, depart func(T) error) (reconcile.Result, error) {
	if !hasArrived(o) || isCleared(o) {
		return reconcile.Result{}, nil
	}
	end, err := a.leaving.acquire(a.local.Node(), oldPool(o))
	if err != nil {
		return reconcile.Result{}, err
	}
	defer end()
	err = a.withLocks([]string{lock}, func() error {
		still, err := stillMoves(ctx, a, o, now, a.hasLeftForGood)
		if err != nil {
			return err
		}
		o = still
		return depart(o)
	})
	switch {
	case err == nil:
		a.Changed()
		klog.FromContext(ctx).Info("Gave back the bytes of what has moved", "object", o.GetName(), "to", o.Node())
		return reconcile.Result{}, a.reportMove(ctx, o, func(s *v1alpha1.MoveStatus) { s.Cleared, s.Waits, s.Message = true, false, "moved" })
	case errors.Is(err, errdefs.ErrBusy):
		return reconcile.Result{RequeueAfter: inUseRetry}, nil // a snapshot may be read for hours
	}
	failure := a.reportMove(ctx, o, func(s *v1alpha1.MoveStatus) { // the progress stays as it is: it is the new node's
		s.Waits, s.Message = true, cluster.Limited("moved; the bytes that node "+a.local.Node()+" had are still there: "+errdefs.Words(err))
	})
	if failure == nil && errors.Is(err, errdefs.ErrInUse) {
		return reconcile.Result{RequeueAfter: inUseRetry}, nil
	}
	return reconcile.Result{}, errors.Join(err, failure)
}

// depart deletes the bytes of a volume that has left this node with a seal (sealed). It ends exports first, as the node that used the volume while it moved
// may still be connected. Then it asks the new node whether it has all of the volume, which it may have lost since it reported that: ErrUnavailable if not.
// Bytes without that seal stay: ErrPrecondition.
func (a *Agent) depart(ctx context.Context, v *v1alpha1.Volume, sealed time.Time) error {
	id, home := cluster.VolumeID(v), v.Spec.NodeName
	if since, is, err := a.local.SealedSince(ctx, id); errdefs.IgnoreNotFound(err) != nil {
		return err
	} else if is && since.Equal(sealed) {
		if err := errors.Join(a.local.Left(ctx, id, sealed, home), a.local.Unexport(ctx, id, 0)); err != nil {
			return err
		}
		asking, cancel := context.WithTimeout(ctx, homeTime)
		defer cancel()
		if err := (otherHome{a, home}).Arrived(asking, id); err != nil {
			return errdefs.Recast(errdefs.ErrUnavailable, err, "node %s has to say that it has all of volume %s; if it never will, these are its bytes: delete the object of the volume, and adopt it here", home, id)
		}
	}
	return a.local.Depart(ctx, id, sealed)
}
