package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// NodePublishVolume binds a staged volume to the target path, or makes an inline
// ephemeral volume and mounts it there.
func (s *Server) NodePublishVolume(ctx context.Context, r *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	if err := required(r.GetVolumeId(), "target path", r.GetTargetPath()); err != nil {
		return nil, err
	}
	u, err := useOf(r.GetVolumeCapability(), r.GetPublishContext(), r.GetReadonly())
	if err != nil {
		return nil, err
	}
	if csimap.IsEphemeral(r.GetVolumeContext()) {
		err = s.publishEphemeral(ctx, r, u)
	} else {
		err = s.publish(ctx, r, u)
	}
	if err != nil {
		return nil, fmt.Errorf("publish volume %s at %s: %w", r.GetVolumeId(), r.GetTargetPath(), err)
	}
	return &csi.NodePublishVolumeResponse{}, nil
}

func (s *Server) publish(ctx context.Context, r *csi.NodePublishVolumeRequest, u use) error {
	id, err := volume.ParseID(r.GetVolumeId())
	if err != nil {
		return err
	}
	v, err := s.volumes.Get(ctx, id)
	if err != nil {
		return err
	}
	if r.GetStagingTargetPath() == "" {
		return fmt.Errorf("%w: the request has no staging target path; stage the volume first", blockdev.ErrPrecondition)
	}
	if err := mount.CleanPath(r.GetStagingTargetPath()); err != nil {
		return err
	}
	staged := r.GetStagingTargetPath()
	if u.block {
		staged = marker(staged)
	}
	at, err := s.here(ctx, id, staged)
	if errors.Is(err, blockdev.ErrNotFound) || (err == nil && at.Node != u.block) {
		return fmt.Errorf("%w: it is not staged at %s for this access", blockdev.ErrPrecondition, r.GetStagingTargetPath())
	}
	if err != nil {
		return err
	}
	if u.exclusive {
		if err := s.alone(ctx, id, staged, r.GetTargetPath()); err != nil {
			return err
		}
	}
	if u.block {
		return s.publishBlock(ctx, v, r.GetTargetPath(), u)
	}
	return s.publishMount(staged, at.Info, r.GetTargetPath(), u)
}

// alone makes sure that a volume is published nowhere else.
func (s *Server) alone(ctx context.Context, id volume.ID, staged, target string) error {
	devices, err := s.volumes.Attached(ctx, id)
	if err != nil {
		return err
	}
	for _, device := range devices {
		for _, path := range s.mounts.Paths(device.Number) {
			if path != staged && path != target {
				return fmt.Errorf("%w: its access mode SINGLE_NODE_SINGLE_WRITER allows one target, and it is published at %s", blockdev.ErrInUse, path)
			}
		}
	}
	return nil
}

// publishMount binds the folder of a staged filesystem.
func (s *Server) publishMount(staged string, info mount.Info, target string, u use) (err error) {
	made, err := mount.MakeTarget(target, false)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil && made {
			err = errors.Join(err, mount.RemoveTarget(target))
		}
	}()
	readOnly := u.readOnly || info.ReadOnly
	there, err := look(target)
	if err != nil {
		return err
	}
	if there.Root {
		if there.Device != info.Device || there.Node {
			return fmt.Errorf("%w: something else is mounted there", blockdev.ErrExists)
		}
		if there.ReadOnly != readOnly {
			return fmt.Errorf("%w: it is published there with read-only %v", blockdev.ErrExists, there.ReadOnly)
		}
		return nil
	}
	if err := mount.Bind(staged, target, readOnly); err != nil {
		return err
	}
	s.mounts.Add(info.Device, target, !readOnly)
	return nil
}

// publishBlock binds the device of a staged block volume. A bind cannot keep anybody from
// writing to a device, so a read-only publication gets a device of its own that takes no
// writes; it goes when the volume is unstaged.
func (s *Server) publishBlock(ctx context.Context, v volume.Volume, target string, u use) error {
	device, err := s.volumes.Attach(ctx, v, u.readOnly, true)
	if err != nil {
		return err
	}
	defer device.Close()
	return s.bindDevice(device, target)
}

// publishEphemeral makes a volume for one pod, under the ID that the CO gave it.
func (s *Server) publishEphemeral(ctx context.Context, r *csi.NodePublishVolumeRequest, u use) error {
	if u.block {
		return fmt.Errorf("%w: an inline ephemeral volume is for mount access", blockdev.ErrInvalid)
	}
	if _, err := volume.ParseID(r.GetVolumeId()); err == nil {
		return fmt.Errorf("%w: this is the ID of a volume that is not ephemeral", blockdev.ErrInvalid)
	}
	parameters, size, err := csimap.ParseEphemeral(r.GetVolumeContext())
	if err != nil {
		return err
	}
	v, err := s.volumes.Create(ctx, volume.Spec{Name: r.GetVolumeId(), Pool: parameters.Pool, Provisioning: parameters.Provisioning,
		Size: size, Filesystem: u.fs, Ephemeral: r.GetTargetPath()})
	if err != nil {
		return err
	}
	if _, err = mount.MakeTarget(r.GetTargetPath(), false); err == nil {
		// A new filesystem has to be written once, also one for reading only: it is mounted
		// for writing to nobody.
		err = s.mountVolume(ctx, v, r.GetTargetPath(), u)
	}
	// One that was formatted before this call may have been handed out to its pod.
	fresh := v.Format.State != volume.Formatted
	if err != nil && fresh && ctx.Err() == nil && !errors.Is(err, blockdev.ErrExists) {
		err = errors.Join(err, s.removeEphemeral(ctx, v, r.GetTargetPath()))
	}
	return err
}

func (s *Server) removeEphemeral(ctx context.Context, v volume.Volume, target string) error {
	if err := mount.RemoveTarget(target); err != nil {
		return err
	}
	if err := s.volumes.Detach(ctx, v.ID); err != nil {
		return err
	}
	return s.volumes.Delete(ctx, v.ID)
}

// NodeUnpublishVolume takes a target away, and with it an inline ephemeral volume.
func (s *Server) NodeUnpublishVolume(ctx context.Context, r *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	if err := required(r.GetVolumeId(), "target path", r.GetTargetPath()); err != nil {
		return nil, err
	}
	if err := s.unpublish(ctx, r.GetVolumeId(), r.GetTargetPath()); err != nil {
		return nil, fmt.Errorf("unpublish volume %s at %s: %w", r.GetVolumeId(), r.GetTargetPath(), err)
	}
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

func (s *Server) unpublish(ctx context.Context, text, target string) error {
	info, err := mount.At(target)
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR) && !mount.Corrupted(err) {
		return err
	}
	id, parseErr := volume.ParseID(text)
	if err == nil && info.Root && parseErr == nil {
		// Only if the volume is known to be elsewhere is this somebody else's mount.
		devices, err := s.volumes.Attached(ctx, id)
		if err != nil {
			return err
		}
		if foreign(devices, info.Device) {
			return fmt.Errorf("%w: what is mounted there is not this volume", blockdev.ErrPrecondition)
		}
	}
	if err := mount.RemoveTarget(target); err != nil {
		return err
	}
	s.mounts.Remove(info.Device, target)
	if parseErr == nil {
		return nil
	}
	v, err := s.volumes.Ephemeral(ctx, text)
	if errors.Is(err, blockdev.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if v.Ephemeral != target {
		return nil
	}
	return s.removeEphemeral(ctx, v, target)
}
