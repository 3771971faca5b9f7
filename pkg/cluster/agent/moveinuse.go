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

// A volume that is used moves through the node of its claim (docs/decisions/moving-in-use.md): this carries it. The kernel there writes to the old home and to the
// new one; when both have all of it, the object says so (it is pinned), and then either that it has moved, or that it has not. How far a volume is, each look
// finds anew, in the kernel and in the object.

// MoveMirrors are the devices of the volumes that this node uses: volume.Everywhere.
type MoveMirrors interface {
	Attached(ctx context.Context, id volume.ID) ([]blockdev.Device, error)
	Seats(ctx context.Context, id volume.ID) (home, away bool, err error)
	// Grow: see volume.Local.
	Grow(ctx context.Context, id volume.ID, key volume.Key) (volume.Volume, error)
	Mirrors(ctx context.Context) ([]volume.ID, error)
	Mirrored(ctx context.Context, id volume.ID) (volume.Mirrored, bool, error)
	Mirror(ctx context.Context, id volume.ID, to blockdev.Device, data func(context.Context) ([]blockdev.Extent, error)) error
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
	// moveWorkers is how many volumes are carried on at once. Each step is short, but for the first.
	moveWorkers = 4
	// moveCopies is how many of them are copied at once: each takes the others' time, and none is useful before it is whole.
	moveCopies = 1
	// lookEvery is between two looks at a volume that has a mirror, at the most. One that is copied is looked at again when it should be whole, at
	// the soonest after a shortestLook-th part of that.
	lookEvery    = time.Second
	shortestLook = 16
	// searchEvery is between two looks for mirrors that no object tells of.
	searchEvery = 30 * time.Second
	// How soon a copy begins anew that was ended: after so many looks, and longer each time.
	firstBackoff   = 2
	longestBackoff = 2 * time.Minute
	// longestSwitch is how long writes may be held back: until a mirror is in effect, and until it is said whether a volume that is pinned has moved.
	longestSwitch = 10 * time.Second
	// awayLooks is for how many looks (Options.LookEvery) a new home may be away before the copy to it ends: who uses the volume waits meanwhile, whatever its
	// class says, and its old home is there.
	awayLooks = 15
	// stuckTime is after how long what holds the lock of a volume is taken to wait itself for a leg that has failed.
	stuckTime = 5 * time.Second
)

// inUseMover carries the volumes that this node uses.
type inUseMover struct {
	*Agent
	volumes MoveMirrors
	legs    MoveConnections

	beginning sync.Mutex // held while a copy is begun

	mu    sync.Mutex
	known map[string]inUseMove
}

// inUseMove is what is known of a volume that is carried, beside what the kernel and the object say. It is forgotten with the process.
type inUseMove struct {
	to     string    // the new home, which this process has had prepare its leg; empty: that was one of before, or there is none
	pool   string    // of spec.move then
	sure   bool      // the object does not say that both homes have all, and nobody is about to write that
	tries  int       // copies that were ended
	rest   time.Time // when the next one may begin
	locked time.Time // since when the lock cannot be had
	away   time.Time // since when the new home is
	held   time.Time // since when it is known to be held, until it has moved or not
	looked time.Time // when the last look was that found it being copied; zero: not yet
	told   time.Time // when how far it is was written down last
}

// MoveInUse carries volumes until ctx ends.
func (a *Agent) MoveInUse(ctx context.Context, volumes MoveMirrors, legs MoveConnections) {
	c := &inUseMover{Agent: a, volumes: volumes, legs: legs, known: map[string]inUseMove{}}
	c.pace.by(volumes.Throttle)
	var done sync.WaitGroup
	defer done.Wait()
	defer a.movesInUse.ShutDown()
	for range moveWorkers {
		done.Go(func() {
			for c.next(ctx) {
			}
		})
	}
	for c.find(ctx); ; c.find(ctx) {
		select {
		case <-ctx.Done():
			return
		case <-time.After(searchEvery):
		}
	}
}

// newMovesInUse is the queue of what is to be carried, by the names of objects.
func newMovesInUse(every time.Duration) workqueue.TypedRateLimitingInterface[string] {
	return workqueue.NewTypedRateLimitingQueue(workqueue.NewTypedItemExponentialFailureRateLimiter[string](firstRetry, every))
}

// moveInUseChanged looks at a volume that moves, or has moved, and that this node uses.
func (a *Agent) moveInUseChanged(o client.Object, _ bool) {
	if v, is := o.(*v1alpha1.Volume); is && v.Spec.Move != nil && a.options.Network != nil {
		a.movesInUse.Add(v.Name)
	}
}

// find has what the kernel has of moves be looked at, whatever the objects say.
func (c *inUseMover) find(ctx context.Context) {
	mirrors, err := c.volumes.Mirrors(ctx)
	connected, failure := c.legs.Connected()
	for _, id := range mirrors {
		c.movesInUse.Add(id.Key)
	}
	for _, ref := range connected {
		c.movesInUse.Add(ref.Key)
	}
	if copied, err := c.copied(ctx, mirrors, ""); err == nil && len(copied) == 0 {
		c.pace.rests(ctx, pacedMove, "")
	}
	if err = errors.Join(err, failure); err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).Error(err, "Could not look for volumes that move while they are used; trying again")
	}
}

// copied are those of the volumes that have a mirror which are being copied, beside one.
func (c *inUseMover) copied(ctx context.Context, mirrors []volume.ID, beside string) (ids []volume.ID, err error) {
	for _, id := range mirrors {
		if id.Key == beside {
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

// next looks at one volume; false once there is no more to do.
func (c *inUseMover) next(ctx context.Context) bool {
	key, shutdown := c.movesInUse.Get()
	if shutdown {
		return false
	}
	defer c.movesInUse.Done(key)
	ctx = klog.NewContext(ctx, klog.FromContext(ctx).WithValues("volume", key))
	switch again, err := c.look(ctx, key); {
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

// observed is one look at a volume.
type observed struct {
	id         volume.ID
	v          *v1alpha1.Volume // nil: there is none
	m          volume.Mirrored
	copied     int64           // how much of it was copied since the last look, in bytes
	old, new   *remotepool.Leg // nil: none, or that leg is this node's own
	home       bool            // this node is, or was, the old home
	here       bool            // this node is the new home
	away       bool            // the new home is, for too long
	generation int64           // of the claim for which the volume was mirrored; 0: not known
}

// look takes the next step with a volume, and says when to look again; 0: when its object changes.
func (c *inUseMover) look(ctx context.Context, key string) (again time.Duration, err error) {
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
		return c.idle(ctx, now)
	}
	now.m, now.copied = mirrored, c.gauges.mirror(key, mirrored.Synced, mirrored.Total)
	if err := c.findLegs(ctx, now); err != nil {
		return 0, err
	}
	return c.follow(ctx, now)
}

// object returns the object of a volume as the watches have it, or else as the API server does; nil if there is none.
func (c *inUseMover) object(ctx context.Context, key string) (*v1alpha1.Volume, error) {
	if v, is := c.usedHere(key); is {
		return v.DeepCopy(), nil
	}
	if v, there, err := get(ctx, c.Agent, key, &v1alpha1.Volume{}); err == nil && there {
		return v, nil
	}
	return c.live(ctx, key)
}

// live returns the object of a volume as the API server has it; nil if there is none.
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

// idOf is the ID of a volume without an object, as the kernel has it.
func (c *inUseMover) idOf(ctx context.Context, key string) (volume.ID, error) {
	mirrors, err := c.volumes.Mirrors(ctx)
	for _, id := range mirrors {
		if id.Key == key {
			return id, err
		}
	}
	return volume.ID{Kind: blockdev.Volume, Key: key}, err
}

// findLegs finds what the legs of a mirror are.
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
	c.note(now.id.Key, func(k *inUseMove) {
		switch {
		case now.new == nil || now.new.Live:
			k.away = time.Time{}
		case k.away.IsZero():
			k.away = time.Now()
		}
		now.away = !k.away.IsZero() && time.Since(k.away) > awayLooks*c.options.LookEvery
	})
	if now.generation == 0 && now.new != nil {
		now.generation = now.new.Generation - 1
	}
	if now.new != nil || now.home {
		return nil
	}
	if to := c.knownOf(now.id.Key).to; to != "" {
		now.here = to == c.local.Node()
	} else if v := now.v; v != nil && v.Spec.Move != nil {
		now.here = v.Spec.Move.Node == c.local.Node() || v.Spec.NodeName == c.local.Node()
	}
	return nil
}

func (m *observed) ref() blockdev.Ref { return blockdev.Ref{Kind: m.id.Kind, Key: m.id.Key} }

// knownOf is what is known of a volume.
func (c *inUseMover) knownOf(key string) inUseMove {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.known[key]
}

func (c *inUseMover) note(key string, change func(*inUseMove)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	k := c.known[key]
	change(&k)
	c.known[key] = k
}

func (c *inUseMover) forget(key string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.known, key)
}

// withVolume works with the lock of a volume. Who has it may be waiting for a leg that has failed, which nobody else can end: after a while that is done
// without. What is done then are tables, of which each is whole, and names that everybody else looks up anew.
func (c *inUseMover) withVolume(key string, failed bool, work func() error) error {
	err := c.withLocks([]string{keylock.Volume(key)}, func() error {
		c.note(key, func(k *inUseMove) { k.locked = time.Time{} })
		return work()
	})
	if !errors.Is(err, errdefs.ErrBusy) || !failed {
		return err
	}
	since := c.knownOf(key).locked
	if since.IsZero() {
		c.note(key, func(k *inUseMove) { k.locked = time.Now() })
	} else if time.Since(since) >= stuckTime {
		return work()
	}
	return err
}

// saysWaits says why a volume is not carried on now.
func (c *inUseMover) saysWaits(ctx context.Context, v *v1alpha1.Volume, why error) error {
	return kube.IgnoreConflict(c.reportMoveInUse(ctx, v, func(s *v1alpha1.MoveStatus) {
		s.Waits, s.Message, s.Progress = true, cluster.Limited(errdefs.Words(why)), nil
	}))
}
