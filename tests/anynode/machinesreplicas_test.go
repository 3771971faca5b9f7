package anynode

import (
	"context"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// beside is the machine that has no leg of volumes with legs on home and away.
var beside = consumers[1]

// powerCut is which machines lose their power under a volume with legs on home and away, while a machine writes to it.
type powerCut struct {
	user    string
	victims []string
	next    string // who uses the volume then
	joins   bool   // away's leg has just come back, and is being made equal
	kind    string // of writer
}

// writers are the kinds: whose writes are through when they are done, past the page cache; who writes, and then flushes; and who writes to a file, and syncs it. One at a time, as the flushes of one have the disk keep what another one wrote.
var writers = []string{"through", "flushed", "ext4"}

func (p powerCut) name() string {
	what := "writing"
	if p.joins {
		what = "joining"
	}
	return fmt.Sprintf("%s on %s, %s dies, %s", what, p.user, strings.Join(p.victims, "+"), p.kind)
}

// another reports whether a leg is current that has its power.
func (p powerCut) another() bool {
	return len(p.victims) == 1 && (!p.joins || p.victims[0] == away)
}

// TestMachinesReplicas: machines that have legs of volumes lose their power, one or both at once, with all that their kernels and disks had not written down, under a writer that is on one of them or on neither, also while a leg is
// made equal: every write that was acknowledged and flushed is there, on whatever leg is used next, and on each leg in the end; no leg differs, and nothing is left.
func TestMachinesReplicas(t *testing.T) {
	// What a leg lacks takes some seconds, so that power is cut in the middle.
	slow := []string{fmt.Sprintf("--copy-bandwidth=%d", 4*mib)}
	c := newMachines(t, map[string][]string{home: slow, away: slow, beside: slow}, home, away, beside)
	var cuts []powerCut
	for _, kind := range writers {
		for _, joins := range []bool{false, true} {
			for _, victims := range [][]string{{home}, {away}, {home, away}} {
				next := home
				if len(victims) == 1 && victims[0] == home {
					next = away
				}
				cuts = append(cuts, powerCut{beside, victims, beside, joins, kind}, powerCut{home, victims, next, joins, kind})
			}
		}
	}
	t.Logf("-anynode.seed=%d", *seed)
	random := rand.New(rand.NewPCG(*seed, 0))
	if random.Shuffle(len(cuts), func(i, j int) { cuts[i], cuts[j] = cuts[j], cuts[i] }); !*full {
		cuts = cuts[:1]
	}
	for _, p := range cuts {
		t.Run(p.name(), func(t *testing.T) { c.within(t).legsDie(p, random) })
	}
}

// legged is a volume with legs on home and away, and who writes to it.
type legged struct {
	*used
	m *mirrored
}

// legs makes a volume with legs on home and away that a machine uses and writes to.
func (c *machines) legs(user, kind string) *legged {
	c.Helper()
	filesystem := co.Block
	if kind == "ext4" {
		filesystem = kind
	}
	m := c.mirror(fmt.Sprintf("%s-%d", kind, newTag()), filesystem, home, away)
	u := &legged{&used{volume: m.volume, c: c, kind: filesystem, at: home, flush: kind == "flushed"}, m}
	u.has(user)
	u.writes(user)
	return u
}

func (c *machines) legsDie(p powerCut, random *rand.Rand) {
	c.Helper()
	u := c.legs(p.user, p.kind)
	if p.joins {
		u.joining(p.user)
	}
	time.Sleep(time.Duration(random.IntN(1500)) * time.Millisecond)
	c.Logf("%v are current, %d writes were acknowledged", u.m.object().Current(), u.writer.acked.Load())
	for _, name := range p.victims {
		c.all[name].cut()
	}
	if p.next != p.user {
		u.takenOver(p)
	}
	time.Sleep(time.Duration(random.IntN(8000)) * time.Millisecond) // what does not answer for five seconds is given up
	for _, name := range p.victims {
		c.all[name].boot()
	}
	c.ready(p.victims...)
	if slices.Contains(p.victims, p.user) {
		u.fails()
		u.stages(p.next)
	} else if !u.survives() {
		if p.another() {
			c.Errorf("the volume had a leg that was current, and its writer had an error: %v", u.writer.err)
		}
		u.unstages(p.user)
		u.stages(p.user)
	}
	u.holds(p.next)
	u.writes(p.next)
	if p.next != p.user {
		c.outOfService(p.user, false)
	}
	u.m.current(u.m.legs...)
	u.ends()
	u.gives(p.next)
	u.same()
	for _, node := range []string{home, away} { // each reads what it has itself
		u.has(node)
		u.holds(node)
		u.gives(node)
	}
	u.again("delete it", u.of.Delete)
	c.empty()
}

// joining has away's machine be without power for a while, in which much is written, and waits until its leg is being made equal.
func (u *legged) joining(user string) {
	u.Helper()
	u.c.all[away].cut()
	u.m.current(u.m.leg(home))
	to := "of=" + u.path
	if u.kind != co.Block {
		to += ".more"
	}
	u.c.run(user, "dd", "if=/dev/zero", to, "bs=1M", "seek=8", "count=16", "conv=fsync,notrunc")
	u.c.all[away].boot()
	u.eventually("a leg is being made equal", func() bool {
		return slices.ContainsFunc(u.m.object().Status.Legs, func(l v1alpha1.Leg) bool { return l.State == v1alpha1.LegJoining })
	})
}

// takenOver gives the volume of a machine that is dead to the next one, which can use it at once if it has a leg that is current.
func (u *legged) takenOver(p powerCut) {
	u.Helper()
	u.c.outOfService(p.user, true)
	u.again("release it", func(ctx context.Context) error { return u.release(ctx, p.user) })
	u.again("claim it", func(ctx context.Context) error { return u.claim(ctx, p.next) })
	if !p.joins {
		u.stages(p.next)
		u.holds(p.next)
	}
}

// same makes sure that both legs have the same bytes.
func (u *legged) same() {
	u.Helper()
	sum := func(node string) string {
		return strings.Fields(u.c.run(node, "sha256sum", filepath.Join(poolInMachine, "volumes", u.m.leg(node)+".img")))[0]
	}
	if sum(home) != sum(away) {
		u.Errorf("the legs differ")
	}
}

// survives waits until the writer goes on, or has ended, and ends it.
func (u *legged) survives() (wrote bool) {
	u.Helper()
	at := u.writer.acked.Load()
	u.eventually("it is written to, or the writer has ended", func() bool {
		select {
		case <-u.writer.done:
			return true
		default:
			return u.writer.acked.Load() > at+2*blocks
		}
	})
	u.writer.end()
	u.Logf("the writer: %v", u.writer.err)
	return u.writer.err == nil
}

// TestMachinesReplicasClose: whoever uses a volume gives it back, and machines lose their power shortly before that, in the middle of it, or right after: those of legs, or of the user. What was flushed is there, on whatever leg is used
// next. If the legs count as closed, they are equal with nothing copied, and have also what was not flushed before.
func TestMachinesReplicasClose(t *testing.T) {
	c := newMachines(t, nil, home, away, beside)
	t.Logf("-anynode.seed=%d", *seed)
	random := rand.New(rand.NewPCG(*seed, 0))
	rounds := 2
	if *full {
		rounds = 40
	}
	m := c.mirror("closed", co.Block, home, away)
	u := &closer{legged: &legged{&used{volume: m.volume, c: c, kind: co.Block, at: home, flush: true}, m}}
	for i := range rounds {
		c.Logf("round %d", i)
		u.round(random, []string{home, away, beside}[random.IntN(3)])
	}
	for _, node := range []string{home, away} { // each reads what it has itself
		u.has(node)
		u.m.current(u.m.legs...)
		u.finds(node)
		u.gives(node)
	}
	u.same()
	u.again("delete it", u.of.Delete)
	c.empty()
}

// closer is a volume that is given back in each round.
type closer struct {
	*legged
	have []found // what it has; nil: what its last writer has flushed, and perhaps more
	rest string  // what else it has, as a checksum; empty: not known
}

// round has a machine use the volume, and give it back while machines lose their power.
func (u *closer) round(random *rand.Rand, user string) {
	u.Helper()
	u.has(user)
	if random.IntN(3) > 0 {
		u.m.current(u.m.legs...)
	}
	u.finds(user)
	u.writes(user)
	time.Sleep(time.Duration(random.IntN(500)) * time.Millisecond)
	u.ends()
	at := fmt.Sprint("seek=", 16+random.IntN(96))                                                                       // another part each time, so that what differs is not written over
	more := []string{"dd", "if=/dev/urandom", "of=" + u.path, "bs=64k", at, "count=32", "oflag=direct", "conv=notrunc"} // nobody flushes that
	ask := func(method string, of, answer any) error {
		ctx, cancel := context.WithTimeout(context.Background(), 2*callTime)
		defer cancel()
		return u.c.all[user].ask(ctx, method, of, answer)
	}
	when := []string{"before", "while", "after"}[random.IntN(3)]
	var have []found
	var rest string
	wrote := make(chan error, 1)
	if when == "before" {
		go func() { wrote <- ask("Run", more, new(string)) }()
	} else {
		u.c.run(user, more...)
		wrote <- nil
		have, rest = u.reads(user), u.beyond(user)
	}
	gave := make(chan error, 1)
	gives := func() { gave <- ask("Down", u.as(), new(bool)) }
	closed := false
	switch when {
	case "before":
		time.Sleep(time.Duration(random.IntN(2000)) * time.Millisecond)
		gave <- nil
	case "while":
		go gives()
		time.Sleep(time.Duration(random.IntN(1500)) * time.Millisecond)
	case "after":
		gives()
		err := <-gave
		gave <- err
		closed = err == nil
		time.Sleep(time.Duration(random.IntN(300)) * time.Millisecond)
	}
	victims := [][]string{{home}, {away}, {home, away}, {user}, {home, away, user}}[random.IntN(5)]
	victims = slices.Compact(slices.Sorted(slices.Values(victims)))
	u.Logf("%s %s gives it back (was done: %v), %v die, %v are current", when, user, closed, victims, u.m.object().Current())
	for _, name := range victims {
		u.c.all[name].cut()
	}
	time.Sleep(time.Duration(random.IntN(8000)) * time.Millisecond)
	for _, name := range victims {
		u.c.all[name].boot()
	}
	u.c.ready(victims...)
	u.Logf("what was written without a flush: %v; it was given back: %v", <-wrote, <-gave)
	u.gives(user)

	now := u.m.object()
	if settled := now.Settled(); settled && len(now.Current()) == 2 {
		u.Log("its legs count as closed")
		u.same()
	}
	u.have, u.rest = nil, ""
	if closed || now.Settled() {
		u.have, u.rest = have, rest // if they are known
	}
}

// finds makes sure that a machine finds what it is to find.
func (u *closer) finds(node string) {
	u.Helper()
	if u.writer == nil {
		return
	}
	u.holds(node)
	if u.rest != "" && (!slices.Equal(u.reads(node), u.have) || u.beyond(node) != u.rest) {
		u.Errorf("on %s it does not have what it had when it was closed", node)
	}
}

// beyond is a checksum of what was written behind the blocks of writers.
func (u *closer) beyond(node string) string {
	u.Helper()
	return u.c.run(node, "sh", "-c", "dd if="+u.path+" bs=64k skip=16 count=128 iflag=direct status=none | sha256sum")
}
