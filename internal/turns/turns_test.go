package turns

import (
	"context"
	"fmt"
	"sync"
	"testing"
)

// TestTable: one caller at a time has the turn, and nothing is kept of things that nobody works on.
func TestTable(t *testing.T) {
	var table Table[string]
	var all sync.WaitGroup
	var changes [3]int
	for i := range 300 {
		all.Go(func() {
			end, err := table.Begin(context.Background(), fmt.Sprint("thing ", i%3))
			if err != nil {
				t.Error(err)
				return
			}
			defer end()
			changes[i%3]++
		})
	}
	all.Wait()
	if changes != [3]int{100, 100, 100} {
		t.Errorf("changed %v times", changes)
	}
	if n := table.Len(); n > 0 {
		t.Errorf("kept are %d", n)
	}
}
