package drivertest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
)

// Build builds the driver, in a folder of the test, and returns its path. flags are those
// of go build.
func Build(t testing.TB, flags ...string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "driver")
	argv := append(append([]string{"build", "-o", path}, flags...), "github.com/ashlar-csi/ashlar/cmd/driver")
	if out, err := exec.Command("go", argv...).CombinedOutput(); err != nil {
		t.Fatalf("go %s: %v: %s", strings.Join(argv, " "), err, out)
	}
	return path
}

// Process is a driver that runs as a process of its own, with its pool in folder pool of
// its Dir unless told otherwise. It is the client of its own services, also of those of a
// process that was started in its place.
type Process struct {
	Dir    string
	Socket string
	// Log is what the driver, and those before it, have said.
	Log *Log

	csi.IdentityClient
	csi.ControllerClient
	csi.GroupControllerClient
	csi.SnapshotMetadataClient
	csi.NodeClient

	program string
	args    []string
	cmd     *exec.Cmd
	ended   chan struct{}
}

// NewProcess makes a driver that is not running yet; it is dead at the end of the test.
func NewProcess(t testing.TB, program, dir string, args ...string) *Process {
	t.Helper()
	p := &Process{Dir: dir, Socket: filepath.Join(dir, "csi.sock"), Log: &Log{}, program: program}
	p.args = append([]string{"serve", "--endpoint=unix://" + p.Socket, "--node-id=" + Node}, args...)
	if !strings.Contains(strings.Join(args, " "), "--pool=") {
		p.args = append(p.args, "--pool=default=file://"+dir+"/pool?reservePercent=0")
	}
	conn, err := grpc.NewClient("unix://"+p.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 2 * time.Millisecond, Multiplier: 1.5, MaxDelay: 20 * time.Millisecond}}))
	must(t, err)
	p.IdentityClient, p.ControllerClient = csi.NewIdentityClient(conn), csi.NewControllerClient(conn)
	p.GroupControllerClient, p.SnapshotMetadataClient = csi.NewGroupControllerClient(conn), csi.NewSnapshotMetadataClient(conn)
	p.NodeClient = csi.NewNodeClient(conn)
	t.Cleanup(func() {
		p.Kill()
		_ = conn.Close()
	})
	return p
}

// startTime is how long a driver may take until it serves.
const startTime = 20 * time.Second

// Start starts the driver and waits until it serves.
func (p *Process) Start() error {
	cmd, started, ended := exec.Command(p.program, p.args...), make(chan error), make(chan struct{})
	cmd.Stdout, cmd.Stderr = p.Log, p.Log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	p.cmd, p.ended = cmd, ended
	go func() {
		// The driver dies with the thread that started it: this one waits for it.
		runtime.LockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait()
		}
		close(ended)
	}()
	if err := <-started; err != nil {
		return err
	}
	for deadline := time.Now().Add(startTime); ; time.Sleep(2 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		_, err := p.Probe(ctx, &csi.ProbeRequest{})
		cancel()
		if err == nil {
			return nil
		}
		select {
		case <-p.ended:
			return errors.New("the driver ended")
		default:
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("the driver does not answer: %w", err)
		}
	}
}

// PID of the driver that was started last.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Kill makes sure that the driver is dead (SIGKILL).
func (p *Process) Kill() {
	if p.ended != nil && p.cmd.Process != nil {
		_ = p.cmd.Process.Kill()
		<-p.ended
	}
}

// Gone reports whether the driver has ended.
func (p *Process) Gone() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

// Log keeps what was written to it.
type Log struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// Tail is its end.
func (l *Log) Tail() string {
	text := l.String()
	return text[max(0, len(text)-16000):]
}

// ClearAway takes away by force what a failed test left below a folder.
func ClearAway(dir string) {
	for range 4 { // filesystems upon devices upon files
		left := Leftovers(dir)
		for i := len(left) - 1; i >= 0; i-- {
			kind, rest, _ := strings.Cut(left[i], " ")
			switch kind {
			case "mount":
				if f, err := os.Open(rest); err == nil {
					_ = unix.IoctlSetInt(int(f.Fd()), 0xc0045878, 0) // FITHAW
					_ = f.Close()
				}
				_ = unix.Unmount(rest, unix.MNT_DETACH)
			case "loop":
				_ = exec.Command("losetup", "-d", "/dev/"+strings.Fields(rest)[1]).Run()
			}
		}
	}
}
