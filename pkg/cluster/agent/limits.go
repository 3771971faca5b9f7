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

// limitPause is until a volume that a call has for itself is tried again.
const limitPause = time.Second

// limitAgain sets the limits of the volumes of other nodes that are used here, and not by many, once after a start: a change of them, or what they were lifted for, may
// have been cut short. What they are the objects say, so no home is asked. It ends when all are set, or with ctx.
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

// limitLater is limitUsed, as often as it takes.
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

// limitUsed sets the limits of a volume of another node, if it is used here still. errWaits while they are being changed: the object tells when they have been. Once the
// home itself has said what they are, they are that. ErrBusy if a call has the volume for itself.
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

// settled reports whether the mutable parameters that an object has in force are those of the volume: no change of them is under way.
func settled(v *v1alpha1.Volume) bool {
	return maps.Equal(v.Spec.Mutable, v.Status.Mutable) || v.Common().Refused(v.Generation) != nil
}

// tell notes that the home of a volume has said what its mutable parameters are.
func (o *others) tell(key string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.told[key] = true
}

// wasTold reports whether the home of a volume has said that since the start.
func (o *others) wasTold(key string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.told[key]
}

// A home has its sole user follow what is changed of a volume's mutable parameters. Many readers follow the object by themselves: their home need not reach them, and none of
// them keeps it from changing them.

// usedChanged looks at a volume of another node that is used here.
func (a *Agent) usedChanged(o client.Object, gone bool) {
	a.moveInUseChanged(o, gone)
	a.others.modified.Add(o.GetName())
}

// followModified has the volumes that this node reads beside others follow the mutable parameters that their objects have in force, from the start on, until ctx ends.
func (a *Agent) followModified(ctx context.Context, here UsedVolumes) {
	defer context.AfterFunc(ctx, a.others.modified.ShutDown)()
	set := map[string]map[string]string{} // by the names of objects
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

// modifyRead has what is attached of a volume be as its object says, if this node reads it beside others, and it was not that already, which set tells. ErrBusy if a call
// has the volume for itself.
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
