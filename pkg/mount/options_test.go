package mount

import (
	"slices"
	"testing"
)

func TestSplitOptions(t *testing.T) {
	for options, want := range map[string][]string{
		"":                      nil,
		"ro":                    {"ro"},
		"ro,noatime":            {"ro", "noatime"},
		",,ro,":                 {"ro"},
		"a=1,b=2":               {"a=1", "b=2"},
		`a,context="x:c1,c2",b`: {"a", `context="x:c1,c2"`, "b"},
		`"a,b"`:                 {`"a,b"`},
	} {
		if have := SplitOptions(options); !slices.Equal(have, want) {
			t.Errorf("%q is split to %q, want %q", options, have, want)
		}
	}
}
