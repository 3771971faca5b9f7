// Package mover does the controller's part in the moves of volumes and snapshots. It requests the moves of volumes that follow their pods. When the new
// node has a full copy, it writes that node into the object, by compare-and-swap. When the old node has given its bytes back, it ends the move. Everything
// else is done by the agents of the two nodes (docs/decisions/moving.md).
package mover

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// firstRetry and lastRetry are the first and the longest pause between tries of a step that failed. lastRetry is also the pause between two looks whether
// a node of a move is gone.
const (
	firstRetry = 100 * time.Millisecond
	lastRetry  = time.Minute
)

// Mover changes the nodes of volumes and snapshots that move. Every replica of the controller has one: each of its writes is refused if the object was
// changed meanwhile. The events of a cache tell it of moves (VolumeChanged, SnapshotChanged); Run does the work.
type Mover struct {
	kube      kube.Connection
	after     time.Duration // for how long a volume is used on another node before it follows
	stays     func(v *v1alpha1.Volume, why string)
	pending   queue // names of Volumes
	snapshots queue // names of Snapshots
}

type queue = workqueue.TypedRateLimitingInterface[string]

func newQueue() queue {
	return workqueue.NewTypedRateLimitingQueue(workqueue.NewTypedItemExponentialFailureRateLimiter[string](firstRetry, lastRetry))
}

// FollowAfter is the usual time for which a volume is used on another node before it follows. A pod that was moved by mistake, or because its node
// restarts, is back before that.
const FollowAfter = 10 * time.Minute

// New returns a Mover. The cache of its connection has to have Volumes, with the indexes cluster.ByFetched and cluster.ByReplicaOf, Snapshots, with
// cluster.ByGroup and cluster.BySource, and Pools. stays is told, again and again, why a volume that is to follow its pod cannot; it must not keep or change
// the volume's object.
func New(c kube.Connection, followAfter time.Duration, stays func(v *v1alpha1.Volume, why string)) *Mover {
	return &Mover{c, followAfter, stays, newQueue(), newQueue()}
}

// VolumeChanged has a volume looked at, if it moves or is to follow its pod.
func (m *Mover) VolumeChanged(o client.Object, gone bool) {
	if v, is := o.(*v1alpha1.Volume); is && !gone && (v.Spec.Move != nil || isToFollow(v)) {
		m.pending.Add(v.Name)
	}
}

// Run does the mover's work until the context ends. The cache has to be filled before.
func (m *Mover) Run(ctx context.Context) {
	var done sync.WaitGroup
	defer done.Wait()
	defer m.pending.ShutDown()
	defer m.snapshots.ShutDown()
	done.Go(func() { work(ctx, m.pending, "volume", m.move) })
	done.Go(func() { work(ctx, m.snapshots, "snapshot", m.moveSnapshot) })
	<-ctx.Done()
}

// work calls step for each key of a queue, until that is shut down. It calls step again after again, or, if it failed, after a pause.
func work(ctx context.Context, pending queue, kind string, step func(ctx context.Context, key string) (again time.Duration, err error)) {
	for {
		key, shutdown := pending.Get()
		if shutdown {
			return
		}
		again, err := step(ctx, key)
		switch {
		case err != nil && ctx.Err() == nil:
			klog.FromContext(ctx).Error(err, "Could not go on with a move; trying again", kind, key)
			pending.AddRateLimited(key)
		case again > 0:
			pending.Forget(key)
			pending.AddAfter(key, again)
		default:
			pending.Forget(key)
		}
		pending.Done(key)
	}
}

// move takes the next step of a volume's move, if that is for the controller. again is after how long to look again even if the object does not change; 0:
// not before it changes.
func (m *Mover) move(ctx context.Context, key string) (again time.Duration, err error) {
	v := &v1alpha1.Volume{}
	if err := m.kube.Cache.Get(ctx, client.ObjectKey{Name: key}, v); err != nil {
		return 0, client.IgnoreNotFound(err)
	}
	before := v.DeepCopy()
	switch {
	case v.Spec.Move == nil && !isToFollow(v):
		return 0, nil
	case v.Spec.Move == nil:
		follow, again, err := m.follow(ctx, v)
		if err != nil || !follow {
			return again, err
		}
		klog.FromContext(ctx).Info("A volume is to be where it is used", "volume", cluster.VolumeID(v).String(), "from", v.Spec.NodeName, "to", v.Spec.Claim.Node)
		v.Spec.Move = &v1alpha1.Move{Node: v.Spec.Claim.Node, Follows: true}
	case isNotToFollow(v):
		klog.FromContext(ctx).Info("A volume no longer follows to where it was used", "volume", cluster.VolumeID(v).String(), "home", v.Spec.NodeName, "node", v.Spec.Move.Node)
		v.Spec.Move = nil
	case v.Spec.Move.Left:
		ended, err := m.hasEnded(ctx, cluster.VolumeID(v), v.Spec.Move.Node, v.Status.Move)
		if err != nil || !ended {
			return lastRetry, err
		}
		v.Spec.Move = nil
	case cluster.MayMove(v):
		if gone, err := m.gone(ctx, cluster.VolumeID(v), v.Spec.Move.Node); err != nil || gone {
			return lastRetry, err
		}
		if together, err := m.sharesNode(ctx, v); err != nil || together {
			return lastRetry, err
		}
		if err := m.labelSnapshots(ctx, v); err != nil {
			return 0, err
		}
		klog.FromContext(ctx).Info("A volume moves", "volume", cluster.VolumeID(v).String(), "from", v.Spec.NodeName, "to", v.Spec.Move.Node)
		cluster.Flip(v)
	default:
		return 0, nil
	}
	err = kube.IgnoreConflict(m.kube.Client.Patch(ctx, v, kube.LockingPatch(before)))
	return 0, kube.APIError("move volume "+key, client.IgnoreNotFound(err))
}

// sharesNode reports whether a leg moves to a node where another leg of its volume is, or moves to. Of two that move to one node, each finds the other.
func (m *Mover) sharesNode(ctx context.Context, v *v1alpha1.Volume) (bool, error) {
	if v.Spec.ReplicaOf == "" {
		return false, nil
	}
	var list v1alpha1.VolumeList
	if err := m.kube.Cache.List(ctx, &list, client.MatchingFields{cluster.ByReplicaOf: v.Spec.ReplicaOf}); err != nil {
		return false, kube.APIError("list the replicas of "+v.Spec.ReplicaOf, err)
	}
	other := v.OtherLeg(v.Spec.Move.Node, list.Pointers())
	if other != nil {
		klog.FromContext(ctx).Info("A replica does not move to where another one of its volume is, or moves to", "replica", v.Name, "other", other.Name, "node", v.Spec.Move.Node)
	}
	return other != nil, nil
}

// hasEnded reports whether a move is over: the new node has taken the volume or snapshot over, and the old node has given its bytes back, or is gone for
// good.
func (m *Mover) hasEnded(ctx context.Context, id volume.ID, old string, s *v1alpha1.MoveStatus) (bool, error) {
	if s == nil || !s.Arrived {
		return false, nil
	}
	if s.Cleared {
		return true, nil
	}
	return m.gone(ctx, id, old)
}

// gone reports whether a node of a move is gone for good (cluster.IsGone), by the API server.
func (m *Mover) gone(ctx context.Context, id volume.ID, name string) (bool, error) {
	node := &corev1.Node{}
	err := m.kube.Live.Get(ctx, client.ObjectKey{Name: name}, node)
	if client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("look at node %s, for the move of %s: %w", name, id, err)
	}
	gone := cluster.IsGone(node, err)
	if gone {
		klog.FromContext(ctx).Info("A node of a move is gone", "id", id.String(), "node", name)
	}
	return gone, nil
}
