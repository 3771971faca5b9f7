package cluster

import (
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// State is how far a volume or a snapshot is, in one word.
type State string

// The states.
const (
	Making   State = "making" // it is being made, or waits for that
	Ready    State = "ready"
	Deleting State = "deleting"
	Failed   State = "failed" // what was asked for last was refused
	Lost     State = "lost"   // its bytes are missing
)

// States are all of them.
var States = []State{Making, Ready, Deleting, Failed, Lost}

// StateOf is the state of an object, as its status says it.
func StateOf(o Object) State {
	status := o.Common()
	refused := status.Refused(o.GetGeneration())
	switch {
	case Going(o):
		return Deleting
	case lost(status), refused != nil && refused.Reason == ReasonDataLoss:
		return Lost
	case refused != nil:
		return Failed
	case status.Created == nil:
		return Making
	}
	return Ready
}

// lost: the bytes of what was there are missing.
func lost(s *v1alpha1.ObjectStatus) bool {
	ready := meta.FindStatusCondition(s.Conditions, v1alpha1.Ready)
	return ready != nil && ready.Status == metav1.ConditionFalse && ready.Reason == ReasonDataLoss
}
