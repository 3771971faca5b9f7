package cluster_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/agent"
	"github.com/ashlar-csi/ashlar/pkg/cluster/lost"
	"github.com/ashlar-csi/ashlar/pkg/cluster/store"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
	"github.com/ashlar-csi/ashlar/pkg/volume/storetest"
)

// ask asks for a volume on one node to have n replicas (spec.replicas), as kubectl ashlar does; with 0 it takes the request back.
func (w *environment) ask(name string, n int) error {
	w.Helper()
	return w.written(func() error {
		o := w.object(name)
		before := o.DeepCopy()
		o.Spec.Replicas = n
		return w.Patch(w.ctx, o, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	})
}

// became reports whether a volume that was on one node has n legs, only the first one, which it was before, is current, and the request is taken off.
func (w *environment) became(name string, n int) bool {
	r, legs := w.whole(name), w.legsOf(name)
	if r == nil || r.Status.Made == nil || len(legs) != n || len(r.Spec.Legs) != n {
		return false
	}
	for _, v := range legs {
		if v.Status.Created == nil {
			return false
		}
	}
	return legs[0].Name == r.Name && legs[0].Spec.Replicas == 0 && slices.Equal(r.Current(), []string{r.Name})
}

// TestBecomesReplicated: a volume that is asked to have replicas gets them when nobody uses it. It keeps its ID and its size, and its next claim is later
// than those that it had. Until its node has noted that it is a leg, it cannot be used.
func TestBecomesReplicated(t *testing.T) {
	w, all, s := legCluster(t, 2)
	v, err := s.Create(w.ctx, anyNode("v", "node-1"))
	check.OK(t, err)
	check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-2"))))
	claims := w.object("v").Spec.Claims
	check.OK(t, w.ask("v", 2))
	time.Sleep(300 * time.Millisecond)
	if w.whole("v") != nil || w.object("v").Spec.ReplicaOf != "" {
		t.Error("it became one with replicas while it was used")
	}
	if have, err := s.Get(w.ctx, v.ID); err != nil || have.Claim.Node != "node-2" {
		t.Errorf("it is %+v, %v", have, err)
	}
	check.OK(t, s.Release(w.ctx, v.ID, "node-2"))
	w.eventually("it has replicas", func() bool { return w.became("v", 2) })
	have, err := s.Get(w.ctx, v.ID)
	check.OK(t, err)
	if have.ID != v.ID || have.Replicas != 2 || have.Size != v.Size || have.Name != v.Name {
		t.Errorf("it is %+v", have)
	}
	if listed, err := s.List(w.ctx, volume.ID{}, 0); err != nil || len(listed) != 1 || listed[0].ID != v.ID {
		t.Errorf("listed are %+v, %v", listed, err)
	}
	w.eventually("its record says that it is a replica", func() bool {
		local, err := all["node-1"].local.Get(w.ctx, v.ID)
		return err == nil && local.ReplicaOf == v.ID.Key
	})
	r := w.whole("v")
	if r.Spec.ReplaceAfter != 600 || r.Spec.Pools != "default" || r.Spec.Claim != nil {
		t.Errorf("its object is %+v", r.Spec)
	}
	check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-2"))))
	if have := w.whole("v").Spec.Claim.Generation; have <= claims {
		t.Errorf("its claim is %d, and there were %d before", have, claims)
	}
	if err := w.ask("v", 3); err == nil || !strings.Contains(err.Error(), "how many there are to be says its ReplicatedVolume") {
		t.Errorf("a leg is asked to have replicas: %v", err)
	}
	check.OK(t, s.Release(w.ctx, v.ID, "node-2"))
	check.OK(t, s.Delete(w.ctx, v.ID))

	v, err = s.Create(w.ctx, anyNode("v", "node-1"))
	check.OK(t, err)
	all["node-1"].stop() // so that its record does not say yet that it is a leg
	check.OK(t, w.ask("v", 2))
	w.eventually("it is about to have replicas", func() bool { return w.whole("v") != nil })
	time.Sleep(300 * time.Millisecond)
	if w.whole("v").Status.Made != nil {
		t.Error("it can be used before its node knows that it is a leg")
	}
	fails(t, second(s.Claim(w.ctx, v.ID, on("node-2"))), errdefs.ErrUnavailable)
	fails(t, second(s.Get(w.ctx, v.ID)), errdefs.ErrUnavailable)
	if listed, err := s.List(w.ctx, volume.ID{}, 0); err != nil || len(listed) != 1 || listed[0].ID != v.ID {
		t.Errorf("meanwhile listed are %+v, %v", listed, err)
	}
	w.start(all["node-1"].machine)
	w.eventually("it has replicas when its node is back", func() bool { return w.became("v", 2) })
	check.OK(t, s.Delete(w.ctx, v.ID))

	alone, err := s.Create(w.ctx, spec("alone"))
	check.OK(t, err)
	if err := w.ask("alone", 2); err == nil || !strings.Contains(err.Error(), "a volume with access node gets no replicas") {
		t.Errorf("a volume with access node is asked to have replicas: %v", err)
	}
	check.OK(t, s.Delete(w.ctx, alone.ID))
	for _, m := range all {
		w.tally(m.machine)
	}
}

// mirroring starts n nodes in a network that can use volumes with replicas, and a store that knows their pools.
func (w *environment) mirroring(n int) (all []*machine, s *store.Store) {
	w.Helper()
	for i := range n {
		m := w.begin(&machine{name: fmt.Sprint("node-", i+1), mirrors: true, with: func(o *agent.Options) {
			o.Exporter, o.Network = &given{to: map[volume.ID]volume.Grant{}}, &v1alpha1.Network{Name: "storage", Address: "10.0.0.7:4420"}
		}})
		all = append(all, m)
	}
	return all, w.knowing(all...)
}

// TestBecomesReplicatedUsed: a volume gets replicas while a node uses it, if that node can use a mirror. The claim becomes that of the new volume, with
// the same generation, so that the user is not fenced. Until the new object has the claim, it cannot be released.
func TestBecomesReplicatedUsed(t *testing.T) {
	w := newEnvironment(t)
	all, s := w.mirroring(3)
	for _, user := range []string{"node-1", "node-2"} {
		v, err := s.Create(w.ctx, anyNode("v", "node-1"))
		check.OK(t, err)
		check.OK(t, second(s.Claim(w.ctx, v.ID, on(user))))
		claim := *w.object("v").Spec.Claim
		check.OK(t, w.ask("v", 2))
		w.eventually("it has replicas", func() bool { return w.became("v", 2) })
		r := w.whole("v")
		if have := r.Spec.Claim; !equality.Semantic.DeepEqual(have, &claim) || r.Spec.Claims != claim.Generation {
			t.Errorf("used by %s, its claim is %+v of %d, and was %+v", user, have, r.Spec.Claims, claim)
		}
		w.eventually("its legs are claimed", func() bool {
			for _, leg := range w.legsOf("v") {
				if c := leg.Spec.Claim; c == nil || c.Node != user || leg.Name == r.Name && !equality.Semantic.DeepEqual(c, &claim) {
					return false
				}
			}
			return true
		})
		if have, err := s.Get(w.ctx, v.ID); err != nil || have.Claim.Node != user || have.Claim.Generation != claim.Generation {
			t.Errorf("it is %+v, %v", have, err)
		}
		check.OK(t, second(s.Claim(w.ctx, v.ID, on(user))))
		fails(t, second(s.Claim(w.ctx, v.ID, on("node-3"))), errdefs.ErrInUse)
		check.OK(t, s.Release(w.ctx, v.ID, user))
		check.OK(t, s.Delete(w.ctx, v.ID))
	}

	v, goesOn := w.about(all, s)
	fails(t, second(s.Expand(w.ctx, v.ID, volume.Range{Required: 2 * v.Size})), errdefs.ErrUnavailable)
	fails(t, s.Delete(w.ctx, v.ID), errdefs.ErrInUse)
	if c := w.whole("v").Spec.Claim; c == nil || c.Node != "node-2" {
		t.Errorf("its claim is %+v", c)
	}
	goesOn()
}

// about makes a volume of node-1 that node-2 uses, and that is about to get replicas: the agent of node-1 is stopped, so that the record does not say yet
// that the volume is a leg. goesOn starts that agent, waits until there are replicas, and deletes the volume.
func (w *environment) about(all []*machine, s *store.Store) (v volume.Volume, goesOn func()) {
	w.Helper()
	v, err := s.Create(w.ctx, anyNode("v", "node-1"))
	check.OK(w, err)
	check.OK(w, second(s.Claim(w.ctx, v.ID, on("node-2"))))
	all[0].stop()
	check.OK(w, w.ask("v", 2))
	w.eventually("it is about to have replicas", func() bool { return w.whole("v") != nil })
	return v, func() {
		w.Helper()
		w.start(all[0])
		w.eventually("it has replicas when its node is back", func() bool { return w.became("v", 2) })
		check.OK(w, s.Release(w.ctx, v.ID, "node-2"))
		check.OK(w, s.Delete(w.ctx, v.ID))
		for _, m := range all {
			w.tally(m)
		}
	}
}

// TestTakenBackTooLate: when a volume has become a leg, the request for replicas cannot be taken back: the volume would be neither one with replicas nor
// one without, and could not be released.
func TestTakenBackTooLate(t *testing.T) {
	w := newEnvironment(t)
	all, s := w.mirroring(2)
	_, goesOn := w.about(all, s)
	if err := w.ask("v", 0); !apierrors.IsInvalid(err) {
		t.Errorf("taken back: %v", err)
	}
	goesOn()
}

// TestReleasedWhileItBecomes: a volume is released at the very moment when it gets replicas. Then neither its Volume nor its ReplicatedVolume has the
// claim.
func TestReleasedWhileItBecomes(t *testing.T) {
	w := newEnvironment(t)
	all, s := w.mirroring(1) // so that it never gets another leg
	v, err := s.Create(w.ctx, anyNode("v", "node-1"))
	check.OK(t, err)
	for range 10 {
		w.eventually("it is claimed", func() bool { return second(s.Claim(w.ctx, v.ID, on("node-1"))) == nil })
		if w.object("v").Spec.ReplicaOf == "" {
			_ = w.ask("v", 2) // it is refused if an earlier request was carried out
		}
		w.eventually("it is released", func() bool { return s.Release(w.ctx, v.ID, "node-1") == nil })
		w.eventually("and nobody has it", func() bool {
			r := w.whole("v")
			return w.object("v").Spec.Claim == nil && (r == nil || r.Spec.Claim == nil)
		})
	}
	w.eventually("it is deleted", func() bool { return s.Delete(w.ctx, v.ID) == nil })
	for _, m := range all {
		w.tally(m)
	}
}

// becomesCutShort returns a cluster of two nodes in a network, and a cutter for its controllers.
func becomesCutShort(t *testing.T) (w *environment, cut *cutter, machines []*machine) {
	t.Helper()
	w, cut = newEnvironment(t), &cutter{}
	for i := range 2 {
		m, _ := w.networked(fmt.Sprint("node-", i+1), "storage")
		machines = append(machines, m)
	}
	wrap(t, func(c *rest.Config) { c.Wrap(cut.wrap) })
	return w, cut, machines
}

// TestBecomesReplicatedCutShort: at whatever write the controller dies while a volume gets replicas, the next controller goes on. Meanwhile the volume can
// be deleted.
func TestBecomesReplicatedCutShort(t *testing.T) {
	w, cut, machines := becomesCutShort(t)
	s, stop := w.store()
	for _, m := range machines {
		w.pooled(s, m)
	}
	dies := func() bool { // waits until the controller is cut off (true), or has done all
		dead := false
		w.eventually("it is done, or cut short", func() bool {
			cut.mu.Lock()
			dead = cut.dead
			cut.mu.Unlock()
			return dead || w.became("v", 2)
		})
		return dead
	}
	for _, deleted := range []bool{false, true} {
		for _, after := range []bool{false, true} {
			n := 1
			for ; ; n++ {
				v, err := s.Create(w.ctx, anyNode("v", "node-1"))
				check.OK(t, err)
				check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-1"))))
				check.OK(t, s.Release(w.ctx, v.ID, "node-1"))
				cut.arm(n, after)
				check.OK(t, w.ask("v", 2))
				dead := dies()
				stop()
				cut.mend()
				s, stop = w.store()
				if !deleted {
					w.eventually(fmt.Sprintf("write %d, done %v: the next one goes on", n, after), func() bool { return w.became("v", 2) })
					check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-2"))))
					fails(t, second(s.Claim(w.ctx, v.ID, on("node-1"))), errdefs.ErrInUse)
					check.OK(t, s.Release(w.ctx, v.ID, "node-2"))
				}
				w.eventually("it is deleted", func() bool { return s.Delete(w.ctx, v.ID) == nil })
				w.eventually(fmt.Sprintf("write %d, done %v: nothing is left", n, after), func() bool { return w.whole("v") == nil && len(w.legsOf("v")) == 0 })
				if !dead {
					break
				}
			}
			if n < 6 { // four writes to become a leg, and two to get another one
				t.Errorf("it took %d writes", n-1)
			}
		}
	}
	stop()
	for _, m := range machines {
		w.tally(m)
	}
}

// TestTakenBackWhileItBecomes: at whatever write the controller dies while a volume gets replicas, and the request is taken back then, the volume can be
// used in the end.
func TestTakenBackWhileItBecomes(t *testing.T) {
	w, cut, machines := becomesCutShort(t)
	for n := 1; n <= 4; n++ {
		s, stop := w.store()
		for _, m := range machines {
			w.pooled(s, m)
		}
		v, err := s.Create(w.ctx, anyNode("v", "node-1"))
		check.OK(t, err)
		cut.arm(n, true)
		check.OK(t, w.ask("v", 2))
		w.eventually("it is about to have replicas", func() bool { return w.object("v").Spec.ReplicaOf != "" })
		for end := time.Now().Add(time.Second); w.object("v").Status.ReplicaOf == "" && time.Now().Before(end); {
			time.Sleep(10 * time.Millisecond)
		}
		taken := w.ask("v", 0)
		stop()
		cut.mend()
		s, stop = w.store()
		w.eventually(fmt.Sprintf("write %d, taken back: %v; it has replicas", n, taken), func() bool { return w.became("v", 2) })
		check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-2"))))
		check.OK(t, s.Release(w.ctx, v.ID, "node-2"))
		w.eventually("it is deleted", func() bool { return s.Delete(w.ctx, v.ID) == nil })
		stop()
	}
	for _, m := range machines {
		w.tally(m)
	}
}

// TestExpandRefusedWhileItBecomes: the first leg of a volume that is used without a mirror still grows last. If another leg cannot grow, the first one
// keeps its size.
func TestExpandRefusedWhileItBecomes(t *testing.T) {
	w := newEnvironment(t)
	all, s := w.mirroring(2)
	v, err := s.Create(w.ctx, anyNode("v", "node-1"))
	check.OK(t, err)
	check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-1"))))
	check.OK(t, w.ask("v", 2))
	w.eventually("it has replicas", func() bool { return w.became("v", 2) })
	check.OK(t, second(s.Create(w.ctx, volume.Spec{Name: "filler", Size: volume.Range{Required: storetest.Size - v.Size}, Nodes: []string{"node-2"}})))
	fails(t, second(s.Expand(w.ctx, v.ID, volume.Range{Required: 2 * v.Size})), errdefs.ErrNoSpace)
	if have := w.legsOf("v")[0].Status.Size; have != v.Size || w.whole("v").Spec.Size != v.Size {
		t.Errorf("its first leg has %d bytes, and it had %d", have, v.Size)
	}
	check.OK(t, s.Release(w.ctx, v.ID, "node-1"))
	check.OK(t, errors.Join(s.Delete(w.ctx, v.ID), s.Delete(w.ctx, volume.ID{Kind: blockdev.Volume, Pool: "default", Key: volume.KeyOf("filler")})))
	for _, m := range all {
		w.tally(m)
	}
}

// TestLacksReplica: the object and the health of a volume that is to have more replicas than there are nodes with room say why it lacks one, as long as it
// does.
func TestLacksReplica(t *testing.T) {
	w, _, s := legCluster(t, 2)
	v, err := s.Create(w.ctx, replicas("v", 2))
	check.OK(t, err)
	w.edit("v", func(r *v1alpha1.ReplicatedVolume) { r.Spec.Replicas = 3 })
	w.eventually("it says why", func() bool {
		return strings.Contains(w.whole("v").Status.Lacks, "2 nodes have room for one of 3 replicas")
	})
	problems, err := s.Health(w.ctx, v.ID)
	if err != nil || len(problems) != 1 || problems[0].Reason != "ReplicaMissing" || !strings.Contains(problems[0].Message, "1 of 3 replicas are not there: 2 nodes have room") {
		t.Errorf("its health is %+v, %v", problems, err)
	}
	w.edit("v", func(r *v1alpha1.ReplicatedVolume) { r.Spec.Replicas = 2 })
	w.eventually("it lacks none", func() bool { return w.whole("v").Status.Lacks == "" })
	check.OK(t, s.Delete(w.ctx, v.ID))
}

// TestReplicatedIsLost: for a volume with replicas one PersistentVolume is missing (package lost), and not one for each replica, also without its first
// leg.
func TestReplicatedIsLost(t *testing.T) {
	w, _, s := legCluster(t, 3)
	v, err := s.Create(w.ctx, replicas("v", 3))
	check.OK(t, err)
	first := w.legsOf("v")[0].Name
	for _, without := range []string{"", first} {
		if without != "" {
			w.becomes("v", w.whole("v").Spec.Legs[1:]...)
			w.edit("v", func(r *v1alpha1.ReplicatedVolume) {
				r.Spec.Replicas, r.Spec.Legs = 2, slices.DeleteFunc(r.Spec.Legs, func(name string) bool { return name == without })
			})
			w.eventually("the first leg is gone", func() bool { return len(w.legsOf("v")) == 2 })
		}
		objects, _, err := lost.Find(w.ctx, w, lost.Options{Driver: "block.csi.ashlar.dev", Class: "c", AccessMode: "ReadWriteOnce", Namespace: "nowhere"})
		check.OK(t, err)
		if len(objects) != 1 || objects[0].GetName() != "v" || !strings.Contains(fmt.Sprintf("%+v", objects[0]), v.ID.String()) {
			t.Errorf("without %q there are %+v", without, objects)
		}
	}
	check.OK(t, s.Delete(w.ctx, v.ID))
}

// TestAddLeg: no leg gets a name that another one has, also if that was not numbered.
func TestAddLeg(t *testing.T) {
	r := cluster.ReplicatedNamed(volume.KeyOf("v"))
	first, second := cluster.AddLeg(r), cluster.AddLeg(r)
	other := cluster.ReplicatedNamed(r.Name)
	other.Spec.Legs = []string{first}
	if name := cluster.AddLeg(other); name != second || other.Spec.Numbered != 2 {
		t.Errorf("beside %s it is %s, number %d", first, name, other.Spec.Numbered)
	}
}

// TestReplicatedWrittenAnew: the ReplicatedVolume of a volume is lost, and there is no backup of it. That is said, and what docs/operate/strays.md has a person
// write in its place is used as the volume.
func TestReplicatedWrittenAnew(t *testing.T) {
	w, _, s := legCluster(t, 2)
	v, err := s.Create(w.ctx, replicas("v", 2))
	check.OK(t, err)
	for range 3 {
		check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-1"))))
		check.OK(t, s.Release(w.ctx, v.ID, "node-1"))
	}
	legs := w.whole("v").Spec.Legs
	check.OK(t, w.Delete(w.ctx, w.whole("v")))
	find := func() ([]client.Object, string) {
		t.Helper()
		objects, doubts, err := lost.Find(w.ctx, w, lost.Options{Driver: "block.csi.ashlar.dev", Class: "c", AccessMode: "ReadWriteOnce", Namespace: "nowhere"})
		check.OK(t, err)
		return objects, strings.Join(doubts, "\n")
	}
	if objects, doubts := find(); len(objects) > 0 || !strings.Contains(doubts, v.ID.Key) || !strings.Contains(doubts, legs[1]+" on node ") {
		t.Errorf("lost are %+v; doubts: %q", objects, doubts)
	}
	r := cluster.ReplicatedNamed(v.ID.Key)
	r.Spec = v1alpha1.ReplicatedVolumeSpec{Name: "v", Pool: v.ID.Pool, Pools: v.ID.Pool, Replicas: 2, ReplaceAfter: 600, Size: v.Size, Legs: legs, Numbered: 2, Claims: 1000000}
	check.OK(t, w.Create(w.ctx, r))
	check.OK(t, w.Status().Patch(w.ctx, r, client.RawPatch(types.MergePatchType, []byte(`{"status":{"made":"2026-01-01T00:00:00.000000Z","legs":[{"name":"`+legs[0]+`","current":true},{"name":"`+legs[1]+`"}]}}`))))
	w.eventually("it can be claimed", func() bool { return second(s.Claim(w.ctx, v.ID, on("node-2"))) == nil })
	if claims := w.claims("v"); !slices.Equal(claims, []string{"node-2 1000001", "node-2 1000001"}) {
		t.Errorf("its legs are claimed for %q", claims)
	}
	if objects, doubts := find(); len(objects) != 1 || doubts != "" {
		t.Errorf("lost are %+v; doubts: %q", objects, doubts)
	}
	check.OK(t, s.Release(w.ctx, v.ID, "node-2"))
	check.OK(t, s.Delete(w.ctx, v.ID))
}
