// Package soak has many callers work on few volumes at once, with calls that are made twice,
// given up half-way, or cut short by a driver that is killed, and searches, for each family of
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

	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

var (
	seedFlag = flag.Uint64("soak.seed", 0, "seed of the calls; 0: another one each time")
	timeFlag = flag.Duration("soak.time", 30*time.Second, "how long")
	raced    bool // this test, and so the driver, has the race detector
)

const (
	callers   = 2 // of each family
	callsEach = 8 // in a round
	miB       = 1 << 20
	retryTime = 60 * time.Second
)

// soak is the driver under test, and what is made with it.
type soak struct {
	*drivertest.Process
	t        *testing.T
	begin    time.Time
	pool     string
	families []*family
}

func (s *soak) now() time.Duration { return time.Since(s.begin) }

func TestSoak(t *testing.T) {
	drivertest.NeedRoot(t)
	seed := *seedFlag
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	fmt.Printf("soak: -soak.seed=%d makes the same calls again\n", seed)
	s := begin(t)
	ok(t, s.up())
	for i, filesystem := range []string{"ext4", "xfs", block} {
		s.families = append(s.families, newFamily(s, filesystem, seed+uint64(i)))
	}
	random := rand.New(rand.NewPCG(seed, 0))
	rounds, kills := 0, 0
	for ; s.now() < *timeFlag && !t.Failed(); rounds++ {
		killed := s.round(random)
		kills += btoi(killed)
	}
	calls, answers := 0, map[string]int{}
	for _, f := range s.families {
		calls += f.calls
		for answer, n := range f.answers {
			answers[answer] += n
		}
	}
	fmt.Printf("soak: %d rounds, %d calls, %d kills of the driver, race detector %v; answers: %v\n", rounds, calls, kills, raced, answers)
	log, err := os.ReadFile(filepath.Join(s.Dir, "log"))
	ok(t, err)
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
	image, folder := filepath.Join(dir, "image"), filepath.Join(dir, "pool")
	ok(t, os.WriteFile(image, nil, 0o600))
	ok(t, os.Truncate(image, 8<<30))
	ok(t, os.Mkdir(folder, 0o700))
	drivertest.Run(t, "mkfs.xfs", "-q", image)
	drivertest.MountLoop(t, image, folder)
	t.Cleanup(func() {
		if t.Failed() {
			drivertest.ClearAway(filepath.Join(dir, "work"))
			drivertest.ClearAway(filepath.Join(folder, "volumes"))
		}
		ok(t, unix.Unmount(folder, 0))
	})
	ok(t, os.Mkdir(filepath.Join(dir, "work"), 0o700))
	binary, err := drivertest.Build(t.TempDir(), flags...)
	ok(t, err)
	p, err := drivertest.NewProcess(binary, dir, "--node-id="+drivertest.Node, "--pool=default=file://"+folder+"?reservePercent=0", "-v=2")
	ok(t, err)
	t.Cleanup(p.Close)
	return &soak{Process: p, t: t, begin: time.Now(), pool: folder}
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
	for _, f := range s.families {
		for i := range callers {
			work.Go(func() { f.work(i) })
		}
	}
	if killed = random.IntN(3) == 0; killed {
		time.Sleep(min(time.Duration(random.ExpFloat64()*float64(150*time.Millisecond)), time.Second))
		begin := s.now()
		s.Kill()
		if err := s.up(); err != nil {
			s.t.Errorf("restart: %v", err)
		}
		for _, f := range s.families {
			f.note(operation{in: input{kind: restart}, begin: begin, end: s.now()})
		}
	}
	ended := make(chan struct{})
	go func() { work.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(2 * retryTime):
		s.t.Fatalf("callers are stuck; the driver's log:\n%s", s.Log())
	}
	for _, f := range s.families {
		f.quiet()
		f.observe()
		f.judge()
	}
	return killed
}

// again makes a call until it is through.
func again(call func(ctx context.Context) error) error {
	for deadline := time.Now().Add(retryTime); ; time.Sleep(5 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(context.Background(), callTime)
		err := call(ctx)
		cancel()
		if !unclear(err) && !isAborted(err) || time.Now().After(deadline) {
			return err
		}
	}
}

// empty takes down and deletes all that there is, and makes sure that nothing is left.
func (s *soak) empty() {
	for _, f := range s.families {
		f.takeDown()
	}
	for _, pattern := range []string{"pool/volumes/*", "pool/snapshots/*", "work/*/*/*"} {
		found, _ := filepath.Glob(filepath.Join(s.Dir, pattern))
		for _, path := range found {
			s.t.Errorf("left behind: %s", path)
		}
	}
	for _, line := range drivertest.Gone(func() []string {
		return append(drivertest.Leftovers(filepath.Join(s.Dir, "work")), drivertest.Leftovers(filepath.Join(s.pool, "volumes"))...)
	}) {
		s.t.Errorf("left behind: %s", line)
	}
	if out, err := exec.Command("pgrep", "-P", fmt.Sprint(s.Pid())).Output(); err == nil {
		s.t.Errorf("left behind: programs %s", out)
	}
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
