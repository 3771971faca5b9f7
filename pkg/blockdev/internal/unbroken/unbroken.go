// Package unbroken runs calls of the kernel that no signal interrupts, and that may take long when a disk or the other end of a connection does not
// answer.
package unbroken

import (
	"context"

	"github.com/ashlar-csi/ashlar/internal/turns"
)

// Table has the calls that are under way, by name. Its zero value is ready for use.
type Table struct {
	turns turns.Table[string]
}

// Do calls do once no other call of that name is under way, and returns its error. If ctx ends first, it returns ctx.Err(). A do that has begun then goes
// on to its end, and the next call of that name waits for it.
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
