package poolset

import (
	"strings"
	"testing"
)

// TestHas: which pools a set names.
func TestHas(t *testing.T) {
	for set, names := range map[string]map[string]bool{
		"fast":            {"fast": true, "fast-a": false, "fas": false, "": false},
		"fast-*":          {"fast-a": true, "fast-": true, "fast-nvme-1": true, "fast": false, "slow-fast-a": false},
		"*":               {"fast": true, "x": true},
		"*-ssd":           {"a-ssd": true, "ssd": false, "a-ssd-b": false},
		"nvme*-a,default": {"nvme0-a": true, "nvme-a": true, "default": true, "nvme0-b": false},
		"a**b":            {"ab": true, "acb": true, "a": false},
	} {
		s, err := Parse(set)
		if err != nil {
			t.Errorf("%q: %v", set, err)
		}
		for name, want := range names {
			if s.Has(name) != want {
				t.Errorf("%q has %q: %v, want %v", set, name, !want, want)
			}
		}
	}
	if Set("").Has("default") {
		t.Error("the empty set has a pool")
	}
}

// TestParse: a text that is no set is refused, and the message says which part is wrong.
func TestParse(t *testing.T) {
	for _, text := range []string{"", ",", "a,", ",a", "a,,b", "A", "fast_*", "fast-", "-fast", "a b", "fast-?", "[a]", `\*`, "a/b", "../x", "*,!fast",
		strings.Repeat("x", 25), strings.Repeat("a,", most) + "a"} {
		if s, err := Parse(text); err == nil || s != "" {
			t.Errorf("%q: %q, %v", text, s, err)
		}
	}
	if _, err := Parse("a,B"); err == nil || !strings.Contains(err.Error(), `"B"`) {
		t.Errorf("%v", err)
	}
}

// TestOne: One recognises a set of one pool.
func TestOne(t *testing.T) {
	for set, want := range map[Set]string{"fast": "fast", "fast-*": "", "a,b": "", "": ""} {
		if name, one := set.One(); name != want || one != (want != "") {
			t.Errorf("%q: %q, %v", set, name, one)
		}
	}
}

// TestAmong: the part of a set within some pools.
func TestAmong(t *testing.T) {
	pools := []string{"b", "fast-b", "fast-a"}
	for set, want := range map[Set]Set{"fast-*": "fast-b,fast-a", "b": "b", "c": "", "*": "b,fast-b,fast-a", "": ""} {
		if have := set.Among(pools); have != want {
			t.Errorf("%q: %q, want %q", set, have, want)
		}
	}
}
