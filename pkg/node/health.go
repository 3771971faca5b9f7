package node

import (
	"context"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// NodeGetVolumeStats returns how much of a filesystem is used, in bytes and inodes; of a block volume how many bytes it takes in its pool, if that is known.
// ErrNotFound if the volume is not at the path.
func (s *Server) NodeGetVolumeStats(ctx context.Context, r *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	if r.GetVolumeId() != "" && r.GetVolumePath() == "" {
		return nil, csimap.Missing("volume path")
	}
	v, err := s.find(ctx, r.GetVolumeId())
	if err != nil {
		return nil, err
	}
	at, err := s.findPublished(ctx, v.ID, r.GetVolumePath())
	if err != nil {
		return nil, err
	}
	if at.Node {
		usage := &csi.VolumeUsage{Unit: csi.VolumeUsage_BYTES, Total: v.Size}
		used, known, err := s.volumes.Used(ctx, v.ID)
		if err != nil {
			return nil, err
		}
		if known { // at most the size: what is used includes the header of an encrypted volume, and the size does not
			usage.Used = min(used, v.Size)
			usage.Available = v.Size - usage.Used
		}
		return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{usage}}, nil
	}
	u := filesystem.UsageOf(at.Statfs) // not of the path, where another filesystem may be by now
	response := &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{{
		Unit: csi.VolumeUsage_BYTES, Total: u.Total, Used: u.Used, Available: u.Available}}}
	if u.Inodes > 0 { // btrfs has no number of inodes
		response.Usage = append(response.Usage, &csi.VolumeUsage{
			Unit: csi.VolumeUsage_INODES, Total: u.Inodes, Used: u.InodesUsed, Available: u.InodesAvailable})
	}
	return response, nil
}

// NodeGetVolumeHealth returns what the pool and the kernel know to be wrong with a volume; ErrNotFound if there is no such volume. ErrUnavailable for an inline
// ephemeral volume whose pool is not open.
func (s *Server) NodeGetVolumeHealth(ctx context.Context, r *csi.NodeGetVolumeHealthRequest) (*csi.NodeGetVolumeHealthResponse, error) {
	if r.GetVolumeId() == "" {
		return nil, csimap.Missing("volume ID")
	}
	id, err := volume.ParseID(r.GetVolumeId())
	if err != nil {
		v, err := s.findEphemeral(ctx, r.GetVolumeId())
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

// NodeGetStorageHealth returns what is wrong with the pools of the node.
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
		// CSI has one entry for each status and reason (NodeGetStorageHealthResponse).
		if have := entries[k]; have != nil {
			have.Message += "; " + p.Message
			continue
		}
		entries[k] = &csi.NodeGetStorageHealthResponse_StorageBackendHealth{Status: k.status, Reason: k.reason, Message: p.Message}
		response.BackendHealth = append(response.BackendHealth, entries[k])
	}
	if err := ctx.Err(); err != nil { // a pool that did not answer in time may be missing from the list, as if it were well
		return nil, fmt.Errorf("ask the pools of the node how they are: %w", err)
	}
	return response, nil
}
