package soak

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
)

// operation is a call with its answer, and the time (since the beginning of the test) that
// it had to happen in.
type operation struct {
	in         input
	out        output
	begin, end time.Duration
}

// order is one way in which things can have happened up to some moment: the state, and
// which of the calls that were being made at that moment had happened already.
type order struct {
	state state
	done  uint64 // bits of the slots of calls
}

// tooMany orders make a search give up.
const tooMany = 1 << 19

// search goes through a history and returns the states that it can have led to, from one of
// those that it began with: none if there is no order of its calls, each between its begin and
// its end, in which the answers are possible (Wing & Gong; with Lowe's just-in-time
// linearization). at is the call whose answer is impossible.
func search(start map[state]bool, history []operation) (states map[state]bool, at *operation, err error) {
	type event struct {
		when time.Duration
		call int
		end  bool
	}
	var events []event
	for i, o := range history {
		events = append(events, event{o.begin, i, false}, event{o.end, i, true})
	}
	slices.SortFunc(events, func(x, y event) int {
		if x.when != y.when {
			return cmp.Compare(x.when, y.when)
		}
		return cmp.Compare(btoi(x.end), btoi(y.end))
	})
	orders := map[order]bool{}
	for s := range start {
		orders[order{state: s}] = true
	}
	slots, open := make([]int, len(history)), map[int]int{} // slot -> call
	for _, e := range events {
		if !e.end {
			for open[slots[e.call]] != 0 {
				slots[e.call]++
			}
			if slots[e.call] > 63 {
				return nil, nil, fmt.Errorf("more than 64 calls at once")
			}
			open[slots[e.call]] = e.call + 1
			continue
		}
		ending := uint64(1) << slots[e.call]
		next, seen := map[order]bool{}, map[order]bool{}
		var visit func(o order)
		visit = func(o order) {
			if seen[o] || len(seen) > tooMany {
				return
			}
			seen[o] = true
			if o.done&ending != 0 {
				next[order{o.state, o.done &^ ending}] = true
				return
			}
			if history[e.call].out.maybe {
				next[o] = true // it was never done
			}
			for slot, call := range open {
				bit := uint64(1) << slot
				if o.done&bit != 0 {
					continue
				}
				one := history[call-1]
				for _, s := range outcomes(o.state, one.in, one.out) {
					if !one.out.maybe || s != o.state {
						visit(order{s, o.done | bit})
					}
				}
			}
		}
		for o := range orders {
			visit(o)
		}
		if len(seen) > tooMany {
			return nil, &history[e.call], fmt.Errorf("more than %d orders are possible", tooMany)
		}
		if len(next) == 0 {
			return nil, &history[e.call], nil
		}
		delete(open, slots[e.call])
		orders = next
	}
	states = map[state]bool{}
	for o := range orders {
		states[o.state] = true
	}
	return states, nil, nil
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

func story(history []operation) string {
	slices.SortFunc(history, func(x, y operation) int { return cmp.Compare(x.begin, y.begin) })
	var text strings.Builder
	for _, o := range history {
		fmt.Fprintf(&text, "%12s - %12s  %s: %s\n", o.begin, o.end, o.in, o.out)
	}
	return text.String()
}

// TestSearch: the search tells histories that can be from those that cannot.
func TestSearch(t *testing.T) {
	ok, no := output{}, output{code: codes.NotFound}
	maybe := output{code: codes.Unavailable, maybe: true}
	busy := output{code: codes.FailedPrecondition}
	in := func(k kind) input { return input{kind: k} }
	wrote, got := func(n int32) input { return input{kind: write, number: n} }, func(n int32) output { return output{number: n} }
	up := []operation{{in(create), ok, 0, 1}, {in(claim), ok, 1, 2}, {in(stage), ok, 2, 3}, {in(publish), ok, 4, 5}}
	for name, c := range map[string]struct {
		history  []operation
		possible bool
	}{
		"a life": {slices.Concat(up, []operation{{wrote(1), ok, 6, 7}, {in(read), got(1), 8, 9}, {in(unpublish), ok, 10, 11},
			{in(unstage), ok, 12, 13}, {in(release), ok, 13, 14}, {in(remove), ok, 14, 15}, {in(stage), no, 16, 17}}), true},
		"staged without a claim":         {[]operation{{in(create), ok, 0, 1}, {in(stage), ok, 2, 3}}, false},
		"staged without being":           {[]operation{{in(claim), ok, 0, 1}, {in(stage), ok, 1, 2}}, false},
		"at once":                        {[]operation{{in(stage), ok, 0, 5}, {in(claim), ok, 0, 5}, {in(create), ok, 1, 4}}, true},
		"one after the other":            {[]operation{{in(claim), ok, 0, 1}, {in(create), ok, 2, 4}}, false},
		"perhaps":                        {[]operation{{in(create), maybe, 0, 9}, {in(stage), no, 1, 2}, {in(claim), ok, 2, 3}, {in(stage), ok, 3, 4}}, true},
		"perhaps, but not twice":         {[]operation{{in(create), maybe, 0, 9}, {in(modify), ok, 1, 2}, {in(remove), ok, 5, 6}, {in(modify), ok, 7, 8}}, false},
		"deleted in use":                 {slices.Concat(up, []operation{{in(remove), ok, 6, 7}}), false},
		"refused in use":                 {slices.Concat(up, []operation{{in(remove), busy, 6, 7}}), true},
		"refused without being":          {[]operation{{in(remove), busy, 6, 7}}, false},
		"a lost write":                   {slices.Concat(up, []operation{{wrote(1), ok, 6, 7}, {wrote(2), ok, 8, 9}, {in(read), got(1), 10, 11}}), false},
		"writes at once":                 {slices.Concat(up, []operation{{wrote(1), ok, 6, 9}, {wrote(2), ok, 6, 9}, {in(read), got(1), 10, 11}}), true},
		"mounted with nothing published": {[]operation{{in(create), ok, 0, 1}, {in(read), got(0), 2, 3}}, false},
		"a group of nothing":             {[]operation{{in(cutGroup), ok, 0, 1}}, false},
		"what the snapshot had": {slices.Concat(up, []operation{{wrote(1), ok, 6, 7}, {in(snapshot), ok, 8, 9}, {wrote(2), ok, 10, 11},
			{input{kind: create, volume: b}, ok, 12, 13}, {input{kind: claim, volume: b}, ok, 13, 14}, {input{kind: stage, volume: b}, ok, 14, 15}, {input{kind: publish, volume: b}, ok, 16, 17},
			{input{kind: read, volume: b}, got(1), 18, 19}}), true},
		"what the snapshot cannot have": {slices.Concat(up, []operation{{wrote(1), ok, 6, 7}, {in(snapshot), ok, 8, 9}, {wrote(2), ok, 10, 11},
			{input{kind: create, volume: b}, ok, 12, 13}, {input{kind: claim, volume: b}, ok, 13, 14}, {input{kind: stage, volume: b}, ok, 14, 15}, {input{kind: publish, volume: b}, ok, 16, 17},
			{input{kind: read, volume: b}, got(2), 18, 19}}), false},
	} {
		states, _, err := search(map[state]bool{empty: true}, c.history)
		if err != nil || (len(states) > 0) != c.possible {
			t.Errorf("%s: possible %v, want %v, %v:\n%s", name, len(states) > 0, c.possible, err, story(c.history))
		}
	}
}
