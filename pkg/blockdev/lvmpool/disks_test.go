package lvmpool_test

import (
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pools"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
)

// TestLVMDisks: a pool, and its location, know the physical volumes of the group, with those that were added after the pool was opened.
func TestLVMDisks(t *testing.T) {
	group := drivertest.NewGroup(t, 64*pooltest.MiB, 64*pooltest.MiB)
	url := group.URL() + "?reservePercent=0"
	pool := pooltest.OpenURL(t, url)
	defer func() { check.OK(t, pool.Close()) }()
	location, err := pools.Parse(url)
	check.OK(t, err)
	on := func(devices ...string) {
		t.Helper()
		var want []uint64
		for _, device := range devices {
			var st unix.Stat_t
			check.OK(t, unix.Stat(device, &st))
			want = append(want, st.Rdev)
		}
		slices.Sort(want)
		opened, ok := blockdev.As[blockdev.Founded](pool)
		if !ok {
			t.Fatal("the pool does not know what it is on")
		}
		for what, founded := range map[string]blockdev.Founded{"pool": opened, "location": location.(blockdev.Founded)} {
			have, err := founded.Foundations(t.Context())
			check.OK(t, err)
			if slices.Sort(have); !slices.Equal(have, want) {
				t.Errorf("the %s is on %v, want %v", what, have, want)
			}
		}
	}
	on(group.Devices...)
	another := drivertest.Disk(t, 64*pooltest.MiB)
	drivertest.Run(t, "vgextend", "-q", group.Name, another)
	on(append(slices.Clone(group.Devices), another)...)
	drivertest.Run(t, "vgreduce", "-q", group.Name, another)
	on(group.Devices...)
}
