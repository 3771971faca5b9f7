package replicator

import (
	"testing"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// TestExcess: which leg a volume does without: never one that is needed, never the last current one.
func TestExcess(t *testing.T) {
	var (
		current = judgement{current: true}
		home    = judgement{current: true, home: true}
		joining = judgement{}
		lost    = judgement{state: bad}
		listed  = judgement{state: bad, current: true} // lost, and the object does not know that yet
	)
	const used, unused = true, false
	for what, c := range map[string]struct {
		replicas int
		used     bool
		legs     []judgement
		at       int // of the leg that goes; -1: none
		kind     kind
	}{
		"as many as it is to have":              {2, used, []judgement{home, current}, -1, stays},
		"fewer":                                 {3, used, []judgement{home, current}, -1, stays},
		"one is lost, its successor joins":      {2, used, []judgement{home, lost, joining}, -1, stays},
		"one is lost, its successor is current": {2, used, []judgement{home, lost, current}, 1, takeOut},
		"lost unnoticed, its successor is new":  {2, unused, []judgement{current, listed, joining}, -1, stays},
		"lost unnoticed, and not needed":        {1, unused, []judgement{current, listed}, 1, unlist},
		"all current, while it is used":         {2, used, []judgement{current, home, current}, 2, takeOut},
		"all current, and the first is away":    {1, used, []judgement{current, home}, 0, takeOut},
		"all current, and nobody uses it":       {1, unused, []judgement{current, current}, 1, unlist},
		"one that is not current goes first":    {1, used, []judgement{current, joining, home}, 1, takeOut},
		"and of these one that is lost":         {2, used, []judgement{home, lost, joining, current}, 1, takeOut},
		"the only current one":                  {1, used, []judgement{joining, home, lost}, 2, takeOut},
		"none is current":                       {1, used, []judgement{joining, lost}, -1, stays},
		"the only current one is lost":          {1, unused, []judgement{listed, joining}, -1, stays},
	} {
		t.Run(what, func(t *testing.T) {
			r := &v1alpha1.ReplicatedVolume{Spec: v1alpha1.ReplicatedVolumeSpec{Replicas: c.replicas}}
			if c.used {
				r.Spec.Claim = &v1alpha1.Claim{Node: "n"}
			}
			want := ""
			for i := range c.legs {
				c.legs[i].name = string(rune('a' + i))
				if i == c.at {
					want = c.legs[i].name
				}
			}
			if name, kind := excess(r, c.legs); name != want || kind != c.kind {
				t.Errorf("%q goes (%v), want %q (%v)", name, kind, want, c.kind)
			}
		})
	}
}
