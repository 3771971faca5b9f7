// Package progress keeps a table of objects that are being copied or zeroed: how far each is, and how many bytes were copied in all. The maker of an object
// registers it (Track); the long steps of pools report through their context, and do not know the table.
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

// Table is the objects that are being made. The zero Table is empty and ready for use.
type Table struct {
	mu     sync.Mutex
	items  map[*item]struct{}
	copied map[string]*atomic.Int64 // by pool, in bytes since the start
}

// Copy is one object that is being copied or zeroed. All figures are bytes.
type Copy struct {
	Pool    string
	Subject string // the object, a blockdev.Ref as text
	Done    int64  // of Total, with holes, and with what an earlier try has copied
	Total   int64
	Began   time.Time // when this try began, UTC
}

// item is an object that is being made. total is 0 until its first long step begins.
type item struct {
	pool, subject string
	began         time.Time
	done, total   atomic.Int64
	copied        *atomic.Int64
	logged        atomic.Int64 // when its progress was last logged, in ns since the epoch
}

type contextKey struct{}

// Track registers an object of a pool, and returns the context for making it. end has to be called when it is made, or given up.
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

// Running returns what is being copied or zeroed now, sorted by pool and subject.
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

// Copied returns how many bytes were copied or zeroed in a pool since the start, without holes.
func (t *Table) Copied(pool string) int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	if copied := t.copied[pool]; copied != nil {
		return copied.Load()
	}
	return 0
}

// Begin reports that a long step begins, with done of total bytes in place already. Begin, Add and Skip do nothing for a context that is not from Track.
func Begin(ctx context.Context, done, total int64) {
	if i := of(ctx); i != nil {
		i.done.Store(done)
		i.total.Store(total)
	}
}

// Add reports that n more bytes are copied or zeroed. Every logEvery the progress is logged.
func Add(ctx context.Context, n int64) {
	if i := of(ctx); i != nil {
		i.copied.Add(n)
		i.advance(ctx, n)
	}
}

// Skip reports that n more bytes are in place that needed no work: holes, and shared blocks.
func Skip(ctx context.Context, n int64) {
	if i := of(ctx); i != nil {
		i.advance(ctx, n)
	}
}

func of(ctx context.Context) *item {
	i, _ := ctx.Value(contextKey{}).(*item)
	return i
}

// logEvery is how often the progress of a copy is logged.
const logEvery = 10 * time.Second

func (i *item) advance(ctx context.Context, n int64) {
	done, last, now := i.done.Add(n), i.logged.Load(), time.Now().UnixNano()
	if now-last < int64(logEvery) || !i.logged.CompareAndSwap(last, now) {
		return
	}
	klog.FromContext(ctx).Info("Copying, zeroing or comparing", "pool", i.pool, "object", i.subject, "bytes", done, "of", i.total.Load())
}
