package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// snapshot makes the snapshot of an object, or takes it away.
func (a *Agent) snapshot(ctx context.Context, r request) (reconcile.Result, error) {
	s, there, err := get(ctx, a, r.key, &v1alpha1.Snapshot{})
	if err != nil || !there {
		return reconcile.Result{}, err
	}
	switch {
	case s.Deleting():
		return a.deleteSnapshot(ctx, s)
	case s.DeletionTimestamp != nil:
		return reconcile.Result{}, a.released(ctx, s)
	case s.Status.Created != nil:
		return reconcile.Result{RequeueAfter: checkAgain}, a.tendSnapshot(ctx, s)
	case !s.Spec.Make:
		return reconcile.Result{RequeueAfter: checkAgain}, a.findSnapshot(ctx, s)
	case s.Common().Refused(s.Generation) != nil:
		return reconcile.Result{}, nil // it waits to be deleted
	}
	working, end := a.making(ctx, r)
	defer end()
	defer a.Changed()
	var made volume.Snapshot
	if err := a.copying(working, []string{keylock.Snapshot(s.Name), keylock.Volume(s.Spec.Source)}, nil, func(ctx context.Context) (err error) {
		if err := wanted(ctx, a, s); err != nil {
			return err
		}
		made, err = a.local.CreateSnapshot(ctx, s.Spec.Name, snapshotSource(s))
		return err
	}); err != nil {
		return reconcile.Result{}, refuse(ctx, a, s, err)
	}
	return reconcile.Result{}, a.reportCut(ctx, s, made)
}

// findSnapshot finds the snapshot of an object that may not be cut: see findVolume.
func (a *Agent) findSnapshot(ctx context.Context, s *v1alpha1.Snapshot) error {
	have, err := a.local.GetSnapshot(ctx, snapshotID(s))
	switch {
	case errors.Is(err, errdefs.ErrNotFound):
		err = fmt.Errorf("%w: %s", errdefs.ErrDataLoss, a.missingSnapshot(snapshotID(s)))
	case err == nil && have.Source != snapshotSource(s):
		err = fmt.Errorf("%w: snapshot %s is of volume %s, not %s", errdefs.ErrExists, have.ID, have.Source, snapshotSource(s))
	}
	if err != nil {
		return refuse(ctx, a, s, err)
	}
	defer a.Changed()
	return a.reportCut(ctx, s, have)
}

func (a *Agent) missingSnapshot(id volume.ID) string {
	return fmt.Sprintf("pool %s of node %s does not have this snapshot any more; nothing was cut in its place", id.Pool, a.local.Node())
}

// reportCut reports a snapshot that is there, and sees to it that it is not cut again.
func (a *Agent) reportCut(ctx context.Context, s *v1alpha1.Snapshot, made volume.Snapshot) error {
	if err := settle(ctx, a, s); err != nil {
		return err
	}
	return report(ctx, a, s, func(s *v1alpha1.Snapshot) {
		if s.Status.Created != nil {
			return
		}
		s.Status.Created, s.Status.Size = madeAt(made.Created), made.Size
		s.Status.Failure, s.Status.ObservedGeneration = nil, s.Generation
		setCondition(&s.Status.Conditions, s, v1alpha1.Ready, metav1.ConditionTrue, "Cut", "")
	})
}

func (a *Agent) deleteSnapshot(ctx context.Context, s *v1alpha1.Snapshot) (reconcile.Result, error) {
	defer a.Changed()
	err := a.locked([]string{keylock.Snapshot(s.Name)}, nil, func() error {
		if have, err := a.local.GetSnapshot(ctx, snapshotID(s)); err == nil && !sameBytes(s, have.Created) {
			klog.FromContext(ctx).Info("Keeping a snapshot of the same name that is not the one to be deleted", "snapshot", have.ID.String())
			return nil
		}
		return a.local.DeleteSnapshot(ctx, snapshotID(s))
	})
	if err == nil {
		return reconcile.Result{}, finish(ctx, a.client, s)
	}
	return reconcile.Result{RequeueAfter: lastRetry}, refuse(ctx, a, s, err)
}

// tendSnapshot looks after a snapshot that was cut once. If it is missing, it is lost: a
// snapshot of another moment is not the same.
func (a *Agent) tendSnapshot(ctx context.Context, s *v1alpha1.Snapshot) error {
	if err := settle(ctx, a, s); err != nil {
		return err
	}
	problems, err := a.snapshotHealth(ctx, s)
	if err != nil {
		return err
	}
	return report(ctx, a, s, func(s *v1alpha1.Snapshot) { a.setReady(&s.Status.Conditions, s, problems) })
}

func (a *Agent) snapshotHealth(ctx context.Context, s *v1alpha1.Snapshot) ([]blockdev.Problem, error) {
	id := snapshotID(s)
	for _, pool := range a.pools {
		if pool.Name() == id.Pool {
			problems, err := pool.Health(ctx, blockdev.Ref{Kind: id.Kind, Key: id.Key})
			if !errors.Is(err, errdefs.ErrNotFound) {
				return problems, err
			}
		}
	}
	return []blockdev.Problem{{Severity: blockdev.DataLoss, Reason: "SnapshotMissing", Message: a.missingSnapshot(id)}}, nil
}

// group cuts the members of a group snapshot together, or takes them away together.
func (a *Agent) group(ctx context.Context, r request) (reconcile.Result, error) {
	var list v1alpha1.SnapshotList
	if err := a.client.List(ctx, &list, client.MatchingFields{byGroup: r.key}); err != nil || len(list.Items) == 0 {
		return reconcile.Result{}, err
	}
	members := list.Items
	var deleting, leaving, cut, found, refused int
	var failures []error
	for i := range members {
		m := &members[i]
		switch {
		case m.Deleting():
			deleting++
		case m.DeletionTimestamp != nil:
			leaving++
			failures = append(failures, a.released(ctx, m))
		}
		if m.Status.Created != nil {
			cut++
		}
		if !m.Spec.Make {
			found++
		}
		if m.Common().Refused(m.Generation) != nil {
			refused++
		}
	}
	if leaving > 0 {
		return reconcile.Result{}, errors.Join(failures...)
	}
	whole := len(members) == members[0].Spec.Group.Size
	switch {
	case deleting == len(members):
		return a.deleteGroup(ctx, r.key, members)
	case deleting > 0, !whole:
		return reconcile.Result{}, nil // the rest of it comes, or goes, too
	case cut == len(members):
		for i := range members {
			failures = append(failures, a.tendSnapshot(ctx, &members[i]))
		}
		return reconcile.Result{RequeueAfter: checkAgain}, errors.Join(failures...)
	case refused > 0 && found == 0:
		return reconcile.Result{}, a.refuseAll(ctx, members, errors.New(firstFailure(members)))
	}
	return reconcile.Result{RequeueAfter: checkAgain}, a.makeGroup(ctx, r, members, cut+found > 0)
}

// makeGroup cuts a group. known: some member was cut, so all were, and none is cut again.
func (a *Agent) makeGroup(ctx context.Context, r request, members []v1alpha1.Snapshot, known bool) error {
	var made volume.Group
	var err error
	if known {
		made, err = a.local.GetGroup(ctx, volume.GroupID{Key: r.key})
		if errors.Is(err, errdefs.ErrNotFound) {
			err = fmt.Errorf("%w: snapshots of this group that were cut are missing", errdefs.ErrDataLoss)
		}
	} else {
		defer a.Changed()
		working, end := a.making(ctx, r)
		defer end()
		var sources []volume.ID
		for i := range members {
			sources = append(sources, snapshotSource(&members[i]))
		}
		locks := groupLocks(r.key, members)
		for _, source := range sources {
			locks = append(locks, keylock.Volume(source.Key))
		}
		err = a.copying(working, locks, nil, func(ctx context.Context) (err error) {
			for i := range members {
				if err := wanted(ctx, a, &members[i]); err != nil {
					return err
				}
			}
			made, err = a.local.CreateGroup(ctx, members[0].Spec.Name, sources)
			return err
		})
	}
	if err != nil {
		return a.refuseAll(ctx, members, err)
	}
	for i := range members {
		m := &members[i]
		at := slices.IndexFunc(made.Snapshots, func(s volume.Snapshot) bool { return s.ID == snapshotID(m) })
		if at < 0 {
			return fmt.Errorf("%w: %s has no snapshot %s", errdefs.ErrDataLoss, made.ID, snapshotID(m))
		}
		if err := a.reportCut(ctx, m, made.Snapshots[at]); err != nil {
			return err
		}
	}
	return nil
}

func groupLocks(key string, members []v1alpha1.Snapshot) []string {
	locks := []string{keylock.Group(key)}
	for i := range members {
		locks = append(locks, keylock.Snapshot(members[i].Name))
	}
	return locks
}

func firstFailure(members []v1alpha1.Snapshot) string {
	for i := range members {
		if f := members[i].Status.Failure; f != nil {
			return f.Message
		}
	}
	return ""
}

func (a *Agent) refuseAll(ctx context.Context, members []v1alpha1.Snapshot, err error) error {
	for i := range members {
		m := &members[i]
		if m.Status.Created != nil || m.Common().Refused(m.Generation) != nil {
			continue
		}
		if err := refuse(ctx, a, m, err); err != nil {
			return err
		}
	}
	return nil
}

func (a *Agent) deleteGroup(ctx context.Context, key string, members []v1alpha1.Snapshot) (reconcile.Result, error) {
	defer a.Changed()
	if err := a.locked(groupLocks(key, members), nil, func() error {
		for i := range members {
			have, err := a.local.GetSnapshot(ctx, snapshotID(&members[i]))
			if errors.Is(err, errdefs.ErrUnavailable) {
				return err // what is in that pool would stay
			}
			if err == nil && !sameBytes(&members[i], have.Created) {
				klog.FromContext(ctx).Info("Keeping a group of the same name that is not the one to be deleted", "group", volume.GroupID{Key: key}.String())
				return nil
			}
		}
		return a.local.DeleteGroup(ctx, volume.GroupID{Key: key})
	}); err != nil {
		return reconcile.Result{}, err
	}
	var failures []error
	for i := range members {
		failures = append(failures, finish(ctx, a.client, &members[i]))
	}
	return reconcile.Result{}, errors.Join(failures...)
}
