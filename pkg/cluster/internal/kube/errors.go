package kube

import (
	"fmt"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// APIError wraps an error of the API server in a sentinel: ErrNotFound, ErrInvalid, or else ErrUnavailable, as the request may have been carried out.
// doing says what was asked. nil stays nil.
func APIError(doing string, err error) error {
	sentinel := errdefs.ErrUnavailable
	switch {
	case err == nil:
		return nil
	case apierrors.IsNotFound(err):
		sentinel = errdefs.ErrNotFound
	case unconfigured(err): // no fault of the request
	case apierrors.IsInvalid(err), apierrors.IsBadRequest(err):
		sentinel = errdefs.ErrInvalid
	}
	return fmt.Errorf("%w: %s: %w", sentinel, doing, err)
}

// unconfigured reports whether the API server refused a request only because it could not ask one of its admission policies. A server that has just started
// does not find the kind of their parameters, if it looked for its kinds before it served all of them; it looks again every 30 seconds
// (k8s.io/apiserver/pkg/admission/plugin/policy). Its status says no more than that the object is invalid; so the message is looked at.
func unconfigured(err error) bool {
	return apierrors.IsInvalid(err) && strings.Contains(err.Error(), "failed to configure ")
}

// LockingPatch returns a patch that fails with a conflict if the object was changed since before was read (optimistic lock).
func LockingPatch(before client.Object) client.Patch {
	return client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
}

// IgnoreConflict returns nil for a conflict and for an object that is gone. It is for callers that watch the object: the change or deletion causes an
// event.
func IgnoreConflict(err error) error {
	if apierrors.IsConflict(err) {
		return nil
	}
	return client.IgnoreNotFound(err)
}

// IsDeleted reports whether an error says that an object is not there, and not that its kind is not, as while the definitions are restored.
func IsDeleted(err error) bool {
	return apierrors.IsNotFound(err) && !apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse)
}
