// Package progress is a table of what is being copied or zeroed: how far each is, and how much was done in all. Who makes an
// object says so (Track), and the pools' long steps report to it through their context; they need not know who is looking.
package progress

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"
)

// Table is what is being made at the moment. The zero Table is empty and ready to use.
type Table struct {
	mu     sync.Mutex
	items  map[*item]struct{}
	copied map[string]*atomic.Int64 // by pool; never goes down
}

// Copy is one object that is being copied or zeroed. All figures are bytes.
type Copy struct {
	Pool    string
	Subject string // the object: a blockdev.Ref, as text
	Done    int64  // of Total; holes, and what an earlier try has done, included
	Total   int64
	Began   time.Time // this try, UTC
}

// item is one object that is being made. Until its first long step begins there is nothing to tell of it (total is 0).
type item struct {
	pool, subject string
	began         time.Time
	done, total   atomic.Int64
	copied        *atomic.Int64
	logged        atomic.Int64 // when, in ns since the epoch
}

type contextKey struct{}

// Track returns the context for what makes an object of a pool. end is to be called when it is made, or was given up.
func (t *Table) Track(ctx context.Context, pool, subject string) (_ context.Context, end func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.items == nil {
		t.items, t.copied = map[*item]struct{}{}, map[string]*atomic.Int64{}
	}
	if t.copied[pool] == nil {
		t.copied[pool] = &atomic.Int64{}
	}
	i := &item{pool: pool, subject: subject, began: time.Now(), copied: t.copied[pool]}
	i.logged.Store(i.began.UnixNano())
	t.items[i] = struct{}{}
	return context.WithValue(ctx, contextKey{}, i), func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(t.items, i)
	}
}

// Running returns what is being copied or zeroed now, by pool and subject.
func (t *Table) Running() []Copy {
	t.mu.Lock()
	defer t.mu.Unlock()
	copies := make([]Copy, 0, len(t.items))
	for i := range t.items {
		if total := i.total.Load(); total > 0 {
			copies = append(copies, Copy{Pool: i.pool, Subject: i.subject, Done: min(i.done.Load(), total), Total: total, Began: i.began.UTC()})
		}
	}
	slices.SortFunc(copies, func(a, b Copy) int { return cmp.Or(cmp.Compare(a.Pool, b.Pool), cmp.Compare(a.Subject, b.Subject)) })
	return copies
}

// Find returns the copy of an object of a pool; false if nothing is being copied or zeroed for it.
func (t *Table) Find(pool, subject string) (Copy, bool) {
	for _, c := range t.Running() {
		if c.Pool == pool && c.Subject == subject {
			return c, true
		}
	}
	return Copy{}, false
}

// Copied is how many bytes were copied or zeroed in a pool since the start, without holes.
func (t *Table) Copied(pool string) int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	if copied := t.copied[pool]; copied != nil {
		return copied.Load()
	}
	return 0
}

// Begin says that a long step begins: so many bytes are there already, of so many. Without Track nobody hears of it; the same is
// true of Add and Skip.
func Begin(ctx context.Context, done, total int64) {
	if i := of(ctx); i != nil {
		i.done.Store(done)
		i.total.Store(total)
	}
}

// Add says that so many more bytes are copied or zeroed. It says so in the log too, now and then.
func Add(ctx context.Context, n int64) {
	if i := of(ctx); i != nil {
		i.copied.Add(n)
		i.advance(ctx, n)
	}
}

// Skip says that so many more bytes are in place that took no work: holes, and blocks that are shared.
func Skip(ctx context.Context, n int64) {
	if i := of(ctx); i != nil {
		i.advance(ctx, n)
	}
}

func of(ctx context.Context) *item {
	i, _ := ctx.Value(contextKey{}).(*item)
	return i
}

// logEvery is how often the log says how far a copy is.
const logEvery = 10 * time.Second

func (i *item) advance(ctx context.Context, n int64) {
	done, last, now := i.done.Add(n), i.logged.Load(), time.Now().UnixNano()
	if now-last < int64(logEvery) || !i.logged.CompareAndSwap(last, now) {
		return
	}
	klog.FromContext(ctx).Info("Copying, zeroing or comparing", "pool", i.pool, "object", i.subject, "bytes", done, "of", i.total.Load())
}
