package agent

import (
	"context"
	"fmt"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/progress"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
)

// status.progress is written progressEvery after the start, then no more often than that, and only if it went on by a 100th: short work costs no write, and
// what takes a day costs a hundred.
const (
	progressEvery = 5 * time.Second
	progressOf    = 100
)

// followed writes the progress of objects while they are made or grown.
type followed struct {
	agent   *Agent
	objects []cluster.Object
}

// follow writes the progress of objects into their status until end is called. Then end sets the objects to what was last written.
func follow[T cluster.Object](ctx context.Context, a *Agent, objects ...T) (end func()) {
	f := &followed{agent: a}
	for _, o := range objects {
		f.objects = append(f.objects, o.DeepCopyObject().(cluster.Object))
	}
	ctx, cancel := context.WithCancel(ctx)
	var done sync.WaitGroup
	done.Go(func() { f.run(ctx) })
	return func() {
		cancel()
		done.Wait()
		for i, o := range objects {
			if now := f.objects[i]; now.GetUID() == o.GetUID() && now.GetGeneration() == o.GetGeneration() && now.Common().Progress != nil {
				o.SetResourceVersion(now.GetResourceVersion())
				*o.Common() = *now.Common()
			}
		}
	}
}

func (f *followed) run(ctx context.Context) {
	tick := time.NewTicker(f.agent.options.ProgressEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		for i := range f.objects {
			if err := f.write(ctx, i); err != nil {
				klog.FromContext(ctx).V(2).Info("Could not write down how far it is", "object", f.objects[i].GetName(), "err", err)
			}
		}
	}
}

// write writes the progress of object number i, if that is news. After an error it reads the object, so that the next write can succeed.
func (f *followed) write(ctx context.Context, i int) error {
	o := f.objects[i]
	far, running := f.agent.progress(o)
	was := o.Common().Progress
	if !running || (was != nil && was.Total == far.Total && abs(far.Done-was.Done) < max(1, far.Total/progressOf)) {
		return nil
	}
	before := o.DeepCopyObject().(cluster.Object)
	o.Common().Progress = &v1alpha1.Progress{Done: far.Done, Total: far.Total}
	if v, is := o.(*v1alpha1.Volume); is && isFetched(v) {
		setCopied(v, metav1.ConditionFalse, v1alpha1.ReasonCopying, fmt.Sprintf("%s of %s are copied from node %s", cluster.Bytes(far.Done), cluster.Bytes(far.Total), v.Spec.Source.NodeName))
	}
	f.agent.summarize(ctx, o)
	// Not with ctx, which ends with the work: a write that is cut off may have been done, and end has to know that.
	writing, cancel := context.WithTimeout(context.WithoutCancel(ctx), progressEvery)
	defer cancel()
	err := f.agent.kube.Client.Status().Patch(writing, o, kube.LockingPatch(before))
	if err == nil {
		if was == nil {
			f.agent.Changed() // the pool has it now, so no room is kept for it beside that
		}
		return nil
	}
	f.objects[i] = before
	now := o.DeepCopyObject().(cluster.Object)
	reading, cancel := context.WithTimeout(context.WithoutCancel(ctx), progressEvery)
	defer cancel()
	if f.agent.kube.Live.Get(reading, client.ObjectKeyFromObject(o), now) == nil && now.GetUID() == before.GetUID() {
		f.objects[i] = now
	}
	return err
}

// progress returns how far the copying or zeroing of an object's bytes is; false if none is under way.
func (a *Agent) progress(o cluster.Object) (progress.Copy, bool) {
	return a.progressIn(o.In(), o)
}

// progressIn is progress for an object whose bytes are copied to a given pool of this node: that of a move.
func (a *Agent) progressIn(pool string, o cluster.Object) (progress.Copy, bool) {
	kind := blockdev.Volume
	if _, is := o.(*v1alpha1.Snapshot); is {
		kind = blockdev.Snapshot
	}
	return a.local.Progress().Find(pool, blockdev.Ref{Kind: kind, Key: o.GetName()}.String())
}
