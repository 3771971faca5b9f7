package lvmpool_test

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pools"
)

// TestLVMFlushes: what lvm2 changed is flushed on each disk of the group before a call returns, as lvm2 leaves it in the disks' caches. What an earlier
// driver had not flushed when it died is flushed by the next one. (tests/power cuts the power.)
func TestLVMFlushes(t *testing.T) {
	for _, kind := range []string{"linear", "thin"} {
		t.Run(kind, func(t *testing.T) {
			g := drivertest.NewGroup(t, 128<<20, 64<<20)
			url := g.URL()
			if kind == "thin" {
				url = g.ThinPool(t, "pool", "-L", "32M", g.Devices[0])
			}
			flushed := func(what string, do func() error) {
				t.Helper()
				before := flushes(t, g.Devices)
				if err := do(); err != nil {
					t.Fatalf("%s: %v", what, err)
				}
				for device, n := range flushes(t, g.Devices) {
					if n == before[device] {
						t.Errorf("%s: %s was not flushed", what, device)
					}
				}
			}
			var pool blockdev.Pool
			flushed("start", func() (err error) {
				pool, err = pools.Open(t.Context(), "p", url)
				return err
			})
			defer pool.Close()
			ref := blockdev.Ref{Kind: blockdev.Volume, Key: strings.Repeat("a", 32)}
			flushed("create", func() error {
				_, err := pool.Create(t.Context(), blockdev.Spec{Ref: ref, Name: "a", Size: pool.Granularity()})
				return err
			})
			flushed("change a label", func() error {
				_, err := pool.SetLabels(t.Context(), ref, func(labels map[string]string) error {
					labels["key"] = "value"
					return nil
				})
				return err
			})
			flushed("expand", func() error {
				_, err := pool.Expand(t.Context(), ref, 2*pool.Granularity())
				return err
			})
			flushed("delete", func() error { return pool.Delete(t.Context(), ref) })
		})
	}
}

// flushes returns how many flushes each device has carried out (Documentation/block/stat.rst).
func flushes(t *testing.T, devices []string) map[string]int {
	t.Helper()
	counts := map[string]int{}
	for _, device := range devices {
		text, err := os.ReadFile("/sys/class/block/" + filepath.Base(device) + "/stat")
		if err != nil {
			t.Fatal(err)
		}
		n, err := strconv.Atoi(strings.Fields(string(text))[15])
		if err != nil {
			t.Fatal(err)
		}
		counts[device] = n
	}
	return counts
}
