package replicator

import (
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// TestExcess: which leg is taken out of a volume with more legs than it is to have: never one that is needed, and never the last current one.
func TestExcess(t *testing.T) {
	var (
		current = assessment{current: true}
		home    = assessment{current: true, home: true}
		joining = assessment{}
		lost    = assessment{state: bad}
		ahead   = assessment{ahead: true}
		listed  = assessment{state: bad, current: true} // lost, and still current by the object
	)
	const used, unused = true, false
	for what, c := range map[string]struct {
		replicas int
		used     bool
		legs     []assessment
		at       int // of the leg that goes; -1: none
		kind     removal
	}{
		"as many as it is to have":              {2, used, []assessment{home, current}, -1, stays},
		"fewer":                                 {3, used, []assessment{home, current}, -1, stays},
		"one is lost, its successor joins":      {2, used, []assessment{home, lost, joining}, -1, stays},
		"one is lost, its successor is current": {2, used, []assessment{home, lost, current}, 1, takeOut},
		"lost unnoticed, its successor is new":  {2, unused, []assessment{current, listed, joining}, -1, stays},
		"lost unnoticed, and not needed":        {1, unused, []assessment{current, listed}, 1, unlist},
		"all current, while it is used":         {2, used, []assessment{current, home, current}, 2, takeOut},
		"all current, and the first is away":    {1, used, []assessment{current, home}, 0, takeOut},
		"all current, and nobody uses it":       {1, unused, []assessment{current, current}, 1, unlist},
		"one that is not current goes first":    {1, used, []assessment{current, joining, home}, 1, takeOut},
		"and of these one that is lost":         {2, used, []assessment{home, lost, joining, current}, 1, takeOut},
		"the only current one":                  {1, used, []assessment{joining, home, lost}, 2, takeOut},
		"none is current":                       {1, used, []assessment{joining, lost}, -1, stays},
		"one may have what the others lack":     {2, used, []assessment{home, ahead, current}, -1, stays},
		"the only current one is lost":          {1, unused, []assessment{listed, joining}, -1, stays},
	} {
		t.Run(what, func(t *testing.T) {
			r := &v1alpha1.ReplicatedVolume{Spec: v1alpha1.ReplicatedVolumeSpec{Replicas: c.replicas}}
			if c.used {
				r.Spec.Claim = &v1alpha1.Claim{Node: "n"}
			}
			want := ""
			for i := range c.legs {
				c.legs[i].name = string(rune('a' + i))
				if i == c.at {
					want = c.legs[i].name
				}
			}
			if name, kind := surplusLeg(r, c.legs); name != want || kind != c.kind {
				t.Errorf("%q goes (%v), want %q (%v)", name, kind, want, c.kind)
			}
		})
	}
}

// TestReplaced: a leg that was not current for too long is replaced only while the volume has a mirror, by which another leg can become current. A volume
// that was in use when it got replicas may have no mirror until it is staged again.
func TestReplaced(t *testing.T) {
	before := metav1.NewTime(time.Now().Add(-time.Hour))
	for what, c := range map[string]struct {
		claim  *v1alpha1.Claim
		opened int64
		leg    *v1alpha1.Leg
		want   bool
	}{
		"opened":                 {&v1alpha1.Claim{Generation: 2, Since: &before}, 2, nil, true},
		"opened, and it waits":   {&v1alpha1.Claim{Generation: 2, Since: &before}, 2, &v1alpha1.Leg{Since: &before}, true},
		"it joins":               {&v1alpha1.Claim{Generation: 2, Since: &before}, 2, &v1alpha1.Leg{State: v1alpha1.LegJoining, Since: &before}, false},
		"it is ahead":            {&v1alpha1.Claim{Generation: 2, Since: &before}, 2, &v1alpha1.Leg{State: v1alpha1.LegAhead, Since: &before}, false},
		"it is current":          {&v1alpha1.Claim{Generation: 2, Since: &before}, 2, &v1alpha1.Leg{Current: true}, false},
		"claimed":                {&v1alpha1.Claim{Generation: 2, Since: &before}, 1, &v1alpha1.Leg{Since: &before}, false},
		"used, and never opened": {&v1alpha1.Claim{Generation: 2, Since: &before}, 0, nil, false},
		"not claimed":            {nil, 2, &v1alpha1.Leg{Since: &before}, false},
	} {
		r := &v1alpha1.ReplicatedVolume{Spec: v1alpha1.ReplicatedVolumeSpec{ReplaceAfter: 600, Claim: c.claim, Legs: []string{"leg"}}, Status: v1alpha1.ReplicatedVolumeStatus{Opened: c.opened}}
		if c.leg != nil {
			c.leg.Name = "leg"
			r.Status.Legs = []v1alpha1.Leg{*c.leg}
		}
		v := &v1alpha1.Volume{ObjectMeta: metav1.ObjectMeta{CreationTimestamp: before}}
		p := &Replicator{away: map[string]map[string]away{}, began: time.Now()}
		if due, replaced := p.dueLegs(r, map[string]*v1alpha1.Volume{"leg": v})["leg"]; replaced != c.want || replaced && time.Now().Before(due) {
			t.Errorf("%s: it is replaced: %v, at %v", what, replaced, due)
		}
	}
}

// TestReplacedByOwnClock: whatever the clock of the node that uses a volume says, a leg is replaced when this controller has seen it away for long enough. A
// try to join does not begin that anew, and a leg that is current for a moment does.
func TestReplacedByOwnClock(t *testing.T) {
	const after = 10 * time.Minute
	for _, skew := range []time.Duration{-time.Hour, time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			claimed := metav1.Now()
			r := &v1alpha1.ReplicatedVolume{Spec: v1alpha1.ReplicatedVolumeSpec{ReplaceAfter: int64(after / time.Second), Claim: &v1alpha1.Claim{Generation: 2, Since: &claimed}, Legs: []string{"leg"}},
				Status: v1alpha1.ReplicatedVolumeStatus{Opened: 2, Legs: []v1alpha1.Leg{{Name: "leg", Current: true}}}}
			legs := map[string]*v1alpha1.Volume{"leg": {ObjectMeta: metav1.ObjectMeta{CreationTimestamp: claimed}}}
			p := &Replicator{away: map[string]map[string]away{}, began: time.Now()}
			leg := &r.Status.Legs[0]
			leaves := func() {
				*leg = v1alpha1.Leg{Name: "leg", State: v1alpha1.LegWaiting, Since: new(metav1.NewTime(time.Now().Add(skew)))}
			}
			is := func(when string, want time.Duration) {
				t.Helper()
				if at, replaced := p.dueLegs(r, legs)["leg"]; !replaced || time.Until(at) != want {
					t.Errorf("a clock that is off by %s, %s: it is replaced: %v, in %s, want %s", skew, when, replaced, time.Until(at), want)
				}
			}
			p.dueLegs(r, legs)
			time.Sleep(3 * time.Hour)
			leaves()
			is("as it leaves", after)
			time.Sleep(4 * time.Minute)
			leg.State = v1alpha1.LegJoining
			if due := p.dueLegs(r, legs); len(due) > 0 {
				t.Errorf("while it joins it is replaced at %v", due)
			}
			time.Sleep(4 * time.Minute)
			leg.State = v1alpha1.LegWaiting
			is("as it could not join", 2*time.Minute)
			*leg = v1alpha1.Leg{Name: "leg", Current: true}
			p.dueLegs(r, legs)
			time.Sleep(time.Second)
			leaves()
			is("as it leaves again", after)

			p = &Replicator{away: map[string]map[string]away{}, began: time.Now()} // a start of the controller
			is("away before the controller began", after+min(skew, 0))
		})
	}
}
