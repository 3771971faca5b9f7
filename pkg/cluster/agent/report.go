package agent

import (
	"context"
	"errors"
	"strings"
	"syscall"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/metrics"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// report writes the status of an object, with its summary, if edit changes it. It fails with a conflict if the object was changed since it was read.
func report[T cluster.Object](ctx context.Context, a *Agent, o T, edit func(T)) error {
	before := o.DeepCopyObject().(T)
	edit(o)
	a.summarize(ctx, o)
	if equality.Semantic.DeepEqual(before, o) {
		return nil
	}
	return a.kube.Client.Status().Patch(ctx, o, kube.LockingPatch(before))
}

// setCondition sets a condition of an object. The message is cut to what an object may hold. A condition that says the same already stays as it is, also of
// an earlier generation: it would be no news.
func setCondition(conditions *[]metav1.Condition, o client.Object, kind string, status metav1.ConditionStatus, reason, message string) {
	message = cluster.Limited(message)
	if have := meta.FindStatusCondition(*conditions, kind); have != nil && have.Status == status && have.Reason == reason && have.Message == message {
		return
	}
	meta.SetStatusCondition(conditions, metav1.Condition{Type: kind, Status: status, Reason: reason, Message: message, ObservedGeneration: o.GetGeneration()})
}

// summarize sets the summary of an object. A snapshot has the PersistentVolumeClaim of its volume there, once that was known.
func (a *Agent) summarize(ctx context.Context, o cluster.Object) {
	if s, ok := o.(*v1alpha1.Snapshot); ok && s.Status.Summary.Claim == "" {
		source := &v1alpha1.Volume{}
		if err := a.kube.Cache.Get(ctx, client.ObjectKey{Name: s.Spec.Source}, source); err == nil && source.Spec.ClaimRef != nil {
			s.Status.Summary.Claim = source.Spec.ClaimRef.Namespace + "/" + source.Spec.ClaimRef.Name
		}
	}
	cluster.Summarize(o)
}

// setHealth sets the health of an object to its problems, and the condition Healthy to the worst of them. When there are none any more, the condition says
// what was (setWell).
func setHealth(conditions *[]metav1.Condition, health *[]v1alpha1.Problem, o client.Object, problems []blockdev.Problem) {
	*health = cluster.FromProblems(problems, *health)
	if len(*health) == 0 {
		setWell(conditions, o, v1alpha1.Healthy, "NoProblems", "nothing is known to be wrong")
		return
	}
	messages := make([]string, 0, len(*health))
	for _, p := range *health {
		messages = append(messages, p.Message)
	}
	setCondition(conditions, o, v1alpha1.Healthy, metav1.ConditionFalse, (*health)[0].Reason, strings.Join(messages, "; "))
}

// setWell makes a condition True with a reason. If it was False, the reason is Recovered, and the message names the former reason; both stay from then on.
func setWell(conditions *[]metav1.Condition, o client.Object, kind, reason, message string) {
	if have := meta.FindStatusCondition(*conditions, kind); have != nil {
		if have.Status == metav1.ConditionTrue {
			return // a new observedGeneration alone is worth no write
		}
		reason, message = v1alpha1.Recovered, message+" any more; what was: "+have.Reason
	}
	setCondition(conditions, o, kind, metav1.ConditionTrue, reason, message)
}

// refuse writes the error of what a spec asks for as the node's final answer (status.failure). A transient error is returned instead, to be tried again.
func refuse[T cluster.Object](ctx context.Context, a *Agent, o T, err error) error {
	return refuseRest(ctx, a, o, err, func(T) {})
}

// refuseRest is refuse for a change of which a part was carried out: done sets that part in the status.
func refuseRest[T cluster.Object](ctx context.Context, a *Agent, o T, err error, done func(T)) error {
	if isTransient(err) {
		return err
	}
	failure := cluster.FailureOf(err)
	if have := o.Common().Refused(o.GetGeneration()); have != nil && *have == *failure {
		return nil
	}
	klog.FromContext(ctx).Error(err, "Refused")
	metrics.AgentFailures.Inc(a.local.Node(), requestOf(o).kind)
	return report(ctx, a, o, func(o T) {
		done(o)
		status := o.Common()
		status.Failure, status.Progress, status.ObservedGeneration = failure, nil, o.GetGeneration()
		if status.Created == nil {
			setCondition(&status.Conditions, o, v1alpha1.Ready, metav1.ConditionFalse, failure.Reason, failure.Message)
			if v1alpha1.IsLost(o) {
				setHealth(&status.Conditions, &status.Health, o, []blockdev.Problem{{Severity: blockdev.DataLoss, Reason: cluster.ReasonDataLoss, Message: failure.Message}})
			}
		}
	})
}

// transient are the errors after which the node tries again by itself, and writes nothing.
var transient = []error{context.Canceled, errdefs.ErrBusy, errdefs.ErrUnavailable,
	syscall.ENOMEM, syscall.EMFILE, syscall.ENFILE, syscall.EAGAIN}

// isTransient reports whether an error is one of these. That a leg is not current is none: the controller chooses another one.
func isTransient(err error) bool {
	if errors.Is(err, volume.ErrNotCurrent) {
		return false
	}
	for _, one := range transient {
		if errors.Is(err, one) {
			return true
		}
	}
	return false
}
