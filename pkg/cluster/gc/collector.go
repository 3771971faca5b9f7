// Package gc is the garbage collector of a cluster's objects. It runs in the controller, and it
//
//   - gives up what is to be deleted on nodes that are gone for good;
//   - has blank volumes deleted for which there is no PersistentVolumeClaim and no PersistentVolume, and blank legs whose volume is gone;
//   - takes back claims for which there is no VolumeAttachment;
//   - deletes groups of snapshots of which some members' objects were never created.
//
// It deletes no bytes that anybody can have used: whether a volume is blank, its node says. docs/cluster.md says who deletes what.
package gc

import (
	"context"
	"strings"
	"sync"
	"time"

	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// A look for what is left of nodes that are gone takes time in proportion to the number of objects, and something changes all the time. So between two looks
// there is a pause of a tenth of GoneGrace, within leastRest and mostRest.
const (
	leastRest = 100 * time.Millisecond
	mostRest  = 5 * time.Second
	// mostGathering is the longest time for which a candidate that is due waits for others, so that one census serves all of them.
	mostGathering = time.Minute
)

// Options of a Collector.
type Options struct {
	// GoneGrace is how long a node has to be gone before what is to be deleted on it is given up.
	GoneGrace time.Duration
	// AbandonGrace is how old a volume, or a group of snapshots that is not taken, has to be before it can be collected. It is also the time between a refusal
	// because of a claim and the look whether that claim can be taken back.
	AbandonGrace time.Duration
	// Driver is the name of the CSI driver.
	Driver string
}

// Agents tells of the agents of nodes.
type Agents interface {
	// Patience returns how much longer a node's agent may be silent before it counts as down. beats is false for an agent that was never heard.
	Patience(node string) (left time.Duration, beats bool)
}

// Collector collects garbage while Run runs. Every replica of the controller has one: each step may be done twice. It learns what there is from the events of
// a cache (VolumeChanged, SnapshotChanged, PoolChanged, NodeChanged).
type Collector struct {
	kube    kube.Connection
	agents  Agents
	options Options
	pending workqueue.TypedDelayingInterface[candidate]
	named   sync.Map      // UIDs of volumes that have a PersistentVolume: they are not looked at again
	nodes   chan struct{} // of one element; has it while a look for nodes that are gone is due
}

// New returns a collector. The cache of c has to have nodes, and volumes, snapshots and pools with the index cluster.ByNode; snapshots also with the index
// cluster.ByGroup, and volumes with cluster.ByReplicaOf.
func New(c kube.Connection, agents Agents, o Options) *Collector {
	return &Collector{kube: c, agents: agents, options: o, pending: workqueue.NewTypedDelayingQueue[candidate](), nodes: make(chan struct{}, 1)}
}

// candidate is what may be garbage. It is looked at when it is old enough.
type candidate struct {
	kind string // aVolume, aGroup, or aClaim
	key  string
}

const (
	aVolume = "volume"
	aGroup  = "group"
	aClaim  = "claim of volume"
)

func (o candidate) String() string {
	if o.kind == aGroup {
		return volume.GroupID{Key: o.key}.String()
	}
	return o.kind + " " + o.key
}

// ClaimRefused says that a call was refused because a volume is claimed. After AbandonGrace its claims are taken back if there are no VolumeAttachments for
// them. key is the name of the Volume or ReplicatedVolume.
func (c *Collector) ClaimRefused(key string) {
	c.pending.AddAfter(candidate{aClaim, key}, c.options.AbandonGrace)
}

// provisioned reports whether a volume was made for a PersistentVolumeClaim that its object names. Of other volumes it cannot be told that nobody wants them.
func provisioned(v *v1alpha1.Volume) bool {
	return v.Spec.ClaimRef != nil && strings.HasPrefix(v.Spec.Name, cluster.ProvisionedPrefix)
}

// isUnusedLeg reports whether a volume is a further leg of a volume with several, and was never used: no claim of its volume came to it.
func isUnusedLeg(v *v1alpha1.Volume) bool {
	return v.Spec.ReplicaOf != "" && v.Name != v.Spec.ReplicaOf && v.Spec.Claims == 0
}

// wanted reports whether somebody uses a volume, or moves it.
func wanted(v *v1alpha1.Volume) bool { return len(v.Claimants()) > 0 || v.Spec.Move != nil }

// VolumeChanged queues a volume to be looked at when it is as old as AbandonGrace.
func (c *Collector) VolumeChanged(o client.Object, gone bool) {
	c.objectChanged(o, gone)
	v, ok := o.(*v1alpha1.Volume)
	if !ok || !provisioned(v) && !isUnusedLeg(v) {
		return
	}
	if gone {
		c.named.Delete(v.UID)
	} else if _, known := c.named.Load(v.UID); !known && (!wanted(v) || v.Spec.Abandoned) { // one that is wanted changes when that ends
		c.pending.AddAfter(candidate{aVolume, v.Name}, time.Until(v.CreationTimestamp.Add(c.options.AbandonGrace)))
	}
}

// SnapshotChanged queues the group of a snapshot that is not taken, to be looked at when the snapshot is as old as AbandonGrace.
func (c *Collector) SnapshotChanged(o client.Object, gone bool) {
	c.objectChanged(o, gone)
	if m, ok := o.(*v1alpha1.Snapshot); ok && !gone && m.Spec.Group != nil && m.Status.Created == nil {
		c.pending.AddAfter(candidate{aGroup, strings.Clone(m.Spec.Group.Key)}, time.Until(m.CreationTimestamp.Add(c.options.AbandonGrace)))
	}
}

// objectChanged has nodes that are gone looked for if an object is to be deleted, or is abandoned: its node may be one of them.
func (c *Collector) objectChanged(o client.Object, gone bool) {
	v, is := o.(*v1alpha1.Volume)
	if !gone && (v1alpha1.Going(o.(cluster.Object)) || is && v.Spec.Abandoned) {
		c.notifyNodes()
	}
}

// PoolChanged has nodes that are gone looked for: the node of the Pool may be one.
func (c *Collector) PoolChanged(client.Object, bool) { c.notifyNodes() }

// NodeChanged has nodes that are gone looked for.
func (c *Collector) NodeChanged(client.Object, bool) { c.notifyNodes() }

func (c *Collector) notifyNodes() {
	select {
	case c.nodes <- struct{}{}:
	default: // a look is due already
	}
}

// Run collects until the context ends. It may begin only when the cache has been filled.
func (c *Collector) Run(ctx context.Context) {
	var done sync.WaitGroup
	defer done.Wait()
	done.Go(func() {
		for {
			one, shutdown := c.pending.Get()
			if shutdown {
				return
			}
			c.collectPending(ctx, one)
		}
	})
	defer c.pending.ShutDown()
	since := map[string]time.Time{} // when this process first saw a node to be gone
	var timer <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.nodes:
		case <-timer:
		}
		timer = nil
		next, err := c.collectNodes(ctx, since)
		if err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Could not clear up after a node that is gone; trying again")
			next = time.Minute
		}
		if next > 0 {
			timer = time.After(next)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(min(max(c.options.GoneGrace/10, leastRest), mostRest)):
		}
	}
}

// collectPending looks at candidates that are due, and at those that become due in the next moments, with one census for all.
func (c *Collector) collectPending(ctx context.Context, due ...candidate) {
	select {
	case <-ctx.Done():
	case <-time.After(min(max(c.options.AbandonGrace/20, leastRest), mostGathering)):
	}
	for c.pending.Len() > 0 {
		one, shutdown := c.pending.Get()
		if shutdown {
			return
		}
		due = append(due, one)
	}
	known := c.census()
	for _, one := range due {
		var err error
		switch one.kind {
		case aGroup:
			err = c.collectGroup(ctx, one.key)
		case aClaim:
			err = c.collectClaim(ctx, known, one.key)
		default:
			err = c.collectVolume(ctx, known, one.key)
		}
		if err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Could not find out whether something is abandoned; trying again", "what", one.String())
			c.pending.AddAfter(one, time.Minute)
		}
		c.pending.Done(one)
	}
}
