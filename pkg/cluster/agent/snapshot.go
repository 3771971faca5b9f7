package agent

import (
	"context"
	"errors"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// reconcileSnapshot makes, maintains or deletes the snapshot of an object that belongs to no group.
func (a *Agent) reconcileSnapshot(ctx context.Context, r request) (reconcile.Result, error) {
	s, there, err := get(ctx, a, r.key, &v1alpha1.Snapshot{})
	if err != nil || !there {
		return reconcile.Result{}, err
	}
	switch {
	case s.Deleting():
		return a.deleteSnapshot(ctx, s)
	case s.DeletionTimestamp != nil:
		return reconcile.Result{}, a.dropObject(ctx, s)
	case s.Status.Created != nil:
		return reconcile.Result{RequeueAfter: checkAgain}, a.maintainSnapshot(ctx, s)
	case !s.Spec.Make:
		return reconcile.Result{RequeueAfter: checkAgain}, a.findSnapshot(ctx, s)
	case s.Common().Refused(s.Generation) != nil:
		return reconcile.Result{}, nil // the controller deletes it
	}
	cut, err := a.cutOf(ctx, s)
	if err != nil {
		return reconcile.Result{}, refuse(ctx, a, s, err)
	}
	working, end := a.making(ctx, r)
	defer end()
	defer a.Changed()
	var made volume.Snapshot
	if err := a.withYieldingLocks(working, []string{keylock.Snapshot(s.Name), keylock.Volume(cut.Key)}, nil, func(ctx context.Context) (err error) {
		if err := stillWanted(ctx, a, s); err != nil {
			return err
		}
		defer follow(ctx, a, s)()
		made, err = a.local.CutLeg(ctx, s.Spec.Name, cluster.SnapshotSource(s), cut, string(s.UID))
		return err
	}); err != nil {
		return reconcile.Result{}, refuse(ctx, a, s, err)
	}
	return reconcile.Result{}, a.reportSnapshot(ctx, s, made)
}

// cutOf returns the volume of which a snapshot is to be taken: its source, or if that has several legs, the leg on this node (spec.leg). The ID of a leg
// may name another pool than the one it is in, as it has moved. ErrUnavailable if the leg is not here.
func (a *Agent) cutOf(ctx context.Context, s *v1alpha1.Snapshot) (volume.ID, error) {
	if s.Spec.Leg == "" {
		return cluster.SnapshotSource(s), nil
	}
	leg, there, err := get(ctx, a, s.Spec.Leg, &v1alpha1.Volume{})
	if err != nil || !there {
		return volume.ID{}, errors.Join(err, fmt.Errorf("%w: node %s has no leg %s of volume %s", errdefs.ErrUnavailable, a.local.Node(), s.Spec.Leg, cluster.SnapshotSource(s)))
	}
	return cluster.VolumeID(leg), nil
}

// findSnapshot is for an object that has neither spec.make nor status.created: see findVolume.
func (a *Agent) findSnapshot(ctx context.Context, s *v1alpha1.Snapshot) error {
	if err := errdefs.IgnoreNotFound(a.takeOverSnapshot(ctx, s)); err != nil { // an object that was restored without its status may be moving
		return err
	}
	have, err := a.local.GetSnapshot(ctx, cluster.SnapshotID(s))
	switch {
	case errors.Is(err, errdefs.ErrNotFound):
		err = fmt.Errorf("%w: %s", errdefs.ErrDataLoss, a.missingSnapshot(cluster.SnapshotID(s)))
	case err == nil && have.Source != cluster.SnapshotSource(s):
		err = fmt.Errorf("%w: snapshot %s is of volume %s, not %s", errdefs.ErrExists, have.ID, have.Source, cluster.SnapshotSource(s))
	}
	if err != nil {
		return refuse(ctx, a, s, err)
	}
	defer a.Changed()
	return a.reportSnapshot(ctx, s, have)
}

func (a *Agent) missingSnapshot(id volume.ID) string {
	return fmt.Sprintf("pool %s of node %s does not have this snapshot any more; nothing was cut in its place", id.Pool, a.local.Node())
}

// reportSnapshot reports a snapshot that was taken or found (status.created), after it has taken spec.make off, so that it is not taken again.
func (a *Agent) reportSnapshot(ctx context.Context, s *v1alpha1.Snapshot, made volume.Snapshot) error {
	if err := clearIntent(ctx, a, s); err != nil {
		return err
	}
	return report(ctx, a, s, func(s *v1alpha1.Snapshot) {
		if s.Status.Created != nil {
			return
		}
		s.Status.Created, s.Status.Size = madeAt(made.Created), made.Size
		s.Status.Failure, s.Status.Progress, s.Status.ObservedGeneration = nil, nil, s.Generation
		setCondition(&s.Status.Conditions, s, v1alpha1.Ready, metav1.ConditionTrue, "Cut", "the snapshot is there to be restored")
		setHealth(&s.Status.Conditions, &s.Status.Health, s, nil)
	})
}

// deleteSnapshot deletes the snapshot of an object with spec.delete, and then the object. A snapshot of the same name that is not the object's (sameBytes)
// stays.
func (a *Agent) deleteSnapshot(ctx context.Context, s *v1alpha1.Snapshot) (reconcile.Result, error) {
	defer a.Changed()
	err := a.withLocks([]string{keylock.Snapshot(s.Name)}, func() error {
		if have, err := a.local.GetSnapshot(ctx, cluster.SnapshotID(s)); err == nil && !sameBytes(s, have.Created, have.Object) {
			klog.FromContext(ctx).Info("Keeping a snapshot of the same name that is not the one to be deleted", "snapshot", have.ID.String())
			return nil
		}
		return deleteBytes(ctx, a, []*v1alpha1.Snapshot{s}, func() error { return a.local.DeleteSnapshot(ctx, cluster.SnapshotID(s)) })
	})
	if err == nil {
		return reconcile.Result{}, cluster.RemoveObject(ctx, a.kube.Client, s)
	}
	return reconcile.Result{RequeueAfter: lastRetry}, refuse(ctx, a, s, err)
}

// maintainSnapshot reports the health of a snapshot that was reported before, and takes it over if it has moved here. If it is missing, it is lost: it is
// not taken again, as that would be another one.
func (a *Agent) maintainSnapshot(ctx context.Context, s *v1alpha1.Snapshot) error {
	if err := clearIntent(ctx, a, s); err != nil {
		return err
	}
	if err := errdefs.IgnoreNotFound(a.takeOverSnapshot(ctx, s)); err != nil {
		return err
	}
	problems, err := a.snapshotHealth(ctx, s)
	if err != nil {
		return err
	}
	return report(ctx, a, s, func(s *v1alpha1.Snapshot) {
		if s.Spec.Move == nil {
			s.Status.Move = nil
		}
		setHealth(&s.Status.Conditions, &s.Status.Health, s, problems)
		setReady(&s.Status.Conditions, s, problems)
	})
}

// snapshotHealth returns the problems of a snapshot; a missing one is a DataLoss.
func (a *Agent) snapshotHealth(ctx context.Context, s *v1alpha1.Snapshot) ([]blockdev.Problem, error) {
	id := cluster.SnapshotID(s)
	for _, pool := range a.options.Pools {
		if pool.Name() == id.Pool {
			problems, err := pool.Health(ctx, blockdev.Ref{Kind: id.Kind, Key: id.Key})
			if !errors.Is(err, errdefs.ErrNotFound) {
				return problems, err
			}
		}
	}
	message := a.missingSnapshot(id)
	if m := s.Spec.Move; m != nil && m.Left && !hasArrived(s) {
		message = fmt.Sprintf("pool %s of node %s does not have what was said to be copied there; node %s, which the snapshot has left, may still have all of its bytes: do not delete it there before you have looked", id.Pool, a.local.Node(), m.Node)
	}
	return []blockdev.Problem{{Severity: blockdev.DataLoss, Reason: "SnapshotMissing", Message: message}}, nil
}
