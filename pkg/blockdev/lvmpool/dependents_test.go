package lvmpool_test

import (
	"slices"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
)

// TestLVMDependents: others have made a snapshot of a volume (a backup, say), or thin volumes that read from it. These are not removed with the volume.
func TestLVMDependents(t *testing.T) {
	for kind, depend := range map[string]func(f *lvmFixture, path string){
		"snapshot": func(f *lvmFixture, path string) {
			drivertest.Run(f, "lvcreate", "-q", "-s", "-L", "8M", "-n", "theirs", path)
		},
		"external origin": func(f *lvmFixture, path string) {
			drivertest.Run(f, "lvcreate", "-q", "--type", "thin-pool", "-L", "32M", "-n", "others", f.group.Name)
			drivertest.Run(f, "lvchange", "-q", "-pr", path)
			drivertest.Run(f, "lvcreate", "-q", "-s", "--thinpool", "others", "-n", "theirs", path)
		},
	} {
		t.Run(kind, func(t *testing.T) {
			f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 128*pooltest.MiB)}
			f.url = f.group.URL() + "?reservePercent=0"
			f.start()
			f.make(pooltest.Vol("a"), 8*pooltest.MiB)
			f.write(pooltest.Vol("a"), 0, marked("a", 8*pooltest.MiB))
			depend(f, f.path(pooltest.Vol("a")))
			err := f.pool.Delete(t.Context(), pooltest.Vol("a"))
			t.Logf("delete: %v", err)
			if volumes := f.group.Volumes(t); !slices.Contains(volumes, "theirs") {
				t.Errorf("others' volume was removed with the pool's: %q are left", volumes)
			}
			if slices.Contains(f.group.Volumes(t), "theirs") {
				drivertest.Run(t, "lvremove", "-q", "-f", f.group.Name+"/theirs")
			}
		})
	}
}
