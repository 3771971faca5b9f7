package agent

import (
	"context"
	"errors"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/internal/progress"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/cluster/port"
	"github.com/ashlar-csi/ashlar/pkg/cluster/transfer"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// A snapshot moves in the same steps as a volume (move.go), except that it is not sealed, as nobody writes to it. Readers on the old node go on, and the
// bytes there are deleted when there are none.

const aSnapshotMove = "snapshot-move"

// connectSnapshotMoves prepares the watch of snapshots of other nodes that move here, or have left this node. It asks the API server nothing.
func (a *Agent) connectSnapshotMoves(config *rest.Config) (err error) {
	if a.options.Agents == nil {
		return nil
	}
	these := fields.AndSelectors(fields.OneTermEqualSelector("spec.move.node", a.local.Node()), a.elsewhereSelector())
	a.snapshotMoves, err = kube.Connect(config, map[client.Object]cache.ByObject{&v1alpha1.Snapshot{}: {Field: these}})
	return err
}

// runSnapshotMoves watches those snapshots, and does this node's part in their moves, until the context ends.
func (a *Agent) runSnapshotMoves(ctx context.Context) error {
	if a.options.Agents == nil {
		<-ctx.Done()
		return nil
	}
	return runMoveQueues(ctx, a, "snapshot-mover", a.snapshotMoves, &v1alpha1.Snapshot{}, aSnapshotMove, a.snapshotMoveChanged)
}

// snapshotMoveChanged ends the copy of a snapshot that does not move here any more.
func (a *Agent) snapshotMoveChanged(o client.Object, gone bool) {
	if s, is := o.(*v1alpha1.Snapshot); !is || !gone && !v1alpha1.Going(s) {
		return
	}
	a.Changed() // what was copied may have to be removed
	a.mu.Lock()
	defer a.mu.Unlock()
	if cancel := a.cancels[request{aSnapshotMove, o.GetName()}]; cancel != nil {
		cancel()
	}
}

// reconcileSnapshotMove does this node's part in the move of a snapshot whose object names another node now: it copies the snapshot here, or gives back
// the bytes of one that has left.
func (a *Agent) reconcileSnapshotMove(ctx context.Context, r request) (reconcile.Result, error) {
	s := &v1alpha1.Snapshot{}
	if err := a.snapshotMoves.Cache.Get(ctx, client.ObjectKey{Name: r.key}, s); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	switch m := s.Spec.Move; {
	case m == nil || m.Node != a.local.Node() || s.Spec.NodeName == a.local.Node():
		return reconcile.Result{}, nil
	case m.Left:
		return a.giveBackSnapshot(ctx, s)
	case v1alpha1.Going(s), cluster.SnapshotMayMove(s):
		return reconcile.Result{}, nil // there is nothing to do here: it is deleted, or the controller has to change its node
	}
	err := a.moveSnapshotIn(ctx, r, s)
	switch {
	case err == nil || ctx.Err() != nil:
		return reconcile.Result{RequeueAfter: checkAgain}, nil
	case errors.Is(err, context.Canceled), errors.Is(err, errPoolBusy): // it does not move here any more, or has to wait
		return reconcile.Result{RequeueAfter: inUseRetry}, nil
	case errors.Is(err, errdefs.ErrBusy):
		return reconcile.Result{}, err
	}
	return reconcile.Result{}, errors.Join(err, a.reportWaits(ctx, s, "", err))
}

// moveSnapshotIn copies a snapshot that moves here, and reports when the copy is complete. errPoolBusy if too many copies of its pool are under way.
func (a *Agent) moveSnapshotIn(ctx context.Context, r request, s *v1alpha1.Snapshot) error {
	if s.Status.Created == nil {
		return fmt.Errorf("%w: snapshot %s is not taken yet", errdefs.ErrUnavailable, cluster.SnapshotID(s))
	}
	ended, err := a.copyingIn.acquire(s.Spec.NodeName, s.In())
	if err != nil {
		return err
	}
	defer ended()
	defer a.Changed()
	from, err := a.copySnapshotIn(ctx, r, s, s.Spec.NodeName)
	if err != nil {
		return err
	}
	now, err := stillMoves(ctx, a, s, &v1alpha1.Snapshot{}, func(now cluster.Object) bool {
		return now.Node() == s.Node() && a.movesHere(now) && !v1alpha1.Going(now)
	})
	if err != nil {
		return err
	}
	if here, err := a.local.IsCopiedIn(ctx, cluster.SnapshotID(now), from.Created); err != nil || !here { // the copy may have been removed, as the move was taken back and requested again
		return errors.Join(err, fmt.Errorf("%w: the copy of snapshot %s is gone; it is copied anew", errdefs.ErrUnavailable, s.Name))
	}
	return a.reportMove(ctx, now, func(far *v1alpha1.MoveStatus) {
		far.Copied, far.Progress = &v1alpha1.MoveCopied{Generation: now.Generation, Size: now.Status.Size, Sealed: metav1.NewMicroTime(from.Created)}, nil
		far.Waits, far.Message = false, "all bytes are on node "+a.local.Node()
	})
}

// copySnapshotIn copies a snapshot from another node, and returns what that node answered about it. ErrPrecondition if that node has another snapshot of
// its name.
func (a *Agent) copySnapshotIn(ctx context.Context, r request, s *v1alpha1.Snapshot, home string) (volume.Origin, error) {
	ctx, end := a.making(ctx, r)
	defer end()
	id := cluster.SnapshotID(s)
	agent, err := a.agentOf(ctx, home)
	if err != nil {
		return volume.Origin{}, err
	}
	asking, cancel := context.WithTimeout(ctx, homeTime)
	from, err := transfer.OpenSnapshotMove(asking, agent, s.Name)
	cancel()
	switch {
	case err != nil:
		return from, fmt.Errorf("ask node %s for snapshot %s: %w", home, id, err)
	case from.ID != id || !sameBytes(s, from.Created, ""):
		return from, fmt.Errorf("%w: node %s has %s, cut at %s, and the object is of one that was cut at %s; it is not moved", errdefs.ErrPrecondition, home, from.ID, from.Created, s.Status.Created)
	}
	return from, a.withYieldingLocks(ctx, []string{keylock.Snapshot(s.Name)}, nil, func(ctx context.Context) error {
		defer a.followCopy(ctx, s, s.In(), func(ctx context.Context, far progress.Copy) error {
			now := &v1alpha1.Snapshot{}
			if err := a.snapshotMoves.Cache.Get(ctx, client.ObjectKeyFromObject(s), now); err != nil || !a.movesHere(now) || now.Spec.Move.Left {
				return client.IgnoreNotFound(err)
			}
			return a.reportMove(ctx, now, func(m *v1alpha1.MoveStatus) { setCopyProgress(m, far, home) })
		})()
		return a.local.CopySnapshotIn(ctx, cluster.ToSnapshot(s).Name, from)
	})
}

// openSnapshotMove opens a snapshot for the agent of another node (the caller). Either the snapshot moves from here to the caller, or has moved there and
// not arrived. Or it has moved here from the caller, which wants to know whether all of it is here; with head, which asks for no bytes, it may ask that
// even when the move has ended. ErrNotFound if the snapshot's object says nothing of that.
func (a *Agent) openSnapshotMove(ctx context.Context, key string, head bool) (volume.Origin, error) {
	s, node := &v1alpha1.Snapshot{}, port.CallerNode(ctx)
	err := a.kube.Live.Get(ctx, client.ObjectKey{Name: key}, s)
	if client.IgnoreNotFound(err) != nil {
		return volume.Origin{}, kube.APIError("read snapshot "+key, err)
	}
	m, here := s.Spec.Move, a.local.Node()
	moves := m != nil && (m.Node == node && s.Spec.NodeName == here || m.Left && m.Node == here && s.Spec.NodeName == node && !hasArrived(s))
	if err != nil || node == "" || v1alpha1.Going(s) || !moves && !(head && settledOn(s, here)) {
		return volume.Origin{}, fmt.Errorf("%w: no snapshot %s of node %s moves to node %q, or has come from there", errdefs.ErrNotFound, key, here, node)
	}
	return a.openLocked(keylock.Snapshot(key), func() (volume.Origin, error) { return a.local.OpenMove(ctx, cluster.SnapshotID(s)) })
}

// takeOverSnapshot takes over a snapshot that has moved here. Usually the copy is complete; if not (it was on a disk that failed), it is copied anew from
// the node that it has left, which keeps the bytes until then. ErrNotFound if neither has them; errPoolBusy as from beginArrival. It does nothing if the
// snapshot has not moved here, or has arrived.
func (a *Agent) takeOverSnapshot(ctx context.Context, s *v1alpha1.Snapshot) error {
	if !a.isArriving(s) {
		return nil
	}
	one, err := a.beginArrival(s)
	if err != nil {
		return err
	}
	defer one.end()
	here, err := a.broughtSnapshot(ctx, s)
	if err == nil && !here {
		_, err = a.copySnapshotIn(ctx, requestOf(s), s, s.Spec.Move.Node)
	}
	if err == nil {
		return a.arriveSnapshot(ctx, s)
	}
	if errors.Is(err, errdefs.ErrNotFound) || errors.Is(err, errdefs.ErrBusy) || ctx.Err() != nil {
		return err
	}
	return errors.Join(err, a.reportWaits(ctx, s, notAllHere, err))
}

// broughtSnapshot reports whether all bytes of a snapshot that has moved here are here. If its object does not say when it was taken (status.created), a
// copy that has not arrived does not count, as it may be one of another snapshot.
func (a *Agent) broughtSnapshot(ctx context.Context, s *v1alpha1.Snapshot) (bool, error) {
	id := cluster.SnapshotID(s)
	if s.Status.Created != nil {
		return a.local.IsCopiedIn(ctx, id, s.Status.Created.Time)
	}
	_, err := a.local.GetSnapshot(ctx, id)
	if errors.Is(err, errdefs.ErrNotFound) || errors.Is(err, errdefs.ErrUnavailable) {
		return false, nil
	}
	return err == nil, err
}

// arriveSnapshot makes the copy of a snapshot that has moved here the snapshot, and reports that. On success s is the new object.
func (a *Agent) arriveSnapshot(ctx context.Context, s *v1alpha1.Snapshot) error {
	return a.withLocks([]string{keylock.Snapshot(s.Name)}, func() error {
		now, err := stillMoves(ctx, a, s, &v1alpha1.Snapshot{}, a.isArriving)
		if err != nil {
			return err
		}
		if err := a.local.Arrive(ctx, cluster.SnapshotID(now)); err != nil {
			return err
		}
		have, err := a.local.GetSnapshot(ctx, cluster.SnapshotID(now))
		if err != nil {
			return err
		}
		klog.FromContext(ctx).Info("A snapshot has moved here", "snapshot", cluster.SnapshotID(now).String(), "from", now.Spec.Move.Node)
		defer a.Changed()
		err = a.reportMove(ctx, now, func(far *v1alpha1.MoveStatus) {
			now.Status.Size = have.Size // this pool may round sizes differently
			far.Arrived, far.Waits, far.Message = true, false, "moved; node "+now.Spec.Move.Node+" is to give its bytes back"
		})
		*s = *now
		return err
	})
}

// isThere returns nil if the node to which a snapshot has moved says that it has all of it. The object is not enough: if it was restored to the time of an
// earlier move, the snapshot may have moved back here since, and unlike a volume it has no seal that would show that.
func (a *Agent) isThere(ctx context.Context, s *v1alpha1.Snapshot) error {
	id, home := cluster.SnapshotID(s), s.Spec.NodeName
	if v1alpha1.IsLost(s) {
		return fmt.Errorf("%w: snapshot %s is lost on node %s", errdefs.ErrUnavailable, id, home)
	}
	ctx, cancel := context.WithTimeout(ctx, homeTime)
	defer cancel()
	agent, err := a.agentOf(ctx, home)
	if err != nil {
		return err
	}
	there, err := transfer.OpenSnapshotMove(ctx, agent, s.Name)
	if err != nil {
		return err
	}
	if there.ID != id || !sameBytes(s, there.Created, "") {
		return fmt.Errorf("%w: node %s has %s, cut at %s, and what has moved there was cut at %s", errdefs.ErrPrecondition, home, there.ID, there.Created, s.Status.Created)
	}
	return nil
}

// giveBackSnapshot deletes the bytes of a snapshot that has left this node, once the new node has taken it over, and nobody reads them here.
func (a *Agent) giveBackSnapshot(ctx context.Context, s *v1alpha1.Snapshot) (reconcile.Result, error) {
	return giveBack(ctx, a, s, &v1alpha1.Snapshot{}, keylock.Snapshot(s.Name), func(s *v1alpha1.Snapshot) error {
		if s.Status.Created == nil {
			return fmt.Errorf("%w: the object of snapshot %s does not say when it was cut", errdefs.ErrBusy, s.Name)
		}
		id, cut := cluster.SnapshotID(s), s.Status.Created.Time
		if here, err := a.local.IsCopiedIn(ctx, id, cut); err != nil {
			return err
		} else if here {
			if err := a.isThere(ctx, s); err != nil {
				return errdefs.Recast(errdefs.ErrUnavailable, err, "ask node %s whether it has all of snapshot %s", s.Spec.NodeName, id)
			}
		}
		return a.local.DepartSnapshot(ctx, id, cut)
	})
}
