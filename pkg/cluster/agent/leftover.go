package agent

import (
	"context"
	"errors"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// dropLeftover removes what an unfinished copy or move has left in a pool, if no object asks for it any more: nobody has used it. The exception is a copy
// that may be the volume itself (mayHaveMoved), which it keeps as a stray (volume.KeepLeftover). Errors are logged, and the next search tries again.
func (a *Agent) dropLeftover(ctx context.Context, left volume.Leftover) {
	kept := false
	wanted, err := a.stillMade(ctx, left)
	if wanted {
		return
	}
	if err == nil {
		lock := keylock.Volume(left.For)
		if left.Comes() {
			lock = keylock.Snapshot(left.For)
		}
		err = a.withLocks([]string{lock}, func() error {
			if wanted, err = a.stillMade(ctx, left); wanted || err != nil { // now under the lock
				return err
			}
			if kept, err = a.mayHaveMoved(ctx, left); err != nil {
				return err
			}
			if kept {
				return a.local.KeepLeftover(ctx, left)
			}
			return a.local.DropLeftover(ctx, left)
		})
	}
	log := klog.FromContext(ctx)
	switch {
	case wanted:
	case err == nil && kept:
		log.Info("Keeping what is here of a volume that moved here while it was used, by an object that is gone", "id", left.ID.String())
	case err == nil:
		log.Info("Removed what was left of a copy that nobody asks for", "id", left.ID.String(), "copy", left.For)
	case errors.Is(err, errdefs.ErrBusy) || errors.Is(err, errdefs.ErrInUse):
		a.leftBusy = true
	default:
		log.Error(err, "Could not remove what is left of a copy; trying again", "id", left.ID.String(), "copy", left.For)
	}
}

// stillMade reports whether a leftover is still needed: its volume is still to be made, or its volume or snapshot still moves here. It is false only if the
// cache and the API server both say so.
func (a *Agent) stillMade(ctx context.Context, left volume.Leftover) (bool, error) {
	for _, reader := range []client.Reader{a.kube.Cache, a.kube.Live} {
		var o cluster.Object = &v1alpha1.Volume{}
		if left.Comes() {
			o = &v1alpha1.Snapshot{}
		}
		err := reader.Get(ctx, client.ObjectKey{Name: left.For}, o)
		if client.IgnoreNotFound(err) != nil {
			return false, err
		}
		v, is := o.(*v1alpha1.Volume)
		if err == nil && !v1alpha1.Going(o) && (a.movesHere(o) || is && a.takesPart(v) && v.Spec.Make && v.Status.Created == nil) {
			return true, nil
		}
	}
	return false, nil
}

// mayHaveMoved reports whether a leftover may be the volume itself: the volume moved here while it was used (Carried), and the object that would say whether
// the move has ended is not there any more. Either it is gone, or another one of its name was created, or it was restored to before the move: then it has an
// earlier generation, or the old node reports that the volume has left it (volume.ReasonMovedAway).
func (a *Agent) mayHaveMoved(ctx context.Context, left volume.Leftover) (bool, error) {
	if left.Carried == "" {
		return false, nil
	}
	v := &v1alpha1.Volume{}
	err := a.kube.Live.Get(ctx, client.ObjectKey{Name: left.For}, v)
	wentBack := v.Generation < left.Generation || slices.ContainsFunc(v.Status.Health, func(p v1alpha1.Problem) bool { return p.Reason == volume.ReasonMovedAway })
	return apierrors.IsNotFound(err) || err == nil && (string(v.UID) != left.Carried || wentBack), client.IgnoreNotFound(err)
}
