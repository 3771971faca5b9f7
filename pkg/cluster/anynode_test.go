package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/agent"
	"github.com/ashlar-csi/ashlar/pkg/cluster/lost"
	"github.com/ashlar-csi/ashlar/pkg/cluster/store"
	"github.com/ashlar-csi/ashlar/pkg/controller"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// given has the exports of a node: it stands for what exports volumes (agent.Options.Exporter).
type given struct {
	mu    sync.Mutex
	to    map[volume.ID]volume.Grant
	stuck error // the error of Unexport; nil: it succeeds

	readers map[volume.ID][]int64 // generations of the claims of readers
}

func (g *given) ExportOf(_ context.Context, id volume.ID) (volume.Grant, bool, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	to, is := g.to[id]
	return to, is, nil
}

func (g *given) IsExport(context.Context, volume.ID, string) (bool, error) { return true, nil }

func (g *given) Gives(_ context.Context, id volume.ID) (bool, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	_, is := g.to[id]
	return is || len(g.readers[id]) > 0, nil
}

func (g *given) Unexport(_ context.Context, id volume.ID, generation int64) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.to[id].Generation == generation && g.stuck == nil {
		delete(g.to, id)
	}
	return g.stuck
}

// gives exports a volume, as the agent does when a node opens it.
func (g *given) gives(_ context.Context, id volume.ID, to volume.Grant) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.to[id] = to
}

func (g *given) fail(err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.stuck = err
}

// networked starts a machine in a network; empty: in none.
func (w *environment) networked(name, network string) (*machine, *given) {
	w.Helper()
	g := &given{to: map[volume.ID]volume.Grant{}}
	return w.begin(&machine{name: name, with: func(o *agent.Options) {
		if network != "" {
			o.Exporter, o.Network = g, &v1alpha1.Network{Name: network, Address: "10.0.0.7:4420"}
		}
	}}), g
}

// knowing starts a store, and waits until it knows the pools of machines.
func (w *environment) knowing(machines ...*machine) *store.Store {
	w.Helper()
	s, _ := w.store()
	for _, m := range machines {
		w.pooled(s, m)
	}
	return s
}

func anyNode(name string, nodes ...string) volume.Spec {
	s := spec(name)
	s.Access, s.Nodes = volume.AccessAny, nodes
	return s
}

// touched makes the agent of a volume look at it.
func (w *environment) touched(name string) {
	w.Helper()
	o := w.object(name)
	before := o.DeepCopy()
	metav1.SetMetaDataAnnotation(&o.ObjectMeta, "example.com/touched", time.Now().String())
	check.OK(w, w.Patch(w.ctx, o, client.MergeFrom(before)))
}

// exported waits until the object of a volume has an export (status.export); nil: none.
func (w *environment) exported(name string, want *volume.Grant) {
	w.Helper()
	w.eventually(fmt.Sprintf("volume %s is given to %v", name, want), func() bool {
		e := w.object(name).Status.Export
		return e == nil && want == nil || e != nil && want != nil && *want == (volume.Grant{Generation: e.Generation, Node: e.Node}) && e.Since != nil
	})
}

func on(node string) volume.Claim { return volume.Claim{Node: node, Mode: "m"} }

// generation returns the generation of a volume's claim; 0 if it has none.
func (w *environment) generation(name string) int64 {
	w.Helper()
	if c := w.object(name).Spec.Claim; c != nil {
		return c.Generation
	}
	return 0
}

// TestAnyNodeClaimed: which nodes may claim a volume that other nodes can use, and how its claims are counted.
func TestAnyNodeClaimed(t *testing.T) {
	w := newEnvironment(t)
	a, _ := w.networked("node-a", "storage")
	b, _ := w.networked("node-b", "storage")
	c, _ := w.networked("node-c", "default")
	d, _ := w.networked("node-d", "")
	s := w.knowing(a, b, c, d)
	v, err := s.Create(w.ctx, anyNode("v", a.name))
	check.OK(t, err)
	own, err := s.Create(w.ctx, volume.Spec{Name: "own", Size: volume.Range{Required: mib}, Nodes: []string{a.name}})
	check.OK(t, err)
	for _, refused := range []struct {
		id   volume.ID
		node string
		why  string
	}{
		{v.ID, c.name, `networks "storage" and "default"`},
		{v.ID, d.name, "node node-d is in no network"},
		{own.ID, b.name, "is on node node-a and cannot be used on node node-b"},
	} {
		if err := second(s.Claim(w.ctx, refused.id, on(refused.node))); !errors.Is(err, errdefs.ErrPrecondition) || !strings.Contains(err.Error(), refused.why) {
			t.Errorf("claimed for %s: %v, want one that says %q", refused.node, err, refused.why)
		}
	}
	fails(t, second(s.Claim(w.ctx, v.ID, on("nowhere"))), errdefs.ErrNotFound)

	for want, node := range []string{b.name, a.name, b.name} {
		for range 2 { // a repeated call does not make another claim
			check.OK(t, second(s.Claim(w.ctx, v.ID, on(node))))
			if have := w.generation("v"); have != int64(want+1) {
				t.Errorf("claimed for %s with generation %d, want %d", node, have, want+1)
			}
		}
		fails(t, second(s.Claim(w.ctx, v.ID, volume.Claim{Node: node, Mode: "other"})), errdefs.ErrExists)
		fails(t, second(s.Claim(w.ctx, v.ID, on(map[string]string{a.name: b.name, b.name: a.name}[node]))), errdefs.ErrInUse)
		check.OK(t, s.Release(w.ctx, v.ID, node))
		if o := w.object("v"); o.Spec.Claim != nil || o.Spec.Claims != int64(want+1) {
			t.Errorf("released, it is %+v", o.Spec)
		}
	}
	check.OK(t, second(s.Claim(w.ctx, own.ID, on(a.name))))
	if o := w.object("own"); o.Spec.Claims != 0 || o.Spec.Claim.Generation != 0 {
		t.Errorf("a volume of one node counts: %+v", o.Spec)
	}
}

// TestAnyNodeRace: if a volume is claimed for two nodes at once, by two controllers, one of them gets it; and no generation is used twice.
func TestAnyNodeRace(t *testing.T) {
	w := newEnvironment(t)
	a, _ := w.networked("node-a", "storage")
	b, _ := w.networked("node-b", "storage")
	stores := []*store.Store{w.knowing(a, b), w.knowing(a, b)}
	v, err := stores[0].Create(w.ctx, anyNode("v", a.name))
	check.OK(t, err)
	for round := range 10 {
		var won [2]error
		var both sync.WaitGroup
		for i, node := range []string{a.name, b.name} {
			both.Go(func() { won[i] = second(stores[i].Claim(w.ctx, v.ID, on(node))) })
		}
		both.Wait()
		one, other := won[0] == nil, won[1] == nil
		if one == other || !errors.Is(errors.Join(won[:]...), errdefs.ErrInUse) {
			t.Fatalf("round %d: %v and %v", round, won[0], won[1])
		}
		if have := w.generation("v"); have != int64(round+1) {
			t.Errorf("round %d has generation %d", round, have)
		}
		check.OK(t, stores[round%2].Release(w.ctx, v.ID, ""))
	}
}

// TestAnyNodeReleased: a release waits until the home has ended the export, and until then the volume is not deleted.
func TestAnyNodeReleased(t *testing.T) {
	w := newEnvironment(t)
	a, home := w.networked("node-a", "storage")
	b, _ := w.networked("node-b", "storage")
	s := w.knowing(a, b)
	v, err := s.Create(w.ctx, anyNode("v", a.name))
	check.OK(t, err)
	check.OK(t, second(s.Claim(w.ctx, v.ID, on(b.name))))
	first := volume.Grant{Generation: 1, Node: b.name}
	home.gives(w.ctx, v.ID, first)
	w.touched("v")
	w.exported("v", &first)

	home.fail(fmt.Errorf("%w: the target hangs", errdefs.ErrUnavailable))
	for range 2 { // external-attacher repeats the call
		w.waits(func() error { return s.Release(soon(t), v.ID, b.name) }, "wait for its node node-a to end what it gives to node node-b (claim 1)")
		if w.object("v").Spec.Claim != nil {
			t.Error("it is claimed still")
		}
	}
	if err := s.Delete(w.ctx, v.ID); !errors.Is(err, errdefs.ErrInUse) || !strings.Contains(err.Error(), "given to node node-b") {
		t.Errorf("deleted: %v", err)
	}
	check.OK(t, second(s.Claim(w.ctx, v.ID, on(b.name)))) // meanwhile it may be claimed again, with another generation than the one that ends
	if have := w.generation("v"); have != 2 {
		t.Errorf("claimed with generation %d", have)
	}
	home.fail(nil)
	w.exported("v", nil)
	check.OK(t, s.Release(w.ctx, v.ID, b.name))
	check.OK(t, s.Delete(w.ctx, v.ID))
	w.tally(a)
}

// TestAnyNodeAlone: a home that is in no network any more still reports its exports, and when they have ended. An export that it cannot end does not keep
// its agent from other work.
func TestAnyNodeAlone(t *testing.T) {
	w := newEnvironment(t)
	a, home := w.networked("node-a", "storage")
	b, _ := w.networked("node-b", "storage")
	s := w.knowing(a, b)
	v, err := s.Create(w.ctx, anyNode("v", a.name))
	check.OK(t, err)
	check.OK(t, second(s.Claim(w.ctx, v.ID, on(b.name))))
	to := volume.Grant{Generation: 1, Node: b.name}
	home.gives(w.ctx, v.ID, to)
	w.touched("v")
	w.exported("v", &to)
	a.stop()
	a.with = func(o *agent.Options) { o.Exporter = home }
	w.start(a)
	home.fail(fmt.Errorf("%w: it gives nothing to other nodes", errdefs.ErrUnavailable))
	w.asked("its claim is off", func(ctx context.Context) error { return s.Release(ctx, v.ID, b.name) }, func() bool { return w.object("v").Spec.Claim == nil })
	grown, err := s.Expand(w.ctx, v.ID, volume.Range{Required: 2 * mib})
	if check.OK(t, err); grown.Size != 2*mib {
		t.Errorf("grown, it is %+v", grown)
	}
	w.exported("v", &to)
	home.fail(nil)
	w.touched("v")
	w.exported("v", nil)
	check.OK(t, s.Release(w.ctx, v.ID, b.name))
	check.OK(t, s.Delete(w.ctx, v.ID))
}

// TestAnyNodeCounted: a node cannot use up the generations of claims by what it reports about exports. It can report a somewhat later one, as after a
// restore of the object, and the next claim has that.
func TestAnyNodeCounted(t *testing.T) {
	w := newEnvironment(t)
	a, _ := w.networked("node-a", "storage")
	b, _ := w.networked("node-b", "storage")
	s := w.knowing(a, b)
	v, err := s.Create(w.ctx, anyNode("v", a.name))
	check.OK(t, err)
	check.OK(t, second(s.Claim(w.ctx, v.ID, on(b.name))))
	a.stop()
	x := w.takenOver(t, a.name)
	says := func(generation int64, many bool) error {
		o := w.object("v")
		before := o.DeepCopy()
		e := v1alpha1.Export{Generation: generation, Node: b.name}
		if o.Status.Export, o.Status.Readers = &e, nil; many {
			o.Status.Export, o.Status.Readers = nil, []v1alpha1.Export{e}
		}
		return x.Client.Status().Patch(w.ctx, o, client.MergeFrom(before))
	}
	for _, many := range []bool{true, false} {
		for _, generation := range []int64{math.MaxInt64, math.MaxInt64 - 1, 1 << 53, 1_000_000_002} {
			if err := says(generation, many); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "a node gives a volume by a claim that there was") {
				t.Errorf("given by claim %d, to read %v: %v", generation, many, err)
			}
		}
		check.OK(t, says(1_000_000_001, many))
	}
	check.OK(t, w.Patch(w.ctx, w.object("v"), client.RawPatch(types.MergePatchType, []byte(`{"spec":{"claim":null}}`))))
	check.OK(t, second(s.Claim(w.ctx, v.ID, on(b.name))))
	if have := w.generation("v"); have != 1_000_000_001 { // the one for which the home exports it to the same node
		t.Errorf("claimed with generation %d", have)
	}
}

// TestAnyNodeHomeGone: a release waits for a home that is down, but not for one that is gone for good.
func TestAnyNodeHomeGone(t *testing.T) {
	w := newEnvironment(t)
	a, home := w.networked("node-a", "storage")
	b, _ := w.networked("node-b", "storage")
	s := w.knowing(a, b)
	v, err := s.Create(w.ctx, anyNode("v", a.name))
	check.OK(t, err)
	check.OK(t, second(s.Claim(w.ctx, v.ID, on(b.name))))
	to := volume.Grant{Generation: 1, Node: b.name}
	home.gives(w.ctx, v.ID, to)
	w.touched("v")
	w.exported("v", &to)
	a.stop()
	w.node(a.name, false)
	fails(t, s.Release(soon(t), v.ID, b.name), errdefs.ErrUnavailable)
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: a.name}}
	check.OK(t, w.Get(w.ctx, client.ObjectKeyFromObject(node), node))
	before := node.DeepCopy()
	node.Spec.Taints = append(node.Spec.Taints, corev1.Taint{Key: v1alpha1.GoneTaint, Effect: corev1.TaintEffectNoExecute})
	check.OK(t, w.Patch(w.ctx, node, client.MergeFrom(before)))
	check.OK(t, s.Release(w.ctx, v.ID, b.name))
	w.eventually("what was on it is given up", func() bool { return s.Delete(soon(t), v.ID) == nil })
}

// madeAnew deletes the object of a volume and creates it again, as a restore or an adoption does: without its status, and with the spec as edit changes
// it. meanwhile is called in between.
func (w *environment) madeAnew(name string, meanwhile func(), edit func(*v1alpha1.VolumeSpec)) {
	w.Helper()
	o := w.object(name)
	check.OK(w, w.Delete(w.ctx, o))
	w.eventually("it is gone", func() bool { return w.object(name) == nil })
	meanwhile()
	again := cluster.VolumeNamed(o.Name)
	again.Spec = o.Spec
	edit(&again.Spec)
	check.OK(w, w.Create(w.ctx, again))
	w.eventually("it is found", func() bool { return w.object(name).Status.Created != nil })
}

// TestAnyNodeRestored: a home exports a volume for a claim that its object, which was restored, does not know. The export stays until the volume is
// claimed for another node, or released; and another claim gets a generation that no claim had before.
func TestAnyNodeRestored(t *testing.T) {
	w := newEnvironment(t)
	a, home := w.networked("node-a", "storage")
	b, _ := w.networked("node-b", "storage")
	s := w.knowing(a, b)
	v, err := s.Create(w.ctx, anyNode("v", a.name))
	check.OK(t, err)
	unknown := volume.Grant{Generation: 5, Node: b.name}
	forgotten := func(spec *v1alpha1.VolumeSpec) { spec.Claim, spec.Claims = nil, 0 }
	older := func(spec *v1alpha1.VolumeSpec) { spec.Claims, spec.Claim = 3, nil }
	for what, is := range map[string]struct {
		restored func(*v1alpha1.VolumeSpec)
		then     func()
		want     int64 // the generation of the claim afterwards
		left     *volume.Grant
	}{
		"its user claims it again":  {forgotten, func() { check.OK(t, second(s.Claim(w.ctx, v.ID, on(b.name)))) }, 5, &unknown},
		"its user claims the older": {older, func() { check.OK(t, second(s.Claim(w.ctx, v.ID, on(b.name)))) }, 5, &unknown},
		"another claims it":         {older, func() { check.OK(t, second(s.Claim(w.ctx, v.ID, on(a.name)))) }, 6, nil},
		"it is released":            {forgotten, func() { check.OK(t, s.Release(w.ctx, v.ID, b.name)) }, 0, nil},
		"somebody else had it": {func(spec *v1alpha1.VolumeSpec) {
			spec.Claims, spec.Claim = 2, &v1alpha1.Claim{Node: a.name, Mode: "m", Generation: 2}
		}, func() {}, 2, nil},
		"one of the same number": {func(spec *v1alpha1.VolumeSpec) {
			spec.Claims, spec.Claim = 5, &v1alpha1.Claim{Node: a.name, Mode: "m", Generation: 5}
		}, func() {}, 5, nil},
	} {
		w.madeAnew("v", func() { home.gives(w.ctx, v.ID, unknown) }, is.restored)
		if w.object("v").Spec.Claim == nil {
			w.exported("v", &unknown)
		}
		is.then()
		w.eventually(what+": what is left of it", func() bool {
			to, there, _ := home.ExportOf(w.ctx, v.ID)
			return there == (is.left != nil) && (!there || to == *is.left)
		})
		w.exported("v", is.left)
		if have := w.generation("v"); have != is.want {
			t.Errorf("%s: claimed with generation %d, want %d", what, have, is.want)
		}
		check.OK(t, s.Release(w.ctx, v.ID, ""))
		w.exported("v", nil)
	}
}

// TestAnyNodeMoved: a disk is put into the node that used a volume on it. That node is now the home, and ends the export to itself.
func TestAnyNodeMoved(t *testing.T) {
	w := newEnvironment(t)
	a, home := w.networked("node-a", "storage")
	s := w.knowing(a)
	v, err := s.Create(w.ctx, anyNode("v", a.name))
	check.OK(t, err)
	before := volume.Grant{Generation: 5, Node: a.name}
	for _, claim := range []string{"", a.name} {
		w.madeAnew("v", func() { home.gives(w.ctx, v.ID, before) }, func(spec *v1alpha1.VolumeSpec) {
			if spec.Claims = 0; claim != "" {
				spec.Claims, spec.Claim = before.Generation, &v1alpha1.Claim{Node: claim, Mode: "m", Generation: before.Generation}
			}
		})
		w.eventually("it is given to nobody", func() bool { _, is, _ := home.ExportOf(w.ctx, v.ID); return !is })
		w.exported("v", nil)
	}
}

// TestAnyNodePlaced: a volume that other nodes can use is made on a node that is in a network, and its topology says which nodes can use it.
func TestAnyNodePlaced(t *testing.T) {
	w := newEnvironment(t)
	a, _ := w.networked("node-a", "")
	b, _ := w.networked("node-b", "storage")
	c, _ := w.networked("node-c", "storage")
	s := w.knowing(a, b, c)
	server := controller.New(s)
	in := func(segments ...map[string]string) *csi.TopologyRequirement {
		r := &csi.TopologyRequirement{}
		for _, one := range segments {
			r.Requisite = append(r.Requisite, &csi.Topology{Segments: one})
		}
		r.Preferred = r.Requisite
		return r
	}
	node := func(name string) map[string]string { return map[string]string{csimap.TopologyKey: name} }
	network := map[string]string{csimap.NetworkKey: "storage"}
	at := func(name string) map[string]string { // as external-provisioner gives it for a node that has both keys
		both := maps.Clone(network)
		both[csimap.TopologyKey] = name
		return both
	}
	create := func(name string, r *csi.TopologyRequirement) (*csi.Volume, error) {
		made, err := server.CreateVolume(w.ctx, &csi.CreateVolumeRequest{Name: name, Parameters: map[string]string{"access": "any", "homeTimeout": "90s"}, AccessibilityRequirements: r,
			CapacityRange: &csi.CapacityRange{RequiredBytes: mib},
			VolumeCapabilities: []*csi.VolumeCapability{{AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
				AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER}}}})
		return made.GetVolume(), err
	}
	for name, is := range map[string]struct {
		where *csi.TopologyRequirement
		homes string // nodes of which one is its home
	}{
		"anywhere": {nil, "node-b node-c"}, "strict": {in(at(c.name)), "node-c"}, "in the network": {in(network), "node-b node-c"}, "first": {in(node(c.name), network), "node-c"},
		"some keys": {in(node(a.name), node(b.name)), "node-b"}, "all keys": {in(at(b.name), at(c.name)), "node-b"},
	} {
		v, err := create(name, is.where)
		check.OK(t, err)
		said := v.GetAccessibleTopology()
		if len(said) != 2 || !strings.Contains(is.homes, said[0].GetSegments()[csimap.TopologyKey]) || !maps.Equal(said[1].GetSegments(), network) {
			t.Errorf("%s: %v, want one of %s", name, said, is.homes)
		}
		again, err := server.ControllerGetVolume(w.ctx, &csi.ControllerGetVolumeRequest{VolumeId: v.GetVolumeId()})
		check.OK(t, err)
		if len(again.GetVolume().GetAccessibleTopology()) != 2 {
			t.Errorf("%s: then it is %v", name, again)
		}
		if o := w.object(name); o.Spec.Access != "any" || o.Spec.HomeTimeout != 90 {
			t.Errorf("%s: its object is %+v", name, o.Spec)
		}
	}
	_, err := create("not there", in(node(a.name)))
	if fails(t, err, errdefs.ErrNoSpace); !strings.Contains(err.Error(), "node node-a reaches no other node (parameter access=any)") {
		t.Error(err)
	}
	fails(t, second(create("no such network", in(map[string]string{csimap.NetworkKey: "other"}))), errdefs.ErrNoSpace)

	room := func(access string, topology map[string]string) int64 {
		r := &csi.GetCapacityRequest{Parameters: map[string]string{"access": access}}
		if topology != nil {
			r.AccessibleTopology = &csi.Topology{Segments: topology}
		}
		c, err := server.GetCapacity(w.ctx, r)
		check.OK(t, err)
		return c.GetAvailableCapacity()
	}
	onB, onC := room("node", node(b.name)), room("node", node(c.name))
	for what, is := range map[string]struct {
		topology map[string]string
		want     int64
	}{
		"all": {nil, onB + onC}, "a node": {at(b.name), onB}, "the network": {network, onB + onC}, "a node in none": {node(a.name), 0}, "another": {map[string]string{csimap.NetworkKey: "other"}, 0},
	} {
		if have := room("any", is.topology); have != is.want {
			t.Errorf("%s: room for %d, want %d", what, have, is.want)
		}
	}
	if room("node", node(a.name)) == 0 {
		t.Error("a node in no network has no room for its own volumes")
	}

	objects, _, err := lost.Find(w.ctx, w, lost.Options{Driver: cluster.DefaultDriver, Class: "x", AccessMode: "ReadWriteOnce", Namespace: "default"})
	check.OK(t, err)
	if len(objects) == 0 {
		t.Fatal("nothing is lost")
	}
	for _, o := range objects {
		if pv, is := o.(*corev1.PersistentVolume); is {
			terms := pv.Spec.NodeAffinity.Required.NodeSelectorTerms
			if len(terms) != 2 || terms[0].MatchExpressions[0].Key != v1alpha1.TopologyKey || terms[1].MatchExpressions[0].Key != v1alpha1.NetworkKey || terms[1].MatchExpressions[0].Values[0] != "storage" {
				t.Errorf("%s is for %v", pv.Name, terms)
			}
		}
	}
}

// TestAnyNodeCopied: a copy that other nodes can use is made on the node of its source, also for a pod on another node that reaches it there.
func TestAnyNodeCopied(t *testing.T) {
	w := newEnvironment(t)
	a, _ := w.networked("node-a", "storage")
	b, _ := w.networked("node-b", "storage")
	c, _ := w.networked("node-c", "")
	s := w.knowing(a, b, c)
	v, err := s.Create(w.ctx, anyNode("v", a.name))
	check.OK(t, err)
	copied := anyNode("copied", b.name)
	copied.Source = v.ID
	have, err := s.Create(w.ctx, copied)
	check.OK(t, err)
	if have.Node != a.name || have.Access != volume.AccessAny {
		t.Errorf("copied as %+v", have)
	}
	copied.Name, copied.Access = "of one node", volume.AccessNode
	fails(t, second(s.Create(w.ctx, copied)), errdefs.ErrNoSpace)
	alone, err := s.Create(w.ctx, volume.Spec{Name: "alone", Size: volume.Range{Required: mib}, Nodes: []string{c.name}})
	check.OK(t, err)
	unreached := anyNode("unreached", c.name)
	unreached.Source = alone.ID
	if err := second(s.Create(w.ctx, unreached)); !errors.Is(err, errdefs.ErrPrecondition) || !strings.Contains(err.Error(), "reaches no other node") {
		t.Errorf("copied on a node in no network: %v", err)
	}
}

// Export is not used by these tests: no node opens a volume over the port.
func (g *given) Export(context.Context, volume.ID, volume.Grant) (volume.Exported, error) {
	return volume.Exported{}, errdefs.ErrUnsupported
}
