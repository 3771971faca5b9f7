package soak

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/ashlar-csi/ashlar/internal/linear"
)

// operation is a call with its answer, and the time (since the beginning of the test) that
// it had to happen in.
type operation struct {
	in         input
	out        output
	begin, end time.Duration
}

func (o operation) When() (begin, end time.Duration) { return o.begin, o.end }
func (o operation) Maybe() bool                      { return o.out.maybe }
func (o operation) Outcomes(from state) []state      { return outcomes(from, o.in, o.out) }

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
	second := []operation{{in(snapshot), ok, 6, 7}, {input{kind: create, volume: b}, ok, 7, 8}}
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
		"a group beside a write":         {slices.Concat(up, second, []operation{{input{kind: cutGroup, held: true}, busy, 8, 9}}), true},
		"a group refused for nothing":    {slices.Concat(up, second, []operation{{in(cutGroup), busy, 8, 9}}), false},
		"a group of nothing":             {[]operation{{in(cutGroup), ok, 0, 1}}, false},
		"what the snapshot had": {slices.Concat(up, []operation{{wrote(1), ok, 6, 7}, {in(snapshot), ok, 8, 9}, {wrote(2), ok, 10, 11},
			{input{kind: create, volume: b}, ok, 12, 13}, {input{kind: claim, volume: b}, ok, 13, 14}, {input{kind: stage, volume: b}, ok, 14, 15}, {input{kind: publish, volume: b}, ok, 16, 17},
			{input{kind: read, volume: b}, got(1), 18, 19}}), true},
		"what the snapshot cannot have": {slices.Concat(up, []operation{{wrote(1), ok, 6, 7}, {in(snapshot), ok, 8, 9}, {wrote(2), ok, 10, 11},
			{input{kind: create, volume: b}, ok, 12, 13}, {input{kind: claim, volume: b}, ok, 13, 14}, {input{kind: stage, volume: b}, ok, 14, 15}, {input{kind: publish, volume: b}, ok, 16, 17},
			{input{kind: read, volume: b}, got(2), 18, 19}}), false},
	} {
		states, _, err := linear.Search(map[state]bool{empty: true}, c.history)
		if err != nil || (len(states) > 0) != c.possible {
			t.Errorf("%s: possible %v, want %v, %v:\n%s", name, len(states) > 0, c.possible, err, story(c.history))
		}
	}
}
