package pack

import (
	"hash/maphash"
	"strings"
)

const (
	mostWords         = 4096   // of a format; they are never forgotten
	shortest, longest = 3, 256 // bytes of a word
	window            = 4096   // about how many strings are remembered that one owner said
	reach             = 4096   // bytes before a string in which it is looked for: in all of a long text, each would take the longer
)

// words are what values of several owners say, as the names of nodes. Its zero value is ready.
type words struct {
	at   map[string]int // in list
	list []string       // it only grows
	once []said         // by the hash of what was said
}

// said is what one owner said; both by their hashes.
type said struct{ what, owner uint64 }

var seed = maphash.MakeSeed()

// find returns where in list a string is, which an owner says. What it is the second one to say becomes a word.
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
