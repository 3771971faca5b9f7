package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/agent"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/cluster/store"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
	"github.com/ashlar-csi/ashlar/pkg/volume/storetest"
)

// nodes has machines in one network, whose agents make legs, by their names.
type nodes map[string]*legNode

type legNode struct {
	*machine
	*given
}

// legCluster starts n nodes in a network, and a store that knows their pools.
func legCluster(t *testing.T, n int) (*environment, nodes, *store.Store) {
	t.Helper()
	w, all := newEnvironment(t), nodes{}
	var machines []*machine
	for i := range n {
		m, g := w.networked(fmt.Sprint("node-", i+1), "storage")
		all[m.name] = &legNode{m, g}
		machines = append(machines, m)
	}
	return w, all, w.knowing(machines...)
}

func replicas(name string, n int, on ...string) volume.Spec {
	s := anyNode(name, on...)
	s.Replicas = volume.Replicas{Count: n, ReplaceAfter: 10 * time.Minute}
	return s
}

// whole returns the ReplicatedVolume of a name; nil if there is none.
func (w *environment) whole(name string) *v1alpha1.ReplicatedVolume {
	w.Helper()
	r := &v1alpha1.ReplicatedVolume{}
	err := w.Get(w.ctx, client.ObjectKey{Name: volume.KeyOf(name)}, r)
	if client.IgnoreNotFound(err) != nil {
		w.Fatal(err)
	}
	if err != nil {
		return nil
	}
	return r
}

// legsOf returns the legs of a volume: first those that its object names, in that order.
func (w *environment) legsOf(name string) (legs []*v1alpha1.Volume) {
	w.Helper()
	var list v1alpha1.VolumeList
	check.OK(w, w.List(w.ctx, &list))
	for i := range list.Items {
		if list.Items[i].Spec.ReplicaOf == volume.KeyOf(name) {
			legs = append(legs, &list.Items[i])
		}
	}
	at := func(v *v1alpha1.Volume) int {
		if r := w.whole(name); r != nil && slices.Contains(r.Spec.Legs, v.Name) {
			return slices.Index(r.Spec.Legs, v.Name)
		}
		return v1alpha1.MostReplicas * 2
	}
	slices.SortFunc(legs, func(a, b *v1alpha1.Volume) int { return at(a) - at(b) })
	return legs
}

// homes returns the nodes of the legs of a volume.
func (w *environment) homes(name string) (homes []string) {
	w.Helper()
	for _, v := range w.legsOf(name) {
		homes = append(homes, v.Spec.NodeName)
	}
	return homes
}

// claims returns the claims of the legs of a volume, each as NODE GENERATION; empty for none.
func (w *environment) claims(name string) (claims []string) {
	w.Helper()
	for _, v := range w.legsOf(name) {
		c := ""
		if v.Spec.Claim != nil {
			c = fmt.Sprint(v.Spec.Claim.Node, " ", v.Spec.Claim.Generation)
		}
		claims = append(claims, c)
	}
	return claims
}

// says changes the status of a volume, as the node of its claim or the controller does.
func (w *environment) says(name string, edit func(r *v1alpha1.ReplicatedVolume)) {
	w.Helper()
	check.OK(w, w.written(func() error {
		r := w.whole(name)
		before := r.DeepCopy()
		edit(r)
		return w.Status().Patch(w.ctx, r, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	}))
}

// isMade shows that a volume has legs on n nodes, which are all current, and that it is the only volume.
func (w *environment) isMade(t *testing.T, s *store.Store, name string, v volume.Volume, n int) {
	t.Helper()
	r, legs := w.whole(name), w.legsOf(name)
	if r == nil || r.Status.Made == nil || len(legs) != n || len(r.Spec.Legs) != n || r.Spec.Legs[0] != r.Name || len(r.Current()) != n || r.Status.Summary != fmt.Sprintf("%d of %d", n, n) {
		t.Fatalf("it is %+v, with %d legs", r, len(legs))
	}
	homes := w.homes(name)
	slices.Sort(homes)
	if len(slices.Compact(homes)) != n {
		t.Errorf("its legs are on %v", homes)
	}
	for i, leg := range legs {
		if leg.Name != r.Spec.Legs[i] || leg.Status.Created == nil || leg.Status.Size != r.Spec.Size || leg.Spec.Access != "any" {
			t.Errorf("leg %d is %+v", i, leg.Spec)
		}
	}
	if v.ID.Key != r.Name || v.ID.String() != r.ID() || v.Name != name || v.Size != r.Spec.Size || v.Replicas != n || v.ReplicaOf != "" || !slices.Contains(homes, v.Node) {
		t.Errorf("the volume is %+v", v)
	}
	if all, err := s.List(w.ctx, volume.ID{}, 0); err != nil || len(all) != 1 || all[0].ID != v.ID {
		t.Errorf("listed are %+v, %v", all, err)
	}
}

// TestReplicated: a volume with replicas is made on several nodes, and is claimed, changed and deleted as one. Its legs cannot be used as volumes.
func TestReplicated(t *testing.T) {
	w, all, s := legCluster(t, 3)
	v, err := s.Create(w.ctx, replicas("v", 2, "node-2"))
	check.OK(t, err)
	w.isMade(t, s, "v", v, 2)
	if homes := w.homes("v"); homes[0] != "node-2" {
		t.Errorf("its legs are on %v, and the first was to be on node-2", homes)
	}
	again, err := s.Create(w.ctx, replicas("v", 2, "node-2"))
	check.OK(t, err)
	if again.ID != v.ID || again.Node != v.Node || len(w.legsOf("v")) != 2 {
		t.Errorf("made again it is %+v", again)
	}
	fails(t, second(s.Create(w.ctx, replicas("v", 3, "node-2"))), errdefs.ErrExists)
	fails(t, second(s.Create(w.ctx, anyNode("v", "node-2"))), errdefs.ErrExists)
	have, err := s.Get(w.ctx, v.ID)
	check.OK(t, err)
	if have.ID != v.ID || have.Size != v.Size {
		t.Errorf("it is %+v", have)
	}
	if problems, err := s.Health(w.ctx, v.ID); err != nil || len(problems) > 0 {
		t.Errorf("its health is %v, %v", problems, err)
	}

	leg := w.legsOf("v")[1]
	other := volume.ID{Kind: v.ID.Kind, Pool: leg.Spec.Pool, Key: leg.Name}
	fails(t, second(s.Get(w.ctx, other)), errdefs.ErrNotFound)
	fails(t, second(s.Claim(w.ctx, other, on("node-1"))), errdefs.ErrNotFound)
	fails(t, second(s.Expand(w.ctx, other, volume.Range{Required: 8 * mib})), errdefs.ErrNotFound)
	check.OK(t, s.Delete(w.ctx, other)) // there is no volume of this ID
	check.OK(t, s.Release(w.ctx, other, "node-1"))
	if len(w.legsOf("v")) != 2 {
		t.Error("a leg was deleted as a volume")
	}

	check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-1"))))
	check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-1"))))
	if claims := w.claims("v"); !slices.Equal(claims, []string{"node-1 1", "node-1 1"}) || w.whole("v").Spec.Claim.Generation != 1 {
		t.Errorf("its legs are claimed for %q", claims)
	}
	fails(t, second(s.Claim(w.ctx, v.ID, on("node-3"))), errdefs.ErrInUse)
	fails(t, second(s.Claim(w.ctx, v.ID, volume.Claim{Node: "node-1", Mode: "other"})), errdefs.ErrExists)
	fails(t, second(s.Claim(w.ctx, v.ID, volume.Claim{Node: "node-1", Mode: "mount,MULTI_NODE_READER_ONLY"})), errdefs.ErrPrecondition)
	fails(t, s.Delete(w.ctx, v.ID), errdefs.ErrInUse)

	grown, err := s.Expand(w.ctx, v.ID, volume.Range{Required: 8 * mib})
	check.OK(t, err)
	if grown.Size != 8*mib || w.whole("v").Spec.Size != 8*mib || w.legsOf("v")[0].Status.Size != 8*mib || w.legsOf("v")[1].Status.Size != 8*mib {
		t.Errorf("grown it is %+v", grown)
	}
	check.OK(t, s.Modify(w.ctx, v.ID, map[string]string{"readAheadKiB": "64"}))
	for i, leg := range w.legsOf("v") {
		if leg.Status.Mutable["readAheadKiB"] != "64" {
			t.Errorf("leg %d has %v", i, leg.Status.Mutable)
		}
	}
	fails(t, s.Modify(w.ctx, v.ID, map[string]string{"placement": "follow"}), errdefs.ErrInvalid)

	check.OK(t, s.Release(w.ctx, v.ID, "node-3")) // that node has no claim
	if w.whole("v").Spec.Claim == nil {
		t.Error("another node's claim was taken off")
	}
	check.OK(t, s.Release(w.ctx, v.ID, "node-1"))
	if claims := w.claims("v"); !slices.Equal(claims, []string{"", ""}) || w.whole("v").Spec.Claim != nil {
		t.Errorf("released, its legs are claimed for %q", claims)
	}
	check.OK(t, s.Delete(w.ctx, v.ID))
	check.OK(t, s.Delete(w.ctx, v.ID))
	if w.whole("v") != nil || len(w.legsOf("v")) > 0 {
		t.Error("it is still there")
	}
	for _, m := range all {
		w.tally(m.machine)
	}
}

// TestReplicatedApart: the legs of a volume are on nodes where the label that its class names (replicaTopologyKey) has different values.
func TestReplicatedApart(t *testing.T) {
	w, _, s := legCluster(t, 4)
	zone := func(node, value string) {
		n := &corev1.Node{}
		check.OK(t, w.Get(w.ctx, client.ObjectKey{Name: node}, n))
		before := n.DeepCopy()
		metav1.SetMetaDataLabel(&n.ObjectMeta, "zone", value)
		check.OK(t, w.Patch(w.ctx, n, client.MergeFrom(before)))
	}
	zone("node-1", "a")
	zone("node-2", "a")
	zone("node-3", "b") // node-4 is in no zone
	w.eventually("the store knows the zones", func() bool {
		found, err := s.NodesIn(w.ctx, map[string]string{"zone": "b"})
		return err == nil && len(found) == 1
	})
	apart := func(name string, n int) volume.Spec {
		spec := replicas(name, n, "node-1")
		spec.Replicas.TopologyKey = "zone"
		return spec
	}
	_, err := s.Create(w.ctx, apart("three", 3))
	if fails(t, err, errdefs.ErrNoSpace); !strings.Contains(err.Error(), "2 values of the label zone (parameter replicaTopologyKey) have room for one of 3 replicas, and each needs one of its own: node node-4 has no label zone") {
		t.Error(err)
	}
	if len(w.legsOf("three")) > 0 {
		t.Error("a leg was made")
	}
	v, err := s.Create(w.ctx, apart("v", 2))
	check.OK(t, err)
	w.isMade(t, s, "v", v, 2)
	if homes := w.homes("v"); !slices.Equal(homes, []string{"node-1", "node-3"}) {
		t.Errorf("its legs are on %v", homes)
	}
	alone := apart("alone", 2)
	alone.Nodes = []string{"node-4"}
	_, err = s.Create(w.ctx, alone)
	if fails(t, err, errdefs.ErrNoSpace); !strings.Contains(err.Error(), "node node-4 has no label zone (parameter replicaTopologyKey)") || len(w.legsOf("alone")) > 0 {
		t.Errorf("the first leg is to be where no label says which zone that is: %v", err)
	}
	alone.Nodes = []string{"node-4", "node-2"}
	_, err = s.Create(w.ctx, alone)
	check.OK(t, err)
	if homes := w.homes("alone"); !slices.Equal(homes, []string{"node-2", "node-3"}) {
		t.Errorf("its legs are on %v", homes)
	}
	w.copiesApart(t, s, apart)
}

// copiesApart shows that a copy on the node of its source, which has no such label, is refused. A copy that may be anywhere is to be on another node.
func (w *environment) copiesApart(t *testing.T, s *store.Store, apart func(string, int) volume.Spec) {
	t.Helper()
	source, err := s.Create(w.ctx, anyNode("source", "node-4"))
	check.OK(t, err)
	snapshot, err := s.CreateSnapshot(w.ctx, "snapshot", source.ID)
	check.OK(t, err)
	edit := func(cordoned bool) {
		n := &corev1.Node{}
		check.OK(t, w.Get(w.ctx, client.ObjectKey{Name: "node-4"}, n))
		before := n.DeepCopy()
		n.Spec.Unschedulable = cordoned
		check.OK(t, w.Patch(w.ctx, n, client.MergeFrom(before)))
	}
	for name, from := range map[string]volume.ID{"clone": source.ID, "restored": snapshot.ID} {
		for _, cordoned := range []bool{false, true} {
			edit(cordoned)
			w.eventually("the store knows whether it is cordoned", func() bool {
				places, err := s.Places(w.ctx, "")
				return err == nil && (places["node-4"] == "") == cordoned
			})
			here := apart(name, 2)
			here.Source, here.Nodes = from, nil
			_, err := s.Create(w.ctx, here)
			if fails(t, err, errdefs.ErrNoSpace); !strings.Contains(err.Error(), "is on node node-4, and so are its copies") || !strings.Contains(err.Error(), "node node-4 has no label zone (parameter replicaTopologyKey)") {
				t.Errorf("%s, cordoned: %v: %v", name, cordoned, err)
			}
			if len(w.legsOf(name)) > 0 {
				t.Errorf("%s: a leg was made", name)
			}
			anywhere := apart(fmt.Sprint(name, cordoned), 2)
			anywhere.Source, anywhere.Nodes, anywhere.Copies = from, nil, volume.CopiesAnywhere
			_, err = s.Create(w.ctx, anywhere)
			if fails(t, err, errdefs.ErrPrecondition); !strings.Contains(err.Error(), "is on node node-4, and would be copied to node node-") { // these agents have no ports, so the copy is refused
				t.Errorf("%s may be anywhere, cordoned: %v: %v", name, cordoned, err)
			}
		}
	}
}

// TestReplicatedNetworks: the first leg of a volume, also of a copy, has to be in a network with room for the other legs.
func TestReplicatedNetworks(t *testing.T) {
	w := newEnvironment(t)
	var machines []*machine
	for node, network := range map[string]string{"node-1": "storage", "node-2": "storage", "node-3": "alone"} {
		m, _ := w.networked(node, network)
		machines = append(machines, m)
	}
	s := w.knowing(machines...)
	source, err := s.Create(w.ctx, anyNode("source", "node-3"))
	check.OK(t, err)
	copied := replicas("clone", 2)
	copied.Source = source.ID
	for _, spec := range []volume.Spec{replicas("v", 2, "node-3"), copied} {
		_, err := s.Create(w.ctx, spec)
		if fails(t, err, errdefs.ErrNoSpace); !strings.Contains(err.Error(), `node node-3 is in the network "alone", where 1 node has room for one of 2 replicas, and each needs a node of its own`) {
			t.Errorf("%s: %v", spec.Name, err)
		}
		if w.whole(spec.Name) != nil || len(w.legsOf(spec.Name)) > 0 {
			t.Errorf("a part of %s is there", spec.Name)
		}
	}
	for name, on := range map[string][]string{"first": {"node-3", "node-1"}, "any": nil} {
		_, err := s.Create(w.ctx, replicas(name, 2, on...))
		check.OK(t, err)
		if homes := w.homes(name); len(homes) != 2 || slices.Contains(homes, "node-3") {
			t.Errorf("the legs of %s are on %v", name, homes)
		}
	}
}

// TestReplicatedNoRoom: a volume that cannot have all its replicas is not made, and leaves nothing.
func TestReplicatedNoRoom(t *testing.T) {
	w, all, s := legCluster(t, 2)
	_, err := s.Create(w.ctx, replicas("three", 3))
	if fails(t, err, errdefs.ErrNoSpace); !strings.Contains(err.Error(), "2 nodes have room for one of 3 replicas") {
		t.Error(err)
	}
	large := replicas("large", 2, "node-1")
	large.Size.Required = storetest.Size - 16*mib
	filler := spec("filler")
	filler.Nodes, filler.Size.Required = []string{"node-2"}, 64*mib
	_, err = s.Create(w.ctx, filler)
	check.OK(t, err)
	_, err = s.Create(w.ctx, large)
	if fails(t, err, errdefs.ErrNoSpace); !strings.Contains(err.Error(), "1 node has room for one of 2 replicas") {
		t.Error(err)
	}
	if w.whole("large") != nil || len(w.legsOf("large")) > 0 {
		t.Error("a part of it is there")
	}
	for _, m := range all {
		w.tally(m.machine)
	}
}

// TestReplicatedRefused: a leg that a node refuses is made on another one. If no node takes it, the whole volume is withdrawn, at whatever write the
// controller dies meanwhile. After that the volume can be made.
func TestReplicatedRefused(t *testing.T) {
	w, full := newEnvironment(t), &sync.Map{}
	cut := &cutter{}
	var machines []*machine
	for i := range 3 {
		name := fmt.Sprint("node-", i+1)
		machines = append(machines, w.begin(&machine{name: name, hook: func(operation string, _ blockdev.Ref) error {
			if is, _ := full.Load(name); operation == "Create" && is == true {
				return fmt.Errorf("%w: the disk is full", errdefs.ErrNoSpace)
			}
			return nil
		}, with: func(o *agent.Options) {
			o.Exporter, o.Network = &given{to: map[volume.ID]volume.Grant{}}, &v1alpha1.Network{Name: "storage", Address: "10.0.0.7:4420"}
		}}))
	}
	wrap(t, func(c *rest.Config) { c.Wrap(cut.wrap) })
	s := w.knowing(machines...)
	full.Store("node-2", true)
	v, err := s.Create(w.ctx, replicas("v", 2, "node-1"))
	check.OK(t, err)
	if homes := w.homes("v"); !slices.Equal(homes, []string{"node-1", "node-3"}) {
		t.Errorf("its legs are on %v", homes)
	}
	check.OK(t, s.Delete(w.ctx, v.ID))
	for n, more := 1, true; more; n++ {
		full.Store("node-3", true)
		cut.arm(n, n%2 == 0)
		_, err := s.Create(w.ctx, replicas("v", 2, "node-1"))
		if more = cut.mend(); !more {
			if fails(t, err, errdefs.ErrNoSpace); !strings.Contains(err.Error(), "1 node has room for one of 2 replicas") || !strings.Contains(err.Error(), "the disk is full") {
				t.Error(err)
			}
			if w.whole("v") != nil || len(w.legsOf("v")) > 0 {
				t.Error("a part of it is there")
			}
			if n < 9 {
				t.Errorf("it took %d writes", n-1)
			}
		}
		full.Store("node-3", false)
		v, err := s.Create(w.ctx, replicas("v", 2, "node-1"))
		if err != nil {
			t.Fatalf("after write %d: %v", n, err)
		}
		w.isMade(t, s, "v", v, 2)
		check.OK(t, s.Delete(w.ctx, v.ID))
	}
	for _, m := range machines {
		w.tally(m)
	}
}

// cutter cuts a store off from the API server at one of its writes, as if it had died there, until mend.
type cutter struct {
	mu    sync.Mutex
	left  int  // how many writes are left until that one, which counts; 0: it is not cut off
	after bool // that write is still done
	dead  bool // it is cut off
}

func (c *cutter) arm(n int, after bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.left, c.after, c.dead = n, after, false
}

// is reports whether the store is cut off.
func (c *cutter) is() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.dead
}

// mend lets the store go on, and reports whether it was cut off.
func (c *cutter) mend() (was bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	was, c.left, c.dead = c.dead, 0, false
	return was
}

func (c *cutter) wrap(next http.RoundTripper) http.RoundTripper {
	return tripper(func(r *http.Request) (*http.Response, error) {
		if r.Method == http.MethodGet || !strings.Contains(r.URL.Path, "/ashlar.dev/") {
			return next.RoundTrip(r)
		}
		c.mu.Lock()
		dead, now := c.dead, false
		if c.left > 0 {
			c.left--
			now = c.left == 0
			c.dead = c.dead || now
		}
		done := now && c.after
		c.mu.Unlock()
		if (dead || now) && !done {
			return nil, errCut
		}
		answer, err := next.RoundTrip(r)
		if err == nil && now {
			return nil, errors.Join(errCut, answer.Body.Close())
		}
		return answer, err
	})
}

// TestReplicatedCutShort: at whatever write the controller dies in a call for a volume with replicas, the repeated call does all of it.
func TestReplicatedCutShort(t *testing.T) {
	cut := &cutter{}
	w, all, _ := legCluster(t, 3)
	wrap(t, func(c *rest.Config) { c.Wrap(cut.wrap) })
	s := w.knowing(all["node-1"].machine, all["node-2"].machine, all["node-3"].machine)
	id := volume.ID{Kind: "vol", Pool: "default", Key: volume.KeyOf("v")}
	for _, after := range []bool{false, true} {
		writes := map[string]int{}
		for n, more := 1, true; more; n++ {
			more = false
			for _, step := range []struct {
				what string
				call func() error
				is   func() bool
			}{
				{"create", func() error { return second(s.Create(w.ctx, replicas("v", 3, "node-2"))) }, func() bool {
					r := w.whole("v")
					return r != nil && len(r.Current()) == 3 && len(w.legsOf("v")) == 3
				}},
				{"claim", func() error { return second(s.Claim(w.ctx, id, on("node-1"))) }, func() bool {
					return w.whole("v").Spec.Claim != nil && !slices.Contains(w.claims("v"), "")
				}},
				{"expand", func() error { return second(s.Expand(w.ctx, id, volume.Range{Required: 4 * mib})) }, func() bool {
					return !slices.ContainsFunc(w.legsOf("v"), func(v *v1alpha1.Volume) bool { return v.Status.Size != 4*mib }) && w.whole("v").Spec.Size == 4*mib
				}},
				{"release", func() error { return s.Release(w.ctx, id, "node-1") }, func() bool {
					return w.whole("v").Spec.Claim == nil && strings.Join(w.claims("v"), "") == ""
				}},
				{"delete", func() error { return s.Delete(w.ctx, id) }, func() bool { return w.whole("v") == nil && len(w.legsOf("v")) == 0 }},
			} {
				cut.arm(n, after)
				err := step.call()
				if err == nil && step.what == "create" && cut.is() {
					t.Errorf("%s, write %d, done %v: it was done though the controller had died", step.what, n, after)
				}
				if err == nil { // the store goes on by itself to write to legs
					w.eventually(step.what+" is done, or cut short", func() bool { return cut.is() || step.is() })
				}
				if cut.mend() {
					more = true
					writes[step.what] = n
					check.OK(t, step.call())
				} else {
					check.OK(t, err)
				}
				w.eventually(fmt.Sprintf("%s, write %d, done %v: all is done", step.what, n, after), step.is)
			}
		}
		t.Logf("writes, done %v: %v", after, writes)
		for _, what := range []string{"create", "claim", "expand", "release", "delete"} {
			if writes[what] < 4 {
				t.Errorf("%s had %d writes", what, writes[what])
			}
		}
	}
	for _, m := range all {
		w.tally(m.machine)
	}
}

// TestReplicatorFinishes: what a controller has written into the object before it died, and is not asked for again, is carried out by the next one: claims
// of legs, their end, growth, and a deletion.
func TestReplicatorFinishes(t *testing.T) {
	w, _, s := legCluster(t, 2)
	v, err := s.Create(w.ctx, replicas("v", 2))
	check.OK(t, err)
	edit := func(edit func(r *v1alpha1.ReplicatedVolume)) {
		r := w.whole("v")
		before := r.DeepCopy()
		edit(r)
		check.OK(t, w.Patch(w.ctx, r, client.MergeFrom(before)))
	}
	edit(func(r *v1alpha1.ReplicatedVolume) {
		r.Spec.Claims, r.Spec.Claim = 5, &v1alpha1.Claim{Node: "node-1", Mode: "m", Generation: 5}
	})
	w.eventually("its legs are claimed", func() bool { return slices.Equal(w.claims("v"), []string{"node-1 5", "node-1 5"}) })
	edit(func(r *v1alpha1.ReplicatedVolume) {
		r.Spec.Claims, r.Spec.Claim = 6, &v1alpha1.Claim{Node: "node-1", Mode: "m", Generation: 6}
	})
	w.eventually("a claim of before is no claim", func() bool { return slices.Equal(w.claims("v"), []string{"node-1 6", "node-1 6"}) })
	edit(func(r *v1alpha1.ReplicatedVolume) { r.Spec.Claim = nil })
	w.eventually("they are not claimed", func() bool { return slices.Equal(w.claims("v"), []string{"", ""}) })
	edit(func(r *v1alpha1.ReplicatedVolume) { r.Spec.Size = 4 * mib })
	w.eventually("they grow", func() bool {
		return !slices.ContainsFunc(w.legsOf("v"), func(v *v1alpha1.Volume) bool { return v.Status.Size != 4*mib })
	})
	edit(func(r *v1alpha1.ReplicatedVolume) { r.Spec.Delete = r.UID })
	w.eventually("it is deleted", func() bool { return w.whole("v") == nil && len(w.legsOf("v")) == 0 })
	check.OK(t, s.Delete(w.ctx, v.ID))
}

// edit changes the spec of a volume with several legs.
func (w *environment) edit(name string, edit func(r *v1alpha1.ReplicatedVolume)) {
	w.Helper()
	check.OK(w, w.written(func() error {
		r := w.whole(name)
		before := r.DeepCopy()
		edit(r)
		return w.Patch(w.ctx, r, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	}))
}

// legID returns the ID of a leg, as its node has it.
func legID(v *v1alpha1.Volume) volume.ID { return cluster.VolumeID(v) }

// TestReplicatedHomes: a release of a volume, and the next claim, do not wait for the home of a leg that is dead, as long as another leg can be used. The
// dead home still exports its leg, which is not claimed again before that has ended.
func TestReplicatedHomes(t *testing.T) {
	w, all, s := legCluster(t, 3)
	v, err := s.Create(w.ctx, replicas("v", 2, "node-1"))
	check.OK(t, err)
	user := map[string]string{"node-2": "node-3", "node-3": "node-2"}[w.homes("v")[1]]
	alive, dead := w.legsOf("v")[0], w.legsOf("v")[1]
	check.OK(t, second(s.Claim(w.ctx, v.ID, on(user))))
	opened := func(leg *v1alpha1.Volume, generation int64) {
		all[leg.Spec.NodeName].gives(w.ctx, legID(leg), volume.Grant{Generation: generation, Node: user})
		w.touched(leg.Spec.Name)
		w.exported(leg.Spec.Name, &volume.Grant{Generation: generation, Node: user})
	}
	opened(alive, 1)
	opened(dead, 1)
	all["node-1"].fail(fmt.Errorf("%w: the target hangs", errdefs.ErrUnavailable))
	all[dead.Spec.NodeName].stop()
	w.waits(func() error { return s.Release(soon(t), v.ID, user) }, "node-1 has not ended yet what it gives of volume "+v.ID.String()+" to node "+user+" (claim 1)")
	if claims := w.claims("v"); w.whole("v").Spec.Claim != nil || !slices.Equal(claims, []string{"", ""}) {
		t.Errorf("its legs are claimed for %q", claims)
	}
	fails(t, second(s.Claim(soon(t), v.ID, on("node-1"))), errdefs.ErrUnavailable)
	fails(t, s.Delete(soon(t), v.ID), errdefs.ErrUnavailable)
	all["node-1"].fail(nil)
	check.OK(t, s.Release(w.ctx, v.ID, user))
	check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-1"))))
	if claims := w.claims("v"); !slices.Equal(claims, []string{"node-1 2", ""}) {
		t.Errorf("its legs are claimed for %q", claims)
	}
	w.start(all[dead.Spec.NodeName].machine)
	w.eventually("the other leg is claimed when it is given to nobody any more", func() bool { return slices.Equal(w.claims("v"), []string{"node-1 2", "node-1 2"}) })
	check.OK(t, s.Release(w.ctx, v.ID, ""))
	check.OK(t, s.Delete(w.ctx, v.ID))
}

// TestReplicatedCounted: towards the limit of a node, a volume with replicas counts once, and its legs do not count.
func TestReplicatedCounted(t *testing.T) {
	w, _, s := legCluster(t, 2)
	for i := range storetest.Limit {
		v, err := s.Create(w.ctx, replicas(fmt.Sprint("v", i), 2))
		check.OK(t, err)
		check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-1"))))
	}
	more, err := s.Create(w.ctx, replicas("more", 2))
	check.OK(t, err)
	fails(t, second(s.Claim(w.ctx, more.ID, on("node-1"))), errdefs.ErrLimit)
	check.OK(t, second(s.Claim(w.ctx, more.ID, on("node-2"))))
}

// TestReplicatedCopies: a snapshot of a volume with replicas names the volume as its source, whichever leg it is taken of. A copy of it has one current
// leg, where it was copied; the others lack the bytes.
func TestReplicatedCopies(t *testing.T) {
	w, all, s := legCluster(t, 3)
	v, err := s.Create(w.ctx, replicas("v", 2, "node-1"))
	check.OK(t, err)
	first, err := s.CreateSnapshot(w.ctx, "first", v.ID)
	check.OK(t, err)
	w.says("v", func(r *v1alpha1.ReplicatedVolume) { r.Status.Legs[0].Current = false })
	w.eventually("the store knows it", func() bool {
		have, err := s.Get(w.ctx, v.ID)
		return err == nil && have.Node == w.homes("v")[1]
	})
	other, err := s.CreateSnapshot(w.ctx, "other", v.ID)
	check.OK(t, err)
	if first.Node != "node-1" || other.Node != w.homes("v")[1] || first.Source != v.ID || other.Source != v.ID {
		t.Errorf("the snapshots are %+v and %+v", first, other)
	}
	again, err := s.CreateSnapshot(w.ctx, "other", v.ID)
	if check.OK(t, err); again != other {
		t.Errorf("asked for again it is %+v", again)
	}
	if of, err := s.ListSnapshots(w.ctx, v.ID, volume.ID{}, 0); err != nil || len(of) != 2 {
		t.Errorf("its snapshots are %+v, %v", of, err)
	}
	if have, err := all[other.Node].local.GetSnapshot(w.ctx, other.ID); err != nil || have.Source != v.ID {
		t.Errorf("on its node it is %+v, %v", have, err)
	}
	clone := replicas("clone", 2)
	clone.Source = v.ID
	err = second(s.Create(w.ctx, clone))
	if fails(t, err, errdefs.ErrPrecondition); !strings.Contains(err.Error(), "can be cloned on node node-1 only, of its replica there: it does not have all") || strings.Contains(err.Error(), "other replicas") {
		t.Errorf("it does not say why: %v", err)
	}

	restored := replicas("restored", 2)
	restored.Source = other.ID
	r, err := s.Create(w.ctx, restored)
	check.OK(t, err)
	o := w.whole("restored")
	if current := o.Current(); r.Source != other.ID || r.Node != other.Node || len(current) != 1 || current[0] != o.Name || len(o.Status.Legs) != 2 || o.Status.Summary != "1 of 2" {
		t.Errorf("restored it is %+v: %+v", r, o.Status)
	}
	check.OK(t, s.Delete(w.ctx, v.ID)) // the snapshots stay
	check.OK(t, s.Delete(w.ctx, r.ID))
	check.OK(t, errors.Join(s.DeleteSnapshot(w.ctx, first.ID), s.DeleteSnapshot(w.ctx, other.ID)))
	for _, m := range all {
		w.tally(m.machine)
	}
}

// TestReplicatedCutOfCurrent: a snapshot that was asked of a leg while that was current is not taken of it once it lacks what was written, but of another
// leg; nor is a clone made of such a leg.
func TestReplicatedCutOfCurrent(t *testing.T) {
	w, all, s := legCluster(t, 2)
	v, err := s.Create(w.ctx, replicas("v", 2, "node-1"))
	check.OK(t, err)
	all["node-1"].stop()
	clone := anyNode("clone", "node-1")
	clone.Source = v.ID
	fails(t, second(s.CreateSnapshot(soon(t), "s", v.ID)), errdefs.ErrUnavailable)
	fails(t, second(s.Create(soon(t), clone)), errdefs.ErrUnavailable)
	asked := &v1alpha1.Snapshot{}
	check.OK(t, w.Get(w.ctx, client.ObjectKey{Name: volume.KeyOf("s")}, asked))
	if asked.Spec.NodeName != "node-1" || w.object("clone").Spec.NodeName != "node-1" {
		t.Fatalf("the snapshot is asked of %s, the clone of %s", asked.Spec.NodeName, w.object("clone").Spec.NodeName)
	}
	w.says("v", func(r *v1alpha1.ReplicatedVolume) { r.Status.Lists++; r.Status.Legs[0].Current = false })
	w.start(all["node-1"].machine)
	w.eventually("node-1 works", func() bool {
		check.OK(t, second(s.Create(w.ctx, anyNode("other", "node-1"))))
		return true
	})
	time.Sleep(300 * time.Millisecond)
	if check.OK(t, w.Get(w.ctx, client.ObjectKey{Name: asked.Name}, asked)); asked.Status.Created != nil {
		t.Error("the snapshot was taken of a leg that lacks what was written")
	}
	if w.object("clone").Status.Created != nil {
		t.Error("a clone was made of it")
	}
	cut, err := s.CreateSnapshot(w.ctx, "s", v.ID)
	if check.OK(t, err); cut.Node != "node-2" {
		t.Errorf("the snapshot is %+v", cut)
	}
	w.says("v", func(r *v1alpha1.ReplicatedVolume) { r.Status.Lists++; r.Status.Legs[0].Current = true })
	made, err := s.Create(w.ctx, clone)
	if check.OK(t, err); made.Node != "node-1" {
		t.Errorf("when the leg is current again, the clone is %+v", made)
	}
}

// lostPower has the record of a leg on the node say that its machine has lost power since its volume was used.
func (n *legNode) lostPower(t *testing.T, id volume.ID) {
	t.Helper()
	const used = "1:1:open:00000000-0000-4000-8000-000000000000" // by a boot of before
	check.OK(t, second(n.local.SwapLabels(t.Context(), id, map[string]string{"leg": ""}, map[string]string{"leg": used})))
}

// TestReplicatedCutOfPowerLost: a leg whose machine has lost power since its volume was used may lack what was not flushed. A snapshot is taken of another
// current leg, if there is one.
func TestReplicatedCutOfPowerLost(t *testing.T) {
	w, all, s := legCluster(t, 2)
	v, err := s.Create(w.ctx, replicas("v", 2, "node-1"))
	check.OK(t, err)
	all["node-1"].lostPower(t, v.ID)
	w.again("it is taken of the other leg", func(ctx context.Context) error { return second(s.CreateSnapshot(ctx, "s", v.ID)) })
	cut, err := s.CreateSnapshot(w.ctx, "s", v.ID)
	if check.OK(t, err); cut.Node != "node-2" {
		t.Errorf("the snapshot is %+v", cut)
	}
	w.says("v", func(r *v1alpha1.ReplicatedVolume) { r.Status.Lists++; r.Status.Legs[1].Current = false })
	w.again("it is taken of the only one", func(ctx context.Context) error { return second(s.CreateSnapshot(ctx, "only", v.ID)) })
	if cut, err = s.CreateSnapshot(w.ctx, "only", v.ID); err != nil || cut.Node != "node-1" {
		t.Errorf("the snapshot is %+v, %v", cut, err)
	}
}

// TestReplicatedCloneOfPowerLost: the one leg that can be cloned has lost power. The caller is told to make a snapshot, which is taken of another leg, and need
// not wait until the volume is used.
func TestReplicatedCloneOfPowerLost(t *testing.T) {
	w, all, s := legCluster(t, 2)
	v, err := s.Create(w.ctx, replicas("v", 2, "node-1"))
	check.OK(t, err)
	all["node-1"].lostPower(t, v.ID)
	for _, clone := range []volume.Spec{spec("clone"), replicas("replicated", 2)} {
		clone.Source = v.ID
		err := second(s.Create(w.ctx, clone))
		if fails(t, err, errdefs.ErrPrecondition); err == nil || !strings.Contains(err.Error(), "has started anew") || !strings.Contains(err.Error(), "make a snapshot of it") {
			t.Error(err)
		}
		if left := w.legsOf(clone.Name); w.object(clone.Name) != nil || len(left) > 0 || w.whole(clone.Name) != nil {
			t.Errorf("%s is left", clone.Name)
		}
	}
}

// TestReplicatedCutOfAway: a snapshot that was asked of a leg whose node is down by now, and has not taken it, is taken of another leg, whether the one that
// is away is still current or not. When the node is back it takes none.
func TestReplicatedCutOfAway(t *testing.T) {
	for _, current := range []bool{true, false} {
		t.Run(fmt.Sprint("current ", current), func(t *testing.T) {
			w, all, s := legCluster(t, 2)
			v, err := s.Create(w.ctx, replicas("v", 2, "node-1"))
			check.OK(t, err)
			all["node-1"].stop()
			fails(t, second(s.CreateSnapshot(soon(t), "s", v.ID)), errdefs.ErrUnavailable)
			asked := &v1alpha1.Snapshot{}
			check.OK(t, w.Get(w.ctx, client.ObjectKey{Name: volume.KeyOf("s")}, asked))
			if asked.Spec.NodeName != "node-1" {
				t.Fatalf("the snapshot is asked of %s", asked.Spec.NodeName)
			}
			w.says("v", func(r *v1alpha1.ReplicatedVolume) { r.Status.Lists++; r.Status.Legs[0].Current = current })
			w.node("node-1", false)
			w.again("it is taken of the other leg", func(ctx context.Context) error { return second(s.CreateSnapshot(ctx, "s", v.ID)) })
			w.node("node-1", true)
			w.start(all["node-1"].machine)
			w.again("node-1 works", func(ctx context.Context) error { return second(s.Create(ctx, anyNode("other", "node-1"))) })
			cut, err := s.CreateSnapshot(w.ctx, "s", v.ID)
			if check.OK(t, err); cut.Node != "node-2" {
				t.Errorf("the snapshot is %+v", cut)
			}
			if _, err := all["node-1"].local.GetSnapshot(w.ctx, cut.ID); !errors.Is(err, errdefs.ErrNotFound) {
				t.Errorf("of what was taken back node-1 has: %v", err)
			}
		})
	}
}

// becomes writes which legs of a volume are current, as the node that uses it does, and that the others have not been for a minute.
func (w *environment) becomes(name string, current ...string) {
	w.Helper()
	w.says(name, func(r *v1alpha1.ReplicatedVolume) {
		r.Status.Legs = nil
		if c := r.Spec.Claim; c != nil {
			r.Status.Opened = c.Generation
		}
		for _, leg := range r.Spec.Legs {
			one := v1alpha1.Leg{Name: leg, Current: true, State: v1alpha1.LegCurrent}
			if !slices.Contains(current, leg) {
				one = v1alpha1.Leg{Name: leg, State: v1alpha1.LegWaiting, Since: new(metav1.NewTime(time.Now().Add(-time.Minute)))}
			}
			r.Status.Legs = append(r.Status.Legs, one)
		}
	})
}

// replaced waits until a volume has another leg beside one that is to be replaced (old), makes the others current, and waits until the old one is gone.
func (w *environment) replaced(name, old string) {
	w.Helper()
	w.eventually("there is another leg", func() bool {
		legs := w.legsOf(name)
		return len(legs) == 3 && legs[2].Status.Created != nil
	})
	if r := w.whole(name); !slices.Contains(r.Spec.Legs, old) {
		w.Errorf("the leg is out before another one is current: %+v", r.Spec)
	}
	var current []string
	for _, leg := range w.whole(name).Spec.Legs {
		if leg != old {
			current = append(current, leg)
		}
	}
	w.becomes(name, current...)
	w.eventually("the old leg is gone", func() bool {
		return slices.Equal(w.whole(name).Spec.Legs, current) && len(w.legsOf(name)) == 2
	})
	w.becomes(name, current...) // now that it has two legs
}

// TestReplicatorReplaces: a leg whose bytes are lost, whose node is gone for good, or that is away for too long, is replaced by one on another node. It
// stays until the new one is current.
func TestReplicatorReplaces(t *testing.T) {
	w, all, s := legCluster(t, 4)
	v, err := s.Create(w.ctx, replicas("v", 2, "node-1"))
	check.OK(t, err)

	lost := w.legsOf("v")[1]
	m := all[lost.Spec.NodeName]
	m.stop()
	check.OK(t, m.local.Delete(w.ctx, legID(lost)))
	w.start(m.machine)
	w.eventually("the loss is told", func() bool {
		problems, err := s.Health(w.ctx, v.ID)
		return err == nil && len(problems) > 0
	})
	if problems, err := s.Health(w.ctx, v.ID); err != nil || slices.ContainsFunc(problems, func(p blockdev.Problem) bool { return p.Severity != blockdev.Degraded }) {
		t.Errorf("with one leg lost its health is %+v, %v", problems, err)
	}
	w.eventually("it is to have another one", func() bool { return len(w.whole("v").Spec.Legs) == 3 })
	check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-1"))))
	w.replaced("v", lost.Name)

	gone := w.legsOf("v")[1]
	all[gone.Spec.NodeName].stop()
	check.OK(t, w.Delete(w.ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: gone.Spec.NodeName}}))
	w.becomes("v", w.whole("v").Name)
	w.replaced("v", gone.Name)

	away := w.legsOf("v")[1]
	w.becomes("v", w.whole("v").Name)
	time.Sleep(time.Second)
	if legs := w.whole("v").Spec.Legs; len(legs) != 2 {
		t.Errorf("a leg is replaced before its time: %v", legs)
	}
	w.edit("v", func(r *v1alpha1.ReplicatedVolume) { r.Spec.ReplaceAfter = 3 })
	w.replaced("v", away.Name)
	if homes := w.homes("v"); homes[1] == away.Spec.NodeName || homes[1] == gone.Spec.NodeName || homes[1] == "node-1" {
		t.Errorf("its legs are on %v", homes)
	}
	check.OK(t, s.Release(w.ctx, v.ID, "node-1"))
	check.OK(t, s.Delete(w.ctx, v.ID))
}

// TestReplicatorOldNames: somebody brings an older spec.legs of a volume back, as a tool that applies what a repository has: it names the first leg, which was
// replaced since, and is gone; or it names what never was a leg of the volume. No such leg can be made, so another one takes its place.
func TestReplicatorOldNames(t *testing.T) {
	w, all, s := legCluster(t, 4)
	v, err := s.Create(w.ctx, replicas("v", 2, "node-1"))
	check.OK(t, err)
	check.OK(t, second(s.Create(w.ctx, replicas("other", 2, "node-1"))))
	check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-2"))))
	older := w.whole("v").Spec.Legs
	w.becomes("v", older...)
	first := w.legsOf("v")[0]
	m := all[first.Spec.NodeName]
	m.stop()
	check.OK(t, m.local.Delete(w.ctx, legID(first)))
	w.start(m.machine)
	w.replaced("v", first.Name)

	for _, name := range []string{first.Name, "0123456789abcdef0123456789abcdef", w.whole("other").Spec.Legs[1]} {
		stays := older[1]
		w.edit("v", func(r *v1alpha1.ReplicatedVolume) { r.Spec.Legs = []string{name, stays} })
		w.becomes("v", stays)
		var next string
		w.eventually("another one is made in the place of "+name, func() bool {
			legs := w.whole("v").Spec.Legs
			next = legs[len(legs)-1]
			made := w.legsOf("v")
			return len(legs) == 3 && slices.ContainsFunc(made, func(v *v1alpha1.Volume) bool { return v.Name == next && v.Status.Created != nil })
		})
		w.becomes("v", stays, next)
		w.eventually("the volume does without the name", func() bool {
			r := w.whole("v")
			return slices.Equal(r.Spec.Legs, []string{stays, next}) && len(w.legsOf("v")) == 2 && r.Status.Lacks == ""
		})
		w.becomes("v", stays, next)
	}
	if legs := w.legsOf("other"); len(legs) != 2 {
		t.Errorf("of another volume, whose leg it named, %d legs are left", len(legs))
	}
	check.OK(t, s.Release(w.ctx, v.ID, "node-2"))
	check.OK(t, s.Delete(w.ctx, v.ID))
}

// TestReplicatorUnfit: a new leg that cannot be made equal to the others is deleted, and its node gets no other one. When no node is left, the object says
// why. A leg that was current before, and cannot be made equal any more, stays.
func TestReplicatorUnfit(t *testing.T) {
	w, all, s := legCluster(t, 4)
	v, err := s.Create(w.ctx, replicas("v", 2, "node-1"))
	check.OK(t, err)
	check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-1"))))
	before := w.whole("v").Spec.Legs
	w.becomes("v", before...)
	w.edit("v", func(r *v1alpha1.ReplicatedVolume) { r.Spec.Replicas = 3 })
	unfit := func(r *v1alpha1.ReplicatedVolume, name string, sound int64) {
		if r.Leg(name) == nil {
			r.Status.Legs = append(r.Status.Legs, v1alpha1.Leg{Name: name})
		}
		*r.Leg(name) = v1alpha1.Leg{Name: name, Sound: sound, State: v1alpha1.LegUnfit, Message: "larger sectors", Since: new(metav1.Now())}
	}
	var tried []string
	for range 2 {
		w.eventually("there is another leg", func() bool {
			legs := w.legsOf("v")
			return len(legs) == 3 && legs[2].Status.Created != nil && slices.Contains(w.whole("v").Spec.Legs, legs[2].Name)
		})
		leg := w.legsOf("v")[2]
		tried = append(tried, leg.Spec.NodeName)
		w.says("v", func(r *v1alpha1.ReplicatedVolume) { unfit(r, leg.Name, 0) })
		w.eventually("it is gone", func() bool {
			return w.Get(w.ctx, client.ObjectKeyFromObject(leg), &v1alpha1.Volume{}) != nil && !slices.Contains(w.whole("v").Spec.Legs, leg.Name)
		})
		w.says("v", func(r *v1alpha1.ReplicatedVolume) { // as its user does
			r.Status.Legs = slices.DeleteFunc(r.Status.Legs, func(l v1alpha1.Leg) bool { return l.Name == leg.Name })
		})
	}
	if slices.Sort(tried); !slices.Equal(tried, []string{"node-3", "node-4"}) {
		t.Errorf("tried were %v", tried)
	}
	w.eventually("the object says why it has too few", func() bool {
		lacks := w.whole("v").Status.Lacks
		return strings.Contains(lacks, "node node-3 had a replica") && strings.Contains(lacks, "node node-4 had a replica") && strings.Contains(lacks, "larger sectors")
	})
	w.says("v", func(r *v1alpha1.ReplicatedVolume) { unfit(r, before[1], 1) })
	time.Sleep(time.Second)
	if r := w.whole("v"); !slices.Equal(r.Spec.Legs, before) || len(w.legsOf("v")) != 2 {
		t.Errorf("it is to have the legs %v, and had %v", r.Spec.Legs, before)
	}
	check.OK(t, s.Release(w.ctx, v.ID, "node-1"))
	check.OK(t, s.Delete(w.ctx, v.ID))
	for _, m := range all {
		w.tally(m.machine)
	}
}

// TestReplicatorNoneJoins: while two new legs are not made equal to the others for too long, no further one is made, and the object says so.
func TestReplicatorNoneJoins(t *testing.T) {
	w, _, s := legCluster(t, 5)
	v, err := s.Create(w.ctx, replicas("v", 2, "node-1"))
	check.OK(t, err)
	check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-1"))))
	before := w.whole("v").Spec.Legs
	w.becomes("v", before...)
	w.edit("v", func(r *v1alpha1.ReplicatedVolume) { r.Spec.Replicas, r.Spec.ReplaceAfter = 3, 1 })
	w.eventually("the object says why it has too few", func() bool {
		return strings.Contains(w.whole("v").Status.Lacks, "2 new replicas are not made equal to the others for too long")
	})
	time.Sleep(2 * time.Second)
	if legs := w.whole("v").Spec.Legs; len(legs) != 4 {
		t.Errorf("it is to have %d legs", len(legs))
	}
	leg := w.legsOf("v")[3]
	w.becomes("v", append(before, leg.Name)...)
	w.eventually("one is current, and the other one is gone", func() bool {
		r := w.whole("v")
		return len(w.legsOf("v")) == 3 && slices.Contains(r.Spec.Legs, leg.Name) && r.Status.Lacks == ""
	})
	check.OK(t, s.Release(w.ctx, v.ID, "node-1"))
	check.OK(t, s.Delete(w.ctx, v.ID))
}

// TestReplicatorCounts: a volume gets as many legs as its object says (spec.replicas), or loses some. The last current one stays, and the one on the node
// that uses the volume is kept before others.
func TestReplicatorCounts(t *testing.T) {
	w, all, s := legCluster(t, 3)
	v, err := s.Create(w.ctx, replicas("v", 2, "node-1"))
	check.OK(t, err)
	check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-1"))))
	w.edit("v", func(r *v1alpha1.ReplicatedVolume) { r.Spec.Replicas = 3 })
	w.eventually("it has three", func() bool {
		legs := w.legsOf("v")
		return len(legs) == 3 && legs[2].Status.Created != nil && !slices.Contains(w.claims("v"), "")
	})
	names := w.whole("v").Spec.Legs
	w.becomes("v", names...)

	w.edit("v", func(r *v1alpha1.ReplicatedVolume) { r.Spec.Replicas = 1 })
	w.eventually("it is to do without two", func() bool { return slices.Equal(w.whole("v").Spec.Legs, names[:1]) })
	time.Sleep(300 * time.Millisecond)
	if legs := w.legsOf("v"); len(legs) != 3 {
		t.Errorf("%d legs are left while the node that uses the volume has all of them", len(legs))
	}
	w.becomes("v", names[0])
	w.eventually("two are gone", func() bool { return len(w.legsOf("v")) == 1 })
	check.OK(t, s.Release(w.ctx, v.ID, "node-1"))
	check.OK(t, s.Delete(w.ctx, v.ID))

	v, err = s.Create(w.ctx, replicas("v", 3))
	check.OK(t, err)
	w.edit("v", func(r *v1alpha1.ReplicatedVolume) { r.Spec.Replicas = 1 })
	w.eventually("nobody uses it, and two are gone", func() bool {
		r := w.whole("v")
		return len(w.legsOf("v")) == 1 && len(r.Status.Legs) == 1 && r.Status.Summary == "1 of 1" && r.Status.Legs[0].Name == r.Spec.Legs[0]
	})
	check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-2"))))
	check.OK(t, s.Release(w.ctx, v.ID, "node-2"))
	check.OK(t, s.Delete(w.ctx, v.ID))
	for _, m := range all {
		w.tally(m.machine)
	}
}

// TestReplicatorTakesBack: a leg was taken out, and the user of the volume ended before it had left; the leg is the only current one since. It is one of the
// volume's again, which can be claimed, and not deleted. It can be taken out again.
func TestReplicatorTakesBack(t *testing.T) {
	w, _, s := legCluster(t, 2)
	v, err := s.Create(w.ctx, replicas("v", 2, "node-1"))
	check.OK(t, err)
	check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-1"))))
	names := w.whole("v").Spec.Legs
	w.becomes("v", names[1])
	w.edit("v", func(r *v1alpha1.ReplicatedVolume) {
		r.Spec.Claim, r.Spec.Legs, r.Spec.Removed = nil, names[:1], []v1alpha1.RemovedLeg{{Name: names[1], NodeName: "node-2", Time: metav1.Now()}}
	})
	w.eventually("it is a leg again", func() bool {
		r := w.whole("v")
		return slices.Contains(r.Spec.Legs, names[1]) && len(r.Spec.Removed) == 0
	})
	w.eventually("the volume can be claimed", func() bool { return second(s.Claim(soon(t), v.ID, on("node-1"))) == nil })
	w.becomes("v", names...)
	w.edit("v", func(r *v1alpha1.ReplicatedVolume) { r.Spec.Replicas = 1 })
	w.eventually("one is taken out", func() bool { return len(w.whole("v").Spec.Legs) == 1 })
	w.becomes("v", w.whole("v").Spec.Legs...)
	w.eventually("it is gone", func() bool { return len(w.legsOf("v")) == 1 })
	check.OK(t, s.Release(w.ctx, v.ID, "node-1"))
	check.OK(t, s.Delete(w.ctx, v.ID))
}

// TestReplicatorUserDied: the user of a volume has died, so one of its current legs may have lost what the other one has. None goes before somebody uses the
// volume again, or it was closed; nor does one that was taken out while it was used.
func TestReplicatorUserDied(t *testing.T) {
	w, _, s := legCluster(t, 2)
	v, err := s.Create(w.ctx, replicas("v", 2, "node-1"))
	check.OK(t, err)
	check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-1"))))
	names := w.whole("v").Spec.Legs
	w.becomes("v", names...)
	w.edit("v", func(r *v1alpha1.ReplicatedVolume) { r.Spec.Replicas = 1 })
	w.eventually("one is taken out", func() bool { return len(w.whole("v").Spec.Legs) == 1 })
	check.OK(t, s.Release(w.ctx, v.ID, "node-1"))
	whole := func() bool {
		r := w.whole("v")
		return len(r.Spec.Legs) == 2 && len(r.Current()) == 2 && len(w.legsOf("v")) == 2
	}
	w.eventually("it is a leg again", whole)
	time.Sleep(300 * time.Millisecond)
	if !whole() {
		t.Error("a leg is gone that may have what the other one has lost")
	}
	w.says("v", func(r *v1alpha1.ReplicatedVolume) { r.Status.Closed = r.Status.Opened })
	w.eventually("it was closed, and one is gone", func() bool { return len(w.legsOf("v")) == 1 })
	check.OK(t, s.Delete(w.ctx, v.ID))
}

// TestReplicatorMakesLate: a leg is named, and has no Volume, as no node could make it until now. The node that uses the volume has said that the leg waits. It
// is made, and no other one in its place.
func TestReplicatorMakesLate(t *testing.T) {
	w, _, s := legCluster(t, 3)
	v, err := s.Create(w.ctx, replicas("v", 2, "node-1"))
	check.OK(t, err)
	check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-1"))))
	names := w.whole("v").Spec.Legs
	w.becomes("v", names...)
	next := w.whole("v")
	name := cluster.AddLeg(next)
	w.says("v", func(r *v1alpha1.ReplicatedVolume) {
		r.Status.Legs = append(r.Status.Legs, v1alpha1.Leg{Name: name, State: v1alpha1.LegWaiting, Message: "not found", Since: new(metav1.Now().Rfc3339Copy())})
	})
	w.edit("v", func(r *v1alpha1.ReplicatedVolume) {
		r.Spec.Replicas, r.Spec.Legs, r.Spec.Numbered = 3, next.Spec.Legs, next.Spec.Numbered
	})
	w.eventually("it is made", func() bool {
		legs := w.legsOf("v")
		return len(legs) == 3 && legs[2].Name == name && legs[2].Status.Created != nil
	})
	if legs := w.whole("v").Spec.Legs; !slices.Equal(legs, next.Spec.Legs) {
		t.Errorf("its legs are %v", legs)
	}
	check.OK(t, s.Release(w.ctx, v.ID, "node-1"))
	check.OK(t, s.Delete(w.ctx, v.ID))
}

// TestReplicatedAway: a change of a volume does not wait for a leg that is not current, and whose node is away; the leg gets it when the node is back. It
// does wait for a current leg.
func TestReplicatedAway(t *testing.T) {
	w, all, s := legCluster(t, 2)
	v, err := s.Create(w.ctx, replicas("v", 2, "node-1"))
	check.OK(t, err)
	check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-1"))))
	all["node-2"].stop()
	w.node("node-2", false)
	w.eventually("the store knows it", func() bool {
		_, err := s.Expand(soon(t), v.ID, volume.Range{Required: 4 * mib})
		return errors.Is(err, errdefs.ErrUnavailable)
	})
	if size := w.whole("v").Spec.Size; size != v.Size {
		t.Errorf("it is said to have %d bytes, and a current leg has not grown", size)
	}
	w.becomes("v", w.whole("v").Name)
	w.eventually("it grows without the other leg", func() bool {
		grown, err := s.Expand(soon(t), v.ID, volume.Range{Required: 4 * mib})
		return err == nil && grown.Size == 4*mib
	})
	check.OK(t, s.Modify(w.ctx, v.ID, map[string]string{"readAheadKiB": "64"}))
	if problems, err := s.Health(w.ctx, v.ID); err != nil || !slices.ContainsFunc(problems, func(p blockdev.Problem) bool {
		return p.Reason == "ReplicaNotCurrent" && strings.HasPrefix(p.Message, "replica on node node-2: it does not have all that was written")
	}) {
		t.Errorf("its health is %+v, %v", problems, err)
	}
	w.node("node-2", true)
	w.start(all["node-2"].machine)
	w.eventually("the other leg has all of it", func() bool {
		leg := w.legsOf("v")[1]
		return leg.Status.Size == 4*mib && leg.Status.Mutable["readAheadKiB"] == "64"
	})
	all["node-2"].stop()
	w.node("node-2", false)
	w.becomes("v", w.whole("v").Spec.Legs...)
	check.OK(t, s.Release(w.ctx, v.ID, "node-1"))
	w.eventually("it waits to be deleted", func() bool { return errors.Is(s.Delete(soon(t), v.ID), errdefs.ErrUnavailable) })
	check.OK(t, w.Delete(w.ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-2"}}))
	w.eventually("a node that is gone for good is not waited for", func() bool { return s.Delete(soon(t), v.ID) == nil && w.whole("v") == nil })
}

// TestReplicatedStaleClaim: a claim of a volume with replicas without a VolumeAttachment is released after some time, with those of its legs. The claims
// of the legs of an attached volume stay.
func TestReplicatedStaleClaim(t *testing.T) {
	w, _, s := legCluster(t, 2)
	ids := map[string]volume.ID{}
	for _, name := range []string{"stale", "attached"} {
		v, err := s.Create(w.ctx, replicas(name, 2))
		check.OK(t, err)
		ids[name] = v.ID
		check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-1"))))
		w.persistentVolume("pv-replicated-"+name, cluster.DefaultDriver, v.ID)
	}
	pv := "pv-replicated-attached"
	va := &storagev1.VolumeAttachment{ObjectMeta: metav1.ObjectMeta{Name: "va-replicated"}, Spec: storagev1.VolumeAttachmentSpec{Attacher: cluster.DefaultDriver, NodeName: "node-1",
		Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: &pv}}}
	check.OK(t, w.Create(w.ctx, va))
	t.Cleanup(func() { check.OK(t, w.Delete(w.ctx, va)) })
	for _, id := range ids {
		fails(t, s.Delete(w.ctx, id), errdefs.ErrInUse)
	}
	s, _ = w.sweeping()
	w.eventually("the stale one is taken back", func() bool { return s.Delete(w.ctx, ids["stale"]) == nil })
	fails(t, s.Delete(w.ctx, ids["attached"]), errdefs.ErrInUse)
	if claims := w.claims("attached"); !slices.Equal(claims, []string{"node-1 1", "node-1 1"}) {
		t.Errorf("the legs of what is attached are claimed for %q", claims)
	}
}

// TestReplicatedRestored: an object is restored without its status. Its legs are not taken for current, and none is made anew or deleted.
func TestReplicatedRestored(t *testing.T) {
	w, _, s := legCluster(t, 3)
	v, err := s.Create(w.ctx, replicas("v", 2, "node-1"))
	check.OK(t, err)
	check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-1"))))
	r := w.whole("v")
	copied := &v1alpha1.ReplicatedVolume{ObjectMeta: metav1.ObjectMeta{Name: r.Name}, Spec: r.Spec}
	copied.Spec.Delete = "another" // as in a backup that was made while the object was being deleted
	copied.Spec.Claim = nil
	check.OK(t, w.Delete(w.ctx, r))
	check.OK(t, w.Create(w.ctx, copied))
	w.eventually("the store knows the copy", func() bool {
		return errors.Is(second(s.Get(w.ctx, v.ID)), errdefs.ErrNotFound) && w.whole("v").Spec.Delete == ""
	})
	if _, err := s.Claim(w.ctx, v.ID, on("node-1")); err == nil || !strings.Contains(err.Error(), "restore ReplicatedVolume "+v.ID.Key+" with its status") {
		t.Errorf("who wants to use it is told: %v", err)
	}
	fails(t, second(s.Create(w.ctx, replicas("v", 2, "node-1"))), errdefs.ErrDataLoss)
	if r := w.whole("v"); r == nil || r.Status.Made != nil || len(w.legsOf("v")) != 2 {
		t.Errorf("it is %+v, with %d legs", r, len(w.legsOf("v")))
	}
	check.OK(t, s.Delete(w.ctx, v.ID))
}

// TestReplicatedClaimsCountedOn: an object that was restored has counted fewer claims than the records of its legs. The patch of the runbook
// replicas-missing corrects that: the claims of its legs follow, and the next claim is a later one.
func TestReplicatedClaimsCountedOn(t *testing.T) {
	w, _, s := legCluster(t, 2)
	v, err := s.Create(w.ctx, replicas("v", 2))
	check.OK(t, err)
	check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-1"))))
	check.OK(t, w.Patch(w.ctx, w.whole("v"), client.RawPatch(types.MergePatchType, []byte(`{"spec":{"claims":9,"claim":{"generation":9}}}`))))
	w.eventually("the legs are claimed by it", func() bool { return slices.Equal(w.claims("v"), []string{"node-1 9", "node-1 9"}) })
	check.OK(t, s.Release(w.ctx, v.ID, "node-1"))
	w.eventually("it is claimed anew", func() bool { return second(s.Claim(w.ctx, v.ID, on("node-1"))) == nil })
	if claims := w.claims("v"); !slices.Equal(claims, []string{"node-1 10", "node-1 10"}) {
		t.Errorf("its legs are claimed for %q", claims)
	}
	check.OK(t, s.Release(w.ctx, v.ID, "node-1"))
	if err := w.Patch(w.ctx, w.whole("v"), client.RawPatch(types.MergePatchType, []byte(`{"spec":{"claims":19,"claim":{"generation":19}}}`))); err == nil || !strings.Contains(err.Error(), "spec.claim.node: Required") {
		t.Errorf("a claim of nobody: %v", err)
	}
	check.OK(t, w.Patch(w.ctx, w.whole("v"), client.RawPatch(types.MergePatchType, []byte(`{"spec":{"claims":19}}`))))
	w.eventually("it is claimed by a later claim", func() bool { return second(s.Claim(w.ctx, v.ID, on("node-1"))) == nil })
	if claims := w.claims("v"); !slices.Equal(claims, []string{"node-1 20", "node-1 20"}) {
		t.Errorf("its legs are claimed for %q", claims)
	}
}

// TestReplicatedBeforeGrowth: the object of a volume is restored to before the volume grew. The volume keeps its size, also if it is claimed at once: through a
// smaller mirror its users would not find what they have, and what a leg lacks behind its end would not be copied to it. As long as a leg is smaller, it has
// not grown. No older size is written.
func TestReplicatedBeforeGrowth(t *testing.T) {
	w, all, s := legCluster(t, 2)
	v, err := s.Create(w.ctx, replicas("v", 2, "node-1"))
	check.OK(t, err)
	check.OK(t, second(s.Expand(w.ctx, v.ID, volume.Range{Required: 4 * mib})))
	refused := w.Patch(w.ctx, w.whole("v"), client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"spec":{"size":%d}}`, v.Size)))
	if refused == nil || !strings.Contains(refused.Error(), "a volume does not shrink") {
		t.Errorf("an older size: %v", refused)
	}
	restore := func(size int64) {
		t.Helper()
		r := w.whole("v")
		check.OK(t, w.Delete(w.ctx, r))
		older := &v1alpha1.ReplicatedVolume{ObjectMeta: metav1.ObjectMeta{Name: r.Name}, Spec: r.Spec}
		older.Spec.Size = size
		check.OK(t, w.Create(w.ctx, older))
		w.says("v", func(n *v1alpha1.ReplicatedVolume) { n.Status = r.Status })
	}
	restore(v.Size)
	w.eventually("it has its size", func() bool { return w.whole("v").Spec.Size == 4*mib })
	w.eventually("it can be claimed", func() bool { return second(s.Claim(soon(t), v.ID, on("node-1"))) == nil })
	if now, err := s.Get(w.ctx, v.ID); err != nil || now.Size != 4*mib {
		t.Errorf("it is %+v, %v", now, err)
	}
	check.OK(t, s.Release(w.ctx, v.ID, "node-1"))

	// One leg alone is larger.
	all["node-2"].stop()
	leg := w.legsOf("v")[0]
	leg.Spec.Size = 8 * mib
	check.OK(t, w.Update(w.ctx, leg))
	w.eventually("it has grown", func() bool { return w.legsOf("v")[0].Status.Size == 8*mib })
	check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-1"))))
	time.Sleep(300 * time.Millisecond)
	if size := w.whole("v").Spec.Size; size != 4*mib {
		t.Errorf("with one leg that is larger it has %d bytes", size)
	}
	w.start(all["node-2"].machine)
	check.OK(t, s.Release(w.ctx, v.ID, "node-1"))
	w.eventually("it is deleted", func() bool { return s.Delete(soon(t), v.ID) == nil })
}

// TestKeepsSizeWithoutLost: the object of a volume is restored to before the volume grew, and to before one of its legs was replaced, which is lost since. The volume
// keeps its size: the successor of that leg would be too small for it.
func TestKeepsSizeWithoutLost(t *testing.T) {
	now := metav1.NowMicro()
	leg := func(name string, size int64) *v1alpha1.Volume {
		v := &v1alpha1.Volume{ObjectMeta: metav1.ObjectMeta{Name: name}}
		v.Status.Created, v.Status.Size = &now, size
		return v
	}
	lost, unmade := leg("b", 2*mib), &v1alpha1.Volume{ObjectMeta: metav1.ObjectMeta{Name: "c"}}
	lost.Status.Conditions = []metav1.Condition{{Type: v1alpha1.Ready, Status: "False"}}
	for what, c := range map[string]struct {
		legs    []*v1alpha1.Volume
		current []string
		want    int64
	}{
		"all have grown":            {[]*v1alpha1.Volume{leg("a", 4*mib), leg("b", 4*mib), leg("c", 8*mib)}, []string{"a", "b", "c"}, 4 * mib},
		"one has not":               {[]*v1alpha1.Volume{leg("a", 4*mib), leg("b", 2*mib), leg("c", 8*mib)}, []string{"a", "c"}, 2 * mib},
		"one is lost":               {[]*v1alpha1.Volume{leg("a", 4*mib), lost, leg("c", 8*mib)}, []string{"a", "b"}, 4 * mib},
		"one is lost, one not made": {[]*v1alpha1.Volume{leg("a", 4*mib), lost, unmade}, []string{"a", "b"}, 4 * mib},
		"one is named":              {[]*v1alpha1.Volume{leg("a", 4*mib), lost}, []string{"a", "b"}, 4 * mib},
		"one has no object":         {[]*v1alpha1.Volume{leg("a", 4*mib), lost}, []string{"a", "c"}, 2 * mib},
		"one has not said its size": {[]*v1alpha1.Volume{leg("a", 4*mib), leg("b", 4*mib), unmade}, []string{"a", "c"}, 2 * mib},
		"all are lost":              {[]*v1alpha1.Volume{lost}, []string{"b"}, 2 * mib},
	} {
		r := &v1alpha1.ReplicatedVolume{Spec: v1alpha1.ReplicatedVolumeSpec{Size: 2 * mib, Legs: []string{"a", "b", "c"}}}
		for _, name := range r.Spec.Legs {
			r.Status.Legs = append(r.Status.Legs, v1alpha1.Leg{Name: name, Current: slices.Contains(c.current, name)})
		}
		if what == "all are lost" {
			r.Spec.Legs = []string{"b"}
		}
		if changed := cluster.KeepSize(r, c.legs); r.Spec.Size != c.want || changed != (c.want > 2*mib) {
			t.Errorf("%s: it has %d bytes, %v", what, r.Spec.Size, changed)
		}
	}
}

// TestReplicatedOlder: an object is restored, with its status, to before all its legs were replaced. The present legs stay, as they alone have what was
// written. Meanwhile its snapshots can be restored.
func TestReplicatedOlder(t *testing.T) {
	w, _, s := legCluster(t, 2)
	v, err := s.Create(w.ctx, replicas("v", 2))
	check.OK(t, err)
	snapshot, err := s.CreateSnapshot(w.ctx, "snapshot", v.ID)
	check.OK(t, err)
	r := w.whole("v")
	legs := w.legsOf("v")
	check.OK(t, w.Delete(w.ctx, r))
	older := &v1alpha1.ReplicatedVolume{ObjectMeta: metav1.ObjectMeta{Name: r.Name}, Spec: r.Spec}
	older.Spec.Legs = nil
	for range legs {
		cluster.AddLeg(older)
	}
	check.OK(t, w.Create(w.ctx, older))
	w.says("v", func(r *v1alpha1.ReplicatedVolume) { cluster.SetLegs(r, false) })
	w.eventually("the store knows it", func() bool { return errors.Is(second(s.Get(w.ctx, v.ID)), errdefs.ErrUnavailable) })
	rescued := anyNode("rescued")
	rescued.Source = snapshot.ID
	check.OK(t, second(s.Create(w.ctx, rescued)))
	time.Sleep(time.Second)
	for _, leg := range legs {
		now := &v1alpha1.Volume{}
		if err := w.Get(w.ctx, client.ObjectKeyFromObject(leg), now); err != nil || now.Deleting() {
			t.Errorf("leg %s on %s: %v", leg.Name, leg.Spec.NodeName, err)
		}
	}
	check.OK(t, s.Delete(w.ctx, v.ID))
}

// beforeThirdLeg restores the object of a volume with three legs, with its status, to before the third was made, with a number of replicas that it is to have. It
// returns the object that there was.
func (w *environment) beforeThirdLeg(name string, replicas int) *v1alpha1.ReplicatedVolume {
	w.Helper()
	r := w.whole(name)
	check.OK(w, w.Delete(w.ctx, r))
	older := &v1alpha1.ReplicatedVolume{ObjectMeta: metav1.ObjectMeta{Name: r.Name}, Spec: r.Spec}
	older.Spec.Legs, older.Spec.Numbered, older.Spec.Replicas = r.Spec.Legs[:2], 2, replicas
	check.OK(w, w.Create(w.ctx, older))
	w.says(name, func(r *v1alpha1.ReplicatedVolume) { cluster.SetLegs(r, false) })
	return r
}

// haveAllLegs checks that all legs of an object are there, and that a deletion of the volume leaves none.
func (w *environment) haveAllLegs(s *store.Store, id volume.ID, r *v1alpha1.ReplicatedVolume) {
	w.Helper()
	for _, leg := range r.Spec.Legs {
		now := &v1alpha1.Volume{}
		if err := w.Get(w.ctx, client.ObjectKey{Name: leg}, now); err != nil || now.Deleting() {
			w.Errorf("leg %s: %v, it is to be deleted: %v", leg, err, now.Deleting())
		}
	}
	check.OK(w, s.Delete(w.ctx, id))
	if left := w.legsOf(r.Spec.Name); len(left) > 0 {
		w.Errorf("%d legs are left of a volume that was deleted", len(left))
	}
}

// TestReplicatedOlderInPart: an object is restored, with its status, to before one of its legs was made. That leg stays, as it may alone have what was written
// since, though another leg is current by the object.
func TestReplicatedOlderInPart(t *testing.T) {
	w, _, s := legCluster(t, 3)
	v, err := s.Create(w.ctx, replicas("v", 3))
	check.OK(t, err)
	r := w.beforeThirdLeg("v", 2)
	w.eventually("the store knows it", func() bool { return second(s.Get(w.ctx, v.ID)) == nil })
	time.Sleep(time.Second)
	w.haveAllLegs(s, v.ID, r)
}

// TestReplicatedOlderAndLacks: an object is restored, with its status, to before one of its legs was made, and the volume lacks a leg. When the object comes to
// the number of that leg, the leg is one of the volume's again, and is not deleted as one that the volume does without.
func TestReplicatedOlderAndLacks(t *testing.T) {
	w, _, s := legCluster(t, 3)
	v, err := s.Create(w.ctx, replicas("v", 3))
	check.OK(t, err)
	r := w.beforeThirdLeg("v", 3)
	w.eventually("it has a third leg", func() bool { return len(w.whole("v").Spec.Legs) == 3 })
	time.Sleep(time.Second)
	if now := w.whole("v").Spec.Legs; !slices.Equal(now, r.Spec.Legs) {
		t.Errorf("its legs are %v, and were %v", now, r.Spec.Legs)
	}
	w.haveAllLegs(s, v.ID, r)
}

// TestReplicatedForgotten: the object of a volume with replicas was deleted by hand. Errors say what to restore. It is not deleted while it is in use. Its legs
// can be released and deleted by the ID of the volume, also if the first of them is gone.
func TestReplicatedForgotten(t *testing.T) {
	w, all, s := legCluster(t, 3)
	for what, lacks := range map[string]func(name string){"all legs": nil, "not the first": func(name string) {
		w.edited(volume.KeyOf(name), func(v *v1alpha1.Volume) { v.Spec.Claim, v.Spec.Delete = nil, v.UID })
		w.eventually("it is gone", func() bool { return w.object(name) == nil })
	}} {
		v, err := s.Create(w.ctx, replicas(what, 3))
		check.OK(t, err)
		check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-1"))))
		check.OK(t, w.Delete(w.ctx, w.whole(what)))
		if lacks != nil {
			lacks(what)
		}
		w.eventually("the store knows that", func() bool { return errors.Is(second(s.Get(w.ctx, v.ID)), errdefs.ErrNotFound) })
		for _, leg := range w.legsOf(what) {
			if leg.Name != v.ID.Key {
				check.OK(t, s.Delete(w.ctx, cluster.VolumeID(leg))) // there is no volume of this ID
			}
		}
		for _, err := range []error{second(s.Get(w.ctx, v.ID)), second(s.Claim(w.ctx, v.ID, on("node-2")))} {
			if !errors.Is(err, errdefs.ErrNotFound) || !strings.Contains(err.Error(), "restore ReplicatedVolume "+volume.KeyOf(what)) {
				t.Errorf("%s: %v", what, err)
			}
		}
		check.OK(t, s.Release(w.ctx, v.ID, "node-2"))
		fails(t, s.Delete(w.ctx, v.ID), errdefs.ErrInUse)
		if claims := w.claims(what); !slices.Contains(claims, "node-1 1") {
			t.Errorf("%s: released for another node, its legs are claimed for %q", what, claims)
		}
		check.OK(t, s.Release(w.ctx, v.ID, "node-1"))
		if claims := w.claims(what); slices.ContainsFunc(claims, func(c string) bool { return c != "" }) {
			t.Errorf("%s: released, its legs are claimed for %q", what, claims)
		}
		check.OK(t, s.Delete(w.ctx, v.ID))
		if legs := w.legsOf(what); len(legs) > 0 || w.whole(what) != nil {
			t.Errorf("%s: left are %d legs, and %+v", what, len(legs), w.whole(what))
		}
	}
	for _, m := range all {
		w.tally(m.machine)
	}
}

// TestReplicatedOtherID: a volume whose first leg is gone is not deleted by an ID that names another pool, and that is no volume's.
func TestReplicatedOtherID(t *testing.T) {
	w, _, s := legCluster(t, 2)
	v, err := s.Create(w.ctx, replicas("v", 2))
	check.OK(t, err)
	w.edited(v.ID.Key, func(v *v1alpha1.Volume) { v.Spec.Delete = v.UID })
	w.eventually("its first leg is gone", func() bool { return w.object("v") == nil })
	other := v.ID
	other.Pool = "b"
	fails(t, second(s.Get(w.ctx, other)), errdefs.ErrNotFound)
	time.Sleep(time.Second) // so that the store knows it
	check.OK(t, s.Delete(w.ctx, other))
	if r := w.whole("v"); r == nil || r.Going() || len(w.legsOf("v")) == 0 {
		t.Errorf("it is %+v, with %d legs", r, len(w.legsOf("v")))
	}
	check.OK(t, s.Delete(w.ctx, v.ID))
}

// TestReplicatedAdoptedStays: the object of a volume that was used is lost, and adopted, and the volume gets replicas. No object tells any more that it was
// used. It stays, though nobody knows of it.
func TestReplicatedAdoptedStays(t *testing.T) {
	w, all, s := legCluster(t, 2)
	one := anyNode("pvc-adopted", nodeName)
	one.For = volume.Requester{Namespace: "default", Name: "nobody"}
	v, err := s.Create(w.ctx, one)
	check.OK(t, err)
	check.OK(t, all[nodeName].local.SetFormat(w.ctx, v.ID, formatted))
	check.OK(t, w.Delete(w.ctx, w.object("pvc-adopted")))
	w.strays("default", 1)
	w.adopt("default", "all")
	w.eventually("it is found", func() bool { o := w.object("pvc-adopted"); return o != nil && o.Status.Created != nil })
	check.OK(t, w.ask("pvc-adopted", 2))
	w.eventually("it has replicas", func() bool { return w.became("pvc-adopted", 2) })
	w.sweeping()
	time.Sleep(2 * abandonGrace)
	if r := w.whole("pvc-adopted"); r == nil || r.Going() || len(w.legsOf("pvc-adopted")) != 2 {
		t.Errorf("it is %+v, with %d legs", r, len(w.legsOf("pvc-adopted")))
	}
	check.OK(t, second(all[nodeName].local.Get(w.ctx, v.ID)))
}

// TestReplicatedAbandoned: a volume with replicas that was made for a claim, and has no PersistentVolume, is deleted if it was never used; so is a first
// leg that is left alone of such a volume, and a further leg that is left alone of any.
func TestReplicatedAbandoned(t *testing.T) {
	w, all, s := legCluster(t, 2)
	for _, name := range []string{"pvc-unknown", "pvc-used", "pvc-begun"} {
		one := replicas(name, 2)
		one.For = volume.Requester{Namespace: "default", Name: "nobody"}
		v, err := s.Create(w.ctx, one)
		check.OK(t, err)
		if name == "pvc-used" {
			check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-1"))))
			check.OK(t, s.Release(w.ctx, v.ID, "node-1"))
		}
	}
	other := w.legsOf("pvc-begun")[1]
	check.OK(t, w.Delete(w.ctx, w.whole("pvc-begun")))
	w.edited(other.Name, func(v *v1alpha1.Volume) { v.Spec.Delete = v.UID })
	late := w.begunLate(s, "late")
	w.sweeping()
	w.eventually("what nobody knows of is gone", func() bool {
		return w.whole("pvc-unknown") == nil && len(w.legsOf("pvc-unknown")) == 0 && len(w.legsOf("pvc-begun")) == 0
	})
	w.eventually("a leg that was begun while its volume was deleted is gone", func() bool { return len(w.legsOf(late)) == 0 })
	time.Sleep(abandonGrace)
	if r := w.whole("pvc-used"); r == nil || r.Going() || len(w.legsOf("pvc-used")) != 2 {
		t.Errorf("what was used is %+v", r)
	}
	for _, m := range all {
		w.tally(m.machine)
	}
}

// TestReplicatedAbandonedBehind: a volume with replicas that nobody knows of is deleted also if the clocks of the nodes are behind that of the API server.
func TestReplicatedAbandonedBehind(t *testing.T) {
	w, all, s := legCluster(t, 2)
	for _, m := range all {
		m.disks[0].SetBehind(10 * time.Second)
	}
	one := replicas("pvc-unknown", 2)
	one.For = volume.Requester{Namespace: "default", Name: "nobody"}
	check.OK(t, second(s.Create(w.ctx, one)))
	w.sweeping()
	w.eventually("it is gone", func() bool { return w.whole("pvc-unknown") == nil && len(w.legsOf("pvc-unknown")) == 0 })
	for _, m := range all {
		w.tally(m.machine)
	}
}

// begunLate has a leg begun just as its volume is deleted: the object was read before that, and the leg is created after it. It returns the name of the volume.
func (w *environment) begunLate(s *store.Store, name string) string {
	w.Helper()
	v, err := s.Create(w.ctx, replicas(name, 2))
	check.OK(w, err)
	leg := w.legsOf(name)[1]
	check.OK(w, s.Delete(w.ctx, v.ID))
	leg = &v1alpha1.Volume{ObjectMeta: metav1.ObjectMeta{Name: volume.KeyOf(name + "-3"), Labels: leg.Labels}, Spec: leg.Spec}
	leg.Spec.Make, leg.Spec.Name = true, name+"-3"
	check.OK(w, w.Create(w.ctx, leg))
	w.eventually("it is made", func() bool {
		legs := w.legsOf(name)
		return len(legs) == 1 && legs[0].Status.Created != nil
	})
	return name
}

// edited changes the spec of a Volume.
func (w *environment) edited(key string, edit func(v *v1alpha1.Volume)) {
	w.Helper()
	v := &v1alpha1.Volume{}
	check.OK(w, w.Get(w.ctx, client.ObjectKey{Name: key}, v))
	before := v.DeepCopy()
	edit(v)
	check.OK(w, w.Patch(w.ctx, v, client.MergeFrom(before)))
}

// TestReplicatedOfBefore: a controller whose cache still has a deleted volume does not delete legs of another volume of its name, which is being made, or
// exists.
func TestReplicatedOfBefore(t *testing.T) {
	w := newEnvironment(t)
	leg := volumeOn(nodeName, "v")
	leg.Spec.Access, leg.Spec.ReplicaOf = "any", leg.Name
	check.OK(t, w.Create(w.ctx, leg))
	r := cluster.ReplicatedNamed(leg.Name)
	r.Spec = v1alpha1.ReplicatedVolumeSpec{Name: "v", Pool: "default", Replicas: 2, Size: mib, Legs: []string{leg.Name}, Numbered: 1}
	of := func(uid types.UID) *v1alpha1.ReplicatedVolume {
		old := r.DeepCopy()
		old.UID, old.Spec.Delete = uid, uid
		return old
	}
	as := kube.Connection{Client: w.Client, Live: w.Client}
	stays := func(what string, old *v1alpha1.ReplicatedVolume) {
		t.Helper()
		v, err := cluster.RemoveLeg(w.ctx, as, old, leg.Name)
		if check.OK(t, err); v != nil || w.object("v").Spec.Delete != "" {
			t.Errorf("%s: its leg is to be deleted", what)
		}
	}
	stays("it is being made", of("before"))
	check.OK(t, w.Create(w.ctx, r))
	stays("it is there", of("before"))
	stays("it is not to be deleted", of(r.UID))
	w.edit("v", func(r *v1alpha1.ReplicatedVolume) { r.Spec.Delete = r.UID })
	if v, err := cluster.RemoveLeg(w.ctx, as, of(r.UID), leg.Name); err != nil || v == nil || !w.object("v").Deleting() {
		t.Errorf("it is to be deleted, and its leg is %+v, %v", v, err)
	}
}

// TestReplicatedDefinitionAway: without the definition of ReplicatedVolumes, no call answers that a volume with replicas is gone.
func TestReplicatedDefinitionAway(t *testing.T) {
	w, _, s := legCluster(t, 2)
	v, err := s.Create(w.ctx, replicas("v", 2, "node-1"))
	check.OK(t, err)
	w.undefined("replicatedvolumes.ashlar.dev")
	w.eventually("the API server serves it no longer, and the store has heard of it", func() bool { return second(s.List(w.ctx, volume.ID{}, 0)) != nil })
	needDefinitions(t, map[string]func() error{
		"list":    func() error { return second(s.List(w.ctx, volume.ID{}, 0)) },
		"get":     func() error { return second(s.Get(w.ctx, v.ID)) },
		"claim":   func() error { return second(s.Claim(w.ctx, v.ID, on("node-1"))) },
		"release": func() error { return s.Release(w.ctx, v.ID, "node-1") },
		"delete":  func() error { return s.Delete(w.ctx, v.ID) },
		"create":  func() error { return second(s.Create(w.ctx, replicas("v", 2, "node-1"))) },
	})
}
