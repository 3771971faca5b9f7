package main

import (
	"cmp"
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	fleet "github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// cutOf returns a snapshot of a volume on a node; edit changes it.
func cutOf(name, source, node string, size int64, edit func(*v1alpha1.Snapshot)) *v1alpha1.Snapshot {
	s := &v1alpha1.Snapshot{ObjectMeta: metav1.ObjectMeta{Name: volume.KeyOf(name)}, Spec: v1alpha1.SnapshotSpec{NodeName: node, Pool: "default", Name: name, Source: volume.KeyOf(source)},
		Status: v1alpha1.SnapshotStatus{ObjectStatus: v1alpha1.ObjectStatus{Created: new(metav1.NowMicro()), Size: size}}}
	if edit != nil {
		edit(s)
	}
	return s
}

// ported gives the agents of nodes a port, each in its pool "default" or that of NODE/POOL. Only agents may write that.
func (e *environment) ported(places ...string) {
	e.Helper()
	for _, at := range places {
		name, of, _ := strings.Cut(at, "/")
		p := &v1alpha1.Pool{}
		check.OK(e, e.Get(e.Context(), client.ObjectKey{Name: overview.PoolName(name, cmp.Or(of, "default"))}, p))
		before := p.DeepCopy()
		p.Status.Agent = &v1alpha1.AgentEndpoint{Address: "10.0.0.1:9810", Fingerprint: "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"}
		agent, err := client.New(apitest.Get(e).Agent(e, name), client.Options{Scheme: e.Scheme()})
		check.OK(e, err)
		check.OK(e, agent.Status().Patch(e.Context(), p, client.MergeFrom(before)))
	}
}

// carriers do what agents and controller do for moves of snapshots, but for one with a name, until the test ends.
func (e *environment) carriers(held string) {
	ctx, stop := context.WithCancel(e.Context())
	var done sync.WaitGroup
	done.Go(func() {
		for ; ctx.Err() == nil; time.Sleep(5 * time.Millisecond) {
			var all v1alpha1.SnapshotList
			if err := e.List(ctx, &all); err != nil {
				continue
			}
			for i := range all.Items {
				if s := &all.Items[i]; s.Spec.Move != nil && s.Spec.Name != held {
					_ = e.carry(ctx, s) // else at the next look
				}
			}
		}
	})
	e.Cleanup(func() { stop(); done.Wait() })
}

// carry takes the next step of the move of a snapshot.
func (e *environment) carry(ctx context.Context, s *v1alpha1.Snapshot) error {
	switch m, far := s.Spec.Move, s.Status.Move; {
	case !m.Left && far == nil:
		s.Status.Move = &v1alpha1.MoveStatus{Node: m.Node, Message: "half is copied", Progress: &v1alpha1.Progress{Done: 1, Total: 2}}
		return e.Status().Update(ctx, s)
	case !m.Left:
		fleet.FlipSnapshot(s)
	case !far.Arrived:
		s.Status.Move = &v1alpha1.MoveStatus{Node: s.Spec.NodeName, Arrived: true, Message: "moved"}
		return e.Status().Update(ctx, s)
	default:
		s.Spec.Move = nil
	}
	return e.Update(ctx, s)
}

// isOn checks that a snapshot is on a node, and does not move.
func (e *environment) isOn(s *v1alpha1.Snapshot, node string) {
	e.Helper()
	now := &v1alpha1.Snapshot{}
	check.OK(e, e.Get(e.Context(), client.ObjectKeyFromObject(s), now))
	if now.Spec.NodeName != node || now.Spec.Move != nil {
		e.Errorf("%s is %+v, and should be on node %s", s.Spec.Name, now.Spec, node)
	}
}

// TestMoveWithSnapshots: the snapshots of a volume stay, or move along with it if asked to, wherever they are; they can also follow it later.
func TestMoveWithSnapshots(t *testing.T) {
	e := newEnvironment(t)
	nodes(e)
	e.ported("n1", "n3", "n4")
	hasten(t)
	e.add(movable("pvc-1", "n1", 100*mib, nil))
	one, two, others := cutOf("one", "pvc-1", "n1", 100*mib, nil), cutOf("two", "pvc-1", "n4", 100*mib, nil), cutOf("others", "pvc-2", "n1", mib, nil)
	for _, s := range []*v1alpha1.Snapshot{one, two, others} {
		e.add(s)
	}
	run(t, apitest.Admin, "move", "pvc-1", "--to=n3", "--with-snapshots", "--wait=false").says(t, "pvc-1: node n3 is asked to copy it from node n1\n",
		"snapshot one: node n3 is asked to copy it from node n1\n", "snapshot two: node n3 is asked to copy it from node n4\n")
	run(t, apitest.Admin, "move", "pvc-1", "--cancel", "--with-snapshots").says(t, "pvc-1: it stays on node n1.\n", "snapshot one: it stays on node n1.\n", "snapshot two: it stays on node n4.\n")
	e.isOn(one, "n1")
	e.drivers("")
	e.carriers("")
	r := run(t, apitest.Admin, "move", "pvc-1", "--to=n3")
	check.OK(t, r.err)
	e.isOn(one, "n1")
	r = run(t, apitest.Admin, "move", "pvc-1", "--to=n3", "--with-snapshots")
	check.OK(t, r.err)
	r.says(t, "snapshot one: it is on node n3\n", "snapshot two: it is on node n3\n")
	run(t, apitest.Admin, "move", "pvc-1", "--to=n3", "--with-snapshots").says(t, "It has no snapshots on other nodes than n3.\n")
	r = run(t, apitest.Admin, "move", "pvc-1", "--to=n1", "--with-snapshots")
	check.OK(t, r.err)
	r.says(t, "pvc-1: it is on node n1.\n", "snapshot one: it is on node n1\n")
	e.isOn(one, "n1")
	e.isOn(two, "n1")
	e.isOn(others, "n1")
	r = run(t, apitest.Admin, "move", two.ID(), "--to=n4")
	check.OK(t, r.err)
	r.says(t, "snapshot two: it is on node n4\n")
	e.isOn(two, "n4")
}

// TestMoveToOtherPoolWithSnapshots: a volume moves to a pool of another name, its snapshots to those of their own names on that node. A snapshot without one
// there stays, and the output says so.
func TestMoveToOtherPoolWithSnapshots(t *testing.T) {
	e := newEnvironment(t)
	nodes(e)
	fast(e, "n3")
	e.ported("n1", "n3", "n3/fast", "n4")
	hasten(t)
	e.add(movable("pvc-1", "n1", 100*mib, nil))
	early, another := cutOf("early", "pvc-1", "n1", 90*mib, nil), cutOf("another", "pvc-1", "n1", mib, func(s *v1alpha1.Snapshot) { s.Spec.SourcePool = "fast" }) // of an earlier volume
	later := cutOf("later", "pvc-1", "n3", 80*mib, func(s *v1alpha1.Snapshot) { s.Spec.Pool, s.Spec.SourcePool = "fast", "default" })
	for _, s := range []*v1alpha1.Snapshot{early, another} {
		e.add(s)
	}
	e.drivers("")
	e.carriers("")
	r := run(t, apitest.Admin, "move", "pvc-1", "--to=n3/fast", "--with-snapshots")
	check.OK(t, r.err)
	r.says(t, "pvc-1: it is in pool fast of node n3.\nIts snapshots move to the pools of their own names on node n3, which their IDs have.\n", "snapshot early: it is on node n3\n")
	e.isOn(early, "n3")
	e.isOn(another, "n1")
	e.add(later)
	r = run(t, apitest.Admin, "evacuate", "n3", "--to=n4/default", "--with-snapshots", "--dry-run")
	r.says(t, "pvc-1   100Mi  n4/default  -\n", "early     90Mi  n4     -\n", "later     80Mi  stays  node n4: it has no pool fast (it has default): a snapshot stays in pools of one name, as its ID has it; start the driver there with a --pool of the name fast\n")
	r = run(t, apitest.Admin, "move", "pvc-1", "--to=n4/default", "--with-snapshots")
	r.refused(t, "1 of 2 snapshots stay where they are, see above")
	r.says(t, "pvc-1: it is in pool default of node n4.\nIts snapshots move to the pools of their own names", "snapshot later: stays on node n3: it has no pool fast (it has default)", "snapshot early: it is on node n4\n")
	e.isOn(early, "n4")
	e.isOn(later, "n3")
	run(t, apitest.Admin, "move", later.ID(), "--to=n1/default").refused(t, "to pool default of node n1: it is in pool fast, and stays in pools of that name, as its ID has it; give --to n1")
}

// TestMoveSnapshotRefused: a snapshot that cannot move is refused, with the reason.
func TestMoveSnapshotRefused(t *testing.T) {
	e := newEnvironment(t)
	nodes(e)
	e.ported("n1", "n3")
	hasten(t)
	waits(t, &standstill, 300*time.Millisecond)
	large, lost, stuck := cutOf("large", "pvc-1", "n1", 900*mib, nil), cutOf("lost", "pvc-1", "n1", mib, func(s *v1alpha1.Snapshot) {
		s.Status.Conditions = []metav1.Condition{{Type: v1alpha1.Ready, Status: metav1.ConditionFalse, Reason: "DataLoss", LastTransitionTime: metav1.Now()}}
	}), cutOf("stuck", "pvc-1", "n1", mib, nil)
	for _, s := range []*v1alpha1.Snapshot{large, lost, stuck} {
		e.add(s)
	}
	for _, c := range []struct{ id, to, says string }{
		{large.ID(), "n3", "snapshot large: stays on node n1: pool n3.default has no room: 900Mi are needed"},
		{large.ID(), "n1", "snapshot large: stays on node n1: it is on that node"},
		{stuck.ID(), "n4", "snapshot stuck: stays on node n1: its agent has no port"},
		{stuck.ID(), "n9", "snapshot stuck: stays on node n1: there is no such node"},
		{lost.ID(), "n3", "snapshot lost: stays on node n1: its bytes are missing"},
		{stuck.ID(), "n3", "snapshot stuck: stays on node n1: its move does not go on (nothing has changed for 300ms), and may later: node n3 is asked to copy it from node n1"},
	} {
		r := run(t, apitest.Admin, "move", c.id, "--to="+c.to)
		r.refused(t, "1 of 1 snapshots stay where they are, see above")
		r.says(t, c.says)
	}
	run(t, apitest.Admin, "move", stuck.ID(), "--cancel").says(t, "snapshot stuck: it stays on node n1.\n")
	run(t, apitest.Admin, "move", "snap.default.0123456789abcdef0123456789abcdef", "--to=n3").refused(t, "there is no snapshot snap.default.0123456789abcdef0123456789abcdef")
	run(t, apitest.Admin, "move", stuck.ID(), "--to=n3/b").refused(t, "it is in pool default, and stays in pools of that name")
}

// TestEvacuateWithSnapshots: the snapshots of a node stay, or move if asked to: to the node of their volume, or to which it moves; those of a group to one
// node; others to where there is most room.
func TestEvacuateWithSnapshots(t *testing.T) {
	e := newEnvironment(t)
	nodes(e)
	e.ported("n1", "n2", "n3", "n4")
	hasten(t)
	e.add(movable("pvc-a", "n1", 100*mib, nil))
	e.add(movable("pvc-far", "n4", 10*mib, nil))
	grouped := func(s *v1alpha1.Snapshot) { s.Spec.Group = &v1alpha1.Group{Key: volume.KeyOf("group"), Size: 2} }
	along, far, gone := cutOf("along", "pvc-a", "n1", 90*mib, nil), cutOf("far", "pvc-far", "n1", 80*mib, nil), cutOf("gone", "pvc-gone", "n1", 70*mib, nil)
	first, second := cutOf("first", "pvc-far", "n1", 60*mib, grouped), cutOf("second", "pvc-a", "n1", 50*mib, grouped)
	large, there := cutOf("large", "pvc-gone", "n1", 900*mib, nil), cutOf("there", "pvc-a", "n3", mib, nil)
	for _, s := range []*v1alpha1.Snapshot{along, far, gone, first, second, large, there} {
		e.add(s)
	}
	run(t, apitest.Admin, "evacuate", "n1", "--dry-run").says(t, "Snapshots on node n1, which stay there without --with-snapshots: 6\n")
	r := run(t, apitest.Admin, "evacuate", "n1", "--dry-run", "--with-snapshots")
	r.says(t, "pvc-a   100Mi  n3  -\n", "SNAPSHOT  SIZE   TO     REMARKS\n", "along     90Mi   n3     -\n", "far       80Mi   n4     -\n", "first     60Mi   n4     -\n", "second    50Mi   n4     -\n", "large     900Mi  stays  node n2: it is cordoned")
	r.refused(t, "1 of 6 snapshots stay where they are, see above")
	e.isOn(along, "n1")
	e.drivers("")
	e.carriers("")
	r = run(t, apitest.Admin, "evacuate", "n1", "--with-snapshots")
	r.refused(t, "1 of 6 snapshots stay where they are, see above")
	r.says(t, "No volume is left on node n1.\n", "snapshot gone: it is on node n")
	for s, node := range map[*v1alpha1.Snapshot]string{along: "n3", far: "n4", first: "n4", second: "n4", large: "n1", there: "n3"} {
		e.isOn(s, node)
	}
	e.remove(large)
	r = run(t, apitest.Admin, "evacuate", "n1", "--with-snapshots")
	check.OK(t, r.err)
	r.says(t, "No volume is on node n1.\n")
}

// TestRoomOfAsked: the room of what is asked to move to a pool, and has not begun, is taken there: no other move is planned into it.
func TestRoomOfAsked(t *testing.T) {
	e := newEnvironment(t)
	nodes(e)
	e.ported("n1", "n3")
	hasten(t)
	v := movable("pvc-1", "n4", 100*mib, nil)
	e.add(v)
	var cuts []*v1alpha1.Snapshot
	for _, name := range []string{"one", "two", "three", "four"} {
		cuts = append(cuts, cutOf(name, "pvc-gone", "n1", 200*mib, nil))
		e.add(cuts[len(cuts)-1])
	}
	r := run(t, apitest.Admin, "move", "pvc-1", "--to=n3", "--wait=false")
	check.OK(t, r.err)
	e.edited(v, func(v *v1alpha1.Volume) { v.Status.Move = &v1alpha1.MoveStatus{Node: "n3", Waits: true, Message: "m"} }) // its copy has not begun
	check.OK(t, run(t, apitest.Admin, "move", cuts[0].ID(), "--to=n3", "--wait=false").err)
	check.OK(t, run(t, apitest.Admin, "move", cuts[1].ID(), "--to=n3", "--wait=false").err)
	r = run(t, apitest.Admin, "move", cuts[2].ID(), "--to=n3", "--wait=false")
	r.refused(t, "1 of 1 snapshots stay where they are")
	r.says(t, "pool n3.default has no room: 200Mi are needed, and 0 could come at most")
	r = run(t, apitest.Admin, "evacuate", "n1", "--to=n3", "--with-snapshots", "--dry-run")
	r.refused(t, "2 of 4 snapshots stay where they are")
	r.says(t, "one       200Mi  n3     under way\n", "two       200Mi  n3     under way\n", "three     200Mi  stays  ", "four      200Mi  stays  ")

	// Moves that were taken back take no room, and those that have begun are in the pool's own figures.
	check.OK(t, run(t, apitest.Admin, "move", "pvc-1", "--cancel").err)
	check.OK(t, run(t, apitest.Admin, "move", cuts[1].ID(), "--cancel").err)
	check.OK(t, e.Get(e.Context(), client.ObjectKeyFromObject(cuts[0]), cuts[0]))
	check.OK(t, e.carry(e.Context(), cuts[0]))
	p := &v1alpha1.Pool{}
	check.OK(t, e.Get(e.Context(), client.ObjectKey{Name: overview.PoolName("n3", "default")}, p))
	before := p.DeepCopy()
	p.Status.Available -= 200 * mib
	check.OK(t, e.Status().Patch(e.Context(), p, client.MergeFrom(before)))
	check.OK(t, run(t, apitest.Admin, "move", cuts[2].ID(), "--to=n3", "--wait=false").err)
	run(t, apitest.Admin, "move", cuts[3].ID(), "--to=n3", "--wait=false").says(t, "200Mi are needed, and 100Mi could come at most")
}
