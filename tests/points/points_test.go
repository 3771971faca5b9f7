// Package points kills the driver at each of its state-changing system calls, and makes
// sure that every volume is whole and nothing is leaked.
package points

import (
	"flag"
	"fmt"
	"hash/fnv"
	"maps"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/tests/points/trace"
)

var (
	full = flag.Bool("points.full", os.Getenv("POINTS") == "all", "all points of all calls, not a sample (POINTS=all does it too)")
	seed = flag.Uint64("points.seed", 0, "seed of the sample; 0: the number of the day")
)

var today = sync.OnceValue(func() uint64 {
	if *seed != 0 {
		return *seed
	}
	return uint64(time.Now().Unix() / 86400)
})

// draw is what a test draws at random: by the seed and its name, so that it is the same when
// it is run alone.
func draw(t *testing.T) *rand.Rand {
	name := fnv.New64a()
	_, _ = name.Write([]byte(t.Name()))
	return rand.New(rand.NewPCG(today(), name.Sum64()))
}

// attempt runs one of the cases of a sample. If it fails, it says how to have just that again:
// with the seed, and with another argument that the sample depends on.
func attempt(t *testing.T, name, argument string, do func(t *testing.T)) {
	t.Run(name, func(t *testing.T) {
		t.Cleanup(func() {
			if t.Failed() {
				var path []string
				command := "go test ./tests/points"
				if strings.HasPrefix(t.Name(), "TestLVM") {
					command = "hack/lvm/test.sh ./tests/points"
				}
				for _, element := range strings.Split(t.Name(), "/") {
					path = append(path, "^"+regexp.QuoteMeta(element)+"$")
				}
				t.Logf("just this again: %s -test.v -test.run '%s' -points.seed=%d %s", command, strings.Join(path, "/"), today(), argument)
			}
		})
		do(t)
	})
}

// TestPoints: for each call that changes something, and for each point of it, kill the
// driver there, restart it, and
//
//   - make the call again, as a sidecar does: it converges, all data is whole;
//   - or give up, as a CO may: what was begun can be undone;
//   - or kill it again at each point of its start, before the call is made again.
//
// Either way nothing is left in the end.
func TestPoints(t *testing.T) {
	drivertest.NeedRoot(t)
	_, err := program()
	check.OK(t, err)
	if !*full {
		fmt.Printf("points: a sample; -points.seed=%d has the same again, -points.full has all\n", today())
	}
	sites := map[string]*site{copying: newSite(t, copying), sharing: newSite(t, sharing)}
	for _, s := range scenarios {
		t.Run(s.name, func(t *testing.T) {
			begin, kills, random := time.Now(), 0, draw(t)
			o := untouched(t, sites[s.fs], s)
			calls, undoable := o.calls, o.undoable
			try := func(c crash) (reached bool) {
				attempt(t, c.String(), fmt.Sprint("-points.full=", *full), func(t *testing.T) { reached = c.happen(t, sites[s.fs], s) })
				if reached {
					kills++
				}
				return reached
			}
			anywhere := func() int { return 1 + random.IntN(len(calls)) }
			if *full {
				for n, more := 1, true; more; n++ {
					// After every other one of many alike the CO gives up.
					alike := n <= len(calls) && trace.Alike(calls, n-1)
					more = try(crash{at: n, giveUp: alike && undoable && n%2 == 0}) || n < len(calls)
					if more && undoable && !alike {
						try(crash{at: n, giveUp: true})
					}
				}
				for n, more := 1, true; more; n++ {
					more = try(crash{at: anywhere(), atStart: n}) || n < startPoints
				}
			} else {
				try(crash{at: anywhere()})
				try(crash{at: anywhere(), giveUp: undoable})
				try(crash{at: anywhere(), atStart: 1 + random.IntN(startPoints)})
			}
			fmt.Printf("points: %-42s %3d points, %3d crashes, %5.1f s: %s\n", s.name, len(calls), kills, time.Since(begin).Seconds(), histogram(calls))
		})
	}
}

// startPoints is about how many points a start has, if there is nothing to mend.
const startPoints = 12

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
func (w *environment) traced(call func() error, decide func(n int, c trace.Call) trace.Verdict) (trace.Result, error) {
	w.t.Helper()
	tracer, err := trace.Attach(w.Pid(), decide)
	check.OK(w.t, err)
	failure := call()
	result, err := tracer.Detach()
	check.OK(w.t, err)
	return result, failure
}

// course of a call with nobody harmed.
type course struct {
	calls    []trace.Call // its points
	asked    int          // what lvm2 was told, in lines
	undoable bool         // a CO can give it up
	took     time.Duration
}

// untouched makes the call with nobody harmed.
func untouched(t *testing.T, s *site, sc scenario) (c course) {
	w := newEnvironment(t, s)
	p := sc.prepare(w)
	begin := time.Now()
	result, err := w.traced(p.call, func(_ int, at trace.Call) trace.Verdict {
		if tells(at) {
			c.asked++
		}
		return trace.Verdict{}
	})
	c.took, c.calls, c.undoable = time.Since(begin), result.Calls, p.undo != nil
	check.OK(t, err)
	p.converged()
	w.takeDown()
	w.nothingLeft()
	w.Kill()
	return c
}

// crash is a way to die.
type crash struct {
	at      int  // the point of the call
	atStart int  // the point of the start after that, at which it dies again; 0: it does not
	giveUp  bool // nobody makes the call again
	all     bool // what the driver has started dies with it
}

func (c crash) String() string {
	text := fmt.Sprint(c.at)
	if c.all {
		text += " of all"
	}
	switch {
	case c.atStart > 0:
		return fmt.Sprintf("%s and %d of the start", text, c.atStart)
	case c.giveUp:
		return text + " and give up"
	}
	return text
}

// happen makes the call, lets the crash happen, and goes on. It reports whether there was
// such a point.
func (c crash) happen(t *testing.T, s *site, sc scenario) (reached bool) {
	w := newEnvironment(t, s)
	p := sc.prepare(w)
	result, err := w.traced(p.call, c.killAt(c.at))
	if !result.Killed {
		check.OK(t, err)
	} else {
		w.died(result)
		if c.atStart > 0 {
			if result = w.startTraced(c.killAt(c.atStart)); result.Killed {
				w.died(result)
			}
		}
		w.start()
	}
	w.goOn(p, c.giveUp, c.at%2 == 0)
	return result.Killed
}

func (c crash) killAt(n int) func(int, trace.Call) trace.Verdict {
	return func(i int, _ trace.Call) trace.Verdict { return trace.Verdict{Kill: i == n, All: c.all} }
}

func (w *environment) died(r trace.Result) {
	w.t.Helper()
	w.t.Logf("killed at %d: %s", len(r.Calls), r.Calls[len(r.Calls)-1])
	if len(r.Survivors) > 0 {
		w.t.Errorf("children %v outlived the driver", r.Survivors)
	}
}

// goOn goes on after a call that was cut short: whoever uses a volume notices nothing, and
// the call can be made again, or given up, with or without its undoing.
func (w *environment) goOn(p plan, giveUp, undo bool) {
	w.t.Helper()
	for _, v := range w.volumes {
		v.checkUp()
	}
	if giveUp {
		if undo {
			w.all(p.undo)
		}
		w.takeDown()
		w.start() // which gives up what waited for a retry
		w.all(w.deleteListed)
	} else {
		w.all(p.call)
		p.converged()
		w.takeDown()
	}
	w.nothingLeft()
}
