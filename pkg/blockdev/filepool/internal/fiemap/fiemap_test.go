package fiemap_test

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/fiemap"
)

// TestApartBelieved: only XFS and btrfs are believed that two files have the same bytes. Others may say the same addresses of any two files (CIFS), or of
// blocks on two disks.
func TestApartBelieved(t *testing.T) {
	drivertest.NeedRoot(t)
	const size = 1 << 20
	for fs, believed := range map[string]bool{"xfs": true, "btrfs": true, "ext4": false} {
		dir := filepath.Join(drivertest.Dir(t), fs)
		drivertest.MountNew(t, fs, dir, 512<<20)
		var files []*os.File
		for _, name := range []string{"a", "b"} {
			f, err := os.Create(filepath.Join(dir, name))
			check.OK(t, err)
			t.Cleanup(func() { _ = f.Close() })
			check.OK(t, f.Truncate(size))
			files = append(files, f)
		}
		apart, next, err := fiemap.Apart(files[0], files[1], 4096, size)
		check.OK(t, err)
		want := []fiemap.Range{{Start: 4096, End: size}}
		if believed {
			want = nil
		}
		if next != size || !slices.Equal(apart, want) {
			t.Errorf("%s, of two files without data: %v up to %d, want %v", fs, apart, next, want)
		}
	}
}
