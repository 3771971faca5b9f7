// Package ioctl calls ioctl(2), again if a signal interrupts it. Errors of requests are a unix.Errno.
package ioctl

import (
	"errors"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Pointer makes a request whose argument is a pointer, which may be nil.
func Pointer(f *os.File, request uint, arg unsafe.Pointer) error {
	_, err := Result(f, request, arg)
	return err
}

// Result makes a request as Pointer does, and returns its result: some requests tell by it what kept them from their work.
func Result(f *os.File, request uint, arg unsafe.Pointer) (int, error) {
	for {
		r, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), uintptr(request), uintptr(arg))
		if errno == 0 {
			return int(r), nil
		}
		if errno != unix.EINTR {
			return 0, errno
		}
	}
}

// Value makes a request whose argument is a number, and returns its result.
func Value(f *os.File, request uint, arg uintptr) (int, error) {
	for {
		r, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), uintptr(request), arg)
		if errno == 0 {
			return int(r), nil
		}
		if errno != unix.EINTR {
			return 0, errno
		}
	}
}

// Uninterrupted runs work, which calls ioctl(2), with all signals of this thread blocked (pthread_sigmask(3)), but for SIGKILL, SIGSTOP and those of faults of
// the thread itself. They are delivered afterwards.
func Uninterrupted(work func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var all, before unix.Sigset_t
	for i := range all.Val {
		all.Val[i] = ^all.Val[i]
	}
	for _, fault := range []unix.Signal{unix.SIGBUS, unix.SIGFPE, unix.SIGILL, unix.SIGSEGV, unix.SIGTRAP} {
		bits := 8 * int(unsafe.Sizeof(all.Val[0]))
		all.Val[(int(fault)-1)/bits] &^= 1 << ((int(fault) - 1) % bits)
	}
	if err := unix.PthreadSigmask(unix.SIG_BLOCK, &all, &before); err != nil {
		return err
	}
	return errors.Join(work(), unix.PthreadSigmask(unix.SIG_SETMASK, &before, nil))
}

// DeviceSize returns the size of a block device, in bytes.
func DeviceSize(f *os.File) (int64, error) {
	var size uint64
	err := Pointer(f, unix.BLKGETSIZE64, unsafe.Pointer(&size))
	return int64(size), err
}

// SectorSize returns the size of a logical sector of a block device, in bytes.
func SectorSize(f *os.File) (uint32, error) {
	var size int32
	err := Pointer(f, unix.BLKSSZGET, unsafe.Pointer(&size))
	return uint32(size), err
}
