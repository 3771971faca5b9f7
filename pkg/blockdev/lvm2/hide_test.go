package lvm2

import (
	"cmp"
	"context"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/command"
)

const key = "0123456789abcdef0123456789abcdef"

// TestFilter: lvm2 leaves out what has bytes of volumes, of whatever pool, and what is just coming; it reads what it read before of all else. Without such
// devices it gets no filter, and without a free filter neither.
func TestFilter(t *testing.T) {
	lv := "LVM-" + strings.Repeat("x", 64)
	plain := map[string]string{ // by path in /sys/block
		"sda/size":                   "1",
		"loop0/loop/backing_file":    "/root/disk.img",
		"loop1/size":                 "0", // without a file
		"loop2/loop/backing_file":    "/mnt/volumes/disk.img",
		"nvme0n1/device/subsysnqn":   "nqn.2014.08.org.nvmexpress:8086",
		"dm-0/dm/name":               "mpatha",
		"dm-0/dm/uuid":               "mpath-1",
		"dm-1/dm/name":               "luks-1.a+b",
		"dm-1/dm/uuid":               "CRYPT-LUKS2-1",
		"dm-2/dm/name":               `a\x20b`,
		"dm-2/dm/uuid":               "",
		"dm-3/dm/name":               "root-home",
		"dm-3/dm/uuid":               lv,
		"dm-4/dm/name":               "fast-vol." + key,
		"dm-4/dm/uuid":               lv,
		"dm-5/dm/name":               "fast-vol." + key + "-writable",
		"dm-5/dm/uuid":               lv + "-writable",
		"dm-6/dm/name":               "ashlar-vol." + key + ".1f.2a",
		"dm-6/dm/uuid":               "LVM-NOT-OF-LVM",
		"nvme0c0n1/device/subsysnqn": "nqn.2014.08.org.nvmexpress:8086",
	}
	volumes := map[string]map[string]string{
		"an image":                      {"loop3/loop/backing_file": "/var/lib/ashlar/volumes/" + key + ".img"},
		"an image of a snapshot":        {"loop3/loop/backing_file": "/var/lib/ashlar/snapshots/" + key + ".img"},
		"an image that is unlinked":     {"loop3/loop/backing_file": "/volumes/" + key + ".img (deleted)"},
		"a loop device and its keeper":  {"loop3/loop/backing_file": "/volumes/" + key + ".img", "loop4/loop/backing_file": "/dev/loop3"},
		"encryption in a file pool":     {"dm-7/dm/name": "ashlar-vol." + key + ".1f.2a-crypt", "dm-7/dm/uuid": "CRYPT-LUKS2-2"},
		"encryption in a volume group":  {"dm-7/dm/name": "fast-vol." + key + "-writable-crypt", "dm-7/dm/uuid": "CRYPT-LUKS2-2"},
		"encryption of another node's":  {"dm-7/dm/name": "ashlar-other-vol." + key + "-crypt", "dm-7/dm/uuid": "CRYPT-LUKS2-2"},
		"encryption, moved to a pool":   {"dm-7/dm/name": "ashlar-other-vol.pool-2." + key + "-crypt", "dm-7/dm/uuid": "CRYPT-LUKS2-2"},
		"a volume of another node":      {"nvme3n1/device/subsysnqn": "nqn.2026-11.dev.ashlar:" + key + ":1:a"},
		"the same, with several paths":  {"nvme3n1/device/subsysnqn": "nqn.2026-11.dev.ashlar:" + key + ":1:a", "nvme3c4n1/device/subsysnqn": "nqn.2026-11.dev.ashlar:" + key + ":1:a"},
		"one that is being connected":   {"nvme3n1/device/subsysnqn": "nqn.2026-11.dev.ashlar:" + key},
		"several":                       {"loop3/loop/backing_file": "/volumes/" + key + ".img", "nvme3n1/device/subsysnqn": "nqn.2026-11.dev.ashlar:x"},
		"below one that lvm2 knows not": {"loop3/loop/backing_file": "/volumes/" + key + ".img", "dm-7/dm/name": "ashlar-vol." + key + ".1f.2a-seat", "dm-7/dm/uuid": "LVM-NOT-OF-LVM-movable"},
	}
	tree := func(t *testing.T, trees ...map[string]string) *sight {
		dir := t.TempDir()
		for _, files := range trees {
			for path, text := range files {
				check.OK(t, os.MkdirAll(filepath.Join(dir, filepath.Dir(path)), 0o700))
				check.OK(t, os.WriteFile(filepath.Join(dir, path), []byte(text+"\n"), 0o600))
			}
		}
		return &sight{find: finds(Filters{Free: "global_filter"}), sysfs: dir}
	}
	if filter, err := tree(t, plain).filter(t.Context()); err != nil || filter != "" {
		t.Errorf("without volumes: %q, %v", filter, err)
	}
	for what, devices := range volumes {
		t.Run(what, func(t *testing.T) {
			s := tree(t, plain, devices)
			for _, again := range []string{"", "again: "} {
				filter, err := s.filter(t.Context())
				check.OK(t, err)
				read := reads(t, filter, "global_filter")
				for _, names := range [][]string{{"/dev/sda"}, {"/dev/loop0"}, {"/dev/loop0p2"}, {"/dev/loop2"}, {"/dev/nvme0n1"}, {"/dev/nvme0n1p3"}, {"/dev/mapper/mpatha", "/dev/dm-0"}, {"/dev/dm-0"},
					{"/dev/mapper/luks-1.a+b", "/dev/dm-1"}, {`/dev/mapper/a\x20b`, "/dev/dm-2"}, {"/dev/disk/by-id/x", "/dev/sda"}} {
					if !read(names) {
						t.Errorf("%sit does not read %s with %s", again, names, filter)
					}
				}
				for _, names := range [][]string{{"/dev/loop9"}, {"/dev/loop01"}, {"/dev/nvme9n1"}, {"/dev/nvme0n10"}, {"/dev/dm-9"}, {"/dev/mapper/luks-1xa+b"}} { // not there yet
					if read(names) {
						t.Errorf("%sit reads %s with %s", again, names, filter)
					}
				}
				for path := range devices {
					name, _, _ := strings.Cut(path, "/")
					for _, names := range [][]string{{"/dev/" + name}, {"/dev/disk/by-id/x", "/dev/" + name}, {"/dev/" + name, "/dev/block/1:2"}, {"/dev/" + name + "p1"}} {
						if read(names) {
							t.Errorf("%sit reads %s with %s", again, names, filter)
						}
					}
				}
			}
			s.find, s.found = finds(Filters{}), false
			if filter, err := s.filter(t.Context()); err != nil || filter != "" {
				t.Errorf("without a free filter: %q, %v", filter, err)
			}
		})
	}
}

// TestFilterOfLVs: if lvm2 reads logical volumes, those of volumes are left out, and the others are read.
func TestFilterOfLVs(t *testing.T) {
	dir := t.TempDir()
	for path, text := range map[string]string{"dm-0/dm/name": "root-home", "dm-0/dm/uuid": "LVM-1", "dm-1/dm/name": "fast-vol." + key, "dm-1/dm/uuid": "LVM-2",
		"dm-2/dm/name": "fast-cut.snap." + key + "-cow", "dm-2/dm/uuid": "LVM-3", "dm-3/dm/name": "fast-grow." + key, "dm-3/dm/uuid": "LVM-4"} {
		check.OK(t, os.MkdirAll(filepath.Join(dir, filepath.Dir(path)), 0o700))
		check.OK(t, os.WriteFile(filepath.Join(dir, path), []byte(text+"\n"), 0o600))
	}
	s := &sight{find: finds(Filters{Free: "filter", LVs: true}), sysfs: dir}
	filter, err := s.filter(t.Context())
	check.OK(t, err)
	read := reads(t, filter, "filter")
	for name, want := range map[string]bool{"/dev/dm-0": true, "/dev/mapper/root-home": true, "/dev/dm-1": false, "/dev/dm-2": false, "/dev/dm-3": false} {
		if read([]string{name}) != want {
			t.Errorf("%s: read %v, with %s", name, !want, filter)
		}
	}
}

// TestAnotherDeviceOfThatName: what was found out of a device is not taken for that of the next one.
func TestAnotherDeviceOfThatName(t *testing.T) {
	dir := t.TempDir()
	s := &sight{find: finds(Filters{Free: "filter"}), sysfs: dir}
	for _, file := range []string{"/root/disk", "/volumes/" + key + ".img", "/root/disk"} {
		folder := filepath.Join(dir, "loop0", "loop")
		check.OK(t, os.MkdirAll(filepath.Dir(folder), 0o700))
		check.OK(t, os.Mkdir(folder+"-next", 0o700)) // sysfs gives no inode number again
		check.OK(t, os.RemoveAll(folder))
		check.OK(t, os.Rename(folder+"-next", folder))
		check.OK(t, os.WriteFile(filepath.Join(folder, "backing_file"), []byte(file+"\n"), 0o600))
		filter, err := s.filter(t.Context())
		if err != nil || (filter != "") != strings.Contains(file, "volumes") {
			t.Errorf("over %s: %q, %v", file, filter, err)
		}
	}
}

// TestDeviceThatGoes: a device of the device mapper that is going, of which sysfs says EINVAL, fails no command, and is not read. Here another attribute that says so stands for its.
func TestDeviceThatGoes(t *testing.T) {
	dir := t.TempDir()
	const invalid = "/sys/class/net/lo/speed"
	if _, err := os.ReadFile(invalid); !errors.Is(err, unix.EINVAL) {
		t.Fatalf("read %s: %v", invalid, err)
	}
	check.OK(t, os.MkdirAll(filepath.Join(dir, "dm-0/dm"), 0o700))
	check.OK(t, os.Symlink(invalid, filepath.Join(dir, "dm-0/dm/name")))
	check.OK(t, os.MkdirAll(filepath.Join(dir, "loop0/loop"), 0o700))
	check.OK(t, os.WriteFile(filepath.Join(dir, "loop0/loop/backing_file"), []byte("/volumes/"+key+".img\n"), 0o600))
	filter, err := (&sight{find: finds(Filters{Free: "filter"}), sysfs: dir}).filter(t.Context())
	check.OK(t, err)
	if reads(t, filter, "filter")([]string{"/dev/dm-0"}) {
		t.Errorf("it is read with %s", filter)
	}
}

// TestLearns: lvm2 is asked for its settings once, and again when they were changed, or when it could not tell.
func TestLearns(t *testing.T) {
	t.Setenv(systemDir, t.TempDir())
	asked, broken := 0, errors.New("broken")
	s := &sight{sysfs: t.TempDir(), find: func(context.Context) (Filters, error) {
		asked++
		if asked == 1 {
			return Filters{}, broken
		}
		return Filters{Free: "filter"}, nil
	}}
	if _, err := s.filter(t.Context()); !errors.Is(err, broken) {
		t.Errorf("error %v", err)
	}
	for i, file := range []string{"lvm.conf", "lvmlocal.conf", ""} {
		for range 3 {
			check.OK(t, s.learn(t.Context()))
		}
		if asked != i+2 {
			t.Errorf("it was asked %d times before %q", asked, file)
		}
		check.OK(t, os.WriteFile(filepath.Join(os.Getenv(systemDir), file+"x"), nil, 0o600))
		check.OK(t, os.Rename(filepath.Join(os.Getenv(systemDir), file+"x"), filepath.Join(os.Getenv(systemDir), cmp.Or(file, "other"))))
	}
}

// TestFindFilters: which filter is free, by lvm2 itself.
func TestFindFilters(t *testing.T) {
	if _, err := command.Find("lvmconfig"); err != nil {
		t.Skip("lvm2 is not installed")
	}
	for settings, want := range map[string]Filters{
		``:                                 {Free: "global_filter"},
		`devices { scan_lvs=1 }`:           {Free: "global_filter", LVs: true},
		`devices { filter=["r|^/dev/a|"]}`: {Free: "global_filter"},
		`devices { global_filter=["a|^/dev/a|","r|.*|"]}`:   {Free: "filter"},
		`devices { global_filter="r|a|" filter=["r|^/b|"]}`: {},
	} {
		dir := t.TempDir()
		t.Setenv(systemDir, dir)
		check.OK(t, os.WriteFile(filepath.Join(dir, "lvm.conf"), []byte(settings), 0o600))
		if have, err := FindFilters(t.Context()); err != nil || have != want {
			t.Errorf("%s: %+v, %v, want %+v", settings, have, err, want)
		}
	}
}

// finds returns a stand-in for FindFilters.
func finds(f Filters) func(context.Context) (Filters, error) {
	return func(context.Context) (Filters, error) { return f, nil }
}

// reads returns what lvm2 does with a filter: whether it reads a device of some names (_accept_p in lib/filters/filter-regex.c).
func reads(t *testing.T, filter, name string) func(names []string) bool {
	t.Helper()
	list, ok := strings.CutPrefix(filter, name+`=["`)
	list, closed := strings.CutSuffix(list, `"]`)
	if !ok || !closed || strings.ContainsAny(filter, "' \\") {
		t.Fatalf("lvm2's shell does not take %q", filter)
	}
	type pattern struct {
		accept bool
		*regexp.Regexp
	}
	var patterns []pattern
	for text := range strings.SplitSeq(list, `","`) {
		patterns = append(patterns, pattern{text[0] == 'a', regexp.MustCompile(text[2 : len(text)-1])})
	}
	return func(names []string) bool {
		rejected := false
		for _, name := range names {
			for _, p := range patterns {
				if p.MatchString(name) {
					if p.accept {
						return true
					}
					rejected = true
					break
				}
			}
		}
		return !rejected
	}
}
