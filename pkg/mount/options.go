package mount

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// attributes are the options that belong to a mount, not to its filesystem, as attributes of mount_setattr(2); 0: the default.
var attributes = map[string]uint64{
	"nosuid": unix.MOUNT_ATTR_NOSUID, "nodev": unix.MOUNT_ATTR_NODEV, "noexec": unix.MOUNT_ATTR_NOEXEC,
	"noatime": unix.MOUNT_ATTR_NOATIME, "strictatime": unix.MOUNT_ATTR_STRICTATIME, "nodiratime": unix.MOUNT_ATTR_NODIRATIME,
	"relatime": unix.MOUNT_ATTR_RELATIME, "nosymfollow": unix.MOUNT_ATTR_NOSYMFOLLOW,
	"suid": 0, "dev": 0, "exec": 0, "atime": 0, "diratime": 0, "defaults": 0, "rw": 0,
}

// userspace are the options that mount(8) keeps to itself. They are ignored, as are those that begin with x- or X-, and comments.
var userspace = map[string]bool{"auto": true, "noauto": true, "nofail": true, "_netdev": true, "user": true, "nouser": true, "users": true, "group": true, "owner": true}

func forUserspace(option string) bool {
	key, _, _ := strings.Cut(option, "=")
	return userspace[option] || strings.HasPrefix(option, "x-") || strings.HasPrefix(option, "X-") || key == "comment"
}

// refused are the options that ask for something else than to mount a volume's filesystem.
var refused = map[string]bool{"bind": true, "rbind": true, "remount": true, "move": true, "shared": true, "rshared": true,
	"slave": true, "rslave": true, "private": true, "rprivate": true, "unbindable": true, "runbindable": true, "loop": true, "offset": true, "sizelimit": true}

// otherDevices are the options that name a device beside the volume's (ext4, XFS, btrfs).
var otherDevices = map[string]bool{"journal_dev": true, "journal_path": true, "logdev": true, "rtdev": true, "device": true}

// deadly are the options with which an error in the filesystem makes the kernel panic.
var deadly = map[string]bool{"errors=panic": true, "fatal_errors=panic": true}

// SplitOptions splits options at commas outside of quotes (SELinux contexts have commas).
func SplitOptions(options ...string) []string {
	var all []string
	for _, option := range options {
		quoted := false
		all = append(all, strings.FieldsFunc(option, func(r rune) bool {
			if r == '"' {
				quoted = !quoted
			}
			return r == ',' && !quoted
		})...)
	}
	return all
}

// CheckOptions returns ErrInvalid for options that no mount of a volume may have.
func CheckOptions(options ...string) error {
	for _, one := range SplitOptions(options...) {
		key, _, _ := strings.Cut(one, "=")
		switch {
		case refused[key]:
			return fmt.Errorf("%w: mount option %s: it would make the mount something else", errdefs.ErrInvalid, one)
		case otherDevices[key]:
			return fmt.Errorf("%w: mount option %s: a volume is one device", errdefs.ErrInvalid, one)
		case deadly[strings.ReplaceAll(one, `"`, "")]:
			return fmt.Errorf("%w: mount option %s: a damaged volume must not take the node down", errdefs.ErrInvalid, one)
		}
	}
	return nil
}
