package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pools"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// volumeMount is a mount of a volume: what is at a path, and which of its devices that is.
type volumeMount struct {
	mount.Info
	device blockdev.Device
}

// find returns the volume of an ID that the CO uses: an ID of this driver, or that of an inline ephemeral volume.
func (s *Server) find(ctx context.Context, text string) (volume.Volume, error) {
	if text == "" {
		return volume.Volume{}, csimap.Missing("volume ID")
	}
	id, err := volume.ParseID(text)
	if err != nil {
		return s.findEphemeral(ctx, text)
	}
	return s.volumes.Get(ctx, id)
}

// findEphemeral returns the inline ephemeral volume with an ID of the CO's. ErrNotFound if there is none; ErrUnavailable if a pool that may have it is not
// open.
func (s *Server) findEphemeral(ctx context.Context, text string) (volume.Volume, error) {
	v, err := s.volumes.Ephemeral(ctx, text)
	if closed := s.volumes.Closed(); errors.Is(err, errdefs.ErrNotFound) && len(closed) > 0 {
		err = fmt.Errorf("%w: no open pool has a volume %q, and these are not open: %s", errdefs.ErrUnavailable, text, strings.Join(closed, ", "))
	}
	return v, err
}

// volumeAt returns the mount of a volume at a path; ErrNotFound if the volume is not mounted there. A mount that was not in s.mounts is added.
func (s *Server) volumeAt(ctx context.Context, id volume.ID, path string) (volumeMount, error) {
	info, err := mount.At(path)
	if err != nil && !mount.Missing(err) {
		return volumeMount{}, fmt.Errorf("volume %s at %s: %w", id, path, err)
	}
	if err == nil && info.Root {
		devices, err := s.volumes.Attached(ctx, id)
		if err != nil {
			return volumeMount{}, err
		}
		for _, device := range devices {
			if device.Number == info.Device {
				s.mounts.Found(info.Device, path, !info.ReadOnly)
				return volumeMount{info, device}, nil
			}
		}
	}
	return volumeMount{}, fmt.Errorf("%w: volume %s is not at %s", errdefs.ErrNotFound, id, path)
}

// findPublished is volumeAt for a path of a request, which may also be the staging path of a block volume: then it returns the mount of the device at its
// marker.
func (s *Server) findPublished(ctx context.Context, id volume.ID, path string) (volumeMount, error) {
	path = mount.Resolve(path)
	at, err := s.volumeAt(ctx, id, path)
	if errors.Is(err, errdefs.ErrNotFound) {
		device, markerErr := s.volumeAt(ctx, id, marker(path))
		if !errors.Is(markerErr, errdefs.ErrNotFound) {
			return device, markerErr
		}
	}
	return at, err
}

// mounted is what is mounted at a path.
type mounted struct {
	mounted bool
	dead    bool   // it can only be unmounted (mount.Corrupted)
	device  uint64 // 0: not known
}

// mountedAt returns what is mounted at a path, alive or dead; nothing if the path does not exist. Other errors are those of mount.At.
func mountedAt(path string) (mounted, error) {
	info, err := mount.At(path)
	switch {
	case err == nil:
		return mounted{mounted: info.Root, device: info.Device}, nil
	case mount.Missing(err):
		return mounted{}, nil
	case mount.Corrupted(err):
		device, err := mount.DeviceOf(path)
		return mounted{mounted: true, dead: true, device: device}, err
	}
	return mounted{}, err
}

// of reports whether the mount is of a volume that has some devices. A device that the pool does not know any more, as its image was replaced or the pool
// is missing, is known by its name. A dead mount of no known device counts as this volume's, as it can only be unmounted.
func (m mounted) of(id volume.ID, held []uint64) bool {
	if slices.Contains(held, m.device) || m.dead && m.device == 0 {
		return true
	}
	ref, known := pools.Owner(m.device)
	return known && ref.Kind == id.Kind && ref.Key == id.Key
}

// other returns ErrPrecondition for a mount at a place that is not of the volume, which has the devices held.
func (m mounted) other(place string, held []uint64) error {
	has := "none"
	if len(held) > 0 {
		has = strings.Join(shown(held...), ", ")
	}
	return fmt.Errorf("%w: what is mounted at %s is not this volume but %s (the volume's devices here: %s); look at what it is (findmnt), and unmount it if nobody needs it",
		errdefs.ErrPrecondition, place, shown(m.device)[0], has)
}

// shown returns devices as findmnt and lsblk show them: by their names in the kernel, or by their numbers if they have none any more.
func shown(numbers ...uint64) (names []string) {
	for _, n := range numbers {
		number := fmt.Sprintf("%d:%d", unix.Major(n), unix.Minor(n))
		name, err := os.Readlink("/sys/dev/block/" + number)
		if err == nil {
			number = "/dev/" + filepath.Base(name)
		}
		names = append(names, number)
	}
	return names
}

// devicesOf returns the devices of a volume. If its pool cannot be asked (its disk is dead or not mounted, or it is not in the flags), asked is false, and
// they are those that are mounted: so what is there can still be taken down.
func (s *Server) devicesOf(ctx context.Context, id volume.ID) (held []uint64, asked bool, err error) {
	devices, err := s.volumes.Attached(ctx, id)
	if err == nil {
		return blockdev.Numbers(devices), true, nil
	}
	if ctx.Err() != nil {
		return nil, false, ctx.Err()
	}
	klog.FromContext(ctx).Info("A pool cannot be asked for a volume's devices; going by what is mounted", "volume", id.String(), "err", err.Error())
	for _, number := range s.mounts.Devices() {
		if ref, known := pools.Owner(number); known && ref.Kind == id.Kind && ref.Key == id.Key {
			held = append(held, number)
		}
	}
	return held, false, nil
}

// otherMounts returns where the devices of a volume are mounted, without one place under all its names. A device that goes meanwhile leaves its number to
// the next volume, so the device of each mount has to be this volume's still.
func (s *Server) otherMounts(ctx context.Context, id volume.ID, held []uint64, place string) (paths []string, err error) {
	for _, number := range held {
		others := slices.DeleteFunc(s.mounts.Paths(number), func(path string) bool { return path == place || mount.Same(path, place) })
		if len(others) == 0 {
			continue
		}
		now, _, err := s.devicesOf(ctx, id)
		if err != nil {
			return nil, err
		}
		if (mounted{device: number}).of(id, now) {
			paths = append(paths, others...)
		}
	}
	return paths, nil
}

// checkStagedOnce returns ErrInUse if a volume is mounted anywhere but at a path: CSI has one staging path for each volume.
func (s *Server) checkStagedOnce(ctx context.Context, id volume.ID, path string) error {
	devices, err := s.volumes.Attached(ctx, id)
	if err != nil {
		return err
	}
	others, err := s.otherMounts(ctx, id, blockdev.Numbers(devices), path)
	if err != nil {
		return err
	}
	if len(others) > 0 {
		return fmt.Errorf("%w: it is not staged at %s, and mounted at %s; a volume has one staging path: unpublish and unstage it there first", errdefs.ErrInUse, path, others[0])
	}
	return nil
}

// findMount returns what is at a path where something is to be mounted. It unmounts a dead mount first. ErrPrecondition if the path is not there.
func findMount(path string) (mount.Info, error) {
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

// marker returns where the device of a block volume is bound within the staging path. The mount there shows, also after a restart, that the volume is staged,
// and as which device.
func marker(stagingPath string) string { return filepath.Join(stagingPath, "device") }
