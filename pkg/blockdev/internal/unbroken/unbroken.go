// Package unbroken is for calls of the kernel that no signal breaks off, and that may take long when a disk or the other end of a
// connection does not answer.
package unbroken

import (
	"context"
	"sync"
)

// Table has what is under way, by name. Its zero value is ready for use.
type Table struct {
	mu    sync.Mutex
	names map[string]*turn
}

// turn is whose turn it is of those who do something of one name.
type turn struct {
	taken chan struct{} // has one element while something is under way
	users int           // who waits for it, or has it
}

// Do does something of a name when nothing else of that name is under way any more. It returns when that is done, or with ctx.Err()
// when ctx ends before: what has begun then goes on to its end, and the next of that name waits for it.
func (t *Table) Do(ctx context.Context, name string, do func() error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	turn := t.enter(name)
	select {
	case turn.taken <- struct{}{}:
	case <-ctx.Done():
		t.leave(name, turn)
		return ctx.Err()
	}
	ended := make(chan error, 1)
	go func() {
		err := do()
		<-turn.taken
		t.leave(name, turn)
		ended <- err
	}()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (t *Table) enter(name string) *turn {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.names == nil {
		t.names = map[string]*turn{}
	}
	if t.names[name] == nil {
		t.names[name] = &turn{taken: make(chan struct{}, 1)}
	}
	t.names[name].users++
	return t.names[name]
}

func (t *Table) leave(name string, turn *turn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if turn.users--; turn.users == 0 {
		delete(t.names, name)
	}
}
