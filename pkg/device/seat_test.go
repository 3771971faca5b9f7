package device_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/device"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// overSeats runs a test over each kind of pool, of a volume that is plain and of one that is encrypted; data is how much less than the pool's device it shows.
func overSeats(t *testing.T, test func(f *fixture, o device.Options, shown int64)) {
	t.Run("plain", func(t *testing.T) {
		overEach(t, func(f *fixture) { test(f, device.Options{Seat: true}, size) })
	})
	t.Run("encrypted", func(t *testing.T) {
		overEncrypted(t, func(f *fixture) {
			test(f, device.Options{Seat: true, Encryption: opening.Encryption}, behind)
		})
	})
}

func (f *fixture) seated() *dm.Device {
	f.Helper()
	d, err := dm.Find(f.seat())
	check.OK(f, err)
	return d
}

// TestSeat: it is between the pool's device and what is over that, found whether it is asked for or not, grows, and goes with the rest. What is attached without one stays so.
func TestSeat(t *testing.T) {
	for _, keep := range []bool{false, true} {
		overSeats(t, func(f *fixture, o device.Options, shown int64) {
			o.Keep = keep
			d := f.attach(o)
			below, err := f.pool.Attached(f.Context(), f.ref)
			check.OK(f, err)
			seat := f.seated()
			if seat == nil || !seat.Deferred || len(below) != 1 || d.Size != shown || d.Kept != keep || d.Below != below[0].Path {
				f.Fatalf("attached as %+v over the seat %+v over %+v", d, seat, below)
			}
			if under, err := dm.Below(seat.Name); err != nil || len(under) != 1 || under[0] != below[0].Number {
				f.Errorf("the seat is over %v: %v", under, err)
			}
			f.is(d, shown, "attached")
			if devices := f.attached(); devices[0].Below != below[0].Path {
				f.Errorf("found as over %s, not %s", devices[0].Below, below[0].Path)
			}
			f.writes(d.Path)
			for what, o := range map[string]device.Options{"with": o, "without": {Keep: keep, Encryption: o.Encryption}} {
				again := f.attach(o)
				if again.Number != d.Number || f.seated() == nil {
					f.Errorf("attached again %s a seat as %s, not %s", what, again.Path, d.Path)
				}
				check.OK(f, again.Close())
			}
			for step, grow := range []func(){
				func() { check.OK(f, f.stack().Grow(f.Context(), opening.Encryption.Key)) },
				func() { again := f.attach(o); check.OK(f, again.Close()) },
			} {
				shown += 4 * pooltest.MiB
				check.OK(f, pooltest.Second(f.pool.Expand(f.Context(), f.ref, below[0].Size+int64(step+1)*4*pooltest.MiB)))
				grow()
				f.is(d, shown, fmt.Sprint("grown in way ", step))
			}
			if mirrors, err := device.New().Mirrors(f.Context(), f.pool); len(mirrors) > 0 || err != nil {
				f.Errorf("mirrors %v, %v", mirrors, err)
			}
			f.recover()
			f.writes(d.Path)
			orphans, err := device.New().Orphans(f.Context(), f.pool)
			if check.OK(f, err); len(orphans) == 1 != keep {
				f.Errorf("orphans %v", orphans)
			}
			check.OK(f, d.Close())
			if keep {
				check.OK(f, f.stack().Detach(f.Context()))
			}
			f.closed()

			bare := f.attach(device.Options{Keep: keep, Encryption: o.Encryption})
			again := f.attach(o)
			if again.Number != bare.Number || f.seated() != nil {
				f.Errorf("attached without a seat as %s, and then with one as %s: %+v", bare.Path, again.Path, f.seated())
			}
			check.OK(f, errors.Join(again.Close(), bare.Close(), f.stack().Detach(f.Context())))
			f.closed()
		})
	}
}

// TestSeatCut: what a crash leaves of a seat is put right by the next attach, by a start, and by a detach; and one that somebody suspended is told by health.
func TestSeatCut(t *testing.T) {
	overSeats(t, func(f *fixture, o device.Options, shown int64) {
		name := f.seat()
		for what, table := range map[string]func(below blockdev.Device){
			"without a table": func(blockdev.Device) {},
			"a table loaded": func(below blockdev.Device) {
				check.OK(f, dm.Load(name, dm.Linear(below.Number, below.Size)))
			},
			"of nobody": func(below blockdev.Device) { check.OK(f, dm.Make(name, "", dm.Linear(below.Number, below.Size))) },
			"suspended": func(below blockdev.Device) {
				check.OK(f, errors.Join(dm.Make(name, "", dm.Linear(below.Number, below.Size)), dm.Suspend(name)))
			},
		} {
			for _, next := range []string{"attach", "start", "detach"} {
				below, err := f.pool.Attach(f.Context(), f.ref, blockdev.Attachment{})
				check.OK(f, err)
				_, uuid := f.names()
				drivertest.Run(f, "dmsetup", "create", name, "--notable", "--uuid", uuid+"-movable-01234567")
				table(below)
				check.OK(f, below.Close())
				switch next {
				case "attach":
					if what == "suspended" {
						f.recover()
					}
					d := f.attach(o)
					f.writes(d.Path)
					f.is(d, shown, "attached, "+what)
					check.OK(f, d.Close())
				case "start":
					f.recover()
				case "detach":
					check.OK(f, f.stack().Detach(f.Context()))
				}
				f.closed()
				if d := f.seated(); d != nil {
					f.Fatalf("after %s, %s, it is there: %+v", next, what, d)
				}
			}
		}
		d := f.attach(o)
		drivertest.Run(f, "dmsetup", "suspend", name)
		problems, err := f.stack().Health(f.Context())
		if check.OK(f, err); fmt.Sprint(reasons(problems)) != "[DeviceSuspended]" || !strings.Contains(problems[0].Message, name) {
			f.Errorf("health %v", problems)
		}
		drivertest.Run(f, "dmsetup", "load", name, "--table", "0 8 error")
		f.recover()
		f.writes(d.Path)
		f.is(d, shown, "after a start")
		check.OK(f, d.Close())
	})
}

// TestSeatOfAnother: a device that has the name of a seat and is another's keeps its table.
func TestSeatOfAnother(t *testing.T) {
	overSeats(t, func(f *fixture, o device.Options, _ int64) {
		name := f.seat()
		drivertest.Run(f, "dmsetup", "create", name, "--uuid", "somebody's", "--table", "0 8 error")
		f.Cleanup(func() { drivertest.Run(f, "dmsetup", "remove", "--retry", name) })
		_, err := f.stack().Attach(f.Context(), o)
		pooltest.Fails(f, err, errdefs.ErrPrecondition, "attached below another's device")
		check.OK(f, f.stack().Detach(f.Context()))
		f.recover()
		if table := drivertest.Run(f, "dmsetup", "table", name); !strings.Contains(table, "error") {
			f.Errorf("its table is %s", table)
		}
	})
}
