package mount

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/command"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// This file gives readers the device of a raw volume. A read-only bind keeps nobody from opening a device node for writing. A second, read-only device would
// have a page cache of its own, which does not see what is written through the first. So readers get the same device, at a node whose owner does not exist in
// its mount: that is an idmapped mount (mount_setattr(2)) of a user namespace without root. Nobody can open such a file for writing, whatever his rights
// (HAS_UNMAPPED_ID in inode_permission of fs/namei.c), and everybody for reading, as its mode says.

// readers has the user namespace of these mounts, once it was made.
var readers struct {
	sync.Mutex
	namespace *os.File
}

// readerNamespace returns the user namespace of readers' mounts, and makes it when it is called first. ErrPrecondition if the program for that is missing,
// ErrUnsupported if this machine allows no user namespaces.
func readerNamespace() (int, error) {
	readers.Lock()
	defer readers.Unlock()
	if readers.namespace == nil {
		namespace, err := command.UserNamespace()
		switch {
		case errors.Is(err, exec.ErrNotFound), errors.Is(err, fs.ErrNotExist):
			return 0, fmt.Errorf("%w: make a user namespace: %w: install coreutils", errdefs.ErrPrecondition, err)
		case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EPERM), errors.Is(err, unix.EINVAL): // too many, none for anybody, none in this kernel
			return 0, fmt.Errorf("%w: make a user namespace: %w: allow them (sysctl user.max_user_namespaces)", errdefs.ErrUnsupported, err)
		case err != nil:
			return 0, fmt.Errorf("make a user namespace: %w", err)
		}
		readers.namespace = namespace
	}
	return int(readers.namespace.Fd()), nil
}

// BindReader attaches a block device, by its number, at target, an existing file, for reading only. RemoveTarget ends that. ErrUnsupported if the kernel
// cannot do it, ErrPrecondition if a program is missing (readerNamespace), ErrInUse if the node is busy.
func BindReader(number uint64, target string) (err error) {
	fail := func(what string, err error) error {
		return fmt.Errorf("bind a device to %s for reading: %s: %w", target, what, err)
	}
	namespace, err := readerNamespace()
	if err != nil {
		return fail("find its owner", err)
	}
	defer holdForks()()
	tree, err := detachedNode(number, namespace)
	if errors.Is(err, unix.EINVAL) { // idmapped mounts of tmpfs: Linux 6.3
		defer func() {
			if err != nil {
				_ = os.Remove(nodeBeside(target))
			}
		}()
		tree, err = nodeNextTo(target, number, namespace)
	}
	if errors.Is(err, unix.EINVAL) {
		err = fmt.Errorf("%w: neither tmpfs nor the filesystem of the path can be mounted with other owners here: %w", errdefs.ErrUnsupported, err)
	}
	if errors.Is(err, unix.EBUSY) {
		err = fmt.Errorf("%w: %w", errdefs.ErrInUse, err)
	}
	if err != nil {
		return fail("make its node", err)
	}
	defer unix.Close(tree)
	if err := attachTree(tree, target); err != nil {
		return fail("attach", err)
	}
	return nil
}

// detachedNode returns the mount of a device node (makeNode) on a new tmpfs that is mounted nowhere.
func detachedNode(number uint64, namespace int) (int, error) {
	fsfd, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("fsopen: %w", err)
	}
	defer unix.Close(fsfd)
	if err := unix.FsconfigCreate(fsfd); err != nil {
		return -1, fmt.Errorf("open the filesystem: %w", err)
	}
	directory, err := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("fsmount: %w", err)
	}
	defer unix.Close(directory)
	return makeNode(directory, "device", number, namespace)
}

// nodeBeside returns where the device node of a target is, if it could not be on a tmpfs. It stays there as long as it is mounted: the kubelet binds the target
// to paths of its own, and the kernel binds no file that has no name any more (ENOENT, d_set_mounted of fs/dcache.c).
func nodeBeside(target string) string { return target + nodeSuffix }

const nodeSuffix = ".node"

// isReader reports whether a mount may be that of a reader's node: a mount of something below the root of its filesystem, with an ID mapping. Only somebody
// with rights on the machine can make an idmapped mount.
func isReader(m *mountinfo.Info) bool {
	return m.Root != "/" && slices.Contains(strings.Split(m.Options, ","), "idmapped")
}

// nodeNextTo is makeNode at nodeBeside. A node that an earlier try has left there is removed first.
func nodeNextTo(target string, number uint64, namespace int) (int, error) {
	if err := removeNode(nodeBeside(target)); err != nil {
		return -1, err
	}
	return makeNode(unix.AT_FDCWD, nodeBeside(target), number, namespace)
}

// removeNode removes a block device node. Anything else at the path stays, without an error.
func removeNode(path string) error {
	info, err := os.Lstat(path)
	if err == nil && info.Mode().Type() == fs.ModeDevice {
		err = os.Remove(path)
	}
	if Missing(err) {
		return nil
	}
	return err
}

// makeNode makes a device node at a path in a directory, and returns a detached mount of it, through which it can only be read.
func makeNode(directory int, path string, number uint64, namespace int) (int, error) {
	const mode = 0o444
	if err := unix.Mknodat(directory, path, unix.S_IFBLK|mode, int(number)); err != nil {
		return -1, fmt.Errorf("mknod: %w", err)
	}
	if err := unix.Fchmodat(directory, path, mode, 0); err != nil { // whatever the umask
		return -1, fmt.Errorf("chmod: %w", err)
	}
	tree, err := unix.OpenTree(directory, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return -1, fmt.Errorf("open_tree: %w", err)
	}
	err = unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &unix.MountAttr{
		Attr_set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_IDMAP, Attr_clr: unix.MOUNT_ATTR_NODEV, Userns_fd: uint64(namespace)})
	if err != nil {
		unix.Close(tree)
		return -1, fmt.Errorf("mount_setattr: %w", err)
	}
	return tree, nil
}
