package agent

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
)

// TestSameBytes: of what was not reported yet, the UID of the object tells whose it is, however far the clocks of node and API server are apart.
func TestSameBytes(t *testing.T) {
	created := time.Unix(1e9, 0)
	o := &v1alpha1.Snapshot{ObjectMeta: metav1.ObjectMeta{UID: "own", CreationTimestamp: metav1.NewTime(created)}, Spec: v1alpha1.SnapshotSpec{Intent: v1alpha1.Intent{Make: true}}}
	for _, off := range []time.Duration{-time.Hour, 0, time.Hour} {
		for object, want := range map[string]bool{"own": true, "another": false, "": false} {
			if sameBytes(o, created.Add(off), object) != want {
				t.Errorf("made %v after the object was created, for %q: want %v", off, object, want)
			}
		}
	}
	refused := o.DeepCopy()
	refused.Status.Failure = &v1alpha1.Failure{Reason: cluster.ReasonExists}
	restored := o.DeepCopy()
	restored.Spec.Make = false
	reported := o.DeepCopy()
	reported.Status.Created = madeAt(created)
	for what, c := range map[string]struct {
		o      cluster.Object
		made   time.Time
		object string
		want   bool
	}{
		"refused as another one is there": {refused, created, "own", false},
		"restored without its status":     {restored, created, "another", true},
		"reported":                        {reported, created, "another", true},
		"reported, and made later":        {reported, created.Add(time.Minute), "own", false},
	} {
		if sameBytes(c.o, c.made, c.object) != c.want {
			t.Errorf("%s: want %v", what, c.want)
		}
	}
}
