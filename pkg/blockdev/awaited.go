package blockdev

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"
)

// awaitPause is between two looks for a pool that is not there.
const awaitPause = 2 * time.Second

// Awaited is a pool whose storage was not there when the driver started: a disk that is
// missing, a filesystem that is not mounted yet. Its calls look for it, at most every
// awaitPause; until it is there they are ErrUnavailable, and its health says why.
type Awaited struct {
	name string
	open func(context.Context) (Pool, error)
	then func(context.Context, Pool) error

	pool atomic.Pointer[Pool] // nil until it is there

	turn   chan struct{} // of size 1: who has it looks for the pool, and may touch what follows
	why    error
	looked time.Time
}

var _ Pool = (*Awaited)(nil)

// OpenOrAwait is Open, but the pool may be there later than the driver: instead of
// ErrUnavailable it returns an Awaited.
func OpenOrAwait(ctx context.Context, name, location string) (Pool, error) {
	pool, err := Open(ctx, name, location)
	if !errors.Is(err, ErrUnavailable) {
		return pool, err
	}
	return NewAwaited(name, err, func(ctx context.Context) (Pool, error) { return Open(ctx, name, location) }), nil
}

// NewAwaited returns a pool that is not there, and how to open it; why is what the first
// try said.
func NewAwaited(name string, why error, open func(context.Context) (Pool, error)) *Awaited {
	return &Awaited{name: name, open: open, turn: make(chan struct{}, 1), why: why, looked: time.Now()}
}

// Then sets what is done with the pool once it is open, before anybody else may use it. If
// that fails, the pool is closed again and still awaited. It is to be called before the
// pool is used.
func (a *Awaited) Then(do func(context.Context, Pool) error) { a.then = do }

// There returns the pool itself; nil if it is not there. It does not look for it.
func There(p Pool) Pool {
	a, ok := p.(*Awaited)
	if !ok {
		return p
	}
	if pool := a.pool.Load(); pool != nil {
		return *pool
	}
	return nil
}

// As returns a pool as one that can do more (Prover, Suspender, Differ); false if it
// cannot, or is not there.
func As[T any](p Pool) (more T, ok bool) {
	more, ok = There(p).(T)
	return more, ok
}

// get looks for the pool, if it is not there.
func (a *Awaited) get(ctx context.Context) (Pool, error) {
	if pool := There(a); pool != nil {
		return pool, nil
	}
	select {
	case a.turn <- struct{}{}:
		defer func() { <-a.turn }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if pool := There(a); pool != nil {
		return pool, nil
	}
	if time.Since(a.looked) >= awaitPause {
		pool, err := a.open(ctx)
		if err == nil && a.then != nil {
			if err = a.then(ctx, pool); err != nil {
				err = errors.Join(err, pool.Close())
			}
		}
		if ctx.Err() != nil && err != nil { // that says nothing of the pool
			return nil, err
		}
		a.looked = time.Now()
		if err == nil {
			klog.FromContext(ctx).Info("A pool that was missing is there", "pool", a.name)
			a.pool.Store(&pool)
			return pool, nil
		}
		a.why = err
	}
	return nil, fmt.Errorf("%w: pool %s is not there: %s", ErrUnavailable, a.name, a.why.Error())
}

// through is a call of the pool, if it is there.
func through[T any](ctx context.Context, a *Awaited, call func(Pool) (T, error)) (T, error) {
	pool, err := a.get(ctx)
	if err != nil {
		var none T
		return none, err
	}
	return call(pool)
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
	pool, err := a.get(ctx)
	if err != nil {
		return a.missing(ctx, err), ctx.Err()
	}
	return pool.Health(ctx, ref)
}

// PoolHealth: see Pool.
func (a *Awaited) PoolHealth(ctx context.Context) []Problem {
	pool, err := a.get(ctx)
	if err != nil {
		return a.missing(ctx, err)
	}
	return pool.PoolHealth(ctx)
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

// Close: see Pool.
func (a *Awaited) Close() error {
	if pool := There(a); pool != nil {
		return pool.Close()
	}
	return nil
}
