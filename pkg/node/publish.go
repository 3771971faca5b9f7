package node

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/internal/trace"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// NodePublishVolume binds a staged volume to the target path, or makes an inline ephemeral volume and mounts it there. If it is published there already as
// asked for, it succeeds; ErrExists if in another way. ErrPrecondition if it is not staged for this access.
func (s *Server) NodePublishVolume(ctx context.Context, r *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	target, err := required(r.GetVolumeId(), "target path", r.GetTargetPath())
	if err != nil {
		return nil, err
	}
	how, err := newMountRequest(r.GetVolumeCapability(), r.GetPublishContext(), r.GetReadonly())
	if err != nil {
		return nil, err
	}
	how.secret = newSecret(r.GetSecrets(), ofClass(publishSecret))
	if csimap.IsEphemeral(r.GetVolumeContext()) {
		how.secret.source = "the field nodePublishSecretRef of the pod's volume"
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
	v, err := s.getClaimed(ctx, id, how)
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
	if !how.many { // one of many readers writes no record
		if err := s.checkExclusive(ctx, v, staged, target, how.exclusive); err != nil {
			return err
		}
	}
	if err := s.volumes.Limit(v, at.device); err != nil { // before the pod runs
		return err
	}
	if how.block {
		return s.attachAndBind(ctx, v, target, how)
	}
	return s.publishMount(ctx, staged, at, target, how)
}

// stagedAs returns ErrPrecondition if a volume is staged with another filesystem than the capability names, or with another SELinux context. The context is
// not compared if it is not known, nor for one of many readers, who record no flags.
func stagedAs(v volume.Volume, at mount.Info, c *csi.VolumeCapability, how mountRequest) error {
	if how.block {
		return nil
	}
	if have := filesystem.TypeOf(at.Statfs.Type); c.GetMount().GetFsType() != "" && have != how.fs {
		return fmt.Errorf("%w: it is staged as %s, not as %s; publish it as what it is, or unstage it first", errdefs.ErrPrecondition, have, how.fs)
	}
	if !how.many && !sameContext(v.Flags, how.options) {
		return fmt.Errorf("%w: it is staged with another SELinux context; unpublish it everywhere and unstage it first", errdefs.ErrPrecondition)
	}
	return nil
}

// checkExclusive returns ErrInUse if a volume that may have one target only (SINGLE_NODE_SINGLE_WRITER) is published at another one. It records the target
// durably before it is there. The record is needed because the kernel cannot tell a target from a bind of it: the kubelet binds devices and subpaths
// elsewhere. The kernel says whether the volume is still mounted at the recorded target; so unpublishing need not change the record.
//
// Without a recorded target (an older driver published the volume, or it was published for a use that is not exclusive) each of its mounts, beside that at
// the staging path, counts as a target. For a use that is not exclusive the recorded target is deleted.
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
		if others, err = s.otherMounts(ctx, v.ID, blockdev.Numbers(devices), staged); err != nil {
			return err
		}
		if slices.ContainsFunc(others, func(other string) bool { return mount.Same(other, target) }) {
			return nil // a retry: the other mounts are binds of this target
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
		if there.mounted && (there.dead || slices.Contains(blockdev.Numbers(devices), there.device)) {
			return fmt.Errorf("%w: its access mode SINGLE_NODE_SINGLE_WRITER allows one target, and it is published at %s; unpublish it there first", errdefs.ErrInUse, other)
		}
	}
	if v.Target == target {
		return nil
	}
	return s.volumes.SetTarget(ctx, v.ID, target)
}

// publishMount binds the directory of a staged filesystem to the target, read-only if it is staged read-only. ErrExists if something else is mounted there,
// or it is published there in another way. ErrPrecondition if it is to be written to, and the kernel has made the filesystem read-only after an error.
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
	if !made { // otherwise nothing is mounted there
		if there, err = findMount(target); err != nil {
			return err
		}
	}
	if there.Root {
		if there.Device != info.Device || there.Node {
			return fmt.Errorf("%w: something else is mounted there; look at what it is (findmnt), and unmount it if nobody needs it", errdefs.ErrExists)
		}
		if there.ReadOnly != readOnly {
			return fmt.Errorf("%w: it is published there with read-only %v; unpublish it first", errdefs.ErrExists, there.ReadOnly)
		}
		return nil
	}
	// Only now: a pod for which it is published already keeps it.
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

// NodeUnpublishVolume unmounts the volume from the target path and removes the target. It deletes an inline ephemeral volume. ErrPrecondition if something
// else is mounted there, or the target has content; ErrInUse if a process uses the mount. A volume that is not published is success.
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

// unpublish is NodeUnpublishVolume. text is the volume's ID, asked the target as the CO names it, and target the same path without links (mount.Resolve). An
// ephemeral volume is deleted only if it was made for the target asked. One whose record cannot be read stays, without an error: that would not pass, and the
// kubelet would keep the pod for ever. The health of its pool tells of it (RecordDamaged).
func (s *Server) unpublish(ctx context.Context, text, asked, target string) error {
	id, parseErr := volume.ParseID(text)
	if parseErr != nil { // an ephemeral volume, or none of this driver's
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
			return at.other(target, held)
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
	if errors.Is(err, errdefs.ErrDataLoss) {
		klog.FromContext(ctx).Error(err, "An inline ephemeral volume was unpublished, and cannot be deleted; a start deletes it once its record can be read", "volume", text)
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
