package points

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/tests/points/trace"
)

// TestCutShort: what is made from a volume whose ext4 a tool was growing when all died, before
// anybody repaired it, is repaired as the volume itself is.
func TestCutShort(t *testing.T) {
	drivertest.NeedRoot(t)
	at := newSite(t, sharing)
	sc := named("NodeStageVolume later, growing")
	// inResize2fs counts its points: how many there are before it depends on who else takes loop devices.
	inResize2fs := func() func(trace.Call) (n int) {
		program, count := "", 0
		return func(c trace.Call) int {
			switch {
			case c.Exec:
				program = filepath.Base(c.Path)
			case c.Child && program == "resize2fs":
				count++
				return count
			}
			return 0
		}
	}
	var within []int
	for count, calls := inResize2fs(), untouched(t, at, sc).calls; len(calls) > 0; calls = calls[1:] {
		if n := count(calls[0]); n > 0 {
			within = append(within, n)
		}
	}
	if len(within) < 2 {
		t.Fatalf("resize2fs has %d points", len(within))
	}
	if random := draw(t); !*full {
		random.Shuffle(len(within), func(i, j int) { within[i], within[j] = within[j], within[i] })
		within = within[:2]
	}
	for _, n := range within {
		attempt(t, fmt.Sprint(n), fmt.Sprint("-points.full=", *full), func(t *testing.T) {
			w := newEnvironment(t, at)
			p := sc.prepare(w)
			v := w.volumes[0]
			count := inResize2fs()
			result, err := w.traced(p.call, func(i int, c trace.Call) trace.Verdict {
				return trace.Verdict{Kill: i > 0 && count(c) == n, All: true}
			})
			if !result.Killed {
				t.Fatalf("point %d was not reached: %v", n, err)
			}
			w.died(result)
			w.start()
			at.bytesOf(v, func(path string) {
				if blankBoot(t, path) {
					t.Error("there is no copy of the superblock")
				}
			})
			v.size = 300 * miB
			snapshot := must(v.cut("cut"))(w)
			restored, clone := w.volume("restored", "ext4", v.size), w.volume("clone", "ext4", v.size)
			restored.snapshot, clone.source = snapshot, v
			for _, made := range []*vol{restored, clone} {
				w.all(made.create)
				made.content = 1
				made.whole(1)
				made.shows(v.size)
			}
			w.goOn(p, false, false)
		})
	}
}
