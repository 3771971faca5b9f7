package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Pool is a pool of the agent's node.
type Pool struct {
	blockdev.Pool
	Kind string // of storage, as it is shown to people
}

// When pools are measured and reported.
const (
	quiet    = time.Second     // after a change: until nothing has changed for this long
	latest   = 5 * time.Second // after a change: no later than this
	drift    = time.Minute     // without a change: others may have filled the pool's filesystem
	driftOf  = 100             // changes by others count from the 100th part of the pool on
	poolWait = 5 * time.Second // after an error, and while a pool is not there or a leftover is in use

	usedPause = 5 * time.Minute // least time between two writes of a change of status.used alone
)

// reportPools keeps the objects of the node's pools up to date until the context ends. It fails with ErrPrecondition if the objects are another driver's, or
// a pool has another identity than its object: then the agent ends, and the next start does not use that pool.
func (a *Agent) reportPools(ctx context.Context) error {
	for exact := true; ctx.Err() == nil; {
		err := a.writePools(ctx, exact)
		if errors.Is(err, errdefs.ErrPrecondition) {
			return err
		}
		if err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Could not report the pools; trying again")
		}
		select {
		case <-ctx.Done():
		case <-time.After(a.poolPause(err)):
			exact = err != nil
		case <-a.changed:
			exact = true
			a.gatherChanges(ctx)
		}
	}
	return nil
}

// poolPause returns how long to wait for the next report if nothing changes. err is that of the last one.
func (a *Agent) poolPause(err error) time.Duration {
	if err != nil || a.leftBusy || slices.ContainsFunc(a.options.Pools, func(p Pool) bool { return blockdev.Unwrap(p.Pool) == nil }) {
		return poolWait // asking a pool that is not there looks for it
	}
	return drift
}

// gatherChanges waits until nothing has changed for quiet, but for latest at most.
func (a *Agent) gatherChanges(ctx context.Context) {
	limit := time.After(latest)
	for {
		select {
		case <-a.changed:
		case <-ctx.Done():
			return
		case <-time.After(quiet):
			return
		case <-limit:
			return
		}
	}
}

// writePools reports all pools. With exact small changes of their figures are written too.
func (a *Agent) writePools(ctx context.Context, exact bool) error {
	a.leftBusy = false
	failures := []error{a.retirePools(ctx)} // first, so that there are never two default pools
	for i := range a.options.Pools {
		failures = append(failures, a.writePool(ctx, i, exact))
	}
	return errors.Join(failures...)
}

// declarePool writes the spec of a pool's object: the options of the agent, and the pool's identity. ErrPrecondition if the object is another driver's, or
// has another identity (identityOf).
func (a *Agent) declarePool(ctx context.Context, i int) (*v1alpha1.Pool, error) {
	pool := a.options.Pools[i]
	spec := v1alpha1.PoolSpec{NodeName: a.local.Node(), Pool: pool.Name(), Default: i == 0, MaxVolumes: a.options.MaxVolumes, Driver: a.options.Driver}
	name := overview.PoolName(spec.NodeName, spec.Pool)
	o, there, id, err := a.identifyPool(ctx, name, pool)
	if err != nil {
		return nil, err
	}
	spec.UUID = id
	if !there {
		o = &v1alpha1.Pool{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: spec}
		if err := a.kube.Client.Create(ctx, o); err != nil {
			return nil, fmt.Errorf("create pool %s: %w", name, err)
		}
		return o, nil
	}
	return o, a.updatePool(ctx, o, spec)
}

// identifyPool returns the object of a pool, if it is there, and the identity to write into it (identityOf).
func (a *Agent) identifyPool(ctx context.Context, name string, pool Pool) (o *v1alpha1.Pool, there bool, id string, err error) {
	o, there, err = get(ctx, a, name, &v1alpha1.Pool{})
	if err != nil {
		return nil, false, "", err
	}
	if id, err = identityOf(pool.Pool, o.Spec.UUID); err == nil {
		return o, there, id, nil
	}
	// The cache may not have yet that somebody allowed another identity.
	if o, there, err = poolNow(ctx, a.kube.Live, name); err == nil {
		id, err = identityOf(pool.Pool, o.Spec.UUID)
	}
	return o, there, id, err
}

// updatePool changes the spec of a pool's object. An object of another driver is taken over only if the cluster is this driver's (cluster.CheckOwner).
func (a *Agent) updatePool(ctx context.Context, o *v1alpha1.Pool, spec v1alpha1.PoolSpec) error {
	if o.Spec == spec {
		return nil
	}
	if cluster.DriverOf(o) != a.options.Driver {
		if err := cluster.CheckOwner(ctx, a.kube.Live, a.options.Driver); err != nil {
			return err
		}
	}
	before := o.DeepCopy()
	o.Spec = spec
	if err := a.kube.Client.Patch(ctx, o, kube.LockingPatch(before)); err != nil {
		return fmt.Errorf("update pool %s: %w", o.Name, err)
	}
	return nil
}

// poolNow reads the object of a pool at the API server.
func poolNow(ctx context.Context, live client.Reader, name string) (o *v1alpha1.Pool, there bool, err error) {
	var pools v1alpha1.PoolList
	if err := live.List(ctx, &pools, client.MatchingFields{"metadata.name": name}); err != nil {
		return nil, false, kube.APIError("read pool "+name, err)
	}
	if len(pools.Items) == 0 {
		return &v1alpha1.Pool{}, false, nil
	}
	return &pools.Items[0], true, nil
}

// identityOf returns the identity to write into the object of a pool. That is the pool's own, if written is empty, the same, or v1alpha1.NewPool;
// ErrPrecondition if written is another one. It is written if the pool has none, or is not there.
func identityOf(pool blockdev.Pool, written string) (string, error) {
	var have string
	if is, ok := blockdev.As[blockdev.Identified](pool); ok {
		have = is.ID()
	}
	switch {
	case have == "", have == written:
		return written, nil
	case written == "", written == v1alpha1.NewPool:
		return have, nil
	}
	return "", fmt.Errorf("%w: pool %s has the identity %s, and its object says %s; whoever has replaced the disk on purpose changes spec.uuid of the object", errdefs.ErrPrecondition, pool.Name(), have, written)
}

// writePool measures pool number i, adopts what its object asks for, and writes its status if that is news (isNews). Without exact small changes of its
// figures are left out.
func (a *Agent) writePool(ctx context.Context, i int, exact bool) error {
	pool := a.options.Pools[i]
	m := measure(ctx, pool)
	o, err := a.declarePool(ctx, i) // before the status says that it has room
	if err != nil {
		return err
	}
	before := o.DeepCopy()
	var strays []stray
	var refused error
	open := blockdev.Unwrap(pool.Pool) != nil
	if open {
		if strays, err = a.strays(ctx, pool); err != nil {
			return err
		}
		strays, refused = a.adopt(ctx, o, strays)
	}
	m.report(o, before.Status, exact)
	o.Status.Agent, o.Status.Network, o.Status.Encryption, o.Status.Limits = a.options.Endpoint, a.network(), a.schemes(), a.limits()
	if open { // else what was reported last stays: nobody can look
		reportStrays(o, strays)
	}
	cluster.SummarizePool(o)
	if !m.isNews(before.Status, o.Status) {
		return refused
	}
	o.Status.Measured = &m.at
	if err := a.kube.Client.Status().Patch(ctx, o, client.MergeFrom(before)); err != nil {
		return errors.Join(refused, fmt.Errorf("report pool %s: %w", o.Name, err))
	}
	return refused
}

// network returns the network of this node as its pools report it; nil: it is in none.
func (a *Agent) network() *v1alpha1.Network {
	if a.options.Network == nil {
		return nil
	}
	network := *a.options.Network
	network.Mirrors = a.mirrors()
	return &network
}

// schemes returns the schemes by which volumes of the node can be encrypted.
func (a *Agent) schemes() (names []string) {
	if a.options.Schemes != nil {
		for _, scheme := range a.options.Schemes() {
			names = append(names, string(scheme))
		}
	}
	return names
}

// limits returns whether the node can enforce limits of I/O; nil: that is not told.
func (a *Agent) limits() *bool {
	if a.options.Limits == nil {
		return nil
	}
	return new(a.options.Limits())
}

// measurement is what was measured of a pool at one time.
type measurement struct {
	pool     Pool
	at       metav1.MicroTime
	capacity blockdev.Capacity // zero if it could not be measured
	problems []blockdev.Problem
}

func measure(ctx context.Context, pool Pool) measurement {
	m := measurement{pool: pool, at: metav1.NowMicro()}
	var err error
	m.capacity, err = pool.Capacity(ctx)
	m.problems = pool.PoolHealth(ctx)
	if err != nil {
		m.capacity = blockdev.Capacity{}
		if len(m.problems) == 0 {
			m.problems = []blockdev.Problem{{Severity: blockdev.Inaccessible, Reason: poolUnavailable, Message: errdefs.Words(err)}}
		}
	}
	return m
}

// report sets the status of a pool's object to the measurement. last is what was written before: without exact, figures that differ little from it stay as
// there.
func (m measurement) report(o *v1alpha1.Pool, last v1alpha1.PoolStatus, exact bool) {
	s, c := &o.Status, m.capacity
	s.Kind, s.Granularity = m.pool.Kind, m.pool.Granularity()
	s.Total, s.Promised, s.Available, s.MaxVolume, s.MinVolume = c.Total, c.Promised, c.Available, c.MaxVolume, c.MinVolume
	if !exact && last.Promised == c.Promised && max(abs(last.Available-c.Available), abs(last.Total-c.Total)) < c.Total/driftOf {
		s.Total, s.Available, s.MaxVolume = last.Total, last.Available, last.MaxVolume
	}
	s.Used = c.Used
	setHealth(&s.Conditions, &s.Health, o, m.problems)
}

// isNews reports whether a status is worth a write. status.used alone, which changes with each write to a thin volume, is if it has changed by a 100th of the
// pool and the last write is usedPause ago.
func (m measurement) isNews(last, now v1alpha1.PoolStatus) bool {
	used := abs(now.Used - last.Used)
	now.Used, now.Summary.Used = last.Used, last.Summary.Used
	if !equality.Semantic.DeepEqual(last, now) {
		return true
	}
	return used > 0 && used >= now.Total/driftOf && (last.Measured == nil || m.at.Sub(last.Measured.Time) >= usedPause)
}

func abs(n int64) int64 { return max(n, -n) }

// retirePools updates the objects of pools that the agent was started without: they have no room, and the problem NotConfigured. It also takes spec.default
// off all but the first pool, and keeps spec.maxVolumes the same in all objects.
func (a *Agent) retirePools(ctx context.Context) error {
	var pools v1alpha1.PoolList
	if err := a.kube.Client.List(ctx, &pools); err != nil {
		return err
	}
	var failures []error
	for i := range pools.Items {
		o := &pools.Items[i]
		at := slices.IndexFunc(a.options.Pools, func(p Pool) bool { return o.Name == overview.PoolName(a.local.Node(), p.Name()) })
		before := o.DeepCopy()
		o.Spec.Default = o.Spec.Default && at == 0
		if at < 0 {
			o.Spec.MaxVolumes = a.options.MaxVolumes
		}
		if o.Spec != before.Spec {
			if err := a.kube.Client.Patch(ctx, o, client.MergeFrom(before)); err != nil {
				failures = append(failures, fmt.Errorf("update pool %s: %w", o.Name, err))
				continue
			}
			before = o.DeepCopy()
		}
		if at >= 0 {
			continue
		}
		o.Status = v1alpha1.PoolStatus{Kind: o.Status.Kind, Measured: o.Status.Measured, Conditions: o.Status.Conditions, Health: o.Status.Health}
		setHealth(&o.Status.Conditions, &o.Status.Health, o, []blockdev.Problem{{Severity: blockdev.Inaccessible, Reason: cluster.ReasonNotConfigured,
			Message: "the node was started without this pool: start it with the pool again, or delete this object if nothing of it is needed any more"}})
		cluster.SummarizePool(o)
		if !equality.Semantic.DeepEqual(before.Status, o.Status) {
			failures = append(failures, a.kube.Client.Status().Patch(ctx, o, client.MergeFrom(before)))
		}
	}
	return errors.Join(failures...)
}
