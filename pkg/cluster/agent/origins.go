package agent

import (
	"fmt"
	"sync"

	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// bringers is how many volumes, or snapshots, are brought at once from one pool of another node, and mostBringers from all: one whose disk hangs keeps nothing from coming that
// others have. So many are also given back at once.
const (
	bringers     = 4
	mostBringers = 4 * bringers
)

// errOrigin: as many as can be are brought from that pool.
var errOrigin = fmt.Errorf("%w: as many as can be are brought from that pool at once", errdefs.ErrUnavailable)

// origins counts what is brought from pools of other nodes.
type origins struct {
	mu   sync.Mutex
	busy map[string]int // by the names of the pools' objects
}

// begin has one more be brought from a pool, until end is called; errOrigin if it has to wait.
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
