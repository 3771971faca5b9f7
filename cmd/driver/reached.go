package main

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvmet"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/remotepool"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/replicapool"
	"github.com/ashlar-csi/ashlar/pkg/cluster/agent"
	"github.com/ashlar-csi/ashlar/pkg/cluster/export"
	"github.com/ashlar-csi/ashlar/pkg/cluster/move"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/metrics"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/node"
	"github.com/ashlar-csi/ashlar/pkg/rpc"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// reached is what a node has of other nodes' volumes, and they of its own; without a network that is nothing.
type reached struct {
	volumes  node.Volumes // that can be used
	keeping  func(run func(context.Context) error) func(context.Context) error
	services func(grpc.ServiceRegistrar)
	samples  metrics.Source
	uses     func(context.Context) []overview.Use
}

// usesNothing is of a node that uses no volumes but its own.
func usesNothing(context.Context) []overview.Use { return nil }

// reach has the volumes of this node given to others, and lets it use those of others. Without a network it ends what the node gave before its machine started.
func (o *options) reach(ctx context.Context, a *agent.Agent, local *volume.Local, mounts *mount.Table, locks *keylock.Table, network *v1alpha1.Network) (*reached, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, err
	}
	how := volume.Exporting{Boot: strings.TrimSpace(string(boot)), Locks: locks}
	if network == nil {
		local.ServeExports(ctx, how)
		return &reached{local, o.keepingNothing, func(grpc.ServiceRegistrar) {}, func() []metrics.Sample { return nil }, usesNothing}, nil
	}
	at, err := netip.ParseAddrPort(network.Address)
	if err != nil {
		return nil, err
	}
	socket, err := rpc.ParseEndpoint(o.endpoint)
	if err != nil {
		return nil, err
	}
	// Beside the socket, in a folder of the node that only root can look into.
	if how.Key, err = volume.ExportKey(filepath.Join(filepath.Dir(socket), "node.key")); err != nil {
		return nil, err
	}
	how.TLS, how.Consumers, how.Open = o.remoteTLS, a.Consumers(), func() (volume.Exporter, error) {
		t, err := nvmet.Open(at)
		if err != nil {
			return nil, err
		}
		return t, nil
	}
	local.ServeExports(ctx, how)
	remote := remotepool.New(o.nodeID, remotepool.Host(o.remoteTLS), a.Homes())
	others, err := volume.NewLocal(ctx, o.nodeID, []blockdev.Pool{remote}, mounts, 0)
	if err != nil {
		return nil, err
	}
	everywhere := volume.NewEverywhere(local, others, a.Elsewhere(remote.Has))
	replicate, err := o.replicate(ctx, a, everywhere, remote, mounts)
	if err != nil {
		return nil, err
	}
	return &reached{
		volumes: everywhere,
		keeping: func(run func(context.Context) error) func(context.Context) error {
			return func(ctx context.Context) error {
				ctx, stop := context.WithCancel(ctx)
				var done sync.WaitGroup
				defer done.Wait()
				defer stop()
				done.Go(func() { local.KeepExports(ctx) })
				done.Go(func() { remote.Keep(ctx) })
				done.Go(func() { a.ReportAway(ctx, remote.Away, agent.AwayEvery) })
				done.Go(func() { a.MoveInUse(ctx, everywhere, remote) })
				done.Go(func() { replicate(ctx) })
				return run(ctx)
			}
		},
		services: func(r grpc.ServiceRegistrar) {
			export.Register(r, a.Exports(), a.Uses(others))
			move.Register(r, a.Moving(), a.Moving(), a.Moving())
		},
		samples: remote.Samples, uses: everywhere.Uses,
	}, nil
}

// replicate has this node use volumes with several legs too, if its kernel can mirror; what it returns looks after their mirrors until its context ends.
func (o *options) replicate(ctx context.Context, a *agent.Agent, everywhere *volume.Everywhere, remote *remotepool.Pool, mounts *mount.Table) (func(context.Context), error) {
	legs := a.ReplicaLegs(everywhere, remote)
	pool, err := replicapool.New(o.nodeID, legs)
	if errors.Is(err, errdefs.ErrUnsupported) || errors.Is(err, errdefs.ErrUnavailable) {
		klog.FromContext(ctx).Info("This node uses no replicated volumes", "why", err.Error())
		return func(context.Context) {}, nil
	}
	if err != nil {
		return nil, err
	}
	replicated, err := volume.NewLocal(ctx, o.nodeID, []blockdev.Pool{pool}, mounts, 0)
	if err != nil {
		return nil, err
	}
	everywhere.Replicate(replicated, a.Replicated(pool.Has))
	a.UseReplicated(everywhere.Replicated())
	return func(ctx context.Context) { legs.ReconcileMirrors(ctx, pool) }, nil
}

// keepingNothing is what a node keeps that is in no network: it waits for the one that it was told of.
func (o *options) keepingNothing(run func(context.Context) error) func(context.Context) error {
	if o.remoteAddress == "" {
		return run
	}
	wait := func(ctx context.Context) error { return untilReachable(ctx, reachablePause, o.reachable) }
	return func(ctx context.Context) error { return beside(ctx, wait, run) }
}

// registering registers the services of others, and what nodes that use volumes of each other say.
func (r *reached) registering(others func(grpc.ServiceRegistrar)) func(grpc.ServiceRegistrar) {
	return func(registrar grpc.ServiceRegistrar) {
		others(registrar)
		r.services(registrar)
	}
}
