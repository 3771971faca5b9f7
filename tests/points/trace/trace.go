// Package trace stops a process, from outside and with ptrace(2), at each system call
// that changes something that outlives the process: files, devices, mounts. There it can
// let the call happen, kill the process before it does, or make the call fail.
//
// Calls are counted over all threads of the process and over all of its children, in the
// order in which they are entered. (strace --inject=...:when=N counts for each thread by
// itself, and the threads of a Go program share its work as it comes.)
package trace

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Verdict is what becomes of a system call. Its zero value lets it happen.
type Verdict struct {
	// Kill the process (SIGKILL, not its children) before the call happens.
	Kill bool
	// All of its children are killed with it, as at the end of a container.
	All bool
	// Fail the call with this error, without its happening (where CanFail).
	Fail unix.Errno
	// Exec is the program that is started in place of the one that was meant, with the same
	// arguments; empty: that one. Its path must not be longer than the other's.
	Exec string
	// Die: the child that makes the call is killed (SIGKILL) before it happens.
	Die bool
	// Swallow a write: it does not happen, and looks as if it had.
	Swallow bool
	// Write this line in place of what was to be written: so much of it as fits, and spaces.
	Write string
}

// Trace is a process that is being traced.
type Trace struct {
	pid     int
	decide  func(n int, c Call) Verdict
	leaving atomic.Bool
	done    chan struct{}

	// The rest belongs to the tracing thread until done is closed.
	tasks     map[int]bool    // of the process and its children, by thread ID
	moving    map[int]bool    // of these, seized and not yet seen standing still
	results   map[int]uintptr // of calls that do not happen, between entry and exit
	calls     []Call
	killed    bool
	survivors []int
	err       error
}

// survival is how long children get to die after the process was killed.
const survival = time.Minute

// threads run tracers. All ptrace requests for a process have to come from one thread,
// and that thread waits for whatever is its child (wait4(2), __WNOTHREAD): so it must
// never start another process, and does nothing else from the start of this one.
var threads = make(chan func())

func init() {
	var locked sync.WaitGroup
	for range runtime.NumCPU() {
		locked.Add(1)
		go func() {
			runtime.LockOSThread()
			locked.Done()
			for run := range threads {
				run()
			}
		}()
	}
	locked.Wait()
}

// Attach begins to trace a running Go process, and the children that it has. decide is called before the n-th (1, 2,
// ...) state-changing call, and with 0 before each call with Talk, while the caller of that call stands still. The caller must
// not wait for the process until the trace has ended: it would steal what the kernel
// reports to the tracer.
func Attach(pid int, decide func(n int, c Call) Verdict) (*Trace, error) {
	t := &Trace{pid: pid, decide: decide, done: make(chan struct{}), tasks: map[int]bool{}, moving: map[int]bool{}, results: map[int]uintptr{}}
	attached := make(chan error)
	threads <- func() {
		defer close(t.done)
		if err := t.seize(); err != nil {
			attached <- err
			return
		}
		t.err = t.loop(attached)
	}
	return t, <-attached
}

// Result of a trace.
type Result struct {
	// Calls that were stopped at, the last one being the one before which the process
	// was killed, if it was.
	Calls  []Call
	Killed bool
	// Survivors are children that did not die with the process; they are dead now.
	Survivors []int
}

// Detach ends the trace: the process runs on, unless it was killed; then all of it is
// gone when Detach returns.
func (t *Trace) Detach() (Result, error) {
	t.leaving.Store(true)
	// Something has to happen for the tracer to wake up. Go programs take SIGURG lightly.
	_ = unix.Kill(t.pid, unix.SIGURG)
	<-t.done
	return Result{t.calls, t.killed, t.survivors}, t.err
}

// Dead is closed when the process is gone, or no longer traced.
func (t *Trace) Dead() <-chan struct{} { return t.done }

const options = unix.PTRACE_O_TRACESYSGOOD | unix.PTRACE_O_TRACECLONE | unix.PTRACE_O_TRACEFORK |
	unix.PTRACE_O_TRACEVFORK | unix.PTRACE_O_TRACEEXEC | unix.PTRACE_O_EXITKILL

func ptrace(request, tid int, addr, data uintptr) error {
	_, _, errno := unix.RawSyscall6(unix.SYS_PTRACE, uintptr(request), uintptr(tid), addr, data, 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// seize takes all threads that are there and not traced. One that was in the middle of
// making another when it was seized makes it untraced, and it may appear after the look:
// so all are only taken if, once each has stood still, another look finds none.
func (t *Trace) seize() error {
	for found := true; found; {
		found = false
		threads, err := threadsOf(t.pid)
		if err != nil {
			return err
		}
		for _, child := range childrenOf(t.pid) {
			more, _ := threadsOf(child)
			threads = append(threads, more...)
		}
		for _, tid := range threads {
			if t.tasks[tid] {
				continue
			}
			err := ptrace(unix.PTRACE_SEIZE, tid, 0, options)
			if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EPERM) {
				continue // gone, or traced already
			}
			if err != nil {
				return fmt.Errorf("seize thread %d: %w", tid, err)
			}
			t.tasks[tid], t.moving[tid], found = true, true, true
			if err := ptrace(unix.PTRACE_INTERRUPT, tid, 0, 0); err != nil {
				return fmt.Errorf("interrupt thread %d: %w", tid, err)
			}
		}
	}
	if len(t.tasks) == 0 {
		return fmt.Errorf("process %d cannot be traced", t.pid)
	}
	return nil
}

func threadsOf(pid int) (tids []int, err error) {
	threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	for _, thread := range threads {
		tid, _ := strconv.Atoi(thread.Name())
		tids = append(tids, tid)
	}
	return tids, err
}

// childrenOf are the processes that a process has started and that have not ended.
func childrenOf(pid int) (pids []int) {
	paths, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range paths {
		stat, _ := os.ReadFile(path)
		fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:])) // proc(5): state, parent
		if len(fields) > 1 && fields[0] != "Z" && fields[1] == strconv.Itoa(pid) {
			child, _ := strconv.Atoi(strings.Split(path, "/")[2])
			pids = append(pids, child)
		}
	}
	return pids
}

// loop runs until nothing is traced any more. It says once on attached when all threads
// are.
func (t *Trace) loop(attached chan<- error) error {
	interrupted, answered := false, false
	defer func() {
		if !answered {
			attached <- fmt.Errorf("process %d is gone", t.pid)
		}
	}()
	for len(t.tasks) > 0 {
		var status unix.WaitStatus
		tid, err := unix.Wait4(-1, &status, unix.WALL|unix.WNOTHREAD, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if errors.Is(err, unix.ECHILD) {
			return nil
		}
		if err != nil {
			return err
		}
		delete(t.moving, tid)
		if !status.Stopped() {
			delete(t.tasks, tid)
			continue
		}
		t.tasks[tid] = true
		if !answered && len(t.moving) == 0 {
			if err := t.seize(); err != nil || len(t.moving) == 0 {
				answered = true
				attached <- err
			}
		}
		t.stopped(tid, status)
		if t.leaving.Load() && !t.killed && !interrupted {
			interrupted = true
			for other := range t.tasks {
				_ = ptrace(unix.PTRACE_INTERRUPT, other, 0, 0)
			}
		}
	}
	return nil
}

// stopped looks at a thread that stands still, and lets it go on. It may be gone by then:
// so errors of ptrace mean nothing here, and its end will be reported.
func (t *Trace) stopped(tid int, status unix.WaitStatus) {
	signal, event := status.StopSignal(), int(uint32(status)>>16)
	resume, deliver := unix.PTRACE_SYSCALL, uintptr(0)
	switch {
	case event == unix.PTRACE_EVENT_STOP && signal != unix.SIGTRAP:
		resume = unix.PTRACE_LISTEN // stopped by SIGSTOP or the like, and stays so
	case event == unix.PTRACE_EVENT_CLONE || event == unix.PTRACE_EVENT_FORK || event == unix.PTRACE_EVENT_VFORK:
		var child uint
		if err := ptrace(unix.PTRACE_GETEVENTMSG, tid, 0, uintptr(unsafe.Pointer(&child))); err == nil {
			t.tasks[int(child)] = true
		}
	case event != 0:
	case signal == unix.SIGTRAP|0x80:
		t.syscall(tid)
	default:
		deliver = uintptr(signal)
	}
	_, skipped := t.results[tid]
	switch {
	case t.killed:
		resume = unix.PTRACE_CONT
	case t.leaving.Load() && !skipped:
		resume = unix.PTRACE_DETACH
		delete(t.tasks, tid)
	}
	_ = ptrace(resume, tid, 0, deliver)
}

// syscallInfo is struct ptrace_syscall_info.
type syscallInfo struct {
	op     uint8
	_      [3]byte
	arch   uint32
	ip, sp uint64
	nr     uint64 // at exit: the value returned
	args   [6]uint64
	_      [16]byte
}

func (t *Trace) syscall(tid int) {
	var info syscallInfo
	if err := ptrace(unix.PTRACE_GET_SYSCALL_INFO, tid, unsafe.Sizeof(info), uintptr(unsafe.Pointer(&info))); err != nil {
		if err := registers(tid, &info); err != nil {
			return
		}
	}
	if result, skipped := t.results[tid]; skipped || info.op == unix.PTRACE_SYSCALL_INFO_EXIT {
		if skipped {
			delete(t.results, tid)
			t.note(setResult(tid, result))
		}
		return
	}
	if info.op != unix.PTRACE_SYSCALL_INFO_ENTRY || t.killed || t.leaving.Load() {
		return
	}
	call, counts := inspect(tid, int(info.nr), info.args)
	if !counts && call.Talk == "" {
		return
	}
	call.Child = !t.own(tid)
	n := 0
	if counts {
		t.calls = append(t.calls, call)
		n = len(t.calls)
	}
	verdict := t.decide(n, call)
	switch {
	case verdict.Kill:
		t.kill(verdict.All)
	case verdict.Die && call.Child:
		t.note(unix.Kill(tid, unix.SIGKILL))
	case verdict.Fail != 0:
		t.note(skip(tid))
		t.results[tid] = uintptr(-int64(verdict.Fail))
	case verdict.Swallow:
		t.note(skip(tid))
		t.results[tid] = uintptr(info.args[2])
	case verdict.Write != "":
		t.note(overwrite(tid, info.args, verdict.Write))
	case verdict.Exec != "":
		t.note(replace(tid, call, info.args, verdict.Exec))
	}
}

func (t *Trace) note(err error) { t.err = errors.Join(t.err, err) }

// own reports whether a thread is one of the process's own.
func (t *Trace) own(tid int) bool {
	_, err := os.Stat(fmt.Sprintf("/proc/%d/task/%d", t.pid, tid))
	return err == nil
}

// kill kills the process. What it started has to die of that by itself, unless all are
// killed.
func (t *Trace) kill(all bool) {
	t.killed = true
	var children []int
	for tid := range t.tasks {
		if !t.own(tid) {
			children = append(children, tid)
		}
	}
	t.note(unix.Kill(t.pid, unix.SIGKILL))
	for _, child := range children {
		if all {
			_ = unix.Kill(child, unix.SIGKILL)
		}
	}
	late := time.AfterFunc(survival, func() {
		for _, child := range children {
			if unix.Kill(child, 0) == nil { // the loop waits for its end
				t.survivors = append(t.survivors, child)
				_ = unix.Kill(child, unix.SIGKILL)
			}
		}
	})
	go func() {
		<-t.done
		late.Stop()
	}()
}

// memory reads some bytes of the memory of a thread; what there is of them.
func memory(tid int, address uint64, size int) []byte {
	mem, err := os.Open(fmt.Sprintf("/proc/%d/mem", tid))
	if err != nil {
		return nil
	}
	defer mem.Close()
	buffer := make([]byte, size)
	n, _ := mem.ReadAt(buffer, int64(address))
	return buffer[:n]
}

// setMemory writes over some of it.
func setMemory(tid int, address uint64, b []byte) error {
	mem, err := os.OpenFile(fmt.Sprintf("/proc/%d/mem", tid), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer mem.Close()
	_, err = mem.WriteAt(b, int64(address))
	return err
}

// text reads a string from the memory of a thread; what there is of it.
func text(tid int, address uint64) string {
	// A string near the end of a page must not fail for what lies behind it.
	return unix.ByteSliceToString(memory(tid, address, int(4096-address%4096)))
}

// texts reads a list of strings that ends in a null pointer.
func texts(tid int, address uint64) (all []string) {
	for ; ; address += 8 {
		one := word(tid, address)
		if one == 0 {
			return all
		}
		all = append(all, text(tid, one))
	}
}

// replace writes another path over the one of the program that a thread is about to start.
// That one was put there for this call only (syscall.forkExec copies it).
func replace(tid int, c Call, args [6]uint64, path string) error {
	if !c.Exec || len(path) > len(c.Path) {
		return fmt.Errorf("%s cannot become %s", c, path)
	}
	return setMemory(tid, args[changing[unix.SYS_EXECVE].arg], append([]byte(path), 0))
}

// overwrite changes what a thread is about to write.
func overwrite(tid int, args [6]uint64, text string) error {
	size := int(args[2])
	b := append(bytes.Repeat([]byte(" "), max(size-1, 0)), '\n')[:size]
	copy(b[:max(size-1, 0)], text)
	return setMemory(tid, args[1], b)
}

// word reads 8 bytes from the memory of a thread.
func word(tid int, address uint64) (value uint64) {
	copy((*[8]byte)(unsafe.Pointer(&value))[:], memory(tid, address, 8))
	return value
}

// behind returns what a file descriptor of a thread is: its mode, and its name.
func behind(tid int, fd uint64) (mode uint32, name string) {
	path := fmt.Sprintf("/proc/%d/fd/%d", tid, int32(fd))
	var st syscall.Stat_t
	if syscall.Stat(path, &st) != nil {
		return 0, ""
	}
	name, _ = os.Readlink(path)
	return st.Mode, filepath.Clean(name)
}
