package measure

import (
	"context"
	"sync"
	"time"
)

// reading is something that may take long to find out: a disk may hang. It is found out by one goroutine at a time, and what is
// known for a short time is not looked for again.
type reading[T any] struct {
	find func(ctx context.Context) T
	// fresh is how long a reading is good enough; after one that took long it is pause times as long as that took.
	fresh time.Duration

	mu    sync.Mutex
	last  T
	known bool
	ended time.Time
	took  time.Duration
	under chan struct{} // closed at the end of the one under way; nil without
}

// pause bounds what readings take of the time: a part in so many.
const pause = 20

// start starts one, if one is wanted and none is under way. Its work is one of all, which ends with ctx.
func (r *reading[T]) start(ctx context.Context, all *sync.WaitGroup) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.under != nil || ctx.Err() != nil || (r.known && time.Since(r.ended) < max(r.fresh, pause*r.took)) {
		return
	}
	done, began := make(chan struct{}), time.Now()
	r.under = done
	all.Go(func() {
		found := r.find(ctx)
		r.mu.Lock()
		defer r.mu.Unlock()
		r.last, r.known, r.ended, r.took, r.under = found, true, time.Now(), time.Since(began), nil
		close(done)
	})
}

// get waits for the one under way, until patience is closed. It returns the last one; late if there is a later one under way, known
// if there is one at all.
func (r *reading[T]) get(patience <-chan struct{}) (last T, known, late bool) {
	r.mu.Lock()
	under := r.under
	r.mu.Unlock()
	if under != nil {
		select {
		case <-under:
		case <-patience:
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.last, r.known, r.under != nil
}
