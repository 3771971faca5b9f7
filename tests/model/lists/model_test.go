// Package lists explores what the numbers of lists of current legs are for (docs/replication.md, "Restored objects"): the object of a volume with several legs is put back to what it was at any moment, more than once,
// while the volume is used and while it is not. It runs no code of the driver. What else fails, and what is copied, is in tests/model/replication.
//
// There is: the object, and two backups of it; two or three legs, with their records, and how much of what was written each has; and a user with a mirror, and a driver that may start anew.
// It is wrong if a leg is used that lacks what was acknowledged, though a leg that answers was told of a later list; and if there is a state from which, though nothing fails any more, neither all legs can be current again nor the legs are refused.
package lists

import (
	"flag"
	"reflect"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/tests/model/explore"
)

var (
	large  = flag.Bool("model.large", false, "explore with more that fails")
	states = flag.Int("model.states", 10_000_000, "the most states of a case to look at")
)

// rules are the guards. Without any of them something is lost, which TestEachRule shows.
type rules struct {
	Number  bool // a leg that knows of a later list tells that the object is of before
	Told    bool // a leg leaves the mirror after those that stay were told of the list without it
	Renews  bool // and of no other one that is due, and was perhaps written: else the list gets another number first
	Learns  bool // a leg that joins is told of the last list before it is in the mirror
	Burns   bool // a number that was announced to a leg is given to no other list of it
	Asks    bool // legs that are not on the list are asked, too
	Last    bool // and all those of a list that know of none after it with one more say that no other leg can be current
	Forgets bool // who has written a list asks what the legs know until all are told
	Right   bool // who uses the volume writes the list anew into an object that was put back, also to one of the same number
	Recall  bool // also if its driver has started anew, and the object names none of its legs
}

// model is a system of some legs.
type model struct {
	rules
	legs   int
	budget budget
}

type budget struct{ writes, fails, joins, starts, ends, saves, restores int8 }

const lacks = "a leg is used that lacks what was acknowledged"

func (m *model) explore() explore.Result {
	return explore.All(explore.System[state]{Start: m.start(), Steps: m.steps, Wrong: func(s state) string {
		if s.wrong {
			return lacks
		}
		return ""
	}, Done: m.done}, *states)
}

func of(legs int, b budget, without string) *model {
	m := &model{legs: legs, budget: b}
	v := reflect.ValueOf(&m.rules).Elem()
	for i := range v.NumField() {
		v.Field(i).SetBool(v.Type().Field(i).Name != without)
	}
	return m
}

var cases = []struct {
	legs   int
	budget budget
	large  bool
}{
	{2, budget{writes: 1, fails: 1, joins: 1, starts: 1, ends: 2, saves: 2, restores: 2}, false},
	{2, budget{writes: 2, fails: 2, joins: 2, starts: 1, ends: 2, saves: 2, restores: 3}, true},
	{3, budget{writes: 1, fails: 1, joins: 0, starts: 0, ends: 2, saves: 1, restores: 2}, false},
	{3, budget{writes: 1, fails: 2, joins: 1, starts: 1, ends: 2, saves: 1, restores: 2}, true},
}

func TestLists(t *testing.T) {
	for _, c := range cases {
		if c.large && !*large {
			continue
		}
		r := of(c.legs, c.budget, "").explore()
		t.Logf("%d legs, %+v: %d states, %d steps, %d ends", c.legs, c.budget, r.States, r.Steps, r.Done)
		r.Check(t)
	}
}

// TestEachRule shows that the model finds what is wrong.
func TestEachRule(t *testing.T) {
	for i, kind := 0, reflect.TypeFor[rules](); i < kind.NumField(); i++ {
		name := kind.Field(i).Name
		t.Run(name, func(t *testing.T) {
			found := ""
			for _, c := range cases {
				if found = of(c.legs, c.budget, name).explore().Wrong; found != "" {
					break
				}
			}
			if found == "" {
				t.Fatal("no case shows what this is for")
			}
			first, _, _ := strings.Cut(found, "\n  in the end")
			t.Log(first)
		})
	}
}
