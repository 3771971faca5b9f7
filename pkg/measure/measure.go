// Package measure finds out, at each scrape of metrics, how the pools of this node are, and their volumes. A scrape waits a moment
// for what takes long, and never starts the same thing twice: a disk that hangs costs one goroutine, however often it is asked for.
package measure

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/loop"
	"github.com/ashlar-csi/ashlar/pkg/metrics"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

const (
	// fresh is how old what is said of a pool may be, so that several scrapers cost as much as one.
	fresh = 5 * time.Second
	// freshVolumes is the same for its volumes, which are looked at one by one.
	freshVolumes = time.Minute
	// slow is how long a look at a pool may take, on a disk that is busy, say. What takes longer hangs.
	slow = 10 * time.Second
	// patience is how long a scrape waits for pools.
	patience = metrics.ScrapeTime * 2 / 3
	// closeTime is how long the end of the driver waits for what hangs.
	closeTime = time.Second
)

// Pool is a pool of the node.
type Pool struct {
	blockdev.Pool
	Kind string // as pools.KindOf says
}

// Node measures the pools of a node.
type Node struct {
	local     *volume.Local
	pools     []*pool
	perVolume bool

	context context.Context
	stop    context.CancelFunc
	work    sync.WaitGroup
}

// pool is a pool with what is known of it.
type pool struct {
	Pool
	state   reading[state]
	volumes reading[volumes]
}

// state is how a pool is as a whole.
type state struct {
	capacity  *blockdev.Capacity // nil: it cannot be told
	thin      *blockdev.ThinUse  // nil: it is none, or it cannot be told
	volumes   int
	exports   int
	snapshots int
	problems  []blockdev.Problem
}

// volumes is how the volumes of a pool are.
type volumes struct {
	failed   bool            // it cannot be told
	problems map[problem]int // how many volumes have it
	each     []measured      // if that is asked for
}

type problem struct {
	severity blockdev.Severity
	reason   string
}

type measured struct {
	volume.Volume
	used int64 // -1: it cannot be told
}

// New measures the pools of a node. With perVolume there are samples of each volume.
func New(ctx context.Context, local *volume.Local, pools []Pool, perVolume bool) *Node {
	metrics.Begin(local.Node())
	n := &Node{local: local, perVolume: perVolume}
	n.context, n.stop = context.WithCancel(ctx)
	for _, p := range pools {
		one := &pool{Pool: p}
		one.state.fresh, one.state.find = fresh, one.look
		one.volumes.fresh, one.volumes.find = freshVolumes, func(ctx context.Context) volumes { return n.lookAtVolumes(ctx, p.Name()) }
		n.pools = append(n.pools, one)
	}
	return n
}

// Close ends what is being looked at. What hangs in the kernel is left behind.
func (n *Node) Close() {
	n.stop()
	done := make(chan struct{})
	go func() { n.work.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(closeTime):
	}
}

// look finds out how a pool is.
func (p *pool) look(ctx context.Context) (s state) {
	c, err := p.Capacity(ctx)
	volumes, listed := p.List(ctx, blockdev.Volume, "", 0)
	snapshots, listedToo := p.List(ctx, blockdev.Snapshot, "", 0)
	if errors.Join(err, listed, listedToo) == nil {
		s.capacity, s.volumes, s.snapshots = &c, len(volumes), len(snapshots)
		for _, record := range volumes {
			if volume.IsExported(record) {
				s.exports++
			}
		}
	}
	if thin, ok := blockdev.As[blockdev.ThinPool](p.Pool.Pool); ok {
		if use, is, err := thin.ThinUse(ctx); err == nil && is {
			s.thin = &use
		}
	}
	s.problems = p.PoolHealth(ctx)
	return s
}

// lookAtVolumes finds out what a pool keeps, and how its volumes are.
func (n *Node) lookAtVolumes(ctx context.Context, pool string) volumes {
	found := volumes{problems: map[problem]int{}}
	list, err := n.local.InPool(ctx, pool)
	if err != nil {
		return volumes{failed: true}
	}
	for _, v := range list {
		if n.perVolume {
			found.each = append(found.each, n.measure(ctx, v))
		}
		problems, err := n.local.Health(ctx, v.ID)
		if err != nil {
			continue // it was deleted meanwhile, or the driver ends; else its pool says what is wrong
		}
		for _, p := range problems {
			found.problems[problem{severityOf(v, p), p.Reason}]++
		}
	}
	return found
}

// severityOf is how bad a problem of a volume is. If a leg lost its bytes, or cannot be used, its volume need not have lost data or access: only the controller knows whether it has other legs.
func severityOf(v volume.Volume, p blockdev.Problem) blockdev.Severity {
	if v.ReplicaOf != "" {
		return min(p.Severity, blockdev.Degraded)
	}
	return p.Severity
}

func (n *Node) measure(ctx context.Context, v volume.Volume) measured {
	used, known, err := n.local.Used(ctx, v.ID)
	if !known || err != nil {
		used = -1
	}
	return measured{v, used}
}

// Samples is a metrics.Source.
func (n *Node) Samples() []metrics.Sample {
	var samples []metrics.Sample
	node := n.local.Node()
	if free, err := loop.Free(); err == nil {
		samples = append(samples, metrics.LoopDevicesFree.At(float64(free), node))
	}
	copies := map[string]int{}
	for _, c := range n.local.Progress().Running() {
		copies[c.Pool]++
	}
	waiting, enough := context.WithTimeout(n.context, patience)
	defer enough()
	for _, p := range n.pools {
		p.state.start(n.context, &n.work)
		p.volumes.start(n.context, &n.work)
	}
	for _, p := range n.pools {
		name := p.Name()
		samples = append(samples, metrics.CopiesInProgress.At(float64(copies[name]), node, name),
			metrics.CopiedBytes.At(float64(n.local.Progress().Copied(name)), node, name))
		samples = append(samples, p.stateSamples(node, waiting.Done())...)
		samples = append(samples, p.volumeSamples(node, waiting.Done())...)
	}
	return samples
}

// hangs is what is wrong with a pool that does not answer in time.
var hangs = blockdev.Problem{Severity: blockdev.Inaccessible, Reason: "PoolUnavailable"}

func (p *pool) stateSamples(node string, patience <-chan struct{}) []metrics.Sample {
	name := p.Name()
	s, known, busy := p.state.get(patience)
	if !known || busy > slow {
		s = state{problems: []blockdev.Problem{hangs}}
	}
	var samples []metrics.Sample
	if s.thin != nil {
		samples = append(samples, metrics.PoolThinData.At(s.thin.Data, node, name), metrics.PoolThinMetadata.At(s.thin.Metadata, node, name))
	}
	up := s.capacity != nil
	said := map[problem]bool{}
	for _, one := range s.problems {
		if one.Severity >= blockdev.Inaccessible && one.Reason != "PoolFull" { // one that is full serves what it has
			up = false
		}
		if key := (problem{one.Severity, one.Reason}); !said[key] {
			said[key] = true
			samples = append(samples, metrics.PoolProblems.At(1, node, name, one.Severity.String(), one.Reason))
		}
	}
	samples = append(samples, metrics.PoolUp.Is(up, node, name, p.Kind))
	if c := s.capacity; c != nil {
		samples = append(samples, metrics.PoolTotal.At(float64(c.Total), node, name), metrics.PoolPromised.At(float64(c.Promised), node, name),
			metrics.PoolAvailable.At(float64(c.Available), node, name), metrics.PoolUsed.At(float64(c.Used), node, name),
			metrics.PoolVolumes.At(float64(s.volumes), node, name), metrics.PoolExports.At(float64(s.exports), node, name), metrics.PoolSnapshots.At(float64(s.snapshots), node, name))
	}
	return samples
}

// volumeSamples says how the volumes were when all were looked at last, which may take its time.
func (p *pool) volumeSamples(node string, patience <-chan struct{}) []metrics.Sample {
	v, known, _ := p.volumes.get(patience)
	if !known || v.failed {
		return nil
	}
	name := p.Name()
	var samples []metrics.Sample
	for what, n := range v.problems {
		samples = append(samples, metrics.VolumeProblems.At(float64(n), node, name, what.severity.String(), what.reason))
	}
	for _, one := range v.each {
		labels := []string{node, name, one.ID.String(), one.For.Namespace, one.For.Name}
		samples = append(samples, metrics.VolumeSize.At(float64(one.Size), labels...))
		if one.used >= 0 {
			samples = append(samples, metrics.VolumeUsed.At(float64(one.used), labels...))
		}
	}
	return samples
}
