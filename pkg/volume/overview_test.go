package volume_test

import (
	"sync"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// TestOverviewHangs: while the disk of a pool hangs, the overview is returned in time, with the problem of that pool and all that is in other pools. However
// many overviews are asked for, one goroutine waits for the disk. Once it answers, everything is shown again.
func TestOverviewHangs(t *testing.T) {
	release := make(chan struct{})
	var mu sync.Mutex
	waiting, hung := 0, false
	pools := []blockdev.Pool{memory.NewDisk(100*mib).Open("good", nil), memory.NewDisk(100*mib).Open("bad", func(operation string, _ blockdev.Ref) error {
		mu.Lock()
		wait := hung && operation == "Capacity"
		if wait {
			waiting++
		}
		mu.Unlock()
		if wait {
			<-release
		}
		return nil
	})}
	mounts, err := mount.LoadTable()
	check.OK(t, err)
	local, err := volume.NewLocal(t.Context(), "n", pools, mounts, 0)
	check.OK(t, err)
	for _, pool := range []string{"good", "bad"} {
		_, err = local.Create(t.Context(), volume.Spec{Name: pool, Pool: pool, Size: volume.Range{Required: mib}})
		check.OK(t, err)
	}
	mu.Lock()
	hung = true
	mu.Unlock()
	local.SetPatience(4 * time.Second) // the other pool answers by then, also on a slow machine
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			o, err := local.Overview(t.Context(), nil)
			if err != nil || len(o.Volumes) != 1 || len(o.Missing) != 1 || len(o.Problems) != 1 || o.Problems[0].Reason != "PoolUnavailable" || o.Problems[0].Subject.Name != "n.bad" {
				t.Errorf("%v: %+v", err, o)
			}
		})
	}
	all.Wait()
	mu.Lock()
	if hung = false; waiting != 1 {
		t.Errorf("%d wait for the disk", waiting)
	}
	mu.Unlock()
	close(release)
	local.SetPatience(time.Minute)
	for range 2 { // the first one waits for the look that still is under way
		o, err := local.Overview(t.Context(), nil)
		if err != nil || len(o.Volumes) != 2 || len(o.Problems) != 0 || len(o.Missing) != 0 {
			t.Errorf("the disk answers again: %v: %+v", err, o)
		}
	}
}
