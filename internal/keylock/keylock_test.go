package keylock

import (
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
)

func TestTryLock(t *testing.T) {
	type keys struct{ exclusive, shared []string }
	for name, c := range map[string]struct {
		held, want keys
		busy       string
	}{
		"nothing held":              {keys{}, keys{[]string{"a"}, []string{"b"}}, ""},
		"nothing wanted":            {keys{[]string{"a"}, nil}, keys{}, ""},
		"others":                    {keys{[]string{"a"}, []string{"b"}}, keys{[]string{"c"}, []string{"d"}}, ""},
		"exclusive against itself":  {keys{[]string{"a"}, nil}, keys{[]string{"a"}, nil}, "a"},
		"shared against exclusive":  {keys{[]string{"a"}, nil}, keys{nil, []string{"a"}}, "a"},
		"exclusive against shared":  {keys{nil, []string{"a"}}, keys{[]string{"a"}, nil}, "a"},
		"shared with shared":        {keys{nil, []string{"a"}}, keys{nil, []string{"a"}}, ""},
		"one of several":            {keys{[]string{"b"}, nil}, keys{[]string{"a", "b", "c"}, nil}, "b"},
		"both is exclusive":         {keys{[]string{"a"}, []string{"a"}}, keys{nil, []string{"a"}}, "a"},
		"wanting both is exclusive": {keys{nil, []string{"a"}}, keys{[]string{"a"}, []string{"a"}}, "a"},
		"twice is once":             {keys{}, keys{[]string{"a", "a"}, []string{"b", "b"}}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			var table Table
			release, busy := table.TryLock(c.held.exclusive, c.held.shared)
			if busy != "" {
				t.Fatalf("%s is busy in a new table", busy)
			}
			unlock, busy := table.TryLock(c.want.exclusive, c.want.shared)
			if busy != c.busy || (unlock == nil) != (busy != "") {
				t.Fatalf("busy %q, want %q; unlock given: %v", busy, c.busy, unlock != nil)
			}
			if unlock != nil {
				unlock()
			}
			release()
			// When all are unlocked, nothing is held, not even by the try that failed.
			all := slices.Concat(c.held.exclusive, c.held.shared, c.want.exclusive, c.want.shared)
			if _, busy := table.TryLock(all, nil); busy != "" {
				t.Errorf("%s is still held", busy)
			}
		})
	}
}

// TestYielding: a holder that yields is told when another caller was refused a key that it holds exclusively, but not by callers that would yield themselves,
// and not after it has unlocked.
func TestYielding(t *testing.T) {
	isClosed := func(c <-chan struct{}) bool {
		select {
		case <-c:
			return true
		default:
			return false
		}
	}
	var table Table
	unlock, wanted, busy := table.TryYielding([]string{"a", "b"}, []string{"c"})
	if busy != "" {
		t.Fatalf("%s is busy in a new table", busy)
	}
	if _, _, busy := table.TryYielding([]string{"b"}, nil); busy != "b" || isClosed(wanted) {
		t.Errorf("another that yields: busy %q, asked to yield: %v", busy, isClosed(wanted))
	}
	if _, busy := table.TryLock([]string{"c"}, nil); busy != "c" || isClosed(wanted) {
		t.Errorf("what it shares: busy %q, asked to yield: %v", busy, isClosed(wanted))
	}
	for range 2 {
		if _, busy := table.TryLock([]string{"d"}, []string{"a", "b"}); busy == "" || !isClosed(wanted) {
			t.Errorf("what it has for itself: busy %q, asked to yield: %v", busy, isClosed(wanted))
		}
	}
	unlock()
	unlock, again, busy := table.TryYielding([]string{"a"}, nil)
	if busy != "" || isClosed(again) {
		t.Errorf("the next one: busy %q, asked to yield: %v", busy, isClosed(again))
	}
	unlock()
	unlock, busy = table.TryLock([]string{"a"}, nil)
	if busy != "" {
		t.Errorf("%s is still held", busy)
	}
	if _, second := table.TryLock([]string{"a"}, nil); second != "a" || isClosed(again) {
		t.Errorf("of one that does not yield: busy %q, an earlier one was asked: %v", second, isClosed(again))
	}
	unlock()
}

// TestSharers: an exclusive lock can be had only after the last sharer has unlocked.
func TestSharers(t *testing.T) {
	var table Table
	var unlocks []func()
	for range 3 {
		unlock, busy := table.TryLock(nil, []string{"a"})
		if busy != "" {
			t.Fatal("a shared key is busy for a sharer")
		}
		unlocks = append(unlocks, unlock)
	}
	for i, unlock := range unlocks {
		if _, busy := table.TryLock([]string{"a"}, nil); busy != "a" {
			t.Fatalf("exclusive with %d sharers: busy %q", len(unlocks)-i, busy)
		}
		unlock()
	}
	if _, busy := table.TryLock([]string{"a"}, nil); busy != "" {
		t.Errorf("%s is busy after the last sharer", busy)
	}
}

// TestStress: counters that only their locks guard are right in the end. The race detector finds a lock that does not exclude others.
func TestStress(t *testing.T) {
	const keys, workers, rounds = 5, 8, 2000
	var table Table
	var counters [keys]int
	var wanted [keys]atomic.Int64
	var all sync.WaitGroup
	for worker := range workers {
		all.Go(func() {
			random := rand.New(rand.NewPCG(uint64(worker), 1))
			for range rounds {
				picked := random.Perm(keys)[:3]
				names := func(indices []int) (s []string) {
					for _, i := range indices {
						s = append(s, strconv.Itoa(i))
					}
					return s
				}
				unlock, busy := table.TryLock(names(picked[:2]), names(picked[2:]))
				if busy != "" {
					continue
				}
				_ = counters[picked[2]]
				for _, i := range picked[:2] {
					counters[i]++
					wanted[i].Add(1)
				}
				unlock()
			}
		})
	}
	all.Wait()
	for i := range counters {
		if int64(counters[i]) != wanted[i].Load() || counters[i] == 0 {
			t.Errorf("key %d was counted %d times, want %d", i, counters[i], wanted[i].Load())
		}
	}
	if len(table.held) != 0 {
		t.Errorf("held in the end: %v", table.held)
	}
}
