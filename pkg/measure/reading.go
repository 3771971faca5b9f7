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
	// fresh is how long a reading is good enough; after one that took long it is pause times as long as that took, longest at the most.
	fresh time.Duration

	mu    sync.Mutex
	last  T
	known bool
	ended time.Time
	took  time.Duration
	under chan struct{} // closed at the end of the one under way; nil without
	began time.Time     // when that was started
}

const (
	// pause bounds what readings take of the time: a part in so many.
	pause = 20
	// longest is how long a reading is good enough at the most: one may have taken long because a disk hung, and that is over.
	longest = 5 * time.Minute
)

// start starts one, if one is wanted and none is under way. Its work is one of all, which ends with ctx.
func (r *reading[T]) start(ctx context.Context, all *sync.WaitGroup) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.under != nil || ctx.Err() != nil || (r.known && time.Since(r.ended) < min(max(r.fresh, pause*r.took), longest)) {
		return
	}
	done, began := make(chan struct{}), time.Now()
	r.under, r.began = done, began
	all.Go(func() {
		found := r.find(ctx)
		r.mu.Lock()
		defer r.mu.Unlock()
		r.last, r.known, r.ended, r.took, r.under = found, true, time.Now(), time.Since(began), nil
		close(done)
	})
}

// get waits for the one under way, until patience is closed. It returns the last one, known if there is one at all; and for how long
// another one is under way, 0 without.
func (r *reading[T]) get(patience <-chan struct{}) (last T, known bool, busy time.Duration) {
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
	if r.under != nil {
		busy = time.Since(r.began)
	}
	return r.last, r.known, busy
}
