package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// reconcileGroup makes, maintains or deletes the members of a group snapshot, as far as they are on this node: they are taken together, and deleted
// together.
func (a *Agent) reconcileGroup(ctx context.Context, r request) (reconcile.Result, error) {
	members, err := cluster.Members(ctx, a.kube.Client, r.key)
	if err != nil || len(members) == 0 {
		return reconcile.Result{}, err
	}
	var deleting, leaving, cut, found, refused int
	var failures []error
	for i := range members {
		m := &members[i]
		switch {
		case m.Deleting():
			deleting++
		case m.DeletionTimestamp != nil:
			leaving++
			failures = append(failures, a.dropObject(ctx, m))
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
	switch {
	case deleting == len(members):
		return a.deleteGroup(ctx, r.key, members)
	case deleting > 0:
		return reconcile.Result{}, nil // the controller deletes the other members, too
	case cut+found > 0: // all were taken together, and none is taken again; some may have moved away
		for i := range members {
			if m := &members[i]; m.Status.Created != nil {
				failures = append(failures, a.maintainSnapshot(ctx, m))
			} else {
				failures = append(failures, a.findSnapshot(ctx, m))
			}
		}
		return reconcile.Result{RequeueAfter: checkAgain}, errors.Join(failures...)
	case len(members) < members[0].Spec.Group.Size:
		return reconcile.Result{}, nil // the controller creates the other members, too
	case refused > 0:
		return reconcile.Result{}, a.refuseAll(ctx, members, isOpen, errors.New(firstFailure(members)))
	}
	return reconcile.Result{RequeueAfter: checkAgain}, a.makeGroup(ctx, r, members)
}

// makeGroup takes the snapshots of a group of which none was taken, and reports them; or that it was refused.
func (a *Agent) makeGroup(ctx context.Context, r request, members []v1alpha1.Snapshot) error {
	defer a.Changed()
	made, err := a.cutGroup(ctx, r, members)
	if err != nil {
		return a.refuseAll(ctx, members, isOpen, err)
	}
	for i := range members {
		m := &members[i]
		at := slices.IndexFunc(made.Snapshots, func(s volume.Snapshot) bool { return s.ID == cluster.SnapshotID(m) })
		if at < 0 {
			return fmt.Errorf("%w: %s has no snapshot %s", errdefs.ErrDataLoss, made.ID, cluster.SnapshotID(m))
		}
		if err := a.reportSnapshot(ctx, m, made.Snapshots[at]); err != nil {
			return err
		}
	}
	return nil
}

// cutGroup takes the snapshots of a group together, as long as all are wanted.
func (a *Agent) cutGroup(ctx context.Context, r request, members []v1alpha1.Snapshot) (made volume.Group, err error) {
	working, end := a.making(ctx, r)
	defer end()
	var sources []volume.ID
	locks, legs, objects := groupLocks(r.key, members), map[volume.ID]volume.ID{}, map[volume.ID]string{}
	for i := range members {
		source := cluster.SnapshotSource(&members[i])
		cut, err := a.cutOf(ctx, &members[i])
		if err != nil {
			return made, err
		}
		sources, legs[source], objects[source], locks = append(sources, source), cut, string(members[i].UID), append(locks, keylock.Volume(cut.Key))
	}
	err = a.withYieldingLocks(working, locks, nil, func(ctx context.Context) (err error) {
		for i := range members {
			if err := stillWanted(ctx, a, &members[i]); err != nil {
				return err
			}
		}
		defer follow(ctx, a, pointers(members)...)()
		made, err = a.local.CutLegs(ctx, members[0].Spec.Name, sources, legs, objects)
		return err
	})
	return made, err
}

func pointers(members []v1alpha1.Snapshot) (all []*v1alpha1.Snapshot) {
	for i := range members {
		all = append(all, &members[i])
	}
	return all
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

// isOpen reports whether a member was neither taken nor refused.
func isOpen(m *v1alpha1.Snapshot) bool {
	return m.Status.Created == nil && m.Common().Refused(m.Generation) == nil
}

// refuseAll reports err for those members that are meant.
func (a *Agent) refuseAll(ctx context.Context, members []v1alpha1.Snapshot, meant func(*v1alpha1.Snapshot) bool, err error) error {
	for i := range members {
		if !meant(&members[i]) {
			continue
		}
		if err := refuse(ctx, a, &members[i], err); err != nil {
			return err
		}
	}
	return nil
}

// deleteGroup deletes the snapshots of a group, and then their objects. If one of the snapshots is not that of its object (sameBytes), all of them stay. If that
// fails, each object says why, and it is tried again.
func (a *Agent) deleteGroup(ctx context.Context, key string, members []v1alpha1.Snapshot) (reconcile.Result, error) {
	defer a.Changed()
	if err := a.withLocks(groupLocks(key, members), func() error {
		var ids []volume.ID
		for i := range members {
			ids = append(ids, cluster.SnapshotID(&members[i]))
			have, err := a.local.GetSnapshot(ctx, cluster.SnapshotID(&members[i]))
			if errors.Is(err, errdefs.ErrUnavailable) {
				return err // otherwise the snapshot in that pool would stay without an object
			}
			if err == nil && !sameBytes(&members[i], have.Created, have.Object) {
				klog.FromContext(ctx).Info("Keeping a group of the same name that is not the one to be deleted", "group", volume.GroupID{Key: key}.String())
				return nil
			}
		}
		return deleteBytes(ctx, a, pointers(members), func() error { return a.local.DeleteMembers(ctx, volume.GroupID{Key: key}, ids) })
	}); err != nil {
		return reconcile.Result{RequeueAfter: lastRetry}, a.refuseAll(ctx, members, func(*v1alpha1.Snapshot) bool { return true }, err)
	}
	var failures []error
	for i := range members {
		failures = append(failures, cluster.RemoveObject(ctx, a.kube.Client, &members[i]))
	}
	return reconcile.Result{}, errors.Join(failures...)
}
