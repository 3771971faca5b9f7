package cluster_test

import (
	"context"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster/store"
	"github.com/ashlar-csi/ashlar/pkg/controller"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// cached waits until the cache of a store has a volume.
func (w *environment) cached(s *store.Store, id volume.ID) {
	w.Helper()
	w.eventually("its cache has the volume", func() bool {
		all, _ := s.List(w.ctx, volume.ID{}, 0) // by the cache alone; none, and an error, before it was read
		for _, v := range all {
			if v.ID == id {
				return true
			}
		}
		return false
	})
}

// cachedSnapshots waits until the cache of a store has so many snapshots of a volume.
func (w *environment) cachedSnapshots(s *store.Store, of volume.ID, n int) {
	w.Helper()
	w.eventually("its cache has the snapshots", func() bool {
		all, err := s.ListSnapshots(w.ctx, of, volume.ID{}, 0)
		return err == nil && len(all) == n
	})
}

// TestLaggingReplicaDeletesLeg: a volume has replicas since a controller heard of it last. The controller is asked to delete it, and does not delete the leg
// alone that the volume was before.
func TestLaggingReplicaDeletesLeg(t *testing.T) {
	w, all, s := legCluster(t, 2)
	behind, lag := w.behind()
	v, err := s.Create(w.ctx, anyNode("v", "node-1"))
	check.OK(t, err)
	w.cached(behind, v.ID)
	catchUp := lag.hold()
	defer catchUp()
	check.OK(t, w.ask("v", 2))
	w.eventually("it has replicas", func() bool { return w.became("v", 2) })
	fails(t, behind.Delete(soon(t), v.ID), errdefs.ErrUnavailable)
	if leg := w.object("v"); leg == nil || v1alpha1.Going(leg) {
		t.Errorf("the first leg is to be deleted, and the volume stays: %+v", leg)
	}
	catchUp()
	w.again("it is deleted", func(ctx context.Context) error { return behind.Delete(ctx, v.ID) })
	if left := w.objects(); len(left) > 0 || w.whole("v") != nil {
		t.Errorf("left: %d objects, ReplicatedVolume %v", len(left), w.whole("v"))
	}
	for _, m := range all {
		w.tally(m.machine)
	}
}

// TestLaggingReplicaOtherPool: since a controller heard of a volume and a snapshot last, another one has deleted them, and made others of their names in
// another pool. The controller finds these by their IDs, and deletes them.
func TestLaggingReplicaOtherPool(t *testing.T) {
	w, m, s := newCluster(t)
	behind, lag := w.behind()
	w.pooled(behind, m)
	in := func(pool string) (volume.Volume, volume.Snapshot) {
		of, err := s.Create(w.ctx, volume.Spec{Name: "of " + pool, Pool: pool, Size: volume.Range{Required: mib}})
		check.OK(t, err)
		v, err := s.Create(w.ctx, volume.Spec{Name: "v", Pool: pool, Size: volume.Range{Required: mib}})
		check.OK(t, err)
		snapshot, err := s.CreateSnapshot(w.ctx, "s", of.ID)
		check.OK(t, err)
		return v, snapshot
	}
	v, snapshot := in("default")
	w.cached(behind, v.ID)
	w.cachedSnapshots(behind, snapshot.Source, 1)
	catchUp := lag.hold()
	defer catchUp()
	check.OK(t, s.Delete(w.ctx, v.ID))
	check.OK(t, s.DeleteSnapshot(w.ctx, snapshot.ID))
	v, snapshot = in("b")
	check.OK(t, second(behind.Get(w.ctx, v.ID)))
	check.OK(t, second(behind.GetSnapshot(w.ctx, snapshot.ID)))
	fails(t, behind.Delete(soon(t), v.ID), errdefs.ErrUnavailable) // its watch does not tell that it is gone
	ctx, cancel := context.WithTimeout(w.ctx, 5*time.Second)       // first it waits a second for the cache to have the write before
	defer cancel()
	fails(t, behind.DeleteSnapshot(ctx, snapshot.ID), errdefs.ErrUnavailable)
	w.eventually("both are gone", func() bool { return w.object("v") == nil && len(w.objects()) == 2 })
	catchUp()
	w.tally(m)
}

// TestLaggingReplicaOtherGroup: since a controller heard of a group last, another one has deleted it, and made one of its name of other volumes. What the
// caller says of its snapshots is not called wrong because of the earlier group.
func TestLaggingReplicaOtherGroup(t *testing.T) {
	w, m, s := newCluster(t)
	behind, lag := w.behind()
	w.pooled(behind, m)
	v, err := s.Create(w.ctx, spec("v"))
	check.OK(t, err)
	other, err := s.Create(w.ctx, spec("other"))
	check.OK(t, err)
	group, err := s.CreateGroup(w.ctx, "g", []volume.ID{v.ID})
	check.OK(t, err)
	w.cachedSnapshots(behind, v.ID, 1)
	catchUp := lag.hold()
	defer catchUp()
	check.OK(t, s.DeleteGroup(w.ctx, group.ID))
	group, err = s.CreateGroup(w.ctx, "g", []volume.ID{other.ID})
	check.OK(t, err)
	ids := []string{group.Snapshots[0].ID.String()}
	server := controller.New(behind)
	have, err := server.GetVolumeGroupSnapshot(w.ctx, &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: group.ID.String(), SnapshotIds: ids})
	check.OK(t, err)
	if n := len(have.GetGroupSnapshot().GetSnapshots()); n != 1 || have.GetGroupSnapshot().GetSnapshots()[0].GetSourceVolumeId() != other.ID.String() {
		t.Errorf("got %v", have)
	}
	err = second(server.DeleteVolumeGroupSnapshot(soon(t), &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: group.ID.String(), SnapshotIds: ids}))
	fails(t, err, errdefs.ErrUnavailable) // its watch does not tell that it is gone
	w.eventually("it is deleted", func() bool { return len(w.objects()) == 2 })
	catchUp()
	w.tally(m)
}

// TestLaggingReplicaTaken: a snapshot and a group were taken since a controller heard last, and their volume was deleted. The controller finds them when it
// is asked for them again.
func TestLaggingReplicaTaken(t *testing.T) {
	w, m, s := newCluster(t)
	behind, lag := w.behind()
	w.pooled(behind, m)
	catchUp := lag.hold()
	defer catchUp()
	v, err := s.Create(w.ctx, spec("v"))
	check.OK(t, err)
	snapshot, err := s.CreateSnapshot(w.ctx, "s", v.ID)
	check.OK(t, err)
	group, err := s.CreateGroup(w.ctx, "g", []volume.ID{v.ID})
	check.OK(t, err)
	check.OK(t, s.Delete(w.ctx, v.ID))
	have, err := behind.CreateSnapshot(w.ctx, "s", v.ID)
	if err != nil || have.ID != snapshot.ID {
		t.Errorf("snapshot %v: %v", have.ID, err)
	}
	same, err := behind.CreateGroup(w.ctx, "g", []volume.ID{v.ID})
	if err != nil || same.ID != group.ID {
		t.Errorf("group %v: %v", same.ID, err)
	}
}

// TestLaggingReplicaDeletesReplicatedAgain: a controller knows that a volume with replicas is being deleted, and not yet that it is gone, and that another one
// has made it anew since. A further deletion is for the new one.
func TestLaggingReplicaDeletesReplicatedAgain(t *testing.T) {
	w, all, s := legCluster(t, 2)
	behind, lag := w.behind()
	v, err := s.Create(w.ctx, replicas("v", 2))
	check.OK(t, err)
	w.cached(behind, v.ID)
	all["node-2"].stop()
	fails(t, behind.Delete(soon(t), v.ID), errdefs.ErrUnavailable)
	catchUp := lag.hold()
	defer catchUp()
	w.start(all["node-2"].machine)
	w.again("it is deleted", func(ctx context.Context) error { return s.Delete(ctx, v.ID) })
	check.OK(t, second(s.Create(w.ctx, replicas("v", 2))))
	if err := behind.Delete(soon(t), v.ID); err != nil {
		fails(t, err, errdefs.ErrUnavailable) // its watch does not tell that it is gone
	} else if r := w.whole("v"); r != nil && !r.Going() { // the other controller may have deleted all by the time it asked for the legs
		t.Errorf("OK, and there is %v", r)
	}
	w.eventually("the new one is deleted", func() bool { r := w.whole("v"); return r == nil || r.Going() })
	catchUp()
	w.again("it is gone", func(ctx context.Context) error { return behind.Delete(ctx, v.ID) })
	if left := w.objects(); len(left) > 0 || w.whole("v") != nil {
		t.Errorf("left: %d objects, ReplicatedVolume %v", len(left), w.whole("v"))
	}
	for _, m := range all {
		w.tally(m.machine)
	}
}

// TestLaggingReplicaDeletesLegTakenOut: since a controller heard of a volume with replicas last, it got another replica, was used, and did without that
// replica, whose Volume is there still. The controller that did that is gone. A deletion by the other one leaves no leg.
func TestLaggingReplicaDeletesLegTakenOut(t *testing.T) {
	w, all := newEnvironment(t), nodes{}
	behind, lag := w.behind()
	s, stop := w.store()
	for _, name := range []string{"node-1", "node-2", "node-3"} {
		m, g := w.networked(name, "storage")
		all[name] = &legNode{m, g}
		w.pooled(s, m)
		w.pooled(behind, m)
	}
	v, err := s.Create(w.ctx, replicas("v", 2))
	check.OK(t, err)
	w.cached(behind, v.ID)
	catchUp := lag.hold()
	defer catchUp()
	w.edit("v", func(r *v1alpha1.ReplicatedVolume) { r.Spec.Replicas = 3 })
	w.eventually("it has another leg", func() bool {
		legs := w.legsOf("v")
		return len(legs) == 3 && legs[2].Status.Created != nil
	})
	check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-1"))))
	w.eventually("its legs are claimed", func() bool { return w.legsOf("v")[2].Spec.Claims > 0 })
	check.OK(t, s.Release(w.ctx, v.ID, "node-1"))
	stop()
	w.edit("v", func(r *v1alpha1.ReplicatedVolume) { r.Spec.Replicas, r.Spec.Legs = 2, r.Spec.Legs[:2] })
	deleted := make(chan error, 1)
	go func() { deleted <- behind.Delete(w.ctx, v.ID) }()
	w.eventually("the legs that it knows are gone", func() bool { return len(w.legsOf("v")) <= 1 })
	catchUp()
	check.OK(t, <-deleted)
	if left := w.objects(); len(left) > 0 || w.whole("v") != nil {
		t.Errorf("left: %d objects, ReplicatedVolume %v", len(left), w.whole("v"))
	}
	for _, m := range all {
		w.tally(m.machine)
	}
}
