package life

import (
	"os"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

// TestPoolGoneFromFlags: what is in a pool that the driver was started without is neither deleted
// nor released, whatever is asked; an ID of another grammar never was a volume.
func TestPoolGoneFromFlags(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := newDir(t)
	a, b := "a=file://"+dir+"/a?reservePercent=0", "b=file://"+dir+"/b?reservePercent=0"
	d := start(t, drivertest.Options{Dir: dir, Pools: []string{a, b}})
	r := co.Request("volume", block, smallest[block])
	r.Parameters = map[string]string{"pool": "b"}
	v := d.made(r)
	s, err := d.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: v.ID})
	check.Code(t, err, codes.OK)
	group, err := d.CreateVolumeGroupSnapshot(t.Context(), &csi.CreateVolumeGroupSnapshotRequest{Name: "g", SourceVolumeIds: []string{v.ID}})
	check.Code(t, err, codes.OK)
	check.Code(t, v.claim(), codes.OK)
	d.Stop()

	d = start(t, drivertest.Options{Dir: dir, Pools: []string{a}})
	without := d.volume(v.ID, v.Name, v.Capability)
	members := []string{group.GetGroupSnapshot().GetSnapshots()[0].GetSnapshotId()}
	deleteGroup := func(d *driver) error {
		_, err := d.DeleteVolumeGroupSnapshot(t.Context(), &csi.DeleteVolumeGroupSnapshotRequest{
			GroupSnapshotId: group.GetGroupSnapshot().GetGroupSnapshotId(), SnapshotIds: members})
		return err
	}
	for what, err := range map[string]error{"delete": without.delete(), "release": without.release(), "claim": without.claim(), "expand": without.expand(2 << 20),
		"delete snapshot": d.deleteSnapshot(s.GetSnapshot().GetSnapshotId()), "delete group": deleteGroup(d),
		"modify":   second(d.ControllerModifyVolume(t.Context(), &csi.ControllerModifyVolumeRequest{VolumeId: v.ID, MutableParameters: map[string]string{"readAheadKiB": "64"}})),
		"snapshot": second(without.snapshot("other")), "clone": second(d.create(co.FromVolume(co.Request("clone", block, smallest[block]), v.ID)))} {
		if status.Code(err) != codes.Unavailable {
			t.Errorf("%s of what is in a pool that is not in the flags: %v", what, err)
		}
	}
	check.Code(t, d.volume("some-other-driver's", "", nil).delete(), codes.OK)
	check.Code(t, d.deleteSnapshot("some-other-driver's"), codes.OK)
	d.Stop()

	d = start(t, drivertest.Options{Dir: dir, Pools: []string{a, b}})
	back := d.volume(v.ID, v.Name, v.Capability)
	check.Code(t, back.delete(), codes.FailedPrecondition, "claimed")
	check.OK(t, back.release())
	check.OK(t, d.deleteSnapshot(s.GetSnapshot().GetSnapshotId()))
	check.OK(t, deleteGroup(d))
	check.OK(t, back.delete())
	for _, directory := range []string{"volumes", "snapshots"} {
		if left, err := os.ReadDir(dir + "/b/" + directory); err != nil || len(left) > 0 {
			t.Errorf("left are %v, %v", left, err)
		}
	}
}
