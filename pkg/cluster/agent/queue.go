package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/controller/priorityqueue"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/metrics"
)

// request names what is reconciled: a volume, a snapshot, a group snapshot, or the move of a volume or snapshot.
type request struct{ kind, key string }

const (
	aVolume   = "volume"
	aSnapshot = "snapshot"
	aGroup    = "group"
)

// When the agent tries again what failed, and how much it does at once.
const (
	firstRetry = 20 * time.Millisecond
	lastRetry  = 30 * time.Second
	busyRetry  = 20 * time.Millisecond
	inUseRetry = time.Second
	// conflictRetry is for a write that had a conflict. The event of the other change comes earlier, unless the watch is behind: then each try before that
	// fails too.
	conflictRetry = time.Second
	// yieldRetry is for a copy that gave way to a call: the kubelet asks again within seconds.
	yieldRetry = 5 * time.Second
	// checkAgain is how often a volume is reconciled without a change.
	checkAgain = 5 * time.Minute
	// workers is how many objects are reconciled at once; makers is how many of them are made, and deleters how many are deleted. To make one may take hours (a
	// copy, zeroing), and to delete one minutes (an image in millions of pieces). So each has a queue of its own.
	workers  = 16
	makers   = 64
	deleters = 16
)

// queues are the queues of the objects of this node, with how many objects each works on at once.
var queues = map[string]int{"agent": workers, "maker": makers, "deleter": deleters}

// errAwaited is the error of a step that needs an object, or an answer of another node, which is not there yet.
var errAwaited = errors.New("something is not there yet")

// requestOf returns the request of an object; of a member of a group, that of the group.
func requestOf(o client.Object) request {
	s, ok := o.(*v1alpha1.Snapshot)
	switch {
	case !ok:
		return request{aVolume, o.GetName()}
	case s.Spec.Group != nil:
		return request{aGroup, s.Spec.Group.Key}
	}
	return request{aSnapshot, s.Name}
}

// queue returns one of the queues: of the requests that queueOf has in it.
func (a *Agent) queue(ctx context.Context, name string) (controller.TypedController[request], error) {
	log := klog.FromContext(ctx)
	queue, err := controller.NewTypedUnmanaged(name, controller.TypedOptions[request]{
		SkipNameValidation:      new(true), // tests run several agents
		MaxConcurrentReconciles: queues[name],
		Reconciler: reconcile.TypedFunc[request](func(ctx context.Context, r request) (reconcile.Result, error) {
			if its, err := a.queueOf(ctx, r); err != nil || its != name {
				return reconcile.Result{}, err
			}
			return a.reconcile(ctx, r)
		}),
		RateLimiter: workqueue.NewTypedItemExponentialFailureRateLimiter[request](firstRetry, lastRetry),
		NewQueue: func(name string, limiter workqueue.TypedRateLimiter[request]) workqueue.TypedRateLimitingInterface[request] {
			queue := priorityqueue.New(name, func(o *priorityqueue.Opts[request]) { o.Log, o.RateLimiter = log, limiter })
			a.gauges.add(queue)
			return queue
		},
		LogConstructor: func(r *request) logr.Logger {
			if r == nil {
				return log
			}
			return log.WithValues(r.kind, r.key)
		},
	})
	if err != nil {
		return nil, err
	}
	volumes := handler.TypedEnqueueRequestsFromMapFunc(func(_ context.Context, v *v1alpha1.Volume) []request { return []request{requestOf(v)} })
	snapshots := handler.TypedEnqueueRequestsFromMapFunc(func(_ context.Context, s *v1alpha1.Snapshot) []request { return []request{requestOf(s)} })
	return queue, errors.Join(queue.Watch(source.TypedKind(a.kube.Cache, &v1alpha1.Volume{}, volumes)),
		queue.Watch(source.TypedKind(a.kube.Cache, &v1alpha1.Snapshot{}, snapshots)))
}

// queueOf returns in which queue a request is, by its objects: those that are still to be made (without status.created), all to be deleted, or neither.
func (a *Agent) queueOf(ctx context.Context, r request) (string, error) {
	objects, err := a.objectsOf(ctx, r)
	switch {
	case err != nil || len(objects) == 0:
		return "agent", err
	case slices.ContainsFunc(objects, func(o cluster.Object) bool { return o.Common().Created == nil && !v1alpha1.Going(o) }):
		return "maker", nil
	case !slices.ContainsFunc(objects, func(o cluster.Object) bool { return !o.Deleting() }):
		return "deleter", nil
	}
	return "agent", nil
}

// objectsOf returns the objects of a request, by the cache.
func (a *Agent) objectsOf(ctx context.Context, r request) (objects []cluster.Object, err error) {
	add := func(o cluster.Object, there bool, err error) ([]cluster.Object, error) {
		if err != nil || !there {
			return nil, err
		}
		return []cluster.Object{o}, nil
	}
	switch r.kind {
	case aVolume:
		v, there, err := get(ctx, a, r.key, &v1alpha1.Volume{})
		return add(v, there, err)
	case aSnapshot:
		s, there, err := get(ctx, a, r.key, &v1alpha1.Snapshot{})
		return add(s, there, err)
	}
	members, err := cluster.Members(ctx, a.kube.Client, r.key)
	for i := range members {
		objects = append(objects, &members[i])
	}
	return objects, err
}

// reconcile carries out the objects that a request names. After an error that it returns, the request is tried again, later each time; for some errors it
// returns a fixed time instead.
func (a *Agent) reconcile(ctx context.Context, r request) (result reconcile.Result, err error) {
	ctx, end := a.traced(ctx, r)
	defer func() { end(err) }()
	switch r.kind {
	case aVolume:
		result, err = a.reconcileVolume(ctx, r)
	case aSnapshot:
		result, err = a.reconcileSnapshot(ctx, r)
	case aMove:
		result, err = a.reconcileMove(ctx, r)
	case aSnapshotMove:
		result, err = a.reconcileSnapshotMove(ctx, r)
	default:
		result, err = a.reconcileGroup(ctx, r)
	}
	if countsAsFailure(ctx, err) {
		metrics.AgentFailures.Inc(a.local.Node(), r.kind)
	}
	switch {
	case errors.Is(err, errGaveWay):
		return reconcile.Result{RequeueAfter: yieldRetry}, nil
	case errors.Is(err, errPoolBusy):
		return reconcile.Result{RequeueAfter: inUseRetry}, nil
	case errors.Is(err, errdefs.ErrBusy):
		return reconcile.Result{RequeueAfter: busyRetry}, nil
	case apierrors.IsConflict(err), errors.Is(err, errAwaited):
		return reconcile.Result{RequeueAfter: conflictRetry}, nil
	case apierrors.IsNotFound(err), ctx.Err() != nil:
		return reconcile.Result{}, nil
	}
	return result, err
}

// countsAsFailure reports whether an error counts in the metric of failures: those that only mean "not now" do not.
func countsAsFailure(ctx context.Context, err error) bool {
	return err != nil && ctx.Err() == nil && !errors.Is(err, errGaveWay) && !errors.Is(err, errPoolBusy) && !errors.Is(err, errAwaited) && !errors.Is(err, errdefs.ErrBusy) && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err)
}

// objectChanged ends the making of an object (making) that is gone or to be deleted.
func (a *Agent) objectChanged(o client.Object, gone bool) {
	a.moveInUseChanged(o, gone)
	if gone {
		a.undeleted.Delete(o.GetUID())
		a.Changed() // its bytes may be left
	} else if !v1alpha1.Going(o.(cluster.Object)) {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if cancel := a.cancels[requestOf(o)]; cancel != nil {
		cancel()
	}
}

// making returns a context that objectChanged, moveChanged or snapshotMoveChanged cancels when the object of a request is not wanted any more. The caller
// calls the function that it returns when the work has ended.
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

// stillWanted returns ErrBusy if an object, by the cache, is gone, to be deleted, or another one of its name. It is called with the lock that its bytes are
// deleted under, for an object that was read before.
func stillWanted[T cluster.Object](ctx context.Context, a *Agent, o T) error {
	now := o.DeepCopyObject().(T)
	now, there, err := get(ctx, a, o.GetName(), now)
	if err == nil && (!there || v1alpha1.Going(now) || now.GetUID() != o.GetUID()) {
		err = fmt.Errorf("%w: nobody wants %s any more", errdefs.ErrBusy, o.GetName())
	}
	return err
}
