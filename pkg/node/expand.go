package node

import (
	"context"
	"errors"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// NodeExpandVolume grows the devices of a volume to its size, and the filesystem to its device. ErrNotFound if the volume is neither at the path nor at the
// staging path; ErrOutOfRange if its controller has not made it as large as required; ErrPrecondition if the filesystem is mounted read-only everywhere.
func (s *Server) NodeExpandVolume(ctx context.Context, r *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	if r.GetVolumeId() != "" && r.GetVolumePath() == "" {
		return nil, csimap.Missing("volume path")
	}
	v, err := s.find(ctx, r.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if c := r.GetVolumeCapability(); c != nil {
		if _, err := csimap.CheckCapabilities(c); err != nil {
			return nil, err
		}
	}
	at, err := s.findPublished(ctx, v.ID, r.GetVolumePath())
	if staged := r.GetStagingTargetPath(); errors.Is(err, errdefs.ErrNotFound) && staged != "" {
		// Of a raw volume that several pods have, the kubelet names the path of the last that came, also if that pod is gone. After ErrNotFound it would not
		// ask again.
		at, err = s.findPublished(ctx, v.ID, staged)
	}
	if err != nil {
		return nil, err
	}
	required := r.GetCapacityRange().GetRequiredBytes()
	if required > v.Size && v.Stale { // not ErrOutOfRange, after which the kubelet would not ask again
		return nil, fmt.Errorf("%w: volume %s had %d bytes when its home last answered, %d are required; it is asked again", errdefs.ErrUnavailable, v.ID, v.Size, required)
	}
	if required > v.Size {
		return nil, fmt.Errorf("%w: volume %s has %d bytes, %d are required; expand it at the controller first", errdefs.ErrOutOfRange, v.ID, v.Size, required)
	}
	// After a crash the device may be smaller than what its pool has.
	secret := newSecret(r.GetSecrets(), ofClass(expandSecret))
	if v, err = s.volumes.Grow(ctx, v.ID, secret.key); err != nil {
		return nil, fmt.Errorf("grow volume %s: %w", r.GetVolumeId(), secret.explain(err))
	}
	if !at.Node {
		if err := s.grow(v, at.device); err != nil {
			return nil, err
		}
	}
	return &csi.NodeExpandVolumeResponse{CapacityBytes: v.Size}, nil
}

// grow grows the filesystem on a device, through any directory where it is mounted for writing; ErrPrecondition if there is none.
func (s *Server) grow(v volume.Volume, device blockdev.Device) error {
	for _, path := range s.mounts.Paths(device.Number) {
		if info, err := mount.At(path); err == nil && info.Directory && !info.ReadOnly {
			return filesystem.Grow(filesystem.TypeOf(info.Statfs.Type), device.Path, path)
		}
	}
	return fmt.Errorf("%w: the filesystem of volume %s is mounted read-only and cannot grow; it grows when it is next staged for writing", errdefs.ErrPrecondition, v.ID)
}
