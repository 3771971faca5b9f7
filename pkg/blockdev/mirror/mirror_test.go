package mirror_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/ioctl"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/mirror"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

const (
	mib  = 1 << 20
	size = 32 * mib

	// patient is how long a test waits for what takes a moment on a quick machine.
	patient = 2 * time.Minute
)

// leg is a disk that can fail: a device of the device mapper over a loop device. The bytes of its image are those on the disk.
type leg struct {
	t      *testing.T
	name   string
	image  string
	loop   uint64
	number uint64
}

// newLeg makes one. options are of losetup.
func newLeg(t *testing.T, name string, options ...string) *leg {
	l := &leg{t: t, name: "test-" + name, image: filepath.Join(drivertest.Dir(t), name)}
	check.OK(t, errors.Join(os.WriteFile(l.image, nil, 0o600), os.Truncate(l.image, 2*size)))
	device := drivertest.Loop(t, l.image, options...)
	t.Cleanup(func() { drivertest.Run(t, "losetup", "-d", device) })
	var st unix.Stat_t
	check.OK(t, unix.Stat(device, &st))
	l.loop = st.Rdev
	check.OK(t, dm.Make(l.name, "", dm.Linear(l.loop, size)))
	t.Cleanup(func() { drivertest.Run(t, "dmsetup", "remove", "--retry", l.name) })
	d, err := dm.Find(l.name)
	check.OK(t, err)
	l.number = d.Number
	return l
}

func (l *leg) table(kind, text string) {
	l.t.Helper()
	check.OK(l.t, dm.Replace(l.name, []dm.Line{{Length: size, Kind: kind, Text: text}}))
}

// mend makes the disk work.
func (l *leg) mend() { l.table("linear", dm.Number(l.loop)+" 0") }

// fail makes the disk fail all writes and flushes. It can still be read.
func (l *leg) fail() { l.table("flakey", dm.Number(l.loop)+" 0 0 1 1 error_writes") }

// slow makes the disk take a time for each request. The kernel counts these: it does not where a device itself holds them back, as the one below does.
func (l *leg) slow(takes time.Duration) {
	name := l.name + "-slow"
	check.OK(l.t, dm.Make(name, "", []dm.Line{{Length: size, Kind: "delay", Text: fmt.Sprintf("%s 0 %d", dm.Number(l.loop), takes.Milliseconds())}}))
	l.t.Cleanup(func() { drivertest.Run(l.t, "dmsetup", "remove", "--retry", name) })
	below, err := dm.Find(name)
	check.OK(l.t, err)
	l.table("linear", dm.Number(below.Number)+" 0")
	l.t.Cleanup(l.mend)
}

// failLater makes the disk fail all requests, each after a time.
func (l *leg) failLater(after time.Duration) {
	name := l.name + "-bad"
	check.OK(l.t, dm.Make(name, "", []dm.Line{{Length: size, Kind: "flakey", Text: dm.Number(l.loop) + " 0 0 1"}}))
	l.t.Cleanup(func() { drivertest.Run(l.t, "dmsetup", "remove", "--retry", name) })
	bad, err := dm.Find(name)
	check.OK(l.t, err)
	l.table("delay", fmt.Sprintf("%s 0 %d", dm.Number(bad.Number), after.Milliseconds()))
	l.t.Cleanup(l.mend)
}

// at returns what is on the disk at an offset.
func (l *leg) at(offset int64, n int) []byte {
	l.t.Helper()
	f, err := os.Open(l.image)
	check.OK(l.t, err)
	defer f.Close()
	b := make([]byte, n)
	_, err = f.ReadAt(b, offset)
	check.OK(l.t, err)
	return b
}

// written returns how much the kernel has written to the disk, in bytes.
func (l *leg) written() (n int64) {
	text, err := os.ReadFile("/sys/dev/block/" + dm.Number(l.number) + "/stat")
	check.OK(l.t, err)
	_, err = fmt.Sscan(strings.Fields(string(text))[6], &n)
	check.OK(l.t, err)
	return n * 512
}

// fixture is a mirror, and the legs that it may have.
type fixture struct {
	t    *testing.T
	name string
	legs []*leg
}

func need(t *testing.T) {
	drivertest.NeedRoot(t)
	drivertest.NeedMapper(t)
	check.OK(t, dm.CanMirror())
}

// newMirror makes a mirror over some legs; the others are not in it.
func newMirror(t *testing.T, in, beside int) *fixture {
	need(t)
	f := &fixture{t: t, name: "ashlar-test-mirror"}
	for i := range in + beside {
		f.legs = append(f.legs, newLeg(t, fmt.Sprint("leg", i)))
	}
	f.over(in)
	return f
}

// over makes the mirror, over the first legs.
func (f *fixture) over(in int) {
	t := f.t
	check.OK(t, mirror.Make(context.Background(), f.name, "LVM-NOT-OF-LVM-TEST-MIRROR", size, f.numbers(in)...))
	t.Cleanup(func() {
		_ = dm.Replace(f.name, []dm.Line{{Length: size, Kind: "zero"}}) // releases what the mirror may hold
		inUse, err := mirror.Remove(context.Background(), f.name)
		if left, failure := dm.Names(f.name); err != nil || failure != nil || inUse || len(left) > 0 {
			t.Error("it does not go:", inUse, err, failure, left)
		}
	})
}

func (f *fixture) numbers(n int) (numbers []uint64) {
	for _, l := range f.legs[:n] {
		numbers = append(numbers, l.number)
	}
	return numbers
}

func (f *fixture) look() mirror.State {
	f.t.Helper()
	s, err := mirror.Look(f.name)
	check.OK(f.t, err)
	return s
}

// beside returns the names of the devices that the kernel has beside the mirror, without its note.
func (f *fixture) beside() []string {
	f.t.Helper()
	names, err := dm.Names(f.name + "-")
	check.OK(f.t, err)
	return slices.DeleteFunc(names, func(name string) bool { return name == f.name+"-since" })
}

// watch waits until the state of the mirror is one that until accepts, and returns it.
func (f *fixture) watch(seen mirror.Event, what string, until func(s mirror.State) bool) mirror.State {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patient)
	defer cancel()
	for {
		s, err := mirror.Watch(ctx, f.name, seen)
		if err != nil {
			f.t.Fatalf("waiting for %s: %v (%+v)", what, err, f.look())
		}
		if until(s) {
			return s
		}
		seen = s.Event
	}
}

func (f *fixture) failed(seen mirror.Event, failed ...int) mirror.State {
	f.t.Helper()
	var want []uint64
	for _, i := range failed {
		want = append(want, f.legs[i].number)
	}
	return f.watch(seen, "a failure", func(s mirror.State) bool { return slices.Equal(s.Failed(), want) })
}

func (f *fixture) leave(legs ...int) {
	f.t.Helper()
	var numbers []uint64
	for _, i := range legs {
		numbers = append(numbers, f.legs[i].number)
	}
	check.OK(f.t, mirror.Leave(context.Background(), f.name, numbers...))
}

func (f *fixture) open() *os.File {
	f.t.Helper()
	d, err := dm.Find(f.name)
	check.OK(f.t, err)
	file, err := dm.Open(d, os.O_RDWR|unix.O_DIRECT)
	check.OK(f.t, err)
	f.t.Cleanup(func() { _ = file.Close() })
	return file
}

func page(fill byte) []byte {
	b, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		panic(err)
	}
	copy(b, bytes.Repeat([]byte{fill}, 4096))
	return b
}

func (f *fixture) write(fill byte, offset int64) {
	f.t.Helper()
	_, err := f.open().WriteAt(page(fill), offset)
	check.OK(f.t, err)
}

// later calls do, which may have to wait, in the background. done gets its error at its end.
func later(do func() error) (done chan error) {
	done = make(chan error, 1)
	go func() { done <- do() }()
	return done
}

// waits fails the test if done has ended, or ends within a moment.
func waits(t *testing.T, done chan error, what string) {
	t.Helper()
	select {
	case err := <-done:
		t.Fatalf("%s did not wait: %v", what, err)
	case <-time.After(300 * time.Millisecond):
	}
}

func ends(t *testing.T, done chan error, what string) {
	t.Helper()
	select {
	case err := <-done:
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	case <-time.After(patient):
		t.Fatal(what, "still waits")
	}
}

func (f *fixture) has(i int, fill byte, offset int64) {
	f.t.Helper()
	if got := f.legs[i].at(offset, 4096); !bytes.Equal(got, bytes.Repeat([]byte{fill}, 4096)) {
		f.t.Errorf("leg %d has %d... at %d, not %d", i, got[0], offset, fill)
	}
}

func (f *fixture) equal(legs ...int) {
	f.t.Helper()
	first := f.legs[legs[0]].at(0, size)
	for _, i := range legs[1:] {
		if other := f.legs[i].at(0, size); !bytes.Equal(first, other) {
			at := 0
			for first[at] == other[at] {
				at++
			}
			f.t.Errorf("legs %d and %d differ, first at %d", legs[0], i, at)
		}
	}
}

// TestHolds: a leg fails while writes are in flight. None that it lacks is acknowledged before it has left. After that all of them are on the other legs.
func TestHolds(t *testing.T) {
	for _, n := range []int{2, 3} {
		for failing := range n {
			t.Run(fmt.Sprintf("%d legs, leg %d", n, failing), func(t *testing.T) {
				f := newMirror(t, n, 0)
				f.write(1, 0)
				for i := range n {
					f.has(i, 1, 0)
				}
				seen := f.look().Event
				f.legs[failing].failLater(500 * time.Millisecond)
				const writers = 16
				var acknowledged atomic.Int32
				var all sync.WaitGroup
				for i := range writers {
					file := f.open()
					all.Go(func() {
						if i > 0 {
							time.Sleep(250 * time.Millisecond) // all are in flight when the first one fails
						}
						if _, err := file.WriteAt(page(2), int64(i)*mib); err != nil {
							t.Error(err)
						}
						acknowledged.Add(1)
					})
				}
				s := f.failed(seen, failing)
				time.Sleep(time.Second)
				if n := acknowledged.Load(); n > 0 {
					t.Errorf("%d of %d writes were acknowledged while leg %d had failed", n, writers, failing)
				}
				if len(s.Legs) != n || s.Joining != nil {
					t.Errorf("it is %+v", s)
				}
				held := f.look()
				if got := held.Failed(); !slices.Equal(got, []uint64{f.legs[failing].number}) {
					t.Errorf("after the writes %v have failed", got)
				}
				f.leave(failing)
				all.Wait()
				for i := range n {
					for w := range int64(writers) {
						if i != failing {
							f.has(i, 2, w*mib)
						}
					}
				}
				f.legs[failing].mend()
				f.write(3, 0)
				f.has(failing, 1, 0)
				if got := f.look(); len(got.Legs) != n-1 || len(got.Failed()) > 0 {
					t.Errorf("it is %+v", got)
				}
			})
		}
	}
}

// TestLegComesBack: a leg joins while the mirror is used. Only ranges that differ are copied, and later writes are on all current legs.
func TestLegComesBack(t *testing.T) {
	for _, n := range []int{2, 3} {
		t.Run(fmt.Sprint(n, " legs"), func(t *testing.T) {
			ctx := context.Background()
			f := newMirror(t, n, 0)
			away := n - 1
			f.leave(away)
			for _, at := range []int64{3 * mib, 7*mib + 512<<10, 20 * mib} {
				f.write(5, at)
				f.has(away, 0, at)
			}
			seen, before := f.look().Event, f.legs[away].written()
			written := []dm.Range{{Offset: 3 * mib, Length: 4096}, {Offset: 7*mib + 512<<10, Length: mib}, {Offset: 20 * mib, Length: mib}}
			for range 2 { // the second call changes nothing
				check.OK(t, mirror.Join(ctx, f.name, f.legs[away].number, differs(written...)))
			}
			s := f.watch(seen, "a leg that is equal", mirror.State.Equal)
			if s.Joining.Device != f.legs[away].number || len(s.Legs) != n-1 || s.Synced != size || s.Total != size {
				t.Errorf("it is %+v", s)
			}
			// 3, 7 and 8, and 20 MiB
			if copied := f.legs[away].written() - before; copied != 4*mib {
				t.Errorf("%d bytes were copied", copied)
			}
			f.write(6, 25*mib)
			f.has(away, 6, 25*mib)
			for range 2 {
				check.OK(t, mirror.Finish(ctx, f.name, f.legs[away].number))
			}
			if s := f.look(); s.Joining != nil || len(s.Legs) != n || s.Legs[0].Device != f.legs[away].number {
				t.Errorf("it is %+v", s)
			}
			if left := f.beside(); len(left) > 0 {
				t.Errorf("beside it there is %v", left)
			}
			f.write(7, 30*mib)
			for i := range n {
				f.has(i, 7, 30*mib)
			}
			f.equal([]int{0, 1, n - 1}...)
		})
	}
}

// TestLooksAtOneMoment: while a leg joins, becomes current, or leaves, Look returns the state before a step or after it, and nothing in between.
func TestLooksAtOneMoment(t *testing.T) {
	ctx := context.Background()
	f := newMirror(t, 2, 1)
	joins := f.legs[2].number
	changes := later(func() error {
		for i := range 60 {
			if err := mirror.Join(ctx, f.name, joins, differs(dm.Range{Length: mib})); err != nil {
				return err
			}
			for i%2 == 0 {
				if err := mirror.Finish(ctx, f.name, 0); err == nil {
					break
				} else if !errors.Is(err, errdefs.ErrUnavailable) {
					return err
				}
			}
			if err := mirror.Leave(ctx, f.name, joins); err != nil {
				return err
			}
		}
		return nil
	})
	current := f.numbers(2)
	for n := 0; ; n++ {
		select {
		case err := <-changes:
			check.OK(t, err)
			t.Log(n, "looks")
			return
		default:
		}
		s := f.look()
		var legs []uint64
		for _, l := range s.Legs {
			if l.Device != joins {
				legs = append(legs, l.Device)
			}
			if l.Failed && l.Device != joins {
				t.Fatalf("leg %d has failed: %+v", l.Device, s)
			}
		}
		if !slices.Equal(legs, current) || s.Joining != nil && (s.Joining.Device != joins || s.Joining.Failed) || s.Size != size {
			t.Fatalf("there are legs %v, not %v, and %d that joins: %+v, joining %+v", legs, current, joins, s, s.Joining)
		}
	}
}

// TestJoinsUnderLoad: a leg with unknown content joins while somebody writes. Then all legs are equal.
func TestJoinsUnderLoad(t *testing.T) {
	ctx := context.Background()
	f := newMirror(t, 2, 1)
	stop := make(chan struct{})
	var writes int
	file := f.open()
	writer := later(func() error {
		for ; ; writes++ {
			select {
			case <-stop:
				return nil
			default:
			}
			if _, err := file.WriteAt(page(byte(writes%250+1)), int64(writes*7919%(size/4096))*4096); err != nil {
				return err
			}
		}
	})
	seen := f.look().Event
	check.OK(t, mirror.Join(ctx, f.name, f.legs[2].number, differs(dm.Range{Length: size})))
	f.watch(seen, "a leg that is equal", mirror.State.Equal)
	check.OK(t, mirror.Finish(ctx, f.name, 0))
	time.Sleep(200 * time.Millisecond)
	close(stop)
	ends(t, writer, "the writer")
	t.Logf("%d writes beside the copy", writes)
	f.equal(0, 1, 2)
}

// largeSectors have a disk with logical sectors of 4096 bytes (losetup).
var largeSectors = []string{"--sector-size", "4096"}

// sectors makes sure what logical sectors the mirror has.
func (f *fixture) sectors(when string, want uint32) {
	f.t.Helper()
	if have, err := ioctl.SectorSize(f.open()); err != nil || have != want {
		f.t.Errorf("%s the mirror has sectors of %d bytes, %v, want %d", when, have, err, want)
	}
}

// TestLargerSectors: a leg on a disk with larger logical sectors does not join, and what uses the mirror goes on in its own.
func TestLargerSectors(t *testing.T) {
	f := newMirror(t, 1, 0)
	large := newLeg(t, "large", largeSectors...)
	is(t, mirror.Join(context.Background(), f.name, large.number, differs(dm.Range{Length: size})), errdefs.ErrPrecondition)
	if s := f.look(); s.Joining != nil || len(s.Legs) != 1 {
		t.Errorf("it is %+v", s)
	}
	f.sectors("after that", 512)
}

// TestKeepsSectors: a mirror keeps the largest logical sectors that it had, as long as it is there. So the leg that has them can leave, and join again.
func TestKeepsSectors(t *testing.T) {
	ctx := context.Background()
	need(t)
	f := &fixture{t: t, name: "ashlar-test-mirror", legs: []*leg{newLeg(t, "leg0"), newLeg(t, "leg1", largeSectors...), newLeg(t, "leg2")}}
	f.over(3)
	f.sectors("at first", 4096)
	f.write(1, mib)
	for _, leaves := range [][]int{{1}, {1, 2}} { // to a mirror, and to a linear target
		f.leave(leaves...)
		f.sectors("without the leg", 4096)
		check.OK(t, errors.Join(mirror.Resize(ctx, f.name, size/2), mirror.Resize(ctx, f.name, size)))
		f.sectors("when it has grown", 4096)
		f.write(2, 2*mib)
		for _, i := range leaves {
			seen := f.look().Event
			check.OK(t, mirror.Join(ctx, f.name, f.legs[i].number, differs(dm.Range{Length: size})))
			f.sectors("while a leg joins", 4096)
			f.watch(seen, "a leg that is equal", mirror.State.Equal)
			check.OK(t, mirror.Finish(ctx, f.name, 0))
		}
		f.equal(0, 1, 2)
	}
	f.sectors("in the end", 4096)
}

// TestJoinsByWhatWasWritten: a leg that was away joins by the ranges that were written meanwhile, beside a writer that goes on. No write is under way when
// Join asks for the ranges, and none goes on before the leg has joined.
func TestJoinsByWhatWasWritten(t *testing.T) {
	ctx := context.Background()
	f := newMirror(t, 2, 0)
	f.leave(1)
	var mu sync.Mutex
	var written []dm.Range
	stop := make(chan struct{})
	file := f.open()
	var all sync.WaitGroup
	for w := range int64(4) {
		all.Go(func() {
			for i := int64(0); ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				at := (i*4 + w) * 7919 % (size / 4096) * 4096
				mu.Lock()
				written = append(written, dm.Range{Offset: at, Length: 4096})
				mu.Unlock()
				if _, err := file.WriteAt(page(byte(i%250+1)), at); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	time.Sleep(20 * time.Millisecond)
	seen := f.look().Event
	check.OK(t, mirror.Join(ctx, f.name, f.legs[1].number, func(context.Context) ([]dm.Range, error) {
		mu.Lock()
		before := slices.Clone(written)
		mu.Unlock()
		time.Sleep(200 * time.Millisecond)
		mu.Lock()
		defer mu.Unlock()
		if n := len(written) - len(before); n > 4 {
			t.Errorf("%d writes went on meanwhile", n)
		}
		return before, nil
	}))
	f.watch(seen, "a leg that is equal", mirror.State.Equal)
	check.OK(t, mirror.Finish(ctx, f.name, 0))
	for range 20 {
		check.OK(t, mirror.Still(context.Background(), f.name))
		time.Sleep(5 * time.Millisecond)
	}
	close(stop)
	all.Wait()
	t.Logf("%d writes", len(written))
	f.equal(0, 1)

	if err := mirror.Still(context.Background(), f.name); err != nil {
		t.Error(err)
	}
	f.leave(1)
	refused := errors.New("it is not known")
	is(t, mirror.Join(ctx, f.name, f.legs[1].number, func(context.Context) ([]dm.Range, error) { return nil, refused }), refused)
	f.write(9, 0)
	if s := f.look(); s.Joining != nil || s.Held || len(s.Legs) != 1 {
		t.Errorf("it is %+v", s)
	}
	is(t, mirror.Still(context.Background(), "ashlar-test-none"), errdefs.ErrNotFound)
}

// TestFailsWhileOneJoins: while a leg joins two current ones, any leg may fail: it leaves, and the others go on.
func TestFailsWhileOneJoins(t *testing.T) {
	ctx := context.Background()
	for _, failing := range []int{1, 2} {
		t.Run(fmt.Sprint("leg ", failing), func(t *testing.T) {
			f := newMirror(t, 2, 1)
			seen := f.look().Event
			if failing == 2 {
				f.legs[2].failLater(100 * time.Millisecond)
			} else {
				f.legs[2].table("delay", dm.Number(f.legs[2].loop)+" 0 300")
			}
			check.OK(t, mirror.Join(ctx, f.name, f.legs[2].number, differs(dm.Range{Length: size})))
			if failing == 2 {
				f.watch(seen, "the leg that joins to fail", func(s mirror.State) bool { return s.Joining.Failed })
				f.leave(2)
				f.write(9, 0)
				f.has(0, 9, 0)
				f.has(1, 9, 0)
				return
			}
			f.legs[1].fail()
			file := f.open()
			write := later(func() error { _, err := file.WriteAt(page(9), 31*mib); return err })
			waits(t, write, "a write of which a leg has failed")
			if got := f.look().Failed(); !slices.Equal(got, f.numbers(2)[1:]) {
				t.Errorf("%v have failed", got)
			}
			f.leave(1)
			ends(t, write, "a write that was held")
			f.has(0, 9, 31*mib)
			if s := f.look(); len(s.Legs) != 1 || s.Joining == nil {
				t.Errorf("it is %+v", s)
			}
			f.leave(2)
			f.write(10, 0)
			f.has(0, 10, 0)
		})
	}
}

// TestFlushFails: a leg fails a flush, and then takes writes again. Once Watch has seen it, or a driver that was away starts, nothing that the leg lacks is
// acknowledged. What the kernel acknowledged before that is on the leg that stays.
func TestFlushFails(t *testing.T) {
	for _, n := range []int{2, 3} {
		for failing := range n {
			for _, noticed := range []string{"at once", "late", "by a driver that looked too late", "by a driver that starts"} {
				t.Run(fmt.Sprintf("leg %d of %d, %s", failing, n, noticed), func(t *testing.T) {
					f := newMirror(t, n, 0)
					f.write(1, 0)
					seen := f.look().Event
					f.legs[failing].fail()
					file := f.open()
					flush := later(file.Sync)
					waits(t, flush, "a flush that a leg fails")
					f.legs[failing].mend()
					last := byte(1)
					if noticed != "at once" { // by then the kernel forgets the failure, and writes to one leg alone
						for last = range byte(5) {
							f.write(last+2, 0)
						}
						last += 2
						if s := f.look(); len(s.Failed()) > 0 {
							t.Fatalf("this kernel does not forget: %+v", s)
						}
					}
					switch noticed {
					case "by a driver that starts":
						check.OK(t, mirror.Recover(context.Background(), f.name))
					case "by a driver that looked too late":
						seen = f.look().Event
						fallthrough
					default:
						f.watch(seen, "it to be held", func(s mirror.State) bool { return s.Held })
					}
					s := f.look()
					if !s.Held || len(s.Failed()) != n-1 {
						t.Errorf("%v have failed, of %v", s.Failed(), s.Legs)
					}
					write := later(func() error { _, err := file.WriteAt(page(99), mib); return err })
					waits(t, write, "a write to a mirror that is held")
					check.OK(t, mirror.Recover(context.Background(), f.name)) // as a start of the driver does
					if now := f.look(); !now.Held || !slices.Equal(now.Legs, s.Legs) {
						t.Errorf("found again it is %+v, not %+v", now, s)
					}
					if n == 3 {
						is(t, mirror.Leave(context.Background(), f.name, s.Failed()[0]), errdefs.ErrPrecondition)
					}
					check.OK(t, mirror.Leave(context.Background(), f.name, s.Failed()...))
					ends(t, write, "a write that was held")
					ends(t, flush, "the flush")
					stays := slices.IndexFunc(f.legs, func(l *leg) bool { return !slices.Contains(s.Failed(), l.number) })
					f.has(stays, last, 0)
					f.has(stays, 99, mib)
				})
			}
		}
	}
}

// TestForgottenIsKept: the kernel has forgotten that a leg has failed a flush, and nobody knows yet. No change of the mirror hides that.
func TestForgottenIsKept(t *testing.T) {
	ctx := context.Background()
	f := newMirror(t, 3, 1)
	file := f.open()
	f.legs[1].fail()
	flush := later(file.Sync)
	waits(t, flush, "a flush that a leg fails")
	f.legs[1].mend()
	for range 5 {
		f.write(2, 0)
	}
	if s := f.look(); len(s.Failed()) > 0 || !s.Forgot {
		t.Fatalf("this kernel does not forget: %+v", s)
	}
	for what, change := range map[string]func() error{
		"still":   func() error { return mirror.Still(ctx, f.name) },
		"resized": func() error { return mirror.Resize(ctx, f.name, size/2) },
		"joined":  func() error { return mirror.Join(ctx, f.name, f.legs[3].number, differs(dm.Range{Length: size})) },
		"left":    func() error { return mirror.Leave(ctx, f.name, f.legs[2].number) },
		"ordered": func() error { return mirror.Finish(ctx, f.name, f.legs[2].number) },
	} {
		if err := change(); !errors.Is(err, errdefs.ErrUnavailable) {
			t.Errorf("%s: %v", what, err)
		}
		if _, err := mirror.Compare(ctx, f.name, 0, free); !errors.Is(err, errdefs.ErrUnavailable) {
			t.Errorf("compared after it was %s: %v", what, err)
		}
	}
	f.write(3, 0)
	s := f.watch(f.look().Event, "it to be held", func(s mirror.State) bool { return s.Held })
	check.OK(t, mirror.Leave(ctx, f.name, s.Failed()...))
	ends(t, flush, "the flush")
	f.has(slices.IndexFunc(f.legs, func(l *leg) bool { return l.number == f.look().Legs[0].Device }), 3, 0)
}

// noFlush makes the disk fail flushes, and nothing else.
func (l *leg) noFlush() {
	l.t.Helper()
	check.OK(l.t, dm.Replace(l.name, []dm.Line{{Length: size, Kind: "linear", Text: dm.Number(l.loop) + " 0"}, {Start: size, Length: 4096, Kind: "flakey", Text: dm.Number(l.loop) + " 0 0 1"}}))
}

// TestFlushAll: a leg cannot be flushed by the driver, and takes flushes again. Nothing is acknowledged until it has left: it may lack what was acknowledged.
func TestFlushAll(t *testing.T) {
	for _, n := range []int{2, 3} {
		for failing := range n {
			t.Run(fmt.Sprintf("leg %d of %d", failing, n), func(t *testing.T) {
				ctx := context.Background()
				f := newMirror(t, n, 0)
				f.write(1, 0)
				check.OK(t, mirror.FlushAll(ctx, f.name))
				f.legs[failing].noFlush()
				if err := mirror.FlushAll(ctx, f.name); err == nil {
					t.Fatal("it was flushed")
				}
				f.legs[failing].mend()
				file := f.open()
				flush := later(file.Sync)
				waits(t, flush, "a flush after one has failed")
				s := f.look()
				if !s.Held || !slices.Equal(s.Failed(), []uint64{f.legs[failing].number}) {
					t.Errorf("it is %+v", s)
				}
				if err := mirror.FlushAll(ctx, f.name); err != nil { // it is told no more
					t.Error(err)
				}
				f.leave(failing)
				ends(t, flush, "the flush")
				f.write(2, 0)
				f.has(failing, 1, 0)
				f.has((failing+1)%n, 2, 0)
			})
		}
	}
}

// TestNoneIsFlushed: no leg can be flushed. Nobody has everything then, and the mirror is not held for ever.
func TestNoneIsFlushed(t *testing.T) {
	f := newMirror(t, 2, 0)
	for _, l := range f.legs {
		l.noFlush()
	}
	if err := mirror.FlushAll(context.Background(), f.name); err == nil {
		t.Error("it was flushed")
	}
	for _, l := range f.legs {
		l.mend()
	}
	ends(t, later(f.open().Sync), "a flush")
}

// flushFailsOnce makes the disk fail the next flush, and what else is flushed until it has: each takes a second. It returns once the flush of file is under way to it. The disk
// takes flushes as soon as the mirror knows that one has failed.
func (f *fixture) flushFailsOnce(i int, file *os.File) (flush chan error) {
	t, l := f.t, f.legs[i]
	bad := l.name + "-once"
	check.OK(t, dm.Make(bad, "", []dm.Line{{Length: 4096, Kind: "flakey", Text: dm.Number(l.loop) + " 0 0 1"}}))
	t.Cleanup(func() { drivertest.Run(t, "dmsetup", "remove", "--retry", bad) })
	t.Cleanup(l.mend)
	d, err := dm.Find(bad)
	check.OK(t, err)
	number := dm.Number(d.Number)
	check.OK(t, dm.Replace(l.name, []dm.Line{{Length: size, Kind: "linear", Text: dm.Number(l.loop) + " 0"},
		{Start: size, Length: 4096, Kind: "delay", Text: fmt.Sprintf("%s 0 0 %[1]s 0 0 %[1]s 0 1000", number)}}))
	seen := f.look().Event
	flush = later(file.Sync)
	waits(t, flush, "a flush that takes a second")
	go func() {
		for end := time.Now().Add(patient); time.Now().Before(end); time.Sleep(time.Millisecond) {
			if s, err := mirror.Look(f.name); err != nil || s.Event != seen {
				break
			}
		}
		_ = dm.Replace(bad, dm.Linear(l.loop, 4096))
	}()
	return flush
}

// TestFlushFailsAsItChanges: the mirror gets another table, and a leg that stays fails a flush which is under way meanwhile. It is not tried again: a disk
// tells only once what it could not flush. The flush is acknowledged when that leg has left.
func TestFlushFailsAsItChanges(t *testing.T) {
	ctx := context.Background()
	for what, change := range map[string]func(f *fixture) error{
		"grows":          func(f *fixture) error { return mirror.Resize(ctx, f.name, size) },
		"another leaves": func(f *fixture) error { return mirror.Leave(ctx, f.name, f.legs[2].number) },
		"reads another":  func(f *fixture) error { return mirror.Finish(ctx, f.name, f.legs[2].number) },
	} {
		for _, failing := range []int{0, 1} {
			t.Run(fmt.Sprint(what, ", leg ", failing), func(t *testing.T) {
				f := newMirror(t, 3, 0)
				check.OK(t, mirror.Resize(ctx, f.name, size/2))
				f.write(1, 0)
				flush := f.flushFailsOnce(failing, f.open())
				is(t, change(f), errdefs.ErrUnavailable)
				waits(t, flush, "a flush that a leg has failed")
				s := f.look()
				if !slices.Equal(s.Failed(), []uint64{f.legs[failing].number}) {
					t.Errorf("it is %+v", s)
				}
				f.leave(failing)
				ends(t, flush, "the flush")
				check.OK(t, change(f))
				f.write(2, 0)
				f.has(1-failing, 2, 0)
				f.has(failing, 1, 0)
			})
		}
	}
}

// TestLeavesBesideFailed: a leg is to leave, and another one has failed a flush, of which nobody knows yet. The flush is not tried again.
func TestLeavesBesideFailed(t *testing.T) {
	f := newMirror(t, 3, 0)
	f.legs[1].noFlush()
	flush := later(f.open().Sync)
	for end := time.Now().Add(patient); len(f.look().Failed()) == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it is %+v", f.look())
		}
	}
	f.legs[1].mend()
	is(t, mirror.Leave(context.Background(), f.name, f.legs[2].number), errdefs.ErrUnavailable)
	waits(t, flush, "a flush that a leg has failed")
	f.leave(1, 2)
	ends(t, flush, "the flush")
}

// TestFlushFailsAsItFinishes: a leg that has joined becomes one of the mirror's, and one fails a flush that is under way meanwhile.
func TestFlushFailsAsItFinishes(t *testing.T) {
	ctx := context.Background()
	for _, c := range []struct{ in, failing int }{{1, 1}, {2, 0}, {2, 1}, {2, 2}} {
		t.Run(fmt.Sprintf("leg %d, beside %d", c.failing, c.in), func(t *testing.T) {
			f := newMirror(t, c.in, 1)
			joins := f.legs[c.in].number
			_, file := f.topOver()
			f.write(1, 0)
			seen := f.look().Event
			check.OK(t, mirror.Join(ctx, f.name, joins, differs(dm.Range{Length: size})))
			f.watch(seen, "it to be equal", mirror.State.Equal)
			check.OK(t, mirror.FlushLeg(f.name, joins))
			flush := f.flushFailsOnce(c.failing, file)
			is(t, mirror.Finish(ctx, f.name, f.legs[0].number), errdefs.ErrUnavailable)
			waits(t, flush, "a flush that a leg has failed")
			f.leave(c.failing)
			ends(t, flush, "the flush")
			_, err := file.WriteAt(page(2), 0)
			check.OK(t, err)
			f.has(c.failing, 1, 0)
			f.has((c.failing+1)%(c.in+1), 2, 0)
		})
	}
}

// TestFlushFailsWhileOneJoins: while a leg joins, one of the two current legs fails a flush, and then takes writes again: the kernel forgets the failure,
// and does not write to that leg. All that was acknowledged is on the current leg that stays, and on the one that joins.
func TestFlushFailsWhileOneJoins(t *testing.T) {
	for failing := range 2 {
		t.Run(fmt.Sprint("leg ", failing), func(t *testing.T) {
			f := newMirror(t, 2, 1)
			f.write(1, 0)
			seen := f.look().Event
			check.OK(t, mirror.Join(context.Background(), f.name, f.legs[2].number, differs(dm.Range{Length: mib})))
			seen = f.watch(seen, "a leg that is equal", mirror.State.Equal).Event
			f.legs[failing].fail()
			file := f.open()
			flush := later(file.Sync)
			waits(t, flush, "a flush that a leg fails")
			f.legs[failing].mend()
			for fill := byte(2); fill < 7; fill++ {
				f.write(fill, 0)
			}
			if s := f.look(); len(s.Failed()) > 0 {
				t.Fatalf("this kernel does not forget: %+v", s)
			}
			s := f.watch(seen, "it to be held", func(s mirror.State) bool { return s.Held })
			check.OK(t, mirror.Leave(context.Background(), f.name, s.Failed()...))
			ends(t, flush, "the flush")
			stays := f.look().Legs
			if len(stays) != 1 {
				t.Fatalf("%+v stay", stays)
			}
			f.has(slices.IndexFunc(f.legs, func(l *leg) bool { return l.number == stays[0].Device }), 6, 0)
			f.has(2, 6, 0)
			f.leave(2)
		})
	}
}

// TestFlushFailsOnceEqual: all is copied to a leg that joins, when the only current leg fails a flush, and then takes writes again. No later write is
// acknowledged that this leg lacks, and its failure is not forgotten: if another node takes the volume over now, it uses that leg alone, as the other one
// is not on the list yet.
func TestFlushFailsOnceEqual(t *testing.T) {
	for _, differ := range [][]dm.Range{{{Length: mib}}, nil} {
		t.Run(fmt.Sprint(differ), func(t *testing.T) {
			f := newMirror(t, 1, 1)
			f.write(1, 0)
			seen := f.look().Event
			check.OK(t, mirror.Join(context.Background(), f.name, f.legs[1].number, differs(differ...)))
			f.watch(seen, "a leg that is equal", mirror.State.Equal)
			time.Sleep(100 * time.Millisecond)
			for at := range int64(4) {
				f.write(2, at*mib)
				f.has(0, 2, at*mib)
				f.has(1, 2, at*mib)
			}
			f.legs[0].fail()
			file := f.open()
			flush := later(file.Sync)
			time.Sleep(300 * time.Millisecond)
			f.legs[0].mend()
			acknowledged := byte(2)
			for fill := byte(3); fill < 8; fill++ {
				write := later(func() error { _, err := file.WriteAt(page(fill), 0); return err })
				select {
				case err := <-write:
					if err == nil {
						acknowledged = fill
					}
				case <-time.After(300 * time.Millisecond):
				}
			}
			if f.legs[0].at(0, 1)[0] < acknowledged {
				t.Errorf("%d was acknowledged, and the only leg that is current has %d", acknowledged, f.legs[0].at(0, 1)[0])
			}
			if s := f.look(); !slices.Equal(s.Failed(), f.numbers(1)) || s.Joining == nil {
				t.Errorf("it is %+v", s)
			}
			check.OK(t, mirror.End(context.Background(), f.name))
			if err := <-flush; err == nil {
				t.Error("the flush was acknowledged")
			}
		})
	}
}

// TestJoinerFailsOnceEqual: all is copied to a leg that joins, when this leg fails a flush or a write. That is held until the leg has left, and the
// failure is not forgotten.
func TestJoinerFailsOnceEqual(t *testing.T) {
	for _, n := range []int{1, 2} {
		for _, what := range []string{"flush", "write"} {
			t.Run(fmt.Sprint(n, what), func(t *testing.T) {
				f := newMirror(t, n, 1)
				seen := f.look().Event
				check.OK(t, mirror.Join(context.Background(), f.name, f.legs[n].number, differs(dm.Range{Length: mib})))
				f.watch(seen, "a leg that is equal", mirror.State.Equal)
				check.OK(t, mirror.FlushLeg(f.name, f.legs[n].number))
				time.Sleep(100 * time.Millisecond)
				seen = f.look().Event
				f.legs[n].fail()
				file := f.open()
				held := later(func() error {
					if what == "flush" {
						return file.Sync()
					}
					_, err := file.WriteAt(page(3), 0)
					return err
				})
				waits(t, held, what)
				f.legs[n].mend()
				s := f.watch(seen, "a failure", func(s mirror.State) bool { return s.Joining.Failed })
				if len(s.Failed()) > 0 || s.Equal() {
					t.Errorf("it is %+v", s)
				}
				is(t, mirror.Finish(context.Background(), f.name, 0), errdefs.ErrUnavailable)
				f.leave(n)
				ends(t, held, what)
				f.write(4, 0)
				for i := range n {
					f.has(i, 4, 0)
				}
			})
		}
	}
}

// TestFailsWhileStill: a leg fails writes and flushes while a mirror is held for a moment. It can leave: nothing begins to copy to it before.
func TestFailsWhileStill(t *testing.T) {
	f := newMirror(t, 2, 0)
	l := f.legs[1]
	var stop atomic.Bool
	var all sync.WaitGroup
	for i := range int64(8) {
		file := f.open()
		all.Go(func() {
			for at := i; !stop.Load(); at += 5 {
				var err error
				if i == 0 {
					err = file.Sync()
				} else {
					_, err = file.WriteAt(page(2), at*mib%size)
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	l.failLater(time.Second)
	time.Sleep(200 * time.Millisecond)
	is(t, mirror.Still(context.Background(), f.name), errdefs.ErrUnavailable)
	time.Sleep(time.Second)
	check.OK(t, mirror.Recover(context.Background(), f.name)) // as a driver that starts
	if s := f.look(); !s.Held || !slices.Equal(s.Failed(), []uint64{l.number}) {
		t.Errorf("it is %+v", s)
	}
	ends(t, later(func() error { return mirror.Leave(context.Background(), f.name, l.number) }), "the leg that leaves")
	time.Sleep(100 * time.Millisecond)
	stop.Store(true)
	all.Wait()
}

// TestJoinerIsFlushed: a leg that joins counts as flushed if nothing that it has taken can be lost. What is under way to it is flushed too: that may be a write
// that has to be durable at its end. And if its disk could not be flushed it has failed, whoever was told.
func TestJoinerIsFlushed(t *testing.T) {
	for _, n := range []int{1, 2} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			f := newMirror(t, n, 1)
			joins := f.legs[n]
			check.OK(t, mirror.Join(context.Background(), f.name, joins.number, differs(dm.Range{Length: mib})))
			f.watch(mirror.Event{}, "a leg that is equal", mirror.State.Equal)
			joins.table("delay", fmt.Sprintf("%[1]s 0 0 %[1]s 0 2000 %[1]s 0 0", dm.Number(joins.loop))) // of writes
			file := f.open()
			write := later(func() error { _, err := file.WriteAt(page(2), 0); return err })
			time.Sleep(500 * time.Millisecond)
			check.OK(t, mirror.FlushLeg(f.name, joins.number))
			select {
			case err := <-write:
				check.OK(t, err)
			case <-time.After(200 * time.Millisecond):
				t.Error("it counts as flushed, and a write of before is under way")
				check.OK(t, <-write)
			}
			joins.fail()
			flush := later(file.Sync)
			waits(t, flush, "a flush")
			joins.mend()
			is(t, mirror.FlushLeg(f.name, joins.number), errdefs.ErrUnavailable)
			f.leave(n)
			ends(t, flush, "a flush")
		})
	}
}

// TestJoinsWithoutCache: a leg joins whose disk has no volatile cache.
func TestJoinsWithoutCache(t *testing.T) {
	for _, all := range []bool{false, true} {
		t.Run(fmt.Sprint(all), func(t *testing.T) {
			need(t)
			f := &fixture{t: t, name: "ashlar-test-mirror", legs: []*leg{newLeg(t, "leg0"), newLeg(t, "leg1")}}
			f.legs[1].noCache()
			if all {
				f.legs[0].noCache()
			}
			f.over(1)
			check.OK(t, mirror.Join(context.Background(), f.name, f.legs[1].number, differs(dm.Range{Length: mib})))
			f.watch(mirror.Event{}, "a leg that is equal", mirror.State.Equal)
			check.OK(t, mirror.FlushLeg(f.name, f.legs[1].number))
			check.OK(t, mirror.Finish(context.Background(), f.name, 0))
		})
	}
}

// TestJoinerFailsInTheMiddle: a leg fails in the middle of its copy, while the mirror is written to and flushed. It can leave, and all goes on.
func TestJoinerFailsInTheMiddle(t *testing.T) {
	for _, n := range []int{1, 2} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			f := newMirror(t, n, 1)
			joins := f.legs[n]
			joins.table("delay", fmt.Sprintf("%[1]s 0 0 %[1]s 0 100 %[1]s 0 0", dm.Number(joins.loop))) // of writes
			check.OK(t, mirror.Join(context.Background(), f.name, joins.number, differs(dm.Range{Length: size})))
			var stop atomic.Bool
			var all sync.WaitGroup
			for i := range int64(8) {
				file := f.open()
				all.Go(func() {
					for at := i; !stop.Load(); at += 5 {
						if _, err := file.WriteAt(page(2), at*mib%size); err != nil {
							t.Error(err)
							return
						}
						if i > 0 {
							continue
						}
						if err := file.Sync(); err != nil {
							t.Error(err)
							return
						}
					}
				})
			}
			for end := time.Now().Add(patient); f.look().Synced < size/8 && time.Now().Before(end); {
				time.Sleep(10 * time.Millisecond)
			}
			if s := f.look(); s.Synced < size/8 || s.Equal() {
				t.Fatalf("it is %+v", s)
			}
			joins.fail()
			time.Sleep(time.Second)
			ends(t, later(func() error { return mirror.Leave(context.Background(), f.name, joins.number) }), "the leg that leaves")
			time.Sleep(100 * time.Millisecond)
			stop.Store(true)
			all.Wait()
			joins.mend()
		})
	}
}

// TestJoinerStays: the only current leg leaves when the joining one is equal.
func TestJoinerStays(t *testing.T) {
	f := newMirror(t, 1, 1)
	f.write(1, 0)
	seen := f.look().Event
	check.OK(t, mirror.Join(context.Background(), f.name, f.legs[1].number, differs(dm.Range{Length: mib})))
	f.watch(seen, "a leg that is equal", mirror.State.Equal)
	f.leave(0)
	f.write(2, 0)
	f.has(0, 1, 0)
	f.has(1, 2, 0)
	if s := f.look(); len(s.Legs) != 1 || s.Legs[0].Device != f.legs[1].number || s.Joining != nil {
		t.Errorf("it is %+v", s)
	}
}

// TestJoinsAnySize: legs join volumes whose last unit is not whole, and whose units are larger than 1 MiB.
func TestJoinsAnySize(t *testing.T) {
	for _, of := range []int64{size - mib/2 + 4096, 96<<30 + mib + 4096} {
		t.Run(fmt.Sprint(of), func(t *testing.T) {
			need(t)
			f := &fixture{t: t, name: "ashlar-test-mirror"}
			for i := range 2 {
				l := newLeg(t, fmt.Sprint("leg", i))
				check.OK(t, os.Truncate(l.image, of))
				drivertest.Run(t, "losetup", "-c", fmt.Sprint("/dev/loop", unix.Minor(l.loop)))
				check.OK(t, dm.Replace(l.name, dm.Linear(l.loop, of)))
				f.legs = append(f.legs, l)
			}
			check.OK(t, mirror.Make(t.Context(), f.name, "", of, f.legs[0].number))
			t.Cleanup(func() { _, err := mirror.Remove(context.Background(), f.name); check.OK(t, err) })
			last := of - 4096
			f.write(1, last)
			f.write(2, 0)
			seen := f.look().Event
			check.OK(t, mirror.Join(t.Context(), f.name, f.legs[1].number, differs(dm.Range{Length: 4096}, dm.Range{Offset: last, Length: 4096})))
			s := f.watch(seen, "a leg that is equal", mirror.State.Equal)
			if got, err := mirror.Size(f.name); err != nil || got != of || s.Size != of || s.Total != of || s.Synced != of {
				t.Errorf("of %d bytes it is %d, %v, %+v", of, got, err, s)
			}
			f.has(1, 1, last)
			f.has(1, 2, 0)
			f.write(3, last)
			f.has(0, 3, last)
			f.has(1, 3, last)
			check.OK(t, mirror.FlushLeg(f.name, f.legs[1].number))
			check.OK(t, mirror.Finish(t.Context(), f.name, 0))
			f.write(4, last)
			f.has(1, 4, last)
		})
	}
}

// TestAllFail: when all legs have failed, I/O has errors, and nothing is acknowledged.
func TestAllFail(t *testing.T) {
	f := newMirror(t, 2, 0)
	seen := f.look().Event
	f.legs[0].fail()
	f.legs[1].fail()
	write := later(func() error { _, err := f.open().WriteAt(page(1), 0); return err })
	select {
	case err := <-write:
		if !errors.Is(err, unix.EIO) {
			t.Errorf("the write: %v", err)
		}
	case <-time.After(patient):
		t.Error("the write waits")
	}
	f.failed(seen, 0, 1)
	is(t, mirror.Leave(context.Background(), f.name, f.numbers(2)...), errdefs.ErrPrecondition)
	f.leave(1)
	if _, err := f.open().WriteAt(page(1), 0); !errors.Is(err, unix.EIO) {
		t.Errorf("a write to the last leg, that has failed: %v", err)
	}
	f.legs[0].mend()
	f.write(2, 0)
}

// TestMakeAgain: Make finds a mirror that is there, and refuses one with another size or other legs.
func TestMakeAgain(t *testing.T) {
	f := newMirror(t, 2, 1)
	check.OK(t, mirror.Make(context.Background(), f.name, "", size, f.numbers(2)...))
	is(t, mirror.Make(context.Background(), f.name, "", size, f.numbers(3)...), errdefs.ErrExists)
	is(t, mirror.Make(context.Background(), f.name, "", size/2, f.numbers(2)...), errdefs.ErrExists)
	_, err := mirror.Look("ashlar-test-none")
	is(t, err, errdefs.ErrNotFound)
	check.OK(t, mirror.Recover(context.Background(), "ashlar-test-none"))
}

// TestConsumerDies: the consumer dies while writes are in flight. All acknowledged writes are on every leg, whatever became of the others. Then the other
// legs are made equal to one.
func TestConsumerDies(t *testing.T) {
	ctx := context.Background()
	f := newMirror(t, 2, 0)
	const writers = 8
	var acknowledged [writers]byte
	var all sync.WaitGroup
	var dead atomic.Bool
	for w := range writers {
		file := f.open()
		all.Go(func() {
			for i := byte(1); i < 250 && !dead.Load(); i++ {
				if _, err := file.WriteAt(page(i), int64(w)*mib); err != nil {
					return
				}
				acknowledged[w] = i
			}
		})
	}
	time.Sleep(300 * time.Millisecond)
	f.legs[1].failLater(time.Millisecond) // and it takes none of the writes under way
	time.Sleep(300 * time.Millisecond)
	for w, last := range acknowledged {
		if last > 0 {
			f.has(1, last, int64(w)*mib)
		}
	}
	dead.Store(true)
	check.OK(t, dm.Replace(f.name, []dm.Line{{Length: size, Kind: "error"}}))
	all.Wait()
	f.legs[1].mend()
	check.OK(t, dm.Replace(f.name, dm.Linear(f.legs[1].number, size)))
	seen := f.look().Event
	check.OK(t, mirror.Join(ctx, f.name, f.legs[0].number, differs(dm.Range{Length: writers * mib})))
	f.watch(seen, "a leg that is equal", mirror.State.Equal)
	check.OK(t, mirror.Finish(ctx, f.name, 0))
	f.equal(0, 1)
	for w, last := range acknowledged {
		if last > 0 {
			f.has(0, last, int64(w)*mib)
		}
	}
}

// TestRecover: Recover repairs what a crash in Compare, in Join, or before a table is in effect leaves.
func TestRecover(t *testing.T) {
	ctx := context.Background()
	f := newMirror(t, 2, 1)
	check.OK(t, dm.Hold(f.name)) // Compare
	write := later(func() error { _, err := f.open().WriteAt(page(1), 0); return err })
	waits(t, write, "a write")
	check.OK(t, dm.Make(f.name+"-base", "", dm.Linear(f.legs[0].number, size))) // Join
	check.OK(t, mirror.Recover(ctx, f.name))
	ends(t, write, "a write")
	if left := f.beside(); len(left) > 0 {
		t.Errorf("beside it there is %v", left)
	}
	check.OK(t, dm.Load(f.name, dm.Linear(f.legs[0].number, size))) // a table that is loaded and not in effect
	check.OK(t, mirror.Recover(ctx, f.name))
	if s := f.look(); len(s.Legs) != 2 || s.Held {
		t.Errorf("it is %+v", s)
	}
	if d, err := dm.Find(f.name); err != nil || d.Loaded || d.Suspended {
		t.Errorf("it is %+v, %v", d, err)
	}

	check.OK(t, dm.Hold(f.name)) // Compare, by one driver, and Resize, by the next one, before it has recovered the mirror
	write = later(func() error { _, err := f.open().WriteAt(page(2), 0); return err })
	waits(t, write, "a write")
	check.OK(t, dm.Load(f.name, []dm.Line{{Length: size - mib, Kind: "mirror", Text: fmt.Sprintf("core 2 1024 nosync 2 %s 0 %s 0 1 handle_errors", dm.Number(f.legs[0].number), dm.Number(f.legs[1].number))}}))
	if s := f.look(); s.Held || len(s.Failed()) > 0 {
		t.Errorf("with a table of all its legs it is %+v", s)
	}
	check.OK(t, mirror.Recover(ctx, f.name))
	ends(t, write, "a write")
	if s := f.look(); s.Size != size {
		t.Errorf("its size is %d", s.Size)
	}
}

// TestRecoverWhileOneJoins: a driver ended in the middle of a change of the mirror of the current legs, and another one in the middle of Finish.
func TestRecoverWhileOneJoins(t *testing.T) {
	ctx := context.Background()
	f := newMirror(t, 2, 1)
	check.OK(t, mirror.Join(ctx, f.name, f.legs[2].number, differs(dm.Range{Length: mib})))
	f.watch(mirror.Event{}, "it to be equal", mirror.State.Equal)
	check.OK(t, dm.Hold(f.name+"-base"))
	write := later(func() error { _, err := f.open().WriteAt(page(1), 0); return err })
	waits(t, write, "a write")
	check.OK(t, mirror.Recover(ctx, f.name))
	ends(t, write, "a write")
	if s := f.look(); s.Held || s.Joining == nil || len(s.Legs) != 2 {
		t.Errorf("it is %+v", s)
	}
	check.OK(t, dm.Hold(f.name))
	var legs string
	for _, number := range f.numbers(3) {
		legs += " " + dm.Number(number) + " 0"
	}
	d, err := dm.Find(f.name)
	check.OK(t, err)
	check.OK(t, dm.Note(f.name+"-since", fmt.Sprintf("ashlar-mirror-since-%d-%s", d.Event, f.name)))
	check.OK(t, dm.Load(f.name, []dm.Line{{Length: size, Kind: "mirror", Text: "core 2 1024 nosync 3" + legs + " 1 handle_errors"}}))
	check.OK(t, mirror.Recover(ctx, f.name))
	f.write(2, 0)
	for i := range 3 {
		f.has(i, 2, 0)
	}
	if s, left := f.look(), f.beside(); len(left) > 0 || s.Joining != nil || len(s.Legs) != 3 {
		t.Errorf("it is %+v, and beside it there is %v", s, left)
	}
}

// held has the name of the mirror that a process of this test holds.
const held = "ASHLAR_TEST_HELD_MIRROR"

// killed runs a test in a process of its own, with one more variable in its environment, and kills it after a time. It fails the test if that process ends by itself.
func killed(t *testing.T, test, variable string, after time.Duration) {
	t.Helper()
	driver := exec.Command(os.Args[0], "-test.run=^"+test+"$")
	driver.Env = append(os.Environ(), variable)
	check.OK(t, driver.Start())
	time.Sleep(after)
	check.OK(t, driver.Process.Kill())
	if err := driver.Wait(); !strings.Contains(fmt.Sprint(err), "killed") {
		t.Fatalf("the process ended before it was killed: %v", err)
	}
}

// TestKilledWhileItWaits: the driver is killed while it waits, before it holds a mirror, for what is under way to a leg. The next driver can change the
// mirror, and what a leg fails is still held.
func TestKilledWhileItWaits(t *testing.T) {
	if name := os.Getenv(held); name != "" {
		t.Fatal("it was held, and its driver not killed: ", mirror.Still(context.Background(), name))
	}
	f := newMirror(t, 2, 0)
	f.legs[0].slow(3 * time.Second)
	write := later(func() error { _, err := f.open().WriteAt(page(1), 0); return err })
	time.Sleep(300 * time.Millisecond)
	killed(t, "TestKilledWhileItWaits", held+"="+f.name, time.Second)
	ends(t, write, "a write")
	f.legs[0].mend()
	check.OK(t, mirror.Recover(context.Background(), f.name))
	f.legs[1].fail()
	write = later(func() error { _, err := f.open().WriteAt(page(2), 0); return err })
	waits(t, write, "a write that leg 1 failed")
	f.leave(1)
	ends(t, write, "a write without leg 1")
	f.has(0, 2, 0)
}

// changed has the name of the mirror that a process of this test changes all the time.
const changed = "ASHLAR_TEST_CHANGED_MIRROR"

// TestKilledAsItChanges: the driver is killed at any moment of a change of a mirror that is being written to. The next driver can change the mirror, what a leg fails is still held,
// and what is over the mirror goes on.
func TestKilledAsItChanges(t *testing.T) {
	if name := os.Getenv(changed); name != "" {
		for {
			if err := mirror.Still(context.Background(), name); err != nil {
				t.Fatal("it could not be changed: ", err)
			}
			time.Sleep(5 * time.Millisecond)
		}
	}
	for _, slow := range []struct {
		takes time.Duration // a request
		kills int
	}{{20 * time.Millisecond, 60}, {time.Second, 12}} {
		t.Run(slow.takes.String(), func(t *testing.T) { newMirror(t, 2, 0).killAsItChanges(slow.takes, slow.kills) })
	}
}

// killAsItChanges kills, as often as kills says, a driver that changes a mirror whose legs take a time for each request.
func (f *fixture) killAsItChanges(takes time.Duration, kills int) {
	t := f.t
	for _, l := range f.legs[:2] {
		l.slow(takes)
	}
	mirrors, err := dm.Find(f.name)
	check.OK(t, err)
	const top = "ashlar-test-top"
	check.OK(t, dm.Make(top, "", dm.Linear(mirrors.Number, size)))
	t.Cleanup(func() { drivertest.Run(t, "dmsetup", "remove", "--retry", top) })
	above, err := dm.Find(top)
	check.OK(t, err)
	var stop atomic.Bool
	var all sync.WaitGroup
	for i := range int64(8) {
		file, err := os.OpenFile(above.Path(), os.O_RDWR|unix.O_DIRECT, 0)
		check.OK(t, err)
		all.Go(func() {
			defer file.Close()
			for !stop.Load() {
				if _, err := file.WriteAt(page(2), i*mib); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for range kills {
		killed(t, "TestKilledAsItChanges", changed+"="+f.name, 500*time.Millisecond+rand.N(200*time.Millisecond+3*takes))
		check.OK(t, mirror.Recover(context.Background(), f.name))
		if above, err := dm.Find(top); err != nil || above.Suspended { // as the stack of the volume recovers
			check.OK(t, errors.Join(err, dm.Resume(top, dm.NoScan)))
		}
		ends(t, later(func() error { return mirror.Still(context.Background(), f.name) }), "the next change")
	}
	stop.Store(true)
	all.Wait()
	f.legs[0].mend()
	f.legs[1].fail()
	write := later(func() error { _, err := f.open().WriteAt(page(2), 0); return err })
	waits(t, write, "a write that leg 1 failed")
	f.leave(1)
	ends(t, write, "a write without leg 1")
}

// TestRefuses: calls that a mirror cannot carry out in its state are refused.
func TestRefuses(t *testing.T) {
	ctx := context.Background()
	f := newMirror(t, 2, 1)
	f.leave(2) // leg 2 is not in the mirror
	is(t, mirror.Leave(ctx, f.name, f.numbers(2)...), errdefs.ErrPrecondition)
	if s := f.look(); len(s.Legs) != 2 {
		t.Errorf("it is %+v", s)
	}
	f.legs[2].failLater(time.Second)
	check.OK(t, mirror.Join(ctx, f.name, f.legs[2].number, differs(dm.Range{Length: size})))
	is(t, mirror.Finish(ctx, f.name, 0), errdefs.ErrUnavailable)
	is(t, mirror.Resize(context.Background(), f.name, 2*size), errdefs.ErrUnavailable)
	_, err := mirror.Compare(ctx, f.name, 0, free)
	is(t, err, errdefs.ErrUnavailable)
	f.leave(2)
	f.legs[1].fail()
	write := later(func() error { _, err := f.open().WriteAt(page(1), 0); return err })
	waits(t, write, "a write")
	is(t, mirror.Join(ctx, f.name, f.legs[2].number, differs()), errdefs.ErrUnavailable)
	is(t, mirror.Finish(ctx, f.name, 0), errdefs.ErrUnavailable)
	f.leave(1)
	ends(t, write, "a write")
}

// differs returns the function for Join that returns these ranges.
func differs(ranges ...dm.Range) func(context.Context) ([]dm.Range, error) {
	return func(context.Context) ([]dm.Range, error) { return ranges, nil }
}

func is(t *testing.T, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%v, and not %v", err, want)
	}
}

func free(context.Context, int64, []dm.Range) error { return nil }

// TestCompare: Compare finds blocks that rot on one leg, and no others, also while somebody writes.
func TestCompare(t *testing.T) {
	ctx := context.Background()
	f := newMirror(t, 3, 0)
	stop := make(chan struct{})
	file := f.open()
	writer := later(func() error {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return nil
			default:
			}
			if _, err := file.WriteAt(page(byte(i%250+1)), int64(i*7919%(16*mib/4096))*4096); err != nil {
				return err
			}
		}
	})
	found, err := mirror.Compare(ctx, f.name, 0, free)
	check.OK(t, err)
	if len(found) > 0 {
		t.Errorf("legs that are equal differ in %v", found)
	}
	rot := func(leg int, offset int64) {
		b := f.legs[leg].at(offset, 1)
		image, err := os.OpenFile(f.legs[leg].image, os.O_RDWR, 0)
		check.OK(t, err)
		defer image.Close()
		_, err = image.WriteAt([]byte{b[0] ^ 1}, offset)
		check.OK(t, err)
	}
	rot(1, 20*mib+5000)
	rot(2, 20*mib+9000)
	rot(0, 31*mib)
	found, err = mirror.Compare(ctx, f.name, 0, free)
	close(stop)
	ends(t, writer, "the writer")
	check.OK(t, err)
	if want := []dm.Range{{Offset: 20*mib + 4096, Length: 8192}, {Offset: 31 * mib, Length: 4096}}; !slices.Equal(found, want) {
		t.Errorf("they differ in %v, not %v", found, want)
	}
	found, err = mirror.Compare(ctx, f.name, 20*mib, func(_ context.Context, at int64, found []dm.Range) error {
		if at == 21*mib && len(found) == 1 {
			return os.ErrDeadlineExceeded
		}
		return nil
	})
	is(t, err, os.ErrDeadlineExceeded)
	if want := []dm.Range{{Offset: 20*mib + 4096, Length: 8192}}; !slices.Equal(found, want) {
		t.Errorf("from 20 to 21 MiB they differ in %v, not %v", found, want)
	}
	_, err = mirror.Compare(ctx, f.name, 0, func(_ context.Context, at int64, _ []dm.Range) error {
		if at == 20*mib {
			f.leave(1) // from now on nobody writes to the leg
		}
		return nil
	})
	is(t, err, errdefs.ErrUnavailable)
}

// TestResize: a mirror grows with its legs while it is used.
func TestResize(t *testing.T) {
	f := newMirror(t, 2, 0)
	f.write(1, size-4096)
	for _, l := range f.legs {
		check.OK(t, dm.Replace(l.name, dm.Linear(l.loop, 2*size)))
	}
	for range 2 {
		check.OK(t, mirror.Resize(context.Background(), f.name, 2*size))
	}
	if s := f.look(); s.Size != 2*size || len(s.Legs) != 2 {
		t.Errorf("it is %+v", s)
	}
	f.write(2, 2*size-4096)
	for i := range 2 {
		f.has(i, 1, size-4096)
		f.has(i, 2, 2*size-4096)
	}
	check.OK(t, mirror.Resize(context.Background(), f.name, size))
}

// flushes returns how often the device below a leg was flushed.
func (l *leg) flushes() (n int64) {
	text, err := os.ReadFile("/sys/dev/block/" + dm.Number(l.loop) + "/stat")
	check.OK(l.t, err)
	_, err = fmt.Sscan(strings.Fields(string(text))[15], &n)
	check.OK(l.t, err)
	return n
}

// noCache makes the leg say that it has no volatile cache, like a disk that keeps all that it has taken.
func (l *leg) noCache() {
	check.OK(l.t, os.WriteFile("/sys/dev/block/"+dm.Number(l.loop)+"/queue/write_cache", []byte("write through"), 0))
	l.mend()
	if dm.Flushed(l.number) { // since Linux 6.11 a device over a disk keeps what the disk said first
		l.number = l.loop
	}
	if dm.Flushed(l.number) {
		l.t.Fatal("the kernel flushes it all the same")
	}
}

// TestFlushesWhoJoins: a device that was made over a mirror whose only leg has no cache flushes a leg with a cache that joins later. It goes on to do so
// when the mirror grows.
func TestFlushesWhoJoins(t *testing.T) {
	ctx := context.Background()
	need(t)
	f := &fixture{t: t, name: "ashlar-test-mirror", legs: []*leg{newLeg(t, "leg0"), newLeg(t, "leg1"), newLeg(t, "leg2")}}
	f.legs[0].noCache()
	f.over(1)
	if s := f.look(); s.Size != size || len(s.Legs) != 1 || s.Legs[0].Device != f.legs[0].number {
		t.Errorf("it is %+v", s)
	}
	if of, err := mirror.Size(f.name); err != nil || of != size {
		t.Errorf("its size is %d, %v", of, err)
	}
	above := f.name + "-above"
	d, err := dm.Find(f.name)
	check.OK(t, err)
	check.OK(t, dm.Make(above, "", dm.Linear(d.Number, size)))
	t.Cleanup(func() { drivertest.Run(t, "dmsetup", "remove", "--retry", above) })
	d, err = dm.Find(above)
	check.OK(t, err)
	file, err := dm.Open(d, os.O_RDWR)
	check.OK(t, err)
	defer file.Close()
	flushed := func(when string, legs ...int) {
		t.Helper()
		var before []int64
		for _, i := range legs {
			before = append(before, f.legs[i].flushes())
		}
		check.OK(t, file.Sync())
		for n, i := range legs {
			if f.legs[i].flushes() == before[n] {
				t.Errorf("%s: leg %d is not flushed", when, i)
			}
		}
	}
	flushed("alone")
	for i := 1; i <= 2; i++ {
		check.OK(t, mirror.Join(ctx, f.name, f.legs[i].number, differs(dm.Range{Length: mib})))
		f.watch(mirror.Event{}, "a leg that is equal", mirror.State.Equal)
		check.OK(t, mirror.Finish(ctx, f.name, 0))
		flushed("joined", []int{1, 2}[:i]...)
	}
	f.leave(1, 2)
	flushed("alone again")
	for _, l := range f.legs {
		check.OK(t, dm.Replace(l.name, dm.Linear(l.loop, 2*size)))
	}
	check.OK(t, mirror.Resize(ctx, f.name, 2*size))
	if s := f.look(); s.Size != 2*size || len(s.Legs) != 1 {
		t.Errorf("it is %+v", s)
	}
	d, err = dm.Find(f.name)
	check.OK(t, err)
	check.OK(t, dm.Replace(above, dm.Linear(d.Number, 2*size)))
	check.OK(t, mirror.Join(ctx, f.name, f.legs[1].number, differs(dm.Range{Length: mib})))
	f.watch(mirror.Event{}, "a leg that is equal", mirror.State.Equal)
	check.OK(t, mirror.Finish(ctx, f.name, 0))
	flushed("grown", 1)
}

// TestDiscards: a mirror refuses discards, though all its legs take them: they need not do all of one. So it is while a leg joins, once one has left, and once
// it has grown.
func TestDiscards(t *testing.T) {
	ctx := context.Background()
	f := newMirror(t, 2, 1)
	f.write(1, 0)
	refused := func(when string) {
		t.Helper()
		for i, l := range f.legs {
			if most, err := os.ReadFile("/sys/dev/block/" + dm.Number(l.number) + "/queue/discard_max_bytes"); err != nil || strings.TrimSpace(string(most)) == "0" {
				t.Fatalf("leg %d takes no discards, so nothing is tried: %s, %v", i, most, err)
			}
		}
		part := [2]uint64{0, mib}
		if err := ioctl.Pointer(f.open(), unix.BLKDISCARD, unsafe.Pointer(&part)); !errors.Is(err, unix.EOPNOTSUPP) {
			t.Errorf("%s: a discard is answered with %v", when, err)
		}
		if b := f.legs[0].at(0, 1)[0]; b != 1 {
			t.Errorf("%s: the first byte of a leg is %d", when, b)
		}
	}
	refused("two legs")
	check.OK(t, mirror.Join(ctx, f.name, f.legs[2].number, differs(dm.Range{Length: mib})))
	refused("while one joins")
	f.watch(mirror.Event{}, "a leg that is equal", mirror.State.Equal)
	check.OK(t, mirror.Finish(ctx, f.name, 0))
	refused("three legs")
	f.leave(1, 2)
	refused("one leg")
	for _, l := range f.legs {
		check.OK(t, dm.Replace(l.name, dm.Linear(l.loop, 2*size)))
	}
	check.OK(t, mirror.Resize(ctx, f.name, 2*size))
	refused("grown")
}

// TestReadsOnward: reads go to the first leg, and to another one if that fails.
func TestReadsOnward(t *testing.T) {
	f := newMirror(t, 2, 0)
	f.write(1, 0)
	seen := f.look().Event
	f.legs[0].table("error", "")
	b := page(0)
	_, err := f.open().ReadAt(b, 0)
	check.OK(t, err)
	if b[0] != 1 {
		t.Errorf("it reads %d", b[0])
	}
	s := f.watch(seen, "a failure", func(s mirror.State) bool { return len(s.Failed()) > 0 })
	if !slices.Equal(s.Failed(), f.numbers(1)) {
		t.Errorf("%v have failed", s.Failed())
	}
	f.legs[0].mend()
	f.leave(0)
}

// TestEnds: a mirror that has ended fails what it held, and all later I/O. Its legs are free, and unchanged.
func TestEnds(t *testing.T) {
	ctx := context.Background()
	f := newMirror(t, 2, 0)
	f.write(1, 0)
	seen := f.look().Event
	f.legs[1].fail()
	held := later(func() error { _, err := f.open().WriteAt(page(2), mib); return err })
	f.failed(seen, 1)
	waits(t, held, "a write")
	file := f.open()
	flush := later(file.Sync)
	waits(t, flush, "a flush")
	check.OK(t, mirror.End(ctx, f.name))
	check.OK(t, mirror.End(ctx, f.name))
	for what, done := range map[string]chan error{"a write": held, "a flush": flush, "another flush": later(file.Sync)} {
		select {
		case err := <-done:
			if err == nil {
				t.Error("acknowledged, though one leg has not done it: ", what)
			}
		case <-time.After(patient):
			t.Fatal("still held: ", what)
		}
	}
	if _, err := f.open().WriteAt(page(3), 0); err == nil {
		t.Error("a write was acknowledged by nobody")
	}
	if s := f.look(); len(s.Legs) > 0 || s.Held || s.Joining != nil {
		t.Errorf("it is %+v", s)
	}
	for _, leg := range f.legs[:2] {
		holders, err := os.ReadDir("/sys/dev/block/" + dm.Number(leg.number) + "/holders")
		if err != nil || len(holders) > 0 {
			t.Errorf("leg %s has something over it: %v, %v", dm.Number(leg.number), holders, err)
		}
	}
	f.has(0, 1, 0)
}

// TestSteady: pages are not changed while they are written to the legs, whatever table the mirror has.
func TestSteady(t *testing.T) {
	ctx := context.Background()
	f := newMirror(t, 2, 1)
	steady := func(when string) {
		t.Helper()
		d, err := dm.Find(f.name)
		check.OK(t, err)
		text, err := os.ReadFile("/sys/dev/block/" + dm.Number(d.Number) + "/queue/stable_writes")
		if errors.Is(err, os.ErrNotExist) {
			t.Skip("this kernel has no such setting")
		}
		if err != nil || string(text) != "1\n" {
			t.Errorf("%s it is %q, %v", when, text, err)
		}
	}
	steady("with two legs")
	seen := f.look().Event
	check.OK(t, mirror.Join(ctx, f.name, f.legs[2].number, differs(dm.Range{Length: mib})))
	steady("while one joins")
	f.watch(seen, "a leg that is equal", mirror.State.Equal)
	check.OK(t, mirror.Finish(ctx, f.name, 0))
	steady("with three")
	f.leave(0, 1)
	steady("with one")
}

// TestWatchWaits: Watch waits until its context ends if nothing happens to its mirror, however much happens to other devices. It returns at once when a
// leg fails.
func TestWatchWaits(t *testing.T) {
	f := newMirror(t, 2, 0)
	var seen mirror.Event
	// The event of the mirror's regions, which are equal, may come a little later.
	for now, since := f.look().Event, time.Now(); time.Since(since) < 300*time.Millisecond; time.Sleep(10 * time.Millisecond) {
		if seen = f.look().Event; seen != now {
			now, since = seen, time.Now()
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	began := time.Now()
	var took time.Duration
	watch := later(func() error {
		_, err := mirror.Watch(ctx, f.name, seen)
		took = time.Since(began)
		return err
	})
	for range 10 {
		const other = "ashlar-test-other"
		check.OK(t, dm.Make(other, "", []dm.Line{{Length: mib, Kind: "zero"}}))
		_, err := dm.Remove(other)
		check.OK(t, err)
	}
	if err := <-watch; !errors.Is(err, context.DeadlineExceeded) || took > 10*time.Second || f.look().Event != seen {
		t.Fatalf("after %v: %v", took, err)
	}
	file := f.open()
	watch = later(func() error {
		s, err := mirror.Watch(context.Background(), f.name, seen)
		if err == nil && !slices.Equal(s.Failed(), []uint64{f.legs[1].number}) {
			err = fmt.Errorf("these have failed: %v", s.Failed())
		}
		return err
	})
	waits(t, watch, "the watch of a mirror to which nothing has happened")
	f.legs[1].fail()
	write := later(func() error {
		_, err := file.WriteAt(page(1), 0)
		return err
	})
	ends(t, watch, "the watch of a mirror with a leg that has failed")
	f.leave(1)
	ends(t, write, "the write")
}
