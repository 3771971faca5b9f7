package pack

import (
	"hash/maphash"
	"strings"
)

const (
	mostWords         = 4096   // words of a format; they are never forgotten
	shortest, longest = 3, 256 // bytes of a word
	window            = 4096   // slots for strings that only one owner has had so far
	reach             = 4096   // how many bytes before a string are searched for the same string: a search of all of a long text would take too long
)

// words has strings that values of several owners have, as the names of nodes. Its zero value is ready. The lock of the Format guards it.
type words struct {
	at   map[string]int // place in list
	list []string       // only grows
	once []said         // by the hash of the string, modulo window
}

// said is a string that one owner has; both are hashes.
type said struct{ what, owner uint64 }

var seed = maphash.MakeSeed()

// find returns the place of a string in list. It adds the string if another owner had it before, as far as that is remembered, and there is room
// (mostWords).
func (w *words) find(s string, owner uint64) (at int, is bool) {
	if len(s) < shortest || len(s) > longest {
		return 0, false
	}
	if at, is := w.at[s]; is {
		return at, true
	}
	if w.once == nil {
		w.at, w.once = map[string]int{}, make([]said, window)
	}
	now := said{maphash.String(seed, s), owner}
	before := &w.once[now.what%window]
	if before.what != now.what || before.owner == owner || len(w.list) == mostWords {
		*before = now
		return 0, false
	}
	s = strings.Clone(s)
	w.at[s], w.list = len(w.list), append(w.list, s)
	return len(w.list) - 1, true
}
