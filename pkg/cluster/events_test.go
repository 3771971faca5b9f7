package cluster_test

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/internal/runbook"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/events"
	"github.com/ashlar-csi/ashlar/pkg/cluster/store"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// eventsOn returns the events of a reason (empty: all) that kubectl describe shows for an object, by the fields that it asks for.
func (w *environment) eventsOn(o client.Object, reason string) []corev1.Event {
	w.Helper()
	kind, err := w.GroupVersionKindFor(o)
	check.OK(w, err)
	check.OK(w, client.IgnoreNotFound(w.Get(w.ctx, client.ObjectKeyFromObject(o), o)))
	fields := client.MatchingFields{"involvedObject.name": o.GetName(), "involvedObject.kind": kind.Kind, "involvedObject.uid": string(o.GetUID())}
	if o.GetNamespace() != "" {
		fields["involvedObject.namespace"] = o.GetNamespace()
	}
	var list corev1.EventList
	check.OK(w, w.List(w.ctx, &list, fields, client.InNamespace(o.GetNamespace())))
	return slices.DeleteFunc(list.Items, func(e corev1.Event) bool { return reason != "" && e.Reason != reason })
}

// told waits until there is an event with a reason on each of some objects. It shows that there is only one, which is as the table says, and that a
// warning ends with the address of its runbook.
func (w *environment) told(reason, says string, on ...client.Object) {
	w.Helper()
	for _, o := range on {
		var all []corev1.Event
		w.eventually(fmt.Sprintf("%s on %T %s", reason, o, o.GetName()), func() bool { all = w.eventsOn(o, reason); return len(all) > 0 })
		e := all[0]
		if len(all) != 1 {
			w.Errorf("%d events %s on %T %s: %+v", len(all), reason, o, o.GetName(), all)
		}
		at := slices.IndexFunc(events.Table, func(one events.Entry) bool { return one.Reason == reason })
		if at < 0 || events.Table[at].Type != e.Type || !slices.Contains(events.Table[at].On, e.InvolvedObject.Kind) {
			w.Errorf("the table has no %s event %s on a %s", e.Type, reason, e.InvolvedObject.Kind)
		}
		if e.Type == corev1.EventTypeWarning && !strings.HasSuffix(e.Message, ". See "+runbook.URL(reason)) || !strings.Contains(e.Message, says) || len(e.Message) > 1024 {
			w.Errorf("%s on %T says %q, and should say %q and lead on", reason, o, e.Message, says)
		}
		if e.InvolvedObject.ResourceVersion != "" || e.ReportingController != cluster.DefaultDriver {
			w.Errorf("%+v of %s", e.InvolvedObject, e.ReportingController)
		}
	}
}

// claimed creates a claim, a volume for it, and the PersistentVolume, bound to each other, as external-provisioner and Kubernetes do.
func (w *environment) claimed(s *store.Store, name string) (volume.Volume, *corev1.PersistentVolumeClaim, *corev1.PersistentVolume) {
	w.Helper()
	claim := w.claim(name)
	one := w.specOf(claim)
	v, err := s.Create(w.ctx, one)
	check.OK(w, err)
	pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: one.Name}, Spec: corev1.PersistentVolumeSpec{
		Capacity: claim.Spec.Resources.Requests, AccessModes: claim.Spec.AccessModes,
		ClaimRef:               &corev1.ObjectReference{Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID},
		PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: cluster.DefaultDriver, VolumeHandle: v.ID.String()}}}}
	check.OK(w, w.Create(w.ctx, pv))
	pv.Status.Phase = corev1.VolumeBound
	check.OK(w, w.Status().Update(w.ctx, pv))
	claim.Spec.VolumeName = pv.Name
	check.OK(w, w.Update(w.ctx, claim))
	return v, claim, pv
}

// claim creates a PersistentVolumeClaim that is not bound.
func (w *environment) claim(name string) *corev1.PersistentVolumeClaim {
	w.Helper()
	claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Spec: corev1.PersistentVolumeClaimSpec{
		AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
		Resources:   corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Mi")}}}}
	check.OK(w, w.Create(w.ctx, claim))
	w.Cleanup(func() {
		check.OK(w, w.Get(w.ctx, client.ObjectKeyFromObject(claim), claim))
		claim.Finalizers = nil
		check.OK(w, w.Update(w.ctx, claim))
		check.OK(w, client.IgnoreNotFound(w.Delete(w.ctx, claim)))
	})
	return claim
}

// specOf returns what external-provisioner asks for a claim.
func (w *environment) specOf(claim *corev1.PersistentVolumeClaim) volume.Spec {
	one := spec("pvc-" + string(claim.UID))
	one.For = volume.Requester{Namespace: claim.Namespace, Name: claim.Name, PersistentVolume: one.Name}
	return one
}

func ref(v volume.Volume) blockdev.Ref { return blockdev.Ref{Kind: blockdev.Volume, Key: v.ID.Key} }

// TestEventsOfVolumes: a problem of a volume causes one event on it, on its PersistentVolume and on its claim, however many controllers look at it how
// often. So does its end; and if the problem comes back, there is a new event.
func TestEventsOfVolumes(t *testing.T) {
	w := newEnvironment(t)
	m := w.machine(nodeName)
	s, stopFirst := w.store()
	_, stopSecond := w.store()
	w.pooled(s, m)
	v, claim, pv := w.claimed(s, "data")
	other, otherClaim, otherPV := w.claimed(s, "other")
	object := cluster.VolumeNamed(v.ID.Key)
	bad := blockdev.Problem{Severity: blockdev.Degraded, Reason: "FilesystemErrors", Message: "the ext4 filesystem has recorded 3 errors; check it." + strings.Repeat(" ü", 1000)}
	m.disks[0].Ail(ref(v), bad)
	w.touch(w.object(v.Name))
	w.told("FilesystemErrors", "volume "+v.ID.String()+" on node "+nodeName+": the ext4 filesystem has recorded 3 errors; check it", object, pv, claim)

	for i := range 4 {
		bad.Message = fmt.Sprint("the ext4 filesystem has recorded ", i+4, " errors")
		m.disks[0].Ail(ref(v), bad)
		w.touch(w.object(v.Name))
		w.eventually("it is looked at", func() bool { return w.object(v.Name).Status.Health[0].Message == bad.Message })
	}
	for range 2 {
		m.stop()
		stopFirst()
		stopSecond()
		w.start(m)
		_, stopFirst = w.store()
		_, stopSecond = w.store()
		w.touch(w.object(v.Name))
	}
	// Events are written in order: after that of the other volume, none of the first one is left to be written.
	m.disks[0].Ail(ref(other), bad)
	w.touch(w.object(other.Name))
	w.told("FilesystemErrors", "recorded 7 errors", cluster.VolumeNamed(other.ID.Key), otherPV, otherClaim)
	w.told("FilesystemErrors", "recorded 3 errors", object, pv, claim)

	worse := blockdev.Problem{Severity: blockdev.Inaccessible, Reason: "FilesystemReadOnly", Message: "it is read-only"}
	m.disks[0].Ail(ref(v), bad, worse)
	w.touch(w.object(v.Name))
	w.told("FilesystemReadOnly", "it is read-only", object, pv, claim)
	m.disks[0].Ail(ref(v))
	w.touch(w.object(v.Name))
	w.told(events.Recovered, "what was: FilesystemReadOnly", object, pv, claim)
	time.Sleep(time.Second) // the beginning of a problem is known in whole seconds
	m.disks[0].Ail(ref(v), bad)
	w.touch(w.object(v.Name))
	w.eventually("it is said again", func() bool { return len(w.eventsOn(claim, "FilesystemErrors")) == 2 })

	check.OK(t, m.disks[0].Open("default", nil).Delete(w.ctx, ref(v)))
	w.touch(w.object(v.Name))
	w.told("VolumeMissing", "does not have this volume any more", object, pv, claim)
	if all := w.eventsOn(otherClaim, ""); len(all) != 1 {
		t.Errorf("on another claim: %+v", all)
	}
}

// TestEventsByHand: the PersistentVolume of a volume was written by hand, and is bound to another claim than the one that the volume was made for. The
// events are on these two.
func TestEventsByHand(t *testing.T) {
	w, m, s := newCluster(t)
	v, claim, pv := w.claimed(s, "data")
	check.OK(t, w.Get(w.ctx, client.ObjectKeyFromObject(pv), pv))
	pv.Finalizers = nil
	check.OK(t, w.Update(w.ctx, pv))
	check.OK(t, client.IgnoreNotFound(w.Delete(w.ctx, pv)))
	now := w.claim("now")
	byHand := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "by-hand"}, Spec: pv.Spec}
	byHand.Spec.ClaimRef = &corev1.ObjectReference{Namespace: "default", Name: "now", UID: now.UID}
	check.OK(t, w.Create(w.ctx, byHand))
	byHand.Status.Phase = corev1.VolumeBound
	check.OK(t, w.Status().Update(w.ctx, byHand))
	m.disks[0].Ail(ref(v), blockdev.Problem{Severity: blockdev.DataLoss, Reason: "ImageMissing", Message: "it is gone"})
	w.touch(w.object(v.Name))
	w.told("ImageMissing", "it is gone", cluster.VolumeNamed(v.ID.Key), byHand, now)
	if all := w.eventsOn(claim, ""); len(all) > 0 {
		t.Errorf("on a claim that is not bound to it: %+v", all)
	}
}

// TestEventsByHandBeside: of several PersistentVolumes of a volume, the events are on the one that is bound, also if the volume was made for another one,
// and whatever their order in a list.
func TestEventsByHandBeside(t *testing.T) {
	w, m, s := newCluster(t)
	v, claim, pv := w.claimed(s, "data")
	add := func(name string, phase corev1.PersistentVolumePhase, claim *corev1.PersistentVolumeClaim) *corev1.PersistentVolume {
		one := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: pv.Spec}
		one.Spec.ClaimRef = &corev1.ObjectReference{Namespace: "default", Name: claim.Name, UID: claim.UID}
		check.OK(t, w.Create(w.ctx, one))
		one.Status.Phase = phase
		check.OK(t, w.Status().Update(w.ctx, one))
		return one
	}
	check.OK(t, w.Get(w.ctx, client.ObjectKeyFromObject(pv), pv))
	pv.Status.Phase = corev1.VolumeReleased // its claim was deleted, and it was retained
	check.OK(t, w.Status().Update(w.ctx, pv))
	now := w.claim("now")
	byHand := add("by-hand", corev1.VolumeBound, now)
	add("zz-before", corev1.VolumeReleased, claim)
	m.disks[0].Ail(ref(v), blockdev.Problem{Severity: blockdev.DataLoss, Reason: "ImageMissing", Message: "it is gone"})
	w.touch(w.object(v.Name))
	w.told("ImageMissing", "it is gone", cluster.VolumeNamed(v.ID.Key), byHand, now)
	if all := w.eventsOn(claim, ""); len(all) > 0 {
		t.Errorf("on a claim that is not bound to it: %+v", all)
	}
}

// TestEventsOfPools: a problem of a pool causes an event on it and on its node.
func TestEventsOfPools(t *testing.T) {
	w, m, s := newCluster(t)
	pool, node := &v1alpha1.Pool{ObjectMeta: metav1.ObjectMeta{Name: overview.PoolName(nodeName, "default")}}, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}}
	for i := range 3 {
		m.disks[0].Ail(blockdev.Ref{}, blockdev.Problem{Severity: blockdev.Degraded, Reason: "PoolNearlyFull", Message: fmt.Sprint(9-i, " bytes are left; make room")})
		m.agent.Changed()
		w.told("PoolNearlyFull", "9 bytes are left; make room", pool, node)
		w.eventually("it is looked at", func() bool {
			check.OK(t, w.Get(w.ctx, client.ObjectKeyFromObject(pool), pool))
			return strings.HasPrefix(pool.Status.Health[0].Message, fmt.Sprint(9-i))
		})
	}
	m.disks[0].Ail(blockdev.Ref{})
	m.agent.Changed()
	w.told(events.Recovered, "what was: PoolNearlyFull", pool, node)

	v, err := s.Create(w.ctx, spec("v"))
	check.OK(t, err)
	check.OK(t, w.Delete(w.ctx, w.object("v")))
	w.told(events.Strays, v.ID.String(), pool, node)
	w.adopt("default", "all")
	w.eventually("that it is accounted for is said too", func() bool {
		return len(w.eventsOn(node, events.Recovered)) == 2 && len(w.eventsOn(pool, events.Recovered)) == 2
	})
}

// TestEventsOfNodes: events on a volume tell that it waits for its node, and why; those on a node that its agent is silent.
func TestEventsOfNodes(t *testing.T) {
	w := newEnvironment(t)
	m := w.beating(nodeName)
	s := w.listening(silentAfter)
	w.pooled(s, m)
	used, claim, _ := w.claimed(s, "used")
	check.OK(t, second(s.Claim(w.ctx, used.ID, volume.Claim{Node: nodeName, Mode: "m"})))
	idle, idleClaim, idlePV := w.claimed(s, "idle")
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}}
	w.node(nodeName, false)
	w.told(events.NodeNotReady, "waits for node "+nodeName, cluster.VolumeNamed(used.ID.Key), claim)
	w.node(nodeName, true)
	w.told(events.NodeReady, "is ready again", cluster.VolumeNamed(used.ID.Key), claim)

	m.stop()
	w.told(events.AgentSilent, "nothing is heard of the driver on node "+nodeName, node)
	fails(t, second(s.Expand(w.ctx, used.ID, volume.Range{Required: 2 * mib})), errdefs.ErrUnavailable) // without a write to the object
	v := w.object(idle.Name)
	before := v.DeepCopy()
	v.Spec.Size = 2 * mib
	check.OK(t, w.Patch(w.ctx, v, client.MergeFrom(before)))
	w.told(events.AgentSilent, "waits for node "+nodeName, v, idleClaim)
	w.start(m)
	w.told(events.AgentHeard, "is heard again", node)
	if all := w.eventsOn(claim, events.AgentSilent); len(all) > 0 {
		t.Errorf("a volume that is in use does not wait for the agent: %+v", all)
	}

	m.stop()
	check.OK(t, w.Delete(w.ctx, node))
	w.told(events.NodeGone, "is gone for good", cluster.VolumeNamed(idle.ID.Key), idleClaim, idlePV)
}

// TestEventsOfRefusals: what a node refuses causes one event, however often it is asked for, and although the object is deleted each time.
func TestEventsOfRefusals(t *testing.T) {
	var refuse atomic.Bool
	w := newEnvironment(t)
	m := w.machineWith(nodeName, func(operation string, ref blockdev.Ref) error {
		if refuse.Load() && (operation == "Create" || operation == "Expand") {
			return fmt.Errorf("%w: writers would have to wait for too long", errdefs.ErrPrecondition)
		}
		return nil
	})
	s, _ := w.store()
	w.pooled(s, m)
	v, claim, pv := w.claimed(s, "data")
	waiting := w.claim("copy")
	clone := w.specOf(waiting)
	clone.Source = v.ID
	refuse.Store(true)
	for range 3 {
		fails(t, second(s.Create(w.ctx, clone)), errdefs.ErrPrecondition)
		fails(t, second(s.CreateSnapshot(w.ctx, "s", v.ID)), errdefs.ErrPrecondition)
		fails(t, second(s.Expand(w.ctx, v.ID, volume.Range{Required: 2 * mib})), errdefs.ErrPrecondition)
	}
	object := cluster.VolumeNamed(v.ID.Key)
	w.told(events.CopyRefused, "writers would have to wait for too long", waiting, object, claim)
	w.told(events.GrowthRefused, "cannot grow from 1Mi to 2Mi", object, pv, claim)
	refuse.Store(false)
	check.OK(t, second(s.Create(w.ctx, clone)))
}

// TestEventsLast: the event of a state that lasts is renewed as a series, and is written anew when the API server has deleted it.
func TestEventsLast(t *testing.T) {
	w := newEnvironment(t)
	m := w.machine(nodeName)
	for range 2 {
		s, err := store.New(wrapped(apitest.Get(w).Config("controller")), store.Options{GoneGrace: grace, AbandonGrace: time.Hour, Driver: cluster.DefaultDriver, EventsAgain: time.Second})
		check.OK(t, err)
		w.run(s.Run)
		w.eventually("the store is ready", func() bool { return s.Ready(w.ctx) == nil })
		w.pooled(s, m)
	}
	pool := &v1alpha1.Pool{ObjectMeta: metav1.ObjectMeta{Name: overview.PoolName(nodeName, "default")}}
	m.disks[0].Ail(blockdev.Ref{}, blockdev.Problem{Severity: blockdev.Degraded, Reason: "PoolNearlyFull", Message: "make room"})
	m.agent.Changed()
	count := func() int32 {
		all := w.eventsOn(pool, "PoolNearlyFull")
		if len(all) > 1 {
			t.Fatalf("%d events", len(all))
		}
		if len(all) == 0 || all[0].Series == nil {
			return 0
		}
		return all[0].Series.Count
	}
	w.eventually("it is a series", func() bool { return count() >= 4 })
	check.OK(t, w.DeleteAllOf(w.ctx, &corev1.Event{}, client.InNamespace("default")))
	w.eventually("it is there again", func() bool { return count() >= 4 })
	m.disks[0].Ail(blockdev.Ref{})
	m.agent.Changed()
	w.told(events.Recovered, "", pool)
	w.eventually("it ends, as it is over", func() bool {
		last := count()
		time.Sleep(2 * time.Second)
		return count() == last
	})
}

// TestEventsRefused: if events must not be written, or the API server does not answer such requests, nothing else is held up. Events of what still lasts
// are written when that is possible.
func TestEventsRefused(t *testing.T) {
	w := newEnvironment(t)
	var cut atomic.Bool
	wrap(t, func(c *rest.Config) {
		c.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return roundTrip(func(r *http.Request) (*http.Response, error) {
				if cut.Load() && strings.HasSuffix(r.URL.Path, "/events") {
					<-r.Context().Done()
					return nil, r.Context().Err()
				}
				return next.RoundTrip(r)
			})
		})
	})
	allow := func(rules []rbacv1.PolicyRule) {
		check.OK(t, w.Update(context.WithoutCancel(w.ctx), &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "controller"}, Rules: rules}))
	}
	m := w.machine(nodeName)
	s, err := store.New(wrapped(apitest.Get(w).Config("controller")), store.Options{GoneGrace: grace, AbandonGrace: time.Hour, Driver: cluster.DefaultDriver, EventsAgain: time.Second})
	check.OK(t, err)
	stop := w.run(s.Run)
	w.eventually("the store is ready", func() bool { return s.Ready(w.ctx) == nil })
	w.pooled(s, m)
	for what, way := range map[string]struct{ off, on func() }{
		"refused": {func() {
			allow(slices.DeleteFunc(slices.Clone(roles["controller"]), func(r rbacv1.PolicyRule) bool { return r.Resources[0] == "events" }))
			t.Cleanup(func() { allow(roles["controller"]) })
			its, err := client.New(apitest.Get(t).Config("controller"), client.Options{Scheme: w.Scheme()})
			check.OK(t, err)
			w.eventually("the rights are in force", func() bool {
				one := &corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "none"}, InvolvedObject: corev1.ObjectReference{Namespace: "default"}}
				return apierrors.IsForbidden(its.Create(w.ctx, one, client.DryRunAll))
			})
		}, func() { allow(roles["controller"]) }},
		"no answer": {func() { cut.Store(true) }, func() { cut.Store(false) }},
	} {
		way.off()
		began := time.Now()
		v, claim, _ := w.claimed(s, strings.ReplaceAll(what, " ", "-"))
		m.disks[0].Ail(ref(v), blockdev.Problem{Severity: blockdev.Degraded, Reason: "FilesystemErrors", Message: "errors"})
		w.touch(w.object(v.Name))
		w.eventually("its health is written down", func() bool { return len(w.object(v.Name).Status.Health) == 1 })
		check.OK(t, second(s.Expand(w.ctx, v.ID, volume.Range{Required: 2 * mib})))
		snapshot, err := s.CreateSnapshot(w.ctx, "s "+what, v.ID)
		check.OK(t, err)
		check.OK(t, s.DeleteSnapshot(w.ctx, snapshot.ID))
		if took := time.Since(began); took > time.Minute {
			t.Errorf("%s: it took %s", what, took)
		}
		if all := w.eventsOn(claim, ""); len(all) > 0 {
			t.Errorf("%s: %+v", what, all)
		}
		way.on()
		w.told("FilesystemErrors", "errors", cluster.VolumeNamed(v.ID.Key), claim)
		check.OK(t, s.Delete(w.ctx, v.ID))
	}
	cut.Store(true)
	m.disks[0].Ail(blockdev.Ref{}, blockdev.Problem{Severity: blockdev.Degraded, Reason: "PoolNearlyFull", Message: "make room"})
	m.agent.Changed()
	time.Sleep(2 * time.Second)
	began := time.Now()
	stop()
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("the controller took %s to end", took)
	}
}

// TestRoles: the rights of the controller in these tests are those of the manifests.
func TestRoles(t *testing.T) {
	files := map[string][]string{"controller": {"rbac-controller.yaml", "startup-taint/rights.yaml"}}
	for user, granted := range roles {
		var manifests []rbacv1.PolicyRule
		for _, file := range files[user] {
			text, err := os.ReadFile("../../deploy/kubernetes/" + file)
			check.OK(t, err)
			for document := range strings.SplitSeq(string(text), "\n---\n") {
				var one rbacv1.ClusterRole
				check.OK(t, yaml.Unmarshal([]byte(document), &one))
				if one.Kind == "ClusterRole" { // the first one is the driver's
					manifests = append(manifests, one.Rules...)
					break
				}
			}
		}
		// Leases have a namespace: the manifests have a Role for them, not the ClusterRole.
		want := slices.DeleteFunc(slices.Clone(granted), func(r rbacv1.PolicyRule) bool { return slices.Equal(r.Resources, []string{"leases"}) })
		normal := func(rules []rbacv1.PolicyRule) []string {
			var lines []string
			for _, r := range rules {
				for _, resource := range r.Resources {
					lines = append(lines, fmt.Sprint(r.APIGroups, resource, r.Verbs))
				}
			}
			slices.Sort(lines)
			return lines
		}
		if have, want := normal(manifests), normal(want); !slices.Equal(have, want) {
			t.Errorf("%s: the manifests grant\n%s\nand the tests\n%s", user, strings.Join(have, "\n"), strings.Join(want, "\n"))
		}
	}
}
