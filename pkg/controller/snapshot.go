package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/types/known/timestamppb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

func wrapInt64(n int64) *wrapperspb.Int64Value { return wrapperspb.Int64(n) }

// CreateSnapshot makes a snapshot. ErrNoSpace if the request names nodes, and the source is on none of these.
func (s *Server) CreateSnapshot(ctx context.Context, r *csi.CreateSnapshotRequest) (*csi.CreateSnapshotResponse, error) {
	if err := checkName(r.GetName()); err != nil {
		return nil, err
	}
	source, err := parse(r.GetSourceVolumeId(), blockdev.Volume)
	if err != nil {
		return nil, err
	}
	if err := checkSnapshotParameters(r.GetParameters()); err != nil {
		return nil, err
	}
	nodes, err := s.nodesOf(ctx, r.GetAccessibilityRequirements())
	if err != nil {
		return nil, err
	}
	if len(nodes) > 0 {
		v, err := s.store.Get(ctx, source)
		if err == nil && !slices.Contains(nodes, v.Node) {
			return nil, fmt.Errorf("%w: a snapshot of volume %s can be used on node %s, not on %v", errdefs.ErrNoSpace, source, v.Node, nodes)
		}
		if err != nil && !errors.Is(err, errdefs.ErrNotFound) { // an existing snapshot does not need its source any more
			return nil, err
		}
	}
	snapshot, err := s.store.CreateSnapshot(ctx, r.GetName(), source)
	if err != nil {
		return nil, err
	}
	return &csi.CreateSnapshotResponse{Snapshot: toSnapshot(snapshot)}, nil
}

func checkSnapshotParameters(parameters map[string]string) error {
	for key := range parameters {
		// Both are for the CO. Kubernetes' test suite repeats the field deletionPolicy of a VolumeGroupSnapshotClass among the parameters.
		if !csimap.ForCO(key) && key != "deletionPolicy" {
			return fmt.Errorf("%w: unknown snapshot parameter %q; there are none", errdefs.ErrInvalid, key)
		}
	}
	return nil
}

// DeleteSnapshot: see the CSI specification.
func (s *Server) DeleteSnapshot(ctx context.Context, r *csi.DeleteSnapshotRequest) (*csi.DeleteSnapshotResponse, error) {
	id, err := parse(r.GetSnapshotId(), blockdev.Snapshot)
	if err == nil {
		err = s.store.DeleteSnapshot(ctx, id)
	}
	return &csi.DeleteSnapshotResponse{}, errdefs.IgnoreNotFound(err)
}

// GetSnapshot returns one snapshot.
func (s *Server) GetSnapshot(ctx context.Context, r *csi.GetSnapshotRequest) (*csi.GetSnapshotResponse, error) {
	id, err := parse(r.GetSnapshotId(), blockdev.Snapshot)
	if err != nil {
		return nil, err
	}
	snapshot, err := s.store.GetSnapshot(ctx, id)
	if err != nil {
		return nil, err
	}
	return &csi.GetSnapshotResponse{Snapshot: toSnapshot(snapshot)}, nil
}

// ListSnapshots lists all snapshots, those of one volume, or one snapshot. It lists nothing for IDs that are not there.
func (s *Server) ListSnapshots(ctx context.Context, r *csi.ListSnapshotsRequest) (*csi.ListSnapshotsResponse, error) {
	after, limit, err := page(r.GetMaxEntries(), r.GetStartingToken(), blockdev.Snapshot)
	if err != nil {
		return nil, err
	}
	snapshots, err := s.list(ctx, r, after, limit)
	if err = errdefs.IgnoreNotFound(err); err != nil {
		return nil, err
	}
	response := &csi.ListSnapshotsResponse{}
	response.Entries, response.NextToken, err = fillPage(snapshots, r.GetMaxEntries(), func(s volume.Snapshot) volume.ID { return s.ID },
		func(s volume.Snapshot) (*csi.ListSnapshotsResponse_Entry, bool, error) {
			return &csi.ListSnapshotsResponse_Entry{Snapshot: toSnapshot(s)}, true, nil
		})
	return response, err
}

func (s *Server) list(ctx context.Context, r *csi.ListSnapshotsRequest, after volume.ID, limit int) ([]volume.Snapshot, error) {
	var source volume.ID
	if text := r.GetSourceVolumeId(); text != "" {
		var err error
		if source, err = parse(text, blockdev.Volume); err != nil {
			return nil, err
		}
	}
	if r.GetSnapshotId() == "" {
		return s.store.ListSnapshots(ctx, source, after, limit)
	}
	id, err := parse(r.GetSnapshotId(), blockdev.Snapshot)
	if err != nil {
		return nil, err
	}
	snapshot, err := s.store.GetSnapshot(ctx, id)
	if err != nil || (source != (volume.ID{}) && snapshot.Source != source) {
		return nil, err
	}
	return []volume.Snapshot{snapshot}, nil
}

// GroupControllerGetCapabilities lists all capabilities of CSI 1.13.
func (s *Server) GroupControllerGetCapabilities(context.Context, *csi.GroupControllerGetCapabilitiesRequest) (*csi.GroupControllerGetCapabilitiesResponse, error) {
	return &csi.GroupControllerGetCapabilitiesResponse{Capabilities: []*csi.GroupControllerServiceCapability{{
		Type: &csi.GroupControllerServiceCapability_Rpc{Rpc: &csi.GroupControllerServiceCapability_RPC{
			Type: csi.GroupControllerServiceCapability_RPC_CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT}}}}}, nil
}

// CreateVolumeGroupSnapshot makes snapshots of several volumes at one point in time.
func (s *Server) CreateVolumeGroupSnapshot(ctx context.Context, r *csi.CreateVolumeGroupSnapshotRequest) (*csi.CreateVolumeGroupSnapshotResponse, error) {
	if err := checkName(r.GetName()); err != nil {
		return nil, err
	}
	if len(r.GetSourceVolumeIds()) == 0 {
		return nil, csimap.Missing("source volume IDs")
	}
	if err := checkSnapshotParameters(r.GetParameters()); err != nil {
		return nil, err
	}
	var sources []volume.ID
	for _, text := range r.GetSourceVolumeIds() {
		id, err := parse(text, blockdev.Volume)
		if err != nil {
			return nil, err
		}
		sources = append(sources, id)
	}
	group, err := s.store.CreateGroup(ctx, r.GetName(), sources)
	if err != nil {
		return nil, err
	}
	return &csi.CreateVolumeGroupSnapshotResponse{GroupSnapshot: toGroup(group)}, nil
}

func toGroup(g volume.Group) *csi.VolumeGroupSnapshot {
	out := &csi.VolumeGroupSnapshot{GroupSnapshotId: g.ID.String(), CreationTime: timestamppb.New(g.Created), ReadyToUse: true}
	for _, snapshot := range g.Snapshots {
		out.Snapshots = append(out.Snapshots, toSnapshot(snapshot))
	}
	return out
}

// getGroup returns the group with an ID. ErrInvalid if snapshot IDs are given, and they are not those of its members. If the store has no such group, or fails,
// the group that is returned with the error has its ID only.
func (s *Server) getGroup(ctx context.Context, text string, snapshotIDs []string) (volume.Group, error) {
	if text == "" {
		return volume.Group{}, csimap.Missing("group snapshot ID")
	}
	id, err := volume.ParseGroupID(text)
	if err != nil {
		return volume.Group{}, err
	}
	group, err := s.store.GetGroup(ctx, id)
	if err != nil {
		return volume.Group{ID: id}, err
	}
	var members []string
	for _, snapshot := range group.Snapshots {
		members = append(members, snapshot.ID.String())
	}
	given := slices.Clone(snapshotIDs)
	slices.Sort(given)
	slices.Sort(members)
	if len(given) > 0 && !slices.Equal(given, members) {
		return volume.Group{}, fmt.Errorf("%w: %s has the snapshots %v, not %v", errdefs.ErrInvalid, id, members, given)
	}
	return group, nil
}

// DeleteVolumeGroupSnapshot deletes a group and all its snapshots. ErrInvalid if the request names other snapshots than those of the group; else ErrUnavailable
// if the pool of one that it names is not there. In both cases nothing is deleted.
func (s *Server) DeleteVolumeGroupSnapshot(ctx context.Context, r *csi.DeleteVolumeGroupSnapshotRequest) (*csi.DeleteVolumeGroupSnapshotResponse, error) {
	group, err := s.getGroup(ctx, r.GetGroupSnapshotId(), r.GetSnapshotIds())
	if errdefs.IgnoreNotFound(err) != nil {
		return nil, err
	}
	for _, text := range r.GetSnapshotIds() {
		// Without this check the deletion could succeed without that snapshot, and the CO would not ask again.
		if id, err := volume.ParseID(text); err == nil && id.Kind == blockdev.Snapshot {
			if _, err := s.store.GetSnapshot(ctx, id); errors.Is(err, errdefs.ErrUnavailable) {
				return nil, fmt.Errorf("delete %s: %w", r.GetGroupSnapshotId(), err)
			}
		}
	}
	if group.ID.Key != "" {
		err = s.store.DeleteGroup(ctx, group.ID) // or the snapshots that are left of an incomplete group
	}
	return &csi.DeleteVolumeGroupSnapshotResponse{}, errdefs.IgnoreNotFound(err)
}

// GetVolumeGroupSnapshot returns a group. ErrInvalid if the request names other snapshots than its members.
func (s *Server) GetVolumeGroupSnapshot(ctx context.Context, r *csi.GetVolumeGroupSnapshotRequest) (*csi.GetVolumeGroupSnapshotResponse, error) {
	group, err := s.getGroup(ctx, r.GetGroupSnapshotId(), r.GetSnapshotIds())
	if err != nil {
		return nil, err
	}
	return &csi.GetVolumeGroupSnapshotResponse{GroupSnapshot: toGroup(group)}, nil
}

// metadataBatch is the largest number of ranges in one message, and the usual one.
const metadataBatch = 256

// GetMetadataAllocated streams the ranges of a snapshot that were written, in bytes.
func (s *Server) GetMetadataAllocated(r *csi.GetMetadataAllocatedRequest, stream csi.SnapshotMetadata_GetMetadataAllocatedServer) error {
	ctx := stream.Context()
	store, err := s.differ()
	if err != nil {
		return err
	}
	snapshot, err := s.metadataSource(ctx, r.GetSnapshotId(), r.GetStartingOffset(), r.GetMaxResults())
	if err != nil {
		return err
	}
	return batches(r.GetMaxResults(), func(yield func(blockdev.Extent) error) error {
		return store.Allocated(ctx, snapshot.ID, r.GetStartingOffset(), yield)
	}, func(ranges []*csi.BlockMetadata) error {
		return stream.Send(&csi.GetMetadataAllocatedResponse{BlockMetadataType: csi.BlockMetadataType_VARIABLE_LENGTH,
			VolumeCapacityBytes: snapshot.Size, BlockMetadata: ranges})
	})
}

// GetMetadataDelta streams the ranges in which a snapshot differs from an earlier one, in bytes.
func (s *Server) GetMetadataDelta(r *csi.GetMetadataDeltaRequest, stream csi.SnapshotMetadata_GetMetadataDeltaServer) error {
	ctx := stream.Context()
	store, err := s.differ()
	if err != nil {
		return err
	}
	base, err := parse(r.GetBaseSnapshotId(), blockdev.Snapshot)
	if err != nil {
		return err
	}
	target, err := s.metadataSource(ctx, r.GetTargetSnapshotId(), r.GetStartingOffset(), r.GetMaxResults())
	if err != nil {
		return err
	}
	return batches(r.GetMaxResults(), func(yield func(blockdev.Extent) error) error {
		return store.Changed(ctx, base, target.ID, r.GetStartingOffset(), yield)
	}, func(ranges []*csi.BlockMetadata) error {
		return stream.Send(&csi.GetMetadataDeltaResponse{BlockMetadataType: csi.BlockMetadataType_VARIABLE_LENGTH,
			VolumeCapacityBytes: target.Size, BlockMetadata: ranges})
	})
}

// differ returns the store as a volume.Differ; ErrUnsupported if it is none.
func (s *Server) differ() (volume.Differ, error) {
	if store, ok := s.store.(volume.Differ); ok {
		return store, nil
	}
	return nil, fmt.Errorf("%w: what is allocated and what changed is known to the node alone", errdefs.ErrUnsupported)
}

func (s *Server) metadataSource(ctx context.Context, text string, offset int64, maxResults int32) (volume.Snapshot, error) {
	id, err := parse(text, blockdev.Snapshot)
	if err != nil {
		return volume.Snapshot{}, err
	}
	if maxResults < 0 {
		return volume.Snapshot{}, fmt.Errorf("%w: max_results is %d", errdefs.ErrInvalid, maxResults)
	}
	snapshot, err := s.store.GetSnapshot(ctx, id)
	if err == nil && (offset < 0 || offset > snapshot.Size) {
		return volume.Snapshot{}, fmt.Errorf("%w: starting_offset %d is not within the %d bytes of %s", errdefs.ErrOutOfRange, offset, snapshot.Size, id)
	}
	return snapshot, err
}

// batches sends the ranges that produce yields, in messages of maxResults at most (0: metadataBatch). If there are none, it sends one message without ranges,
// which tells the caller the size of the volume.
func batches(maxResults int32, produce func(yield func(blockdev.Extent) error) error, send func([]*csi.BlockMetadata) error) error {
	limit := int(maxResults)
	if limit == 0 || limit > metadataBatch {
		limit = metadataBatch
	}
	var ranges []*csi.BlockMetadata
	sent := false
	flush := func() error {
		err := send(ranges)
		ranges, sent = nil, true
		return err
	}
	if err := produce(func(e blockdev.Extent) error {
		ranges = append(ranges, &csi.BlockMetadata{ByteOffset: e.Offset, SizeBytes: e.Length})
		if len(ranges) == limit {
			return flush()
		}
		return nil
	}); err != nil {
		return err
	}
	if len(ranges) > 0 || !sent {
		return flush()
	}
	return nil
}
