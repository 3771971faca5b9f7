package anynode

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

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
	ended := make(chan struct{})
	go func() { defer close(ended); d.Kill() }()
	select {
	case <-ended:
	case <-time.After(hold / 2): // it waits for the disk of a node that it does not reach (freezing what is there, say), and ends when it does
	}
	return func() { <-ended; check.OK(c, d.Start()) }
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
	cutting  = "snapshot" // while it is written to
	growing  = "growth"   // the same
	down     = "unstage"
	release  = "release"
	takeover = "takeover" // while it is written to, the volume is taken from its consumer, and given to the other one
)

var steps = []string{staging, writing, cutting, growing, down, release, takeover}

// filesystems are what a volume may have.
var filesystems = []string{co.Block, "ext4", "xfs", "btrfs"}

// TestAnyNode: whatever fails at whatever step, and comes back: every acknowledged write is there, of a consumer that was fenced nothing arrives any more,
// no two nodes ever had the volume, what was cut is as of one moment, and nothing is left. Each pair has another filesystem in each run.
func TestAnyNode(t *testing.T) {
	c := newNodes(t)
	var lives []*life
	for _, step := range steps {
		for _, f := range faults {
			kinds := filesystems
			if step == takeover {
				kinds = kinds[:2] // both nodes have it mounted for a while, and a kernel mounts one XFS or btrfs of a UUID
			}
			kind := kinds[(uint64(len(lives))+*seed)%uint64(len(kinds))]
			lives = append(lives, &life{scene: &scene{kind: kind, user: first}, step: step, fault: f})
		}
	}
	t.Logf("-anynode.seed=%d", *seed)
	if !*full {
		random := rand.New(rand.NewPCG(*seed, 0))
		random.Shuffle(len(lives), func(i, j int) { lives[i], lives[j] = lives[j], lives[i] })
		lives = lives[:8]
	}
	for i, l := range lives {
		t.Run(fmt.Sprintf("%s, %s, %s", l.step, l.fault.name, l.kind), func(t *testing.T) {
			in := *c
			in.TB = t
			l.volume = in.create(fmt.Sprint("volume-", i), l.kind, largeEnough)
			l.run()
		})
	}
}

// largeEnough asks for what XFS and btrfs need.
func largeEnough(r *csi.CreateVolumeRequest) {
	if fs := r.VolumeCapabilities[0].GetMount().GetFsType(); fs == "xfs" || fs == "btrfs" {
		r.CapacityRange.RequiredBytes = 320 * mib
	}
}

// life is that of one volume, with a fault in it.
type life struct {
	*scene
	step  string
	fault fault
}

// hold is how long a fault lasts.
const hold = 4 * time.Second

// with does something, in the middle of which the fault comes if it is its step, and tries until it is done.
func (l *life) with(step, what string, call func(ctx context.Context) error) {
	l.Helper()
	if l.step == step {
		l.during(l.fault, what, call)
	}
	l.again(what, call)
}

// during does something once, in the middle of which a fault comes.
func (c *nodes) during(f fault, what string, call func(ctx context.Context) error) {
	c.Helper()
	ctx, cancel := context.WithTimeout(c.Context(), patient)
	defer cancel()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := call(ctx); err != nil {
			c.Logf("%s, in which %s: %v", what, f.name, err)
		}
	}()
	time.Sleep(time.Duration(rand.IntN(60)) * time.Millisecond)
	heal := f.strike(c)
	time.Sleep(hold / 2)
	heal()
	<-ended
}

func (l *life) run() {
	l.claimed()
	l.with(staging, "stage it", func(ctx context.Context) error { return l.up(ctx, first) })
	l.writes()
	switch l.step {
	case takeover:
		l.takeover()
	case cutting:
		l.cut()
		l.orderly()
	case growing:
		l.with(growing, "grow it", l.expand)
		l.grown()
		l.orderly()
	default:
		l.orderly()
	}
	second := consumers[1]
	l.holds(second)
	after, err := write(l.file(second), newTag())
	check.OK(l, err)
	l.goesOn(after)
	after.end()
	check.OK(l, after.err)
	l.writer = after
	l.leave(second)
	// At home it has what the second wrote, and nothing else.
	l.use(home, func(string) { l.holds(home) })
	l.again("delete it", l.of.Delete)
	l.nothingLeft("in the kernel", func() []string { return slices.Concat(left(), stacked(l.dir), drivertest.Keys(l, nvmet.Prefix)) })
	if images, _ := filepath.Glob(filepath.Join(l.dir, "pool-of-*", "volumes", "*")); len(images) > 0 {
		l.Errorf("left in the pools: %v", images)
	}
}

// cut has the volume cut while it is written to, and makes sure that what was cut has all that was written before one moment, and nothing of after it.
func (l *life) cut() {
	l.Helper()
	before := l.writer.acked.Load()
	var cut *csi.Snapshot
	l.with(cutting, "cut it", func(ctx context.Context) (err error) {
		cut, err = l.of.Snapshot(ctx, l.of.Name+"-cut")
		return err
	})
	after := l.writer.began.Load()
	l.goesOn(l.writer) // whoever held it has let it go
	copied := l.create(l.of.Name+"-copy", l.kind, largeEnough, func(r *csi.CreateVolumeRequest) { co.FromSnapshot(r, cut.GetSnapshotId()) })
	copied.use(consumers[1], func(target string) {
		there := copied.at(consumers[1])
		copied.wasCut(there.File(target), l.writer, before, after)
	})
	l.again("delete the copy", copied.of.Delete)
	l.again("delete the cut", func(ctx context.Context) error { return l.controller.RemoveSnapshot(ctx, cut.GetSnapshotId()) })
}

// wasCut makes sure that a copy of what was cut while somebody wrote, between two of the writes, has all that was written before one moment, and nothing of after it.
func (v *volume) wasCut(path string, w *writer, before, after uint64) {
	v.Helper()
	now, err := read(path)
	check.OK(v, err)
	last := slices.MaxFunc(now, func(a, b found) int { return cmp.Compare(a.n, b.n) }).n
	if last < before || last > after {
		v.Errorf("the cut has write %d, of %d to %d", last, before, after)
	}
	check.OK(v, w.lostOf(now, last, last))
}

// orderly hands the volume over as a CO does whose pod has ended.
func (l *life) orderly() {
	l.Helper()
	second := consumers[1]
	if l.step == writing {
		heal := l.fault.strike(l.nodes)
		time.Sleep(hold)
		heal()
		l.goesOn(l.writer)
	}
	l.ended() // whatever failed, the writer only waited
	l.with(down, "take it down", func(ctx context.Context) error { return l.down(ctx, first) })
	l.with(release, "release it", func(ctx context.Context) error { return l.release(ctx, first) })
	l.again("claim it for the next", func(ctx context.Context) error { return l.claim(ctx, second) })
	l.again("stage it on the next", func(ctx context.Context) error { return l.up(ctx, second) })
}

// takeover gives the volume to the next node while the first still writes to it, as a CO does that takes the first for gone.
func (l *life) takeover() {
	l.Helper()
	before, second := l.writer, consumers[1]
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
	now, err := read(l.file(second))
	check.OK(l, err)
	check.OK(l, before.lost(now))
	if !healed {
		heal()
		healed = true
	}
	l.lost()
	if acked := before.acked.Load(); acked != fenced {
		// Acknowledged before the fence, and counted after it: it has to be there, which is looked at again.
		l.Logf("%d writes were counted after the release", acked-fenced)
	}
	again, err := read(l.file(second))
	check.OK(l, err)
	check.OK(l, before.lost(again))
	for i := range now {
		if now[i] != again[i] {
			l.Errorf("block %d changed from %v to %v after the volume had gone to the next node", i, now[i], again[i])
		}
	}
	l.again("the first takes it down", func(ctx context.Context) error { return l.down(ctx, first) })
}
