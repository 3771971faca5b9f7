// Package points kills the driver at each of its state-changing system calls, and makes
// sure that every volume is whole and nothing is leaked.
package points

import (
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/tests/points/trace"
)

var (
	full = flag.Bool("points.full", os.Getenv("POINTS") == "all", "all points of all calls, not a sample (POINTS=all does it too)")
	seed = flag.Uint64("points.seed", 0, "seed of the sample; 0: the number of the day")
)

func today() uint64 {
	if *seed != 0 {
		return *seed
	}
	return uint64(time.Now().Unix() / 86400)
}

// samples is how many points of each call a sample has.
const samples = 2

// TestPoints: for each call that changes something, and for each point of it, kill the
// driver there, restart it, and
//
//   - make the call again, as a sidecar does: it converges, all data is whole;
//   - or give up, as a CO may: what was begun can be undone.
//
// Either way nothing is left in the end.
func TestPoints(t *testing.T) {
	drivertest.NeedRoot(t)
	_, err := program()
	ok(t, err)
	seed := today()
	if !*full {
		fmt.Printf("points: a sample; -points.seed=%d has the same again, -points.full has all\n", seed)
	}
	random := rand.New(rand.NewPCG(seed, 0))
	sites := map[string]*site{copying: newSite(t, copying), sharing: newSite(t, sharing)}
	for _, s := range scenarios {
		t.Run(s.name, func(t *testing.T) {
			begin := time.Now()
			calls, undoable := untouched(t, sites[s.fs], s)
			points, kills := numbers(len(calls), *full, random), 0
			for i := 0; i < len(points); i++ {
				n := points[i]
				beyond := false
				for _, giveUp := range []bool{false, true} {
					if (giveUp && !undoable) || (!*full && undoable && giveUp != (i%2 == 1)) {
						continue
					}
					killed := false
					t.Run(fmt.Sprintf("%d give-up=%v", n, giveUp), func(t *testing.T) { killed = kill(t, sites[s.fs], s, n, giveUp) })
					if killed {
						kills++
					} else if !giveUp {
						beyond = true
					}
				}
				if *full && i == len(points)-1 && !beyond {
					points = append(points, n+1) // this time there was more to do
				}
			}
			fmt.Printf("points: %-42s %3d points, %3d kills, %5.1f s: %s\n", s.name, len(calls), kills, time.Since(begin).Seconds(), histogram(calls))
		})
	}
}

// numbers are the points to try: all of 1 to n and the one beyond, or a sample.
func numbers(n int, all bool, random *rand.Rand) (points []int) {
	for i := range n + 1 {
		points = append(points, i+1)
	}
	if all {
		return points
	}
	chosen := map[int]bool{}
	for len(chosen) < min(samples, n) {
		chosen[points[random.IntN(n)]] = true
	}
	return slices.Sorted(maps.Keys(chosen))
}

// histogram of the system calls of a call.
func histogram(calls []trace.Call) string {
	count := map[string]int{}
	for _, c := range calls {
		name := c.Name
		if c.Child && !c.Exec {
			name = "child's " + name
		}
		count[name]++
	}
	var parts []string
	for _, name := range slices.SortedFunc(maps.Keys(count), func(a, b string) int { return count[b]*1000 - count[a]*1000 + strings.Compare(a, b) }) {
		parts = append(parts, fmt.Sprintf("%d %s", count[name], name))
	}
	return strings.Join(parts, ", ")
}

// traced makes a call under a trace.
func (w *world) traced(call func() error, decide func(n int, c trace.Call) trace.Verdict) (trace.Result, error) {
	w.t.Helper()
	tracer, err := trace.Attach(w.pid(), decide)
	ok(w.t, err)
	failure := call()
	result, err := tracer.Detach()
	ok(w.t, err)
	return result, failure
}

// untouched makes the call with nobody harmed, and returns the points that it has, and
// whether a CO can give it up.
func untouched(t *testing.T, s *site, sc scenario) (calls []trace.Call, undoable bool) {
	w := newWorld(t, s)
	p := sc.prepare(w)
	result, err := w.traced(p.call, func(int, trace.Call) trace.Verdict { return trace.Verdict{} })
	ok(t, err)
	p.converged()
	w.takeDown()
	w.nothingLeft()
	w.kill()
	return result.Calls, p.undo != nil
}

// kill makes the call and kills the driver at the n-th point, then goes on. It reports
// whether the call had so many points.
func kill(t *testing.T, s *site, sc scenario, n int, giveUp bool) (killed bool) {
	w := newWorld(t, s)
	p := sc.prepare(w)
	result, err := w.traced(p.call, func(i int, _ trace.Call) trace.Verdict { return trace.Verdict{Kill: i == n} })
	if !result.Killed {
		ok(t, err)
	} else {
		t.Logf("killed at %d: %s", n, result.Calls[len(result.Calls)-1])
		if len(result.Survivors) > 0 {
			t.Errorf("children %v outlived the driver", result.Survivors)
		}
		w.restart()
	}
	w.goOn(p, giveUp, n%2 == 0)
	return result.Killed
}

// goOn goes on after a call that was cut short: whoever uses a volume notices nothing, and
// the call can be made again, or given up, with or without its undoing.
func (w *world) goOn(p plan, giveUp, undo bool) {
	w.t.Helper()
	for _, v := range w.volumes {
		v.checkUp()
	}
	if giveUp {
		if undo {
			w.all(p.undo)
		}
		w.takeDown()
		w.restart() // which gives up what waited for a retry
		w.all(w.deleteListed)
	} else {
		w.all(p.call)
		p.converged()
		w.takeDown()
	}
	w.nothingLeft()
}
