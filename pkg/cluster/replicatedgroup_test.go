package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/store"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// TestReplicatedGroup: volumes with replicas can be in group snapshots, beside others. All snapshots are taken on one node that has all of the volumes: of
// a volume with replicas, of its leg there, which has to be current.
func TestReplicatedGroup(t *testing.T) {
	w, all, s := legCluster(t, 3)
	w.cordoned("node-3", true)
	w.places(s, "", map[string]string{"node-1": "node-1", "node-2": "node-2"})
	first, err := s.Create(w.ctx, replicas("first", 2, "node-1"))
	check.OK(t, err)
	second, err := s.Create(w.ctx, replicas("second", 2, "node-2"))
	check.OK(t, err)
	plain, err := s.Create(w.ctx, anyNode("plain", "node-2"))
	check.OK(t, err)
	w.cordoned("node-3", false)
	far, err := s.Create(w.ctx, anyNode("far", "node-3"))
	check.OK(t, err)

	group, err := s.CreateGroup(w.ctx, "g", []volume.ID{first.ID, second.ID, plain.ID})
	check.OK(t, err)
	of := map[volume.ID]bool{}
	for _, one := range group.Snapshots {
		of[one.Source] = true
		o := w.cutObject(one.ID)
		if o.Spec.NodeName != "node-2" {
			t.Errorf("%s was cut on %s", one.Source, o.Spec.NodeName)
		}
		if leg := w.legsOf("first")[1].Name; one.Source == first.ID && o.Spec.Leg != leg {
			t.Errorf("of the first volume the leg %q was cut, and not %s", o.Spec.Leg, leg)
		}
	}
	if len(group.Snapshots) != 3 || !of[first.ID] || !of[second.ID] || !of[plain.ID] {
		t.Errorf("the group is %+v", group)
	}
	again, err := s.CreateGroup(w.ctx, "g", []volume.ID{plain.ID, second.ID, first.ID})
	if err != nil || !again.Created.Equal(group.Created) || len(again.Snapshots) != 3 {
		t.Errorf("asked for again it is %+v, %v", again, err)
	}
	restored := spec("restored")
	restored.Source = group.Snapshots[slices.IndexFunc(group.Snapshots, func(one volume.Snapshot) bool { return one.Source == first.ID })].ID
	copied, err := s.Create(w.ctx, restored)
	check.OK(t, err)
	check.OK(t, s.Delete(w.ctx, copied.ID))
	check.OK(t, s.DeleteGroup(w.ctx, group.ID))

	refused := func(sources ...volume.ID) {
		t.Helper()
		_, err := s.CreateGroup(w.ctx, "none", sources)
		if fails(t, err, errdefs.ErrPrecondition); err == nil || !strings.Contains(err.Error(), "only volumes of one node can be cut at one moment") {
			t.Error(err)
		}
	}
	refused(first.ID, far.ID)
	w.says("first", func(r *v1alpha1.ReplicatedVolume) { r.Leg(w.legsOf("first")[1].Name).Current = false })
	w.eventually("the store knows that", func() bool {
		_, err := s.CreateGroup(w.ctx, "none", []volume.ID{first.ID, plain.ID})
		if err == nil {
			t.Error("a group was taken of a leg that is not current")
		}
		return errors.Is(err, errdefs.ErrPrecondition)
	})
	refused(first.ID, plain.ID)

	all["node-1"].stop()
	w.node("node-1", false)
	tries := 0
	w.eventually("what both have is cut where somebody is there", func() bool {
		tries++ // a group that was asked of node-1, before the store knew that it is down, is waited for
		w.says("first", func(r *v1alpha1.ReplicatedVolume) {
			for i := range r.Status.Legs {
				r.Status.Legs[i].Current = true
			}
		})
		group, err := s.CreateGroup(soon(t), fmt.Sprint("there ", tries), []volume.ID{first.ID, second.ID})
		return err == nil && w.cutObject(group.Snapshots[0].ID).Spec.NodeName == "node-2"
	})
}

// pair makes two volumes with two replicas each, on node-1 and node-2.
func (w *environment) pair(s *store.Store) (ids []volume.ID) {
	w.Helper()
	for _, name := range []string{"first", "second"} {
		v, err := s.Create(w.ctx, replicas(name, 2, "node-1"))
		check.OK(w, err)
		ids = append(ids, v.ID)
	}
	return ids
}

// TestReplicatedGroupOfAway: a group snapshot that was asked of a node which is down by now, and has taken none of it, is taken on another one that has all
// of the volumes.
func TestReplicatedGroupOfAway(t *testing.T) {
	w, all, s := legCluster(t, 2)
	sources := w.pair(s)
	all["node-1"].stop()
	fails(t, second(s.CreateGroup(soon(t), "g", sources)), errdefs.ErrUnavailable)
	var asked v1alpha1.SnapshotList
	if check.OK(t, w.List(w.ctx, &asked)); len(asked.Items) != 2 || asked.Items[0].Spec.NodeName != "node-1" || asked.Items[1].Spec.NodeName != "node-1" {
		t.Fatalf("asked for are %+v", asked.Items)
	}
	w.node("node-1", false)
	w.again("it is taken on the other node", func(ctx context.Context) error { return second(s.CreateGroup(ctx, "g", sources)) })
	group, err := s.CreateGroup(w.ctx, "g", sources)
	if check.OK(t, err); len(group.Snapshots) != 2 || group.Snapshots[0].Node != "node-2" || group.Snapshots[1].Node != "node-2" {
		t.Errorf("it is %+v", group)
	}
}

// TestReplicatedGroupOfPowerLost: a leg whose machine has lost power since its volume was used may lack what was not flushed. A group is cut on another node
// that has current legs of all volumes. If each node has such a leg, the group is refused with the reason of one of them.
func TestReplicatedGroupOfPowerLost(t *testing.T) {
	w, all, s := legCluster(t, 2)
	sources := w.pair(s)
	all["node-1"].lostPower(t, sources[1])
	group, err := s.CreateGroup(w.ctx, "g", sources)
	if check.OK(t, err); len(group.Snapshots) != 2 || group.Snapshots[0].Node != "node-2" || group.Snapshots[1].Node != "node-2" {
		t.Errorf("it is %+v", group)
	}
	all["node-2"].lostPower(t, cluster.VolumeID(w.legsOf("first")[1]))
	err = second(s.CreateGroup(w.ctx, "none", sources))
	if fails(t, err, errdefs.ErrUnavailable); !strings.Contains(err.Error(), "has started anew") {
		t.Error(err)
	}
	var left v1alpha1.SnapshotList
	if check.OK(t, w.List(w.ctx, &left)); len(left.Items) != 2 {
		t.Errorf("left are %+v", left.Items)
	}
}
