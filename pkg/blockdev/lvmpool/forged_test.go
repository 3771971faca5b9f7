package lvmpool_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lvmpool"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/device"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// TestLVMForgedGroup: somebody writes a physical volume into a device that the driver does not take for one of a volume, so that lvm2 reads it. It is of a group that has the name of the
// pool's, or also its UUID and a later version: a pod reads both in /sys/block/dm-*/dm. Nothing goes there, and no volume counts as lost. When those bytes are gone, the pool goes on.
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
			forge(t, f.group.Name, forged.id, raw)
			content, err := os.ReadFile(raw)
			check.OK(t, err)
			check.OK(t, os.WriteFile(raw, make([]byte, len(content)), 0)) // what was written to the raw volume so far

			f.pool = pooltest.OpenURL(t, f.group.URL()+"?reservePercent=0")
			check.OK(t, os.WriteFile(raw, content, 0))
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
				t.Errorf("something was written to the device (%v)", err)
			}
			check.OK(t, os.WriteFile(raw, make([]byte, len(content)), 0))
			lvmpool.Age(f.pool)
			f.ill(pooltest.Vol("a"))
			f.holds(pooltest.Vol("a"), 0, marked("a", 8*pooltest.MiB))
		})
	}
}

// forge writes a physical volume into a device, of a group with a name and a UUID, in a late version.
func forge(t *testing.T, group, id, device string) {
	t.Helper()
	t.Run("forge", func(t *testing.T) {
		drivertest.SetUpLVM(t, `"a|^`+device+`$|"`)
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
`, group, id, pv, device), 0o600))
		drivertest.Run(t, "pvcreate", "-q", "-ff", "-y", "--uuid", pv, "--restorefile", file, device)
		drivertest.Run(t, "vgcfgrestore", "-q", "-y", "-f", file, group)
	})
}

// TestLVMReadsNoVolume: a tenant writes a physical volume into a raw volume of a file pool: of a group with the name and UUID of the pool's, or the head of
// the pool's own disk. The pool's lvm2 does not read it, and all goes on, also when an administrator extends the group; whichever filter the administrator uses.
func TestLVMReadsNoVolume(t *testing.T) {
	for _, theirs := range []string{"global_filter", "filter"} {
		t.Run(theirs, func(t *testing.T) {
			f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 64*pooltest.MiB)}
			f.url = f.group.URL() + "?reservePercent=0"
			conf := filepath.Join(os.Getenv("LVM_SYSTEM_DIR"), "lvm.conf")
			settings, err := os.ReadFile(conf)
			check.OK(t, err)
			check.OK(t, os.WriteFile(conf, bytes.Replace(settings, []byte("global_filter"), []byte(theirs), 1), 0o600))
			id := drivertest.Run(t, "vgs", "--noheadings", "-o", "vg_uuid", f.group.Name)
			f.start()
			f.make(pooltest.Vol("a"), 8*pooltest.MiB)
			f.write(pooltest.Vol("a"), 0, marked("a", 8*pooltest.MiB))

			dir := drivertest.Dir(t)
			files := pooltest.OpenedFiles(t, dir)
			pooltest.Create(t, files, blockdev.Spec{Ref: pooltest.Vol("f"), Size: 64 * pooltest.MiB})
			of := device.New().Of(files, pooltest.Vol("f"))
			raw, err := of.Attach(t.Context(), device.Options{Keep: true})
			check.OK(t, err)
			defer func() { check.OK(t, errors.Join(raw.Close(), of.Detach(context.Background()))) }()
			below := drivertest.Run(t, "losetup", "-n", "-O", "NAME", "-j", dir+"/volumes/"+pooltest.Vol("f").Key+".img") // lvm2 does not read the top of it
			for what, written := range map[string]func(t *testing.T) (device string){
				"the name and UUID of the group": func(t *testing.T) string {
					device := drivertest.Disk(t, 64*pooltest.MiB)
					forge(t, f.group.Name, id, device)
					return device
				},
				"the head of its disk": func(*testing.T) string { return f.group.Devices[0] },
			} {
				t.Run(what, func(t *testing.T) {
					f := &lvmFixture{T: t, group: f.group, pool: f.pool}
					t.Run("the tenant", func(t *testing.T) {
						head := make([]byte, 2*pooltest.MiB)
						device, err := os.Open(written(t))
						check.OK(t, err)
						check.OK(t, errors.Join(pooltest.Second(device.ReadAt(head, 0)), device.Close()))
						pooltest.WriteTo(t, raw.Path, 0, head)
					})
					content, err := os.ReadFile(raw.Path)
					check.OK(t, err)
					if out, err := exec.Command("pvs", "-o", "pv_name").CombinedOutput(); !strings.Contains(string(out), below) {
						t.Fatalf("lvm2 without the driver does not read %s, so this shows nothing: %s, %v", below, out, err)
					}
					lvmpool.Age(f.pool)
					f.poolIll()
					f.ill(pooltest.Vol("a"))
					f.make(pooltest.Vol("b"), 8*pooltest.MiB)
					f.write(pooltest.Vol("b"), 0, marked("b", 8*pooltest.MiB))
					check.OK(t, pooltest.Second(f.pool.Expand(t.Context(), pooltest.Vol("b"), 12*pooltest.MiB)))
					f.copy(pooltest.Snap("b"), pooltest.Vol("b"), 12*pooltest.MiB)
					f.holds(pooltest.Snap("b"), 0, marked("b", 8*pooltest.MiB))
					f.holds(pooltest.Vol("a"), 0, marked("a", 8*pooltest.MiB))
					check.OK(t, errors.Join(f.pool.Delete(t.Context(), pooltest.Snap("b")), f.pool.Delete(t.Context(), pooltest.Vol("b"))))

					before, err := f.pool.Capacity(t.Context())
					check.OK(t, err)
					more := drivertest.Disk(t, 64*pooltest.MiB)
					own := `devices/global_filter=["a|^` + f.group.Devices[0] + `$|","a|^` + more + `$|","r|.*|"]` // what the administrator looks at
					drivertest.Run(t, "vgextend", "-q", "-y", "--config", own, f.group.Name, more)
					lvmpool.Age(f.pool)
					after, err := f.pool.Capacity(t.Context())
					if err != nil || after.Available <= before.Available {
						t.Errorf("after the group was extended: %+v, before %+v, %v", after, before, err)
					}
					f.poolIll()
					drivertest.Run(t, "vgreduce", "-q", "-y", "--config", own, f.group.Name, more)
					if have, err := os.ReadFile(raw.Path); err != nil || !bytes.Equal(have, content) {
						t.Errorf("something was written to the tenant's volume (%v)", err)
					}
				})
			}
			pooltest.WriteTo(t, raw.Path, 0, make([]byte, 2*pooltest.MiB)) // so that the tests' own lvm2 finds the group
		})
	}
}
