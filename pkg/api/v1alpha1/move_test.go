package v1alpha1_test

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// TestNotBeside: on which nodes a volume that has, or gets, legs on some others may have one more.
func TestNotBeside(t *testing.T) {
	zones := map[string]string{"a1": "a", "a2": "a", "b1": "b", "b2": "b", "c1": "c"} // n1 has no label
	labels := func(node string) map[string]string { return map[string]string{"zone": zones[node]} }
	leg := func(node, moves string) *v1alpha1.Volume {
		v := &v1alpha1.Volume{Spec: v1alpha1.VolumeSpec{NodeName: node}}
		if moves != "" {
			v.Spec.Move = &v1alpha1.Move{Node: moves}
		}
		return v
	}
	leaves := leg("a1", "")
	leaves.Name = "leaves"
	left := leg("b1", "a1")
	left.Spec.Move.Left = true
	lost, now := leg("a1", ""), metav1.NowMicro()
	lost.Status.Created, lost.Status.Conditions = &now, []metav1.Condition{{Type: v1alpha1.Ready, Status: "False"}}
	for what, c := range map[string]struct {
		key    string
		others []*v1alpha1.Volume
		node   string
		why    string // part of it; empty: it can
	}{
		"the first":                        {"", nil, "n1", ""},
		"another node":                     {"", []*v1alpha1.Volume{leg("a1", "")}, "a2", ""},
		"the same node":                    {"", []*v1alpha1.Volume{leg("b1", ""), leg("a1", "")}, "a1", "has another replica"},
		"the node that one moves to":       {"", []*v1alpha1.Volume{leg("a1", "b1")}, "b1", "or gets one"},
		"the node that one moves from":     {"", []*v1alpha1.Volume{leg("a1", "b1")}, "a1", "has another replica"},
		"the node that one has left":       {"", []*v1alpha1.Volume{left}, "a1", ""},
		"another zone":                     {"zone", []*v1alpha1.Volume{leg("a1", "")}, "b1", ""},
		"the same zone":                    {"zone", []*v1alpha1.Volume{leg("b1", ""), leg("a1", "")}, "a2", "is where node a1 is"},
		"the zone that one moves to":       {"zone", []*v1alpha1.Volume{leg("a1", "b1")}, "b2", "is where node b1 is"},
		"the zone that one moves from":     {"zone", []*v1alpha1.Volume{leg("a1", "b1")}, "a2", ""},
		"the zone that one has left":       {"zone", []*v1alpha1.Volume{left}, "a2", ""},
		"the zone of one that is lost":     {"zone", []*v1alpha1.Volume{lost}, "a2", ""},
		"the node of one that is lost":     {"zone", []*v1alpha1.Volume{lost}, "a1", "has a replica of the volume that is lost"},
		"the zone of one that is replaced": {"zone", []*v1alpha1.Volume{leaves, leg("b1", "")}, "a2", ""},
		"the node of one that is replaced": {"zone", []*v1alpha1.Volume{leaves}, "a1", "has another replica"},
		"no zone":                          {"zone", nil, "n1", "has no label zone"},
		"a zone, beside one that has none": {"zone", []*v1alpha1.Volume{leg("n1", "")}, "c1", ""},
	} {
		r := &v1alpha1.ReplicatedVolume{Spec: v1alpha1.ReplicatedVolumeSpec{TopologyKey: c.key}}
		if why := r.NotBeside(c.others, []string{leaves.Name}, c.node, labels); (why == "") != (c.why == "") || !strings.Contains(why, c.why) {
			t.Errorf("%s: %q, want %q", what, why, c.why)
		}
	}
}
