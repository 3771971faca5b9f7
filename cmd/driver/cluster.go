package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/controller"
	"github.com/ashlar-csi/ashlar/pkg/identity"
	"github.com/ashlar-csi/ashlar/pkg/node"
	"github.com/ashlar-csi/ashlar/pkg/rpc"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// abandonGrace is how old a volume is before somebody asks whether anybody knows of it:
// longer than provisioning takes.
const abandonGrace = time.Hour

// checkCluster checks the flags that only the parts of a cluster have.
func (o *options) checkCluster() error {
	switch {
	case o.mode == "all" && o.kubeconfig != "":
		return errors.New("--kubeconfig: --mode=all is one machine without Kubernetes; use controller or node")
	case o.mode == "controller" && len(o.pools) > 0:
		return errors.New("--pool: pools belong to nodes; the controller finds them as objects")
	case o.goneGrace < 0:
		return fmt.Errorf("--gone-grace=%s: give 0 or more", o.goneGrace)
	}
	if o.mode == "node" {
		if problems := validation.NameIsDNSSubdomain(o.nodeID, false); len(problems) > 0 {
			return fmt.Errorf("--node-id=%s: give the name of the Kubernetes node: %s", o.nodeID, problems[0])
		}
	}
	return nil
}

// kubernetes says how to reach the API server. It does not try to.
func (o *options) kubernetes() (*rest.Config, error) {
	config, err := rest.InClusterConfig()
	if o.kubeconfig != "" {
		config, err = clientcmd.BuildConfigFromFlags("", o.kubeconfig)
	}
	if errors.Is(err, rest.ErrNotInCluster) {
		return nil, fmt.Errorf("--mode=%s needs Kubernetes, and this is no pod: give --kubeconfig", o.mode)
	}
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig=%s: %w", o.kubeconfig, err)
	}
	config.UserAgent = o.driverName + "-" + o.mode + "/" + version
	return config, nil
}

// newIdentity is that of a plugin of a cluster: what only a node could answer, the
// controller does not offer.
func newIdentity(o options, ready func(context.Context) error) *identity.Server {
	return identity.New(o.driverName, version, ready, csi.PluginCapability_Service_SNAPSHOT_METADATA_SERVICE)
}

// startController serves what a cluster has one of, over the objects of the cluster.
func startController(ctx context.Context, o options) error {
	config, err := o.kubernetes()
	if err != nil {
		return err
	}
	store, err := cluster.NewStore(config, cluster.Options{GoneGrace: o.goneGrace, AbandonGrace: abandonGrace})
	if err != nil {
		return err
	}
	ready := func(ctx context.Context) error {
		if err := store.Ready(ctx); err != nil {
			return fmt.Errorf("%w: %w", identity.ErrStarting, err)
		}
		return nil
	}
	c := controller.New(store)
	return beside(ctx, store.Run, func(ctx context.Context) error {
		return listen(ctx, o, rpc.Services{Identity: newIdentity(o, ready), Controller: c, GroupController: c})
	})
}

// startNode serves what each node of a cluster has, and carries out the objects of the node.
func startNode(ctx context.Context, o options) (err error) {
	config, err := o.kubernetes()
	if err != nil {
		return err
	}
	local, mounts, pools, err := openLocal(ctx, o)
	defer func() { err = errors.Join(err, closeAll(pools)) }()
	if err != nil {
		return err
	}
	var kept []cluster.AgentPool
	for i, pool := range pools {
		location, err := blockdev.ParseLocation(o.pools[i].url)
		if err != nil {
			return err
		}
		kept = append(kept, cluster.AgentPool{Pool: pool, Kind: location.Scheme})
	}
	locks := &keylock.Table{}
	agent, err := cluster.NewAgent(config, local, kept, locks, o.maxVolumes)
	if err != nil {
		return err
	}
	return beside(ctx, agent.Run, func(ctx context.Context) error {
		return listen(ctx, o, rpc.Services{Identity: newIdentity(o, local.Ready), Locks: locks,
			Node: node.New(&watched{local, agent.Changed}, mounts, o.maxVolumes)})
	})
}

// watched tells the agent of the volumes that the node makes and deletes by itself.
type watched struct {
	*volume.Local
	changed func()
}

func (w *watched) Create(ctx context.Context, spec volume.Spec) (volume.Volume, error) {
	defer w.changed()
	return w.Local.Create(ctx, spec)
}

func (w *watched) Delete(ctx context.Context, id volume.ID) error {
	defer w.changed()
	return w.Local.Delete(ctx, id)
}

// beside serves until ctx ends, with a part running beside it for as long as calls are
// served. If the part fails, serving ends.
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
