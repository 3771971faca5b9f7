package store

import (
	"context"
	"errors"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// discard is intend for what the store itself has no use for, and waits until it is gone.
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

// remove deletes the object of an ID, and waits until it is gone. refuse says why it may not go; with errStale it is looked at
// anew, at the API server itself. So it is if the cache says that it is being deleted, or after a conflict: another store may
// have made anew what is being deleted here. unchanged: see intend.
func remove[T cluster.Object](ctx context.Context, s *Store, id volume.ID, o T, unchanged bool, refuse func(live bool) error) error {
	w := s.hub.Open(o)
	defer w.Close()
	err := s.get(ctx, id.Key, o)
	for live := false; ; live = true {
		if errors.Is(err, errdefs.ErrNotFound) || (err == nil && o.In() != id.Pool) {
			return s.unaccounted(ctx, id.String())
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

// obtain finds the object of a key, by the API server's own word (another store may have deleted what
// this one's cache has), or creates it as planned. One that is being deleted is waited for to be gone. fits says of one that is there whether it is what is wanted; with
// false it is to be looked at anew. w watches the object.
func obtain[O any, T interface {
	*O
	cluster.Object
}](ctx context.Context, s *Store, w *kube.Watch, key string, plan func() (T, error), fits func(T) (bool, error)) (T, error) {
	have := T(new(O))
	for live, err := false, s.kube.Client.Get(ctx, client.ObjectKey{Name: key}, have); ; live, err = true, s.kube.Live.Get(ctx, client.ObjectKey{Name: key}, have) {
		switch {
		case apierrors.IsNotFound(err):
			want, err := plan()
			if err != nil {
				return nil, err
			}
			if err = s.kube.Client.Create(ctx, want); err == nil && !want.May().Make {
				uid := want.GetUID() // nobody may make it, and the name is to be free
				return nil, errors.Join(cluster.ErrDefinitions, client.IgnoreNotFound(s.kube.Client.Delete(ctx, want, client.Preconditions{UID: &uid})))
			}
			if !apierrors.IsAlreadyExists(err) {
				return want, kube.APIError("create "+key, err)
			}
		case err != nil:
			return nil, kube.APIError("read "+key, err)
		case !live:
		case cluster.Going(have):
			if err := waitGone(ctx, s, w, have); err != nil {
				return nil, err
			}
		default:
			if ok, err := fits(have); ok || err != nil {
				return have, err
			}
		}
		have = T(new(O)) // nothing of what it was is to stay
	}
}

// made waits until the node has made an object. A refused one is removed, but for one whose
// bytes were there once.
func made[T cluster.Object](ctx context.Context, s *Store, w *kube.Watch, have T) (T, error) {
	have, err := wait(ctx, s, w, have, isMade)
	var refused *cluster.Refusal
	switch {
	case errors.Is(err, errGone):
		err = fmt.Errorf("%w: %w while it was being made", errdefs.ErrUnavailable, err)
	case errors.As(err, &refused):
		if lostUnmade(have) {
			return have, err
		}
		if err := discard(ctx, s, w, have); err != nil {
			return have, err
		}
	case err == nil:
		err = notAgain(ctx, s, have)
	}
	return have, err
}

// notAgain sees to it that what an agent of an older version has made is not made again.
func notAgain[T cluster.Object](ctx context.Context, s *Store, have T) error {
	if !have.May().Make {
		return nil
	}
	before := have.DeepCopyObject().(T)
	after := have.DeepCopyObject().(T)
	after.May().Make = false
	return kube.APIError("write down that it was made", kube.IgnoreConflict(s.kube.Client.Patch(ctx, after, client.MergeFrom(before))))
}

// isMade is for wait: the node has made the object, or refused to.
func isMade[T cluster.Object](o T) (bool, error) {
	if o.Common().Created != nil {
		return true, nil
	}
	if f := o.Common().Refused(o.GetGeneration()); f != nil {
		return false, cluster.ErrorOf(o.Node(), f)
	}
	return false, nil
}

// errGone: the object that was waited for is not there any more.
var errGone = errors.New("it was deleted")

// wait waits for what the node of an object says of it. It returns the first state of
// the object, from have on, for which done is true, or done's error; errGone once the
// object is gone. While its node is not ready, and when the context ends, the error is
// ErrUnavailable: the work may go on. w was opened before have was read or written.
func wait[T cluster.Object](ctx context.Context, s *Store, w *kube.Watch, have T, done func(T) (bool, error)) (T, error) {
	if ok, err := done(have); ok || err != nil {
		return have, err
	}
	node := s.hub.Open(kube.Node(have.Node()))
	defer node.Close()
	seen := false
	for {
		if err := s.nodes.Ready(ctx, have.Node()); err != nil {
			return have, err
		}
		select {
		case <-ctx.Done():
			return have, fmt.Errorf("%w: node %s has not answered yet: %w", errdefs.ErrUnavailable, have.Node(), ctx.Err())
		case <-node.Signal:
			node.Take()
		case <-s.nodes.Silence(have.Node()):
		case <-w.Signal:
			for _, e := range w.Take() {
				switch now := e.Object.(T); {
				case now.GetUID() != have.GetUID() && !seen:
					// An earlier one of the name; the cache is not that far yet.
				case now.GetUID() != have.GetUID(), e.Gone:
					return have, errGone
				case now.GetGeneration() < have.GetGeneration():
					seen = true // the cache does not have the last change yet
				default:
					seen, have = true, now.DeepCopyObject().(T) // the cache's own is everybody's
					if ok, err := done(have); ok || err != nil {
						return have, err
					}
				}
			}
		}
	}
}

// waitGone waits until an object that is being deleted is gone. A node that cannot is an
// error, but the node goes on trying.
func waitGone[T cluster.Object](ctx context.Context, s *Store, w *kube.Watch, o T) error {
	_, err := wait(ctx, s, w, o, func(o T) (bool, error) {
		if cluster.Going(o) {
			if f := o.Common().Refused(o.GetGeneration()); f != nil {
				return false, cluster.ErrorOf(o.Node(), f)
			}
		}
		return false, nil
	})
	if errors.Is(err, errGone) {
		return nil
	}
	return err
}
