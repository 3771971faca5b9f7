package cluster

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
)

// room is a pool, and what can still be promised of it.
type room struct {
	*v1alpha1.Pool
	available, maxVolume int64
}

// rooms returns the pools of a name, or with none the default pools, of some nodes, or with
// none of all; ErrInvalid if no node at all has such a pool. What was made or is being made
// since a pool was measured is taken off: that takes the longer the more volumes the node has,
// so nobody should ask for nodes that do not matter.
func (s *Store) rooms(ctx context.Context, pool string, nodes []string) (map[string]room, error) {
	if err := s.Ready(ctx); err != nil {
		return nil, err
	}
	var pools v1alpha1.PoolList
	options := []client.ListOption{client.UnsafeDisableDeepCopy}
	if pool != "" {
		options = append(options, client.MatchingFields{byPool: pool})
	}
	if err := s.client.List(ctx, &pools, options...); err != nil {
		return nil, apiError("list pools", err)
	}
	found := map[string]room{}
	known := false
	for i := range pools.Items {
		p := &pools.Items[i]
		if pool == "" && !p.Spec.Default {
			continue
		}
		known = true
		if len(nodes) > 0 && !slices.Contains(nodes, p.Spec.NodeName) {
			continue
		}
		promised, err := s.unseen(ctx, p)
		if err != nil {
			return nil, err
		}
		found[p.Spec.NodeName] = room{p, max(0, p.Status.Available-promised), max(0, p.Status.MaxVolume-promised)}
	}
	if !known {
		return nil, fmt.Errorf("%w: parameter pool=%q: no node has such a pool", blockdev.ErrInvalid, pool)
	}
	return found, nil
}

// unseen is how much was promised of a pool that its figures do not have yet.
func (s *Store) unseen(ctx context.Context, p *v1alpha1.Pool) (int64, error) {
	later := func(pool string, status *v1alpha1.ObjectStatus) bool {
		return pool == p.Spec.Pool && (status.Created == nil || p.Status.Measured == nil || status.Created.After(p.Status.Measured.Time))
	}
	var volumes v1alpha1.VolumeList
	var snapshots v1alpha1.SnapshotList
	here := client.MatchingFields{byNode: p.Spec.NodeName}
	if err := s.client.List(ctx, &volumes, here, client.UnsafeDisableDeepCopy); err != nil {
		return 0, apiError("list volumes", err)
	}
	if err := s.client.List(ctx, &snapshots, here, client.UnsafeDisableDeepCopy); err != nil {
		return 0, apiError("list snapshots", err)
	}
	var promised int64
	for i := range volumes.Items {
		if v := &volumes.Items[i]; later(v.Spec.Pool, v.Common()) {
			promised += v.Spec.Size
		} else if v.Spec.Pool == p.Spec.Pool {
			promised += max(0, v.Spec.Size-v.Status.Size) // it is growing
		}
	}
	for i := range snapshots.Items {
		if s := &snapshots.Items[i]; later(s.Spec.Pool, s.Common()) {
			promised += s.Status.Size
		}
	}
	return promised, nil
}

// place chooses the node and pool of a new volume: of the nodes that are allowed the first
// that has room; of any, the one with most. If none seems to have room, the best one is
// asked all the same: its figures may be old, and the node's answer is not.
func (s *Store) place(ctx context.Context, pool string, nodes []string, size int64) (node, in string, err error) {
	found, err := s.rooms(ctx, pool, nodes)
	if err != nil {
		return "", "", err
	}
	var fit []room
	var down error
	for name, r := range found {
		if err := s.nodeReady(ctx, name); err != nil {
			down = err
			continue
		}
		fit = append(fit, r)
	}
	if len(fit) == 0 && down != nil {
		return "", "", down
	}
	if len(fit) == 0 {
		return "", "", fmt.Errorf("%w: no pool %q on any of the nodes %v", blockdev.ErrNoSpace, pool, nodes)
	}
	best := slices.MinFunc(fit, func(a, b room) int {
		full := func(r room) int {
			if r.maxVolume < size {
				return 1
			}
			return 0
		}
		return cmp.Or(cmp.Compare(full(a), full(b)),
			cmp.Compare(slices.Index(nodes, a.Spec.NodeName), slices.Index(nodes, b.Spec.NodeName)),
			cmp.Compare(b.available, a.available), cmp.Compare(a.Spec.NodeName, b.Spec.NodeName))
	})
	return best.Spec.NodeName, best.Spec.Pool, nil
}

// granularity is what sizes in a pool of a node are multiples of.
func (s *Store) granularity(ctx context.Context, node, pool string) (int64, error) {
	var p v1alpha1.Pool
	if err := s.client.Get(ctx, client.ObjectKey{Name: PoolName(node, pool)}, &p); err != nil {
		return 0, apiError(fmt.Sprintf("read pool %s of node %s", pool, node), err)
	}
	return max(p.Status.Granularity, blockdev.Granularity), nil
}

// Capacity: see volume.Store. With no node it is that of all nodes together; a node that is
// not ready has none.
func (s *Store) Capacity(ctx context.Context, pool, node string) (blockdev.Capacity, error) {
	var nodes []string
	if node != "" {
		nodes = []string{node}
	}
	found, err := s.rooms(ctx, pool, nodes)
	if err != nil {
		return blockdev.Capacity{}, err
	}
	var c blockdev.Capacity
	for name, r := range found {
		if s.nodeReady(ctx, name) != nil {
			continue
		}
		c.Total += r.Status.Total
		c.Promised += r.Status.Promised + (r.Status.Available - r.available)
		c.Available += r.available
		c.MaxVolume = max(c.MaxVolume, r.maxVolume)
		if c.MinVolume == 0 || r.Status.MinVolume < c.MinVolume {
			c.MinVolume = r.Status.MinVolume
		}
	}
	return c, nil
}
