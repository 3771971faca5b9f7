package lvmpool_test

import (
	"context"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
)

// TestLVMCutRemovedAsItIsClosed: the last user of a volume closes it while lvm2 removes the cut that it was copied from. The copy is made, no device is left,
// and the pool goes on.
func TestLVMCutRemovedAsItIsClosed(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 256*pooltest.MiB)}
	f.url = f.group.URL() + "?reservePercent=0"
	f.start()
	f.make(pooltest.Vol("a"), 8*pooltest.MiB)
	f.write(pooltest.Vol("a"), 0, marked("a", 8*pooltest.MiB))
	name := f.group.Device(pooltest.Vol("a").String())
	caught := 0
	for range 6 {
		device := pooltest.Attach(t, f.pool, pooltest.Vol("a"), blockdev.Attachment{})
		done, closed, cut := make(chan struct{}), make(chan error, 1), false
		_, err := f.pool.Create(t.Context(), blockdev.Spec{Ref: pooltest.Snap("b"), Name: "b", Size: 8 * pooltest.MiB, Origin: pooltest.Vol("a"), Cut: func(context.Context) error {
			cut = true
			go func() {
				for {
					select {
					case <-done:
						closed <- device.Close()
						return
					default:
					}
					if d, err := dm.Find(name); err == nil && d != nil && d.Suspended {
						closed <- device.Close()
						caught++
						return
					}
				}
			}()
			return nil
		}})
		close(done)
		if !cut {
			closed <- device.Close()
		}
		check.OK(t, <-closed)
		if err != nil {
			t.Errorf("copy, cut %v: %v", cut, err)
			t.Logf("%s", drivertest.Run(t, "dmsetup", "info", "-c", "--noheadings", "-o", "name,open,attr"))
			check.OK(t, pooltest.Second(f.pool.Create(t.Context(), blockdev.Spec{Ref: pooltest.Snap("b"), Name: "b", Size: 8 * pooltest.MiB, Origin: pooltest.Vol("a")})))
		}
		time.Sleep(50 * time.Millisecond)
		if left := f.group.DeviceNames(); len(left) > 0 {
			t.Errorf("left: %q", left)
			t.Logf("%s", drivertest.Run(t, "dmsetup", "info", "-c", "--noheadings", "-o", "name,open,attr"))
			check.OK(t, f.stack(pooltest.Vol("a")).Detach(t.Context()))
		}
		f.holds(pooltest.Snap("b"), 0, marked("a", 8*pooltest.MiB))
		f.holds(pooltest.Vol("a"), 0, marked("a", 8*pooltest.MiB))
		check.OK(t, f.pool.Delete(t.Context(), pooltest.Snap("b")))
	}
	t.Logf("closed %d times while it was suspended", caught)
}
