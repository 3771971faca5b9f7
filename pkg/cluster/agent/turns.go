package agent

import (
	"context"
	"sync"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/mirror"
)

// mostJoins is how many legs are made equal at once on a node: each takes the others' time, and none is useful before it is whole.
const mostJoins = 2

// turns is whose legs are made equal, of the volumes that a node uses: those with the fewest legs that have everything come first.
type turns struct {
	mu      sync.Mutex
	joining map[blockdev.Ref]bool
	waiting map[blockdev.Ref]waiter
}

// waiter is a volume that waits for its turn.
type waiter struct {
	current int       // legs that have everything
	at      time.Time // when it asked last
}

// takes reports whether it is the turn of a volume, and has others wait then until it is told to have ended. Who waits asks again, before stale is over.
func (t *turns) takes(ref blockdev.Ref, current int, now time.Time, stale time.Duration) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.joining[ref] {
		return true
	}
	t.prepare()
	t.waiting[ref] = waiter{current, now}
	before := len(t.joining)
	for other, w := range t.waiting {
		if now.Sub(w.at) > stale {
			delete(t.waiting, other)
		} else if other != ref && w.current < current {
			before++
		}
	}
	if before >= mostJoins {
		return false
	}
	t.begins(ref)
	return true
}

// are says whether a leg of a volume is being made equal, whoever began that.
func (t *turns) are(ref blockdev.Ref, joins bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !joins {
		delete(t.joining, ref)
		return
	}
	t.prepare()
	t.begins(ref)
}

// prepare makes room for what is known. The caller has the lock, as of begins.
func (t *turns) prepare() {
	if t.waiting == nil {
		t.joining, t.waiting = map[blockdev.Ref]bool{}, map[blockdev.Ref]waiter{}
	}
}

// begins has a volume be one whose leg is made equal.
func (t *turns) begins(ref blockdev.Ref) {
	delete(t.waiting, ref)
	t.joining[ref] = true
}

// paces has what is copied to a leg of the mirror be within the limit of the node, and others have their turn when none is, or is about to be.
func (t *tender) paces(ctx context.Context, s mirror.State) {
	switch {
	case s.Joining != nil:
		t.turns.are(t.ref, true)
		t.pace.copied(ctx, paced{pacedJoin, t.ref.Key}, s.Synced, time.Now())
	case t.beside == nil:
		t.turnEnds(ctx)
	}
}

// turnEnds has others have their turn.
func (t *tender) turnEnds(ctx context.Context) {
	t.turns.are(t.ref, false)
	t.pace.rests(ctx, pacedJoin, t.ref.Key)
}

// hasTurn reports whether a leg of the volume may be made equal now.
func (t *tender) hasTurn(ctx context.Context, now *view) bool {
	if !t.turns.takes(t.ref, len(now.v.Current()), time.Now(), 3*t.options.LookEvery) {
		return false
	}
	t.pace.begins(ctx, paced{pacedJoin, t.ref.Key}, time.Now())
	return true
}
