// Package turns has one after another do something to a thing, by its name or address; of things that nobody works on it keeps nothing.
package turns

import (
	"context"
	"sync"

	"golang.org/x/sync/semaphore"
)

// Table has whose turn it is. Its zero value is ready for use.
type Table[T comparable] struct {
	mu sync.Mutex
	of map[T]*turn // of those who have it, or wait
}

type turn struct {
	*semaphore.Weighted
	users int // who has the turn or waits for it; guarded by Table.mu
}

// Begin waits for the caller's turn, which lasts until end. Who came first is first. The error is the context's; then there is nothing to end.
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

// Len is of how many things somebody has the turn, or waits for it.
func (t *Table[T]) Len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.of)
}
