package agent

import (
	"context"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
)

// clearIntent takes from an object what allows its bytes to be made: they are there, or were. A deletion that was meant
// for another object, of which this is a copy, goes too, and so does the finalizer of older versions.
func clearIntent[T cluster.Object](ctx context.Context, a *Agent, o T) error {
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
	return a.kube.Client.Patch(ctx, o, kube.LockingPatch(before))
}

// dropObject takes the finalizer of older versions off an object that somebody deleted without asking the driver to delete
// the volume or snapshot. Its bytes stay, whoever uses them goes on, and they are reported as strays.
func (a *Agent) dropObject(ctx context.Context, o cluster.Object) error {
	defer a.Changed()
	if !controllerutil.ContainsFinalizer(o, v1alpha1.Finalizer) {
		return nil
	}
	klog.FromContext(ctx).Info("The object was deleted, and not by the driver; the bytes stay", "node", o.Node(), "object", o.GetName())
	return cluster.RemoveFinalizer(ctx, a.kube.Client, o)
}

// sameBytes: what a pool has is what an object was about when it was reported, and not
// something of the same name that was made after it. Of an object that was not reported, and may
// be made, it is what was made since there is that object: what was there before (its object was
// deleted, or etcd went back) is somebody's.
func sameBytes(o cluster.Object, made time.Time) bool {
	status := o.Common()
	if status.Created != nil {
		return status.Created.Time.Truncate(time.Microsecond).Equal(made.Truncate(time.Microsecond))
	}
	differs := status.Failure != nil && status.Failure.Reason == cluster.ReasonExists
	return !o.May().Make || !differs && !made.Before(o.GetCreationTimestamp().Time)
}

// madeAt is for status.created.
func madeAt(made time.Time) *metav1.MicroTime {
	created := metav1.NewMicroTime(made)
	return &created
}
