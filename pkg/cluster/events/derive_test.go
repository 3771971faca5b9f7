package events

import (
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// TestRefusalsLeadToTheirCause: what was refused for lack of room leads to the page about room, and not to that about refusals.
func TestRefusalsLeadToTheirCause(t *testing.T) {
	for reason, page := range map[string]string{"NoSpace": "pool-full.md", "Precondition": "refused.md", "DataLoss": "data-loss.md"} {
		v := &v1alpha1.Volume{}
		v.Generation, v.Spec.Size = 2, 2<<30
		v.Status.Created, v.Status.Size = &metav1.MicroTime{Time: time.Now()}, 1<<30
		v.Status.ObservedGeneration, v.Status.Failure = 2, &v1alpha1.Failure{Reason: reason, Message: "no"}
		all := ofVolume(v, nodeState{})
		if len(all) != len(volumes) {
			t.Fatalf("%s: %d sayings", reason, len(all))
		}
		for _, one := range all {
			if one.reason != GrowthRefused || !strings.HasSuffix(one.text(), "/"+page) {
				t.Errorf("%s on %s of %s: %s", one.reason, one.on, reason, one.text())
			}
		}
	}
}
