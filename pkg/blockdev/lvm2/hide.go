package lvm2

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/command"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/named"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// A pod that has a raw volume can write a physical volume into it, of whatever group it names, and lvm2 believes what it reads. So lvm2 is told to leave out all
// devices that have bytes of volumes, of whatever pool. It leaves out most by itself: those whose UUID is that of a part of a logical volume. The others are
// loop devices over images, encrypted volumes, and volumes of other nodes.

// Filters is what the settings of an administrator (lvm.conf(5)) say of the devices that lvm2 reads.
type Filters struct {
	Free string // the filter that the administrator does not use, and the driver can: global_filter or filter; empty: there is none
	LVs  bool   // lvm2 reads logical volumes, too (devices/scan_lvs)
}

// FindFilters asks lvm2 for its settings.
func FindFilters(ctx context.Context) (f Filters, err error) {
	// With settings that are all the defaults, lvm2 2.03.16 answers only if it is given one more.
	text, _, err := command.RunWith(ctx, command.Options{Env: append(settings(), "LVM_SUPPRESS_FD_WARNINGS=1")}, "lvmconfig", "--typeconfig", "full", "--config", "backup/backup=0",
		"devices/global_filter", "devices/filter", "devices/scan_lvs")
	if err != nil {
		return f, fmt.Errorf("%w: ask lvm2 which devices it reads: %w", errdefs.ErrUnavailable, err)
	}
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		switch {
		case key == "scan_lvs":
			f.LVs = value != "0"
		case value == `["a|.*|"]` && f.Free == "": // the default
			f.Free = key
		}
	}
	return f, nil
}

// sight finds the devices that lvm2 may read.
type sight struct {
	find    func(context.Context) (Filters, error) // FindFilters
	sysfs   string                                 // /sys/block
	filters Filters
	found   bool
	by      [2]unix.Timespec // when the files were changed from which filters are
	known   map[string]device
}

// learn asks lvm2 for its settings, if they may have changed since it was last asked: lvm2 itself reads them before its next command.
func (s *sight) learn(ctx context.Context) (err error) {
	var by [2]unix.Timespec
	for i, file := range []string{"lvm.conf", "lvmlocal.conf"} {
		var st unix.Stat_t
		if unix.Stat(filepath.Join(cmp.Or(os.Getenv(systemDir), "/etc/lvm"), file), &st) == nil { // without it there are the defaults
			by[i] = st.Ctim
		}
	}
	if s.found && by == s.by {
		return nil
	}
	s.filters, err = s.find(ctx)
	s.found, s.by = err == nil, by
	return err
}

// device is what is known of a device of one of the classes that volumes have.
type device struct {
	inode      uint64 // of its folder in sysfs; a later device of the same name, or another file of a loop device, has another one
	volume     bool   // it has bytes of a volume
	name, uuid string // of a device of the device mapper
}

// filter returns the setting that has lvm2 leave out what has bytes of volumes: of loop devices, of the device mapper and of NVMe it accepts only those that
// are there now and have none, so that one that is just coming is left out as well. It is empty if there is none to leave out, or no filter for it
// (Filters.Free). Devices of other classes are not affected: lvm2 leaves out a device if a filter rejects one of its names, and accepts none before.
func (s *sight) filter(ctx context.Context) (string, error) {
	if err := s.learn(ctx); err != nil || s.filters.Free == "" {
		return "", err
	}
	entries, err := os.ReadDir(s.sysfs)
	if err != nil {
		return "", fmt.Errorf("%w: list block devices: %w", errdefs.ErrUnavailable, err)
	}
	known := map[string]device{}
	hide, accepted := false, []string{}
	for _, entry := range entries {
		name := entry.Name()
		d, there, err := s.look(name)
		if err != nil {
			return "", fmt.Errorf("%w: find out what block device %s is: %w", errdefs.ErrUnavailable, name, err)
		}
		if !there {
			continue
		}
		known[name] = d
		switch {
		case strings.HasPrefix(d.uuid, "LVM-") && !s.filters.LVs: // lvm2 leaves it out by itself
		case d.volume:
			hide = true
		case d.name != "":
			accepted = append(accepted, name)
			if plain.MatchString(d.name) {
				accepted = append(accepted, "mapper/"+literal.Replace(d.name))
			}
		default:
			accepted = append(accepted, name+"(p[0-9]+)?")
		}
	}
	s.known = known
	if !hide {
		return "", nil
	}
	patterns := `"r#^/dev/(loop|dm-|mapper/|nvme)#"`
	if len(accepted) > 0 {
		patterns = `"a#^/dev/(` + strings.Join(accepted, "|") + `)$#",` + patterns
	}
	return s.filters.Free + "=[" + patterns + "]", nil
}

// plain matches the names that /dev/mapper has as they are, and that regular expressions of lvm2 take with few changes (literal).
var (
	plain   = regexp.MustCompile(`^[A-Za-z0-9_.+=:@,-]+$`)
	literal = strings.NewReplacer(".", "[.]", "+", "[+]")
)

// look returns what is known of a device, or finds it out; there is false if it is of no class that volumes have, has no bytes, or is gone.
func (s *sight) look(name string) (d device, there bool, err error) {
	folder, find := filepath.Join(s.sysfs, name), s.nvme
	switch {
	case strings.HasPrefix(name, "loop"):
		folder, find = filepath.Join(folder, "loop"), s.loop // it is there while the device has a file
	case strings.HasPrefix(name, "dm-"):
		find = s.mapped
	case !strings.HasPrefix(name, "nvme"):
		return d, false, nil
	}
	var st unix.Stat_t
	if err := unix.Lstat(folder, &st); err != nil {
		return d, false, ignoreGone(err)
	}
	if d = s.known[name]; d.inode == st.Ino {
		return d, true, nil
	}
	d, err = find(name)
	d.inode = st.Ino
	return d, err == nil, ignoreGone(err)
}

// ignoreGone drops the error for a device that is gone, or going: of one of the device mapper, sysfs says EINVAL then (dm_attr_show of dm-sysfs.c).
func ignoreGone(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENXIO) || errors.Is(err, unix.EINVAL) {
		return nil
	}
	return err
}

// loop finds out what a loop device is over: an image, or another loop device, whose keeper it is.
func (s *sight) loop(name string) (d device, err error) {
	for range 2 {
		backing, err := os.ReadFile(filepath.Join(s.sysfs, name, "loop", "backing_file"))
		if err != nil {
			return d, err
		}
		if _, _, d.volume = named.Image(string(backing)); d.volume {
			break
		}
		below := strings.TrimSpace(string(backing))
		if name = filepath.Base(below); filepath.Dir(below) != "/dev" || !strings.HasPrefix(name, "loop") {
			break
		}
	}
	return d, nil
}

// mapped finds out what a device of the device mapper is, by its name and UUID.
func (s *sight) mapped(name string) (d device, err error) {
	for attribute, to := range map[string]*string{"name": &d.name, "uuid": &d.uuid} {
		text, err := os.ReadFile(filepath.Join(s.sysfs, name, "dm", attribute))
		if err != nil {
			return d, err
		}
		*to = strings.TrimSpace(string(text))
	}
	d.volume = named.OfObject(d.name)
	return d, nil
}

// nvme finds out whether a namespace is a volume of another node, by the name of its subsystem.
func (s *sight) nvme(name string) (d device, err error) {
	subsystem, err := os.ReadFile(filepath.Join(s.sysfs, name, "device", "subsysnqn"))
	d.volume = strings.HasPrefix(string(subsystem), named.NQN)
	return d, err
}
