// Package agent carries out, on one node of a cluster, what the objects of pkg/api say of that node: it makes, changes and
// deletes volumes and snapshots in the node's pools, and writes down how they and the pools are.
package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

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
	// Heartbeat is how often the Lease is renewed; 0 is the usual time.
	Heartbeat time.Duration
}

// Agent carries out the objects of its node on the volumes of its node, and says how its
// pools are. All that it does can be done again: it keeps nothing in mind.
type Agent struct {
	kube    kube.Connection
	hub     kube.Hub
	local   *volume.Local
	options Options
	changed chan struct{}                 // the pools may have
	read    atomic.Bool                   // the cache has been filled once
	looked  map[string]map[volume.ID]look // for the objects of strays, by pool

	mu      sync.Mutex
	cancels map[request]context.CancelFunc // what makes an object
}

// request names what is to be looked after: a volume, a snapshot or a group snapshot.
type request struct{ kind, key string }

const (
	aVolume   = "volume"
	aSnapshot = "snapshot"
	aGroup    = "group"
)

// How often the agent tries again what failed.
const (
	firstRetry = 20 * time.Millisecond
	lastRetry  = 30 * time.Second
	busyRetry  = 20 * time.Millisecond
	inUseRetry = time.Second
	// conflictRetry is when what somebody else has changed is looked at again. The change itself comes earlier, unless
	// the watch is behind: then each try before it has come is refused too.
	conflictRetry = time.Second
	// yieldRetry is when a copy goes on that gave way to a call: the kubelet asks again
	// within seconds.
	yieldRetry = 5 * time.Second
	// checkAgain is how often a volume is looked at that nothing happens to.
	checkAgain = 5 * time.Minute
	// workers is how many objects are worked on at once; makers is how many are made. That
	// may take hours (a copy, zeroing), and nothing else is to wait for it.
	workers = 16
	makers  = 64
)

// New returns the agent of the node that local is of. It asks the API server nothing until it runs.
func New(config *rest.Config, local *volume.Local, o Options) (*Agent, error) {
	if o.Heartbeat == 0 {
		o.Heartbeat = cluster.Heartbeat
	}
	own := cache.ByObject{Field: fields.OneTermEqualSelector("spec.nodeName", local.Node())}
	c, err := kube.Connect(config, map[client.Object]cache.ByObject{&v1alpha1.Volume{}: own, &v1alpha1.Snapshot{}: own, &v1alpha1.Pool{}: own})
	if err != nil {
		return nil, err
	}
	a := &Agent{kube: c, local: local, options: o, changed: make(chan struct{}, 1),
		looked: map[string]map[volume.ID]look{}, cancels: map[request]context.CancelFunc{}}
	return a, c.Cache.IndexField(context.Background(), &v1alpha1.Snapshot{}, cluster.ByGroup, cluster.IndexGroup)
}

// Run works until the context ends. Without an API server it waits for one. It fails if the
// cluster has another driver of this kind.
func (a *Agent) Run(ctx context.Context) error {
	for _, kind := range []struct {
		of   client.Object
		also func(client.Object, bool)
	}{{&v1alpha1.Volume{}, a.objectChanged}, {&v1alpha1.Snapshot{}, a.objectChanged}, {&v1alpha1.Pool{}, a.poolChanged}} {
		informer, err := a.kube.Cache.GetInformer(ctx, kind.of, cache.BlockUntilSynced(false))
		if err != nil {
			return err
		}
		if _, err := informer.AddEventHandler(a.hub.Handler(kind.also)); err != nil {
			return err
		}
	}
	work, err := a.queue(ctx, "agent", workers, false)
	if err != nil {
		return err
	}
	making, err := a.queue(ctx, "maker", makers, true)
	if err != nil {
		return err
	}
	volumes := handler.TypedEnqueueRequestsFromMapFunc(func(_ context.Context, v *v1alpha1.Volume) []request {
		return []request{{aVolume, v.Name}}
	})
	snapshots := handler.TypedEnqueueRequestsFromMapFunc(func(_ context.Context, s *v1alpha1.Snapshot) []request {
		if s.Spec.Group != nil {
			return []request{{aGroup, s.Spec.Group.Key}}
		}
		return []request{{aSnapshot, s.Name}}
	})
	for _, queue := range []controller.TypedController[request]{work, making} {
		if err := errors.Join(queue.Watch(source.TypedKind(a.kube.Cache, &v1alpha1.Volume{}, volumes)),
			queue.Watch(source.TypedKind(a.kube.Cache, &v1alpha1.Snapshot{}, snapshots))); err != nil {
			return err
		}
	}
	ctx, stop := context.WithCancel(ctx)
	var done sync.WaitGroup
	defer done.Wait()
	defer stop()
	failures := make(chan error, 4)
	if a.options.Namespace != "" {
		beating := heartbeat{live: a.kube.Live, namespace: a.options.Namespace, node: a.local.Node(), every: a.options.Heartbeat}
		done.Go(func() { beating.run(ctx) })
	}
	done.Go(func() { failures <- a.kube.Cache.Start(ctx) })
	if !a.kube.Cache.WaitForCacheSync(ctx) {
		return nil // the context ended
	}
	if err := cluster.WaitForOwner(ctx, a.kube.Live, a.options.Driver); err != nil {
		return err
	}
	a.read.Store(true)
	done.Go(func() { failures <- work.Start(ctx) })
	done.Go(func() { failures <- making.Start(ctx) })
	done.Go(func() {
		if err := a.reportPools(ctx); err != nil {
			failures <- err
		}
	})
	return <-failures
}

// queue returns the queue of requests that make something, or of all others.
func (a *Agent) queue(ctx context.Context, name string, workers int, makes bool) (controller.TypedController[request], error) {
	log := klog.FromContext(ctx)
	return controller.NewTypedUnmanaged(name, controller.TypedOptions[request]{
		SkipNameValidation:      new(true), // tests run several agents
		MaxConcurrentReconciles: workers,
		Reconciler: reconcile.TypedFunc[request](func(ctx context.Context, r request) (reconcile.Result, error) {
			if unmade, err := a.unmade(ctx, r); err != nil || unmade != makes {
				return reconcile.Result{}, err
			}
			return a.reconcile(ctx, r)
		}),
		RateLimiter: workqueue.NewTypedItemExponentialFailureRateLimiter[request](firstRetry, lastRetry),
		LogConstructor: func(r *request) logr.Logger {
			if r == nil {
				return log
			}
			return log.WithValues(r.kind, r.key)
		},
	})
}

// unmade reports whether what a request names is still to be made.
func (a *Agent) unmade(ctx context.Context, r request) (bool, error) {
	unmade := func(o cluster.Object) bool { return o.Common().Created == nil && !cluster.Going(o) }
	switch r.kind {
	case aVolume:
		v, there, err := get(ctx, a, r.key, &v1alpha1.Volume{})
		return there && unmade(v), err
	case aSnapshot:
		s, there, err := get(ctx, a, r.key, &v1alpha1.Snapshot{})
		return there && unmade(s), err
	}
	members, err := cluster.Members(ctx, a.kube.Client, r.key)
	return slices.ContainsFunc(members, func(m v1alpha1.Snapshot) bool { return unmade(&m) }), err
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

// objectChanged ends the making of what nobody wants any more.
func (a *Agent) objectChanged(o client.Object, gone bool) {
	if gone {
		a.Changed() // its bytes may be left
	} else if !cluster.Going(o.(cluster.Object)) {
		return
	}
	r := request{aVolume, o.GetName()}
	if s, ok := o.(*v1alpha1.Snapshot); ok {
		r.kind = aSnapshot
		if s.Spec.Group != nil {
			r = request{aGroup, s.Spec.Group.Key}
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if cancel := a.cancels[r]; cancel != nil {
		cancel()
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

// making returns a context that ends when nobody wants the object of a request any more.
func (a *Agent) making(ctx context.Context, r request) (context.Context, func()) {
	ctx, cancel := context.WithCancel(ctx)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.cancels[r] = cancel
	return ctx, func() {
		cancel()
		a.mu.Lock()
		defer a.mu.Unlock()
		delete(a.cancels, r)
	}
}

// wanted is ErrBusy if nobody wants an object any more that was read before its lock was taken:
// then its bytes may be deleted already.
func wanted[T cluster.Object](ctx context.Context, a *Agent, o T) error {
	now := o.DeepCopyObject().(T)
	now, there, err := get(ctx, a, o.GetName(), now)
	if err == nil && (!there || cluster.Going(now) || now.GetUID() != o.GetUID()) {
		err = fmt.Errorf("%w: nobody wants %s any more", errdefs.ErrBusy, o.GetName())
	}
	return err
}

func (a *Agent) reconcile(ctx context.Context, r request) (reconcile.Result, error) {
	var result reconcile.Result
	var err error
	switch r.kind {
	case aVolume:
		result, err = a.volume(ctx, r)
	case aSnapshot:
		result, err = a.snapshot(ctx, r)
	default:
		result, err = a.group(ctx, r)
	}
	switch {
	case errors.Is(err, errGaveWay):
		return reconcile.Result{RequeueAfter: yieldRetry}, nil
	case errors.Is(err, errdefs.ErrBusy):
		return reconcile.Result{RequeueAfter: busyRetry}, nil
	case apierrors.IsConflict(err):
		return reconcile.Result{RequeueAfter: conflictRetry}, nil
	case apierrors.IsNotFound(err), ctx.Err() != nil:
		return reconcile.Result{}, nil
	}
	return result, err
}

// get reads an object of this node from the cache; nil if it is gone.
func get[T client.Object](ctx context.Context, a *Agent, key string, o T) (_ T, there bool, err error) {
	err = a.kube.Client.Get(ctx, client.ObjectKey{Name: key}, o)
	if apierrors.IsNotFound(err) {
		return o, false, nil
	}
	return o, err == nil, err
}

// locked works on the volumes of the node with the locks that its CSI calls take;
// ErrBusy if it cannot have them. What is only looked at or written down needs none, and
// takes none: a call that comes because of what was written must not find it locked.
func (a *Agent) locked(exclusive, shared []string, work func() error) error {
	unlock, busy := a.options.Locks.TryLock(exclusive, shared)
	if unlock == nil {
		return fmt.Errorf("%w on %s", errdefs.ErrBusy, busy)
	}
	defer unlock()
	return work()
}

// errGaveWay ends a copy that goes on later.
var errGaveWay = fmt.Errorf("%w: a call needs what is being copied", errdefs.ErrBusy)

// copying is locked for what may last. A copy of a volume gives way when somebody needs the
// volume: nobody waits for hours to stage or unstage it. How much of the copy stays is the
// pool's business.
func (a *Agent) copying(ctx context.Context, exclusive, shared []string, work func(context.Context) error) error {
	unlock, wanted, busy := a.options.Locks.TryYielding(exclusive, shared)
	if unlock == nil {
		return fmt.Errorf("%w on %s", errdefs.ErrBusy, busy)
	}
	defer unlock()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-wanted:
			cancel(errGaveWay)
		case <-ctx.Done():
		}
	}()
	err := work(ctx)
	if err != nil && errors.Is(context.Cause(ctx), errGaveWay) {
		return errGaveWay
	}
	return err
}
