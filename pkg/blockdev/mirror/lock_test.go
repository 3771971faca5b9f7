package mirror

import (
	"fmt"
	"sync"
	"testing"
)

// TestLock: one call at a time changes a mirror, and the table of turns keeps nothing of a mirror that nobody changes.
func TestLock(t *testing.T) {
	var all sync.WaitGroup
	var changes [3]int
	for i := range 300 {
		all.Go(func() {
			defer lock(fmt.Sprint("mirror ", i%3))()
			changes[i%3]++
		})
	}
	all.Wait()
	if changes != [3]int{100, 100, 100} {
		t.Errorf("changed %v times", changes)
	}
	if n := changing.Len(); n > 0 {
		t.Errorf("kept are the locks of %d mirrors", n)
	}
}
