package page

import (
	"context"
	"crypto/sha256"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/internal/runbook"
)

const gib = int64(1) << 30

// noon is the time of all made-up overviews.
var noon = time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)

func problem(severity overview.Severity, reason, message string, kind, name string) overview.Problem {
	return overview.Problem{Severity: severity, Reason: reason, Message: message, Subject: overview.Subject{Kind: kind, Name: name}, Runbook: runbook.URL(reason)}
}

func volumeID(pool string, n int) string {
	key := sha256.Sum256([]byte(strconv.Itoa(n)))
	return fmt.Sprintf("vol.%s.%x", pool, key[:16])
}

// small returns a cluster of three nodes with a pool that is nearly full, a missing disk and a damaged volume.
func small() *overview.Overview {
	o := &overview.Overview{Taken: noon, Cluster: true, Driver: "block.csi.ashlar.dev", Version: "v0.4.0"}
	o.Nodes = []overview.Node{
		{Name: "worker-1", Ready: true, Pools: []overview.Pool{
			{Node: "worker-1", Name: "default", Kind: "file", Default: true, UUID: "5a1e6c1e-6f3c-4c1b-9b30-2a60f3f1d5a1", Total: 894 * gib, Promised: 412 * gib, Available: 482 * gib, MaxVolume: 482 * gib, Used: 187 * gib},
			{Node: "worker-1", Name: "fast", Kind: "lvmthin", UUID: "0c7e54b1-3f8e-4c55-8a5c-63bd1f6de011", Total: 1788 * gib, Promised: 1702 * gib, Available: 86 * gib, MaxVolume: 86 * gib, Used: 971 * gib, Problems: []overview.Problem{
				problem(overview.Warning, "PoolNearlyFull", "95 % of what it may promise is taken; delete volumes or snapshots, or grow it, before new volumes are refused", "Pool", "worker-1.fast")}}}},
		{Name: "worker-2", Ready: true, Pools: []overview.Pool{
			{Node: "worker-2", Name: "default", Kind: "file", Default: true, UUID: "e2f3c9a4-8a13-4a53-94d8-6f7ad9f4a0e2", Total: 894 * gib, Promised: 655 * gib, Available: 239 * gib, MaxVolume: 239 * gib, Used: 402 * gib,
				Strays: []overview.Stray{{ID: volumeID("default", 900), Name: "pvc-6b1f8a70", Claim: &overview.Ref{Namespace: "shop", Name: "reports"}, Size: 20 * gib}}, StrayCount: 1}}},
		{Name: "worker-3", Ready: true, Pools: []overview.Pool{
			{Node: "worker-3", Name: "default", Kind: "file", Default: true, UUID: "77b04f5f-9f93-4e52-bf3c-81a80aeb33b7", Total: 894 * gib, Promised: 240 * gib, Available: 654 * gib, MaxVolume: 654 * gib, Used: 121 * gib},
			{Node: "worker-3", Name: "fast", Kind: "lvm", UUID: "c1f9a0fd-64b2-4a4a-8a4d-98b6a3d4b9e4", Total: 1788 * gib, Promised: 600 * gib, Available: 0, MaxVolume: 0, Used: 600 * gib, Problems: []overview.Problem{
				problem(overview.Inaccessible, "DeviceMissing", "volume group fast lacks a physical volume; bring the disk back, or give it up with vgreduce", "Pool", "worker-3.fast")}}}},
	}
	used := func(n int64) *int64 { return &n }
	add := func(namespace, claim, pod, node, pool, filesystem string, size, taken int64) *overview.Volume {
		n := len(o.Volumes)
		v := overview.Volume{ID: volumeID(pool, n), Name: fmt.Sprintf("pvc-%08x-4c1e-4b8a-9d55-%012x", 0x3c9dd41b+n*40503, 0x2a60f3f1d5a1+n*91193), Node: node, Pool: pool,
			Size: size, Used: used(taken), Filesystem: filesystem, Thin: pool == "fast", Created: noon.Add(-time.Duration(n+3) * 31 * time.Hour),
			Claim: &overview.Ref{Namespace: namespace, Name: claim}, State: overview.Ready}
		v.PersistentVolume = v.Name
		if pod != "" {
			v.Pods, v.Published = []overview.Ref{{Namespace: namespace, Name: pod}}, node
		}
		o.Volumes = append(o.Volumes, v)
		return &o.Volumes[n]
	}
	for i := range 3 {
		node := fmt.Sprintf("worker-%d", i+1)
		add("shop", fmt.Sprintf("data-postgres-%d", i), fmt.Sprintf("postgres-%d", i), node, "default", "xfs", 100*gib, int64(38+7*i)*gib)
		add("monitoring", fmt.Sprintf("prometheus-%d", i), fmt.Sprintf("prometheus-%d", i), node, "default", "ext4", 50*gib, int64(21+3*i)*gib)
		add("search", fmt.Sprintf("data-opensearch-%d", i), fmt.Sprintf("opensearch-%d", i), node, []string{"fast", "default", "fast"}[i], "xfs", 300*gib, int64(140+31*i)*gib)
	}
	id := o.Volumes[8].ID
	o.Volumes[8].Problems = []overview.Problem{problem(overview.Inaccessible, "DeviceMissing", "a physical volume under fast/"+id+" is missing; bring the disk back, or restore the volume from a backup", "Volume", id)}
	damaged := add("shop", "media", "media-7c9f9d6d5-x2xkq", "worker-2", "default", "ext4", 200*gib, 66*gib)
	damaged.Problems = []overview.Problem{problem(overview.DataLoss, "ImageTruncated", "its image is 187 GiB and its record says 200 GiB; restore it from a backup, or delete it", "Volume", damaged.ID)}
	damaged.State = overview.Lost
	cache := add("build", "cache", "", "worker-1", "fast", "ext4", 80*gib, 12*gib)
	cache.Used = nil
	copied := add("staging", "data-postgres-0", "", "worker-1", "default", "xfs", 100*gib, 17*gib)
	copied.State, copied.Source, copied.Progress = overview.Making, o.Volumes[0].ID, &overview.Progress{Done: 17 * gib, Total: 38 * gib}
	raw := add("vms", "disk-gitlab", "virt-launcher-gitlab-8z6hq", "worker-3", "fast", "", 120*gib, 120*gib)
	raw.Thin = false
	for i := range 4 {
		o.Snapshots = append(o.Snapshots, overview.Snapshot{ID: fmt.Sprintf("snap.default.%032x", 0x51ab7f00+i*7919), Name: fmt.Sprintf("snapshot-nightly-%d", 20+i), Node: "worker-1", Pool: "default",
			Source: o.Volumes[0].ID, Size: 100 * gib, Created: noon.Add(-time.Duration(24*(3-i)+9) * time.Hour), State: overview.Ready})
	}
	o.Snapshots[3].State, o.Snapshots[3].Progress = overview.Making, &overview.Progress{Done: 31 * gib, Total: 38 * gib}
	o.Finish()
	return o
}

// large returns a cluster with many volumes, on nodes of two pools with 100 volumes each. Each 50th volume has a problem.
func large(volumes int) *overview.Overview {
	o := &overview.Overview{Taken: noon, Cluster: true, Driver: "block.csi.ashlar.dev", Version: "v0.4.0"}
	for n := range volumes / 200 {
		node := overview.Node{Name: fmt.Sprintf("node-%04d", n), Ready: true}
		for _, name := range []string{"default", "fast"} {
			node.Pools = append(node.Pools, overview.Pool{Node: node.Name, Name: name, Kind: "file", Default: name == "default", Total: 2000 * gib, Promised: 1000 * gib, Available: 1000 * gib, MaxVolume: 1000 * gib, Used: 500 * gib})
		}
		o.Nodes = append(o.Nodes, node)
	}
	for n := range volumes {
		pool := []string{"default", "fast"}[n%2]
		taken := int64(n%10) * gib
		v := overview.Volume{ID: volumeID(pool, n), Name: fmt.Sprintf("pvc-%08x", n*40503), Node: fmt.Sprintf("node-%04d", n/200), Pool: pool, Size: 10 * gib, Used: &taken, Filesystem: "ext4",
			Created: noon.Add(-time.Duration(n) * time.Minute), Claim: &overview.Ref{Namespace: fmt.Sprintf("team-%d", n%37), Name: fmt.Sprintf("data-%05d", n)},
			Pods: []overview.Ref{{Namespace: fmt.Sprintf("team-%d", n%37), Name: fmt.Sprintf("pod-%05d", n)}}, State: overview.Ready}
		if n%50 == 0 {
			v.Problems = []overview.Problem{problem(overview.Degraded, "FilesystemErrors", "the kernel found errors in its filesystem; unmount it and run fsck", "Volume", v.ID)}
		}
		if n%4 == 0 {
			o.Snapshots = append(o.Snapshots, overview.Snapshot{ID: fmt.Sprintf("snap.%s.%032x", pool, n), Name: fmt.Sprintf("snapshot-%d", n), Node: v.Node, Pool: pool, Source: v.ID, Size: v.Size, Created: noon, State: overview.Ready})
		}
		o.Volumes = append(o.Volumes, v)
	}
	o.Finish()
	return o
}

// madeUp is a source whose overview a test sets.
type madeUp struct {
	mu       sync.Mutex
	overview *overview.Overview
	err      error
	taken    int                        // how often an overview was taken
	watching map[chan struct{}]struct{} // one for each follower
}

func (m *madeUp) Overview(context.Context) (*overview.Overview, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.taken++
	return m.overview, m.err
}

func (m *madeUp) Changes(ctx context.Context) <-chan struct{} {
	changes := make(chan struct{}, 1)
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.watching == nil {
		m.watching = map[chan struct{}]struct{}{}
	}
	m.watching[changes] = struct{}{}
	context.AfterFunc(ctx, func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(m.watching, changes)
	})
	return changes
}

// set sets the overview, or the error, and reports a change.
func (m *madeUp) set(o *overview.Overview, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.overview, m.err = o, err
	for changes := range m.watching {
		select {
		case changes <- struct{}{}:
		default:
		}
	}
}

// counts returns how often an overview was taken, and the number of followers.
func (m *madeUp) counts() (taken, watching int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.taken, len(m.watching)
}
