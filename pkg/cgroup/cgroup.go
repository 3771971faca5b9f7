// Package cgroup limits what the pods of this machine do to a block device, by the io controller of control groups version 2
// (Documentation/admin-guide/cgroup-v2.rst of the kernel, "IO Interface Files": io.max).
//
// A limit is a line for the device in the group above all pods, which the kubelet calls kubepods: the kernel counts there what
// all groups below it do together, whatever the QoS class of their pods and whenever their containers start. What is not a pod
// (the driver, a check of a filesystem, the kubelet) is not limited. Lines of other devices are never touched, and no controller is
// ever enabled: the groups are systemd's and the kubelet's.
package cgroup

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// root is where version 2 is mounted, on the machine and, by the node's manifest, in the driver's container.
const root = "/sys/fs/cgroup"

// Limits are of what is done to one device in a second: bytes and requests, as the kernel counts them. 0 is no limit.
type Limits struct{ ReadBandwidth, WriteBandwidth, ReadIOPS, WriteIOPS uint64 }

// MostIOPS is the largest limit of requests that the kernel keeps; more is none to it.
const MostIOPS = 1<<32 - 2

// Supported is ErrPrecondition, with what to do, if this machine keeps no limits.
func Supported() error {
	_, err := pods()
	return err
}

// Limit has the pods of this machine, all together, do no more to a device than limits say. With an error nothing has changed:
// ErrPrecondition where limits cannot be kept. No limits are always kept. undo sets what was there before.
func Limit(device uint64, limits Limits) (undo func() error, err error) {
	var undos []func() error
	undo = func() error {
		var failures []error
		for _, one := range slices.Backward(undos) {
			failures = append(failures, one())
		}
		return errors.Join(failures...)
	}
	groups, err := pods()
	if err != nil {
		if limits == (Limits{}) {
			return undo, nil
		}
		return nil, err
	}
	for _, group := range groups {
		before, err := read(group, device)
		if err == nil && before == limits {
			continue
		}
		if err == nil {
			err = write(group, device, limits)
		}
		if err != nil {
			return nil, errors.Join(err, undo())
		}
		undos = append(undos, func() error { return write(group, device, before) })
	}
	return undo, nil
}

// Kept reports whether the limits are those of a device, as Limit set them.
func Kept(device uint64, limits Limits) (bool, error) {
	groups, err := pods()
	if errors.Is(err, errdefs.ErrPrecondition) {
		return limits == Limits{}, nil
	}
	for _, group := range groups {
		if is, err := read(group, device); err != nil || is != limits {
			return false, err
		}
	}
	return err == nil, err
}

// Limited returns the devices that have a limit, which need not be there: the kernel keeps the line of a loop device that is over nothing.
func Limited() (devices []uint64, err error) {
	groups, err := pods()
	if errors.Is(err, errdefs.ErrPrecondition) {
		return nil, nil
	}
	for _, group := range groups {
		text, err := os.ReadFile(filepath.Join(group, ioMax))
		if err != nil {
			return nil, err
		}
		for line := range strings.Lines(string(text)) {
			var major, minor uint32
			if _, err := fmt.Sscanf(line, "%d:%d ", &major, &minor); err == nil {
				devices = append(devices, unix.Mkdev(major, minor))
			}
		}
	}
	return devices, err
}

// pods returns the groups above all pods: one for each kubelet of this machine, which is one but where several share a kernel.
func pods() ([]string, error) {
	var at unix.Statfs_t
	if err := unix.Statfs(root, &at); err != nil {
		return nil, fmt.Errorf("%w: %s: %w", errdefs.ErrPrecondition, root, err)
	}
	if at.Type != unix.CGROUP2_SUPER_MAGIC {
		return nil, fmt.Errorf("%w: %s is not of control groups version 2, and version 1 keeps no limit for a pod as a whole; start the machine with systemd.unified_cgroup_hierarchy=1", errdefs.ErrPrecondition, root)
	}
	groups, err := find(root)
	if err != nil {
		return nil, err
	}
	if len(groups) == 0 {
		return nil, fmt.Errorf("%w: there is no control group of pods (kubepods) below %s; limits are kept for the pods of a kubelet, with its cgroupsPerQOS", errdefs.ErrPrecondition, root)
	}
	for _, group := range groups {
		if _, err := os.Stat(filepath.Join(group, ioMax)); err != nil {
			return nil, fmt.Errorf("%w: the io controller is not enabled for the pods' control group: %w; the kernel needs CONFIG_BLK_DEV_THROTTLING, and cgroup.subtree_control of each group above it io", errdefs.ErrPrecondition, err)
		}
	}
	return groups, nil
}

// find returns the groups that kubelets made for all of their pods, whichever their cgroup driver and --cgroup-root:
// kubepods of cgroupfs, kubepods.slice or PARENT-kubepods.slice of systemd. Nobody has a group of that name within a service or a
// scope, which are programs and containers: a kubelet in a container (kind) sees its own groups as all there are.
func find(root string) (groups []string, err error) {
	err = filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist): // it went meanwhile
			return nil
		case err != nil:
			return fmt.Errorf("look for the control group of pods: %w", err)
		case !entry.IsDir():
			return nil
		}
		name := entry.Name()
		if name == "kubepods" || name == "kubepods.slice" || strings.HasSuffix(name, "-kubepods.slice") {
			groups = append(groups, path)
			return fs.SkipDir
		}
		if strings.HasSuffix(name, ".service") || strings.HasSuffix(name, ".scope") {
			return fs.SkipDir
		}
		return nil
	})
	return groups, err
}

const ioMax = "io.max"

// keys of a line of io.max, and what they limit.
func (l *Limits) keys() map[string]*uint64 {
	return map[string]*uint64{"rbps": &l.ReadBandwidth, "wbps": &l.WriteBandwidth, "riops": &l.ReadIOPS, "wiops": &l.WriteIOPS}
}

const none = "max"

// number is a device as the kernel writes it.
func number(device uint64) string {
	return fmt.Sprintf("%d:%d", unix.Major(device), unix.Minor(device))
}

// read returns what a group limits of a device; a device without a line has no limits.
func read(group string, device uint64) (l Limits, err error) {
	f, err := os.Open(filepath.Join(group, ioMax))
	if err != nil {
		return l, err
	}
	defer f.Close()
	keys := l.keys()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		if len(words) == 0 || words[0] != number(device) {
			continue
		}
		for _, word := range words[1:] {
			key, value, _ := strings.Cut(word, "=")
			if limit := keys[key]; limit != nil && value != none {
				if *limit, err = strconv.ParseUint(value, 10, 64); err != nil {
					return l, fmt.Errorf("%s: %q: %w", f.Name(), lines.Text(), err)
				}
			}
		}
	}
	return l, lines.Err()
}

// write sets the line of a device.
func write(group string, device uint64, l Limits) error {
	line := number(device)
	for key, limit := range l.keys() {
		value := none
		if *limit > 0 {
			value = strconv.FormatUint(*limit, 10)
		}
		line += " " + key + "=" + value
	}
	f, err := os.OpenFile(filepath.Join(group, ioMax), os.O_WRONLY, 0) // it makes none, as os.WriteFile would
	if err == nil {
		_, err = f.WriteString(line)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		return fmt.Errorf("limit a device by %q: %w", line, errdefs.FromErrno(err))
	}
	return nil
}
