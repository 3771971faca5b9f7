package replicator

import (
	"context"
	"slices"
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
		down    = assessment{current: true, down: true}
		lost    = assessment{state: bad}
		ahead   = assessment{ahead: true}
		listed  = assessment{state: bad, current: true}            // lost, and still current by the object
		unfit   = assessment{state: bad, unfit: true, fresh: true} // it can never be made equal
		stale   = assessment{state: bad, unfit: true}              // the same, and it was current before
		moves   = assessment{state: moving, current: true}
		moved   = assessment{state: bad, current: true} // its successor is there
	)
	const used, unused, died, next, closed = "used", "never used", "its user has died", "its user has died, and there is a next one", "closed"
	for what, c := range map[string]struct {
		replicas int
		use      string
		legs     []assessment
		at       int // of the leg that goes; -1: none
		kind     removal
	}{
		"as many as it is to have":               {2, used, []assessment{home, current}, -1, stays},
		"fewer":                                  {3, used, []assessment{home, current}, -1, stays},
		"one is lost, its successor joins":       {2, used, []assessment{home, lost, joining}, -1, stays},
		"one is lost, its successor is current":  {2, used, []assessment{home, lost, current}, 1, takeOut},
		"lost unnoticed, its successor is new":   {2, unused, []assessment{current, listed, joining}, -1, stays},
		"lost unnoticed, and not needed":         {1, unused, []assessment{current, listed}, 1, unlist},
		"all current, while it is used":          {2, used, []assessment{current, home, current}, 2, takeOut},
		"all current, and the first is away":     {1, used, []assessment{current, home}, 0, takeOut},
		"all current, and nobody uses it":        {1, unused, []assessment{current, current}, 1, unlist},
		"the node of the first is down":          {1, unused, []assessment{down, current}, 0, unlist},
		"the nodes of all are down":              {1, unused, []assessment{down, down}, -1, stays},
		"the nodes of too many are down":         {2, unused, []assessment{down, current, joining}, -1, stays},
		"that of the user is down":               {1, used, []assessment{{current: true, home: true, down: true}, current}, 0, takeOut},
		"one that is not current goes first":     {1, used, []assessment{current, joining, home}, 1, takeOut},
		"and of these one that is lost":          {2, used, []assessment{home, lost, joining, current}, 1, takeOut},
		"the only current one":                   {1, used, []assessment{joining, home, lost}, 2, takeOut},
		"none is current":                        {1, used, []assessment{joining, lost}, -1, stays},
		"one may have what the others lack":      {2, used, []assessment{home, ahead, current}, -1, stays},
		"a new one cannot be made equal":         {2, used, []assessment{home, unfit}, 1, takeOut},
		"nor its successor":                      {2, used, []assessment{home, stale, unfit}, 2, takeOut},
		"one of before cannot be made equal":     {2, used, []assessment{home, stale}, -1, stays},
		"the only current one is lost":           {1, unused, []assessment{listed, joining}, -1, stays},
		"one is where its successor is":          {2, used, []assessment{{current: true, beside: true}, current, {current: true, home: true, beside: true}}, 0, takeOut},
		"one is to move":                         {2, used, []assessment{home, moves}, -1, stays},
		"and its successor joins":                {2, used, []assessment{home, moved, joining}, -1, stays},
		"and its successor is current":           {2, used, []assessment{home, moved, current}, 1, takeOut},
		"both move, one successor joins":         {2, used, []assessment{moved, moves, joining}, -1, stays},
		"both move, one successor is current":    {2, used, []assessment{moved, moves, current}, 0, takeOut},
		"both move, the other cannot":            {2, used, []assessment{moves, moved, current}, 1, takeOut},
		"one is lost, one is to move":            {2, used, []assessment{lost, moves, current}, 0, takeOut},
		"the same, and its successor joins":      {2, used, []assessment{lost, moves, joining}, -1, stays},
		"one is to move, its successor is named": {2, used, []assessment{home, moves, {state: missing}}, -1, stays},
		"fewer are enough, and one is to move":   {1, used, []assessment{moves, current}, 0, takeOut},
		"its user has died":                      {1, died, []assessment{current, current}, -1, stays},
		"its user has died, and there is a next": {1, next, []assessment{current, current}, -1, stays},
		"its user has died, one lacks something": {1, died, []assessment{current, joining}, 1, takeOut},
		"its user has died, one is lost":         {1, died, []assessment{current, listed}, 1, unlist},
		"its user has closed it":                 {1, closed, []assessment{current, current}, 1, unlist},
	} {
		t.Run(what, func(t *testing.T) {
			r := &v1alpha1.ReplicatedVolume{Spec: v1alpha1.ReplicatedVolumeSpec{Replicas: c.replicas}}
			switch c.use {
			case used, next:
				r.Spec.Claim = &v1alpha1.Claim{Node: "n", Generation: 2}
			}
			r.Status.Opened = map[string]int64{used: 2, next: 1, died: 1, closed: 1}[c.use]
			r.Status.Closed = map[string]int64{closed: 1}[c.use]
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
		p := &Replicator{maker: working{true}, away: map[string]map[string]away{}, began: time.Now()}
		if due, replaced := p.dueLegs(t.Context(), r, map[string]*v1alpha1.Volume{"leg": v})["leg"]; replaced != c.want || replaced && time.Now().Before(due) {
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
			p := &Replicator{maker: working{true}, away: map[string]map[string]away{}, began: time.Now()}
			leg := &r.Status.Legs[0]
			leaves := func() {
				*leg = v1alpha1.Leg{Name: "leg", State: v1alpha1.LegWaiting, Since: new(metav1.NewTime(time.Now().Add(skew)))}
			}
			is := func(when string, want time.Duration) {
				t.Helper()
				if at, replaced := p.dueLegs(t.Context(), r, legs)["leg"]; !replaced || time.Until(at) != want {
					t.Errorf("a clock that is off by %s, %s: it is replaced: %v, in %s, want %s", skew, when, replaced, time.Until(at), want)
				}
			}
			p.dueLegs(t.Context(), r, legs)
			time.Sleep(3 * time.Hour)
			leaves()
			is("as it leaves", after)
			time.Sleep(4 * time.Minute)
			leg.State = v1alpha1.LegJoining
			if due := p.dueLegs(t.Context(), r, legs); len(due) > 0 {
				t.Errorf("while it joins it is replaced at %v", due)
			}
			time.Sleep(4 * time.Minute)
			leg.State = v1alpha1.LegWaiting
			is("as it could not join", 2*time.Minute)
			*leg = v1alpha1.Leg{Name: "leg", Current: true}
			p.dueLegs(t.Context(), r, legs)
			time.Sleep(time.Second)
			leaves()
			is("as it leaves again", after)

			p = &Replicator{maker: working{true}, away: map[string]map[string]away{}, began: time.Now()} // a start of the controller
			is("away before the controller began", after+min(skew, 0))
		})
	}
}

// working is a Maker that knows whether nodes work.
type working struct{ all bool }

func (w working) Works(context.Context, string) bool { return w.all }

func (working) Mirrors(context.Context) func(string) bool { return nil }

func (working) HasRoom(context.Context, *v1alpha1.ReplicatedVolume, string, *v1alpha1.Volume, *v1alpha1.Volume, []string) error {
	return nil
}

func (working) BeginLeg(context.Context, *v1alpha1.ReplicatedVolume, string, *v1alpha1.Volume, *v1alpha1.Volume, []string) error {
	return nil
}

// TestQueues: a leg that waits for its turn to be made equal, as legs of other volumes are first, or another one of its own, is not replaced meanwhile,
// unless its node is away. When its turn has come it has the whole time.
func TestQueues(t *testing.T) {
	const after = 10 * time.Minute
	for what, first := range map[string]v1alpha1.Leg{
		"of other volumes": {Name: "first", Current: true, State: v1alpha1.LegCurrent},
		"of its own":       {Name: "first", State: v1alpha1.LegJoining},
	} {
		synctest.Test(t, func(t *testing.T) {
			claimed := metav1.Now()
			state := v1alpha1.LegWaiting
			if first.Current {
				state = v1alpha1.LegQueued
			}
			r := &v1alpha1.ReplicatedVolume{Spec: v1alpha1.ReplicatedVolumeSpec{ReplaceAfter: int64(after / time.Second), Claim: &v1alpha1.Claim{Generation: 2, Since: &claimed}, Legs: []string{"first", "leg"}},
				Status: v1alpha1.ReplicatedVolumeStatus{Opened: 2, Legs: []v1alpha1.Leg{first, {Name: "leg", State: state, Since: &claimed}}}}
			legs := map[string]*v1alpha1.Volume{"first": {}, "leg": {}}
			p := &Replicator{maker: working{true}, away: map[string]map[string]away{}, began: time.Now()}
			is := func(when string, want time.Duration) {
				t.Helper()
				if at := p.dueLegs(t.Context(), r, legs)["leg"]; time.Until(at) != want {
					t.Errorf("%s first, %s: it is replaced in %s, want %s", what, when, time.Until(at), want)
				}
			}
			is("at first", after)
			time.Sleep(3 * time.Hour)
			is("after hours", after)
			p.maker = working{false}
			time.Sleep(4 * time.Minute)
			is("its node is away", 6*time.Minute)
			p.maker = working{true}
			is("its node is back", after)
			r.Status.Legs[0].State, r.Status.Legs[1].State = v1alpha1.LegCurrent, v1alpha1.LegWaiting
			time.Sleep(time.Minute)
			is("its turn has come", 9*time.Minute)
		})
	}
}

// TestVacancies: a leg that is lost is replaced before one that is to move, and does not wait for it.
func TestVacancies(t *testing.T) {
	legs := map[string]*v1alpha1.Volume{"a": {}, "b": {}, "c": {}}
	for what, c := range map[string]struct {
		states [3]state // of a, b and c
		want   []*v1alpha1.Volume
	}{
		"all are good":                         {[3]state{good, good, good}, nil},
		"one is lost":                          {[3]state{good, bad, good}, []*v1alpha1.Volume{nil}},
		"one is to move":                       {[3]state{good, moving, good}, []*v1alpha1.Volume{legs["b"]}},
		"two are":                              {[3]state{moving, good, moving}, []*v1alpha1.Volume{legs["a"], legs["c"]}},
		"one is to move, one is lost":          {[3]state{moving, good, bad}, []*v1alpha1.Volume{nil, legs["a"]}},
		"the same, and the next is to be made": {[3]state{moving, missing, bad}, []*v1alpha1.Volume{nil, legs["a"]}},
	} {
		r := &v1alpha1.ReplicatedVolume{Spec: v1alpha1.ReplicatedVolumeSpec{Replicas: 3}}
		var all []assessment
		for i, s := range c.states {
			all = append(all, assessment{name: string(rune('a' + i)), state: s})
		}
		if have := vacancies(r, all, legs); !slices.Equal(have, c.want) {
			t.Errorf("%s: %v, want %v", what, have, c.want)
		}
	}
}
