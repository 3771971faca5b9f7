package agent

import (
	"cmp"
	"fmt"
	"sync"

	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// maxPerPool is how many volumes and snapshots are copied at once from one pool of another node, and maxMoves from all pools: so a pool whose disk hangs does
// not delay moves from others. As many are taken over, and given back, of each pool at once.
const (
	maxPerPool = 4
	maxMoves   = 4 * maxPerPool
)

// errPoolBusy: all slots of a pool are taken. It is tried again soon.
var errPoolBusy = fmt.Errorf("%w: as many as can be are under way of that pool at once", errdefs.ErrUnavailable)

// poolSlots bounds how many moves are under way of each pool.
type poolSlots struct {
	mu   sync.Mutex
	busy map[string]int // by the names of the pools' objects
}

// acquire takes a slot of a pool, until end is called; errPoolBusy if none is free.
func (o *poolSlots) acquire(node, pool string) (end func(), _ error) {
	name := overview.PoolName(node, pool)
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.busy[name] >= maxPerPool {
		return nil, errPoolBusy
	}
	if o.busy == nil {
		o.busy = map[string]int{}
	}
	o.busy[name]++
	return func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		if o.busy[name]--; o.busy[name] == 0 {
			delete(o.busy, name)
		}
	}, nil
}

// arrival is a takeover of something that has moved here. It has a slot of the pool that it has left, and one of the pool here: the disk of either may hang.
type arrival struct {
	arriving         *poolSlots
	node, pool       string // where it is now
	oldSlot, newSlot func() // end the slots
}

// beginArrival takes the slots for an arrival, until end is called; errPoolBusy if one of them is not free.
func (a *Agent) beginArrival(o cluster.Object) (*arrival, error) {
	m, _ := o.Moves()
	left, err := a.arriving.acquire(m.Node, oldPool(o))
	if err != nil {
		return nil, err
	}
	one := &arrival{arriving: &a.arriving, node: o.Node(), pool: o.In(), oldSlot: left, newSlot: func() {}}
	if err := one.enter(); err != nil {
		left()
		return nil, err
	}
	return one, nil
}

// enter takes the slot of the pool here.
func (t *arrival) enter() (err error) {
	in, err := t.arriving.acquire(t.node, t.pool)
	if err == nil {
		t.newSlot = in
	}
	return err
}

// withoutSlot calls ask, which waits for the old node, without the slot of the pool here: that node may be dead. errPoolBusy if no slot is free afterwards.
func (t *arrival) withoutSlot(ask func()) error {
	t.newSlot()
	t.newSlot = func() {}
	ask()
	return t.enter()
}

// end frees the slots.
func (t *arrival) end() {
	t.oldSlot()
	t.newSlot()
}

// oldPool returns the pool of its old node that something has left.
func oldPool(o cluster.Object) string {
	m, _ := o.Moves()
	return cmp.Or(m.Pool, o.In())
}
