// Package command is the one way in which the driver runs other programs.
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

	"github.com/ashlar-csi/ashlar/internal/trace"
	"github.com/ashlar-csi/ashlar/pkg/metrics"
)

// outputLimit bounds what is kept of each of a program's two outputs, in bytes.
const outputLimit = 64 << 10

// searchPath is where programs are looked for first, and where those that they start
// look: a driver that was started by hand may have a PATH without the system's tools.
const searchPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Error says which program failed, how, and what it printed.
type Error struct {
	Argv   []string
	Code   int // exit status; -1 if it did not exit by itself
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

// Run runs a program, without a shell, with an empty standard input and the C
// locale, and returns its standard output and error, at most 64 KiB of each. The program and
// all that it starts are killed when ctx ends, and when the driver dies. A failure
// is an *Error; if ctx ended first, it wraps ctx.Err().
func Run(ctx context.Context, argv ...string) (stdout, stderr string, err error) {
	return RunWith(ctx, Options{}, argv...)
}

// Options say what a program has beside its arguments.
type Options struct {
	Input []byte   // what it reads from its standard input; it is in no error
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
	err = cmd.Run()
	if errors.Is(err, exec.ErrWaitDelay) {
		// It ended, and something that it started has its outputs still.
		_ = cmd.Cancel()
	}
	if err == nil {
		return out.String(), warnings.String(), nil
	}
	return out.String(), warnings.String(), failed(ctx, argv, err, warnings.String()+" "+out.String())
}

// failed is the error of a program, which printed something.
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

// observe counts that a program ran.
func observe(program string, began time.Time, err error) {
	program = metrics.Program(filepath.Base(program))
	metrics.CommandSeconds.Observe(time.Since(began), program)
	var failure *Error
	if err != nil && !(errors.As(err, &failure) && didItsWork(program, failure.Code)) {
		metrics.CommandFailures.Inc(program)
	}
}

// didItsWork reports whether the exit status of a program is not that of a failure: of an e2fsck that repaired something (e2fsck(8)), and
// of a smartctl that could ask the disk, whatever that said (smartctl(8), RETURN VALUES).
func didItsWork(program string, code int) bool {
	const asked = ^0b11 // not: the command line is wrong, the disk does not open
	return (program == "e2fsck" && code == 1) || (program == "smartctl" && code > 0 && code&asked == code)
}

// Find returns where a program is; exec.ErrNotFound if it is nowhere.
func Find(name string) (string, error) { return exec.LookPath(find(name)) }

// find returns where a program is; its name if it is not in searchPath, to be looked
// for in the driver's own PATH.
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

// limited keeps the first outputLimit bytes and swallows the rest. The buffer is not
// embedded: with its ReadFrom, io.Copy would go around Write.
type limited struct{ kept bytes.Buffer }

func (l *limited) String() string { return l.kept.String() }

func (l *limited) Write(p []byte) (int, error) {
	if room := outputLimit - l.kept.Len(); room > 0 {
		l.kept.Write(p[:min(room, len(p))])
	}
	return len(p), nil
}
