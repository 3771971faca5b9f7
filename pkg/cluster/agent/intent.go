package agent

import (
	"context"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// clearIntent takes spec.make off an object whose bytes are made, or were once. It also takes off a spec.delete with another UID, as of a restored copy of an
// object, and the finalizer of older versions.
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

// deleteBytes calls remove, which deletes the bytes of some objects with spec.delete. The caller holds their locks. If that has failed before, it asks the API
// server first whether they are still to be deleted: somebody may have taken spec.delete off since, and the watch not tell of that, as the network is cut.
// ErrUnavailable if they are not, or that cannot be found out.
func deleteBytes[T cluster.Object](ctx context.Context, a *Agent, objects []T, remove func() error) error {
	for _, o := range objects {
		if _, failed := a.undeleted.Load(o.GetUID()); !failed {
			continue
		}
		now := o.DeepCopyObject().(T)
		if err := a.kube.Live.Get(ctx, client.ObjectKeyFromObject(o), now); client.IgnoreNotFound(err) != nil {
			return kube.APIError("find out whether "+o.GetName()+" is still to be deleted", err)
		} else if err != nil || now.GetUID() != o.GetUID() || !now.Deleting() {
			return fmt.Errorf("%w: %s is not to be deleted any more, as the API server says, and the watch has not told of that yet", errdefs.ErrUnavailable, o.GetName())
		}
	}
	err := remove()
	for _, o := range objects {
		if err != nil {
			a.undeleted.Store(o.GetUID(), true)
		} else {
			a.undeleted.Delete(o.GetUID())
		}
	}
	return err
}

// dropObject takes the finalizer of older versions off an object that was deleted without spec.delete. Its bytes stay, who uses them goes on, and they are
// reported as strays.
func (a *Agent) dropObject(ctx context.Context, o cluster.Object) error {
	defer a.Changed()
	if !controllerutil.ContainsFinalizer(o, v1alpha1.Finalizer) {
		return nil
	}
	klog.FromContext(ctx).Info("The object was deleted, and not by the driver; the bytes stay", "node", o.Node(), "object", o.GetName())
	return cluster.RemoveFinalizer(ctx, a.kube.Client, o)
}

// sameBytes reports whether what a pool has, made at a time for the object of a UID, is the volume or snapshot of an object, and not another one of its name.
// If the object was reported, the times have to be the same. If it has spec.make and was not reported, what the pool has must have been made for it: else
// it belongs to an object that was deleted, or lost in a restore of etcd, or an older driver has made it. No clock tells that: this node's may be ahead of
// that of the API server, or behind it.
func sameBytes(o cluster.Object, made time.Time, object string) bool {
	status := o.Common()
	if status.Created != nil {
		return status.Created.Time.Truncate(time.Microsecond).Equal(made.Truncate(time.Microsecond))
	}
	differs := status.Failure != nil && status.Failure.Reason == cluster.ReasonExists
	return !o.May().Make || !differs && object == string(o.GetUID())
}

// madeAt returns a time as status.created has it.
func madeAt(made time.Time) *metav1.MicroTime {
	created := metav1.NewMicroTime(made)
	return &created
}
