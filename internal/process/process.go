// Package process runs the driver as a process, for tests and the demo. It can be killed and started again.
package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/ashlar-csi/ashlar/internal/co"
)

// stopTime is how long the driver may take to end after SIGTERM: as long as a kubelet gives it. On a machine that is not busy it ends sooner.
const stopTime = 30 * time.Second

// Build builds the driver in a directory and returns its path. flags are further flags of go build. Without -race it is static, as in a release. It keeps the
// paths of the source, unlike a release, so that what was compiled for the tests is reused.
func Build(dir string, flags ...string) (string, error) {
	_, file, _, _ := runtime.Caller(0)
	return BuildOf(filepath.Join(filepath.Dir(file), "../.."), dir, flags...)
}

// BuildOf is Build for another tree of the project.
func BuildOf(tree, dir string, flags ...string) (string, error) {
	build := exec.Command("go", slices.Concat([]string{"build", "-o", filepath.Join(dir, "driver")}, flags, []string{"./cmd/driver"})...)
	if !slices.Contains(flags, "-race") {
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
	}
	build.Dir = tree
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the driver (its source has to be where it was): %w\n%s", err, out)
	}
	return filepath.Join(dir, "driver"), nil
}

// Driver is a process of the driver, and a client of it. When this process ends in any way, the driver gets SIGTERM.
type Driver struct {
	*co.Client
	Socket string
	Conn   *grpc.ClientConn

	argv []string
	mu   sync.Mutex
	last *run // nil before the first Start
}

// run is one process of the driver.
type run struct {
	*exec.Cmd
	ended chan struct{}           // closed when the process has ended, before it is waited for
	wait  func() *os.ProcessState // waits for it (wait(2))
}

// New returns a driver that serves on csi.sock in a directory, which is made. It does not run yet. Its log is the file log there. argv is the program and its
// flags, without --endpoint, and without --node-id if node is given.
func New(dir, node string, argv ...string) (*Driver, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	d := &Driver{Socket: filepath.Join(dir, "csi.sock")}
	d.argv = append(slices.Clone(argv), "--endpoint=unix://"+d.Socket)
	if node != "" {
		d.argv = append(d.argv, "--node-id="+node)
	}
	var err error
	if d.Conn, err = co.Dial(d.Socket); err != nil {
		return nil, err
	}
	d.Client = co.New(d.Conn, node, dir)
	return d, nil
}

// Start starts the driver, and kills one that still runs. It does not wait until the driver serves.
func (d *Driver) Start() error {
	d.Kill()
	log, err := os.OpenFile(d.logPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	r, pidfd := &run{Cmd: exec.Command(d.argv[0], d.argv[1:]...), ended: make(chan struct{})}, -1
	r.Stdout, r.Stderr = log, log
	// A group of its own: an interrupt from the terminal reaches this process alone, which then ends the driver.
	r.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM, PidFD: &pidfd}
	r.wait = sync.OnceValue(func() *os.ProcessState {
		<-r.ended
		_ = r.Wait() // the state has the result
		return r.ProcessState
	})
	started := make(chan error)
	go func() {
		runtime.LockOSThread() // Pdeathsig is sent when the thread that started the process ends
		defer close(r.ended)
		err := r.Cmd.Start()
		started <- err
		if err == nil {
			// Not by wait(2): a tracer of the process would miss its events.
			defer unix.Close(pidfd)
			for errors.Is(poll(pidfd), unix.EINTR) {
			}
		}
	}()
	if err := <-started; err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.last = r
	return nil
}

// poll waits until the process of a pidfd has ended (pidfd_open(2)).
func poll(pidfd int) error {
	_, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, -1)
	return err
}

func (d *Driver) run() *run {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.last
}

// Pid returns the process ID of the driver. It has to be started.
func (d *Driver) Pid() int { return d.run().Process.Pid }

// Ended returns a channel that is closed when the driver, as last started, has ended.
func (d *Driver) Ended() <-chan struct{} { return d.run().ended }

// Wait waits until the driver has ended, and returns its state; nil if another waiter, as a tracer, has that.
func (d *Driver) Wait() *os.ProcessState { return d.run().wait() }

// Ready waits until Probe says that the driver is ready. It fails if the driver ends before.
func (d *Driver) Ready(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-d.Ended():
			cancel(errors.New("it has ended"))
		case <-ctx.Done():
		}
	}()
	for {
		r, err := d.Probe(ctx, &csi.ProbeRequest{}, grpc.WaitForReady(true))
		if err == nil && r.GetReady().GetValue() {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("the driver is not ready: %w: %s", context.Cause(ctx), d.Log()), err)
		case <-time.After(2 * time.Millisecond):
		}
	}
}

func (d *Driver) logPath() string { return filepath.Join(d.Dir, "log") }

// Log returns the end of the driver's log, 16,000 bytes at most. It goes on when the driver is started again.
func (d *Driver) Log() string {
	log, _ := os.ReadFile(d.logPath())
	return string(log[max(0, len(log)-16000):])
}

// Kill kills the driver (SIGKILL) if it runs, and waits for its end.
func (d *Driver) Kill() {
	if r := d.run(); r != nil {
		_ = r.Process.Kill() // it may have ended
		r.wait()
	}
}

// Stop ends the driver by SIGTERM, and after stopTime by SIGKILL. It returns an error unless SIGTERM has ended it with status 0.
func (d *Driver) Stop() error {
	r := d.run()
	select {
	case <-r.ended:
		return fmt.Errorf("the driver had ended before: %s", r.wait())
	default:
	}
	if err := r.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	select {
	case <-r.ended:
	case <-time.After(stopTime):
		d.Kill()
		return fmt.Errorf("the driver did not end within %s of SIGTERM, so it was killed", stopTime)
	}
	if state := r.wait(); !state.Success() {
		return fmt.Errorf("after SIGTERM the driver ended with %s", state)
	}
	return nil
}

// Close kills the driver and closes its client.
func (d *Driver) Close() {
	d.Kill()
	d.Conn.Close()
}
