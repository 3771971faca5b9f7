package identity_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"

	"github.com/container-storage-interface/spec/lib/go/csi"
	csirpc "github.com/kubernetes-csi/csi-lib-utils/rpc"
	"google.golang.org/grpc"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/identity"
)

// connect serves the service on a socket, and connects to it.
func connect(t *testing.T, s *identity.Server) *grpc.ClientConn {
	t.Helper()
	return drivertest.Connect(t, func(server *grpc.Server) { csi.RegisterIdentityServer(server, s) })
}

func TestPluginInfo(t *testing.T) {
	s := identity.New("ashlar.dev", "v1.2.3", nil)
	if name, err := csirpc.GetDriverName(t.Context(), connect(t, s)); err != nil || name != "ashlar.dev" {
		t.Errorf("a sidecar reads the name %q, %v", name, err)
	}
	if info, err := s.GetPluginInfo(t.Context(), &csi.GetPluginInfoRequest{}); err != nil || info.GetVendorVersion() != "v1.2.3" {
		t.Errorf("the version is %v, %v", info, err)
	}
}

// TestPluginCapabilities: all services of CSI are announced, but for those that the plugin is without; and that volumes grow while they are in use.
func TestPluginCapabilities(t *testing.T) {
	for name, without := range map[string][]csi.PluginCapability_Service_Type{
		"all": nil,
		"a node alone": {csi.PluginCapability_Service_CONTROLLER_SERVICE, csi.PluginCapability_Service_GROUP_CONTROLLER_SERVICE,
			csi.PluginCapability_Service_SNAPSHOT_METADATA_SERVICE},
	} {
		s := identity.New("ashlar.dev", "v1", nil, without...)
		announced, err := csirpc.GetPluginCapabilities(t.Context(), connect(t, s))
		check.OK(t, err)
		want := csirpc.PluginCapabilitySet{}
		for number := range csi.PluginCapability_Service_Type_name {
			want[csi.PluginCapability_Service_Type(number)] = number != 0
		}
		for _, service := range without {
			want[service] = false
		}
		for service, has := range want {
			if announced[service] != has {
				t.Errorf("%s: %s is announced: %v", name, service, announced[service])
			}
		}
		response, err := s.GetPluginCapabilities(t.Context(), &csi.GetPluginCapabilitiesRequest{})
		check.OK(t, err)
		online := 0
		for _, c := range response.GetCapabilities() {
			if c.GetVolumeExpansion().GetType() == csi.PluginCapability_VolumeExpansion_ONLINE {
				online++
			}
		}
		if online != 1 {
			t.Errorf("%s: capabilities %v", name, response)
		}
	}
}

func TestProbe(t *testing.T) {
	ended, end := context.WithCancel(t.Context())
	end()
	for what, c := range map[string]struct {
		ready func(context.Context) error
		ctx   context.Context
		want  bool
		err   error
	}{
		"nothing to wait for": {nil, t.Context(), true, nil},
		"ready":               {func(context.Context) error { return nil }, t.Context(), true, nil},
		"starting":            {func(context.Context) error { return identity.ErrStarting }, t.Context(), false, nil},
		"starting for longer than the caller waits": {func(context.Context) error { return identity.ErrStarting }, ended, false, errdefs.ErrUnavailable},
		"broken": {func(context.Context) error { return errors.New("no API server") }, t.Context(), false, errdefs.ErrUnavailable},
	} {
		response, err := identity.New("ashlar.dev", "v1", c.ready).Probe(c.ctx, &csi.ProbeRequest{})
		pooltest.Fails(t, err, c.err, what)
		if response.GetReady().GetValue() != c.want || (err == nil && response.GetReady() == nil) {
			t.Errorf("%s: %v", what, response)
		}
	}
}

// TestProbeForever: a sidecar waits for a plugin that starts, and goes on when it is ready.
func TestProbeForever(t *testing.T) {
	asked := 0
	s := identity.New("ashlar.dev", "v1", func(context.Context) error {
		if asked++; asked == 1 {
			return identity.ErrStarting
		}
		return nil
	})
	if err := csirpc.ProbeForever(t.Context(), connect(t, s), time.Minute); err != nil || asked != 2 {
		t.Errorf("asked %d times: %v", asked, err)
	}
}
