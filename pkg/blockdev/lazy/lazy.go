// Package lazy opens a pool when its storage is there: its disk may come later than the driver, or go and come back.
package lazy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// A disk that does not answer holds up the attempt to open its pool, and no call for longer than this:
const (
	retryInterval = 2 * time.Second  // between two attempts
	openPatience  = 10 * time.Second // how long a call waits for an attempt
	closePatience = time.Second      // how long Close waits for an attempt
)

// Pool is a pool whose storage may not be there, or not answer: a disk that is missing, or hangs, or has errors; a filesystem that is not mounted yet. Its
// calls try to open it, one attempt at a time, and at most one every retryInterval. Until it is open they return errdefs.ErrUnavailable, and its health
// says why.
type Pool struct {
	name string
	open func(context.Context) (blockdev.Pool, error)

	current atomic.Pointer[opened] // nil until it is open

	mu      sync.Mutex
	onOpen  func(context.Context, blockdev.Pool) error
	pending blockdev.Pool // an open pool for which onOpen has to be called first
	attempt *attempt      // the attempt that is under way; nil: none
	why     error         // the error of the last attempt
	tried   time.Time     // when the last attempt ended
	closing bool
}

// opened is a pool that is open. Calls hold users for reading; whoever closes it holds it for writing.
type opened struct {
	pool  blockdev.Pool
	users sync.RWMutex
}

// attempt is one attempt to open the pool.
type attempt struct {
	begun time.Time
	ended chan struct{}
	end   context.CancelFunc
}

var _ blockdev.Pool = (*Pool)(nil)

// Open opens a pool, or returns one that is opened later. It waits for openPatience at most. It fails only with errors that do not pass by themselves:
// errdefs.ErrInvalid, and errdefs.ErrInUse if another process has the pool; or if ctx ends.
func Open(ctx context.Context, name string, open func(context.Context) (blockdev.Pool, error)) (*Pool, error) {
	a := New(name, errors.New("nobody has looked yet"), open)
	a.tried = time.Time{}
	_, err := a.get(ctx)
	a.mu.Lock()
	why := a.why
	a.mu.Unlock()
	if err != nil && (ctx.Err() != nil || lasting(why)) {
		return nil, errors.Join(cmp.Or(ctx.Err(), why), a.Close())
	}
	return a, nil
}

// lasting reports whether an error does not pass by itself.
func lasting(err error) bool {
	return errors.Is(err, errdefs.ErrInvalid) || errors.Is(err, errdefs.ErrInUse)
}

// New returns a pool that is not open yet, and is opened by open; why is the error of the first attempt.
func New(name string, why error, open func(context.Context) (blockdev.Pool, error)) *Pool {
	return &Pool{name: name, open: open, why: why, tried: time.Now()}
}

// OnOpen sets the function that is called with the pool each time that it is opened, before anybody else can use it; if it is open already, that is now.
// If the function fails, the pool is closed again, and opened later. It is called before the pool is used.
func (a *Pool) OnOpen(ctx context.Context, call func(context.Context, blockdev.Pool) error) {
	a.mu.Lock()
	a.onOpen = call
	current := a.current.Swap(nil)
	if current != nil {
		a.pending, a.tried = current.pool, time.Time{}
	}
	a.mu.Unlock()
	if current != nil {
		_, _ = a.get(ctx) // its calls and its health report the error
	}
}

// Unwrap returns the pool itself; nil if it is not open. It does not try to open it.
func (a *Pool) Unwrap() blockdev.Pool {
	if current := a.current.Load(); current != nil {
		return current.pool
	}
	return nil
}

// get returns the open pool. If it is not open, it begins an attempt, or waits for the one that is under way. errdefs.ErrUnavailable if that does not open
// it.
func (a *Pool) get(ctx context.Context) (*opened, error) {
	if current := a.current.Load(); current != nil {
		return current, nil
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	a.mu.Lock()
	if a.attempt == nil && !a.closing && time.Since(a.tried) >= retryInterval {
		opening, end := context.WithCancel(context.WithoutCancel(ctx)) // the attempt goes on if the caller has gone
		a.attempt = &attempt{time.Now(), make(chan struct{}), end}
		go a.try(opening, a.attempt)
	}
	attempt := a.attempt
	a.mu.Unlock()
	if attempt != nil {
		patience := time.NewTimer(openPatience - time.Since(attempt.begun))
		defer patience.Stop()
		select {
		case <-attempt.ended:
		case <-patience.C:
			return nil, fmt.Errorf("%w: pool %s is not there yet: it is being opened since %s; if that does not end, its storage does not answer: look at the kernel's log", errdefs.ErrUnavailable, a.name, attempt.begun.Format(time.RFC3339))
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	if current := a.current.Load(); current != nil {
		return current, nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return nil, fmt.Errorf("%w: pool %s is not there: %s", errdefs.ErrUnavailable, a.name, a.why.Error())
}

// try is one attempt: it opens the pool, and calls onOpen.
func (a *Pool) try(ctx context.Context, attempt *attempt) {
	defer close(attempt.ended)
	defer attempt.end()
	a.mu.Lock()
	pool, onOpen, first := a.pending, a.onOpen, a.tried.IsZero()
	a.pending = nil
	a.mu.Unlock()
	var err error
	if pool == nil {
		pool, err = a.open(ctx)
	}
	if err == nil && onOpen != nil {
		if err = onOpen(ctx, pool); err != nil {
			err = errors.Join(err, pool.Close())
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.attempt, a.tried, a.why = nil, time.Now(), err
	switch {
	case err != nil:
		if first && !lasting(err) {
			klog.FromContext(ctx).Error(err, "A pool is not there; it is opened when it is", "pool", a.name)
		}
	case a.closing:
		_ = pool.Close() // Close was called
	default:
		if !first {
			klog.FromContext(ctx).Info("A pool that was missing is there", "pool", a.name)
		}
		a.current.Store(&opened{pool: pool})
	}
}

// through makes a call of the open pool. If the error may mean that the pool has gone, it looks at that: see discardGone.
func through[T any](ctx context.Context, a *Pool, call func(blockdev.Pool) (T, error)) (T, error) {
	current, err := a.get(ctx)
	if err != nil {
		var none T
		return none, err
	}
	current.users.RLock()
	result, err := call(current.pool)
	current.users.RUnlock()
	if errors.Is(err, errdefs.ErrUnavailable) || errdefs.OfDisk(err) {
		a.discardGone(ctx, current, err)
	}
	return result, err
}

// discardGone gives up a pool that failed, if it says that it has to be opened anew (blockdev.Leaver); the next call opens it. The old one is closed when
// its last call has ended.
func (a *Pool) discardGone(ctx context.Context, current *opened, why error) {
	if leaver, ok := current.pool.(blockdev.Leaver); !ok || !leaver.Gone() {
		return
	}
	a.mu.Lock()
	discarded := !a.closing && a.current.CompareAndSwap(current, nil)
	if discarded {
		a.why, a.tried = why, time.Now().Add(-retryInterval)
	}
	a.mu.Unlock()
	if !discarded {
		return
	}
	log := klog.FromContext(ctx)
	log.Info("A pool has to be opened anew", "pool", a.name, "why", why.Error())
	go func() {
		current.users.Lock()
		defer current.users.Unlock()
		if err := current.pool.Close(); err != nil {
			log.Error(err, "Could not close a pool that is opened anew", "pool", a.name)
		}
	}()
}

// Name of the pool.
func (a *Pool) Name() string { return a.name }

// Granularity: see blockdev.Pool. Until the pool is open, it is the least that a pool may have.
func (a *Pool) Granularity() int64 {
	if pool := blockdev.Unwrap(a); pool != nil {
		return pool.Granularity()
	}
	return blockdev.Granularity
}

// Create: see blockdev.Pool.
func (a *Pool) Create(ctx context.Context, spec blockdev.Spec) (blockdev.Record, error) {
	return through(ctx, a, func(p blockdev.Pool) (blockdev.Record, error) { return p.Create(ctx, spec) })
}

// Delete: see blockdev.Pool.
func (a *Pool) Delete(ctx context.Context, ref blockdev.Ref) error {
	_, err := through(ctx, a, func(p blockdev.Pool) (struct{}, error) { return struct{}{}, p.Delete(ctx, ref) })
	return err
}

// Erase: see blockdev.Pool.
func (a *Pool) Erase(ctx context.Context, ref blockdev.Ref) error {
	_, err := through(ctx, a, func(p blockdev.Pool) (struct{}, error) { return struct{}{}, p.Erase(ctx, ref) })
	return err
}

// Get: see blockdev.Pool.
func (a *Pool) Get(ctx context.Context, ref blockdev.Ref) (blockdev.Record, error) {
	return through(ctx, a, func(p blockdev.Pool) (blockdev.Record, error) { return p.Get(ctx, ref) })
}

// List: see blockdev.Pool.
func (a *Pool) List(ctx context.Context, kind blockdev.Kind, after string, limit int) ([]blockdev.Record, error) {
	return through(ctx, a, func(p blockdev.Pool) ([]blockdev.Record, error) { return p.List(ctx, kind, after, limit) })
}

// SetLabels: see blockdev.Pool.
func (a *Pool) SetLabels(ctx context.Context, ref blockdev.Ref, change func(map[string]string) error) (blockdev.Record, error) {
	return through(ctx, a, func(p blockdev.Pool) (blockdev.Record, error) { return p.SetLabels(ctx, ref, change) })
}

// Expand: see blockdev.Pool.
func (a *Pool) Expand(ctx context.Context, ref blockdev.Ref, size int64) (blockdev.Record, error) {
	return through(ctx, a, func(p blockdev.Pool) (blockdev.Record, error) { return p.Expand(ctx, ref, size) })
}

// Attach: see blockdev.Pool.
func (a *Pool) Attach(ctx context.Context, ref blockdev.Ref, how blockdev.Attachment) (blockdev.Device, error) {
	return through(ctx, a, func(p blockdev.Pool) (blockdev.Device, error) { return p.Attach(ctx, ref, how) })
}

// Attached: see blockdev.Pool.
func (a *Pool) Attached(ctx context.Context, ref blockdev.Ref) ([]blockdev.Device, error) {
	return through(ctx, a, func(p blockdev.Pool) ([]blockdev.Device, error) { return p.Attached(ctx, ref) })
}

// Detach: see blockdev.Pool.
func (a *Pool) Detach(ctx context.Context, ref blockdev.Ref) error {
	_, err := through(ctx, a, func(p blockdev.Pool) (struct{}, error) { return struct{}{}, p.Detach(ctx, ref) })
	return err
}

// Capacity: see blockdev.Pool.
func (a *Pool) Capacity(ctx context.Context) (blockdev.Capacity, error) {
	return through(ctx, a, func(p blockdev.Pool) (blockdev.Capacity, error) { return p.Capacity(ctx) })
}

// Health: see blockdev.Pool.
func (a *Pool) Health(ctx context.Context, ref blockdev.Ref) ([]blockdev.Problem, error) {
	if _, err := a.get(ctx); err != nil {
		return a.missing(ctx, err), ctx.Err()
	}
	return through(ctx, a, func(p blockdev.Pool) ([]blockdev.Problem, error) { return p.Health(ctx, ref) })
}

// PoolHealth: see blockdev.Pool.
func (a *Pool) PoolHealth(ctx context.Context) []blockdev.Problem {
	current, err := a.get(ctx)
	if err != nil {
		return a.missing(ctx, err)
	}
	current.users.RLock()
	problems := current.pool.PoolHealth(ctx)
	current.users.RUnlock()
	for _, problem := range problems {
		if problem.Severity == blockdev.Inaccessible {
			a.discardGone(ctx, current, errors.New(problem.Message))
			break
		}
	}
	return problems
}

// missing returns the health of a pool that is not open.
func (a *Pool) missing(ctx context.Context, err error) []blockdev.Problem {
	if ctx.Err() != nil {
		return nil
	}
	return []blockdev.Problem{{Severity: blockdev.Inaccessible, Reason: "PoolMissing", Message: errdefs.Words(err)}}
}

// Orphans: see blockdev.Pool.
func (a *Pool) Orphans(ctx context.Context) (map[blockdev.Ref][]blockdev.Device, error) {
	return through(ctx, a, func(p blockdev.Pool) (map[blockdev.Ref][]blockdev.Device, error) { return p.Orphans(ctx) })
}

// Close: see blockdev.Pool. It does not wait for an attempt that hangs.
func (a *Pool) Close() error {
	a.mu.Lock()
	a.closing = true
	attempt, current, pool := a.attempt, a.current.Swap(nil), a.pending
	a.pending = nil
	a.mu.Unlock()
	if attempt != nil {
		attempt.end()
		select {
		case <-attempt.ended:
		case <-time.After(closePatience):
		}
	}
	if current != nil {
		pool = current.pool
	}
	if pool == nil {
		return nil
	}
	return pool.Close()
}
