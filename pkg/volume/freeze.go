package volume

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ashlar-csi/ashlar/internal/trace"
	"github.com/ashlar-csi/ashlar/internal/undoing"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/metrics"
	"github.com/ashlar-csi/ashlar/pkg/mount"
)

func setFrozen(ctx context.Context, pool blockdev.Pool, ref blockdev.Ref, value string) error {
	return changeLabel(ctx, pool, ref, labelFrozen, value)
}

// filesystems returns the directories at which the filesystem of an object is mounted. Other binds of it (of a subpath) are left out: to open one may
// block.
func (l *Local) filesystems(ctx context.Context, pool blockdev.Pool, ref blockdev.Ref) []string {
	devices, err := l.stacks.Of(pool, ref).Attached(ctx)
	if err != nil {
		return nil
	}
	var paths []string
	for _, device := range devices {
		for _, path := range l.mounts.Paths(device.Number) {
			if info, err := mount.At(path); err == nil && info.Directory {
				paths = append(paths, path)
			}
		}
	}
	return paths
}

// A filesystem that stays frozen is as good as lost to its user. So a thaw that fails is tried again, thawTries times.
const (
	thawTries = 10
	thawPause = 100 * time.Millisecond
)

// hold is what keeps writes from an origin that is copied.
type hold int

const (
	goesOn      hold = iota // nothing does
	bySuspended             // the origin's devices here are suspended
	byFrozen                // the filesystem is frozen, where it is mounted
)

// quiesce is holdBack, and makes sure that a leg has all that was acknowledged: it has to be current after the writes are held back; all the time until thaw,
// if they go on, or if it is only the leg that takes none: once that is off the list, its volume goes on without it. ErrNotCurrent, also from thaw, if it is
// not.
func (l *Local) quiesce(ctx context.Context, o origin) (_ context.Context, quiesced bool, thaw func() error, err error) {
	ctx, how, thaw, err := l.holdBack(ctx, o)
	quiesced = how != goesOn
	if err != nil || l.lists == nil || o.record.Labels[labelReplicaOf] == "" {
		return ctx, quiesced, thaw, err
	}
	list, err := l.listOf(ctx, o)
	if err != nil {
		return ctx, false, func() error { return nil }, errors.Join(err, thaw())
	}
	if how == byFrozen {
		return ctx, true, thaw, nil
	}
	end := thaw
	return ctx, quiesced, sync.OnceValue(func() error {
		if err := end(); err != nil {
			return err
		}
		now, err := l.listOf(context.WithoutCancel(ctx), o)
		if err == nil && now != list {
			err = fmt.Errorf("copy leg %s, which was not current all the time meanwhile: %w", o.id(), ErrNotCurrent)
		}
		return err
	}), nil
}

// listTime is how long the cluster may take to say whether a leg is current: writers may wait meanwhile.
const listTime = 5 * time.Second

// listOf returns the number of the list of current legs that a leg is on: see Lists. ErrNotCurrent as well if its record shows that it is an older copy, as its
// disk was put back; and if its machine has lost power while its volume was used, and it is not alone on the list: it may lack what was acknowledged, and who
// uses the volume next takes another leg.
func (l *Local) listOf(ctx context.Context, o origin) (list int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, listTime)
	defer cancel()
	on, err := l.lists.ListOf(ctx, o.record.Labels[labelReplicaOf], o.record.Key)
	if err != nil {
		return 0, err
	}
	r, err := o.pool.Get(ctx, o.record.Ref) // after the list: it knows of that
	if err != nil {
		return 0, err
	}
	how, _ := l.exporting()
	leg := Leg{Now: how.Boot}
	leg.LegState, err = legStateOf(r)
	switch {
	case err != nil:
	case leg.IsOlder(on), on.Closed && on.Sound > 0 && !leg.Closed: // or it is being opened at this moment
		err = fmt.Errorf("copy leg %s, which is an older copy, by its record (claim %d, list %d), or is being opened; its volume was used by claim %d, and has list %d; use the volume once, and the leg is copied anew: %w", o.id(), leg.Sound, leg.Knows(), on.Sound, on.Number, ErrNotCurrent)
	case on.Legs > 1 && leg.LostPower():
		err = fmt.Errorf("copy leg %s, whose machine has started anew since its volume was used, or whose disk could not be flushed, so that it may lack what was not flushed; use the volume once, or make a snapshot of it, which is taken of another leg if the machine of one has not: %w", o.id(), ErrNotCurrent)
	}
	return on.Number, err
}

// holdBack holds back the writes to an origin until thaw is called, which may be called again. It freezes the filesystem if one is mounted. Otherwise, or
// if somebody else froze that, it suspends the devices, if the pool copies at once. how is goesOn if writes may go on; somebody else may end their own
// freeze at any time. The context that it returns is for what is done meanwhile: see held. ErrUnavailable from thaw: writes went on before it, so what was
// copied is of no point in time.
//
// The writes to an exported volume are held back by its consumer. Those to a leg are held back by the consumer of its volume, which may be this node.
func (l *Local) holdBack(ctx context.Context, o origin) (_ context.Context, how hold, thaw func() error, err error) {
	nothing := func() error { return nil }
	if e, is, err := exportOf(o.record); err != nil {
		return ctx, goesOn, nothing, err
	} else if is {
		return l.holdConsumer(ctx, o, e.Grant)
	}
	paths := l.filesystems(ctx, o.pool, o.record.Ref)
	if len(paths) == 0 && o.record.Labels[labelReplicaOf] != "" && l.consumers() != nil { // a leg that is attached here is below the mirror of its volume, unless it was mounted before the volume had a mirror
		if devices, err := l.stacks.Of(o.pool, o.record.Ref).Attached(ctx); err != nil || len(devices) > 0 {
			if err != nil {
				return ctx, goesOn, nothing, err
			}
			return l.holdConsumer(ctx, o, Grant{Node: l.node})
		}
	}
	defer l.lift(ctx, o)()
	if len(paths) == 0 {
		return l.suspend(ctx, o)
	}
	if err := l.mayFreeze(o.id()); err != nil {
		return ctx, goesOn, nothing, err
	}
	// A freeze outlives its process, so the record comes first: the next start ends it.
	if err := setFrozen(ctx, o.pool, o.record.Ref, "true"); err != nil {
		return ctx, goesOn, nothing, err
	}
	unmark := func() error { // also when the caller's time is over
		ctx, cancel := undoing.Context(ctx)
		defer cancel()
		return setFrozen(ctx, o.pool, o.record.Ref, "")
	}
	// All paths show the one filesystem of the volume's device.
	end, pending, err := l.freeze(ctx, o.id(), paths[0])
	switch {
	case errors.Is(err, errdefs.ErrBusy):
		if err := unmark(); err != nil {
			return ctx, goesOn, nothing, err
		}
		return l.suspend(ctx, o)
	case pending: // the filesystem may still become frozen
		return ctx, goesOn, nothing, err
	case err != nil:
		return ctx, goesOn, nothing, errors.Join(err, unmark())
	}
	ctx, thaw = l.held(ctx, o, sync.OnceValue(func() error {
		err := endFreeze(end, paths[0])
		if err != nil && !errors.Is(err, errdefs.ErrUnavailable) {
			return err // the next start tries again
		}
		return errors.Join(err, unmark())
	}))
	return ctx, byFrozen, thaw, nil
}

// suspend is holdBack for a volume that has no filesystem mounted, or one that somebody else froze.
func (l *Local) suspend(ctx context.Context, o origin) (_ context.Context, how hold, resume func() error, err error) {
	nothing := func() error { return nil }
	stack := l.stacks.Of(o.pool, o.record.Ref)
	if cutter, ok := blockdev.As[blockdev.Cutter](o.pool); !ok || !cutter.CutsAtOnce(o.record.Ref) {
		return ctx, goesOn, nothing, stack.Flush(ctx)
	}
	if err := l.mayFreeze(o.id()); err != nil {
		return ctx, goesOn, nothing, err
	}
	if resume, err = stack.Suspend(ctx); err != nil || resume == nil {
		return ctx, goesOn, nothing, err
	}
	ctx, resume = l.held(ctx, o, resume)
	return ctx, bySuspended, resume, nil
}

// endFreeze calls end, which filesystem.Freeze returned for a path. If that fails it thaws again, thawTries times.
func endFreeze(end func() error, path string) error {
	err := end()
	for try := 0; err != nil && !errors.Is(err, errdefs.ErrUnavailable) && try < thawTries; try++ {
		time.Sleep(thawPause)
		err = filesystem.Thaw(path)
	}
	return err
}

// freezeTime is how long freeze waits for the kernel.
const freezeTime = time.Minute

// freeze is filesystem.Freeze for a volume, for freezeTime at most. pending: the time is over and the kernel has not finished. The freeze is then ended as
// soon as it begins. Until that mayFreeze refuses others, and the mark in the record stays until the next copy or start.
func (l *Local) freeze(ctx context.Context, id ID, path string) (_ func() error, pending bool, _ error) {
	ctx, cancel := context.WithTimeoutCause(ctx, freezeTime, errdefs.ErrUnavailable)
	defer cancel()
	end, err := filesystem.Freeze(ctx, path)
	if err == nil || end == nil {
		return end, false, err
	}
	l.setFreezing(id, true)
	go func() {
		_ = endFreeze(end, path) // the next start tries again
		l.setFreezing(id, false)
	}()
	return nil, true, fmt.Errorf("%w: %s", err, stuck(id))
}

func stuck(id ID) string {
	return fmt.Sprintf("a write to the filesystem of volume %s has begun and does not end, and nothing can be frozen before that; end the pod that writes, or all that use it", id)
}

func (l *Local) setFreezing(id ID, freezing bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if freezing {
		l.freezing[id] = true
	} else {
		delete(l.freezing, id)
	}
}

// held returns the context for what is done while the writes to an origin are held back, and what releases them. After longestFreeze the context ends: see
// freezeError. After a release it does not.
func (l *Local) held(ctx context.Context, o origin, release func() error) (context.Context, func() error) {
	ctx, cancel := context.WithCancelCause(ctx)
	id, longest, began := o.id(), l.longestFreeze, time.Now()
	now, together := ctx.Value(cuttingKey{}).(*atomic.Pointer[ID])
	_, span := trace.Start(ctx, "hold writes back", "object", o.record.Ref.String())
	observe := sync.OnceFunc(func() { metrics.FreezeSeconds.Observe(time.Since(began), l.node); span(nil) })
	timer := time.AfterFunc(longest, func() {
		slow := held{id, together}
		if together {
			slow.id = *now.Load()
		}
		l.mu.Lock()
		l.tooLong[slow] = time.Now()
		l.mu.Unlock()
		cancel(slow.tooLong(longest))
	})
	return ctx, func() error {
		timer.Stop()
		defer observe()
		return release()
	}
}

// restFactor is for how many times longestFreeze writers are left alone after they were held back that long in vain. Whoever asks for a copy asks again
// and again.
const restFactor = 10

// mayFreeze returns ErrPrecondition if the writers of a volume were lately held back for longestFreeze in vain, and ErrUnavailable if an earlier freeze is
// pending.
func (l *Local) mayFreeze(id ID) error {
	if err := l.wasTooLong(held{id: id}); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.freezing[id] {
		return fmt.Errorf("%w: %s", errdefs.ErrUnavailable, stuck(id))
	}
	return nil
}

// mayHoldWith returns ErrPrecondition if the writers of a group were lately held back for longestFreeze in vain, because of this member.
func (l *Local) mayHoldWith(id ID) error { return l.wasTooLong(held{id, true}) }

// wasTooLong returns h.tooLong if that was within the time for which writers are left alone.
func (l *Local) wasTooLong(h held) error {
	rest := restFactor * l.longestFreeze
	l.mu.Lock()
	defer l.mu.Unlock()
	for one, at := range l.tooLong {
		if time.Since(at) > rest {
			delete(l.tooLong, one)
		}
	}
	if _, known := l.tooLong[h]; known {
		return h.tooLong(l.longestFreeze)
	}
	return nil
}

// held is a volume whose copy writers were held back for: its own, or together those of all members of a group.
type held struct {
	id       ID
	together bool
}

// tooLong is the error of a copy for which writers were held back for too long.
func (h held) tooLong(longest time.Duration) error {
	if h.together {
		return fmt.Errorf("%w: the writers to all volumes of the group are held back meanwhile, and for that volume %s takes longer than the %s for which they may be; "+
			"stop the pods that use the volumes of the group until it is cut, or keep them in pools that copy in an instant (XFS, btrfs, LVM)", errdefs.ErrPrecondition, h.id, longest)
	}
	return fmt.Errorf("%w: volume %s is in use, and its pool cannot copy it within the %s for which its writers may be held back; "+
		"stop the pods that use it until it is copied, or keep it in a pool that copies in an instant (XFS, btrfs, LVM)", errdefs.ErrPrecondition, h.id, longest)
}

// cuttingKey is the key of the context's value that withCutting sets.
type cuttingKey struct{}

// withCutting returns the context for a group that is cut, and what has to have the member that is being worked on before the writers of one are held back:
// if they are for too long, it is because of that one (held).
func withCutting(ctx context.Context) (context.Context, *atomic.Pointer[ID]) {
	now := &atomic.Pointer[ID]{}
	return context.WithValue(ctx, cuttingKey{}, now), now
}

// freezeError returns the error of work with a context of held: why that has ended, if writers were held back for too long; else err.
func freezeError(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); err != nil && errors.Is(cause, errdefs.ErrPrecondition) {
		return cause
	}
	return err
}

// withThaw joins the error of a copy and that of a thaw, unless the first contains the second.
func withThaw(err, thaw error) error {
	if errors.Is(err, thaw) {
		return err
	}
	return errors.Join(err, thaw)
}
