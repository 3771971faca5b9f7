// Package events tells people, on what they describe, what is wrong and when it is well again: as Kubernetes' Events on
// PersistentVolumeClaims, PersistentVolumes, Nodes, Volumes, ReplicatedVolumes, Snapshots and Pools. Table has all of them.
//
// All that it says follows from the objects of pkg/api and from the heartbeats, so it runs in the controller, and agents need
// no right for it. Nobody remembers what was said: the name of an event is made of what it is on, the reason, and when
// the state began, so the second who says it finds that it was said, be it another controller or the same one after a
// restart. That is why client-go's recorders are not used: their events have random names, and only the process knows
// what it has said. A state that lasts is said again, as a series of the one event, before Kubernetes forgets it.
package events

import (
	"context"
	"fmt"
	"os"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
)

const (
	// again is when a state that lasts is said again. API servers forget an event after an hour, unless told otherwise.
	again = 30 * time.Minute
	// fresh is how old what does not last may be when it is said: of older states the event was there, and is forgotten. For as
	// long it is not said again.
	fresh = time.Hour
	// pace is the time between two events, so that what happens to many volumes at once is no load for the API server.
	pace = 20 * time.Millisecond
	// most is how much is kept in mind. What comes beyond that is not said.
	most = 20000
	// mostOfNode is how much is taken up within an hour (fresh) of what one node says. The rest is not said, so that a node which says
	// ever new things, by a fault or because somebody took it over, fills neither what is kept here nor the API server.
	mostOfNode = most / 4
	// firstRetry and lastRetry are between tries while the API server does not answer.
	firstRetry = time.Second
	lastRetry  = 5 * time.Minute
	// timeout of a request.
	timeout = 10 * time.Second
)

// Options of an Announcer.
type Options struct {
	// Driver is the name of the CSI driver, which the events are from.
	Driver string
	// Namespace has the Leases of the agents.
	Namespace string
	// Again is when a state that lasts is said again; 0 is the usual time.
	Again time.Duration
}

// Agents tells of the agents of nodes.
type Agents interface {
	// Patience is how much longer a node's agent may be silent; false for one that never was heard.
	Patience(node string) (left time.Duration, beats bool)
}

// Announcer says what there is to say. It learns of it from the events of a cache (VolumeChanged, ReplicatedChanged, SnapshotChanged, PoolChanged,
// NodeChanged, LeaseChanged), which never wait for it, and says it while it runs. An API server that refuses events, or is away, holds up
// nothing else.
type Announcer struct {
	kube     kube.Connection
	agents   Agents
	options  Options
	instance string
	queue    workqueue.TypedRateLimitingInterface[string]
	look     chan struct{}                                // there may be news of nodes
	wholes   workqueue.TypedRateLimitingInterface[string] // replicated volumes of which there may be news
	handles  handles                                      // used by the one who says
	refusal  sync.Once                                    // that events are refused is logged once

	mu      sync.Mutex
	entries map[string]*entry          // by key: what is to be said, and what was
	lasting map[string]map[string]bool // keys of what lasts, by the object that it is about
	nodes   map[string]nodeState       // those that are not well
	taken   map[string]int             // how much was taken up of each node
	since   time.Time                  // since when that was counted
	moves   map[types.UID]begun        // of volumes and snapshots that are to move
}

// entry is a saying of this process.
type entry struct {
	saying
	noted time.Time // when it was found
	said  time.Time // zero: not yet
}

// New returns an announcer. Its connection's cache has volumes, with the indexes cluster.ByNode, cluster.ByMove and cluster.ByReplicaOf, replicated volumes, pools, with cluster.ByNode, nodes and Leases.
func New(c kube.Connection, agents Agents, o Options) *Announcer {
	if o.Again == 0 {
		o.Again = again
	}
	host, err := os.Hostname()
	if err != nil || host == "" {
		host = o.Driver
	}
	return &Announcer{kube: c, agents: agents, options: o, instance: host[:min(len(host), mostInstance)],
		queue:  workqueue.NewTypedRateLimitingQueue(workqueue.NewTypedItemExponentialFailureRateLimiter[string](firstRetry, lastRetry)),
		wholes: workqueue.NewTypedRateLimitingQueue(workqueue.NewTypedItemExponentialFailureRateLimiter[string](firstRetry, lastRetry)),
		look:   make(chan struct{}, 1), handles: handles{live: c.Live, driver: o.Driver},
		entries: map[string]*entry{}, lasting: map[string]map[string]bool{}, nodes: map[string]nodeState{}, moves: map[types.UID]begun{}}
}

// VolumeChanged says what there is to say of a volume.
func (a *Announcer) VolumeChanged(o client.Object, gone bool) {
	if v, ok := o.(*v1alpha1.Volume); ok {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.updateVolume(v, gone)
	}
}

// updateVolume is update of a volume.
func (a *Announcer) updateVolume(v *v1alpha1.Volume, gone bool) {
	if v.Spec.ReplicaOf != "" {
		a.wholes.Add(v.Spec.ReplicaOf)
	}
	a.update(v, gone, ofVolume(v, a.nodes[v.Spec.NodeName], a.other(v.Spec.Move), a.began(v, v.Spec.Move, gone)))
}

// other is how the node is that something moves to, or has left.
func (a *Announcer) other(m *v1alpha1.Move) nodeState {
	if m == nil {
		return nodeState{}
	}
	return a.nodes[m.Node]
}

// begun is a move of a volume or a snapshot that has not moved yet.
type begun struct {
	node string // the new one
	at   int64  // the generation of the object
}

// began is the generation of an object at which its move began: that in which the move was seen first, as nothing of the object says so, and
// others change it while the volume moves; 0 if it is not to move. All who watch see that generation; who begins to watch later may tell of
// the move once more. The caller has the lock.
func (a *Announcer) began(o client.Object, m *v1alpha1.Move, gone bool) int64 {
	if gone || m == nil || m.Left {
		delete(a.moves, o.GetUID())
		return 0
	}
	if a.moves[o.GetUID()].node != m.Node {
		a.moves[o.GetUID()] = begun{m.Node, o.GetGeneration()}
	}
	return a.moves[o.GetUID()].at
}

// SnapshotChanged says what there is to say of a snapshot.
func (a *Announcer) SnapshotChanged(o client.Object, gone bool) {
	if s, ok := o.(*v1alpha1.Snapshot); ok {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.update(s, gone, ofSnapshot(s, a.other(s.Spec.Move), a.began(s, s.Spec.Move, gone)))
	}
}

// PoolChanged says what there is to say of a pool.
func (a *Announcer) PoolChanged(o client.Object, gone bool) {
	if p, ok := o.(*v1alpha1.Pool); ok {
		a.mu.Lock()
		a.update(p, gone, ofPool(p))
		a.mu.Unlock()
	}
	a.NodeChanged(o, gone) // it may be the first pool of its node
}

// LeaseChanged has it looked whether an agent is heard again.
func (a *Announcer) LeaseChanged(o client.Object, gone bool) {
	if lease, ok := o.(*coordinationv1.Lease); ok && lease.Spec.HolderIdentity != nil && a.unwell(*lease.Spec.HolderIdentity) {
		a.NodeChanged(o, gone)
	}
}

func (a *Announcer) unwell(node string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.nodes[node].reason != ""
}

// NodeChanged has it looked which nodes are there.
func (a *Announcer) NodeChanged(client.Object, bool) {
	select {
	case a.look <- struct{}{}:
	default: // it will be
	}
}

// update takes in all that there is to say of an object. The caller has the lock.
func (a *Announcer) update(o client.Object, gone bool, now []saying) {
	if gone {
		now = nil
	}
	about := objectKey(o)
	last, lasts := a.lasting[about], map[string]bool{}
	for _, one := range now {
		if one.lasting {
			lasts[one.key()] = true
		}
		if one.lasting || one.since.IsZero() || time.Since(one.since) < fresh {
			a.say(one)
		}
	}
	for key := range last {
		e := a.entries[key]
		if lasts[key] || e == nil {
			continue
		}
		delete(a.entries, key)
		if r, is := o.(*v1alpha1.ReplicatedVolume); is && !e.said.IsZero() && !gone {
			if one, again := e.currentAgain(r); again {
				a.say(one)
			}
		}
		if e.waits && !e.said.IsZero() && !gone && a.nodes[nodeOf(o)].reason == "" {
			a.say(e.over())
		}
	}
	if delete(a.lasting, about); len(lasts) > 0 {
		a.lasting[about] = lasts
	}
}

// say has something said, unless it was or will be. The caller has the lock.
func (a *Announcer) say(one saying) {
	key := one.key()
	if e := a.entries[key]; e != nil {
		return
	}
	if time.Since(a.since) >= fresh {
		a.taken, a.since = map[string]int{}, time.Now()
	}
	node := nodeOf(one.of)
	switch {
	case a.taken[node] > mostOfNode:
		return
	case a.taken[node] == mostOfNode:
		a.taken[node]++ // that is said once
		klog.Background().Info("There is too much to say of a node; its events are left out for up to an hour", "node", node, "reason", one.reason, "about", one.of.GetName())
		return
	case len(a.entries) >= most:
		klog.Background().Info("There is too much to say; an event is left out", "reason", one.reason, "about", one.of.GetName())
		return
	}
	a.taken[node]++
	a.entries[key] = &entry{saying: one, noted: time.Now()}
	a.queue.Add(key)
}

// Run says what there is to say until the context ends. The cache has been filled.
func (a *Announcer) Run(ctx context.Context) {
	var done sync.WaitGroup
	defer done.Wait()
	done.Go(func() {
		for {
			key, shutdown := a.queue.Get()
			if shutdown {
				return
			}
			a.next(ctx, key)
			a.queue.Done(key)
		}
	})
	done.Go(func() { a.lookAtWholes(ctx) })
	defer a.wholes.ShutDown()
	defer a.queue.ShutDown()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.look:
		case <-timer.C:
		}
		timer.Reset(a.lookAtNodes(ctx))
		select {
		case <-ctx.Done():
			return
		case <-time.After(lookPause):
		}
	}
}

// next says one thing, if it is still so.
func (a *Announcer) next(ctx context.Context, key string) {
	one, there := a.take(key)
	if !there || ctx.Err() != nil {
		return
	}
	posting, cancel := context.WithTimeout(ctx, timeout)
	err := a.post(posting, one)
	cancel()
	switch {
	case err == nil:
		a.queue.Forget(key)
		a.queue.AddAfter(key, a.done(key))
	case ctx.Err() == nil:
		klog.FromContext(ctx).V(2).Info("Could not write an event; trying again", "reason", one.reason, "about", one.of.GetName(), "err", err)
		a.queue.AddRateLimited(key)
	}
	select {
	case <-ctx.Done():
	case <-time.After(pace):
	}
}

// take returns what is to be said now. What does not last is forgotten when it is not fresh any more.
func (a *Announcer) take(key string) (entry, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	e := a.entries[key]
	if e == nil {
		return entry{}, false
	}
	if !e.lasting && time.Since(e.noted) >= fresh {
		delete(a.entries, key)
		return entry{}, false
	}
	return *e, e.lasting || e.said.IsZero()
}

// done notes that something was said. It returns when to look at it again.
func (a *Announcer) done(key string) time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	e := a.entries[key]
	if e == nil {
		return 0 // it is over
	}
	e.said = time.Now()
	if e.lasting {
		return a.options.Again
	}
	return fresh
}

func objectKey(o client.Object) string { return fmt.Sprintf("%T/%s", o, o.GetName()) }
