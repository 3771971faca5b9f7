package mirror_test

import (
	"context"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/mirror"
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
