package volume

import (
	"context"
	"slices"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/device"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/mount"
)

// Health: see Store. Problems of the devices, which explain those above them, are returned alone. Otherwise the first are returned of: those of a move
// and of the export; those of the mounted filesystem; those of the limits. Lost marks of a leg are returned beside them.
func (l *Local) Health(ctx context.Context, id ID) ([]blockdev.Problem, error) {
	pool, ref, err := l.object(id, blockdev.Volume)
	if err != nil {
		return nil, err
	}
	stack := l.stacks.Of(pool, ref)
	problems, err := stack.Health(ctx)
	if err != nil || slices.ContainsFunc(problems, func(p blockdev.Problem) bool { return p.Reason != device.ReasonMarksLost }) {
		return problems, err
	}
	above, err := l.healthAbove(ctx, id, stack)
	return append(above, problems...), err
}

// healthAbove returns the problems of a volume above its devices.
func (l *Local) healthAbove(ctx context.Context, id ID, stack device.Stack) ([]blockdev.Problem, error) {
	v, err := l.Get(ctx, id)
	if err != nil {
		return nil, err
	}
	if problems := append(l.leftHealth(v), l.exportHealth(v)...); len(problems) > 0 {
		return problems, nil
	}
	devices, err := stack.Attached(ctx)
	if err != nil {
		return nil, err
	}
	for _, device := range devices {
		if problems, _, err := l.filesystemHealth(device, v.Format.Type); len(problems) > 0 || err != nil {
			return problems, err
		}
	}
	return l.limitsHealth(v, devices)
}

// filesystemHealth returns the problems of the filesystem on a device, as the kernel tells them, by the first of its mounts; a bind of the device's node is
// none. mounted is false if there is no mount. carries is the filesystem in the volume's record. An error says nothing of the filesystem: the machine or this
// process has no file descriptors or memory left.
func (l *Local) filesystemHealth(device blockdev.Device, carries filesystem.Type) (problems []blockdev.Problem, mounted bool, err error) {
	for _, m := range l.mounts.Mounts(device.Number) {
		switch {
		case mount.Starved(m.Err):
			return nil, false, m.Err
		case m.Err != nil:
			return []blockdev.Problem{filesystem.ShutDown(carries, device.Path, m.Path, m.Err)}, true, nil
		case !m.Info.Node:
			// by the kernel, as a raw volume may carry what its user made
			t := filesystem.TypeOf(m.Info.Statfs.Type)
			return filesystem.Health(t, device.Path, m.Path, m.Writable, m.Info.ReadOnly), true, nil
		}
	}
	return nil, false, nil
}

// PoolHealth returns what is wrong with the pools of this node.
func (l *Local) PoolHealth(ctx context.Context) []blockdev.Problem {
	var problems []blockdev.Problem
	for _, pool := range l.pools {
		problems = append(problems, pool.PoolHealth(ctx)...)
	}
	return problems
}
