package agent

import (
	"context"
	"errors"
	"maps"

	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// The mutable parameters of a volume with several legs are those of its legs: their homes write them down, but have no devices over all of them. So the node
// that uses the volume applies them to what is over the mirror, as the objects of the legs have them.

// applyMutable applies the mutable parameters to what is over the mirror, when they change, and once in each process, as an earlier one may have been cut
// short. It does nothing while a call has the lock of the volume: that call applies them, or the next step does.
func (m *mirrorReconciler) applyMutable(ctx context.Context, v *v1alpha1.ReplicatedVolume) {
	m.replicas.mu.Lock()
	using := m.replicas.using
	m.replicas.mu.Unlock()
	want, known := m.mutable(ctx, v)
	if !known || using == nil || maps.Equal(want, m.appliedMutable) && (m.hasApplied || len(want) == 0) {
		return
	}
	err := m.withLocks([]string{keylock.Volume(m.ref.Key)}, func() error { return using.Modified(ctx, cluster.ReplicatedID(v), want) })
	if errors.Is(err, errdefs.ErrBusy) {
		return
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "Could not have a replicated volume that is used here follow its mutable parameters; it stays as it is until the next change")
	}
	m.appliedMutable, m.hasApplied = want, true
}

// mutable returns the mutable parameters in force, by the objects of the current legs; false while those are not known here, are being changed, or differ.
func (m *mirrorReconciler) mutable(ctx context.Context, v *v1alpha1.ReplicatedVolume) (map[string]string, bool) {
	var legs []*v1alpha1.Volume
	for _, name := range v.Current() {
		leg, is := m.usedHere(name)
		if !is {
			var err error
			if leg, is, err = get(ctx, m.Agent, name, &v1alpha1.Volume{}); err != nil || !is {
				return nil, false
			}
		}
		legs = append(legs, leg)
	}
	return agreedMutable(legs)
}

// agreedMutable returns the mutable parameters that all legs have; false if they differ, or are being changed.
func agreedMutable(legs []*v1alpha1.Volume) (map[string]string, bool) {
	for _, leg := range legs {
		if !settled(leg) || !maps.Equal(leg.Status.Mutable, legs[0].Status.Mutable) {
			return nil, false
		}
	}
	if len(legs) == 0 {
		return nil, false
	}
	return legs[0].Status.Mutable, true
}
