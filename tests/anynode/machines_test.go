package anynode

import (
	"context"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// TestMachines: whole machines lose their power under a writer, with all that their kernels and disks had not written down, or stand still: every acknowledged write
// is there afterwards, filesystems are whole, of a machine that was fenced nothing arrives any more, and nothing is left.
func TestMachines(t *testing.T) {
	c := newMachines(t, nil, home, away)
	for _, s := range []struct {
		name   string
		run    func(c *machines)
		sample bool // it is tried each time
	}{
		{"home dies", (*machines).homeDies, true},
		{"consumer dies", (*machines).consumerDies, true},
		{"consumer is frozen", (*machines).consumerFrozen, false},
		{"both die", (*machines).bothDie, true},
		{"a move", (*machines).moveDies, false},
		{"a move in use", (*machines).usedMoveDies, false},
	} {
		if s.sample || *full {
			t.Run(s.name, func(t *testing.T) { s.run(c.within(t)) })
		}
	}
}

// within is the cluster for a part of the test.
func (c *machines) within(t testing.TB) *machines {
	in := *c.nodes
	in.TB = t
	for _, m := range c.all {
		outer := m.TB
		m.TB = t
		t.Cleanup(func() { m.TB = outer })
	}
	return &machines{&in, c.all}
}

// used is a volume, and who writes to it.
type used struct {
	*volume
	c      *machines
	kind   string
	path   string // where the node that uses it has its bytes
	at     string // the machine that has it
	flush  bool   // its writer flushes now and then
	writer *writer
}

// kinds are those of the volumes that are used at once. The last one is in no sample.
var kinds = []string{co.Block, "ext4", "xfs"}

// inUse makes volumes that away uses and writes to.
func (c *machines) inUse() (all []*used) {
	c.Helper()
	some := kinds
	if !*full {
		some = kinds[:2]
	}
	return c.usedBy(away, some)
}

// usedBy makes volumes of some kinds that a machine uses and writes to.
func (c *machines) usedBy(node string, kinds []string) (all []*used) {
	c.Helper()
	for _, kind := range kinds {
		u := &used{volume: c.create(fmt.Sprintf("%s-%d", kind, newTag()), kind), c: c, kind: kind, at: home}
		u.has(node)
		u.writes(node)
		all = append(all, u)
	}
	return all
}

// has claims the volume for a machine, and stages it there.
func (u *used) has(node string) {
	u.Helper()
	u.again("claim it for "+node, func(ctx context.Context) error { return u.claim(ctx, node) })
	u.stages(node)
}

func (u *used) stages(node string) {
	u.Helper()
	u.again("stage it on "+node, func(ctx context.Context) error {
		return u.c.all[node].ask(ctx, "Up", u.as(), &u.path)
	})
}

func (u *used) unstages(node string) {
	u.Helper()
	u.again("take it down on "+node, func(ctx context.Context) error {
		return u.c.all[node].ask(ctx, "Down", u.as(), new(bool))
	})
}

func (u *used) as() Used { return Used{ID: u.of.ID, Name: u.of.Name, Filesystem: u.kind} }

func (u *used) writes(node string) {
	u.Helper()
	w := u.c.all[node].write(toWrite{u.path, newTag(), u.flush})
	u.writer = w
	u.eventually("it is written to on "+node, func() bool {
		select {
		case <-w.done:
			u.Fatalf("the writer on %s: %v", node, w.err)
		default:
		}
		return w.acked.Load() > blocks
	})
}

// ends stops the writer, which noticed nothing.
func (u *used) ends() {
	u.Helper()
	u.writer.end()
	check.OK(u, u.writer.err)
}

// fails waits until the writer has an error.
func (u *used) fails() {
	u.Helper()
	select {
	case <-u.writer.done:
		if u.writer.err == nil {
			u.Error("the writer ended without an error")
		}
		u.Logf("the writer: %v", u.writer.err)
	case <-time.After(patient):
		u.Fatalf("the writer of volume %s did not end", u.of.Name)
	}
}

// reads what a machine finds in the volume.
func (u *used) reads(node string) (have []found) {
	u.Helper()
	ctx, cancel := context.WithTimeout(u.Context(), patient)
	defer cancel()
	var all [][2]uint64
	check.OK(u, u.c.all[node].ask(ctx, "Read", u.path, &all))
	for _, one := range all {
		have = append(have, found{one[0], one[1]})
	}
	return have
}

// holds makes sure that what the last writer was acknowledged is there.
func (u *used) holds(node string) {
	u.Helper()
	check.OK(u, u.writer.lost(u.reads(node)))
}

// run runs a program in a machine.
func (c *machines) run(node string, argv ...string) (said string) {
	c.Helper()
	ctx, cancel := context.WithTimeout(c.Context(), patient)
	defer cancel()
	check.OK(c, c.all[node].ask(ctx, "Run", argv, &said))
	return said
}

// whole makes sure that the filesystem is, of a volume that nobody uses.
func (u *used) whole() {
	u.Helper()
	image := filepath.Join(poolInMachine, "volumes", u.key()+".img")
	switch u.kind {
	case "ext4":
		u.c.run(u.at, "e2fsck", "-fn", image)
	case "xfs":
		u.c.run(u.at, "xfs_repair", "-n", "-f", image)
	}
}

// gives ends the use of the volume by a machine.
func (u *used) gives(node string) {
	u.Helper()
	u.unstages(node)
	u.again("release it on "+node, func(ctx context.Context) error { return u.release(ctx, node) })
}

// over makes sure where the volumes are that all is there, deletes the volumes, and looks for what is left.
func (c *machines) over(all []*used) {
	c.Helper()
	for _, u := range all {
		u.whole()
		u.has(u.at)
		u.holds(u.at)
		u.gives(u.at)
		u.again("delete it", u.of.Delete)
	}
	c.empty()
}

// empty makes sure that nothing is left on any machine.
func (c *machines) empty() {
	c.Helper()
	for name, m := range c.all {
		var left []string
		c.eventually("nothing is left on "+name, func() bool {
			ctx, cancel := context.WithTimeout(c.Context(), callTime)
			defer cancel()
			left = nil
			err := m.ask(ctx, "Left", true, &left)
			if err == nil && len(left) > 0 {
				c.Logf("on %s: %v", name, left)
				time.Sleep(time.Second)
			}
			return err == nil && len(left) == 0
		})
	}
}

// homeDies: the home's machine dies under the writers of the other, and comes back. They wait, and then get errors; staged again, the volumes have all that was acknowledged.
func (c *machines) homeDies() {
	all := c.inUse()
	c.all[home].cut()
	time.Sleep(hold / 2)
	for _, u := range all {
		select {
		case <-u.writer.done:
			c.Errorf("while its home was away, the writer of volume %s ended: %v", u.of.Name, u.writer.err)
		default:
		}
	}
	c.all[home].boot()
	c.ready(home)
	for _, u := range all {
		u.fails()
		u.unstages(away)
		u.stages(away)
		u.holds(away)
		u.writes(away)
		u.ends()
		u.gives(away)
	}
	c.over(all)
}

// consumerDies: the machine of the writers dies, and is said to be gone; the home has its volumes then. The dead one comes back, and does not reach what it had.
func (c *machines) consumerDies() {
	all := c.inUse()
	subsystems := strings.Fields(c.run(away, "sh", "-c", "cat /sys/class/nvme/*/subsysnqn"))
	if len(subsystems) != len(all) {
		c.Fatalf("away is connected to %v", subsystems)
	}
	c.all[away].cut()
	c.outOfService(away, true)
	for _, u := range all {
		u.again("release it", func(ctx context.Context) error { return u.release(ctx, away) })
		u.has(home)
		u.holds(home)
		u.writes(home)
	}
	if exported := c.run(home, "find", "/sys/kernel/config/nvmet/subsystems", "-mindepth", "1", "-maxdepth", "1", "-name", "nqn.2026*"); exported != "" {
		c.Errorf("home has its volumes, and still exports %s", exported)
	}
	c.all[away].boot()
	c.ready(away)
	for _, u := range all {
		ctx, cancel := context.WithTimeout(c.Context(), callTime)
		if err := c.all[away].ask(ctx, "Up", u.as(), new(string)); err == nil {
			c.Errorf("volume %s is home's, and away can use it", u.of.Name)
		}
		cancel()
	}
	for _, nqn := range subsystems {
		options := fmt.Sprintf("transport=tcp,traddr=%s,trsvcid=4420,nqn=%s", c.all[home].address, nqn)
		var said string
		ctx, cancel := context.WithTimeout(c.Context(), patient)
		err := c.all[away].ask(ctx, "Run", []string{"sh", "-c", `echo "$0" >/dev/nvme-fabrics`, options}, &said)
		cancel()
		if err == nil {
			c.Errorf("away can still connect to %s", nqn)
		}
		c.Logf("connect to what was exported before: %v", err)
	}
	for _, u := range all {
		u.ends()
		u.holds(home)
		u.gives(home)
	}
	c.outOfService(away, false)
	c.over(all)
}

// outOfService has a Node say that it is, or not. Who sees to volumes then is the CO.
func (c *machines) outOfService(name string, is bool) {
	c.Helper()
	node := &corev1.Node{}
	check.OK(c, c.kube.Get(c.Context(), client.ObjectKey{Name: name}, node))
	before := node.DeepCopy()
	node.Spec.Taints = slices.DeleteFunc(node.Spec.Taints, func(t corev1.Taint) bool { return t.Key == corev1.TaintNodeOutOfService })
	if is {
		node.Spec.Taints = append(node.Spec.Taints, corev1.Taint{Key: corev1.TaintNodeOutOfService, Effect: corev1.TaintEffectNoExecute})
	}
	check.OK(c, c.kube.Patch(c.Context(), node, client.MergeFrom(before)))
}

// consumerFrozen: the machine of the writers stands still while its volumes go to their home, and goes on then. Nothing of it reaches the disk.
func (c *machines) consumerFrozen() {
	all := c.inUse()
	thaw := c.all[away].freeze()
	have := map[*used][]found{}
	before := map[*used]*writer{}
	for _, u := range all {
		u.again("release it", func(ctx context.Context) error { return u.release(ctx, away) })
		u.has(home)
		u.holds(home)
		before[u] = u.writer
		u.writes(home)
		u.ends()
		have[u] = u.reads(home)
	}
	thaw()
	for _, u := range all {
		now := u.writer
		u.writer = before[u]
		u.fails()
		u.writer = now
	}
	for _, u := range all {
		if again := u.reads(home); !slices.Equal(again, have[u]) {
			c.Errorf("volume %s had %v, and has %v since its consumer goes on", u.of.Name, have[u], again)
		}
		u.unstages(away)
		u.gives(home)
	}
	c.over(all)
}

// bothDie: both machines die at once, and come back. The pods' node is the same.
func (c *machines) bothDie() {
	all := c.inUse()
	c.all[home].cut()
	c.all[away].cut()
	c.all[home].boot()
	c.all[away].boot()
	c.ready(home, away)
	for _, u := range all {
		u.stages(away)
		u.holds(away)
		u.writes(away)
		u.ends()
		u.gives(away)
	}
	c.over(all)
}

// moveDies: volumes that nobody uses move, and at each of some steps the machine of the old home, or of the new one, dies and comes back. The move goes on to its end.
func (c *machines) moveDies() {
	for _, step := range []string{asked, copying, copied, flipped, arrived, cleared} {
		for _, victim := range []string{home, away} {
			c.TB.(*testing.T).Run(fmt.Sprintf("%s, %s dies", step, victim), func(t *testing.T) { c.within(t).moves(step, victim) })
		}
	}
}

func (c *machines) moves(step, victim string) {
	c.Helper()
	var all []*used
	for _, kind := range kinds[:2] {
		u := &used{volume: c.create(fmt.Sprintf("move-%s-%d", kind, newTag()), kind), c: c, kind: kind, at: home}
		u.has(home)
		u.writes(home)
		u.ends()
		u.gives(home)
		all = append(all, u)
	}
	goOn := c.reachMove(step, all)
	c.all[victim].cut()
	goOn()
	time.Sleep(hold / 4)
	c.all[victim].boot()
	c.ready(victim)
	for _, u := range all {
		u.moving("it is over", func(v *v1alpha1.Volume) bool {
			return v.Spec.NodeName == away && v.Spec.Move == nil && v.Status.Move == nil
		})
		u.at = away
		for node, want := range map[string]int{home: 0, away: 2} {
			if files := u.files(node); len(files) != want {
				c.Errorf("%s has %v of volume %s", node, files, u.of.Name)
			}
		}
		u.has(home) // over the network now
		u.holds(home)
		u.gives(home)
	}
	c.over(all)
}

// reachMove has the volumes move up to the step. Who would go on from there stands still, until goOn.
func (c *machines) reachMove(step string, all []*used) (goOn func()) {
	c.Helper()
	var held []func()
	hold := func(thaw func()) (letGo func()) {
		letGo = sync.OnceFunc(thaw)
		c.Cleanup(letGo)
		held = append(held, letGo)
		return letGo
	}
	goOn = func() {
		for _, letGo := range held {
			letGo()
		}
	}
	each := func(what string, is func(v *v1alpha1.Volume) bool) {
		for _, u := range all {
			u.moving(what, is)
		}
	}
	control := hold(frozen(c.controller))
	for _, u := range all {
		u.move(away)
	}
	switch step {
	case asked:
		time.Sleep(time.Duration(rand.IntN(100)) * time.Millisecond)
		return goOn
	case copying:
		c.eventually("a volume is copied", func() bool { return len(all[0].files(away)) > 0 })
		return goOn
	}
	each("all bytes are there", func(v *v1alpha1.Volume) bool { return v.Status.Move != nil && v.Status.Move.Copied != nil })
	switch step {
	case copied:
		return goOn
	case flipped:
		hold(c.all[away].freeze())
		control()
		each("it has moved", func(v *v1alpha1.Volume) bool { return v.Spec.NodeName == away })
		return goOn
	}
	thaw := hold(c.all[home].freeze())
	control()
	each("it has arrived", func(v *v1alpha1.Volume) bool { return v.Status.Move != nil && v.Status.Move.Arrived })
	if step == cleared {
		hold(frozen(c.controller))
		thaw()
		each("the old home has given it back", func(v *v1alpha1.Volume) bool { return v.Status.Move != nil && v.Status.Move.Cleared })
	}
	return goOn
}

// files are those of the volume that a machine's pool has.
func (u *used) files(node string) []string {
	u.Helper()
	return strings.Fields(u.c.run(node, "find", poolInMachine+"/volumes", "-name", u.key()+".*"))
}

// usedMoveDies: volumes that a machine writes to move from home to away, and at each of some steps one of the two machines dies and comes back. The move goes on to its end.
func (c *machines) usedMoveDies() {
	for _, user := range []string{home, away} {
		for _, step := range []string{copying, copied, flipped, arrived} {
			for _, victim := range []string{home, away} {
				c.TB.(*testing.T).Run(fmt.Sprintf("used by %s, %s, %s dies", user, step, victim), func(t *testing.T) { c.within(t).movesInUse(user, step, victim) })
			}
		}
	}
}

func (c *machines) movesInUse(user, step, victim string) {
	c.Helper()
	all := c.usedBy(user, kinds[:2])
	goOn := c.reachMoveInUse(user, step, all)
	c.all[victim].cut()
	goOn()
	time.Sleep(hold / 4)
	c.all[victim].boot()
	c.ready(victim)
	for _, u := range all {
		over := func() bool {
			now := u.object()
			return now.Spec.NodeName == away && now.Spec.Move == nil && now.Status.Move == nil
		}
		u.eventually("the move is over, or the writer has ended", func() bool {
			select {
			case <-u.writer.done:
				return true
			default:
				return over()
			}
		})
		select {
		case <-u.writer.done: // its machine died, or that which had all the bytes then
			u.fails()
			if victim != user {
				u.unstages(user)
			}
			u.stages(user)
			u.holds(user)
			u.writes(user)
		default:
		}
		u.eventually("the move is over", over)
		u.at = away
		for node, want := range map[string]int{home: 0, away: 2} {
			if files := u.files(node); len(files) != want {
				c.Errorf("%s has %v of volume %s", node, files, u.of.Name)
			}
		}
		u.goesOn(u.writer)
		u.ends()
		u.holds(user)
		u.gives(user)
	}
	c.over(all)
}

// reachMoveInUse has volumes that a machine uses move up to the step. Who would go on from there stands still, until goOn.
func (c *machines) reachMoveInUse(user, step string, all []*used) (goOn func()) {
	c.Helper()
	control := sync.OnceFunc(frozen(c.controller))
	c.Cleanup(control)
	goOn = control
	for _, u := range all {
		u.move(away)
	}
	each := func(what string, is func(v *v1alpha1.Volume) bool) {
		for _, u := range all {
			u.moving(what, is)
		}
	}
	if step == copying {
		c.eventually("a volume is copied", func() bool { return len(all[0].files(away)) > 0 })
		time.Sleep(time.Duration(rand.IntN(500)) * time.Millisecond)
		return goOn
	}
	each("its user has copied all bytes", func(v *v1alpha1.Volume) bool {
		return v.Status.Move != nil && v.Status.Move.Copied != nil && v.Status.Move.Copied.Claim > 0
	})
	if step == copied {
		return goOn
	}
	still := user // it would write to the new home alone
	if step == arrived {
		still = home // it would give its bytes back
	}
	thaw := c.all[still].freeze()
	control()
	each("it has moved", func(v *v1alpha1.Volume) bool {
		return v.Spec.NodeName == away && (step == flipped || v.Status.Move != nil && v.Status.Move.Arrived)
	})
	return thaw
}
