// Package lazy is a pool that is opened when it is there: its disk may come later than the driver, or go and come back.
package lazy

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

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
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

// Pool is a pool whose storage may not be there, or not answer: a disk that is missing, or
// hangs, or has errors, a filesystem that is not mounted yet. Its calls look for it, at most every
// awaitPause and one at a time; until it is there they are errdefs.ErrUnavailable, and its health says why.
type Pool struct {
	name string
	open func(context.Context) (blockdev.Pool, error)

	there atomic.Pointer[present] // nil until it is there

	mu      sync.Mutex
	then    func(context.Context, blockdev.Pool) error
	opened  blockdev.Pool // that is not there yet, as then has to be done
	look    *look
	why     error // of the last look
	looked  time.Time
	closing bool
}

// present is a pool that is there. Who calls it holds users for reading, who closes it for writing.
type present struct {
	pool  blockdev.Pool
	users sync.RWMutex
}

// look is one look for the pool.
type look struct {
	begun time.Time
	ended chan struct{}
	end   context.CancelFunc
}

var _ blockdev.Pool = (*Pool)(nil)

// Open opens a pool, or returns one that looks for it later. It waits for lookTime at the most, and fails only with what does
// not pass: errdefs.ErrInvalid, and errdefs.ErrInUse if another process has the pool.
func Open(ctx context.Context, name string, open func(context.Context) (blockdev.Pool, error)) (blockdev.Pool, error) {
	a := New(name, errors.New("nobody has looked yet"), open)
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

// New returns a pool that is not there, and how to open it; why is what the first
// try said.
func New(name string, why error, open func(context.Context) (blockdev.Pool, error)) *Pool {
	return &Pool{name: name, open: open, why: why, looked: time.Now()}
}

// Then sets what is done with the pool once it is open, before anybody else may use it, and does
// it if the pool is there already. If it fails, the pool is closed again and still awaited. It
// is to be called before the pool is used.
func (a *Pool) Then(ctx context.Context, do func(context.Context, blockdev.Pool) error) {
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

// Unwrap returns the pool that it stands for; nil if that is not there. It does not look for it.
func (a *Pool) Unwrap() blockdev.Pool {
	if there := a.there.Load(); there != nil {
		return there.pool
	}
	return nil
}

// get looks for the pool, if it is not there.
func (a *Pool) get(ctx context.Context) (*present, error) {
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
func (a *Pool) find(ctx context.Context, l *look) {
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
func through[T any](ctx context.Context, a *Pool, call func(blockdev.Pool) (T, error)) (T, error) {
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
func (a *Pool) leave(ctx context.Context, there *present, why error) {
	if l, ok := there.pool.(blockdev.Leaver); !ok || !l.Gone() {
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
func (a *Pool) Name() string { return a.name }

// Granularity is the least that a pool may have, until the pool is there.
func (a *Pool) Granularity() int64 {
	if pool := blockdev.There(a); pool != nil {
		return pool.Granularity()
	}
	return blockdev.Granularity
}

// Create: see Pool.
func (a *Pool) Create(ctx context.Context, spec blockdev.Spec) (blockdev.Record, error) {
	return through(ctx, a, func(p blockdev.Pool) (blockdev.Record, error) { return p.Create(ctx, spec) })
}

// Delete: see Pool.
func (a *Pool) Delete(ctx context.Context, ref blockdev.Ref) error {
	_, err := through(ctx, a, func(p blockdev.Pool) (struct{}, error) { return struct{}{}, p.Delete(ctx, ref) })
	return err
}

// Get: see Pool.
func (a *Pool) Get(ctx context.Context, ref blockdev.Ref) (blockdev.Record, error) {
	return through(ctx, a, func(p blockdev.Pool) (blockdev.Record, error) { return p.Get(ctx, ref) })
}

// List: see Pool.
func (a *Pool) List(ctx context.Context, kind blockdev.Kind, after string, limit int) ([]blockdev.Record, error) {
	return through(ctx, a, func(p blockdev.Pool) ([]blockdev.Record, error) { return p.List(ctx, kind, after, limit) })
}

// SetLabels: see Pool.
func (a *Pool) SetLabels(ctx context.Context, ref blockdev.Ref, change func(map[string]string) error) (blockdev.Record, error) {
	return through(ctx, a, func(p blockdev.Pool) (blockdev.Record, error) { return p.SetLabels(ctx, ref, change) })
}

// Expand: see Pool.
func (a *Pool) Expand(ctx context.Context, ref blockdev.Ref, size int64) (blockdev.Record, error) {
	return through(ctx, a, func(p blockdev.Pool) (blockdev.Record, error) { return p.Expand(ctx, ref, size) })
}

// Attach: see Pool.
func (a *Pool) Attach(ctx context.Context, ref blockdev.Ref, how blockdev.Attachment) (blockdev.Device, error) {
	return through(ctx, a, func(p blockdev.Pool) (blockdev.Device, error) { return p.Attach(ctx, ref, how) })
}

// Attached: see Pool.
func (a *Pool) Attached(ctx context.Context, ref blockdev.Ref) ([]blockdev.Device, error) {
	return through(ctx, a, func(p blockdev.Pool) ([]blockdev.Device, error) { return p.Attached(ctx, ref) })
}

// Detach: see Pool.
func (a *Pool) Detach(ctx context.Context, ref blockdev.Ref) error {
	_, err := through(ctx, a, func(p blockdev.Pool) (struct{}, error) { return struct{}{}, p.Detach(ctx, ref) })
	return err
}

// Capacity: see Pool.
func (a *Pool) Capacity(ctx context.Context) (blockdev.Capacity, error) {
	return through(ctx, a, func(p blockdev.Pool) (blockdev.Capacity, error) { return p.Capacity(ctx) })
}

// Health: see Pool.
func (a *Pool) Health(ctx context.Context, ref blockdev.Ref) ([]blockdev.Problem, error) {
	if _, err := a.get(ctx); err != nil {
		return a.missing(ctx, err), ctx.Err()
	}
	return through(ctx, a, func(p blockdev.Pool) ([]blockdev.Problem, error) { return p.Health(ctx, ref) })
}

// PoolHealth: see Pool.
func (a *Pool) PoolHealth(ctx context.Context) []blockdev.Problem {
	there, err := a.get(ctx)
	if err != nil {
		return a.missing(ctx, err)
	}
	there.users.RLock()
	problems := there.pool.PoolHealth(ctx)
	there.users.RUnlock()
	for _, problem := range problems {
		if problem.Severity == blockdev.Inaccessible {
			a.leave(ctx, there, errors.New(problem.Message))
			break
		}
	}
	return problems
}

func (a *Pool) missing(ctx context.Context, err error) []blockdev.Problem {
	if ctx.Err() != nil {
		return nil
	}
	return []blockdev.Problem{{Severity: blockdev.Inaccessible, Reason: "PoolMissing", Message: err.Error()}}
}

// Orphans: see Pool.
func (a *Pool) Orphans(ctx context.Context) (map[blockdev.Ref][]blockdev.Device, error) {
	return through(ctx, a, func(p blockdev.Pool) (map[blockdev.Ref][]blockdev.Device, error) { return p.Orphans(ctx) })
}

// Close: see Pool. A look that hangs is left behind.
func (a *Pool) Close() error {
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
