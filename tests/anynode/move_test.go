package anynode

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/process"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	volumes "github.com/ashlar-csi/ashlar/pkg/volume"
)

// newHome is where volumes move to, and third a node that is neither that nor their home.
var newHome, third = consumers[1], consumers[0]

func (v *volume) key() string { return volumes.KeyOf(v.of.Name) }

// object is the volume's, once the API server answers.
func (v *volume) object() *v1alpha1.Volume {
	v.Helper()
	now := &v1alpha1.Volume{}
	v.eventually("the API server has volume "+v.of.Name, func() bool {
		ctx, cancel := context.WithTimeout(v.Context(), 10*time.Second)
		defer cancel()
		return v.kube.Get(ctx, client.ObjectKey{Name: v.key()}, now) == nil
	})
	return now
}

// move asks for the volume to be moved to a node.
func (v *volume) move(node string) {
	v.Helper()
	v.moveTo(node, "")
}

// moveTo asks for the volume to be moved to a pool of a node.
func (v *volume) moveTo(node, pool string) {
	v.Helper()
	now := v.object()
	before := now.DeepCopy()
	now.Spec.Move = &v1alpha1.Move{Node: node, Pool: pool}
	check.OK(v, v.kube.Patch(v.Context(), now, client.MergeFrom(before)))
}

// moving waits until the object of a volume says something of its move.
func (v *volume) moving(what string, is func(*v1alpha1.Volume) bool) {
	v.Helper()
	last := ""
	v.eventually(fmt.Sprintf("the move of %s: %s", v.of.Name, what), func() bool {
		now := v.object()
		if s := now.Status.Move; s != nil && s.Message != last {
			last = s.Message
			v.Logf("the move of %s: %s", v.of.Name, last)
		}
		return is(now)
	})
}

// moved waits until a volume has moved, and makes sure that it is in one place.
func (v *volume) moved(from, to string) {
	v.Helper()
	v.moving("it is over", func(now *v1alpha1.Volume) bool {
		return now.Spec.NodeName == to && now.Spec.Move == nil && now.Status.Move == nil
	})
	if files := v.files(from); len(files) > 0 {
		v.Errorf("left on %s: %v", from, files)
	}
	if files := v.files(to); len(files) != 2 {
		v.Errorf("node %s has %v, not an image and a record", to, files)
	}
	for _, label := range []string{"sealed", "import"} {
		if v.says(label, to) {
			v.Errorf("the record on %s says %s", to, label)
		}
	}
}

// files are those of the volume that a node's pool has.
func (v *volume) files(node string) []string {
	all, _ := filepath.Glob(filepath.Join(v.dir, "pool-of-"+node, "volumes", v.key()+".*"))
	return all
}

// devices are all that are in use: loop devices, and those of the device mapper.
func devices() (all []string) {
	for _, pattern := range []string{"/sys/block/dm-*", "/sys/block/loop*/loop"} {
		found, _ := filepath.Glob(pattern)
		all = append(all, found...)
	}
	return append(all, left()...)
}

// gone makes sure that nothing of any volume is left.
func (c *nodes) gone() {
	c.Helper()
	if left := drivertest.Gone(devices); len(left) > 0 {
		c.Errorf("left in the kernel: %v", left)
	}
	for _, kind := range []string{"volumes", "snapshots", "marks"} {
		if files, _ := filepath.Glob(filepath.Join(c.dir, "pool-of-*", kind, "*")); len(files) > 0 {
			c.Errorf("left in the pools: %v", files)
		}
	}
}

// use has a node use the volume for as long as do takes, as its only user.
func (v *volume) use(node string, do func(target string)) {
	v.Helper()
	v.again("claim it for "+node, func(ctx context.Context) error { return v.claim(ctx, node) })
	v.again("stage it on "+node, func(ctx context.Context) error { return v.up(ctx, node) })
	do(v.target(node))
	v.leave(node)
}

// leave ends the use of a volume by a node.
func (v *volume) leave(node string) {
	v.Helper()
	v.again("take it down on "+node, func(ctx context.Context) error { return v.down(ctx, node) })
	v.again("release it on "+node, func(ctx context.Context) error { return v.release(ctx, node) })
}

// TestMove: a volume that another node has used moves there, is used there without a network, grows, and moves back; what is cut before can be restored.
func TestMove(t *testing.T) {
	c := newNodes(t)
	for name, encrypted := range map[string]bool{"plain": false, "encrypted": true} {
		t.Run(name, func(t *testing.T) {
			in := c.encrypted(encrypted)
			in.TB = t
			in.thereAndBack(name)
		})
	}
}

func (c *nodes) thereAndBack(name string) {
	c.Helper()
	content := func(seed string) drivertest.Content { return drivertest.Content{Seed: name + seed, Size: 4 * mib} }
	v := c.create(name, "ext4")
	var cut *csi.Snapshot
	v.use(newHome, func(target string) {
		check.OK(c, content("before").Write(filepath.Join(target, "before")))
		v.again("it is cut", func(ctx context.Context) (err error) {
			cut, err = v.of.Snapshot(ctx, name+"-cut")
			return err
		})
		check.OK(c, content("after").Write(filepath.Join(target, "after")))
	})
	v.move(newHome)
	v.moved(home, newHome)

	v.again("claim it for its new home", func(ctx context.Context) error { return v.claim(ctx, newHome) })
	c.links(newHome, false)
	v.again("stage it at its new home", func(ctx context.Context) error { return v.up(ctx, newHome) })
	if exports := left(); len(exports) > 0 {
		c.Errorf("at its new home it is used over the network: %v", exports)
	}
	there := v.at(newHome)
	check.OK(c, content("after").In(filepath.Join(v.target(newHome), "after")))
	v.again("it grows", func(ctx context.Context) error { return v.of.Expand(ctx, 128*mib) })
	v.again("its filesystem grows", func(ctx context.Context) error { return there.NodeExpand(ctx, there.Target("pod")) })
	var size unix.Statfs_t
	check.OK(c, unix.Statfs(v.target(newHome), &size))
	if has := int64(size.Blocks) * size.Bsize; has < 100*mib {
		c.Errorf("its filesystem has %d bytes", has)
	}
	check.OK(c, content("grown").Write(filepath.Join(v.target(newHome), "grown")))
	v.again("take it down", func(ctx context.Context) error { return v.down(ctx, newHome) })
	c.links(newHome, true)
	v.again("release it", func(ctx context.Context) error { return v.release(ctx, newHome) })

	restored := c.create(name+"-restored", "ext4", func(r *csi.CreateVolumeRequest) { co.FromSnapshot(r, cut.GetSnapshotId()) })
	restored.use(third, func(target string) {
		check.OK(c, content("before").In(filepath.Join(target, "before")))
		if _, err := os.Stat(filepath.Join(target, "after")); err == nil {
			c.Error("what was restored has what was written after the cut")
		}
	})
	v.move(home)
	v.moved(newHome, home)
	for _, node := range []string{third, home} {
		v.use(node, func(target string) {
			for _, what := range []string{"before", "after", "grown"} {
				check.OK(c, content(what).In(filepath.Join(target, what)))
			}
		})
	}
	v.again("delete it", v.of.Delete)
	v.again("delete what was restored", restored.of.Delete)
	v.again("delete the cut", func(ctx context.Context) error { return c.controller.RemoveSnapshot(ctx, cut.GetSnapshotId()) })
	c.gone()
}

// The steps of a move, at which something fails.
const (
	asked   = "asked"
	sealed  = "sealed"
	copying = "copying"
	copied  = "all copied"
	flipped = "flipped"
	arrived = "arrived"
	giving  = "giving back"
	cleared = "cleared"
)

var moveSteps = []string{asked, sealed, copying, copied, flipped, arrived, giving, cleared}

// moveFault is a fault; freezes is whose process it freezes.
type moveFault struct {
	fault
	freezes string
}

var moveFaults = func() []moveFault {
	all := []moveFault{{fault: faults[0]}}
	add := func(name, freezes string, strike func(c *nodes) func()) {
		all = append(all, moveFault{fault{name: name, strike: strike}, freezes})
	}
	for _, node := range []string{home, newHome} {
		what := map[string]string{home: "home", newHome: "new home"}[node]
		add(what+" killed", "", func(c *nodes) func() { return killed(c, c.agents[node]) })
		add(what+" frozen", node, func(c *nodes) func() { return frozen(c.agents[node]) })
		add(what+" cut off", "", func(c *nodes) func() { return cutOff(c, node) })
		add(what+" without API server", "", func(c *nodes) func() { return unheard(c, node) })
	}
	add("controller killed", "", func(c *nodes) func() { return killed(c, c.controller) })
	add("controller frozen", "controller", func(c *nodes) func() { return frozen(c.controller) })
	add("API server killed", "", func(c *nodes) func() { return apitest.Get(c).Kill(c) })
	add("API server frozen", "", func(c *nodes) func() { return apitest.Get(c).Freeze(c) })
	return all
}()

// moveSample are the pairs of a sample: a fault of each part, before and after the volume has moved.
var moveSample = map[string]string{sealed: "home without API server", copying: "new home cut off", copied: "API server killed", cleared: "home frozen"}

// TestMoveFails: whatever fails at whatever step of a move, and comes back, also if somebody claims the volume in that moment, at home, at its new home, or elsewhere:
// the move ends, every acknowledged write is there, while one node uses the volume no other can, and nothing is left.
func TestMoveFails(t *testing.T) {
	c := newNodes(t)
	var scenes []*moveScene
	for _, step := range moveSteps {
		for _, f := range moveFaults {
			scenes = append(scenes, &moveScene{step: step, fault: f})
		}
	}
	t.Logf("-anynode.seed=%d", *seed)
	if !*full { // a pair takes a minute or two
		scenes = slices.DeleteFunc(scenes, func(s *moveScene) bool { return moveSample[s.step] != s.fault.name })
		draw(t.Name()).Shuffle(len(scenes), func(i, j int) { scenes[i], scenes[j] = scenes[j], scenes[i] })
		scenes = scenes[:2]
	}
	for i, s := range scenes {
		t.Run(fmt.Sprintf("%s, %s", s.step, s.fault.name), func(t *testing.T) {
			in := *c
			in.TB = t
			s.nodes = &in
			s.run(i)
		})
	}
}

// moveScene is the move of some volumes at once, which fails at a step.
type moveScene struct {
	*nodes
	step  string
	fault moveFault
	all   []*mover
}

// mover is a volume that moves, and who claims it in the middle.
type mover struct {
	*volume
	claimant string // a node; empty: nobody
	fill     drivertest.Content
	last     *writer // who wrote to it last
	read     []found // what the claimant has found
}

func (s *moveScene) run(n int) {
	s.Helper()
	for _, claimant := range []string{"", home, newHome, third} {
		name := fmt.Sprintf("move-%d-of-%s", n, claimant)
		m := &mover{volume: s.create(name, co.Block), claimant: claimant, fill: drivertest.Content{Seed: name, Offset: 2 * mib, Size: 12 * mib}}
		m.use(home, func(target string) {
			check.OK(s, m.fill.Write(target))
			m.writes(home)
			m.last.end()
			check.OK(s, m.last.err)
		})
		s.all = append(s.all, m)
	}
	held, letGo := s.reach()
	heal := sync.OnceFunc(s.fault.strike(s.nodes))
	s.Cleanup(heal)
	if held == "" || held != s.fault.freezes { // else it stands still until it is healed
		letGo()
	}
	s.meanwhile(heal)
	for i, m := range s.all {
		if m.claimant != "" {
			m.alone()
			m.leave(m.claimant)
		}
		m.moved(home, newHome)
		m.use([]string{newHome, third, home, newHome}[i], func(target string) {
			now, err := read(target)
			check.OK(s, err)
			check.OK(s, m.last.lost(now))
			check.OK(s, m.fill.In(target))
		})
		m.again("delete it", m.of.Delete)
	}
	s.gone()
}

// writes starts a writer at a node, and waits until each of its blocks was written.
func (m *mover) writes(node string) {
	m.Helper()
	w, err := write(m.target(node), newTag())
	check.OK(m, err)
	m.last = w
	m.eventually("it is written to", func() bool { return w.acked.Load() > 2*blocks })
}

// meanwhile has the volumes claimed while something fails, until all are used by who claims them.
func (s *moveScene) meanwhile(heal func()) {
	s.Helper()
	var claims sync.WaitGroup
	ctx, cancel := context.WithTimeout(s.Context(), patient)
	defer cancel()
	for _, m := range s.all {
		if m.claimant != "" {
			claims.Go(func() { m.claimed(ctx) })
		}
	}
	time.Sleep(hold / 2)
	heal()
	claims.Wait()
	for _, m := range s.all {
		if m.claimant == "" {
			continue
		}
		if m.read == nil {
			s.Fatalf("%s never had volume %s\n%s", m.claimant, m.of.Name, s.logs())
		}
		at := m.last.acked.Load()
		s.eventually("volume "+m.of.Name+" is written to", func() bool { return m.last.acked.Load() > at+2*blocks })
	}
}

// claimed has the claimant use the volume, until the context ends: it finds what was acknowledged before, and begins to write.
func (m *mover) claimed(ctx context.Context) {
	last := ""
	for ctx.Err() == nil {
		err := func() error {
			ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
			defer cancel()
			return co.InTurn(func() error { return m.claim(ctx, m.claimant) }, func() error { return m.up(ctx, m.claimant) })
		}()
		if err == nil {
			break
		}
		if last != err.Error() {
			last = err.Error()
			m.Logf("%s has volume %s: %v", m.claimant, m.of.Name, err)
		}
		time.Sleep(50 * time.Millisecond)
	}
	if ctx.Err() != nil {
		return
	}
	now, err := read(m.target(m.claimant))
	if err == nil {
		err = m.last.lost(now)
	}
	next, failure := write(m.target(m.claimant), newTag())
	if err != nil || failure != nil {
		m.Errorf("%s has volume %s: %v, %v", m.claimant, m.of.Name, err, failure)
		return
	}
	m.read, m.last = now, next
}

// alone makes sure that nobody but the claimant can use the volume, and ends its writer.
func (m *mover) alone() {
	m.Helper()
	for _, node := range []string{home, newHome, third} {
		if node == m.claimant {
			continue
		}
		ctx, cancel := context.WithTimeout(m.Context(), 10*time.Second)
		if err := m.claim(ctx, node); err == nil {
			m.Errorf("%s has volume %s, and %s may claim it", m.claimant, m.of.Name, node)
		}
		if err := m.up(ctx, node); err == nil {
			m.Errorf("%s has volume %s, and %s can use it", m.claimant, m.of.Name, node)
		}
		cancel()
	}
	m.last.end()
	check.OK(m, m.last.err) // whatever failed, the writer only waited
}

// reach has the volumes move up to the step. Who would go on from there stands still: held, until it is let go.
func (s *moveScene) reach() (held string, letGo func()) {
	s.Helper()
	letGo = func() {}
	hold := func(name string) {
		next := letGo
		held, letGo = name, sync.OnceFunc(frozen(s.process(name)))
		s.Cleanup(letGo)
		next() // whoever stood still before
	}
	late := map[string]bool{copied: true, flipped: true, arrived: true, giving: true, cleared: true}[s.step]
	if late {
		hold("controller")
	}
	for _, m := range s.all {
		m.move(newHome)
	}
	first := s.all[0]
	switch s.step {
	case sealed:
		s.eventually("a volume is sealed", func() bool { return first.says("sealed", home) })
		return held, letGo
	case copying:
		s.eventually("a volume is copied", func() bool { return len(first.files(newHome)) > 0 })
		return held, letGo
	case asked:
		time.Sleep(time.Duration(rand.IntN(60)) * time.Millisecond)
		return held, letGo
	}
	s.each("all bytes are there", func(v *v1alpha1.Volume) bool { return v.Status.Move != nil && v.Status.Move.Copied != nil })
	switch s.step {
	case copied:
		return held, letGo
	case flipped:
		hold(newHome)
		s.each("it has moved", func(v *v1alpha1.Volume) bool { return v.Spec.NodeName == newHome })
		return held, letGo
	}
	hold(home)
	s.each("it has arrived", func(v *v1alpha1.Volume) bool { return v.Status.Move != nil && v.Status.Move.Arrived })
	switch s.step {
	case giving:
		letGo()
		time.Sleep(time.Duration(rand.IntN(60)) * time.Millisecond)
		return "", func() {}
	case cleared:
		hold("controller")
		s.each("the old home has given it back", func(v *v1alpha1.Volume) bool { return v.Status.Move != nil && v.Status.Move.Cleared })
	}
	return held, letGo
}

// each waits until all volumes are so far.
func (s *moveScene) each(what string, is func(*v1alpha1.Volume) bool) {
	s.Helper()
	for _, m := range s.all {
		m.moving(what, is)
	}
}

// process is that of a node, or of the controller.
func (c *nodes) process(name string) *process.Driver {
	if name == "controller" {
		return c.controller
	}
	return c.agents[name]
}

// says reports whether the volume's record at a node has a label.
func (v *volume) says(label, node string) bool {
	record, _ := os.ReadFile(filepath.Join(v.dir, "pool-of-"+node, "volumes", v.key()+".rec"))
	return bytes.Contains(record, []byte(`"`+label+`"`))
}
