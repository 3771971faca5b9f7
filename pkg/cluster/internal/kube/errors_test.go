package kube

import (
	"errors"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// TestAPIErrorOfPolicies: what an admission policy denies is invalid. What the API server could not ask it is not: the same request may be accepted soon.
func TestAPIErrorOfPolicies(t *testing.T) {
	for said, want := range map[string]error{
		"an agent deletes no pool": errdefs.ErrInvalid,
		"failed to configure policy: failed to find resource referenced by paramKind: 'ashlar.dev/v1alpha1, Kind=ReplicatedVolume'": errdefs.ErrUnavailable,
		"failed to configure binding: failed to read the parameters":                                                                errdefs.ErrUnavailable,
	} {
		// As k8s.io/apiserver/pkg/admission/plugin/policy/validating answers.
		refused := apierrors.NewForbidden(schema.GroupResource{Group: "ashlar.dev", Resource: "volumes"}, "v",
			errors.New("ValidatingAdmissionPolicy 'ashlar-node-replicas' with binding 'ashlar-node-replicas' denied request: "+said))
		refused.ErrStatus.Reason, refused.ErrStatus.Code = metav1.StatusReasonInvalid, 422
		if err := APIError("create v", refused); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", said, err, want)
		}
	}
}
