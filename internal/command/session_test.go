package command

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// session starts a shell script that answers on file descriptor 3.
func session(t *testing.T, script string) *Session {
	t.Helper()
	s, err := Start([]string{"GREETING=hello"}, "sh", "-c", script)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func ends(answer []byte) bool { return bytes.HasSuffix(answer, []byte(".\n")) }

// within runs something that must not take longer.
func within(t *testing.T, limit time.Duration, what string, do func()) {
	t.Helper()
	start := time.Now()
	do()
	if took := time.Since(start); took > limit {
		t.Errorf("%s took %v, at most %v were wanted", what, took, limit)
	}
}

func TestSessionAnswers(t *testing.T) {
	s := session(t, `while read -r line; do echo "noise: $line"; echo "warning" >&2; echo "$GREETING $line $LC_ALL" >&3; echo "more." >&3; done`)
	for i := range 100 {
		answer, err := s.Ask(t.Context(), fmt.Sprint("n", i), ends)
		if want := fmt.Sprintf("hello n%d C\nmore.\n", i); err != nil || string(answer) != want {
			t.Fatalf("%q, %v; want %q", answer, err, want)
		}
	}
	var noise string
	for deadline := time.Now().Add(5 * time.Second); !strings.HasSuffix(noise, "noise: n99 warning") && time.Now().Before(deadline); { // it comes another way
		noise = strings.TrimSpace(noise + " " + s.Noise())
	}
	if !strings.HasSuffix(noise, "noise: n99 warning") || strings.Contains(noise, "n10 ") || strings.Contains(noise, "\n") {
		t.Errorf("noise %q", noise)
	}
	pid := s.cmd.Process.Pid
	within(t, 2*time.Second, "Close", s.Close)
	if running(pid) {
		t.Error("the program is there after Close")
	}
	within(t, time.Second, "Close again", s.Close)
	if _, err := s.Ask(t.Context(), "x", ends); err == nil {
		t.Error("an answer after Close")
	}
}

func TestSessionLargeAnswer(t *testing.T) {
	s := session(t, `while read -r n; do head -c "$n" /dev/zero | tr '\0' a >&3; echo . >&3; done`)
	for _, n := range []int{0, 1, 65536, 5 << 20} {
		if answer, err := s.Ask(t.Context(), fmt.Sprint(n), ends); err != nil || len(answer) != n+2 {
			t.Errorf("%d bytes, %v; want %d", len(answer), err, n+2)
		}
	}
	if _, err := s.Ask(t.Context(), fmt.Sprint(answerLimit+1<<20), func([]byte) bool { return false }); err == nil || !strings.Contains(err.Error(), "more than") {
		t.Errorf("an answer without end: %v", err)
	}
}

// TestSessionFails: what gives no answer is an error that says so, in time, and Close ends
// it and all that it started.
func TestSessionFails(t *testing.T) {
	for name, c := range map[string]struct {
		script string
		want   error // nil: another than of the context
		says   string
		close  time.Duration
	}{
		"silence":          {`while read -r line; do sleep 300; done`, context.DeadlineExceeded, "", 2 * time.Second},
		"half an answer":   {`while read -r line; do echo half >&3; done; sleep 300`, context.DeadlineExceeded, "", 2 * time.Second},
		"ends":             {`read -r line; echo "cannot go on" >&2; exit 3`, nil, "it ended without an answer", time.Second},
		"ends half-way":    {`read -r line; echo half >&3; kill -9 $$`, nil, "it ended without an answer", time.Second},
		"ends at once":     {`exit 1`, nil, "", time.Second},
		"takes no hint":    {`trap "" TERM; while :; do sleep 300; done`, context.DeadlineExceeded, "", sessionGrace + 2*time.Second},
		"a stubborn child": {`trap "" TERM; sh -c 'trap "" TERM; while :; do sleep 300; done' & wait; wait`, context.DeadlineExceeded, "", sessionGrace + 2*time.Second},
		"stopped":          {`kill -STOP $$`, context.DeadlineExceeded, "", sessionGrace + 2*time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			list := filepath.Join(t.TempDir(), "pids")
			s := session(t, `echo $$ >"`+list+`.new"; mv "`+list+`.new" "`+list+`"; `+c.script)
			all := pids(t, list, 1)
			ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
			defer cancel()
			var err error
			within(t, 2*time.Second, "Ask", func() { _, err = s.Ask(ctx, "question", ends) })
			var failure *Error
			if !errors.As(err, &failure) || (c.want != nil && !errors.Is(err, c.want)) || (c.want == nil && ctx.Err() != nil) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("error %v, want %v %q", err, c.want, c.says)
			}
			within(t, c.close, "Close", s.Close)
			gone(t, all)
			left, _ := filepath.Glob("/proc/[0-9]*/cmdline")
			for _, path := range left {
				if line, _ := os.ReadFile(path); bytes.Contains(line, []byte(list)) {
					t.Errorf("%s is left: %q", path, line)
				}
			}
		})
	}
}

// TestSessionFinishes: a program that is told to end may finish what it is at.
func TestSessionFinishes(t *testing.T) {
	done := filepath.Join(t.TempDir(), "done")
	s := session(t, `trap "" TERM; read -r line; sleep 1; echo done >"`+done+`"`)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := s.Ask(ctx, "question", ends); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v", err)
	}
	s.Close()
	if _, err := os.Stat(done); err != nil {
		t.Errorf("it was cut short: %v", err)
	}
}

func TestSessionContext(t *testing.T) {
	s := session(t, `while read -r line; do echo . >&3; done`)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Ask(ctx, "question", ends); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	// It was not asked, so the next answer is to the next question.
	if _, err := s.Ask(t.Context(), "question", ends); err != nil {
		t.Error(err)
	}
}

func TestSessionNoProgram(t *testing.T) {
	var failure *Error
	if _, err := Start(nil, "no-such-program-here"); !errors.As(err, &failure) || !strings.Contains(err.Error(), "no-such-program-here") {
		t.Errorf("error %v", err)
	}
}
