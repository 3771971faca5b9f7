package device_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/era"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pools"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/device"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// markedFixture is a volume with room for marks beside it.
type markedFixture struct {
	*fixture
	options device.Options // without marks
}

// overMarked runs a test over each kind of pool, of a volume with a seat and one without.
func overMarked(t *testing.T, test func(f *markedFixture)) {
	drivertest.NeedRoot(t)
	drivertest.NeedMapper(t)
	check.OK(t, era.Available())
	for _, seat := range []bool{false, true} {
		t.Run(fmt.Sprint("seat ", seat), func(t *testing.T) {
			overEach(t, func(f *fixture) {
				pooltest.Create(f, f.pool, blockdev.Spec{Ref: f.beside(), Size: 8 * pooltest.MiB})
				test(&markedFixture{f, device.Options{Seat: seat, Keep: !seat}})
			})
		})
	}
}

func (f *fixture) beside() blockdev.Ref { return blockdev.Ref{Kind: blockdev.Marks, Key: f.ref.Key} }

// marking opens what the marks are in, which are none yet if they are to be new.
func (f *markedFixture) marking(anew bool) *device.Marking {
	f.Helper()
	metadata := pooltest.Attach(f, f.pool, f.beside(), blockdev.Attachment{})
	if anew {
		check.OK(f, era.Clear(metadata.Path))
	}
	return &device.Marking{Metadata: metadata, Block: pooltest.MiB}
}

func (f *markedFixture) mark(anew bool) blockdev.Device {
	f.Helper()
	o := f.options
	o.Marking = f.marking(anew)
	d := f.attach(o)
	check.OK(f, o.Marking.Metadata.Close())
	return d
}

func (f *markedFixture) name() string {
	name, _ := f.names()
	return name + "-marks"
}

// kept makes sure that marks are kept, or not.
func (f *markedFixture) kept(want bool, when string) {
	f.Helper()
	if m, err := f.stack().Marked(f.Context()); err != nil || !m.Attached || m.Kept() != want {
		f.Errorf("%s: %+v, %v, want kept: %v", when, m, err, want)
	}
}

// written makes sure that just some blocks were written since an era.
func (f *markedFixture) written(since uint32, want ...int64) {
	f.Helper()
	extents, err := f.stack().Written(f.Context(), since)
	check.OK(f, err)
	var have []int64
	for _, e := range extents {
		for at := e.Offset; at < e.Offset+e.Length; at += pooltest.MiB {
			have = append(have, at/pooltest.MiB)
		}
	}
	if !slices.Equal(have, want) {
		f.Errorf("since era %d there was written %v, want %v", since, have, want)
	}
}

func writeBlocks(t testing.TB, path string, blocks ...int64) {
	t.Helper()
	for _, b := range blocks {
		pooltest.WriteTo(t, path, b*pooltest.MiB+4096, []byte("written"))
	}
}

func (f *markedFixture) end(d blockdev.Device) {
	f.Helper()
	check.OK(f, errors.Join(d.Close(), f.stack().Detach(f.Context())))
	f.closed()
	if d, err := dm.Find(f.name()); err != nil || d != nil {
		f.Errorf("%+v is left, %v", d, err)
	}
}

// TestMarked: what is written is marked, whether marks are asked for again or not, also after the volume was detached, and has grown; and what marks goes with the rest.
func TestMarked(t *testing.T) {
	overMarked(t, func(f *markedFixture) {
		d := f.mark(true)
		f.is(d, size, "attached")
		below, err := f.pool.Attached(f.Context(), f.ref)
		check.OK(f, err)
		if len(below) != 1 || d.Below != below[0].Path || f.attached()[0].Below != below[0].Path {
			f.Errorf("attached as %+v over %+v, and found as %+v", d, below, f.attached())
		}
		f.kept(true, "attached")
		writeBlocks(f, d.Path, 3, 5)
		f.written(1, 3, 5)
		begun, err := f.stack().BeginEra(context.Background())
		check.OK(f, err)
		writeBlocks(f, d.Path, 5, 6)
		again := f.attach(f.options)
		f.recover()
		f.kept(true, "attached again, and after a start")
		check.OK(f, again.Close())
		f.written(begun, 5, 6)
		f.end(d)

		d = f.mark(false)
		f.written(begun, 5, 6)
		_, err = f.stack().Written(f.Context(), begun+100)
		pooltest.Fails(f, err, errdefs.ErrPrecondition, "asked for an era that has not come")
		for step, grow := range []func(){
			func() { check.OK(f, f.stack().Grow(f.Context(), nil)) },
			func() { again := f.attach(f.options); check.OK(f, again.Close()) },
			f.recover,
		} {
			want := size + int64(step+1)*4*pooltest.MiB
			check.OK(f, pooltest.Second(f.pool.Expand(f.Context(), f.ref, want)))
			grow()
			f.is(d, want, fmt.Sprint("grown in way ", step))
			writeBlocks(f, d.Path, want/pooltest.MiB-1)
		}
		f.written(begun, 5, 6, 19, 23, 27)
		f.end(d)

		bare := f.attach(f.options)
		f.kept(false, "attached without")
		o := f.options
		o.Marking = f.marking(false)
		again = f.attach(o)
		f.kept(false, "attached without, and then with marks")
		check.OK(f, errors.Join(again.Close(), o.Marking.Metadata.Close()))
		f.end(bare)
	})
}

// TestMarkedCut: what a crash leaves of what marks is put right by the next attach, by a start, and by a detach.
func TestMarkedCut(t *testing.T) {
	overMarked(t, func(f *markedFixture) {
		for what, table := range map[string]func(m *device.Marking, below blockdev.Device, uuid string){
			"without a table": func(*device.Marking, blockdev.Device, string) {},
			"a table loaded": func(m *device.Marking, below blockdev.Device, _ string) {
				check.OK(f, dm.Load(f.name(), []dm.Line{{Length: size, Kind: "era", Text: fmt.Sprintf("%s %s 2048", dm.Number(m.Metadata.Number), dm.Number(below.Number))}}))
			},
			"of nobody": func(m *device.Marking, below blockdev.Device, uuid string) {
				check.OK(f, era.Make(f.name(), uuid, size, pooltest.MiB, m.Metadata.Number, below.Number))
			},
		} {
			for _, next := range []string{"attach", "start", "detach"} {
				m := f.marking(true)
				below, err := f.pool.Attach(f.Context(), f.ref, blockdev.Attachment{})
				check.OK(f, err)
				_, uuid := f.names()
				drivertest.Run(f, "dmsetup", "create", f.name(), "--notable", "--uuid", uuid+"-marks")
				table(m, below, uuid+"-marks")
				check.OK(f, errors.Join(below.Close(), m.Metadata.Close()))
				switch next {
				case "attach":
					d := f.mark(false)
					f.kept(true, what)
					writeBlocks(f, d.Path, 2)
					f.written(1, 2)
					f.end(d)
				case "start":
					f.recover()
				case "detach":
					check.OK(f, f.stack().Detach(f.Context()))
				}
				f.closed()
				if d, err := dm.Find(f.name()); err != nil || d != nil {
					f.Fatalf("%s, %s: %+v is left, %v", what, next, d, err)
				}
			}
		}
	})
}

// TestUnmarked: what has no room for the marks of what it is to grow to, and what is to go on without marks, does so while it is used, and health says so.
func TestUnmarked(t *testing.T) {
	overMarked(t, func(f *markedFixture) {
		d := f.mark(true)
		user, err := os.OpenFile(d.Path, os.O_RDWR|unix.O_SYNC, 0)
		check.OK(f, err)
		defer user.Close()
		if problems, err := f.stack().Health(f.Context()); err != nil || len(problems) > 0 {
			f.Errorf("health %v, %v", problems, err)
		}
		check.OK(f, f.stack().Unmark())
		check.OK(f, f.stack().Unmark())
		f.kept(false, "unmarked")
		check.OK(f, pooltest.Second(user.WriteAt([]byte("written"), 7*pooltest.MiB)))
		if problems, err := f.stack().Health(f.Context()); err != nil || len(problems) != 1 || problems[0].Reason != "MarksLost" || problems[0].Severity != blockdev.Degraded {
			f.Errorf("health %v, %v", problems, err)
		}
		_, err = f.stack().Written(f.Context(), 1)
		pooltest.Fails(f, err, errdefs.ErrPrecondition, "asked for marks")
		check.OK(f, pooltest.Second(f.pool.Expand(f.Context(), f.ref, size+4*pooltest.MiB)))
		check.OK(f, f.stack().Grow(f.Context(), nil))
		f.is(d, size+4*pooltest.MiB, "grown")
		check.OK(f, user.Close())
		f.end(d)

		// Marks that cannot be, and the volume without.
		metadata := pooltest.Attach(f, f.pool, f.beside(), blockdev.Attachment{})
		pooltest.WriteTo(f, metadata.Path, 0, make([]byte, 8192))
		pooltest.WriteTo(f, metadata.Path, 100, []byte("no marks"))
		o := f.options
		o.Marking = &device.Marking{Metadata: metadata, Block: pooltest.MiB}
		_, err = f.stack().Attach(f.Context(), o)
		pooltest.Fails(f, err, device.ErrMarks, "attached with something else for marks")
		check.OK(f, metadata.Close())
		d = f.attach(f.options)
		f.writes(d.Path)
		f.end(d)
	})
}

// TestMarkedDiscards: what is discarded is marked, all of it, or refused.
func TestMarkedDiscards(t *testing.T) {
	overMarked(t, func(f *markedFixture) {
		d := f.mark(true)
		writeBlocks(f, d.Path, 1, 2, 3, 4, 5, 6)
		begun, err := f.stack().BeginEra(context.Background())
		check.OK(f, err)
		user, err := os.OpenFile(d.Path, os.O_RDWR, 0)
		check.OK(f, err)
		defer user.Close()
		for _, grown := range []int64{0, 4 * pooltest.MiB} {
			check.OK(f, pooltest.Second(f.pool.Expand(f.Context(), f.ref, size+grown)))
			check.OK(f, f.stack().Grow(f.Context(), nil))
			at := [2]uint64{2 * pooltest.MiB, 3 * pooltest.MiB}
			_, _, errno := unix.Syscall(unix.SYS_IOCTL, user.Fd(), unix.BLKDISCARD, uintptr(unsafe.Pointer(&at)))
			switch errno {
			case 0:
				f.written(begun, 2, 3, 4)
			case unix.EOPNOTSUPP:
				f.written(begun)
			default:
				f.Fatal(errno)
			}
		}
		check.OK(f, user.Close())
		f.end(d)
	})
}

// marked attaches the volume of a pair with marks, and returns the disk that has these.
func (p *pair) marked() (d blockdev.Device, metadata *disk) {
	p.Helper()
	check.OK(p, era.Available())
	metadata = newDisk(p.T, "metadata", 8*pooltest.MiB)
	p.options.Marking = &device.Marking{Metadata: metadata.device(), Block: pooltest.MiB}
	p.Cleanup(func() { check.OK(p, p.stack().DetachLowest(context.Background())) })
	return p.attach(p.options), metadata
}

// TestMarkedMoves: a volume that moves while it is used is marked as long as it is where its marks are, and leaves them there.
func TestMarkedMoves(t *testing.T) {
	overPair(t, 48*pooltest.MiB, func(p *pair) {
		d, metadata := p.marked()
		kept := func(want bool, when string) {
			p.Helper()
			if m, err := p.stack().Marked(p.Context()); err != nil || m.Kept() != want {
				p.Errorf("%s: %+v, %v, want kept: %v", when, m, err, want)
			}
		}
		w := p.writer(d.Path)
		w.goesOn(t)
		for step, end := range []func() error{
			func() error { return p.stack().Unmirror(p.Context()) },
			func() error { return p.stack().Switch(p.Context(), p.moved()) },
		} {
			begun, err := p.stack().BeginEra(context.Background())
			check.OK(p, err)
			p.mirror(p.all())
			w.goesOn(t)
			kept(true, "mirrored")
			if written, err := p.stack().Written(p.Context(), begun); err != nil || len(written) == 0 {
				p.Errorf("while it is mirrored there was written %v, %v", written, err)
			}
			p.copied()
			check.OK(p, end())
			w.goesOn(t)
			kept(step == 0, "and that has ended")
		}
		check.OK(p, p.stack().DetachLowest(p.Context()))
		name, _ := p.names()
		if left, err := dm.Find(name + "-marks"); err != nil || left != nil {
			p.Errorf("%+v is left, %v", left, err)
		}
		p.from.fail(p.T)
		metadata.fail(p.T)
		w.goesOn(t)
		n, err := w.halt()
		check.OK(p, errors.Join(err, d.Close(), p.moved().Detach(p.Context())))
		p.bare(p.to, func(path string) { p.has(path, n) })
	})
}

// TestMarkedIsNotAsked: a change of a mirror does not ask what marks the volume below it for its status. While that is suspended, as when it grows, the kernel would not
// answer, and its new table would wait for that answer, for ever.
func TestMarkedIsNotAsked(t *testing.T) {
	overPair(t, 48*pooltest.MiB, func(p *pair) {
		d, _ := p.marked()
		p.mirror(p.all())
		p.copied()
		check.OK(p, p.stack().FlushMirror(p.Context()))
		name, _ := p.names()
		check.OK(p, dm.Suspend(name+"-marks"))
		held := make(chan error, 1)
		go func() { held <- p.stack().HoldMirror(context.Background()) }()
		select {
		case err := <-held:
			check.OK(p, err)
		case <-time.After(10 * time.Second):
			p.Error("it waits for the marks")
		}
		check.OK(p, errors.Join(dm.Resume(name+"-marks", dm.NoScan), p.stack().Unmirror(p.Context()), d.Close(), p.stack().Detach(p.Context())))
	})
}

// TestMarksWentAway: what marks a volume goes with its last user between two looks of Attach, for a volume that is to have no marks: Attach tries again
// without.
func TestMarksWentAway(t *testing.T) {
	overEach(t, func(f *fixture) {
		if err := f.stack().AttachMarks(f.Context()); !dm.Vanished(err) {
			f.Errorf("attached: %v", err)
		}
	})
}

// TestMarkedHung: whoever asks for the marks of a volume does not wait for a disk that does not answer: that is an error, and does not say that none are kept.
// When the disk answers again, they are.
func TestMarkedHung(t *testing.T) {
	overEach(t, func(f *fixture) {
		check.OK(f, era.Available())
		pooltest.Create(f, f.pool, blockdev.Spec{Ref: f.beside(), Size: 8 * pooltest.MiB})
		marked := &markedFixture{f, device.Options{Keep: true}}
		below, hangs := marked.marking(true), "ashlar-test-hangs"
		check.OK(f, dm.Make(hangs, "", dm.Linear(below.Metadata.Number, below.Metadata.Size)))
		f.Cleanup(func() { drivertest.Run(f, "dmsetup", "remove", "--retry", hangs) })
		d, err := dm.Find(hangs)
		check.OK(f, err)
		top := f.attach(device.Options{Keep: true, Marking: &device.Marking{Metadata: blockdev.Device{Path: d.Path(), Number: d.Number, Size: below.Metadata.Size}, Block: below.Block}})
		writeBlocks(f, top.Path, 1)
		check.OK(f, dm.Suspend(hangs))
		wrote := make(chan struct{})
		go func() { defer close(wrote); writeBlocks(f, top.Path, 2) }() // the mark waits
		time.Sleep(time.Second)
		asked := make(chan error, 3)
		stack := f.stack()
		go func() {
			_, err := stack.Marked(context.Background())
			asked <- err
			_, err = stack.Written(context.Background(), 1)
			asked <- err
			_, err = stack.BeginEra(context.Background())
			asked <- err
		}()
		for _, what := range []string{"marked", "written", "an era begun"} {
			select {
			case err := <-asked:
				pooltest.Fails(f, err, errdefs.ErrUnavailable, what)
			case <-time.After(time.Minute):
				f.Errorf("%s: it waits for the disk", what)
			}
		}
		check.OK(f, dm.Resume(hangs, dm.NoScan))
		<-wrote
		marked.kept(true, "when it answers again")
		marked.written(1, 1, 2)
		marked.end(top)
		check.OK(f, below.Metadata.Close())
	})
}

// TestLongestNames: in a volume group with the longest name that a pool takes, each layer has a device of its own. One with a longer name is refused before it
// has a volume.
func TestLongestNames(t *testing.T) {
	drivertest.NeedLVM(t)
	check.OK(t, era.Available())
	group := drivertest.NewGroup(t, 128*pooltest.MiB)
	const longest = 127 - len("-vol.") - 32 - len("-writable-marks")
	rename := func(dashes, length int) string {
		name := strings.Repeat("-", dashes)
		name = "g" + name + strings.Repeat("g", length-1-2*dashes)
		drivertest.Run(t, "vgrename", "-q", group.Name, name)
		group.Name = name
		return group.URL() + "?reservePercent=0"
	}
	for _, dashes := range []int{0, 2} {
		t.Run(fmt.Sprint(dashes, " dashes"), func(t *testing.T) {
			_, err := pools.Open(t.Context(), "test", rename(dashes, longest+1))
			pooltest.Fails(t, err, errdefs.ErrUnsupported, "opened with a name that is too long")
			pool, err := pools.Open(t.Context(), "test", rename(dashes, longest))
			check.OK(t, err)
			t.Cleanup(func() { check.OK(t, pool.Close()) })
			f := over(t, pool)
			pooltest.Create(f, pool, blockdev.Spec{Ref: f.beside(), Size: 8 * pooltest.MiB})
			marked := &markedFixture{f, device.Options{Seat: true, Keep: true}}
			d := marked.mark(true)
			writeBlocks(t, d.Path, 3)
			marked.kept(true, "with the longest name")
			marked.written(1, 3)
			top, _ := f.names()
			numbers := map[uint64]bool{}
			for _, suffix := range []string{"", "-seat", "-marks"} {
				if d, err := dm.Find(top + suffix); err != nil || d == nil {
					t.Errorf("device %s: %v, %v", top+suffix, d, err)
				} else {
					numbers[d.Number] = true
				}
			}
			if len(numbers) != 3 {
				t.Errorf("the layers are %d devices", len(numbers))
			}
			marked.end(d)
			check.OK(t, errors.Join(pool.Delete(t.Context(), f.beside()), pool.Delete(t.Context(), f.ref)))
		})
	}
}
