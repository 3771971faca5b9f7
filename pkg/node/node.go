// Package node is the CSI Node service. It stages a volume (attaches it and mounts its filesystem, once), and publishes it (binds it to where a pod sees it).
//
// The kernel, and not a record, says which volumes are staged and published, and where. So to unpublish and to unstage needs neither a record nor an API server;
// only the deletion of an inline ephemeral volume needs its record.
//
// The caller serialises calls for the same volume, except those that only look (pkg/rpc).
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

// Volumes is what the service needs of the volumes of its node: volume.Local, or volume.Everywhere.
type Volumes interface {
	Node() string
	// Topology returns where the node is: the segments of its CSI topology, without that of its name.
	Topology(ctx context.Context) (map[string]string, error)
	Get(ctx context.Context, id volume.ID) (volume.Volume, error)
	Create(ctx context.Context, spec volume.Spec) (volume.Volume, error)
	Delete(ctx context.Context, id volume.ID) error
	// Grow brings the devices of a volume to its size. An encrypted one that is attached needs its key for that.
	Grow(ctx context.Context, id volume.ID, key volume.Key) (volume.Volume, error)
	// Ephemeral returns the inline ephemeral volume with an ID of the CO's; ErrNotFound if no open pool has it.
	Ephemeral(ctx context.Context, name string) (volume.Volume, error)
	// Closed returns the names of the pools of this node that are not open.
	Closed() []string
	// Used returns how many bytes a volume takes in its pool, with the header of an encrypted one; known is false if the pool cannot tell.
	Used(ctx context.Context, id volume.ID) (used int64, known bool, err error)
	// SetTarget and SetFlags record volume.Volume.Target and Flags durably.
	SetTarget(ctx context.Context, id volume.ID, target string) error
	SetFlags(ctx context.Context, id volume.ID, flags string) error
	// AwaitClaim waits, not for long, until this node knows of its claim of a volume by that generation or a later one. It is called before Get, which goes by
	// what is known. ErrUnavailable if there is a later claim than this node knows of, or that cannot be found out.
	AwaitClaim(ctx context.Context, id volume.ID, generation int64) error
	// Claimed returns the claim of a volume that is to be used on this node, for reading only or not; known is false if this node does not know it.
	Claimed(ctx context.Context, v volume.Volume, readOnly bool) (claim volume.Claim, known bool)
	// Attach attaches a volume to be mounted: its device goes with its last user. AttachRaw attaches a volume until Detach, to be handed out as it is; if
	// writable, it is recorded as raw before. An encrypted volume needs its key: volume.ErrNoKey or volume.ErrKey without the right one.
	Attach(ctx context.Context, v volume.Volume, key volume.Key) (blockdev.Device, error)
	AttachRaw(ctx context.Context, v volume.Volume, key volume.Key, writable bool) (blockdev.Device, error)
	// AttachToRead attaches a volume that many nodes read (volume.Claim.Many), to be mounted, or with raw to be handed out. Nobody can write to its device.
	AttachToRead(ctx context.Context, v volume.Volume, raw bool) (blockdev.Device, error)
	// Format makes sure that a device of a volume carries a filesystem. It makes one only on a volume that never had any bytes of its user, and then records
	// the flags (SetFlags) too. ErrPrecondition if the device carries something else, ErrDataLoss if what it carried is gone.
	Format(ctx context.Context, v *volume.Volume, device blockdev.Device, want filesystem.Type, flags string) (made bool, err error)
	// Attached returns the devices of a volume, Detach removes them. Both need no record of the volume.
	Attached(ctx context.Context, id volume.ID) ([]blockdev.Device, error)
	Detach(ctx context.Context, id volume.ID) error
	// Limit sets the limits of I/O of a volume, as its parameters say, for one of its devices. Unlimit takes away the limits of devices that no pod uses;
	// undo sets them again.
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
	// MaxVolumes is how many volumes the node can have; 0 for any number.
	MaxVolumes int64
	Ephemeral  Ephemeral
	// Claims: a volume has to be claimed for this node before it is staged or published here
	// (in Kubernetes: CSIDriver.spec.attachRequired).
	Claims bool
}

// New returns the service. mounts is the table that volumes uses, too. ctx is that of the driver: with it end the checks of filesystems that go on after
// their callers have gone.
func New(ctx context.Context, volumes Volumes, mounts *mount.Table, o Options) *Server {
	return &Server{volumes: volumes, mounts: mounts, options: o, checks: checks{driver: ctx}}
}

// NodeGetCapabilities lists what the node can do. VOLUME_MOUNT_GROUP is left to the kubelet, which alone knows fsGroupChangePolicy.
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

// NodeGetInfo returns the node's name, its topology, and how many volumes it can have. ErrUnavailable while a label for the topology is not known.
func (s *Server) NodeGetInfo(ctx context.Context, _ *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	place, err := s.volumes.Topology(ctx)
	if err != nil {
		return nil, err
	}
	topology := csimap.Topology(s.volumes.Node())
	maps.Copy(topology.Segments, place)
	return &csi.NodeGetInfoResponse{NodeId: s.volumes.Node(), MaxVolumesPerNode: s.options.MaxVolumes, AccessibleTopology: topology}, nil
}
