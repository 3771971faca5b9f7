package kube

import (
	"fmt"
	"sync"

	"k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Event is a change of an object that is watched.
type Event struct {
	Object client.Object // its state afterwards, or its last one; shared with the cache, and not to be changed
	Gone   bool          // it was deleted
}

// Watch gets the events of some objects from when it was opened until it is closed.
type Watch struct {
	// Signal receives when there may be events to take.
	Signal <-chan struct{}
	// Close ends the watch.
	Close func()

	signal chan struct{}
	mu     sync.Mutex
	events []Event
}

// Take returns the events since it was last called.
func (w *Watch) Take() []Event {
	w.mu.Lock()
	defer w.mu.Unlock()
	events := w.events
	w.events = nil
	return events
}

// Hub hands the events of the cache to watches. Its zero value is ready.
type Hub struct {
	mu      sync.Mutex
	watches map[string]map[*Watch]bool
}

func hubKey(o client.Object) string { return fmt.Sprintf("%T/%s", o, o.GetName()) }

// Open begins to watch objects, which need not exist.
func (h *Hub) Open(objects ...client.Object) *Watch {
	signal := make(chan struct{}, 1)
	w := &Watch{Signal: signal, signal: signal}
	w.Close = func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		for _, o := range objects {
			key := hubKey(o)
			if delete(h.watches[key], w); len(h.watches[key]) == 0 {
				delete(h.watches, key)
			}
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.watches == nil {
		h.watches = map[string]map[*Watch]bool{}
	}
	for _, o := range objects {
		key := hubKey(o)
		if h.watches[key] == nil {
			h.watches[key] = map[*Watch]bool{}
		}
		h.watches[key][w] = true
	}
	return w
}

func (h *Hub) publish(o client.Object, gone bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for w := range h.watches[hubKey(o)] {
		w.mu.Lock()
		w.events = append(w.events, Event{o, gone})
		w.mu.Unlock()
		select {
		case w.signal <- struct{}{}:
		default: // it is signalled already
		}
	}
}

// Handler returns the handler of an informer that publishes its events, and then calls also, if that is not nil, with
// each object and whether it is gone.
func (h *Hub) Handler(also func(o client.Object, gone bool)) cache.ResourceEventHandler {
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
