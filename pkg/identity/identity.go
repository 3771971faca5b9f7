// Package identity serves the CSI Identity service.
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

// Server implements the service.
type Server struct {
	csi.UnimplementedIdentityServer
	name, version string
	ready         func(context.Context) error
	without       []csi.PluginCapability_Service_Type
}

// ErrStarting means that the plugin is not ready yet, and becomes ready by itself.
var ErrStarting = errors.New("starting")

// New returns the service of a plugin. ready, if set, returns ErrStarting until the plugin can serve calls, and another error if something keeps it from that;
// it does not look at pools. without lists services that this plugin does not have.
func New(name, version string, ready func(context.Context) error, without ...csi.PluginCapability_Service_Type) *Server {
	return &Server{name: name, version: version, ready: ready, without: without}
}

// GetPluginInfo returns name and version.
func (s *Server) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: s.name, VendorVersion: s.version}, nil
}

// GetPluginCapabilities lists the services beyond Identity and Node, that volumes and snapshots are accessible from some nodes only, and that volumes grow
// while they are in use.
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

// Probe answers whether the plugin serves calls: false while it starts, ErrUnavailable if ready fails otherwise or the call has ended. Problems of pools do not
// count: they are reported as health, and restarting the plugin, as a CO does for a failed probe, mends none (CSI specification, Probe).
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
