package node

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/ashlar-csi/ashlar/internal/trace"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// NodePublishVolume binds a staged volume to the target path, or makes an inline
// ephemeral volume and mounts it there.
func (s *Server) NodePublishVolume(ctx context.Context, r *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	target, err := required(r.GetVolumeId(), "target path", r.GetTargetPath())
	if err != nil {
		return nil, err
	}
	how, err := newMountRequest(r.GetVolumeCapability(), r.GetPublishContext(), r.GetReadonly())
	if err != nil {
		return nil, err
	}
	how.secret = newSecret(r.GetSecrets(), publishSecret)
	if csimap.IsEphemeral(r.GetVolumeContext()) {
		err = s.publishEphemeral(ctx, r, target, how)
	} else {
		err = s.publish(ctx, r, target, how)
	}
	if err != nil {
		return nil, fmt.Errorf("publish volume %s at %s: %w", r.GetVolumeId(), r.GetTargetPath(), how.secret.explain(err))
	}
	return &csi.NodePublishVolumeResponse{}, nil
}

func (s *Server) publish(ctx context.Context, r *csi.NodePublishVolumeRequest, target string, how mountRequest) error {
	id, err := volume.ParseID(r.GetVolumeId())
	if err != nil {
		return err
	}
	v, err := s.volumes.Get(ctx, id)
	if err != nil {
		return err
	}
	if r.GetStagingTargetPath() == "" {
		return fmt.Errorf("%w: the request has no staging target path; stage the volume first", errdefs.ErrPrecondition)
	}
	if err := mount.CleanPath(r.GetStagingTargetPath()); err != nil {
		return err
	}
	how.readByMany(v, r.GetVolumeCapability())
	if err := s.checkClaim(ctx, v, &how); err != nil {
		return err
	}
	staged := mount.Resolve(r.GetStagingTargetPath())
	if how.block {
		staged = marker(staged)
	}
	at, err := s.volumeAt(ctx, id, staged)
	if errors.Is(err, errdefs.ErrNotFound) || (err == nil && at.Node != how.block) {
		return fmt.Errorf("%w: it is not staged at %s for this access", errdefs.ErrPrecondition, r.GetStagingTargetPath())
	}
	if err != nil {
		return err
	}
	if err := stagedAs(v, at.Info, r.GetVolumeCapability(), how); err != nil {
		return err
	}
	if !how.many { // who reads it beside others changes no record
		if err := s.checkExclusive(ctx, v, staged, target, how.exclusive); err != nil {
			return err
		}
	}
	if err := s.volumes.Limit(v, at.device); err != nil { // before the pod runs
		return err
	}
	if how.block {
		return s.publishBlock(ctx, v, target, how)
	}
	return s.publishMount(ctx, staged, at, target, how)
}

// stagedAs makes sure that a volume can be published as it is staged: as the filesystem that the
// caller names, if it names one, and with its SELinux context.
func stagedAs(v volume.Volume, at mount.Info, c *csi.VolumeCapability, how mountRequest) error {
	if how.block {
		return nil
	}
	if have := filesystem.TypeOf(at.Statfs.Type); c.GetMount().GetFsType() != "" && have != how.fs {
		return fmt.Errorf("%w: it is staged as %s, not as %s", errdefs.ErrPrecondition, have, how.fs)
	}
	if !how.many && !sameContext(v.Flags, how.options) {
		return fmt.Errorf("%w: it is staged with another SELinux context", errdefs.ErrPrecondition)
	}
	return nil
}

// checkExclusive makes sure that an exclusive volume is published nowhere else, and puts the target that
// it is going to have on record, durably, before it is there. What is published there still is the
// kernel's to say, so nothing has to be written down when it is taken away. A record is needed
// because the kernel cannot tell a target from what others bind of it: the kubelet binds
// devices and subpaths elsewhere.
//
// Without a target on record (an older driver published it, or one for a use that is not
// exclusive) everything that is mounted of it counts as one.
func (s *Server) checkExclusive(ctx context.Context, v volume.Volume, staged, target string, exclusive bool) error {
	if !exclusive {
		if v.Target == "" {
			return nil
		}
		return s.volumes.SetTarget(ctx, v.ID, "")
	}
	devices, err := s.volumes.Attached(ctx, v.ID)
	if err != nil {
		return err
	}
	others := []string{v.Target}
	if v.Target == "" {
		if others, err = s.otherMounts(ctx, v.ID, numbers(devices), staged); err != nil {
			return err
		}
		if slices.ContainsFunc(others, func(other string) bool { return mount.Same(other, target) }) {
			return nil // and what else is there came after it
		}
	}
	for _, other := range others {
		if other == "" || other == target || mount.Same(other, target) {
			continue
		}
		there, err := mountedAt(other)
		if err != nil {
			return err
		}
		if there.mounted && (there.dead || slices.Contains(numbers(devices), there.device)) {
			return fmt.Errorf("%w: its access mode SINGLE_NODE_SINGLE_WRITER allows one target, and it is published at %s", errdefs.ErrInUse, other)
		}
	}
	if v.Target == target {
		return nil
	}
	return s.volumes.SetTarget(ctx, v.ID, target)
}

// publishMount binds the directory of a staged filesystem; not for writing where the kernel stopped that.
func (s *Server) publishMount(ctx context.Context, staged string, info volumeMount, target string, how mountRequest) (err error) {
	made, err := mount.MakeTarget(target, false)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil && made {
			err = errors.Join(err, mount.RemoveTarget(target))
		}
	}()
	readOnly := how.readOnly || info.ReadOnly
	there := mount.Info{}
	if !made { // what was made just now has no mount
		if there, err = findMount(target); err != nil {
			return err
		}
	}
	if there.Root {
		if there.Device != info.Device || there.Node {
			return fmt.Errorf("%w: something else is mounted there", errdefs.ErrExists)
		}
		if there.ReadOnly != readOnly {
			return fmt.Errorf("%w: it is published there with read-only %v", errdefs.ErrExists, there.ReadOnly)
		}
		return nil
	}
	// A pod that has it already keeps it.
	if !how.readOnly && s.mounts.Writable(info.Device, staged) && filesystem.Stopped(info.device.Path, info.ReadOnly) {
		return fmt.Errorf("%w: the kernel made the filesystem at %s read-only after an error, and it is asked for to be written to; look at the kernel's log, unpublish it everywhere, unstage it, and stage it anew",
			errdefs.ErrPrecondition, staged)
	}
	if err := trace.Do(ctx, "bind", func(context.Context) error { return mount.Bind(staged, target, readOnly) }); err != nil {
		return err
	}
	s.mounts.Add(info.Device, target, !readOnly)
	return nil
}

// publishBlock binds the device of a staged block volume. Readers get the same device as writers,
// at a node that cannot be written through: what is written is what they read.
func (s *Server) publishBlock(ctx context.Context, v volume.Volume, target string, how mountRequest) error {
	device, err := s.attachRaw(ctx, v, how)
	if err != nil {
		return err
	}
	defer device.Close()
	return s.bindDevice(ctx, v, device, target, how)
}

// NodeUnpublishVolume takes a target away, and with it an inline ephemeral volume.
func (s *Server) NodeUnpublishVolume(ctx context.Context, r *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	target, err := required(r.GetVolumeId(), "target path", r.GetTargetPath())
	if err != nil {
		return nil, err
	}
	if err := s.unpublish(ctx, r.GetVolumeId(), r.GetTargetPath(), target); err != nil {
		return nil, fmt.Errorf("unpublish volume %s at %s: %w", r.GetVolumeId(), r.GetTargetPath(), err)
	}
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

// unpublish takes a target away. asked is how the CO wrote it.
func (s *Server) unpublish(ctx context.Context, text, asked, target string) error {
	id, parseErr := volume.ParseID(text)
	if parseErr != nil { // an ephemeral volume, if it is one of ours
		id = volume.ID{Kind: blockdev.Volume, Key: volume.KeyOf(text)}
		if v, err := s.volumes.Ephemeral(ctx, text); err == nil {
			id = v.ID
		}
	}
	at, err := mountedAt(target)
	if err != nil {
		return err
	}
	if at.mounted {
		held, _, err := s.devicesOf(ctx, id)
		if err != nil {
			return err
		}
		if !at.of(id, held) {
			return fmt.Errorf("%w: what is mounted there is not this volume", errdefs.ErrPrecondition)
		}
	}
	if err := mount.RemoveTarget(target); err != nil {
		return err
	}
	s.mounts.Remove(at.device, target)
	if parseErr == nil {
		return nil
	}
	v, err := s.volumes.Ephemeral(ctx, text)
	if errors.Is(err, errdefs.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if v.Ephemeral != asked {
		return nil
	}
	return s.removeEphemeral(ctx, v, target)
}
