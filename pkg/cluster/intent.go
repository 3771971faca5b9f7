package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/ashlar-csi/ashlar/internal/trace"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// ErrDefinitions: the API server dropped a field that it does not know.
var ErrDefinitions = fmt.Errorf("%w: the definitions of ashlar.dev in this cluster are older than this driver: apply those of its version (deploy/kubernetes/crds)", errdefs.ErrUnavailable)

// Leaving returns ErrUnavailable for a volume or snapshot that has moved, and whose bytes its old node still has: if it were deleted now, they would stay
// there without an object. move is the spec.move of the object.
func Leaving(kind string, id volume.ID, move *v1alpha1.Move) error {
	if move == nil || !move.Left {
		return nil
	}
	return fmt.Errorf("%w: delete %s %s: it has moved from node %s, which has not given its bytes back yet: it does when the drivers of both nodes run, and status.move says what it waits for; if that node never comes back, delete its Node object",
		errdefs.ErrUnavailable, kind, id, move.Node)
}

// IntendDeletion allows the node of an object to delete its bytes (spec.delete), and takes claims and a move off the object. It fails with a conflict if
// another object has its name by now, and with unchanged also if the object was changed since it was read. ErrDefinitions if the API server does not know
// the field.
func IntendDeletion[T Object](ctx context.Context, c client.Client, o T, unchanged bool) error {
	id := map[string]any{"uid": o.GetUID()}
	if unchanged {
		id["resourceVersion"] = o.GetResourceVersion()
	}
	if parent := trace.Parent(ctx); parent != "" || o.GetAnnotations()[v1alpha1.TraceAnnotation] != "" {
		id["annotations"] = map[string]any{v1alpha1.TraceAnnotation: traced(parent)}
	}
	spec := map[string]any{"delete": o.GetUID()}
	if s, ok := any(o).(*v1alpha1.Snapshot); ok && s.Spec.Move != nil {
		spec["move"] = nil
	}
	if v, ok := any(o).(*v1alpha1.Volume); ok {
		if v.Spec.Claim != nil {
			spec["claim"] = nil
		}
		if v.Spec.Readers != nil {
			spec["readers"] = nil
		}
		if v.Spec.Move != nil {
			spec["move"] = nil
		}
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
		return ErrDefinitions
	}
	return nil
}

// traced is the value of the annotation in a patch: null takes it off.
func traced(parent string) any {
	if parent == "" {
		return nil
	}
	return parent
}

// ofAnother reports whether a patch was refused because the object has another UID: to the API server that is an attempt to change the UID.
func ofAnother(err error) bool {
	var status apierrors.APIStatus
	return apierrors.IsInvalid(err) && errors.As(err, &status) && status.Status().Details != nil &&
		slices.ContainsFunc(status.Status().Details.Causes, func(c metav1.StatusCause) bool { return c.Field == "metadata.uid" })
}

// RemoveObject deletes the object of a volume or snapshot whose bytes are gone. It fails with a conflict if the object was changed since it was read.
func RemoveObject[T Object](ctx context.Context, c client.Client, o T) error {
	if controllerutil.ContainsFinalizer(o, v1alpha1.Finalizer) {
		if err := RemoveFinalizer(ctx, c, o); err != nil {
			return err
		}
	}
	if o.GetDeletionTimestamp() != nil {
		return nil
	}
	uid, version := o.GetUID(), o.GetResourceVersion()
	return client.IgnoreNotFound(c.Delete(ctx, o, client.Preconditions{UID: &uid, ResourceVersion: &version}))
}

// RemoveFinalizer takes the finalizer of older versions off an object. It fails with a conflict if the object was changed since it was read.
func RemoveFinalizer(ctx context.Context, c client.Client, o client.Object) error {
	before := o.DeepCopyObject().(client.Object)
	controllerutil.RemoveFinalizer(o, v1alpha1.Finalizer)
	return c.Patch(ctx, o, kube.LockingPatch(before))
}
