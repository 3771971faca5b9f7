package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// going: nobody is to use an object any more. Its bytes go only if it is Deleting.
func going(o object) bool { return o.Deleting() || o.GetDeletionTimestamp() != nil }

// lostUnmade: its bytes may not be made, and its node has not found any.
func lostUnmade(o object) bool {
	f := o.Common().Refused(o.GetGeneration())
	return o.Common().Created == nil && !o.May().Make && f != nil && f.Reason == reasonDataLoss
}

// errDefinitions: the API server dropped a field that it does not know.
var errDefinitions = fmt.Errorf("%w: the definitions of ashlar.dev in this cluster are older than this driver: apply those of its version (deploy/kubernetes/crds)", errdefs.ErrUnavailable)

// intend writes down that the bytes of an object may go, and that nobody has claimed it. With
// unchanged it fails with a conflict if anybody changed the object since it was read; a conflict
// also if another object has its name.
func intend[T object](ctx context.Context, c client.Client, o T, unchanged bool) error {
	id := map[string]any{"uid": o.GetUID()}
	if unchanged {
		id["resourceVersion"] = o.GetResourceVersion()
	}
	spec := map[string]any{"delete": o.GetUID()}
	if v, ok := any(o).(*v1alpha1.Volume); ok && v.Spec.Claim != nil {
		spec["claim"] = nil
	}
	patch, err := json.Marshal(map[string]any{"metadata": id, "spec": spec})
	if err != nil {
		return err
	}
	if err := c.Patch(ctx, o, client.RawPatch(types.MergePatchType, patch)); err != nil {
		if ofAnother(err) {
			err = apierrors.NewConflict(schema.GroupResource{Group: v1alpha1.GroupVersion.Group}, o.GetName(), err)
		}
		return err
	}
	if !o.Deleting() {
		return errDefinitions
	}
	return nil
}

// ofAnother: a patch was for an object with another UID. To the API server that is an attempt to change the UID.
func ofAnother(err error) bool {
	var status apierrors.APIStatus
	return apierrors.IsInvalid(err) && errors.As(err, &status) && status.Status().Details != nil &&
		slices.ContainsFunc(status.Status().Details.Causes, func(c metav1.StatusCause) bool { return c.Field == "metadata.uid" })
}

// discard is intend for what the store itself has no use for, and waits until it is gone.
func discard[T object](ctx context.Context, s *Store, w *watch, o T) error {
	if !o.Deleting() {
		err := intend(ctx, s.client, o, false)
		if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
			return nil // another of the name is another's
		}
		if err != nil {
			return apiError("delete "+o.GetName(), err)
		}
	}
	return waitGone(ctx, s, w, o)
}

// errStale: that is only what the cache says, and another store may have changed it since.
var errStale = errors.New("the cache may be behind")

// remove deletes the object of an ID, and waits until it is gone. refuse says why it may not go; with errStale it is looked at
// anew, at the API server itself. So it is if the cache says that it is being deleted, or after a conflict: another store may
// have made anew what is being deleted here. unchanged: see intend.
func remove[T object](ctx context.Context, s *Store, id volume.ID, o T, unchanged bool, refuse func(live bool) error) error {
	w := s.hub.open(o)
	defer w.close()
	err := s.get(ctx, id.Key, o)
	for live := false; ; live = true {
		if errors.Is(err, errdefs.ErrNotFound) || (err == nil && o.In() != id.Pool) {
			return s.unaccounted(ctx, id.String())
		}
		if err != nil {
			return fmt.Errorf("delete %s: %w", id, err)
		}
		now, why := live, refuse(live)
		switch {
		case errors.Is(why, errStale):
		case why != nil:
			return why
		case !o.Deleting():
			err := intend(ctx, s.client, o, unchanged)
			if now = err == nil; err != nil && ignoreConflict(err) != nil {
				return apiError("delete "+id.String(), err)
			}
		}
		if now {
			if err := waitGone(ctx, s, w, o); err != nil {
				return fmt.Errorf("delete %s: %w", id, err)
			}
			return nil
		}
		err = s.getNow(ctx, id.Key, o)
	}
}

// settle takes from an object what allows its bytes to be made: they are there, or were. What
// else goes are a deletion that was meant for another object, of which this is a copy, and the
// finalizer of older versions.
func settle[T object](ctx context.Context, a *Agent, o T) error {
	before := o.DeepCopyObject().(T)
	may := o.May()
	changed := may.Make || controllerutil.ContainsFinalizer(o, v1alpha1.Finalizer)
	may.Make = false
	if may.Delete != "" && !o.Deleting() {
		may.Delete, changed = "", true
	}
	if !changed {
		return nil
	}
	controllerutil.RemoveFinalizer(o, v1alpha1.Finalizer)
	return a.client.Patch(ctx, o, lockingPatch(before))
}

// finish deletes the object of what is gone, unless somebody changed it.
func finish[T object](ctx context.Context, c client.Client, o T) error {
	if controllerutil.ContainsFinalizer(o, v1alpha1.Finalizer) {
		if err := letGo(ctx, c, o); err != nil {
			return err
		}
	}
	if o.GetDeletionTimestamp() != nil {
		return nil
	}
	uid, version := o.GetUID(), o.GetResourceVersion()
	return client.IgnoreNotFound(c.Delete(ctx, o, client.Preconditions{UID: &uid, ResourceVersion: &version}))
}

// letGo takes the finalizer of older versions off an object that somebody deleted.
func letGo(ctx context.Context, c client.Client, o client.Object) error {
	before := o.DeepCopyObject().(client.Object)
	controllerutil.RemoveFinalizer(o, v1alpha1.Finalizer)
	return c.Patch(ctx, o, lockingPatch(before))
}

// released lets an object go that somebody deleted without asking the driver to delete the
// volume or snapshot. Its bytes stay, whoever uses them goes on, and they are reported.
func (a *Agent) released(ctx context.Context, o object) error {
	defer a.Changed()
	if !controllerutil.ContainsFinalizer(o, v1alpha1.Finalizer) {
		return nil
	}
	klog.FromContext(ctx).Info("The object was deleted, and not by the driver; the bytes stay", "node", o.Node(), "object", o.GetName())
	return letGo(ctx, a.client, o)
}

// sameBytes: what a pool has is what an object was about when it was reported, and not
// something of the same name that was made after it. Of an object that was not reported, and may
// be made, it is what was made since there is that object: what was there before (its object was
// deleted, or etcd went back) is somebody's.
func sameBytes(o object, made time.Time) bool {
	status := o.Common()
	if status.Created != nil {
		return status.Created.Time.Truncate(time.Microsecond).Equal(made.Truncate(time.Microsecond))
	}
	differs := status.Failure != nil && status.Failure.Reason == reasonExists
	return !o.May().Make || !differs && !made.Before(o.GetCreationTimestamp().Time)
}

// madeAt is for status.created.
func madeAt(made time.Time) *metav1.MicroTime {
	created := metav1.NewMicroTime(made)
	return &created
}
