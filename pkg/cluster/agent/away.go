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

// AwayEvery is how often ReportAway looks, and how long a home may be silent before that is reported: a cable that is replugged is not.
const AwayEvery = 10 * time.Second

// ReportAway reports, until ctx ends, which volumes of other nodes that are used here wait for their homes, and since when, and also when one no longer does.
// It writes `away` of status.export, or of the reader. away returns all that wait (remotepool.Pool).
func (a *Agent) ReportAway(ctx context.Context, away func() (map[blockdev.Ref]time.Time, error), pause time.Duration) {
	ticks := time.NewTicker(pause)
	defer ticks.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticks.C:
			if err := a.reportAway(ctx, away, pause); err != nil && ctx.Err() == nil {
				klog.FromContext(ctx).V(2).Info("Could not write down which volumes of other nodes wait for these; trying again", "err", err.Error())
			}
		}
	}
}

func (a *Agent) reportAway(ctx context.Context, away func() (map[blockdev.Ref]time.Time, error), least time.Duration) error {
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

// setAway sets or clears `away` of the exports of a volume to a node, and reports whether that changes anything. A home that has been silent for less than
// least is not away.
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
