package lvmpool_test

import (
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lvmpool"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
)

// The steps of docs/runbooks for LVM pools. TestLVMNeedsCheck, TestLVMThinPoolFull and TestLVMMissingDevice do the others.

// TestLVMRunbookDiskIsDead: a disk is given up. The volumes on it are lost, and no others, and the pool makes volumes again, without a restart.
func TestLVMRunbookDiskIsDead(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 64*pooltest.MiB, 64*pooltest.MiB)}
	f.url = f.group.URL() + "?reservePercent=0"
	f.start()
	f.make(pooltest.Vol("a"), 60*pooltest.MiB) // all of the first disk
	f.write(pooltest.Vol("a"), 0, marked("a", 8*pooltest.MiB))
	f.make(pooltest.Vol("b"), 16*pooltest.MiB)
	drivertest.Run(t, "losetup", "-d", f.group.Devices[1])
	lvmpool.Age(f.pool)
	f.poolIll("DeviceMissing")
	f.ill(pooltest.Vol("b"), "DeviceMissing")

	drivertest.Run(t, "vgcfgbackup", "-q", "-f", t.TempDir()+"/backup", f.group.Name)
	drivertest.Run(t, "vgreduce", "-q", "--removemissing", "--force", f.group.Name)
	lvmpool.Age(f.pool)
	f.poolIll()
	f.ill(pooltest.Vol("a"))
	f.ill(pooltest.Vol("b"), "VolumeMissing")
	f.holds(pooltest.Vol("a"), 0, marked("a", 8*pooltest.MiB))
	check.OK(t, f.pool.Delete(t.Context(), pooltest.Vol("b")))
	another := drivertest.Disk(t, 64*pooltest.MiB)
	drivertest.Run(t, "pvcreate", "-q", another)
	drivertest.Run(t, "vgextend", "-q", f.group.Name, another)
	lvmpool.Age(f.pool)
	f.make(pooltest.Vol("c"), 16*pooltest.MiB)
	f.restart()
	f.poolIll()
	f.clear()
	drivertest.Run(t, "vgreduce", "-q", f.group.Name, another)
}

// TestLVMRunbookRepair: a volume that nobody uses can be brought up, repaired and taken down again by hand.
func TestLVMRunbookRepair(t *testing.T) {
	onLVM(t, func(f *lvmFixture) {
		f.make(pooltest.Vol("a"), 16*pooltest.MiB)
		path := f.path(pooltest.Vol("a"))
		drivertest.Run(f, "lvchange", "-q", "-ay", "-K", path)
		drivertest.Run(f, "mkfs.ext4", "-q", "/dev/"+path)
		drivertest.Run(f, "e2fsck", "-f", "-y", "/dev/"+path)
		drivertest.Run(f, "lvchange", "-q", "-an", path)
		f.ill(pooltest.Vol("a"))
		f.attached(pooltest.Vol("a"), false, func(device string) { drivertest.Run(f, "e2fsck", "-f", "-n", device) })
	})
}

// TestLVMRunbookRenamed: a volume that was renamed can be used again when it has its name back.
func TestLVMRunbookRenamed(t *testing.T) {
	onLVM(t, func(f *lvmFixture) {
		f.make(pooltest.Vol("a"), 16*pooltest.MiB)
		f.write(pooltest.Vol("a"), 0, marked("a", 8*pooltest.MiB))
		check.OK(f, f.pool.Close())
		drivertest.Run(f, "lvrename", "-q", f.group.Name, pooltest.Vol("a").String(), "mine")
		f.pool = pooltest.OpenURL(f, f.url)
		f.poolIll("VolumeRenamed")
		drivertest.Run(f, "lvrename", "-q", f.group.Name, "mine", pooltest.Vol("a").String())
		f.restart()
		f.poolIll()
		f.ill(pooltest.Vol("a"))
		f.holds(pooltest.Vol("a"), 0, marked("a", 8*pooltest.MiB))
	})
}
