package volume_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/era"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// leg is a leg, and which of its blocks of 1 MiB were written since each era that was begun, and since 0.
type leg struct {
	testing.TB
	pool    blockdev.Pool
	l       *volume.Local
	v       volume.Volume
	path    string // of its device; empty while it is not attached
	written map[uint32]map[int64]bool
}

const legSize = 16 * mib

// overLegs runs a test with a new leg in a pool of each kind, and checks that nothing is left of it.
func overLegs(t *testing.T, spec volume.Spec, test func(g *leg)) {
	drivertest.NeedMapper(t)
	check.OK(t, era.Available())
	urls := kindURLs(t)
	for _, kind := range []string{"xfs", "linear", "thin", "plain"} {
		t.Run(kind, func(t *testing.T) {
			g := &leg{TB: t, pool: open(t, kind, urls[kind]), written: map[uint32]map[int64]bool{0: {}}}
			g.start()
			spec.Name, spec.Size, spec.Access, spec.ReplicaOf = "leg", volume.Range{Required: legSize}, volume.AccessAny, "0123456789abcdef0123456789abcdef"
			g.make(spec)
			test(g)
			g.detach()
			check.OK(g, g.l.Delete(t.Context(), g.v.ID))
			g.nothing()
		})
	}
}

func (g *leg) make(spec volume.Spec) {
	g.Helper()
	var err error
	g.v, err = g.l.Create(g.Context(), spec)
	check.OK(g, err)
}

// start starts the driver, the first time or again.
func (g *leg) start() {
	g.Helper()
	mounts, err := mount.LoadTable()
	check.OK(g, err)
	g.l, err = volume.NewLocal(g.Context(), node, []blockdev.Pool{g.pool}, mounts, 0)
	check.OK(g, err)
}

func (g *leg) attach() {
	g.Helper()
	check.OK(g, g.tryAttach())
}

func (g *leg) tryAttach() error {
	v, err := g.l.Get(g.Context(), g.v.ID)
	if err != nil {
		return err
	}
	device, err := g.l.AttachRaw(g.Context(), v, nil, true)
	if err == nil {
		g.v, g.path = v, device.Path
		err = device.Close()
	}
	return err
}

func (g *leg) detach() {
	g.Helper()
	check.OK(g, g.l.Detach(g.Context(), g.v.ID))
	g.path = ""
}

// put writes 4 KiB into each of some blocks, past the page cache.
func (g *leg) put(blocks ...int64) {
	g.Helper()
	check.OK(g, g.tryPut(blocks...))
}

func (g *leg) tryPut(blocks ...int64) error {
	g.Helper()
	f, err := os.OpenFile(g.path, os.O_WRONLY|unix.O_DIRECT, 0)
	check.OK(g, err)
	defer f.Close()
	page, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	check.OK(g, err)
	page[0] = 1
	for _, b := range blocks {
		if _, err := f.WriteAt(page, b*mib+8192); err != nil {
			return err
		}
		for _, since := range g.written {
			since[b] = true
		}
	}
	return nil
}

// begin begins an era; 0 if writes are not marked.
func (g *leg) begin() (number uint32) {
	g.Helper()
	number, err := g.l.BeginEra(g.Context(), g.v.ID)
	if errors.Is(err, errdefs.ErrUnsupported) {
		return 0
	}
	check.OK(g, err)
	if g.written[number] != nil {
		g.Errorf("era %d begins twice", number)
	}
	g.written[number] = map[int64]bool{}
	return number
}

// marks returns the blocks that count as written since an era; all: they are the whole volume.
func (g *leg) marks(since uint32) (have map[int64]bool, all bool) {
	g.Helper()
	extents, err := g.l.Marks(g.Context(), g.v.ID, since)
	check.OK(g, err)
	have = map[int64]bool{}
	total := int64(0)
	for _, e := range extents {
		for at := e.Offset; at < e.Offset+e.Length; at += mib {
			have[at/mib] = true
		}
		total += e.Length
	}
	now, err := g.l.Get(g.Context(), g.v.ID)
	check.OK(g, err)
	return have, total == now.Size
}

// safe makes sure that all blocks that were written since each era count as written.
func (g *leg) safe(when string) {
	g.Helper()
	for since, blocks := range g.written {
		have, _ := g.marks(since)
		for b := range blocks {
			if !have[b] {
				g.Fatalf("%s: since era %d block %d was written, and %v are marked", when, since, b, slices.Sorted(maps.Keys(have)))
			}
		}
	}
}

// exact makes sure that those blocks count as written since an era that were, and no others.
func (g *leg) exact(since uint32, when string) {
	g.Helper()
	if have, _ := g.marks(since); !maps.Equal(have, g.written[since]) {
		g.Errorf("%s: since era %d %v are marked, want %v", when, since, slices.Sorted(maps.Keys(have)), slices.Sorted(maps.Keys(g.written[since])))
	}
}

// whole makes sure that writes are not marked: since each era but 0 the whole leg counts as written, and no era begins.
func (g *leg) whole(when string) {
	g.Helper()
	g.safe(when)
	for since := range g.written {
		if have, all := g.marks(since); !all && since > 0 {
			g.Errorf("%s: since era %d %v are marked, want all", when, since, slices.Sorted(maps.Keys(have)))
		}
	}
	if number := g.begin(); number != 0 {
		g.Errorf("%s: era %d begins", when, number)
	}
}

// nothing makes sure that the pool has no leg and no marks, and the kernel no device of marks.
func (g *leg) nothing() {
	g.Helper()
	for _, kind := range []blockdev.Kind{blockdev.Volume, blockdev.Marks} {
		if left, err := g.pool.List(context.Background(), kind, "", 0); err != nil || len(left) > 0 {
			g.Errorf("left are %v, %v", left, err)
		}
	}
	if names, err := dm.Names(""); err != nil || slices.ContainsFunc(names, func(name string) bool { return bytes.HasSuffix([]byte(name), []byte("-marks")) }) {
		g.Errorf("left are %v, %v", names, err)
	}
}

// damage overwrites the beginning of the marks of a leg that is not attached, if it has any.
func (g *leg) damage(text []byte) {
	g.Helper()
	device, err := g.pool.Attach(g.Context(), blockdev.Ref{Kind: blockdev.Marks, Key: g.v.ID.Key}, blockdev.Attachment{})
	if errors.Is(err, errdefs.ErrNotFound) {
		return
	}
	check.OK(g, err)
	f, err := os.OpenFile(device.Path, os.O_WRONLY, 0)
	check.OK(g, err)
	check.OK(g, errors.Join(second(f.WriteAt(text, 0)), f.Sync(), f.Close(), device.Close()))
}

// TestLVMMarks: what was written to an attached leg since each era is told, also after a start of the driver, after the leg was detached, and after it has
// grown. A copy of a leg does not get its marks: all of it counts as written.
func TestLVMMarks(t *testing.T) {
	overLegs(t, volume.Spec{}, func(g *leg) {
		g.whole("before it is attached")
		g.attach()
		g.exact(0, "new")
		g.put(3, 5)
		g.exact(0, "written")
		first := g.begin()
		g.put(5, 7)
		g.exact(first, "written in an era")
		g.start()
		g.attach()
		g.exact(first, "after a start")
		if have, err := g.l.Health(t.Context(), g.v.ID); err != nil || len(have) > 0 {
			g.Errorf("health %v, %v", have, err)
		}
		g.detach()
		g.attach()
		g.exact(0, "attached again")
		g.exact(first, "attached again")
		next := g.begin()
		check.OK(g, second(g.l.Expand(t.Context(), g.v.ID, volume.Range{Required: legSize + 8*mib})))
		g.put(9, 20)
		for _, since := range []uint32{0, first, next} {
			g.exact(since, "grown")
		}

		s, err := g.l.CreateSnapshot(t.Context(), "snapshot", g.v.ID)
		check.OK(g, err)
		copied := *g
		copied.written = map[uint32]map[int64]bool{0: {}, first: {1: true}}
		copied.make(volume.Spec{Name: "copy", Source: s.ID, Size: volume.Range{Required: s.Size}, Access: volume.AccessAny, ReplicaOf: "ff"})
		copied.attach()
		have, _ := copied.marks(0)
		for b := range g.written[0] {
			if !have[b] {
				g.Errorf("of a copy %v hold data, and of what it is of %v", slices.Sorted(maps.Keys(have)), slices.Sorted(maps.Keys(g.written[0])))
			}
		}
		if _, all := copied.marks(first); !all {
			g.Errorf("of a copy not all counts as written since %d", first)
		}
		again := copied.begin()
		copied.put(2)
		copied.exact(again, "a copy")
		copied.detach()
		check.OK(g, errors.Join(g.l.Delete(t.Context(), copied.v.ID), g.l.DeleteSnapshot(t.Context(), s.ID)))
		listed, err := g.l.List(t.Context(), volume.ID{}, 0)
		if err != nil || len(listed) != 1 {
			g.Errorf("listed are %v, %v", listed, err)
		}
	})
}

// TestLVMMarksLost: after marks were lost or damaged, or while the kernel cannot mark writes, the whole leg counts as written. Marks begin anew when the leg is
// attached next on a kernel that can.
func TestLVMMarksLost(t *testing.T) {
	overLegs(t, volume.Spec{}, func(g *leg) {
		g.attach()
		g.begin()
		g.put(1)
		for what, text := range map[string][]byte{"damaged": bytes.Repeat([]byte("damaged "), 1024), "cleared": make([]byte, 8192)} {
			g.detach()
			g.damage(text)
			g.attach()
			g.safe(what)
			for since := range g.written {
				if _, all := g.marks(since); !all && since > 0 {
					g.Errorf("%s: since %d not all counts", what, since)
				}
			}
			begun := g.begin()
			g.put(2)
			g.exact(begun, what+", and begun again")
		}
		g.detach()
		check.OK(g, g.pool.Delete(t.Context(), blockdev.Ref{Kind: blockdev.Marks, Key: g.v.ID.Key}))
		g.attach()
		g.safe("gone")
		begun := g.begin()
		g.put(4)
		g.exact(begun, "gone, and begun again")

		g.detach()
		with := volume.WithoutMarks()
		defer with()
		g.attach()
		g.put(6)
		g.whole("a kernel without")
		g.detach()
		with()
		g.attach()
		g.safe("a kernel that has it again")
		begun = g.begin()
		g.put(3)
		g.exact(begun, "a kernel that has it again")
	})
}

// marksBytes reads the metadata of the marks of a leg that is not attached, or writes them.
func (g *leg) marksBytes(write []byte) (have []byte) {
	g.Helper()
	device, err := g.pool.Attach(g.Context(), blockdev.Ref{Kind: blockdev.Marks, Key: g.v.ID.Key}, blockdev.Attachment{})
	check.OK(g, err)
	f, err := os.OpenFile(device.Path, os.O_RDWR, 0)
	check.OK(g, err)
	if write != nil {
		check.OK(g, second(f.WriteAt(write, 0)))
	} else {
		have, err = io.ReadAll(f)
		check.OK(g, err)
	}
	check.OK(g, errors.Join(f.Sync(), f.Close(), device.Close()))
	return have
}

// TestLVMMarksOlder: marks are put back as they were before the leg was attached last, or before its last common moment. All of the leg counts as written,
// also once as many eras have begun as there were.
func TestLVMMarksOlder(t *testing.T) {
	overLegs(t, volume.Spec{}, func(g *leg) {
		g.attach()
		g.put(1)
		for _, when := range []string{"attached", "in a common moment"} {
			g.detach()
			saved := g.marksBytes(nil)
			g.attach()
			var common uint32
			for n := range int64(3) {
				common = g.begin()
				g.put(3 + n)
			}
			if when != "attached" {
				check.OK(g, g.l.SetCommonEra(g.Context(), g.v.ID, common))
			}
			g.detach()
			if when != "attached" { // it does not say in which era it was attached
				check.OK(g, second(g.pool.SetLabels(g.Context(), blockdev.Ref{Kind: blockdev.Volume, Key: g.v.ID.Key}, func(labels map[string]string) error {
					labels["marks"] = labels["marks"][:strings.LastIndex(labels["marks"], ":")]
					return nil
				})))
				g.start()
			}
			g.marksBytes(saved)
			g.attach()
			g.safe("older than when it was " + when)
			for range 8 {
				g.begin()
				g.safe("older than when it was " + when + ", and more eras began")
			}
			begun := g.begin()
			g.put(9)
			g.exact(begun, "begun again")
		}
	})
}

// TestLVMMarksLater: a volume that becomes a leg gets marks when it is attached next, and all that was written before counts as written. So does the whole leg
// once it has grown so much that its marks have no room, until it is attached again.
func TestLVMMarksLater(t *testing.T) {
	urls := kindURLs(t)
	g := &leg{TB: t, pool: open(t, "plain", urls["plain"]), written: map[uint32]map[int64]bool{0: {}}}
	g.start()
	g.make(volume.Spec{Name: "plain", Size: volume.Range{Required: legSize}, Access: volume.AccessAny, Provisioning: blockdev.Thin})
	g.attach()
	g.put(1)
	check.OK(t, g.l.SetReplicaOf(t.Context(), g.v.ID, "ff"))
	g.attach()
	g.put(2)
	g.whole("attached before")
	g.detach()
	g.attach()
	begun := g.begin()
	g.put(3)
	g.exact(begun, "attached as a leg")
	g.safe("what was there before")

	// The object of the marks has no room for those of so large a leg.
	check.OK(t, second(g.l.Expand(t.Context(), g.v.ID, volume.Range{Required: 700 * mib})))
	g.put(600)
	g.whole("grown")
	g.detach()
	g.attach()
	begun = g.begin()
	g.put(650)
	g.exact(begun, "grown, and attached again")
	g.detach()
	check.OK(t, g.l.Delete(t.Context(), g.v.ID))
	g.nothing()
}

// cutPool is a pool in which nothing can be changed or attached after some such calls, as if the driver had died.
type cutPool struct {
	blockdev.Pool
	left int
}

var errCut = errors.New("the driver died")

func (p *cutPool) Unwrap() blockdev.Pool { return p.Pool }

func (p *cutPool) step() error {
	if p.left--; p.left < 0 {
		return errCut
	}
	return nil
}

func (p *cutPool) Create(ctx context.Context, s blockdev.Spec) (blockdev.Record, error) {
	if err := p.step(); err != nil {
		return blockdev.Record{}, err
	}
	return p.Pool.Create(ctx, s)
}

func (p *cutPool) Delete(ctx context.Context, ref blockdev.Ref) error {
	return errors.Join(p.step(), p.Pool.Delete(ctx, ref))
}

func (p *cutPool) SetLabels(ctx context.Context, ref blockdev.Ref, change func(map[string]string) error) (blockdev.Record, error) {
	if err := p.step(); err != nil {
		return blockdev.Record{}, err
	}
	return p.Pool.SetLabels(ctx, ref, change)
}

func (p *cutPool) Attach(ctx context.Context, ref blockdev.Ref, how blockdev.Attachment) (blockdev.Device, error) {
	if err := p.step(); err != nil {
		return blockdev.Device{}, err
	}
	return p.Pool.Attach(ctx, ref, how)
}

// TestLVMMarksCut: if the driver dies at any step of the attachment of a leg, all that is written before and later still counts as written.
func TestLVMMarksCut(t *testing.T) {
	overLegs(t, volume.Spec{}, func(g *leg) {
		whole := g.pool
		for what, before := range map[string]func(){
			"kept":    func() {},
			"damaged": func() { g.damage(bytes.Repeat([]byte("damaged "), 1024)) },
			"gone": func() {
				check.OK(g, whole.Delete(t.Context(), blockdev.Ref{Kind: blockdev.Marks, Key: g.v.ID.Key}))
			},
			"without": func() { g.attach(); g.put(12); g.detach() },
		} {
			for n, cut := 0, true; cut; n++ {
				before()
				if what == "without" {
					with := volume.WithoutMarks()
					g.attach()
					g.put(11)
					g.detach()
					with()
				}
				g.pool = &cutPool{whole, n}
				g.start()
				err := g.tryAttach()
				if cut = errors.Is(err, errCut); err != nil && !cut {
					g.Fatalf("%s, cut after %d steps: %v", what, n, err)
				}
				g.pool = whole
				g.start()
				g.attach()
				g.safe(fmt.Sprint(what, ", cut after ", n))
				g.begin()
				g.put(int64(n % 10))
				g.safe(fmt.Sprint(what, ", cut after ", n, ", and written"))
				g.detach()
			}
		}
	})
}

// TestLVMMarksAnyhow: after any order of writes, eras, attachments, starts, growth, damage, and kernels that cannot mark, all that was written counts as
// written.
func TestLVMMarksAnyhow(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	overLegs(t, volume.Spec{}, func(g *leg) {
		random := rand.New(rand.NewPCG(seed, 1))
		without, exact := func() {}, 0
		for n := range 150 {
			what := []string{"put", "put", "put", "begin", "begin", "attach", "attach", "detach", "start", "grow", "damage", "without", "with", "with", "with"}[random.IntN(15)]
			if g.path == "" && slices.Contains([]string{"put", "begin"}, what) || g.path != "" && what == "damage" {
				continue
			}
			switch what {
			case "put":
				g.put(random.Int64N(16))
			case "begin":
				if number := g.begin(); number > 0 {
					g.exact(number, "begun")
					exact++
				}
			case "attach":
				g.attach()
			case "detach":
				g.detach()
			case "start":
				g.start()
				g.attach() // the start has detached it, as it is not mounted
			case "grow":
				if g.v.Size < 40*mib {
					check.OK(g, second(g.l.Expand(t.Context(), g.v.ID, volume.Range{Required: g.v.Size + 4*mib})))
					g.v.Size += 4 * mib
				}
			case "damage":
				if random.IntN(3) == 0 {
					g.damage(make([]byte, 4096*random.IntN(3)))
				}
			case "without":
				without = volume.WithoutMarks()
			case "with":
				without()
			}
			g.safe(fmt.Sprint(n, ": ", what))
		}
		without()
		g.Logf("%d eras", exact)
	})
}

// TestLVMMarksOutlivePower: when a write to a leg has ended, its mark is on the disk: a copy of the pool's files has it, as after a loss of power.
func TestLVMMarksOutlivePower(t *testing.T) {
	drivertest.NeedMapper(t)
	check.OK(t, era.Available())
	dir := drivertest.Dir(t)
	at := func(name string) string { return "file://" + filepath.Join(dir, name) + "?reservePercent=0&create=1" }
	check.OK(t, os.Mkdir(filepath.Join(dir, "a"), 0o700))
	g := &leg{TB: t, pool: open(t, "default", at("a")), written: map[uint32]map[int64]bool{0: {}}}
	g.start()
	g.make(volume.Spec{Name: "leg", Size: volume.Range{Required: legSize}, Access: volume.AccessAny, ReplicaOf: "ff"})
	g.attach()
	g.put(1)
	begun := g.begin()
	g.put(2, 9)
	drivertest.Run(t, "cp", "-a", filepath.Join(dir, "a"), filepath.Join(dir, "b")) // without what the devices over the files have in memory
	after := *g
	after.pool = open(t, "default", at("b"))
	after.start()
	after.attach()
	after.exact(begun, "after a loss of power")
	after.exact(0, "after a loss of power")
	after.detach()
	g.detach()
}
