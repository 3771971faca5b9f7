package agent

import (
	"cmp"
	"fmt"
	"sync"

	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// bringers is how many volumes, or snapshots, are brought at once from one pool of another node, and mostBringers from all: one whose disk hangs keeps nothing from coming that
// others have. As many are taken over, and given back, of each pool: see errOrigin.
const (
	bringers     = 4
	mostBringers = 4 * bringers
)

// errOrigin: as many as can be are under way of that pool. It is tried again soon.
var errOrigin = fmt.Errorf("%w: as many as can be are under way of that pool at once", errdefs.ErrUnavailable)

// origins counts what is brought, taken over or given back, by pools.
type origins struct {
	mu   sync.Mutex
	busy map[string]int // by the names of the pools' objects
}

// begin has one more be under way from a pool, or in one, until end is called; errOrigin if it has to wait.
func (o *origins) begin(node, pool string) (end func(), _ error) {
	name := overview.PoolName(node, pool)
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.busy[name] >= bringers {
		return nil, errOrigin
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

// arrival is something that has moved here, and is taken over.
type arrival struct {
	arriving   *origins
	node, pool string // where it is
	left, in   func() // end that it is from a pool of its old node, and in one here
}

// beginArrival has something be taken over that has moved here, until it ends; errOrigin if as many are from that pool of its old node, or in the pool here: the disk of either may
// hang, and who takes over works for all that the node has.
func (a *Agent) beginArrival(o cluster.Object) (*arrival, error) {
	m, _ := o.Moves()
	left, err := a.arriving.begin(m.Node, leftPool(o))
	if err != nil {
		return nil, err
	}
	one := &arrival{arriving: &a.arriving, node: o.Node(), pool: o.In(), left: left, in: func() {}}
	if err := one.enter(); err != nil {
		left()
		return nil, err
	}
	return one, nil
}

// enter has it be in its pool again.
func (t *arrival) enter() (err error) {
	in, err := t.arriving.begin(t.node, t.pool)
	if err == nil {
		t.in = in
	}
	return err
}

// asking waits for the old node, which may be dead: meanwhile it is not in its pool, where others arrive. errOrigin if it cannot go on there then.
func (t *arrival) asking(ask func()) error {
	t.in()
	t.in = func() {}
	ask()
	return t.enter()
}

// end ends it.
func (t *arrival) end() {
	t.left()
	t.in()
}

// leftPool is the pool of its old node that something has left.
func leftPool(o cluster.Object) string {
	m, _ := o.Moves()
	return cmp.Or(m.Pool, o.In())
}
