package ioctl

import "golang.org/x/sys/unix"

// DeviceNumber makes a device number of the kernel's encoding in ioctls (huge_encode_dev).
func DeviceNumber(dev uint64) uint64 {
	return unix.Mkdev(uint32(dev>>8&0xfff), uint32(dev&0xff|dev>>12&0xfff00))
}
