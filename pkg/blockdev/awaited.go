package blockdev

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// awaitPause is between two looks for a pool that is not there; lookTime is how long somebody waits for
// one. A disk that does not answer holds up the look, and nobody else.
const (
	awaitPause = 2 * time.Second
	lookTime   = 10 * time.Second
	// endTime is how long the end of the driver waits for a look.
	endTime = time.Second
)

// Awaited is a pool whose storage may not be there, or not answer: a disk that is missing, or
// hangs, or has errors, a filesystem that is not mounted yet. Its calls look for it, at most every
// awaitPause and one at a time; until it is there they are errdefs.ErrUnavailable, and its health says why.
type Awaited struct {
	name string
	open func(context.Context) (Pool, error)

	there atomic.Pointer[present] // nil until it is there

	mu      sync.Mutex
	then    func(context.Context, Pool) error
	opened  Pool // that is not there yet, as then has to be done
	look    *look
	why     error // of the last look
	looked  time.Time
	closing bool
}

// present is a pool that is there. Who calls it holds users for reading, who closes it for writing.
type present struct {
	pool  Pool
	users sync.RWMutex
}

// leaver is a pool that can find that it has to be let go of and opened anew: what it holds keeps its disk
// from being unmounted and repaired, or is not what is at its place any more.
type leaver interface{ gone() bool }

// look is one look for the pool.
type look struct {
	begun time.Time
	ended chan struct{}
	end   context.CancelFunc
}

var _ Pool = (*Awaited)(nil)

// OpenOrAwait is Open for a pool that may be there later than the driver. It waits for lookTime at the
// most, and fails only with what does not pass: errdefs.ErrInvalid, and errdefs.ErrInUse if another process has the
// pool. known is nil for a caller who remembers no pools.
func OpenOrAwait(ctx context.Context, name, location string, known Known) (Pool, error) {
	a := NewAwaited(name, errors.New("nobody has looked yet"), func(ctx context.Context) (Pool, error) { return openKnown(ctx, name, location, known) })
	a.looked = time.Time{}
	_, err := a.get(ctx)
	a.mu.Lock()
	why := a.why
	a.mu.Unlock()
	if err != nil && (ctx.Err() != nil || lasting(why)) {
		return nil, errors.Join(cmp.Or(ctx.Err(), why), a.Close())
	}
	return a, nil
}

// lasting reports whether an error is one of those that do not pass by themselves.
func lasting(err error) bool {
	return errors.Is(err, errdefs.ErrInvalid) || errors.Is(err, errdefs.ErrInUse)
}

// NewAwaited returns a pool that is not there, and how to open it; why is what the first
// try said.
func NewAwaited(name string, why error, open func(context.Context) (Pool, error)) *Awaited {
	return &Awaited{name: name, open: open, why: why, looked: time.Now()}
}

// Then sets what is done with the pool once it is open, before anybody else may use it, and does
// it if the pool is there already. If it fails, the pool is closed again and still awaited. It
// is to be called before the pool is used.
func (a *Awaited) Then(ctx context.Context, do func(context.Context, Pool) error) {
	a.mu.Lock()
	a.then = do
	there := a.there.Swap(nil)
	if there != nil {
		a.opened, a.looked = there.pool, time.Time{}
	}
	a.mu.Unlock()
	if there != nil {
		_, _ = a.get(ctx) // what is wrong is what its calls and health say
	}
}

// There returns the pool itself; nil if it is not there. It does not look for it.
func There(p Pool) Pool {
	a, ok := p.(*Awaited)
	if !ok {
		return p
	}
	if there := a.there.Load(); there != nil {
		return there.pool
	}
	return nil
}

// As returns a pool as one that can do more (Identified, Prover, Suspender, Differ); false if it
// cannot, or is not there.
func As[T any](p Pool) (more T, ok bool) {
	more, ok = There(p).(T)
	return more, ok
}

// get looks for the pool, if it is not there.
func (a *Awaited) get(ctx context.Context) (*present, error) {
	if there := a.there.Load(); there != nil {
		return there, nil
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	a.mu.Lock()
	if a.look == nil && !a.closing && time.Since(a.looked) >= awaitPause {
		looking, end := context.WithCancel(context.WithoutCancel(ctx)) // that the caller has gone says nothing of the pool
		a.look = &look{time.Now(), make(chan struct{}), end}
		go a.find(looking, a.look)
	}
	l := a.look
	a.mu.Unlock()
	if l != nil {
		patience := time.NewTimer(lookTime - time.Since(l.begun))
		defer patience.Stop()
		select {
		case <-l.ended:
		case <-patience.C:
			return nil, fmt.Errorf("%w: pool %s is not there: its storage does not answer since %s; look at the kernel's log", errdefs.ErrUnavailable, a.name, l.begun.Format(time.RFC3339))
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	if there := a.there.Load(); there != nil {
		return there, nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return nil, fmt.Errorf("%w: pool %s is not there: %s", errdefs.ErrUnavailable, a.name, a.why.Error())
}

// find opens the pool, and has done what comes first.
func (a *Awaited) find(ctx context.Context, l *look) {
	defer close(l.ended)
	defer l.end()
	a.mu.Lock()
	pool, then, first := a.opened, a.then, a.looked.IsZero()
	a.opened = nil
	a.mu.Unlock()
	var err error
	if pool == nil {
		pool, err = a.open(ctx)
	}
	if err == nil && then != nil {
		if err = then(ctx, pool); err != nil {
			err = errors.Join(err, pool.Close())
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.look, a.looked, a.why = nil, time.Now(), err
	switch {
	case err != nil:
		if first && !lasting(err) {
			klog.FromContext(ctx).Error(err, "A pool is not there; it is awaited", "pool", a.name)
		}
	case a.closing:
		_ = pool.Close() // nobody asks any more
	default:
		if !first {
			klog.FromContext(ctx).Info("A pool that was missing is there", "pool", a.name)
		}
		a.there.Store(&present{pool: pool})
	}
}

// through is a call of the pool, if it is there.
func through[T any](ctx context.Context, a *Awaited, call func(Pool) (T, error)) (T, error) {
	there, err := a.get(ctx)
	if err != nil {
		var none T
		return none, err
	}
	there.users.RLock()
	result, err := call(there.pool)
	there.users.RUnlock()
	if errors.Is(err, errdefs.ErrUnavailable) || errors.Is(err, unix.EIO) {
		a.leave(ctx, there, err)
	}
	return result, err
}

// leave lets go of a pool that failed, if it says that it has to be opened anew; the next call looks for
// it. It is closed when its last call has ended.
func (a *Awaited) leave(ctx context.Context, there *present, why error) {
	if l, ok := there.pool.(leaver); !ok || !l.gone() {
		return
	}
	a.mu.Lock()
	left := !a.closing && a.there.CompareAndSwap(there, nil)
	if left {
		a.why, a.looked = why, time.Now().Add(-awaitPause)
	}
	a.mu.Unlock()
	if !left {
		return
	}
	log := klog.FromContext(ctx)
	log.Info("A pool has to be opened anew", "pool", a.name, "why", why.Error())
	go func() {
		there.users.Lock()
		defer there.users.Unlock()
		if err := there.pool.Close(); err != nil {
			log.Error(err, "Could not close a pool that is opened anew", "pool", a.name)
		}
	}()
}

// Name of the pool.
func (a *Awaited) Name() string { return a.name }

// Granularity is the least that a pool may have, until the pool is there.
func (a *Awaited) Granularity() int64 {
	if pool := There(a); pool != nil {
		return pool.Granularity()
	}
	return Granularity
}

// Create: see Pool.
func (a *Awaited) Create(ctx context.Context, spec Spec) (Record, error) {
	return through(ctx, a, func(p Pool) (Record, error) { return p.Create(ctx, spec) })
}

// Delete: see Pool.
func (a *Awaited) Delete(ctx context.Context, ref Ref) error {
	_, err := through(ctx, a, func(p Pool) (struct{}, error) { return struct{}{}, p.Delete(ctx, ref) })
	return err
}

// Get: see Pool.
func (a *Awaited) Get(ctx context.Context, ref Ref) (Record, error) {
	return through(ctx, a, func(p Pool) (Record, error) { return p.Get(ctx, ref) })
}

// List: see Pool.
func (a *Awaited) List(ctx context.Context, kind Kind, after string, limit int) ([]Record, error) {
	return through(ctx, a, func(p Pool) ([]Record, error) { return p.List(ctx, kind, after, limit) })
}

// SetLabels: see Pool.
func (a *Awaited) SetLabels(ctx context.Context, ref Ref, change func(map[string]string) error) (Record, error) {
	return through(ctx, a, func(p Pool) (Record, error) { return p.SetLabels(ctx, ref, change) })
}

// Expand: see Pool.
func (a *Awaited) Expand(ctx context.Context, ref Ref, size int64) (Record, error) {
	return through(ctx, a, func(p Pool) (Record, error) { return p.Expand(ctx, ref, size) })
}

// Attach: see Pool.
func (a *Awaited) Attach(ctx context.Context, ref Ref, how Attachment) (Device, error) {
	return through(ctx, a, func(p Pool) (Device, error) { return p.Attach(ctx, ref, how) })
}

// Attached: see Pool.
func (a *Awaited) Attached(ctx context.Context, ref Ref) ([]Device, error) {
	return through(ctx, a, func(p Pool) ([]Device, error) { return p.Attached(ctx, ref) })
}

// Detach: see Pool.
func (a *Awaited) Detach(ctx context.Context, ref Ref) error {
	_, err := through(ctx, a, func(p Pool) (struct{}, error) { return struct{}{}, p.Detach(ctx, ref) })
	return err
}

// Capacity: see Pool.
func (a *Awaited) Capacity(ctx context.Context) (Capacity, error) {
	return through(ctx, a, func(p Pool) (Capacity, error) { return p.Capacity(ctx) })
}

// Health: see Pool.
func (a *Awaited) Health(ctx context.Context, ref Ref) ([]Problem, error) {
	if _, err := a.get(ctx); err != nil {
		return a.missing(ctx, err), ctx.Err()
	}
	return through(ctx, a, func(p Pool) ([]Problem, error) { return p.Health(ctx, ref) })
}

// PoolHealth: see Pool.
func (a *Awaited) PoolHealth(ctx context.Context) []Problem {
	there, err := a.get(ctx)
	if err != nil {
		return a.missing(ctx, err)
	}
	there.users.RLock()
	problems := there.pool.PoolHealth(ctx)
	there.users.RUnlock()
	for _, problem := range problems {
		if problem.Severity == Inaccessible {
			a.leave(ctx, there, errors.New(problem.Message))
			break
		}
	}
	return problems
}

func (a *Awaited) missing(ctx context.Context, err error) []Problem {
	if ctx.Err() != nil {
		return nil
	}
	return []Problem{{Inaccessible, "PoolMissing", err.Error()}}
}

// Orphans: see Pool.
func (a *Awaited) Orphans(ctx context.Context) (map[Ref][]Device, error) {
	return through(ctx, a, func(p Pool) (map[Ref][]Device, error) { return p.Orphans(ctx) })
}

// Close: see Pool. A look that hangs is left behind.
func (a *Awaited) Close() error {
	a.mu.Lock()
	a.closing = true
	l, there, opened := a.look, a.there.Swap(nil), a.opened
	a.opened = nil
	a.mu.Unlock()
	if l != nil {
		l.end()
		select {
		case <-l.ended:
		case <-time.After(endTime):
		}
	}
	if there != nil {
		opened = there.pool
	}
	if opened == nil {
		return nil
	}
	return opened.Close()
}
