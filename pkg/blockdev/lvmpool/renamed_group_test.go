package lvmpool_test

import (
	"os"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lvmpool"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
)

// TestLVMAnotherGroup: while the pool is open, somebody renames its group and makes another one of that name. No volume counts as gone, and none as deleted
// that is still there.
func TestLVMAnotherGroup(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 64*pooltest.MiB)}
	f.url = f.group.URL() + "?reservePercent=0"
	f.start()
	f.make(pooltest.Vol("a"), 8*pooltest.MiB)
	f.write(pooltest.Vol("a"), 0, marked("secret", 8*pooltest.MiB))
	disk := drivertest.Disk(t, 64*pooltest.MiB)
	check.OK(t, f.stack(pooltest.Vol("a")).Detach(t.Context()))
	drivertest.Run(t, "vgrename", "-q", f.group.Name, f.group.Name+"-old")
	check.OK(t, os.RemoveAll("/dev/"+f.group.Name)) // as udev does
	drivertest.Run(t, "vgcreate", "-q", f.group.Name, disk)
	lvmpool.Age(f.pool)
	problems, err := f.pool.Health(t.Context(), pooltest.Vol("a"))
	t.Logf("health: %v, %v", problems, err)
	if len(problems) > 0 && problems[0].Reason == "VolumeMissing" {
		t.Error("a volume of a group that was renamed counts as lost")
	}
	err = f.pool.Erase(t.Context(), pooltest.Vol("a"))
	t.Logf("erase: %v", err)
	drivertest.Run(t, "vgremove", "-q", "-f", "-y", f.group.Name)
	check.OK(t, os.RemoveAll("/dev/"+f.group.Name))
	drivertest.Run(t, "vgrename", "-q", f.group.Name+"-old", f.group.Name)
	f.restart()
	if records := f.all(); err == nil && len(records) > 0 {
		t.Errorf("a volume that was erased, as the pool said, is there: %v", records)
		f.holds(pooltest.Vol("a"), 0, make([]byte, 4096))
	}
}
