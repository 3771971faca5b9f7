package agent

import (
	"context"
	"errors"
	"syscall"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// report writes the status of an object, if edit changes it. It fails with a conflict if
// anybody changed the object since it was read.
func report[T cluster.Object](ctx context.Context, a *Agent, o T, edit func(T)) error {
	before := o.DeepCopyObject().(T)
	edit(o)
	if equality.Semantic.DeepEqual(before, o) {
		return nil
	}
	return a.kube.Client.Status().Patch(ctx, o, kube.LockingPatch(before))
}

func setCondition(conditions *[]metav1.Condition, o client.Object, kind string, status metav1.ConditionStatus, reason, message string) {
	meta.SetStatusCondition(conditions, metav1.Condition{Type: kind, Status: status, Reason: reason, Message: message, ObservedGeneration: o.GetGeneration()})
}

// refuse writes down that the node cannot do what the spec says. Errors that may pass are
// returned, to be tried again.
func refuse[T cluster.Object](ctx context.Context, a *Agent, o T, err error) error {
	if isTransient(err) {
		return err
	}
	failure := cluster.FailureOf(err)
	if have := o.Common().Refused(o.GetGeneration()); have != nil && *have == *failure {
		return nil
	}
	klog.FromContext(ctx).Error(err, "Refused")
	return report(ctx, a, o, func(o T) {
		status := o.Common()
		status.Failure, status.ObservedGeneration = failure, o.GetGeneration()
		if status.Created == nil {
			setCondition(&status.Conditions, o, v1alpha1.Ready, metav1.ConditionFalse, failure.Reason, failure.Message)
		}
	})
}

// transient are errors after which the node tries again by itself, without telling.
var transient = []error{context.Canceled, errdefs.ErrBusy, errdefs.ErrUnavailable,
	syscall.ENOMEM, syscall.EMFILE, syscall.ENFILE, syscall.EAGAIN}

func isTransient(err error) bool {
	for _, one := range transient {
		if errors.Is(err, one) {
			return true
		}
	}
	return false
}
