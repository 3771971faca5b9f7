// Package keylock locks by name: one operation at a time on each thing, any number of operations on different things. Nobody waits for a lock.
package keylock

import "sync"

// Keys of the locks of volumes, snapshots and group snapshots. Whoever works on one of these holds its lock.

// Volume returns the key for a volume, by the key of its ID.
func Volume(key string) string { return "volume/" + key }

// Snapshot returns the key for a snapshot, by the key of its ID.
func Snapshot(key string) string { return "snapshot/" + key }

// Group returns the key for a group snapshot, by the key of its ID.
func Group(key string) string { return "group/" + key }

// Table holds the locks. Its zero value is ready for use.
type Table struct {
	mu   sync.Mutex
	held map[string]int // -1: exclusive; n > 0: shared by n
	// yields has, for each key that is held exclusively by TryYielding, the function that tells its holder to yield.
	yields map[string]func()
}

// TryLock locks all the keys or none: exclusive ones for this holder alone, shared ones together with other sharers. On success it returns unlock, which has to
// be called once. Else unlock is nil, and busy is a key that is taken. A key in both lists is exclusive.
func (t *Table) TryLock(exclusive, shared []string) (unlock func(), busy string) {
	return t.try(exclusive, shared, nil)
}

// TryYielding is TryLock for work that may take long and can be interrupted. wanted is closed when a TryLock was refused one of the exclusive keys. A refused
// TryYielding does not close it.
func (t *Table) TryYielding(exclusive, shared []string) (unlock func(), wanted <-chan struct{}, busy string) {
	asked := make(chan struct{})
	unlock, busy = t.try(exclusive, shared, sync.OnceFunc(func() { close(asked) }))
	return unlock, asked, busy
}

// try is TryLock; with asked it is TryYielding, and asked is called when the holder has to yield.
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
