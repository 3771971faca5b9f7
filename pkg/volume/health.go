package volume

import (
	"context"
	"slices"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/mount"
)

// Health: see Store. It takes in what the kernel says of the mounted filesystem.
func (l *Local) Health(ctx context.Context, id ID) ([]blockdev.Problem, error) {
	pool, ref, err := l.object(id, blockdev.Volume)
	if err != nil {
		return nil, err
	}
	stack := l.stacks.Of(pool, ref)
	problems, err := stack.Health(ctx)
	if err != nil || len(problems) > 0 {
		return problems, err
	}
	v, err := l.Get(ctx, id)
	if err != nil {
		return nil, err
	}
	devices, err := stack.Attached(ctx)
	if err != nil {
		return nil, err
	}
	for _, device := range devices {
		if problems, mounted := l.filesystemHealth(device, v.Format.Type); mounted {
			return problems, nil
		}
	}
	return nil, nil
}

// filesystemHealth is what the kernel says of the filesystem on a device, at the first path where it is mounted; carries is
// what the record says it is.
func (l *Local) filesystemHealth(device blockdev.Device, carries filesystem.Type) (problems []blockdev.Problem, mounted bool) {
	for _, path := range l.mounts.Paths(device.Number) {
		info, err := mount.At(path)
		if err == nil && info.Node {
			continue
		}
		have := carries
		if err == nil { // a raw volume may carry what its user made
			have = filesystem.TypeOf(info.Statfs.Type)
		}
		problems := filesystem.Health(have, device.Path, path, l.mounts.Writable(device.Number, path))
		if len(problems) > 0 && !slices.Contains(l.mounts.Paths(device.Number), path) {
			continue // it was taken away meanwhile, and what is below it was looked at
		}
		return problems, true
	}
	return nil, false
}

// PoolHealth is what is wrong with the pools of this node.
func (l *Local) PoolHealth(ctx context.Context) []blockdev.Problem {
	var problems []blockdev.Problem
	for _, pool := range l.pools {
		problems = append(problems, pool.PoolHealth(ctx)...)
	}
	return problems
}
