package points

import (
	"context"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ashlar-csi/ashlar/tests/points/trace"
)

// shellTrouble is what can go wrong with lvm2, which the driver asks through a shell that
// stays.
type shellTrouble struct {
	name string
	// request is what becomes of a command.
	request func(command string) trace.Verdict
	// answer is what becomes of a line (1, 2, ...) of what lvm2 says to it.
	answer func(line int) trace.Verdict
	// gone: it cannot be started again, for once.
	gone bool
	code codes.Code
	says string
}

func instead(line string) func(string) trace.Verdict {
	return func(string) trace.Verdict { return trace.Verdict{Write: line} }
}

func asked(string) trace.Verdict { return trace.Verdict{} }

const noAnswer = "lvm2 gave no answer"

var shellTroubles = []shellTrouble{
	{name: "refuses", request: func(command string) trace.Verdict {
		return trace.Verdict{Write: strings.Replace(command, " -y ", " -Q ", 1)}
	}, code: codes.Internal, says: "Error during parsing of command line"},
	{name: "ends before it", request: instead("exit"), code: codes.Unavailable, says: noAnswer},
	{name: "ends before it, and is gone", request: instead("exit"), gone: true, code: codes.Unavailable, says: noAnswer},
	{name: "dies after it", request: asked, answer: func(int) trace.Verdict { return trace.Verdict{Die: true} }, code: codes.Unavailable, says: noAnswer},
	{name: "hangs before it", request: func(string) trace.Verdict { return trace.Verdict{Swallow: true} }, code: codes.DeadlineExceeded},
	{name: "hangs after it", request: asked, answer: func(int) trace.Verdict { return trace.Verdict{Swallow: true} }, code: codes.DeadlineExceeded},
	{name: "prints noise", request: asked, answer: func(line int) trace.Verdict {
		b := make([]byte, 200)
		_, _ = rand.NewChaCha8([32]byte{byte(line)}).Read(b)
		return trace.Verdict{Write: string(b)}
	}, code: codes.DeadlineExceeded},
	{name: "prints an empty answer", request: asked, answer: func(line int) trace.Verdict {
		if line == 1 {
			return trace.Verdict{Write: " {}"} // as long as what it says first
		}
		return trace.Verdict{Swallow: true}
	}, code: codes.Unavailable, says: noAnswer},
}

// TestLVMFaults is TestFaults and TestChildren over LVM pools. Of lvm2 each command goes
// wrong, in each way; each of its system calls fails, as those of the driver do; and it dies
// before each.
func TestLVMFaults(t *testing.T) {
	if !trace.CanFail {
		t.Skip("system calls cannot be made to fail on this machine")
	}
	overLVM(t, sweep{"faults", "faults", *fullFaults, *lvmFaultsTime}, func(t *testing.T, at *site, sc scenario, end time.Time) tally {
		random := draw(t)
		o := untouched(t, at, sc)
		kinds, some := lvmFaults(at, sc, o), tally{}
		for _, kind := range kinds {
			some.of += len(kind)
		}
		var tried []harm
		if *fullFaults {
			tried = slices.Concat(kinds...)
		} else {
			for range 1 + some.of/lvmShare {
				kind := kinds[random.IntN(len(kinds))]
				tried = append(tried, kind[random.IntN(len(kind))])
			}
		}
		for i, c := range tried {
			if i > 0 && time.Now().After(end) {
				break
			}
			giveUp := o.undoable && random.IntN(2) == 0
			attempt(t, fmt.Sprintf("%d: %s give-up=%v", i, c.name, giveUp), fmt.Sprintf("-faults.lvm=1h -faults.full=%v", *fullFaults), func(t *testing.T) {
				some.tried++
				c.happen(t, giveUp)
			})
		}
		return some
	})
}

// tells reports whether a call tells lvm2 something, which is a line. What cryptsetup reads, a passphrase, is none; nor is the error number, 8 bytes
// of which the last is 0, that Go tells a child of its own in a new user namespace before that becomes another program (syscall.forkExec).
func tells(c trace.Call) bool { return !c.Child && strings.HasSuffix(c.Talk, "\n") }

// TestTells: of what a driver says through pipes, only commands of lvm2 are changed. Go's word to its child with a line's end in it is error 10<<56.
func TestTells(t *testing.T) {
	for talk, want := range map[string]bool{"lvs --noheadings\n": true, "a passphrase": false, string(make([]byte, 8)): false, "": false} {
		if tells(trace.Call{Name: "write", Talk: talk}) != want {
			t.Errorf("%q is a command of lvm2: %v", talk, !want)
		}
	}
	if tells(trace.Call{Name: "write", Talk: "  VG #PV\n", Child: true}) {
		t.Error("what lvm2 answers is a command of it")
	}
}

// harm is something that can go wrong in a call.
type harm struct {
	name   string
	happen func(t *testing.T, giveUp bool)
}

// lvmFaults are what can go wrong in a call, by kind; each kind is as likely. Calls of other
// programs fail with one error each, the next one with the next; of writes in a row
// (of mkfs and the like) one counts.
func lvmFaults(at *site, sc scenario, o course) (kinds [][]harm) {
	var own, others, deaths, programs, commands []harm
	for i, c := range o.calls {
		n := i + 1
		if inRow(o.calls, i) || strings.HasSuffix(c.Path, "/.lvm_history") { // where lvm2 never gets to, as the driver gives it no home
			continue
		}
		errnos, all := c.Errors(), &own
		if c.Child {
			all = &others
			if len(errnos) > 0 {
				errnos = errnos[n%len(errnos):][:1]
			}
			if !c.Exec {
				deaths = append(deaths, harm{fmt.Sprintf("%d %s dies", n, c.Name), func(t *testing.T, giveUp bool) { fault(t, at, sc, n, 0, giveUp) }})
			}
		}
		for _, errno := range errnos {
			*all = append(*all, harm{fmt.Sprintf("%d %s %s", n, c.Name, unix.ErrnoName(errno)), func(t *testing.T, giveUp bool) { fault(t, at, sc, n, errno, giveUp) }})
		}
	}
	for n, c := range started(o.calls) {
		for _, trouble := range troubles(c) {
			programs = append(programs, harm{filepath.Base(c.Path) + " " + trouble.name, func(t *testing.T, giveUp bool) { child(t, at, sc, o, n, trouble, giveUp) }})
		}
	}
	for n := 1; n <= o.asked; n++ {
		for _, trouble := range shellTroubles {
			commands = append(commands, harm{fmt.Sprintf("lvm %d %s", n, trouble.name), func(t *testing.T, giveUp bool) { trouble.happen(t, at, sc, o, n, giveUp) }})
		}
	}
	for _, kind := range [][]harm{own, others, deaths, programs, commands} {
		if len(kind) > 0 {
			kinds = append(kinds, kind)
		}
	}
	return kinds
}

// happen makes a call with trouble at the n-th command (1, 2, ...) of it.
func (trouble shellTrouble) happen(t *testing.T, at *site, sc scenario, o course, n int, giveUp bool) {
	w := newEnvironment(t, at)
	p := sc.prepare(w)
	var met atomic.Bool
	if trouble.code == codes.DeadlineExceeded {
		caller := newEnough()
		w.caller = caller
		go caller.when(met.Load, o.took*3/2+500*time.Millisecond) // by then all is done that can be done without what hangs
	}
	command, commands, lines := "", 0, 0
	_, err := w.traced(p.call, func(_ int, c trace.Call) trace.Verdict {
		switch {
		case c.Exec && trouble.gone && command != "":
			trouble.gone = false
			return trace.Verdict{Fail: unix.ENOENT}
		case c.Talk == "" || !c.Child && !tells(c):
		case !c.Child:
			if commands++; commands == n {
				command = strings.TrimSpace(c.Talk)
				met.Store(trouble.answer == nil)
				return trouble.request(command)
			}
		case commands == n && trouble.answer != nil:
			lines++
			met.Store(true)
			return trouble.answer(lines)
		}
		return trace.Verdict{}
	})
	w.caller = context.Background()
	t.Logf("lvm %s %s; the answer: %v", command, trouble.name, err)
	if command == "" {
		t.Fatalf("lvm2 was told %d commands, not %d", commands, n)
	}
	if w.gone() {
		t.Fatal("the driver is gone")
	}
	if err != nil { // else it was got around, or did not matter
		said := err.Error()
		if trouble.code == codes.DeadlineExceeded {
			said = w.ended()
		}
		if code := status.Code(err); code != trouble.code {
			t.Errorf("answered as %s, not %s", code, trouble.code)
		}
		for _, word := range []string{"lvm", strings.Fields(command)[0], trouble.says} {
			if !strings.Contains(said, word) {
				t.Errorf("the answer says nothing of %q: %s", word, said)
			}
		}
	}
	w.goOn(p, giveUp, false)
}
