package mount

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// Table remembers where devices are mounted, so that no call has to read all mounts of the machine. As mounts come and go, Paths and Mounts ask the kernel
// again for each path that they return. Paths are those of Resolve. Several goroutines may call its methods at once.
type Table struct {
	mu     sync.Mutex
	mounts map[uint64][]entry // by device; few of each, so no index by path
	seen   uint64             // of the last entry
}

// entry is a mount of a device at a path that was found, or made by this process.
type entry struct {
	path     string
	writable bool   // made for writing
	seen     uint64 // the number of this entry: another mount of the device at the path has another one
}

// LoadTable returns a table with the mounts of block devices in this process's mount namespace.
func LoadTable() (*Table, error) {
	t := &Table{mounts: map[uint64][]entry{}}
	mounts, err := mountinfo.GetMounts(nil)
	if err != nil {
		return nil, fmt.Errorf("read mounts: %w", err)
	}
	for _, m := range mounts {
		if device := tableDevice(m, mounts); unix.Major(device) != 0 {
			// By the options of the mount: those of the filesystem change when the kernel makes it read-only after an error. The path is cloned, as it keeps
			// its whole line of mountinfo in memory.
			t.Add(device, strings.Clone(m.Mountpoint), !slices.Contains(strings.Split(m.Options, ","), "ro"))
		}
	}
	return t, nil
}

// tableDevice returns the block device of a mount; a number with major number 0 if it has none.
func tableDevice(m *mountinfo.Info, all []*mountinfo.Info) uint64 {
	switch {
	case isNode(m, all):
		return blockDevice(m.Mountpoint)
	case m.FSType == "btrfs":
		return btrfsMounted(m, all)
	}
	return unix.Mkdev(uint32(m.Major), uint32(m.Minor))
}

// blockDevice returns the device of a block device node; 0 if there is none at the path.
func blockDevice(path string) uint64 {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return 0
	}
	return st.Rdev
}

// btrfsMounted returns a block device of a mount of a btrfs, which has device numbers of its own; 0 if it is not known. It asks this mount, and then others
// with the same device number (At). The source in the list of mounts is used last, and only if it has a mounted btrfs: that path may lead to another device
// by now, or be of another mount namespace.
func btrfsMounted(m *mountinfo.Info, all []*mountinfo.Info) uint64 {
	said := func(one *mountinfo.Info) uint64 {
		if one.Major != m.Major || one.Minor != m.Minor {
			return 0
		}
		if info, err := At(one.Mountpoint); err == nil && info.mount == one.ID && !info.Node {
			return info.Device
		}
		return 0
	}
	if device := said(m); device != 0 {
		return device
	}
	for _, one := range all {
		if device := said(one); device != 0 {
			return device
		}
	}
	if device := blockDevice(m.Source); hasBtrfs(device) {
		return device
	}
	return 0
}

// isNode reports whether a mount is of a device node that a driver bound, from /dev or for a reader (BindReader). A pod may make nodes too, of any device, in
// volumes and in a tmpfs (emptyDir), and have them bound: those do not count.
func isNode(m *mountinfo.Info, all []*mountinfo.Info) bool {
	switch {
	case isReader(m):
		info, err := At(m.Mountpoint)
		return err == nil && info.Node
	case m.FSType == "devtmpfs":
		return m.Root != "/"
	case m.FSType != "tmpfs" || m.Root == "/":
		return false
	}
	// In a container /dev may be a tmpfs. That of an earlier container of this driver is mounted nowhere here any more, whereas the tmpfs of a pod is, where
	// the kubelet mounted it.
	shown := false
	for _, one := range all {
		if one.Major == m.Major && one.Minor == m.Minor && one.Root == "/" {
			if one.Mountpoint == "/dev" {
				return true
			}
			shown = true
		}
	}
	return !shown
}

// hasBtrfs reports whether a block device is one of a mounted btrfs.
func hasBtrfs(device uint64) bool {
	name, err := os.Readlink(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(device), unix.Minor(device)))
	if err != nil {
		return false
	}
	found, err := filepath.Glob("/sys/fs/btrfs/*/devices/" + filepath.Base(name))
	return err == nil && len(found) > 0
}

// Add adds a mount that was made, for writing or not. It replaces the entry of the device at that path.
func (t *Table) Add(device uint64, path string, writable bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.add(device, path, writable)
}

// Found adds a mount that was found, if the table does not have it: somebody else made it.
func (t *Table) Found(device uint64, path string, writable bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.find(device, path) == nil {
		t.add(device, path, writable)
	}
}

func (t *Table) add(device uint64, path string, writable bool) {
	t.seen++
	now := entry{path, writable, t.seen}
	if known := t.find(device, path); known != nil {
		*known = now
		return
	}
	t.mounts[device] = append(t.mounts[device], now)
}

// find returns the entry of a device at a path; nil if there is none.
func (t *Table) find(device uint64, path string) *entry {
	for i, e := range t.mounts[device] {
		if e.path == path {
			return &t.mounts[device][i]
		}
	}
	return nil
}

// Devices returns the devices in the table, in no order.
func (t *Table) Devices() []uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Collect(maps.Keys(t.mounts))
}

// Writable reports whether the mount of a device at a path was made for writing; false if it is not in the table.
func (t *Table) Writable(device uint64, path string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.find(device, path)
	return e != nil && e.writable
}

// Remove removes the mount of a device at a path from the table.
func (t *Table) Remove(device uint64, path string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.remove(device, path)
}

func (t *Table) remove(device uint64, path string) {
	t.mounts[device] = slices.DeleteFunc(t.mounts[device], func(e entry) bool { return e.path == path })
	if len(t.mounts[device]) == 0 {
		delete(t.mounts, device)
	}
}

// forget is Remove, unless the device was mounted there again since the caller read the entry.
func (t *Table) forget(device uint64, was entry) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.find(device, was.path); e != nil && *e == was {
		t.remove(device, was.path)
	}
}

// Mounted is one mount of a device, as it was at one moment.
type Mounted struct {
	Path     string
	Writable bool  // it was made for writing
	Info     Info  // of At, if Err is nil
	Err      error // of At: the mount is there, but it is dead, does not answer, or could not be looked at
}

// Paths returns, sorted, those paths in the table where the device is mounted now, as a filesystem or as a bound device node.
func (t *Table) Paths(device uint64) []string {
	var paths []string
	for _, m := range t.Mounts(device) {
		paths = append(paths, m.Path)
	}
	return paths
}

// Mounts returns the mounts at the Paths of a device, in that order. Entries of mounts that are gone are removed from the table.
func (t *Table) Mounts(device uint64) []Mounted {
	t.mu.Lock()
	all := slices.Clone(t.mounts[device])
	t.mu.Unlock()
	slices.SortFunc(all, func(a, b entry) int { return strings.Compare(a.path, b.path) })
	var mounted []Mounted
	for _, e := range all {
		if m, found := t.look(device, e); found {
			mounted = append(mounted, m)
		}
	}
	return mounted
}

// look returns the mount at a path where the device was mounted; false if it is not any more. If the device is mounted there anew meanwhile, it looks again,
// so that what it returns is of one mount.
func (t *Table) look(device uint64, was entry) (Mounted, bool) {
	for {
		m := Mounted{Path: was.path, Writable: was.writable}
		m.Info, m.Err = At(was.path)
		now, known := t.entry(device, was.path)
		switch {
		case !known:
			return Mounted{}, false
		case now != was:
			was = now
		case m.is(device):
			return m, true
		default:
			t.forget(device, was)
			return Mounted{}, false
		}
	}
}

// is reports whether what is at the path is a mount of the device.
func (m Mounted) is(device uint64) bool {
	switch {
	case m.Err == nil:
		return m.Info.Root && m.Info.Device == device
	case Missing(m.Err):
		return false
	}
	// A mount that gives an error is still a mount, of this device or by now of another one.
	other, err := DeviceOf(m.Path)
	return err != nil || other == 0 || other == device
}

func (t *Table) entry(device uint64, path string) (entry, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.find(device, path); e != nil {
		return *e, true
	}
	return entry{}, false
}
