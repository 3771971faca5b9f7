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
	"sigs.k8s.io/controller-runtime/pkg/controller"

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
	// Locks are the table of locks that the node's CSI calls take, too.
	Locks *keylock.Table
	// MaxVolumes is how many volumes may be claimed for the node; 0 for any number.
	MaxVolumes int64
	// Namespace is that of the agent's Lease; empty: it has none.
	Namespace string
	// Endpoint is where other parts of the driver reach this agent (package port); nil: nowhere.
	Endpoint *v1alpha1.AgentEndpoint
	// Agents connects to the agents of other nodes, to copy and to use what is on these; nil: to none.
	Agents Agents
	// Network is the network in which volumes of the node are exported to other nodes, and those of other nodes used here; nil: none.
	Network *v1alpha1.Network
	// Exporter exports volumes of the node to other nodes; nil: none is exported. Without a Network it only ends exports from before the machine started.
	Exporter Exporter
	// Schemes returns how volumes of the node can be encrypted, now; nil: not at all.
	Schemes func() []volume.Scheme
	// Limits reports whether the node can enforce limits of I/O now; nil: status.limits of the pools stays empty.
	Limits func() bool
	// Heartbeat is how often the Lease is renewed; 0 is the usual time.
	Heartbeat time.Duration
	// ProgressEvery is how often progress is written into an object; 0 is the usual time.
	ProgressEvery time.Duration
	// LookEvery is how often a move in use, and the mirror of a volume with several legs, is looked at; 0 is the usual time.
	LookEvery time.Duration
	// MoveCopies is how many moves in use copy at once; 0 is the usual number.
	MoveCopies int
	// RoomTime is for how long room is made at once for a volume that moves here while it is used (move.New); 0 is the usual time.
	RoomTime time.Duration
	// CopyBandwidth is how many bytes per second the kernel copies for moves in use and for legs that join, all together; 0: no limit.
	CopyBandwidth int64
	// ScrubEvery is how often the legs of each volume that the node uses are compared (scrubbed); 0: only on request.
	ScrubEvery time.Duration
	// ScrubBandwidth is how many bytes per second of each leg a scrub reads; 0: no limit.
	ScrubBandwidth int64
}

// Agents connects to the agents of other nodes (port.Callers).
type Agents interface {
	Agent(node string, at v1alpha1.AgentEndpoint) (grpc.ClientConnInterface, error)
}

// Agent carries out the objects of its node on the volumes of the node, and reports its pools. Each step may be done again: after a restart it needs nothing
// but the objects, the records and the kernel.
type Agent struct {
	kube    kube.Connection
	hub     kube.Hub
	local   *volume.Local
	options Options
	changed chan struct{}                   // of one element; has it while a report of the pools is due
	read    atomic.Bool                     // the cache has been filled once
	lookups map[string]map[volume.ID]lookup // of the last search for strays, by pool; used by the goroutine that reports the pools alone
	// leftBusy: the last report of the pools found leftovers that are in use, and so could not be removed. Only the goroutine that reports the pools uses it.
	leftBusy  bool
	gauges    gauges    // for metrics
	copyingIn poolSlots // of moves that copy to this node
	arriving  poolSlots // of moves that this node takes over
	leaving   poolSlots // of moves whose bytes this node gives back
	// fetching is a semaphore: fetch holds one of its maxFetches elements.
	fetching chan struct{}
	// growing is a semaphore: change holds one of its maxGrowths elements.
	growing       chan struct{}
	others        others
	moves         kube.Connection // caches the volumes of other nodes that move here, or have left this node
	snapshotMoves kube.Connection // caches the snapshots of other nodes that move here, or have left this node
	replicas      replicas
	movesInUse    workqueue.TypedRateLimitingInterface[string] // volumes that move while this node uses them (MoveInUse)

	throttle copyThrottle // of the copies that the kernel makes for volumes that this node uses

	mu      sync.Mutex
	cancels map[request]context.CancelFunc // ends the making of an object (making)

	undeleted sync.Map // UIDs of objects whose bytes could not be deleted yet (stillDeletes)
}

// New returns the agent of the node of local. It asks the API server nothing until Run.
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
		lookups: map[string]map[volume.ID]lookup{}, fetching: make(chan struct{}, maxFetches), growing: make(chan struct{}, maxGrowths), cancels: map[request]context.CancelFunc{}, movesInUse: newMovesInUse(o.LookEvery), throttle: copyThrottle{limit: o.CopyBandwidth}}
	if err := errors.Join(a.connectOthers(config), a.connectMoves(config), a.connectSnapshotMoves(config), a.connectReplicas(config)); err != nil {
		return nil, err
	}
	local.SetMoves(a)
	local.SetLists(a)
	return a, c.Cache.IndexField(context.Background(), &v1alpha1.Snapshot{}, cluster.ByGroup, cluster.IndexGroup)
}

// Run works until the context ends. Without an API server it waits for one. It fails if the objects of the cluster are those of a driver of another name,
// and if a pool turns out to be another one than its object says (reportPools).
func (a *Agent) Run(ctx context.Context) error {
	if err := a.watch(ctx); err != nil {
		return err
	}
	var work []controller.TypedController[request]
	for name := range queues {
		queue, err := a.queue(ctx, name)
		if err != nil {
			return err
		}
		work = append(work, queue)
	}
	ctx, stop := context.WithCancel(ctx)
	var done sync.WaitGroup
	defer done.Wait()
	defer stop()
	failures := make(chan error, 6+len(work))
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
	for _, queue := range work {
		done.Go(func() { failures <- queue.Start(ctx) })
	}
	done.Go(func() {
		if err := a.reportPools(ctx); err != nil {
			failures <- err
		}
	})
	return <-failures
}

// watch has the events of the cache handed to the hub and to the agent.
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

// hear has the events of a kind, from the cache of a connection, handed to the hub and to also.
func (a *Agent) hear(ctx context.Context, c kube.Connection, of client.Object, also func(client.Object, bool)) error {
	informer, err := c.Cache.GetInformer(ctx, of, cache.BlockUntilSynced(false))
	if err != nil {
		return err
	}
	_, err = informer.AddEventHandler(a.hub.Handler(also))
	return err
}

// Changed has the pools reported soon, because something in them may have changed.
func (a *Agent) Changed() {
	select {
	case a.changed <- struct{}{}:
	default: // a report is due already
	}
}

// poolChanged has the pools reported if the object of one was deleted, or asks to adopt strays.
func (a *Agent) poolChanged(o client.Object, gone bool) {
	if gone || o.GetAnnotations()[v1alpha1.AdoptAnnotation] != "" {
		a.Changed()
	}
}

// Labels returns the labels of the agent's Node with some keys, from the API server. ErrUnavailable if one is missing: a node that has just joined may get
// it later.
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

// runWatched runs work that waits for I/O in a mirror, and calls look again and again meanwhile: a leg may not answer, and then only the end of its
// connection ends the wait. When ctx ends, work is waited for no longer than endTime. The next process finishes or repairs what it leaves (mirror.Recover).
func (a *Agent) runWatched(ctx context.Context, look func(context.Context), work func() error) error {
	done := make(chan error, 1)
	go func() { done <- work() }()
	for {
		select {
		case err := <-done:
			return err
		case <-ctx.Done():
			err, ended := waitForEnd(ctx, done)
			if !ended {
				err = ctx.Err()
			}
			return err
		case <-time.After(2 * a.options.LookEvery):
			look(ctx)
		}
	}
}

// endTime is how long work is waited for when the driver is to end.
const endTime = 2 * time.Second

// waitForEnd waits for a result; once the context has ended, no longer than endTime. ended is false if there is none.
func waitForEnd[T any](ctx context.Context, done <-chan T) (result T, ended bool) {
	select {
	case result = <-done:
		return result, true
	case <-ctx.Done():
	}
	select {
	case result = <-done:
		return result, true
	case <-time.After(endTime):
		return result, false
	}
}
