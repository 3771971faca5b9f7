package agent

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// A volume moves in steps (docs/decisions/moving.md): the agent of the home seals it, and that of the new node copies it; the controller names the new node;
// that one takes the volume over; the old one gives its bytes back. movein.go has the steps of the new node, moveout.go those of the old one.

// aMove is the kind of the requests of moves.
const aMove = "move"

// connectMoves prepares the watch of the volumes that move here, or have left here. It asks the API server nothing.
func (a *Agent) connectMoves(config *rest.Config) (err error) {
	a.moves, err = a.connectElsewhere(config, "spec.move.node")
	return err
}

// runMoves watches and carries out moves until the context ends. It does so without a network too: what has left this node is to be given back.
func (a *Agent) runMoves(ctx context.Context) error {
	return runMoveQueues(ctx, a, "mover", a.moves, &v1alpha1.Volume{}, aMove, a.moveChanged)
}

// runMoveQueues reconciles what moves here, or has left here, in the cache of a connection, as requests of a kind, until the context ends. It has two queues,
// as one waits for the other otherwise: what moves here may take hours, and others wait for what is given back. changed is called with each change first.
func runMoveQueues[T cluster.Object](ctx context.Context, a *Agent, name string, from kube.Connection, of T, kind string, changed func(client.Object, bool)) error {
	ctx, stop := context.WithCancel(ctx)
	var done sync.WaitGroup
	defer done.Wait()
	defer stop()
	if err := a.hear(ctx, from, of, changed); err != nil {
		return err
	}
	requests := handler.TypedEnqueueRequestsFromMapFunc(func(_ context.Context, o T) []request { return []request{{kind, o.GetName()}} })
	var queues []controller.TypedController[request]
	for _, left := range []bool{false, true} {
		queue, err := a.moveQueue(ctx, name, func(key string) (bool, error) {
			o := of.DeepCopyObject().(T)
			if err := from.Cache.Get(ctx, client.ObjectKey{Name: key}, o); err != nil {
				return false, client.IgnoreNotFound(err)
			}
			m, _ := o.Moves()
			return m != nil && m.Left == left, nil
		})
		if err == nil {
			err = queue.Watch(source.TypedKind(from.Cache, of, requests))
		}
		if err != nil {
			return err
		}
		queues = append(queues, queue)
	}
	failures := make(chan error, 1+len(queues))
	done.Go(func() { failures <- from.Cache.Start(ctx) })
	if !from.Cache.WaitForCacheSync(ctx) {
		return nil // the context ended
	}
	a.Changed() // a move that was taken back while nobody watched causes no event
	for _, queue := range queues {
		done.Go(func() { failures <- queue.Start(ctx) })
	}
	return <-failures
}

// moveQueue returns a queue of moves. It ignores the objects for which is is false.
func (a *Agent) moveQueue(ctx context.Context, name string, is func(key string) (bool, error)) (controller.TypedController[request], error) {
	log := klog.FromContext(ctx)
	return controller.NewTypedUnmanaged(name, controller.TypedOptions[request]{
		SkipNameValidation:      new(true), // tests run several agents
		MaxConcurrentReconciles: maxMoves,
		Reconciler: reconcile.TypedFunc[request](func(ctx context.Context, r request) (reconcile.Result, error) {
			if mine, err := is(r.key); err != nil || !mine {
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

// moveChanged ends the copy of a volume that somebody claims, or that does not move here any more.
func (a *Agent) moveChanged(o client.Object, gone bool) {
	v, is := o.(*v1alpha1.Volume)
	if !is || !gone && len(v.Claimants()) == 0 {
		return
	}
	if gone {
		a.Changed() // its bytes may be left
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if cancel := a.cancels[request{aMove, v.Name}]; cancel != nil {
		cancel()
	}
}

// movesHere reports whether an object says that it moves to this node, or has just done so.
func (a *Agent) movesHere(o cluster.Object) bool {
	m, _ := o.Moves()
	return m != nil && (!m.Left && m.Node == a.local.Node() || m.Left && o.Node() == a.local.Node())
}

// isArriving reports whether an object says that it has moved to this node, which has not taken it over yet.
func (a *Agent) isArriving(o cluster.Object) bool {
	return o.Node() == a.local.Node() && a.movesHere(o) && !hasArrived(o)
}

// hasLeft reports whether an object says that it has left this node for another one.
func (a *Agent) hasLeft(o cluster.Object) bool {
	m, _ := o.Moves()
	return m != nil && m.Left && m.Node == a.local.Node() && o.Node() != a.local.Node()
}

// hasLeftForGood reports whether an object says that it has left this node for another one, which has taken it over.
func (a *Agent) hasLeftForGood(o cluster.Object) bool { return a.hasLeft(o) && hasArrived(o) }

// hasArrived reports whether what has moved was taken over by its new node.
func hasArrived(o cluster.Object) bool {
	_, s := o.Moves()
	return s != nil && s.Arrived
}

// isCleared reports whether the node that something has left has given its bytes back.
func isCleared(o cluster.Object) bool {
	m, s := o.Moves()
	return m.Left && s != nil && s.Cleared
}

// stillMoves reads an object into now as the API server has it. ErrBusy if it is another one by now, or something is not so of it any more.
func stillMoves[T cluster.Object](ctx context.Context, a *Agent, o, now T, is func(cluster.Object) bool) (T, error) {
	if err := a.kube.Live.Get(ctx, client.ObjectKeyFromObject(o), now); err != nil {
		return now, kube.APIError("read "+o.GetName(), err)
	}
	if now.GetUID() != o.GetUID() || !is(now) {
		return now, fmt.Errorf("%w: the object of %s, which moves, was changed meanwhile", errdefs.ErrBusy, o.GetName())
	}
	return now, nil
}

// reconcileMove carries out this node's part in the move of a volume that is not its own now.
func (a *Agent) reconcileMove(ctx context.Context, r request) (reconcile.Result, error) {
	v := &v1alpha1.Volume{}
	if err := a.moves.Cache.Get(ctx, client.ObjectKey{Name: r.key}, v); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	a.locate(v)
	switch m := v.Spec.Move; {
	case m == nil || m.Node != a.local.Node() || v.Spec.NodeName == a.local.Node():
		return reconcile.Result{}, nil
	case m.Left:
		return a.giveBack(ctx, v)
	case a.options.Network == nil && (consumerMoves(v) || cluster.MayMove(v)):
		return reconcile.Result{}, nil // its user says how far that is, or all is here
	}
	err := a.checkInNetwork()
	if err == nil {
		err = a.copyIn(ctx, r, v)
	}
	switch {
	case err == nil || ctx.Err() != nil:
		return reconcile.Result{RequeueAfter: checkAgain}, nil
	case errors.Is(err, context.Canceled), errors.Is(err, errPoolBusy): // by a claim, which may have ended before
		return reconcile.Result{RequeueAfter: inUseRetry}, nil
	case consumerMoves(v):
		return reconcile.Result{RequeueAfter: checkAgain}, nil // its user says how far that is
	}
	if failure := a.reportWaits(ctx, v, "", err); failure != nil {
		return reconcile.Result{}, errors.Join(err, failure)
	}
	if errors.Is(err, errWaits) {
		return reconcile.Result{RequeueAfter: checkAgain}, nil
	}
	return reconcile.Result{}, err
}

// checkInNetwork is errWaits on a node without a network: no volume can move to it.
func (a *Agent) checkInNetwork() error {
	if a.options.Network != nil {
		return nil
	}
	return fmt.Errorf("%w: node %s is in no network, so no volume comes to it: start its driver with --remote-address", errWaits, a.local.Node())
}

// reportMove writes the part of an object's status that is about its move, if edit changes it. It fails with a conflict if anybody changed the object
// since it was read.
func (a *Agent) reportMove(ctx context.Context, o cluster.Object, edit func(*v1alpha1.MoveStatus)) error {
	return a.writeMove(ctx, o, func(s *v1alpha1.MoveStatus) {
		s.Claim, s.Refused = 0, false
		edit(s)
	})
}

// reportWaits is reportMove for why a move does not go on.
func (a *Agent) reportWaits(ctx context.Context, o cluster.Object, before string, err error) error {
	return a.reportMove(ctx, o, func(s *v1alpha1.MoveStatus) {
		setMoveWaits(s, before, err)
		m, _ := o.Moves()
		s.Refused = s.Refused && !m.Left
	})
}

// setMoveWaits says why a move does not go on, and whether the new node refuses it (v1alpha1.MoveStatus.Refused). before is put before the words of the error.
func setMoveWaits(s *v1alpha1.MoveStatus, before string, err error) {
	s.Waits, s.Message, s.Progress = true, cluster.Limited(before+errdefs.Words(err)), nil
	s.Refused = !isTransient(err) && !errors.Is(err, context.DeadlineExceeded)
}

// writeMove is reportMove, whoever says it.
func (a *Agent) writeMove(ctx context.Context, o cluster.Object, edit func(*v1alpha1.MoveStatus)) error {
	before := o.DeepCopyObject().(cluster.Object)
	m, s := o.Moves()
	want := v1alpha1.MoveStatus{Node: m.Node, Pool: m.Pool}
	if m.Left {
		want = v1alpha1.MoveStatus{Node: o.Node()}
	}
	if s == nil || !m.Left && (s.Node != want.Node || s.Pool != want.Pool) {
		s = &want
		o.SetMoveStatus(s)
	}
	edit(s)
	if equality.Semantic.DeepEqual(before, o) {
		return nil
	}
	return a.kube.Client.Status().Patch(ctx, o, kube.LockingPatch(before))
}

// errWaits ends what goes on when the object changes.
var errWaits = fmt.Errorf("%w", errdefs.ErrUnavailable)

// locate says where this node has a volume, or will have, by its object: also before its pool is open, and whatever is left of it in another one.
func (a *Agent) locate(v *v1alpha1.Volume) {
	pool := v.Spec.Pool
	switch m := v.Spec.Move; {
	case v.Spec.NodeName == a.local.Node():
	case m != nil && m.Node == a.local.Node() && !isCleared(v):
		pool = v.MovePool()
	default:
		return
	}
	a.local.Locate(cluster.VolumeID(v), pool)
}

// checkUnclaimed is errWaits while somebody uses a volume, or it is exported.
func checkUnclaimed(v *v1alpha1.Volume) error {
	if c := v.Spec.Claim; c != nil && v.Spec.ReplicaOf != "" {
		return fmt.Errorf("%w: replica %s is used on node %s: its volume gets another replica on node %s, and does without this one when that has everything", errWaits, v.Name, c.Node, v.Spec.Move.Node)
	}
	if nodes := v.Claimants(); len(nodes) > 0 {
		return fmt.Errorf("%w: volume %s is used on node %s; it is copied when it is not", errWaits, cluster.VolumeID(v), strings.Join(nodes, ", "))
	}
	if given := v.Given(); len(given) > 0 {
		return fmt.Errorf("%w: volume %s is still given to node %s; it is copied when it is not", errWaits, cluster.VolumeID(v), given[0].Node)
	}
	return nil
}
