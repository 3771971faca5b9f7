package hostile

import (
	"context"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/process"
)

const (
	halfOpen = 10_000
	// What the driver may have at the most, whoever calls.
	mostDescriptors = 700
	mostMemory      = 256 // MiB
)

// TestConnections: what can be done to a driver, a process of its own, by connecting to it.
func TestConnections(t *testing.T) {
	drivertest.NeedRoot(t)
	binary, err := process.Build(t.TempDir())
	check.OK(t, err)
	dir := drivertest.Dir(t)
	p, err := process.New(dir, drivertest.Node, binary, "--pool=default=file://"+dir+"/pool?reservePercent=0")
	check.OK(t, err)
	t.Cleanup(p.Close)
	check.OK(t, p.Start())
	check.OK(t, p.Ready(t.Context()))
	t.Run("large messages", func(t *testing.T) { largeMessages(t, p) })
	t.Run("half-open", func(t *testing.T) { halfOpenConnections(t, p) })
}

// halfOpenConnections: thousands that connect and say nothing, or half of something, cost
// the driver little; who was connected before goes on, and who comes afterwards is served.
func halfOpenConnections(t *testing.T, p *process.Driver) {
	allow := unix.Rlimit{Cur: halfOpen + 1000, Max: halfOpen + 1000}
	var before unix.Rlimit
	check.OK(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &before))
	if before.Cur < allow.Cur {
		allow.Max = max(allow.Max, before.Max)
		check.OK(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &allow))
	}
	call := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		_, err := p.ListVolumes(ctx, &csi.ListVolumesRequest{})
		return err
	}
	var open []net.Conn
	closeAll := func() {
		for _, c := range open {
			_ = c.Close()
		}
		open = nil
	}
	defer closeAll()
	const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" // RFC 9113, section 3.4
	settings := string([]byte{0, 0, 0, 4, 0, 0, 0, 0, 0})
	for i := range halfOpen {
		c, err := (&net.Dialer{Timeout: 10 * time.Second}).DialContext(t.Context(), "unix", p.Socket)
		if err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
		open = append(open, c)
		// Nothing, a part of the preface, all of it, or all and an empty SETTINGS frame.
		_, _ = c.Write([]byte([]string{"", preface[:9], preface, preface + settings}[i%4]))
		if i%1000 == 0 {
			check.OK(t, call())
		}
	}
	check.OK(t, call())
	descriptors, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.Pid()))
	check.OK(t, err)
	if n := len(descriptors); n > mostDescriptors {
		t.Errorf("the driver has %d descriptors", n)
	}
	if n := memory(t, p.Pid()); n > mostMemory {
		t.Errorf("the driver has %d MiB", n)
	}
	closeAll()
	// Another caller, as soon as the driver has noticed.
	again := func() error {
		c, err := net.Dial("unix", p.Socket)
		if err != nil {
			return err
		}
		defer c.Close()
		_, _ = c.Write([]byte(preface + settings))
		_ = c.SetDeadline(time.Now().Add(5 * time.Second))
		_, err = c.Read(make([]byte, 1))
		return err
	}
	deadline := time.Now().Add(30 * time.Second)
	for err = again(); err != nil && time.Now().Before(deadline); err = again() {
		time.Sleep(10 * time.Millisecond)
	}
	check.OK(t, err)
	check.OK(t, call())
}

// memory that a process has, in MiB.
func memory(t *testing.T, pid int) (n int) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	check.OK(t, err)
	_, rest, _ := strings.Cut(string(text), "VmRSS:")
	_, err = fmt.Sscan(rest, &n)
	check.OK(t, err)
	return n >> 10
}

// largeMessages: a message of 4 MiB or more is refused before it is looked at.
func largeMessages(t *testing.T, p *process.Driver) {
	before := memory(t, p.Pid())
	for _, size := range []int{4 << 20, 16 << 20, 64 << 20} {
		_, err := p.CreateVolume(t.Context(), &csi.CreateVolumeRequest{Name: strings.Repeat("x", size)})
		if status.Code(err) != codes.ResourceExhausted {
			t.Errorf("a message of %d bytes is answered with %.200v", size, err)
		}
	}
	if now := memory(t, p.Pid()); now > before+64 {
		t.Errorf("the driver has %d MiB, it had %d", now, before)
	}
	_, err := p.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	check.OK(t, err)
}
