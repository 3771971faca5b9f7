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

// Volume is a volume, and how it is used. Each method makes one call; Up and Down make several.
type Volume struct {
	*Client
	ID, Name   string
	Capability *csi.VolumeCapability
	Size       int64 // bytes, as Create was answered
	// Staging is its staging path; an inline ephemeral volume has none.
	Staging string
	// Attributes of an inline ephemeral volume; of others none.
	Attributes map[string]string
	// Secrets are what the calls bring that stage the volume, publish it if it is ephemeral, and grow it on the node.
	Secrets map[string]string
	// PublishContext is what Claim was answered.
	PublishContext map[string]string
}

// Block reports whether it is used as a raw device.
func (v *Volume) Block() bool { return v.Capability.GetBlock() != nil }

// Target is the path at which a pod has the volume; the directory that it is in is made.
func (v *Volume) Target(pod string) string {
	target := filepath.Join(v.Dir, pod, v.Name)
	_ = os.MkdirAll(filepath.Dir(target), 0o750) // without it, the driver says so
	return target
}

// File is the volume's bytes, or a file in its filesystem, where it is published.
func (v *Volume) File(target string) string {
	if v.Block() {
		return target
	}
	return filepath.Join(target, "data")
}

// Claim has the driver give the volume to the node.
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

// StageRequest is what Stage asks for.
func (v *Volume) StageRequest() *csi.NodeStageVolumeRequest {
	return &csi.NodeStageVolumeRequest{VolumeId: v.ID, StagingTargetPath: v.Staging, VolumeCapability: v.Capability, PublishContext: v.PublishContext, Secrets: v.Secrets}
}

// Stage makes the staging directory if it is not there, and stages the volume.
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

// PublishRequest is what Publish asks for.
func (v *Volume) PublishRequest(target string, readOnly bool) *csi.NodePublishVolumeRequest {
	var secrets map[string]string
	if v.Staging == "" {
		secrets = v.Secrets
	}
	return &csi.NodePublishVolumeRequest{VolumeId: v.ID, StagingTargetPath: v.Staging, TargetPath: target, VolumeCapability: v.Capability,
		PublishContext: v.PublishContext, VolumeContext: v.Attributes, Readonly: readOnly, Secrets: secrets}
}

// Publish publishes the volume at a target, whose directory has to be there.
func (v *Volume) Publish(ctx context.Context, target string, readOnly bool) error {
	_, err := v.NodePublishVolume(ctx, v.PublishRequest(target, readOnly))
	return err
}

// Unpublish undoes Publish.
func (v *Volume) Unpublish(ctx context.Context, target string) error {
	_, err := v.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: v.ID, TargetPath: target})
	return err
}

// Up claims, stages and publishes the volume, and returns the target, that of a pod named "pod".
func (v *Volume) Up(ctx context.Context) (target string, err error) {
	target = v.Target("pod")
	return target, InTurn(
		func() error { return v.Claim(ctx) },
		func() error { return v.Stage(ctx) },
		func() error { return v.Publish(ctx, target, false) })
}

// Down takes the volume from its targets, unstages and releases it. What the driver, and the CO, made for that is gone then.
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
	if err := os.Remove(v.Staging); err != nil && !errors.Is(err, fs.ErrNotExist) { // it has to be empty
		return err
	}
	return v.Release(ctx)
}

// Delete deletes the volume.
func (v *Volume) Delete(ctx context.Context) error {
	_, err := v.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.ID})
	return err
}

// Expand grows the volume to a size (bytes), which has to be what it has then.
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

// NodeExpand grows the filesystem of the volume, which is at a path.
func (v *Volume) NodeExpand(ctx context.Context, path string) error {
	_, err := v.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{VolumeId: v.ID, VolumePath: path, StagingTargetPath: v.Staging, VolumeCapability: v.Capability, Secrets: v.Secrets})
	return err
}

// Snapshot cuts the volume. The snapshot has to be ready.
func (v *Volume) Snapshot(ctx context.Context, name string) (*csi.Snapshot, error) {
	response, err := v.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: v.ID})
	if err == nil && !response.GetSnapshot().GetReadyToUse() {
		err = fmt.Errorf("snapshot %s is not ready: %v", name, response)
	}
	return response.GetSnapshot(), err
}
