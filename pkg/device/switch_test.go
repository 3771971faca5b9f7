package device_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/device"
)

// bare is what opens a volume without a seat, on whatever disk it is.
func (p *pair) bare(on *disk, look func(path string)) {
	p.Helper()
	stack := device.New().Of(on, p.ref)
	d, err := stack.Attach(p.Context(), device.Options{Keep: true, Encryption: p.options.Encryption})
	check.OK(p, err)
	look(d.Path)
	check.OK(p, errors.Join(d.Close(), stack.Detach(p.Context())))
}

// TestSwitch: a volume under a writer goes on over its new leg alone, as the same device with the names of the other pool. A switch that was cut short is found, and
// finished by the next one.
func TestSwitch(t *testing.T) {
	for _, cut := range []int{0, 1, 2} { // devices that were renamed before a crash
		overPair(t, 48*pooltest.MiB, func(p *pair) {
			d := p.attach(p.options)
			w := p.writer(d.Path)
			w.goesOn(t)
			p.mirror(p.all())
			w.goesOn(t)
			p.copied()
			if cut > 0 {
				p.cut(cut)
				refs, err := device.New().Mirrors(p.Context(), p.from)
				if check.OK(p, err); !slices.Equal(refs, []blockdev.Ref{p.ref}) {
					p.Errorf("cut short, mirrors are %v", refs)
				}
				p.recover()
				check.OK(p, device.New().Recover(p.Context(), p.to))
			}
			check.OK(p, p.stack().Switch(p.Context(), p.moved()))
			check.OK(p, p.stack().Switch(p.Context(), p.moved()))
			p.from.fail(p.T) // it has no part any more
			w.goesOn(t)
			devices, err := p.moved().Attached(p.Context())
			if check.OK(p, err); len(devices) != 1 || devices[0].Number != d.Number || !devices[0].Kept {
				p.Errorf("attached as %+v, not as %s", devices, d.Path)
			}
			if _, is, err := p.moved().Mirrored(p.Context()); is || err != nil {
				p.Errorf("mirrored: %v, %v", is, err)
			}
			check.OK(p, device.New().Recover(p.Context(), p.to))
			if refs, err := device.New().Mirrors(p.Context(), p.to); len(refs) > 0 || err != nil {
				p.Errorf("mirrors %v, %v", refs, err)
			}
			w.goesOn(t)
			n, err := w.halt()
			check.OK(p, errors.Join(err, d.Close(), p.moved().Detach(p.Context())))
			p.bare(p.to, func(path string) { p.has(path, n) })
		})
	}
}

// cut is a switch of which only so many devices were renamed.
func (p *pair) cut(renamed int) {
	p.Helper()
	check.OK(p, dm.Replace(p.seat(), dm.Linear(p.to.device().Number, p.from.size)))
	before, _ := p.names()
	after, _, _, err := p.to.Top(p.ref)
	check.OK(p, err)
	for _, suffix := range []string{"", "-crypt"}[:renamed] {
		d, err := dm.Find(before + suffix)
		check.OK(p, err)
		if d != nil {
			check.OK(p, dm.Rename(before+suffix, after+suffix))
		}
	}
}

// TestLegFails: nothing is acknowledged that is not on both legs, and what is held goes on over the one that is told, and without an error.
func TestLegFails(t *testing.T) {
	for _, old := range []bool{false, true} {
		overPair(t, 48*pooltest.MiB, func(p *pair) {
			d := p.attach(p.options)
			w := p.writer(d.Path)
			w.goesOn(t)
			p.mirror(p.all())
			p.copied()
			w.goesOn(t)
			if old {
				p.from.fail(p.T)
				p.becomes("failed", func(m device.Mirrored) bool { return m.OldFailed && !m.NewFailed })
			} else {
				p.to.fail(p.T)
				p.becomes("failed", func(m device.Mirrored) bool { return m.NewFailed && !m.OldFailed })
			}
			time.Sleep(100 * time.Millisecond) // what was under way
			w.held(t)
			p.recover() // a start changes nothing
			w.held(t)
			left, stack := p.from, p.stack()
			if old {
				left, stack = p.to, p.moved()
				check.OK(p, p.stack().Switch(p.Context(), p.moved()))
			} else {
				check.OK(p, p.stack().Unmirror(p.Context()))
			}
			w.goesOn(t)
			n, err := w.halt()
			check.OK(p, errors.Join(err, d.Close(), stack.Detach(p.Context())))
			p.bare(left, func(path string) { p.has(path, n) })
		})
	}
}

// TestHeldWritesNeedNoFlush: what a mirror holds fails if it is suspended otherwise than Replace does.
func TestHeldWritesNeedNoFlush(t *testing.T) {
	overPair(t, 48*pooltest.MiB, func(p *pair) {
		d := p.attach(p.options)
		w := p.writer(d.Path)
		p.mirror(p.all())
		p.copied()
		p.to.fail(p.T)
		p.becomes("failed", func(m device.Mirrored) bool { return m.NewFailed })
		time.Sleep(100 * time.Millisecond)
		w.held(t)
		drivertest.Run(p, "dmsetup", "suspend", "--nolockfs", p.seat())
		check.OK(p, p.stack().Unmirror(p.Context()))
		select {
		case err := <-w.done:
			if err == nil {
				p.Error("the write did not fail")
			}
		case <-time.After(30 * time.Second):
			p.Fatal("the write did not fail")
		}
		for range w.n {
		}
		p.writes(d.Path)
	})
}
