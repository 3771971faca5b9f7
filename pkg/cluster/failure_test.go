package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lazy"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/store"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
	"github.com/ashlar-csi/ashlar/pkg/volume/storetest"
)

func (w *environment) object(name string) *v1alpha1.Volume {
	v := &v1alpha1.Volume{}
	if err := w.Get(w.ctx, client.ObjectKey{Name: volume.KeyOf(name)}, v); client.IgnoreNotFound(err) != nil {
		w.Fatal(err)
	} else if err != nil {
		return nil
	}
	return v
}

// TestAgentDown: what a store asks of a node whose agent is down is carried out when the agent is back, and a repeated call finds it.
func TestAgentDown(t *testing.T) {
	w, m, s := newCluster(t)
	old, err := s.Create(w.ctx, spec("old"))
	check.OK(t, err)
	m.stop()

	fails(t, second(s.Create(soon(t), spec("v"))), context.DeadlineExceeded)
	fails(t, second(s.Create(soon(t), spec("v"))), errdefs.ErrUnavailable)
	fails(t, second(s.CreateSnapshot(soon(t), "s", old.ID)), errdefs.ErrUnavailable)
	fails(t, second(s.CreateGroup(soon(t), "g", []volume.ID{old.ID})), errdefs.ErrUnavailable)
	fails(t, second(s.Expand(soon(t), old.ID, volume.Range{Required: 2 * mib})), errdefs.ErrUnavailable)
	check.OK(t, second(s.Claim(w.ctx, old.ID, volume.Claim{Node: nodeName, Mode: "m"}))) // a claim waits for no node
	check.OK(t, s.Release(w.ctx, old.ID, nodeName))
	if left, err := s.List(w.ctx, volume.ID{}, 0); err != nil || len(left) != 1 {
		t.Errorf("half-made volumes are listed: %v, %v", left, err)
	}

	w.start(m)
	v, err := s.Create(w.ctx, spec("v"))
	check.OK(t, err)
	check.OK(t, second(s.CreateSnapshot(w.ctx, "s", old.ID)))
	check.OK(t, second(s.CreateGroup(w.ctx, "g", []volume.ID{old.ID})))
	if grown, err := s.Expand(w.ctx, old.ID, volume.Range{Required: 2 * mib}); err != nil || grown.Size != 2*mib {
		t.Errorf("%+v, %v", grown, err)
	}
	m.stop()
	fails(t, s.Delete(soon(t), v.ID), errdefs.ErrUnavailable)
	w.start(m)
	check.OK(t, s.Delete(w.ctx, v.ID))
	w.tally(m)
}

// TestControllerKilled: when a store ends in the middle of a call, the repeated call of another store finds all that it has begun.
func TestControllerKilled(t *testing.T) {
	w := newEnvironment(t)
	m := w.machine(nodeName)
	for delay := time.Duration(0); delay < 40*time.Millisecond; delay += 4 * time.Millisecond {
		s, kill := w.store()
		w.pooled(s, m)
		name := fmt.Sprint("v", delay)
		ctx, cancel := context.WithCancel(w.ctx)
		time.AfterFunc(delay, cancel)
		v, err := s.Create(ctx, spec(name))
		if err == nil {
			_, err = s.CreateSnapshot(ctx, name, v.ID)
		}
		if err == nil {
			err = s.Delete(ctx, v.ID)
		}
		t.Logf("after %s: %v", delay, err)
		kill()

		s, kill = w.store()
		w.pooled(s, m)
		v, err = s.Create(w.ctx, spec(name))
		check.OK(t, err)
		snapshot, err := s.CreateSnapshot(w.ctx, name, v.ID)
		check.OK(t, err)
		check.OK(t, s.Delete(w.ctx, v.ID))
		check.OK(t, s.DeleteSnapshot(w.ctx, snapshot.ID))
		kill()
		cancel()
	}
	w.tally(m)
}

// TestExpandedBehind: another store has just grown a volume to more than is asked for, which the cache of this one does not know yet: the volume keeps
// that size.
func TestExpandedBehind(t *testing.T) {
	w, _, s := newCluster(t)
	behind, _ := w.store()
	v := w.created(s, spec("v"))
	w.eventually("both know it", func() bool { return second(behind.Get(w.ctx, v.ID)) == nil })
	for size := int64(4); size < 80; size += 4 {
		check.OK(t, second(s.Expand(w.ctx, v.ID, volume.Range{Required: size * mib})))
		if v, err := behind.Expand(w.ctx, v.ID, volume.Range{Required: (size - 2) * mib}); err != nil || v.Size != size*mib {
			t.Errorf("of %d MiB it is %+v, %v", size, v, err)
		}
	}
}

// TestModifiedBeside: two stores change a volume at the same time, and its node refuses one of the changes. The other call succeeds.
func TestModifiedBeside(t *testing.T) {
	w, _, s := newCluster(t)
	beside, _ := w.store()
	v := w.created(s, spec("v"))
	w.eventually("both know it", func() bool { return second(beside.Get(w.ctx, v.ID)) == nil })
	for i := range 15 {
		var asked sync.WaitGroup
		asked.Go(func() {
			if err := second(s.Expand(w.ctx, v.ID, volume.Range{Required: 10 * storetest.Size})); !errors.Is(err, errdefs.ErrNoSpace) {
				t.Errorf("expand: %v", err)
			}
		})
		asked.Go(func() {
			if err := beside.Modify(w.ctx, v.ID, map[string]string{"readAheadKiB": fmt.Sprint(64 << (i % 2))}); err != nil {
				t.Errorf("modify: %v", err)
			}
		})
		asked.Wait()
	}
	if o := w.object("v"); o.Spec.Size != mib || o.Status.Size != mib {
		t.Errorf("it is to have %d bytes, and has %d", o.Spec.Size, o.Status.Size)
	}
}

// TestRefusedInPart: a node that refuses one part of a change carries out the rest.
func TestRefusedInPart(t *testing.T) {
	w, _, s := newCluster(t)
	w.created(s, spec("v"))
	for _, one := range []struct {
		size, made int64
		readAhead  string
		in         map[string]string
	}{
		{10 * storetest.Size, mib, "64", map[string]string{"readAheadKiB": "64"}},
		{2 * mib, 2 * mib, "no number", map[string]string{"readAheadKiB": "64"}},
	} {
		o := w.object("v")
		o.Spec.Size, o.Spec.Mutable = one.size, map[string]string{"readAheadKiB": one.readAhead}
		check.OK(t, w.Update(w.ctx, o))
		w.eventually("the node has answered", func() bool { o = w.object("v"); return o.Common().Refused(o.Generation) != nil })
		if o.Status.Size != one.made || !maps.Equal(o.Status.Mutable, one.in) {
			t.Errorf("of %d bytes, %s: %+v", one.size, one.readAhead, o.Status)
		}
	}
}

// TestRefusedBeside: a change was refused together with one that is carried out, and its caller has given up before the answer. The other call takes the
// refused change out of the spec.
func TestRefusedBeside(t *testing.T) {
	w, m, s := newCluster(t)
	v := w.created(s, spec("v"))
	m.stop()
	w.edited(volume.KeyOf("v"), func(v *v1alpha1.Volume) { v.Spec.Size = 10 * storetest.Size })
	modified := make(chan error, 1)
	mutable := map[string]string{"readAheadKiB": "64"}
	go func() { modified <- s.Modify(w.ctx, v.ID, mutable) }()
	w.eventually("both are asked for", func() bool { return maps.Equal(w.object("v").Spec.Mutable, mutable) })
	w.start(m)
	check.OK(t, <-modified)
	if o := w.object("v"); o.Spec.Size != mib || !maps.Equal(o.Status.Mutable, mutable) {
		t.Errorf("it is to have %d bytes, and has %+v", o.Spec.Size, o.Status)
	}
}

// TestRefusedLongAgo: a growth was refused for want of room, and whoever asked for it died before that was taken out of the spec. When there is room, the volume
// does not grow because somebody claims or releases it: nobody asks for that any more.
func TestRefusedLongAgo(t *testing.T) {
	w, m, s := newCluster(t)
	v := w.created(s, spec("v"))
	for _, change := range []func() error{
		func() error { return second(s.Claim(w.ctx, v.ID, volume.Claim{Node: m.name, Mode: "m"})) },
		func() error { return s.Release(w.ctx, v.ID, m.name) },
	} {
		other := w.created(s, volume.Spec{Name: "other", Size: volume.Range{Required: storetest.Size / 4 * 3}})
		w.edited(v.ID.Key, func(v *v1alpha1.Volume) { v.Spec.Size = storetest.Size / 2 })
		w.eventually("the node has refused that", func() bool { o := w.object("v"); return o.Common().Refused(o.Generation) != nil })
		check.OK(t, s.Delete(w.ctx, other.ID))
		check.OK(t, change())
		w.eventually("the node has answered", func() bool { return w.object("v").Status.Failure == nil })
		if o := w.object("v"); o.Spec.Size != mib || o.Status.Size != mib {
			t.Fatalf("it is to have %d bytes, and has %d", o.Spec.Size, o.Status.Size)
		}
	}
	w.tally(m)
}

// TestCutNeverMade: snapshots were asked of a node that was away, and their volume is deleted before it is back. Repeated calls answer NotFound, and leave
// no objects.
func TestCutNeverMade(t *testing.T) {
	w, m, s := newCluster(t)
	v, other := w.created(s, spec("v")), w.created(s, spec("other"))
	m.stop()
	cuts := func() (n int) {
		var all v1alpha1.SnapshotList
		check.OK(t, w.List(w.ctx, &all))
		return len(all.Items)
	}
	w.asked("a cut is", func(ctx context.Context) error { return second(s.CreateSnapshot(ctx, "s", v.ID)) }, func() bool { return cuts() == 1 })
	w.asked("a group is", func(ctx context.Context) error { return second(s.CreateGroup(ctx, "g", []volume.ID{v.ID, other.ID})) }, func() bool { return cuts() == 3 })
	w.asked("to go", func(ctx context.Context) error { return s.Delete(ctx, v.ID) }, func() bool { return v1alpha1.Going(w.object("v")) })
	fails(t, second(s.CreateSnapshot(w.ctx, "s", other.ID)), errdefs.ErrExists)
	check.OK(t, m.local.Delete(w.ctx, v.ID)) // as if the agent deleted the volume first
	w.start(m)
	w.eventually("the volume is gone", func() bool { return w.object("v") == nil })
	w.eventually("the store knows that", func() bool {
		err := second(s.CreateSnapshot(w.ctx, "s", v.ID))
		return errors.Is(err, errdefs.ErrNotFound)
	})
	fails(t, second(s.CreateGroup(w.ctx, "g", []volume.ID{v.ID, other.ID})), errdefs.ErrNotFound)
	var left v1alpha1.SnapshotList
	check.OK(t, w.List(w.ctx, &left))
	for _, o := range left.Items {
		t.Errorf("left is %+v, %+v", o.Spec, o.Status)
	}
	w.tally(m)
}

// TestNodeNotReady: calls that need a node that is not ready fail at once, and those under way end. Calls for other nodes succeed.
func TestNodeNotReady(t *testing.T) {
	w := newEnvironment(t)
	a, b := w.machine("node-a"), w.machine("node-b")
	s := w.knowing(a, b)
	on := func(name, node string) volume.Spec {
		one := spec(name)
		one.Nodes = []string{node}
		return one
	}
	va, err := s.Create(w.ctx, on("va", "node-a"))
	check.OK(t, err)

	a.stop()
	waiting := make(chan error)
	go func() { waiting <- second(s.Create(w.ctx, on("waiting", "node-a"))) }()
	w.eventually("it was asked for", func() bool { return w.object("waiting") != nil })
	w.node("node-a", false)
	fails(t, <-waiting, errdefs.ErrNoSpace)

	refused := func(want error, call func(context.Context) error) { // at once, not by a time limit
		t.Helper()
		ctx, cancel := context.WithTimeout(w.ctx, time.Minute)
		defer cancel()
		err := call(ctx)
		fails(t, err, want)
		if errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("it was waited for: %v", err)
		}
	}
	refused(errdefs.ErrNoSpace, func(ctx context.Context) error { return second(s.Create(ctx, on("v", "node-a"))) })
	if w.object("v") != nil {
		t.Error("an object was made for a node that is not ready")
	}
	for _, call := range []func(context.Context) error{
		func(ctx context.Context) error {
			return second(s.Create(ctx, volume.Spec{Name: "copy", Source: va.ID}))
		},
		func(ctx context.Context) error { return second(s.CreateSnapshot(ctx, "s", va.ID)) },
		func(ctx context.Context) error { return second(s.Expand(ctx, va.ID, volume.Range{Required: 2 * mib})) },
		func(ctx context.Context) error { return s.Delete(ctx, va.ID) },
	} {
		refused(errdefs.ErrUnavailable, call)
	}
	if problems, err := s.Health(w.ctx, va.ID); err != nil || len(problems) != 1 || problems[0].Reason != "NodeNotReady" {
		t.Errorf("health %v, %v", problems, err)
	}
	if c, err := s.Capacity(w.ctx, "", volume.NotEncrypted, "node-a"); err != nil || c.Available != 0 {
		t.Errorf("capacity %+v, %v", c, err)
	}
	vb, err := s.Create(w.ctx, spec("anywhere"))
	check.OK(t, err)
	if vb.Node != "node-b" {
		t.Errorf("made on %s", vb.Node)
	}
	check.OK(t, second(s.Create(w.ctx, on("vb", "node-b"))))

	w.node("node-a", true)
	w.start(a)
	w.eventually("the store has seen that the node is back", func() bool { return s.Delete(w.ctx, va.ID) == nil })
	w.tally(a)
	w.tally(b)
}

// TestNodeGoneBeforeUse: a volume is made and reported, and its node is gone for good before there is a PersistentVolume, as the provisioner has died. Whoever
// asks again gets it on another node. If there is a PersistentVolume, the volume stays.
func TestNodeGoneBeforeUse(t *testing.T) {
	w := newEnvironment(t)
	a, b := w.machine("node-a"), w.machine("node-b")
	s, _ := w.store()
	w.pooled(s, a)
	w.pooled(s, b)
	lost, kept := w.specOf(w.claim("lost")), w.specOf(w.claim("kept"))
	lost.Nodes, kept.Nodes = []string{a.name}, []string{a.name}
	check.OK(t, second(s.Create(w.ctx, lost)))
	v, err := s.Create(w.ctx, kept)
	check.OK(t, err)
	check.OK(t, w.Create(w.ctx, &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: kept.Name}, Spec: corev1.PersistentVolumeSpec{
		Capacity: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Mi")}, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
		PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: cluster.DefaultDriver, VolumeHandle: v.ID.String()}}}}))
	a.stop()
	check.OK(t, w.Delete(w.ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: a.name}}))
	lost.Nodes, kept.Nodes = []string{b.name}, []string{b.name}
	for end := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		made, err := s.Create(w.ctx, lost)
		if err == nil && made.Node == b.name {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("it is not made on the other node: %+v, %v", made, err)
		}
	}
	fails(t, second(s.Create(w.ctx, kept)), errdefs.ErrExists)
	if o := w.object(kept.Name); o == nil || o.Spec.NodeName != a.name || o.Deleting() {
		t.Errorf("what a PersistentVolume names is %+v", o)
	}
}

// TestNodeGoneBeforeCut: a snapshot, a group and a copy are asked for, and their node is gone for good before it has taken them. Once they are given up the answer is final:
// before a final one external-snapshotter deletes neither the VolumeSnapshot nor the claim of the volume.
func TestNodeGoneBeforeCut(t *testing.T) {
	w, m, s := newCluster(t)
	v, err := s.Create(w.ctx, spec("v"))
	check.OK(t, err)
	m.stop()
	cuts := map[string]func(context.Context) error{
		"snapshot": func(ctx context.Context) error { return second(s.CreateSnapshot(ctx, "s", v.ID)) },
		"group":    func(ctx context.Context) error { return second(s.CreateGroup(ctx, "g", []volume.ID{v.ID})) },
		"copy": func(ctx context.Context) error {
			return second(s.Create(ctx, volume.Spec{Name: "copy", Source: v.ID}))
		},
	}
	for _, cut := range cuts {
		fails(t, cut(soon(t)), errdefs.ErrUnavailable)
	}
	w.node(nodeName, false)
	for _, cut := range cuts {
		fails(t, cut(soon(t)), errdefs.ErrUnavailable) // it may come back
	}
	check.OK(t, w.Delete(w.ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}}))
	for what, cut := range cuts {
		w.eventually("the answer about a "+what+" is final", func() bool { return errors.Is(cut(soon(t)), errdefs.ErrPrecondition) })
	}
	var left v1alpha1.SnapshotList
	check.OK(t, w.List(w.ctx, &left))
	if o := w.object("copy"); o != nil || len(left.Items) > 0 {
		t.Errorf("objects are left: %+v, %+v", o, left.Items)
	}
}

// TestNodeGone: objects of a node that is gone for good are removed after the grace period if their deletion was asked for, and no others.
func TestNodeGone(t *testing.T) {
	for _, tainted := range []bool{true, false} {
		t.Run(fmt.Sprint("tainted ", tainted), func(t *testing.T) {
			w := newEnvironment(t)
			m := w.machine(nodeName)
			s, _ := w.store()
			w.store() // a second replica does the same
			w.pooled(s, m)
			kept, err := s.Create(w.ctx, spec("kept"))
			check.OK(t, err)
			v, err := s.Create(w.ctx, spec("v"))
			check.OK(t, err)
			snapshot, err := s.CreateSnapshot(w.ctx, "s", v.ID)
			check.OK(t, err)
			m.stop()
			w.node(nodeName, false)
			fails(t, s.Delete(w.ctx, v.ID), errdefs.ErrUnavailable)
			time.Sleep(2 * grace)
			if o := w.object("v"); o == nil || !o.Deleting() {
				t.Fatal("given up, or not deleted, without a signal")
			}
			n := &corev1.Node{}
			check.OK(t, w.Get(w.ctx, client.ObjectKey{Name: nodeName}, n))
			began := time.Now()
			if tainted {
				n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: v1alpha1.GoneTaint, Effect: corev1.TaintEffectNoSchedule})
				check.OK(t, w.Update(w.ctx, n))
			} else {
				check.OK(t, w.Delete(w.ctx, n))
			}
			w.eventually("it is given up", func() bool { return w.object("v") == nil })
			if took := time.Since(began); took < grace/2 {
				t.Errorf("given up after %s", took)
			}
			// A later deletion is carried out too.
			w.eventually("the snapshot is given up", func() bool {
				_ = s.DeleteSnapshot(soon(t), snapshot.ID) // the error does not matter: it may be gone already
				_, err := s.GetSnapshot(w.ctx, snapshot.ID)
				return errors.Is(err, errdefs.ErrNotFound)
			})
			if o := w.object("kept"); o == nil || o.Deleting() {
				t.Error("what nobody deleted is gone")
			}
			check.OK(t, second(s.Get(w.ctx, kept.ID)))
			w.eventually("the pools are forgotten", func() bool {
				var pools v1alpha1.PoolList
				check.OK(t, w.List(w.ctx, &pools))
				return len(pools.Items) == 0
			})
			for range 20 { // before and after the store knows that
				fails(t, second(s.Expand(w.ctx, kept.ID, volume.Range{Required: 2 * mib})), errdefs.ErrUnavailable)
				time.Sleep(20 * time.Millisecond)
			}
		})
	}
}

// TestPlacement: a volume is made on the first of the given nodes that has room, or if none are given, on the one with the most room.
func TestPlacement(t *testing.T) {
	w := newEnvironment(t)
	a, b := w.machine("node-a"), w.machine("node-b")
	s := w.knowing(a, b)
	for i, c := range []struct {
		size  int64
		nodes []string
		want  string
	}{
		{300 * mib, []string{"node-b"}, "node-b"},
		{100 * mib, nil, "node-a"},
		{300 * mib, []string{"node-a", "node-b"}, "node-a"},
		{100 * mib, nil, "node-b"},                           // 624 and 724 MiB are left
		{650 * mib, []string{"node-a", "node-b"}, ""},        // no node has that much
		{620 * mib, []string{"node-b", "node-a"}, "node-b"},  // it has 624
		{600 * mib, []string{"node-b", "node-a"}, "node-a"},  // the second choice
		{600 * mib, []string{"elsewhere", "node-a"}, ""},     // full
		{4 * mib, []string{"elsewhere", "node-b"}, "node-b"}, // all that is left
	} {
		spec := volume.Spec{Name: fmt.Sprint("v", i), Size: volume.Range{Required: c.size}, Nodes: c.nodes}
		v, err := s.Create(w.ctx, spec)
		if c.want == "" {
			if !errors.Is(err, errdefs.ErrNoSpace) || w.object(spec.Name) != nil {
				t.Errorf("%d: %+v, error %v, object %v", i, v, err, w.object(spec.Name))
			}
			continue
		}
		if err != nil || v.Node != c.want {
			t.Errorf("%d: on node %s, error %v; want %s", i, v.Node, err, c.want)
		}
	}
	// A pool that the given node does not have, and one that no node has.
	missing := spec("missing")
	missing.Pool, missing.Nodes = "b", []string{"elsewhere"}
	fails(t, second(s.Create(w.ctx, missing)), errdefs.ErrNoSpace)
	missing.Pool = "unknown"
	fails(t, second(s.Create(w.ctx, missing)), errdefs.ErrInvalid)
	fails(t, second(s.Capacity(w.ctx, "unknown", volume.NotEncrypted, "node-a")), errdefs.ErrInvalid)
	if c, err := s.Capacity(w.ctx, "b", volume.NotEncrypted, "elsewhere"); err != nil || c.Total != 0 {
		t.Errorf("capacity of a node that is not there: %+v, %v", c, err)
	}
	w.tally(a)
	w.tally(b)
}

// TestGroupOfTwoNodes: a group snapshot of volumes on two nodes is refused, and leaves nothing.
func TestGroupOfTwoNodes(t *testing.T) {
	w := newEnvironment(t)
	a, b := w.machine("node-a"), w.machine("node-b")
	s := w.knowing(a, b)
	var ids []volume.ID
	for _, m := range []*machine{a, b} {
		v, err := s.Create(w.ctx, volume.Spec{Name: m.name, Size: volume.Range{Required: mib}, Nodes: []string{m.name}})
		check.OK(t, err)
		ids = append(ids, v.ID)
	}
	fails(t, second(s.CreateGroup(w.ctx, "g", ids)), errdefs.ErrPrecondition) // CSI specification, CreateVolumeGroupSnapshot Errors
	var left v1alpha1.SnapshotList
	check.OK(t, w.List(w.ctx, &left))
	if len(left.Items) != 0 {
		t.Errorf("%d snapshots are left", len(left.Items))
	}
}

// TestRefusalsSayOnce: the error of a snapshot, or a group of them, that its node refuses names it once.
func TestRefusalsSayOnce(t *testing.T) {
	w := newEnvironment(t)
	m := w.machineWith(nodeName, func(operation string, ref blockdev.Ref) error {
		if operation == "Create" && ref.Kind == blockdev.Snapshot {
			return fmt.Errorf("%w: the pool says no", errdefs.ErrPrecondition)
		}
		return nil
	})
	s := w.knowing(m)
	v, err := s.Create(w.ctx, spec("v"))
	check.OK(t, err)
	for what, err := range map[string]error{
		`snapshot "s" of volume ` + v.ID.String(): second(s.CreateSnapshot(w.ctx, "s", v.ID)),
		`group snapshot "g"`:                      second(s.CreateGroup(w.ctx, "g", []volume.ID{v.ID})),
	} {
		if fails(t, err, errdefs.ErrPrecondition); strings.Count(err.Error(), what) != 1 {
			t.Errorf("%v", err)
		}
	}
}

// TestTwoStores: two controllers that are asked at once make one volume of a name, and one of two different claims succeeds.
func TestTwoStores(t *testing.T) {
	w := newEnvironment(t)
	m := w.machine(nodeName)
	a, _ := w.store()
	b, _ := w.store()
	w.pooled(a, m)
	w.pooled(b, m)
	for i := range 8 {
		name := fmt.Sprint("v", i)
		var claimed atomic.Int32
		var all sync.WaitGroup
		for j, s := range []*store.Store{a, b} {
			all.Go(func() {
				v, err := s.Create(w.ctx, spec(name))
				if err == nil {
					err = second(s.Claim(w.ctx, v.ID, volume.Claim{Node: nodeName, Mode: fmt.Sprint("mode-", j)}))
				}
				if err == nil {
					claimed.Add(1)
				} else if !errors.Is(err, errdefs.ErrExists) {
					t.Error(err)
				}
			})
		}
		all.Wait()
		if claimed.Load() != 1 {
			t.Errorf("%d claims of one volume", claimed.Load())
		}
		id := volume.ID{Kind: blockdev.Volume, Pool: "default", Key: volume.KeyOf(name)}
		for _, s := range []*store.Store{a, b} {
			all.Go(func() {
				if err := errors.Join(s.Release(w.ctx, id, nodeName), s.Delete(w.ctx, id)); err != nil && !errors.Is(err, errdefs.ErrInUse) {
					t.Error(err)
				}
			})
		}
		all.Wait()
		check.OK(t, errors.Join(b.Release(w.ctx, id, ""), b.Delete(w.ctx, id)))
	}
	w.tally(m)
}

// TestClaimsAtOnce: claims that are written at the same time count once each, so that a node gets as many as it can have. A call that waits for another
// one to be counted ends with its context.
func TestClaimsAtOnce(t *testing.T) {
	var hang atomic.Bool
	hung, let := make(chan struct{}), make(chan struct{})
	release := sync.OnceFunc(func() { close(let) })
	wrap(t, func(c *rest.Config) {
		c.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return roundTrip(func(q *http.Request) (*http.Response, error) {
				if q.Method == http.MethodPatch && strings.HasSuffix(q.URL.Path, "/volumes/"+volume.KeyOf("v0")) && hang.CompareAndSwap(true, false) {
					close(hung)
					held(t, let)
				}
				return next.RoundTrip(q)
			})
		})
	})
	w, _, s := newCluster(t)
	t.Cleanup(release)
	var ids []volume.ID
	for i := range storetest.Limit {
		v, err := s.Create(w.ctx, spec(fmt.Sprint("v", i)))
		check.OK(t, err)
		ids = append(ids, v.ID)
	}
	claim := volume.Claim{Node: nodeName, Mode: "m"}
	for range 10 {
		var all sync.WaitGroup
		for _, id := range ids {
			all.Go(func() {
				if err := second(s.Claim(w.ctx, id, claim)); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		for _, id := range ids {
			check.OK(t, s.Release(w.ctx, id, nodeName))
		}
	}

	hang.Store(true)
	answers := make(chan error, 2)
	go func() { answers <- second(s.Claim(w.ctx, ids[0], claim)) }()
	w.comes(hung, "a claim is written")
	go func() { answers <- second(s.Claim(w.ctx, ids[1], claim)) }() // waits until the first one is counted
	time.Sleep(100 * time.Millisecond)
	given := make(chan error, 1)
	go func() { given <- second(s.Claim(soon(t), ids[2], claim)) }()
	select {
	case err := <-given:
		fails(t, err, errdefs.ErrUnavailable)
	case <-time.After(10 * time.Second):
		t.Error("it waits longer than its caller")
	}
	release()
	check.OK(t, errors.Join(<-answers, <-answers))
}

// TestDeletedWhileMade: a volume that is deleted while its node makes it is gone afterwards.
func TestDeletedWhileMade(t *testing.T) {
	w := newEnvironment(t)
	release := make(chan struct{})
	entered := make(chan struct{}, 8)
	hook := func(operation string, ref blockdev.Ref) error {
		if operation == "Create" && ref.Kind == blockdev.Volume {
			entered <- struct{}{}
			held(t, release)
		}
		return nil
	}
	m := w.machineWith(nodeName, hook)
	s, _ := w.store()
	w.pooled(s, m)
	w.asked("it is being made", func(ctx context.Context) error { return second(s.Create(ctx, spec("v"))) },
		func() bool { return len(entered) > 0 })
	id := volume.ID{Kind: blockdev.Volume, Pool: "default", Key: volume.KeyOf("v")}
	w.asked("it is to be deleted", func(ctx context.Context) error { return s.Delete(ctx, id) },
		func() bool { o := w.object("v"); return o != nil && o.Deleting() })
	close(release)
	check.OK(t, s.Delete(w.ctx, id))
	w.tally(m)
	check.OK(t, second(s.Create(w.ctx, spec("v"))))
}

// TestBytesMissing: a volume and a snapshot whose bytes are gone are reported as lost, and not made again.
func TestBytesMissing(t *testing.T) {
	w, m, s := newCluster(t)
	v, err := s.Create(w.ctx, spec("v"))
	check.OK(t, err)
	snapshot, err := s.CreateSnapshot(w.ctx, "s", v.ID)
	check.OK(t, err)
	m.stop()
	check.OK(t, m.local.Delete(w.ctx, v.ID))
	check.OK(t, m.local.DeleteSnapshot(w.ctx, snapshot.ID))
	w.start(m)
	w.eventually("the loss is reported", func() bool {
		problems, err := s.Health(w.ctx, v.ID)
		return err == nil && len(problems) == 1 && problems[0].Severity == blockdev.DataLoss
	})
	w.eventually("that of the snapshot is", func() bool {
		o := &v1alpha1.Snapshot{}
		check.OK(t, w.Get(w.ctx, client.ObjectKey{Name: snapshot.ID.Key}, o))
		c := meta.FindStatusCondition(o.Status.Conditions, v1alpha1.Ready)
		return c != nil && c.Status == metav1.ConditionFalse && c.Reason == "DataLoss"
	})
	check.OK(t, second(s.Create(w.ctx, spec("v")))) // its object still exists
	fails(t, second(s.Expand(w.ctx, v.ID, volume.Range{Required: 2 * mib})), errdefs.ErrDataLoss)
	fails(t, second(m.local.Get(w.ctx, v.ID)), errdefs.ErrNotFound)
	check.OK(t, errors.Join(s.Delete(w.ctx, v.ID), s.DeleteSnapshot(w.ctx, snapshot.ID)))
}

// TestStrays: a volume without an object is reported, and stays; an ephemeral one is not reported.
func TestStrays(t *testing.T) {
	w := newEnvironment(t)
	m := w.machine(nodeName)
	stray, err := m.local.Create(w.ctx, spec("stray"))
	check.OK(t, err)
	ephemeral := spec("ephemeral")
	ephemeral.Ephemeral = t.TempDir() + "/x"
	check.OK(t, second(m.local.Create(w.ctx, ephemeral)))
	m.agent.Changed()
	w.eventually("it is reported", func() bool {
		p := &v1alpha1.Pool{}
		check.OK(t, w.Get(w.ctx, client.ObjectKey{Name: overview.PoolName(nodeName, "default")}, p))
		c := meta.FindStatusCondition(p.Status.Conditions, v1alpha1.Accounted)
		return c != nil && c.Status == metav1.ConditionFalse && strings.HasSuffix(c.Message, ": "+stray.ID.String()) &&
			p.Status.StrayCount == 1 && len(p.Status.Strays) == 1 && p.Status.Strays[0].ID == stray.ID.String() && p.Status.Strays[0].Name == "stray"
	})
	check.OK(t, second(m.local.Get(w.ctx, stray.ID)))
}

// TestDeleteUnreported: all objects of the driver are lost, as its definitions were removed, and a volume is deleted before its node has reported what its pool keeps. It
// does not count as deleted: neither while there is no Pool at all, nor while the pool is not there. When the node is gone for good, it does.
func TestDeleteUnreported(t *testing.T) {
	w, m, s := newCluster(t)
	v, _, pv := w.claimed(s, "data")
	pv.Spec.NodeAffinity = boundTo(m.name)
	check.OK(t, w.Update(w.ctx, pv))
	lose := func() {
		t.Helper()
		m.stop()
		if v := w.object(v.Name); v != nil {
			check.OK(t, w.Delete(w.ctx, v))
		}
		check.OK(t, w.DeleteAllOf(w.ctx, &v1alpha1.Pool{}))
		w.eventually("the store has heard of it", func() bool { // of each pool: one after another goes
			return second(s.Capacity(w.ctx, "b", volume.NotEncrypted, m.name)) != nil && second(s.Capacity(w.ctx, "default", volume.NotEncrypted, m.name)) != nil
		})
	}
	lose()
	fails(t, s.Delete(soon(t), v.ID), errdefs.ErrUnavailable)
	m.wrap = func(*memory.Pool) blockdev.Pool {
		return lazy.New("default", errors.New("no disk"), func(context.Context) (blockdev.Pool, error) { return nil, errors.New("no disk") })
	}
	w.start(m)
	w.pooled(s, m)
	w.eventually("the pool is reported", func() bool { return w.pool(m.name, "default").Status.Measured != nil })
	if c := meta.FindStatusCondition(w.pool(m.name, "default").Status.Conditions, v1alpha1.Accounted); c != nil {
		t.Errorf("of a pool that is not there it says %+v", c)
	}
	fails(t, s.Delete(soon(t), v.ID), errdefs.ErrUnavailable)
	m.stop()
	m.wrap = nil
	w.start(m)
	w.waits(func() error { return s.Delete(soon(t), v.ID) }, "its bytes are still on node "+m.name)
	lose()
	check.OK(t, w.Delete(w.ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: m.name}}))
	check.OK(t, s.Delete(w.ctx, v.ID))
}

// TestBusy: while a call of the node holds the lock of a volume, the agent waits.
func TestBusy(t *testing.T) {
	w, m, s := newCluster(t)
	v, err := s.Create(w.ctx, spec("v"))
	check.OK(t, err)
	unlock := check.Locked(t, m.locks, keylock.Volume(v.ID.Key))
	fails(t, second(s.Expand(soon(t), v.ID, volume.Range{Required: 2 * mib})), errdefs.ErrUnavailable)
	unlock()
	check.OK(t, second(s.Expand(w.ctx, v.ID, volume.Range{Required: 2 * mib})))
}

// TestNoAPIServer: a store and an agent that start while the API server does not answer work when it does.
func TestNoAPIServer(t *testing.T) {
	w := newEnvironment(t)
	server := apitest.Get(t)
	m := w.machine(nodeName)
	m.stop()
	thaw := server.Freeze(t)
	s, err := store.New(server.Config("controller"), store.Options{GoneGrace: grace, AbandonGrace: time.Hour, Driver: cluster.DefaultDriver})
	check.OK(t, err)
	w.run(s.Run)
	w.start(m)
	time.Sleep(200 * time.Millisecond)
	fails(t, s.Ready(w.ctx), errdefs.ErrUnavailable)
	fails(t, second(s.Create(w.ctx, spec("v"))), errdefs.ErrUnavailable)
	thaw()
	w.eventually("the store is ready", func() bool { return s.Ready(w.ctx) == nil })
	w.pooled(s, m)
	check.OK(t, second(s.Create(w.ctx, spec("v"))))
}

// TestUnfinishedGroup: a controller died after it had created some members of a group. They are deleted if nobody asks for the group again for long.
// Complete groups stay.
func TestUnfinishedGroup(t *testing.T) {
	w, m, s := newCluster(t)
	v, err := s.Create(w.ctx, spec("v"))
	check.OK(t, err)
	v2, err := s.Create(w.ctx, spec("v2"))
	check.OK(t, err)
	whole, err := s.CreateGroup(w.ctx, "whole", []volume.ID{v.ID, v2.ID})
	check.OK(t, err)
	var one v1alpha1.Snapshot
	check.OK(t, w.Get(w.ctx, client.ObjectKey{Name: whole.Snapshots[0].ID.Key}, &one))
	part := &v1alpha1.Snapshot{ObjectMeta: metav1.ObjectMeta{Name: volume.KeyOf("part"), Finalizers: one.Finalizers}, Spec: one.Spec}
	part.Spec.Make, part.Spec.Name, part.Spec.Group = true, "part", &v1alpha1.Group{Key: volume.KeyOf("part"), Size: 2}
	began := time.Now()
	check.OK(t, w.Create(w.ctx, part))
	_, stop := w.sweeping()
	w.eventually("the part is gone", func() bool {
		return apierrors.IsNotFound(w.Get(w.ctx, client.ObjectKeyFromObject(part), &v1alpha1.Snapshot{}))
	})
	if age := time.Since(began); age < abandonGrace-time.Second { // creation times have whole seconds
		t.Errorf("it went after %v", age)
	}
	again, err := s.GetGroup(w.ctx, whole.ID)
	check.OK(t, err)
	if len(again.Snapshots) != 2 {
		t.Errorf("the whole group has %d members", len(again.Snapshots))
	}
	stop() // so that it does not find the next group incomplete
	check.OK(t, second(s.CreateGroup(w.ctx, "part", []volume.ID{v.ID, v2.ID})))
	w.tally(m)
}

// TestAbandoned: a volume that was made for a claim, and that no PersistentVolume, claim or user has, is deleted if its node finds it blank, and stays if
// not.
func TestAbandoned(t *testing.T) {
	w, m, s := newCluster(t)
	provisioned := func(name string) volume.ID {
		one := spec(name)
		one.For = volume.Requester{Namespace: "default", Name: "claim"}
		v, err := s.Create(w.ctx, one)
		check.OK(t, err)
		return v.ID
	}
	used, owned, claimed := provisioned("pvc-used"), provisioned("pvc-owned"), provisioned("pvc-claimed")
	check.OK(t, m.local.SetFormat(w.ctx, used, volume.Format{State: volume.Formatted, Type: "ext4"}))
	check.OK(t, second(s.Claim(w.ctx, claimed, volume.Claim{Node: nodeName, Mode: "m"})))
	check.OK(t, w.Create(w.ctx, &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pvc-owned"}, Spec: corev1.PersistentVolumeSpec{
		Capacity:               corev1.ResourceList{corev1.ResourceStorage: *resource.NewQuantity(mib, resource.BinarySI)},
		AccessModes:            []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
		PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: cluster.DefaultDriver, VolumeHandle: owned.String()}}}}))
	provisioned("pvc-adopted")
	check.OK(t, w.Delete(w.ctx, w.object("pvc-adopted")))
	w.strays("default", 1)
	w.adopt("default", "all")
	w.eventually("it is found", func() bool { o := w.object("pvc-adopted"); return o != nil && o.Status.Created != nil })
	blank := provisioned("pvc-blank")
	check.OK(t, second(s.Create(w.ctx, spec("named-by-somebody"))))
	w.sweeping()
	w.eventually("the blank one is gone", func() bool { return w.object("pvc-blank") == nil })
	fails(t, second(m.local.Get(w.ctx, blank)), errdefs.ErrNotFound)
	w.eventually("the used one was looked at", func() bool {
		o := w.object("pvc-used")
		return o != nil && o.Status.Is(v1alpha1.Abandoned, "False") && !o.Spec.Abandoned
	})
	for _, name := range []string{"pvc-used", "pvc-owned", "pvc-claimed", "pvc-adopted", "named-by-somebody"} {
		if o := w.object(name); o == nil || o.Spec.Abandoned || o.Deleting() {
			t.Errorf("%s: %+v", name, o)
		}
	}
	w.tally(m)
}

// TestAbandonedGone: nobody knows of volumes, and the node that is to say whether they are blank is gone for good. The one that nobody ever used is given up.
// Those stay that were claimed once, or of which nobody can tell that, as such claims are not counted.
func TestAbandonedGone(t *testing.T) {
	w, all, s := legCluster(t, 1)
	unused, used, untold := anyNode("pvc-unused", nodeName), anyNode("pvc-used", nodeName), spec("pvc-untold")
	for _, one := range []volume.Spec{unused, used, untold} {
		one.For = volume.Requester{Namespace: "default", Name: "claim"}
		v, err := s.Create(w.ctx, one)
		check.OK(t, err)
		if one.Name == used.Name {
			check.OK(t, second(s.Claim(w.ctx, v.ID, on(nodeName))))
			check.OK(t, s.Release(w.ctx, v.ID, nodeName))
		}
	}
	all[nodeName].stop()
	w.node(nodeName, false)
	w.sweeping()
	for _, one := range []volume.Spec{unused, used, untold} {
		w.eventually("its node is asked", func() bool { return w.object(one.Name).Spec.Abandoned })
	}
	time.Sleep(2 * grace)
	if w.object(unused.Name) == nil {
		t.Fatal("given up without a signal")
	}
	check.OK(t, w.Delete(w.ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}}))
	w.eventually("it is given up", func() bool { return w.object(unused.Name) == nil })
	time.Sleep(2 * grace)
	for _, one := range []volume.Spec{used, untold} {
		if o := w.object(one.Name); o == nil || o.Deleting() {
			t.Errorf("%s is %+v", one.Name, o)
		}
	}
}

// TestRefusedAndStuck: a node could not make a volume, and cannot remove what is left of it either. The error says why it could not make it, and not only
// that the node has not answered.
func TestRefusedAndStuck(t *testing.T) {
	w := newEnvironment(t)
	var broken atomic.Bool
	broken.Store(true)
	m := w.machineWith(nodeName, func(operation string, ref blockdev.Ref) error {
		if ref.Key != volume.KeyOf("v") || !broken.Load() {
			return nil
		}
		switch operation {
		case "Create":
			return errors.New("input/output error")
		case "Delete":
			return fmt.Errorf("%w: no disk", errdefs.ErrUnavailable)
		}
		return nil
	})
	s, _ := w.store()
	w.pooled(s, m)
	for range 2 { // a repeated call says it too
		w.waits(func() error { return second(s.Create(soon(t), spec("v"))) }, "input/output error")
	}
	broken.Store(false)
	w.eventually("it is made", func() bool { return second(s.Create(w.ctx, spec("v"))) == nil })
	w.tally(m)
}

// TestGroupNotDeleted: a node cannot delete a group snapshot. The call, and each snapshot of the group, say why. The node goes on trying.
func TestGroupNotDeleted(t *testing.T) {
	w := newEnvironment(t)
	var broken atomic.Bool
	m := w.machineWith(nodeName, func(operation string, ref blockdev.Ref) error {
		if operation == "Delete" && ref.Kind == blockdev.Snapshot && broken.Load() {
			return errors.New("input/output error")
		}
		return nil
	})
	s, _ := w.store()
	w.pooled(s, m)
	var sources []volume.ID
	for _, name := range []string{"a", "b"} {
		v, err := s.Create(w.ctx, spec(name))
		check.OK(t, err)
		sources = append(sources, v.ID)
	}
	group, err := s.CreateGroup(w.ctx, "g", sources)
	check.OK(t, err)
	broken.Store(true)
	for range 2 {
		ctx, cancel := context.WithTimeout(w.ctx, 20*time.Second)
		err := s.DeleteGroup(ctx, group.ID)
		cancel()
		if err == nil || errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), "input/output error") {
			t.Errorf("the deletion ended with %v", err)
		}
	}
	for _, one := range group.Snapshots {
		w.eventually("the snapshot says why it is still there", func() bool {
			f := w.cutObject(one.ID).Status.Failure
			return f != nil && strings.Contains(f.Message, "input/output error")
		})
	}
	broken.Store(false)
	if asked := w.cutObject(group.Snapshots[0].ID); asked != nil { // the node may have tried again meanwhile
		before := asked.DeepCopy()
		cluster.Annotate(asked, v1alpha1.AskedAnnotation, "now") // it tries at once
		check.OK(t, client.IgnoreNotFound(w.Patch(w.ctx, asked, client.MergeFrom(before))))
	}
	for _, one := range group.Snapshots {
		w.eventually("it is deleted", func() bool { return w.cutObject(one.ID) == nil })
	}
	w.tally(m)
}

// TestMadeAnewMeanwhile: an agent of an older version has made a volume, and the store takes spec.make off its object. It does not do so to another object
// of that name, which was created meanwhile.
func TestMadeAnewMeanwhile(t *testing.T) {
	w := newEnvironment(t)
	m := w.machine(nodeName)
	m.stop()
	let, asked := make(chan struct{}), make(chan struct{}, 1)
	wrap(t, func(c *rest.Config) {
		c.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return roundTrip(func(q *http.Request) (*http.Response, error) {
				if q.Method == http.MethodPatch && strings.HasSuffix(q.URL.Path, "/volumes/"+volume.KeyOf("v")) {
					select {
					case asked <- struct{}{}:
					default:
					}
					held(t, let)
				}
				return next.RoundTrip(q)
			})
		})
	})
	s := w.knowing(m)
	answer := make(chan error, 1)
	go func() { answer <- second(s.Create(w.ctx, spec("v"))) }()
	w.eventually("it is asked for", func() bool { return w.object("v") != nil })
	made := w.object("v")
	before := made.DeepCopy()
	made.Status.Created, made.Status.Size = new(metav1.NowMicro()), mib
	check.OK(t, w.Status().Patch(w.ctx, made, client.MergeFrom(before)))
	w.comes(asked, "the store writes down that it was made")
	check.OK(t, w.Delete(w.ctx, made))
	another := cluster.VolumeNamed(made.Name)
	another.Spec = made.Spec
	check.OK(t, w.Create(w.ctx, another))
	close(let)
	<-answer
	if o := w.object("v"); !o.Spec.Make {
		t.Error("another one of its name is never made")
	}
}
