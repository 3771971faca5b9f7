package anynode

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"hash/fnv"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/process"
	"github.com/ashlar-csi/ashlar/tests/points/trace"
)

var (
	pointsFull = flag.Bool("points.full", false, "all crashes and faults of all calls, and not a sample of them")
	pointsTime = flag.Duration("points.time", 30*time.Second, "how long a sample of crashes and faults is tried, in the order of -anynode.seed")
	// pointsAfter: a call may have a system call more in one run than in another, so what follows is nearly what comes next.
	pointsAfter = flag.Int("points.after", 0, "how many cases of each call are left out: those that runs of the same -anynode.seed have tried, as the last line says")
)

// TestPoints: for each call that changes something of a volume that is used away from its home, and for each system call of the home's or of the consumer's
// driver in it that does: the driver is killed before it, and started again, or killed once more in its start; or that system call fails. Then the
// call is made again, as a CO does, or its opposite. Whoever uses the volume notices nothing, what was acknowledged is there, and nothing is left.
func TestPoints(t *testing.T) {
	c := newNodes(t)
	t.Logf("-anynode.seed=%d", *seed)
	end, order := time.Now().Add(*pointsTime), draw(t.Name())
	some := slices.Clone(acts)
	if *pointsFull {
		end = time.Now().AddDate(1, 0, 0)
	} else {
		order.Shuffle(len(some), func(i, j int) { some[i], some[j] = some[j], some[i] })
	}
	cases, tried, of := map[string][]harm{}, 0, 0 // that were not tried yet
	next := *pointsAfter                          // of each call so many were tried
	for round, left := 0, 1; left > 0 && time.Now().Before(end); round++ {
		left = 0
		for _, a := range some {
			if time.Now().After(end) {
				break
			}
			t.Run(a.name, func(t *testing.T) {
				if round == 0 {
					calls := a.try(t, c, harm{}).Calls
					all := a.cases(t.Name(), calls)
					of += len(all)
					cases[a.name] = all[min(*pointsAfter, len(all)):]
					t.Logf("%d points, %d cases:", len(calls), len(all))
					for i, call := range calls {
						t.Logf("%4d %s", i+1, call)
					}
				}
				for n := 0; n < inRow && len(cases[a.name]) > 0 && time.Now().Before(end); n++ {
					h := cases[a.name][0]
					cases[a.name] = cases[a.name][1:]
					tried++
					t.Run(h.String(), func(t *testing.T) { a.try(t, c, h) })
				}
			})
			left += len(cases[a.name])
		}
		if time.Now().Before(end) {
			next += inRow
		}
	}
	t.Logf("%d cases of %d, of %d calls of %d, in the order of -anynode.seed=%d; what comes next: -points.after=%d", tried, of, len(cases), len(acts), *seed, next)
}

// inRow is how many cases of a call are tried one after the other.
const inRow = 3

// draw is what the seed says for a name.
func draw(of string) *rand.Rand {
	name := fnv.New64a()
	_, _ = name.Write([]byte(of))
	return rand.New(rand.NewPCG(*seed, name.Sum64()))
}

// act is a call, of a volume that is in the state before it.
type act struct {
	name      string
	harmed    string // the node whose driver is
	user      string // who uses the volume; empty: the first consumer
	kind      string // of the volume's filesystem
	encrypted bool
	before    func(s *scene)
	call      func(s *scene, ctx context.Context) error // nil: the driver starts
	back      func(s *scene, ctx context.Context) error // the opposite; nil: a CO goes on until the call is through
	used      bool                                      // by its user, once the call is through; after the opposite it is the other way round
	stays     bool                                      // it is used after either
	fenced    bool                                      // who used it before has errors then
	check     func(s *scene)                            // once the call is through; nil: nothing
}

// scene is a volume, and what was written to it.
type scene struct {
	*volume
	kind   string
	user   string
	writer *writer // the last one; nil: there was none
	letGo  func()  // of the controller, if it stands still
}

var first = consumers[0]

func (s *scene) claimed() {
	s.again("claim it", func(ctx context.Context) error { return s.claim(ctx, s.user) })
}

// written has the volume used, and written to.
func (s *scene) written() {
	s.Helper()
	s.claimed()
	s.writes()
}

// writes starts a writer where the volume is used.
func (s *scene) writes() {
	s.Helper()
	s.again("have it up", func(ctx context.Context) error { return s.up(ctx, s.user) })
	if s.kind != co.Block {
		f, err := os.Create(s.file(s.user))
		check.OK(s, err)
		_, err = f.Write(make([]byte, blocks*block))
		check.OK(s, err)
		check.OK(s, f.Sync())
		check.OK(s, f.Close())
	}
	var err error
	s.writer, err = write(s.file(s.user), newTag())
	check.OK(s, err)
	s.eventually("it is written to", func() bool { return s.writer.acked.Load() > blocks })
}

// ended makes sure that a writer noticed nothing, and stops it.
func (s *scene) ended() {
	s.Helper()
	s.writer.stop.Store(true)
	s.writerEnds()
	check.OK(s, s.writer.err)
}

func (s *scene) writerEnds() {
	s.Helper()
	s.eventually("the writer ends", func() bool {
		s.startEnded()
		select {
		case <-s.writer.done:
			return true
		default:
			return false
		}
	})
}

func (s *scene) filled() {
	s.Helper()
	s.written()
	s.ended()
}

func (s *scene) file(node string) string {
	there := s.at(node)
	return there.File(s.target(node))
}

// holds makes sure that what was acknowledged is there.
func (s *scene) holds(node string) {
	s.Helper()
	now, err := read(s.file(node))
	check.OK(s, err)
	check.OK(s, s.writer.lost(now))
}

func (s *scene) stage(ctx context.Context) error {
	there := s.at(s.user)
	return there.Stage(ctx)
}

func (s *scene) unstage(ctx context.Context) error {
	there := s.at(s.user)
	return there.Unstage(ctx)
}

func (s *scene) unpublished() {
	s.again("unpublish it", func(ctx context.Context) error {
		there := s.at(s.user)
		return there.Unpublish(ctx, s.target(s.user))
	})
}

func (s *scene) expand(ctx context.Context) error {
	_, err := s.controller.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{VolumeId: s.of.ID,
		CapacityRange: &csi.CapacityRange{RequiredBytes: s.larger()}, VolumeCapability: s.of.Capability})
	return err
}

func (s *scene) nodeExpand(ctx context.Context) error {
	there := s.at(s.user)
	return there.NodeExpand(ctx, s.target(s.user))
}

// grown makes sure that the consumer has the size.
func (s *scene) grown() {
	s.Helper()
	s.again("grow it on its consumer", s.nodeExpand)
	var size int64
	if s.kind == co.Block {
		f, err := os.Open(s.file(s.user))
		check.OK(s, err)
		size, err = f.Seek(0, io.SeekEnd)
		check.OK(s, err)
		check.OK(s, f.Close())
	} else {
		var st unix.Statfs_t
		check.OK(s, unix.Statfs(s.target(s.user), &st))
		size = int64(st.Blocks) * st.Bsize * 4 / 3 // the filesystem has something for itself
	}
	if size < s.larger() {
		s.Errorf("it has %d bytes, not %d", size, s.larger())
	}
}

func (s *scene) larger() int64 { return 2 * s.of.Size }

// expanded has the volume larger at its home.
func (s *scene) expanded() {
	s.Helper()
	s.again("grow it", s.expand)
}

// rebooted takes the home's exports out of the kernel, and has its machine look as one that has started anew. Once the scene is over it is what it was, and its
// driver, which has read that only once, is started again: else the next start would end what this one has exported.
func (s *scene) rebooted() {
	s.Helper()
	s.agents[home].Kill()
	remove(s)
	boot := filepath.Join(s.dir, "boot_id")
	check.OK(s, os.WriteFile(boot, fmt.Appendf(nil, "11111111-2222-3333-4444-%012d\n", newTag()), 0o600))
	check.OK(s, unix.Mount(boot, "/proc/sys/kernel/random/boot_id", "", unix.MS_BIND, ""))
	s.Cleanup(func() {
		drivertest.Unmount(s, "/proc/sys/kernel/random/boot_id")
		s.agents[home].Kill()
		s.started(s.agents[home])
	})
}

var acts = slices.Concat(stages, unstages, moves, becoming, []act{
	{name: "open an export", harmed: home, kind: co.Block, before: (*scene).claimed, call: (*scene).stage, back: (*scene).unstage, used: true},
	{name: "close an export", harmed: home, kind: co.Block, before: func(s *scene) { s.filled(); s.unpublished() }, call: (*scene).unstage, back: (*scene).stage},
	{name: "end an export", harmed: home, kind: co.Block, before: (*scene).written, fenced: true,
		call: func(s *scene, ctx context.Context) error { return s.release(ctx, first) }},
	{name: "unstage what was fenced", harmed: first, kind: co.Block, encrypted: true, fenced: true, call: (*scene).unstage, before: func(s *scene) {
		s.written()
		s.again("release it", func(ctx context.Context) error { return s.release(ctx, first) })
		s.lost()
		s.eventually("its connection ends", func() bool { return len(connections()) == 0 })
		s.unpublished()
	}},
	{name: "grow at home", harmed: home, kind: co.Block, before: (*scene).written, used: true, call: (*scene).expand, check: (*scene).grown},
	{name: "grow on a consumer, raw and encrypted", harmed: first, kind: co.Block, encrypted: true, before: func(s *scene) { s.written(); s.expanded() }, used: true,
		call: (*scene).nodeExpand, check: (*scene).grown},
	{name: "grow on a consumer, filesystem", harmed: first, kind: "ext4", before: func(s *scene) { s.written(); s.expanded() }, used: true,
		call: (*scene).nodeExpand, check: (*scene).grown},
	{name: "start of the home", harmed: home, kind: co.Block, before: func(s *scene) { s.written(); s.agents[home].Kill() }, used: true},
	{name: "start of the home, exports lost", harmed: home, kind: co.Block, before: func(s *scene) { s.written(); s.agents[home].Kill(); remove(s) }, used: true},
	{name: "start of the home's machine", harmed: home, kind: co.Block, before: func(s *scene) { s.written(); s.rebooted() }, fenced: true},
	{name: "start of a consumer", harmed: first, kind: "ext4", encrypted: true, before: func(s *scene) { s.written(); s.agents[first].Kill() }, used: true},
})

var stages, unstages = func() (stages, unstages []act) {
	for _, v := range []act{{name: "raw", kind: co.Block}, {name: "filesystem", kind: "ext4"}, {name: "raw and encrypted", kind: co.Block, encrypted: true},
		{name: "filesystem, encrypted", kind: "ext4", encrypted: true}} {
		v.harmed = first
		later, ends := v, v
		v.name, v.before, v.call, v.back, v.used = "first stage, "+v.name, (*scene).claimed, (*scene).stage, (*scene).unstage, true
		later.name, later.call, later.back, later.used = "stage, "+later.name, (*scene).stage, (*scene).unstage, true
		later.before = func(s *scene) { s.filled(); s.takenDown() }
		ends.name, ends.call, ends.back = "unstage, "+ends.name, (*scene).unstage, (*scene).stage
		ends.before = func(s *scene) { s.filled(); s.unpublished() }
		stages, unstages = append(stages, v, later), append(unstages, ends)
	}
	return stages, unstages
}()

func (s *scene) takenDown() {
	s.Helper()
	s.again("take it down", func(ctx context.Context) error { return s.down(ctx, s.user) })
}

// harm is what happens at a system call, the first being 1. With 0 nothing does.
type harm struct {
	at      int
	all     bool       // what the driver has started dies with it
	fail    unix.Errno // 0: the driver is killed
	atStart int        // the one of the start after that, at which it is killed again; 0: it is not
	back    bool       // the opposite is called then
}

func (h harm) String() string {
	text := fmt.Sprintf("%d killed", h.at)
	if h.fail != 0 {
		text = fmt.Sprintf("%d %s", h.at, unix.ErrnoName(h.fail))
	}
	if h.all {
		text += " with all"
	}
	if h.atStart != 0 {
		text += fmt.Sprintf(" and at %d of the start", h.atStart)
	}
	if h.back {
		text += " and back"
	}
	return text
}

// cases are all that can happen in a call, in a random order, which for each point is drawn by itself: so it is much the same in another run that has a point more.
// Those come first that are most unlike others: of each point a crash and an error.
func (a act) cases(of string, calls []trace.Call) []harm {
	type drawn struct {
		harm
		more bool
		turn uint64
	}
	var every []drawn
	for i, c := range calls {
		if strings.HasSuffix(c.Path, "/log") { // what the driver says
			continue
		}
		random := draw(fmt.Sprintf("%s/%d", of, i+1))
		back := func() bool { return a.back != nil && random.IntN(2) == 0 }
		dies := harm{at: i + 1, all: random.IntN(2) == 0, back: back()}
		if random.IntN(4) == 0 {
			dies.atStart = 1 + random.IntN(startPoints)
		}
		all, errnos := []harm{dies}, c.Errors()
		if !trace.CanFail {
			errnos = nil
		}
		for _, n := range random.Perm(len(errnos)) {
			all = append(all, harm{at: i + 1, fail: errnos[n], back: back()})
		}
		first := min(2, len(all))
		if trace.Alike(calls, i) {
			all = all[random.IntN(first):][:1]
			first = 0
		}
		for n, h := range all {
			every = append(every, drawn{h, n >= first, random.Uint64()})
		}
	}
	slices.SortFunc(every, func(x, y drawn) int {
		if x.more != y.more {
			return map[bool]int{false: -1, true: 1}[x.more]
		}
		return cmp.Compare(x.turn, y.turn)
	})
	all := make([]harm, len(every))
	for i, one := range every {
		all[i] = one.harm
	}
	return all
}

// startPoints is about how many points a start has.
const startPoints = 40

// try makes the call, has the harm come, and goes on.
func (a act) try(t *testing.T, c *nodes, h harm) trace.Result {
	in := c.encrypted(a.encrypted)
	in.TB = t
	s := &scene{volume: in.create(fmt.Sprint("points-", newTag()), a.kind), kind: a.kind, user: cmp.Or(a.user, first), letGo: func() {}}
	a.before(s)
	var at trace.Call
	decide := func(n int, c trace.Call) trace.Verdict {
		if n != h.at || n == 0 || h.fail != 0 && !slices.Contains(c.Errors(), h.fail) {
			return trace.Verdict{}
		}
		at = c
		return trace.Verdict{Kill: h.fail == 0, All: h.all, Fail: h.fail}
	}
	result := s.course(a, decide)
	t.Logf("%s: %s", h, at)
	if len(result.Survivors) > 0 {
		t.Errorf("children %v outlived the driver", result.Survivors)
	}
	agent, dead := s.agents[a.harmed], result.Killed
	if dead && h.atStart > 0 {
		dead = s.startTraced(agent, func(n int, _ trace.Call) trace.Verdict { return trace.Verdict{Kill: n == h.atStart} }).Killed
	}
	if dead || ended(agent) {
		s.started(agent)
	}
	s.goOn(a, h.back)
	return result
}

// course makes the call under a trace.
func (s *scene) course(a act, decide func(n int, c trace.Call) trace.Verdict) trace.Result {
	s.Helper()
	agent := s.agents[a.harmed]
	if a.call == nil {
		return s.startTraced(agent, decide)
	}
	tracer, err := trace.Attach(agent.Pid(), decide)
	check.OK(s, err)
	ctx, cancel := context.WithTimeout(s.Context(), patient)
	defer cancel()
	go func() { // some calls wait for a driver that is dead
		<-tracer.Dead()
		time.AfterFunc(hold/2, cancel)
	}()
	failure := a.call(s, ctx)
	result, err := tracer.Detach()
	check.OK(s, err)
	if failure != nil {
		s.Logf("the answer: %v", failure)
		if status.Code(failure) == codes.Unknown {
			s.Error("the answer has no code")
		}
	}
	return result
}

// startTraced starts a driver that is dead under a trace, which begins with its first step. It may end by itself.
func (s *scene) startTraced(agent *process.Driver, decide func(n int, c trace.Call) trace.Verdict) trace.Result {
	s.Helper()
	held := s.held(agent.Node)
	check.OK(s, os.WriteFile(held, nil, 0o600))
	check.OK(s, agent.Start())
	var info unix.Siginfo
	check.OK(s, unix.Waitid(unix.P_PID, agent.Pid(), &info, unix.WSTOPPED|unix.WNOWAIT, nil))
	check.OK(s, os.Remove(held))
	tracer, err := trace.Attach(agent.Pid(), decide)
	check.OK(s, err)
	check.OK(s, syscall.Kill(agent.Pid(), syscall.SIGCONT))
	ctx, cancel := context.WithTimeout(s.Context(), patient)
	defer cancel()
	failure := agent.Ready(ctx)
	result, err := tracer.Detach()
	check.OK(s, err)
	if failure != nil && !result.Killed && !ended(agent) {
		s.Error(failure)
	}
	return result
}

func (s *scene) started(agent *process.Driver) {
	s.Helper()
	check.OK(s, agent.Start())
	ctx, cancel := context.WithTimeout(context.WithoutCancel(s.Context()), patient) // a cleanup calls it, too
	defer cancel()
	check.OK(s, agent.Ready(ctx))
}

func ended(d *process.Driver) bool {
	select {
	case <-d.Ended():
		return true
	default:
		return false
	}
}

// startEnded starts each driver that has ended by itself, as a kubelet does: one that could not reach the network when it started ends once it can.
func (s *scene) startEnded() {
	s.Helper()
	for _, agent := range s.agents {
		if ended(agent) {
			s.started(agent)
		}
	}
}

// again is nodes.again, with startEnded.
func (s *scene) again(what string, call func(ctx context.Context) error) {
	s.Helper()
	s.nodes.again(what, func(ctx context.Context) error {
		s.startEnded()
		return call(ctx)
	})
}

// goOn goes on after a call that was cut short, up to the end of the volume.
func (s *scene) goOn(a act, back bool) {
	s.Helper()
	if call := a.call; back {
		s.again("the opposite", func(ctx context.Context) error { return a.back(s, ctx) })
	} else if call != nil {
		s.again("the call", func(ctx context.Context) error { return call(s, ctx) })
	}
	if a.check != nil {
		a.check(s)
	}
	switch {
	case a.fenced:
		s.lost()
	case s.writer != nil:
		s.ended()
	}
	if a.stays || a.used != back {
		s.again("have it up", func(ctx context.Context) error { return s.up(ctx, s.user) })
		if s.writer == nil {
			s.writes()
			s.ended()
		}
		s.holds(s.user)
	}
	s.takenDown()
	s.nothingLeft("connections", func() []string {
		return slices.DeleteFunc(left(), func(path string) bool { return !strings.HasPrefix(path, "/sys/class") })
	})
	s.again("release it", func(ctx context.Context) error { return s.release(ctx, s.user) })
	s.nothingLeft("in the kernel", func() []string { return append(left(), stacked(s.dir)...) })
	s.nothingLeft("in the records", s.labels)
	s.again("claim it for its home", func(ctx context.Context) error { return s.claim(ctx, home) })
	if s.writer != nil {
		s.again("have it at home", func(ctx context.Context) error { return s.up(ctx, home) })
		s.holds(home)
		s.again("take it down at home", func(ctx context.Context) error { return s.down(ctx, home) })
	}
	s.again("release it at home", func(ctx context.Context) error { return s.release(ctx, home) })
	s.again("delete it", s.of.Delete)
	s.nothingLeft("in the pools", func() []string {
		files, _ := filepath.Glob(filepath.Join(s.dir, "pool-of-*", "volumes", "*"))
		return append(files, stacked(s.dir)...)
	})
}

// lost waits until the writer has found that it has the volume no more.
func (s *scene) lost() {
	s.Helper()
	s.writerEnds()
	if s.writer.err == nil {
		s.Error("the writer ended without an error")
	}
}

// connections are those of left.
func connections() []string {
	return slices.DeleteFunc(left(), func(path string) bool { return !strings.HasPrefix(path, "/sys/class") })
}

func (s *scene) nothingLeft(where string, left func() []string) {
	s.Helper()
	if found := drivertest.Gone(left); len(found) > 0 {
		s.Errorf("left %s: %v\n%s", where, found, s.logs())
	}
}

// stacked are the mounts, loop devices, and devices of the device mapper.
func stacked(dir string) []string {
	all := drivertest.Leftovers(dir)
	found, _ := filepath.Glob("/sys/block/dm-*/dm/name")
	for _, path := range found {
		name, _ := os.ReadFile(path)
		all = append(all, "mapper device "+strings.TrimSpace(string(name)))
	}
	return all
}

// labels are the records that still say that something is exported.
func (s *scene) labels() (all []string) {
	records, _ := filepath.Glob(filepath.Join(s.dir, "pool-of-*", "volumes", "*.rec"))
	for _, path := range records {
		text, err := os.ReadFile(path)
		check.OK(s, err)
		if strings.Contains(string(text), `"export":`) {
			all = append(all, path)
		}
	}
	return all
}
