package anynode

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/process"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvmet"
)

var (
	full = flag.Bool("anynode.full", false, "each fault at each step, and not a sample of them")
	seed = flag.Uint64("anynode.seed", uint64(time.Now().UnixNano()), "which sample")
)

// fault is something that fails, and is well again later.
type fault struct {
	name   string
	strike func(c *nodes) (heal func())
	// homeless: while it lasts, nobody can know that the home has let nobody else in.
	homeless bool
}

// frozen is a process that stands still.
func frozen(d *process.Driver) func() {
	pid := d.Pid()
	_ = syscall.Kill(pid, syscall.SIGSTOP)
	return func() { _ = syscall.Kill(pid, syscall.SIGCONT) }
}

// killed is one that is started again by heal.
func killed(c *nodes, d *process.Driver) func() {
	d.Kill()
	return func() { check.OK(c, d.Start()) }
}

// cutOff is a node that reaches no other.
func cutOff(c *nodes, node string) func() {
	c.links(node, false)
	return func() { c.links(node, true) }
}

// unheard is a node that does not reach the API server.
func unheard(c *nodes, node string) func() {
	c.reach(node, false)
	return func() { c.reach(node, true) }
}

// faults are all that there are, for a volume that the first consumer has.
var faults = []fault{
	{name: "nothing", strike: func(*nodes) func() { return func() {} }},
	{name: "consumer killed", strike: func(c *nodes) func() { return killed(c, c.agents[consumers[0]]) }},
	{name: "consumer frozen", strike: func(c *nodes) func() { return frozen(c.agents[consumers[0]]) }},
	{name: "consumer cut off", strike: func(c *nodes) func() {
		c.link(consumers[0], false)
		return func() { c.link(consumers[0], true) }
	}},
	{name: "consumer without API server", strike: func(c *nodes) func() { return unheard(c, consumers[0]) }},
	{name: "consumer gone", strike: func(c *nodes) func() {
		c.link(consumers[0], false)
		c.reach(consumers[0], false)
		start := killed(c, c.agents[consumers[0]])
		return func() { c.link(consumers[0], true); c.reach(consumers[0], true); start() }
	}},
	{name: "home killed", homeless: true, strike: func(c *nodes) func() { return killed(c, c.agents[home]) }},
	{name: "home frozen", homeless: true, strike: func(c *nodes) func() { return frozen(c.agents[home]) }},
	{name: "home cut off", strike: func(c *nodes) func() { return cutOff(c, home) }},
	{name: "home without API server", homeless: true, strike: func(c *nodes) func() { return unheard(c, home) }},
	{name: "API server frozen", homeless: true, strike: func(c *nodes) func() { return apitest.Get(c).Freeze(c) }},
	{name: "controller killed", homeless: true, strike: func(c *nodes) func() { return killed(c, c.controller) }},
}

// A step of a volume's life, in the middle of which something fails.
const (
	noStep   = ""
	staging  = "stage"
	writing  = "write"
	down     = "unstage"
	release  = "release"
	takeover = "takeover" // while it is written to, the volume is taken from its consumer, and given to the other one
)

var steps = []string{staging, writing, down, release, takeover}

// TestAnyNode: whatever fails at whatever step, and comes back: every acknowledged write is there, of a consumer that was fenced nothing arrives any more,
// no two nodes ever had the volume, and nothing is left.
func TestAnyNode(t *testing.T) {
	c := newNodes(t)
	type scene struct {
		step       string
		fault      fault
		filesystem string
	}
	var scenes []scene
	for _, step := range steps {
		for _, f := range faults {
			scenes = append(scenes, scene{step, f, co.Block})
		}
	}
	if !*full {
		t.Logf("-anynode.seed=%d", *seed)
		random := rand.New(rand.NewPCG(*seed, 0))
		random.Shuffle(len(scenes), func(i, j int) { scenes[i], scenes[j] = scenes[j], scenes[i] })
		scenes = scenes[:8]
	}
	for i, s := range scenes {
		t.Run(fmt.Sprintf("%s, %s", s.step, s.fault.name), func(t *testing.T) {
			in := *c
			in.TB = t
			(&life{volume: in.create(fmt.Sprint("volume-", i), s.filesystem), step: s.step, fault: s.fault}).run()
		})
	}
}

// life is that of one volume, with a fault in it.
type life struct {
	*volume
	step  string
	fault fault
}

// hold is how long a fault lasts.
const hold = 4 * time.Second

// with does something, in the middle of which the fault comes if it is its step, and tries until it is done.
func (l *life) with(step, what string, call func(ctx context.Context) error) {
	l.Helper()
	if l.step != step {
		l.again(what, call)
		return
	}
	ctx, cancel := context.WithTimeout(l.Context(), patient)
	defer cancel()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := call(ctx); err != nil {
			l.Logf("%s, in which %s: %v", what, l.fault.name, err)
		}
	}()
	time.Sleep(time.Duration(rand.IntN(60)) * time.Millisecond)
	heal := l.fault.strike(l.nodes)
	time.Sleep(hold / 2)
	heal()
	<-ended
	l.again(what, call)
}

func (l *life) run() {
	first, second := consumers[0], consumers[1]
	l.again("claim it", func(ctx context.Context) error { return l.claim(ctx, first) })
	l.with(staging, "stage it", func(ctx context.Context) error { return l.up(ctx, first) })
	before, err := write(l.target(first), newTag())
	check.OK(l, err)
	l.eventually("it is written to", func() bool { return before.acked.Load() > 2*blocks })
	if l.step == takeover {
		l.takeover(before)
	} else {
		l.orderly(before)
	}
	now, err := read(l.target(second))
	check.OK(l, err)
	check.OK(l, before.lost(now))
	after, err := write(l.target(second), newTag())
	check.OK(l, err)
	l.eventually("the next node writes to it", func() bool { return after.acked.Load() > 2*blocks })
	after.end()
	check.OK(l, after.err)
	l.again("take it down", func(ctx context.Context) error { return l.down(ctx, second) })
	l.again("release it", func(ctx context.Context) error { return l.release(ctx, second) })
	// At home it has what the second wrote, and nothing else.
	l.again("claim it for its home", func(ctx context.Context) error { return l.claim(ctx, home) })
	l.again("have it at home", func(ctx context.Context) error { return l.up(ctx, home) })
	now, err = read(l.target(home))
	check.OK(l, err)
	check.OK(l, after.lost(now))
	l.again("take it down at home", func(ctx context.Context) error { return l.down(ctx, home) })
	l.again("release it at home", func(ctx context.Context) error { return l.release(ctx, home) })
	l.again("delete it", l.of.Delete)
	if left := drivertest.Gone(func() []string { return slices.Concat(left(), stacked(l.dir), drivertest.Keys(l, nvmet.Prefix)) }); len(left) > 0 {
		l.Errorf("left in the kernel: %v", left)
	}
	if images, _ := filepath.Glob(filepath.Join(l.dir, "pool-of-*", "volumes", "*")); len(images) > 0 {
		l.Errorf("left in the pools: %v", images)
	}
}

// orderly hands the volume over as a CO does whose pod has ended.
func (l *life) orderly(before *writer) {
	l.Helper()
	first, second := consumers[0], consumers[1]
	if l.step == writing {
		heal := l.fault.strike(l.nodes)
		time.Sleep(hold)
		heal()
		at := before.acked.Load()
		l.eventually("it is written to again", func() bool { return before.acked.Load() > at+blocks })
	}
	before.end()
	check.OK(l, before.err) // whatever failed, the writer only waited
	l.with(down, "take it down", func(ctx context.Context) error { return l.down(ctx, first) })
	l.with(release, "release it", func(ctx context.Context) error { return l.release(ctx, first) })
	l.again("claim it for the next", func(ctx context.Context) error { return l.claim(ctx, second) })
	l.again("stage it on the next", func(ctx context.Context) error { return l.up(ctx, second) })
}

// takeover gives the volume to the next node while the first still writes to it, as a CO does that takes the first for gone.
func (l *life) takeover(before *writer) {
	l.Helper()
	first, second := consumers[0], consumers[1]
	heal := l.fault.strike(l.nodes)
	healed := false
	l.Cleanup(func() {
		if !healed {
			heal()
		}
	})
	if l.fault.homeless {
		ctx, cancel := context.WithTimeout(l.Context(), hold)
		if err := l.release(ctx, first); err == nil {
			l.Errorf("it was released, with %s", l.fault.name)
		}
		cancel()
		heal()
		healed = true
	}
	l.again("release it", func(ctx context.Context) error { return l.release(ctx, first) })
	fenced := before.acked.Load()
	l.again("claim it for the next", func(ctx context.Context) error { return l.claim(ctx, second) })
	if l.fault.name == "home cut off" { // nobody reaches it
		heal()
		healed = true
	}
	l.again("stage it on the next", func(ctx context.Context) error { return l.up(ctx, second) })
	now, err := read(l.target(second))
	check.OK(l, err)
	check.OK(l, before.lost(now))
	if !healed {
		heal()
		healed = true
	}
	select { // the first finds that it has lost the volume
	case <-before.done:
		if before.err == nil {
			l.Error("the writer of the first node ended without an error")
		}
	case <-time.After(patient):
		l.Fatalf("the writer of the first node did not end\n%s", l.logs())
	}
	if acked := before.acked.Load(); acked != fenced {
		// Acknowledged before the fence, and counted after it: it has to be there, which is looked at again.
		l.Logf("%d writes were counted after the release", acked-fenced)
	}
	again, err := read(l.target(second))
	check.OK(l, err)
	check.OK(l, before.lost(again))
	for i := range now {
		if now[i] != again[i] {
			l.Errorf("block %d changed from %v to %v after the volume had gone to the next node", i, now[i], again[i])
		}
	}
	l.again("the first takes it down", func(ctx context.Context) error { return l.down(ctx, first) })
}
