// Package moving explores what can happen when a volume moves while it is used (docs/decisions/moving-in-use.md): every order of every step, of everybody who has
// a part in it, with all that fails in between. It runs no code of the driver: it shows that the protocol is right, not that the driver keeps to it.
//
// There is: the volume's object; two homes with their disks, what is in their caches and not flushed, and the labels of their records; consumers, which are a
// third node, or one of the two, with a kernel (the mirror) and a driver of its own; the network; the controller; pods that come and go; people.
// It fails: calls and their answers are lost, or late; a write to the API server is late, or its answer is lost; drivers die; the power of nodes goes; legs of mirrors
// fail; moves are taken back and asked for again; claims are released with everything mounted, and given to other nodes. A server looks at the API server
// first and acts later. Who does not answer, or does not know yet, is somebody whose step comes later.
//
// It is wrong if the home that the object names lacks what was acknowledged, or on its disk what was flushed; if a user reads anything else; if two nodes can
// write; or if there is a state from which, though nothing fails any more, nobody can end the move and leave nothing of it.
//
// Not modelled: the steps within one act of a driver (ioctls, renames: pkg/device tests those), regions and ranges beyond two blocks, growth and snapshots,
// disks that are lost before a volume has arrived, nodes that never come back. Of an API server that goes back to before the flip only what the homes do then by themselves, until somebody decides:
// an old home that does not know yet that the volume has left it is used if the new one is down.
package moving

import (
	"flag"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/tests/model/explore"
)

var (
	large   = flag.Bool("model.large", false, "explore with more that fails: for about an hour, with 5 GiB")
	only    = flag.String("model.only", "", "explore one case only: consumer, the node that may claim the volume later, blocks, faults, writes, acts of people, claims")
	most    = flag.Int("model.states", 10_000_000, "the most states of a case to look at")
	without = flag.String("model.without", "", "rules to take away, with -model.only")
)

// set has all rules of a struct be kept, or not.
func set(rules any, keep bool) {
	v := reflect.ValueOf(rules).Elem()
	for i := range v.NumField() {
		v.Field(i).SetBool(keep)
	}
}

// take takes a rule away.
func (m *model) take(name string) {
	rule := reflect.ValueOf(&m.rules).Elem().FieldByName(name)
	if !rule.IsValid() {
		rule = reflect.ValueOf(&m.belts).Elem().FieldByName(name)
	}
	rule.SetBool(false)
}

// of is a model of a case, as -model.only has it.
func of(t *testing.T, words string) *model {
	m := &model{others: make([]int8, 1)}
	set(&m.rules, true)
	set(&m.belts, true)
	if _, err := fmt.Sscan(words, &m.consumer, &m.others[0], &m.blocks, &m.budget.faults, &m.budget.writes, &m.budget.people, &m.budget.claims); err != nil {
		t.Fatalf("case %q: %v", words, err)
	}
	return m
}

func (m *model) explore() explore.Result {
	return explore.All(explore.System[state]{Start: m.start(), Steps: m.steps, Wrong: m.wrong, Done: m.done}, *most)
}

// cases: consumer, who may claim the volume later, blocks, and how many faults, writes, acts of people (asking, taking back, releasing, unstaging) and claims there are.
var (
	small = []string{
		"2 0 1  1 1 0 0", "0 2 1  1 1 0 0", "1 2 1  1 1 0 0", // the consumer is neither of the homes; the old one; the new one
		"2 0 1  2 0 0 0", "0 2 1  2 0 0 0", "1 2 1  2 0 0 0",
		"2 0 1  1 0 1 0", "0 2 1  1 0 1 0", "1 2 1  1 0 1 0",
		"0 2 1  1 0 1 1", "1 2 1  0 1 1 1", "2 1 2  0 2 0 0",
	}
	more = []string{
		"2 0 1  2 1 0 0", "0 2 1  2 1 0 0", "1 2 1  2 1 0 0",
		"2 0 2  1 2 0 0", "0 2 2  1 2 0 0", "1 2 2  1 2 0 0",
		"0 2 1  1 1 1 0", "1 2 1  1 0 1 1",
		"2 0 1  1 1 1 1", "2 1 1  1 1 1 1", "0 2 1  1 1 1 1", "0 1 1  1 1 1 1", "1 2 1  1 1 1 1", "1 0 1  1 1 1 1",
		"2 0 1  2 0 1 0", "0 2 1  2 0 1 0", "1 2 1  2 0 1 0",
		"2 0 1  1 0 2 0", "0 2 1  1 1 2 0", "1 2 1  1 1 2 0", "0 2 1  1 0 2 1", "1 2 1  1 0 2 1",
		"2 0 1  3 0 0 0", "0 2 1  3 0 0 0", "1 2 1  3 0 0 0",
	}
)

func TestMoves(t *testing.T) {
	cases := small
	if *large {
		cases = more
	}
	if *only != "" {
		cases = []string{*only}
	}
	for _, words := range cases {
		t.Run(strings.Join(strings.Fields(words), ","), func(t *testing.T) {
			m := of(t, words)
			for _, name := range strings.Fields(*without) {
				m.take(name)
			}
			start := time.Now()
			r := m.explore()
			t.Logf("%d states, %d steps, %d ends, %s", r.States, r.Steps, r.Done, time.Since(start).Round(time.Millisecond))
			r.Check(t)
		})
	}
}

const (
	lacks   = "the home has not what was acknowledged"
	disks   = "the home has not on its disk what was flushed"
	missing = "the home has no bytes"
	partly  = "the home has a part of the bytes"
	reads   = "the user reads what is not the volume"
	two     = "two nodes can write"
	stuck   = "nobody can end this"
	last    = "the last bytes are given back"
	newest  = "what was written last is gone"
	older   = "the old home, which knows that it is that or can ask, is used"
)

// TestEachRule shows that the model finds what is wrong: without any of the rules something is lost, or stuck.
func TestEachRule(t *testing.T) {
	found := map[string]struct{ words, wrong string }{
		"Hold":          {"2 0 1  1 1 0 0", lacks},
		"Range":         {"2 0 1  0 1 0 0", reads},
		"Boot":          {"2 0 1  1 1 0 0", lacks},
		"Fence":         {"0 2 1  0 0 1 1", two},
		"NameWord":      {"2 0 1  1 0 0 0", missing},
		"PrepareLater":  {"2 0 1  1 0 0 0", partly},
		"PrepareAnew":   {"2 0 1  1 0 0 0", missing},
		"CompleteFlush": {"2 0 1  0 1 0 0", disks},
		"CompleteBoot":  {"2 0 1  1 1 0 0", lacks},
		"CompleteLater": {"2 0 1  1 0 0 0", stuck},
		"SealKind":      {"2 0 1  1 0 1 0", missing},
		"SealStays":     {"2 0 1  1 0 0 0", stuck},
		"SealOpen":      {"2 0 1  1 1 0 0", lacks},
		"SealWrite":     {"2 0 1  2 1 0 0", lacks},
		"DepartAsks":    {"2 0 1  1 0 0 0", last},
		"BackKept":      {"2 0 1  1 1 0 0", newest},
		"BackAsks":      {"2 0 1  1 1 0 0", older},
		"BackLeft":      {"2 0 1  2 1 0 0", older},
		"GarbageLive":   {"2 0 1  1 0 0 0", missing},
		"Pin":           {"2 0 1  1 0 0 0", missing},
		"PinVersion":    {"2 0 1  2 1 0 0", missing},
		"PinOrder":      {"2 0 1  2 1 0 0", lacks},
		"UnsureWrites":  {"2 0 1  2 1 0 0", missing},
		"UnsureOwn":     {"2 0 1  1 0 2 0", stuck},
		"PinStale":      {"2 0 1  0 0 2 0", stuck},
		"BackHome":      {"2 0 1  0 1 1 0", lacks},
		"SwitchFlip":    {"2 0 1  0 1 0 0", lacks},
		"FlipCurrent":   {"2 0 1  0 0 2 0", missing},
		"ReleaseLeft":   {"2 0 1  0 0 1 0", stuck},
	}
	for i, kind := 0, reflect.TypeFor[rules](); i < kind.NumField(); i++ {
		name := kind.Field(i).Name
		t.Run(name, func(t *testing.T) {
			f, is := found[name]
			if !is {
				t.Fatal("no case shows what this is for")
			}
			m := of(t, f.words)
			m.take(name)
			r := m.explore()
			if !strings.HasPrefix(r.Wrong, f.wrong) {
				t.Fatalf("without it, want %q, got after %d states: %s", f.wrong, r.States, r.Wrong)
			}
			t.Logf("after %d states: %s", r.States, r.Wrong)
		})
	}
}

// TestBelts shows what is not needed: rather than to believe that a guard is the one that counts, it is to be known.
func TestBelts(t *testing.T) {
	for _, words := range []string{"2 0 1  1 1 0 0", "1 2 1  2 0 0 0", "0 2 1  1 0 1 0"} {
		m := of(t, words)
		set(&m.belts, false)
		if r := m.explore(); r.Wrong != "" {
			t.Errorf("%s: %s", words, r.Wrong)
		}
	}
}
