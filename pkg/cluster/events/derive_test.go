package events

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
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

// TestLongNames: the name of an event is one that Kubernetes takes, however long that of its object is.
func TestLongNames(t *testing.T) {
	a := New(kube.Connection{}, nil, Options{Driver: v1alpha1.DefaultDriver})
	for at := 1; at < mostName; at++ {
		for _, between := range []string{"-", ".", "--", "---"} {
			name := strings.Repeat("a", at) + between + strings.Repeat("b", mostName)
			event := a.event(entry{saying: saying{of: &v1alpha1.Volume{}, on: onClaim, reason: "X"}}, corev1.ObjectReference{Namespace: "n", Name: name[:mostName-1] + "b"})
			if problems := validation.NameIsDNSSubdomain(event.Name, false); len(problems) > 0 {
				t.Fatalf("%s: %v", event.Name, problems)
			}
		}
	}
}
