package agent

import (
	"context"
	"errors"
	"fmt"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// withLocks calls work with exclusive locks of the table that the node's CSI calls use; ErrBusy if one of them is held. A look or a report alone takes no
// lock, so that a CSI call which follows on what was written is not refused as busy.
func (a *Agent) withLocks(locks []string, work func() error) error {
	unlock, busy := a.options.Locks.TryLock(locks, nil)
	if unlock == nil {
		return fmt.Errorf("%w on %s", errdefs.ErrBusy, busy)
	}
	defer unlock()
	return work()
}

// errGaveWay is the error of a copy that was ended for a call, and goes on later.
var errGaveWay = fmt.Errorf("%w: a call needs what is being copied", errdefs.ErrBusy)

// withYieldingLocks is withLocks for work that may take hours. When a call wants one of the locks, the context of work ends, and the error is errGaveWay.
// How much of a copy stays for the next try, the pool decides.
func (a *Agent) withYieldingLocks(ctx context.Context, exclusive, shared []string, work func(context.Context) error) error {
	unlock, wanted, busy := a.options.Locks.TryYielding(exclusive, shared)
	if unlock == nil {
		return fmt.Errorf("%w on %s", errdefs.ErrBusy, busy)
	}
	defer unlock()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-wanted:
			cancel(errGaveWay)
		case <-ctx.Done():
		}
	}()
	err := work(ctx)
	if err != nil && errors.Is(context.Cause(ctx), errGaveWay) {
		return errGaveWay
	}
	return err
}
