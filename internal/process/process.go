// Package process runs a driver as a process, and calls it.
package process

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

const (
	// callTime is how long one call of the driver may take.
	callTime = time.Minute
	// stopTime is how long the driver gets to end after SIGTERM: what it promises, and some.
	stopTime = 8 * time.Second
)

// Driver is a driver that runs as a child of this process, and a client of it.
type Driver struct {
	csi.IdentityClient
	csi.ControllerClient
	csi.GroupControllerClient
	csi.NodeClient

	Command *exec.Cmd
	Conn    *grpc.ClientConn
	Log     tail
	Calls   atomic.Int64
	Exited  chan struct{} // closed when the process is gone
	Err     error         // of its end; valid, as is Command.ProcessState, once Exited is closed
}

// Start starts a program as a driver. Its log goes to the tail only.
func Start(program, socket string, flags ...string) (*Driver, error) {
	p := &Driver{Exited: make(chan struct{})}
	p.Command = exec.Command(program, append([]string{"serve", "--endpoint=" + socket}, flags...)...)
	p.Command.Stdout, p.Command.Stderr = &p.Log, &p.Log
	// A group of its own: an interrupt from the terminal is for the demo, which then ends
	// the driver. If the demo is killed, the driver ends too.
	p.Command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	p.Command.WaitDelay = time.Second
	if err := p.Command.Start(); err != nil {
		return nil, err
	}
	go func() {
		p.Err = p.Command.Wait()
		close(p.Exited)
	}()
	var err error
	p.Conn, err = grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithUnaryInterceptor(p.call),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 5 * time.Millisecond, Multiplier: 1.5, MaxDelay: 100 * time.Millisecond}}))
	if err != nil {
		return p, err
	}
	p.IdentityClient, p.NodeClient = csi.NewIdentityClient(p.Conn), csi.NewNodeClient(p.Conn)
	p.ControllerClient, p.GroupControllerClient = csi.NewControllerClient(p.Conn), csi.NewGroupControllerClient(p.Conn)
	return p, nil
}

// call is around each call: it ends with the driver, and its error names the method.
func (p *Driver) call(ctx context.Context, method string, request, response any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	go func() {
		select {
		case <-p.Exited:
			cancel()
		case <-ctx.Done():
		}
	}()
	p.Calls.Add(1)
	err := invoke(ctx, method, request, response, conn, append(options, grpc.WaitForReady(true))...)
	if err == nil {
		return nil
	}
	wait := time.Duration(0)
	if status.Code(err) == codes.Unavailable {
		wait = time.Second // the connection may break before the end of the process is known
	}
	select {
	case <-p.Exited:
		return fmt.Errorf("%s: the driver ended before it answered: %s", path.Base(method), p.Command.ProcessState)
	case <-time.After(wait):
		return &callError{path.Base(method), err}
	}
}

// callError is the answer of the driver to a call that it did not serve.
type callError struct {
	method string
	err    error
}

func (e *callError) Error() string {
	s := status.Convert(e.err)
	return fmt.Sprintf("%s: %s: %s", e.method, s.Code(), s.Message())
}

func (e *callError) Unwrap() error { return e.err }

// Ready waits until the driver says that it is.
func (p *Driver) Ready(ctx context.Context) error {
	for {
		response, err := p.Probe(ctx, &csi.ProbeRequest{})
		if err != nil || response.GetReady().GetValue() {
			return err
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// Stop ends the driver with SIGTERM, and with SIGKILL if that does not do. An error
// means that it did not end by itself, with status 0.
func (p *Driver) Stop() error {
	if p.Conn != nil {
		p.Conn.Close()
	}
	select {
	case <-p.Exited:
		return fmt.Errorf("the driver had ended before: %s", p.Command.ProcessState)
	default:
	}
	if err := p.Command.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	select {
	case <-p.Exited:
		return p.Err
	case <-time.After(stopTime):
	}
	err := p.Command.Process.Kill()
	<-p.Exited
	return errors.Join(fmt.Errorf("the driver did not end within %s of SIGTERM, so it was killed", stopTime), err)
}

// Adopt makes this process the parent of all that its children leave behind, so that
// it can tell whether there is anything (prctl(2), PR_SET_CHILD_SUBREAPER).
func Adopt() error { return unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) }

// Orphaned reports whether this process has any child left.
func Orphaned() bool {
	for {
		pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil: // ECHILD: none
			return false
		case pid == 0: // one that runs
			return true
		}
	}
}

// tail keeps the last lines that were written to it.
type tail struct {
	mu   sync.Mutex
	text []byte
}

const tailBytes = 16 << 10

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, p...)
	if cut := len(t.text) - tailBytes; cut > 0 {
		if end := bytes.IndexByte(t.text[cut:], '\n'); end >= 0 {
			cut += end + 1
		}
		t.text = append(t.text[:0], t.text[cut:]...)
	}
	return len(p), nil
}

// Last returns up to n lines.
func (t *tail) Last(n int) []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	text := strings.TrimSpace(string(t.text))
	if text == "" {
		return nil
	}
	lines := strings.Split(text, "\n")
	return lines[max(0, len(lines)-n):]
}
