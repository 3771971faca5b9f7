package node

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pools"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
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
	path, err := required(r.GetVolumeId(), "staging target path", r.GetStagingTargetPath())
	if err != nil {
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
	if err = s.claimed(ctx, v, &u); err == nil {
		if u.block {
			err = s.stageBlock(ctx, v, path, u)
		} else {
			err = s.mountVolume(ctx, v, path, u)
		}
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
	if mount.Missing(err) {
		return info, fmt.Errorf("%w: %s is not there; the caller has to make it", errdefs.ErrPrecondition, path)
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
		return fmt.Errorf("%w: %s is no folder", errdefs.ErrPrecondition, path)
	}
	if info.Root {
		return s.mounted(ctx, v, path, u)
	}
	if err := s.single(ctx, v.ID, path); err != nil {
		return err
	}
	device, err := s.volumes.Attach(ctx, v, false)
	if err != nil {
		return err
	}
	// From the mount on, it is the mount that holds the device.
	defer device.Close()
	if err := filesystem.Unused(ctx, device.Path); err != nil {
		return err
	}
	fresh, err := s.format(ctx, &v, device, u)
	if err != nil {
		return err
	}
	if !fresh {
		if err := s.check(ctx, v, device, u); err != nil {
			return err
		}
	}
	if want := flagsOf(u.options); v.Flags != want {
		if err := s.volumes.SetFlags(ctx, v.ID, want); err != nil {
			return err
		}
	}
	if err := s.mountDevice(device, path, u); err != nil {
		return err
	}
	if u.readOnly || fresh || !filesystem.GrowsMounted(u.fs) {
		return nil
	}
	return filesystem.Grow(u.fs, device.Path, path)
}

// check looks over a filesystem that somebody may have written byte by byte.
func (s *Server) check(ctx context.Context, v volume.Volume, device blockdev.Device, u use) error {
	if err := filesystem.Inspect(u.fs, device.Path); err != nil {
		return err
	}
	if u.readOnly {
		return nil
	}
	return s.checks.run(ctx, v.ID.Key, func(ctx context.Context) error {
		if err := filesystem.Check(ctx, u.fs, device.Path); err != nil {
			return err
		}
		return filesystem.GrowBeforeMount(ctx, u.fs, device.Path)
	})
}

// mountDevice mounts the filesystem of a device, and makes sure that it is the device's.
func (s *Server) mountDevice(device blockdev.Device, path string, u use) error {
	if err := mount.Filesystem(device.Path, path, string(u.fs), slices.Concat(u.fs.MountOptions(), u.options), u.readOnly); err != nil {
		return err
	}
	err := filesystem.OnlyOn(device.Number, path)
	if err != nil {
		return errors.Join(err, mount.Unmount(path))
	}
	s.mounts.Add(device.Number, path, !u.readOnly)
	return nil
}

// mounted is a retry: something is mounted at the path already.
func (s *Server) mounted(ctx context.Context, v volume.Volume, path string, u use) error {
	at, err := s.here(ctx, v.ID, path)
	if errors.Is(err, errdefs.ErrNotFound) || (err == nil && at.Node) {
		return fmt.Errorf("%w: something else is mounted at %s", errdefs.ErrExists, path)
	}
	if err != nil {
		return err
	}
	// Of a volume that was a raw device, the record does not know the filesystem.
	have := filesystem.TypeOf(at.Statfs.Type)
	if writable := s.mounts.Writable(at.Device, path); writable == u.readOnly || have != u.fs {
		return fmt.Errorf("%w: it is mounted at %s as %s, writable %v", errdefs.ErrExists, path, have, writable)
	}
	if v.Flags != "" && v.Flags != flagsOf(u.options) {
		return fmt.Errorf("%w: it is mounted at %s with other mount flags", errdefs.ErrExists, path)
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
		return false, carries(v, device, u.fs)
	case volume.Blank:
		blank, err := s.volumes.Blank(ctx, v.ID, device)
		if err != nil {
			return false, err
		}
		if !blank {
			return false, fmt.Errorf("%w: its record says that it was never formatted, but %s is not blank; nothing was formatted: look at what is on it", errdefs.ErrPrecondition, device.Path)
		}
	case volume.Formatting:
		// Nobody ever had this volume: what is on it is what mkfs left when it was cut
		// short. Unless it is something that mkfs does not write, or that was mounted since.
		foreign, err := filesystem.Foreign(device.Path, v.Format.Type)
		if err != nil {
			return false, err
		}
		if foreign != "" {
			return false, fmt.Errorf("%w: its formatting was cut short, and %s carries %s now; nothing was formatted: look at what is on it", errdefs.ErrPrecondition, device.Path, foreign)
		}
		used, err := filesystem.Used(device.Path)
		if err != nil {
			return false, err
		}
		if used { // a crash came before the record said so, or the record is an old one: what is there is kept
			v.Format.State = volume.Formatted
			if err := s.volumes.SetFormat(ctx, v.ID, v.Format); err != nil {
				return false, err
			}
			return false, carries(v, device, u.fs)
		}
	default:
		return false, fmt.Errorf("%w: its record has the unknown format state %q", errdefs.ErrDataLoss, v.Format.State)
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

// carries makes sure that a volume, which is never formatted again, carries a filesystem, and notes it.
func carries(v *volume.Volume, device blockdev.Device, want filesystem.Type) error {
	have, err := filesystem.Probe(device.Path)
	if err != nil {
		return err
	}
	if have == want {
		v.Format.Type = have
		return nil
	}
	if v.Format.State == volume.Formatted && have == "" {
		return fmt.Errorf("%w: it was formatted with %s, and %s carries no filesystem now; nothing was formatted: restore it from a snapshot or a backup", errdefs.ErrDataLoss, v.Format.Type, device.Path)
	}
	if have == "" {
		return fmt.Errorf("%w: it was used as a raw block device, so it is not formatted for %s: its bytes are its user's", errdefs.ErrPrecondition, want)
	}
	return fmt.Errorf("%w: it carries %s, not %s", errdefs.ErrPrecondition, have, want)
}

// stageBlock attaches a volume for good and binds its device into the staging path.
func (s *Server) stageBlock(ctx context.Context, v volume.Volume, path string, u use) error {
	if info, err := look(path); err != nil {
		return err
	} else if !info.Folder {
		return fmt.Errorf("%w: %s is no folder", errdefs.ErrPrecondition, path)
	} else if info.Root {
		if _, err := s.here(ctx, v.ID, path); err == nil {
			return fmt.Errorf("%w: it is mounted at %s as a filesystem", errdefs.ErrExists, path)
		} else if !errors.Is(err, errdefs.ErrNotFound) {
			return err
		}
	}
	if info, err := look(marker(path)); err != nil || !info.Root {
		if err := s.single(ctx, v.ID, marker(path)); err != nil {
			return err
		}
	}
	device, err := s.attachRaw(ctx, v, u)
	if err != nil {
		return err
	}
	defer device.Close()
	return s.bindDevice(ctx, v, device, marker(path), u)
}

// attachRaw attaches a volume to be handed out as a raw device.
func (s *Server) attachRaw(ctx context.Context, v volume.Volume, u use) (blockdev.Device, error) {
	// Before anybody can write to it: what it carries from now on is its user's.
	if state := v.Format.State; !u.readOnly && (state == volume.Blank || state == volume.Formatting) {
		if err := s.volumes.SetFormat(ctx, v.ID, volume.Format{State: volume.Raw}); err != nil {
			return blockdev.Device{}, err
		}
	}
	return s.volumes.Attach(ctx, v, true)
}

// bindDevice binds a device of a volume to a file, which it makes.
func (s *Server) bindDevice(ctx context.Context, v volume.Volume, device blockdev.Device, path string, u use) error {
	made, err := mount.MakeTarget(path, true)
	if err != nil {
		return err
	}
	info, err := look(path)
	if err == nil && info.Root {
		return s.bound(ctx, v, path, u)
	}
	if err == nil && u.readOnly {
		err = mount.BindReader(device.Number, path)
	} else if err == nil {
		err = mount.Bind(device.Path, path, false)
	}
	if err != nil {
		if made {
			err = errors.Join(err, mount.RemoveTarget(path))
		}
		return err
	}
	s.mounts.Add(device.Number, path, !u.readOnly)
	return nil
}

// bound is a retry: something is mounted at the path already.
func (s *Server) bound(ctx context.Context, v volume.Volume, path string, u use) error {
	at, err := s.here(ctx, v.ID, path)
	if errors.Is(err, errdefs.ErrNotFound) || (err == nil && !at.Node) {
		return fmt.Errorf("%w: something else is mounted at %s", errdefs.ErrExists, path)
	}
	if err != nil {
		return err
	}
	// A reader that an older driver published has a read-only device of its own.
	if readOnly := at.ReadOnly || at.device.ReadOnly; readOnly != u.readOnly {
		return fmt.Errorf("%w: its device is at %s with read-only %v", errdefs.ErrExists, path, readOnly)
	}
	return nil
}

// NodeUnstageVolume takes the mount or the bound device away, and then the device.
func (s *Server) NodeUnstageVolume(ctx context.Context, r *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	path, err := required(r.GetVolumeId(), "staging target path", r.GetStagingTargetPath())
	if err != nil {
		return nil, err
	}
	id, err := volume.ParseID(r.GetVolumeId())
	if err != nil {
		return &csi.NodeUnstageVolumeResponse{}, nil // none of ours is staged anywhere
	}
	if err := s.unstage(ctx, id, path); err != nil {
		return nil, fmt.Errorf("unstage volume %s: %w", r.GetVolumeId(), err)
	}
	return &csi.NodeUnstageVolumeResponse{}, nil
}

func (s *Server) unstage(ctx context.Context, id volume.ID, path string) error {
	_ = s.checks.forget(id.Key) // whoever unstages does not wait for it
	held, asked, err := s.held(ctx, id)
	if err != nil {
		return err
	}
	place := path
	if info, err := mount.At(path); err == nil && !info.Root {
		place = marker(path)
	}
	at, err := mountedAt(place)
	if err != nil {
		return err
	}
	if at.mounted && !at.of(id, held) {
		if len(held) == 0 {
			return nil // it is staged nowhere, so not here either; what is here is another's
		}
		return fmt.Errorf("%w: what is mounted at %s is not this volume", errdefs.ErrPrecondition, place)
	}
	if at.mounted && !slices.Contains(held, at.device) {
		held = append(held, at.device)
	}
	if others := s.elsewhere(held, place); len(others) > 0 {
		return fmt.Errorf("%w: it is still published at %s", errdefs.ErrInUse, others[0])
	}
	if place == path {
		err = mount.Unmount(path) // the folder is the caller's
	} else {
		err = mount.RemoveTarget(place)
	}
	if err != nil {
		return err
	}
	s.mounts.Remove(at.device, place)
	if left := s.elsewhere(held, ""); len(left) > 0 { // a name of the place that did not follow
		return fmt.Errorf("%w: it is still mounted at %s", errdefs.ErrInUse, left[0])
	}
	if asked {
		return s.volumes.Detach(ctx, id)
	}
	if at.mounted && place != path {
		return pools.LetGo(ctx, at.device)
	}
	return nil // the device goes with its mount; what else is left goes when its pool is there again
}
