// Package linear checks a history of concurrent calls for linearizability: whether there is an order of them, one after the other, in which every answer is
// possible.
package linear

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// Call is a call of the history, with its answer.
type Call[S comparable] interface {
	// When returns when the call began and ended; it took effect between.
	When() (begin, end time.Duration)
	// Maybe reports whether the call may also have had no effect at all.
	Maybe() bool
	// Outcomes returns the states that the call may lead to from a state; none if its answer is impossible there.
	Outcomes(from S) []S
}

// order is one possible course of events up to some time: the state, and which of the calls in progress have taken effect.
type order[S comparable] struct {
	state S
	done  uint64 // a bit for each slot of a call in progress
}

// tooMany is the number of orders at which a search gives up.
const tooMany = 1 << 19

// event is the begin of a call, or its end.
type event struct {
	when time.Duration
	call int
	end  bool
}

// Search returns the states that a history can have led to, from one of the states in start. It returns none if there is no order of the calls, each between
// its begin and its end, in which the answers are possible (Wing & Gong; with Lowe's just-in-time linearization); then at is the index of the call whose answer
// is impossible. It fails if the search is too large.
func Search[S comparable, C Call[S]](start map[S]bool, history []C) (states map[S]bool, at int, err error) {
	orders := map[order[S]]bool{}
	for s := range start {
		orders[order[S]{state: s}] = true
	}
	slots, open := make([]int, len(history)), map[int]int{} // slot -> call
	for _, e := range events[S](history) {
		if e.end {
			next, err := ended(orders, history, open, slots[e.call])
			if err != nil || len(next) == 0 {
				return nil, e.call, err
			}
			delete(open, slots[e.call])
			orders = next
			continue
		}
		for taken := true; taken; {
			if _, taken = open[slots[e.call]]; taken {
				slots[e.call]++
			}
		}
		if slots[e.call] > 63 {
			return nil, e.call, fmt.Errorf("more than 64 calls at once")
		}
		open[slots[e.call]] = e.call
	}
	states = map[S]bool{}
	for o := range orders {
		states[o.state] = true
	}
	return states, 0, nil
}

// events returns the begins and ends of all calls, by time. At equal times begins come before ends.
func events[S comparable, C Call[S]](history []C) (all []event) {
	for i, c := range history {
		begin, end := c.When()
		all = append(all, event{begin, i, false}, event{end, i, true})
	}
	slices.SortFunc(all, func(x, y event) int {
		if x.when == y.when && x.end != y.end {
			if y.end {
				return -1
			}
			return 1
		}
		return cmp.Compare(x.when, y.when)
	})
	return all
}

// ended returns the orders in which the call of a slot, which ends now, has taken effect, or never will.
func ended[S comparable, C Call[S]](orders map[order[S]]bool, history []C, open map[int]int, slot int) (map[order[S]]bool, error) {
	ending := uint64(1) << slot
	next, seen := map[order[S]]bool{}, map[order[S]]bool{}
	var visit func(o order[S])
	visit = func(o order[S]) {
		if seen[o] || len(seen) > tooMany {
			return
		}
		seen[o] = true
		if o.done&ending != 0 {
			next[order[S]{o.state, o.done &^ ending}] = true
			return
		}
		if history[open[slot]].Maybe() {
			next[o] = true // it had no effect
		}
		for slot, call := range open {
			bit, one := uint64(1)<<slot, history[call]
			if o.done&bit != 0 {
				continue
			}
			for _, s := range one.Outcomes(o.state) {
				if !one.Maybe() || s != o.state {
					visit(order[S]{s, o.done | bit})
				}
			}
		}
	}
	for o := range orders {
		visit(o)
	}
	if len(seen) > tooMany {
		return nil, fmt.Errorf("more than %d orders are possible", tooMany)
	}
	return next, nil
}
