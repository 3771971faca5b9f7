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
