package agent

import (
	"context"
	"sync"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/mirror"
)

// maxJoins is how many legs are resynchronised at once on a node: each slows the others down, and none is useful before it is complete.
const maxJoins = 2

// joinSlots bounds for how many volumes a leg joins at once. Those with the fewest current legs come first.
type joinSlots struct {
	mu      sync.Mutex
	joining map[blockdev.Ref]bool
	waiting map[blockdev.Ref]waiter
}

// waiter is a volume that waits for a slot.
type waiter struct {
	current int       // current legs
	at      time.Time // when it asked last
}

// acquire takes a slot for a volume until it is set free (set), and reports whether the volume has one. Whoever has none asks again before stale is over, or
// is forgotten.
func (t *joinSlots) acquire(ref blockdev.Ref, current int, now time.Time, stale time.Duration) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.joining[ref] {
		return true
	}
	t.init()
	t.waiting[ref] = waiter{current, now}
	before := len(t.joining)
	for other, w := range t.waiting {
		if now.Sub(w.at) > stale {
			delete(t.waiting, other)
		} else if other != ref && w.current < current {
			before++
		}
	}
	if before >= maxJoins {
		return false
	}
	t.occupy(ref)
	return true
}

// set says whether a leg of a volume joins: one that an earlier process began to join has a slot too.
func (t *joinSlots) set(ref blockdev.Ref, joins bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !joins {
		delete(t.joining, ref)
		return
	}
	t.init()
	t.occupy(ref)
}

// init makes the maps. The caller has the lock.
func (t *joinSlots) init() {
	if t.waiting == nil {
		t.joining, t.waiting = map[blockdev.Ref]bool{}, map[blockdev.Ref]waiter{}
	}
}

// occupy gives a volume a slot. The caller has the lock.
func (t *joinSlots) occupy(ref blockdev.Ref) {
	delete(t.waiting, ref)
	t.joining[ref] = true
}

// throttleJoin counts the copy to a leg that joins against the node's limit, and frees the slot of the mirror when no leg joins, or is about to.
func (m *mirrorReconciler) throttleJoin(ctx context.Context, s mirror.State) {
	switch {
	case s.Joining != nil:
		m.joinSlots.set(m.ref, true)
		m.throttle.report(ctx, throttledCopy{copyOfJoin, m.ref.Key}, s.Synced, time.Now())
	case m.background == nil:
		m.releaseSlot(ctx)
	}
}

// releaseSlot frees the slot of the mirror.
func (m *mirrorReconciler) releaseSlot(ctx context.Context) {
	m.joinSlots.set(m.ref, false)
	m.throttle.stop(ctx, copyOfJoin, m.ref.Key)
}

// acquireSlot reports whether a leg of the mirror may join now.
func (m *mirrorReconciler) acquireSlot(ctx context.Context, now *mirrorView) bool {
	if !m.joinSlots.acquire(m.ref, len(now.v.Current()), time.Now(), 3*m.options.LookEvery) {
		return false
	}
	m.throttle.start(ctx, throttledCopy{copyOfJoin, m.ref.Key}, time.Now())
	return true
}
