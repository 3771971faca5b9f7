// Package command runs other programs. The driver runs them in no other way.
package command

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/trace"
	"github.com/ashlar-csi/ashlar/pkg/metrics"
)

// outputLimit is how many bytes are kept of each of the two outputs of a program.
const outputLimit = 64 << 10

// searchPath is where programs are searched first, and the PATH of programs that are run: if the driver is started by hand, its own PATH may lack the
// directories of the system.
const searchPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Error is the failure of a program.
type Error struct {
	Argv   []string
	Code   int // exit status; -1: it did not exit by itself
	Output string
	Err    error
}

func (e *Error) Error() string {
	msg := fmt.Sprintf("%s: %v", strings.Join(e.Argv, " "), e.Err)
	if e.Output != "" {
		msg += ": " + e.Output
	}
	return msg
}

func (e *Error) Unwrap() error { return e.Err }

// Run runs a program without a shell, with an empty standard input and the C locale, and returns its standard output and error, up to outputLimit of each. The
// program, and all that it starts, is killed when ctx ends; the program also when the driver dies. Failures are an *Error, which wraps ctx.Err() if ctx has
// ended.
func Run(ctx context.Context, argv ...string) (stdout, stderr string, err error) {
	return RunWith(ctx, Options{}, argv...)
}

// Options are what a program gets besides its arguments.
type Options struct {
	Input []byte   // its standard input, which is in no error
	Env   []string // added to its environment
}

// RunWith is Run with options.
func RunWith(ctx context.Context, o Options, argv ...string) (stdout, stderr string, err error) {
	ctx, end := trace.Start(ctx, filepath.Base(argv[0]))
	defer func(began time.Time) { observe(argv[0], began, err); end(err) }(time.Now())
	cmd := exec.CommandContext(ctx, find(argv[0]), argv[1:]...)
	cmd.Env = append([]string{"LC_ALL=C", "PATH=" + searchPath}, o.Env...)
	if len(o.Input) > 0 {
		cmd.Stdin = bytes.NewReader(o.Input)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
	var out, warnings limited
	cmd.Stdout, cmd.Stderr = &out, &warnings
	err = run(ctx, cmd)
	if errors.Is(err, exec.ErrWaitDelay) {
		// The program has ended, but something that it started has its outputs open.
		_ = cmd.Cancel()
	}
	if err == nil {
		return out.String(), warnings.String(), nil
	}
	return out.String(), warnings.String(), failed(ctx, argv, err, warnings.String()+" "+out.String())
}

// ErrProcessorTime is the error of a program that has had more time of processors than it may have (WithProcessorTime).
var ErrProcessorTime = errors.New("it has had more time of processors than it may have")

type processorTime struct{}

// WithProcessorTime returns a context with which each program has at most so much time of processors, in whole seconds, and not of a clock: for one that works on
// what others may have made up so that it never comes to an end. A program that has had more is ended (SIGXCPU): ErrProcessorTime.
func WithProcessorTime(ctx context.Context, most time.Duration) context.Context {
	return context.WithValue(ctx, processorTime{}, max(most.Truncate(time.Second), time.Second))
}

// run runs a command that is set up, within the time of WithProcessorTime.
func run(ctx context.Context, cmd *exec.Cmd) error {
	if err := start(ctx, cmd); err != nil {
		return err
	}
	return wait(ctx, cmd)
}

// start starts a command. The kernel counts the time of processors from here on (RLIMIT_CPU, setrlimit(2)).
func start(ctx context.Context, cmd *exec.Cmd) error {
	if err := cmd.Start(); err != nil {
		return err
	}
	if most, limited := ctx.Value(processorTime{}).(time.Duration); limited {
		seconds := uint64(most / time.Second)
		_ = unix.Prlimit(cmd.Process.Pid, unix.RLIMIT_CPU, &unix.Rlimit{Cur: seconds, Max: seconds + 5}, nil) // it may have ended already; SIGXCPU, and SIGKILL 5 s later
	}
	return nil
}

// wait waits for a command that start has started.
func wait(ctx context.Context, cmd *exec.Cmd) error {
	err := cmd.Wait()
	if most, limited := ctx.Value(processorTime{}).(time.Duration); limited && cmd.ProcessState != nil {
		if status, is := cmd.ProcessState.Sys().(syscall.WaitStatus); is && status.Signaled() && status.Signal() == syscall.SIGXCPU {
			return fmt.Errorf("%w, %s: %w", ErrProcessorTime, most, err)
		}
	}
	return err
}

// failed returns the error of a program that has printed something.
func failed(ctx context.Context, argv []string, err error, printed string) *Error {
	failure := &Error{Argv: argv, Code: -1, Err: err, Output: strings.Join(strings.Fields(printed), " ")}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		failure.Code = exit.ExitCode()
	}
	if ctx.Err() != nil {
		failure.Err = ctx.Err()
	}
	return failure
}

// observe counts a run of a program in the metrics.
func observe(program string, began time.Time, err error) {
	program = metrics.Program(filepath.Base(program))
	metrics.CommandSeconds.Observe(time.Since(began), program)
	var failure *Error
	if err != nil && !(errors.As(err, &failure) && didItsWork(program, failure.Code)) {
		metrics.CommandFailures.Inc(program)
	}
}

// didItsWork reports whether an exit status other than 0 is no failure: e2fsck has repaired something (e2fsck(8)), or smartctl could ask the disk, whatever it
// answered (smartctl(8), RETURN VALUES).
func didItsWork(program string, code int) bool {
	const asked = ^0b11 // all bits but those of failures: wrong command line, disk not opened
	return (program == "e2fsck" && code == 1) || (program == "smartctl" && code > 0 && code&asked == code)
}

// Find returns the path of a program; exec.ErrNotFound if it is not found.
func Find(name string) (string, error) { return exec.LookPath(find(name)) }

// find returns the path of a program in searchPath, or its name if it is not there: then the driver's own PATH is searched.
func find(name string) string {
	if strings.Contains(name, "/") {
		return name
	}
	for _, dir := range filepath.SplitList(searchPath) {
		path := filepath.Join(dir, name)
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return path
		}
	}
	return name
}

// limited keeps the first outputLimit bytes, and drops the rest. The buffer is not embedded: io.Copy would use its ReadFrom instead of Write.
type limited struct{ kept bytes.Buffer }

func (l *limited) String() string { return l.kept.String() }

func (l *limited) Write(p []byte) (int, error) {
	if room := outputLimit - l.kept.Len(); room > 0 {
		l.kept.Write(p[:min(room, len(p))])
	}
	return len(p), nil
}
