package co

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

// Volume is a volume and how it is used. Each method makes one call; Up and Down make several.
type Volume struct {
	*Client
	ID, Name   string
	Capability *csi.VolumeCapability
	Size       int64 // bytes, by the answer to Create
	// Staging is its staging path; empty for an inline ephemeral volume.
	Staging string
	// Attributes are those of an inline ephemeral volume.
	Attributes map[string]string
	// Secrets are sent with the calls that stage the volume, publish it if it is ephemeral, and expand it on the node.
	Secrets map[string]string
	// PublishContext is from the answer to Claim.
	PublishContext map[string]string
}

// Block reports whether the volume is used as a raw device.
func (v *Volume) Block() bool { return v.Capability.GetBlock() != nil }

// Target returns the path at which a pod gets the volume. Its parent directory is made.
func (v *Volume) Target(pod string) string {
	target := filepath.Join(v.Dir, pod, v.Name)
	_ = os.MkdirAll(filepath.Dir(target), 0o750) // if that fails, the driver fails too
	return target
}

// File returns the path of the device, or of a file in the filesystem, at a target.
func (v *Volume) File(target string) string {
	if v.Block() {
		return target
	}
	return filepath.Join(target, "data")
}

// Claim publishes the volume to the node (ControllerPublishVolume).
func (v *Volume) Claim(ctx context.Context) error {
	response, err := v.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{VolumeId: v.ID, NodeId: v.Node, VolumeCapability: v.Capability})
	v.PublishContext = response.GetPublishContext()
	return err
}

// Release undoes Claim.
func (v *Volume) Release(ctx context.Context) error {
	_, err := v.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: v.ID, NodeId: v.Node})
	return err
}

// StageRequest returns the request of Stage.
func (v *Volume) StageRequest() *csi.NodeStageVolumeRequest {
	return &csi.NodeStageVolumeRequest{VolumeId: v.ID, StagingTargetPath: v.Staging, VolumeCapability: v.Capability, PublishContext: v.PublishContext, Secrets: v.Secrets}
}

// Stage makes the staging directory if need be, and stages the volume.
func (v *Volume) Stage(ctx context.Context) error {
	if err := os.MkdirAll(filepath.Dir(v.Staging), 0o750); err != nil {
		return err
	}
	if err := os.Mkdir(v.Staging, 0o750); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	_, err := v.NodeStageVolume(ctx, v.StageRequest())
	return err
}

// Unstage undoes Stage; the directory stays.
func (v *Volume) Unstage(ctx context.Context) error {
	_, err := v.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: v.ID, StagingTargetPath: v.Staging})
	return err
}

// PublishRequest returns the request of Publish.
func (v *Volume) PublishRequest(target string, readOnly bool) *csi.NodePublishVolumeRequest {
	var secrets map[string]string
	if v.Staging == "" {
		secrets = v.Secrets
	}
	return &csi.NodePublishVolumeRequest{VolumeId: v.ID, StagingTargetPath: v.Staging, TargetPath: target, VolumeCapability: v.Capability,
		PublishContext: v.PublishContext, VolumeContext: v.Attributes, Readonly: readOnly, Secrets: secrets}
}

// Publish publishes the volume at a target, whose parent directory has to exist.
func (v *Volume) Publish(ctx context.Context, target string, readOnly bool) error {
	_, err := v.NodePublishVolume(ctx, v.PublishRequest(target, readOnly))
	return err
}

// Unpublish undoes Publish.
func (v *Volume) Unpublish(ctx context.Context, target string) error {
	_, err := v.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: v.ID, TargetPath: target})
	return err
}

// Up claims, stages and publishes the volume, and returns the target: that of a pod named "pod".
func (v *Volume) Up(ctx context.Context) (target string, err error) {
	target = v.Target("pod")
	return target, InTurn(
		func() error { return v.Claim(ctx) },
		func() error { return v.Stage(ctx) },
		func() error { return v.Publish(ctx, target, false) })
}

// Down unpublishes the volume from targets, unstages and releases it. It fails if a target or something in the staging directory is left.
func (v *Volume) Down(ctx context.Context, targets ...string) error {
	for _, target := range targets {
		if err := v.Unpublish(ctx, target); err != nil {
			return err
		}
		if _, err := os.Lstat(target); !errors.Is(err, fs.ErrNotExist) {
			return errors.Join(fmt.Errorf("the target %s is still there after NodeUnpublishVolume", target), err)
		}
	}
	if err := v.Unstage(ctx); err != nil {
		return err
	}
	if err := os.Remove(v.Staging); err != nil && !errors.Is(err, fs.ErrNotExist) { // fails if it is not empty
		return err
	}
	return v.Release(ctx)
}

// Delete deletes the volume.
func (v *Volume) Delete(ctx context.Context) error {
	_, err := v.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.ID})
	return err
}

// Expand expands the volume to size bytes, and checks the answer.
func (v *Volume) Expand(ctx context.Context, size int64) error {
	response, err := v.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{VolumeId: v.ID,
		CapacityRange: &csi.CapacityRange{RequiredBytes: size}, VolumeCapability: v.Capability})
	if err != nil {
		return err
	}
	if has := response.GetCapacityBytes(); has != size {
		return fmt.Errorf("volume %s was expanded to %d bytes, not %d", v.Name, has, size)
	}
	if want := !v.Block() || len(v.Secrets) > 0; response.GetNodeExpansionRequired() != want {
		return fmt.Errorf("node_expansion_required of volume %s is %v", v.Name, !want)
	}
	return nil
}

// NodeExpand expands the volume on the node, where it is at a path.
func (v *Volume) NodeExpand(ctx context.Context, path string) error {
	_, err := v.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{VolumeId: v.ID, VolumePath: path, StagingTargetPath: v.Staging, VolumeCapability: v.Capability, Secrets: v.Secrets})
	return err
}

// Snapshot makes a snapshot of the volume. It fails unless that is ready at once.
func (v *Volume) Snapshot(ctx context.Context, name string) (*csi.Snapshot, error) {
	response, err := v.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: v.ID})
	if err == nil && !response.GetSnapshot().GetReadyToUse() {
		err = fmt.Errorf("snapshot %s is not ready: %v", name, response)
	}
	return response.GetSnapshot(), err
}
