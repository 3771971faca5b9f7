package node

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/internal/trace"
	"github.com/ashlar-csi/ashlar/internal/undoing"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pools"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// NodeStageVolume attaches a volume and makes it available at the staging path: a filesystem is mounted there, after it was made on a new volume; the
// device of a block volume is bound to a file in it (marker). If it is staged already as asked for, it succeeds; ErrExists if in another way, ErrInUse if
// at another path.
func (s *Server) NodeStageVolume(ctx context.Context, r *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	path, err := required(r.GetVolumeId(), "staging target path", r.GetStagingTargetPath())
	if err != nil {
		return nil, err
	}
	how, err := newMountRequest(r.GetVolumeCapability(), r.GetPublishContext(), false)
	if err != nil {
		return nil, err
	}
	how.secret = newSecret(r.GetSecrets(), ofClass(stageSecret))
	id, err := volume.ParseID(r.GetVolumeId())
	if err != nil {
		return nil, err
	}
	v, err := s.getClaimed(ctx, id, how)
	if err != nil {
		return nil, err
	}
	how.readByMany(v, r.GetVolumeCapability())
	if err = s.checkClaim(ctx, v, &how); err == nil {
		if how.block {
			err = s.stageBlock(ctx, v, path, how)
		} else {
			err = s.mountVolume(ctx, v, path, how)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("stage volume %s: %w", id, how.secret.explain(err))
	}
	return &csi.NodeStageVolumeResponse{}, nil
}

// mountVolume attaches a volume and mounts its filesystem at a path, an existing directory. It makes the filesystem on a volume that was never used
// (Volumes.Format); any other is inspected, and unless it is for reading only, checked and grown. If something is mounted at the path already, see
// checkMounted. ErrPrecondition if the path is no directory, or the volume carries something else; ErrInUse if it is mounted elsewhere.
func (s *Server) mountVolume(ctx context.Context, v volume.Volume, path string, how mountRequest) error {
	info, err := findMount(path)
	if err != nil {
		return err
	}
	if !info.Directory {
		return fmt.Errorf("%w: %s is no directory", errdefs.ErrPrecondition, path)
	}
	if info.Root {
		return s.checkMounted(ctx, v, path, how)
	}
	if err := s.checkStagedOnce(ctx, v.ID, path); err != nil {
		return err
	}
	device, err := s.attach(ctx, v, how)
	if err != nil {
		return err
	}
	// Once it is mounted, the mount keeps the device.
	defer device.Close()
	_ = s.volumes.Unlimit(ctx, device.Number) // a former device of this number may have had limits
	if err := filesystem.Unused(ctx, device.Path); err != nil {
		return err
	}
	if how.many {
		return s.mountUnwritten(ctx, v, device, path, how)
	}
	flags := flagsOf(how.options)
	fresh, err := s.volumes.Format(ctx, &v, device, how.fs, flags)
	if err != nil {
		return err
	}
	if !fresh {
		if err := s.check(ctx, v, device, how); err != nil {
			return err
		}
	}
	if v.Flags != flags {
		if err := s.volumes.SetFlags(ctx, v.ID, flags); err != nil {
			return err
		}
	}
	if err := s.mountDevice(ctx, device, path, how); err != nil {
		return err
	}
	if how.readOnly || fresh || !filesystem.GrowsMounted(how.fs) {
		return nil
	}
	return s.growStaged(ctx, v.ID, device, path, how.fs)
}

// growStaged grows the filesystem that is mounted at the path where a volume is staged. If it cannot grow, it is unmounted: after an error the kubelet takes
// it for not staged, and would not unstage it. There are two exceptions.
//
// It is published: then it is staged as asked for, which is success, and it stays as large as it is. NodeExpandVolume, which a CO calls for the growth, says
// why. After each start of the kubelet volumes in use are staged once more, and their pods would not be set up again after an error.
//
// ErrBusy: then it stays mounted. A btrfs that was unmounted while it was balanced goes on with that when it is mounted, and does not grow before that has
// ended, which it never would if each try unmounted it. With that error the kubelet knows that it may be staged.
func (s *Server) growStaged(ctx context.Context, id volume.ID, device blockdev.Device, path string, fs filesystem.Type) error {
	err := filesystem.Grow(fs, device.Path, path)
	if err == nil {
		return nil
	}
	published, failure := s.otherMounts(ctx, id, []uint64{device.Number}, path)
	switch {
	case failure != nil:
		return errors.Join(err, failure)
	case len(published) > 0:
		klog.FromContext(ctx).Error(err, "A volume that is in use was staged once more, and its filesystem could not grow to the size of its device", "volume", id.String())
		return nil
	case errors.Is(err, errdefs.ErrBusy):
		return err
	}
	return errors.Join(err, mount.Unmount(path))
}

// attach attaches a volume to be mounted.
func (s *Server) attach(ctx context.Context, v volume.Volume, how mountRequest) (blockdev.Device, error) {
	if how.many {
		return s.volumes.AttachToRead(ctx, v, false)
	}
	return s.volumes.Attach(ctx, v, how.secret.key)
}

// mountUnwritten mounts the filesystem of a volume that many nodes read. It writes nothing, neither to the device nor to the volume's record: the home of
// the volume has brought the filesystem to where it can be mounted as it is (filesystem.Settle). ErrPrecondition if the device carries another filesystem.
func (s *Server) mountUnwritten(ctx context.Context, v volume.Volume, device blockdev.Device, path string, how mountRequest) error {
	have, err := filesystem.Probe(device.Path)
	if err == nil && have != how.fs {
		err = fmt.Errorf("%w: %s carries %q, not %s; nothing was formatted: use it with the fsType that it has, or look at what is on it", errdefs.ErrPrecondition, device.Path, have, how.fs)
	}
	if err == nil {
		err = s.check(ctx, v, device, how)
	}
	if err != nil {
		return err
	}
	how.options = slices.Concat(how.fs.UnwrittenOptions(), how.options)
	return s.mountDevice(ctx, device, path, how)
}

// check inspects a filesystem before it is mounted, as somebody may have written it byte by byte to the raw device. Unless it is for reading only, it also
// checks it, repairs what is safe to repair, and grows it where that is not possible once it is mounted; this goes on if the caller goes away (checks).
func (s *Server) check(ctx context.Context, v volume.Volume, device blockdev.Device, how mountRequest) error {
	if err := filesystem.Inspect(how.fs, device.Path); err != nil {
		return err
	}
	if how.readOnly {
		return nil
	}
	return s.checks.run(ctx, v.ID.Key, func(ctx context.Context) error {
		if err := filesystem.Check(ctx, how.fs, device.Path); err != nil {
			return err
		}
		return filesystem.GrowBeforeMount(ctx, how.fs, device.Path)
	})
}

// mountDevice mounts the filesystem of a device at a path. ErrPrecondition, and nothing is mounted, if the kernel mounted the filesystem of another device
// that has the same identity (filesystem.OnlyOn).
func (s *Server) mountDevice(ctx context.Context, device blockdev.Device, path string, how mountRequest) error {
	if err := trace.Do(ctx, "mount", func(context.Context) error {
		return mount.Filesystem(device.Path, path, string(how.fs), slices.Concat(how.fs.MountOptions(), how.options), how.readOnly)
	}, "filesystem", string(how.fs)); err != nil {
		return err
	}
	err := filesystem.OnlyOn(device.Number, path)
	if err != nil {
		return errors.Join(err, mount.Unmount(path))
	}
	s.mounts.Add(device.Number, path, !how.readOnly)
	return nil
}

// checkMounted is for a retry, when something is mounted at the path already. ErrExists unless that is the volume, mounted as asked for.
func (s *Server) checkMounted(ctx context.Context, v volume.Volume, path string, how mountRequest) error {
	at, err := s.volumeAt(ctx, v.ID, path)
	if errors.Is(err, errdefs.ErrNotFound) || (err == nil && at.Node) {
		return fmt.Errorf("%w: something else is mounted at %s; look at what it is (findmnt), and unmount it if nobody needs it", errdefs.ErrExists, path)
	}
	if err != nil {
		return err
	}
	// The kernel is asked for the filesystem, as the record of a volume that was used as a raw device does not have it.
	have := filesystem.TypeOf(at.Statfs.Type)
	if writable := s.mounts.Writable(at.Device, path); writable == how.readOnly || have != how.fs {
		return fmt.Errorf("%w: it is mounted at %s as %s, writable %v; unstage it first", errdefs.ErrExists, path, have, writable)
	}
	if v.Flags != "" && v.Flags != flagsOf(how.options) && !how.many {
		return fmt.Errorf("%w: it is mounted at %s with other mount flags; unstage it first", errdefs.ErrExists, path)
	}
	if how.readOnly || !filesystem.GrowsMounted(have) {
		return nil
	}
	// The first try may have ended between mounting and growing.
	return s.growStaged(ctx, v.ID, at.device, path, how.fs)
}

// stageBlock attaches a volume until it is unstaged, and binds its device to the marker of the staging path, which is an existing directory. If it is bound
// there already, it is not attached again. ErrExists if something else is there, or it is bound for another use; ErrInUse if it is mounted elsewhere.
func (s *Server) stageBlock(ctx context.Context, v volume.Volume, path string, how mountRequest) error {
	if info, err := findMount(path); err != nil {
		return err
	} else if !info.Directory {
		return fmt.Errorf("%w: %s is no directory", errdefs.ErrPrecondition, path)
	} else if info.Root {
		if _, err := s.volumeAt(ctx, v.ID, path); err == nil {
			return fmt.Errorf("%w: it is mounted at %s as a filesystem; unstage it first", errdefs.ErrExists, path)
		} else if !errors.Is(err, errdefs.ErrNotFound) {
			return err
		}
	}
	if info, err := findMount(marker(path)); err != nil || !info.Root {
		if err := s.checkStagedOnce(ctx, v.ID, marker(path)); err != nil {
			return err
		}
	}
	return s.attachAndBind(ctx, v, marker(path), how)
}

// detachUnbound detaches a raw volume whose device is bound nowhere: the kubelet takes it for not staged after an error, and would not unstage it.
func (s *Server) detachUnbound(ctx context.Context, id volume.ID) error {
	ctx, cancel := undoing.Context(ctx)
	defer cancel()
	devices, err := s.volumes.Attached(ctx, id)
	if err != nil || len(devices) == 0 {
		return err
	}
	bound, err := s.otherMounts(ctx, id, blockdev.Numbers(devices), "")
	if err != nil || len(bound) > 0 {
		return err
	}
	return s.volumes.Detach(ctx, id)
}

// attachAndBind attaches a raw volume and binds its device to a file. Readers get the device that writers have, so that they read what is written, but at a
// node that nobody can open for writing (mount.BindReader). If it is bound there already, it stays as it was attached: that might not be possible
// now. ErrExists if something else is mounted there, or it is bound for another use. If it cannot be bound, it is attached only if it is bound elsewhere.
func (s *Server) attachAndBind(ctx context.Context, v volume.Volume, path string, how mountRequest) error {
	if bound, err := s.isBound(ctx, v, path, how); err != nil || bound {
		return err
	}
	device, err := s.attachRaw(ctx, v, how)
	if err != nil {
		return err
	}
	err = s.bindDevice(ctx, v, device, path, how)
	_ = device.Close() // it only ends a hold
	if err != nil {
		err = errors.Join(err, s.detachUnbound(ctx, v.ID))
	}
	return err
}

// isBound reports whether the device of a volume is bound to a file, and can be bound elsewhere from there; ErrExists if it is bound for another use.
func (s *Server) isBound(ctx context.Context, v volume.Volume, path string, how mountRequest) (bool, error) {
	info, err := findMount(path)
	if err != nil || !info.Root { // bindDevice makes the file, or tells why it cannot
		return false, nil
	}
	if _, err := s.volumeAt(ctx, v.ID, path); errors.Is(err, errdefs.ErrNotFound) { // something else is: see bindDevice
		return false, nil
	} else if err != nil {
		return false, err
	}
	return !how.readOnly || !info.Unlinked, s.checkBound(ctx, v, path, how)
}

func (s *Server) attachRaw(ctx context.Context, v volume.Volume, how mountRequest) (blockdev.Device, error) {
	if how.many {
		return s.volumes.AttachToRead(ctx, v, true)
	}
	return s.volumes.AttachRaw(ctx, v, how.secret.key, !how.readOnly)
}

// bindDevice binds a device of a volume to a file, which it makes if it is not there. If the device is bound there already, see checkBound.
func (s *Server) bindDevice(ctx context.Context, v volume.Volume, device blockdev.Device, path string, how mountRequest) error {
	made, err := mount.MakeTarget(path, true)
	if err != nil {
		return err
	}
	info, err := findMount(path)
	if err == nil && info.Root {
		if err := s.checkBound(ctx, v, path, how); err != nil || !how.readOnly || !info.Unlinked {
			return err
		}
		// An older driver, or somebody else, has removed the node of this reader, so the kubelet cannot bind it elsewhere (mount.Info.Unlinked). It gets
		// another one.
		if err = mount.Unmount(path); errors.Is(err, errdefs.ErrInUse) {
			return nil // a pod has it open, and goes on with it
		}
	}
	if err == nil && how.readOnly {
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
	s.mounts.Add(device.Number, path, !how.readOnly)
	return nil
}

// checkBound is for a retry, when something is mounted at the path already. ErrExists unless that is a device of the volume, read-only or not as asked for.
func (s *Server) checkBound(ctx context.Context, v volume.Volume, path string, how mountRequest) error {
	at, err := s.volumeAt(ctx, v.ID, path)
	if errors.Is(err, errdefs.ErrNotFound) || (err == nil && !at.Node) {
		return fmt.Errorf("%w: something else is mounted at %s; look at what it is (findmnt), and unmount it if nobody needs it", errdefs.ErrExists, path)
	}
	if err != nil {
		return err
	}
	// An older driver gave a reader a read-only device of its own.
	if readOnly := at.ReadOnly || at.device.ReadOnly; readOnly != how.readOnly {
		return fmt.Errorf("%w: its device is at %s with read-only %v; unpublish or unstage it there first", errdefs.ErrExists, path, readOnly)
	}
	return nil
}

// NodeUnstageVolume unmounts the volume from the staging path and detaches it. ErrInUse while it is mounted elsewhere, or a process uses it;
// ErrPrecondition if something else is mounted at the path. A volume that is not staged is success.
func (s *Server) NodeUnstageVolume(ctx context.Context, r *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	path, err := required(r.GetVolumeId(), "staging target path", r.GetStagingTargetPath())
	if err != nil {
		return nil, err
	}
	id, err := volume.ParseID(r.GetVolumeId())
	if err != nil {
		return &csi.NodeUnstageVolumeResponse{}, nil // no ID of this driver's volumes, so it is staged nowhere
	}
	if err := s.unstage(ctx, id, path); err != nil {
		return nil, fmt.Errorf("unstage volume %s: %w", r.GetVolumeId(), err)
	}
	return &csi.NodeUnstageVolumeResponse{}, nil
}

func (s *Server) unstage(ctx context.Context, id volume.ID, path string) error {
	_ = s.checks.forget(id.Key) // it was kept for another try to stage the volume
	held, asked, err := s.devicesOf(ctx, id)
	if err != nil {
		return err
	}
	place := path
	at, err := mountedAt(place)
	if err == nil && !at.mounted {
		place = marker(path)
		at, err = mountedAt(place)
	}
	if err != nil {
		return err
	}
	if at.mounted && !at.of(id, held) {
		if len(held) == 0 {
			return nil // the volume has no device here, so it is not staged; what is mounted is another volume
		}
		return at.other(place, held)
	}
	if at.mounted && !slices.Contains(held, at.device) {
		held = append(held, at.device)
	}
	others, err := s.otherMounts(ctx, id, held, place)
	if err != nil {
		return err
	}
	if len(others) > 0 {
		return fmt.Errorf("%w: it is still published at %s; unpublish it there first", errdefs.ErrInUse, others[0])
	}
	relimit := func() {}
	if at.mounted { // the mount keeps the device, so the number is still its own
		relimit = s.volumes.Unlimit(ctx, at.device)
	}
	if place == path {
		err = mount.Unmount(path) // the directory stays: the caller made it
	} else {
		err = mount.RemoveTarget(place)
	}
	if err != nil {
		relimit()
		return err
	}
	s.mounts.Remove(at.device, place)
	left, err := s.otherMounts(ctx, id, held, "")
	if err != nil {
		return err
	}
	if len(left) > 0 { // at another name of the same directory (mount.Same), from where it was not unmounted, too
		return fmt.Errorf("%w: it is still mounted at %s; unmount it there first", errdefs.ErrInUse, left[0])
	}
	if asked {
		return s.volumes.Detach(ctx, id)
	}
	if at.mounted && place != path {
		return pools.DetachWithoutPool(ctx, at.device)
	}
	return nil // a device goes with its last mount; what is left otherwise goes when its pool can be asked again
}
