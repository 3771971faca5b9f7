package cluster_test

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/agent"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
	"github.com/ashlar-csi/ashlar/pkg/volume/storetest"
)

// startWith starts the agent of a machine with pools of some names, in this order: "default", "b", or "renamed", which is on the disk of "default".
func (w *environment) startWith(m *machine, names ...string) {
	w.Helper()
	mounts, err := mount.LoadTable()
	check.OK(w, err)
	var pools []blockdev.Pool
	var kept []agent.Pool
	for _, name := range names {
		p := m.disks[map[string]int{"default": 0, "renamed": 0, "b": 1}[name]].Open(name, m.hook)
		pools, kept = append(pools, p), append(kept, agent.Pool{Pool: p, Kind: "memory"})
	}
	m.local, err = volume.NewLocal(w.ctx, m.name, pools, mounts, 0)
	check.OK(w, err)
	m.agent, err = agent.New(apitest.Get(w).Agent(w, m.name), m.local, agent.Options{Driver: cluster.DefaultDriver, Pools: kept, Locks: m.locks, MaxVolumes: storetest.Limit})
	check.OK(w, err)
	m.stop = w.run(m.agent.Run)
}

// pool returns the object of a pool; it waits until there is one.
func (w *environment) pool(node, name string) *v1alpha1.Pool {
	w.Helper()
	p := &v1alpha1.Pool{}
	w.eventually("pool "+name+" of "+node+" has an object", func() bool { // a node that was gone creates it again
		err := w.Get(w.ctx, client.ObjectKey{Name: overview.PoolName(node, name)}, p)
		check.OK(w, client.IgnoreNotFound(err))
		return err == nil
	})
	return p
}

// TestOneDefault: whatever pools a node was started with before, exactly one is the default: the first one of those that it is started with now.
func TestOneDefault(t *testing.T) {
	w, m, s := newCluster(t)
	probes := 0
	for i, pools := range [][]string{{"b"}, {"b", "default"}, {"renamed", "b"}, {"default", "b"}} {
		m.stop()
		w.startWith(m, pools...)
		w.eventually(fmt.Sprint("one default, of ", pools), func() bool {
			var all v1alpha1.PoolList
			check.OK(t, w.List(w.ctx, &all))
			var defaults []string
			for _, p := range all.Items {
				if p.Spec.Default {
					defaults = append(defaults, p.Spec.Pool)
				}
			}
			c, err := s.Capacity(w.ctx, "", volume.NotEncrypted, nodeName)
			return len(defaults) == 1 && defaults[0] == pools[0] && err == nil && c.Available > 0
		})
		w.eventually(fmt.Sprint("the store knows it, of ", pools), func() bool {
			probes++
			ctx, cancel := context.WithTimeout(w.ctx, 5*time.Second) // a call for a pool that is not there any more may not be answered
			defer cancel()
			v, err := s.Create(ctx, spec(fmt.Sprint("probe ", probes)))
			return err == nil && v.ID.Pool == pools[0]
		})
		for j := range 10 {
			v, err := s.Create(w.ctx, spec(fmt.Sprint(i, " ", j)))
			check.OK(t, err)
			if v.ID.Pool != pools[0] {
				t.Errorf("pools %v: a volume that asks for none is in %s", pools, v.ID.Pool)
			}
		}
	}
}

// TestTwoDefaults: two pools of a node may be marked as the default, as an agent ended before it took the mark off the old one, or is of an older version,
// which never does. The pool that the node has now counts.
func TestTwoDefaults(t *testing.T) {
	for what, spoil := range map[string]func(p *v1alpha1.Pool){
		"not configured": func(p *v1alpha1.Pool) {
			later := metav1.NewMicroTime(p.Status.Measured.Add(60e9))
			p.Status.Measured, p.Status.Available, p.Status.MaxVolume = &later, 0, 0
			meta.SetStatusCondition(&p.Status.Conditions, metav1.Condition{Type: v1alpha1.Healthy, Status: metav1.ConditionFalse, Reason: "NotConfigured"})
		},
		"measured before": func(p *v1alpha1.Pool) {
			earlier := metav1.NewMicroTime(p.Status.Measured.Add(-60e9))
			p.Status.Measured = &earlier
		},
	} {
		t.Run(what, func(t *testing.T) {
			w, m, s := newCluster(t)
			m.stop() // otherwise it corrects the object
			old := w.pool(nodeName, "default").DeepCopy()
			status := old.Status
			old.ObjectMeta, old.Spec.Pool = metav1.ObjectMeta{Name: overview.PoolName(nodeName, "old")}, "old"
			check.OK(t, w.Create(w.ctx, old))
			old.Status = status
			spoil(old)
			check.OK(t, w.Status().Update(w.ctx, old))
			w.eventually("the store knows it", func() bool {
				c, err := s.Capacity(w.ctx, "old", volume.NotEncrypted, nodeName)
				return err == nil && c.Total > 0
			})
			for range 50 {
				c, err := s.Capacity(w.ctx, "", volume.NotEncrypted, nodeName)
				check.OK(t, err)
				if c.Available == 0 {
					t.Fatal("the old one counts")
				}
			}
			for i := range 20 {
				name := fmt.Sprint("v", i)
				w.asked("it is placed", func(ctx context.Context) error { return second(s.Create(ctx, spec(name))) },
					func() bool { return w.object(name) != nil })
				if o := w.object(name); o.Spec.Pool != "default" {
					t.Fatalf("it is placed at %+v", o)
				}
			}
		})
	}
}

// TestWhereNoPodsRun: a volume that may be on any node is made on one whose taints allow pods, also if others have more room, and never on a cordoned one.
// If the CO requires one node, as a pod is scheduled there, neither matters.
func TestWhereNoPodsRun(t *testing.T) {
	w := newEnvironment(t)
	nodes := []string{"node-a", "node-b", "node-c"}
	for _, name := range nodes {
		w.machine(name)
	}
	s, _ := w.store()
	for _, name := range nodes {
		w.pooled(s, &machine{name: name})
	}
	edit := func(name string, change func(*corev1.NodeSpec)) {
		n := &corev1.Node{}
		check.OK(t, w.Get(w.ctx, client.ObjectKey{Name: name}, n))
		before := n.DeepCopy()
		change(&n.Spec)
		check.OK(t, w.Patch(w.ctx, n, client.MergeFrom(before)))
	}
	for _, name := range nodes { // the API server taints new Nodes, and there is no node controller here that takes the taint off
		edit(name, func(n *corev1.NodeSpec) { n.Taints = nil })
	}
	made := 0
	create := func(on ...string) (string, error) {
		made++
		one := spec(fmt.Sprint("v", made))
		one.Nodes = on
		v, err := s.Create(w.ctx, one)
		return v.Node, err
	}
	on := func(want string, allowed ...string) {
		t.Helper()
		run := 0
		w.eventually("volumes are on "+want, func() bool {
			node, err := create(allowed...)
			check.OK(t, err)
			if run++; node != want {
				run = 0
			}
			return run == 3
		})
		for range 4 {
			if node, err := create(allowed...); err != nil || node != want {
				t.Errorf("on %s, %v; want %s", node, err, want)
			}
		}
	}
	edit("node-b", func(n *corev1.NodeSpec) {
		n.Taints = []corev1.Taint{{Key: "maintenance", Effect: corev1.TaintEffectNoExecute}, {Key: "x", Effect: corev1.TaintEffectPreferNoSchedule}}
	})
	edit("node-a", func(n *corev1.NodeSpec) { n.Unschedulable = true })
	w.places(s, "", map[string]string{"node-b": "node-b", "node-c": "node-c"}) // when it knows that, it knows of the taint, too
	on("node-c")
	on("node-c", nodes...) // the order of preference counts only among possible nodes
	on("node-b", "node-a", "node-b")
	on("node-a", "node-a")
	edit("node-c", func(n *corev1.NodeSpec) { n.Unschedulable = true })
	w.places(s, "", map[string]string{"node-b": "node-b"})
	on("node-b")
	edit("node-b", func(n *corev1.NodeSpec) { n.Unschedulable = true })
	var err error
	w.eventually("none is left", func() bool { _, err = create(); return err != nil })
	fails(t, err, errdefs.ErrNoSpace)
}

// TestPoolRemoved: how many volumes a node may have is what it was last started with, whatever objects of pools from earlier starts say.
func TestPoolRemoved(t *testing.T) {
	w, m, s := newCluster(t)
	m.stop()
	for i := range 5 {
		name := fmt.Sprint("old", i)
		check.OK(t, w.Create(w.ctx, &v1alpha1.Pool{ObjectMeta: metav1.ObjectMeta{Name: overview.PoolName(nodeName, name)},
			Spec: v1alpha1.PoolSpec{NodeName: nodeName, Pool: name, MaxVolumes: 1}}))
	}
	w.start(m)
	w.eventually("the pools say it", func() bool {
		var pools v1alpha1.PoolList
		check.OK(t, w.List(w.ctx, &pools))
		return !slices.ContainsFunc(pools.Items, func(p v1alpha1.Pool) bool { return p.Spec.MaxVolumes != storetest.Limit })
	})
	for i := range storetest.Limit {
		v, err := s.Create(w.ctx, spec(fmt.Sprint(i)))
		check.OK(t, err)
		w.eventually("it is claimed", func() bool { return second(s.Claim(w.ctx, v.ID, volume.Claim{Node: nodeName, Mode: "m"})) == nil })
	}
}

// TestLimitedPlaced: a volume with limits of I/O is not made on a node that reports that it cannot enforce them. A volume without, or with the limit
// "max", may be on any node.
func TestLimitedPlaced(t *testing.T) {
	w := newEnvironment(t)
	says := func(what bool) func() bool { return func() bool { return what } }
	a, b := w.begin(&machine{name: "node-a", limits: says(false), ported: true}), w.begin(&machine{name: "node-b", limits: says(true), ported: true})
	s := w.calling(a)
	w.pooled(s, b)
	limited := func(name, limit string, nodes ...string) volume.Spec {
		on := spec(name)
		on.Nodes, on.Mutable = nodes, map[string]string{"readIOPS": limit}
		return on
	}
	_, err := s.Create(w.ctx, limited("there", "100", a.name))
	fails(t, err, errdefs.ErrNoSpace)
	if !strings.Contains(err.Error(), "node node-a cannot keep limits of I/O") {
		t.Error(err)
	}
	for i, nodes := range [][]string{nil, {a.name, b.name}} {
		v, err := s.Create(w.ctx, limited(fmt.Sprint("v", i), "100", nodes...))
		if !volume.LimitsHere() { // this machine cannot enforce limits, so its node refuses
			if fails(t, err, errdefs.ErrNoSpace); !strings.Contains(err.Error(), "node node-b cannot have such a volume") {
				t.Error(err)
			}
			continue
		}
		if err != nil || v.Node != b.name {
			t.Errorf("of %v: %+v, %v", nodes, v, err)
		}
	}
	if v, err := s.Create(w.ctx, limited("none", "max", a.name)); err != nil || v.Node != a.name {
		t.Errorf("without a limit: %+v, %v", v, err)
	}
	_, snapshot := w.snapshotOf(s, a, "source", 3)
	of := limited("copy", "100")
	of.Source, of.Copies, of.Size.Required = snapshot.ID, volume.CopiesAnywhere, 64*mib
	if err = second(s.Create(w.ctx, of)); volume.LimitsHere() {
		check.OK(t, err)
	} else if fails(t, err, errdefs.ErrNoSpace); !strings.Contains(err.Error(), "node node-b cannot have such a volume") {
		t.Errorf("of a copy that may be anywhere: %v", err)
	}
	w.tally(a)
	w.tally(b)
}

// TestRoomForWhatMoves: the room for a volume or snapshot that is to move to a node is reserved there as soon as the move is asked for, and counted once,
// when its copy has begun too.
func TestRoomForWhatMoves(t *testing.T) {
	w := newEnvironment(t)
	a, _ := w.networked("node-1", "storage")
	b, _ := w.networked("node-2", "storage")
	s := w.knowing(a, b)
	of := anyNode("v", a.name)
	of.Size.Required = 64 * mib
	v, err := s.Create(w.ctx, of)
	check.OK(t, err)
	snapshot, err := s.CreateSnapshot(w.ctx, "s", v.ID)
	check.OK(t, err)
	a.stop()
	b.stop()
	before := w.available(s, b.name)
	room := func(when string, taken int64) {
		t.Helper()
		w.eventually(when, func() bool { return w.available(s, b.name) == before-taken })
	}
	w.edited(v.ID.Key, func(v *v1alpha1.Volume) { v.Spec.Move = &v1alpha1.Move{Node: b.name} })
	room("a volume is to come", 64*mib)
	o := &v1alpha1.Snapshot{}
	check.OK(t, w.Get(w.ctx, client.ObjectKey{Name: snapshot.ID.Key}, o))
	o.Spec.Move = &v1alpha1.Move{Node: b.name}
	check.OK(t, w.Update(w.ctx, o))
	room("its snapshot is to come", 128*mib)
	says := func(status *v1alpha1.MoveStatus) {
		t.Helper()
		now := w.object("v")
		was := now.DeepCopy()
		now.Status.Move = status
		check.OK(t, w.Status().Patch(w.ctx, now, client.MergeFrom(was)))
	}
	says(&v1alpha1.MoveStatus{Node: b.name, Waits: true, Refused: true, Message: "it cannot have that"})
	room("its new node refuses the volume", 64*mib)
	says(&v1alpha1.MoveStatus{Node: b.name, Waits: true, Message: "others are first"})
	room("it waits for others", 128*mib)
	says(&v1alpha1.MoveStatus{Node: b.name, Progress: &v1alpha1.Progress{Total: 64 * mib, Done: mib}})
	room("the volume is being copied, so the pool has it", 64*mib)
}

// TestRoomForWhatIsMade: a volume that is to be made takes room of its pool once: before the pool has it, and when it is being made, which may take long.
func TestRoomForWhatIsMade(t *testing.T) {
	w := newEnvironment(t)
	m := w.machine(nodeName)
	s := w.knowing(m)
	m.stop()
	before := w.available(s, nodeName)
	v := volumeOn(nodeName, "v")
	v.Spec.Make, v.Spec.Size = true, 64*mib
	check.OK(t, w.Create(w.ctx, v))
	w.eventually("it is to be made", func() bool { return w.available(s, nodeName) == before-64*mib })
	was := v.DeepCopy()
	v.Status.Progress = &v1alpha1.Progress{Done: mib, Total: 64 * mib}
	check.OK(t, w.Status().Patch(w.ctx, v, client.MergeFrom(was)))
	w.eventually("it is being made, so the pool has it", func() bool { return w.available(s, nodeName) == before })
}

// TestWantedElsewhereAsItIsMade: a volume is wanted on another node by a second controller, and made where the first one has asked for it before the second one
// has taken that back. The first one has answered, so the volume stays, and the second one says where it is.
func TestWantedElsewhereAsItIsMade(t *testing.T) {
	w := newEnvironment(t)
	let := make(chan struct{})
	a, b := w.machineWith("node-a", func(operation string, _ blockdev.Ref) error {
		if operation == "Create" {
			held(t, let)
		}
		return nil
	}), w.machine("node-b")
	s := w.knowing(a, b)
	takingBack, goOn := make(chan struct{}), make(chan struct{})
	tell := sync.OnceFunc(func() { close(takingBack) })
	wrap(t, func(c *rest.Config) {
		c.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return roundTrip(func(q *http.Request) (*http.Response, error) {
				if q.Method == http.MethodPatch {
					tell()
					held(t, goOn)
				}
				return next.RoundTrip(q)
			})
		})
	})
	other := w.knowing(a, b)
	on := func(node string) volume.Spec {
		of := spec("v")
		of.Nodes = []string{node}
		return of
	}
	answers, others := make(chan error, 1), make(chan error, 1)
	go func() { answers <- second(s.Create(w.ctx, on(a.name))) }()
	w.eventually("it is asked for", func() bool { return w.object("v") != nil })
	go func() { others <- second(other.Create(w.ctx, on(b.name))) }()
	w.comes(takingBack, "the other controller takes it back")
	close(let)
	check.OK(t, <-answers)
	close(goOn)
	fails(t, <-others, errdefs.ErrExists)
	if v, err := s.Get(w.ctx, volume.ID{Kind: blockdev.Volume, Pool: "default", Key: volume.KeyOf("v")}); err != nil || v.Node != a.name {
		t.Errorf("it is %+v, %v", v, err)
	}
}

// TestLostTakesNoRoom: the object of a volume was restored without its status, and its bytes are lost. As nothing is made for it, no room is kept for it.
func TestLostTakesNoRoom(t *testing.T) {
	w, _, s := newCluster(t)
	free := w.available(s, nodeName)
	lost := volumeOn(nodeName, "lost")
	lost.Spec.Size = free / 2
	check.OK(t, w.Create(w.ctx, lost))
	w.eventually("it is lost", func() bool { return v1alpha1.LostUnmade(w.object("lost")) })
	w.eventually("its room is that of others", func() bool { return w.available(s, nodeName) == free })
}
