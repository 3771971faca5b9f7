package filepool_test

import (
	"errors"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// TestFullAgain: several callers at once can have all the space of what was just deleted.
func TestFullAgain(t *testing.T) {
	for _, fs := range filesystems {
		t.Run(fs, func(t *testing.T) {
			t.Parallel() // it waits for the disk
			pool := pooltest.OpenedFiles(t, mountNew(t, fs)+"/pool")
			const fit, asking = 5, 16
			for round := range 25 {
				c := pooltest.CapacityOf(t, pool)
				size := (c.Available - 16*pooltest.MiB) / fit / (4 * pooltest.MiB) * (4 * pooltest.MiB)
				errs := pooltest.AtOnce(asking, func(i int) error {
					return pooltest.Second(pool.Create(t.Context(), blockdev.Spec{Ref: volNumber(i), Name: "a", Size: size}))
				})
				made := 0
				for _, err := range errs {
					if err == nil {
						made++
					} else if !errors.Is(err, errdefs.ErrNoSpace) {
						t.Fatal(err)
					}
				}
				// The space of earlier deletions may have come back only after the measurement; then there is room for more.
				if now := pooltest.CapacityOf(t, pool); made < fit || made > fit && now.Total <= c.Total {
					t.Fatalf("round %d: %d of %d were made: %+v, now %+v: %v", round, made, fit, c, now, errors.Join(errs...))
				}
				check.OK(t, errors.Join(pooltest.AtOnce(asking, func(i int) error { return pool.Delete(t.Context(), volNumber(i)) })...))
			}
		})
	}
}
