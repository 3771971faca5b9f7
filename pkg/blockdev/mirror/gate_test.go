package mirror_test

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/mirror"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// topOver makes a device over the mirror, as the stack of a volume does, and returns its name and a file of it.
func (f *fixture) topOver() (name string, file *os.File) {
	f.t.Helper()
	name = "ashlar-test-top"
	below, err := dm.Find(f.name)
	check.OK(f.t, err)
	check.OK(f.t, dm.Make(name, "", dm.Linear(below.Number, size)))
	f.t.Cleanup(func() { drivertest.Run(f.t, "dmsetup", "remove", "--retry", name) })
	d, err := dm.Find(name)
	check.OK(f.t, err)
	file, err = dm.Open(d, os.O_RDWR|unix.O_DIRECT)
	check.OK(f.t, err)
	f.t.Cleanup(func() { _ = file.Close() })
	return name, file
}

// TestAboveStaysSuspended: somebody holds back what is written to a device over a mirror, as for a snapshot. A change of the mirror does not let it go on.
func TestAboveStaysSuspended(t *testing.T) {
	ctx := context.Background()
	f := newMirror(t, 2, 1)
	name, file := f.topOver()
	for what, change := range map[string]func() error{
		"held for a moment": func() error { return mirror.Still(ctx, f.name) },
		"in another order":  func() error { return mirror.Finish(ctx, f.name, f.legs[1].number) },
	} {
		check.OK(t, dm.Suspend(name))
		write := later(func() error { _, err := file.WriteAt(page(1), 0); return err })
		waits(t, write, "a write to what is suspended")
		if err := change(); err != nil {
			t.Error(what, err)
		}
		select {
		case err := <-write:
			t.Errorf("%s: written, though somebody had suspended the device: %v", what, err)
			continue
		default:
		}
		d, err := dm.Find(name)
		if err != nil || !d.Suspended {
			t.Errorf("%s: it is %+v, %v", what, d, err)
		}
		check.OK(t, dm.Resume(name, dm.NoScan))
		ends(t, write, "a write")
	}
}

// TestLeavesBesideCopy: a leg leaves in the middle of its copy, and takes long for each write. The kernel waits for what is being copied, and users do not.
func TestLeavesBesideCopy(t *testing.T) {
	const takes = 8 * time.Second
	f := newMirror(t, 1, 1)
	_, file := f.topOver()
	joins := f.legs[1]
	joins.slow(takes)
	check.OK(t, mirror.Join(context.Background(), f.name, joins.number, differs(dm.Range{Length: size})))
	left := later(func() error { return mirror.Leave(context.Background(), f.name, joins.number) })
	var longest time.Duration
	for block := page(0); ; {
		select {
		case err := <-left:
			check.OK(t, err)
			if t.Log("longest", longest); longest > takes/2 {
				t.Errorf("a read took %v", longest)
			}
			return
		case <-time.After(10 * time.Millisecond):
		}
		began := time.Now()
		_, err := file.ReadAt(block, 0)
		check.OK(t, err)
		longest = max(longest, time.Since(began))
	}
}

// joining is a mirror of two legs that a third one joins, which takes long for each write. Leg 1 has failed a write, which is held.
func joining(t *testing.T) (f *fixture, held chan error) {
	t.Helper()
	f = newMirror(t, 2, 1)
	_, file := f.topOver()
	f.legs[2].slow(50 * time.Millisecond)
	check.OK(t, mirror.Join(context.Background(), f.name, f.legs[2].number, differs(dm.Range{Length: size})))
	f.legs[1].fail()
	held = later(func() error { _, err := file.WriteAt(page(9), 31*mib); return err })
	waits(t, held, "a write of which a leg has failed")
	return f, held
}

// TestFailsBesideJoin: a leg fails while another one joins. Both can leave at once, and the one that joins does not leave alone: what the other one holds would
// be waited for, and nothing could end that.
func TestFailsBesideJoin(t *testing.T) {
	f, held := joining(t)
	for range 2 {
		var alone error
		ends(t, later(func() error { alone = mirror.Leave(context.Background(), f.name, f.legs[2].number); return nil }), "the leg that joins")
		is(t, alone, errdefs.ErrUnavailable)
	}
	ends(t, later(func() error { return mirror.Leave(context.Background(), f.name, f.legs[1].number, f.legs[2].number) }), "both legs")
	ends(t, held, "a write that was held")
	f.has(0, 9, 31*mib)
	if s := f.look(); len(s.Legs) != 1 || s.Joining != nil {
		t.Errorf("it is %+v", s)
	}
}

// TestEndsBesideJoin: a mirror ends that holds a write as a leg has failed, while another one joins.
func TestEndsBesideJoin(t *testing.T) {
	f, held := joining(t)
	ends(t, later(func() error { return mirror.End(context.Background(), f.name) }), "the end")
	select {
	case err := <-held:
		if err == nil {
			t.Error("acknowledged, though one leg has not done it")
		}
	case <-time.After(patient):
		t.Fatal("a write is still held")
	}
	if s := f.look(); len(s.Legs) > 0 || s.Joining != nil {
		t.Errorf("it is %+v", s)
	}
}

// TestEndCutShort: the driver is killed in the middle of the end of a mirror that a leg joins. The next one finishes it.
func TestEndCutShort(t *testing.T) {
	f, held := joining(t)
	ends(t, later(func() error {
		return dm.ReplaceFailing(f.name+"-base", []dm.Line{{Length: size, Kind: "error"}, {Start: size, Length: mib, Kind: "error"}})
	}), "the first step")
	check.OK(t, mirror.Recover(context.Background(), f.name))
	if err := <-held; err == nil {
		t.Error("acknowledged, though one leg has not done it")
	}
	if s := f.look(); len(s.Legs) > 0 || s.Joining != nil || s.Size != size {
		t.Errorf("it is %+v", s)
	}
}

// TestJoinerFailsBesideTwo: a leg joins two others, and fails a write or a flush, which is held. It can leave alone: the mirror of the others holds nothing.
func TestJoinerFailsBesideTwo(t *testing.T) {
	for _, what := range []string{"write", "flush"} {
		t.Run(what, func(t *testing.T) {
			f := newMirror(t, 2, 1)
			_, file := f.topOver()
			check.OK(t, mirror.Join(context.Background(), f.name, f.legs[2].number, differs(dm.Range{Length: mib})))
			f.watch(mirror.Event{}, "a leg that is equal", mirror.State.Equal)
			check.OK(t, mirror.FlushLeg(f.name, f.legs[2].number))
			f.legs[2].fail()
			held := later(func() error {
				if what == "flush" {
					return file.Sync()
				}
				_, err := file.WriteAt(page(9), 0)
				return err
			})
			waits(t, held, "what the leg that joins has failed")
			t.Cleanup(func() { _ = mirror.End(context.Background(), f.name) })
			var left error
			ends(t, later(func() error { left = mirror.Leave(context.Background(), f.name, f.legs[2].number); return nil }), "the leg that joins")
			check.OK(t, left)
			ends(t, held, "what was held")
			if s := f.look(); len(s.Legs) != 2 || len(s.Failed()) > 0 || s.Joining != nil {
				t.Errorf("it is %+v", s)
			}
		})
	}
}

// TestJoinerStaysForAll: a leg is equal to two others, of which one fails a write, when both are to leave. What is held is on the leg that stays.
func TestJoinerStaysForAll(t *testing.T) {
	f := newMirror(t, 2, 1)
	_, file := f.topOver()
	check.OK(t, mirror.Join(context.Background(), f.name, f.legs[2].number, differs(dm.Range{Length: mib})))
	f.watch(mirror.Event{}, "a leg that is equal", mirror.State.Equal)
	f.legs[1].fail()
	held := later(func() error { _, err := file.WriteAt(page(9), 0); return err })
	waits(t, held, "a write of which a leg has failed")
	ends(t, later(func() error { return mirror.Leave(context.Background(), f.name, f.numbers(2)...) }), "all that were current")
	ends(t, held, "a write that was held")
	f.has(2, 9, 0)
	if s := f.look(); len(s.Legs) != 1 || s.Legs[0].Device != f.legs[2].number || s.Joining != nil {
		t.Errorf("it is %+v", s)
	}
}

// heldParts has the name of the device that a process of this test holds.
const heldParts = "ASHLAR_TEST_HELD_PARTS"

// TestKilledWhilePartsWait: TestKilledWhileItWaits, of a device of which only the second part is a mirror, as while a move is copied back.
func TestKilledWhilePartsWait(t *testing.T) {
	if name := os.Getenv(heldParts); name != "" {
		t.Fatal("it was held, and its driver not killed: ", dm.Hold(name))
	}
	need(t)
	legs := []*leg{newLeg(t, "leg0"), newLeg(t, "leg1")}
	legs[0].slow(3 * time.Second)
	const name = "ashlar-test-parts"
	first, second := dm.Number(legs[0].number), dm.Number(legs[1].number)
	check.OK(t, dm.Make(name, "", []dm.Line{{Length: mib, Kind: "linear", Text: first + " 0"},
		{Start: mib, Length: size - mib, Kind: "mirror", Text: fmt.Sprintf("core 2 1024 nosync 2 %s 2048 %s 2048 1 handle_errors", first, second)}}))
	t.Cleanup(func() { drivertest.Run(t, "dmsetup", "remove", "--retry", name) })
	d, err := dm.Find(name)
	check.OK(t, err)
	file, err := dm.Open(d, os.O_RDWR|unix.O_DIRECT)
	check.OK(t, err)
	defer file.Close()
	write := later(func() error { _, err := file.WriteAt(page(1), 2*mib); return err })
	time.Sleep(300 * time.Millisecond)
	killed(t, "TestKilledWhilePartsWait", heldParts+"="+name, time.Second)
	ends(t, write, "a write")
	ends(t, later(func() error { return dm.Replace(name, dm.Linear(legs[1].number, size)) }), "the next change")
}
