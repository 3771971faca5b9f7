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

// A read-only bind keeps nobody from opening a device node for writing, and a second, read-only
// device has a page cache of its own, which does not see what is written through the first. So
// a reader gets the same device, at a node whose owner does not exist where it is mounted: the
// mount is an idmapped one (mount_setattr(2)), of a user namespace without root. Nobody can open
// such a file for writing, whatever his rights (inode_permission, HAS_UNMAPPED_ID), and
// everybody for reading, as its mode says.

// readers holds the user namespace of these mounts, once there is one.
var readers struct {
	sync.Mutex
	namespace *os.File
}

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

// BindReader attaches a block device at target, an existing file, for reading only. RemoveTarget takes it away.
// ErrUnsupported where the kernel cannot.
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

// detachedNode is a device node on a tmpfs that is mounted nowhere.
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

// nodeBeside is where a target's device node is, as long as it is mounted there: what is linked nowhere can be mounted nowhere else
// (ENOENT, d_set_mounted of fs/dcache.c), and the kubelet binds what was published to paths of its own.
func nodeBeside(target string) string { return target + nodeSuffix }

const nodeSuffix = ".node"

// isReader tells whether a mount may be that of a reader's node, as mountinfo has it: it has an ID mapping, which nobody
// without rights on the machine can give to one.
func isReader(m *mountinfo.Info) bool {
	return m.Root != "/" && slices.Contains(strings.Split(m.Options, ","), "idmapped")
}

func nodeNextTo(target string, number uint64, namespace int) (int, error) {
	if err := removeNode(nodeBeside(target)); err != nil {
		return -1, err
	}
	return makeNode(unix.AT_FDCWD, nodeBeside(target), number, namespace)
}

// removeNode removes a device node.
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

// makeNode makes a device node that can only be read through the mount of it that is returned.
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
