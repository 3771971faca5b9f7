package controller

import (
	"context"
	"errors"
	"maps"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// GetCapacity returns the bytes that the pools of a class still have for new volumes, together, and the size of the largest volume that one of them can have.
func (s *Server) GetCapacity(ctx context.Context, r *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	parameters, err := csimap.ParseParameters(r.GetParameters())
	if err != nil {
		return nil, err
	}
	floor := int64(blockdev.Granularity)
	if len(r.GetVolumeCapabilities()) > 0 {
		fs, err := csimap.CheckCapabilities(r.GetVolumeCapabilities()...)
		if err != nil {
			return nil, err
		}
		if fs != "" {
			floor = fs.MinSize()
		}
	}
	nodes, err := s.homes(ctx, parameters.Access, r.GetAccessibleTopology())
	if err != nil {
		return nil, err
	}
	c, err := s.capacity(ctx, parameters, nodes)
	if err != nil {
		return nil, err
	}
	return &csi.GetCapacityResponse{AvailableCapacity: c.Available, MaximumVolumeSize: wrapInt64(c.MaxVolume),
		MinimumVolumeSize: wrapInt64(max(c.MinVolume, floor))}, nil
}

// capacity returns the capacity of nodes for volumes of a class. The node "" stands for all.
func (s *Server) capacity(ctx context.Context, p csimap.Parameters, nodes []string) (all blockdev.Capacity, _ error) {
	if p.Replicas.Legs() > 1 {
		return s.apart(ctx, p, nodes)
	}
	for _, node := range nodes {
		one, err := s.store.Capacity(ctx, p.Pool, p.Encryption.Scheme, node)
		if err != nil {
			return blockdev.Capacity{}, err
		}
		all = all.And(one)
	}
	return all, nil
}

// apart is capacity for volumes with several legs. The first leg is on one of nodes; the others are on any nodes of its network, no two legs in one place
// (volume.Reacher).
func (s *Server) apart(ctx context.Context, p csimap.Parameters, nodes []string) (all blockdev.Capacity, _ error) {
	networks, err := s.networks(ctx)
	if err != nil {
		return blockdev.Capacity{}, err
	}
	places, err := s.reach.Places(ctx, p.Replicas.TopologyKey)
	if err != nil {
		return blockdev.Capacity{}, err
	}
	rooms := overview.Rooms{Replicas: p.Replicas.Legs()}
	add := func(node string, first bool) (one blockdev.Capacity, err error) {
		at := overview.Site{Network: networks[node], Name: places[node]}
		if at.Name == "" {
			return one, nil // no leg may be there
		}
		if one, err = s.store.Capacity(ctx, p.Pool, p.Encryption.Scheme, node); err == nil {
			rooms.Add(at, overview.Room{Available: one.Available, Largest: one.MaxVolume}, first)
		}
		return one, err
	}
	for _, node := range nodes {
		one, err := add(node, true)
		if err != nil {
			return blockdev.Capacity{}, err
		}
		all = all.And(one)
	}
	for _, node := range slices.Sorted(maps.Keys(networks)) {
		if slices.Contains(nodes, node) || rooms.Enough(networks[node]) {
			continue // asking for a capacity counts the volumes of the node
		}
		if _, err := add(node, false); err != nil {
			return blockdev.Capacity{}, err
		}
	}
	room := rooms.Sum()
	all.Available, all.MaxVolume = room.Available, room.Largest
	return all, nil
}

// homes returns the nodes of a topology that can have volumes with this access; "" stands for all nodes. It returns none if the topology matches no node.
func (s *Server) homes(ctx context.Context, access volume.Access, topology *csi.Topology) ([]string, error) {
	if err := s.reaches(access, volume.Replicas{}); err != nil {
		return nil, err
	}
	nodes := []string{""}
	if topology != nil {
		var err error
		nodes, err = s.nodesIn(ctx, topology.GetSegments())
		if errors.Is(err, errdefs.ErrNoSpace) || errors.Is(err, errdefs.ErrInvalid) { // the topology has no node of this driver
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
	}
	if access == volume.AccessNode {
		return nodes, nil
	}
	networks, err := s.networks(ctx)
	if topology == nil {
		nodes = slices.Collect(maps.Keys(networks))
	}
	return slices.DeleteFunc(nodes, func(node string) bool { return networks[node] == "" }), err
}
