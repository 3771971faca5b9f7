package anynode

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

// TestHomeWithoutPower: a sync does not say that something is safe which the home lost with its power.
func TestHomeWithoutPower(t *testing.T) {
	c := newNodes(t)
	v := c.create("power", co.Block)
	first := consumers[0]
	c.again("claim it", func(ctx context.Context) error { return v.claim(ctx, first) })
	c.again("stage it", func(ctx context.Context) error { return v.up(ctx, first) })
	f, err := os.OpenFile(v.target(first), os.O_RDWR|unix.O_DIRECT, 0)
	check.OK(t, err)
	defer func() { _ = f.Close() }() // it was
	check.OK(t, f.Sync())
	images, err := filepath.Glob(filepath.Join(c.dir, "pool-of-home", "volumes", "*"))
	check.OK(t, err)
	flushed, err := os.ReadFile(images[0]) // what is safe from a power cut
	check.OK(t, err)
	data := aligned()
	copy(data, "written, and acknowledged")
	_, err = f.WriteAt(data, 8*block)
	check.OK(t, err)

	// The home loses its power, and has it again.
	c.agents[home].Kill()
	remove(t)
	check.OK(t, os.WriteFile(images[0], flushed, 0))
	boot := filepath.Join(c.dir, "boot_id")
	check.OK(t, os.WriteFile(boot, []byte("11111111-2222-3333-4444-555555555555\n"), 0o600))
	check.OK(t, unix.Mount(boot, "/proc/sys/kernel/random/boot_id", "", unix.MS_BIND, ""))
	t.Cleanup(func() { drivertest.Unmount(t, "/proc/sys/kernel/random/boot_id") })
	check.OK(t, c.agents[home].Start())

	// The disk has lost what it had acknowledged, so the sync must not say that it is safe; and the volume can be had again.
	synced := make(chan error, 1)
	go func() { synced <- f.Sync() }()
	select {
	case err := <-synced:
		if err == nil {
			t.Error("fsync said that it is safe, and it is lost")
		}
	case <-time.After(patient):
		t.Fatalf("fsync did not end\n%s", c.logs())
	}
	check.OK(t, f.Close())
	c.again("take it down", func(ctx context.Context) error { return v.down(ctx, first) })
	c.again("stage it again", func(ctx context.Context) error { return v.up(ctx, first) })
	c.again("take it down again", func(ctx context.Context) error { return v.down(ctx, first) })
	c.again("release it", func(ctx context.Context) error { return v.release(ctx, first) })
	c.again("delete it", v.of.Delete)
}

// remove takes what is exported out of the kernel, as a reboot does.
func remove(t testing.TB) {
	t.Helper()
	const root = "/sys/kernel/config/nvmet"
	for _, pattern := range []string{"/ports/*/subsystems/nqn.2026*", "/subsystems/nqn.2026*/namespaces/1", "/subsystems/nqn.2026*/allowed_hosts/*", "/subsystems/nqn.2026*", "/hosts/nqn.2026*", "/ports/42*"} {
		found, err := filepath.Glob(root + pattern)
		check.OK(t, err)
		for _, path := range found {
			check.OK(t, os.Remove(path))
		}
	}
}
