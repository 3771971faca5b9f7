package store

import (
	"context"
	"errors"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// getOrCreate returns the object with a key, read at the API server, or creates the one that plan returns. If the object is being deleted, it waits until
// that is gone. fits reports whether the object that is there is the wanted one; if it is false without an error, the object is read again. w watches the
// object.
func getOrCreate[O any, T interface {
	*O
	cluster.Object
}](ctx context.Context, s *Store, w *kube.Watch, key string, plan func() (T, error), fits func(T) (bool, error)) (T, error) {
	// If the cache has no object, it is created at once. If it has one, another controller may have deleted or changed it since.
	err := s.kube.Client.Get(ctx, client.ObjectKey{Name: key}, T(new(O)))
	if client.IgnoreNotFound(err) != nil {
		return nil, kube.APIError("read "+key, err)
	}
	for absent := apierrors.IsNotFound(err); ; {
		if absent {
			if made, created, err := create(ctx, s, plan); created || err != nil {
				return made, err
			}
		}
		have := T(new(O)) // a new one, as Get does not clear fields that are not in the answer
		err := s.kube.Live.Get(ctx, client.ObjectKey{Name: key}, have)
		if absent = apierrors.IsNotFound(err); absent {
			continue
		}
		if err != nil {
			return nil, kube.APIError("read "+key, err)
		}
		if v1alpha1.Going(have) {
			if err := waitGone(ctx, s, w, have); err != nil {
				return have, err
			}
		} else if ok, err := fits(have); ok || err != nil {
			return have, err
		}
	}
}

// create creates the object that plan returns. created is false without an error if an object of its name exists. ErrDefinitions if the definitions are too
// old for the object.
func create[T cluster.Object](ctx context.Context, s *Store, plan func() (T, error)) (want T, created bool, err error) {
	if want, err = plan(); err != nil {
		return want, false, err
	}
	cluster.Trace(ctx, want)
	var options []client.CreateOption
	if want.Strict() { // without a field that older definitions drop, bytes would not be encrypted, or a volume could not be reached
		options = append(options, client.FieldValidation(metav1.FieldValidationStrict))
	}
	err = s.kube.Client.Create(ctx, want, options...)
	switch {
	case apierrors.IsAlreadyExists(err):
		return want, false, nil
	case apierrors.IsBadRequest(err) && len(options) > 0:
		return want, false, errdefs.Recast(cluster.ErrDefinitions, err, "create %s", want.GetName())
	case err != nil:
		return want, false, kube.APIError("create "+want.GetName(), err)
	case !want.May().Make:
		uid := want.GetUID() // the definitions have dropped spec.make, so no agent makes it; the name has to be free again
		err := client.IgnoreNotFound(s.kube.Client.Delete(ctx, want, client.Preconditions{UID: &uid}))
		return want, false, errors.Join(cluster.ErrDefinitions, err)
	}
	return want, true, nil
}

// discard deletes an object that an earlier try left, and waits until it is gone. unchanged: see cluster.IntendDeletion. It is needed unless the node has
// refused the object for good: otherwise the node may have made it since, and another controller answered so.
func discard[T cluster.Object](ctx context.Context, s *Store, w *kube.Watch, o T, unchanged bool) error {
	if !o.Deleting() {
		err := cluster.IntendDeletion(ctx, s.kube.Client, o, unchanged)
		if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
			return nil // it is gone, or was changed: the caller reads it again
		}
		if err != nil {
			return kube.APIError("delete "+o.GetName(), err)
		}
	}
	return waitGone(ctx, s, w, o)
}

// errStale says that a decision needs the object as the API server has it: another controller may have changed it.
var errStale = errors.New("the cache may be behind")

// deleteByID deletes the object with an ID, and waits until it is gone. refuse returns why it may not be deleted; live tells it that the object was read at
// the API server. With errStale, after a conflict, and if it is being deleted by the cache, the object is read at the API server and looked at again:
// another controller may have created it anew. unchanged: see cluster.IntendDeletion.
func deleteByID[T cluster.Object](ctx context.Context, s *Store, id volume.ID, o T, unchanged bool, refuse func(live bool) error) error {
	w := s.hub.Open(o)
	defer w.Close()
	err := s.get(ctx, id, o)
	for live := false; ; live = true {
		if errors.Is(err, errdefs.ErrNotFound) || (err == nil && o.Named() != id.Pool) {
			return s.checkStrays(ctx, id.String(), "")
		}
		if err != nil {
			return fmt.Errorf("delete %s: %w", id, err)
		}
		now, why := live, refuse(live)
		switch {
		case errors.Is(why, errStale):
		case why != nil:
			return why
		case !o.Deleting():
			err := cluster.IntendDeletion(ctx, s.kube.Client, o, unchanged)
			if now = err == nil; err != nil && kube.IgnoreConflict(err) != nil {
				return kube.APIError("delete "+id.String(), err)
			}
		}
		if now {
			if err := waitGone(ctx, s, w, o); err != nil {
				return fmt.Errorf("delete %s: %w", id, err)
			}
			return nil
		}
		err = s.getNow(ctx, id.Key, o)
	}
}
