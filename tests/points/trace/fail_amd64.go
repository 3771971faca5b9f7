package trace

import "golang.org/x/sys/unix"

// CanFail: Verdict.Fail works here.
const CanFail = true

// skip makes the call that a thread is about to make none at all.
func skip(tid int) error {
	var regs unix.PtraceRegs
	if err := unix.PtraceGetRegs(tid, &regs); err != nil {
		return err
	}
	regs.Orig_rax = ^uint64(0)
	return unix.PtraceSetRegs(tid, &regs)
}

// setResult makes a call that has just ended fail.
func setResult(tid int, errno unix.Errno) error {
	var regs unix.PtraceRegs
	if err := unix.PtraceGetRegs(tid, &regs); err != nil {
		return err
	}
	regs.Rax = uint64(-int64(errno))
	return unix.PtraceSetRegs(tid, &regs)
}
