// Package queue reads and writes the settings of block queues, as in sysfs-block(5) below /sys/block/DEVICE/queue.
package queue

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// schedulers has the I/O schedulers that the kernel was ever seen to have.
var schedulers sync.Map

// HasScheduler reports whether the kernel has an I/O scheduler loaded, by the lists of its block devices. True if no device has such a list. It reads the
// lists only for a name that it has not seen before.
func HasScheduler(name string) bool {
	if _, seen := schedulers.Load(name); seen {
		return true
	}
	lists, err := filepath.Glob("/sys/block/*/queue/scheduler")
	if err != nil {
		return true
	}
	asked := false
	for _, path := range lists {
		list, err := os.ReadFile(path)
		if err != nil || len(strings.Fields(string(list))) < 2 {
			continue // "none" alone: a device that takes no scheduler
		}
		asked = true
		for _, one := range strings.Fields(string(list)) {
			schedulers.Store(strings.Trim(one, "[]"), true)
		}
		if _, seen := schedulers.Load(name); seen {
			return true
		}
	}
	return !asked
}

// Setting is a setting of a device's block queue, by its name under /sys/block/DEVICE/queue.
type Setting struct{ Device, Name, Value string }

// Set writes all settings, or none if there is an error. errdefs.ErrInvalid if the kernel refuses a value, or has no such setting. undo restores the
// earlier values.
func Set(settings ...Setting) (undo func() error, err error) {
	var undos []func() error
	undo = func() error {
		var failures []error
		for _, one := range slices.Backward(undos) {
			failures = append(failures, one())
		}
		return errors.Join(failures...)
	}
	for _, s := range settings {
		before, err := Read(s.Device, s.Name)
		if err == nil && before == s.Value {
			continue
		}
		if err == nil {
			err = Write(s.Device, s.Name, s.Value)
		}
		if err != nil {
			if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
				err = fmt.Errorf("%w: the kernel says: %w", errdefs.ErrInvalid, err)
			}
			return nil, errors.Join(fmt.Errorf("set %s of %s to %q: %w", s.Name, s.Device, s.Value, err), undo())
		}
		undos = append(undos, func() error { return Write(s.Device, s.Name, before) })
	}
	return undo, nil
}

func settingPath(device, name string) string {
	return filepath.Join("/sys/block", filepath.Base(device), "queue", filepath.Base(name))
}

// Read returns a setting of a device's queue. For a choice ("none [bfq]") it returns what is in brackets.
func Read(device, name string) (string, error) {
	b, err := os.ReadFile(settingPath(device, name))
	value := strings.TrimSpace(string(b))
	if _, rest, found := strings.Cut(value, "["); found {
		value, _, _ = strings.Cut(rest, "]")
	}
	return value, err
}

// Write changes a setting of a device's queue. It makes no file, unlike os.WriteFile.
func Write(device, name, value string) error {
	f, err := os.OpenFile(settingPath(device, name), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}
