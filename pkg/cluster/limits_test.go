package cluster_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// parameters has the object of a volume wish for mutable parameters, and say which are in force.
func (w *environment) parameters(name string, wished, inForce map[string]string) {
	w.Helper()
	o := w.object(name)
	before := o.DeepCopy()
	o.Spec.Mutable = wished
	check.OK(w, w.Patch(w.ctx, o, client.MergeFrom(before)))
	before = o.DeepCopy()
	o.Status.Mutable = inForce
	check.OK(w, w.Status().Patch(w.ctx, o, client.MergeFrom(before)))
}

// TestLimitsAfterStart: a driver that starts sets the limits of the volumes of other nodes that are used there, once, as their objects have them: what is claimed there
// alone, and what it reads beside others; not before a change of them is through, nor while a call has the volume, and nothing after what the home itself said, or the
// claim's end.
func TestLimitsAfterStart(t *testing.T) {
	w, a, b, s, v, _ := reached(t, spec("claimed"))
	limits := map[string]string{"readIOPS": "100"}
	made := map[string]volume.ID{"claimed": v.ID}
	for _, name := range []string{"read", "free", "changing", "refused", "busy", "told", "ended", "unlimited", "unclaimed"} {
		v, err := s.Create(w.ctx, anyNode(name, a.name))
		check.OK(t, err)
		made[name] = v.ID
	}
	check.OK(t, s.Claim(w.ctx, made["read"], manyOn(b.name))) // before the node has as many as it can have
	for name, id := range made {
		if name != "read" && name != "unclaimed" {
			w.claimFor(id, b.name)
		}
	}
	a.stop() // its agent would say what this machine cannot keep
	b.stop()
	for name := range made {
		switch name {
		case "changing", "told", "ended":
			w.parameters(name, limits, nil)
		case "refused":
			w.parameters(name, map[string]string{"readIOPS": "7"}, limits)
			o := w.object(name)
			before := o.DeepCopy()
			o.Status.ObservedGeneration, o.Status.Failure = o.Generation, &v1alpha1.Failure{Reason: "Internal", Message: "m"}
			check.OK(t, w.Status().Patch(w.ctx, o, client.MergeFrom(before)))
		case "unlimited":
			w.parameters(name, map[string]string{"readIOPS": "max"}, map[string]string{"readIOPS": "max"})
		case "free":
		default:
			w.parameters(name, limits, limits)
		}
	}
	unlock, _ := b.locks.TryLock([]string{"volume/" + made["busy"].Key}, nil)
	w.start(b)
	var want []string
	set := func(names ...string) {
		t.Helper()
		for _, name := range names {
			want = append(want, fmt.Sprint(made[name].Key, " ", limits))
		}
		slices.Sort(want)
		w.eventually(fmt.Sprint("limits are set of ", names), func() bool { return len(b.uses.others.limited()) >= len(want) })
		time.Sleep(200 * time.Millisecond)
		if have := b.uses.others.limited(); !slices.Equal(have, want) {
			t.Errorf("limits were set of %v, want %v", have, want)
		}
	}
	set("claimed", "read", "refused")
	unlock()
	set("busy")
	w.parameters("changing", limits, limits)
	set("changing")

	check.OK(t, a.agent.Consumers().Modified(w.ctx, made["told"], volume.Grant{Generation: 1, Node: b.name}, map[string]string{"readAheadKiB": "64"}))
	w.parameters("told", limits, limits)
	w.claimFor(made["ended"], "")
	w.parameters("ended", limits, limits)
	w.parameters("claimed", nil, nil) // which its home has it told of
	w.parameters("claimed", limits, limits)
	set()
}
