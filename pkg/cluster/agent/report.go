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
)

// report writes the status of an object, if edit changes it. It fails with a conflict if
// anybody changed the object since it was read.
func report[T cluster.Object](ctx context.Context, a *Agent, o T, edit func(T)) error {
	before := o.DeepCopyObject().(T)
	edit(o)
	a.summarize(ctx, o)
	if equality.Semantic.DeepEqual(before, o) {
		return nil
	}
	return a.kube.Client.Status().Patch(ctx, o, kube.LockingPatch(before))
}

// setCondition sets a condition of an object; of its message as much as an object holds. One that says the same of a later generation stays as it is: that is no news.
func setCondition(conditions *[]metav1.Condition, o client.Object, kind string, status metav1.ConditionStatus, reason, message string) {
	message = cluster.Limited(message)
	if have := meta.FindStatusCondition(*conditions, kind); have != nil && have.Status == status && have.Reason == reason && have.Message == message {
		return
	}
	meta.SetStatusCondition(conditions, metav1.Condition{Type: kind, Status: status, Reason: reason, Message: message, ObservedGeneration: o.GetGeneration()})
}

// summarize makes the summary of an object. A snapshot is of the claim of its volume, as long as that is known.
func (a *Agent) summarize(ctx context.Context, o cluster.Object) {
	if s, ok := o.(*v1alpha1.Snapshot); ok && s.Status.Summary.Claim == "" {
		source := &v1alpha1.Volume{}
		if err := a.kube.Cache.Get(ctx, client.ObjectKey{Name: s.Spec.Source}, source); err == nil && source.Spec.ClaimRef != nil {
			s.Status.Summary.Claim = source.Spec.ClaimRef.Namespace + "/" + source.Spec.ClaimRef.Name
		}
	}
	cluster.Summarize(o)
}

// setHealth writes down what is wrong with an object: all of it in health, and the worst as a condition. Once nothing is, the
// condition says that something was.
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

// setWell makes a condition True: for this reason, unless it was False before. That it was stays written down.
func setWell(conditions *[]metav1.Condition, o client.Object, kind, reason, message string) {
	if have := meta.FindStatusCondition(*conditions, kind); have != nil {
		if have.Status == metav1.ConditionTrue {
			return // the generation that it is about does not matter
		}
		reason, message = v1alpha1.Recovered, message+" any more; what was: "+have.Reason
	}
	setCondition(conditions, o, kind, metav1.ConditionTrue, reason, message)
}

// refuse writes down that the node cannot do what the spec says. Errors that may pass are
// returned, to be tried again.
func refuse[T cluster.Object](ctx context.Context, a *Agent, o T, err error) error {
	return refuseRest(ctx, a, o, err, func(T) {})
}

// refuseRest is refuse of what is left of a change; done writes down what is carried out of it.
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
