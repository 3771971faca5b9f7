package trace

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
)

// TestMain is also the program that is traced: told a directory and a number, it waits for a
// line on its input, then makes so many files, each from another goroutine than the one
// before, runs true(1), and prints what became of them. Told -1 files, it has a talk with
// an echo: itself, in another process.
func TestMain(m *testing.M) {
	if os.Getenv("TRACED_ECHO") != "" {
		echo()
	}
	dir, files := os.Getenv("TRACED_DIR"), 0
	if dir == "" {
		os.Exit(m.Run())
	}
	_, _ = fmt.Sscan(os.Getenv("TRACED_FILES"), &files)
	_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
	if files < 0 {
		fmt.Println(talk("hello\n"))
		return
	}
	for i := range files {
		done := make(chan error)
		go func() {
			runtime.LockOSThread() // so that it is another thread, too
			f, err := os.Create(filepath.Join(dir, fmt.Sprint(i)))
			if err == nil {
				err = f.Close()
			}
			done <- err
		}()
		fmt.Println(i, <-done)
	}
	fmt.Println("true", exec.Command("true").Run())
}

func talk(line string) (answer string, err error) {
	hear, say, err := os.Pipe()
	if err != nil {
		return "", err
	}
	other := exec.Command(os.Args[0])
	other.Env, other.ExtraFiles = append(os.Environ(), "TRACED_ECHO=1"), []*os.File{say}
	in, err := other.StdinPipe()
	if err == nil {
		err = other.Start()
	}
	if err == nil {
		_, err = in.Write([]byte(line))
	}
	say.Close()
	b, heard := io.ReadAll(hear)
	return fmt.Sprintf("%q", b), errors.Join(err, heard, other.Wait())
}

// echo says twice what it hears.
func echo() {
	line, _ := bufio.NewReader(os.Stdin).ReadString('\n')
	for range 2 {
		_, _ = os.NewFile(3, "pipe").WriteString(line)
	}
	os.Exit(0)
}

// traced runs the program under a trace.
func traced(t *testing.T, files int, decide func(n int, c Call) Verdict) (r Result, made int, said string) {
	t.Helper()
	if os.Getenv("SKIP_ROOT_TESTS") == "1" {
		t.Skip("SKIP_ROOT_TESTS=1")
	}
	dir := t.TempDir()
	command := exec.Command(os.Args[0])
	command.Env = append(os.Environ(), "TRACED_DIR="+dir, fmt.Sprint("TRACED_FILES=", files))
	in, err := command.StdinPipe()
	check.OK(t, err)
	out, err := command.StdoutPipe()
	check.OK(t, err)
	check.OK(t, command.Start())
	trace, err := Attach(command.Process.Pid, decide)
	check.OK(t, err)
	_, err = in.Write([]byte("\n"))
	check.OK(t, err)
	<-trace.Dead()
	r, err = trace.Detach()
	check.OK(t, err)
	for lines := bufio.NewScanner(out); lines.Scan(); {
		said += lines.Text() + "\n"
	}
	_ = command.Wait() // the tracer has collected it
	entries, err := os.ReadDir(dir)
	check.OK(t, err)
	return r, len(entries), said
}

// TestCount: the calls of all threads are counted as one, and those of children, too.
func TestCount(t *testing.T) {
	r, made, _ := traced(t, 20, func(int, Call) Verdict { return Verdict{} })
	creates, execs := 0, 0
	for _, c := range r.Calls {
		switch {
		case c.Name == "openat O_CREAT" && !c.Child:
			creates++
		case c.Exec && c.Child:
			execs++
		}
	}
	if made != 20 || creates != 20 || execs != 1 || r.Killed {
		t.Errorf("%d files, counted %d and %d programs: %v", made, creates, execs, r)
	}
}

// TestKill: the call at which the process is killed does not happen, all before it did.
func TestKill(t *testing.T) {
	for n := 1; n <= 20; n++ {
		r, made, _ := traced(t, 20, func(i int, _ Call) Verdict { return Verdict{Kill: i == n} })
		if made != n-1 || len(r.Calls) != n || !r.Killed {
			t.Errorf("killed at %d: %d files were made, %d calls counted", n, made, len(r.Calls))
		}
	}
}

// TestFail: a call that is made to fail does not happen, and the process goes on.
func TestFail(t *testing.T) {
	if !CanFail {
		t.Skip("not on this machine")
	}
	r, made, said := traced(t, 3, func(i int, _ Call) Verdict {
		if i == 2 {
			return Verdict{Fail: unix.EDQUOT}
		}
		return Verdict{}
	})
	want := "0 <nil>\n1 open " + filepath.Dir(r.Calls[1].Path) + "/1: disk quota exceeded\n2 <nil>\ntrue <nil>\n"
	if made != 2 || said != want {
		t.Errorf("%d files; it says %q, not %q", made, said, want)
	}
}

// TestExec: another program is started in the place of one.
func TestExec(t *testing.T) {
	r, _, said := traced(t, 0, func(_ int, c Call) Verdict {
		if c.Exec {
			return Verdict{Exec: "/bin/false"}
		}
		return Verdict{}
	})
	if want := "true exit status 1\n"; said != want {
		t.Errorf("it says %q, not %q", said, want)
	}
	if last := r.Calls[len(r.Calls)-1]; !slices.Equal(last.Argv, []string{"true"}) {
		t.Errorf("the last call was %s with %q", last, last.Argv)
	}
}

// TestTalk: what a process and its child say to each other is shown, and can be changed, or
// kept back; and the child can be made to die.
func TestTalk(t *testing.T) {
	for _, c := range []struct {
		name            string
		request, answer Verdict // of all the answers the first
		want            string
	}{
		{"as it is", Verdict{}, Verdict{}, `"hello\nhello\n" <nil>`},
		{"another request", Verdict{Write: "bye"}, Verdict{}, `"bye  \nbye  \n" <nil>`},
		{"another answer", Verdict{}, Verdict{Write: "what is it?"}, `"what \nwhat \n" <nil>`}, // it uses its memory again
		{"no answer", Verdict{}, Verdict{Swallow: true}, `"hello\n" <nil>`},
		{"dead", Verdict{}, Verdict{Die: true}, `"" signal: killed`},
	} {
		t.Run(c.name, func(t *testing.T) {
			if !CanFail {
				t.Skip("not on this machine")
			}
			var heard []string
			r, _, said := traced(t, -1, func(n int, at Call) Verdict {
				switch {
				case at.Talk == "":
					return Verdict{}
				case n != 0:
					t.Errorf("%s is counted", at)
				case !at.Child:
					heard = append(heard, at.Talk)
					return c.request
				}
				if heard = append(heard, at.Talk); len(heard) == 2 {
					return c.answer
				}
				return Verdict{}
			})
			if said != c.want+"\n" || heard[0] != "hello\n" || len(r.Calls) != 1 {
				t.Errorf("it says %s, not %s; heard %q, stopped at %v", said, c.want, heard, r.Calls)
			}
		})
	}
}
