// Package linear searches a history of calls that were made at once for an order of them, one after the other, in which every answer can be.
package linear

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// Call is one that was made, with its answer.
type Call[S comparable] interface {
	// When is the time that it had to happen in.
	When() (begin, end time.Duration)
	// Maybe: it may have happened, or never.
	Maybe() bool
	// Outcomes are the states that it may lead to from one; none if its answer cannot be there.
	Outcomes(from S) []S
}

// order is one way in which things can have happened up to some moment: the state, and
// which of the calls that were being made at that moment had happened already.
type order[S comparable] struct {
	state S
	done  uint64 // bits of the slots of calls
}

// tooMany orders make a search give up.
const tooMany = 1 << 19

// event is the begin of a call, or its end.
type event struct {
	when time.Duration
	call int
	end  bool
}

// Search goes through a history and returns the states that it can have led to, from one of
// those that it began with: none if there is no order of its calls, each between its begin and
// its end, in which the answers are possible (Wing & Gong; with Lowe's just-in-time
// linearization). at is the number of the call whose answer is impossible.
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

// events are those of a history, in the order of time; what begins when something ends was before that.
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

// ended returns the orders in which the call of a slot, which ends, has happened, or never will.
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
			next[o] = true // it was never done
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
