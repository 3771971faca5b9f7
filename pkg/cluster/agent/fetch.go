package agent

import (
	"context"
	"errors"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/cluster/port"
	"github.com/ashlar-csi/ashlar/pkg/cluster/transfer"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// A volume that is a copy of a volume or snapshot of another node is made by the agent of its own node. It fetches the bytes from the agent of the source's
// node, which sends them as long as the object of the copy says that they are for that node (docs/decisions/copies-elsewhere.md).

// takesPart reports whether a volume is on this node, or is a copy of a volume or snapshot of this node.
func (a *Agent) takesPart(v *v1alpha1.Volume) bool {
	return v.Spec.NodeName == a.local.Node() || v.Spec.Source != nil && v.Spec.Source.NodeName == a.local.Node()
}

// isFetched reports whether a volume is a copy of a volume or snapshot of another node.
func isFetched(v *v1alpha1.Volume) bool { return v.Spec.Source != nil && v.Spec.Source.NodeName != "" }

// setCopied sets the condition Copied of a volume that is fetched.
func setCopied(v *v1alpha1.Volume, status metav1.ConditionStatus, reason, message string) {
	setCondition(&v.Status.Conditions, v, v1alpha1.Copied, status, reason, message)
}

// reportFetchWaits writes why the copy from another node does not go on (the condition Copied), if that is fetched and err may pass (isTransient).
func (a *Agent) reportFetchWaits(ctx context.Context, v *v1alpha1.Volume, err error) error {
	if !isFetched(v) || !isTransient(err) || errors.Is(err, errdefs.ErrBusy) || errors.Is(err, context.Canceled) || ctx.Err() != nil {
		return nil
	}
	return report(ctx, a, v, func(v *v1alpha1.Volume) { setCopied(v, metav1.ConditionFalse, v1alpha1.ReasonCopyWaits, err.Error()) })
}

// maxFetches is how many volumes are fetched at once. The other makers are left for volumes that need no other node, however slow other nodes are.
const maxFetches = makers / 4

// errTooManyFetches: maxFetches copies are under way; it is tried again later.
var errTooManyFetches = fmt.Errorf("%w: %d copies from other nodes are under way", errGaveWay, maxFetches)

// fetch makes a volume as a copy of a volume or snapshot of another node. If the copy is there and complete, it returns that. errTooManyFetches if there
// are maxFetches others.
func (a *Agent) fetch(ctx context.Context, v *v1alpha1.Volume, spec volume.Spec) (volume.Volume, error) {
	// A complete copy was not reported, or the object was restored: its source may be gone by now, and it may be in use.
	have, err := a.local.Get(ctx, cluster.VolumeID(v))
	if err == nil {
		return have, spec.Check(have)
	}
	if !errors.Is(err, errdefs.ErrNotFound) {
		return volume.Volume{}, err
	}
	select {
	case a.fetching <- struct{}{}:
		defer func() { <-a.fetching }()
	default:
		return volume.Volume{}, errTooManyFetches
	}
	failed := func(err error) error {
		return fmt.Errorf("fetch %s from node %s: %w", spec.Source, v.Spec.Source.NodeName, err)
	}
	agent, err := a.agentOf(ctx, v.Spec.Source.NodeName)
	if err != nil {
		return volume.Volume{}, failed(err)
	}
	from, err := transfer.Open(ctx, agent, v.Name)
	if err != nil {
		return volume.Volume{}, failed(err)
	}
	read := from.Read
	from.Read = func(ctx context.Context, at int64, visit func(int64, []byte) error) error {
		if err := read(ctx, at, visit); err != nil {
			return err
		}
		return a.checkStillWanted(ctx, v)
	}
	made, err := a.local.Import(ctx, spec, from)
	if err != nil {
		return volume.Volume{}, failed(err)
	}
	return made, nil
}

// checkStillWanted asks the API server whether a volume is still to be made: ErrBusy if not. fetch calls it before a copy is complete: this node may have
// been away, and the copy made on another node meanwhile. An incomplete copy is removed, a complete one would stay.
func (a *Agent) checkStillWanted(ctx context.Context, v *v1alpha1.Volume) error {
	now := &v1alpha1.Volume{}
	err := a.kube.Live.Get(ctx, client.ObjectKeyFromObject(v), now)
	if client.IgnoreNotFound(err) != nil {
		return kube.APIError("read volume "+v.Name, err)
	}
	if err != nil || now.UID != v.UID || v1alpha1.Going(now) {
		return fmt.Errorf("%w: nobody wants %s of node %s any more", errdefs.ErrBusy, v.Name, a.local.Node())
	}
	return nil
}

// OpenCopy opens the source of a copy on another node, or a volume or snapshot that moves there, for the agent of that node: it is a transfer.Source. If
// the source is a volume, it takes a snapshot of it first, which is kept until the copy is made or not wanted any more. ErrNotFound unless the object of
// the copy says that the caller is to make it.
func (a *Agent) OpenCopy(ctx context.Context, r transfer.Request) (volume.Origin, error) {
	if !blockdev.ValidKey(r.Copy) {
		return volume.Origin{}, fmt.Errorf("%w: %q is not the key of a volume", errdefs.ErrInvalid, r.Copy)
	}
	switch {
	case r.Move && r.Snapshot:
		return a.openSnapshotMove(ctx, r.Copy, r.Head)
	case r.Move:
		return a.openMove(ctx, r.Copy)
	}
	v := &v1alpha1.Volume{}
	err := a.kube.Live.Get(ctx, client.ObjectKey{Name: r.Copy}, v)
	if client.IgnoreNotFound(err) != nil {
		return volume.Origin{}, kube.APIError("read volume "+r.Copy, err)
	}
	caller := port.CallerNode(ctx)
	if err != nil || caller == "" || v.Spec.NodeName != caller || v.Spec.Source == nil || v.Spec.Source.NodeName != a.local.Node() ||
		!v.Spec.Make || v.Status.Created != nil || v1alpha1.Going(v) {
		return volume.Origin{}, fmt.Errorf("%w: node %q is to make no volume %s of what is on node %s", errdefs.ErrNotFound, caller, r.Copy, a.local.Node())
	}
	source := cluster.SourceOf(v)
	if source.Kind == blockdev.Snapshot {
		return a.openLocked(keylock.Snapshot(source.Key), func() (volume.Origin, error) { return a.local.Open(ctx, source) })
	}
	var from volume.Origin
	err = a.withYieldingLocks(ctx, []string{keylock.Volume(source.Key)}, nil, func(ctx context.Context) (err error) {
		from, err = a.local.OpenCut(ctx, source, r.Copy)
		return err
	})
	if errors.Is(err, errdefs.ErrBusy) { // to the caller, ErrBusy would mean one of its own locks, for which it waits less long
		err = errdefs.Recast(errdefs.ErrUnavailable, err, "volume %s is needed by a call, and cannot be cut now", source)
	}
	return from, err
}

// openLocked opens a snapshot under a shared lock, and takes that again for each read, so that the snapshot is not deleted meanwhile. ErrUnavailable if
// the lock is held.
func (a *Agent) openLocked(lock string, open func() (volume.Origin, error)) (from volume.Origin, err error) {
	shared := func(work func() error) error {
		unlock, busy := a.options.Locks.TryLock(nil, []string{lock})
		if unlock == nil {
			return fmt.Errorf("%w: %s", errdefs.ErrUnavailable, busy)
		}
		defer unlock()
		return work()
	}
	err = shared(func() error {
		from, err = open()
		return err
	})
	read := from.Read
	from.Read = func(ctx context.Context, at int64, visit func(int64, []byte) error) error {
		return shared(func() error { return read(ctx, at, visit) })
	}
	return from, err
}
