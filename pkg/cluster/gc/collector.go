// Package gc is the garbage collector of a cluster's objects, which runs in the controller. It gives up what is to be
// deleted on nodes that are gone for good, has blank volumes deleted that no claim and no PersistentVolume knows of,
// takes back claims that no VolumeAttachment is for, and deletes groups of snapshots that were never written down in
// full. It deletes no bytes that anybody can have used: those are the node's to judge. docs/cluster.md says who deletes what.
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

// To look for what nodes that are gone have left takes the longer the more objects there are,
// and something is new all the time: between two looks there is a rest, short beside the grace
// period.
const (
	leastRest = 100 * time.Millisecond
	mostRest  = 5 * time.Second
	// mostGathering is how long what is due waits for more, so that one look at all PersistentVolumes is for all of it.
	mostGathering = time.Minute
)

// Options of a Collector.
type Options struct {
	// GoneGrace is how long a node has to be gone before what was deleted of it is given up.
	GoneGrace time.Duration
	// AbandonGrace is how old a volume, or a group of snapshots that is not cut, has to be before it is looked whether
	// anybody knows of it; and how long a claim is left alone because of which something was refused.
	AbandonGrace time.Duration
	// Driver is the name of the CSI driver.
	Driver string
}

// Agents tells of the agents of nodes.
type Agents interface {
	// Patience is how much longer a node's agent may be silent; false for one that never was heard.
	Patience(node string) (left time.Duration, beats bool)
}

// Collector finds what nobody knows of any more. Every replica of the controller has one: each step is harmless when it
// is done twice. It learns what there is from the events of a cache (VolumeChanged, SnapshotChanged, PoolChanged,
// NodeChanged), and works while it runs.
type Collector struct {
	kube    kube.Connection
	agents  Agents
	options Options
	pending workqueue.TypedDelayingInterface[candidate]
	named   sync.Map      // UIDs of volumes that have a PersistentVolume
	nodes   chan struct{} // there may be news of nodes that are gone
}

// New returns a collector. Its connection's cache has volumes, snapshots and pools, with the index cluster.ByNode, of snapshots also cluster.ByGroup, and nodes.
func New(c kube.Connection, agents Agents, o Options) *Collector {
	return &Collector{kube: c, agents: agents, options: o, pending: workqueue.NewTypedDelayingQueue[candidate](), nodes: make(chan struct{}, 1)}
}

// candidate is what nobody may know of, to be looked at when it is old enough.
type candidate struct {
	kind string // aVolume, aGroup, or aClaim
	key  string
}

const (
	aVolume = "volume"
	aGroup  = "group"
	aClaim  = "claim of volume" // because of which something was refused
)

func (o candidate) String() string {
	if o.kind == aGroup {
		return volume.GroupID{Key: o.key}.String()
	}
	return o.kind + " " + o.key
}

// ClaimRefused tells the collector that something was refused because of the claim of a volume: after the grace period it
// is taken back if no VolumeAttachment is for it.
func (c *Collector) ClaimRefused(key string) {
	c.pending.AddAfter(candidate{aClaim, key}, c.options.AbandonGrace)
}

// provisioned reports whether a volume was made for a claim that it names, so that it is known when nobody wants it.
func provisioned(v *v1alpha1.Volume) bool {
	return v.Spec.ClaimRef != nil && strings.HasPrefix(v.Spec.Name, cluster.ProvisionedPrefix)
}

// wanted reports whether somebody uses a volume, or moves it.
func wanted(v *v1alpha1.Volume) bool { return len(v.Claimants()) > 0 || v.Spec.Move != nil }

// VolumeChanged sees to it that every volume is looked at when it is old enough.
func (c *Collector) VolumeChanged(o client.Object, gone bool) {
	c.objectChanged(o, gone)
	v, ok := o.(*v1alpha1.Volume)
	if !ok || !provisioned(v) {
		return
	}
	if gone {
		c.named.Delete(v.UID)
	} else if _, known := c.named.Load(v.UID); !known && (!wanted(v) || v.Spec.Abandoned) { // else it is looked at when that changes
		c.pending.AddAfter(candidate{aVolume, v.Name}, time.Until(v.CreationTimestamp.Add(c.options.AbandonGrace)))
	}
}

// SnapshotChanged sees to it that a group which is not cut is looked at when it is old enough.
func (c *Collector) SnapshotChanged(o client.Object, gone bool) {
	c.objectChanged(o, gone)
	if m, ok := o.(*v1alpha1.Snapshot); ok && !gone && m.Spec.Group != nil && m.Status.Created == nil {
		c.pending.AddAfter(candidate{aGroup, strings.Clone(m.Spec.Group.Key)}, time.Until(m.CreationTimestamp.Add(c.options.AbandonGrace)))
	}
}

// objectChanged: of a node that is gone, there may be something to give up.
func (c *Collector) objectChanged(o client.Object, gone bool) {
	if !gone && v1alpha1.Going(o.(cluster.Object)) {
		c.notifyNodes()
	}
}

// PoolChanged looks for nodes that are gone, as a Pool tells of one.
func (c *Collector) PoolChanged(client.Object, bool) { c.notifyNodes() }

// NodeChanged looks whether nodes are gone.
func (c *Collector) NodeChanged(client.Object, bool) { c.notifyNodes() }

func (c *Collector) notifyNodes() {
	select {
	case c.nodes <- struct{}{}:
	default: // there is
	}
}

// Run collects until the context ends. The cache has been filled.
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

// collectPending looks at what is due, with one look at what Kubernetes has.
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
