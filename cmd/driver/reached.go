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

// reached is how a node uses volumes of other nodes, and they its own. Without a network it uses its own alone.
type reached struct {
	volumes  node.Volumes // all that this node can use
	keeping  func(run func(context.Context) error) func(context.Context) error
	services func(grpc.ServiceRegistrar)
	samples  metrics.Source
	uses     func(context.Context) []overview.Use
}

// usesNothing is reached.uses of a node that uses no volumes of other nodes.
func usesNothing(context.Context) []overview.Use { return nil }

// reach has volumes of this node exported to others, and lets this node use those of others. Without a network it only ends exports from before the machine
// started.
func (o *options) reach(ctx context.Context, a *agent.Agent, local *volume.Local, mounts *mount.Table, locks *keylock.Table, network *v1alpha1.Network) (*reached, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, err
	}
	how := volume.Exporting{Boot: strings.TrimSpace(string(boot)), Locks: locks, Given: nvmet.Given}
	if network == nil {
		local.ServeExports(ctx, how)
		return &reached{local, o.keepingNothing, answering(a, nil), func() []metrics.Sample { return nil }, usesNothing}, nil
	}
	at, err := netip.ParseAddrPort(network.Address)
	if err != nil {
		return nil, err
	}
	socket, err := rpc.ParseEndpoint(o.endpoint)
	if err != nil {
		return nil, err
	}
	// The key is beside the socket, in a folder of the node that only root can read.
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
		services: answering(a, others),
		samples:  remote.Samples, uses: everywhere.Uses,
	}, nil
}

// answering registers what other nodes ask an agent about volumes that are exported, or move. others are the volumes of other nodes; nil without a network. An
// agent without one answers, too: that it has none, and what it knows of volumes that have moved.
func answering(a *agent.Agent, others agent.UsedVolumes) func(grpc.ServiceRegistrar) {
	return func(r grpc.ServiceRegistrar) {
		export.Register(r, a.Exports(), a.Uses(others))
		move.Register(r, a.Moving(), a.Moving(), a.Moving())
	}
}

// replicate lets this node use volumes with several legs too, if its kernel can mirror. It returns a function that looks after their mirrors until its context
// ends.
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

// keepingNothing is reached.keeping of a node without a network. If it was started with --remote-address, it also waits until that can be used
// (untilReachable).
func (o *options) keepingNothing(run func(context.Context) error) func(context.Context) error {
	if o.remoteAddress == "" {
		return run
	}
	wait := func(ctx context.Context) error { return untilReachable(ctx, reachablePause, o.reachable) }
	return func(ctx context.Context) error { return beside(ctx, wait, run) }
}

// registering registers the services of others, and those that nodes with a network call.
func (r *reached) registering(others func(grpc.ServiceRegistrar)) func(grpc.ServiceRegistrar) {
	return func(registrar grpc.ServiceRegistrar) {
		others(registrar)
		r.services(registrar)
	}
}
