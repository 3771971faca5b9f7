package events

import (
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
)

// TestWhyNoneIsUsed: if the node that has the claim cannot use any leg, an event tells why it waits, as long as there is a claim.
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

// TestStatusLost: an event tells that an object was restored without its status, and what to do. One that is being made says nothing.
func TestStatusLost(t *testing.T) {
	r := cluster.ReplicatedNamed("v")
	r.Spec.Legs, r.Spec.Numbered = []string{"a", "b"}, 2
	if all := ofReplicated(r, nil, nil); len(all) > 0 {
		t.Errorf("of one that is being made is told %+v", all)
	}
	r.Spec.Claims = 1
	if !slices.ContainsFunc(ofReplicated(r, nil, nil), func(s saying) bool {
		return s.reason == cluster.ReasonNoCurrentReplica && strings.Contains(s.note, "restore ReplicatedVolume v with its status")
	}) {
		t.Error("it is not told")
	}
}

// TestLacksAReplica: an event tells that no node can have another replica of a volume. It says that the volume has too few only if that is so.
func TestLacksAReplica(t *testing.T) {
	r := cluster.ReplicatedNamed("v")
	r.Spec.Legs, r.Spec.Replicas = []string{"a", "b"}, 2
	r.Status = v1alpha1.ReplicatedVolumeStatus{Made: new(metav1.NowMicro()), Lacks: "node n is cordoned", Legs: []v1alpha1.Leg{{Name: "a", Current: true}, {Name: "b", Current: true}}}
	told := func(words string) bool {
		return slices.ContainsFunc(ofReplicated(r, nil, nil), func(s saying) bool {
			return s.reason == cluster.ReasonReplicaMissing && strings.Contains(s.note, words+", and no further one is made: node n is cordoned")
		})
	}
	if !told("take the place of one that moves, or is lost") {
		t.Error("of one that moves it is not told")
	}
	r.Status.Legs[1].Current = false
	if !told("it has fewer than 2 replicas") {
		t.Error("of one that is missing it is not told")
	}
}
