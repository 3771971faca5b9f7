package command

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/metrics/metricstest"
)

func TestRun(t *testing.T) {
	stdout, stderr, err := Run(t.Context(), "sh", "-c", `echo out; echo warning >&2; echo "$LC_ALL"; cat; env | grep -c HOME`, "arg")
	var failure *Error
	if !errors.As(err, &failure) || failure.Code != 1 { // grep finds nothing: HOME was not passed on
		t.Fatalf("error %v", err)
	}
	if stdout != "out\nC\n0\n" || stderr != "warning\n" {
		t.Errorf("stdout %q, stderr %q", stdout, stderr)
	}
	if stdout, stderr, err := Run(t.Context(), "true"); stdout != "" || stderr != "" || err != nil {
		t.Errorf("true: %q, %q, %v", stdout, stderr, err)
	}
}

// TestRunWith: a program gets its input and environment, and an error does not contain the input.
func TestRunWith(t *testing.T) {
	input := []byte("a \x00 secret\n")
	stdout, _, err := RunWith(t.Context(), Options{Input: input, Env: []string{"GREETING=hello"}}, "sh", "-c", `echo "$GREETING"; cat`)
	if err != nil || stdout != "hello\n"+string(input) {
		t.Errorf("%q, %v", stdout, err)
	}
	_, _, err = RunWith(t.Context(), Options{Input: input}, "sh", "-c", "cat >/dev/null; echo broken >&2; exit 3")
	if err == nil || strings.Contains(err.Error(), "secret") || !strings.Contains(err.Error(), "broken") {
		t.Errorf("error %v", err)
	}
	if _, _, err := RunWith(t.Context(), Options{Input: make([]byte, 1<<20)}, "true"); err != nil && !errors.Is(err, syscall.EPIPE) {
		t.Errorf("with more input than it reads: %v", err)
	}
}

// TestFind: a program is found by its name; exec.ErrNotFound for one that is not there.
func TestFind(t *testing.T) {
	if path, err := Find("sh"); err != nil || !filepath.IsAbs(path) {
		t.Errorf("%q, %v", path, err)
	}
	if _, err := Find("no-such-program-here"); !errors.Is(err, exec.ErrNotFound) {
		t.Errorf("error %v", err)
	}
}

// TestError: an error has the command line, how the program ended, and what it printed.
func TestError(t *testing.T) {
	for name, c := range map[string]struct {
		argv  []string
		code  int
		is    error
		parts []string
	}{
		"exit status": {[]string{"sh", "-c", "echo '  the  disk is' >&2; echo 'on fire' >&2; exit 7"}, 7, nil, []string{"sh -c", "exit status 7", "the disk is on fire"}},
		"signal":      {[]string{"sh", "-c", "kill -9 $$"}, -1, nil, []string{"signal: killed"}},
		"no program":  {[]string{"no-such-program-here", "-x"}, -1, exec.ErrNotFound, []string{"no-such-program-here -x"}},
		"no file":     {[]string{"/nowhere/program"}, -1, os.ErrNotExist, []string{"/nowhere/program"}},
		"no shell":    {[]string{"true; false"}, -1, exec.ErrNotFound, nil},
		"a directory": {[]string{"/tmp"}, -1, os.ErrPermission, []string{"/tmp"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := Run(t.Context(), c.argv...)
			var failure *Error
			if !errors.As(err, &failure) || failure.Code != c.code || (c.is != nil && !errors.Is(err, c.is)) {
				t.Fatalf("error %#v, want code %d, %v", err, c.code, c.is)
			}
			for _, part := range c.parts {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("error %q does not say %q", err, part)
				}
			}
		})
	}
}

func TestOutputIsBounded(t *testing.T) {
	stdout, stderr, err := Run(t.Context(), "sh", "-c", "head -c 300000 /dev/zero | tr '\\0' a; head -c 200000 /dev/zero | tr '\\0' b >&2")
	if err != nil {
		t.Fatal(err)
	}
	if stdout != strings.Repeat("a", outputLimit) || stderr != strings.Repeat("b", outputLimit) {
		t.Errorf("stdout has %d bytes, stderr %d, want the first %d of each", len(stdout), len(stderr), outputLimit)
	}
}

// running reports whether a process exists and is no zombie.
func running(pid int) bool {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	return err == nil && !strings.Contains(string(stat), ") Z ")
}

// pids waits until a program has written the IDs of n processes that it started to a file, and returns them.
func pids(t *testing.T, path string, n int) []int {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		b, _ := os.ReadFile(path)
		if fields := strings.Fields(string(b)); len(fields) == n && strings.HasSuffix(string(b), "\n") {
			var all []int
			for _, field := range fields {
				pid, err := strconv.Atoi(field)
				if err != nil {
					t.Fatal(err)
				}
				all = append(all, pid)
				t.Cleanup(func() {
					if running(pid) {
						_ = syscall.Kill(pid, syscall.SIGKILL)
					}
				})
			}
			return all
		}
	}
	t.Fatalf("%s does not name %d processes", path, n)
	return nil
}

func gone(t *testing.T, all []int) {
	t.Helper()
	for _, pid := range all {
		for deadline := time.Now().Add(time.Minute); running(pid); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Errorf("process %d is still there", pid)
				break
			}
		}
	}
}

// timedOut is a context that has timed out when it is cancelled. So the test decides when that is, on a slow machine too.
type timedOut struct{ context.Context }

func (c timedOut) Err() error {
	if c.Context.Err() != nil {
		return context.DeadlineExceeded
	}
	return nil
}

// TestContext: the end of the context ends the program and all that it has started.
func TestContext(t *testing.T) {
	for name, c := range map[string]struct {
		context func() (context.Context, context.CancelFunc)
		want    error
	}{
		"cancelled": {func() (context.Context, context.CancelFunc) { return context.WithCancel(t.Context()) }, context.Canceled},
		"timed out": {func() (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(t.Context())
			return timedOut{ctx}, cancel
		}, context.DeadlineExceeded},
	} {
		t.Run(name, func(t *testing.T) {
			list := filepath.Join(t.TempDir(), "pids")
			ctx, cancel := c.context()
			defer cancel()
			ended := make(chan error, 1)
			go func() {
				// A child and a grandchild that would go on for long, and ignore signals.
				_, _, err := Run(ctx, "sh", "-c", `trap "" TERM INT HUP; echo before; sh -c 'sleep 300 & echo $$ $! $PPID > "$0.new"; mv "$0.new" "$0"; wait' "$0"; echo after`, list)
				ended <- err
			}()
			all := pids(t, list, 3)
			cancel()
			select {
			case err := <-ended:
				var failure *Error
				if !errors.Is(err, c.want) || !errors.As(err, &failure) || !strings.Contains(err.Error(), "before") || failure.Code != -1 {
					t.Errorf("error %v, want %v, and what it printed until then", err, c.want)
				}
			case <-time.After(time.Minute):
				t.Error("Run is still waiting")
			}
			gone(t, all)
		})
	}
	t.Run("before it starts", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		path := filepath.Join(t.TempDir(), "touched")
		if _, _, err := Run(ctx, "touch", path); !errors.Is(err, context.Canceled) {
			t.Errorf("error %v", err)
		}
		if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the program ran: %v", err)
		}
	})
}

// TestLeftBehind: a program that ends and leaves a child with its outputs has failed, and the child is killed.
func TestLeftBehind(t *testing.T) {
	list := filepath.Join(t.TempDir(), "pids")
	_, _, err := Run(t.Context(), "sh", "-c", `sleep 300 & echo $! > "$0"`, list)
	if !errors.Is(err, exec.ErrWaitDelay) {
		t.Errorf("error %v, want %v", err, exec.ErrWaitDelay)
	}
	gone(t, pids(t, list, 1))
}

// TestCounted: runs and failures are counted by program; those of programs that the driver does not use as "other".
func TestCounted(t *testing.T) {
	before := metricstest.Of(t).Values
	if _, _, err := Run(t.Context(), "mkfs.ext4", "/nowhere/device"); err == nil {
		t.Fatal("a filesystem where there is nothing")
	}
	_, _, err := Run(t.Context(), "true")
	if err != nil {
		t.Fatal(err)
	}
	after := metricstest.Of(t)
	for series, more := range map[string]float64{
		`ashlar_command_seconds_count{program="mkfs.ext4"}`:  1,
		`ashlar_command_failures_total{program="mkfs.ext4"}`: 1,
		`ashlar_command_seconds_count{program="other"}`:      1,
		`ashlar_command_failures_total{program="other"}`:     0,
		`ashlar_command_failures_total{program="true"}`:      0,
	} {
		if got := after.Values[series] - before[series]; got != more {
			t.Errorf("%s went up by %v, want %v", series, got, more)
		}
	}
}

// TestDidItsWork: which exit statuses other than 0 are no failures.
func TestDidItsWork(t *testing.T) {
	for program, codes := range map[string]map[int]bool{
		"smartctl":  {0: true, 1: false, 2: false, 3: false, 4: true, 8: true, 64: true, 66: false, 216: true},
		"e2fsck":    {0: true, 1: true, 4: false},
		"mkfs.ext4": {0: true, 1: false},
	} {
		dir := t.TempDir()
		path := filepath.Join(dir, program)
		if err := os.WriteFile(path, []byte("#!/bin/sh\nexit $1\n"), 0o700); err != nil {
			t.Fatal(err)
		}
		for code, fine := range codes {
			series := "ashlar_command_failures_total{program=\"" + program + "\"}"
			before := metricstest.Of(t).Values[series]
			_, _, err := Run(t.Context(), path, strconv.Itoa(code))
			if (err == nil) != (code == 0) {
				t.Errorf("%s %d: %v", program, code, err)
			}
			if failed := metricstest.Of(t).Values[series] > before; failed == fine {
				t.Errorf("%s %d counts as a failure: %v", program, code, failed)
			}
		}
	}
}

// TestProcessorTime: a program that works for ever is killed when it has had its time of processors, and one that sleeps is not.
func TestProcessorTime(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	little := WithProcessorTime(ctx, time.Second)
	loop := []string{"sh", "-c", "while :; do :; done"}
	_, _, err := Run(little, loop...)
	for _, err := range []error{err, Lines(little, func([]byte) error { return nil }, loop...)} {
		if !errors.Is(err, ErrProcessorTime) || ctx.Err() != nil {
			t.Errorf("a loop ends with %v", err)
		}
	}
	if _, _, err := Run(little, "sleep", "2"); err != nil {
		t.Error(err)
	}
}
