package cluster

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// AgentPool is a pool of the agent's node.
type AgentPool struct {
	blockdev.Pool
	Kind string // of storage, for people
}

// Agent carries out the objects of its node on the volumes of its node, and says how its
// pools are. All that it does can be done again: it keeps nothing in mind.
type Agent struct {
	connection
	local      *volume.Local
	pools      []AgentPool // the first is the default
	locks      *keylock.Table
	maxVolumes int64
	changed    chan struct{} // the pools may have

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

// How often the agent tries again what failed, and how long it lets writers of a mounted
// filesystem wait for a copy.
const (
	firstRetry = 20 * time.Millisecond
	lastRetry  = 30 * time.Second
	busyRetry  = 20 * time.Millisecond
	inUseRetry = time.Second
	longestCut = time.Minute
	// checkAgain is how often a volume is looked at that nothing happens to.
	checkAgain = 5 * time.Minute
	// workers is how many objects are worked on at once.
	workers = 16
)

// NewAgent returns the agent of the node that local is of. locks are those of the node's
// CSI calls; maxVolumes is how many volumes may be claimed for the node, 0 for any number.
func NewAgent(config *rest.Config, local *volume.Local, pools []AgentPool, locks *keylock.Table, maxVolumes int64) (*Agent, error) {
	own := cache.ByObject{Field: fields.OneTermEqualSelector("spec.nodeName", local.Node())}
	c, err := connect(config, map[client.Object]cache.ByObject{&v1alpha1.Volume{}: own, &v1alpha1.Snapshot{}: own, &v1alpha1.Pool{}: own})
	if err != nil {
		return nil, err
	}
	a := &Agent{connection: c, local: local, pools: pools, locks: locks, maxVolumes: maxVolumes,
		changed: make(chan struct{}, 1), cancels: map[request]context.CancelFunc{}}
	return a, c.cache.IndexField(context.Background(), &v1alpha1.Snapshot{}, byGroup, groupOf)
}

// Run works until the context ends. Without an API server it waits for one.
func (a *Agent) Run(ctx context.Context) error {
	for _, kind := range []client.Object{&v1alpha1.Volume{}, &v1alpha1.Snapshot{}, &v1alpha1.Pool{}} {
		informer, err := a.cache.GetInformer(ctx, kind, cache.BlockUntilSynced(false))
		if err != nil {
			return err
		}
		if _, err := informer.AddEventHandler((&hub{}).handler(a.cancelDeleted)); err != nil {
			return err
		}
	}
	log := klog.FromContext(ctx)
	work, err := controller.NewTypedUnmanaged("agent", controller.TypedOptions[request]{
		SkipNameValidation:      new(true), // tests run several agents
		MaxConcurrentReconciles: workers,
		Reconciler:              reconcile.TypedFunc[request](a.reconcile),
		RateLimiter:             workqueue.NewTypedItemExponentialFailureRateLimiter[request](firstRetry, lastRetry),
		LogConstructor: func(r *request) logr.Logger {
			if r == nil {
				return log
			}
			return log.WithValues(r.kind, r.key)
		},
	})
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
	if err := errors.Join(work.Watch(source.TypedKind(a.cache, &v1alpha1.Volume{}, volumes)),
		work.Watch(source.TypedKind(a.cache, &v1alpha1.Snapshot{}, snapshots))); err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	var done sync.WaitGroup
	defer done.Wait()
	defer stop()
	failures := make(chan error, 3)
	done.Go(func() { failures <- a.cache.Start(ctx) })
	if !a.cache.WaitForCacheSync(ctx) {
		return nil // the context ended
	}
	done.Go(func() { failures <- work.Start(ctx) })
	done.Go(func() { a.reportPools(ctx) })
	return <-failures
}

// Changed tells the agent that something of its pools may have changed that it did not do
// itself.
func (a *Agent) Changed() {
	select {
	case a.changed <- struct{}{}:
	default: // it was told
	}
}

// cancelDeleted ends the making of what nobody wants any more.
func (a *Agent) cancelDeleted(o client.Object, gone bool) {
	if !gone && o.GetDeletionTimestamp() == nil {
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

// making returns a context that ends when the object of a request is deleted.
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
	case errors.Is(err, blockdev.ErrBusy):
		return reconcile.Result{RequeueAfter: busyRetry}, nil
	case apierrors.IsConflict(err):
		return reconcile.Result{RequeueAfter: time.Millisecond}, nil // somebody else wrote: look again
	case apierrors.IsNotFound(err), ctx.Err() != nil:
		return reconcile.Result{}, nil
	}
	return result, err
}

// get reads an object of this node from the cache; nil if it is gone.
func get[T client.Object](ctx context.Context, a *Agent, key string, o T) (_ T, there bool, err error) {
	err = a.client.Get(ctx, client.ObjectKey{Name: key}, o)
	if apierrors.IsNotFound(err) {
		return o, false, nil
	}
	return o, err == nil, err
}

// locked works on the volumes of the node with the locks that its CSI calls take;
// ErrBusy if it cannot have them. What is only looked at or written down needs none, and
// takes none: a call that comes because of what was written must not find it locked.
func (a *Agent) locked(exclusive, shared []string, work func() error) error {
	unlock, busy := a.locks.TryLock(exclusive, shared)
	if unlock == nil {
		return fmt.Errorf("%w on %s", blockdev.ErrBusy, busy)
	}
	defer unlock()
	return work()
}

// report writes the status of an object, if edit changes it. It fails with a conflict if
// anybody changed the object since it was read.
func report[T object](ctx context.Context, a *Agent, o T, edit func(T)) error {
	before := o.DeepCopyObject().(T)
	edit(o)
	if equality.Semantic.DeepEqual(before, o) {
		return nil
	}
	return a.client.Status().Patch(ctx, o, lockingPatch(before))
}

func setCondition(conditions *[]metav1.Condition, o client.Object, kind string, status metav1.ConditionStatus, reason, message string) {
	meta.SetStatusCondition(conditions, metav1.Condition{Type: kind, Status: status, Reason: reason, Message: message, ObservedGeneration: o.GetGeneration()})
}

// refuse writes down that the node cannot do what the spec says. Errors that may pass are
// returned, to be tried again.
func refuse[T object](ctx context.Context, a *Agent, o T, err error) error {
	if isTransient(err) {
		return err
	}
	failure := failureOf(err)
	if have := o.Common().Refused(o.GetGeneration()); have != nil && *have == *failure {
		return nil
	}
	klog.FromContext(ctx).Error(err, "Refused")
	return report(ctx, a, o, func(o T) {
		status := o.Common()
		status.Failure, status.ObservedGeneration = failure, o.GetGeneration()
		if status.Created == nil {
			setCondition(&status.Conditions, o, v1alpha1.Ready, metav1.ConditionFalse, failure.Reason, failure.Message)
		}
	})
}
