package main

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"k8s.io/client-go/rest"

	"github.com/ashlar-csi/ashlar/pkg/cluster/port"
	"github.com/ashlar-csi/ashlar/pkg/cluster/transfer"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
	"github.com/ashlar-csi/ashlar/pkg/rpc"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// checkPort checks the flags of the agent's port.
func (o *options) checkPort() error {
	switch {
	case o.agentEndpoint != "" && o.mode != "node":
		return errors.New("--agent-endpoint: nodes have agents (--mode=node)")
	case o.blocks && o.mode != "controller":
		return errors.New("--snapshot-metadata: the controller asks the nodes (--mode=controller); with --mode=all it is served always")
	case o.copyBandwidth != "" && o.agentEndpoint == "":
		return errors.New("--copy-bandwidth: that is of the copies that other nodes fetch, over the port of --agent-endpoint")
	case o.agentEndpoint != "":
		if o.copyBandwidth != "" {
			var err error
			if o.bandwidth, err = csimap.ParseQuantity(o.copyBandwidth); err != nil {
				return fmt.Errorf("--copy-bandwidth (bytes per second): %w", err)
			}
		}
		if err := port.CheckAddress(o.agentEndpoint); err != nil {
			return fmt.Errorf("--agent-endpoint: %w", err)
		}
		if _, err := checkAddress(o.agentEndpoint); err != nil {
			return fmt.Errorf("--agent-endpoint=%s: give IP:PORT: %w", o.agentEndpoint, err)
		}
	}
	return nil
}

// callers returns what connects to agents; nil if it is not wanted.
func callers(config *rest.Config, wanted bool) (*port.Callers, error) {
	if !wanted {
		return nil, nil
	}
	return port.NewCallers(config)
}

// transfers returns what registers the service from which other agents fetch copies, with at most --copy-bandwidth for all together.
func (o *options) transfers(open transfer.Source) func(grpc.ServiceRegistrar) {
	var limit transfer.Limiter
	if o.bandwidth > 0 {
		limit = rate.NewLimiter(rate.Limit(o.bandwidth), volume.ReadSize)
	}
	return func(r grpc.ServiceRegistrar) { transfer.Register(r, open, limit) }
}

// listenPort opens the agent's port; nil without --agent-endpoint.
func (o *options) listenPort() (*port.Listener, error) {
	if o.agentEndpoint == "" {
		return nil, nil
	}
	return port.Listen(o.agentEndpoint)
}

// withPort serves calls by serve, and services on the agent's port if there is one.
func (o *options) withPort(ctx context.Context, listener *port.Listener, config *rest.Config, namespace string, services rpc.Services, serve func(context.Context) error) error {
	if listener == nil {
		return serve(ctx)
	}
	server := port.Server{Node: o.nodeID, Namespace: namespace, Config: config}
	return beside(ctx, func(ctx context.Context) error { return server.Serve(ctx, listener, services) }, serve)
}
