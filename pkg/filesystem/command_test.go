package filesystem

import (
	"slices"
	"strings"
	"testing"
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

// TestMakeCommand: a filesystem has no feature that its kernel cannot mount, and mkfs gives no space back.
func TestMakeCommand(t *testing.T) {
	for _, c := range []struct {
		fs        Type
		kernel    version
		prezeroed bool
		want, not []string
	}{
		{Ext4, version{6, 1}, true, []string{"mkfs.ext4", "-b 4096", "nodiscard", "assume_storage_prezeroed=1"}, []string{"orphan_file", "-F"}},
		{Ext4, version{6, 1}, false, []string{"nodiscard"}, []string{"prezeroed", "orphan_file"}},
		{Ext4, version{5, 15}, false, nil, []string{"orphan_file"}},
		{Ext4, version{5, 14}, false, []string{"-O ^orphan_file"}, nil},
		{XFS, version{5, 19}, true, []string{"mkfs.xfs", "-K"}, []string{"nrext64", "-f"}},
		{XFS, version{5, 18}, false, []string{"mkfs.xfs", "-K", "-i nrext64=0"}, []string{"-f"}},
		{Btrfs, version{4, 18}, false, []string{"mkfs.btrfs", "-K"}, []string{"-f"}},
	} {
		argv := makeCommand(c.fs, c.kernel, c.prezeroed)
		line := strings.Join(argv, " ")
		for _, want := range c.want {
			if !strings.Contains(line, want) {
				t.Errorf("%s on kernel %v: %q has no %q", c.fs, c.kernel, line, want)
			}
		}
		for _, not := range c.not {
			if slices.Contains(argv, not) || (len(not) > 2 && strings.Contains(line, not)) {
				t.Errorf("%s on kernel %v: %q has %q", c.fs, c.kernel, line, not)
			}
		}
	}
}
