// Package keylock locks by name: one operation at a time on each thing, any number
// of operations on different things, and nobody ever waits.
package keylock

import "sync"

// The names of the locks: of a volume, a snapshot and a group snapshot, by their keys.
// Whoever works on one takes its lock.

// Volume is the name of the lock of a volume.
func Volume(key string) string { return "volume/" + key }

// Snapshot is the name of the lock of a snapshot.
func Snapshot(key string) string { return "snapshot/" + key }

// Group is the name of the lock of a group snapshot.
func Group(key string) string { return "group/" + key }

// Table holds the locks. Its zero value is ready for use.
type Table struct {
	mu   sync.Mutex
	held map[string]int // -1: exclusive; n > 0: n sharers
	// yields are the keys whose holder gives way, and what tells it that it is asked to.
	yields map[string]func()
}

// TryLock takes all the keys or none: exclusive ones for one holder alone, shared
// ones together with other sharers. On success it returns the function that gives
// them back, which has to be called once. On failure it names the key that is taken.
// A key that is listed as both counts as exclusive.
func (t *Table) TryLock(exclusive, shared []string) (unlock func(), busy string) {
	return t.try(exclusive, shared, nil)
}

// TryYielding is TryLock for work that may last, and can be interrupted: wanted is closed when
// somebody else was refused one of the exclusive keys. Those who yield do not ask each other to.
func (t *Table) TryYielding(exclusive, shared []string) (unlock func(), wanted <-chan struct{}, busy string) {
	asked := make(chan struct{})
	unlock, busy = t.try(exclusive, shared, sync.OnceFunc(func() { close(asked) }))
	return unlock, asked, busy
}

// try is TryLock, or with a function to be called when it is asked to yield, TryYielding.
func (t *Table) try(exclusive, shared []string, asked func()) (unlock func(), busy string) {
	want := make(map[string]bool, len(exclusive)+len(shared)) // key -> exclusive
	for _, k := range shared {
		want[k] = false
	}
	for _, k := range exclusive {
		want[k] = true
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for k, alone := range want {
		if n := t.held[k]; n < 0 || (alone && n > 0) {
			busy = k
			if yield := t.yields[k]; yield != nil && asked == nil {
				yield()
			}
		}
	}
	if busy != "" {
		return nil, busy
	}
	if t.held == nil {
		t.held, t.yields = make(map[string]int), make(map[string]func())
	}
	for k, alone := range want {
		if alone {
			t.held[k], t.yields[k] = -1, asked
		} else {
			t.held[k]++
		}
	}
	return func() { t.release(want) }, ""
}

func (t *Table) release(keys map[string]bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for k, alone := range keys {
		if alone || t.held[k] == 1 {
			delete(t.held, k)
			delete(t.yields, k)
		} else {
			t.held[k]--
		}
	}
}
