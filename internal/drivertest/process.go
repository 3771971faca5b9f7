package drivertest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

// Build builds the driver in a folder and returns its path: as it is shipped, or with other
// flags of go build.
func Build(dir string, flags ...string) (string, error) {
	_, file, _, _ := runtime.Caller(0)
	build := exec.Command("go", append(append([]string{"build", "-trimpath", "-o", filepath.Join(dir, "driver")}, flags...), "./cmd/driver")...)
	if len(flags) == 0 {
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
	}
	build.Dir = filepath.Join(filepath.Dir(file), "../..")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the driver: %w\n%s", err, out)
	}
	return filepath.Join(dir, "driver"), nil
}

// Process is the real driver in a process of its own, which can be killed and started
// again, and the client of it. It ends with this process, however that ends.
type Process struct {
	csi.IdentityClient
	csi.ControllerClient
	csi.GroupControllerClient
	csi.SnapshotMetadataClient
	csi.NodeClient

	Dir    string
	Socket string

	argv []string
	conn *grpc.ClientConn

	mu     sync.Mutex
	cmd    *exec.Cmd
	exited chan struct{}
}

// NewProcess returns a driver that serves in a folder, which is made; it does not run yet.
// Its log is the file log in there.
func NewProcess(binary, dir string, flags ...string) (*Process, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	socket := dir + "/csi.sock"
	p := &Process{Dir: dir, Socket: socket, argv: append([]string{binary, "serve", "--endpoint=unix://" + socket}, flags...)}
	var err error
	if p.conn, err = grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 2 * time.Millisecond, Multiplier: 1.5, MaxDelay: 20 * time.Millisecond}})); err != nil {
		return nil, err
	}
	p.IdentityClient, p.ControllerClient, p.NodeClient = csi.NewIdentityClient(p.conn), csi.NewControllerClient(p.conn), csi.NewNodeClient(p.conn)
	p.GroupControllerClient, p.SnapshotMetadataClient = csi.NewGroupControllerClient(p.conn), csi.NewSnapshotMetadataClient(p.conn)
	return p, nil
}

// Start starts the driver. It does not wait for it.
func (p *Process) Start() error {
	log, err := os.OpenFile(filepath.Join(p.Dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd, exited, started := exec.Command(p.argv[0], p.argv[1:]...), make(chan struct{}), make(chan error)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	go func() {
		runtime.LockOSThread() // the signal comes when the thread that started it ends
		defer close(exited)
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // it may be killed
		}
	}()
	if err := <-started; err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cmd, p.exited = cmd, exited
	return nil
}

// Pid of the driver, while it runs.
func (p *Process) Pid() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cmd.Process.Pid
}

// Ready waits until the driver says that it is.
func (p *Process) Ready(ctx context.Context) error {
	for {
		r, err := p.Probe(ctx, &csi.ProbeRequest{}, grpc.WaitForReady(true))
		if err == nil && r.GetReady().GetValue() {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("the driver is not ready: %w: %s", ctx.Err(), p.Log()), err)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// Log is the end of what the driver said.
func (p *Process) Log() string {
	log, _ := os.ReadFile(filepath.Join(p.Dir, "log"))
	return string(log[max(0, len(log)-16000):])
}

// Kill ends the driver as kill -9 does; it may be started again.
func (p *Process) Kill() { p.end(syscall.SIGKILL) }

// Stop ends the driver as SIGTERM does.
func (p *Process) Stop() { p.end(syscall.SIGTERM) }

func (p *Process) end(signal syscall.Signal) {
	p.mu.Lock()
	cmd, exited := p.cmd, p.exited
	p.mu.Unlock()
	if cmd == nil {
		return
	}
	_ = cmd.Process.Signal(signal) // it may be gone
	<-exited
}

// Close kills the driver, and is the end of its client.
func (p *Process) Close() {
	p.Kill()
	_ = p.conn.Close()
}

// Again makes a call as a sidecar or the kubelet does: while the answer says that the work
// may still be going on, or that a call before it is not through, it calls again.
func Again(ctx context.Context, call func() error) error {
	for {
		err := call()
		switch status.Code(err) {
		case codes.Unavailable, codes.Aborted, codes.Canceled, codes.DeadlineExceeded:
		default:
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(5 * time.Millisecond):
		}
	}
}
