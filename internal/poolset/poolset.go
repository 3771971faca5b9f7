// Package poolset is how a StorageClass says which pools its volumes may be in. It imports nothing that needs Linux.
package poolset

import (
	"fmt"
	"path"
	"regexp"
	"strings"
)

// Set is names of pools, and patterns of names, separated by commas; in a pattern * stands for any characters, also none:
//
//	fast            the pool of that name
//	fast-*          all whose names begin so
//	nvme0,nvme1     these two
//
// Of a node it means those that the node has. The empty Set means each node's default pool, and no other.
type Set string

// most is how many names and patterns a Set has at most: a parameter of a StorageClass is to be read by people.
const most = 32

// As blockdev.ValidPoolName, with *.
var pattern = regexp.MustCompile(`^[a-z0-9*]([-a-z0-9*]{0,22}[a-z0-9*])?$`)

// Parse fails for what is no Set, and for the empty one, which nobody writes.
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

// Has reports whether the Set names a pool. What is no Set, or empty, names none.
func (s Set) Has(pool string) bool {
	for one := range strings.SplitSeq(string(s), ",") {
		if matches, err := path.Match(one, pool); err == nil && matches {
			return true
		}
	}
	return false
}

// One returns the name if the Set is that of one pool; false if there may be more, or it is the empty one.
func (s Set) One() (name string, one bool) {
	if s == "" || strings.ContainsAny(string(s), ",*") {
		return "", false
	}
	return string(s), true
}

// Among returns the Set of those of some pools that s names, in their order; the empty Set if it names none of them.
func (s Set) Among(pools []string) Set {
	var named []string
	for _, pool := range pools {
		if s.Has(pool) {
			named = append(named, pool)
		}
	}
	return Set(strings.Join(named, ","))
}
