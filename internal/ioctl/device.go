package ioctl

import "golang.org/x/sys/unix"

// DeviceNumber converts a device number as the kernel encodes it in ioctls (huge_encode_dev).
func DeviceNumber(dev uint64) uint64 {
	return unix.Mkdev(uint32(dev>>8&0xfff), uint32(dev&0xff|dev>>12&0xfff00))
}
