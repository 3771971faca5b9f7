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

// TellAway writes down, until ctx ends, which volumes of other nodes that are used here wait for these, and since when. away are all of them
// (remotepool.Pool). That one does not any more is written down as well.
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
	var used v1alpha1.VolumeList
	if err := a.others.kube.Cache.List(ctx, &used); err != nil {
		return err
	}
	var failures []error
	for i := range used.Items {
		v := &used.Items[i]
		e, before := v.Status.Export, v.DeepCopy()
		since, is := now[blockdev.Ref{Kind: blockdev.Volume, Key: v.Name}]
		switch {
		case e == nil || e.Node != a.local.Node():
			continue
		case is && e.Away == nil && time.Since(since) >= least:
			e.Away = new(metav1.NewTime(since))
		case !is && e.Away != nil:
			e.Away = nil
		default:
			continue
		}
		if err := kube.IgnoreConflict(a.statusOf(v).Patch(ctx, v, kube.LockingPatch(before))); err != nil {
			failures = append(failures, fmt.Errorf("volume %s: %w", cluster.VolumeID(v), err))
		}
	}
	return errors.Join(failures...)
}
