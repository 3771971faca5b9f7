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

// holdConsumer is quiesce for a volume that is exported. A consumer that does not answer may go on writing at any time, and what its page cache has is not
// in the copy: so there is none before it answers, or its export has ended. That of a node that is gone ends with its claim.
func (l *Local) holdConsumer(ctx context.Context, o origin, to Grant) (_ context.Context, quiesced bool, release func() error, err error) {
	nothing := func() error { return nil }
	consumers := l.consumers()
	if consumers == nil {
		return ctx, false, nothing, fmt.Errorf("%w: volume %s is exported to %s, which cannot be asked to hold back its writes", errdefs.ErrUnavailable, o.id(), to)
	}
	if err := l.mayFreeze(o.id()); err != nil {
		return ctx, false, nothing, err
	}
	release, err = consumers.Hold(ctx, o.id(), to)
	if err != nil {
		err = fmt.Errorf("volume %s is exported to %s, which has to hold back its writes: %w", o.id(), to, err)
		if errors.Is(err, errdefs.ErrUnavailable) {
			err = fmt.Errorf("%w; if that node is gone for good, taint it node.kubernetes.io/out-of-service: a volume that nobody uses can be copied", err)
		}
		return ctx, false, nothing, err
	}
	if release == nil {
		return l.suspend(ctx, o) // the device that is exported
	}
	ctx, release = l.held(ctx, o, sync.OnceValue(release))
	return ctx, true, release, nil
}

// holdLonger: a consumer holds its writes back for a tenth longer than a home asks it to. It is the home that gives up first, and then does not ask
// again for a while.
const holdLonger = 1.1

// LongestHold is for how long Hold holds writes back, at the most.
func (l *Local) LongestHold() time.Duration {
	return time.Duration(holdLonger * float64(l.longestFreeze))
}

// Hold is for the home of a volume that this node uses: it freezes the filesystem that is mounted here until release is called, which may be
// called again, and has to be called in any case. ErrUnavailable from release: writes were not held back until then; they go on by themselves when
// they were held back for longer than they may be. release is nil, and all is written out, where no filesystem is mounted or somebody else froze it:
// the home holds back what comes. Nothing but the kernel is asked, as the home may be at this volume. The caller has the volume for itself until
// release has returned.
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
	late := time.AfterFunc(longest, func() { _ = thaw() }) // release says it
	return sync.OnceValue(func() error {
		if late.Stop() {
			return thaw()
		}
		return errors.Join(fmt.Errorf("%w: writes to volume %s go on, as they were held back for %s", errdefs.ErrUnavailable, id, longest), thaw())
	}), nil
}
