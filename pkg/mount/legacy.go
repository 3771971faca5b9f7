package mount

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// legacyFlags are the flags of mount(2) for the attributes that it has; relatime is its default.
var legacyFlags = map[uint64]uintptr{
	unix.MOUNT_ATTR_NOSUID: unix.MS_NOSUID, unix.MOUNT_ATTR_NODEV: unix.MS_NODEV, unix.MOUNT_ATTR_NOEXEC: unix.MS_NOEXEC,
	unix.MOUNT_ATTR_NOATIME: unix.MS_NOATIME, unix.MOUNT_ATTR_STRICTATIME: unix.MS_STRICTATIME, unix.MOUNT_ATTR_NODIRATIME: unix.MS_NODIRATIME,
	unix.MOUNT_ATTR_NOSYMFOLLOW: msNosymfollow,
}

const msNosymfollow = 0x100 // MS_NOSYMFOLLOW (linux/mount.h)

// needsLegacy reports whether an error of the kernel may mean that the filesystem takes the SELinux context in the options by mount(2) only. That is so for
// btrfs before Linux 6.8, which opens itself twice, and the first time without a context that was given by fsconfig(2).
func needsLegacy(fstype string, options []string, err error) bool {
	return fstype == "btrfs" && errors.Is(err, unix.EINVAL) &&
		slices.ContainsFunc(SplitOptions(options...), func(o string) bool { return strings.Contains(o, "context=") })
}

// legacy is Filesystem by mount(2). The target is opened before, so that the mount does not follow a link that has taken its place. Forks are not held back
// while the kernel opens the filesystem, as that may take long; they are when the target is closed: a program that was being started meanwhile has executed by
// then, or does so within a moment (waitUnclaimed), and does not keep the mount above busy.
func legacy(device, target, fstype string, options []string, readOnly bool) error {
	var flags uintptr
	var data []string
	for _, one := range SplitOptions(options...) {
		attr, known := attributes[one]
		switch {
		case known:
			flags |= legacyFlags[attr]
		case one == "ro":
			readOnly = true
		case !forUserspace(one):
			data = append(data, one)
		}
	}
	if readOnly {
		flags |= unix.MS_RDONLY
	}
	fd, err := openPath(target)
	if err != nil {
		return err
	}
	defer func() {
		defer holdForks()()
		_ = unix.Close(fd)
	}()
	if err := unix.Mount(device, fmt.Sprintf("/proc/self/fd/%d", fd), fstype, flags, strings.Join(data, ",")); err != nil {
		return fmt.Errorf("mount %s on %s as %s, by mount(2): %w; the kernel's log may say more", device, target, fstype, err)
	}
	return nil
}
