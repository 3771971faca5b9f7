package anynode

import (
	"context"
	"flag"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvme"
)

var multipath = flag.Bool("anynode.multipath", false, "try what is known to fail with nvme_core.multipath")

// TestFlushInFlight: what a consumer flushes while its home goes away is not said to be safe before the home has flushed it. With multipath the kernel says so all
// the same, which docs/use/any-node.md and doctor tell.
func TestFlushInFlight(t *testing.T) {
	if nvme.Multipath() && !*multipath {
		t.Skip("with nvme_core.multipath this kernel acknowledges a flush that nobody has carried out (docs/reliability.md); -anynode.multipath shows it")
	}
	c := newNodes(t)
	v := c.create("v", co.Block)
	first := consumers[0]
	c.again("claim it", func(ctx context.Context) error { return v.claim(ctx, first) })
	c.again("stage it", func(ctx context.Context) error { return v.up(ctx, first) })
	f, err := os.OpenFile(v.target(first), os.O_RDWR|unix.O_DIRECT, 0)
	check.OK(t, err)

	_, err = f.WriteAt(aligned(), 0)
	check.OK(t, err)
	exported := drivertest.Run(t, "sh", "-c", "cat /sys/kernel/config/nvmet/subsystems/*"+v.key()+"*/namespaces/1/device_path")
	name := drivertest.Run(t, "cat", "/sys/block/"+exported[len("/dev/"):]+"/dm/name")
	drivertest.Run(t, "dmsetup", "suspend", "--noflush", "--nolockfs", name)
	resume := func() { drivertest.Run(t, "dmsetup", "resume", name) }
	flushed := make(chan error, 1)
	go func() { flushed <- unix.Fdatasync(int(f.Fd())) }()
	time.Sleep(time.Second)
	select {
	case err := <-flushed:
		t.Errorf("flushed at a home that stands still: %v", err)
		flushed <- err
	default:
	}
	c.links(first, false)
	select {
	case err := <-flushed:
		t.Errorf("flushed at a home that is away: %v", err)
		flushed <- err
	case <-time.After(15 * time.Second):
	}
	resume()
	c.links(first, true)
	select {
	case err := <-flushed:
		check.OK(t, err)
	case <-time.After(patient):
		t.Error("never flushed")
	}
	check.OK(t, f.Close())
	v.leave(first)
	c.again("delete it", v.of.Delete)
}
