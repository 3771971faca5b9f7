package node

import (
	"context"
	"fmt"
	"slices"

	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pools"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// mounted is what is mounted at a path.
type mounted struct {
	mounted bool
	dead    bool   // its filesystem does not answer
	device  uint64 // 0: not known
}

// mountedAt looks what is mounted at a path, alive or dead. A path that is not there has nothing.
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

// of reports whether it is a volume's, which holds some devices. A device that its pool does not
// know any more (its image was replaced, say, or the pool is not there) is known by its name.
// What is dead and of nobody can only be unmounted.
func (m mounted) of(id volume.ID, held []uint64) bool {
	if slices.Contains(held, m.device) || m.dead && m.device == 0 {
		return true
	}
	ref, known := pools.Owner(m.device)
	return known && ref.Kind == id.Kind && ref.Key == id.Key
}

func numbers(devices []blockdev.Device) []uint64 {
	var all []uint64
	for _, device := range devices {
		all = append(all, device.Number)
	}
	return all
}

// held returns the devices of a volume. A pool that cannot be asked (its disk is dead or not
// mounted, or it is not in the flags) keeps nobody from taking down what is there: then asked is false,
// and they are those that are mounted.
func (s *Server) held(ctx context.Context, id volume.ID) (held []uint64, asked bool, err error) {
	devices, err := s.volumes.Attached(ctx, id)
	if err == nil {
		return numbers(devices), true, nil
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

// elsewhere returns where devices are mounted but at a place, under whatever name that is seen.
func (s *Server) elsewhere(held []uint64, place string) []string {
	var paths []string
	for _, number := range held {
		for _, path := range s.mounts.Paths(number) {
			if path != place && !mount.Same(path, place) {
				paths = append(paths, path)
			}
		}
	}
	return paths
}

// single makes sure that a volume is mounted nowhere yet, as it has one staging path.
func (s *Server) single(ctx context.Context, id volume.ID, path string) error {
	devices, err := s.volumes.Attached(ctx, id)
	if err != nil {
		return err
	}
	if others := s.elsewhere(numbers(devices), path); len(others) > 0 {
		return fmt.Errorf("%w: it is not staged at %s, and mounted at %s; a volume has one staging path: unpublish and unstage it there first", errdefs.ErrInUse, path, others[0])
	}
	return nil
}
