package volume

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// holdConsumer is holdBack for an exported volume: the consumer holds back its writes. ErrUnavailable if it does not answer: it may go on to write, and
// what is in its page cache would not be in the copy. That ends with its answer, or with its export; the export of a node that is gone ends with its
// claim.
func (l *Local) holdConsumer(ctx context.Context, o origin, to Grant) (_ context.Context, how hold, release func() error, err error) {
	nothing := func() error { return nil }
	consumers := l.consumers()
	if consumers == nil {
		return ctx, goesOn, nothing, fmt.Errorf("%w: volume %s is exported to %s, which cannot be asked to hold back its writes", errdefs.ErrUnavailable, o.id(), to)
	}
	if err := l.mayFreeze(o.id()); err != nil {
		return ctx, goesOn, nothing, err
	}
	release, err = consumers.Hold(ctx, o.id(), to)
	if err != nil {
		err = fmt.Errorf("volume %s is exported to %s, which has to hold back its writes: %w", o.id(), to, err)
		if errors.Is(err, errdefs.ErrUnavailable) {
			err = fmt.Errorf("%w; if that node is gone for good, taint it node.kubernetes.io/out-of-service: a volume that nobody uses can be copied", err)
		}
		return ctx, goesOn, nothing, err
	}
	if release == nil {
		return l.suspend(ctx, o) // the device that is exported
	}
	ctx, release = l.held(ctx, o, sync.OnceValue(release))
	return ctx, byFrozen, release, nil
}

// holdLonger is how much longer a consumer holds its writes back than a home asks for. So the home gives up first, and then leaves the writers alone for a
// while.
const holdLonger = 1.1

// LongestHold returns the longest time for which Hold holds writes back.
func (l *Local) LongestHold() time.Duration {
	return time.Duration(holdLonger * float64(l.longestFreeze))
}

// Hold freezes, for the home of a volume that this node uses, the filesystem that is mounted here, until release is called. release may be called again,
// and has to be called in any case. After LongestHold the freeze ends by itself. ErrUnavailable from release: writes went on before it was called. release
// is nil if no filesystem is mounted or somebody else froze it: all is written out then, and the home holds back what follows. Hold asks only the kernel,
// as the home may be at work on this volume. The caller has the lock of the volume until release has returned.
func (l *Local) Hold(ctx context.Context, id ID) (release func() error, err error) {
	pool, ref, err := l.object(id, blockdev.Volume)
	if err != nil {
		return nil, err
	}
	stack := l.stacks.Of(pool, ref)
	paths := l.filesystems(ctx, pool, ref)
	if len(paths) == 0 {
		return nil, stack.Flush(ctx)
	}
	if err := l.mayFreeze(id); err != nil {
		return nil, err
	}
	devices, err := stack.Attached(ctx)
	if err != nil {
		return nil, err
	}
	defer l.liftDevices(ctx, id, devices)()
	end, _, err := l.freeze(ctx, id, paths[0])
	if errors.Is(err, errdefs.ErrBusy) {
		return nil, stack.Flush(ctx)
	}
	if err != nil {
		return nil, err
	}
	thaw := sync.OnceValue(func() error { return endFreeze(end, paths[0]) })
	longest := l.LongestHold()
	late := time.AfterFunc(longest, func() { _ = thaw() }) // release returns the error
	return sync.OnceValue(func() error {
		if late.Stop() {
			return thaw()
		}
		return errors.Join(fmt.Errorf("%w: writes to volume %s go on, as they were held back for %s", errdefs.ErrUnavailable, id, longest), thaw())
	}), nil
}
