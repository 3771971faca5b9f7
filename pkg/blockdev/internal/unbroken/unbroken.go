// Package unbroken is for calls of the kernel that no signal breaks off, and that may take long when a disk or the other end of a
// connection does not answer.
package unbroken

import (
	"context"

	"github.com/ashlar-csi/ashlar/internal/turns"
)

// Table has what is under way, by name. Its zero value is ready for use.
type Table struct {
	turns turns.Table[string]
}

// Do does something of a name when nothing else of that name is under way any more. It returns when that is done, or with ctx.Err()
// when ctx ends before: what has begun then goes on to its end, and the next of that name waits for it.
func (t *Table) Do(ctx context.Context, name string, do func() error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	end, err := t.turns.Begin(ctx, name)
	if err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() {
		err := do()
		end()
		ended <- err
	}()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}
