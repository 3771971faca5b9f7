// Package replication explores what can happen to a volume with several legs (docs/replication.md): every order of every step of everybody who has a part in it,
// with what fails in between. It runs no code of the driver.
//
// There is: the volume's object; two or three legs, on nodes of their own, with what is in their caches and not flushed, their bitmaps and records; two consumers, on the node of
// a leg or elsewhere, each with a kernel (the mirror) and a driver; the controller; calls and writes of the object that are late, or lost.
// It fails: the power of legs and of consumers; the way to a leg, with a write that arrives later; and legs are restored from a backup.
// Claims are taken away and given to the other consumer while the first one goes on.
//
// It is wrong if the consumer that has the volume reads anything but what was acknowledged (after a loss of power of all it can choose from: what was flushed, or is later), if no leg is current, or if there
// is a state from which, though nothing fails any more, not all legs can be current again.
package replication

import (
	"flag"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/tests/model/explore"
)

var (
	large   = flag.Bool("model.large", false, "explore with more that fails")
	only    = flag.String("model.only", "", "explore one case only: legs, nodes of the two consumers, faults, writes, claims that end, backups")
	states  = flag.Int("model.states", 10_000_000, "the most states of a case to look at")
	without = flag.String("model.without", "", "rules to take away, with -model.only")
)

const (
	nothing = "no leg is current"
	reads   = "the user reads what is not the volume"
)

// of is a model of a case, as -model.only has it.
func of(t *testing.T, words string, without ...string) *model {
	m := &model{}
	for _, of := range []any{&m.rules, &m.belts} {
		v := reflect.ValueOf(of).Elem()
		for i := range v.NumField() {
			v.Field(i).SetBool(!slices.Contains(without, v.Type().Field(i).Name))
		}
	}
	b := &m.budget
	if _, err := fmt.Sscan(words, &m.legs, &m.at[0], &m.at[1], &b.faults, &b.writes, &b.claims, &b.backups); err != nil {
		t.Fatalf("case %q: %v", words, err)
	}
	return m
}

func (m *model) explore() explore.Result {
	return explore.All(explore.System[state]{Start: m.start(), Steps: m.steps, Wrong: m.wrong, Done: m.done}, *states)
}

// cases: legs; nodes of the two consumers (below the number of legs: that of a leg); and how many faults, writes, ends of claims and backups there are.
var (
	small = []string{
		"2 2 2  1 1 0 0", "2 0 1  1 1 0 0", "2 0 1  1 1 0 1", "2 0 1  2 1 0 0", "2 2 2  2 1 0 0", "2 0 1  0 1 1 0", "3 0 1  1 0 0 0",
	}
	more = []string{
		"2 0 1  1 1 1 0", "2 2 1  1 1 1 0", "2 0 1  0 1 1 1", "2 0 1  2 2 0 0", "2 2 2  3 1 0 0", "3 0 1  1 1 0 0", "3 3 3  2 1 0 0", "3 0 1  0 1 1 0",
	}
)

func TestReplicas(t *testing.T) {
	cases := small
	if *large {
		cases = more
	}
	if *only != "" {
		cases = []string{*only}
	}
	for _, words := range cases {
		t.Run(strings.Join(strings.Fields(words), ","), func(t *testing.T) {
			start := time.Now()
			r := of(t, words, strings.Fields(*without)...).explore()
			t.Logf("%d states, %d steps, %d ends, %s", r.States, r.Steps, r.Done, time.Since(start).Round(time.Millisecond))
			r.Check(t)
		})
	}
}

// TestEachRule shows that the model finds what is wrong: without any of the rules something is lost, or stuck.
func TestEachRule(t *testing.T) {
	found := map[string]struct{ words, wrong string }{
		"Hold":       {"2 0 1  1 1 0 1", reads},
		"DropFirst":  {"2 0 1  1 1 0 1", reads},
		"Last":       {"2 2 2  1 1 0 0", nothing},
		"Fence":      {"2 0 1  0 1 1 0", reads},
		"Choose":     {"2 2 2  1 1 0 0", reads},
		"Whole":      {"2 0 1  1 1 0 1", reads},
		"Union":      {"2 2 2  1 1 0 0", reads},
		"MarkFirst":  {"2 2 2  1 1 0 0", reads},
		"ClearAll":   {"2 2 2  1 1 0 0", reads},
		"ClearList":  {"2 0 1  1 1 0 1", reads},
		"ClearFlush": {"2 2 2  1 1 0 0", reads},
		"AddFlush":   {"2 0 1  1 1 0 1", reads},
		"AddLater":   {"2 2 2  1 1 0 0", reads},
		"CloseFlush": {"2 0 1  1 1 1 0", reads},
		"Opened":     {"2 0 1  1 1 0 1", reads},
		"Backup":     {"2 0 1  1 1 0 1", reads},
		"Word":       {"2 0 1  1 1 0 1", reads},
		"Sound":      {"2 0 1  1 1 0 1", reads},
	}
	for i, kind := 0, reflect.TypeFor[rules](); i < kind.NumField(); i++ {
		name := kind.Field(i).Name
		t.Run(name, func(t *testing.T) {
			f, is := found[name]
			if !is {
				t.Fatal("no case shows what this is for")
			}
			r := of(t, f.words, name).explore()
			if !strings.HasPrefix(r.Wrong, f.wrong) {
				t.Fatalf("without it, want %q, got after %d states: %s", f.wrong, r.States, r.Wrong)
			}
			t.Logf("after %d states: %s", r.States, r.Wrong)
		})
	}
}

// TestBelts shows what is not needed: rather than to believe that a guard is the one that counts, it is to be known.
func TestBelts(t *testing.T) {
	for _, words := range []string{"2 0 1  1 1 0 1", "2 2 2  2 1 0 0"} {
		if r := of(t, words, "DropOwn", "EndStays").explore(); r.Wrong != "" {
			t.Errorf("%s: %s", words, r.Wrong)
		}
	}
}
