package agent

import (
	"context"
	"errors"
	"sync"

	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// A volume that this node uses can become one with several legs meanwhile (package replicator). Its object is claimed for this node then, and its devices are still those of its one leg: they are to be laid over a mirror.

// adopter has such volumes be used through a mirror. Each waits for itself: one whose home has ceased to answer for that, perhaps for ever, as what is under way to it has to end.
type adopter struct {
	*ReplicaLegs
	mu     sync.Mutex
	begun  map[string]bool   // those that are being adopted, by the names of the objects
	told   map[string]string // why it could not be done, last
	adopts sync.WaitGroup
}

func (l *ReplicaLegs) adopter() *adopter {
	return &adopter{ReplicaLegs: l, begun: map[string]bool{}, told: map[string]string{}}
}

// startDue begins to adopt those that are to be. mirrored are the volumes that have a mirror here.
func (a *adopter) startDue(ctx context.Context, mirrored map[blockdev.Ref]int64) {
	if !a.replicas.read.Load() {
		return
	}
	var list v1alpha1.ReplicatedVolumeList
	if err := a.replicas.kube.Cache.List(ctx, &list); err != nil {
		return // it is memory
	}
	for i := range list.Items {
		v := &list.Items[i]
		id := cluster.ReplicatedID(v)
		if c := v.Spec.Claim; c == nil || c.Node != a.local.Node() || v.Status.Made == nil || v.Going() {
			continue
		}
		if _, is := mirrored[blockdev.Ref{Kind: id.Kind, Key: id.Key}]; is {
			if _, astray, err := a.volumes.Adopted(ctx, id); err != nil || !astray {
				continue
			}
		}
		if !a.begin(v.Name) {
			continue
		}
		a.adopts.Go(func() {
			done := make(chan error, 1)
			go func() {
				defer a.end(v.Name)
				a.adopt(ctx, v)
				done <- nil
			}()
			_, _ = waitForEnd(ctx, done)
		})
	}
}

// begin is false if a volume is being adopted.
func (a *adopter) begin(name string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	was := a.begun[name]
	a.begun[name] = true
	return !was
}

func (a *adopter) end(name string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.begun, name)
}

func (a *adopter) adopt(ctx context.Context, v *v1alpha1.ReplicatedVolume) {
	err := a.withLocks([]string{keylock.Volume(v.Name)}, func() error { return a.volumes.Adopt(ctx, cluster.ReplicatedID(v)) })
	why := ""
	if err != nil && !errors.Is(err, errdefs.ErrBusy) && ctx.Err() == nil {
		why = errdefs.Words(err)
	}
	if a.isNews(v.Name, why) {
		a.reportAdoptWaits(ctx, v, err)
	}
}

// isNews keeps why a volume could not be adopted, if it could not, and reports whether it was said already.
func (a *adopter) isNews(name, why string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	was := a.told[name]
	if a.told[name] = why; why == "" {
		delete(a.told, name)
	}
	return why != "" && why != was
}

// reportAdoptWaits says why a volume is used without a mirror: in the log, and in the object, of each leg that waits for that.
func (a *adopter) reportAdoptWaits(ctx context.Context, v *v1alpha1.ReplicatedVolume, err error) {
	why := errdefs.Words(err)
	klog.FromContext(ctx).Error(err, "Could not lay a volume that got replicas while it is used over a mirror; trying again", "volume", v.Name)
	if failure := a.writeReplicas(ctx, v, func(s *v1alpha1.ReplicatedVolumeStatus) {
		for _, name := range v.Spec.Legs {
			leg := v.Leg(name)
			if leg == nil {
				s.Legs = append(s.Legs, v1alpha1.Leg{Name: name})
				leg = v.Leg(name)
			}
			if !leg.Current {
				setWaiting(leg, "node "+a.local.Node()+" uses the volume without a mirror still: "+why)
			}
		}
	}); failure != nil && !errors.Is(failure, errdefs.ErrBusy) {
		klog.FromContext(ctx).Error(failure, "Could not say in its object why a replicated volume waits", "volume", v.Name)
	}
}

// bypassesMirror reports whether what is written to a volume may not come to its mirror, as it is not adopted yet: then no leg joins.
func (m *mirrorReconciler) bypassesMirror(ctx context.Context, v *v1alpha1.ReplicatedVolume) (bool, error) {
	_, astray, err := m.volumes.Adopted(ctx, cluster.ReplicatedID(v))
	return astray, err
}

// comparable reports whether the legs of a volume can be compared: not if it was mounted when it had one, as the filesystem then changes pages while they are written, which each leg takes at another moment.
func (m *mirrorReconciler) comparable(ctx context.Context, v *v1alpha1.ReplicatedVolume) bool {
	adopted, _, err := m.volumes.Adopted(ctx, cluster.ReplicatedID(v))
	return err == nil && !adopted
}
