// Package ioctl calls ioctl(2), again where a signal interrupted it. Errors are those of the kernel, as a unix.Errno.
package ioctl

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Pointer makes a request whose argument is in memory, or is none (nil).
func Pointer(f *os.File, request uint, arg unsafe.Pointer) error {
	for {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), uintptr(request), uintptr(arg))
		if errno == 0 {
			return nil
		}
		if errno != unix.EINTR {
			return errno
		}
	}
}

// Value makes a request whose argument is a number, and returns the kernel's answer.
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

// DeviceSize returns the size of a block device, in bytes.
func DeviceSize(f *os.File) (int64, error) {
	var size uint64
	err := Pointer(f, unix.BLKGETSIZE64, unsafe.Pointer(&size))
	return int64(size), err
}

// SectorSize returns the logical sector of a block device, in bytes.
func SectorSize(f *os.File) (uint32, error) {
	var size int32
	err := Pointer(f, unix.BLKSSZGET, unsafe.Pointer(&size))
	return uint32(size), err
}
