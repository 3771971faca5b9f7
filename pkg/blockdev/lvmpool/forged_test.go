package lvmpool_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lvmpool"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// TestLVMForgedGroup: a tenant writes a physical volume into a raw volume of a file pool (here its loop device). It is of a group that has the name of the
// pool's, or also its UUID and a later version: a pod reads both in /sys/block/dm-*/dm. Nothing goes there, and no volume counts as lost. When the tenant's bytes are gone, the pool goes on.
func TestLVMForgedGroup(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 64*pooltest.MiB)}
	f.url = f.group.URL() + "?reservePercent=0"
	f.start()
	f.make(pooltest.Vol("a"), 8*pooltest.MiB)
	f.write(pooltest.Vol("a"), 0, marked("a", 8*pooltest.MiB))
	id := drivertest.Run(t, "vgs", "--noheadings", "-o", "vg_uuid", f.group.Name)
	id = string(bytes.TrimSpace([]byte(id)))
	for _, forged := range []struct{ what, id string }{{"name", "AAAAAA-AAAA-AAAA-AAAA-AAAA-AAAA-AAAAAA"}, {"name and UUID", id}} {
		t.Run(forged.what, func(t *testing.T) {
			outer := f
			f := &lvmFixture{T: t, group: f.group, pool: f.pool}
			defer func() { outer.pool = f.pool }()
			raw := drivertest.Disk(t, 64*pooltest.MiB)
			check.OK(t, f.pool.Close()) // so that its lvm2 does not see the other settings
			t.Run("the tenant", func(t *testing.T) {
				drivertest.SetUpLVM(t, `"a|^`+raw+`$|"`)
				const pv = "BBBBBB-BBBB-BBBB-BBBB-BBBB-BBBB-BBBBBB"
				file := filepath.Join(t.TempDir(), "forged")
				check.OK(t, os.WriteFile(file, fmt.Appendf(nil, `contents = "Text Format Volume Group"
version = 1
%s {
id = "%s"
seqno = 1000000
format = "lvm2"
status = ["RESIZEABLE", "READ", "WRITE"]
flags = []
extent_size = 8192
max_lv = 0
max_pv = 0
metadata_copies = 0
physical_volumes {
pv0 {
id = "%s"
device = "%s"
status = ["ALLOCATABLE"]
flags = []
dev_size = 131072
pe_start = 2048
pe_count = 15
}
}
}
`, f.group.Name, forged.id, pv, raw), 0o600))
				drivertest.Run(t, "pvcreate", "-q", "-ff", "-y", "--uuid", pv, "--restorefile", file, raw)
				drivertest.Run(t, "vgcfgrestore", "-q", "-y", "-f", file, f.group.Name)
			})
			content, err := os.ReadFile(raw)
			check.OK(t, err)
			check.OK(t, os.WriteFile(raw, make([]byte, len(content)), 0)) // what was written to the raw volume so far

			f.pool = pooltest.OpenURL(t, f.group.URL()+"?reservePercent=0")
			check.OK(t, os.WriteFile(raw, content, 0)) // the tenant writes
			lvmpool.Age(f.pool)
			f.poolIll("PoolUnavailable")
			f.ill(pooltest.Vol("a"), "PoolUnavailable")
			for what, call := range map[string]func() error{
				"create": func() error {
					return pooltest.Second(f.pool.Create(t.Context(), blockdev.Spec{Ref: pooltest.Vol("b"), Name: "b", Size: 8 * pooltest.MiB}))
				},
				"grow": func() error { return pooltest.Second(f.pool.Expand(t.Context(), pooltest.Vol("a"), 16*pooltest.MiB)) },
				"copy": func() error {
					return pooltest.Second(f.pool.Create(t.Context(), blockdev.Spec{Ref: pooltest.Snap("b"), Size: 8 * pooltest.MiB, Origin: pooltest.Vol("a")}))
				},
				"delete": func() error { return f.pool.Delete(t.Context(), pooltest.Vol("a")) },
			} {
				if err := call(); !errors.Is(err, errdefs.ErrUnavailable) {
					t.Errorf("%s: %v", what, err)
				}
			}
			if have, err := os.ReadFile(raw); err != nil || !bytes.Equal(have, content) {
				t.Errorf("something was written to the tenant's raw volume (%v)", err)
			}
			check.OK(t, os.WriteFile(raw, make([]byte, len(content)), 0))
			lvmpool.Age(f.pool)
			f.ill(pooltest.Vol("a"))
			f.holds(pooltest.Vol("a"), 0, marked("a", 8*pooltest.MiB))
		})
	}
}
