package points

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/tests/points/trace"
)

// trouble is what can go wrong with a program that the driver starts.
type trouble struct {
	name string
	// script is what runs in its place; %s is the program itself. Empty: it is not there.
	script string
	// code of the answer; OK: it does no harm.
	code codes.Code
	// says is what the answer repeats of what the program said.
	says string
}

// hangs is the trouble of a program that has not ended when the caller has had enough;
// neither has what it has started.
const hangs = "hangs"

// enough is the context of a caller whose time is up when something hangs, however long it took to get there.
type enough struct {
	context.Context
	up chan struct{}
}

func newEnough() enough { return enough{context.Background(), make(chan struct{})} }

func (e enough) Done() <-chan struct{} { return e.up }

func (e enough) Err() error {
	select {
	case <-e.up:
		return context.DeadlineExceeded
	default:
		return nil
	}
}

// when ends the context a while after something hangs, or when a call should have ended long ago.
func (e enough) when(hangs func() bool, while time.Duration) {
	defer close(e.up)
	for deadline := time.Now().Add(callTime); !hangs() && time.Now().Before(deadline); {
		time.Sleep(10 * time.Millisecond)
	}
	time.Sleep(while)
}

const (
	complain = "echo 'made up: it broke' >&2; exit "
	noise    = `head -c 200000 /dev/urandom; head -c 200000 /dev/urandom >&2; `
)

// troubles of a program; by default, with what its own manual says.
func troubles(c trace.Call) []trouble {
	all := []trouble{
		{"fails", complain + "1", codes.Internal, "made up: it broke"},
		{"is killed", "kill -SEGV $$", codes.Internal, "segmentation fault"},
		{hangs, "echo $$ >$0.pid; sleep 3600 & wait", codes.DeadlineExceeded, ""},
		{"prints noise", noise + `exec %s "$@"`, codes.OK, ""},
		{"prints noise and does nothing", noise + "exit 0", codes.Internal, ""},
		{"is not there", "", codes.FailedPrecondition, "install the filesystem's tools"},
	}
	switch name := filepath.Base(c.Path); {
	case name == "cat":
		// It is a process to be in a namespace; what it does is of no use to anybody.
		for i := range all {
			all[i].code = codes.OK
		}
		all[5] = trouble{"is not there", "", codes.FailedPrecondition, "install coreutils"}
		return slices.DeleteFunc(all, func(x trouble) bool { return x.name == hangs }) // it is killed in any case
	case slices.Contains(c.Argv, "-V"):
		// What it can do is not known then: it is told to do less. mkfs.xfs is asked, on older kernels, as it may do what the kernel cannot mount.
		for i := range all {
			if all[i].name != hangs && (name == "mkfs.ext4" || strings.HasPrefix(all[i].name, "prints noise")) {
				all[i].code = codes.OK
			}
		}
	case name == "mkfs.btrfs":
		all = append(all, trouble{"meets a device that goes", `echo "ERROR: cannot check mount status of $0: No such device or address" >&2; exit 1`, codes.OK, ""})
	case name == "e2fsck":
		// e2fsck(8): 1: all was repaired; 4: not all was; 8: it did not work. It has to have run all the same: resize2fs grows
		// nothing that was mounted in a later second than it was last checked in.
		all[0].code = codes.OK
		all[0].script = `%s "$@"; ` + all[0].script
		all[4].code = codes.OK
		found := trouble{"finds damage", complain + "4", codes.DataLoss, "made up: it broke"}
		if slices.Contains(c.Argv, "-n") { // another one looks closer, and may repair
			found = trouble{found.name, found.script, codes.OK, ""}
		}
		all = append(all, found,
			trouble{"does not work", complain + "8", codes.Internal, "made up: it broke"})
		if slices.Contains(c.Argv, "-p") && slices.Contains(c.Argv, "-f") { // before resize2fs
			return slices.Delete(all, 4, 5)
		}
	case name == "cryptsetup":
		all[5].says = "install cryptsetup"
	case name == "resize2fs":
		// It may have had nothing to do; the filesystem grows when it is staged next.
		all[4].code = codes.OK
	}
	return all
}

// tasks are what programs are started for, as the answer names it.
var tasks = map[string]string{"cat": "make a user namespace", "mkfs.ext4": "make ext4", "mkfs.xfs": "make xfs", "mkfs.btrfs": "make btrfs", "e2fsck": "check", "resize2fs": "grow"}

// starts are the calls that start programs; all are looked at in the full sweep.
var starts = regexp.MustCompile("^(NodeStageVolume (first|later)|NodePublishVolume (ephemeral|block read-only))")

// TestChildren: for each call that starts other programs, and for each of these, have it
// fail in each way, and look at the answer. Then go on as in TestFaults.
func TestChildren(t *testing.T) {
	drivertest.NeedRoot(t)
	_, err := program()
	check.OK(t, err)
	sites := map[string]*site{copying: newSite(t, copying), sharing: newSite(t, sharing)}
	seen, left := map[string]bool{}, 0
	for _, s := range scenarios {
		if !*fullFaults && !starts.MatchString(s.name) {
			continue
		}
		left++
		t.Run(s.name, func(t *testing.T) {
			left--
			begin, count, random := time.Now(), 0, draw(t)
			o := untouched(t, sites[s.fs], s)
			programs, undoable := started(o.calls), o.undoable
			try := func(n int, trouble trouble, giveUp bool) {
				count++
				name := fmt.Sprintf("%d %s %s give-up=%v", n, filepath.Base(programs[n].Path), trouble.name, giveUp)
				attempt(t, name, fmt.Sprint("-faults.full=", *fullFaults), func(t *testing.T) { child(t, sites[s.fs], s, o, n, trouble, giveUp) })
			}
			for n, c := range programs {
				seen[filepath.Base(c.Path)] = true
				all := troubles(c)
				if !*fullFaults {
					try(n, all[random.IntN(len(all))], undoable && random.IntN(2) == 0)
					continue
				}
				if !starts.MatchString(s.name) {
					t.Errorf("%s is started, which is tried in the full sweep only", c.Path)
				}
				for _, trouble := range all {
					try(n, trouble, false)
					if undoable {
						try(n, trouble, true)
					}
				}
			}
			if count > 0 {
				fmt.Printf("children: %-40s %3d programs, %3d troubles, %5.1f s\n", s.name, len(programs), count, time.Since(begin).Seconds())
			}
		})
	}
	for name := range tasks {
		if !seen[name] && left == 0 { // with -run some are left out
			t.Errorf("no call has started %s", name)
		}
	}
}

// started are the programs that are started.
func started(calls []trace.Call) []trace.Call {
	return slices.CompactFunc(slices.DeleteFunc(slices.Clone(calls), func(c trace.Call) bool { return !c.Exec }), startedAgain)
}

// startedAgain reports whether a program is the one before it, run again: mkfs.btrfs is, where another loop device of the
// machine went while it looked at all of them. How often that happens is others' affair.
func startedAgain(before, now trace.Call) bool {
	return filepath.Base(now.Path) == "mkfs.btrfs" && slices.Equal(before.Argv, now.Argv)
}

// child makes the call with trouble in its n-th program (0, 1, ...).
func child(t *testing.T, s *site, sc scenario, o course, n int, trouble trouble, giveUp bool) {
	c := started(o.calls)[n]
	w := newEnvironment(t, s)
	p := sc.prepare(w)
	// Its path takes the place of the program's, so it has to be short.
	script := fmt.Sprintf("/run/.%05d", os.Getpid()%100000)
	if trouble.script != "" {
		text := strings.ReplaceAll(trouble.script, "%s", c.Path)
		check.OK(t, os.WriteFile(script, []byte("#!/bin/sh\n"+text+"\n"), 0o700))
		defer func() { check.OK(t, os.Remove(script)) }()
	}
	if trouble.name == hangs {
		caller := newEnough()
		w.caller = caller
		_ = os.Remove(script + ".pid") // of a test that failed
		go caller.when(func() bool {
			text, _ := os.ReadFile(script + ".pid")
			return bytes.HasSuffix(text, []byte("\n"))
		}, 300*time.Millisecond)
	}
	met, before := false, trace.Call{}
	_, err := w.traced(p.call, func(_ int, at trace.Call) trace.Verdict {
		if !at.Exec || met {
			return trace.Verdict{}
		}
		again := startedAgain(before, at)
		before = at
		if again {
			return trace.Verdict{}
		}
		if n--; n >= 0 {
			return trace.Verdict{}
		}
		met = true
		if trouble.script == "" {
			return trace.Verdict{Fail: unix.ENOENT}
		}
		return trace.Verdict{Exec: script}
	})
	w.caller = context.Background()
	t.Logf("%s %s; the answer: %.400v", strings.Join(c.Argv, " "), trouble.name, err)
	if !met {
		t.Fatalf("%s was not started", c.Path)
	}
	if code := status.Code(err); code != trouble.code {
		t.Errorf("answered as %s, not %s", code, trouble.code)
	}
	said := fmt.Sprint(err)
	if name := filepath.Base(c.Path); trouble.name == hangs && (name == "e2fsck" || name == "resize2fs") {
		w.goesOn(p, script+".pid")
	}
	if trouble.name == hangs {
		said = w.ended()
		w.outlived(script + ".pid")
	}
	if trouble.code != codes.OK {
		for _, word := range []string{tasks[filepath.Base(c.Path)], filepath.Base(c.Path), trouble.says} {
			if !strings.Contains(said, word) {
				t.Errorf("the answer says nothing of %q", word)
			}
		}
	}
	if len(said) > 140_000 {
		t.Errorf("the answer has %d bytes", len(said))
	}
	w.goOn(p, giveUp, false)
}

// goesOn makes sure that a check goes on without its caller, so that a retry is told that it does, until
// the volume is unstaged.
func (w *environment) goesOn(p plan, pidFile string) {
	w.t.Helper()
	text, err := os.ReadFile(pidFile)
	check.OK(w.t, err)
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	check.OK(w.t, err)
	if err := p.call(); status.Code(err) != codes.Aborted {
		w.t.Errorf("a retry meanwhile is answered %v", err)
	}
	if err := unix.Kill(pid, 0); err != nil {
		w.t.Errorf("the check ended with its caller: %v", err)
	}
	check.OK(w.t, w.retried(p.undo))
}

var endedByCaller = regexp.MustCompile(`"Call ended by its caller".*(\n\t.*)*`) // an error of several lines is indented

// wholeLog is all that the driver said.
func (w *environment) wholeLog() string {
	text, err := os.ReadFile(filepath.Join(w.Dir, "log"))
	check.OK(w.t, err)
	return string(text)
}

// ended waits until the driver has ended a call whose caller has gone away, and returns
// what it says of it.
func (w *environment) ended() string {
	w.t.Helper()
	for deadline := time.Now().Add(callTime); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if line := endedByCaller.FindString(w.wholeLog()); line != "" {
			return line
		}
	}
	w.t.Fatal("the call goes on although nobody waits for it")
	return ""
}

// outlived makes sure that of a program, and of what it has started, nothing runs.
func (w *environment) outlived(pidFile string) {
	w.t.Helper()
	text, err := os.ReadFile(pidFile)
	check.OK(w.t, err)
	check.OK(w.t, os.Remove(pidFile))
	group, err := strconv.Atoi(strings.TrimSpace(string(text)))
	check.OK(w.t, err)
	for _, stat := range drivertest.Gone(func() []string { return running(group) }) { // what was killed goes in its own time
		w.t.Errorf("outlived its call: %s", stat)
		_ = unix.Kill(-group, unix.SIGKILL)
	}
}

// running are the processes of a group that have not ended.
func running(group int) (found []string) {
	for _, path := range glob("/proc/[0-9]*/stat") {
		stat, _ := os.ReadFile(path)
		// PID (NAME) STATE PPID PGRP ...: proc_pid_stat(5). Who collects the dead is not our affair.
		var state string
		var parent, pgrp int
		_, _ = fmt.Sscan(string(stat[bytes.LastIndexByte(stat, ')')+1:]), &state, &parent, &pgrp)
		if pgrp == group && state != "Z" && state != "X" {
			found = append(found, string(stat))
		}
	}
	return found
}

func glob(pattern string) []string {
	found, _ := filepath.Glob(pattern)
	return found
}
