package lvmpool_test

import (
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
)

// TestLVMImportedClone: somebody has copied the disk of a group, and imported the copy beside it (vgimportclone), which gives that another name and UUID. The
// pools tell that one is a copy of the other.
func TestLVMImportedClone(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 64*pooltest.MiB)}
	f.url = f.group.URL() + "?reservePercent=0"
	f.start()
	f.make(pooltest.Vol("a"), 8*pooltest.MiB)
	f.restart() // lvm2 has told the UUID of the volume
	disk, copied := drivertest.Disk(t, 64*pooltest.MiB), f.group.Name+"-copied"
	drivertest.Run(t, "dd", "if="+f.group.Devices[0], "of="+disk, "bs=1M", "iflag=direct", "oflag=direct", "status=none")
	drivertest.Run(t, "vgimportclone", "-q", "-n", copied, disk)
	t.Cleanup(func() { drivertest.Run(t, "vgremove", "-q", "-f", "-y", copied) })
	other := pooltest.OpenURL(t, "lvm://"+copied+"?reservePercent=0")
	defer func() { check.OK(t, other.Close()) }()
	if a, b := f.pool.(blockdev.Identified).ID(), other.(blockdev.Identified).ID(); a == b {
		t.Errorf("both have the identity %s", a)
	}
	is := func(pool, of blockdev.Pool) bool { return pool.(blockdev.Copied).IsCopy(of) }
	if !is(other, f.pool) || !is(f.pool, other) {
		t.Error("a copy of a group is not known to be one")
	}
	check.OK(t, other.Delete(t.Context(), pooltest.Vol("a")))
	check.OK(t, pooltest.Second(other.Create(t.Context(), blockdev.Spec{Ref: pooltest.Vol("a"), Name: "a", Size: 8 * pooltest.MiB})))
	if is(other, f.pool) || is(f.pool, other) {
		t.Error("groups that share nothing count as copies")
	}
	check.OK(t, other.Delete(t.Context(), pooltest.Vol("a")))
	f.holds(pooltest.Vol("a"), 0, make([]byte, 8*pooltest.MiB))
}
