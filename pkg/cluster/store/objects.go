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

// getOrCreate finds the object of a key, by the API server's own word, or creates it as planned. One that is being deleted
// is waited for to be gone. fits says of one that is there whether it is what is wanted; with false it is to be looked at
// anew. w watches the object.
func getOrCreate[O any, T interface {
	*O
	cluster.Object
}](ctx context.Context, s *Store, w *kube.Watch, key string, plan func() (T, error), fits func(T) (bool, error)) (T, error) {
	// What the cache does not have is created at once. What it has, another store may have deleted or changed since.
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
		have := T(new(O)) // nothing of what it was is to stay
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

// create creates an object as planned; created is false without an error if there is one of its name.
func create[T cluster.Object](ctx context.Context, s *Store, plan func() (T, error)) (want T, created bool, err error) {
	if want, err = plan(); err != nil {
		return want, false, err
	}
	cluster.Trace(ctx, want)
	var options []client.CreateOption
	if want.Strict() { // a field that was dropped would leave bytes that are not encrypted, or a volume that cannot be reached
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
		uid := want.GetUID() // nobody may make it, and the name is to be free
		err := client.IgnoreNotFound(s.kube.Client.Delete(ctx, want, client.Preconditions{UID: &uid}))
		return want, false, errors.Join(cluster.ErrDefinitions, err)
	}
	return want, true, nil
}

// discard deletes what the store itself has no use for, and waits until it is gone.
func discard[T cluster.Object](ctx context.Context, s *Store, w *kube.Watch, o T) error {
	if !o.Deleting() {
		err := cluster.IntendDeletion(ctx, s.kube.Client, o, false)
		if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
			return nil // another of the name is another's
		}
		if err != nil {
			return kube.APIError("delete "+o.GetName(), err)
		}
	}
	return waitGone(ctx, s, w, o)
}

// errStale: that is only what the cache says, and another store may have changed it since.
var errStale = errors.New("the cache may be behind")

// deleteByID deletes the object of an ID, and waits until it is gone. refuse says why it may not go; with errStale it is looked at
// anew, at the API server itself. So it is if the cache says that it is being deleted, or after a conflict: another store may
// have made anew what is being deleted here. unchanged: see cluster.IntendDeletion.
func deleteByID[T cluster.Object](ctx context.Context, s *Store, id volume.ID, o T, unchanged bool, refuse func(live bool) error) error {
	w := s.hub.Open(o)
	defer w.Close()
	err := s.get(ctx, id.Key, o)
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
