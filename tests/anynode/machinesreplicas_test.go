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

// powerCut is which machines lose their power under volumes with legs on home and away, while a machine writes to them.
type powerCut struct {
	user    string
	victims []string
	next    string // who uses the volumes then
	joins   bool   // away's leg has just come back, and is being made equal
}

func (p powerCut) name() string {
	what := "writing"
	if p.joins {
		what = "joining"
	}
	return fmt.Sprintf("%s on %s, %s dies", what, p.user, strings.Join(p.victims, "+"))
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
	for _, joins := range []bool{false, true} {
		cuts = append(cuts,
			powerCut{beside, []string{home}, beside, joins}, powerCut{beside, []string{away}, beside, joins}, powerCut{beside, []string{home, away}, beside, joins},
			powerCut{home, []string{away}, home, joins}, powerCut{home, []string{home}, away, joins}, powerCut{home, []string{home, away}, home, joins})
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

// legs makes volumes with legs on home and away that a machine uses and writes to: writes that are through when they are done, past the page cache; writes and then a flush; and writes to a file, and fsync.
func (c *machines) legs(user string) (all []*legged) {
	c.Helper()
	for _, kind := range []string{"through", "flushed", "ext4"} {
		filesystem := co.Block
		if kind == "ext4" {
			filesystem = kind
		}
		m := c.mirror(fmt.Sprintf("%s-%d", kind, newTag()), filesystem, home, away)
		u := &legged{&used{volume: m.volume, c: c, kind: filesystem, at: home, flush: kind == "flushed"}, m}
		u.has(user)
		u.writes(user)
		all = append(all, u)
	}
	return all
}

func (c *machines) legsDie(p powerCut, random *rand.Rand) {
	c.Helper()
	all := c.legs(p.user)
	if p.joins {
		c.joining(all, p.user)
	}
	time.Sleep(time.Duration(random.IntN(1500)) * time.Millisecond)
	for _, u := range all {
		c.Logf("volume %s: %v are current, %d writes were acknowledged", u.of.Name, u.m.object().Current(), u.writer.acked.Load())
	}
	for _, name := range p.victims {
		c.all[name].cut()
	}
	if p.next != p.user {
		c.takesOver(all, p)
	}
	time.Sleep(time.Duration(random.IntN(8000)) * time.Millisecond) // what does not answer for five seconds is given up
	for _, name := range p.victims {
		c.all[name].boot()
	}
	c.ready(p.victims...)
	for _, u := range all {
		if slices.Contains(p.victims, p.user) {
			u.fails()
			u.stages(p.next)
		} else if !u.survives() {
			if p.another() {
				c.Errorf("volume %s had a leg that was current, and its writer had an error: %v", u.of.Name, u.writer.err)
			}
			u.unstages(p.user)
			u.stages(p.user)
		}
		u.holds(p.next)
		u.writes(p.next)
	}
	if p.next != p.user {
		c.outOfService(p.user, false)
	}
	for _, u := range all {
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
	}
	c.empty()
}

// joining has away's machine be without power for a while, in which much is written, and waits until its legs are being made equal.
func (c *machines) joining(all []*legged, user string) {
	c.Helper()
	c.all[away].cut()
	for _, u := range all {
		u.m.current(u.m.leg(home))
		to := "of=" + u.path
		if u.kind != co.Block {
			to += ".more"
		}
		c.run(user, "dd", "if=/dev/zero", to, "bs=1M", "seek=8", "count=16", "conv=fsync,notrunc")
	}
	c.all[away].boot()
	c.eventually("a leg is being made equal", func() bool {
		for _, u := range all {
			for _, l := range u.m.object().Status.Legs {
				if l.State == v1alpha1.LegJoining {
					return true
				}
			}
		}
		return false
	})
}

// takesOver gives the volumes of a machine that is dead to the next one, which can use them at once if it has a leg that is current.
func (c *machines) takesOver(all []*legged, p powerCut) {
	c.Helper()
	c.outOfService(p.user, true)
	for _, u := range all {
		u.again("release it", func(ctx context.Context) error { return u.release(ctx, p.user) })
		u.again("claim it", func(ctx context.Context) error { return u.claim(ctx, p.next) })
		if !p.joins {
			u.stages(p.next)
			u.holds(p.next)
		}
	}
}

// same makes sure that both legs have the same bytes.
func (u *legged) same() {
	u.Helper()
	sum := func(node string) string {
		return strings.Fields(u.c.run(node, "sha256sum", filepath.Join(poolInMachine, "volumes", u.m.leg(node)+".img")))[0]
	}
	if sum(home) != sum(away) {
		u.Errorf("the legs of volume %s differ", u.of.Name)
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
	u.Logf("volume %s: the writer: %v", u.of.Name, u.writer.err)
	return u.writer.err == nil
}
