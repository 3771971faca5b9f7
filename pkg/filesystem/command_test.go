package filesystem

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
)

func TestParseVersion(t *testing.T) {
	for text, want := range map[string]version{
		"6.18.44-fc": {6, 18}, "5.4": {5, 4}, "1.47.0 (5-Feb-2023)": {1, 47}, "1.47-rc1": {1, 47}, "10.0.1": {10, 0}, "7": {7, 0}, "": {}, "x.y": {},
	} {
		if have := parseVersion(text); have != want {
			t.Errorf("%q is %v, want %v", text, have, want)
		}
	}
	for _, c := range []struct {
		v            version
		major, minor int
		before       bool
	}{
		{version{5, 14}, 5, 15, true}, {version{5, 15}, 5, 15, false}, {version{5, 16}, 5, 15, false},
		{version{4, 99}, 5, 15, true}, {version{6, 0}, 5, 15, false}, {version{10, 0}, 5, 15, false},
	} {
		if before := c.v.before(c.major, c.minor); before != c.before {
			t.Errorf("%v before %d.%d: %v", c.v, c.major, c.minor, before)
		}
	}
	if v := kernelVersion(); v.before(2, 6) {
		t.Errorf("the kernel is %v", v)
	}
}

// TestMakeCommand: a filesystem has no feature that its kernel cannot mount, mkfs gives no space back, and none is told what it does not know: it would end
// with an error, and such a node could make no filesystem at all. RHEL 9 has Linux 5.14 and e2fsprogs 1.46, Ubuntu 22.04 Linux 5.15 and xfsprogs 5.13.
func TestMakeCommand(t *testing.T) {
	for _, c := range []struct {
		fs           Type
		kernel, tool version
		zeros        bool
		want, not    []string
	}{
		{Ext4, version{6, 1}, version{1, 47}, true, []string{"mkfs.ext4", "-b 4096", "nodiscard", "assume_storage_prezeroed=1"}, []string{"orphan_file", "-F"}},
		{Ext4, version{6, 1}, version{1, 46}, true, []string{"nodiscard"}, []string{"prezeroed"}},
		{Ext4, version{6, 1}, version{1, 47}, false, []string{"nodiscard"}, []string{"prezeroed", "orphan_file"}},
		{Ext4, version{5, 15}, version{1, 47}, false, nil, []string{"orphan_file"}},
		{Ext4, version{5, 14}, version{1, 47}, false, []string{"-O ^orphan_file"}, nil},
		{Ext4, version{5, 14}, version{1, 46}, false, nil, []string{"orphan_file"}},
		{Ext4, version{5, 14}, version{}, true, nil, []string{"orphan_file", "prezeroed"}},
		{XFS, version{5, 19}, version{6, 1}, true, []string{"mkfs.xfs", "-K"}, []string{"nrext64", "-f"}},
		{XFS, version{5, 18}, version{6, 1}, false, []string{"mkfs.xfs", "-K", "-i nrext64=0"}, []string{"-f"}},
		{XFS, version{5, 15}, version{5, 13}, false, nil, []string{"nrext64"}},
		{XFS, version{6, 9}, version{6, 17}, false, nil, []string{"nrext64", "exchange", "parent"}},
		{XFS, version{6, 9}, version{6, 18}, false, []string{"-i exchange=0", "-n parent=0"}, []string{"nrext64"}},
		{XFS, version{5, 15}, version{6, 18}, false, []string{"-i nrext64=0", "-i exchange=0", "-n parent=0"}, nil},
		{XFS, version{6, 10}, version{6, 18}, false, nil, []string{"exchange", "parent"}},
		{XFS, version{5, 15}, version{}, false, nil, []string{"nrext64"}},
		{Btrfs, version{6, 0}, version{6, 18}, false, []string{"mkfs.btrfs", "-K"}, []string{"-f", "-O"}},
		{Btrfs, version{6, 0}, version{6, 19}, false, []string{"-O ^block-group-tree"}, nil},
		{Btrfs, version{6, 1}, version{6, 19}, false, nil, []string{"-O"}},
	} {
		argv := makeCommand(c.fs, c.kernel, c.tool, c.zeros)
		line := strings.Join(argv, " ")
		for _, want := range c.want {
			if !strings.Contains(line, want) {
				t.Errorf("%s of version %v on kernel %v: %q has no %q", c.fs, c.tool, c.kernel, line, want)
			}
		}
		for _, not := range c.not {
			if slices.Contains(argv, not) || (len(not) > 2 && strings.Contains(line, not)) {
				t.Errorf("%s of version %v on kernel %v: %q has %q", c.fs, c.tool, c.kernel, line, not)
			}
		}
	}
}

// TestToolVersion: the versions of the tools are known, from what they say and from the tools that are here.
func TestToolVersion(t *testing.T) {
	for said, want := range map[string]version{
		"mke2fs 1.46.5 (30-Dec-2021)\n\tUsing EXT2FS Library version 1.46.5\n": {1, 46}, "mkfs.xfs version 5.13.0\n": {5, 13},
		"mkfs.btrfs, part of btrfs-progs v6.2\n": {6, 2}, "mkfs.btrfs, part of btrfs-progs v5.16.2 \n": {5, 16}, "": {}, "no version": {},
	} {
		if have := toolVersion(said); have != want {
			t.Errorf("%q is of version %v, want %v", said, have, want)
		}
	}
	for _, fs := range Types {
		if _, err := exec.LookPath(versionCommands[fs][0]); err != nil {
			continue
		}
		for range 2 {
			if have, err := tools.version(t.Context(), fs); err != nil || have.major == 0 {
				t.Errorf("%s is of version %v (%v)", versionCommands[fs][0], have, err)
			}
		}
	}
}

// TestMakeForOldKernel: the tools that are here, whatever their versions, take what they are told for the oldest kernel.
func TestMakeForOldKernel(t *testing.T) {
	for _, fs := range Types {
		if _, err := exec.LookPath(versionCommands[fs][0]); err != nil {
			continue
		}
		tool, err := tools.version(t.Context(), fs)
		check.OK(t, err)
		path := filepath.Join(t.TempDir(), "disk")
		check.OK(t, os.WriteFile(path, nil, 0o600))
		check.OK(t, os.Truncate(path, fs.MinSize()))
		argv := append(makeCommand(fs, version{5, 12}, tool, true), path)
		if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
			t.Errorf("%v: %v: %s", argv, err, out)
		}
		if have, err := Probe(path); err != nil || have != fs {
			t.Errorf("%v made %q (%v)", argv, have, err)
		}
	}
}
