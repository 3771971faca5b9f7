// Package explore visits every state of a small system, and shows the way to the first that is wrong. The protocols under tests/model are explored with it.
package explore

import (
	"fmt"
	"hash/maphash"
	"slices"
	"strings"
	"testing"
)

// A Step is what somebody does in a state, and the state after it. With Fault it is one that a healthy system need not take: what breaks, and what people do.
type Step[S comparable] struct {
	Who   string
	What  string
	Fault bool
	To    S
}

// A System is a start, the steps from a state, what is wrong with a state ("" if nothing), and whether all is done in it.
type System[S comparable] struct {
	Start S
	Steps func(S) []Step[S]
	Wrong func(S) string
	Done  func(S) bool
}

// A Result is what an exploration found.
type Result struct {
	States, Steps int
	Done          int    // states in which all is done
	Wrong         string // "" if nothing is; else what, with the shortest way there
	Cut           bool   // there are more states than were looked at
}

// Check fails if something is wrong, or nothing ever ends. What it says of all states goes for those that were seen.
func (r Result) Check(t testing.TB) {
	t.Helper()
	switch {
	case r.Wrong != "":
		t.Error(r.Wrong)
	case r.Cut:
		t.Log("not all of them: nothing is wrong in those that were seen, and whether each can end was not looked at")
	case r.Done == 0:
		t.Error("it never ends")
	}
}

// A search is what has been seen: each state by its number, where it was reached from first, which is the shortest way, and by what. No pointers, as there are
// millions. States are told apart by a hash of 64 bits.
type search[S comparable] struct {
	seed   maphash.Seed
	known  map[uint64]int32
	states []S
	from   []int32
	by     []uint16
	words  map[[2]string]uint16
	whats  []string
}

// add returns the number of a state, and whether it is new.
func (x *search[S]) add(s S, from int32, who, what string) (number int32, isNew bool) {
	h := maphash.Comparable(x.seed, s)
	if number, seen := x.known[h]; seen {
		return number, false
	}
	by, seen := x.words[[2]string{who, what}]
	if !seen {
		by = uint16(len(x.whats))
		x.words[[2]string{who, what}], x.whats = by, append(x.whats, who+" "+what)
	}
	number = int32(len(x.states))
	x.known[h] = number
	x.states, x.from, x.by = append(x.states, s), append(x.from, from), append(x.by, by)
	return number, true
}

// All visits every state that can be reached, nearest first, but no more than most. The first that is wrong ends it. When all were seen, it looks whether
// from each of them, without another fault, all can be done.
func All[S comparable](sys System[S], most int) (r Result) {
	x := &search[S]{seed: maphash.MakeSeed(), known: map[uint64]int32{}, words: map[[2]string]uint16{}}
	x.add(sys.Start, -1, "", "")
	type edge struct{ from, to int32 }
	var healthy []edge
	for at := int32(0); int(at) < len(x.states); at++ {
		s := x.states[at]
		r.States = len(x.states)
		if wrong := sys.Wrong(s); wrong != "" {
			r.Wrong = wrong + x.trace(at)
			return r
		}
		if r.States >= most {
			r.Cut = true
			return r
		}
		for _, next := range sys.Steps(s) {
			to, _ := x.add(next.To, at, next.Who, next.What)
			r.Steps++
			if !next.Fault && to != at {
				healthy = append(healthy, edge{at, to})
			}
		}
	}
	// Backwards from where all is done: first[s] and then[e] list the healthy steps that end in s.
	first, then := make([]int32, len(x.states)), make([]int32, len(healthy))
	for i := range first {
		first[i] = -1
	}
	for i, e := range healthy {
		then[i], first[e.to] = first[e.to], int32(i)
	}
	ends := make([]bool, len(x.states))
	var queue []int32
	for i := range x.states {
		if sys.Done(x.states[i]) {
			ends[i], queue = true, append(queue, int32(i))
		}
	}
	r.Done = len(queue)
	for ; len(queue) > 0; queue = queue[1:] {
		for e := first[queue[0]]; e >= 0; e = then[e] {
			if from := healthy[e].from; !ends[from] {
				ends[from], queue = true, append(queue, from)
			}
		}
	}
	for at, end := range ends {
		if !end {
			r.Wrong = "nobody can end this, though nothing fails any more" + x.trace(int32(at))
			break
		}
	}
	return r
}

// trace is the way to a state.
func (x *search[S]) trace(at int32) string {
	last := fmt.Sprintf("\n  in the end: %+v", x.states[at])
	last = strings.ReplaceAll(strings.ReplaceAll(last, ":false", ":-"), "disk:-1 word:0 dead:- failed:-", "none")
	var lines []string
	for ; x.from[at] >= 0; at = x.from[at] {
		lines = append(lines, "\n  "+x.whats[x.by[at]])
	}
	slices.Reverse(lines)
	return strings.Join(lines, "") + last
}
