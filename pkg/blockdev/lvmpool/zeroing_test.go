package lvmpool_test

import (
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// TestLVMZeroingSwitchedOff: somebody has a thin pool not zero new blocks any more (lvchange --zero n) while it is a pool. No volume is made or grows, as
// it would show what another one held, and health tells.
func TestLVMZeroingSwitchedOff(t *testing.T) {
	f := thinFixture(t, 64*pooltest.MiB)
	f.make(pooltest.Vol("a"), 56*pooltest.MiB)
	f.write(pooltest.Vol("a"), 0, marked("secret", 56*pooltest.MiB))
	check.OK(t, f.pool.Delete(t.Context(), pooltest.Vol("a")))
	f.make(pooltest.Vol("b"), 8*pooltest.MiB)
	drivertest.Run(t, "lvchange", "-q", "--zero", "n", f.group.Name+"/tp")
	for what, call := range map[string]func() error{
		"create": func() error {
			return pooltest.Second(f.pool.Create(t.Context(), blockdev.Spec{Ref: pooltest.Vol("c"), Name: "c", Size: 8 * pooltest.MiB}))
		},
		"grow": func() error { return pooltest.Second(f.pool.Expand(t.Context(), pooltest.Vol("b"), 16*pooltest.MiB)) },
	} {
		err := call()
		t.Logf("%s: %v", what, err)
		says(t, err, errdefs.ErrUnsupported, "does not zero", "lvchange --zero y")
	}
	f.poolIll("ThinPoolUnfit")
	if available := pooltest.CapacityOf(t, f.pool).Available; available != 0 {
		t.Errorf("%d bytes are available, of which nothing can be made", available)
	}
	drivertest.Run(t, "lvchange", "-q", "--zero", "y", f.group.Name+"/tp")
	f.poolIll()
	f.make(pooltest.Vol("c"), 48*pooltest.MiB)
	f.holds(pooltest.Vol("c"), 0, make([]byte, 48*pooltest.MiB))
}
