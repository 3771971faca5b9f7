package node_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/node"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// TestRefusedStageLeavesNothing: a stage that is refused leaves neither a mount nor a device. After such an answer the kubelet takes the volume for not
// staged: it does not unstage it, and what was left would keep the volume from being deleted.
func TestRefusedStageLeavesNothing(t *testing.T) {
	drivertest.NeedRoot(t)
	f := start(t, node.Options{})
	id, staging := f.create("v", block), f.mkdir("staging")
	device := filepath.Join(staging, "device")
	t.Run("its device cannot be bound", func(t *testing.T) {
		check.OK(t, os.Mkdir(device, 0o700))
		refuses := drivertest.Refuses(t, f.NodeStageVolume, func() *csi.NodeStageVolumeRequest { return f.stage(id, block) })
		refuses("stage", func(*csi.NodeStageVolumeRequest) {}, errdefs.ErrPrecondition, device)
		f.notAttached(id)
		check.OK(t, os.Remove(device))
	})
	t.Run("its filesystem cannot grow", func(t *testing.T) {
		if !filesystem.GrowsMounted(filesystem.Ext4) {
			t.Skip("this process may not grow an ext4 that is mounted")
		}
		drivertest.Twice(t, f.NodeStageVolume, f.stage(id, block))
		drivertest.Run(t, "mkfs.ext4", "-q", "-b", "4096", "-O", "sparse_super2,^resize_inode", device, "2048")
		drivertest.Twice(t, f.NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
		_, err := f.NodeStageVolume(t.Context(), f.stage(id, "ext4"))
		if err == nil || !strings.Contains(err.Error(), "grow the ext4 filesystem") {
			t.Errorf("staged: %v", err)
		}
		f.notAttached(id)
	})
	if left := drivertest.Gone(func() []string { return drivertest.Leftovers(f.dir) }); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// stage is the request to stage a volume at the path staging of the fixture.
func (f fixture) stage(id, access string) *csi.NodeStageVolumeRequest {
	return &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: f.path("staging"), VolumeCapability: capability(access)}
}

// notAttached makes sure that a volume has no device.
func (f fixture) notAttached(text string) {
	f.t.Helper()
	id, err := volume.ParseID(text)
	check.OK(f.t, err)
	devices, err := f.store.Attached(f.t.Context(), id)
	check.OK(f.t, err)
	if len(devices) > 0 {
		f.t.Errorf("it is attached as %v", devices)
	}
}

// TestExpandBesideAPodThatIsGone: of a raw volume that two pods have, the kubelet names the path of the pod that came last, also after that has gone. The
// volume is found by its staging path then.
func TestExpandBesideAPodThatIsGone(t *testing.T) {
	drivertest.NeedRoot(t)
	f := start(t, node.Options{})
	id, staging := f.create("v", block), f.mkdir("staging")
	drivertest.Twice(t, f.NodeStageVolume, f.stage(id, block))
	for _, target := range []string{f.path("first"), f.path("last")} {
		drivertest.Twice(t, f.NodePublishVolume, &csi.NodePublishVolumeRequest{VolumeId: id, StagingTargetPath: staging, TargetPath: target, VolumeCapability: capability(block)})
	}
	drivertest.Twice(t, f.NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: f.path("last")})
	request := func() *csi.NodeExpandVolumeRequest {
		return &csi.NodeExpandVolumeRequest{VolumeId: id, VolumePath: f.path("last"), StagingTargetPath: staging}
	}
	if grown := drivertest.Twice(t, f.NodeExpandVolume, request()); grown.GetCapacityBytes() != 16*pooltest.MiB {
		t.Errorf("it has %v", grown)
	}
	refuses := drivertest.Refuses(t, f.NodeExpandVolume, request)
	refuses("without a staging path", func(r *csi.NodeExpandVolumeRequest) { r.StagingTargetPath = "" }, errdefs.ErrNotFound, "is not at "+f.path("last"))
	refuses("with another one", func(r *csi.NodeExpandVolumeRequest) { r.StagingTargetPath = f.path("nowhere") }, errdefs.ErrNotFound, "is not at "+f.path("nowhere"))
	drivertest.Twice(t, f.NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: f.path("first")})
	drivertest.Twice(t, f.NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
	f.notAttached(id)
}
