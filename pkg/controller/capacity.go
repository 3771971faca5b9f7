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

// GetCapacity returns what the pools of a class can still promise together, and the largest volume that one of them can.
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

// capacity is that of some nodes, for volumes of a class.
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

// apart is capacity for volumes with replicas: the first one is on one of the nodes, the others are elsewhere in its network, each in a place of its own.
func (s *Server) apart(ctx context.Context, p csimap.Parameters, nodes []string) (all blockdev.Capacity, _ error) {
	networks, err := s.networks(ctx)
	if err != nil {
		return blockdev.Capacity{}, err
	}
	places, err := s.reach.Places(ctx, p.Replicas.TopologyKey)
	if err != nil {
		return blockdev.Capacity{}, err
	}
	within := map[string]bool{} // the networks of the nodes
	for _, node := range nodes {
		within[networks[node]] = true
	}
	for network := range within {
		one, err := s.apartIn(ctx, p, nodes, func(node string) string {
			if networks[node] != network {
				return ""
			}
			return places[node]
		}, slices.Sorted(maps.Keys(networks)))
		if err != nil {
			return blockdev.Capacity{}, err
		}
		all = all.And(one)
	}
	return all, nil
}

// apartIn is apart in one network. place is where a node is; empty: none of its volumes may be there.
func (s *Server) apartIn(ctx context.Context, p csimap.Parameters, nodes []string, place func(node string) string, known []string) (own blockdev.Capacity, _ error) {
	in := map[string]blockdev.Capacity{} // by place
	add := func(node string) (one blockdev.Capacity, err error) {
		if at := place(node); at != "" {
			one, err = s.store.Capacity(ctx, p.Pool, p.Encryption.Scheme, node)
			in[at] = in[at].And(one)
		}
		return one, err
	}
	for _, node := range nodes {
		one, err := add(node)
		if err != nil {
			return blockdev.Capacity{}, err
		}
		own = own.And(one)
	}
	first := maps.Clone(in)
	for _, node := range known {
		if _, is := first[place(node)]; is || place(node) == "" {
			continue
		}
		enough := 0 // places beside these that are no limit
		for at, c := range in {
			if _, is := first[at]; !is && c.Available >= own.Available && c.MaxVolume >= own.MaxVolume {
				enough++
			}
		}
		if enough >= p.Replicas.Legs()-1 {
			break // so much is there that further nodes make no difference
		}
		if _, err := add(node); err != nil {
			return blockdev.Capacity{}, err
		}
	}
	places := map[string]overview.Room{}
	for at, c := range in {
		places[at] = overview.Room{Available: c.Available, Largest: c.MaxVolume}
	}
	room := overview.Room{Available: own.Available, Largest: own.MaxVolume}.Apart(places, p.Replicas.Legs())
	own.Available, own.MaxVolume = room.Available, room.Largest
	return own, nil
}

// homes are the nodes of a topology that can have volumes with some access; an empty name stands for all nodes.
func (s *Server) homes(ctx context.Context, access volume.Access, topology *csi.Topology) ([]string, error) {
	if err := s.reaches(access, volume.Replicas{}); err != nil {
		return nil, err
	}
	nodes := []string{""}
	if topology != nil {
		var err error
		nodes, err = s.nodesIn(ctx, topology.GetSegments())
		if errors.Is(err, errdefs.ErrNoSpace) || errors.Is(err, errdefs.ErrInvalid) { // nobody of ours is there
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
