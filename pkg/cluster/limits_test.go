package cluster_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// parameters writes which mutable parameters a volume is to have, and which are in force, into its object.
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

// TestLimitsAfterStart: a driver that starts sets the limits of the volumes of other nodes that are used on its node, once, as their objects have them:
// not while a change of them is under way, or a call holds the volume, and not after the home has told the node itself, or after the claim has ended.
func TestLimitsAfterStart(t *testing.T) {
	w, a, b, s, v, _ := reached(t, spec("claimed"))
	limits := map[string]string{"readIOPS": "100"}
	made := map[string]volume.ID{"claimed": v.ID}
	for _, name := range []string{"read", "free", "changing", "refused", "busy", "told", "ended", "unlimited", "unclaimed"} {
		v, err := s.Create(w.ctx, anyNode(name, a.name))
		check.OK(t, err)
		made[name] = v.ID
	}
	check.OK(t, second(s.Claim(w.ctx, made["read"], manyOn(b.name)))) // first, as the node will have as many as it can have
	for name, id := range made {
		if name != "read" && name != "unclaimed" {
			w.claimFor(id, b.name)
		}
	}
	a.stop() // otherwise its agent reports that this machine cannot keep the limits
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
	unlock := check.Locked(t, b.locks, keylock.Volume(made["busy"].Key))
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
	set("claimed", "refused")
	w.eventually("those that many read are changed", func() bool { return slices.Equal(b.uses.others.modified(made["read"]), []string{fmt.Sprint(limits)}) })
	unlock()
	set("busy")
	w.parameters("changing", limits, limits)
	set("changing")

	w.again("its home says what they are", func(ctx context.Context) error {
		return a.agent.Consumers().Modified(ctx, made["told"], volume.Grant{Generation: 1, Node: b.name}, map[string]string{"readAheadKiB": "64"})
	})
	w.parameters("told", limits, limits)
	w.claimFor(made["ended"], "")
	w.parameters("ended", limits, limits)
	w.parameters("claimed", nil, nil) // a later change, of which the home tells the node itself
	w.parameters("claimed", limits, limits)
	set()
}

// TestReadersModified: a change of a volume's parameters reaches all of several readers once, when the object says that it is in force; also a reader
// where a call holds the volume, after that. It does not reach a reader whose claim has ended.
func TestReadersModified(t *testing.T) {
	w, a, b, s, v, _ := reached(t, spec("v"))
	c, gone := w.begin(&machine{name: "node-3", ported: true, network: a.network}), w.begin(&machine{name: "node-4", ported: true, network: a.network})
	w.pooled(s, c)
	w.pooled(s, gone)
	for _, m := range []*machine{b, c, gone} {
		check.OK(t, second(s.Claim(w.ctx, v.ID, manyOn(m.name))))
		w.eventually(m.name+" knows of its claim", func() bool { return m.agent.Elsewhere(func(blockdev.Ref) bool { return false }).Has(v.ID) })
	}
	check.OK(t, s.Release(w.ctx, v.ID, gone.name))
	w.eventually(gone.name+" knows of its end", func() bool { return !gone.agent.Elsewhere(func(blockdev.Ref) bool { return false }).Has(v.ID) })
	unlock := check.Locked(t, c.locks, keylock.Volume(v.ID.Key))
	check.OK(t, s.Modify(w.ctx, v.ID, map[string]string{"readAheadKiB": "64"}))
	want := []string{"map[readAheadKiB:64]"}
	w.eventually("a reader has it", func() bool { return slices.Equal(b.uses.others.modified(v.ID), want) })
	if early := c.uses.others.modified(v.ID); len(early) > 0 {
		t.Errorf("changed while a call has it: %v", early)
	}
	unlock()
	w.eventually("the other has it too", func() bool { return slices.Equal(c.uses.others.modified(v.ID), want) })
	check.OK(t, s.Modify(w.ctx, v.ID, map[string]string{"readAheadKiB": "128"}))
	want = append(want, "map[readAheadKiB:128]")
	for _, m := range []*machine{b, c} {
		w.touched("v")
		w.eventually(m.name+" has the next", func() bool { return slices.Equal(m.uses.others.modified(v.ID), want) })
	}
	if late := gone.uses.others.modified(v.ID); len(late) > 0 {
		t.Errorf("changed where nobody reads it: %v", late)
	}
	check.OK(t, s.Release(w.ctx, v.ID, ""))
	check.OK(t, s.Delete(w.ctx, v.ID))
}
