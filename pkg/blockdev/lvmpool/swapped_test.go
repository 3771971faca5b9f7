package lvmpool_test

import (
	"bytes"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lvmpool"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/device"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// TestLVMSwapped: while the pool is open, somebody gives two logical volumes each other's names. No user of the one is given the bytes of the other, nor does
// either go with the other. With their own names back, both are as before.
func TestLVMSwapped(t *testing.T) {
	onLVM(t, func(f *lvmFixture) {
		ctx := f.Context()
		a, b := pooltest.Vol("a"), pooltest.Vol("b")
		for ref, word := range map[blockdev.Ref]string{a: "a", b: "b"} {
			f.make(ref, 8*pooltest.MiB)
			f.write(ref, 0, marked(word, 8*pooltest.MiB))
			check.OK(f, f.stack(ref).Detach(ctx))
		}
		lvmpool.Age(f.pool)
		f.ill(a) // a report since they were made
		swap := func() {
			f.Helper()
			for _, names := range [][2]string{{a.String(), "between"}, {b.String(), a.String()}, {"between", b.String()}} {
				drivertest.Run(f, "lvrename", "-q", f.group.Name, names[0], names[1])
			}
		}
		for _, reported := range []bool{false, true} {
			swap()
			if reported {
				lvmpool.Age(f.pool)
				f.ill(a, "VolumeMissing")
			}
			for _, readOnly := range []bool{false, true} {
				says(f, pooltest.Second(f.pool.Attach(ctx, a, blockdev.Attachment{ReadOnly: readOnly})), errdefs.ErrDataLoss)
			}
			says(f, pooltest.Second(f.stack(a).Attach(ctx, device.Options{Keep: true})), errdefs.ErrDataLoss)
			says(f, f.pool.Erase(ctx, a), errdefs.ErrPrecondition)
			says(f, f.pool.Delete(ctx, b), errdefs.ErrPrecondition)
			swap()
			lvmpool.Age(f.pool)
			f.ill(a)
			for ref, word := range map[blockdev.Ref]string{a: "a", b: "b"} {
				if !bytes.Equal(f.read(ref, 0, 8*pooltest.MiB), marked(word, 8*pooltest.MiB)) {
					f.Errorf("%s has other bytes", ref)
				}
				check.OK(f, f.stack(ref).Detach(ctx))
			}
		}
	})
}
