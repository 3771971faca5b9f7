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
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// waitMade waits until the node has made an object. A refused one is removed, but for one whose
// bytes were there once.
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
		if err := discard(ctx, s, w, have); err != nil {
			return have, err
		}
	case err == nil:
		err = forbidMaking(ctx, s, have)
	}
	return have, err
}

// forbidMaking sees to it that what an agent of an older version has made is not made again.
func forbidMaking[T cluster.Object](ctx context.Context, s *Store, have T) error {
	now := have.DeepCopyObject().(T)
	for now.May().Make && now.GetUID() == have.GetUID() {
		before := now.DeepCopyObject().(T)
		now.May().Make = false
		err := s.kube.Client.Patch(ctx, now, kube.LockingPatch(before)) // so it is of no other one of the name, which is to be made still
		if !apierrors.IsConflict(err) {
			return kube.APIError("write down that it was made", client.IgnoreNotFound(err))
		}
		if err := s.getNow(ctx, have.GetName(), now); err != nil {
			return errdefs.IgnoreNotFound(err)
		}
	}
	return nil
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

// askAgainAfter is how long a node has before it is asked again; each time after that it has twice as long. Most work takes less, so this is hardly ever done.
const askAgainAfter = 10 * time.Second

// errGone: the object that was waited for is not there any more.
var errGone = errors.New("it was deleted")

// wait waits for what the node of an object says of it. It returns the first state of
// the object, from have on, for which done is true, or done's error; errGone once the
// object is gone. While its node is not ready, and when the context ends, the error is
// ErrUnavailable: the work may go on. w was opened before have was read or written.
// While the node is ready and that takes long, it is asked again now and then.
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

// lastWord is what a node said last, of what it was asked before, to be read after that it has not answered.
func lastWord(o cluster.Object) string {
	if f := o.Common().Failure; f != nil {
		return " (before that it said: " + f.Message + ")"
	}
	return ""
}

// state is the last state of an object that is known.
type state[T cluster.Object] struct {
	have T
	seen bool // by the watch, too
}

// askAgain writes to the object when it was asked again, so that whoever watches it is told once more of all that it says, and looks at the object itself.
// A watch may have told of a change and left out what the change was: from a second up to two minutes after new definitions the API server goes on to serve the watches that it had by
// the former ones, and these take off what they do not know (tearDown in k8s.io/apiextensions-apiserver); nothing tells of it later.
func (s *state[T]) askAgain(ctx context.Context, store *Store, done func(T) (bool, error)) (bool, error) {
	now := s.have.DeepCopyObject().(T)
	cluster.Annotate(now, v1alpha1.AskedAnnotation, time.Now().UTC().Format(time.RFC3339))
	err := store.kube.Client.Patch(ctx, now, client.MergeFrom(s.have))
	if apierrors.IsNotFound(err) || err == nil && now.GetUID() != s.have.GetUID() {
		return false, errGone
	}
	if err != nil {
		return false, nil // the answer to what was asked before may come all the same
	}
	s.have = now
	return done(now)
}

// follow takes events in until done is true of the state, or fails; errGone once the object is gone.
func (s *state[T]) follow(events []kube.Event, done func(T) (bool, error)) (bool, error) {
	for _, e := range events {
		switch now := e.Object.(T); {
		case now.GetUID() != s.have.GetUID() && !s.seen:
			// An earlier one of the name; the cache is not that far yet.
		case now.GetUID() != s.have.GetUID(), e.Gone:
			return false, errGone
		case now.GetGeneration() < s.have.GetGeneration():
			s.seen = true // the cache does not have the last change yet
		default:
			s.seen, s.have = true, now.DeepCopyObject().(T) // the cache's own is everybody's
			if ok, err := done(s.have); ok || err != nil {
				return ok, err
			}
		}
	}
	return false, nil
}

// waitGone waits until an object that is being deleted is gone. A node that cannot is an
// error, but the node goes on trying.
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
