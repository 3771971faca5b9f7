package store

import (
	"context"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/liveness"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// waitMade waits until the node has made an object. If the node refuses, the object is deleted, unless its bytes were made once and are lost.
func waitMade[T cluster.Object](ctx context.Context, s *Store, w *kube.Watch, have T) (T, error) {
	have, err := wait(ctx, s, w, have, isMade)
	var refused *cluster.Refusal
	switch {
	case errors.Is(err, errGone):
		err = fmt.Errorf("%w: %w while it was being made", errdefs.ErrUnavailable, err)
	case errors.As(err, &refused):
		if v1alpha1.LostUnmade(have) {
			return have, err
		}
		if err := discard(ctx, s, w, have, false); err != nil {
			return have, err
		}
	case err == nil:
		err = forbidMaking(ctx, s, have)
	}
	return have, err
}

// forbidMaking takes spec.make off an object that is made. An agent of an older version does not do that itself.
func forbidMaking[T cluster.Object](ctx context.Context, s *Store, have T) error {
	now := have.DeepCopyObject().(T)
	for now.May().Make && now.GetUID() == have.GetUID() {
		before := now.DeepCopyObject().(T)
		now.May().Make = false
		err := s.kube.Client.Patch(ctx, now, kube.LockingPatch(before)) // by resourceVersion, so not of a later object of the name, which is still to be made
		if !apierrors.IsConflict(err) {
			return kube.APIError("write down that it was made", client.IgnoreNotFound(err))
		}
		if err := s.getNow(ctx, have.GetName(), now); err != nil {
			return errdefs.IgnoreNotFound(err)
		}
	}
	return nil
}

// isMade is for wait: it reports whether the node has made the object. If the node has refused, it returns that failure.
func isMade[T cluster.Object](o T) (bool, error) {
	if o.Common().Created != nil {
		return true, nil
	}
	if f := o.Common().Refused(o.GetGeneration()); f != nil {
		return false, cluster.ErrorOf(o.Node(), f)
	}
	return false, nil
}

// askAgainAfter is how long a node has to answer before it is asked again; each further time it has twice as long. Most work takes less, so this is rare.
const askAgainAfter = 10 * time.Second

// errGone is the error of a wait for an object that was deleted.
var errGone = errors.New("it was deleted")

// wait waits for the node of an object. It returns the first state of the object, from have on, for which done is true or fails. The error is errGone if the
// object is gone, and ErrUnavailable if its node is not ready or the context ends: the node may go on. w has to watch the object from before have was read
// or written. A node that takes long is asked again (askAgain).
func wait[T cluster.Object](ctx context.Context, s *Store, w *kube.Watch, have T, done func(T) (bool, error)) (T, error) {
	if ok, err := done(have); ok || err != nil {
		return have, err
	}
	node := s.hub.Open(kube.Node(have.Node()))
	defer node.Close()
	pause := askAgainAfter
	quiet := time.NewTimer(pause)
	defer quiet.Stop()
	for latest := (state[T]{have: have}); ; {
		if err := s.nodes.Ready(ctx, have.Node()); err != nil {
			return latest.have, err
		}
		select {
		case <-ctx.Done():
			return latest.have, fmt.Errorf("%w: node %s has not answered yet%s: %w", errdefs.ErrUnavailable, have.Node(), lastWord(latest.have), ctx.Err())
		case <-node.Signal:
			node.Take()
		case <-s.nodes.Silence(have.Node()):
		case <-quiet.C:
			pause *= 2
			quiet.Reset(pause)
			if ok, err := latest.askAgain(ctx, s, done); ok || err != nil {
				return latest.have, err
			}
		case <-w.Signal:
			if ok, err := latest.follow(w.Take(), done); ok || err != nil {
				return latest.have, err
			}
		}
	}
}

// homeReady returns an error if the node that alone has the source of a snapshot or a copy does not work now: ErrPrecondition if it is gone for good. To sidecars
// ErrUnavailable means that the work may still be going on: they would ask for ever, and external-snapshotter would meanwhile delete neither the VolumeSnapshot nor
// the claim of its volume.
func (s *Store) homeReady(ctx context.Context, node string) error {
	err := s.nodes.Ready(ctx, node)
	var down *liveness.NodeDown
	if !errors.As(err, &down) {
		return err
	}
	gone, failed := s.isGone(ctx, node)
	if failed != nil {
		return failed
	}
	if gone {
		return errdefs.Recast(errdefs.ErrPrecondition, err, "node %s is gone for good, and what it alone has cannot be copied any more: delete what asks for that; if its disks are well, have them in another node", node)
	}
	return err
}

// lastWord returns the failure that a node reported of an earlier generation of an object, as the end of a message; empty if there is none.
func lastWord(o cluster.Object) string {
	if f := o.Common().Failure; f != nil {
		return " (before that it said: " + f.Message + ")"
	}
	return ""
}

// state is the last state of an object that is known.
type state[T cluster.Object] struct {
	have T
	seen bool // the watch has delivered this object (its UID)
}

// askAgain annotates the object, so that its agent gets a new event, and looks at the answer of that write. The agent may have got an event without the field
// that changed: for a second, up to two minutes, after new definitions the API server serves existing watches by the former ones, which drop fields that they
// do not know (tearDown in k8s.io/apiextensions-apiserver). No later event would tell of the field.
func (s *state[T]) askAgain(ctx context.Context, store *Store, done func(T) (bool, error)) (bool, error) {
	now := s.have.DeepCopyObject().(T)
	cluster.Annotate(now, v1alpha1.AskedAnnotation, time.Now().UTC().Format(time.RFC3339))
	err := store.kube.Client.Patch(ctx, now, client.MergeFrom(s.have))
	if apierrors.IsNotFound(err) || err == nil && now.GetUID() != s.have.GetUID() {
		return false, errGone
	}
	if err != nil {
		return false, nil // the node may still answer
	}
	s.have = now
	return done(now)
}

// follow applies events until done is true of the state, or fails; errGone once the object is gone.
func (s *state[T]) follow(events []kube.Event, done func(T) (bool, error)) (bool, error) {
	for _, e := range events {
		switch now := e.Object.(T); {
		case now.GetUID() != s.have.GetUID() && !s.seen:
			// An earlier object of the name: the cache is behind.
		case now.GetUID() != s.have.GetUID(), e.Gone:
			return false, errGone
		case now.GetGeneration() < s.have.GetGeneration():
			s.seen = true // the cache is behind
		default:
			s.seen, s.have = true, now.DeepCopyObject().(T) // the cache's own object is shared
			if ok, err := done(s.have); ok || err != nil {
				return ok, err
			}
		}
	}
	return false, nil
}

// waitGone waits until an object that is being deleted is gone. If the node reports a failure, that is the error, and the node goes on trying.
func waitGone[T cluster.Object](ctx context.Context, s *Store, w *kube.Watch, o T) error {
	_, err := wait(ctx, s, w, o, func(o T) (bool, error) {
		if v1alpha1.Going(o) {
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
