// Package turns is a table of mutexes, one for each thing, by its name or address: callers work on a thing one after the other, first come first served.
// The table has no entry for a thing that nobody works on.
package turns

import (
	"context"
	"sync"

	"golang.org/x/sync/semaphore"
)

// Table has the turns of all things. Its zero value is ready for use.
type Table[T comparable] struct {
	mu sync.Mutex
	of map[T]*turn // of things that somebody has the turn of, or waits for
}

type turn struct {
	*semaphore.Weighted
	users int // callers that have the turn or wait for it; guarded by Table.mu
}

// Begin waits for the caller's turn, first come first served. The turn lasts until end is called. The error is that of ctx; then there is no turn to end.
func (t *Table[T]) Begin(ctx context.Context, o T) (end func(), err error) {
	mine := t.join(o)
	if err := mine.Acquire(ctx, 1); err != nil {
		t.leave(o, mine)
		return nil, err
	}
	return func() {
		mine.Release(1)
		t.leave(o, mine)
	}, nil
}

func (t *Table[T]) join(o T) *turn {
	t.mu.Lock()
	defer t.mu.Unlock()
	mine := t.of[o]
	if mine == nil {
		mine = &turn{Weighted: semaphore.NewWeighted(1)}
		if t.of == nil {
			t.of = map[T]*turn{}
		}
		t.of[o] = mine
	}
	mine.users++
	return mine
}

func (t *Table[T]) leave(o T, mine *turn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if mine.users--; mine.users == 0 {
		delete(t.of, o)
	}
}

// Len returns the number of things that somebody has the turn of, or waits for.
func (t *Table[T]) Len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.of)
}
