package device_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/direct"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/device"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// failWrites has all that is written to the disk fail, and flushes, until mend. Reads go on.
func (d *disk) failWrites(t *testing.T) (mend func()) {
	t.Helper()
	below, err := dm.Below(d.name)
	check.OK(t, err)
	check.OK(t, dm.Replace(d.name, []dm.Line{{Length: d.size, Kind: "flakey", Text: dm.Number(below[0]) + " 0 0 1 1 error_writes"}}))
	return func() { check.OK(t, dm.Replace(d.name, dm.Linear(below[0], d.size))) }
}

// flushFails has a flush of a volume fail on a disk, which then takes writes again. The flush ends when the mirror does.
func (p *pair) flushFails(path string, on *disk) (flushed chan error) {
	p.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	check.OK(p, err)
	mend := on.failWrites(p.T)
	flushed = make(chan error, 1)
	go func() { flushed <- errors.Join(f.Sync(), f.Close()) }()
	// What is over it flushes it twice, and the second failure may be forgotten at once.
	p.becomes("failed", func(m device.Mirrored) bool { return m.OldFailed || m.NewFailed || m.Forgot })
	time.Sleep(50 * time.Millisecond) // of all targets
	mend()
	return flushed
}

// forgets has the kernel forget that: it writes to the same places, and is acknowledged.
func (p *pair) forgets(path string, places []int64) {
	p.Helper()
	for n := range 5 {
		for _, at := range places {
			p.write(path, at, pattern(100+n))
		}
	}
	if m := p.mirrored(); m.OldFailed || m.NewFailed {
		p.Fatalf("this kernel does not forget: %+v", m)
	}
}

// undone brings a mirror to its old leg.
func (p *pair) undone() (waited int) {
	p.Helper()
	for end := time.Now().Add(time.Minute); ; waited++ {
		err := p.stack().Unmirror(p.Context())
		if err == nil {
			return waited
		}
		if !errors.Is(err, errdefs.ErrBusy) || time.Now().After(end) {
			p.Fatalf("not undone: %v", err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// TestFlushFails: a leg that fails a flush, and takes writes again, which the kernel forgets. Whoever asks is told, also who did not see it, and what was acknowledged is at the old home
// when the mirror has ended, whichever leg it was.
func TestFlushFails(t *testing.T) {
	data := []blockdev.Extent{{Length: 24 * pooltest.MiB}, {Offset: 40 * pooltest.MiB, Length: 4096}, {Offset: 52 * pooltest.MiB, Length: 4096}}
	for _, old := range []bool{false, true} {
		for _, late := range []bool{false, true} {
			t.Run(fmt.Sprintf("old leg: %v, late: %v", old, late), func(t *testing.T) {
				overPair(t, 64*pooltest.MiB, func(p *pair) {
					d := p.attach(p.options)
					places := []int64{2 * pooltest.MiB, 30 * pooltest.MiB, d.Size - pooltest.MiB} // some of what is copied, and of what is not
					last := pattern(1)
					p.mirror(data...)
					p.copied()
					for _, at := range places { // to both: each may be copied over the other, as the kernel may forget one of two failed flushes before long
						p.write(d.Path, at, last)
					}
					check.OK(p, p.stack().FlushMirror(p.Context()))
					failing := p.to
					if old {
						failing = p.from
					}
					flushed := p.flushFails(d.Path, failing)
					if late {
						p.forgets(d.Path, places)
						last = pattern(104)
						check.OK(p, p.stack().HoldMirror(p.Context()))
						p.recover() // as a driver that starts
						if m := p.mirrored(); !m.Forgot || !m.Held || m.Back {
							p.Errorf("it is %+v", m)
						}
						check.OK(p, p.stack().ReleaseMirror(p.Context()))
					}
					waited := p.undone()
					if waited > 0 && !old || waited == 0 && old && late { // what only the new one has is copied back
						p.Errorf("it was undone after %d tries", waited)
					}
					if err := <-flushed; err != nil && !(old && waited == 0) { // see TestOldLegFailsFlush
						p.Error(err)
					}
					p.writes(d.Path)
					if left, err := dm.Names("ashlar-" + p.from.name); err != nil || slices.ContainsFunc(left, isNote) {
						p.Errorf("left are %v, %v", left, err)
					}
					check.OK(p, errors.Join(d.Close(), p.stack().Detach(p.Context())))
					p.bare(p.from, func(path string) {
						for _, at := range places {
							b := make([]byte, len(last))
							check.OK(p, pooltest.Second(readAt(path, b, at)))
							if !bytes.Equal(b, last) {
								p.Errorf("at %d there is %q..., not %q", at, b[:16], last[:16])
							}
						}
					})
				})
			})
		}
	}
}

// TestOldLegFailsFlush: a flush that the old home has failed, once all was copied, is an error, as without a move. The disk would take a second one, without what it has lost.
func TestOldLegFailsFlush(t *testing.T) {
	overPair(t, 48*pooltest.MiB, func(p *pair) {
		d := p.attach(p.options)
		p.mirror(p.all())
		p.copied()
		seat, err := dm.Find(p.seat())
		check.OK(p, err)
		flushed := p.flushFails(seat.Path(), p.from) // once: what is over it would flush it twice
		if m := p.mirrored(); !m.OldFailed || m.Forgot {
			p.Fatalf("it is %+v", m)
		}
		if waited := p.undone(); waited > 0 {
			p.Errorf("it was undone after %d tries", waited)
		}
		if err := <-flushed; !errors.Is(err, unix.EIO) {
			p.Errorf("the flush ended with: %v", err)
		}
		p.writes(d.Path)
		p.onlyDevices()
		check.OK(p, errors.Join(d.Close(), p.stack().Detach(p.Context())))
	})
}

// TestCopiedBackCut: a driver that is killed while it has what only the new leg has copied back, at any point, goes on with that: nothing is lost.
func TestCopiedBackCut(t *testing.T) {
	for steps, after := 1, 1; after <= steps; after++ {
		t.Run(fmt.Sprint(after), func(t *testing.T) {
			overPair(t, 64*pooltest.MiB, func(p *pair) {
				d := p.attach(p.options)
				places := []int64{2 * pooltest.MiB, 30 * pooltest.MiB}
				for _, at := range places {
					p.write(d.Path, at, pattern(1))
				}
				p.mirror(blockdev.Extent{Length: 24 * pooltest.MiB}, blockdev.Extent{Offset: 40 * pooltest.MiB, Length: 4096})
				p.copied()
				flushed := p.flushFails(d.Path, p.from)
				p.forgets(d.Path, places)
				var err error
				steps, err = device.CopyBackCut(p.seat(), after)
				check.OK(p, err)
				p.recover() // as a driver that starts
				if m := p.mirrored(); after < steps && !m.Forgot {
					p.Errorf("it is %+v", m)
				}
				p.undone()
				check.OK(p, <-flushed)
				if left, err := dm.Names("ashlar-" + p.from.name); err != nil || slices.ContainsFunc(left, isNote) {
					p.Errorf("left are %v, %v", left, err)
				}
				check.OK(p, errors.Join(d.Close(), p.stack().Detach(p.Context())))
				p.bare(p.from, func(path string) {
					for _, at := range places {
						b := make([]byte, 4096)
						check.OK(p, pooltest.Second(readAt(path, b, at)))
						if want := pattern(104); !bytes.Equal(b, want) {
							p.Errorf("at %d there is %q..., not %q", at, b[:16], want[:16])
						}
					}
				})
			})
		})
	}
}

// TestNoteIsReplaced: a driver that is killed while it replaces the note of a mirror finds one of the two, and so which leg is the old one.
func TestNoteIsReplaced(t *testing.T) {
	overPair(t, 32*pooltest.MiB, func(p *pair) {
		d := p.attach(p.options)
		p.mirror(p.all())
		p.copied()
		top, _ := p.names()
		check.OK(p, dm.Rename(top+"-since", top+"-newer"))
		if m := p.mirrored(); m.Forgot || m.Back {
			p.Errorf("it is %+v", m)
		}
		p.undone()
		if left, err := dm.Names("ashlar-" + p.from.name); err != nil || slices.ContainsFunc(left, isNote) {
			p.Errorf("left are %v, %v", left, err)
		}
		check.OK(p, errors.Join(d.Close(), p.stack().Detach(p.Context())))
	})
}

// isNote reports whether a device is a note, by its name.
func isNote(name string) bool {
	return strings.HasSuffix(name, "-since") || strings.HasSuffix(name, "-newer")
}

// TestForgotAndFails: a mirror that has forgotten, and of which a leg, or each, fails all that comes since, ends all the same: nobody has what only that leg had, and who uses the volume would wait for ever.
func TestForgotAndFails(t *testing.T) {
	for what, fails := range map[string]func(p *pair){
		"the new leg": func(p *pair) { p.to.fail(p.T) },
		"both legs":   func(p *pair) { p.to.fail(p.T); p.from.fail(p.T) },
	} {
		t.Run(what, func(t *testing.T) {
			overPair(t, 64*pooltest.MiB, func(p *pair) {
				d := p.attach(p.options)
				p.mirror(blockdev.Extent{Length: 24 * pooltest.MiB})
				p.copied()
				check.OK(p, p.stack().FlushMirror(p.Context()))
				flushed := p.flushFails(d.Path, p.to)
				p.forgets(d.Path, []int64{2 * pooltest.MiB})
				fails(p)
				p.undone()
				if err := <-flushed; err != nil && what == "the new leg" {
					p.Error(err)
				}
				check.OK(p, errors.Join(d.Close(), p.stack().Detach(p.Context())))
			})
		})
	}
}

// writesLate has all that is written to the disk take so long, but no flush, until quick.
func (d *disk) writesLate(t *testing.T, late time.Duration) (quick func()) {
	t.Helper()
	below, err := dm.Below(d.name)
	check.OK(t, err)
	check.OK(t, dm.Replace(d.name, []dm.Line{{Length: d.size, Kind: "delay", Text: fmt.Sprintf("%[1]s 0 0 %[1]s 0 %[2]d %[1]s 0 0", dm.Number(below[0]), late.Milliseconds())}}))
	return func() { check.OK(t, dm.Replace(d.name, dm.Linear(below[0], d.size))) }
}

// TestNewLegIsFlushed: nothing that was acknowledged is on one leg alone once the mirror is held: the new leg is flushed before. If that fails, or is cut short, the new leg
// has failed for good, and the volume goes on at the old one. Before all is copied, the new leg is not flushed.
func TestNewLegIsFlushed(t *testing.T) {
	for what, flush := range map[string]func(p *pair) error{
		"held":     func(p *pair) error { return p.stack().HoldMirror(p.Context()) },
		"flushed":  func(p *pair) error { return p.stack().FlushMirror(p.Context()) },
		"switched": func(p *pair) error { return p.stack().Switch(p.Context(), p.moved()) },
	} {
		t.Run(what, func(t *testing.T) {
			overPair(t, 48*pooltest.MiB, func(p *pair) {
				d := p.attach(p.options)
				w := p.writer(d.Path)
				quick := p.to.writesLate(p.T, 20*time.Second)
				p.mirror(p.all())
				pooltest.Fails(p, p.stack().FlushMirror(p.Context()), errdefs.ErrPrecondition, "flushed before all is copied")
				pooltest.Fails(p, p.stack().HoldMirror(p.Context()), errdefs.ErrPrecondition, "held before all is copied")
				quick()
				p.copied()
				mend := p.to.failFlushes(p.T)
				w.goesOn(p.T) // it flushes
				if m := p.mirrored(); m.NewFailed || m.Forgot {
					p.Errorf("it is %+v", m)
				}
				if err := flush(p); err == nil {
					p.Error("the new leg was not flushed")
				}
				mend()
				for range 2 {
					if m := p.mirrored(); !m.NewFailed || m.Held { // it may have Forgot: the writer flushes too
						p.Errorf("it is %+v", m)
					}
					if err := flush(p); err == nil {
						p.Error("it counts as flushed at the second try")
					}
					p.recover() // as a driver that starts
				}
				p.undone()
				w.goesOn(p.T)
				p.mirror(p.all())
				p.copied()
				check.OK(p, errors.Join(p.stack().FlushMirror(p.Context()), p.stack().FlushMirror(p.Context()), p.stack().HoldMirror(p.Context())))
				p.recover()
				if m := p.mirrored(); m.NewFailed || !m.Held || m.Forgot {
					p.Errorf("it is %+v", m)
				}
				check.OK(p, p.stack().Switch(p.Context(), p.moved()))
				w.goesOn(p.T)
				p.onlyDevices()
				n, err := w.halt()
				check.OK(p, errors.Join(err, d.Close(), p.moved().Detach(p.Context())))
				p.bare(p.to, func(path string) { p.has(path, n) })
			})
		})
	}
}

// onlyDevices makes sure that nothing is left of a mirror.
func (p *pair) onlyDevices() {
	p.Helper()
	names, err := dm.Names("ashlar-")
	check.OK(p, err)
	for _, name := range names {
		if isNote(name) || strings.HasSuffix(name, "-new") || strings.HasSuffix(name, "-sound") {
			p.Errorf("device %s is left", name)
		}
	}
}

// failFlushes has all flushes of the disk fail, until mend. Reads and writes go on.
func (d *disk) failFlushes(t *testing.T) (mend func()) {
	t.Helper()
	below, err := dm.Below(d.name)
	check.OK(t, err)
	check.OK(t, dm.Replace(d.name, append(dm.Linear(below[0], d.size), dm.Line{Start: d.size, Length: 4096, Kind: "flakey", Text: dm.Number(below[0]) + " 0 0 1 1 error_writes"})))
	return func() { check.OK(t, dm.Replace(d.name, dm.Linear(below[0], d.size))) }
}

// TestNewLegGoesWithTheVolume: what is over the new leg goes with the last user of the volume, and frees the leg. What a crash leaves of it is no hindrance.
func TestNewLegGoesWithTheVolume(t *testing.T) {
	overPair(t, 48*pooltest.MiB, func(p *pair) {
		d := p.attach(device.Options{Seat: true, Encryption: p.options.Encryption})
		name, _ := p.names()
		check.OK(p, dm.Make(name+"-new", "", dm.Linear(p.to.device().Number, 4096))) // a crash came before it had its size
		p.mirror(p.all())
		p.copied()
		check.OK(p, d.Close())
		for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
			if holders, err := os.ReadDir(dm.Sysfs(p.to.device().Number) + "/holders"); err != nil || len(holders) == 0 || time.Now().After(end) {
				if err != nil || len(holders) > 0 {
					p.Errorf("over the new leg are %v, %v", holders, err)
				}
				break
			}
		}
		check.OK(p, p.stack().Detach(p.Context()))
		p.onlyDevices()
	})
}

// TestNewLegIsFlushedLast: what is under way to the new leg when it is to be flushed is flushed too. It may be a write that has to be durable at its end.
func TestNewLegIsFlushedLast(t *testing.T) {
	overPair(t, 48*pooltest.MiB, func(p *pair) {
		d := p.attach(p.options)
		p.mirror(p.all())
		p.copied()
		quick := p.to.writesLate(p.T, 2*time.Second)
		defer quick()
		written := make(chan error, 1)
		go func() {
			f, err := direct.Open(d.Path, os.O_WRONLY)
			if err == nil {
				page, free, failure := direct.Memory(4096)
				if err = failure; err == nil {
					defer free()
					_, err = f.WriteAt(page, 0)
				}
				err = errors.Join(err, f.Close())
			}
			written <- err
		}()
		time.Sleep(500 * time.Millisecond)
		check.OK(p, p.stack().FlushMirror(p.Context()))
		select {
		case err := <-written:
			check.OK(p, err)
		case <-time.After(200 * time.Millisecond):
			p.Error("it counts as flushed, and a write of before is under way")
			check.OK(p, <-written)
		}
		check.OK(p, errors.Join(d.Close(), p.stack().Detach(p.Context())))
	})
}

// TestLongestName: a volume moves whose devices have the longest names that a pool may give them.
func TestLongestName(t *testing.T) {
	drivertest.NeedRoot(t)
	drivertest.NeedMapper(t)
	const size = 16 * pooltest.MiB
	p := &pair{from: newDisk(t, "", size), to: newDisk(t, "new", size), options: device.Options{Keep: true, Seat: true}}
	p.fixture = &fixture{t, p.from, pooltest.Vol("a"), device.New()}
	t.Cleanup(func() { check.OK(t, p.stack().Detach(context.Background())) })
	short, _ := p.names()
	p.from.label = strings.Repeat("x", dm.NameSize-1-blockdev.LayerRoom-len(short))
	d := p.attach(p.options)
	p.mirror(p.all())
	p.copied()
	check.OK(t, p.stack().FlushMirror(t.Context()))
	p.undone()
	p.onlyDevices()
	check.OK(t, errors.Join(d.Close(), p.stack().Detach(t.Context())))
}

// TestMirrorIsOverItsLegs: a mirror is known to be over both of its legs. Else it would not count as dangling when both are gone.
func TestMirrorIsOverItsLegs(t *testing.T) {
	overPair(t, 32*pooltest.MiB, func(p *pair) {
		d := p.attach(p.options)
		p.mirror(p.all())
		below, err := p.stack().UnderSeat(p.Context())
		check.OK(p, err)
		slices.Sort(below)
		legs := []uint64{p.from.device().Number, p.to.device().Number}
		if slices.Sort(legs); !slices.Equal(below, legs) {
			p.Errorf("the mirror is over %v, and its legs are %v", below, legs)
		}
		p.undone()
		check.OK(p, errors.Join(d.Close(), p.stack().Detach(p.Context())))
	})
}

// users has eight programs write to a volume, of which one flushes it, until end.
func (p *pair) users(path string) (end func()) {
	var stop atomic.Bool
	var all sync.WaitGroup
	for i := range int64(8) {
		f, err := direct.Open(path, os.O_RDWR)
		check.OK(p, err)
		page, free, err := direct.Memory(4096)
		check.OK(p, err)
		all.Go(func() {
			defer free()
			defer f.Close()
			for at := i; !stop.Load(); at += 5 {
				_, err := f.WriteAt(page, at*pooltest.MiB%(48*pooltest.MiB))
				if err == nil && i == 0 {
					err = f.Sync()
				}
				if err != nil {
					p.Error(err)
					return
				}
			}
		})
	}
	return func() { stop.Store(true); all.Wait() }
}

// ends makes sure that a mirror is undone, within a time.
func (p *pair) ends() {
	p.Helper()
	ended := make(chan error, 1)
	go func() { ended <- p.stack().Unmirror(context.Background()) }()
	select {
	case err := <-ended:
		check.OK(p, err)
	case <-time.After(30 * time.Second):
		p.Fatal("the mirror does not end")
	}
}

// TestNewLegFailsAsItIsHeld: a mirror ends whose new leg fails writes and flushes while it is being held.
func TestNewLegFailsAsItIsHeld(t *testing.T) {
	overPair(t, 64*pooltest.MiB, func(p *pair) {
		d := p.attach(p.options)
		p.mirror(p.all())
		p.copied()
		end := p.users(d.Path)
		check.OK(p, p.stack().FlushMirror(p.Context()))
		quick := p.to.writesLate(p.T, 300*time.Millisecond)
		time.Sleep(time.Second)
		held := make(chan error, 1)
		go func() { held <- p.stack().HoldMirror(context.Background()) }()
		time.Sleep(50 * time.Millisecond)
		mend := p.to.failWrites(p.T)
		check.OK(p, <-held)
		if m := p.mirrored(); !m.Held { // on a slow machine nothing may have failed
			p.Errorf("it is %+v", m)
		}
		p.ends()
		mend()
		end()
		quick()
		check.OK(p, errors.Join(d.Close(), p.stack().Detach(p.Context())))
	})
}

// TestNewLegFailsInTheMiddle: a mirror ends whose new leg fails in the middle of the copy, while programs write and flush. (After a failed flush the kernel never copies
// a region that is being written to, and each suspension waits for that copy.)
func TestNewLegFailsInTheMiddle(t *testing.T) {
	overPair(t, 64*pooltest.MiB, func(p *pair) {
		d := p.attach(p.options)
		quick := p.to.writesLate(p.T, 100*time.Millisecond)
		p.mirror(p.all())
		end := p.users(d.Path)
		p.becomes("copied in part", func(m device.Mirrored) bool { return m.Synced > m.Total/8 })
		if m := p.mirrored(); m.Synced == m.Total {
			p.Fatalf("it is %+v", m)
		}
		p.to.failWrites(p.T)
		p.becomes("failed", func(m device.Mirrored) bool { return m.NewFailed })
		time.Sleep(time.Second)
		p.ends()
		end()
		quick()
		check.OK(p, errors.Join(d.Close(), p.stack().Detach(p.Context())))
	})
}

// TestReadFromGone: the leg that is read from is found also when the kernel does not have the other one any more.
func TestReadFromGone(t *testing.T) {
	overPair(t, 32*pooltest.MiB, func(p *pair) {
		d := p.attach(p.options)
		p.mirror(blockdev.Extent{Length: 16 * pooltest.MiB})
		p.copied()
		seat, err := dm.Find(p.seat())
		check.OK(t, err)
		m := p.mirrored()
		gone := unix.Mkdev(259, 1<<19)
		from, err := dm.ReadFrom(seat, 0, []dm.Leg{{Device: m.Old}, {Device: gone}})
		if err != nil || from != m.Old {
			t.Errorf("it is read from %s: %v", dm.Number(from), err)
		}
		p.undone()
		check.OK(p, errors.Join(d.Close(), p.stack().Detach(p.Context())))
	})
}

// TestForgetsWhileItCopies: a flush that fails before all is copied, and is forgotten when that is. A mirror of which nothing is known, as of an older driver, is told of as one that has forgotten.
func TestForgetsWhileItCopies(t *testing.T) {
	overPair(t, 64*pooltest.MiB, func(p *pair) {
		d := p.attach(p.options)
		quick := p.to.writesLate(p.T, 20*time.Second) // nothing is copied before
		p.mirror(p.all())
		flushed := p.flushFails(d.Path, p.from)
		quick()
		p.becomes("copied", func(m device.Mirrored) bool { return m.Synced == m.Total && !m.NewFailed })
		if m := p.mirrored(); !m.Forgot {
			p.Errorf("it is %+v", m)
		}
		p.undone()
		check.OK(p, <-flushed)

		p.mirror(p.all())
		p.copied()
		name, _ := p.names()
		_, err := dm.Remove(name + "-since")
		check.OK(p, err)
		if m := p.mirrored(); !m.Forgot {
			p.Errorf("without a note it is %+v", m)
		}
		p.undone()
		check.OK(p, d.Close())
	})
}

// TestHoldMirror: nothing is acknowledged while a mirror is held, whatever driver starts, until it is released, undone, or switched. It is no problem of the volume.
func TestHoldMirror(t *testing.T) {
	for what, end := range map[string]func(p *pair) error{
		"released": func(p *pair) error { return p.stack().ReleaseMirror(p.Context()) },
		"undone":   func(p *pair) error { return p.stack().Unmirror(p.Context()) },
		"switched": func(p *pair) error { return p.stack().Switch(p.Context(), p.moved()) },
	} {
		t.Run(what, func(t *testing.T) {
			overPair(t, 48*pooltest.MiB, func(p *pair) {
				d := p.attach(p.options)
				pooltest.Fails(p, p.stack().HoldMirror(p.Context()), errdefs.ErrPrecondition, "held without a mirror")
				w := p.writer(d.Path)
				p.mirror(p.all())
				p.copied()
				w.goesOn(p.T)
				check.OK(p, errors.Join(p.stack().HoldMirror(p.Context()), p.stack().HoldMirror(p.Context())))
				time.Sleep(100 * time.Millisecond) // what was under way
				w.held(p.T)
				p.recover()
				w.held(p.T)
				if problems, err := p.stack().Health(p.Context()); err != nil || len(problems) > 0 {
					p.Errorf("health %v, %v", problems, err)
				}
				if m := p.mirrored(); !m.Held || m.Forgot {
					p.Errorf("it is %+v", m)
				}
				check.OK(p, end(p))
				w.goesOn(p.T)
				n, err := w.halt()
				on, stack := p.from, p.stack()
				if what == "switched" {
					on, stack = p.to, p.moved()
				}
				check.OK(p, errors.Join(err, d.Close(), stack.Detach(p.Context())))
				p.bare(on, func(path string) { p.has(path, n) })
			})
		})
	}
}
