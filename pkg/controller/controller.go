// Package controller serves the CSI services Controller, GroupController and SnapshotMetadata. It checks requests, and carries them out by calls of a
// volume.Store. Errors of its calls wrap a sentinel of pkg/errdefs; package rpc gives them their codes.
package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/ashlar-csi/ashlar/internal/runbook"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// Server implements the three services over one store.
type Server struct {
	csi.UnimplementedControllerServer
	csi.UnimplementedGroupControllerServer
	csi.UnimplementedSnapshotMetadataServer
	store volume.Store
	reach volume.Reacher // the store, if its nodes reach each other; else nil
}

// New returns the services over a store. Volumes that other nodes use (AccessAny) are possible if the store is a volume.Reacher.
func New(store volume.Store) *Server {
	reach, _ := store.(volume.Reacher)
	return &Server{store: store, reach: reach}
}

// nodesOf returns the nodes that a requirement allows, each once, the preferred ones first; none means any. Preferred terms are requisite too, if there are
// requisite ones (CSI specification, TopologyRequirement). A term that names no node stands for all nodes with its labels. ErrNoSpace if no node has those of
// any term, ErrInvalid for a term that is empty.
func (s *Server) nodesOf(ctx context.Context, requirement *csi.TopologyRequirement) ([]string, error) {
	var nodes []string
	seen := map[string]bool{}
	var nowhere error
	for _, term := range slices.Concat(requirement.GetPreferred(), requirement.GetRequisite()) {
		these, err := s.nodesIn(ctx, term.GetSegments())
		if errors.Is(err, errdefs.ErrNoSpace) {
			nowhere = err
		} else if err != nil {
			return nil, err
		}
		for _, node := range these {
			if !seen[node] {
				seen[node], nodes = true, append(nodes, node)
			}
		}
	}
	if len(nodes) == 0 {
		return nil, nowhere
	}
	return nodes, nil
}

func (s *Server) nodesIn(ctx context.Context, segments map[string]string) ([]string, error) {
	node, named := segments[csimap.TopologyKey]
	if len(segments) == 0 || (named && node == "") {
		return nil, fmt.Errorf("%w: the topology %v says nothing", errdefs.ErrInvalid, segments)
	}
	if named {
		return []string{node}, nil
	}
	return s.store.NodesIn(ctx, segments)
}

// ControllerGetCapabilities lists all capabilities of CSI 1.13.
func (s *Server) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	var capabilities []*csi.ControllerServiceCapability
	for _, rpc := range []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME,
		csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME,
		csi.ControllerServiceCapability_RPC_PUBLISH_READONLY,
		csi.ControllerServiceCapability_RPC_LIST_VOLUMES,
		csi.ControllerServiceCapability_RPC_LIST_VOLUMES_PUBLISHED_NODES,
		csi.ControllerServiceCapability_RPC_GET_CAPACITY,
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT,
		csi.ControllerServiceCapability_RPC_LIST_SNAPSHOTS,
		csi.ControllerServiceCapability_RPC_GET_SNAPSHOT,
		csi.ControllerServiceCapability_RPC_CLONE_VOLUME,
		csi.ControllerServiceCapability_RPC_EXPAND_VOLUME,
		csi.ControllerServiceCapability_RPC_GET_VOLUME,
		csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
		csi.ControllerServiceCapability_RPC_MODIFY_VOLUME,
		csi.ControllerServiceCapability_RPC_GET_VOLUME_HEALTH,
		csi.ControllerServiceCapability_RPC_LIST_VOLUME_HEALTH,
	} {
		capabilities = append(capabilities, &csi.ControllerServiceCapability{
			Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: rpc}}})
	}
	return &csi.ControllerGetCapabilitiesResponse{Capabilities: capabilities}, nil
}

// CreateVolume: see the CSI specification. Errors besides those of wrong requests are those of volume.Store.Create. ErrUnavailable if the volume is made, but
// its topology cannot be told, as its node is in no network now.
func (s *Server) CreateVolume(ctx context.Context, r *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	if err := checkName(r.GetName()); err != nil {
		return nil, err
	}
	spec := volume.Spec{Name: r.GetName(), Size: volume.Range{Required: r.GetCapacityRange().GetRequiredBytes(), Limit: r.GetCapacityRange().GetLimitBytes()}}
	var err error
	if spec.Filesystem, err = csimap.CheckCapabilities(r.GetVolumeCapabilities()...); err != nil {
		return nil, err
	}
	parameters, err := csimap.ParseParameters(r.GetParameters())
	if err != nil {
		return nil, err
	}
	if err := parameters.Agree(spec.Filesystem); err != nil {
		return nil, err
	}
	spec.Pool, spec.Spread, spec.Copies = parameters.Pool, parameters.Spread, parameters.Copies
	spec.Provisioning, spec.Encryption, spec.For = parameters.Provisioning, parameters.Encryption, parameters.For
	spec.Access, spec.HomeTimeout, spec.Mutable = parameters.Access, parameters.HomeTimeout, parameters.Mutable(r.GetMutableParameters())
	spec.Replicas = parameters.Replicas
	if err := volume.CheckPlacement(spec.Access, spec.Replicas.Legs(), spec.Mutable); err != nil {
		return nil, err
	}
	if err := s.reaches(spec.Access, spec.Replicas); err != nil {
		return nil, err
	}
	if err := checkReaders(spec, r); err != nil {
		return nil, err
	}
	if spec.Spread != volume.NoSpread && spec.For.Name == "" {
		return nil, fmt.Errorf("%w: parameter spread=%s: nobody says which claim the volume is for; external-provisioner does with --extra-create-metadata", errdefs.ErrInvalid, spec.Spread)
	}
	if spec.Nodes, err = s.nodesOf(ctx, r.GetAccessibilityRequirements()); err != nil {
		return nil, err
	}
	if spec.Source, err = sourceOf(r.GetVolumeContentSource()); err != nil {
		return nil, err
	}
	v, err := s.store.Create(ctx, spec)
	if err != nil {
		return nil, err
	}
	networks, err := s.networks(ctx)
	if err != nil {
		return nil, err
	}
	if v.Access == volume.AccessAny && networks[v.Node] == "" { // a PersistentVolume keeps the topology that it gets from this answer
		return nil, fmt.Errorf("%w: volume %s is made, and its node %s is in no network now (--remote-address), so nobody knows who will reach it", errdefs.ErrUnavailable, v.ID, v.Node)
	}
	return &csi.CreateVolumeResponse{Volume: toVolume(v, networks)}, nil
}

// checkReaders returns ErrInvalid for a volume with access any that all its capabilities only read on many nodes, if it has replicas, has no content to read,
// or is encrypted.
func checkReaders(spec volume.Spec, r *csi.CreateVolumeRequest) error {
	writes := func(c *csi.VolumeCapability) bool { return !volume.Claim{Mode: csimap.ModeOf(c)}.Many() }
	switch {
	case spec.Access != volume.AccessAny || slices.ContainsFunc(r.GetVolumeCapabilities(), writes):
		return nil
	case spec.Replicas.Legs() > 0:
		return fmt.Errorf("%w: parameter replicas=%d: a volume with replicas is used on one node at a time, so it is not one that is only read by many (ReadOnlyMany)", errdefs.ErrInvalid, spec.Replicas.Legs())
	case r.GetVolumeContentSource() == nil:
		return fmt.Errorf("%w: nobody could ever write to a volume that is only read by many (ReadOnlyMany): make it from a snapshot or a volume", errdefs.ErrInvalid)
	case spec.Encryption.Scheme != volume.NotEncrypted:
		return fmt.Errorf("%w: a volume that is encrypted can be used on one node at a time, so it is not one that is only read by many (ReadOnlyMany)", errdefs.ErrInvalid)
	}
	return nil
}

// reaches returns ErrInvalid for volumes with access any or with replicas, if the store has one node only.
func (s *Server) reaches(access volume.Access, replicas volume.Replicas) error {
	if access == volume.AccessNode || s.reach != nil {
		return nil
	}
	if n := replicas.Legs(); n > 0 {
		return fmt.Errorf("%w: parameter replicas=%d: this driver has one machine, and each replica needs one of its own, as in a cluster", errdefs.ErrInvalid, n)
	}
	return fmt.Errorf("%w: parameter access=%s: this driver has one machine, which alone can use its volumes; in a cluster other nodes can", errdefs.ErrInvalid, access)
}

// networks returns the network of each node that is in one, by the names of the nodes; none if the store is no Reacher.
func (s *Server) networks(ctx context.Context) (map[string]string, error) {
	if s.reach == nil {
		return nil, nil
	}
	return s.reach.Networks(ctx)
}

// checkName returns ErrInvalid unless a name has 1 to 256 bytes, and no control characters but tab, line feed and carriage return. The CSI specification (Size
// Limits, CreateVolumeRequest.name) asks for these characters, and for up to 128 bytes.
func checkName(name string) error {
	if name == "" {
		return csimap.Missing("name")
	}
	if len(name) > 256 {
		return fmt.Errorf("%w: the name has %d bytes, 256 are the most", errdefs.ErrInvalid, len(name))
	}
	if i := strings.IndexFunc(name, func(c rune) bool {
		return (c < 0x20 && c != '\t' && c != '\n' && c != '\r') || (c >= 0x7f && c <= 0x9f)
	}); i >= 0 {
		return fmt.Errorf("%w: the name has a control character at byte %d", errdefs.ErrInvalid, i)
	}
	return nil
}

func sourceOf(source *csi.VolumeContentSource) (volume.ID, error) {
	switch {
	case source == nil:
		return volume.ID{}, nil
	case source.GetSnapshot() != nil:
		return parse(source.GetSnapshot().GetSnapshotId(), blockdev.Snapshot)
	case source.GetVolume() != nil:
		return parse(source.GetVolume().GetVolumeId(), blockdev.Volume)
	}
	return volume.ID{}, fmt.Errorf("%w: a source that is neither snapshot nor volume", errdefs.ErrInvalid)
}

// parse reads the ID of a volume or of a snapshot. ErrInvalid if the text is empty; ErrNotFound if it is no ID of this driver, or one of the other kind.
func parse(text string, kind blockdev.Kind) (volume.ID, error) {
	if text == "" {
		return volume.ID{}, csimap.Missing(map[blockdev.Kind]string{blockdev.Volume: "volume ID", blockdev.Snapshot: "snapshot ID"}[kind])
	}
	id, err := volume.ParseID(text)
	if err != nil {
		return volume.ID{}, err
	}
	if id.Kind != kind {
		return volume.ID{}, fmt.Errorf("%w: %s is not the ID of a %s", errdefs.ErrNotFound, text, kind)
	}
	return id, nil
}

// toVolume returns a volume as a CSI message. networks are those of the nodes: with access any the volume is accessible from all nodes in the network of its
// own.
func toVolume(v volume.Volume, networks map[string]string) *csi.Volume {
	network := ""
	if v.Access == volume.AccessAny {
		network = networks[v.Node]
	}
	out := &csi.Volume{VolumeId: v.ID.String(), CapacityBytes: v.Size, AccessibleTopology: csimap.Topologies(v.Node, network)}
	switch v.Source.Kind {
	case blockdev.Snapshot:
		out.ContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
			Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: v.Source.String()}}}
	case blockdev.Volume:
		out.ContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
			Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: v.Source.String()}}}
	}
	return out
}

// DeleteVolume: see the CSI specification. It succeeds for an ID that is none of this driver's.
func (s *Server) DeleteVolume(ctx context.Context, r *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	id, err := parse(r.GetVolumeId(), blockdev.Volume)
	if err == nil {
		err = s.store.Delete(ctx, id)
	}
	return &csi.DeleteVolumeResponse{}, errdefs.IgnoreNotFound(err)
}

// ControllerPublishVolume claims a volume for a node. ErrNotFound if there is no such volume; else errors are those of volume.Store.Claim.
func (s *Server) ControllerPublishVolume(ctx context.Context, r *csi.ControllerPublishVolumeRequest) (*csi.ControllerPublishVolumeResponse, error) {
	if r.GetVolumeId() == "" {
		return nil, csimap.Missing("volume ID")
	}
	if r.GetNodeId() == "" {
		return nil, csimap.Missing("node ID")
	}
	if _, err := csimap.CheckCapabilities(r.GetVolumeCapability()); err != nil {
		return nil, err
	}
	id, err := parse(r.GetVolumeId(), blockdev.Volume)
	if err != nil {
		return nil, err
	}
	if _, err := s.store.Get(ctx, id); err != nil {
		return nil, err
	}
	claim, err := s.store.Claim(ctx, id, volume.Claim{Node: r.GetNodeId(), ReadOnly: r.GetReadonly(), Mode: csimap.ModeOf(r.GetVolumeCapability())})
	if err != nil {
		return nil, err
	}
	publishContext := map[string]string{}
	if r.GetReadonly() {
		publishContext[csimap.ReadOnlyKey] = "true"
	}
	if claim.Generation > 0 {
		publishContext[csimap.GenerationKey] = strconv.FormatInt(claim.Generation, 10)
	}
	return &csi.ControllerPublishVolumeResponse{PublishContext: publishContext}, nil
}

// ControllerUnpublishVolume releases the claim of a node, or without a node ID all claims. It succeeds for a volume that is gone.
func (s *Server) ControllerUnpublishVolume(ctx context.Context, r *csi.ControllerUnpublishVolumeRequest) (*csi.ControllerUnpublishVolumeResponse, error) {
	id, err := parse(r.GetVolumeId(), blockdev.Volume)
	if err == nil {
		err = s.store.Release(ctx, id, r.GetNodeId())
	}
	return &csi.ControllerUnpublishVolumeResponse{}, errdefs.IgnoreNotFound(err)
}

// ValidateVolumeCapabilities confirms capabilities that a volume can be used with, and the parameters that it was made with, if the request has any. If it cannot, that is no error: the message says why.
func (s *Server) ValidateVolumeCapabilities(ctx context.Context, r *csi.ValidateVolumeCapabilitiesRequest) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	if r.GetVolumeId() != "" && len(r.GetVolumeCapabilities()) == 0 {
		return nil, csimap.Missing("volume capabilities")
	}
	id, err := parse(r.GetVolumeId(), blockdev.Volume)
	if err != nil {
		return nil, err
	}
	v, err := s.store.Get(ctx, id)
	if err != nil {
		return nil, err
	}
	fs, err := csimap.CheckCapabilities(r.GetVolumeCapabilities()...)
	if err == nil && fs != "" && v.Format.Type != "" && v.Format.Type != fs {
		err = fmt.Errorf("the volume carries %s, not %s", v.Format.Type, fs)
	}
	var parameters csimap.Parameters
	if err == nil {
		parameters, err = csimap.ParseParameters(r.GetParameters())
	}
	if err == nil {
		err = errors.Join(parameters.Agree(fs), s.reaches(parameters.Access, parameters.Replicas))
	}
	if err == nil && len(r.GetParameters()) > 0 {
		err = madeWith(v, parameters)
	}
	if err == nil {
		err = volume.CheckMutable(csimap.MutableOf(r.GetMutableParameters()))
	}
	if err != nil {
		return &csi.ValidateVolumeCapabilitiesResponse{Message: err.Error()}, nil
	}
	return &csi.ValidateVolumeCapabilitiesResponse{Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
		VolumeContext: r.GetVolumeContext(), VolumeCapabilities: r.GetVolumeCapabilities(),
		Parameters: r.GetParameters(), MutableParameters: r.GetMutableParameters()}}, nil
}

// madeWith returns an error that says what differs if a volume was not made with some parameters.
func madeWith(v volume.Volume, p csimap.Parameters) error {
	return volume.Spec{Name: v.Name, Pool: p.Pool, Provisioning: p.Provisioning, Source: v.Source, Filesystem: v.Filesystem, Encryption: p.Encryption,
		Access: p.Access, HomeTimeout: p.HomeTimeout, Replicas: p.Replicas, ReplicaOf: v.ReplicaOf, Ephemeral: v.Ephemeral}.Check(v)
}

// maxPage is the size in bytes from which a list is continued on a next page. gRPC lets through 4 MiB by default, and a caller that asks for all entries has to
// get an answer too: it has a next_token, which the sidecars follow.
const maxPage = 3 << 20

// page reads the paging fields of a request. limit is how many to list, 0 for all: one more than asked for, which shows whether there is a next page.
// ErrInvalid for a negative number, ErrBadToken for a token that is not an ID of this kind.
func page(maxEntries int32, token string, kind blockdev.Kind) (after volume.ID, limit int, err error) {
	if maxEntries < 0 {
		return volume.ID{}, 0, fmt.Errorf("%w: max_entries is %d", errdefs.ErrInvalid, maxEntries)
	}
	if token != "" {
		if after, err = volume.ParseID(token); err != nil || after.Kind != kind {
			return volume.ID{}, 0, fmt.Errorf("%w: starting_token %q", errdefs.ErrBadToken, token)
		}
	}
	if maxEntries == 0 {
		return after, 0, nil
	}
	return after, int(maxEntries) + 1, nil
}

// fillPage makes entries of what was listed, until a page is full, and returns the token of the next page. entry returns false for what the list leaves out.
func fillPage[T any, E proto.Message](listed []T, maxEntries int32, id func(T) volume.ID, entry func(T) (E, bool, error)) (entries []E, next string, err error) {
	size := 0
	for i, one := range listed {
		if size > maxPage || (maxEntries > 0 && i == int(maxEntries)) {
			return entries, id(listed[i-1]).String(), nil
		}
		e, listed, err := entry(one)
		if err != nil {
			return nil, "", err
		}
		if listed {
			entries = append(entries, e)
			size += proto.Size(e) + entryOverhead
		}
	}
	return entries, "", nil
}

// entryOverhead is how many bytes a message needs at most besides its own as a field of another message.
const entryOverhead = 8

func idOf(v volume.Volume) volume.ID { return v.ID }

func toStatus(v volume.Volume) []string {
	if v.Claim.Node == "" {
		return v.Readers
	}
	return []string{v.Claim.Node}
}

// ListVolumes lists volumes in the order of their IDs. A token is the ID of the last volume of a page, so pages stay right if volumes are made or deleted
// meanwhile.
func (s *Server) ListVolumes(ctx context.Context, r *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	after, limit, err := page(r.GetMaxEntries(), r.GetStartingToken(), blockdev.Volume)
	if err != nil {
		return nil, err
	}
	volumes, err := s.store.List(ctx, after, limit)
	if err != nil {
		return nil, err
	}
	networks, err := s.networks(ctx)
	if err != nil {
		return nil, err
	}
	response := &csi.ListVolumesResponse{}
	response.Entries, response.NextToken, err = fillPage(volumes, r.GetMaxEntries(), idOf, func(v volume.Volume) (*csi.ListVolumesResponse_Entry, bool, error) {
		return &csi.ListVolumesResponse_Entry{Volume: toVolume(v, networks), Status: &csi.ListVolumesResponse_VolumeStatus{PublishedNodeIds: toStatus(v)}}, true, nil
	})
	return response, err
}

// ControllerGetVolume returns one volume.
func (s *Server) ControllerGetVolume(ctx context.Context, r *csi.ControllerGetVolumeRequest) (*csi.ControllerGetVolumeResponse, error) {
	id, err := parse(r.GetVolumeId(), blockdev.Volume)
	if err != nil {
		return nil, err
	}
	v, err := s.store.Get(ctx, id)
	if err != nil {
		return nil, err
	}
	networks, err := s.networks(ctx)
	if err != nil {
		return nil, err
	}
	return &csi.ControllerGetVolumeResponse{Volume: toVolume(v, networks),
		Status: &csi.ControllerGetVolumeResponse_VolumeStatus{PublishedNodeIds: toStatus(v)}}, nil
}

// ControllerExpandVolume grows a volume and its device. Filesystems, encrypted volumes and those with several legs need NodeExpandVolume afterwards. ErrOutOfRange
// also if there is no room for it.
//
// After RESOURCE_EXHAUSTED, Kubernetes' external-resizer takes the growth for one that may still be going on: it asks for that size again and again, also if the
// owner of the claim wants less by now, who may have written a size that no disk will ever have. After OUT_OF_RANGE it asks again, too, every few minutes, and at
// once for another size.
func (s *Server) ControllerExpandVolume(ctx context.Context, r *csi.ControllerExpandVolumeRequest) (*csi.ControllerExpandVolumeResponse, error) {
	if r.GetVolumeId() != "" && r.GetCapacityRange() == nil {
		return nil, csimap.Missing("capacity range")
	}
	id, err := parse(r.GetVolumeId(), blockdev.Volume)
	if err != nil {
		return nil, err
	}
	if c := r.GetVolumeCapability(); c != nil {
		if _, err := csimap.CheckCapabilities(c); err != nil {
			return nil, err
		}
	}
	v, err := s.store.Expand(ctx, id, volume.Range{Required: r.GetCapacityRange().GetRequiredBytes(), Limit: r.GetCapacityRange().GetLimitBytes()})
	if errors.Is(err, errdefs.ErrNoSpace) {
		return nil, errdefs.Recast(errdefs.ErrOutOfRange, errors.New(runbook.See(err.Error(), "NoSpace")), "there is no room for it now")
	}
	if err != nil {
		return nil, err
	}
	// A raw device may have a filesystem that its user made, and be mounted, so without a capability it is expanded on the node, unless it is known to be used
	// as a block device. An encrypted volume grows where its key is; one with several legs where the mirror of them is.
	block := r.GetVolumeCapability().GetBlock() != nil || (r.GetVolumeCapability() == nil && v.Format.State == volume.Raw)
	return &csi.ControllerExpandVolumeResponse{CapacityBytes: v.Size, NodeExpansionRequired: !block || v.Encryption.Scheme != volume.NotEncrypted || v.Replicas > 0}, nil
}

// ControllerModifyVolume sets mutable parameters; those that are not given stay.
func (s *Server) ControllerModifyVolume(ctx context.Context, r *csi.ControllerModifyVolumeRequest) (*csi.ControllerModifyVolumeResponse, error) {
	id, err := parse(r.GetVolumeId(), blockdev.Volume)
	if err != nil {
		return nil, err
	}
	return &csi.ControllerModifyVolumeResponse{}, s.store.Modify(ctx, id, csimap.MutableOf(r.GetMutableParameters()))
}

// ControllerGetVolumeHealth returns the known problems of one volume.
func (s *Server) ControllerGetVolumeHealth(ctx context.Context, r *csi.ControllerGetVolumeHealthRequest) (*csi.ControllerGetVolumeHealthResponse, error) {
	id, err := parse(r.GetVolumeId(), blockdev.Volume)
	if err != nil {
		return nil, err
	}
	problems, err := s.store.Health(ctx, id)
	if err != nil {
		return nil, err
	}
	return &csi.ControllerGetVolumeHealthResponse{VolumeHealth: csimap.Health(id.String(), problems)}, nil
}

// ControllerListVolumeHealth lists the volumes that have problems. A page is limited by the number of volumes that it looks at: it may have fewer entries than
// asked for, or none, and still be followed by another page.
func (s *Server) ControllerListVolumeHealth(ctx context.Context, r *csi.ControllerListVolumeHealthRequest) (*csi.ControllerListVolumeHealthResponse, error) {
	after, limit, err := page(r.GetMaxEntries(), r.GetStartingToken(), blockdev.Volume)
	if err != nil {
		return nil, err
	}
	volumes, err := s.store.List(ctx, after, limit)
	if err != nil {
		return nil, err
	}
	response := &csi.ControllerListVolumeHealthResponse{}
	response.Entries, response.NextToken, err = fillPage(volumes, r.GetMaxEntries(), idOf, func(v volume.Volume) (*csi.VolumeHealth, bool, error) {
		problems, err := s.store.Health(ctx, v.ID)
		return csimap.Health(v.ID.String(), problems), len(problems) > 0, errdefs.IgnoreNotFound(err) // deleted since it was listed
	})
	return response, err
}

func toSnapshot(s volume.Snapshot) *csi.Snapshot {
	out := &csi.Snapshot{SnapshotId: s.ID.String(), SourceVolumeId: s.Source.String(), SizeBytes: s.Size,
		CreationTime: timestamppb.New(s.Created), ReadyToUse: true, AccessibleTopology: []*csi.Topology{csimap.Topology(s.Node)}}
	if s.Group.Key != "" {
		out.GroupSnapshotId = s.Group.String()
	}
	return out
}
