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

// poolUnavailable is the reason of the problem that a pool does not answer, of the pool itself and of what is in it.
const poolUnavailable = "PoolUnavailable"

// reconcileVolume carries out the spec of a Volume of this node: it deletes, judges, takes over, finds, makes or maintains the volume, and reports that.
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
	case v.Spec.Abandoned, v.Status.Is(v1alpha1.Abandoned, "True"): // the latter: the verdict is written, and the deletion may have failed
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

// keepUp maintains a volume (maintainVolume), and returns when to do so again.
func (a *Agent) keepUp(ctx context.Context, v *v1alpha1.Volume) (reconcile.Result, error) {
	err := a.maintainVolume(ctx, v)
	if slices.ContainsFunc(v.Status.Health, func(p v1alpha1.Problem) bool {
		return p.Reason == poolUnavailable || p.Reason == volume.ReasonNotExported
	}) {
		return reconcile.Result{RequeueAfter: lastRetry}, err // there is no event when that problem ends
	}
	return reconcile.Result{RequeueAfter: checkAgain}, err
}

// makeVolume makes the volume of an object with spec.make, and reports it. It stops when the object is not wanted any more, and removes what it made for an
// object that was withdrawn.
func (a *Agent) makeVolume(ctx context.Context, r request, v *v1alpha1.Volume) error {
	if v.Common().Refused(v.Generation) != nil {
		return nil // the controller deletes it
	}
	exclusive, shared := []string{keylock.Volume(v.Name)}, []string(nil)
	working, end := a.making(ctx, r)
	defer end()
	switch source := cluster.SourceOf(v); {
	case isFetched(v): // the agent of the source's node takes its lock
	case source.Kind == blockdev.Volume:
		exclusive = append(exclusive, keylock.Volume(source.Key)) // its filesystem is frozen while the copy is begun
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
			Access: volume.Access(v.Spec.Access), HomeTimeout: cluster.HomeTimeoutOf(v), ReplicaOf: v.Spec.ReplicaOf, Object: string(v.UID)}
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
	return a.reportVolume(ctx, v, made, cluster.ReasonCreated)
}

// removeUnwanted removes the blank volume that was made for an object which the controller has withdrawn meanwhile: it is gone, or names another node or
// pool. Nobody can have used the volume, as it was not reported.
func (a *Agent) removeUnwanted(ctx context.Context, v *v1alpha1.Volume) error {
	now := &v1alpha1.Volume{}
	err := a.kube.Live.Get(ctx, client.ObjectKeyFromObject(v), now)
	if client.IgnoreNotFound(err) != nil || (err == nil && now.Spec.NodeName == a.local.Node() && now.Spec.Pool == v.Spec.Pool) {
		return err
	}
	return a.withLocks([]string{keylock.Volume(v.Name)}, func() error { return a.removeBlank(ctx, cluster.VolumeID(v)) })
}

// removeElsewhere removes a blank volume that an earlier try has left in another pool of this node. That pool failed before the volume was reported, so
// nobody can have used it. The caller holds the lock of the volume.
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

// removeBlank removes a volume if its record says that it is blank and no copy, and it is not attached; otherwise it does nothing. The caller holds the lock
// of the volume.
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

// reportVolume reports a volume that was made or found (status.created). The caller has taken spec.make off before (clearIntent).
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
		setHealth(&v.Status.Conditions, &v.Status.Health, v, nil)
	})
}

// status.used is written when it has changed by a 20th of the volume's size, and by 16 MiB at least: 20 writes while a volume is filled, and none for what a
// journal does. It is measured together with the health.
const (
	usedOf    = 20
	usedLeast = 16 << 20 // bytes
)

// used returns how many bytes a volume takes of its pool; nil if that is not known.
func (a *Agent) used(ctx context.Context, have volume.Volume) *int64 {
	used, known, err := a.local.Used(ctx, have.ID)
	if err != nil || !known { // the health says why
		return nil
	}
	return &used
}

// reportUsed sets status.used if it has changed by enough, or if the status is written anyhow.
func reportUsed(v *v1alpha1.Volume, used *int64, anyhow bool) {
	was := v.Status.Used
	if used != nil && (was == nil || anyhow || abs(*used-*was) >= max(v.Status.Size/usedOf, usedLeast)) {
		v.Status.Used = used
	}
}

// findVolume is for an object that has neither spec.make nor status.created: its volume was made once, and the object was restored without its status. It
// reports the volume if the pool has it. If not, it is lost (DataLoss); if it is another volume, that is refused.
func (a *Agent) findVolume(ctx context.Context, v *v1alpha1.Volume) error {
	id := cluster.VolumeID(v)
	have, err := a.local.Get(ctx, id)
	switch {
	case errors.Is(err, errdefs.ErrNotFound):
		err = fmt.Errorf("%w: %s; if this object is one that an older version of the driver has only begun, delete it", errdefs.ErrDataLoss, a.missingVolume(v))
	case err == nil:
		err = volume.Spec{Name: v.Spec.Name, Pool: v.Named(), Source: cluster.SourceOf(v), Filesystem: filesystem.Type(v.Spec.Filesystem),
			Encryption: cluster.EncryptionOf(v), Access: volume.Access(v.Spec.Access), HomeTimeout: cluster.HomeTimeoutOf(v), ReplicaOf: recordedReplicaOf(v, have)}.Check(have)
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

// recordedReplicaOf returns which volume the record of a restored object's volume has to say that it is a leg of: spec.replicaOf. A volume that is getting
// replicas (spec.replicas) is to become a leg of its own name, and its record need not say so yet: becomeLeg writes that once the volume is reported. When the
// request is gone, the record says so. A record that says so of an object that does not is right: other legs may have been written to since.
func recordedReplicaOf(v *v1alpha1.Volume, have volume.Volume) string {
	if v.Spec.Replicas > 0 && v.Spec.ReplicaOf == v.Name && have.ReplicaOf == "" {
		return ""
	}
	return v.Spec.ReplicaOf
}

func (a *Agent) missingVolume(v *v1alpha1.Volume) string {
	if m := v.Spec.Move; m != nil && m.Left {
		return fmt.Sprintf("pool %s of node %s does not have what was said to be copied there; node %s, which the volume has left, may still have all of its bytes: do not delete it there before you have looked", v.Spec.Pool, a.local.Node(), m.Node)
	}
	return fmt.Sprintf("pool %s of node %s does not have this volume any more; nothing was made in its place: bring the pool's files back, restore it from a backup, or delete it", v.Spec.Pool, a.local.Node())
}

// deleteLocal deletes the volume of an object. A volume of the same name that is not the object's (sameBytes) stays, unless it is blank and the object was
// never reported.
func (a *Agent) deleteLocal(ctx context.Context, v *v1alpha1.Volume) error {
	return a.withLocks([]string{keylock.Volume(v.Name)}, func() error {
		if have, err := a.local.Get(ctx, cluster.VolumeID(v)); err == nil && !sameBytes(v, have.Created, have.Object) &&
			(v.Status.Created != nil || have.Format.State != volume.Blank || have.Source != (volume.ID{})) {
			klog.FromContext(ctx).Info("Keeping a volume of the same name that is not the one to be deleted", "volume", cluster.VolumeID(v).String())
			return nil
		}
		return deleteBytes(ctx, a, []*v1alpha1.Volume{v}, func() error { return errdefs.IgnoreNotFound(a.local.Delete(ctx, cluster.VolumeID(v))) })
	})
}

// deleteVolume deletes the volume of an object with spec.delete, and then the object. If that fails it is tried again.
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
		return reconcile.Result{RequeueAfter: inUseRetry}, errdefs.IgnoreNotFound(errors.Join(a.syncExport(ctx, v), a.reportReaders(ctx, v, true))) // the user may be an export that is not wanted any more
	}
	return reconcile.Result{RequeueAfter: lastRetry}, nil
}

// judgeAbandoned decides whether a volume with spec.abandoned is deleted: only if its record says that it is blank and no copy, and it is not attached. It
// writes the verdict (the condition Abandoned) first, which fails if the object was changed meanwhile; from then on nobody can claim the volume. It judges
// anew even if the condition is there: anybody may have written that. The caller holds the lock of the volume.
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

// keepVolume writes the verdict that an abandoned volume stays, and why.
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

// maintainVolume brings a volume that was reported to its spec (exports, size, mutable parameters, spec.replicaOf), and reports its health. If it is missing
// or its record is damaged, it reports the loss; it never makes the volume again.
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
		return errors.Join(a.reportLost(ctx, v, blockdev.Problem{Severity: blockdev.DataLoss, Reason: "RecordDamaged", Message: errdefs.Words(err)}), a.endExportOfDamaged(ctx, v), a.dropUngiven(ctx, v))
	case errors.Is(err, errdefs.ErrUnavailable):
		return errors.Join(report(ctx, a, v, func(v *v1alpha1.Volume) {
			setHealth(&v.Status.Conditions, &v.Status.Health, v, []blockdev.Problem{{Severity: blockdev.Inaccessible, Reason: poolUnavailable, Message: errdefs.Words(err)}})
		}), a.dropUngiven(ctx, v))
	case err != nil:
		return err
	}
	if err := errors.Join(a.syncExport(ctx, v), a.reportReaders(ctx, v, have.Read)); err != nil {
		if errors.Is(err, errdefs.ErrDataLoss) { // the record can be read, but not which exports it has
			err = errors.Join(err, a.endExportOfDamaged(ctx, v))
		}
		return err
	}
	refused := v.Common().Refused(v.Generation) != nil
	awaited := a.unsealStaying(ctx, v, have)
	if awaited == nil {
		awaited = a.becomeLeg(ctx, v, &have)
	}
	if awaited != nil && !errors.Is(awaited, errAwaited) {
		return awaited
	}
	if !refused && (grows(v, have) || !maps.Equal(have.Mutable, v.Spec.Mutable)) {
		defer a.Changed()
		if err := a.change(ctx, v, &have); err != nil {
			return refuseRest(ctx, a, v, err, func(v *v1alpha1.Volume) { v.Status.Size, v.Status.Mutable = have.Size, have.Mutable })
		}
	} else if refused {
		have.Size = min(have.Size, v.Status.Size) // its devices have not grown
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

// becomeLeg writes spec.replicaOf into the record of a volume that is to be a leg, which cannot be undone. A volume that is getting replicas (spec.replicas)
// waits for its ReplicatedVolume first: errAwaited. From then on the request cannot be taken back.
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

// grows reports whether a volume is to grow, or the growth of its record was not reported: its devices, which grow after that, may still be smaller. A growth
// that was refused may have been taken out of the spec since, and stays in the record.
func grows(v *v1alpha1.Volume, have volume.Volume) bool {
	return min(have.Size, v.Status.Size) < max(have.Size, v.Spec.Size)
}

// maxGrowths is how many volumes grow at once. The other workers are left for what else there is to do on the node: a growth may take hours (zeroing).
const maxGrowths = workers / 2

// errTooManyGrowths: maxGrowths growths are under way; it is tried again soon.
var errTooManyGrowths = fmt.Errorf("%w: %d volumes grow already", errPoolBusy, maxGrowths)

// change is changeVolume with the lock of the volume. A growth gives way when a call needs the volume (errGaveWay): its pod may be starting, or ending. It goes on
// later, where it was, as far as the pool can. errTooManyGrowths if there are maxGrowths others.
func (a *Agent) change(ctx context.Context, v *v1alpha1.Volume, have *volume.Volume) error {
	locks := []string{keylock.Volume(v.Name)}
	if !grows(v, *have) {
		return a.withLocks(locks, func() error { return a.changeVolume(ctx, v, have) })
	}
	select {
	case a.growing <- struct{}{}:
		defer func() { <-a.growing }()
	default:
		return errTooManyGrowths
	}
	return a.withYieldingLocks(ctx, locks, nil, func(ctx context.Context) error { return a.changeVolume(ctx, v, have) })
}

// changeVolume changes size and mutable parameters of a volume to those of the spec, and sets have to the result. Both are tried even if one fails, as
// different callers ask for them. If its devices did not grow, have keeps the size that was reported, whatever the record says. The caller holds the lock of
// the volume.
func (a *Agent) changeVolume(ctx context.Context, v *v1alpha1.Volume, have *volume.Volume) error {
	id := cluster.VolumeID(v)
	defer follow(ctx, a, v)()
	var grown, modified error
	if grows(v, *have) {
		size := volume.Range{} // its devices alone
		if v.Spec.Size > have.Size {
			size.Required = v.Spec.Size
		}
		_, grown = a.local.Expand(ctx, id, size)
	}
	if !maps.Equal(have.Mutable, v.Spec.Mutable) {
		modified = a.local.Modify(ctx, id, v.Spec.Mutable)
	}
	now, err := a.local.Get(ctx, id)
	if err == nil {
		if grown != nil {
			now.Size = min(now.Size, v.Status.Size)
		}
		*have = now
	}
	return errors.Join(grown, modified, err)
}

// setReady sets the condition Ready of what was made: False with the reason DataLoss if one of the problems is a data loss, else True.
func setReady(conditions *[]metav1.Condition, o cluster.Object, problems []blockdev.Problem) {
	for _, p := range problems {
		if p.Severity == blockdev.DataLoss {
			setCondition(conditions, o, v1alpha1.Ready, metav1.ConditionFalse, "DataLoss", p.Message)
			return
		}
	}
	if !o.Common().Is(v1alpha1.Ready, "True") { // a new observedGeneration alone is worth no write
		setCondition(conditions, o, v1alpha1.Ready, metav1.ConditionTrue, "Found", "the bytes are there")
	}
}

// reportLost reports that a volume which was reported before is lost.
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
