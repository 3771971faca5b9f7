package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// marker is where the device of a staged block volume is bound, within the staging path:
// it says to whoever looks, also after a restart, that the volume is staged, and as which
// device.
func marker(stagingPath string) string { return filepath.Join(stagingPath, "device") }

// NodeStageVolume attaches a volume, and for mount access formats it if it is new and
// mounts it at the staging path.
func (s *Server) NodeStageVolume(ctx context.Context, r *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	if err := required(r.GetVolumeId(), "staging target path", r.GetStagingTargetPath()); err != nil {
		return nil, err
	}
	u, err := useOf(r.GetVolumeCapability(), r.GetPublishContext(), false)
	if err != nil {
		return nil, err
	}
	id, err := volume.ParseID(r.GetVolumeId())
	if err != nil {
		return nil, err
	}
	v, err := s.volumes.Get(ctx, id)
	if err != nil {
		return nil, err
	}
	if u.block {
		err = s.stageBlock(ctx, v, r.GetStagingTargetPath(), u)
	} else {
		err = s.mountVolume(ctx, v, r.GetStagingTargetPath(), u)
	}
	if err != nil {
		return nil, fmt.Errorf("stage volume %s: %w", id, err)
	}
	return &csi.NodeStageVolumeResponse{}, nil
}

// look looks at a path that something is to be mounted on, and clears a dead mount away.
func look(path string) (mount.Info, error) {
	info, err := mount.At(path)
	if mount.Corrupted(err) {
		if err := mount.Unmount(path); err != nil {
			return info, err
		}
		info, err = mount.At(path)
	}
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return info, fmt.Errorf("%w: %s is not there; the caller has to make it", blockdev.ErrPrecondition, path)
	}
	return info, err
}

// mountVolume mounts the filesystem of a volume at an existing folder.
func (s *Server) mountVolume(ctx context.Context, v volume.Volume, path string, u use) error {
	info, err := look(path)
	if err != nil {
		return err
	}
	if !info.Folder {
		return fmt.Errorf("%w: %s is no folder", blockdev.ErrPrecondition, path)
	}
	if info.Root {
		return s.mounted(ctx, v, path, u)
	}
	device, err := s.volumes.Attach(ctx, v, false, false)
	if err != nil {
		return err
	}
	// From the mount on, it is the mount that holds the device.
	defer device.Close()
	fresh, err := s.format(ctx, &v, device, u)
	if err != nil {
		return err
	}
	if !fresh && !u.readOnly {
		if err := filesystem.Check(ctx, u.fs, device.Path); err != nil {
			return err
		}
		if err := filesystem.GrowBeforeMount(ctx, u.fs, device.Path); err != nil {
			return err
		}
	}
	if err := mount.Filesystem(device.Path, path, string(u.fs), slices.Concat(u.fs.MountOptions(), u.options), u.readOnly); err != nil {
		return err
	}
	s.mounts.Add(device.Number, path, !u.readOnly)
	if u.readOnly || fresh || !filesystem.GrowsMounted(u.fs) {
		return nil
	}
	return filesystem.Grow(u.fs, device.Path, path)
}

// mounted is a retry: something is mounted at the path already.
func (s *Server) mounted(ctx context.Context, v volume.Volume, path string, u use) error {
	at, err := s.here(ctx, v.ID, path)
	if errors.Is(err, blockdev.ErrNotFound) || (err == nil && at.Node) {
		return fmt.Errorf("%w: something else is mounted at %s", blockdev.ErrExists, path)
	}
	if err != nil {
		return err
	}
	// Of a volume that was a raw device, the record does not know the filesystem.
	have := filesystem.TypeOf(at.Filesystem)
	if writable := s.mounts.Writable(at.Device, path); writable == u.readOnly || have != u.fs {
		return fmt.Errorf("%w: it is mounted at %s as %s, writable %v", blockdev.ErrExists, path, have, writable)
	}
	if u.readOnly || !filesystem.GrowsMounted(have) {
		return nil
	}
	// The first try may have died between mounting and growing.
	return filesystem.Grow(u.fs, at.device.Path, path)
}

// format makes sure that the device of a volume carries the filesystem asked for. It
// makes one only if the record says that the volume was never formatted and never handed
// out as a raw device, and the device is blank; on any doubt it leaves the device alone.
// fresh: the filesystem was made just now.
func (s *Server) format(ctx context.Context, v *volume.Volume, device blockdev.Device, u use) (fresh bool, err error) {
	switch v.Format.State {
	case volume.Formatted, volume.Raw:
		have, err := filesystem.Probe(device.Path)
		if err != nil {
			return false, err
		}
		if have == u.fs {
			v.Format.Type = have
			return false, nil
		}
		if v.Format.State == volume.Formatted && have == "" {
			return false, fmt.Errorf("%w: it was formatted with %s, and %s carries no filesystem now; nothing was formatted: restore it from a snapshot or a backup", blockdev.ErrDataLoss, v.Format.Type, device.Path)
		}
		if have == "" {
			return false, fmt.Errorf("%w: it was used as a raw block device, so it is not formatted for %s: its bytes are its user's", blockdev.ErrPrecondition, u.fs)
		}
		return false, fmt.Errorf("%w: it carries %s, not %s", blockdev.ErrPrecondition, have, u.fs)
	case volume.Blank:
		blank, err := s.volumes.Untouched(ctx, v.ID)
		if err == nil && !blank {
			blank, err = filesystem.Blank(ctx, device.Path)
		}
		if err != nil {
			return false, err
		}
		if !blank {
			return false, fmt.Errorf("%w: its record says that it was never formatted, but %s is not blank; nothing was formatted: look at what is on it", blockdev.ErrPrecondition, device.Path)
		}
	case volume.Formatting:
		// Nobody ever had this volume: what is on it is what mkfs left when it was cut
		// short. Unless it is something that mkfs does not write.
		foreign, err := filesystem.Foreign(device.Path, v.Format.Type)
		if err != nil {
			return false, err
		}
		if foreign != "" {
			return false, fmt.Errorf("%w: its formatting was cut short, and %s carries %s now; nothing was formatted: look at what is on it", blockdev.ErrPrecondition, device.Path, foreign)
		}
	default:
		return false, fmt.Errorf("%w: its record has the unknown format state %q", blockdev.ErrDataLoss, v.Format.State)
	}
	zeros := v.Format.State == volume.Blank
	v.Format = volume.Format{State: volume.Formatting, Type: u.fs}
	if err := s.volumes.SetFormat(ctx, v.ID, v.Format); err != nil {
		return false, err
	}
	if err := filesystem.Make(ctx, u.fs, device.Path, zeros); err != nil {
		return false, err
	}
	v.Format.State = volume.Formatted
	return true, s.volumes.SetFormat(ctx, v.ID, v.Format)
}

// stageBlock attaches a volume for good and binds its device into the staging path.
func (s *Server) stageBlock(ctx context.Context, v volume.Volume, path string, u use) error {
	if info, err := look(path); err != nil {
		return err
	} else if !info.Folder {
		return fmt.Errorf("%w: %s is no folder", blockdev.ErrPrecondition, path)
	} else if info.Root {
		if _, err := s.here(ctx, v.ID, path); err == nil {
			return fmt.Errorf("%w: it is mounted at %s as a filesystem", blockdev.ErrExists, path)
		} else if !errors.Is(err, blockdev.ErrNotFound) {
			return err
		}
	}
	// Before anybody can write to it: what it carries from now on is its user's.
	if state := v.Format.State; !u.readOnly && (state == volume.Blank || state == volume.Formatting) {
		if err := s.volumes.SetFormat(ctx, v.ID, volume.Format{State: volume.Raw}); err != nil {
			return err
		}
	}
	device, err := s.volumes.Attach(ctx, v, u.readOnly, true)
	if err != nil {
		return err
	}
	defer device.Close()
	return s.bindDevice(device, marker(path))
}

// bindDevice binds a device node to a file, which it makes.
func (s *Server) bindDevice(device blockdev.Device, path string) error {
	made, err := mount.MakeTarget(path, true)
	if err != nil {
		return err
	}
	info, err := look(path)
	if err == nil && info.Root {
		if info.Node && info.Device == device.Number {
			return nil
		}
		return fmt.Errorf("%w: something else is mounted at %s", blockdev.ErrExists, path)
	}
	if err == nil {
		err = mount.Bind(device.Path, path, false)
	}
	if err != nil {
		if made {
			err = errors.Join(err, mount.RemoveTarget(path))
		}
		return err
	}
	s.mounts.Add(device.Number, path, !device.ReadOnly)
	return nil
}

// NodeUnstageVolume takes the mount or the bound device away, and then the device.
func (s *Server) NodeUnstageVolume(ctx context.Context, r *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	if err := required(r.GetVolumeId(), "staging target path", r.GetStagingTargetPath()); err != nil {
		return nil, err
	}
	path := r.GetStagingTargetPath()
	id, err := volume.ParseID(r.GetVolumeId())
	if err != nil {
		id = volume.ID{} // of another pool or time: what is mounted can go all the same
	}
	if err := s.unstage(ctx, id, path); err != nil {
		return nil, fmt.Errorf("unstage volume %s: %w", r.GetVolumeId(), err)
	}
	return &csi.NodeUnstageVolumeResponse{}, nil
}

// foreign reports whether a device is none of a volume's, which has some.
func foreign(devices []blockdev.Device, number uint64) bool {
	return len(devices) > 0 && !slices.ContainsFunc(devices, func(d blockdev.Device) bool { return d.Number == number })
}

func (s *Server) unstage(ctx context.Context, id volume.ID, path string) error {
	devices, err := s.volumes.Attached(ctx, id)
	if err != nil {
		return err
	}
	place := path
	if info, err := mount.At(path); err == nil && !info.Root {
		place = marker(path)
	}
	info, err := mount.At(place)
	gone := errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR)
	if err != nil && !gone && !mount.Corrupted(err) {
		return err
	}
	if err == nil && info.Root && foreign(devices, info.Device) {
		return fmt.Errorf("%w: what is mounted at %s is not this volume", blockdev.ErrPrecondition, place)
	}
	for _, device := range devices {
		for _, other := range s.mounts.Paths(device.Number) {
			if other != place {
				return fmt.Errorf("%w: it is still published at %s", blockdev.ErrInUse, other)
			}
		}
	}
	if place == path {
		err = mount.Unmount(path) // the folder is the caller's
	} else {
		err = mount.RemoveTarget(place)
	}
	if err != nil {
		return err
	}
	s.mounts.Remove(info.Device, place)
	return s.volumes.Detach(ctx, id)
}
