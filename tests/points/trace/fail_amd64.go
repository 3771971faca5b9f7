package trace

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// CanFail: Verdict.Fail and Verdict.Swallow work here.
const CanFail = true

// Offsets of registers in struct user (sys/user.h).
const (
	r10, r9, r8, rax, rdx, rsi, rdi = 7 * 8, 8 * 8, 9 * 8, 10 * 8, 12 * 8, 13 * 8, 14 * 8
	origRax                         = 15 * 8
)

// registers tells what PTRACE_GET_SYSCALL_INFO does, where the kernel has none (User Mode
// Linux): a call that begins has ENOSYS as its result so far.
func registers(tid int, info *syscallInfo) (err error) {
	peek := func(offset uintptr) (value uint64) {
		if failed := ptrace(unix.PTRACE_PEEKUSR, tid, offset, uintptr(unsafe.Pointer(&value))); failed != nil {
			err = failed
		}
		return value
	}
	info.nr, info.op = peek(origRax), unix.PTRACE_SYSCALL_INFO_EXIT
	if begun := -int64(unix.ENOSYS); peek(rax) == uint64(begun) {
		info.op = unix.PTRACE_SYSCALL_INFO_ENTRY
		info.args = [6]uint64{peek(rdi), peek(rsi), peek(rdx), peek(r10), peek(r8), peek(r9)}
	}
	return err
}

// skip makes the call that a thread is about to make none at all.
func skip(tid int) error {
	return ptrace(unix.PTRACE_POKEUSR, tid, origRax, ^uintptr(0))
}

// setResult makes a call that has just ended return something else.
func setResult(tid int, value uintptr) error {
	return ptrace(unix.PTRACE_POKEUSR, tid, rax, value)
}
