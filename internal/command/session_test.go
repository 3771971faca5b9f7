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

// soon is how long something that does not wait may take on a slow machine: far less than the programs here sleep.
const soon = 60 * time.Second

// within runs something that must not take longer than soon.
func within(t *testing.T, what string, do func()) {
	t.Helper()
	start := time.Now()
	do()
	if took := time.Since(start); took > soon {
		t.Errorf("%s took %v, at most %v were wanted", what, took, soon)
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
	for deadline := time.Now().Add(soon); !strings.HasSuffix(noise, "noise: n99 warning") && time.Now().Before(deadline); { // it comes by other pipes than the answer
		noise = strings.TrimSpace(noise + " " + s.Noise())
		time.Sleep(time.Millisecond)
	}
	if !strings.HasSuffix(noise, "noise: n99 warning") || strings.Contains(noise, "n10 ") || strings.Contains(noise, "\n") {
		t.Errorf("noise %q", noise)
	}
	pid := s.cmd.Process.Pid
	within(t, "Close", s.Close)
	if running(pid) {
		t.Error("the program is there after Close")
	}
	within(t, "Close again", s.Close)
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

// TestSessionFails: if a program gives no answer, Ask fails in time, and Close ends it and all that it has started.
func TestSessionFails(t *testing.T) {
	for name, c := range map[string]struct {
		script string
		want   error // nil: an error, but not that of the context
		says   string
	}{
		"silence":          {`while read -r line; do sleep 300; done`, context.DeadlineExceeded, ""},
		"half an answer":   {`while read -r line; do echo half >&3; done; sleep 300`, context.DeadlineExceeded, ""},
		"ends":             {`read -r line; echo "cannot go on" >&2; exit 3`, nil, "it ended without an answer"},
		"ends half-way":    {`read -r line; echo half >&3; kill -9 $$`, nil, "it ended without an answer"},
		"ends at once":     {`exit 1`, nil, ""},
		"takes no hint":    {`trap "" TERM; while :; do sleep 300; done`, context.DeadlineExceeded, ""},
		"a stubborn child": {`trap "" TERM; sh -c 'trap "" TERM; while :; do sleep 300; done' & wait; wait`, context.DeadlineExceeded, ""},
		"stopped":          {`kill -STOP $$`, context.DeadlineExceeded, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			list := filepath.Join(t.TempDir(), "pids")
			s := session(t, `echo $$ >"`+list+`.new"; mv "`+list+`.new" "`+list+`"; `+c.script)
			all := pids(t, list, 1)
			patience := soon
			if c.want != nil {
				patience = 500 * time.Millisecond
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			var err error
			within(t, "Ask", func() { _, err = s.Ask(ctx, "question", ends) })
			var failure *Error
			if !errors.As(err, &failure) || (c.want != nil && !errors.Is(err, c.want)) || (c.want == nil && ctx.Err() != nil) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("error %v, want %v %q", err, c.want, c.says)
			}
			within(t, "Close", s.Close)
			gone(t, all)
			left := started(list)
			for deadline := time.Now().Add(soon); len(left) > 0 && time.Now().Before(deadline); left = started(list) {
				time.Sleep(10 * time.Millisecond) // killed processes end a little later
			}
			for _, one := range left {
				t.Errorf("left: %s", one)
			}
		})
	}
}

// started returns the processes that have a file in their command line.
func started(file string) (found []string) {
	all, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range all {
		if line, _ := os.ReadFile(path); bytes.Contains(line, []byte(file)) {
			found = append(found, fmt.Sprintf("%s: %q", path, line))
		}
	}
	return found
}

// TestSessionFinishes: a program that gets SIGTERM may finish its work.
func TestSessionFinishes(t *testing.T) {
	for try := range 10 {
		done := filepath.Join(t.TempDir(), "done")
		s := session(t, `trap "" TERM; read -r line; echo . >&3; read -r line; sleep 1; echo done >"`+done+`"`)
		if _, err := s.Ask(t.Context(), "is the trap set?", ends); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		_, err := s.Ask(ctx, "question", ends)
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v", err)
		}
		begin := time.Now()
		s.Close()
		if _, err = os.Stat(done); err == nil {
			return
		}
		// On a machine that stalls, a second of sleep may be longer than sessionGrace.
		if took := time.Since(begin); took < sessionGrace || try == 9 {
			t.Fatalf("it was cut short after %v: %v", took, err)
		}
	}
}

func TestSessionContext(t *testing.T) {
	s := session(t, `while read -r line; do echo . >&3; done`)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Ask(ctx, "question", ends); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	// The program was not asked, so its next answer is to the next question.
	if _, err := s.Ask(t.Context(), "question", ends); err != nil {
		t.Error(err)
	}
}

// TestSessionContextEndsLate: a context that ends together with the answer does not end the next question.
func TestSessionContextEndsLate(t *testing.T) {
	s := session(t, `while read -r line; do echo . >&3; done`)
	for n := range 2000 {
		ctx, cancel := context.WithCancel(t.Context())
		if _, err := s.Ask(ctx, "question", func(answer []byte) bool { cancel(); return ends(answer) }); err != nil {
			t.Fatalf("question %d: %v", n, err)
		}
		if _, err := s.Ask(t.Context(), "question", ends); err != nil {
			t.Fatalf("the question after question %d: %v", n, err)
		}
	}
}

func TestSessionNoProgram(t *testing.T) {
	var failure *Error
	if _, err := Start(nil, "no-such-program-here"); !errors.As(err, &failure) || !strings.Contains(err.Error(), "no-such-program-here") {
		t.Errorf("error %v", err)
	}
}
