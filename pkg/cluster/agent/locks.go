package agent

import (
	"context"
	"errors"
	"fmt"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// withLocks works on the volumes of the node with the locks that its CSI calls take, each for itself;
// ErrBusy if it cannot have them. What is only looked at or written down needs none, and
// takes none: a call that comes because of what was written must not find it locked.
func (a *Agent) withLocks(locks []string, work func() error) error {
	unlock, busy := a.options.Locks.TryLock(locks, nil)
	if unlock == nil {
		return fmt.Errorf("%w on %s", errdefs.ErrBusy, busy)
	}
	defer unlock()
	return work()
}

// errGaveWay ends a copy that goes on later.
var errGaveWay = fmt.Errorf("%w: a call needs what is being copied", errdefs.ErrBusy)

// withYieldingLocks is withLocks for what may last. A copy of a volume gives way when somebody needs the
// volume: nobody waits for hours to stage or unstage it. How much of the copy stays is the
// pool's business.
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
