package agent

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"google.golang.org/grpc"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/internal/progress"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/cluster/port"
	"github.com/ashlar-csi/ashlar/pkg/cluster/transfer"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// A volume moves in steps, each of another part of the driver (docs/decisions/moving.md): the agent of the new node brings the bytes, from that of the home, which
// seals the volume; the controller names the new node; that takes the volume over; the old one gives its bytes back.

const aMove = "move"

// connectMoves prepares the watch of those volumes. It asks the API server nothing.
func (a *Agent) connectMoves(config *rest.Config) (err error) {
	a.moves, err = a.connectElsewhere(config, "spec.move.node")
	return err
}

// runMoves watches and carries out moves until the context ends. In no network too: what has left this node is given back.
func (a *Agent) runMoves(ctx context.Context) error {
	return runBringers(ctx, a, "mover", a.moves, &v1alpha1.Volume{}, aMove, a.moveChanged)
}

// runBringers watches what moves here, or has left here, in the cache of a connection, and reconciles it as requests of a kind until the context ends, in queues of a
// name: one of what comes, which may take hours, and one of what is given back, for which others wait. changed is told of each change before.
func runBringers[T cluster.Object](ctx context.Context, a *Agent, name string, from kube.Connection, of T, kind string, changed func(client.Object, bool)) error {
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
		queue, err := a.bringerQueue(ctx, name, func(key string) (bool, error) {
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
	a.Changed() // of what was taken back while nobody watched no event tells
	for _, queue := range queues {
		done.Go(func() { failures <- queue.Start(ctx) })
	}
	return <-failures
}

// bringerQueue is a queue of what moves here, or has left here; it leaves alone what is not for it.
func (a *Agent) bringerQueue(ctx context.Context, name string, is func(key string) (bool, error)) (controller.TypedController[request], error) {
	log := klog.FromContext(ctx)
	return controller.NewTypedUnmanaged(name, controller.TypedOptions[request]{
		SkipNameValidation:      new(true), // tests run several agents
		MaxConcurrentReconciles: mostBringers,
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

// moveChanged ends the copy of a volume that is wanted by somebody, or does not come here any more.
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

// comesHere reports whether an object says that it moves to this node, or has just done so.
func (a *Agent) comesHere(o cluster.Object) bool {
	m, _ := o.Moves()
	return m != nil && (!m.Left && m.Node == a.local.Node() || m.Left && o.Node() == a.local.Node())
}

// arrives reports whether an object says that it has moved to this node, which has not taken it over yet.
func (a *Agent) arrives(o cluster.Object) bool {
	return o.Node() == a.local.Node() && a.comesHere(o) && !arrived(o)
}

// left reports whether an object says that it has left this node for another one.
func (a *Agent) left(o cluster.Object) bool {
	m, _ := o.Moves()
	return m != nil && m.Left && m.Node == a.local.Node() && o.Node() != a.local.Node()
}

// hasLeft reports whether an object says that it has left this node for another one, which has taken it over.
func (a *Agent) hasLeft(o cluster.Object) bool { return a.left(o) && arrived(o) }

// arrived reports whether what has moved was taken over by its new node.
func arrived(o cluster.Object) bool {
	_, s := o.Moves()
	return s != nil && s.Arrived
}

// cleared reports whether the node that something has left has given its bytes back.
func cleared(o cluster.Object) bool {
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
	case a.options.Network == nil && (carried(v) || cluster.MayMove(v)):
		return reconcile.Result{}, nil // its user says how far that is, or all is here
	}
	err := a.inNetwork()
	if err == nil {
		err = a.bring(ctx, r, v)
	}
	switch {
	case err == nil || ctx.Err() != nil:
		return reconcile.Result{RequeueAfter: checkAgain}, nil
	case errors.Is(err, context.Canceled), errors.Is(err, errOrigin): // by a claim, which may have ended before
		return reconcile.Result{RequeueAfter: inUseRetry}, nil
	case carried(v):
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

// inNetwork is errWaits on a node that is in no network, to which nothing comes.
func (a *Agent) inNetwork() error {
	if a.options.Network != nil {
		return nil
	}
	return fmt.Errorf("%w: node %s is in no network, so no volume comes to it: start its driver with --remote-address", errWaits, a.local.Node())
}

// reportMove writes the part of an object's status that is about its move, if edit changes it. It fails with a conflict if anybody changed the object
// since it was read.
func (a *Agent) reportMove(ctx context.Context, o cluster.Object, edit func(*v1alpha1.MoveStatus)) error {
	return a.writeMove(ctx, o, func(s *v1alpha1.MoveStatus) {
		s.Claim = 0
		edit(s)
	})
}

// reportWaits is reportMove for why a move does not go on.
func (a *Agent) reportWaits(ctx context.Context, o cluster.Object, before string, err error) error {
	return a.reportMove(ctx, o, func(s *v1alpha1.MoveStatus) {
		s.Waits, s.Message, s.Progress = true, cluster.Limited(before+errdefs.Words(err)), nil
	})
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

// bring copies a volume that moves here, and says so when all of it is here.
func (a *Agent) bring(ctx context.Context, r request, v *v1alpha1.Volume) error {
	if cluster.MayMove(v) {
		return nil // it is the controller's turn
	}
	if err := unclaimed(v); err != nil {
		return err // before the claim's event ends what it finds at work
	}
	ended, err := a.origins.begin(v.Spec.NodeName, v.Spec.Pool)
	if err != nil {
		return err
	}
	defer ended()
	working, end := a.making(ctx, r)
	defer end()
	if err := a.mayCome(working, v); err != nil {
		return err
	}
	agent, err := a.agentOf(working, v.Spec.NodeName)
	if err != nil {
		return err
	}
	from, err := askMove(working, agent, v)
	if err != nil {
		return fmt.Errorf("ask node %s for volume %s: %w", v.Spec.NodeName, cluster.VolumeID(v), err)
	}
	if err := errors.Join(knowsPools(v, from), asSaid(v, from)); err != nil {
		return err
	}
	defer a.Changed()
	if err := a.withYieldingLocks(working, []string{keylock.Volume(v.Name)}, nil, func(ctx context.Context) error {
		defer a.followMove(ctx, v)()
		return a.local.Bring(ctx, v.MovePool(), v.Spec.Name, blockdev.Provisioning(v.Spec.Provisioning), from)
	}); err != nil {
		return err
	}
	return a.reportBrought(working, v, agent, from.Created)
}

// mayCome is ErrUnavailable while a volume cannot come to this node.
func (a *Agent) mayCome(ctx context.Context, v *v1alpha1.Volume) error {
	id := cluster.VolumeID(v)
	home, there, err := poolNow(ctx, a.kube.Live, overview.PoolName(v.Spec.NodeName, v.Spec.Pool))
	if err != nil {
		return err
	}
	switch n := home.Status.Network; {
	case v.Status.Created == nil:
		return fmt.Errorf("%w: volume %s is not made yet", errWaits, id)
	case !there || n == nil || n.Name != a.options.Network.Name:
		return fmt.Errorf("%w: volume %s stays on node %s: that is not in the network %q, as node %s is, and who uses the volume may need it to be", errdefs.ErrUnavailable,
			id, v.Spec.NodeName, a.options.Network.Name, a.local.Node())
	}
	return a.apart(ctx, v)
}

// apart is errWaits for a leg that is to come to where another one of its volume is: they are on different nodes.
func (a *Agent) apart(ctx context.Context, v *v1alpha1.Volume) error {
	if v.Spec.ReplicaOf == "" {
		return nil
	}
	var here v1alpha1.VolumeList
	if err := a.kube.Client.List(ctx, &here, client.UnsafeDisableDeepCopy); err != nil {
		return kube.APIError("list the volumes of node "+a.local.Node(), err)
	}
	if other := v.OtherLeg(a.local.Node(), here.Pointers()); other != nil {
		return fmt.Errorf("%w: node %s has another replica of its volume, %s", errWaits, a.local.Node(), other.Name)
	}
	return nil
}

// knowsPools is ErrUnavailable if a volume is to move to a pool of another name, and who says what it is (its home, and who uses it) runs a driver of before such moves: that
// would not know the volume there.
func knowsPools(v *v1alpha1.Volume, from volume.Origin) error {
	if v.Spec.Move.Pool == "" || from.Pool == v.Spec.Pool {
		return nil
	}
	return fmt.Errorf("%w: volume %s is to move to a pool of another name, and the driver of its node %s, or of the node that uses it, does not know of that: bring all nodes to one version", errWaits,
		cluster.VolumeID(v), v.Spec.NodeName)
}

// locate says where this node has a volume, or will have, by its object: also before its pool is open, and whatever is left of it in another one.
func (a *Agent) locate(v *v1alpha1.Volume) {
	pool := v.Spec.Pool
	switch m := v.Spec.Move; {
	case v.Spec.NodeName == a.local.Node():
	case m != nil && m.Node == a.local.Node() && !cleared(v):
		pool = v.MovePool()
	default:
		return
	}
	a.local.Locate(cluster.VolumeID(v), pool)
}

// unclaimed is errWaits while somebody uses a volume.
func unclaimed(v *v1alpha1.Volume) error {
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

// reportBrought writes down that all bytes of a volume are here. Between the two looks at the object nobody used it: else the write is refused, as the object has
// changed; and what was used before, the home has not sealed as it was.
func (a *Agent) reportBrought(ctx context.Context, v *v1alpha1.Volume, agent grpc.ClientConnInterface, sealed time.Time) error {
	now, err := stillMoves(ctx, a, v, &v1alpha1.Volume{}, func(now cluster.Object) bool { return now.Node() == v.Node() && a.comesHere(now) })
	if err != nil {
		return err
	}
	if err := unclaimed(now); err != nil {
		return err
	}
	again, err := askMove(ctx, agent, v)
	if err != nil {
		return err
	}
	if !again.Created.Equal(sealed) || volume.SizeOf(again) != now.Status.Size {
		return fmt.Errorf("%w: volume %s was used, or has grown, while it was copied; it is copied anew", errdefs.ErrUnavailable, v.Name)
	}
	if here, err := a.local.Brought(ctx, cluster.VolumeID(now), sealed); err != nil || !here { // it may have been removed, when the move was taken back and asked for again
		return errors.Join(err, fmt.Errorf("%w: the copy of volume %s is gone; it is copied anew", errdefs.ErrUnavailable, v.Name))
	}
	return a.reportMove(ctx, now, func(s *v1alpha1.MoveStatus) {
		s.Copied, s.Progress = &v1alpha1.MoveCopied{Generation: now.Generation, Size: now.Status.Size, Sealed: metav1.NewMicroTime(sealed)}, nil
		s.Waits, s.Message = false, "all bytes are on node "+a.local.Node()
	})
}

// followMove writes down how far the copy of a volume that moves here is, until end is called.
func (a *Agent) followMove(ctx context.Context, v *v1alpha1.Volume) (end func()) {
	return a.followBringing(ctx, v, v.MovePool(), func(ctx context.Context, far progress.Copy) error {
		now := &v1alpha1.Volume{}
		if err := a.moves.Cache.Get(ctx, client.ObjectKeyFromObject(v), now); err != nil || !a.comesHere(now) {
			return err
		}
		return a.reportMove(ctx, now, func(s *v1alpha1.MoveStatus) { setBringing(s, far, v.Spec.NodeName) })
	})
}

// setBringing says how far the copy of what moves here is, if that is news.
func setBringing(s *v1alpha1.MoveStatus, far progress.Copy, from string) {
	if was := s.Progress; was != nil && was.Total == far.Total && abs(far.Done-was.Done) < max(1, far.Total/progressOf) {
		return
	}
	s.Waits, s.Progress, s.Copied = false, &v1alpha1.Progress{Done: far.Done, Total: far.Total}, nil
	s.Message = fmt.Sprintf("%s of %s are copied from node %s", cluster.Bytes(far.Done), cluster.Bytes(far.Total), from)
}

// followBringing has write write down how far the copy of an object that moves to a pool here is, again and again, until end is called.
func (a *Agent) followBringing(ctx context.Context, o cluster.Object, pool string, write func(context.Context, progress.Copy) error) (end func()) {
	ctx, cancel := context.WithCancel(ctx)
	var done sync.WaitGroup
	done.Go(func() {
		tick := time.NewTicker(a.options.ProgressEvery)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			far, running := a.progressIn(pool, o)
			if !running {
				continue
			}
			if err := write(ctx, far); err != nil {
				klog.FromContext(ctx).V(2).Info("Could not write down how far a move is", "object", o.GetName(), "err", err)
			}
		}
	})
	return func() {
		cancel()
		done.Wait()
	}
}

// openMove seals a volume of this node that moves, for the agent of its new node. ErrNotFound if the volume's object says nothing of that.
func (a *Agent) openMove(ctx context.Context, key string) (volume.Origin, error) {
	v, err := a.leavesFor(ctx, key, port.CallerNode(ctx))
	if err != nil {
		return volume.Origin{}, err
	}
	claims := v.Spec.Claims
	if v.Spec.Move.Left {
		claims = volume.AnyClaims // they are of the new node
	}
	var from volume.Origin
	lock := keylock.Volume(key)
	switch err := a.withLocks([]string{lock}, func() (err error) {
		from, err = a.local.Seal(ctx, cluster.VolumeID(v), claims)
		return err
	}); {
	case err != nil && v.Spec.Move.Left:
		return volume.Origin{}, err // who asks is to know whether this node answered
	case err != nil:
		return volume.Origin{}, errdefs.Recast(errdefs.ErrUnavailable, err, "seal volume %s on node %s", cluster.VolumeID(v), a.local.Node())
	}
	read := from.Read
	from.Read = func(ctx context.Context, at int64, visit func(int64, []byte) error) error {
		err := a.withYieldingLocks(ctx, []string{lock}, nil, func(ctx context.Context) error { return read(ctx, at, visit) })
		if errors.Is(err, errdefs.ErrBusy) {
			err = errdefs.Recast(errdefs.ErrUnavailable, err, "volume %s is needed on node %s", cluster.VolumeID(v), a.local.Node())
		}
		return err
	}
	return from, nil
}

// leavesFor returns the object of a volume of this node that moves to another one, and that nobody uses, or that has moved there and not arrived, as the API server
// has it now.
func (a *Agent) leavesFor(ctx context.Context, key, node string) (*v1alpha1.Volume, error) {
	v := &v1alpha1.Volume{}
	err := a.kube.Live.Get(ctx, client.ObjectKey{Name: key}, v)
	if client.IgnoreNotFound(err) != nil {
		return nil, kube.APIError("read volume "+key, err)
	}
	if m := v.Spec.Move; err == nil && node != "" && m != nil && m.Left && m.Node == a.local.Node() && v.Spec.NodeName == node && !arrived(v) {
		return v, nil
	}
	if m := v.Spec.Move; err != nil || node == "" || v.Spec.NodeName != a.local.Node() || m == nil || m.Left || m.Node != node || v1alpha1.Going(v) || v.Spec.Abandoned {
		return nil, fmt.Errorf("%w: no volume %s of node %s moves to node %q", errdefs.ErrNotFound, key, a.local.Node(), node)
	}
	return v, unclaimed(v)
}

// Stays: see volume.Moves. A claim in the object keeps the controller from naming the new node until that one has the bytes of after it. Without one nothing would
// tell the new node, which may be about to say that it has all of them. Nor would anything tell the user of the volume, if that copies it: so its claim does not do,
// and that this is undone is written down.
func (a *Agent) Stays(ctx context.Context, id volume.ID, pool string, used int64) error {
	v, err := a.hereNow(ctx, id, pool)
	if err != nil || v.Spec.Move == nil || len(v.Spec.Readers) > 0 {
		return err
	}
	switch c := v.Spec.Claim; {
	case c == nil:
		return fmt.Errorf("%w: it is asked for on node %s, and no claim keeps it here", errdefs.ErrUnavailable, v.Spec.Move.Node)
	case pinned(v):
		return fmt.Errorf("%w: all of it is on node %s, which is about to have it", errdefs.ErrUnavailable, v.Spec.Move.Node)
	case used == c.Generation:
		return a.undo(ctx, v)
	}
	return nil
}

// unsealStaying takes the seal of a volume of this node off whose move was taken back: nobody waits for its next use then, which needs the API server.
func (a *Agent) unsealStaying(ctx context.Context, v *v1alpha1.Volume, have volume.Volume) error {
	if !have.Sealed || v.Spec.Move != nil {
		return nil
	}
	err := a.withLocks([]string{keylock.Volume(v.Name)}, func() error { return a.local.Unseal(ctx, cluster.VolumeID(v)) })
	if errors.Is(err, errdefs.ErrPrecondition) || errors.Is(err, errdefs.ErrUnavailable) { // the watch is behind, or the next look finds out
		klog.FromContext(ctx).V(2).Info("A volume that nothing moves stays sealed for now", "volume", v.Name, "err", err.Error())
		return nil
	}
	return err
}

// IsHere: see volume.Moves.
func (a *Agent) IsHere(ctx context.Context, id volume.ID, pool string) error {
	_, err := a.hereNow(ctx, id, pool)
	return err
}

// hereNow returns the object of a volume of a pool of this node, as the API server has it; ErrPrecondition if it is on another node, or in another pool: what this one has was left.
func (a *Agent) hereNow(ctx context.Context, id volume.ID, pool string) (*v1alpha1.Volume, error) {
	v := &v1alpha1.Volume{}
	if err := a.kube.Live.Get(ctx, client.ObjectKey{Name: id.Key}, v); err != nil {
		return nil, errdefs.Recast(errdefs.ErrUnavailable, err, "read volume %s", id.Key)
	}
	if v.Spec.NodeName != a.local.Node() || v.In() != pool || cluster.VolumeID(v) != id {
		return nil, fmt.Errorf("%w: it is on node %s now, in pool %s", errdefs.ErrPrecondition, v.Spec.NodeName, v.In())
	}
	return v, nil
}

// bringRest has all bytes of a volume that has moved be here, and returns how those were sealed; zero where they are a volume already. What is
// sealed, or in another pool, is not that, but left of an earlier move. As a rule all are here. Those
// that are not (the copy was on a disk that failed, or the API server went back to a move of before) are with the node that the volume has left, until this one
// takes it over: so that is asked, and if it is away, or cannot read what it has, what was said before the volume moved holds. Where the object does not say that (it was restored without its
// status), and the old node has what its user went on from, it has to be what is here. ErrNotFound if neither has them; errOrigin as of arrival.asking.
func (a *Agent) bringRest(ctx context.Context, r request, v *v1alpha1.Volume, one *arrival) (sealed metav1.MicroTime, err error) {
	id := cluster.VolumeID(v)
	have, err := a.local.Get(ctx, id)
	if left := err == nil && (have.Sealed || have.Pool != v.Spec.Pool); !left && !errors.Is(err, errdefs.ErrNotFound) {
		return sealed, err
	}
	var copied *v1alpha1.MoveCopied
	if s := v.Status.Move; s != nil {
		copied = s.Copied
	}
	if copied != nil && copied.Claim != 0 {
		return a.broughtInUse(ctx, v, copied.Sealed, one)
	}
	working, end := a.making(ctx, r)
	defer end()
	var from volume.Origin
	if failure := one.asking(func() { from, err = a.askLeft(working, v) }); failure != nil {
		return sealed, failure
	}
	if err == nil {
		err = a.withYieldingLocks(working, []string{keylock.Volume(v.Name)}, nil, func(ctx context.Context) error {
			return a.local.Bring(ctx, v.Spec.Pool, v.Spec.Name, blockdev.Provisioning(v.Spec.Provisioning), from)
		})
		return metav1.NewMicroTime(from.Created), err
	}
	if mayKnowBetter(err) {
		since, is, failure := a.local.BroughtSince(ctx, id)
		if is {
			return a.broughtInUse(ctx, v, metav1.NewMicroTime(since), one)
		}
		return sealed, errors.Join(err, failure)
	}
	if copied != nil && working.Err() == nil {
		if here, failure := a.local.Brought(ctx, id, copied.Sealed.Time); here || failure != nil {
			return copied.Sealed, failure
		}
	}
	return sealed, err
}

// mayKnowBetter reports whether the node that a volume has left has answered that the volume is used there, or needed now: then what was said before it moved need not hold. It does
// where that node is away, has nothing, or cannot read what it has, as its disk fails.
func mayKnowBetter(err error) bool {
	return errors.Is(err, errdefs.ErrBusy) || errors.Is(err, errdefs.ErrInUse) || errors.Is(err, errdefs.ErrPrecondition)
}

// askLeft asks the node that a volume has left for its bytes.
func (a *Agent) askLeft(ctx context.Context, v *v1alpha1.Volume) (volume.Origin, error) {
	agent, err := a.agentOf(ctx, v.Spec.Move.Node)
	if err != nil {
		return volume.Origin{}, err
	}
	return askMove(ctx, agent, v)
}

// askMove is transfer.OpenMove, for no longer than homeTime: a node whose disk hangs keeps nothing from moving that others have.
func askMove(ctx context.Context, agent grpc.ClientConnInterface, v *v1alpha1.Volume) (volume.Origin, error) {
	ctx, cancel := context.WithTimeout(ctx, homeTime)
	defer cancel()
	from, err := transfer.OpenMove(ctx, agent, v.Name)
	return heldTo(v, from), err
}

// heldTo is what another node says of a volume that moves here, held to what the object says: neither its home nor its user decides what goes here.
func heldTo(v *v1alpha1.Volume, from volume.Origin) volume.Origin {
	from.Object, from.Generation, from.Claims = string(v.UID), v.Generation, min(from.Claims, v.Spec.Claims)
	return from
}

// asSaid is ErrUnavailable unless a volume that moves here has the size that its object says: no other node decides how much room is made here.
func asSaid(v *v1alpha1.Volume, from volume.Origin) error {
	if size := volume.SizeOf(from); size != v.Status.Size {
		return fmt.Errorf("%w: volume %s has %d bytes by its object, and is said to have %d; if it has just grown, ask again", errdefs.ErrUnavailable, cluster.VolumeID(v), v.Status.Size, size)
	}
	return nil
}

// takeOver has a volume that has moved here arrive. ErrNotFound if its bytes are nowhere; errOrigin as of beginArrival.
func (a *Agent) takeOver(ctx context.Context, r request, v *v1alpha1.Volume) error {
	one, err := a.beginArrival(v)
	if err != nil {
		return err
	}
	defer one.end()
	sealed, err := a.bringRest(ctx, r, v, one)
	if err == nil {
		return a.arrive(ctx, v, sealed)
	}
	if errors.Is(err, errdefs.ErrNotFound) || errors.Is(err, errdefs.ErrBusy) || errors.Is(err, errOrigin) || ctx.Err() != nil {
		return err
	}
	return errors.Join(err, a.reportWaits(ctx, v, notAllHere, err))
}

const notAllHere = "moved; not all bytes are here: "

// arrive makes what is here of a volume that has moved here the volume.
func (a *Agent) arrive(ctx context.Context, v *v1alpha1.Volume, sealed metav1.MicroTime) error {
	return a.withLocks([]string{keylock.Volume(v.Name)}, func() error {
		now, err := stillMoves(ctx, a, v, &v1alpha1.Volume{}, a.arrives)
		if err != nil {
			return err
		}
		// First, as afterwards nothing here says which bytes it was, and the old node gives back no others.
		if s := now.Status.Move; !sealed.IsZero() && (s == nil || s.Copied == nil || !s.Copied.Sealed.Equal(&sealed)) {
			if err := a.reportMove(ctx, now, func(s *v1alpha1.MoveStatus) {
				s.Copied = &v1alpha1.MoveCopied{Generation: now.Generation, Sealed: sealed, Size: max(now.Status.Size, now.Spec.Size)}
			}); err != nil {
				return err
			}
		}
		if err := a.local.Arrive(ctx, cluster.VolumeID(now)); err != nil {
			return err
		}
		// Its user may be connected here already. What the old node gave is not what counts any more.
		to, is, err := a.given(ctx, cluster.VolumeID(now))
		if err != nil {
			return err
		}
		klog.FromContext(ctx).Info("A volume has moved here", "volume", cluster.VolumeID(now).String(), "from", now.Spec.Move.Node)
		defer a.Changed()
		err = report(ctx, a, now, func(v *v1alpha1.Volume) {
			setGiven(v, to, is)
			if v.Status.Move == nil { // it was restored without its status
				v.Status.Move = &v1alpha1.MoveStatus{Node: a.local.Node()}
			}
			v.Status.Move.Arrived, v.Status.Move.Waits, v.Status.Move.Message = true, false, "moved; node "+v.Spec.Move.Node+" is to give its bytes back"
		})
		*v = *now
		return err
	})
}

// comes is ErrUnavailable for a volume that has moved to this node, which has not taken it over yet: until then nobody uses it.
func (a *Agent) comes(v *v1alpha1.Volume) error {
	if !a.arrives(v) {
		return nil
	}
	return fmt.Errorf("%w: volume %s has moved here from node %s, and node %s has not taken it over yet", errdefs.ErrUnavailable, cluster.VolumeID(v), v.Spec.Move.Node, a.local.Node())
}

// giveBack removes the bytes of a volume that has left this node, once its new one has taken it over.
func (a *Agent) giveBack(ctx context.Context, v *v1alpha1.Volume) (reconcile.Result, error) {
	if !arrived(v) {
		err := a.noteLeft(ctx, v)
		if errors.Is(err, errdefs.ErrBusy) {
			return reconcile.Result{RequeueAfter: inUseRetry}, nil
		}
		return reconcile.Result{}, err
	}
	return giveBack(ctx, a, v, &v1alpha1.Volume{}, keylock.Volume(v.Name), func(v *v1alpha1.Volume) error { return a.depart(ctx, v, copiedAt(v)) })
}

// copiedAt is how a volume that has moved was sealed; zero, as nothing is, if its object does not say that.
func copiedAt(v *v1alpha1.Volume) time.Time {
	if s := v.Status.Move; s != nil && s.Copied != nil {
		return s.Copied.Sealed.Time
	}
	return time.Time{}
}

// noteLeft has the record of a volume say that it has left this node (volume.Left), as soon as the API server says so: who uses it may write on the new node before that has taken it over. errOrigin as of giveBack.
func (a *Agent) noteLeft(ctx context.Context, v *v1alpha1.Volume) error {
	end, err := a.leaving.begin(a.local.Node(), leftPool(v))
	if err != nil {
		return err
	}
	defer end()
	if have, err := a.local.Get(ctx, cluster.VolumeID(v)); err != nil || have.Left != "" {
		return errdefs.IgnoreNotFound(err)
	}
	return a.withLocks([]string{keylock.Volume(v.Name)}, func() error {
		now, err := stillMoves(ctx, a, v, &v1alpha1.Volume{}, a.left)
		if err != nil {
			return err
		}
		return a.local.Left(ctx, cluster.VolumeID(now), copiedAt(now), now.Spec.NodeName)
	})
}

// giveBack has depart remove the bytes of what has left this node, once its new one has taken it over: under a lock, and by the object as the API server has it, which it reads into now.
func giveBack[T cluster.Object](ctx context.Context, a *Agent, o, now T, lock string, depart func(T) error) (reconcile.Result, error) {
	if !arrived(o) || cleared(o) {
		return reconcile.Result{}, nil
	}
	end, err := a.leaving.begin(a.local.Node(), leftPool(o))
	if err != nil {
		return reconcile.Result{}, err
	}
	defer end()
	err = a.withLocks([]string{lock}, func() error {
		still, err := stillMoves(ctx, a, o, now, a.hasLeft)
		if err != nil {
			return err
		}
		o = still
		return depart(o)
	})
	switch {
	case err == nil:
		a.Changed()
		klog.FromContext(ctx).Info("Gave back the bytes of what has moved", "object", o.GetName(), "to", o.Node())
		return reconcile.Result{}, a.reportMove(ctx, o, func(s *v1alpha1.MoveStatus) { s.Cleared, s.Waits, s.Message = true, false, "moved" })
	case errors.Is(err, errdefs.ErrBusy):
		return reconcile.Result{RequeueAfter: inUseRetry}, nil // a snapshot as long as it is read: that may be for hours
	}
	failure := a.reportMove(ctx, o, func(s *v1alpha1.MoveStatus) { // how far it was copied is not this node's to say any more
		s.Waits, s.Message = true, cluster.Limited("moved; the bytes that node "+a.local.Node()+" had are still there: "+errdefs.Words(err))
	})
	if failure == nil && errors.Is(err, errdefs.ErrInUse) {
		return reconcile.Result{RequeueAfter: inUseRetry}, nil
	}
	return reconcile.Result{}, errors.Join(err, failure)
}

// depart removes what is here of a volume that has left, as it was sealed then, if the new node has all of it: that has said so, and may have lost it since. Who used the volume while it moved may
// be connected here still: that ends first.
func (a *Agent) depart(ctx context.Context, v *v1alpha1.Volume, sealed time.Time) error {
	id, home := cluster.VolumeID(v), v.Spec.NodeName
	if since, is, err := a.local.SealedSince(ctx, id); errdefs.IgnoreNotFound(err) != nil {
		return err
	} else if is && since.Equal(sealed) {
		if err := errors.Join(a.local.Left(ctx, id, sealed, home), a.local.Unexport(ctx, id, 0)); err != nil {
			return err
		}
		asking, cancel := context.WithTimeout(ctx, homeTime)
		defer cancel()
		if err := (otherHome{a, home}).Arrived(asking, id); err != nil {
			return errdefs.Recast(errdefs.ErrUnavailable, err, "node %s has to say that it has all of volume %s; if it never will, these are its bytes: delete the object of the volume, and adopt it here", home, id)
		}
	}
	return a.local.Depart(ctx, id, sealed)
}
