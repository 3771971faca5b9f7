package progress

import (
	"context"
	"sync"
	"testing"
)

func TestTable(t *testing.T) {
	var table Table
	if got := table.Running(); len(got) != 0 || table.Copied("fast") != 0 {
		t.Fatalf("an empty table has %v", got)
	}
	ctx, end := table.Track(t.Context(), "fast", "vol.a")
	if got := table.Running(); len(got) != 0 {
		t.Errorf("%v is running before any long step", got)
	}
	Begin(ctx, 100, 1000)
	Add(ctx, 200)
	Skip(ctx, 50)
	c, there := table.Find("fast", "vol.a")
	if !there || c.Done != 350 || c.Total != 1000 || c.Began.IsZero() {
		t.Errorf("%+v, %v; want 350 of 1000", c, there)
	}
	Add(ctx, 5000) // the source may have grown meanwhile: the copy is done, and not more than that
	if c, _ = table.Find("fast", "vol.a"); c.Done != 1000 {
		t.Errorf("%+v is more than done", c)
	}
	if _, there := table.Find("slow", "vol.a"); there {
		t.Error("found in another pool")
	}
	end()
	if _, there := table.Find("fast", "vol.a"); there || len(table.Running()) != 0 {
		t.Error("it is still there after its end")
	}
	if table.Copied("fast") != 5200 || table.Copied("slow") != 0 {
		t.Errorf("%d bytes copied in fast, %d in slow; want 5200 (without the hole, and after the end), 0", table.Copied("fast"), table.Copied("slow"))
	}
}

// TestUntracked: reports without Track do nothing.
func TestUntracked(t *testing.T) {
	ctx := context.Background()
	Begin(ctx, 0, 10)
	Add(ctx, 5)
	Skip(ctx, 5)
}

// TestAtOnce: copies of one pool at the same time are all counted (run it with the race detector).
func TestAtOnce(t *testing.T) {
	var table Table
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			ctx, end := table.Track(t.Context(), "fast", "vol.a")
			defer end()
			Begin(ctx, 0, 100)
			for range 100 {
				Add(ctx, 1)
				table.Running()
			}
		})
	}
	all.Wait()
	if got := table.Copied("fast"); got != 800 {
		t.Errorf("%d bytes copied, want 800", got)
	}
}
