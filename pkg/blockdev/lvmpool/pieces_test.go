package lvmpool_test

import (
	"fmt"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lvmpool"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
)

// TestLVMGrowsIntoPieces: what is free in a group is in many pieces, as small volumes were deleted. A volume grows into them.
func TestLVMGrowsIntoPieces(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 601*pooltest.MiB)} // 150 extents
	f.url = f.group.URL() + "?reservePercent=0"
	remove := []string{"lvremove", "-q", "-f"}
	for i := range 148 {
		name := fmt.Sprint("small", i)
		drivertest.Run(t, "lvcreate", "-q", "-an", "-Wn", "-Zn", "-l", "1", "-n", name, f.group.Name)
		if i%2 == 1 {
			remove = append(remove, f.group.Name+"/"+name)
		}
	}
	drivertest.Run(t, remove...)
	f.start()
	f.make(pooltest.Vol("a"), 8*pooltest.MiB)
	f.write(pooltest.Vol("a"), 0, marked("a", 8*pooltest.MiB))
	for range 2 {
		if _, err := f.pool.Expand(t.Context(), pooltest.Vol("a"), 260*pooltest.MiB); err != nil {
			t.Errorf("%.300s", err.Error())
		}
		lvmpool.Age(f.pool)
		t.Logf("capacity %+v", pooltest.CapacityOf(t, f.pool))
	}
	f.holds(pooltest.Vol("a"), 0, append(marked("a", 8*pooltest.MiB), make([]byte, 252*pooltest.MiB)...))
	check.OK(t, f.pool.Delete(t.Context(), pooltest.Vol("a")))
}
