package ioctl

import "golang.org/x/sys/unix"

// DeviceNumber converts a device number as the kernel encodes it in ioctls (huge_encode_dev).
func DeviceNumber(dev uint64) uint64 {
	return unix.Mkdev(uint32(dev>>8&0xfff), uint32(dev&0xff|dev>>12&0xfff00))
}

// EncodedNumber is the inverse of DeviceNumber.
func EncodedNumber(device uint64) uint64 {
	major, minor := uint64(unix.Major(device)), uint64(unix.Minor(device))
	return minor&0xff | major<<8 | minor&^0xff<<12
}
