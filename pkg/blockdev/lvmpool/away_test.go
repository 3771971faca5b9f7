package lvmpool_test

import (
	"context"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lvmpool"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
)

// TestLVMDiskAwayMeanwhile: a disk of the group goes away while a copy is made, or right before a volume is deleted, and comes back. Then all is as before:
// lvm2 has not turned the disk away.
func TestLVMDiskAwayMeanwhile(t *testing.T) {
	for what, meanwhile := range map[string]func(f *lvmFixture, away func()) error{
		"copy": func(f *lvmFixture, away func()) error {
			device, err := f.pool.Attach(f.Context(), pooltest.Vol("a"), blockdev.Attachment{})
			check.OK(f, err)
			defer device.Close()
			return pooltest.Second(f.pool.Create(f.Context(), blockdev.Spec{Ref: pooltest.Snap("b"), Name: "b", Size: 8 * pooltest.MiB, Origin: pooltest.Vol("a"),
				Cut: func(context.Context) error { away(); return nil }}))
		},
		"delete": func(f *lvmFixture, away func()) error {
			f.make(pooltest.Vol("b"), 8*pooltest.MiB)
			lvmpool.Age(f.pool)
			pooltest.CapacityOf(f, f.pool)
			away()
			return f.pool.Delete(f.Context(), pooltest.Vol("b"))
		},
	} {
		t.Run(what, func(t *testing.T) {
			one, other := newFaultyDisk(t, 64*pooltest.MiB), newFaultyDisk(t, 64*pooltest.MiB)
			f := &lvmFixture{T: t, group: drivertest.NewGroupOn(t, "/dev/mapper/"+one.name, "/dev/mapper/"+other.name)}
			f.url = f.group.URL() + "?reservePercent=0"
			drivertest.Run(t, "lvcreate", "-q", "-an", "-Wn", "-Zn", "-L", "60M", "-n", "theirs", f.group.Name, "/dev/mapper/"+other.name)
			f.start()
			f.make(pooltest.Vol("a"), 8*pooltest.MiB)
			f.write(pooltest.Vol("a"), 0, marked("a", 8*pooltest.MiB))
			err := meanwhile(f, func() { other.behave(other.faults()["nothing"]) })
			t.Logf("meanwhile: %v", err)
			other.well()
			lvmpool.Age(f.pool)
			f.poolIll()
			if count := strings.TrimSpace(drivertest.Run(t, "vgs", "--noheadings", "-o", "vg_missing_pv_count", f.group.Name)); count != "0" {
				t.Errorf("lvm2 has turned %s disks away that are there", count)
				_, err := f.pool.Create(t.Context(), blockdev.Spec{Ref: pooltest.Vol("c"), Name: "c", Size: 4 * pooltest.MiB})
				t.Logf("the next volume: %v", err)
				drivertest.Run(t, "vgextend", "-q", "--restoremissing", f.group.Name, "/dev/mapper/"+other.name)
				lvmpool.Age(f.pool)
			}
			f.make(pooltest.Vol("c"), 4*pooltest.MiB)
			f.holds(pooltest.Vol("a"), 0, marked("a", 8*pooltest.MiB))
			drivertest.Run(t, "lvremove", "-q", "-f", f.group.Name+"/theirs")
		})
	}
}
