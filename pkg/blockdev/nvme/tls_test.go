package nvme_test

import (
	"bytes"
	"crypto/rand"
	"errors"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvme"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvmet"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// newPSK is a new secret of TLS, as homes make them.
func newPSK() string {
	key := make([]byte, 32)
	_, _ = rand.Read(key) // it never fails
	return nvmet.PSK(key)
}

// wire records what goes over the link of the consumer, until heard is called.
func wire(t *testing.T) (heard func() []byte) {
	t.Helper()
	const everything = 0x0300 // ETH_P_ALL, as the network has it
	socket, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, everything)
	check.OK(t, err)
	link, err := net.InterfaceByName("ashlar-c")
	check.OK(t, err)
	check.OK(t, unix.Bind(socket, &unix.SockaddrLinklayer{Protocol: everything, Ifindex: link.Index}))
	check.OK(t, unix.SetsockoptInt(socket, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64*mib))
	check.OK(t, unix.SetsockoptTimeval(socket, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 1000}))
	var all []byte
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		packet := make([]byte, 1<<17) // with offloads they are larger than on a cable
		for {
			n, err := unix.Read(socket, packet)
			if n > 0 {
				all = append(all, packet[:n]...)
				continue
			}
			select {
			case <-end:
				return
			default:
				if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) {
					t.Errorf("what goes over the link: %v", err)
					return
				}
			}
		}
	}()
	return func() []byte {
		close(end)
		<-ended
		check.OK(t, unix.Close(socket))
		return all
	}
}

// said writes words to a device, reads them again from the disk's side, and returns what went over the wire.
func said(t *testing.T, c nvme.Connection, disk string, words []byte) []byte {
	t.Helper()
	device := connect(t, c)
	if device.TLS != (c.PSK != "") {
		t.Errorf("the device is %+v, of %q", device, c.PSK)
	}
	heard := wire(t)
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

// TestTLS: without TLS what is written can be read on the wire, and with it not; and nobody connects to what demands it without it, or with another key.
func TestTLS(t *testing.T) {
	drivertest.NeedTLS(t)
	home(t)
	marker := []byte("a word that is nowhere else. ")
	words := bytes.Repeat(marker, 4096)
	plain, secret := drivertest.Disk(t, 8*mib), drivertest.Disk(t, 8*mib)

	t.Run("without", func(t *testing.T) {
		_, c := exportedWith(t, 1, plain, "")
		if !bytes.Contains(said(t, c, plain, words), marker) {
			t.Error("without TLS, what was written is not on the wire: this test sees nothing")
		}
	})
	t.Run("with", func(t *testing.T) {
		e, c := exportedWith(t, 2, secret, newPSK())
		for what, change := range map[string]func(c *nvme.Connection){
			"plain text":     func(c *nvme.Connection) { c.PSK = "" },
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
		if bytes.Contains(said(t, c, secret, words), marker) {
			t.Error("with TLS, what was written can be read on the wire")
		}
		keys, err := os.ReadFile("/proc/keys")
		check.OK(t, err)
		if !strings.Contains(string(keys), e.NQN) {
			t.Errorf("no key of %s, while it is connected:\n%s", e.NQN, keys)
		}
	})
	if left := drivertest.Gone(func() (keys []string) {
		all, err := os.ReadFile("/proc/keys")
		check.OK(t, err)
		for line := range strings.Lines(string(all)) {
			if strings.Contains(line, nvmet.Prefix) {
				keys = append(keys, line)
			}
		}
		return keys
	}); len(left) > 0 {
		t.Errorf("keys that are left: %q", left)
	}
}

// TestWithoutTLS: a host that cannot encrypt says what is missing, and is not connected.
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
