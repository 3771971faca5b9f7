package kube

import (
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
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
	case apierrors.IsInvalid(err), apierrors.IsBadRequest(err):
		sentinel = errdefs.ErrInvalid
	}
	return fmt.Errorf("%w: %s: %w", sentinel, doing, err)
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
