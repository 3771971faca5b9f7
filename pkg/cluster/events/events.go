// Package events writes Kubernetes' Events, which tell people what is wrong and when it is well again: on PersistentVolumeClaims, PersistentVolumes,
// Nodes, Volumes, ReplicatedVolumes, Snapshots and Pools. Table has all of them.
//
// All events follow from the objects of pkg/api and from the heartbeats, so they are written by the controller, and agents need no right for that. No
// memory of them is kept: the name of an event is made from the object that it is on, the reason, and the state that it tells of. So whoever writes it a
// second time, another controller or the same one after a restart, finds that it exists. That is why client-go's recorders are not used: their events have
// random names, and only the process knows what it has written. The event of a state that lasts is renewed, as a series, before Kubernetes deletes it.
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
	// again is how often the event of a state that lasts is renewed. API servers delete an event after an hour by default (kube-apiserver --event-ttl).
	again = 30 * time.Minute
	// fresh is how old something that does not last may be when its event is written: the event of anything older existed, and was deleted. As long an event
	// is remembered, and not written again.
	fresh = time.Hour
	// pace is the time between two events, so that many events at once are no load for the API server.
	pace = 20 * time.Millisecond
	// most is how many events are remembered. What comes beyond that is left out.
	most = 20000
	// mostOfNode is how many events that one node causes (saying.owner) are taken within an hour (fresh). The rest is left out, so that a node which causes
	// ever new events, by a fault or because it was taken over, fills neither this memory nor the API server.
	mostOfNode = most / 4
	// firstRetry and lastRetry are the first and the longest pause between tries while the API server does not answer.
	firstRetry = time.Second
	lastRetry  = 5 * time.Minute
	// timeout is the time limit for writing one event.
	timeout = 10 * time.Second
)

// Options of an Announcer.
type Options struct {
	// Driver is the name of the CSI driver: the reportingController of the events.
	Driver string
	// Namespace has the Leases of the agents.
	Namespace string
	// Again is how often the event of a state that lasts is renewed; 0 is the usual time.
	Again time.Duration
}

// Agents knows which agents are heard.
type Agents interface {
	// Patience returns how much longer the agent of a node may be silent; 0 or less if it has been silent for too long. beats is false if no Lease of it is
	// known.
	Patience(node string) (left time.Duration, beats bool)
}

// Announcer writes the events of all objects. A cache hands it each change (VolumeChanged, ReplicatedChanged, SnapshotChanged, PoolChanged, NodeChanged,
// LeaseChanged); these calls do not wait for the API server. Run writes the events. If the API server refuses events, or does not answer, nothing else is
// held up.
type Announcer struct {
	kube     kube.Connection
	agents   Agents
	options  Options
	instance string
	queue    workqueue.TypedRateLimitingInterface[string]
	look     chan struct{}                                // of one element; has it while a look at the nodes is due
	wholes   workqueue.TypedRateLimitingInterface[string] // names of the ReplicatedVolumes to look at
	handles  handles                                      // used by the goroutine of queue alone
	refusal  sync.Once                                    // logs once that events are refused

	mu      sync.Mutex
	entries map[string]*entry          // by saying.key: what is to be written, and what was
	lasting map[string]map[string]bool // keys of the entries that last, by objectKey
	nodes   map[string]nodeState       // of nodes that are not well, by name
	taken   map[string]int             // how many events were taken since the time in since, by saying.owner (mostOfNode)
	since   time.Time
	moves   map[types.UID]begun // of volumes and snapshots that are to move
}

// entry is an event that this process is to write, or has written.
type entry struct {
	saying
	noted time.Time // when it was found
	said  time.Time // when it was last written; zero: not yet
}

// New returns an Announcer. The cache of its connection has to have Volumes, with the indexes cluster.ByNode, cluster.ByMove and cluster.ByReplicaOf,
// ReplicatedVolumes, Snapshots, with cluster.ByMove, Pools, with cluster.ByNode, Nodes and Leases.
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

// VolumeChanged has the events of a volume written.
func (a *Announcer) VolumeChanged(o client.Object, gone bool) {
	if v, ok := o.(*v1alpha1.Volume); ok {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.updateVolume(v, gone)
	}
}

// Stays has the event written that tells why a volume that is to follow its pod cannot; once, however often it is called for the same reason, and again after
// an hour.
func (a *Announcer) Stays(v *v1alpha1.Volume, why string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, one := range ofStay(v, why) {
		a.say(one)
	}
}

// updateVolume is update for a volume. The caller holds the lock.
func (a *Announcer) updateVolume(v *v1alpha1.Volume, gone bool) {
	if v.Spec.ReplicaOf != "" {
		a.wholes.Add(v.Spec.ReplicaOf)
	}
	a.update(v, gone, ofVolume(v, a.nodes[v.Spec.NodeName], a.other(v.Spec.Move), a.began(v, v.Spec.Move, gone)))
}

// other returns the state of the node that a move is to, or that was left. The caller holds the lock.
func (a *Announcer) other(m *v1alpha1.Move) nodeState {
	if m == nil {
		return nodeState{}
	}
	return a.nodes[m.Node]
}

// begun is a move of a volume or a snapshot that has not changed its node yet.
type begun struct {
	node string // the new node
	at   int64  // the generation of the object when the move was first seen
}

// began returns the generation of an object at which its move began; 0 if it is not to move. The object does not say that, and changes during the move. So
// it is the generation in which the move was first seen here: the same one in all controllers that watch then. A controller that starts later may write
// the event of the move once more. The caller holds the lock.
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

// SnapshotChanged has the events of a snapshot written.
func (a *Announcer) SnapshotChanged(o client.Object, gone bool) {
	if s, ok := o.(*v1alpha1.Snapshot); ok {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.updateSnapshot(s, gone)
	}
}

// updateSnapshot is update for a snapshot. The caller holds the lock.
func (a *Announcer) updateSnapshot(s *v1alpha1.Snapshot, gone bool) {
	a.update(s, gone, ofSnapshot(s, a.other(s.Spec.Move), a.began(s, s.Spec.Move, gone)))
}

// PoolChanged has the events of a pool written.
func (a *Announcer) PoolChanged(o client.Object, gone bool) {
	if p, ok := o.(*v1alpha1.Pool); ok {
		a.mu.Lock()
		a.update(p, gone, ofPool(p))
		a.mu.Unlock()
	}
	a.NodeChanged(o, gone) // it may be the first pool of its node
}

// LeaseChanged has the nodes looked at if the node of a Lease is not well: its agent may be heard again.
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

// NodeChanged has the nodes looked at.
func (a *Announcer) NodeChanged(client.Object, bool) {
	select {
	case a.look <- struct{}{}:
	default: // a look is due already
	}
}

// update has the events of an object written: now is all that there is to tell of it. States that lasted and are not among them are over, and forgotten;
// the event that says so is written if theirs was. The caller holds the lock.
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
			a.say(e.over(o))
		}
	}
	if delete(a.lasting, about); len(lasts) > 0 {
		a.lasting[about] = lasts
	}
}

// say has an event written, unless it was written or is to be. It leaves it out, and logs that, if there are too many (most, mostOfNode). The caller holds
// the lock.
func (a *Announcer) say(one saying) {
	key := one.key()
	if e := a.entries[key]; e != nil {
		return
	}
	if time.Since(a.since) >= fresh {
		a.taken, a.since = map[string]int{}, time.Now()
	}
	owner := one.owner()
	switch {
	case a.taken[owner] > mostOfNode:
		return
	case a.taken[owner] == mostOfNode:
		a.taken[owner]++ // so that it is logged once
		klog.Background().Info("There is too much to say of one node or replicated volume; its events are left out for up to an hour", "owner", owner, "reason", one.reason, "about", one.of.GetName())
		return
	case len(a.entries) >= most:
		klog.Background().Info("There is too much to say; an event is left out", "reason", one.reason, "about", one.of.GetName())
		return
	}
	a.taken[owner]++
	a.entries[key] = &entry{saying: one, noted: time.Now()}
	a.queue.Add(key)
}

// Run writes events until the context ends. The cache has to be filled before.
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

// next writes one event, if it is still to be written.
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

// take returns the entry of a key, and whether its event is to be written now. It forgets one that does not last after an hour (fresh).
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

// done notes that the event of a key was written. It returns after how long to look at it again.
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
