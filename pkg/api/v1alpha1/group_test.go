package v1alpha1_test

import (
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// TestOfGroup: which of the snapshots that name a group are of it, whatever agents write.
func TestOfGroup(t *testing.T) {
	made := time.Now()
	member := func(name, node string, labelled bool) v1alpha1.Snapshot { // each younger than the one before
		made = made.Add(time.Second)
		s := v1alpha1.Snapshot{ObjectMeta: metav1.ObjectMeta{Name: name, CreationTimestamp: metav1.NewTime(made)},
			Spec: v1alpha1.SnapshotSpec{NodeName: node, Group: &v1alpha1.Group{Key: "g", Size: 2}}}
		if labelled {
			s.Labels = map[string]string{v1alpha1.GroupLabel: "g"}
		}
		return s
	}
	for name, c := range map[string]struct {
		say []v1alpha1.Snapshot
		are []string
	}{
		"none":                                   {nil, nil},
		"made by the controller":                 {[]v1alpha1.Snapshot{member("x", "b", false), member("v", "a", true), member("w", "a", true)}, []string{"v", "w"}},
		"moved apart":                            {[]v1alpha1.Snapshot{member("v", "b", true), member("w", "a", true)}, []string{"v", "w"}},
		"moved apart, and one of its nodes lies": {[]v1alpha1.Snapshot{member("v", "b", true), member("w", "a", true), member("x", "b", false)}, []string{"v", "w"}},
		"one was adopted on the node of the others":  {[]v1alpha1.Snapshot{member("v", "a", true), member("w", "a", false), member("x", "b", false)}, []string{"v", "w"}},
		"one is not there, and another node says so": {[]v1alpha1.Snapshot{member("v", "a", true), member("x", "b", false)}, []string{"v"}},
		"adopted": {[]v1alpha1.Snapshot{member("v", "a", false), member("w", "a", false), member("x", "b", false)}, []string{"v", "w"}},
		"adopted on two nodes, and not labelled yet": {[]v1alpha1.Snapshot{member("v", "a", false), member("w", "b", false)}, []string{"v"}},
	} {
		t.Run(name, func(t *testing.T) {
			var are []string
			for _, s := range v1alpha1.OfGroup(c.say) {
				are = append(are, s.Name)
			}
			if !slices.Equal(are, c.are) {
				t.Errorf("its members are %v, want %v", are, c.are)
			}
		})
	}
}
