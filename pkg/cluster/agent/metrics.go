package agent

import (
	"context"
	"maps"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/metrics"
)

// gauges is what the agent remembers for its metrics.
type gauges struct {
	mu     sync.Mutex
	queues []interface{ Len() int }
	since  map[revision]time.Time // those that are not carried out, and since when

	mirrors  map[string]int64 // by key of a volume that moves while it is used: how many bytes were mirrored at the last look
	mirrored int64            // bytes that were mirrored since the start, of all volumes
}

// revision is one generation of an object's spec.
type revision struct {
	uid        types.UID
	generation int64
}

func (m *gauges) add(queue interface{ Len() int }) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.queues = append(m.queues, queue)
}

// Samples: see metrics.Source. It reads the cache, and asks the API server for nothing.
func (a *Agent) Samples() []metrics.Sample {
	if !a.read.Load() {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), metrics.ScrapeTime)
	defer cancel()
	node := a.local.Node()
	objects, err := cluster.Cached(ctx, a.kube.Cache)
	if err != nil {
		return nil // the cache has stopped
	}
	var samples []metrics.Sample
	for i := range a.options.Pools {
		name := a.options.Pools[i].Name()
		for _, o := range objects.Pools {
			if o.Name == overview.PoolName(node, name) {
				samples = append(samples, metrics.PoolStrays.At(float64(o.Status.StrayCount), node, name))
			}
		}
	}
	samples = append(samples, a.unserved(objects)...)
	var open []cluster.Object
	for i := range objects.Volumes {
		if v := &objects.Volumes[i]; !carriedOut(v) && !a.copies(v) {
			open = append(open, v)
		}
	}
	for i := range objects.Snapshots {
		if s := &objects.Snapshots[i]; !carriedOutSnapshot(s) && !a.copies(s) {
			open = append(open, s)
		}
	}
	mirrors, mirrored := a.gauges.mirroring()
	return append(samples, metrics.MirrorsInProgress.At(float64(mirrors), node), metrics.MirroredBytes.At(float64(mirrored), node),
		metrics.AgentQueueLength.At(float64(a.gauges.length()), node),
		metrics.AgentOldestRequest.At(a.gauges.oldest(open, time.Now()).Seconds(), node))
}

// unserved returns samples of the pools that the agent was started without, and that objects say to be in: no other source has them.
func (a *Agent) unserved(objects cluster.Objects) (samples []metrics.Sample) {
	node, said := a.local.Node(), map[string]bool{}
	for i := range a.options.Pools {
		said[a.options.Pools[i].Name()] = true
	}
	kinds := map[string]string{}
	for i := range objects.Pools {
		if p := &objects.Pools[i]; p.Spec.NodeName == node {
			kinds[p.Spec.Pool] = p.Status.Kind
		}
	}
	say := func(o cluster.Object) {
		if pool := o.In(); o.Node() == node && !said[pool] {
			said[pool] = true
			samples = append(samples, metrics.PoolUp.Is(false, node, pool, kinds[pool]),
				metrics.PoolProblems.At(1, node, pool, blockdev.Inaccessible.String(), cluster.ReasonNotConfigured))
		}
	}
	for i := range objects.Volumes {
		say(&objects.Volumes[i])
	}
	for i := range objects.Snapshots {
		say(&objects.Snapshots[i])
	}
	return samples
}

// mirror notes how many bytes of a volume are mirrored (synced, of total), and returns how many more that is than at the last look; 0 at the first look. A
// volume that is all mirrored is forgotten.
func (m *gauges) mirror(key string, synced, total int64) (copied int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if was, known := m.mirrors[key]; known {
		copied = max(0, synced-was)
		m.mirrored += copied
	}
	if delete(m.mirrors, key); synced < total {
		if m.mirrors == nil {
			m.mirrors = map[string]int64{}
		}
		m.mirrors[key] = synced
	}
	return copied
}

// mirroring returns how many volumes are being mirrored, and how many bytes were mirrored since the start.
func (m *gauges) mirroring() (volumes int, bytes int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.mirrors), m.mirrored
}

func (m *gauges) length() (n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, queue := range m.queues {
		n += queue.Len()
	}
	return n
}

// oldest returns the age of the oldest spec of open, the objects that are not carried out; 0 if there are none. Objects do not say when their spec was
// changed, so a change counts from when it was first seen here.
func (m *gauges) oldest(open []cluster.Object, now time.Time) (age time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	first := map[revision]time.Time{}
	for _, o := range open {
		key := revision{o.GetUID(), o.GetGeneration()}
		since, known := m.since[key]
		switch {
		case known:
		case o.GetDeletionTimestamp() != nil:
			since = o.GetDeletionTimestamp().Time
		case o.Common().Created == nil && !o.Deleting():
			since = o.GetCreationTimestamp().Time
		default:
			since = now
		}
		first[key] = since
		age = max(age, now.Sub(since))
	}
	m.since = first
	return age
}

// carriedOut reports whether the spec of a volume is carried out or refused.
func carriedOut(v *v1alpha1.Volume) bool {
	switch {
	case v1alpha1.Going(v):
		return false
	case v.Common().Refused(v.Generation) != nil:
		return true
	}
	return v.Status.Created != nil && v.Status.Size >= v.Spec.Size && maps.Equal(v.Status.Mutable, v.Spec.Mutable)
}

func carriedOutSnapshot(s *v1alpha1.Snapshot) bool {
	return !v1alpha1.Going(s) && (s.Status.Created != nil || s.Common().Refused(s.Generation) != nil)
}

// copies reports whether the bytes of an object are being copied or zeroed.
func (a *Agent) copies(o cluster.Object) bool {
	_, copying := a.progress(o)
	return copying
}
