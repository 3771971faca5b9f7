// Package node is the CSI Node service: the staged phase (a device with a filesystem,
// mounted once) and the published phase (bound to where a pod sees it).
//
// What is staged and published is what the kernel says: nothing is written down, and
// the calls that undo things need neither a record nor an API server.
package node

import (
	"context"
	"maps"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// Volumes is what the service needs of the volumes of its node; volume.Local is it.
type Volumes interface {
	Node() string
	// Topology is where the node is, beside its name: segments of a CSI topology.
	Topology(ctx context.Context) (map[string]string, error)
	Get(ctx context.Context, id volume.ID) (volume.Volume, error)
	Create(ctx context.Context, spec volume.Spec) (volume.Volume, error)
	Delete(ctx context.Context, id volume.ID) error
	// Grow brings the devices of a volume to its size.
	Grow(ctx context.Context, id volume.ID, key volume.Key) (volume.Volume, error)
	// Ephemeral returns the inline ephemeral volume that the CO gave an ID to.
	Ephemeral(ctx context.Context, name string) (volume.Volume, error)
	// Used is how much of a volume has space, in bytes, where that is known.
	Used(ctx context.Context, id volume.ID) (used int64, known bool, err error)
	// SetTarget and SetFlags record volume.Volume.Target and Flags.
	SetTarget(ctx context.Context, id volume.ID, target string) error
	SetFlags(ctx context.Context, id volume.ID, flags string) error
	// Claimed says how a volume is claimed that is to be used, for reading only or not, as far as that is known here.
	Claimed(ctx context.Context, v volume.Volume, readOnly bool) (claim volume.Claim, known bool)
	// Attach attaches a volume to be mounted, AttachRaw until Detach, to be handed out as it is. The key is that of one that is encrypted.
	Attach(ctx context.Context, v volume.Volume, key volume.Key) (blockdev.Device, error)
	AttachRaw(ctx context.Context, v volume.Volume, key volume.Key, writable bool) (blockdev.Device, error)
	// AttachToRead attaches a volume that many nodes read (volume.Claim.Many), to be mounted, or with raw to be handed out, until Detach: nobody can write to it.
	AttachToRead(ctx context.Context, v volume.Volume, raw bool) (blockdev.Device, error)
	// Format makes sure that a device of a volume carries a filesystem; it makes one only on a blank volume.
	Format(ctx context.Context, v *volume.Volume, device blockdev.Device, want filesystem.Type, flags string) (made bool, err error)
	// Attached and Detach need no record of the volume.
	Attached(ctx context.Context, id volume.ID) ([]blockdev.Device, error)
	Detach(ctx context.Context, id volume.ID) error
	// Limit has pods do no more to the device of a volume than the volume's parameters say. Unlimit takes the limits of devices away that no pod
	// uses; undo sets them again.
	Limit(v volume.Volume, device blockdev.Device) error
	Unlimit(ctx context.Context, devices ...uint64) (undo func())
	Health(ctx context.Context, id volume.ID) ([]blockdev.Problem, error)
	PoolHealth(ctx context.Context) []blockdev.Problem
}

// Server serves the Node service.
type Server struct {
	csi.UnimplementedNodeServer
	volumes Volumes
	mounts  *mount.Table
	options Options
	checks  checks
}

// Options are what the operator of the node decides.
type Options struct {
	// MaxVolumes is how many volumes the node can have, 0 for any number.
	MaxVolumes int64
	Ephemeral  Ephemeral
	// Claims: a volume has to be claimed for this node before it is staged or published here
	// (in Kubernetes: CSIDriver.spec.attachRequired).
	Claims bool
}

// New returns the service. What it goes on with after its caller has gone ends with ctx; mounts
// is shared with the volumes.
func New(ctx context.Context, volumes Volumes, mounts *mount.Table, o Options) *Server {
	return &Server{volumes: volumes, mounts: mounts, options: o, checks: checks{driver: ctx}}
}

// NodeGetCapabilities lists what the node can do. VOLUME_MOUNT_GROUP is not there: the
// kubelet changes the group of files, as it alone knows fsGroupChangePolicy.
func (s *Server) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	var capabilities []*csi.NodeServiceCapability
	for _, rpc := range []csi.NodeServiceCapability_RPC_Type{
		csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME,
		csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
		csi.NodeServiceCapability_RPC_EXPAND_VOLUME,
		csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
		csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH,
		csi.NodeServiceCapability_RPC_GET_STORAGE_HEALTH,
	} {
		capabilities = append(capabilities, &csi.NodeServiceCapability{
			Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: rpc}}})
	}
	return &csi.NodeGetCapabilitiesResponse{Capabilities: capabilities}, nil
}

// NodeGetInfo returns the node's name, place and limit.
func (s *Server) NodeGetInfo(ctx context.Context, _ *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	place, err := s.volumes.Topology(ctx)
	if err != nil {
		return nil, err
	}
	topology := csimap.Topology(s.volumes.Node())
	maps.Copy(topology.Segments, place)
	return &csi.NodeGetInfoResponse{NodeId: s.volumes.Node(), MaxVolumesPerNode: s.options.MaxVolumes, AccessibleTopology: topology}, nil
}
