// Package soak has many callers work on few volumes at once, with calls that are made twice,
// given up half-way, or cut short by a driver that is killed, and searches, for each group of
// volumes, an order of the calls in which every answer can be.
package soak

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/process"
)

var (
	seedFlag = flag.Uint64("soak.seed", 0, "seed of the calls; 0: another one each time")
	timeFlag = flag.Duration("soak.time", 30*time.Second, "how long")
	raced    bool // this test, and so the driver, has the race detector
)

const (
	callers   = 2 // of each environment
	callsEach = 8 // in a round
	miB       = 1 << 20
	retryTime = 60 * time.Second
)

// soak is the driver under test, and what is made with it.
type soak struct {
	*process.Driver
	t            *testing.T
	begin        time.Time
	pool         string
	environments []*environment
}

// work is the directory of staging paths and targets.
func (s *soak) work() string { return filepath.Join(s.Dir, "work") }

func (s *soak) now() time.Duration { return time.Since(s.begin) }

func TestSoak(t *testing.T) {
	drivertest.NeedRoot(t)
	seed := *seedFlag
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	fmt.Printf("soak: -soak.seed=%d makes the same calls again\n", seed)
	s := begin(t)
	check.OK(t, s.up())
	for i, filesystem := range []string{"ext4", "xfs", block} {
		s.environments = append(s.environments, newEnvironment(s, filesystem, seed+uint64(i)))
	}
	random := rand.New(rand.NewPCG(seed, 0))
	rounds, kills := 0, 0
	for ; s.now() < *timeFlag && !t.Failed(); rounds++ {
		killed := s.round(random)
		kills += btoi(killed)
	}
	calls, answers := 0, map[string]int{}
	for _, e := range s.environments {
		calls += e.calls
		for answer, n := range e.answers {
			answers[answer] += n
		}
	}
	fmt.Printf("soak: %d rounds, %d calls, %d kills of the driver, race detector %v; answers: %v\n", rounds, calls, kills, raced, answers)
	log, err := os.ReadFile(filepath.Join(s.Dir, "log"))
	check.OK(t, err)
	if strings.Contains(string(log), "DATA RACE") {
		t.Error("the race detector has found something")
	}
	if !t.Failed() {
		s.empty()
	}
	if t.Failed() {
		t.Logf("seed %d; the end of the driver's log:\n%s", seed, s.Log())
	}
}

// begin builds the driver, and makes a filesystem for its pool that can share blocks.
func begin(t *testing.T) *soak {
	var flags []string
	if raced {
		flags = append(flags, "-race")
	}
	var st unix.Statfs_t
	if unix.Statfs("/dev/shm", &st) == nil && int64(st.Bavail)*st.Bsize > 4<<30 {
		t.Setenv("TMPDIR", "/dev/shm")
	}
	dir := drivertest.Dir(t)
	pool := filepath.Join(dir, "pool")
	drivertest.MountNew(t, "xfs", pool, 8<<30)
	t.Cleanup(func() {
		if t.Failed() {
			drivertest.ClearAway(filepath.Join(dir, "work"))
			drivertest.ClearAway(filepath.Join(pool, "volumes"))
		}
	})
	binary, err := process.Build(t.TempDir(), flags...)
	check.OK(t, err)
	p, err := process.New(dir, drivertest.Node, binary, "--pool=default=file://"+pool+"?reservePercent=0", "-v=2")
	check.OK(t, err)
	t.Cleanup(p.Close)
	return &soak{Driver: p, t: t, begin: time.Now(), pool: pool}
}

// up starts the driver.
func (s *soak) up() error {
	ctx, cancel := context.WithTimeout(s.t.Context(), retryTime)
	defer cancel()
	return errors.Join(s.Start(), s.Ready(ctx))
}

// round has all callers make their calls; the driver may be killed meanwhile. Then nobody
// calls, and everybody looks.
func (s *soak) round(random *rand.Rand) (killed bool) {
	var work sync.WaitGroup
	for _, e := range s.environments {
		for i := range callers {
			work.Go(func() { e.work(i) })
		}
	}
	if killed = random.IntN(3) == 0; killed {
		time.Sleep(min(time.Duration(random.ExpFloat64()*float64(150*time.Millisecond)), time.Second))
		begin := s.now()
		s.Kill()
		if err := s.up(); err != nil {
			s.t.Errorf("restart: %v", err)
		}
		for _, e := range s.environments {
			e.note(operation{in: input{kind: restart}, begin: begin, end: s.now()})
		}
	}
	ended := make(chan struct{})
	go func() { work.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(2 * retryTime):
		s.t.Fatalf("callers are stuck; the driver's log:\n%s", s.Log())
	}
	for _, e := range s.environments {
		e.quiet()
		e.observe()
		e.judge()
	}
	return killed
}

// again makes a call until it is through.
func again(call func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), retryTime)
	defer cancel()
	return co.Again(ctx, func() error { return call(ctx) })
}

// empty takes down and deletes all that there is, and makes sure that nothing is left.
func (s *soak) empty() {
	for _, e := range s.environments {
		e.takeDown()
	}
	for _, pattern := range []string{"pool/volumes/*", "pool/snapshots/*", "work/*/*"} {
		found, _ := filepath.Glob(filepath.Join(s.Dir, pattern))
		for _, path := range found {
			s.t.Errorf("left behind: %s", path)
		}
	}
	for _, line := range drivertest.Gone(func() []string {
		return append(drivertest.Leftovers(s.work()), drivertest.Leftovers(filepath.Join(s.pool, "volumes"))...)
	}) {
		s.t.Errorf("left behind: %s", line)
	}
	for _, pid := range drivertest.Gone(func() []string {
		out, _ := exec.Command("pgrep", "-P", fmt.Sprint(s.Pid())).Output() // it fails where there is none
		return strings.Fields(string(out))
	}) {
		s.t.Errorf("left behind: program %s", pid)
	}
}
