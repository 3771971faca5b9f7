package agent

import (
	"context"
	"errors"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/remotepool"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// The consumer's part in the move of a volume in use (docs/decisions/moving-in-use.md). The kernel of the node that has the claim writes to the old home and
// to the new one. When both have everything, the object says so: the volume is pinned. After that it either has moved, or the pin is taken away again. Each
// step finds out anew, from the kernel and the object, how far the move is.

// MoveMirrors makes the mirrors of volumes that this node uses, and switches their devices from one home to the other: volume.Everywhere.
type MoveMirrors interface {
	Attached(ctx context.Context, id volume.ID) ([]blockdev.Device, error)
	Seats(ctx context.Context, id volume.ID) (home, away bool, err error)
	// Grow: see volume.Local.
	Grow(ctx context.Context, id volume.ID, key volume.Key) (volume.Volume, error)
	Mirrors(ctx context.Context) ([]volume.ID, error)
	Mirrored(ctx context.Context, id volume.ID) (volume.Mirrored, bool, error)
	// CanMirror is ErrUnsupported if the kernel has no mirrors. Mirror is ErrUnfit for a device that the volume is never mirrored to, as it is staged now.
	CanMirror() error
	Mirror(ctx context.Context, id volume.ID, to blockdev.Device, data func(context.Context) ([]blockdev.Extent, error)) error
	// FlushMirror makes durable what the new home has. After an error the new home counts as failed.
	FlushMirror(ctx context.Context, id volume.ID) error
	HoldMirror(ctx context.Context, id volume.ID) error
	ReleaseMirror(ctx context.Context, id volume.ID) error
	Unmirror(ctx context.Context, id volume.ID) error
	Switch(ctx context.Context, id volume.ID, home bool) error
	AttachLeg(ctx context.Context, id volume.ID) (blockdev.Device, error)
	DetachLeg(ctx context.Context, id volume.ID) error
	// Throttle says in which part of the time the kernel may copy, in per cent, for all mirrors of the machine.
	Throttle(percent int) error
}

// MoveConnections are this node's connections to volumes of other nodes: remotepool.Pool.
type MoveConnections interface {
	Legs(ref blockdev.Ref) ([]remotepool.Leg, error)
	Connected() ([]blockdev.Ref, error)
	Second(ctx context.Context, ref blockdev.Ref, export remotepool.Export) (blockdev.Device, error)
	Take(nqn, home string)
	Drop(ctx context.Context, nqn string) error
	End(ctx context.Context, nqn string) error
}

const (
	// moveWorkers is how many volumes take a step at once. Each step is short, but for the first.
	moveWorkers = 4
	// moveCopies is how many of them are copied at once (Options.MoveCopies): each copy slows the others down, and none is useful before it is complete.
	moveCopies = 1
	// lookEvery is the longest time between two looks at a volume that has a mirror (Options.LookEvery). The shortest is lookEvery/shortestLook, for a copy that
	// is nearly complete.
	lookEvery    = time.Second
	shortestLook = 16
	// searchEvery is how often the kernel is searched for mirrors that no object mentions.
	searchEvery = 30 * time.Second
	// A move that failed is tried again after firstBackoff looks, then later each time, and after longestBackoff at the latest.
	firstBackoff   = 2
	longestBackoff = 2 * time.Minute
	// unfitBackoff is the pause after a new home that the volume does not move to, as it is staged now (volume.ErrUnfit). Each try makes room there for nothing.
	unfitBackoff = time.Hour
	// roomTime is how long Prepare makes room at once (Options.RoomTime). If that is not enough, it is asked again, and goes on: some pools have to overwrite the
	// room with zeros.
	roomTime = openTime - homeTime
	// longestSwitch is how long writes may be held back: until a mirror is in effect, and until the controller has moved a pinned volume.
	longestSwitch = 10 * time.Second
	// awayLooks is for how many looks (Options.LookEvery) a new home may be unreachable before the copy to it ends. Pods wait meanwhile, although the old home
	// answers, whatever homeTimeout their class has.
	awayLooks = 15
	// longestBusy is how long a volume's lock is waited for while a leg has failed: see withVolumeLock.
	longestBusy = 5 * time.Second
)

// inUseMover moves the volumes that this node uses.
type inUseMover struct {
	*Agent
	volumes MoveMirrors
	legs    MoveConnections

	starting sync.Mutex // held while a copy is begun

	mu    sync.Mutex
	moves map[string]inUseMove
}

// inUseMove is what this process remembers of a move, beside what the kernel and the object say.
type inUseMove struct {
	to         string    // the new home, if this process made the mirror; empty: an earlier process did, or there is none
	pool       string    // of spec.move then
	unpinned   bool      // the object is known not to be pinned, and no write that pins it is under way; false: not known
	tries      int       // that failed
	retryAt    time.Time // when the next one may start
	unfit      int64     // metadata.generation of the object by which the volume was to move to where it cannot (volume.ErrUnfit); 0: that is not so
	busySince  time.Time // since when the lock of the volume is held by somebody else
	awaySince  time.Time // since when the new home does not answer
	heldSince  time.Time // since when the pinned volume is held
	lookedAt   time.Time // the last look at the copy; zero: none yet
	reportedAt time.Time // when the progress was last written to the object
}

// MoveInUse moves the volumes that this node uses until ctx ends.
func (a *Agent) MoveInUse(ctx context.Context, volumes MoveMirrors, legs MoveConnections) {
	c := &inUseMover{Agent: a, volumes: volumes, legs: legs, moves: map[string]inUseMove{}}
	c.throttle.use(volumes.Throttle)
	var done sync.WaitGroup
	defer done.Wait()
	defer a.movesInUse.ShutDown()
	for range moveWorkers {
		done.Go(func() {
			for c.processNext(ctx) {
			}
		})
	}
	for c.enqueueFound(ctx); ; c.enqueueFound(ctx) {
		select {
		case <-ctx.Done():
			return
		case <-time.After(searchEvery):
		}
	}
}

// newMovesInUse returns the queue of the volumes to take a step with, by the names of their objects.
func newMovesInUse(every time.Duration) workqueue.TypedRateLimitingInterface[string] {
	return workqueue.NewTypedRateLimitingQueue(workqueue.NewTypedItemExponentialFailureRateLimiter[string](firstRetry, every))
}

// moveInUseChanged queues a volume that moves, or has moved.
func (a *Agent) moveInUseChanged(o client.Object, _ bool) {
	if v, is := o.(*v1alpha1.Volume); is && v.Spec.Move != nil && a.options.Network != nil {
		a.movesInUse.Add(v.Name)
	}
}

// enqueueFound queues the volumes of which the kernel has a mirror or a connection, whatever the objects say.
func (c *inUseMover) enqueueFound(ctx context.Context) {
	mirrors, err := c.volumes.Mirrors(ctx)
	connected, failure := c.legs.Connected()
	for _, id := range mirrors {
		c.movesInUse.Add(id.Key)
	}
	for _, ref := range connected {
		c.movesInUse.Add(ref.Key)
	}
	if copied, err := c.beingCopied(ctx, mirrors, ""); err == nil && len(copied) == 0 {
		c.throttle.stop(ctx, copyOfMove, "")
	}
	if err = errors.Join(err, failure); err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).Error(err, "Could not look for volumes that move while they are used; trying again")
	}
}

// beingCopied returns which of the mirrored volumes are being copied, without the one whose key is except.
func (c *inUseMover) beingCopied(ctx context.Context, mirrors []volume.ID, except string) (ids []volume.ID, err error) {
	for _, id := range mirrors {
		if id.Key == except {
			continue
		}
		m, is, err := c.volumes.Mirrored(ctx, id)
		if err != nil {
			return nil, err
		}
		if is && m.Synced < m.Total && !m.OldFailed && !m.NewFailed {
			ids = append(ids, id)
		}
	}
	return ids, nil
}

// processNext takes a step with the next volume of the queue; false once the queue is shut down.
func (c *inUseMover) processNext(ctx context.Context) bool {
	key, shutdown := c.movesInUse.Get()
	if shutdown {
		return false
	}
	defer c.movesInUse.Done(key)
	ctx = klog.NewContext(ctx, klog.FromContext(ctx).WithValues("volume", key))
	switch again, err := c.step(ctx, key); {
	case ctx.Err() != nil:
		return false
	case err != nil:
		if !errors.Is(err, errdefs.ErrBusy) && !apierrors.IsConflict(err) {
			klog.FromContext(ctx).Error(err, "Could not carry on a volume that moves while it is used; trying again")
		}
		c.movesInUse.AddRateLimited(key)
	default:
		c.movesInUse.Forget(key)
		if again > 0 {
			c.movesInUse.AddAfter(key, again)
		}
	}
	return true
}

// observed is what a step finds of a volume, in the kernel and in the object.
type observed struct {
	id         volume.ID
	v          *v1alpha1.Volume // nil: there is none
	m          volume.Mirrored
	copied     int64           // bytes copied since the last look
	old, new   *remotepool.Leg // nil: there is none, or the leg is this node's own
	home       bool            // this node is, or was, the old home
	here       bool            // this node is the new home
	away       bool            // the new home has not answered for too long (awayLooks)
	generation int64           // of the claim for which the volume was mirrored; 0: not known
}

// step takes the next step of a move. again is when to take the one after it; 0: when the object changes.
func (c *inUseMover) step(ctx context.Context, key string) (again time.Duration, err error) {
	v, err := c.object(ctx, key)
	if err != nil {
		return 0, err
	}
	now := &observed{id: volume.ID{Kind: blockdev.Volume, Key: key}, v: v}
	if v != nil {
		now.id = cluster.VolumeID(v)
	} else if now.id, err = c.idOf(ctx, key); err != nil {
		return 0, err
	}
	mirrored, is, err := c.volumes.Mirrored(ctx, now.id)
	if err != nil && !errors.Is(err, errdefs.ErrUnsupported) && !errors.Is(err, errdefs.ErrUnavailable) {
		return 0, err
	}
	if err != nil || !is {
		c.gauges.mirror(key, 0, 0)
		return c.stepUnmirrored(ctx, now)
	}
	now.m, now.copied = mirrored, c.gauges.mirror(key, mirrored.Synced, mirrored.Total)
	if err := c.findLegs(ctx, now); err != nil {
		return 0, err
	}
	return c.stepMirrored(ctx, now)
}

// object returns the object of a volume from a cache, or else from the API server; nil if there is none.
func (c *inUseMover) object(ctx context.Context, key string) (*v1alpha1.Volume, error) {
	if v, is := c.usedHere(key); is {
		return v.DeepCopy(), nil
	}
	if v, there, err := get(ctx, c.Agent, key, &v1alpha1.Volume{}); err == nil && there {
		return v, nil
	}
	return c.live(ctx, key)
}

// live returns the object of a volume from the API server; nil if there is none.
func (c *inUseMover) live(ctx context.Context, key string) (*v1alpha1.Volume, error) {
	ctx, cancel := context.WithTimeout(ctx, homeTime)
	defer cancel()
	v := &v1alpha1.Volume{}
	err := c.kube.Live.Get(ctx, client.ObjectKey{Name: key}, v)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return v, kube.APIError("read volume "+key, err)
}

// idOf returns the ID of a volume without an object, as the names of its devices tell.
func (c *inUseMover) idOf(ctx context.Context, key string) (volume.ID, error) {
	mirrors, err := c.volumes.Mirrors(ctx)
	for _, id := range mirrors {
		if id.Key == key {
			return id, err
		}
	}
	return volume.ID{Kind: blockdev.Volume, Key: key}, err
}

// findLegs finds out which legs a mirror has, and whether one of them is this node's own.
func (c *inUseMover) findLegs(ctx context.Context, now *observed) error {
	home, away, err := c.volumes.Seats(ctx, now.id)
	if err != nil {
		return err
	}
	legs, err := c.legs.Legs(now.ref())
	if err != nil {
		return err
	}
	for i, leg := range legs {
		switch leg.Number {
		case now.m.Old:
			now.old, now.generation = &legs[i], leg.Generation
		case now.m.New:
			now.new = &legs[i]
		}
	}
	now.home = home && !away
	c.update(now.id.Key, func(k *inUseMove) {
		switch {
		case now.new == nil || now.new.Live:
			k.awaySince = time.Time{}
		case k.awaySince.IsZero():
			k.awaySince = time.Now()
		}
		now.away = !k.awaySince.IsZero() && time.Since(k.awaySince) > awayLooks*c.options.LookEvery
	})
	if now.generation == 0 && now.new != nil {
		now.generation = now.new.Generation - 1
	}
	if now.new != nil || now.home {
		return nil
	}
	if to := c.stateOf(now.id.Key).to; to != "" {
		now.here = to == c.local.Node()
	} else if v := now.v; v != nil && v.Spec.Move != nil {
		now.here = v.Spec.Move.Node == c.local.Node() || v.Spec.NodeName == c.local.Node()
	}
	return nil
}

func (m *observed) ref() blockdev.Ref { return blockdev.Ref{Kind: m.id.Kind, Key: m.id.Key} }

// stateOf returns what this process remembers of a move.
func (c *inUseMover) stateOf(key string) inUseMove {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.moves[key]
}

func (c *inUseMover) update(key string, change func(*inUseMove)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	k := c.moves[key]
	change(&k)
	c.moves[key] = k
}

func (c *inUseMover) forget(key string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.moves, key)
}

// withVolumeLock does work under the lock of a volume; ErrBusy if somebody else has it. If a leg has failed, the holder of the lock may itself wait for that
// leg, and only work can end that: so after longestBusy work is done without the lock. It may then only load whole tables, and rename devices, which others
// look up anew.
func (c *inUseMover) withVolumeLock(key string, failed bool, work func() error) error {
	err := c.withLocks([]string{keylock.Volume(key)}, func() error {
		c.update(key, func(k *inUseMove) { k.busySince = time.Time{} })
		return work()
	})
	if !errors.Is(err, errdefs.ErrBusy) || !failed {
		return err
	}
	since := c.stateOf(key).busySince
	if since.IsZero() {
		c.update(key, func(k *inUseMove) { k.busySince = time.Now() })
	} else if time.Since(since) >= longestBusy {
		return work()
	}
	return err
}

// reportInUseWaits writes down why a move does not go on.
func (c *inUseMover) reportInUseWaits(ctx context.Context, v *v1alpha1.Volume, why error) error {
	return kube.IgnoreConflict(c.reportMoveInUse(ctx, v, func(s *v1alpha1.MoveStatus) {
		setMoveWaits(s, "", why)
	}))
}
