package linear

import (
	"testing"
	"time"
)

// access is a read or a write of a register.
type access struct {
	write, maybe bool
	value        int
	begin, end   time.Duration
}

func (a access) When() (begin, end time.Duration) { return a.begin, a.end }
func (a access) Maybe() bool                      { return a.maybe }
func (a access) Outcomes(from int) []int {
	if a.write || from == a.value {
		return []int{a.value}
	}
	return nil
}

func wrote(n int, begin, end time.Duration) access {
	return access{write: true, value: n, begin: begin, end: end}
}

func perhaps(n int, begin, end time.Duration) access {
	return access{write: true, maybe: true, value: n, begin: begin, end: end}
}

func got(n int, begin, end time.Duration) access { return access{value: n, begin: begin, end: end} }

// TestSearch: the search accepts possible histories of a register and no others, and names the call that cannot be explained.
func TestSearch(t *testing.T) {
	for name, c := range map[string]struct {
		history []access
		at      int // index of the call that cannot be explained; -1: none
	}{
		"nothing":                       {nil, -1},
		"one after the other":           {[]access{wrote(1, 0, 1), got(1, 2, 3), wrote(2, 4, 5), got(2, 6, 7)}, -1},
		"a lost write":                  {[]access{wrote(1, 0, 1), wrote(2, 2, 3), got(1, 4, 5)}, 2},
		"a lost write, long ago":        {[]access{wrote(1, 0, 1), got(1, 2, 3), wrote(2, 4, 5), got(2, 6, 7), got(1, 8, 9)}, 4},
		"a write that was never made":   {[]access{wrote(1, 0, 1), got(3, 2, 3)}, 1},
		"writes at once":                {[]access{wrote(1, 0, 9), wrote(2, 0, 9), got(1, 10, 11), got(1, 12, 13)}, -1},
		"writes at once, in two orders": {[]access{wrote(1, 0, 9), wrote(2, 0, 9), got(1, 10, 11), got(2, 12, 13)}, 3},
		"a read during a write":         {[]access{wrote(1, 0, 9), got(0, 1, 2), got(1, 3, 4)}, -1},
		"a read that is taken back":     {[]access{wrote(1, 0, 9), got(1, 1, 2), got(0, 3, 4)}, 2},
		"perhaps, and it was":           {[]access{perhaps(1, 0, 9), got(0, 1, 2), got(1, 10, 11)}, -1},
		"perhaps, and it was not":       {[]access{perhaps(1, 0, 9), got(0, 10, 11)}, -1},
		"perhaps, and then it was not":  {[]access{perhaps(1, 0, 9), got(1, 1, 2), got(0, 10, 11)}, 2},
		"perhaps, but not so late":      {[]access{perhaps(1, 0, 9), got(0, 10, 11), got(1, 12, 13)}, 2},
		"begins as another ends":        {[]access{wrote(1, 0, 1), got(0, 1, 2)}, -1},
	} {
		states, at, err := Search(map[int]bool{0: true}, c.history)
		if err != nil || (len(states) == 0) != (c.at >= 0) || c.at >= 0 && at != c.at {
			t.Errorf("%s: states %v, %v at %d, want %d", name, states, err, at, c.at)
		}
	}
}

// TestSearchGivesUp: a history that is too large to search is an error, and does not count as possible.
func TestSearchGivesUp(t *testing.T) {
	var many []access
	for i := range 65 {
		many = append(many, wrote(i, 0, 1))
	}
	if _, _, err := Search(map[int]bool{0: true}, many); err == nil {
		t.Error("65 calls at once were searched")
	}
	if _, _, err := Search(map[int]bool{0: true}, many[:22]); err == nil {
		t.Error("all orders of 22 writes were searched")
	}
}
