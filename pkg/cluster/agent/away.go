package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
)

// AwayPause is how often TellAway looks, and how long a home does not answer before that is told: a cable that is replugged is no news.
const AwayPause = 10 * time.Second

// TellAway writes down, until ctx ends, which volumes of other nodes that are used here, also by one who reads beside others, wait for these, and since when.
// away are all of them (remotepool.Pool). That one does not any more is written down as well.
func (a *Agent) TellAway(ctx context.Context, away func() (map[blockdev.Ref]time.Time, error), pause time.Duration) {
	ticks := time.NewTicker(pause)
	defer ticks.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticks.C:
			if err := a.tellAway(ctx, away, pause); err != nil && ctx.Err() == nil {
				klog.FromContext(ctx).V(2).Info("Could not write down which volumes of other nodes wait for these; trying again", "err", err.Error())
			}
		}
	}
}

func (a *Agent) tellAway(ctx context.Context, away func() (map[blockdev.Ref]time.Time, error), least time.Duration) error {
	now, err := away()
	if err != nil || !a.others.read.Load() {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, homeTime)
	defer cancel()
	used, err := a.allUsedHere(ctx)
	if err != nil {
		return err
	}
	var failures []error
	for i := range used {
		v := &used[i]
		before := v.DeepCopy()
		since, is := now[blockdev.Ref{Kind: blockdev.Volume, Key: v.Name}]
		if !setAway(v, a.local.Node(), since, is, least) {
			continue
		}
		if err := kube.IgnoreConflict(a.kube.Client.Status().Patch(ctx, v, kube.LockingPatch(before))); err != nil {
			failures = append(failures, fmt.Errorf("volume %s: %w", cluster.VolumeID(v), err))
		}
	}
	return errors.Join(failures...)
}

// setAway has the object of a volume say that its node does not answer another one, which it is given to, or that it does; and reports whether that
// changes it. What has not lasted for long is not said.
func setAway(v *v1alpha1.Volume, node string, since time.Time, is bool, least time.Duration) (changed bool) {
	given := []*v1alpha1.Export{v.Status.Export}
	for i := range v.Status.Readers {
		given = append(given, &v.Status.Readers[i])
	}
	for _, e := range given {
		switch {
		case e == nil || e.Node != node:
		case is && e.Away == nil && time.Since(since) >= least:
			e.Away, changed = new(metav1.NewTime(since)), true
		case !is && e.Away != nil:
			e.Away, changed = nil, true
		}
	}
	return changed
}
