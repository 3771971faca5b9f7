// Package poolset is how a StorageClass names the pools that its volumes may be in. It builds on all systems, not on Linux alone.
package poolset

import (
	"fmt"
	"path"
	"regexp"
	"strings"
)

// Set is names of pools and patterns of names, separated by commas. In a pattern * stands for any number of characters, also none:
//
//	fast            the pool of that name
//	fast-*          all whose names begin so
//	nvme0,nvme1     these two
//
// It names those pools of a node that the node has. The empty Set stands for the default pool of each node.
type Set string

// most is how many names and patterns a Set may have: people have to read it in the StorageClass.
const most = 32

// As blockdev.ValidPoolName, and with *.
var pattern = regexp.MustCompile(`^[a-z0-9*]([-a-z0-9*]{0,22}[a-z0-9*])?$`)

// Parse returns a text as a Set. It fails if the text is no Set, or empty.
func Parse(text string) (Set, error) {
	all := strings.Split(text, ",")
	if len(all) > most {
		return "", fmt.Errorf("%d names of pools; %d are the most", len(all), most)
	}
	for _, one := range all {
		if !pattern.MatchString(one) {
			return "", fmt.Errorf("%q is neither the name of a pool (1 to 24 of a-z, 0-9 and -, with no - at either end) nor a pattern of names (with *)", one)
		}
	}
	return Set(text), nil
}

// Has reports whether the Set names a pool. It is false for the empty Set.
func (s Set) Has(pool string) bool {
	for one := range strings.SplitSeq(string(s), ",") {
		if matches, err := path.Match(one, pool); err == nil && matches {
			return true
		}
	}
	return false
}

// One returns the name of the pool if the Set is one name; false for several names, for patterns, and for the empty Set.
func (s Set) One() (name string, one bool) {
	if s == "" || strings.ContainsAny(string(s), ",*") {
		return "", false
	}
	return string(s), true
}

// Among returns the Set of those pools that s names, in their order; the empty Set if it names none.
func (s Set) Among(pools []string) Set {
	var named []string
	for _, pool := range pools {
		if s.Has(pool) {
			named = append(named, pool)
		}
	}
	return Set(strings.Join(named, ","))
}
