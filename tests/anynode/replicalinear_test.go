package anynode

import (
	"cmp"
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/linear"
)

var linearTime = flag.Duration("linear.time", time.Minute, "for how long TestReplicaLinear goes on, with all its volumes")

const (
	contended = 24 // blocks
	mixed     = 4  // workers that read and write
	reading   = 2  // workers that only read
)

// place is where in the volume a contended block is: some are beside each other, some far away.
func place(n int) int64 { return int64(n%6)*block + int64(n/6)*13*mib }

// access is a read or a write of a block, each of which writes a number of its own. One that had an error may have been done or not.
type access struct {
	node       string
	write      bool
	maybe      bool
	number     uint64
	begin, end time.Duration
}

func (a access) When() (begin, end time.Duration) { return a.begin, a.end }
func (a access) Maybe() bool                      { return a.maybe }
func (a access) Outcomes(from uint64) []uint64 {
	if a.write || a.number == from {
		return []uint64{a.number}
	}
	return nil
}

func (a access) String() string {
	what := map[bool]string{true: "writes", false: "reads"}[a.write]
	if a.maybe {
		what = "perhaps " + what
	}
	return fmt.Sprintf("%14s - %14s  %-6s %s %d", a.begin, a.end, a.node, what, a.number)
}

// shared is a volume whose blocks many work on at once, on one node after the other.
type shared struct {
	*mirrored
	random *rand.Rand
	began  time.Time
	number atomic.Uint64 // that was written last
	user   string
	crowd  *crowd

	states  [contended]map[uint64]bool // what each block may have had when the history began
	history [contended][]access

	rounds, takeovers, handovers, closed, accesses, unknown, late int
}

// TestReplicaLinear: many read and write the same few blocks of a volume with several legs, past the page cache, while drivers, connections, API server and controller fail in an order drawn at random, and the volume goes
// from node to node, in good order or taken from one that still writes. Of each block there is an order of all reads and writes, each between its call and its answer, in which every read has what was written last:
// nothing that was acknowledged is lost, and nothing that was read is taken back. In the end no leg differs, and nothing is left.
func TestReplicaLinear(t *testing.T) {
	c := newNodes(t)
	t.Logf("-anynode.seed=%d", *seed)
	volumes := [][]string{{home, consumers[1]}, {consumers[0], home, consumers[1]}}
	for _, on := range volumes {
		t.Run(fmt.Sprintf("%d legs", len(on)), func(t *testing.T) {
			in := *c
			in.TB = t
			s := &shared{mirrored: in.mirror(fmt.Sprintf("linear, %d legs", len(on)), co.Block, on...), random: draw(t.Name()), began: time.Now(), user: consumers[0]}
			t.Cleanup(func() { showKernel(t) }) // before anything is removed, which may wait for ever
			for i := range s.states {
				s.states[i] = map[uint64]bool{0: true}
			}
			s.claims(s.user)
			s.staged(s.user)
			for time.Since(s.began) < *linearTime/time.Duration(len(volumes)) && !t.Failed() {
				s.round()
			}
			s.over()
			t.Logf("%d rounds in %v, %d takeovers, %d handovers, of %d of which all legs were closed; %d reads and writes, of which %d had no answer; %d reads of nodes that were cut off", s.rounds, s.now(), s.takeovers, s.handovers, s.closed, s.accesses, s.unknown, s.late)
		})
	}
}

// showKernel logs, for a test that has failed, what the kernel has: devices, connections, and who waits for what.
func showKernel(t *testing.T) {
	if !t.Failed() {
		return
	}
	_ = os.WriteFile("/proc/sysrq-trigger", []byte("w"), 0)
	for _, command := range []string{"dmsetup info -c", "dmsetup table", "timeout 5 dmsetup status --noflush", "grep . /sys/class/nvme/*/state /sys/class/nvme/*/subsysnqn", "grep . /sys/block/*/inflight | grep -v '0 *0$'", "dmesg | tail -n 400"} {
		out, err := exec.Command("sh", "-c", command).CombinedOutput()
		t.Logf("%s: %v\n%s", command, err, out)
	}
}

func (s *shared) now() time.Duration { return time.Since(s.began) }

func (s *shared) staged(node string) {
	s.Helper()
	s.again("stage it on "+node, func(ctx context.Context) error { return s.up(ctx, node) })
}

func (s *shared) tookDown(node string) {
	s.Helper()
	s.again("take it down on "+node, func(ctx context.Context) error { return s.down(ctx, node) })
}

// round has something fail while all work, or while the volume goes to another node, and makes sure that what was read is what was written.
func (s *shared) round() {
	s.Helper()
	s.rounds++
	s.work()
	time.Sleep(time.Duration(s.random.IntN(1000)) * time.Millisecond)
	next := s.others(s.user)[s.random.IntN(2)]
	switch s.random.IntN(4) {
	case 0:
		s.takeOver(next)
	case 1:
		s.handOver([]string{next, next, s.user}[s.random.IntN(3)])
	default:
		<-s.fail()
	}
	s.crowd.goesOn(s)
	s.crowd.ends(s, 0)
	s.judge()
	if s.random.IntN(2) == 0 { // else what fails next finds legs that are joining
		s.whole()
	}
}

// handOver gives the volume to another node in good order, or to the same one once more by the same claim, while something fails. If all its legs count as
// closed in between, they are equal: the next user takes them for that.
func (s *shared) handOver(next string) {
	s.Helper()
	s.handovers++
	s.Logf("%s: from %s to %s", s.now(), s.user, next)
	healed := s.fail()
	s.crowd.ends(s, 0)
	s.tookDown(s.user)
	if next != s.user {
		s.releases(s.user)
	}
	if v := s.object(); v.Status.Closed > 0 && v.Status.Closed == v.Status.Opened {
		s.closed++
		s.sameAmong(v.Current())
	}
	if next != s.user {
		s.claims(next)
	}
	s.staged(next)
	s.user = next
	s.work()
	<-healed
}

// takeOver gives the volume to another node while all work on the first one, which may be cut off from everything, as a CO does that takes it for dead.
func (s *shared) takeOver(next string) {
	s.Helper()
	s.takeovers++
	old, before := s.user, s.crowd
	before.released = s.now() // before anything fails: from then on writes may be held
	var healed <-chan struct{}
	if s.random.IntN(3) > 0 {
		healed = s.strike(s.lasting(), failure{old + " is gone", func() func() {
			links, api := cutOff(s.nodes, old), unheard(s.nodes, old)
			start := func() {}
			if s.random.IntN(2) == 0 {
				start = killed(s.nodes, s.agents[old])
			}
			return func() { links(); api(); start() }
		}})
	} else {
		healed = s.fail()
	}
	s.Logf("%s: %s takes it from %s", s.now(), next, old)
	s.releases(old)
	s.claims(next)
	s.staged(next)
	fenced := s.now()
	s.user = next
	s.work()
	<-healed
	s.tookDown(old)
	before.ends(s, fenced)
}

// others are the nodes but one.
func (s *shared) others(node string) []string {
	return slices.DeleteFunc([]string{home, consumers[0], consumers[1]}, func(other string) bool { return other == node })
}

// failure is something that fails, and is well again later.
type failure struct {
	name   string
	strike func() (heal func())
}

// fail has one thing fail, or two, for a while.
func (s *shared) fail() (healed <-chan struct{}) {
	s.Helper()
	node := func() string { return append(s.others(""), s.user)[s.random.IntN(4)] } // the user more often
	all := []func() failure{
		func() failure {
			n := node()
			return failure{n + " is cut off", func() func() { return cutOff(s.nodes, n) }}
		},
		func() failure {
			n := consumers[s.random.IntN(2)]
			return failure{n + " is cut off from home", func() func() { s.link(n, false); return func() { s.link(n, true) } }}
		},
		func() failure {
			n := node()
			return failure{"driver of " + n + " killed", func() func() { return killed(s.nodes, s.agents[n]) }}
		},
		func() failure {
			n := node()
			return failure{"driver of " + n + " frozen", func() func() { return frozen(s.agents[n]) }}
		},
		func() failure {
			n := node()
			return failure{n + " is without API server", func() func() { return unheard(s.nodes, n) }}
		},
		func() failure {
			return failure{"API server frozen", func() func() { return apitest.Get(s).Freeze(s) }}
		},
		func() failure {
			return failure{"controller killed", func() func() { return killed(s.nodes, s.controller) }}
		},
	}
	var some []failure
	for _, i := range s.random.Perm(len(all))[:1+s.random.IntN(2)] {
		some = append(some, all[i]())
	}
	return s.strike(s.lasting(), some...)
}

// lasting is how long something fails: for some time less, or more, than what does not answer is waited for.
func (s *shared) lasting() time.Duration {
	return time.Duration(s.random.IntN(9000)) * time.Millisecond
}

func (s *shared) strike(lasts time.Duration, some ...failure) <-chan struct{} {
	s.Helper()
	var heals []func()
	var names []string
	for _, f := range some {
		heals, names = append(heals, f.strike()), append(names, f.name)
	}
	s.Logf("%s: %s, for %s", s.now(), strings.Join(names, ", and "), lasts)
	healed := make(chan struct{})
	go func() {
		defer close(healed)
		time.Sleep(lasts)
		for _, heal := range heals {
			heal()
		}
	}()
	return healed
}

// whole waits until all legs are current. One that failed several times while it joined is tried again after a minute.
func (s *shared) whole() {
	s.Helper()
	for end := time.Now().Add(2 * time.Minute); len(s.object().Current()) < len(s.legs) && time.Now().Before(end); {
		time.Sleep(100 * time.Millisecond)
	}
	s.current(s.legs...)
}

// judge searches for an order of what was read and written, block by block.
func (s *shared) judge() {
	s.Helper()
	for i, all := range s.history {
		states, at, err := linear.Search(s.states[i], all)
		if err != nil || len(states) == 0 {
			bad := all[at]
			slices.SortFunc(all, func(a, b access) int { return cmp.Compare(a.begin, b.begin) })
			n := slices.Index(all, bad)
			s.Fatalf("block %d: no order of these explains\n%s (%v)\nbefore: %v\n%s\n%s", i, bad, err, s.states[i], story(all[max(0, n-40):min(len(all), n+20)]), s.logs())
		}
		s.states[i], s.history[i] = states, nil
	}
}

func story(all []access) string {
	var text strings.Builder
	for _, a := range all {
		fmt.Fprintln(&text, a)
	}
	return text.String()
}

// over makes sure that all legs are equal and have what was written last, and deletes the volume.
func (s *shared) over() {
	s.Helper()
	s.whole()
	s.tookDown(s.user)
	s.releases(s.user)
	s.same()
	for _, node := range s.on { // each reads what it has itself
		s.claims(node)
		s.staged(node)
		s.user = node
		f := open(s, node)
		data := aligned()
		for n := range contended {
			a, err := s.access(node, f, data, n, false)
			check.OK(s, err)
			s.history[n] = append(s.history[n], a)
		}
		check.OK(s, f.Close())
		s.judge()
		s.tookDown(node)
		s.releases(node)
	}
	s.delete()
}

func open(s *shared, node string) *os.File {
	s.Helper()
	f, err := os.OpenFile(s.target(node), os.O_RDWR|unix.O_DIRECT, 0)
	check.OK(s, err)
	return f
}

// crowd are those who work on a node.
type crowd struct {
	node     string
	released time.Duration // when the volume was about to be taken from it
	stop     atomic.Bool
	answers  atomic.Uint64
	working  sync.WaitGroup

	mu      sync.Mutex
	err     error
	history [contended][]access
}

// work begins to work on the node that uses the volume.
func (s *shared) work() {
	s.Helper()
	w := &crowd{node: s.user}
	for i := range mixed + reading {
		f, random := open(s, w.node), rand.New(rand.NewPCG(s.random.Uint64(), 0))
		w.working.Go(func() {
			defer f.Close()
			w.works(s, f, random, i < mixed)
		})
	}
	s.crowd = w
}

func (w *crowd) works(s *shared, f *os.File, random *rand.Rand, writes bool) {
	for data := aligned(); !w.stop.Load(); {
		n := random.IntN(contended)
		a, err := s.access(w.node, f, data, n, writes && random.IntN(2) == 0)
		if err == nil && a.write && random.IntN(8) == 0 {
			err = unix.Fdatasync(int(f.Fd()))
		}
		w.mu.Lock()
		if a.write || !a.maybe { // a read without an answer says nothing
			w.history[n] = append(w.history[n], a)
		}
		if err != nil {
			w.err = err
		}
		w.mu.Unlock()
		if err != nil {
			return
		}
		w.answers.Add(1)
		time.Sleep(time.Duration(random.IntN(2000)) * time.Microsecond)
	}
}

// access reads or writes a block on a node. A read that meets a write of the same block may get a part of each: the page cache of the pools' filesystem, which
// is in memory, does not keep them apart. Such a read is made again.
func (s *shared) access(node string, f *os.File, data []byte, n int, write bool) (access, error) {
	a := access{node: node, write: write}
	do := f.ReadAt
	if write {
		do, a.number = f.WriteAt, s.number.Add(1)
		for at := 0; at < block; at += 8 {
			binary.LittleEndian.PutUint64(data[at:], a.number)
		}
	}
	a.begin = s.now()
	for tries := 1; ; tries++ {
		_, err := do(data, place(n))
		a.end = s.now()
		if a.maybe = err != nil; a.maybe || write {
			return a, err
		}
		a.number = binary.LittleEndian.Uint64(data)
		also := a.number
		for at := 0; at < block && also == a.number; at += 8 {
			also = binary.LittleEndian.Uint64(data[at:])
		}
		if also == a.number {
			return a, nil
		}
		if tries == 10 {
			return a, fmt.Errorf("block %d has both %d and %d", n, a.number, also)
		}
	}
}

// goesOn makes sure that they have answers.
func (w *crowd) goesOn(s *shared) {
	s.Helper()
	at := w.answers.Load()
	s.eventually("it is worked on, on "+w.node, func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.err != nil {
			s.Fatalf("on %s: %v\n%s", w.node, w.err, s.logs())
		}
		return w.answers.Load() > at+100
	})
}

// ends stops them, and adds what they did to the history. If they were fenced, all have errors; and whatever had none by then was done before that, or never will be.
func (w *crowd) ends(s *shared, fenced time.Duration) {
	s.Helper()
	w.stop.Store(fenced == 0)
	ended := make(chan struct{})
	go func() { w.working.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(patient):
		s.Fatalf("those who work on %s do not end\n%s", w.node, s.logs())
	}
	if (w.err != nil) != (fenced != 0) {
		s.Errorf("those who work on %s, from which the volume was taken at %s: %v", w.node, fenced, w.err)
	}
	for n, all := range w.history {
		for _, a := range all {
			s.accesses++
			switch {
			case a.maybe:
				s.unknown++
				if a.begin > fenced {
					continue
				}
				a.end = fenced
			case fenced != 0 && !a.write && a.end > w.released: // it may show what is held, and what is old
				s.late++
				continue
			}
			s.history[n] = append(s.history[n], a)
		}
	}
}
