package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// poolUnavailable is the reason for a problem of what is in a pool that does not answer.
const poolUnavailable = "PoolUnavailable"

// reconcileVolume makes the volume of an object what the object says.
func (a *Agent) reconcileVolume(ctx context.Context, r request) (reconcile.Result, error) {
	v, there, err := get(ctx, a, r.key, &v1alpha1.Volume{})
	if err != nil || !there {
		return reconcile.Result{}, err
	}
	a.locate(v)
	switch {
	case v.Deleting():
		return a.deleteVolume(ctx, v)
	case v.DeletionTimestamp != nil:
		return reconcile.Result{}, a.dropObject(ctx, v)
	case v.Spec.Abandoned, v.Status.Is(v1alpha1.Abandoned, "True"): // what the verdict was about goes now, if it has not
		return reconcile.Result{}, a.withLocks([]string{keylock.Volume(v.Name)}, func() error { return a.judgeAbandoned(ctx, v) })
	case a.isArriving(v):
		if err := a.takeOver(ctx, r, v); err != nil && !errors.Is(err, errdefs.ErrNotFound) {
			return reconcile.Result{}, err
		}
		return a.keepUp(ctx, v)
	case v.Status.Created == nil && !v.Spec.Make:
		return reconcile.Result{RequeueAfter: checkAgain}, a.findVolume(ctx, v)
	case v.Status.Created == nil:
		return reconcile.Result{}, a.makeVolume(ctx, r, v)
	default:
		return a.keepUp(ctx, v)
	}
}

// keepUp maintains a volume, and says when it is to be looked at again.
func (a *Agent) keepUp(ctx context.Context, v *v1alpha1.Volume) (reconcile.Result, error) {
	err := a.maintainVolume(ctx, v)
	if slices.ContainsFunc(v.Status.Health, func(p v1alpha1.Problem) bool {
		return p.Reason == poolUnavailable || p.Reason == volume.ReasonNotExported
	}) {
		return reconcile.Result{RequeueAfter: lastRetry}, err // nobody says when it comes, or has ended
	}
	return reconcile.Result{RequeueAfter: checkAgain}, err
}

// makeVolume makes the volume of an object that asks for it, as long as it is wanted.
func (a *Agent) makeVolume(ctx context.Context, r request, v *v1alpha1.Volume) error {
	if v.Common().Refused(v.Generation) != nil {
		return nil // it waits to be deleted
	}
	exclusive, shared := []string{keylock.Volume(v.Name)}, []string(nil)
	working, end := a.making(ctx, r)
	defer end()
	switch source := cluster.SourceOf(v); {
	case isFetched(v): // its own agent holds it
	case source.Kind == blockdev.Volume:
		exclusive = append(exclusive, keylock.Volume(source.Key)) // its filesystem is frozen for the cut
	case source.Kind == blockdev.Snapshot:
		shared = append(shared, keylock.Snapshot(source.Key))
	}
	defer a.Changed()
	var made volume.Volume
	if err := a.withYieldingLocks(working, exclusive, shared, func(ctx context.Context) (err error) {
		if err := stillWanted(ctx, a, v); err != nil {
			return err
		}
		if err := a.removeElsewhere(ctx, v); err != nil {
			return err
		}
		defer follow(ctx, a, v)()
		wanted := volume.Spec{Name: v.Spec.Name, Pool: v.Spec.Pool, Provisioning: blockdev.Provisioning(v.Spec.Provisioning), Source: cluster.SourceOf(v),
			Size:       volume.Range{Required: v.Spec.Size, Limit: v.Spec.Size},
			Filesystem: filesystem.Type(v.Spec.Filesystem), Encryption: cluster.EncryptionOf(v), Mutable: v.Spec.Mutable, For: cluster.RequesterOf(v),
			Access: volume.Access(v.Spec.Access), HomeTimeout: cluster.HomeTimeoutOf(v), ReplicaOf: v.Spec.ReplicaOf}
		if isFetched(v) {
			made, err = a.fetch(ctx, v, wanted)
		} else {
			made, err = a.local.Create(ctx, wanted)
		}
		return err
	}); err != nil {
		if failure := a.reportFetchWaits(ctx, v, err); failure != nil {
			return errors.Join(err, failure)
		}
		return refuse(ctx, a, v, err)
	}
	if err := clearIntent(ctx, a, v); err != nil {
		return errors.Join(err, a.removeUnwanted(ctx, v))
	}
	return a.reportVolume(ctx, v, made, "Created")
}

// removeUnwanted removes what was made for an object that is gone: its controller has withdrawn it, maybe for
// another node to make it. Nobody could use it before the object said that it was made.
func (a *Agent) removeUnwanted(ctx context.Context, v *v1alpha1.Volume) error {
	now := &v1alpha1.Volume{}
	err := a.kube.Live.Get(ctx, client.ObjectKeyFromObject(v), now)
	if client.IgnoreNotFound(err) != nil || (err == nil && now.Spec.NodeName == a.local.Node() && now.Spec.Pool == v.Spec.Pool) {
		return err
	}
	return a.withLocks([]string{keylock.Volume(v.Name)}, func() error { return a.removeBlank(ctx, cluster.VolumeID(v)) })
}

// removeElsewhere removes what an earlier try left in another pool of this node, which could not be used any more before it was said that
// it was made: nobody could use it. The caller has the lock.
func (a *Agent) removeElsewhere(ctx context.Context, v *v1alpha1.Volume) error {
	for _, pool := range a.options.Pools {
		id := cluster.VolumeID(v)
		if id.Pool = pool.Name(); id.Pool == v.Spec.Pool || blockdev.Unwrap(pool.Pool) == nil {
			continue
		}
		if err := a.removeBlank(ctx, id); err != nil {
			return err
		}
	}
	return nil
}

// removeBlank removes a volume, if this node's own record says that nothing was ever on it and
// no device of it is there. The caller has the lock.
func (a *Agent) removeBlank(ctx context.Context, id volume.ID) error {
	have, err := a.local.Get(ctx, id)
	if err != nil {
		return errdefs.IgnoreNotFound(err)
	}
	devices, err := a.local.Attached(ctx, id)
	if err != nil || len(devices) > 0 || have.Format.State != volume.Blank || have.Source != (volume.ID{}) {
		return err
	}
	klog.FromContext(ctx).Info("Removing a blank volume that was made in another pool instead", "volume", id.String())
	return errdefs.IgnoreNotFound(a.local.Delete(ctx, id))
}

// reportVolume reports a volume that is there, and cannot be made any more.
func (a *Agent) reportVolume(ctx context.Context, v *v1alpha1.Volume, have volume.Volume, reason string) error {
	used := a.used(ctx, have)
	return report(ctx, a, v, func(v *v1alpha1.Volume) {
		v.Status.Created, v.Status.Size, v.Status.Thin, v.Status.Mutable, v.Status.Used = madeAt(have.Created), have.Size, have.Thin, have.Mutable, used
		v.Status.Encryption, v.Status.ReplicaOf = string(have.Encryption.Scheme), have.ReplicaOf
		v.Status.Failure, v.Status.Progress, v.Status.ObservedGeneration = nil, nil, v.Generation
		setCondition(&v.Status.Conditions, v, v1alpha1.Ready, metav1.ConditionTrue, reason, "the volume is there to be used")
		if isFetched(v) {
			setCopied(v, metav1.ConditionTrue, v1alpha1.ReasonCopied, fmt.Sprintf("all of %s is here, and node %s is not needed for it any more", cluster.SourceOf(v), v.Spec.Source.NodeName))
		}
		setHealth(&v.Status.Conditions, &v.Status.Health, v, nil) // it was just looked at
	})
}

// What a volume uses is written when it changed by one part in so many of its size, and by so much at least: 20 writes while a
// volume is filled, and none for what a journal does. It is looked at with the health, so it costs no look of its own.
const (
	usedOf    = 20
	usedLeast = 16 << 20
)

// used is what a volume takes of its pool; nil if that is not known.
func (a *Agent) used(ctx context.Context, have volume.Volume) *int64 {
	used, known, err := a.local.Used(ctx, have.ID)
	if err != nil || !known { // why, its health says
		return nil
	}
	return &used
}

// reportUsed writes down what a volume uses, if that is worth it, or something else is written anyhow.
func reportUsed(v *v1alpha1.Volume, used *int64, anyhow bool) {
	was := v.Status.Used
	if used != nil && (was == nil || anyhow || abs(*used-*was) >= max(v.Status.Size/usedOf, usedLeast)) {
		v.Status.Used = used
	}
}

// findVolume finds the volume of an object that may not be made: it was once, and the object
// is a copy without its status. If it is missing, it is lost.
func (a *Agent) findVolume(ctx context.Context, v *v1alpha1.Volume) error {
	id := cluster.VolumeID(v)
	have, err := a.local.Get(ctx, id)
	switch {
	case errors.Is(err, errdefs.ErrNotFound):
		err = fmt.Errorf("%w: %s; if this object is one that an older version of the driver has only begun, delete it", errdefs.ErrDataLoss, a.missingVolume(v))
	case err == nil:
		err = volume.Spec{Name: v.Spec.Name, Pool: v.Named(), Source: cluster.SourceOf(v), Filesystem: filesystem.Type(v.Spec.Filesystem),
			Encryption: cluster.EncryptionOf(v), Access: volume.Access(v.Spec.Access), HomeTimeout: cluster.HomeTimeoutOf(v), ReplicaOf: v.Spec.ReplicaOf}.Check(have)
	}
	if err == nil {
		err = clearIntent(ctx, a, v)
	}
	if err != nil {
		return refuse(ctx, a, v, err)
	}
	defer a.Changed()
	return a.reportVolume(ctx, v, have, "Found")
}

func (a *Agent) missingVolume(v *v1alpha1.Volume) string {
	if m := v.Spec.Move; m != nil && m.Left {
		return fmt.Sprintf("pool %s of node %s does not have what was said to be copied there; node %s, which the volume has left, may still have all of its bytes: do not delete it there before you have looked", v.Spec.Pool, a.local.Node(), m.Node)
	}
	return fmt.Sprintf("pool %s of node %s does not have this volume any more; nothing was made in its place: bring the pool's files back, restore it from a backup, or delete it", v.Spec.Pool, a.local.Node())
}

// deleteLocal deletes a volume. What is not the object's, under the same name, stays, if anything
// was ever on it.
func (a *Agent) deleteLocal(ctx context.Context, v *v1alpha1.Volume) error {
	return a.withLocks([]string{keylock.Volume(v.Name)}, func() error {
		if have, err := a.local.Get(ctx, cluster.VolumeID(v)); err == nil && !sameBytes(v, have.Created) &&
			(v.Status.Created != nil || have.Format.State != volume.Blank || have.Source != (volume.ID{})) {
			klog.FromContext(ctx).Info("Keeping a volume of the same name that is not the one to be deleted", "volume", cluster.VolumeID(v).String())
			return nil
		}
		return errdefs.IgnoreNotFound(a.local.Delete(ctx, cluster.VolumeID(v)))
	})
}

// deleteVolume deletes the volume of an object that says so, and then the object.
func (a *Agent) deleteVolume(ctx context.Context, v *v1alpha1.Volume) (reconcile.Result, error) {
	err := a.deleteLocal(ctx, v)
	if err == nil {
		a.Changed()
		return reconcile.Result{}, cluster.RemoveObject(ctx, a.kube.Client, v)
	}
	if err := refuse(ctx, a, v, err); err != nil {
		return reconcile.Result{}, err
	}
	if errors.Is(err, errdefs.ErrInUse) {
		return reconcile.Result{RequeueAfter: inUseRetry}, errdefs.IgnoreNotFound(errors.Join(a.syncExport(ctx, v), a.reportReaders(ctx, v, true))) // perhaps that is who uses it
	}
	return reconcile.Result{RequeueAfter: lastRetry}, nil
}

// judgeAbandoned decides whether a volume that nobody knows of any more may go: only if this node's
// own record says that nothing was ever on it, and no device of it is there. The verdict is
// written down first, and fails if anybody changed the object meanwhile; from then on the
// volume is nobody's. A verdict that is there is no reason to delete: anybody may have written it.
func (a *Agent) judgeAbandoned(ctx context.Context, v *v1alpha1.Volume) error {
	id := cluster.VolumeID(v)
	have, err := a.local.Get(ctx, id)
	verdict := v.Spec.Abandoned && v.Status.Is(v1alpha1.Abandoned, "True")
	blank := errors.Is(err, errdefs.ErrNotFound) && (verdict || v.Status.Created == nil && v.Spec.Make)
	why := "its bytes are missing"
	if err == nil {
		devices, err := a.local.Attached(ctx, id)
		if err != nil {
			return err
		}
		blank = have.Format.State == volume.Blank && have.Source == (volume.ID{}) && len(v.Claimants()) == 0 && len(devices) == 0
		why = "it is, or was, in use, or holds a copy"
	} else if !errors.Is(err, errdefs.ErrNotFound) && !errors.Is(err, errdefs.ErrDataLoss) {
		return err
	}
	if !blank {
		return a.keepVolume(ctx, v, why)
	}
	if err := report(ctx, a, v, func(v *v1alpha1.Volume) {
		setCondition(&v.Status.Conditions, v, v1alpha1.Abandoned, metav1.ConditionTrue, "Blank", "nothing was ever on it")
	}); err != nil {
		return err
	}
	klog.FromContext(ctx).Info("Deleting a blank volume that nobody knows of", "volume", id.String())
	if err := errdefs.IgnoreNotFound(a.local.Delete(ctx, id)); err != nil {
		return err
	}
	return cluster.RemoveObject(ctx, a.kube.Client, v)
}

// keepVolume writes down that a volume stays that nobody seems to know of.
func (a *Agent) keepVolume(ctx context.Context, v *v1alpha1.Volume, why string) error {
	if err := clearIntent(ctx, a, v); err != nil {
		return err
	}
	if v.Status.Is(v1alpha1.Abandoned, "False") {
		return nil
	}
	klog.FromContext(ctx).Info("Keeping a volume that nobody seems to know of", "volume", cluster.VolumeID(v).String(), "why", why)
	return report(ctx, a, v, func(v *v1alpha1.Volume) {
		setCondition(&v.Status.Conditions, v, v1alpha1.Abandoned, metav1.ConditionFalse, "NotBlank", "it is kept: "+why)
	})
}

// maintainVolume changes a volume that was made once to what the spec says, and reports how it is. If it is missing, it is
// lost, and it is not made again.
func (a *Agent) maintainVolume(ctx context.Context, v *v1alpha1.Volume) error {
	if err := clearIntent(ctx, a, v); err != nil {
		return err
	}
	id := cluster.VolumeID(v)
	have, err := a.local.Get(ctx, id)
	switch {
	case errors.Is(err, errdefs.ErrNotFound):
		return errors.Join(a.reportLost(ctx, v, blockdev.Problem{Severity: blockdev.DataLoss, Reason: "VolumeMissing", Message: a.missingVolume(v)}), a.endExportOfMissing(ctx, v))
	case errors.Is(err, errdefs.ErrDataLoss):
		return errors.Join(a.reportLost(ctx, v, blockdev.Problem{Severity: blockdev.DataLoss, Reason: "RecordDamaged", Message: errdefs.Words(err)}), a.endExportOfDamaged(ctx, v))
	case errors.Is(err, errdefs.ErrUnavailable):
		return report(ctx, a, v, func(v *v1alpha1.Volume) {
			setHealth(&v.Status.Conditions, &v.Status.Health, v, []blockdev.Problem{{Severity: blockdev.Inaccessible, Reason: poolUnavailable, Message: errdefs.Words(err)}})
		})
	case err != nil:
		return err
	}
	if err := errors.Join(a.syncExport(ctx, v), a.reportReaders(ctx, v, have.Read), a.unsealStaying(ctx, v, have)); err != nil {
		if errors.Is(err, errdefs.ErrDataLoss) { // the record is good, and does not say to whom it is given
			err = errors.Join(err, a.endExportOfDamaged(ctx, v))
		}
		return err
	}
	refused := v.Common().Refused(v.Generation) != nil
	awaited := a.becomeLeg(ctx, v, &have)
	if awaited != nil && !errors.Is(awaited, errAwaited) {
		return awaited
	}
	if !refused && (have.Size < v.Spec.Size || !maps.Equal(have.Mutable, v.Spec.Mutable)) {
		defer a.Changed()
		if err := a.withLocks([]string{keylock.Volume(v.Name)}, func() error { return a.changeVolume(ctx, v, &have) }); err != nil {
			return refuseRest(ctx, a, v, err, func(v *v1alpha1.Volume) { v.Status.Size, v.Status.Mutable = have.Size, have.Mutable })
		}
	}
	problems, err := a.local.Health(ctx, id)
	if err != nil {
		return err
	}
	used := a.used(ctx, have)
	return errors.Join(awaited, report(ctx, a, v, func(v *v1alpha1.Volume) {
		v.Status.Progress, v.Status.ReplicaOf, v.Status.Thin = nil, have.ReplicaOf, have.Thin // it may have moved to a pool of another kind
		if v.Spec.Move == nil {
			v.Status.Move = nil
		}
		reportUsed(v, used, v.Status.Size != have.Size)
		if !maps.Equal(v.Status.Mutable, have.Mutable) || v.Status.Size != have.Size || (v.Status.Failure != nil && !refused) {
			v.Status.Size, v.Status.Mutable, v.Status.ObservedGeneration = have.Size, have.Mutable, v.Generation
			if !refused {
				v.Status.Failure = nil
			}
		}
		setHealth(&v.Status.Conditions, &v.Status.Health, v, problems)
		setReady(&v.Status.Conditions, v, problems)
	}))
}

// becomeLeg has a volume that is to be a leg be one for good. One that was asked to have replicas waits for its ReplicatedVolume (errAwaited): from then on the wish cannot be taken back, and before, there would be nothing that it is a leg of.
func (a *Agent) becomeLeg(ctx context.Context, v *v1alpha1.Volume, have *volume.Volume) error {
	if v.Spec.ReplicaOf == "" || have.ReplicaOf == v.Spec.ReplicaOf {
		return nil
	}
	if v.Spec.Replicas > 0 {
		err := a.kube.Live.Get(ctx, client.ObjectKey{Name: v.Spec.ReplicaOf}, &v1alpha1.ReplicatedVolume{})
		if apierrors.IsNotFound(err) {
			return errAwaited
		}
		if err != nil {
			return kube.APIError("read replicated volume "+v.Spec.ReplicaOf, err)
		}
	}
	if err := a.withLocks([]string{keylock.Volume(v.Name)}, func() error { return a.local.SetReplicaOf(ctx, cluster.VolumeID(v), v.Spec.ReplicaOf) }); err != nil {
		return err
	}
	have.ReplicaOf = v.Spec.ReplicaOf
	return nil
}

// changeVolume makes the volume what the spec says, and looks what it is then. Callers ask for its size and for its parameters at the same time: what is refused of one does
// not keep the other from being done.
func (a *Agent) changeVolume(ctx context.Context, v *v1alpha1.Volume, have *volume.Volume) error {
	id := cluster.VolumeID(v)
	defer follow(ctx, a, v)()
	var grown, modified error
	if have.Size < v.Spec.Size {
		_, grown = a.local.Expand(ctx, id, volume.Range{Required: v.Spec.Size})
	}
	if !maps.Equal(have.Mutable, v.Spec.Mutable) {
		modified = a.local.Modify(ctx, id, v.Spec.Mutable)
	}
	now, err := a.local.Get(ctx, id)
	if err == nil {
		*have = now
	}
	return errors.Join(grown, modified, err)
}

// setReady: what was made is ready unless its bytes are lost.
func setReady(conditions *[]metav1.Condition, o cluster.Object, problems []blockdev.Problem) {
	for _, p := range problems {
		if p.Severity == blockdev.DataLoss {
			setCondition(conditions, o, v1alpha1.Ready, metav1.ConditionFalse, "DataLoss", p.Message)
			return
		}
	}
	if !o.Common().Is(v1alpha1.Ready, "True") { // else the generation that it is about does not matter
		setCondition(conditions, o, v1alpha1.Ready, metav1.ConditionTrue, "Found", "the bytes are there")
	}
}

// reportLost reports that a volume that was made once is lost.
func (a *Agent) reportLost(ctx context.Context, v *v1alpha1.Volume, p blockdev.Problem) error {
	return report(ctx, a, v, func(v *v1alpha1.Volume) {
		if len(v.Status.Health) != 1 || v.Status.Health[0].Reason != p.Reason {
			klog.FromContext(ctx).Info("Data loss", "volume", cluster.VolumeID(v).String(), "reason", p.Reason, "message", p.Message)
			setHealth(&v.Status.Conditions, &v.Status.Health, v, []blockdev.Problem{p})
			setReady(&v.Status.Conditions, v, []blockdev.Problem{p})
		}
		if v.Status.Size < v.Spec.Size && v.Common().Refused(v.Generation) == nil { // it cannot grow either
			v.Status.Failure, v.Status.ObservedGeneration = &v1alpha1.Failure{Reason: "DataLoss", Message: p.Message}, v.Generation
		}
	})
}
