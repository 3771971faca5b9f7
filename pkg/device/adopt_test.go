package device_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/device"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// adopting is a pool whose device is made over that of another pool when it is attached, as a mirror of one leg is.
type adopting struct {
	*disk
	leg *disk
}

func (a *adopting) there() bool {
	d, err := dm.Find(a.name)
	return err == nil && d != nil
}

func (a *adopting) Attach(ctx context.Context, ref blockdev.Ref, how blockdev.Attachment) (blockdev.Device, error) {
	if err := dm.Make(a.name, "", dm.Linear(a.leg.device().Number, a.size)); err != nil {
		return blockdev.Device{}, err
	}
	return a.disk.Attach(ctx, ref, how)
}

func (a *adopting) Attached(ctx context.Context, ref blockdev.Ref) ([]blockdev.Device, error) {
	if !a.there() {
		return nil, nil
	}
	return a.disk.Attached(ctx, ref)
}

// adoption is a volume on one disk whose devices are to be those of another pool.
type adoption struct {
	*pair
	by *adopting
}

func overAdoption(t *testing.T, test func(a *adoption)) {
	const size = 48 * pooltest.MiB
	overPair(t, size, func(p *pair) {
		a := &adoption{p, &adopting{&disk{name: "test-mirror", size: size}, p.from}}
		a.Cleanup(func() {
			check.OK(a, errors.Join(a.stack().Detach(context.Background()), a.adopted().Detach(context.Background())))
			if a.by.there() {
				drivertest.Run(a, "dmsetup", "remove", "--retry", a.by.name)
			}
		})
		test(a)
	})
}

// adopted is the stack of the other pool.
func (a *adoption) adopted() device.Stack { return device.New().Of(a.by, a.ref) }

// adopt is all of it.
func (a *adoption) adopt() error {
	err := a.stack().HandOver(a.Context(), a.adopted())
	if err == nil {
		err = a.adopted().Reseat(a.Context())
	}
	return err
}

// suffixes are those of the devices of a stack, in the order in which they are renamed.
var suffixes = []string{"-seat", "-crypt", ""}

// cutAfter is a HandOver of which only so many devices were renamed.
func (a *adoption) cutAfter(renamed int) {
	a.Helper()
	before, _ := a.names()
	after, _, _, err := a.by.Top(a.ref)
	check.OK(a, err)
	for _, suffix := range suffixes[:renamed] {
		d, err := dm.Find(before + suffix)
		if check.OK(a, err); d != nil {
			check.OK(a, dm.Rename(before+suffix, after+suffix))
		}
	}
}

// isOver makes sure of what the seat of the other pool is over.
func (a *adoption) isOver(want uint64, when string) {
	a.Helper()
	name, _, _, err := a.by.Top(a.ref)
	check.OK(a, err)
	if below, err := dm.Below(name + "-seat"); err != nil || !slices.Equal(below, []uint64{want}) {
		a.Errorf("%s the seat is over %v, %v; want %d", when, below, err, want)
	}
	adopted, astray, err := a.adopted().Adopted(a.Context())
	if over := a.by.there() && want == a.by.device().Number; err != nil || !adopted || astray == over {
		a.Errorf("%s it is adopted %v, astray %v, %v", when, adopted, astray, err)
	}
}

// TestAdopt: a volume under a writer gets the names of another pool, and then comes to be over the device of that, as the same device for who uses it. Cut short after whichever step, and started again, it is found by one of the two, and is finished
// by the next try; done again, it changes nothing.
func TestAdopt(t *testing.T) {
	for cut := range len(suffixes) + 2 { // devices that were renamed before a crash, and then also the device made
		overAdoption(t, func(a *adoption) {
			d := a.attach(a.options)
			w := a.writer(d.Path)
			w.goesOn(t)
			if adopted, astray, err := a.adopted().Adopted(a.Context()); adopted || astray || err != nil {
				a.Errorf("before, it is adopted %v, astray %v, %v", adopted, astray, err)
			}
			check.OK(a, a.adopted().Reseat(a.Context())) // of what nobody has handed over
			if a.by.there() {
				a.Error("a device was made for a volume that nobody has handed over")
			}
			if cut > 0 {
				a.cutAfter(min(cut, len(suffixes)))
				if cut > len(suffixes) {
					below, err := a.by.Attach(a.Context(), a.ref, blockdev.Attachment{})
					check.OK(a, errors.Join(err, below.Close()))
				}
				a.recover()
				check.OK(a, device.New().Recover(a.Context(), a.by))
				a.isOver(a.from.device().Number, fmt.Sprint("cut short after ", cut))
				w.goesOn(t)
			}
			for range 2 {
				check.OK(a, a.stack().HandOver(a.Context(), a.adopted()))
				a.isOver(a.from.device().Number, "handed over")
				w.goesOn(t)
			}
			for range 2 {
				check.OK(a, a.adopted().Reseat(a.Context()))
				a.isOver(a.by.device().Number, "adopted")
				w.goesOn(t)
			}
			check.OK(a, a.adopt())
			check.OK(a, device.New().Recover(a.Context(), a.by))
			a.isOver(a.by.device().Number, "started again")
			w.goesOn(t)
			devices, err := a.adopted().Attached(a.Context())
			if check.OK(a, err); len(devices) != 1 || devices[0].Number != d.Number || !devices[0].Kept {
				a.Errorf("attached as %+v, not as %s", devices, d.Path)
			}
			again, err := a.adopted().Attach(a.Context(), a.options)
			if check.OK(a, err); again.Number != d.Number {
				a.Errorf("attached again as %s, not as %s", again.Path, d.Path)
			}
			n, err := w.halt()
			check.OK(a, errors.Join(err, again.Close(), d.Close(), a.adopted().Detach(a.Context())))
			drivertest.Run(a, "dmsetup", "remove", "--retry", a.by.name) // so nothing is over it
			a.bare(a.from, func(path string) { a.has(path, n) })
		})
	}
}

// TestHandOverRefused: what has no seat, or moves, or is on a disk without a cache, so that no flush would come to the disks of others, keeps its names; what is held back by its driver is handed over when that has ended.
func TestHandOverRefused(t *testing.T) {
	overAdoption(t, func(a *adoption) {
		d := a.attach(device.Options{Keep: true, Encryption: a.options.Encryption})
		pooltest.Fails(a, a.adopt(), errdefs.ErrUnsupported, "handed over without a seat")
		a.is(d, d.Size, "without a seat")
		check.OK(a, errors.Join(d.Close(), a.stack().Detach(a.Context())))

		setCache := func(to string) {
			old := a.from.device()
			check.OK(a, pooltest.Second(old.SetQueue(map[string]string{"write_cache": to})))
		}
		setCache("write through")
		d = a.attach(a.options)
		pooltest.Fails(a, a.adopt(), errdefs.ErrUnsupported, "handed over though nobody flushes it")
		a.is(d, d.Size, "on a disk without a cache")
		check.OK(a, errors.Join(d.Close(), a.stack().Detach(a.Context())))
		setCache("write back")

		d = a.attach(a.options)
		w := a.writer(d.Path)
		a.mirror(a.all())
		pooltest.Fails(a, a.adopt(), errdefs.ErrPrecondition, "handed over while it moves")
		a.copied()
		w.goesOn(t)
		check.OK(a, a.stack().Unmirror(a.Context()))

		stack := device.New().Of(a.from, a.ref) // of one driver
		resume, err := stack.Suspend(a.Context())
		check.OK(a, err)
		pooltest.Fails(a, stack.HandOver(a.Context(), a.adopted()), errdefs.ErrBusy, "handed over while its writes are held back")
		w.held(t)
		check.OK(a, resume())
		w.goesOn(t)
		check.OK(a, stack.HandOver(a.Context(), a.adopted()))

		a.by.size -= pooltest.MiB
		pooltest.Fails(a, a.adopted().Reseat(a.Context()), errdefs.ErrPrecondition, "brought over what is too small")
		a.isOver(a.from.device().Number, "beside what is too small")
		w.goesOn(t)
		a.by.size += pooltest.MiB
		check.OK(a, a.adopted().Reseat(a.Context()))
		w.goesOn(t)
		n, err := w.halt()
		check.OK(a, errors.Join(err, d.Close(), a.adopted().Detach(a.Context())))
		drivertest.Run(a, "dmsetup", "remove", "--retry", a.by.name)
		a.bare(a.from, func(path string) { a.has(path, n) })
	})
}

// TestHandOverCutAndDetached: what was handed over in part goes with the rest when the volume is detached.
func TestHandOverCutAndDetached(t *testing.T) {
	for cut := 1; cut < len(suffixes); cut++ {
		overAdoption(t, func(a *adoption) {
			d := a.attach(a.options)
			a.cutAfter(cut)
			a.writes(d.Path)
			check.OK(a, errors.Join(d.Close(), a.stack().Detach(a.Context())))
			for end := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
				if names, err := dm.Names("ashlar-test-"); err == nil && len(names) == 0 {
					break
				} else if time.Now().After(end) {
					a.Fatalf("left are %v, %v", names, err)
				}
			}
		})
	}
}
