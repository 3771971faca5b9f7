package node_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/node"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// once is a store where one raw volume can be attached, once: as if afterwards the home of the volume wanted another connection.
type once struct {
	*volume.Local
	attached bool
}

func (o *once) AttachRaw(ctx context.Context, v volume.Volume, key volume.Key, writable bool) (blockdev.Device, error) {
	if o.attached {
		return blockdev.Device{}, errdefs.ErrInUse
	}
	o.attached = true
	return o.Local.AttachRaw(ctx, v, key, writable)
}

// TestStageBound: a raw volume that is staged or published already is staged or published again, as the kubelet does after a start. That succeeds and does not attach it again: pods may
// use it by a connection that could not be made now. In another way, or at another place, it is refused.
func TestStageBound(t *testing.T) {
	mounts, err := mount.LoadTable()
	check.OK(t, err)
	f := start(t, node.Options{})
	store := &once{Local: f.store}
	f.Server = node.New(t.Context(), store, mounts, node.Options{})
	id, staging := f.create("v", block), f.mkdir("staging")
	request := func() *csi.NodeStageVolumeRequest {
		return &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: capability(block)}
	}
	for range 2 {
		_, err = f.NodeStageVolume(t.Context(), request())
		check.OK(t, err)
	}
	refuses := drivertest.Refuses(t, f.NodeStageVolume, request)
	target := filepath.Join(t.TempDir(), "target")
	publish := &csi.NodePublishVolumeRequest{VolumeId: id, StagingTargetPath: staging, TargetPath: target, VolumeCapability: capability(block)}
	store.attached = false
	for range 2 {
		_, err = f.NodePublishVolume(t.Context(), publish)
		check.OK(t, err)
	}
	_, err = f.NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target})
	check.OK(t, err)
	refuses("a reader of what is bound for writing", func(r *csi.NodeStageVolumeRequest) {
		r.VolumeCapability.AccessMode.Mode = csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY
	}, errdefs.ErrExists, "with read-only false")
	refuses("another place", func(r *csi.NodeStageVolumeRequest) { r.StagingTargetPath = f.mkdir("other") }, errdefs.ErrInUse, "staged")
	_, err = f.NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
	check.OK(t, err)
	_, err = f.NodeStageVolume(t.Context(), request())
	if err == nil {
		t.Error("what is not bound any more is not attached")
	}
	check.OK(t, os.Remove(staging))
}
