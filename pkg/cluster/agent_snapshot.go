package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// snapshot makes the snapshot of an object, or takes it away.
func (a *Agent) snapshot(ctx context.Context, r request) (reconcile.Result, error) {
	s, there, err := get(ctx, a, r.key, &v1alpha1.Snapshot{})
	if err != nil || !there {
		return reconcile.Result{}, err
	}
	switch {
	case s.DeletionTimestamp != nil:
		return a.deleteSnapshot(ctx, s)
	case s.Status.Created != nil:
		return reconcile.Result{RequeueAfter: checkAgain}, a.tendSnapshot(ctx, s)
	case s.Common().Refused(s.Generation) != nil:
		return reconcile.Result{}, nil // it waits to be deleted
	}
	working, end := a.making(ctx, r)
	defer end()
	working, cancel := context.WithTimeout(working, longestCut)
	defer cancel()
	defer a.Changed()
	var made volume.Snapshot
	if err := a.locked([]string{keylock.Snapshot(s.Name), keylock.Volume(s.Spec.Source)}, nil, func() (err error) {
		made, err = a.local.CreateSnapshot(working, s.Spec.Name, snapshotSource(s))
		return err
	}); err != nil {
		return reconcile.Result{}, refuse(ctx, a, s, err)
	}
	return reconcile.Result{}, a.reportCut(ctx, s, made)
}

func (a *Agent) reportCut(ctx context.Context, s *v1alpha1.Snapshot, made volume.Snapshot) error {
	return report(ctx, a, s, func(s *v1alpha1.Snapshot) {
		if s.Status.Created != nil {
			return
		}
		cut := metav1.NewMicroTime(made.Created)
		s.Status.Created, s.Status.Size = &cut, made.Size
		s.Status.Failure, s.Status.ObservedGeneration = nil, s.Generation
		setCondition(&s.Status.Conditions, s, v1alpha1.Ready, metav1.ConditionTrue, "Cut", "")
	})
}

func (a *Agent) deleteSnapshot(ctx context.Context, s *v1alpha1.Snapshot) (reconcile.Result, error) {
	if !controllerutil.ContainsFinalizer(s, v1alpha1.Finalizer) {
		return reconcile.Result{}, nil
	}
	defer a.Changed()
	err := a.locked([]string{keylock.Snapshot(s.Name)}, nil, func() error { return a.local.DeleteSnapshot(ctx, snapshotID(s)) })
	if err == nil {
		return reconcile.Result{}, letGo(ctx, a.client, s)
	}
	return reconcile.Result{RequeueAfter: lastRetry}, refuse(ctx, a, s, err)
}

// tendSnapshot looks after a snapshot that was cut once. If it is missing, it is lost: a
// snapshot of another moment is not the same.
func (a *Agent) tendSnapshot(ctx context.Context, s *v1alpha1.Snapshot) error {
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
			if !errors.Is(err, blockdev.ErrNotFound) {
				return problems, err
			}
		}
	}
	return []blockdev.Problem{{Severity: blockdev.DataLoss, Reason: "SnapshotMissing",
		Message: fmt.Sprintf("pool %s of node %s does not have this snapshot any more; nothing was cut in its place", id.Pool, a.local.Node())}}, nil
}

// group cuts the members of a group snapshot together, or takes them away together.
func (a *Agent) group(ctx context.Context, r request) (reconcile.Result, error) {
	var list v1alpha1.SnapshotList
	if err := a.client.List(ctx, &list, client.MatchingFields{byGroup: r.key}); err != nil || len(list.Items) == 0 {
		return reconcile.Result{}, err
	}
	members := list.Items
	var deleting, cut, refused int
	for i := range members {
		m := &members[i]
		if m.DeletionTimestamp != nil {
			deleting++
		}
		if m.Status.Created != nil {
			cut++
		}
		if m.Common().Refused(m.Generation) != nil {
			refused++
		}
	}
	whole := len(members) == members[0].Spec.Group.Size
	switch {
	case deleting == len(members):
		return a.deleteGroup(ctx, r.key, members)
	case deleting > 0, !whole:
		return reconcile.Result{}, nil // the rest of it comes, or goes, too
	case cut == len(members):
		var failures []error
		for i := range members {
			failures = append(failures, a.tendSnapshot(ctx, &members[i]))
		}
		return reconcile.Result{RequeueAfter: checkAgain}, errors.Join(failures...)
	case refused > 0:
		return reconcile.Result{}, a.refuseAll(ctx, members, errors.New(firstFailure(members)))
	}
	return reconcile.Result{}, a.makeGroup(ctx, r, members, cut > 0)
}

// makeGroup cuts a group. known: some member was reported to be cut, so all were, and none
// is cut again.
func (a *Agent) makeGroup(ctx context.Context, r request, members []v1alpha1.Snapshot, known bool) error {
	var made volume.Group
	var err error
	if known {
		made, err = a.local.GetGroup(ctx, volume.GroupID{Key: r.key})
		if errors.Is(err, blockdev.ErrNotFound) {
			err = fmt.Errorf("%w: snapshots of this group that were cut are missing", blockdev.ErrDataLoss)
		}
	} else {
		defer a.Changed()
		working, end := a.making(ctx, r)
		defer end()
		working, cancel := context.WithTimeout(working, longestCut)
		defer cancel()
		var sources []volume.ID
		for i := range members {
			sources = append(sources, snapshotSource(&members[i]))
		}
		locks := groupLocks(r.key, members)
		for _, source := range sources {
			locks = append(locks, keylock.Volume(source.Key))
		}
		err = a.locked(locks, nil, func() (err error) {
			made, err = a.local.CreateGroup(working, members[0].Spec.Name, sources)
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
			return fmt.Errorf("%w: %s has no snapshot %s", blockdev.ErrDataLoss, made.ID, snapshotID(m))
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
	if err := a.locked(groupLocks(key, members), nil, func() error { return a.local.DeleteGroup(ctx, volume.GroupID{Key: key}) }); err != nil {
		return reconcile.Result{}, err
	}
	var failures []error
	for i := range members {
		if m := &members[i]; controllerutil.ContainsFinalizer(m, v1alpha1.Finalizer) {
			failures = append(failures, letGo(ctx, a.client, m))
		}
	}
	return reconcile.Result{}, errors.Join(failures...)
}
