package points

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/volume"
	"github.com/ashlar-csi/ashlar/tests/points/trace"
)

// volumeGroup is a pool of linear volumes, or of thin ones, in a volume group of its own.
type volumeGroup struct {
	*drivertest.Group
	t    testing.TB
	at   string // its URL
	thin bool
	own  []string // its volumes when the pool is empty
}

// newGroup makes a site of a volume group. Its settings hold for the programs of this
// process, too: one at a time.
func newGroup(t *testing.T, thin bool) *site {
	t.Helper()
	g := &volumeGroup{Group: drivertest.NewGroup(t, 2<<30), t: t, thin: thin}
	g.at = g.URL()
	if thin {
		g.at = g.ThinPool(t, "tp", "-L", "1536M", "--poolmetadatasize", "16M")
	}
	g.own = g.Volumes(t)
	return &site{drivertest.Dir(t), g}
}

func (g *volumeGroup) url() string { return g.at }

func (g *volumeGroup) leftovers() (found []string) {
	for deadline := time.Now().Add(detachTime); len(g.DeviceNames()) > 0 && time.Now().Before(deadline); {
		time.Sleep(time.Millisecond)
	}
	for _, name := range g.DeviceNames() {
		found = append(found, "device "+name)
	}
	for _, name := range g.Volumes(g.t) {
		if !slices.Contains(g.own, name) {
			found = append(found, "volume "+name)
		}
	}
	if g.thin { // also a volume of which lvm2 knows no more
		// NAME: START LENGTH thin-pool TRANSACTION METADATA USED/TOTAL ...; the name is another one before its first volume.
		_, after, _ := strings.Cut(drivertest.Run(g.t, "dmsetup", "status", "--target", "thin-pool"), g.Device("tp"))
		line, _, _ := strings.Cut(after, "\n")
		_, line, _ = strings.Cut(line, ": ")
		status := strings.Fields(line)
		if len(status) < 6 || !strings.HasPrefix(status[5], "0/") {
			found = append(found, fmt.Sprintf("blocks in the thin pool: %q", status))
		}
	}
	return found
}

func (g *volumeGroup) clear() {
	for range 3 { // devices upon devices
		for _, name := range g.DeviceNames() {
			_ = exec.Command("dmsetup", "resume", name).Run()
			_ = exec.Command("dmsetup", "remove", "-f", name).Run()
		}
	}
	for _, line := range g.leftovers() {
		if name, ok := strings.CutPrefix(line, "volume "); ok {
			_ = exec.Command("lvremove", "-q", "-f", "-y", g.Name+"/"+name).Run()
		}
	}
}

// mapped is the name of the device of a volume's logical volume.
func (g *volumeGroup) mapped(v *vol) string {
	return g.Device("vol." + volume.KeyOf(v.Name))
}

func (g *volumeGroup) device(v *vol) string {
	found, _ := filepath.Glob("/sys/block/dm-*/dm/name")
	for _, path := range found {
		if name, err := os.ReadFile(path); err == nil && strings.TrimSpace(string(name)) == g.mapped(v)+"-writable" {
			return strings.Split(path, "/")[3]
		}
	}
	return ""
}

func (g *volumeGroup) below(path string) bool { return slices.Contains(g.Devices, path) }

func (g *volumeGroup) bytesOf(v *vol, with func(path string)) {
	lv := g.Name + "/vol." + volume.KeyOf(v.Name)
	drivertest.Run(v.t, "lvchange", "-q", "-ay", "-K", lv)
	with("/dev/mapper/" + g.mapped(v))
	_ = exec.Command("lvchange", "-q", "-an", lv).Run() // if nobody has it
}

var (
	lvmTime       = flag.Duration("points.lvm", 30*time.Second, "how long crashes are tried over LVM pools, in the order of -points.seed, in one call at the least over each kind; with -points.full all are")
	lvmFaultsTime = flag.Duration("faults.lvm", 24*time.Second, "the same for faults, and -faults.full")
)

const (
	// lvmShare is how many points of a call there are to each of them that is tried in a sample.
	lvmShare = 20
	// lvmStartPoints is about how many points a start has, if there is nothing to mend.
	lvmStartPoints = 5
)

// sweep is what is tried of the calls over LVM pools.
type sweep struct {
	what, flag string
	full       bool          // all of it, or
	time       time.Duration // a sample, in so much time
}

// tally is how many cases of a call were tried, of so many.
type tally struct{ tried, of int }

// overLVM goes through the calls over LVM pools of both kinds. Cases of a call are tried until
// its time is up.
func overLVM(t *testing.T, s sweep, try func(t *testing.T, at *site, sc scenario, end time.Time) tally) {
	drivertest.NeedLVM(t)
	if !s.full {
		fmt.Printf("points: a sample of %s over LVM pools; -points.seed=%d has the same again, -%s.lvm=1h has more, -%s.full all\n", s.what, today(), s.flag, s.flag)
	}
	for _, kind := range []string{"thick", "thin"} {
		t.Run(kind, func(t *testing.T) {
			at := newGroup(t, kind == "thin")
			calls := slices.DeleteFunc(slices.Clone(scenarios), func(s scenario) bool {
				return s.name == "CreateVolume thin" || strings.HasSuffix(s.name, ", sharing") // they are as others here
			})
			end := time.Now().Add(s.time / 2)
			if s.full {
				end = time.Now().AddDate(1, 0, 0)
				untouched(t, at, calls[0]) // a thin pool's first volume has points of its own: TestLVMFirst
			} else {
				draw(t).Shuffle(len(calls), func(i, j int) { calls[i], calls[j] = calls[j], calls[i] })
			}
			n, sum := 0, tally{}
			for ; n < len(calls) && (n == 0 || time.Now().Before(end)); n++ {
				t.Run(calls[n].name, func(t *testing.T) {
					begin := time.Now()
					some := try(t, at, calls[n], end)
					sum.tried, sum.of = sum.tried+some.tried, sum.of+some.of
					fmt.Printf("%s: %s, %s: %d of %d, %.1f s\n", s.what, kind, calls[n].name, some.tried, some.of, time.Since(begin).Seconds())
				})
			}
			fmt.Printf("points: %s LVM pool: %d %s of %d, in %d calls of %d\n", kind, sum.tried, s.what, sum.of, n, len(calls))
		})
	}
}

// TestLVMPoints is TestPoints over LVM pools. What lvm2 does for the driver is part of the
// call: each change that it makes to a device of the device mapper, and each write of it to
// a disk, is a point. There the driver is killed alone, and lvm2 has to end by itself; or
// both are, as at the end of a container: with -points.full, one after the other. How it goes on
// is drawn.
func TestLVMPoints(t *testing.T) {
	overLVM(t, sweep{"crashes", "points", *full, *lvmTime}, func(t *testing.T, at *site, sc scenario, end time.Time) tally {
		random := draw(t)
		o := untouched(t, at, sc)
		fmt.Printf("points: %-42s %3d points: %s\n", sc.name, len(o.calls), histogram(o.calls))
		var crashes []crash
		for _, point := range random.Perm(len(o.calls)) {
			c := crash{at: 1 + point, all: random.IntN(2) == 0}
			if crashes = append(crashes, c); *full && !inRow(o.calls, point) {
				crashes = append(crashes, crash{at: c.at, all: !c.all})
			}
		}
		some := tally{of: len(crashes)}
		if !*full {
			crashes = crashes[:1+len(crashes)/lvmShare]
		}
		for i, c := range crashes {
			if i > 0 && time.Now().After(end) {
				break
			}
			switch random.IntN(4) {
			case 0:
				c.giveUp = o.undoable
			case 1:
				c.atStart = 1 + random.IntN(lvmStartPoints)
			}
			attempt(t, fmt.Sprintf("%d: %s", i, c), fmt.Sprintf("-points.lvm=1h -points.full=%v", *full), func(t *testing.T) {
				if c.happen(t, at, sc) || c.atStart > 0 { // a start may have fewer
					some.tried++
				}
			})
		}
		return some
	})
}

// inRow reports whether a call is one of many writes of a program, of mkfs and the like, which
// has the device to itself then.
func inRow(calls []trace.Call, i int) bool {
	c := calls[i]
	return c.Child && c.Name == "pwrite64" && i > 0 && calls[i-1].Name == c.Name && calls[i-1].Path == c.Path
}

// TestLVMFirst is TestLVMPoints for the first volume of a thin pool: lvm2 brings the thin pool
// down for it, has it checked, and brings it up again. There also lvm2 alone dies.
func TestLVMFirst(t *testing.T) {
	drivertest.NeedLVM(t)
	sc, random := named("CreateVolume thick"), draw(t)
	calls := untouched(t, newGroup(t, true), sc).calls
	points := random.Perm(len(calls))
	if !*full {
		points = points[:1]
	}
	for _, point := range points {
		c := crash{at: 1 + point, all: random.IntN(2) == 0, giveUp: random.IntN(3) == 0}
		argument := fmt.Sprintf("-points.full=%v", *full)
		attempt(t, c.String(), argument, func(t *testing.T) {
			if !c.happen(t, newGroup(t, true), sc) {
				t.Error("there is no such point")
			}
		})
		if trace.CanFail && calls[point].Child {
			attempt(t, fmt.Sprint(c.at, " of lvm2"), argument, func(t *testing.T) { fault(t, newGroup(t, true), sc, c.at, 0, c.giveUp) })
		}
	}
	fmt.Printf("points: first volume of a thin LVM pool: %d crashes of %d\n", len(points), len(calls))
}
