package anynode

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
)

// Steps of a volume with several legs, beside those of any (sweep_test.go).
const (
	leaving = "leg leaves" // one that does not answer is about to be given up
	joining = "leg joins"
)

var replicaSteps = []string{staging, writing, leaving, joining, growing, cutting, down, release, takeover}

// replicaFaults are those of any volume, of which home has a leg, and some that come together.
var replicaFaults = append(slices.Clone(faults), []fault{
	{name: "consumer cut off from all", strike: func(c *nodes) func() { return cutOff(c, consumers[0]) }},
	{name: "consumer killed, home cut off", strike: both("consumer killed", "home cut off")},
	{name: "consumer without API server, home killed", strike: both("consumer without API server", "home killed")},
	{name: "API server frozen, home cut off", strike: both("API server frozen", "home cut off")},
	{name: "controller killed, home cut off", strike: both("controller killed", "home cut off")},
	{name: "all killed", strike: func(c *nodes) func() {
		var starts []func()
		for _, d := range c.agents {
			starts = append(starts, killed(c, d))
		}
		return func() {
			for _, start := range starts {
				start()
			}
		}
	}},
}...)

func both(first, second string) func(c *nodes) func() {
	return func(c *nodes) func() {
		var heals []func()
		for _, f := range faults {
			if f.name == first || f.name == second {
				heals = append(heals, f.strike(c))
			}
		}
		return func() {
			for _, heal := range heals {
				heal()
			}
		}
	}
}

// replicaShapes are which nodes have a leg of a volume that the first consumer uses; home has one of each.
var replicaShapes = map[string][]string{
	"two legs elsewhere": {home, consumers[1]},
	"two legs, one here": {consumers[0], home},
	"three legs":         {consumers[0], home, consumers[1]},
}

// TestReplicaSweep: whatever fails at whatever step of the life of a volume with several legs, and comes back: every acknowledged write is there, wherever the volume is used next; whoever was fenced writes nothing any more; all legs are
// current again by themselves, and equal to the byte; and nothing is left.
func TestReplicaSweep(t *testing.T) {
	c := newNodes(t)
	var lives []*replicaLife
	for shape, on := range replicaShapes {
		for _, step := range replicaSteps {
			if step == cutting && on[0] == consumers[0] {
				continue // a raw volume is not cut where it is used: these pools copy, which takes time
			}
			for _, f := range replicaFaults {
				lives = append(lives, &replicaLife{shape: shape, step: step, fault: f})
			}
		}
	}
	t.Logf("-anynode.seed=%d", *seed)
	slices.SortStableFunc(lives, func(a, b *replicaLife) int { return bytes.Compare([]byte(a.name()), []byte(b.name())) })
	random := rand.New(rand.NewPCG(*seed, 0))
	random.Shuffle(len(lives), func(i, j int) { lives[i], lives[j] = lives[j], lives[i] })
	if !*full {
		lives = lives[:3]
	}
	for i, l := range lives {
		t.Run(l.name(), func(t *testing.T) {
			in := *c
			in.TB = t
			l.mirrored = in.mirror(fmt.Sprint("replicas-", i), co.Block, replicaShapes[l.shape]...)
			l.run()
		})
	}
}

// replicaLife is that of one volume, with a fault in it.
type replicaLife struct {
	*mirrored
	shape, step string
	fault       fault
	writer      *writer
}

func (l *replicaLife) name() string { return l.step + ", " + l.fault.name + ", " + l.shape }

// with does something, in the middle of which the fault comes if it is its step, and tries until it is done.
func (l *replicaLife) with(step, what string, call func(ctx context.Context) error) {
	l.Helper()
	if l.step == step {
		l.during(l.fault, what, call)
	}
	l.again(what, call)
}

func (l *replicaLife) run() {
	user, next := consumers[0], consumers[1]
	l.claims(user)
	l.with(staging, "stage it", func(ctx context.Context) error { return l.up(ctx, user) })
	l.writes(user)
	switch l.step {
	case writing:
		l.lasts(legPatience)
	case leaving:
		l.link(user, false) // from home
		time.Sleep(legPatience - 4*time.Second + time.Duration(rand.IntN(4000))*time.Millisecond)
		l.lasts(hold)
		l.link(user, true)
	case joining:
		l.link(user, false)
		l.eventually("a leg is not current", func() bool { return len(l.object().Current()) < len(l.legs) })
		l.link(user, true)
		time.Sleep(time.Duration(rand.IntN(3000)) * time.Millisecond)
		l.lasts(hold)
	case growing:
		l.with(growing, "grow it", func(ctx context.Context) error {
			_, err := l.controller.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{VolumeId: l.of.ID, CapacityRange: &csi.CapacityRange{RequiredBytes: 80 * mib}, VolumeCapability: l.of.Capability})
			return err // the mirror grows on the node, of a raw volume too
		})
		there := l.at(user)
		l.again("its node knows", func(ctx context.Context) error { return there.NodeExpand(ctx, there.Target("pod")) })
	case cutting:
		l.cut()
	}
	if l.step == takeover {
		l.takenOver(user, next)
	} else {
		l.goesOn(l.writer)
		l.current(l.legs...)
		l.ended()
		l.with(down, "take it down", func(ctx context.Context) error { return l.down(ctx, user) })
		l.with(release, "release it", func(ctx context.Context) error { return l.release(ctx, user) })
		l.find(next, l.writer)
	}
	before := l.writer
	l.writes(next)
	l.current(l.legs...)
	l.ended()
	l.again("take it down on the next", func(ctx context.Context) error { return l.down(ctx, next) })
	l.releases(next)
	if l.writer.tag == before.tag {
		l.Error("nobody else wrote")
	}
	l.same()
	l.find(home, l.writer)
	l.ends(home)
}

// legPatience is for how long the node of a leg may not answer, with some to spare.
const legPatience = 14 * time.Second

// lasts has the fault come, and go after a time.
func (l *replicaLife) lasts(d time.Duration) {
	l.Helper()
	heal := l.fault.strike(l.nodes)
	time.Sleep(d)
	heal()
}

// writes has a node write from now on.
func (l *replicaLife) writes(node string) {
	l.Helper()
	w, err := write(l.target(node), newTag())
	check.OK(l, err)
	l.writer = w
	l.goesOn(w)
}

// ended ends the writer, which only waited, whatever failed.
func (l *replicaLife) ended() {
	l.Helper()
	l.writer.end()
	check.OK(l, l.writer.err)
}

// cut has the volume cut while it is written to: what was cut has all that was written before one moment.
func (l *replicaLife) cut() {
	l.Helper()
	before := l.writer.acked.Load()
	var cut *csi.Snapshot
	l.with(cutting, "cut it", func(ctx context.Context) (err error) {
		cut, err = l.of.Snapshot(ctx, l.of.Name+"-cut")
		return err
	})
	after := l.writer.began.Load()
	l.goesOn(l.writer) // whoever held it has let it go
	copied := l.create(l.of.Name+"-copy", co.Block, func(r *csi.CreateVolumeRequest) {
		r.CapacityRange.RequiredBytes = 64 * mib
		co.FromSnapshot(r, cut.GetSnapshotId())
	})
	copied.use(consumers[1], func(target string) {
		copied.wasCut(target, l.writer, before, after)
	})
	l.again("delete the copy", copied.of.Delete)
	l.again("delete the cut", func(ctx context.Context) error { return l.controller.RemoveSnapshot(ctx, cut.GetSnapshotId()) })
}

// takenOver gives the volume to the next node while the first still writes to it, as a CO does that takes the first for gone.
func (l *replicaLife) takenOver(user, next string) {
	l.Helper()
	before := l.writer
	heal := l.fault.strike(l.nodes)
	healed := make(chan struct{})
	go func() {
		defer close(healed)
		time.Sleep(hold)
		heal()
	}()
	l.releases(user)
	fenced := before.acked.Load()
	l.find(next, before)
	now, err := read(l.target(next))
	check.OK(l, err)
	<-healed
	if l.fault.name != "nothing" { // what was held at the fault has its end
		time.Sleep(hold / 2)
	}
	again, err := read(l.target(next))
	check.OK(l, err)
	check.OK(l, before.lost(again))
	if acked := before.acked.Load(); acked != fenced {
		l.Logf("%d writes were counted after the release", acked-fenced)
	}
	if !slices.Equal(now, again) {
		l.Errorf("what the next node read changed after that, with %s", l.fault.name)
	}
	l.again("the first takes it down", func(ctx context.Context) error { return l.down(ctx, user) })
	before.end()
	if before.err == nil {
		l.Error("the writer of the node that had it had no error")
	}
}
