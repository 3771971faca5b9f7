package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/disks"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pools"
	"github.com/ashlar-csi/ashlar/pkg/cluster/agent"
	"github.com/ashlar-csi/ashlar/pkg/cluster/port"
	"github.com/ashlar-csi/ashlar/pkg/cluster/store"
	"github.com/ashlar-csi/ashlar/pkg/controller"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
	"github.com/ashlar-csi/ashlar/pkg/identity"
	"github.com/ashlar-csi/ashlar/pkg/measure"
	"github.com/ashlar-csi/ashlar/pkg/metrics"
	"github.com/ashlar-csi/ashlar/pkg/node"
	"github.com/ashlar-csi/ashlar/pkg/rpc"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// checkCluster checks the flags that belong to a cluster.
func (o *options) checkCluster() error {
	switch {
	case o.mode == "all" && o.kubeconfig != "":
		return errors.New("--kubeconfig: --mode=all is one machine without Kubernetes; use controller or node")
	case o.mode == "controller" && len(o.pools) > 0:
		return errors.New("--pool: pools belong to nodes; the controller finds them as objects")
	case o.mode != "node" && len(o.labels) > 0:
		return errors.New("--topology-label: nodes say where they are (--mode=node)")
	case o.goneGrace < 0:
		return fmt.Errorf("--gone-grace=%s: give 0 or more", o.goneGrace)
	case o.abandonGrace <= 0:
		return fmt.Errorf("--abandon-grace=%s: give more than 0, and longer than making a volume takes", o.abandonGrace)
	}
	if o.mode == "node" {
		if problems := validation.NameIsDNSSubdomain(o.nodeID, false); len(problems) > 0 {
			return fmt.Errorf("--node-id=%s: give the name of the Kubernetes node: %s", o.nodeID, problems[0])
		}
	}
	return nil
}

// kubernetes returns how to reach the API server; it does not connect. Its errors name asks, the flag or command that needs the API server.
func (o *options) kubernetes(asks string) (*rest.Config, error) {
	config, err := rest.InClusterConfig()
	if o.kubeconfig != "" {
		config, err = clientcmd.BuildConfigFromFlags("", o.kubeconfig)
	}
	if errors.Is(err, rest.ErrNotInCluster) {
		return nil, fmt.Errorf("%s needs Kubernetes, and this is no pod: give --kubeconfig", asks)
	}
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig=%s: %w", o.kubeconfig, err)
	}
	config.UserAgent = o.driverName + "-" + o.mode + "/" + version
	return config, nil
}

// namespace returns the namespace of this pod, or with --kubeconfig that of its context.
func (o *options) namespace() (string, error) {
	namespace, _, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(&clientcmd.ClientConfigLoadingRules{ExplicitPath: o.kubeconfig}, nil).Namespace()
	return namespace, err
}

// newIdentity returns the Identity service of a part of a cluster. It offers SnapshotMetadata only if the controller asks the nodes for that
// (--snapshot-metadata).
func newIdentity(o options, ready func(context.Context) error) *identity.Server {
	if o.blocks {
		return identity.New(o.driverName, version, ready)
	}
	return identity.New(o.driverName, version, ready, csi.PluginCapability_Service_SNAPSHOT_METADATA_SERVICE)
}

// startController serves the controller's services, over the objects of the cluster.
func startController(ctx context.Context, o options) error {
	config, err := o.kubernetes("--mode=" + o.mode)
	if err != nil {
		return err
	}
	namespace, err := o.namespace()
	if err != nil {
		return err
	}
	agents, err := callers(config, o.blocks)
	if err != nil {
		return err
	}
	defer agents.Close()
	s, err := store.New(config, store.Options{GoneGrace: o.goneGrace, AbandonGrace: o.abandonGrace, Driver: o.driverName, Namespace: namespace,
		Agents: agents, StartupTaint: o.startupTaint})
	if err != nil {
		return err
	}
	ready := func(ctx context.Context) error {
		if err := s.Ready(ctx); err != nil {
			return fmt.Errorf("%w: %w", identity.ErrStarting, err)
		}
		return nil
	}
	listener, err := rpc.Listen(o.endpoint)
	if err != nil {
		return err
	}
	// answer closes it, too.
	defer listener.Close()
	c := controller.New(s)
	services := rpc.Services{Identity: newIdentity(o, ready), Controller: c, GroupController: c}
	if o.blocks {
		services.SnapshotMetadata = c
	}
	serve := func(ctx context.Context) error {
		return o.monitored(ctx, []metrics.Source{s.Samples}, func(ctx context.Context, observe observer) error {
			services.Observe = observe
			return answer(ctx, o, listener, services)
		})
	}
	if o.page == "" {
		return beside(ctx, s.Run, serve)
	}
	viewer, err := store.NewViewer(config, s, version)
	if err != nil {
		return err
	}
	return beside(ctx, s.Run, func(ctx context.Context) error {
		return beside(ctx, viewer.Run, func(ctx context.Context) error { return o.withPage(ctx, viewer, serve) })
	})
}

// startNode serves a node's services, and has an agent carry out the objects of this node.
func startNode(ctx context.Context, o options) (err error) {
	config, err := o.kubernetes("--mode=" + o.mode)
	if err != nil {
		return err
	}
	namespace, err := o.namespace()
	if err != nil {
		return err
	}
	// An existing directory proves nothing: the kubelet makes that of a pool, even if the disk is missing. The API server has what the pools were.
	memory, err := agent.NewMemory(config, o.nodeID)
	if err != nil {
		return err
	}
	watching := disks.New(ctx)
	local, mounts, opened, err := openLocal(ctx, o, memory.Of, watching)
	defer func() { err = errors.Join(err, closeAll(opened)) }()
	if err != nil {
		return err
	}
	locks := &keylock.Table{}
	listener, err := rpc.Listen(o.endpoint) // before the agent runs: another driver may run on this node
	if err != nil {
		return err
	}
	// answer closes it, too.
	defer listener.Close()
	remote, err := o.listenPort()
	if err != nil {
		return err
	}
	defer remote.Close()
	others, err := callers(config, o.agentEndpoint != "")
	if err != nil {
		return err
	}
	defer others.Close()
	with := o.agentOptions(ctx, local, opened, others)
	with.Locks, with.Namespace, with.Endpoint = locks, namespace, remote.Endpoint()
	a, err := agent.New(config, local, with)
	if err != nil {
		return err
	}
	reached, err := o.reach(ctx, a, local, mounts, locks, with.Network)
	if err != nil {
		return err
	}
	measuring := measure.New(ctx, local, o.measured(opened), o.perVolume)
	defer measuring.Close() // closed before the pools
	watching.Start()
	defer watching.Close()
	return beside(ctx, reached.keeping(a.Run), func(ctx context.Context) error {
		return o.monitored(ctx, []metrics.Source{measuring.Samples, watching.Samples(o.nodeID), a.Samples, reached.samples}, func(ctx context.Context, observe observer) error {
			remotely := rpc.Services{SnapshotMetadata: controller.New(local), Locks: locks, Observe: observe, Others: reached.registering(o.transfers(a.OpenCopy))}
			return o.withPort(ctx, remote, config, namespace, remotely, func(ctx context.Context) error {
				return answer(ctx, o, listener, rpc.Services{Identity: newIdentity(o, nil), Locks: locks, Observe: observe,
					Node: node.New(ctx, &watched{reached.volumes, a, o.labels, with.Network}, mounts, o.node()), Overview: o.overview(local, reached.uses)})
			})
		})
	})
}

// agentOptions returns the options of the agent that follow from flags, pools and others, which may be nil.
func (o *options) agentOptions(ctx context.Context, local *volume.Local, opened []blockdev.Pool, others *port.Callers) agent.Options {
	with := agent.Options{Driver: o.driverName, MaxVolumes: o.maxVolumes, CopyBandwidth: o.bandwidth, ScrubEvery: o.scrubEvery, ScrubBandwidth: o.scrubRate, Schemes: volume.SchemesHere, Limits: volume.LimitsHere}
	for i, pool := range opened {
		with.Pools = append(with.Pools, agent.Pool{Pool: pool, Kind: pools.KindOf(o.pools[i].location)})
	}
	if others != nil {
		with.Agents = others
	}
	with.Network, with.Exporter = o.network(ctx), local
	return with
}

// watched is what the Node service works with in a cluster. It tells the agent when the node makes or deletes a volume by itself (an ephemeral one), and asks
// it for the labels of the node and the claims of volumes.
type watched struct {
	node.Volumes
	agent  *agent.Agent
	labels []string // keys of labels of the Node that say where it is
	// network is the one in which this node reaches others; nil: none.
	network *v1alpha1.Network
}

// Topology returns the segments of this node besides its name. The network is among them only while the node is in one: Kubernetes wants a driver never to
// change the value of a label that it once gave a node.
func (w *watched) Topology(ctx context.Context) (map[string]string, error) {
	where, err := w.agent.Labels(ctx, w.labels)
	if err != nil || w.network == nil {
		return where, err
	}
	all := map[string]string{csimap.NetworkKey: w.network.Name}
	maps.Copy(all, where)
	return all, nil
}

func (w *watched) AwaitClaim(ctx context.Context, id volume.ID, generation int64) error {
	return w.agent.AwaitClaim(ctx, id, generation)
}

func (w *watched) Claimed(ctx context.Context, v volume.Volume, readOnly bool) (volume.Claim, bool) {
	return w.agent.Claimed(ctx, v.ID, readOnly)
}

func (w *watched) Create(ctx context.Context, spec volume.Spec) (volume.Volume, error) {
	defer w.agent.Changed()
	return w.Volumes.Create(ctx, spec)
}

func (w *watched) Delete(ctx context.Context, id volume.ID) error {
	defer w.agent.Changed()
	return w.Volumes.Delete(ctx, id)
}

// beside serves until ctx ends. part runs as long as calls are served, also those that end after ctx. If part ends before, serving ends, and its error is
// returned too.
func beside(ctx context.Context, part, serve func(context.Context) error) error {
	serving, end := context.WithCancel(ctx)
	defer end()
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	var failure error
	var done sync.WaitGroup
	done.Go(func() {
		defer end()
		if err := part(running); err != nil && running.Err() == nil {
			failure = err
		}
	})
	err := serve(serving)
	stop()
	done.Wait()
	return errors.Join(err, failure)
}
