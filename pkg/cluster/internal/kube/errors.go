package kube

import (
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// APIError gives an error of the API server its sentinel. Whatever does not say for sure
// that nothing happened is ErrUnavailable: the work may be going on.
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

// LockingPatch is a patch that fails with a conflict if anybody else changed the object.
func LockingPatch(before client.Object) client.Patch {
	return client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
}

// IgnoreConflict returns nil for a conflict and for an object that is gone: whoever changed or deleted it caused an
// event, and it is looked at again.
func IgnoreConflict(err error) error {
	if apierrors.IsConflict(err) {
		return nil
	}
	return client.IgnoreNotFound(err)
}
