package cluster_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/cluster/agent"
	"github.com/ashlar-csi/ashlar/pkg/cluster/move"
	"github.com/ashlar-csi/ashlar/pkg/cluster/port"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// endless is a pool that makes nothing before it may: as one that overwrites all of it with zeros first.
type endless struct {
	*memory.Pool
	making chan struct{} // has an element for each try

	mu  sync.Mutex
	may bool
}

func (p *endless) Create(ctx context.Context, spec blockdev.Spec) (blockdev.Record, error) {
	p.mu.Lock()
	may := p.may
	p.mu.Unlock()
	if may {
		return p.Pool.Create(ctx, spec)
	}
	p.making <- struct{}{}
	<-ctx.Done()
	return blockdev.Record{}, fmt.Errorf("zero the device: %w", ctx.Err())
}

// TestMoveInUseRoom: the new home of a volume in use may take longer to make room than a call may take. It makes room for some time at once, and then says
// that it is to be asked again. It gives way to calls that need the volume there.
func TestMoveInUseRoom(t *testing.T) {
	const once = 3 * time.Second
	c, _ := newConsumer(t)
	want := c.content(c.a, c.id)
	slow := &endless{making: make(chan struct{}, 10)}
	c.b.stop()
	c.b.with = func(o *agent.Options) { o.RoomTime = once }
	c.b.wrap = func(p *memory.Pool) blockdev.Pool { slow.Pool = p; return slow }
	c.start(c.b)
	c.call()
	calls, err := port.NewCallers(wrapped(apitest.Get(t).Agent(t, c.name)))
	check.OK(t, err)
	t.Cleanup(func() { check.OK(t, calls.Close()) })
	impatient, err := calls.Agent(c.b.name, *c.b.port.Endpoint())
	check.OK(t, err)
	from, err := c.old.Describe(c.ctx, c.of())
	check.OK(t, err)
	prepare := func(meanwhile func()) (took time.Duration) {
		t.Helper()
		began, answer := time.Now(), make(chan error, 1)
		go func() { answer <- second(move.NewAt(impatient).Prepare(c.ctx, c.of(), from)) }()
		<-slow.making
		meanwhile()
		fails(t, <-answer, errdefs.ErrBusy)
		return time.Since(began)
	}
	if took := prepare(func() {}); took < once || took > 10*once {
		t.Errorf("it made room for %s", took)
	}
	if took := prepare(func() {
		c.eventually("it gives way to a call", func() bool {
			unlock, _ := c.b.locks.TryLock([]string{keylock.Volume(c.id.Key)}, nil)
			if unlock != nil {
				unlock()
			}
			return unlock != nil
		})
	}); took >= once {
		t.Errorf("it gave way after %s", took)
	}
	slow.mu.Lock()
	slow.may = true
	slow.mu.Unlock()
	c.pinned()
	s := c.flipped("v", c.b)
	c.over(want)
	c.released(s)
}
