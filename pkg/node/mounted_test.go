package node_test

import (
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/node"
)

// TestWholeLife: each call in the life of a volume on its node has the same answer when it is made twice, and is refused if it asks for something else. In the
// end nothing is left.
func TestWholeLife(t *testing.T) {
	drivertest.NeedRoot(t)
	for _, access := range []string{"ext4", block} {
		t.Run(access, func(t *testing.T) {
			f := start(t, node.Options{})
			id, staging, target := f.create("v", access), f.mkdir("staging"), f.path("target")
			stage := func() *csi.NodeStageVolumeRequest {
				return &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: capability(access)}
			}
			publish := func() *csi.NodePublishVolumeRequest {
				return &csi.NodePublishVolumeRequest{VolumeId: id, StagingTargetPath: staging, TargetPath: target, VolumeCapability: capability(access)}
			}
			drivertest.Twice(t, f.NodeStageVolume, stage())
			f.refusesOtherStages(stage, access)
			drivertest.Twice(t, f.NodePublishVolume, publish())
			f.refusesOtherTargets(publish, access)

			for _, path := range []string{staging, target} {
				drivertest.Twice(t, f.NodeGetVolumeStats, &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: path})
				grown := drivertest.Twice(t, f.NodeExpandVolume, &csi.NodeExpandVolumeRequest{VolumeId: id, VolumePath: path})
				if grown.GetCapacityBytes() != 16*pooltest.MiB {
					t.Errorf("at %s it has %v", path, grown)
				}
			}
			grow := drivertest.Refuses(t, f.NodeExpandVolume, func() *csi.NodeExpandVolumeRequest {
				return &csi.NodeExpandVolumeRequest{VolumeId: id, VolumePath: target, CapacityRange: &csi.CapacityRange{RequiredBytes: 17 * pooltest.MiB}}
			})
			grow("grow before its controller did", func(*csi.NodeExpandVolumeRequest) {}, errdefs.ErrOutOfRange, "expand it at the controller first")
			unstage := drivertest.Refuses(t, f.NodeUnstageVolume, func() *csi.NodeUnstageVolumeRequest {
				return &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging}
			})
			unstage("unstage what is published", func(*csi.NodeUnstageVolumeRequest) {}, errdefs.ErrInUse, "still published at "+target)
			unpublish := drivertest.Refuses(t, f.NodeUnpublishVolume, func() *csi.NodeUnpublishVolumeRequest {
				return &csi.NodeUnpublishVolumeRequest{VolumeId: f.create("other", access), TargetPath: target}
			})
			unpublish("unpublish another one", func(*csi.NodeUnpublishVolumeRequest) {}, errdefs.ErrPrecondition, "is not this volume but /dev/")

			drivertest.Twice(t, f.NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target})
			drivertest.Twice(t, f.NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
			if left := drivertest.Gone(func() []string { return drivertest.Leftovers(f.dir) }); len(left) > 0 {
				t.Errorf("left: %v", left)
			}
		})
	}
}

// refusesOtherStages makes sure that a volume that is staged by the request right is not staged in another way.
func (f fixture) refusesOtherStages(right func() *csi.NodeStageVolumeRequest, access string) {
	f.t.Helper()
	type request = *csi.NodeStageVolumeRequest
	refuses := drivertest.Refuses(f.t, f.NodeStageVolume, right)
	readOnly := csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY
	second := f.mkdir("second")
	refuses("stage at a second path", func(r request) { r.StagingTargetPath = second }, errdefs.ErrInUse, "a volume has one staging path")
	refuses("stage for reading only", func(r request) { r.VolumeCapability.AccessMode.Mode = readOnly }, errdefs.ErrExists, right().GetStagingTargetPath())
	if access == block {
		refuses("stage as a filesystem", func(r request) { r.VolumeCapability = capability("ext4") }, errdefs.ErrInUse, "a volume has one staging path")
		return
	}
	refuses("stage as another filesystem", func(r request) { r.VolumeCapability = capability("xfs") }, errdefs.ErrExists, "as ext4")
	refuses("stage with other flags", func(r request) { r.VolumeCapability.GetMount().MountFlags = []string{"noatime"} }, errdefs.ErrExists, "with other mount flags")
	refuses("stage as a device", func(r request) { r.VolumeCapability = capability(block) }, errdefs.ErrExists, "as a filesystem")
}

// refusesOtherTargets makes sure that a volume that is published by the request right is not published in another way, but is at a second target.
func (f fixture) refusesOtherTargets(right func() *csi.NodePublishVolumeRequest, access string) {
	f.t.Helper()
	type request = *csi.NodePublishVolumeRequest
	refuses := drivertest.Refuses(f.t, f.NodePublishVolume, right)
	target := right().GetTargetPath()
	refuses("publish for reading only", func(r request) { r.Readonly = true }, errdefs.ErrExists, target)
	refuses("publish as the only target", func(r request) {
		r.TargetPath, r.VolumeCapability.AccessMode.Mode = f.path("second target"), csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
	}, errdefs.ErrInUse, "allows one target, and it is published at "+target)
	other := map[string]string{"ext4": block, block: "ext4"}[access]
	refuses("publish with other access", func(r request) { r.VolumeCapability = capability(other) }, errdefs.ErrPrecondition, "it is not staged at")
	if access == "ext4" {
		refuses("publish as another filesystem", func(r request) { r.VolumeCapability = capability("btrfs") }, errdefs.ErrPrecondition, "staged as ext4, not as btrfs")
	}
	// A second target is not refused, as several pods of the node may write to the volume.
	second := right()
	second.TargetPath = f.path("second target")
	drivertest.Twice(f.t, f.NodePublishVolume, second)
	drivertest.Twice(f.t, f.NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: second.GetVolumeId(), TargetPath: second.GetTargetPath()})
}

// TestEphemeralLife: publishing an inline ephemeral volume makes it, once, and unpublishing deletes it.
func TestEphemeralLife(t *testing.T) {
	drivertest.NeedRoot(t)
	f := start(t, node.Options{Ephemeral: node.Ephemeral{Pools: []string{"slow"}, MaxSize: 32 * pooltest.MiB}})
	type request = *csi.NodePublishVolumeRequest
	right := func() request {
		return &csi.NodePublishVolumeRequest{VolumeId: "csi-1", TargetPath: f.path("target"), VolumeCapability: capability("ext4"),
			VolumeContext: map[string]string{"csi.storage.k8s.io/ephemeral": "true", "size": "16Mi"}}
	}
	drivertest.Twice(t, f.NodePublishVolume, right())
	refuses := drivertest.Refuses(t, f.NodePublishVolume, right)
	refuses("of another size", func(r request) { r.VolumeContext["size"] = "20Mi" }, errdefs.ErrExists, "has size 16777216")
	refuses("for another pod", func(r request) { r.TargetPath = f.path("other") }, errdefs.ErrExists, f.path("target"))
	v, err := f.store.Ephemeral(t.Context(), "csi-1")
	if check.OK(t, err); v.ID.Pool != "slow" || v.Ephemeral != f.path("target") || v.Size != 16*pooltest.MiB {
		t.Errorf("it is %+v", v)
	}
	drivertest.Twice(t, f.NodeGetVolumeHealth, &csi.NodeGetVolumeHealthRequest{VolumeId: "csi-1"})
	drivertest.Twice(t, f.NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: "csi-1", TargetPath: f.path("target")})
	_, err = f.store.Ephemeral(t.Context(), "csi-1")
	pooltest.Fails(t, err, errdefs.ErrNotFound, "an ephemeral volume whose pod is gone")
}
