package cluster

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
)

// How the figures of pools are batched: they are written after a second in which nothing
// changed, at the latest after a few.
const (
	quiet    = time.Second
	latest   = 5 * time.Second
	drift    = time.Minute // how often it is looked whether others filled the pool's filesystem
	driftOf  = 100         // changes by others count from one part in so many of the pool on
	poolWait = 5 * time.Second
)

// PoolName is the name of the object of a pool.
func PoolName(node, pool string) string { return node + "." + pool }

// reportPools keeps the objects of the node's pools up to date until the context ends.
func (a *Agent) reportPools(ctx context.Context) {
	exact := true
	for {
		err := a.writePools(ctx, exact)
		var wait <-chan time.Time
		if err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Could not report the pools; trying again")
			wait = time.After(poolWait)
		} else {
			wait = time.After(drift)
		}
		select {
		case <-ctx.Done():
			return
		case <-wait:
			exact = err != nil
			continue
		case <-a.changed:
			exact = true
		}
		limit := time.After(latest)
		for settled := false; !settled; {
			select {
			case <-ctx.Done():
				return
			case <-a.changed:
			case <-time.After(quiet):
				settled = true
			case <-limit:
				settled = true
			}
		}
	}
}

func (a *Agent) writePools(ctx context.Context, exact bool) error {
	var failures []error
	for i := range a.pools {
		failures = append(failures, a.writePool(ctx, i, exact))
	}
	return errors.Join(append(failures, a.retire(ctx))...)
}

// writePool writes how a pool is, if it is not what was written. With exact false it lets
// small changes be.
func (a *Agent) writePool(ctx context.Context, i int, exact bool) error {
	pool := a.pools[i]
	spec := v1alpha1.PoolSpec{NodeName: a.local.Node(), Pool: pool.Name(), Default: i == 0, MaxVolumes: a.maxVolumes}
	name := PoolName(spec.NodeName, spec.Pool)
	o, there, err := get(ctx, a, name, &v1alpha1.Pool{})
	if err != nil {
		return err
	}
	if !there {
		o = &v1alpha1.Pool{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: spec}
		if err := a.client.Create(ctx, o); err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("create pool %s: %w", name, err)
		}
	} else if o.Spec != spec {
		before := o.DeepCopy()
		o.Spec = spec
		if err := a.client.Patch(ctx, o, client.MergeFrom(before)); err != nil {
			return fmt.Errorf("update pool %s: %w", name, err)
		}
	}
	before := o.DeepCopy()
	measured := metav1.NowMicro()
	c, err := pool.Capacity(ctx)
	problems := pool.PoolHealth(ctx)
	if err != nil {
		c = blockdev.Capacity{}
		if len(problems) == 0 {
			problems = []blockdev.Problem{{Severity: blockdev.Inaccessible, Reason: "PoolUnavailable", Message: err.Error()}}
		}
	}
	var strays []string
	if blockdev.There(pool.Pool) != nil {
		if strays, err = a.strays(ctx, pool); err != nil {
			return err
		}
	}
	s := &o.Status
	s.Kind, s.Total, s.Promised, s.Available, s.MaxVolume, s.MinVolume = pool.Kind, c.Total, c.Promised, c.Available, c.MaxVolume, c.MinVolume
	s.Granularity = pool.Granularity()
	if !exact && before.Status.Promised == c.Promised && abs(before.Status.Available-c.Available) < c.Total/driftOf {
		s.Total, s.Available, s.MaxVolume = before.Status.Total, before.Status.Available, before.Status.MaxVolume
	}
	healthy, reason, message := metav1.ConditionTrue, "NoProblems", ""
	for _, p := range problems {
		healthy, reason = metav1.ConditionFalse, p.Reason
		message = strings.TrimPrefix(message+"; "+p.Message, "; ")
	}
	setCondition(&s.Conditions, o, v1alpha1.Healthy, healthy, reason, limited(message))
	accounted, reason, message := metav1.ConditionTrue, "AllKnown", ""
	if len(strays) > 0 {
		accounted, reason = metav1.ConditionFalse, "Strays"
		message = "no object says what these are for; nothing removes them: " + strings.Join(strays, ", ")
	}
	setCondition(&s.Conditions, o, v1alpha1.Accounted, accounted, reason, limited(message))
	if equality.Semantic.DeepEqual(before.Status, o.Status) {
		return nil
	}
	s.Measured = &measured
	if err := a.client.Status().Patch(ctx, o, client.MergeFrom(before)); err != nil {
		return fmt.Errorf("report pool %s: %w", name, err)
	}
	return nil
}

func abs(n int64) int64 { return max(n, -n) }

// strays are volumes and snapshots of a pool that no object is for. Ephemeral volumes are
// the node's own.
func (a *Agent) strays(ctx context.Context, pool blockdev.Pool) ([]string, error) {
	var strays []string
	for _, kind := range []blockdev.Kind{blockdev.Volume, blockdev.Snapshot} {
		records, err := pool.List(ctx, kind, "", 0)
		if err != nil {
			return nil, err
		}
		for _, r := range records {
			var o client.Object = &v1alpha1.Volume{}
			if kind == blockdev.Snapshot {
				o = &v1alpha1.Snapshot{}
			}
			err := a.cache.Get(ctx, client.ObjectKey{Name: r.Key}, o)
			if err == nil {
				continue
			}
			if !apierrors.IsNotFound(err) {
				return nil, err
			}
			if kind == blockdev.Volume {
				if _, err := a.local.Ephemeral(ctx, r.Name); err == nil {
					continue
				}
			}
			// It may have been deleted since the list.
			if _, err := pool.Get(ctx, r.Ref); err == nil {
				strays = append(strays, r.Ref.String())
			}
		}
	}
	return strays, nil
}

// retire takes the room from objects of pools that the node does not have any more.
func (a *Agent) retire(ctx context.Context) error {
	var pools v1alpha1.PoolList
	if err := a.client.List(ctx, &pools); err != nil {
		return err
	}
	var failures []error
	for i := range pools.Items {
		o := &pools.Items[i]
		known := false
		for _, pool := range a.pools {
			known = known || o.Name == PoolName(a.local.Node(), pool.Name())
		}
		if known {
			continue
		}
		before := o.DeepCopy()
		o.Status = v1alpha1.PoolStatus{Kind: o.Status.Kind, Measured: o.Status.Measured, Conditions: o.Status.Conditions}
		setCondition(&o.Status.Conditions, o, v1alpha1.Healthy, metav1.ConditionFalse, "NotConfigured", "the node was started without this pool")
		if !equality.Semantic.DeepEqual(before.Status, o.Status) {
			failures = append(failures, a.client.Status().Patch(ctx, o, client.MergeFrom(before)))
		}
	}
	return errors.Join(failures...)
}
