package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// volume makes the volume of an object what the object says.
func (a *Agent) volume(ctx context.Context, r request) (reconcile.Result, error) {
	v, there, err := get(ctx, a, r.key, &v1alpha1.Volume{})
	if err != nil || !there {
		return reconcile.Result{}, err
	}
	switch {
	case v.DeletionTimestamp != nil:
		return a.deleteVolume(ctx, v)
	case v.Status.Is(v1alpha1.Abandoned, "True"):
		// It waits to be deleted. What the verdict was about goes now, if it has not.
		return reconcile.Result{}, a.deleteLocal(ctx, v)
	case v.Spec.Abandoned:
		return reconcile.Result{}, a.locked([]string{keylock.Volume(v.Name)}, nil, func() error { return a.judge(ctx, v) })
	case v.Status.Created == nil:
		return reconcile.Result{}, a.makeVolume(ctx, r, v)
	default:
		return reconcile.Result{RequeueAfter: checkAgain}, a.tendVolume(ctx, v)
	}
}

func (a *Agent) makeVolume(ctx context.Context, r request, v *v1alpha1.Volume) error {
	if v.Common().Refused(v.Generation) != nil {
		return nil // it waits to be deleted
	}
	exclusive, shared := []string{keylock.Volume(v.Name)}, []string(nil)
	working, end := a.making(ctx, r)
	defer end()
	switch source := sourceOf(v); source.Kind {
	case blockdev.Volume:
		exclusive = append(exclusive, keylock.Volume(source.Key)) // its filesystem is frozen for the cut
		var cancel context.CancelFunc
		working, cancel = context.WithTimeout(working, longestCut)
		defer cancel()
	case blockdev.Snapshot:
		shared = append(shared, keylock.Snapshot(source.Key))
	}
	defer a.Changed()
	var made volume.Volume
	if err := a.locked(exclusive, shared, func() (err error) {
		made, err = a.local.Create(working, volume.Spec{Name: v.Spec.Name, Pool: v.Spec.Pool, Provisioning: blockdev.Provisioning(v.Spec.Provisioning), Source: sourceOf(v),
			Size:       volume.Range{Required: v.Spec.Size, Limit: v.Spec.Size},
			Filesystem: filesystem.Type(v.Spec.Filesystem), Mutable: v.Spec.Mutable})
		return err
	}); err != nil {
		return refuse(ctx, a, v, err)
	}
	return report(ctx, a, v, func(v *v1alpha1.Volume) {
		created := metav1.NewMicroTime(made.Created)
		v.Status.Created, v.Status.Size, v.Status.Thin, v.Status.Mutable = &created, made.Size, made.Thin, made.Mutable
		v.Status.Failure, v.Status.ObservedGeneration = nil, v.Generation
		setCondition(&v.Status.Conditions, v, v1alpha1.Ready, metav1.ConditionTrue, "Created", "")
	})
}

func (a *Agent) deleteLocal(ctx context.Context, v *v1alpha1.Volume) error {
	return a.locked([]string{keylock.Volume(v.Name)}, nil, func() error { return ignoreNotFound(a.local.Delete(ctx, volumeID(v))) })
}

func (a *Agent) deleteVolume(ctx context.Context, v *v1alpha1.Volume) (reconcile.Result, error) {
	if !controllerutil.ContainsFinalizer(v, v1alpha1.Finalizer) {
		return reconcile.Result{}, nil
	}
	var err error
	if claim := v.Spec.Claim; claim != nil {
		// Somebody deleted the object by hand. The release of the claim brings us here again.
		err = fmt.Errorf("%w: volume %s is claimed by node %s", blockdev.ErrInUse, volumeID(v), claim.Node)
		return reconcile.Result{}, refuse(ctx, a, v, err)
	}
	if err = a.deleteLocal(ctx, v); err == nil {
		a.Changed()
		return reconcile.Result{}, letGo(ctx, a.client, v)
	}
	if err := refuse(ctx, a, v, err); err != nil {
		return reconcile.Result{}, err
	}
	if errors.Is(err, blockdev.ErrInUse) {
		return reconcile.Result{RequeueAfter: inUseRetry}, nil
	}
	return reconcile.Result{RequeueAfter: lastRetry}, nil
}

// judge decides whether a volume that nobody knows of any more may go: only if this node's
// own record says that nothing was ever on it, and no device of it is there. The verdict is
// written down first, and fails if anybody changed the object meanwhile; from then on the
// volume is nobody's.
func (a *Agent) judge(ctx context.Context, v *v1alpha1.Volume) error {
	id := volumeID(v)
	have, err := a.local.Get(ctx, id)
	blank := errors.Is(err, blockdev.ErrNotFound) && v.Status.Created == nil
	why := "its bytes are missing"
	if err == nil {
		devices, err := a.local.Attached(ctx, id)
		if err != nil {
			return err
		}
		blank = have.Format.State == volume.Blank && have.Source == (volume.ID{}) && v.Spec.Claim == nil && len(devices) == 0
		why = "it is, or was, in use, or holds a copy"
	} else if !errors.Is(err, blockdev.ErrNotFound) && !errors.Is(err, blockdev.ErrDataLoss) {
		return err
	}
	if !blank {
		if v.Status.Is(v1alpha1.Abandoned, "False") {
			return nil
		}
		klog.FromContext(ctx).Info("Keeping a volume that nobody seems to know of", "volume", id.String(), "why", why)
		return report(ctx, a, v, func(v *v1alpha1.Volume) {
			setCondition(&v.Status.Conditions, v, v1alpha1.Abandoned, metav1.ConditionFalse, "NotBlank", "it is kept: "+why)
		})
	}
	if err := report(ctx, a, v, func(v *v1alpha1.Volume) {
		setCondition(&v.Status.Conditions, v, v1alpha1.Abandoned, metav1.ConditionTrue, "Blank", "nothing was ever on it")
	}); err != nil {
		return err
	}
	klog.FromContext(ctx).Info("Deleting a blank volume that nobody knows of", "volume", id.String())
	return ignoreNotFound(a.local.Delete(ctx, id))
}

// tendVolume looks after a volume that was made once. If it is missing, it is lost, and it
// is not made again.
func (a *Agent) tendVolume(ctx context.Context, v *v1alpha1.Volume) error {
	id := volumeID(v)
	have, err := a.local.Get(ctx, id)
	if errors.Is(err, blockdev.ErrNotFound) {
		return a.lost(ctx, v, blockdev.Problem{Severity: blockdev.DataLoss, Reason: "VolumeMissing",
			Message: fmt.Sprintf("pool %s of node %s does not have this volume any more; nothing was made in its place: bring the pool's files back, restore it from a backup, or delete it", v.Spec.Pool, a.local.Node())})
	}
	if errors.Is(err, blockdev.ErrDataLoss) {
		return a.lost(ctx, v, blockdev.Problem{Severity: blockdev.DataLoss, Reason: "RecordDamaged", Message: err.Error()})
	}
	if errors.Is(err, blockdev.ErrUnavailable) {
		return report(ctx, a, v, func(v *v1alpha1.Volume) {
			v.Status.Health = fromProblems([]blockdev.Problem{{Severity: blockdev.Inaccessible, Reason: "PoolUnavailable", Message: err.Error()}})
		})
	}
	if err != nil {
		return err
	}
	refused := v.Common().Refused(v.Generation) != nil
	if !refused && (have.Size < v.Spec.Size || !maps.Equal(have.Mutable, v.Spec.Mutable)) {
		defer a.Changed()
		if err := a.locked([]string{keylock.Volume(v.Name)}, nil, func() error { return a.changeVolume(ctx, v, &have) }); err != nil {
			return refuse(ctx, a, v, err)
		}
	}
	problems, err := a.local.Health(ctx, id)
	if err != nil {
		return err
	}
	return report(ctx, a, v, func(v *v1alpha1.Volume) {
		if !maps.Equal(v.Status.Mutable, have.Mutable) || v.Status.Size != have.Size || (v.Status.Failure != nil && !refused) {
			v.Status.Size, v.Status.Mutable, v.Status.ObservedGeneration = have.Size, have.Mutable, v.Generation
			if !refused {
				v.Status.Failure = nil
			}
		}
		v.Status.Health = fromProblems(problems)
		a.setReady(&v.Status.Conditions, v, problems)
	})
}

// changeVolume makes the volume what the spec says.
func (a *Agent) changeVolume(ctx context.Context, v *v1alpha1.Volume, have *volume.Volume) (err error) {
	id := volumeID(v)
	if have.Size < v.Spec.Size {
		if *have, err = a.local.Expand(ctx, id, volume.Range{Required: v.Spec.Size}); err != nil {
			return err
		}
	}
	if maps.Equal(have.Mutable, v.Spec.Mutable) {
		return nil
	}
	if err := a.local.Modify(ctx, id, v.Spec.Mutable); err != nil {
		return err
	}
	*have, err = a.local.Get(ctx, id)
	return err
}

// setReady: what was made is ready unless its bytes are lost.
func (a *Agent) setReady(conditions *[]metav1.Condition, o object, problems []blockdev.Problem) {
	for _, p := range problems {
		if p.Severity == blockdev.DataLoss {
			setCondition(conditions, o, v1alpha1.Ready, metav1.ConditionFalse, "DataLoss", p.Message)
			return
		}
	}
	if !o.Common().Is(v1alpha1.Ready, "True") { // else the generation that it is about does not matter
		setCondition(conditions, o, v1alpha1.Ready, metav1.ConditionTrue, "Found", "")
	}
}

func (a *Agent) lost(ctx context.Context, v *v1alpha1.Volume, p blockdev.Problem) error {
	return report(ctx, a, v, func(v *v1alpha1.Volume) {
		if len(v.Status.Health) != 1 || v.Status.Health[0].Reason != p.Reason {
			klog.FromContext(ctx).Info("Data loss", "volume", volumeID(v).String(), "reason", p.Reason, "message", p.Message)
			v.Status.Health = fromProblems([]blockdev.Problem{p})
			a.setReady(&v.Status.Conditions, v, []blockdev.Problem{p})
		}
		if v.Status.Size < v.Spec.Size && v.Common().Refused(v.Generation) == nil { // it cannot grow either
			v.Status.Failure, v.Status.ObservedGeneration = &v1alpha1.Failure{Reason: "DataLoss", Message: p.Message}, v.Generation
		}
	})
}
