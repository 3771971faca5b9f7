package filepool_test

import (
	"context"
	"errors"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
)

// TestFrozen: while somebody has frozen the filesystem of a pool (fsfreeze(8)), who asks for its room or its health waits no longer than its own time, or ten seconds since the first one asked, and leaves nothing
// behind. From then on it has room for nothing, and health says what to do, at once. Thawed, all is as it was.
func TestFrozen(t *testing.T) {
	dir := mountNew(t, "ext4")
	pool := pooltest.OpenedFiles(t, dir)
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: pooltest.MiB})
	before := pooltest.CapacityOf(t, pool)
	run(t, "fsfreeze", "-f", dir)
	thaw := func() { _ = exec.Command("fsfreeze", "-u", dir).Run() }
	t.Cleanup(thaw)
	guard := time.AfterFunc(40*time.Second, thaw) // whoever waits for the kernel cannot be ended
	defer guard.Stop()
	begun, running := time.Now(), runtime.NumGoroutine()
	for i := range 20 {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		if i%2 == 0 {
			if _, err := pool.Capacity(ctx); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("capacity in a call that ends: %v", err)
			}
		} else if problems := pool.PoolHealth(ctx); len(problems) > 0 {
			t.Errorf("health in a call that ends: %v", problems)
		}
		cancel()
	}
	if took, more := time.Since(begun), runtime.NumGoroutine()-running; took > 8*time.Second || more > 1 {
		t.Errorf("20 calls took %s, and left %d goroutines", took, more)
	}
	check.OK(t, pooltest.Second(pool.Get(t.Context(), pooltest.Vol("a"))))
	for i := range 2 {
		asked := time.Now()
		c, err := pool.Capacity(t.Context())
		if err != nil || c.Available != 0 || c.MaxVolume != 0 || c.Total == 0 || c.Promised != before.Promised {
			t.Errorf("capacity: %+v, %v", c, err)
		}
		problems := pool.PoolHealth(t.Context())
		if !slices.Equal(reasons(problems), []string{"2 PoolReadOnly"}) || !strings.Contains(problems[0].Message, "fsfreeze -u "+dir) {
			t.Errorf("health: %v", problems)
		}
		if took := time.Since(asked); took > 15*time.Second || i > 0 && took > time.Second {
			t.Errorf("look %d took %s", i, took)
		}
	}
	run(t, "fsfreeze", "-u", dir)
	for end := time.Now().Add(10 * time.Second); len(pool.PoolHealth(t.Context())) > 0 && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
	}
	if c, err := pool.Capacity(t.Context()); err != nil || c.Available == 0 {
		t.Errorf("capacity after the thaw: %+v, %v", c, err)
	}
}
