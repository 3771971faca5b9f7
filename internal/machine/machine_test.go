package machine

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

func TestSize(t *testing.T) {
	for bytes, want := range map[int64]string{0: "0 B", 512: "512 B", 999: "999 B", 1000: "1 KiB", 1536: "1.5 KiB",
		64 << 20: "64 MiB", 1000 << 20: "1 GiB", 100<<30 + 512<<20: "100 GiB", 16 << 40: "16 TiB"} {
		if got := Size(bytes); got != want {
			t.Errorf("size(%d) is %q, expected %q", bytes, got, want)
		}
	}
}

func TestWithin(t *testing.T) {
	for _, test := range []struct {
		path, above string
		want        bool
	}{
		{"/a", "/a", true}, {"/a/b", "/a", true}, {"/ab", "/a", false}, {"/a", "/a/b", false}, {"/a", "/", true}, {"/", "/", true},
	} {
		if got := Within(test.path, test.above); got != test.want {
			t.Errorf("within(%q, %q) is %v", test.path, test.above, got)
		}
	}
}

// TestMountOf: a mount is found by its path, with special characters, and beside a mount without a source.
func TestMountOf(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root mounts")
	}
	dir := t.TempDir()
	for _, c := range []struct{ name, source string }{{"no source", ""}, {"a b\\040\t\u00a0\n", "none"}} {
		path := filepath.Join(dir, c.name)
		if err := errors.Join(os.Mkdir(path, 0o700), unix.Mount(c.source, path, "tmpfs", 0, "size=1m")); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := unix.Unmount(path, 0); err != nil {
				t.Error(err)
			}
		})
		if m, err := MountOf(path + "/file"); err != nil || m.MountPoint != path || m.FsType != "tmpfs" || m.Source != c.source {
			t.Errorf("the mount of %q is %+v, %v", path, m, err)
		}
	}
}
