package agent

import (
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

// The part of the old node in the move of a volume: it seals the volume, tells what it has, and gives the bytes back once the new node has them.

// openMove seals a volume of this node that moves, for the agent of its new node. ErrNotFound if the volume's object says nothing of that.
func (a *Agent) openMove(ctx context.Context, key string) (volume.Origin, error) {
	v, err := a.leavesFor(ctx, key, port.CallerNode(ctx))
	if err != nil {
		return volume.Origin{}, err
	}
	claims := v.Spec.Claims
	if v.Spec.Move.Left {
		claims = volume.AnyClaims // they are of the new node
	}
	var from volume.Origin
	lock := keylock.Volume(key)
	switch err := a.withLocks([]string{lock}, func() (err error) {
		from, err = a.local.Seal(ctx, cluster.VolumeID(v), claims)
		return err
	}); {
	case err != nil && v.Spec.Move.Left:
		return volume.Origin{}, err // who asks is to know whether this node answered
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

// leavesFor returns the object of a volume of this node that moves to another one, and that nobody uses, or that has moved there and not arrived, as the API server
// has it now.
func (a *Agent) leavesFor(ctx context.Context, key, node string) (*v1alpha1.Volume, error) {
	v := &v1alpha1.Volume{}
	err := a.kube.Live.Get(ctx, client.ObjectKey{Name: key}, v)
	if client.IgnoreNotFound(err) != nil {
		return nil, kube.APIError("read volume "+key, err)
	}
	if m := v.Spec.Move; err == nil && node != "" && m != nil && m.Left && m.Node == a.local.Node() && v.Spec.NodeName == node && !arrived(v) {
		return v, nil
	}
	if m := v.Spec.Move; err != nil || node == "" || v.Spec.NodeName != a.local.Node() || m == nil || m.Left || m.Node != node || v1alpha1.Going(v) || v.Spec.Abandoned {
		return nil, fmt.Errorf("%w: no volume %s of node %s moves to node %q", errdefs.ErrNotFound, key, a.local.Node(), node)
	}
	return v, unclaimed(v)
}

// Stays: see volume.Moves. A claim in the object keeps the controller from naming the new node until that one has the bytes of after it. Without one nothing would
// tell the new node, which may be about to say that it has all of them. Nor would anything tell the user of the volume, if that copies it: so its claim does not do,
// and that this is undone is written down.
func (a *Agent) Stays(ctx context.Context, id volume.ID, pool string, used int64) error {
	v, err := a.hereNow(ctx, id, pool)
	if err != nil || v.Spec.Move == nil || len(v.Spec.Readers) > 0 {
		return err
	}
	switch c := v.Spec.Claim; {
	case c == nil:
		return fmt.Errorf("%w: it is asked for on node %s, and no claim keeps it here", errdefs.ErrUnavailable, v.Spec.Move.Node)
	case pinned(v):
		return fmt.Errorf("%w: all of it is on node %s, which is about to have it", errdefs.ErrUnavailable, v.Spec.Move.Node)
	case used == c.Generation:
		return a.undo(ctx, v)
	}
	return nil
}

// unsealStaying takes the seal of a volume of this node off whose move was taken back: nobody waits for its next use then, which needs the API server.
func (a *Agent) unsealStaying(ctx context.Context, v *v1alpha1.Volume, have volume.Volume) error {
	if !have.Sealed || v.Spec.Move != nil {
		return nil
	}
	err := a.withLocks([]string{keylock.Volume(v.Name)}, func() error { return a.local.Unseal(ctx, cluster.VolumeID(v)) })
	if errors.Is(err, errdefs.ErrPrecondition) || errors.Is(err, errdefs.ErrUnavailable) { // the watch is behind, or the next look finds out
		klog.FromContext(ctx).V(2).Info("A volume that nothing moves stays sealed for now", "volume", v.Name, "err", err.Error())
		return nil
	}
	return err
}

// IsHere: see volume.Moves.
func (a *Agent) IsHere(ctx context.Context, id volume.ID, pool string) error {
	_, err := a.hereNow(ctx, id, pool)
	return err
}

// hereNow returns the object of a volume of a pool of this node, as the API server has it; ErrPrecondition if it is on another node, or in another pool: what this one has was left.
func (a *Agent) hereNow(ctx context.Context, id volume.ID, pool string) (*v1alpha1.Volume, error) {
	v := &v1alpha1.Volume{}
	if err := a.kube.Live.Get(ctx, client.ObjectKey{Name: id.Key}, v); err != nil {
		return nil, errdefs.Recast(errdefs.ErrUnavailable, err, "read volume %s", id.Key)
	}
	if v.Spec.NodeName != a.local.Node() || v.In() != pool || cluster.VolumeID(v) != id {
		return nil, fmt.Errorf("%w: it is on node %s now, in pool %s", errdefs.ErrPrecondition, v.Spec.NodeName, v.In())
	}
	return v, nil
}

// giveBack removes the bytes of a volume that has left this node, once its new one has taken it over.
func (a *Agent) giveBack(ctx context.Context, v *v1alpha1.Volume) (reconcile.Result, error) {
	if !arrived(v) {
		err := a.noteLeft(ctx, v)
		if errors.Is(err, errdefs.ErrBusy) {
			return reconcile.Result{RequeueAfter: inUseRetry}, nil
		}
		return reconcile.Result{}, err
	}
	return giveBack(ctx, a, v, &v1alpha1.Volume{}, keylock.Volume(v.Name), func(v *v1alpha1.Volume) error { return a.depart(ctx, v, copiedAt(v)) })
}

// copiedAt is how a volume that has moved was sealed; zero, as nothing is, if its object does not say that.
func copiedAt(v *v1alpha1.Volume) time.Time {
	if s := v.Status.Move; s != nil && s.Copied != nil {
		return s.Copied.Sealed.Time
	}
	return time.Time{}
}

// noteLeft has the record of a volume say that it has left this node (volume.Left), as soon as the API server says so: who uses it may write on the new node before that has taken it over. errOrigin as of giveBack.
func (a *Agent) noteLeft(ctx context.Context, v *v1alpha1.Volume) error {
	end, err := a.leaving.begin(a.local.Node(), leftPool(v))
	if err != nil {
		return err
	}
	defer end()
	if have, err := a.local.Get(ctx, cluster.VolumeID(v)); err != nil || have.Left != "" {
		return errdefs.IgnoreNotFound(err)
	}
	return a.withLocks([]string{keylock.Volume(v.Name)}, func() error {
		now, err := stillMoves(ctx, a, v, &v1alpha1.Volume{}, a.left)
		if err != nil {
			return err
		}
		return a.local.Left(ctx, cluster.VolumeID(now), copiedAt(now), now.Spec.NodeName)
	})
}

// giveBack has depart remove the bytes of what has left this node, once its new one has taken it over: under a lock, and by the object as the API server has it, which it reads into now.
func giveBack[T cluster.Object](ctx context.Context, a *Agent, o, now T, lock string, depart func(T) error) (reconcile.Result, error) {
	if !arrived(o) || cleared(o) {
		return reconcile.Result{}, nil
	}
	end, err := a.leaving.begin(a.local.Node(), leftPool(o))
	if err != nil {
		return reconcile.Result{}, err
	}
	defer end()
	err = a.withLocks([]string{lock}, func() error {
		still, err := stillMoves(ctx, a, o, now, a.hasLeft)
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
		return reconcile.Result{RequeueAfter: inUseRetry}, nil // a snapshot as long as it is read: that may be for hours
	}
	failure := a.reportMove(ctx, o, func(s *v1alpha1.MoveStatus) { // how far it was copied is not this node's to say any more
		s.Waits, s.Message = true, cluster.Limited("moved; the bytes that node "+a.local.Node()+" had are still there: "+errdefs.Words(err))
	})
	if failure == nil && errors.Is(err, errdefs.ErrInUse) {
		return reconcile.Result{RequeueAfter: inUseRetry}, nil
	}
	return reconcile.Result{}, errors.Join(err, failure)
}

// depart removes what is here of a volume that has left, as it was sealed then, if the new node has all of it: that has said so, and may have lost it since. Who used the volume while it moved may
// be connected here still: that ends first.
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
