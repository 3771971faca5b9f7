package anynode

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvme"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvmet"
)

// TestWire: what a pod writes into a volume of another node can be read on the wire without TLS, and with --remote-tls not; and no log has a secret.
func TestWire(t *testing.T) {
	c := newNodes(t)
	v := c.create("wire", co.Block)
	first := consumers[0]
	c.again("claim it", func(ctx context.Context) error { return v.claim(ctx, first) })
	c.again("stage it", func(ctx context.Context) error { return v.up(ctx, first) })
	keys, err := filepath.Glob("/sys/class/nvme/*/tls_key")
	if check.OK(t, err); (len(keys) == 1) != drivertest.WithTLS() {
		t.Errorf("connections with TLS: %q", keys)
	}

	marker := []byte("a word that is nowhere else. ")
	heard := drivertest.Wire(t, "to-home")
	f, err := os.OpenFile(v.target(first), os.O_RDWR, 0)
	check.OK(t, err)
	_, err = f.WriteAt(bytes.Repeat(marker, 4096), mib)
	check.OK(t, errors.Join(err, f.Sync(), f.Close()))
	all := heard()
	if len(all) < 4096*len(marker) || bytes.Contains(all, marker) == drivertest.WithTLS() {
		t.Errorf("of %d bytes on the wire, what was written can be read: %t", len(all), bytes.Contains(all, marker))
	}

	c.again("take it down", func(ctx context.Context) error { return v.down(ctx, first) })
	c.again("release it", func(ctx context.Context) error { return v.release(ctx, first) })
	c.again("delete it", v.of.Delete)
	if left := drivertest.Gone(func() []string { return drivertest.Keys(t, nvmet.Prefix) }); len(left) > 0 {
		t.Errorf("keys that are left: %q", left)
	}
	if logs := c.logs(); strings.Contains(logs, "NVMeTLSkey") || strings.Contains(logs, "DHHC-1") {
		t.Error("the logs have secrets")
	}
}

// keyed are how many connections there are with TLS.
func keyed(t *testing.T) (n int) {
	t.Helper()
	paths, err := filepath.Glob("/sys/class/nvme/*/tls_key")
	check.OK(t, err)
	for _, path := range paths {
		if key, err := os.ReadFile(path); err == nil && len(bytes.TrimSpace(key)) > 0 {
			n++
		}
	}
	return n
}

// TestTLSSwitched: what is used without TLS goes on, and can be staged again, when its home is to give with TLS; and when the machine of who uses it has started anew, it comes back by
// the same claim, with TLS.
func TestTLSSwitched(t *testing.T) {
	drivertest.NeedTLS(t)
	first, plain := consumers[0], []string{"--remote-tls=false"}
	c := newNodesWith(t, map[string][]string{home: plain, first: plain, consumers[1]: plain})
	v := c.create("switched", co.Block)
	c.again("claim it", func(ctx context.Context) error { return v.claim(ctx, first) })
	c.again("stage it", func(ctx context.Context) error { return v.up(ctx, first) })
	delete(c.more, home)
	check.OK(t, c.agents[home].Stop())
	c.agents[home] = c.agent(c.program, home)
	before, err := os.Stat(v.target(first))
	check.OK(t, err)
	for range 2 {
		c.again("stage it again", func(ctx context.Context) error { return v.up(ctx, first) })
		check.OK(t, errors.Join(c.agents[first].Start(), c.agents[first].Ready(t.Context())))
	}
	if after, err := os.Stat(v.target(first)); err != nil || !os.SameFile(before, after) || keyed(t) != 0 {
		t.Errorf("staged again, it is another device, or has TLS: %v, %d", err, keyed(t))
	}

	// What a start of the consumer's machine leaves.
	check.OK(t, c.agents[first].Stop())
	there := v.at(first)
	drivertest.Run(t, "umount", v.target(first))
	drivertest.Run(t, "umount", filepath.Join(there.Staging, "device"))
	for _, name := range strings.Fields(drivertest.Run(t, "dmsetup", "ls")) {
		if strings.HasPrefix(name, "ashlar-remote-") {
			drivertest.Run(t, "dmsetup", "remove", name)
		}
	}
	all, err := nvme.List(nvmet.Prefix)
	if check.OK(t, err); len(all) != 1 {
		t.Fatalf("connected are %+v", all)
	}
	check.OK(t, nvme.Disconnect(t.Context(), all[0].NQN))
	check.OK(t, errors.Join(c.agents[first].Start(), c.agents[first].Ready(t.Context())))
	c.again("stage it after a reboot", func(ctx context.Context) error { return v.up(ctx, first) })
	if keyed(t) != 1 {
		t.Error("it came back without TLS")
	}
	c.again("take it down", func(ctx context.Context) error { return v.down(ctx, first) })
	c.again("release it", func(ctx context.Context) error { return v.release(ctx, first) })
	c.again("delete it", v.of.Delete)
}

// TestTLSHDAway: a home whose driver starts while no tlshd runs ends what it gave; what comes then waits until one runs, and not for another start of the driver.
func TestTLSHDAway(t *testing.T) {
	drivertest.NeedTLS(t)
	c := newNodes(t)
	first := consumers[0]
	v := c.create("away", co.Block)
	c.again("claim it", func(ctx context.Context) error { return v.claim(ctx, first) })
	c.again("stage it", func(ctx context.Context) error { return v.up(ctx, first) })
	c.tlshd[home]()
	check.OK(t, errors.Join(c.agents[home].Start(), c.agents[home].Ready(t.Context())))
	c.again("take it down", func(ctx context.Context) error { return v.down(ctx, first) })
	c.again("release it", func(ctx context.Context) error { return v.release(ctx, first) })
	if all := left(); len(all) > 0 {
		t.Errorf("without tlshd at home, there is still %q", all)
	}
	drivertest.RunTLSHD(t, home)
	c.again("claim it again", func(ctx context.Context) error { return v.claim(ctx, first) })
	c.again("stage it again", func(ctx context.Context) error { return v.up(ctx, first) })
	c.again("take it down again", func(ctx context.Context) error { return v.down(ctx, first) })
	c.again("release it again", func(ctx context.Context) error { return v.release(ctx, first) })
	c.again("delete it", v.of.Delete)
}
