package events

import (
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
)

// TestWhyNoneIsUsed: why who has the claim does not use a leg that answers is told, as long as somebody has it.
func TestWhyNoneIsUsed(t *testing.T) {
	r := cluster.ReplicatedNamed("v")
	r.Spec.Legs, r.Spec.Claim = []string{"a"}, &v1alpha1.Claim{Node: "node", Generation: 3}
	r.Status = v1alpha1.ReplicatedVolumeStatus{Made: new(metav1.NowMicro()), Legs: []v1alpha1.Leg{{Name: "a", Current: true}}, Waits: "leg b has it"}
	legs := map[string]*v1alpha1.Volume{"a": cluster.VolumeNamed("a")}
	told := func() bool {
		return slices.ContainsFunc(ofReplicated(r, legs, nil), func(s saying) bool {
			return s.reason == cluster.ReasonNoCurrentReplica && strings.Contains(s.note, "leg b has it")
		})
	}
	if !told() {
		t.Error("it is not told")
	}
	r.Spec.Claim = nil
	if told() {
		t.Error("it is told, and nobody wants to use it")
	}
}
