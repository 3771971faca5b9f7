// Package node is the CSI Node service: the staged phase (a device with a filesystem,
// mounted once) and the published phase (bound to where a pod sees it).
//
// What is staged and published is what the kernel says: nothing is written down, and
// the calls that undo things need neither a record nor an API server.
package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
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
	Expand(ctx context.Context, id volume.ID, size volume.Range) (volume.Volume, error)
	// Ephemeral returns the inline ephemeral volume that the CO gave an ID to.
	Ephemeral(ctx context.Context, name string) (volume.Volume, error)
	// Blank reports whether nothing was ever written to a volume, which is attached as a device.
	Blank(ctx context.Context, id volume.ID, device blockdev.Device) (bool, error)
	// Used is how much of a volume has space, in bytes, where that is known.
	Used(ctx context.Context, id volume.ID) (used int64, known bool, err error)
	SetFormat(ctx context.Context, id volume.ID, format volume.Format) error
	// SetTarget and SetFlags record volume.Volume.Target and Flags.
	SetTarget(ctx context.Context, id volume.ID, target string) error
	SetFlags(ctx context.Context, id volume.ID, flags string) error
	// Claimed says how a volume is claimed that is to be used, for reading only or not, as far as that is known here.
	Claimed(ctx context.Context, v volume.Volume, readOnly bool) (claim volume.Claim, known bool)
	// Attach attaches a volume for writing; keep: until Detach, to be handed out as it is.
	Attach(ctx context.Context, v volume.Volume, keep bool) (blockdev.Device, error)
	// Attached and Detach need no record of the volume.
	Attached(ctx context.Context, id volume.ID) ([]blockdev.Device, error)
	Detach(ctx context.Context, id volume.ID) error
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

// find returns the volume of an ID as the CO knows it: one of ours, or that of an inline
// ephemeral volume.
func (s *Server) find(ctx context.Context, text string) (volume.Volume, error) {
	if text == "" {
		return volume.Volume{}, csimap.Missing("volume ID")
	}
	id, err := volume.ParseID(text)
	if err != nil {
		return s.volumes.Ephemeral(ctx, text)
	}
	return s.volumes.Get(ctx, id)
}

// required checks the two fields that most requests need: an ID, and a path that says
// where it leads. It returns the path as the kernel names what is mounted there.
func required(volumeID, field, path string) (string, error) {
	if volumeID == "" {
		return "", csimap.Missing("volume ID")
	}
	if path == "" {
		return "", csimap.Missing(field)
	}
	return mount.Resolve(path), mount.CleanPath(path)
}

// place is a mount of a volume: what is at a path, and which of its devices that is.
type place struct {
	mount.Info
	device blockdev.Device
}

// here looks at a path where the volume should be mounted: ErrNotFound if it is not.
func (s *Server) here(ctx context.Context, id volume.ID, path string) (place, error) {
	info, err := mount.At(path)
	if err != nil && !mount.Missing(err) {
		return place{}, fmt.Errorf("volume %s at %s: %w", id, path, err)
	}
	if err == nil && info.Root {
		devices, err := s.volumes.Attached(ctx, id)
		if err != nil {
			return place{}, err
		}
		for _, device := range devices {
			if device.Number == info.Device {
				s.mounts.Found(info.Device, path, !info.ReadOnly)
				return place{info, device}, nil
			}
		}
	}
	return place{}, fmt.Errorf("%w: volume %s is not at %s", errdefs.ErrNotFound, id, path)
}

// hereOrStaged is here for a path of the caller's, which may also be the staging path of a block volume: a folder with the
// device in it.
func (s *Server) hereOrStaged(ctx context.Context, id volume.ID, path string) (place, error) {
	path = mount.Resolve(path)
	at, err := s.here(ctx, id, path)
	if errors.Is(err, errdefs.ErrNotFound) {
		device, markerErr := s.here(ctx, id, marker(path))
		if !errors.Is(markerErr, errdefs.ErrNotFound) {
			return device, markerErr
		}
	}
	return at, err
}

// use is how a request wants to use a volume.
type use struct {
	block    bool
	fs       filesystem.Type
	options  []string
	readOnly bool
	// exclusive: published at one target at the most.
	exclusive bool
}

func useOf(c *csi.VolumeCapability, publishContext map[string]string, readOnly bool) (use, error) {
	fsType, err := csimap.CheckCapabilities(c)
	if err != nil {
		return use{}, err
	}
	u := use{block: c.GetBlock() != nil, fs: fsType, options: c.GetMount().GetMountFlags(),
		exclusive: c.GetAccessMode().GetMode() == csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER}
	u.readOnly = readOnly || csimap.ReadOnly(c) || publishContext[csimap.ReadOnlyKey] == "true" || slices.Contains(mount.SplitOptions(u.options...), "ro")
	return u, nil
}

// claimed makes sure that a volume is claimed for this node, where that is asked for and as far
// as it is known. What was claimed for reading only is used for reading only.
func (s *Server) claimed(ctx context.Context, v volume.Volume, u *use) error {
	if !s.options.Claims {
		return nil
	}
	claim, known := s.volumes.Claimed(ctx, v, u.readOnly)
	if !known {
		return nil
	}
	if claim.Node != s.volumes.Node() {
		return fmt.Errorf("%w: it is not claimed for node %s (its claim is for node %q); publish it there first, at the controller", errdefs.ErrPrecondition, s.volumes.Node(), claim.Node)
	}
	u.readOnly = u.readOnly || claim.ReadOnly
	return nil
}

// NodeExpandVolume grows the filesystem of a staged or published volume to its device.
func (s *Server) NodeExpandVolume(ctx context.Context, r *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	if r.GetVolumeId() != "" && r.GetVolumePath() == "" {
		return nil, csimap.Missing("volume path")
	}
	v, err := s.find(ctx, r.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if c := r.GetVolumeCapability(); c != nil {
		if _, err := csimap.CheckCapabilities(c); err != nil {
			return nil, err
		}
	}
	at, err := s.hereOrStaged(ctx, v.ID, r.GetVolumePath())
	if err != nil {
		return nil, err
	}
	if required := r.GetCapacityRange().GetRequiredBytes(); required > v.Size {
		return nil, fmt.Errorf("%w: volume %s has %d bytes, %d are required; expand it at the controller first", errdefs.ErrOutOfRange, v.ID, v.Size, required)
	}
	// A retry after a crash may find the device smaller than its image.
	if v, err = s.volumes.Expand(ctx, v.ID, volume.Range{}); err != nil {
		return nil, err
	}
	if !at.Node {
		if err := s.grow(v, at.device); err != nil {
			return nil, err
		}
	}
	return &csi.NodeExpandVolumeResponse{CapacityBytes: v.Size}, nil
}

// grow grows the filesystem on a device, through any folder where it is mounted for writing.
func (s *Server) grow(v volume.Volume, device blockdev.Device) error {
	for _, path := range s.mounts.Paths(device.Number) {
		if info, err := mount.At(path); err == nil && info.Folder && !info.ReadOnly {
			return filesystem.Grow(filesystem.TypeOf(info.Statfs.Type), device.Path, path)
		}
	}
	return fmt.Errorf("%w: the filesystem of volume %s is mounted read-only and cannot grow", errdefs.ErrPrecondition, v.ID)
}

// NodeGetVolumeStats measures a filesystem or a device.
func (s *Server) NodeGetVolumeStats(ctx context.Context, r *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	if r.GetVolumeId() != "" && r.GetVolumePath() == "" {
		return nil, csimap.Missing("volume path")
	}
	v, err := s.find(ctx, r.GetVolumeId())
	if err != nil {
		return nil, err
	}
	at, err := s.hereOrStaged(ctx, v.ID, r.GetVolumePath())
	if err != nil {
		return nil, err
	}
	if at.Node {
		usage := &csi.VolumeUsage{Unit: csi.VolumeUsage_BYTES, Total: v.Size}
		used, known, err := s.volumes.Used(ctx, v.ID)
		if err != nil {
			return nil, err
		}
		if known {
			usage.Used, usage.Available = used, v.Size-used
		}
		return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{usage}}, nil
	}
	u := filesystem.UsageOf(at.Statfs) // the path may be that of another filesystem by now
	response := &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{{
		Unit: csi.VolumeUsage_BYTES, Total: u.Total, Used: u.Used, Available: u.Available}}}
	if u.Inodes > 0 { // btrfs has no count of them
		response.Usage = append(response.Usage, &csi.VolumeUsage{
			Unit: csi.VolumeUsage_INODES, Total: u.Inodes, Used: u.InodesUsed, Available: u.InodesAvailable})
	}
	return response, nil
}

// NodeGetVolumeHealth says what the pool and the kernel know to be wrong with a volume.
func (s *Server) NodeGetVolumeHealth(ctx context.Context, r *csi.NodeGetVolumeHealthRequest) (*csi.NodeGetVolumeHealthResponse, error) {
	if r.GetVolumeId() == "" {
		return nil, csimap.Missing("volume ID")
	}
	id, err := volume.ParseID(r.GetVolumeId())
	if err != nil {
		v, err := s.volumes.Ephemeral(ctx, r.GetVolumeId())
		if err != nil {
			return nil, err
		}
		id = v.ID
	}
	problems, err := s.volumes.Health(ctx, id)
	if err != nil {
		return nil, err
	}
	return &csi.NodeGetVolumeHealthResponse{VolumeHealth: csimap.Health(r.GetVolumeId(), problems)}, nil
}

// NodeGetStorageHealth says what is wrong with the pools of the node.
func (s *Server) NodeGetStorageHealth(ctx context.Context, _ *csi.NodeGetStorageHealthRequest) (*csi.NodeGetStorageHealthResponse, error) {
	response := &csi.NodeGetStorageHealthResponse{}
	type kind struct {
		status csi.StorageHealthErrorType
		reason string
	}
	entries := map[kind]*csi.NodeGetStorageHealthResponse_StorageBackendHealth{}
	for _, p := range s.volumes.PoolHealth(ctx) {
		k := kind{csi.StorageHealthErrorType_STORAGE_DEGRADED, p.Reason}
		if p.Severity != blockdev.Degraded {
			k.status = csi.StorageHealthErrorType_STORAGE_UNREACHABLE
		}
		// One entry for each status and reason (NodeGetStorageHealthResponse).
		if have := entries[k]; have != nil {
			have.Message += "; " + p.Message
			continue
		}
		entries[k] = &csi.NodeGetStorageHealthResponse_StorageBackendHealth{Status: k.status, Reason: k.reason, Message: p.Message}
		response.BackendHealth = append(response.BackendHealth, entries[k])
	}
	return response, nil
}
