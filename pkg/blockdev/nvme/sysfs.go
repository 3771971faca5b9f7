package nvme

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// controllers is the folder of sysfs that has those of all controllers.
const controllers = "/sys/class/nvme"

// controller is the folder of a controller in sysfs. There is one for each subsystem that is connected, as each is connected by one address.
type controller string

// get returns an attribute; empty if it cannot be read.
func (c controller) get(attribute string) string { return attributeOf(string(c), attribute) }

func attributeOf(folder, attribute string) string {
	value, err := os.ReadFile(filepath.Join(folder, attribute))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(value))
}

// farewell bounds the wait for a target that has removed its namespace, and so is about to end the connection (nvmet's grace is a part of it).
const farewell = time.Second

// end has the kernel end a controller, and waits for it. It does nothing to one that is ending already, which has no such attribute any more.
//
// The kernel first tells the target, and waits for the answer for a minute (nvme_core.admin_timeout), also if the connection ends meanwhile. So a target
// that is away, or is about to end the connection, is waited for until the kernel knows.
func (c controller) end(ctx context.Context) error {
	var patience time.Duration
	switch {
	case c.get("state") != live:
	case c.ask() != nil:
		patience = 2 * keepAlive * time.Second
	case c.namespace() == "":
		patience = farewell
	}
	for deadline := time.Now().Add(patience); c.get("state") == live && time.Now().Before(deadline); {
		if err := wait(ctx); err != nil {
			return err
		}
	}
	err := write(filepath.Join(string(c), "delete_controller"), "1")
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return nil
	}
	return errdefs.FromErrno(err)
}

// write writes a value to an attribute. The value, which may be secret, is in no error.
func write(path, value string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.WriteString(value)
	return err
}

// fixed is what does not change while a controller is there. It is kept, as all controllers are looked at often.
type fixed struct {
	inode     uint64 // of its folder in sysfs; a later controller of the same name has another one
	nqn       string // NQN of its subsystem
	subsystem string // the subsystem's folder in sysfs; empty: not known yet
}

var known = struct {
	mu sync.Mutex
	of map[controller]fixed
}{of: map[controller]fixed{}}

// chosen returns the controllers whose subsystems choose selects by NQN.
func chosen(choose func(nqn string) bool) ([]controller, error) {
	entries, err := os.ReadDir(controllers)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, errdefs.FromErrno(err)
	}
	known.mu.Lock()
	defer known.mu.Unlock()
	there := make(map[controller]fixed, len(entries))
	var found []controller
	for _, entry := range entries {
		c := controller(filepath.Join(controllers, entry.Name()))
		var st unix.Stat_t
		if unix.Lstat(string(c), &st) != nil {
			continue // it has just ended
		}
		f := known.of[c]
		if f.inode != st.Ino {
			f = fixed{inode: st.Ino, nqn: c.get("subsysnqn")}
		}
		if strings.HasPrefix(f.nqn, "nqn.") { // while a controller is being made, the kernel says "(efault)" or nothing
			there[c] = f
		}
		if choose(f.nqn) {
			found = append(found, c)
		}
	}
	known.of = there
	return found, nil
}

func controllersOf(nqn string) ([]controller, error) {
	return chosen(func(have string) bool { return have == nqn })
}

// hiding calls hide again and again until done is called: the secret can be read from the moment at which the controller is there.
func hiding(nqn string) (done func()) {
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			hide(nqn)
			select {
			case <-end:
				return
			case <-time.After(pause):
			}
		}
	}()
	return func() { close(end); <-ended }
}

// hide is controller.hide for a subsystem.
func hide(nqn string) {
	found, _ := controllersOf(nqn)
	for _, c := range found {
		c.hide()
	}
}

// hide makes the secret of a connection unreadable. sysfs would show it to everybody, also in pods, whose root is this machine's. Nobody can open a file
// of sysfs without a mode for reading, with whatever capability (KERNFS_ROOT_EXTRA_OPEN_PERM_CHECK), and pods cannot change sysfs.
func (c controller) hide() {
	path := filepath.Join(string(c), "dhchap_secret")
	if at, err := os.Lstat(path); err == nil && at.Mode().Perm() != 0 { // no such file without authentication
		_ = os.Chmod(path, 0)
	}
}

func rescan(nqn string) error {
	found, err := controllersOf(nqn)
	for _, c := range found {
		if err == nil {
			err = write(filepath.Join(string(c), "rescan_controller"), "1")
		}
	}
	return errdefs.FromErrno(err)
}

// Find returns the device of a subsystem; errdefs.ErrNotFound if it is not connected.
func Find(nqn string) (Device, error) {
	found, err := controllersOf(nqn)
	if err != nil {
		return Device{}, fmt.Errorf("find NVMe subsystem %s: %w", nqn, err)
	}
	if len(found) == 0 {
		return Device{}, fmt.Errorf("%w: NVMe subsystem %s is not connected", errdefs.ErrNotFound, nqn)
	}
	return found[0].device(), nil
}

// List returns the connected subsystems whose names begin with a prefix, and their devices. The prefix has to be one of those that the caller connects to: a
// secret of theirs that can still be read, as a process was killed while it connected, List hides.
func List(prefix string) ([]Device, error) {
	found, err := chosen(func(nqn string) bool { return strings.HasPrefix(nqn, prefix) })
	if err != nil {
		return nil, fmt.Errorf("list NVMe subsystems: %w", err)
	}
	devices := make([]Device, 0, len(found))
	for _, c := range found {
		c.hide()
		devices = append(devices, c.device())
	}
	return devices, nil
}

// device returns what sysfs says of a controller and the device of its namespace. Of one that is ending, fields may be empty.
func (c controller) device() Device {
	d := Device{NQN: c.get("subsysnqn"), Host: c.get("hostnqn"), Address: c.get("address"), State: c.get("state"), TLS: c.encrypted()}
	folder := c.namespace()
	number, err := deviceNumber(attributeOf(folder, "dev"))
	if err != nil {
		return d
	}
	sectors, err := strconv.ParseInt(attributeOf(folder, "size"), 10, 64)
	uuid := attributeOf(folder, "uuid")
	if err != nil || uuid == "" || attributeOf(folder, "nguid") != uuid {
		return d
	}
	d.Path, d.Number, d.UUID, d.Size = "/dev/"+filepath.Base(folder), number, uuid, sectors*512
	return d
}

// encrypted reports whether a controller uses TLS, by its attribute for the key. While it connects again, some kernels leave that empty. From Linux 6.12
// on only controllers with TLS have the attribute; from 6.7 to 6.11 all over TCP have it (nvme_dev_attrs_are_visible). So one that is live and has an
// empty one is in plain text.
func (c controller) encrypted() bool {
	if _, err := os.Stat(filepath.Join(string(c), "tls_key")); err != nil {
		return false
	}
	// Read before and after the state, as the connection may come to life, or fail, in between.
	return c.get("tls_key") != "" || c.get("state") != live || c.get("tls_key") != ""
}

// deviceNumber reads an attribute "dev": major and minor.
func deviceNumber(text string) (uint64, error) {
	major, minor, _ := strings.Cut(text, ":")
	m, err := strconv.ParseUint(major, 10, 32)
	n, failure := strconv.ParseUint(minor, 10, 32)
	if err := errors.Join(err, failure); err != nil {
		return 0, fmt.Errorf("device number %q: %w", text, err)
	}
	return unix.Mkdev(uint32(m), uint32(n)), nil
}

// heads matches the names of devices of namespaces that can be opened. With multipath their paths, nvmeXcYnZ, are devices too, which nobody can open.
var heads = regexp.MustCompile(`^nvme\d+n\d+$`)

// namespace returns the folder in sysfs of the device of a controller's namespace; empty if there is none. With multipath (CONFIG_NVME_MULTIPATH and
// nvme_core.multipath) it is in the subsystem's folder, else in the controller's own.
func (c controller) namespace() string {
	for _, folder := range []string{string(c), c.subsystem()} {
		entries, _ := os.ReadDir(folder)
		for _, entry := range entries {
			if heads.MatchString(entry.Name()) {
				return filepath.Join(folder, entry.Name())
			}
		}
	}
	return ""
}

// subsystem returns the folder in sysfs of a controller's subsystem; empty if there is none.
func (c controller) subsystem() string {
	known.mu.Lock()
	f, is := known.of[c]
	known.mu.Unlock()
	if f.subsystem != "" {
		return f.subsystem
	}
	found, _ := filepath.Glob("/sys/class/nvme-subsystem/*/" + filepath.Base(string(c)))
	if len(found) == 0 {
		return ""
	}
	f.subsystem = filepath.Dir(found[0])
	known.mu.Lock()
	defer known.mu.Unlock()
	if is && known.of[c].inode == f.inode {
		known.of[c] = f
	}
	return f.subsystem
}
