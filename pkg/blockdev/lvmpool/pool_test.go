package lvmpool_test

import (
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pools"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// TestLinearPool: LVM pools of linear volumes keep the contract of blockdev.Pool.
func TestLinearPool(t *testing.T) {
	g := drivertest.NewGroup(t, 768*pooltest.MiB)
	conform(t, g.URL())
	if volumes := g.Volumes(t); len(volumes) > 0 {
		t.Errorf("left behind: %v", volumes)
	}
}

// TestThinPool: LVM pools of thin volumes keep the contract of blockdev.Pool.
func TestThinPool(t *testing.T) {
	g := drivertest.NewGroup(t, 768*pooltest.MiB)
	conform(t, g.ThinPool(t, "tp", "-L", "512M", "--poolmetadatasize", "16M"))
	if volumes := g.Volumes(t); len(volumes) > 1 { // the thin pool
		t.Errorf("left behind: %v", volumes)
	}
}

func conform(t *testing.T, url string) {
	pooltest.Run(t, func(t testing.TB, _ string) blockdev.Pool { return pooltest.OpenURL(t, url) })
}

// TestLVMComesLater: the disk of a group, or of a thin pool, comes later than the driver. Volumes on other disks can be used meanwhile.
func TestLVMComesLater(t *testing.T) {
	group := drivertest.NewGroup(t, 64*pooltest.MiB, 64*pooltest.MiB)
	drivertest.Run(t, "lvcreate", "-q", "--type", "thin-pool", "-L", "48M", "--poolmetadatasize", "4M", "--poolmetadataspare", "n", "-n", "tp", group.Name, group.Devices[1])
	other := drivertest.NewGroup(t, 64*pooltest.MiB)
	urls := map[string]string{"linear": group.URL() + "?reservePercent=0", "thin": group.URL() + "/tp?reservePercent=0", "other": other.URL() + "?reservePercent=0"}
	refs := map[string]blockdev.Ref{"linear": pooltest.Vol("a"), "thin": pooltest.Vol("b"), "other": pooltest.Vol("c")}
	bytes := marked("a", 8*pooltest.MiB)
	for name, url := range urls {
		f := &lvmFixture{T: t, url: url, pool: pooltest.OpenURL(t, url)}
		f.make(refs[name], 16*pooltest.MiB)
		f.write(refs[name], 0, bytes)
		check.OK(t, f.pool.Close())
	}

	drivertest.Run(t, "vgchange", "-q", "-an", group.Name, other.Name)
	disks := map[string]string{}
	for _, disk := range []string{group.Devices[1], other.Devices[0]} {
		disks[disk] = drivertest.Run(t, "losetup", "-n", "-O", "BACK-FILE", disk)
		drivertest.Run(t, "losetup", "-d", disk)
	}
	late := map[string]*lvmFixture{}
	for name, url := range urls {
		pool, err := pools.OpenLazy(t.Context(), name, url, nil)
		check.OK(t, err)
		f := &lvmFixture{T: t, group: group, url: url, pool: pool}
		if name == "other" {
			f.group = other
		}
		t.Cleanup(func() { f.clear() })
		late[name] = f
	}
	late["linear"].holds(refs["linear"], 0, bytes)
	for _, name := range []string{"thin", "other"} {
		says(t, pooltest.Second(late[name].pool.Get(t.Context(), refs[name])), errdefs.ErrUnavailable, name)
		late[name].poolIll("PoolMissing")
	}
	for disk, image := range disks {
		drivertest.Run(t, "losetup", disk, image)
	}
	for name, f := range late {
		// A report may be some seconds old (lvmFresh).
		for deadline := time.Now().Add(time.Minute); len(f.pool.PoolHealth(t.Context())) > 0 && time.Now().Before(deadline); {
			time.Sleep(100 * time.Millisecond)
		}
		f.holds(refs[name], 0, bytes)
		f.poolIll()
		check.OK(t, f.pool.Delete(t.Context(), refs[name]))
	}
}
