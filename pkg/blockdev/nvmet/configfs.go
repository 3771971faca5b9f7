package nvmet

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/psk"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

const (
	mountPoint = "/sys/kernel/config"
	root       = mountPoint + "/nvmet"
)

// change is called before each change of the kernel's target; tests end the process there.
var change = func() {}

// present returns errdefs.ErrUnsupported unless the kernel has the target. It mounts configfs if that is not mounted.
func present() error {
	if there(root) {
		return nil
	}
	if !there(mountPoint) {
		return fmt.Errorf("%w: the kernel has no configfs; load its module on this node: modprobe nvmet-tcp", errdefs.ErrUnsupported)
	}
	if entries, err := os.ReadDir(mountPoint); err == nil && len(entries) == 0 {
		if err := unix.Mount("configfs", mountPoint, "configfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil && !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("mount configfs at %s: %w", mountPoint, err)
		}
	}
	if !there(root) {
		return fmt.Errorf("%w: the kernel has no NVMe target; load its module on this node: modprobe nvmet-tcp", errdefs.ErrUnsupported)
	}
	return nil
}

func there(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func hostFolder(nqn string) string      { return filepath.Join(root, "hosts", nqn) }
func subsystemFolder(nqn string) string { return filepath.Join(root, "subsystems", nqn) }
func namespaceFolder(nqn string) string {
	return filepath.Join(subsystemFolder(nqn), "namespaces", "1")
}

// list returns the names in a folder; none if there is no such folder.
func list(folder string) ([]string, error) {
	entries, err := os.ReadDir(folder)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, errdefs.FromErrno(err)
	}
	names := make([]string, 0, len(entries))
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names, nil
}

// makeFolder makes a folder, and so the object that it stands for, if it is not there.
func makeFolder(path string) error {
	if there(path) {
		return nil
	}
	change()
	if err := os.Mkdir(path, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return errdefs.FromErrno(err)
	}
	return nil
}

// remove removes a folder or a link, if it is there.
func remove(path string) error {
	change()
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return errdefs.FromErrno(err)
	}
	return nil
}

// link makes a link at path to a folder, if nothing is there.
func link(to, path string) error {
	if _, err := os.Lstat(path); err == nil {
		return nil
	}
	change()
	if err := os.Symlink(to, path); err != nil && !errors.Is(err, fs.ErrExist) {
		return errdefs.FromErrno(err)
	}
	return nil
}

// get returns the value of an attribute.
func get(path string) (string, error) {
	value, err := os.ReadFile(path)
	return strings.TrimSpace(string(value)), errdefs.FromErrno(err)
}

// set gives an attribute a value, if it has another.
func set(path, value string) error {
	if have, err := get(path); err != nil || have == value {
		return err
	}
	return write(path, value)
}

// write writes a value to an attribute. The value, which may be secret, is in no error.
func write(path, value string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return errdefs.FromErrno(err)
	}
	defer f.Close()
	change()
	_, err = f.WriteString(value)
	return errdefs.FromErrno(err)
}

// lock takes the lock of what exports share, hosts and ports, which holds between processes too. It ends with the process.
func lock() (unlock func(), err error) {
	f, err := os.Open(filepath.Join(root, "ports"))
	if err != nil {
		return nil, errdefs.FromErrno(err)
	}
	for {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX)
		if err == nil {
			return func() { _ = f.Close() }, nil
		}
		if !errors.Is(err, unix.EINTR) {
			f.Close()
			return nil, fmt.Errorf("lock the NVMe target: %w", err)
		}
	}
}

// sweep removes our hosts that no subsystem allows, and keys of TLS whose subsystem is not there. Somebody who made or removed them was cut short, or
// another tool, which knows of no keys, has removed the subsystem. The caller holds the lock.
func sweep() error {
	served, err := psk.Served(Prefix)
	if err != nil {
		return err
	}
	for _, nqn := range served {
		if there(subsystemFolder(nqn)) {
			continue
		}
		if err := psk.End(nqn); err != nil {
			return err
		}
	}
	return sweepHosts()
}

// sweepHosts removes our hosts that no subsystem allows. The caller holds the lock, as a host is made and allowed under it.
func sweepHosts() error {
	hosts, err := list(filepath.Join(root, "hosts"))
	if err != nil {
		return err
	}
	for _, host := range hosts {
		if err := removeHost(host); err != nil {
			return err
		}
	}
	return nil
}

// removeHost removes a host if it is ours, and no subsystem allows it (EBUSY).
func removeHost(nqn string) error {
	if !strings.HasPrefix(nqn, Prefix) {
		return nil
	}
	if err := remove(hostFolder(nqn)); err != nil && !errors.Is(err, unix.EBUSY) {
		return err
	}
	return nil
}

// authenticates reports whether hosts can have secrets. Only a host that is there shows that, so it makes one. The caller holds the lock.
func authenticates() (bool, error) {
	probe := hostFolder(Prefix + "probe")
	if err := makeFolder(probe); err != nil {
		return false, err
	}
	can := there(filepath.Join(probe, "dhchap_key"))
	return can, remove(probe)
}

// encrypts reports whether a port can have TLS. Only a port that is there shows that, so it makes one. The caller holds the lock.
func encrypts() (can bool, err error) {
	probe := portFolder(lastPort + 1)
	if err := makeFolder(probe); err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, remove(probe)) }()
	if !there(filepath.Join(probe, security)) {
		return false, nil
	}
	if err := set(filepath.Join(probe, "addr_trtype"), "tcp"); err != nil {
		return false, err
	}
	err = set(filepath.Join(probe, security), encrypted)
	if errors.Is(err, unix.EINVAL) {
		return false, nil
	}
	return err == nil, err
}
