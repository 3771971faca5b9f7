package cluster

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// object is a Volume or a Snapshot.
type object interface {
	client.Object
	Common() *v1alpha1.ObjectStatus
	Node() string
	In() string
	May() *v1alpha1.Intent
	Deleting() bool
}

// event is a change of an object that was watched.
type event struct {
	object client.Object
	gone   bool
}

// watch gets the events of one object from when it was opened.
type watch struct {
	mu     sync.Mutex
	events []event
	signal chan struct{} // there may be events
	close  func()
}

func (w *watch) take() []event {
	w.mu.Lock()
	defer w.mu.Unlock()
	events := w.events
	w.events = nil
	return events
}

// hub hands the events of the cache to those who wait for them. Its zero value is ready.
type hub struct {
	mu      sync.Mutex
	watches map[string]map[*watch]bool
}

func hubKey(o client.Object) string { return fmt.Sprintf("%T/%s", o, o.GetName()) }

// open begins to watch an object, which need not exist.
func (h *hub) open(o client.Object) *watch {
	key := hubKey(o)
	w := &watch{signal: make(chan struct{}, 1)}
	w.close = func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		if delete(h.watches[key], w); len(h.watches[key]) == 0 {
			delete(h.watches, key)
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.watches == nil {
		h.watches = map[string]map[*watch]bool{}
	}
	if h.watches[key] == nil {
		h.watches[key] = map[*watch]bool{}
	}
	h.watches[key][w] = true
	return w
}

func (h *hub) publish(o client.Object, gone bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for w := range h.watches[hubKey(o)] {
		w.mu.Lock()
		w.events = append(w.events, event{o, gone})
		w.mu.Unlock()
		select {
		case w.signal <- struct{}{}:
		default: // it is there already
		}
	}
}

// handler of an informer that publishes, and then calls also.
func (h *hub) handler(also func(o client.Object, gone bool)) cache.ResourceEventHandler {
	handle := func(v any, gone bool) {
		if last, ok := v.(cache.DeletedFinalStateUnknown); ok {
			v = last.Obj
		}
		if o, ok := v.(client.Object); ok {
			h.publish(o, gone)
			if also != nil {
				also(o, gone)
			}
		}
	}
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { handle(o, false) },
		UpdateFunc: func(_, o any) { handle(o, false) },
		DeleteFunc: func(o any) { handle(o, true) },
	}
}

// errGone: the object that was waited for is not there any more.
var errGone = errors.New("it was deleted")

// wait waits for what the node of an object says of it. It returns the first state of
// the object, from have on, for which done is true, or done's error; errGone once the
// object is gone. While its node is not ready, and when the context ends, the error is
// ErrUnavailable: the work may go on. w was opened before have was read or written.
func wait[T object](ctx context.Context, s *Store, w *watch, have T, done func(T) (bool, error)) (T, error) {
	if ok, err := done(have); ok || err != nil {
		return have, err
	}
	node := s.hub.open(nodeNamed(have.Node()))
	defer node.close()
	seen := false
	for {
		if err := s.nodeReady(ctx, have.Node()); err != nil {
			return have, err
		}
		select {
		case <-ctx.Done():
			return have, fmt.Errorf("%w: node %s has not answered yet: %w", errdefs.ErrUnavailable, have.Node(), ctx.Err())
		case <-node.signal:
			node.take()
		case <-s.silence(have.Node()):
		case <-w.signal:
			for _, e := range w.take() {
				switch now := e.object.(T); {
				case now.GetUID() != have.GetUID() && !seen:
					// An earlier one of the name; the cache is not that far yet.
				case now.GetUID() != have.GetUID(), e.gone:
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
func waitGone[T object](ctx context.Context, s *Store, w *watch, o T) error {
	_, err := wait(ctx, s, w, o, func(o T) (bool, error) {
		if going(o) {
			if f := o.Common().Refused(o.GetGeneration()); f != nil {
				return false, errorOf(o.Node(), f)
			}
		}
		return false, nil
	})
	if errors.Is(err, errGone) {
		return nil
	}
	return err
}
