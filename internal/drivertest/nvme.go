package drivertest

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvme"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// NeedNVMe skips a test if the kernel has no NVMe over TCP. `make test-any` runs such tests in a virtual machine, where it fails instead.
func NeedNVMe(t testing.TB) {
	t.Helper()
	NeedRoot(t)
	if err := nvme.Available(); err != nil {
		if os.Getenv("ASHLAR_NVME") == "1" {
			t.Fatal(err)
		}
		t.Skip("this kernel has no NVMe over TCP; make test-any runs this in a virtual machine")
	}
}

// NeedTLS skips a test if connections over NVMe/TCP cannot be encrypted (WithTLS). `make test-tls` runs such tests in a virtual machine.
func NeedTLS(t testing.TB) {
	t.Helper()
	NeedNVMe(t)
	if !WithTLS() {
		t.Skip("nothing does handshakes of TLS; make test-tls runs this in a virtual machine")
	}
}

// WithTLS reports whether tests encrypt NVMe/TCP: ASHLAR_TLSHD is the program for handshakes (hack/vm/tlshd.sh).
func WithTLS() bool { return os.Getenv("ASHLAR_TLSHD") != "" }

// RunTLSHD runs tlshd in a network namespace, until stop is called or the test ends; without a name in that of the calling thread. It returns when tlshd takes
// requests.
func RunTLSHD(t testing.TB, netns string) (stop func()) {
	t.Helper()
	path := "/proc/thread-self/ns/net" // not that of the process: its first thread may be in another one, for a goroutine that has locked it
	if netns != "" {
		path = "/run/netns/" + netns
	}
	cmd := exec.Command("nsenter", "--net="+path, os.Getenv("ASHLAR_TLSHD"), "--stderr")
	said := &bytes.Buffer{}
	cmd.Stderr = said
	check.OK(t, cmd.Start())
	stop = sync.OnceFunc(func() {
		check.OK(t, cmd.Process.Kill())
		_ = cmd.Wait() // it was killed
	})
	t.Cleanup(func() {
		stop()
		if t.Failed() {
			t.Logf("tlshd in the network %q: %s", netns, said)
		}
	})
	takes := make(chan error)
	go func() { // the thread ends with the goroutine, as it stays locked
		runtime.LockOSThread()
		ns, err := os.Open(path)
		if err == nil {
			err = errors.Join(unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET), ns.Close())
		}
		for deadline := time.Now().Add(goneTime); err == nil; time.Sleep(time.Millisecond) {
			if err = nvme.TLS(); err == nil {
				break
			}
			if errors.Is(err, errdefs.ErrUnavailable) && time.Now().Before(deadline) {
				err = nil
			}
		}
		takes <- err
	}()
	check.OK(t, <-takes)
	return stop
}

// Keys returns the lines of /proc/keys with a text. The kernel removes a key that is not needed any more a little later.
func Keys(t testing.TB, text string) (keys []string) {
	t.Helper()
	all, err := os.ReadFile("/proc/keys")
	if err != nil && !errors.Is(err, os.ErrNotExist) { // the kernel has no keys
		t.Fatal(err)
	}
	for line := range strings.Lines(string(all)) {
		if strings.Contains(line, text) {
			keys = append(keys, line)
		}
	}
	return keys
}
