package psk

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/secret"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

const (
	keyType = "psk"
	keyring = ".nvme" // the kernel's own; tlshd looks there for the key that a connecting host names
)

// readable lets processes of the user that made a key (tlshd) read it by its number: KEY_POS_ALL, KEY_USR_VIEW, KEY_USR_READ.
const readable = 0x3f030000

// key is a key of the kernel that this process may see.
type key struct {
	serial      int
	revoked     bool // nobody can use it any more
	kind        string
	description []string // the words of its description
}

// list returns the keys of the kernel that this process may see, of all network namespaces.
func list() (keys []key, err error) {
	text, err := os.ReadFile("/proc/keys")
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // a kernel without keys has no such file
		return nil, fmt.Errorf("keys of the kernel: %w", errdefs.FromErrno(err))
	}
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(line) // 0e5b31a2 I--Q--- 1 perm 3f010000 0 0 psk NVMe1R01 HOST SUBSYSTEM DIGEST: 32
		if len(words) < 9 {
			continue
		}
		if serial, err := strconv.ParseInt(words[0], 16, 32); err == nil {
			keys = append(keys, key{int(serial), strings.Contains(words[1], "R"), words[7], words[8:]})
		}
	}
	return keys, nil
}

// ring returns the number of the keyring, and all keys that list returns; errdefs.ErrUnsupported if there is no such keyring.
func ring() (serial int, all []key, err error) {
	all, err = list()
	for _, k := range all {
		if k.kind == "keyring" && k.description[0] == keyring+":" {
			return k.serial, all, nil
		}
	}
	if err == nil {
		err = fmt.Errorf("%w: the kernel has no keyring %s (CONFIG_NVME_KEYRING, Linux 6.7)", errdefs.ErrUnsupported, keyring)
	}
	return 0, all, err
}

// Serve lets a host that has a secret connect to a subsystem of this machine, at addresses of this network namespace. Keys of earlier secrets of the
// subsystem, of this or another host, are removed.
func Serve(psk secret.Text, host, subsystem string) error {
	identity, shared, err := derive(psk, host, subsystem)
	if err != nil {
		return err
	}
	into, all, err := ring()
	if err == nil {
		_, err = unix.AddKey(keyType, identity, shared, into)
	}
	if err != nil {
		return fmt.Errorf("put the key of TLS for %s into the keyring %s: %w", subsystem, keyring, errdefs.FromErrno(err))
	}
	return take(into, all, func(k key) bool {
		return k.subsystem() == subsystem && !strings.HasPrefix(strings.Join(k.description, " "), identity)
	})
}

// End removes the keys that Serve put there for a subsystem. If there are none, it does nothing.
func End(subsystem string) error {
	from, all, err := ring()
	if errors.Is(err, errdefs.ErrUnsupported) {
		return nil
	}
	return errors.Join(err, take(from, all, func(k key) bool { return k.subsystem() == subsystem }))
}

// subsystem returns the subsystem that a key of TLS is for; empty for other keys.
func (k key) subsystem() string {
	if k.kind != keyType || len(k.description) < 3 {
		return ""
	}
	return k.description[2]
}

// take removes the keys that which selects from a keyring; all are those of list.
func take(from int, all []key, which func(key) bool) (err error) {
	for _, k := range all {
		if !which(k) {
			continue
		}
		if _, failure := unix.KeyctlInt(unix.KEYCTL_UNLINK, k.serial, from, 0, 0); failure != nil && !errors.Is(failure, unix.ENOENT) && !errors.Is(failure, unix.ENOKEY) {
			err = errors.Join(err, fmt.Errorf("take a key of TLS for %s from the keyring %s: %w", k.subsystem(), keyring, errdefs.FromErrno(failure)))
		}
	}
	return err
}

// Served returns the subsystems whose names have a prefix, and for which the keyring has a key as of Serve. Revoked keys do not count.
func Served(prefix string) (subsystems []string, err error) {
	from, all, err := ring()
	if errors.Is(err, errdefs.ErrUnsupported) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	in, err := members(from)
	unseen := errors.Is(err, unix.EACCES) // this process may only add keys; then all count as members
	if err != nil && !unseen {
		return nil, fmt.Errorf("read the keyring %s: %w", keyring, errdefs.FromErrno(err))
	}
	for _, k := range all {
		if name := k.subsystem(); name != "" && !k.revoked && (unseen || in[k.serial]) && strings.HasPrefix(name, prefix) {
			subsystems = append(subsystems, name)
		}
	}
	return subsystems, nil
}

// members returns the numbers of the keys in a keyring.
func members(ring int) (map[int]bool, error) {
	buffer := make([]byte, 1<<10)
	for {
		n, err := unix.KeyctlBuffer(unix.KEYCTL_READ, ring, buffer, 0) // n is how many bytes there are, also if buffer is too small
		if err != nil {
			return nil, err
		}
		if n > len(buffer) {
			buffer = make([]byte, 2*n)
			continue
		}
		in := make(map[int]bool, n/4)
		for one := range slices.Chunk(buffer[:n], 4) {
			in[int(int32(binary.NativeEndian.Uint32(one)))] = true
		}
		return in, nil
	}
}

// Use calls do with the number of the key by which a host connects to a subsystem. The key stays in no keyring: it goes when do returns, or with the
// connection that do has made with it.
func Use(psk secret.Text, host, subsystem string, do func(serial int) error) error {
	identity, key, err := derive(psk, host, subsystem)
	if err != nil {
		return err
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	serial, err := unix.AddKey(keyType, identity, key, unix.KEY_SPEC_THREAD_KEYRING)
	if err != nil {
		return fmt.Errorf("make the key of TLS for %s: %w", subsystem, errdefs.FromErrno(err))
	}
	defer func() { _, _ = unix.KeyctlInt(unix.KEYCTL_UNLINK, serial, unix.KEY_SPEC_THREAD_KEYRING, 0, 0) }()
	if err := unix.KeyctlSetperm(serial, readable); err != nil {
		return fmt.Errorf("let tlshd read the key of TLS for %s: %w", subsystem, errdefs.FromErrno(err))
	}
	return do(serial)
}
