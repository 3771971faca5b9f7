package nvme_test

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/secret"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvme"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvmet"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// newPSK returns a new secret of TLS, as homes make it.
func newPSK() secret.Text {
	key := make([]byte, 32)
	_, _ = rand.Read(key) // it never fails
	return nvmet.PSK(key)
}

// ephemeral is what a host says in the handshake if each connection is to have keys of its own: its psk_key_exchange_modes are psk_dhe_ke (RFC 8446,
// 4.2.9).
var ephemeral = []byte{0, 45, 0, 2, 1, 1}

// said connects, writes words to a device, reads them again on the disk, and returns what went over the wire.
func said(t *testing.T, c nvme.Connection, disk string, words []byte) []byte {
	t.Helper()
	heard := drivertest.Wire(t, "ashlar-c")
	device := connect(t, c)
	if device.TLS != (c.PSK != (secret.Text{})) {
		t.Errorf("the device is %+v, with %v", device, c.PSK)
	}
	f, err := os.OpenFile(device.Path, os.O_RDWR, 0)
	check.OK(t, err)
	_, err = f.WriteAt(words, mib)
	check.OK(t, errors.Join(err, f.Sync(), f.Close()))
	if !bytes.Contains(content(t, disk), words) {
		t.Error("the disk has not what was written")
	}
	if !bytes.Contains(content(t, device.Path), words) {
		t.Error("the device has not what was written")
	}
	all := heard()
	if len(all) < 2*len(words) {
		t.Errorf("%d bytes went over the wire, of %d that were written and read", len(all), len(words))
	}
	return all
}

// TestTLS: without TLS the words can be read on the wire, and with it not. Without TLS, or with another key, nobody connects to an export with TLS.
func TestTLS(t *testing.T) {
	drivertest.NeedTLS(t)
	home(t)
	marker := []byte("a word that is nowhere else. ")
	words := bytes.Repeat(marker, 4096)
	plain, hidden := drivertest.Disk(t, 8*mib), drivertest.Disk(t, 8*mib)

	t.Run("without", func(t *testing.T) {
		_, c := exportedWith(t, 1, plain, secret.Text{})
		if !bytes.Contains(said(t, c, plain, words), marker) {
			t.Error("without TLS, what was written is not on the wire: this test sees nothing")
		}
	})
	t.Run("with", func(t *testing.T) {
		e, c := exportedWith(t, 2, hidden, newPSK())
		for what, change := range map[string]func(c *nvme.Connection){
			"plain text":     func(c *nvme.Connection) { c.PSK = secret.Text{} },
			"another key":    func(c *nvme.Connection) { c.PSK = newPSK() },
			"another host":   func(c *nvme.Connection) { c.Host = nvmet.Prefix + "node:c:0" },
			"another secret": func(c *nvme.Connection) { c.Secret = newSecret() },
		} {
			other := c
			change(&other)
			began := time.Now()
			_, err := nvme.Connect(t.Context(), other)
			if !errors.Is(err, errdefs.ErrUnavailable) || strings.Contains(err.Error(), "NVMeTLSkey") || strings.Contains(err.Error(), "DHHC") {
				t.Errorf("%s: %v", what, err)
			}
			t.Logf("%s: %v, after %s", what, err, time.Since(began).Round(time.Millisecond))
		}
		all := said(t, c, hidden, words)
		if bytes.Contains(all, marker) {
			t.Error("with TLS, what was written can be read on the wire")
		}
		if !bytes.Contains(all, ephemeral) {
			t.Error("the host may go without keys of the connection's own: who learns its key later could read what was written")
		}
		if keys := drivertest.Keys(t, e.NQN); len(keys) != 2 {
			t.Errorf("while it is connected, the keys of host and target are %q", keys)
		}
	})
	if left := drivertest.Gone(func() []string { return drivertest.Keys(t, nvmet.Prefix) }); len(left) > 0 {
		t.Errorf("keys that are left: %q", left)
	}
}

// TestEncrypted: with Encrypted, Connect makes no connection in plain text. It finds one that is there.
func TestEncrypted(t *testing.T) {
	home(t)
	_, c := exportedWith(t, 1, drivertest.Disk(t, 8*mib), secret.Text{})
	encrypted := c
	encrypted.Encrypted = true
	_, err := nvme.Connect(t.Context(), encrypted)
	if !errors.Is(err, errdefs.ErrPrecondition) || !strings.Contains(err.Error(), "--remote-tls") {
		t.Errorf("what is given in plain text: %v", err)
	}
	if have, err := nvme.List(nvmet.Prefix); err != nil || len(have) > 0 {
		t.Errorf("connected are %+v, %v", have, err)
	}
	plain := connect(t, c)
	if have := connect(t, encrypted); have.Number != plain.Number || have.TLS {
		t.Errorf("what is connected is %+v, and was %+v", have, plain)
	}
}

// TestTLSKey: kernels from 6.7 to 6.11 have the attribute tls_key for all controllers. A connection in plain text is not taken for encrypted there. The
// test has a folder as such a kernel shows it.
func TestTLSKey(t *testing.T) {
	for _, c := range []struct {
		what, state, key string
		there, want      bool
	}{
		{"a kernel without TLS, or without for this controller", "live", "", false, false},
		{"with TLS", "live", "1f4b5a2c\n", true, true},
		{"in plain text, with the attribute of all", "live", "", true, false},
		{"which connects again, with TLS", "connecting", "", true, true},
		{"which connects again, of a kernel that does not forget", "resetting", "1f4b5a2c\n", true, true},
		{"which connects again, without the attribute", "connecting", "", false, false},
	} {
		folder := t.TempDir()
		check.OK(t, os.WriteFile(filepath.Join(folder, "state"), []byte(c.state+"\n"), 0o600))
		if c.there {
			check.OK(t, os.WriteFile(filepath.Join(folder, "tls_key"), []byte(c.key), 0o600))
		}
		have := nvme.Shown(folder)
		if have.TLS != c.want || have.State != c.state {
			t.Errorf("%s: it is %+v", c.what, have)
		}
		if (nvme.Connection{}).Plain(have) || (nvme.Connection{PSK: newPSK()}).Plain(have) == c.want {
			t.Errorf("%s: who wants TLS, or does not, takes it otherwise", c.what)
		}
	}
}

// TestTLSHDAway: while there is no tlshd, connections go on, and new ones are refused, which the error says. One that was cut off comes back when tlshd
// does.
func TestTLSHDAway(t *testing.T) {
	drivertest.NeedTLS(t)
	home(t)
	_, c := exported(t, 1, drivertest.Disk(t, 8*mib))
	_, other := exported(t, 2, drivertest.Disk(t, 8*mib))
	w := write(t, connect(t, c).Path, 2)
	w.until(t, 20, time.Minute)
	stopTLSHD()
	w.until(t, 20, time.Minute)
	if _, err := nvme.Connect(t.Context(), other); !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), "no tlshd runs") {
		t.Errorf("without tlshd: %v", err)
	}
	link(t, "down")
	if still := drivertest.Gone(func() (live []string) {
		if device, err := nvme.Find(c.NQN); err != nil || device.Live() {
			live = append(live, device.State)
		}
		return live
	}); len(still) > 0 {
		t.Fatalf("cut off, it is %q", still)
	}
	link(t, "up")
	before := w.count()
	if waiting := drivertest.Gone(func() []string {
		if strings.Contains(drivertest.Run(t, "dmesg"), "failed to start TLS") {
			return nil
		}
		return []string{"an attempt to connect again"}
	}); len(waiting) > 0 {
		t.Errorf("the kernel made no %s", waiting)
	}
	if device, err := nvme.Find(c.NQN); err != nil || device.Live() || !device.TLS || w.count() != before {
		t.Errorf("without tlshd it is %+v, %v, and wrote %d times", device, err, w.count()-before)
	}
	drivertest.RunTLSHD(t, "")
	w.until(t, 20, time.Minute)
}

// TestTLSHDEarly: a tlshd that was started before the kernel's modules were loaded, and so before there was a keyring, refuses handshakes until it is
// started again. The error of Connect says so.
func TestTLSHDEarly(t *testing.T) {
	drivertest.NeedTLS(t)
	home(t)
	_, c := exported(t, 1, drivertest.Disk(t, 8*mib))
	drivertest.Run(t, "sh", "-c", "ip netns pids "+netns+" | xargs kill -KILL")
	early := exec.Command("nsenter", "--net=/run/netns/"+netns, "unshare", "--mount", "sh", "-c", "mount --bind /dev/null /proc/keys; exec $ASHLAR_TLSHD --stderr")
	said, err := os.Create(filepath.Join(t.TempDir(), "said"))
	check.OK(t, err)
	early.Stderr = said
	check.OK(t, early.Start())
	refused := func() []string {
		_, err := nvme.Connect(t.Context(), c)
		words, unread := os.ReadFile(said.Name())
		if check.OK(t, unread); errors.Is(err, errdefs.ErrUnavailable) && strings.Contains(err.Error(), "restart it where") && bytes.Contains(words, []byte("failed to search 'psk' key")) {
			return nil
		}
		return []string{fmt.Sprint(err), string(words)}
	}
	if left := drivertest.Gone(refused); len(left) > 0 {
		t.Errorf("with a tlshd that has no keyring: %q", left)
	}
	check.OK(t, early.Process.Kill())
	_ = early.Wait() // it was killed
	check.OK(t, said.Close())
	drivertest.RunTLSHD(t, netns)
	connect(t, c)
}

// TestTLSWithoutDNS: while DNS servers do not answer, a connection to a host that is in /etc/hosts is made at once.
func TestTLSWithoutDNS(t *testing.T) {
	drivertest.NeedTLS(t)
	home(t)
	silent, err := net.ListenPacket("udp", "10.77.0.2:53")
	check.OK(t, err)
	t.Cleanup(func() { _ = silent.Close() })
	for path, text := range map[string]string{"/etc/resolv.conf": "nameserver 10.77.0.2\n", "/etc/hosts": homeIP + " home\n10.77.0.2 consumer\n"} {
		file := filepath.Join(t.TempDir(), filepath.Base(path))
		check.OK(t, os.WriteFile(file, []byte(text), 0o600))
		drivertest.Run(t, "mount", "--bind", file, path)
		t.Cleanup(func() { drivertest.Run(t, "umount", path) })
	}
	_, c := exported(t, 1, drivertest.Disk(t, 8*mib))
	began := time.Now()
	connect(t, c)
	if took := time.Since(began); took > 9*time.Second { // one silent server costs 10 s
		t.Errorf("it took %s", took)
	}
}

// TestWithoutTLS: a host that cannot encrypt does not connect, and the error says what is missing.
func TestWithoutTLS(t *testing.T) {
	if drivertest.WithTLS() {
		t.Skip("it can")
	}
	home(t)
	_, c := exported(t, 1, drivertest.Disk(t, 8*mib))
	c.PSK = newPSK()
	_, err := nvme.Connect(t.Context(), c)
	unsupported := errors.Is(err, errdefs.ErrUnsupported) && strings.Contains(err.Error(), "CONFIG_NVME_TCP_TLS, Linux 6.7")
	alone := errors.Is(err, errdefs.ErrUnavailable) && strings.Contains(err.Error(), "no tlshd runs")
	if !unsupported && !alone || strings.Contains(err.Error(), "NVMeTLSkey") {
		t.Errorf("with TLS: %v", err)
	}
	if _, err := nvme.Find(c.NQN); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("it is connected: %v", err)
	}
}
