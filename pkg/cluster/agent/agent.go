// Package agent carries out, on one node of a cluster, what the objects of pkg/api say of that node: it makes, changes and
// deletes volumes and snapshots in the node's pools, and writes down how they and the pools are.
package agent

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// Options of an Agent.
type Options struct {
	// Driver is the name of the CSI driver.
	Driver string
	// Pools of the node; the first is the default.
	Pools []Pool
	// Locks are those of the node's CSI calls.
	Locks *keylock.Table
	// MaxVolumes is how many volumes may be claimed for the node; 0 for any number.
	MaxVolumes int64
	// Namespace is that of the agent's Lease; empty: it has none.
	Namespace string
	// Endpoint is where other parts of the driver reach this agent (package port); nil: nowhere.
	Endpoint *v1alpha1.AgentEndpoint
	// Agents connects to other agents, to copy what is on their nodes, and to use it; nil: to none.
	Agents Agents
	// Network is where volumes of the node are given to others, and those of others used here; nil: nowhere.
	Network *v1alpha1.Network
	// Exporter gives volumes of the node to others, and ends that; nil: they are given to nobody. Without a Network it gives nothing, and ends what it gave before the machine started.
	Exporter Exporter
	// Schemes returns how volumes of the node can be encrypted, now; nil: not at all.
	Schemes func() []volume.Scheme
	// Limits reports whether the node can keep limits of I/O, now; nil: that is not told.
	Limits func() bool
	// Heartbeat is how often the Lease is renewed; 0 is the usual time.
	Heartbeat time.Duration
	// ProgressEvery is how often it is written down how far something is; 0 is the usual time.
	ProgressEvery time.Duration
	// LookEvery is how often a volume that moves while it is used is looked at, and a mirror of replicas; 0 is the usual time.
	LookEvery time.Duration
	// MoveCopies is how many volumes that move while they are used are copied at once; 0 is the usual number.
	MoveCopies int
	// CopyBandwidth is how many bytes per second the kernel copies of volumes that move while this node uses them, and to legs that join; 0: no limit.
	CopyBandwidth int64
	// ScrubEvery is how often the legs of the volumes that the node uses are compared; 0: only when somebody asks for it.
	ScrubEvery time.Duration
	// ScrubBandwidth is how many bytes per second of each leg are read for that; 0: as many as there are.
	ScrubBandwidth int64
}

// Agents connects to the agents of other nodes (port.Callers).
type Agents interface {
	Agent(node string, at v1alpha1.AgentEndpoint) (grpc.ClientConnInterface, error)
}

// Agent carries out the objects of its node on the volumes of its node, and says how its
// pools are. All that it does can be done again: it keeps nothing in mind.
type Agent struct {
	kube    kube.Connection
	hub     kube.Hub
	local   *volume.Local
	options Options
	changed chan struct{}                   // the pools may have
	read    atomic.Bool                     // the cache has been filled once
	lookups map[string]map[volume.ID]lookup // for the objects of strays, by pool
	// leftBusy: the last report of the pools found leftovers that are in use, and so could not be removed. Only the goroutine that reports the pools uses it.
	leftBusy  bool
	gauges    gauges    // for metrics
	copyingIn poolSlots // of what is copied here
	arriving  poolSlots // of what is taken over
	leaving   poolSlots // of what is given back
	// fetching has room for each copy from another node that is under way (fetch).
	fetching      chan struct{}
	others        others
	moves         kube.Connection // watches the volumes of other nodes that move here, or have left here
	snapshotMoves kube.Connection // watches such snapshots
	replicas      replicas
	movesInUse    workqueue.TypedRateLimitingInterface[string] // volumes that move while this node uses them (MoveInUse)

	throttle copyThrottle // of the copies that the kernel makes for volumes that this node uses

	mu      sync.Mutex
	cancels map[request]context.CancelFunc // what makes an object
}

// New returns the agent of the node that local is of. It asks the API server nothing until it runs.
func New(config *rest.Config, local *volume.Local, o Options) (*Agent, error) {
	if o.Heartbeat == 0 {
		o.Heartbeat = cluster.Heartbeat
	}
	if o.ProgressEvery == 0 {
		o.ProgressEvery = progressEvery
	}
	if o.LookEvery == 0 {
		o.LookEvery = lookEvery
	}
	own := cache.ByObject{Field: fields.OneTermEqualSelector("spec.nodeName", local.Node())}
	c, err := kube.Connect(config, map[client.Object]cache.ByObject{&v1alpha1.Volume{}: own, &v1alpha1.Snapshot{}: own, &v1alpha1.Pool{}: own})
	if err != nil {
		return nil, err
	}
	a := &Agent{kube: c, local: local, options: o, changed: make(chan struct{}, 1),
		lookups: map[string]map[volume.ID]lookup{}, fetching: make(chan struct{}, maxFetches), cancels: map[request]context.CancelFunc{}, movesInUse: newMovesInUse(o.LookEvery), throttle: copyThrottle{limit: o.CopyBandwidth}}
	if err := errors.Join(a.connectOthers(config), a.connectMoves(config), a.connectSnapshotMoves(config), a.connectReplicas(config)); err != nil {
		return nil, err
	}
	local.SetMoves(a)
	return a, c.Cache.IndexField(context.Background(), &v1alpha1.Snapshot{}, cluster.ByGroup, cluster.IndexGroup)
}

// Run works until the context ends. Without an API server it waits for one. It fails if the
// cluster has another driver of this kind.
func (a *Agent) Run(ctx context.Context) error {
	if err := a.watch(ctx); err != nil {
		return err
	}
	work, err := a.queue(ctx, "agent", workers, false)
	if err != nil {
		return err
	}
	making, err := a.queue(ctx, "maker", makers, true)
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	var done sync.WaitGroup
	defer done.Wait()
	defer stop()
	failures := make(chan error, 8)
	if a.options.Namespace != "" {
		beating := &heartbeat{live: a.kube.Live, namespace: a.options.Namespace, node: a.local.Node(), every: a.options.Heartbeat}
		done.Go(func() { beating.run(ctx) })
	}
	done.Go(func() { failures <- a.kube.Cache.Start(ctx) })
	done.Go(func() { failures <- a.watchOthers(ctx) })
	done.Go(func() { failures <- a.watchReplicas(ctx) })
	if !a.kube.Cache.WaitForCacheSync(ctx) {
		return nil // the context ended
	}
	if err := cluster.WaitForOwner(ctx, a.kube.Live, a.options.Driver); err != nil {
		return err
	}
	a.read.Store(true)
	done.Go(func() { failures <- a.runMoves(ctx) })
	done.Go(func() { failures <- a.runSnapshotMoves(ctx) })
	done.Go(func() { failures <- work.Start(ctx) })
	done.Go(func() { failures <- making.Start(ctx) })
	done.Go(func() {
		if err := a.reportPools(ctx); err != nil {
			failures <- err
		}
	})
	return <-failures
}

// watch has the events of the cache reach those who wait for them, and the agent itself.
func (a *Agent) watch(ctx context.Context) error {
	for _, kind := range []struct {
		of   client.Object
		also func(client.Object, bool)
	}{{&v1alpha1.Volume{}, a.objectChanged}, {&v1alpha1.Snapshot{}, a.objectChanged}, {&v1alpha1.Pool{}, a.poolChanged}} {
		if err := a.hear(ctx, a.kube, kind.of, kind.also); err != nil {
			return err
		}
	}
	return nil
}

// hear has the events of a connection's cache reach those who wait for them, and also.
func (a *Agent) hear(ctx context.Context, c kube.Connection, of client.Object, also func(client.Object, bool)) error {
	informer, err := c.Cache.GetInformer(ctx, of, cache.BlockUntilSynced(false))
	if err != nil {
		return err
	}
	_, err = informer.AddEventHandler(a.hub.Handler(also))
	return err
}

// Changed tells the agent that something of its pools may have changed that it did not do
// itself.
func (a *Agent) Changed() {
	select {
	case a.changed <- struct{}{}:
	default: // it was told
	}
}

// poolChanged: somebody deleted the object of a pool, or wants objects for what it has.
func (a *Agent) poolChanged(o client.Object, gone bool) {
	if gone || o.GetAnnotations()[v1alpha1.AdoptAnnotation] != "" {
		a.Changed()
	}
}

// Labels returns labels of the agent's Node, as they are now; ErrUnavailable while it has not all of them,
// as a node that has just joined may not.
func (a *Agent) Labels(ctx context.Context, keys []string) (map[string]string, error) {
	if len(keys) == 0 {
		return nil, nil
	}
	node := kube.Node(a.local.Node())
	if err := a.kube.Live.Get(ctx, client.ObjectKeyFromObject(node), node); err != nil {
		return nil, fmt.Errorf("%w: read the labels of node %s: %w", errdefs.ErrUnavailable, node.Name, err)
	}
	found := map[string]string{}
	for _, key := range keys {
		value, there := node.Labels[key]
		if !there || value == "" {
			return nil, fmt.Errorf("%w: node %s has no label %s (--topology-label)", errdefs.ErrUnavailable, node.Name, key)
		}
		found[key] = value
	}
	return found, nil
}

// get reads an object of this node from the cache into o; there is false if it is gone.
func get[T client.Object](ctx context.Context, a *Agent, key string, o T) (_ T, there bool, err error) {
	err = a.kube.Client.Get(ctx, client.ObjectKey{Name: key}, o)
	if apierrors.IsNotFound(err) {
		return o, false, nil
	}
	return o, err == nil, err
}
