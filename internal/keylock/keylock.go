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
}

// TryLock takes all the keys or none: exclusive ones for one holder alone, shared
// ones together with other sharers. On success it returns the function that gives
// them back, which has to be called once. On failure it names the key that is taken.
// A key that is listed as both counts as exclusive.
func (t *Table) TryLock(exclusive, shared []string) (unlock func(), busy string) {
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
			return nil, k
		}
	}
	if t.held == nil {
		t.held = make(map[string]int)
	}
	for k, alone := range want {
		if alone {
			t.held[k] = -1
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
		} else {
			t.held[k]--
		}
	}
}
