// Package identity is the CSI Identity service.
package identity

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Server answers for the plugin as a whole.
type Server struct {
	csi.UnimplementedIdentityServer
	name, version string
	ready         func(context.Context) error
	without       []csi.PluginCapability_Service_Type
}

// ErrStarting: the plugin is not ready yet, and only has to be waited for.
var ErrStarting = errors.New("starting")

// New returns the service. ready, if set, is ErrStarting until the plugin can serve calls; it asks no
// pool. without are services that this plugin does not have.
func New(name, version string, ready func(context.Context) error, without ...csi.PluginCapability_Service_Type) *Server {
	return &Server{name: name, version: version, ready: ready, without: without}
}

// GetPluginInfo returns name and version.
func (s *Server) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: s.name, VendorVersion: s.version}, nil
}

// GetPluginCapabilities lists the services beyond Identity and Node, and that volumes
// and snapshots are tied to a node.
func (s *Server) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (*csi.GetPluginCapabilitiesResponse, error) {
	var capabilities []*csi.PluginCapability
	for _, service := range []csi.PluginCapability_Service_Type{
		csi.PluginCapability_Service_CONTROLLER_SERVICE,
		csi.PluginCapability_Service_GROUP_CONTROLLER_SERVICE,
		csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS,
		csi.PluginCapability_Service_SNAPSHOT_METADATA_SERVICE,
		csi.PluginCapability_Service_SNAPSHOT_ACCESSIBILITY_CONSTRAINTS,
	} {
		if slices.Contains(s.without, service) {
			continue
		}
		capabilities = append(capabilities, &csi.PluginCapability{Type: &csi.PluginCapability_Service_{Service: &csi.PluginCapability_Service{Type: service}}})
	}
	capabilities = append(capabilities, &csi.PluginCapability{Type: &csi.PluginCapability_VolumeExpansion_{
		VolumeExpansion: &csi.PluginCapability_VolumeExpansion{Type: csi.PluginCapability_VolumeExpansion_ONLINE}}})
	return &csi.GetPluginCapabilitiesResponse{Capabilities: capabilities}, nil
}

// Probe is true once the plugin serves calls, false while it starts. It says nothing of pools: what is
// wrong with one is its health, and no restart of the plugin mends it (CSI specification, Probe).
func (s *Server) Probe(ctx context.Context, _ *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	if s.ready == nil {
		return &csi.ProbeResponse{Ready: wrapperspb.Bool(true)}, nil
	}
	err := s.ready(ctx)
	switch {
	case err == nil:
		return &csi.ProbeResponse{Ready: wrapperspb.Bool(true)}, nil
	case errors.Is(err, ErrStarting) && ctx.Err() == nil:
		return &csi.ProbeResponse{Ready: wrapperspb.Bool(false)}, nil
	}
	return nil, fmt.Errorf("%w: not ready: %w", errdefs.ErrUnavailable, err)
}
