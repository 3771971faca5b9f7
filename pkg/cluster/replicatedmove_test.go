package cluster_test

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/remotepool/remotetest"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/store"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// legMovesTo asks for a leg to move to a node; with an empty node it takes the move back.
func (w *environment) legMovesTo(leg *v1alpha1.Volume, node string) {
	w.Helper()
	v := &v1alpha1.Volume{}
	check.OK(w, w.Get(w.ctx, client.ObjectKeyFromObject(leg), v))
	before := v.DeepCopy()
	if v.Spec.Move = nil; node != "" {
		v.Spec.Move = &v1alpha1.Move{Node: node}
	}
	check.OK(w, w.Patch(w.ctx, v, client.MergeFrom(before)))
}

// TestReplicaMovesUsed: a leg that is asked to move while its volume is used stays until another leg, on the node that it is to move to, has everything.
// That node may be in its own zone, but must not be cordoned, or be on the node or in the zone of another leg. If the move is taken back, the new leg is
// removed.
func TestReplicaMovesUsed(t *testing.T) {
	w, all, s := legCluster(t, 4)
	w.zones(s, map[string]string{"node-1": "a", "node-2": "b", "node-3": "b", "node-4": "a"})
	spec := replicas("v", 2, "node-1")
	spec.Replicas.TopologyKey = "zone"
	v, err := s.Create(w.ctx, spec)
	check.OK(t, err)
	check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-1"))))
	w.becomes("v", w.whole("v").Spec.Legs...)
	old := w.legsOf("v")[1]
	to := map[string]string{"node-2": "node-3", "node-3": "node-2"}[old.Spec.NodeName]

	stays := func(why string) {
		t.Helper()
		time.Sleep(500 * time.Millisecond)
		if legs := w.legsOf("v"); len(legs) != 2 {
			t.Errorf("%s, and it has legs on %v", why, w.homes("v"))
		}
		w.legMovesTo(old, "")
	}
	w.cordoned(to, true)
	w.places(s, "", map[string]string{"node-1": "node-1", old.Spec.NodeName: old.Spec.NodeName, "node-4": "node-4"})
	w.legMovesTo(old, to)
	stays("its new node is cordoned")
	w.cordoned(to, false)
	w.legMovesTo(old, "node-4")
	stays("the other leg is in that zone")
	w.legMovesTo(old, "node-1")
	stays("the other leg is on that node")

	second := func() bool {
		legs := w.legsOf("v")
		return len(legs) == 3 && legs[2].Spec.NodeName == to && legs[2].Status.Created != nil
	}
	w.legMovesTo(old, to)
	w.eventually("another leg is there", second)
	w.legMovesTo(old, "")
	w.eventually("it is not needed any more", func() bool { return len(w.whole("v").Spec.Legs) == 2 })
	w.becomes("v", w.whole("v").Spec.Legs...)
	w.eventually("it is gone", func() bool { return len(w.legsOf("v")) == 2 })
	if !slices.Contains(w.whole("v").Spec.Legs, old.Name) {
		t.Error("the wrong leg has gone")
	}

	w.legMovesTo(old, to)
	w.eventually("another leg is there", second)
	time.Sleep(300 * time.Millisecond)
	if legs := w.legsOf("v"); len(legs) != 3 || legs[1].Spec.NodeName != old.Spec.NodeName {
		t.Errorf("its legs are on %v before the new one has everything", w.homes("v"))
	}
	w.replaced("v", old.Name)
	if homes := w.homes("v"); !slices.Equal(homes, []string{"node-1", to}) {
		t.Errorf("its legs are on %v", homes)
	}
	check.OK(t, s.Release(w.ctx, v.ID, "node-1"))
	check.OK(t, s.Delete(w.ctx, v.ID))
	for _, m := range all {
		w.tally(m.machine)
	}
}

// legsAtRest returns a volume with legs on the first two of three nodes, which nobody uses.
func legsAtRest(t *testing.T) (w *environment, v volume.Volume, s *store.Store, a, b, c *machine) {
	t.Helper()
	drivertest.NeedRoot(t)
	w, network := newEnvironment(t), &remotetest.Network{}
	begin := func(name string) *machine { return w.begin(&machine{name: name, ported: true, network: network}) }
	a, b, c = begin("node-1"), begin("node-2"), begin("node-3")
	s = w.calling(a)
	w.pooled(s, b)
	w.pooled(s, c)
	w.cordoned(c.name, true)
	w.places(s, "", map[string]string{a.name: a.name, b.name: b.name})
	v, err := s.Create(w.ctx, replicas("v", 2, a.name))
	check.OK(t, err)
	w.cordoned(c.name, false)
	return w, v, s, a, b, c
}

// TestReplicaMovesAtRest: a leg of a volume that nobody uses moves with its bytes, and stays the same leg, as current as before. It does not move to the
// node of another leg. When the volume is claimed, a leg that is to move is replaced by another one instead.
func TestReplicaMovesAtRest(t *testing.T) {
	w, v, s, a, b, c := legsAtRest(t)
	first, second := w.legsOf("v")[0], w.legsOf("v")[1]
	w.write(a, legID(first), 0)
	want := w.content(a, legID(first))

	w.legMovesTo(first, b.name)
	w.movesays("v", "has another replica of its volume")
	w.legMovesTo(first, "")
	w.legMovesTo(first, c.name)
	w.moved("v", a, c)
	if homes := w.homes("v"); !slices.Equal(homes, []string{c.name, b.name}) {
		t.Errorf("its legs are on %v", homes)
	}
	if r := w.whole("v"); len(r.Current()) != 2 || r.Status.Summary != "2 of 2" {
		t.Errorf("it is %+v", r.Status)
	}
	if have := w.content(c, legID(first)); !bytes.Equal(have, want) {
		t.Error("its bytes are others")
	}
	if have, err := c.local.Get(w.ctx, legID(first)); err != nil || have.ReplicaOf != first.Spec.ReplicaOf {
		t.Errorf("on its new node it is %+v, %v", have, err)
	}
	_, err := s.Claim(w.ctx, v.ID, on(a.name))
	check.OK(t, err)
	w.eventually("both are claimed", func() bool { return !slices.Contains(w.claims("v"), "") })
	w.becomes("v", first.Name, second.Name)
	w.legMovesTo(second, a.name)
	w.eventually("it gets another one", func() bool { legs := w.legsOf("v"); return len(legs) == 3 && legs[2].Spec.NodeName == a.name })
	w.replaced("v", second.Name)
	check.OK(t, s.Release(w.ctx, v.ID, a.name))
	check.OK(t, s.Delete(w.ctx, v.ID))
}

// TestReplicasMoveToOneNode: both legs of a volume in use are asked to move to the same node, as two nodes are emptied at once. One of them does; the other stays,
// and moves when it is asked to move elsewhere.
func TestReplicasMoveToOneNode(t *testing.T) {
	w, v, s, a, b, c := legsAtRest(t)
	first, second := w.legsOf("v")[0], w.legsOf("v")[1]
	_, err := s.Claim(w.ctx, v.ID, on(a.name))
	check.OK(t, err)
	w.becomes("v", first.Name, second.Name)
	w.cordoned(c.name, true)
	w.legMovesTo(first, c.name)
	w.legMovesTo(second, c.name)
	time.Sleep(300 * time.Millisecond) // the controller knows of both
	w.cordoned(c.name, false)
	w.eventually("one gets another in its place", func() bool { return slices.Contains(w.homes("v"), c.name) })
	next := w.legsOf("v")[2]
	w.becomes("v", first.Name, second.Name, next.Name)
	stay := []string{second.Name, next.Name}
	w.eventually("the first one is to go", func() bool { return slices.Equal(w.whole("v").Spec.Legs, stay) })
	w.becomes("v", stay...)
	w.eventually("the other one stays", func() bool { return slices.Equal(w.homes("v"), []string{b.name, c.name}) })
	w.legMovesTo(second, a.name)
	w.eventually("it moves elsewhere", func() bool { return slices.Contains(w.homes("v"), a.name) })
	check.OK(t, s.Release(w.ctx, v.ID, a.name))
	check.OK(t, s.Delete(w.ctx, v.ID))
}

// TestReplicasMoveToOneZone: as TestReplicasMoveToOneNode, with two nodes that have the same value of the label that the volume names.
func TestReplicasMoveToOneZone(t *testing.T) {
	w, _, s := legCluster(t, 4)
	w.zones(s, map[string]string{"node-1": "a", "node-2": "b", "node-3": "c", "node-4": "c"})
	cordon := func(is bool) {
		w.cordoned("node-3", is)
		w.cordoned("node-4", is)
	}
	cordon(true)
	w.places(s, "", map[string]string{"node-1": "node-1", "node-2": "node-2"})
	spec := replicas("v", 2, "node-1")
	spec.Replicas.TopologyKey = "zone"
	v, err := s.Create(w.ctx, spec)
	check.OK(t, err)
	check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-1"))))
	first, other := w.legsOf("v")[0], w.legsOf("v")[1]
	w.becomes("v", first.Name, other.Name)
	w.legMovesTo(first, "node-3")
	w.legMovesTo(other, "node-4")
	time.Sleep(300 * time.Millisecond) // the controller knows of both
	cordon(false)
	w.eventually("the first gets another in its place", func() bool { return slices.Contains(w.homes("v"), "node-3") })
	next := w.legsOf("v")[2]
	w.becomes("v", first.Name, other.Name, next.Name)
	stay := []string{other.Name, next.Name}
	w.eventually("the first one is to go", func() bool { return slices.Equal(w.whole("v").Spec.Legs, stay) })
	w.becomes("v", stay...)
	w.eventually("it is gone, and the other stays", func() bool { return slices.Equal(w.homes("v"), []string{"node-2", "node-3"}) })
	w.eventually("it is said why", func() bool {
		return strings.Contains(w.whole("v").Status.Lacks, "is where node node-3 is, which has another replica of the volume")
	})
	check.OK(t, s.Release(w.ctx, v.ID, "node-1"))
	check.OK(t, s.Delete(w.ctx, v.ID))
}

// TestReplicaLostBesideMoving: a leg of a volume in use was asked to move to where there is no room. Another one that is lost meanwhile does not wait for that.
func TestReplicaLostBesideMoving(t *testing.T) {
	w, all, s := legCluster(t, 4)
	v, err := s.Create(w.ctx, replicas("v", 2, "node-1"))
	check.OK(t, err)
	check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-1"))))
	lost, moves := w.legsOf("v")[0], w.legsOf("v")[1]
	w.becomes("v", lost.Name, moves.Name)
	var free []string
	for name := range all {
		if !slices.Contains(w.homes("v"), name) {
			free = append(free, name)
		}
	}
	w.cordoned(free[0], true)
	w.legMovesTo(moves, free[0])
	w.eventually("it is said why it does not move", func() bool { return strings.Contains(w.whole("v").Status.Lacks, "node "+free[0]+" is cordoned") })
	w.becomes("v", moves.Name)
	w.edit("v", func(r *v1alpha1.ReplicatedVolume) { r.Spec.ReplaceAfter = 1 })
	w.eventually("the lost one gets another in its place", func() bool { return slices.Contains(w.homes("v"), free[1]) })
	next := w.legsOf("v")[2]
	w.becomes("v", moves.Name, next.Name)
	w.eventually("it is gone", func() bool { return slices.Equal(w.homes("v"), []string{moves.Spec.NodeName, free[1]}) })
	w.becomes("v", moves.Name, next.Name)
	w.cordoned(free[0], false)
	w.eventually("the other one moves", func() bool { return slices.Contains(w.homes("v"), free[0]) })
	check.OK(t, s.Release(w.ctx, v.ID, "node-1"))
	check.OK(t, s.Delete(w.ctx, v.ID))
}

// TestReplicaDeletedAsItLeft: a leg of a volume has moved, and its old node still has the bytes. The volume is deleted only when that node has given them
// back: otherwise they would stay there.
func TestReplicaDeletedAsItLeft(t *testing.T) {
	w, v, s, a, b, c := legsAtRest(t)
	leg := w.legsOf("v")[0]
	now := func() *v1alpha1.Volume {
		v := &v1alpha1.Volume{}
		check.OK(t, w.Get(w.ctx, client.ObjectKeyFromObject(leg), v))
		return v
	}
	w.legMovesTo(leg, c.name)
	for m := now().Status.Move; m == nil || m.Copied == nil; m = now().Status.Move {
		time.Sleep(time.Millisecond)
	}
	a.stop()
	w.eventually("it has moved", func() bool { m := now().Spec.Move; return m != nil && m.Left })
	w.eventually("it is said what the deletion waits for", func() bool {
		err := s.Delete(soon(t), v.ID)
		return errors.Is(err, errdefs.ErrUnavailable) && strings.Contains(err.Error(), "it has moved from node node-1, which has not given its bytes back yet")
	})
	if v := now(); v.Deleting() || v.Spec.Move == nil {
		t.Errorf("it is %+v", v.Spec)
	}
	w.start(a)
	w.eventually("it is deleted", func() bool { return s.Delete(soon(t), v.ID) == nil })
	for _, m := range []*machine{a, b, c} {
		w.tally(m)
	}
}

// TestReplicaBesideMoving: no further leg is placed on the node that a leg is to move to, or in its zone.
func TestReplicaBesideMoving(t *testing.T) {
	w, _, s := legCluster(t, 4)
	zones := map[string]string{"node-1": "a", "node-2": "c", "node-3": "b", "node-4": "c"}
	w.zones(s, zones)
	spec := replicas("v", 2, "node-1")
	spec.Replicas.TopologyKey = "zone"
	_, err := s.Create(w.ctx, spec)
	check.OK(t, err)
	legs := w.legsOf("v")
	leaves := legs[0] // on node-1, in zone a; the other leg is in b or c
	to := map[string]string{"b": "node-4", "c": "node-3"}[zones[legs[1].Spec.NodeName]]
	room := func() error {
		r := w.whole("v")
		return s.HasRoom(w.ctx, r, cluster.AddLeg(r), leaves, nil, nil)
	}
	check.OK(t, room())
	w.legMovesTo(leaves, to)
	w.eventually("no zone is left", func() bool { return errors.Is(room(), errdefs.ErrNoSpace) })
	if err := room(); !strings.Contains(err.Error(), "is where node "+to+" is, which has another replica of the volume, or gets one (parameter replicaTopologyKey=zone)") &&
		!strings.Contains(err.Error(), "node "+to+" has another replica of the volume, or gets one") {
		t.Error(err)
	}
	w.legMovesTo(leaves, "")
	w.eventually("it stays", func() bool { return room() == nil })
}

// TestReplicaMovesIntoLittleRoom: a leg of a volume in use can move to a node with room for one such leg: the room for the move and that for the new leg
// are the same, and count once.
func TestReplicaMovesIntoLittleRoom(t *testing.T) {
	w, _, s := legCluster(t, 3)
	spec := replicas("v", 2, "node-1")
	spec.Size.Required = 64 * mib
	v, err := s.Create(w.ctx, spec)
	check.OK(t, err)
	check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-1"))))
	w.becomes("v", w.whole("v").Spec.Legs...)
	old := w.legsOf("v")[1]
	to := map[string]string{"node-2": "node-3", "node-3": "node-2"}[old.Spec.NodeName]
	filler := anyNode("filler", to)
	filler.Size.Required = w.available(s, to) - 96*mib
	check.OK(t, second(s.Create(w.ctx, filler)))
	w.eventually("there is room for one", func() bool { return w.available(s, to) == 96*mib })
	w.legMovesTo(old, to)
	w.eventually("its successor is there", func() bool { return slices.Contains(w.homes("v"), to) })
	w.eventually("it has its room there once", func() bool { return w.available(s, to) == 32*mib })
	w.replaced("v", old.Name)
	check.OK(t, s.Release(w.ctx, v.ID, "node-1"))
	check.OK(t, s.Delete(w.ctx, v.ID))
}
