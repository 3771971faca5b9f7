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

// A volume can become one with several legs while this node uses it (docs/replication.md, "Add legs to a volume in use"). Its devices, which are over its one
// leg, are then laid over a mirror: the volume is adopted.

// adopter adopts such volumes, each in a goroutine of its own: one whose home does not answer may wait for ever, for I/O that is under way.
type adopter struct {
	*ReplicaLegs
	mu     sync.Mutex
	begun  map[string]bool   // volumes that are being adopted, by the names of their objects
	told   map[string]string // why a volume could not be adopted, last
	adopts sync.WaitGroup
}

func (l *ReplicaLegs) adopter() *adopter {
	return &adopter{ReplicaLegs: l, begun: map[string]bool{}, told: map[string]string{}}
}

// startDue starts to adopt the volumes that are to be adopted. mirrored are those that have a mirror here.
func (a *adopter) startDue(ctx context.Context, mirrored map[blockdev.Ref]int64) {
	if !a.replicas.read.Load() {
		return
	}
	var list v1alpha1.ReplicatedVolumeList
	if err := a.replicas.kube.Cache.List(ctx, &list); err != nil {
		return // the cache is memory: this does not happen
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

// begin notes that a volume is being adopted; false if it was already.
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

// isNews keeps why a volume could not be adopted (empty: it was), and reports whether there is a reason that was not reported before.
func (a *adopter) isNews(name, why string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	was := a.told[name]
	if a.told[name] = why; why == "" {
		delete(a.told, name)
	}
	return why != "" && why != was
}

// reportAdoptWaits logs why a volume is used without a mirror, and writes it into the object, of each leg that waits for that.
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

// bypassesMirror reports whether writes to a volume may bypass its mirror, as it is not adopted yet: then no leg may join.
func (m *mirrorReconciler) bypassesMirror(ctx context.Context, v *v1alpha1.ReplicatedVolume) (bool, error) {
	_, astray, err := m.volumes.Adopted(ctx, cluster.ReplicatedID(v))
	return astray, err
}

// comparable reports whether the legs of a volume can be compared. Not if it was mounted before it was adopted: its filesystem may then change a page while
// it is written, and each leg takes it at another moment.
func (m *mirrorReconciler) comparable(ctx context.Context, v *v1alpha1.ReplicatedVolume) bool {
	adopted, _, err := m.volumes.Adopted(ctx, cluster.ReplicatedID(v))
	return err == nil && !adopted
}
