package events

import (
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
)

// TestWhatWaitsSaysWhy: for whatever waits for a node whose agent is silent, an event tells the reason and the node: a move may wait for either of its
// nodes, a claim or a release of another node for the home.
func TestWhatWaitsSaysWhy(t *testing.T) {
	made := &metav1.MicroTime{Time: time.Now()}
	claim := &v1alpha1.Claim{Node: "user", Generation: 3}
	given := &v1alpha1.Export{Node: "user", Generation: 3}
	to, from := &v1alpha1.Move{Node: "other"}, &v1alpha1.Move{Node: "other", Left: true}
	for name, c := range map[string]struct {
		spec   v1alpha1.VolumeSpec
		status v1alpha1.VolumeStatus
		down   string // the node that is silent
		reason string // empty: nothing is said
		part   string
	}{
		"nothing waits":                {v1alpha1.VolumeSpec{}, v1alpha1.VolumeStatus{}, "home", "", ""},
		"a move, before it is known":   {v1alpha1.VolumeSpec{Move: to}, v1alpha1.VolumeStatus{}, "other", MoveWaits, "its move waits for node other: silence"},
		"a move, that waited before":   {v1alpha1.VolumeSpec{Move: to}, v1alpha1.VolumeStatus{Move: &v1alpha1.MoveStatus{Node: "other", Waits: true, Message: "old"}}, "other", MoveWaits, "for node other: silence"},
		"a move to another node":       {v1alpha1.VolumeSpec{Move: to}, v1alpha1.VolumeStatus{}, "third", "", ""},
		"a move that has not arrived":  {v1alpha1.VolumeSpec{Move: from}, v1alpha1.VolumeStatus{Move: &v1alpha1.MoveStatus{Node: "home"}}, "home", AgentSilent, "waits for node home"},
		"what is to be given back":     {v1alpha1.VolumeSpec{Move: from}, v1alpha1.VolumeStatus{Move: &v1alpha1.MoveStatus{Node: "home", Arrived: true}}, "other", MoveWaits, "waits for node other, which is to give its bytes back: silence"},
		"what was given back":          {v1alpha1.VolumeSpec{Move: from}, v1alpha1.VolumeStatus{Move: &v1alpha1.MoveStatus{Node: "home", Arrived: true, Cleared: true}}, "other", "", ""},
		"attached over the network":    {v1alpha1.VolumeSpec{Access: "any", Claim: claim, Claims: 3}, v1alpha1.VolumeStatus{}, "home", AgentSilent, "waits for node home"},
		"used over the network":        {v1alpha1.VolumeSpec{Access: "any", Claim: claim, Claims: 3}, v1alpha1.VolumeStatus{Export: given}, "home", "", ""},
		"attached to read":             {v1alpha1.VolumeSpec{Access: "any", Readers: []v1alpha1.Claim{*claim}, Claims: 3}, v1alpha1.VolumeStatus{}, "home", AgentSilent, "waits for node home"},
		"used at home":                 {v1alpha1.VolumeSpec{Access: "any", Claim: &v1alpha1.Claim{Node: "home", Generation: 3}, Claims: 3}, v1alpha1.VolumeStatus{}, "home", "", ""},
		"released":                     {v1alpha1.VolumeSpec{Access: "any", Claims: 3}, v1alpha1.VolumeStatus{Export: given}, "home", AgentSilent, "waits for node home"},
		"released by one who reads it": {v1alpha1.VolumeSpec{Access: "any", Claims: 3}, v1alpha1.VolumeStatus{Readers: []v1alpha1.Export{*given}}, "home", AgentSilent, "waits for node home"},
		"given by nobody's word":       {v1alpha1.VolumeSpec{Access: "any", Claims: 2}, v1alpha1.VolumeStatus{Export: given}, "home", "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			v := &v1alpha1.Volume{ObjectMeta: metav1.ObjectMeta{Name: "k", Generation: 1}, Spec: c.spec, Status: c.status}
			v.Spec.NodeName, v.Spec.Pool, v.Status.Created = "home", "p", made
			a := New(kube.Connection{}, nil, Options{})
			a.setNode(kube.Node(c.down), false, nodeState{reason: AgentSilent, why: "silence"}, nil)
			for key, e := range a.entries { // the events of the node itself
				if e.on == onNode {
					delete(a.entries, key)
				}
			}
			a.VolumeChanged(v, false)
			said := 0
			for _, e := range a.entries {
				if e.reason == Moved {
					continue
				}
				said++
				if e.reason != c.reason || !strings.Contains(e.note, c.part) || e.level != warning || !e.lasting {
					t.Errorf("%s: %s", e.reason, e.note)
				}
			}
			if said == 0 != (c.reason == "") {
				t.Errorf("%d things are said", said)
			}
			if a.setNode(kube.Node(c.down), false, nodeState{}, []cluster.Object{v}); c.reason == MoveWaits {
				for _, e := range a.entries {
					if e.reason == MoveWaits && strings.Contains(e.note, "silence") {
						t.Errorf("when the node is heard again, it is said that %s", e.note)
					}
				}
			}
		})
	}
}
