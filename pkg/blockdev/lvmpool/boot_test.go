package lvmpool_test

import (
	"context"
	"slices"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
)

// until is a context that has ended once is says so. It tells nobody who waits for that, so no program is killed.
type until struct {
	context.Context
	is func() bool
}

func (until) Done() <-chan struct{} { return nil }

func (u until) Err() error {
	if u.is() {
		return context.Canceled
	}
	return nil
}

// TestLVMGrowthAtBoot: the machine goes down while what a volume is to grow by is zeroed. Whoever activates all volumes at boot does not show what others have
// had there, and the next start removes it.
func TestLVMGrowthAtBoot(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 512*pooltest.MiB)}
	f.url = f.group.URL() + "?reservePercent=0"
	f.start()
	f.make(pooltest.Vol("a"), 8*pooltest.MiB)
	spare := "grow." + pooltest.Vol("a").Key
	up := func() bool {
		d, err := dm.Find(f.group.Device(spare))
		check.OK(t, err)
		return d != nil
	}
	if _, err := f.pool.Expand(until{t.Context(), up}, pooltest.Vol("a"), 480*pooltest.MiB); err == nil {
		t.Fatal("it has grown, and was to be cut short")
	}
	check.OK(t, f.pool.Close())
	drivertest.Run(t, "vgchange", "-q", "-an", f.group.Name)
	if all := f.lv("lv_name"); !slices.Contains(all, spare) || up() {
		t.Fatalf("%s is up, or it is not left: %q", spare, all)
	}
	drivertest.Run(t, "vgchange", "-q", "-aay", f.group.Name)
	if up() {
		t.Errorf("%s is up after a boot", spare)
	}
	f.pool = pooltest.OpenURL(f, f.url)
	if all := f.lv("lv_name"); slices.Contains(all, spare) {
		t.Errorf("left after a start: %q", all)
	}
}
