package agent

import (
	"context"
	"errors"
	"maps"
	"sync"
	"time"

	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// limitPause is after which time a volume whose lock is held is tried again.
const limitPause = time.Second

// limitAgain sets the limits of I/O of the volumes of other nodes that are used here, but those with many readers, once after a start: a change of them, or
// the work for which they were lifted, may have been cut short. It takes them from the objects and asks no home. It returns when all are set, or ctx ends.
func (a *Agent) limitAgain(ctx context.Context, here UsedVolumes) {
	used, err := a.allUsedHere(ctx)
	if err != nil {
		klog.FromContext(ctx).Error(err, "Could not set the limits of the volumes of other nodes")
		return
	}
	var later sync.WaitGroup
	defer later.Wait()
	for i := range used {
		v := &used[i]
		if cluster.ClaimOn(v, a.local.Node()).Many() || !volume.Limited(v.Spec.Mutable) && !volume.Limited(v.Status.Mutable) {
			continue
		}
		if a.limitUsed(ctx, here, v.Name) != nil {
			later.Go(func() { a.limitLater(ctx, here, v.Name) })
		}
	}
}

// limitLater calls limitUsed until it succeeds or ctx ends: again after limitPause if the volume is busy, else when its object changes.
func (a *Agent) limitLater(ctx context.Context, here UsedVolumes, key string) {
	w := a.hub.Open(cluster.VolumeNamed(key))
	defer w.Close()
	for {
		err := a.limitUsed(ctx, here, key)
		if err == nil {
			return
		}
		var again <-chan time.Time
		if errors.Is(err, errdefs.ErrBusy) {
			again = time.After(limitPause)
		}
		select {
		case <-again:
		case <-w.Signal:
			w.Take()
		case <-ctx.Done():
			return
		}
	}
}

// limitUsed sets the limits of a volume of another node, if it is still used here and its home has not told them since the start. errWaits while they are
// being changed: the object changes when that is done. ErrBusy if the lock of the volume is held.
func (a *Agent) limitUsed(ctx context.Context, here UsedVolumes, key string) error {
	return a.withLocks([]string{keylock.Volume(key)}, func() error {
		v, is := a.usedHere(key)
		switch {
		case !is || a.others.wasTold(key):
			return nil
		case !settled(v):
			return errWaits
		}
		here.LimitAgain(ctx, cluster.VolumeID(v), v.Status.Mutable)
		return nil
	})
}

// settled reports whether no change of a volume's mutable parameters is under way: spec and status agree, or the change was refused.
func settled(v *v1alpha1.Volume) bool {
	return maps.Equal(v.Spec.Mutable, v.Status.Mutable) || v.Common().Refused(v.Generation) != nil
}

// tell notes that the home of a volume has told its mutable parameters.
func (o *others) tell(key string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.told[key] = true
}

// wasTold reports whether tell was called for a volume.
func (o *others) wasTold(key string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.told[key]
}

// When a volume's mutable parameters change, its home tells its one consumer. Many readers follow the object by themselves: so the home need not reach them,
// and none of them can hold the change up.

// usedChanged queues a volume of another node that is used here, for moves and for followModified.
func (a *Agent) usedChanged(o client.Object, gone bool) {
	a.moveInUseChanged(o, gone)
	a.others.modified.Add(o.GetName())
}

// followModified applies the mutable parameters in the status of the volumes that this node uses as one of many readers, from the start on, until ctx ends.
func (a *Agent) followModified(ctx context.Context, here UsedVolumes) {
	defer context.AfterFunc(ctx, a.others.modified.ShutDown)()
	set := map[string]map[string]string{} // what was applied last, by the names of objects
	for {
		key, ended := a.others.modified.Get()
		if ended {
			return
		}
		if err := a.modifyRead(ctx, here, key, set); errors.Is(err, errdefs.ErrBusy) {
			a.others.modified.AddAfter(key, limitPause)
		} else if err != nil {
			klog.FromContext(ctx).Error(err, "Could not change a volume that this node reads beside others; it stays as it is until the next change", "volume", key)
		}
		a.others.modified.Done(key)
	}
}

// modifyRead applies the mutable parameters of a volume that this node uses as one of many readers to its devices, unless set says that they were applied. It
// keeps set up to date. ErrBusy if the lock of the volume is held.
func (a *Agent) modifyRead(ctx context.Context, here UsedVolumes, key string, set map[string]map[string]string) error {
	return a.withLocks([]string{keylock.Volume(key)}, func() error {
		v, is := a.usedHere(key)
		if !is || !cluster.ClaimOn(v, a.local.Node()).Many() {
			delete(set, key)
			return nil
		}
		if maps.Equal(set[key], v.Status.Mutable) {
			return nil
		}
		set[key] = v.Status.Mutable
		return here.Modified(ctx, cluster.VolumeID(v), v.Status.Mutable)
	})
}
