package life

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

// replica is a request for the volume of one replica of a StatefulSet, on the disks of a set, each on another one.
func replica(claim, kind string, disks map[string]string) *csi.CreateVolumeRequest {
	r := co.Request("pvc of "+claim, kind, smallest[kind])
	r.Parameters = map[string]string{"pool": "disk-*", "spread": "required", "csi.storage.k8s.io/pvc/name": claim, "csi.storage.k8s.io/pvc/namespace": "ns"}
	for key, value := range disks {
		r.Parameters[key] = value
	}
	return r
}

// poolOf is the name of the pool that a volume is in.
func poolOf(v *vol) string { return strings.Split(v.ID, ".")[1] }

// TestDiskLost: of two disks behind one class, one dies, or is torn away, under the volumes of a StatefulSet. What is on the other one
// does not notice; new volumes of the class come there; and with the disk back all is as it was.
func TestDiskLost(t *testing.T) {
	drivertest.NeedRoot(t)
	for name, lose := range map[string]func(directory string){
		"dead":        func(directory string) { shutDown(t, directory) },
		"not mounted": func(directory string) { check.OK(t, unix.Unmount(directory, unix.MNT_DETACH)) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := newDir(t)
			var pools []string
			for _, disk := range []string{"disk-a", "disk-b"} {
				drivertest.MountNew(t, "xfs", filepath.Join(dir, disk), 2<<30)
				pools = append(pools, fmt.Sprintf("%s=file://%s?reservePercent=0", disk, filepath.Join(dir, disk)))
			}
			d := start(t, drivertest.Options{Dir: dir, Pools: pools})
			whole, err := d.GetCapacity(t.Context(), &csi.GetCapacityRequest{Parameters: map[string]string{"pool": "disk-*"}})
			check.OK(t, err)
			var all []*vol
			for i, kind := range []string{"ext4", block} {
				v := d.made(replica(fmt.Sprintf("data-%s-%d", filepath.Base(dir), i), kind, nil)) // no other test has one of this name
				write(t, v.File(v.running()), uint64(i))
				all = append(all, v)
			}
			if poolOf(all[0]) == poolOf(all[1]) {
				t.Fatalf("both are in %s", poolOf(all[0]))
			}
			_, err = d.create(replica("data-"+filepath.Base(dir)+"-2", "ext4", nil))
			check.Code(t, err, codes.ResourceExhausted, "spread=required")
			lost, well := all[0], all[1]
			filler := co.Request("filler of "+filepath.Base(dir), block, 256*miB) // so that most room was on the lost one
			filler.Parameters = map[string]string{"pool": poolOf(well)}
			fills := d.made(filler)
			unix.Sync()
			directory := filepath.Join(dir, poolOf(lost))
			lose(directory)

			if is := lost.problems(); len(is) == 0 {
				t.Errorf("nothing is said of what is on the lost disk")
			}
			expect(t, well.problems())
			write(t, well.File(well.Target("pod")), 7)
			holds(t, well.File(well.Target("pod")), 7)
			s, err := well.snapshot("of well" + dir)
			check.OK(t, err)
			check.OK(t, d.deleteSnapshot(s.GetSnapshotId()))
			check.OK(t, well.unpublish(well.Target("pod")))
			check.OK(t, well.publish(well.Target("pod"), false))
			left, err := d.GetCapacity(t.Context(), &csi.GetCapacityRequest{Parameters: map[string]string{"pool": "disk-*"}})
			check.OK(t, err)
			if left.GetAvailableCapacity() <= 0 || left.GetAvailableCapacity() > whole.GetAvailableCapacity()*6/10 || left.GetMaximumVolumeSize().GetValue() > left.GetAvailableCapacity() {
				t.Errorf("of %v there is %v left", whole, left)
			}
			for i := range 3 {
				v := d.made(replica(fmt.Sprintf("other%d-%s-0", i, filepath.Base(dir)), "ext4", nil))
				if poolOf(v) != poolOf(well) {
					t.Errorf("a new one is in %s", poolOf(v))
				}
				check.OK(t, v.down(v.running()))
			}

			check.OK(t, fills.delete())
			check.OK(t, lost.unpublish(lost.Target("pod")))
			check.OK(t, lost.unstage())
			check.OK(t, well.down(well.Target("pod")))
			d.Stop()
			for deadline := time.Now().Add(time.Minute); unix.Unmount(directory, unix.MNT_DETACH) == nil && time.Now().Before(deadline); {
				time.Sleep(10 * time.Millisecond)
			}
			image := directory + ".image"
			for deadline := time.Now().Add(time.Minute); len(drivertest.LoopsOver(image)) > 0 && time.Now().Before(deadline); {
				time.Sleep(10 * time.Millisecond)
			}
			drivertest.MountLoop(t, image, directory)
			d = start(t, drivertest.Options{Dir: dir, Pools: pools})
			lost = d.volume(lost.ID, lost.Name, lost.Capability)
			check.OK(t, lost.stage())
			check.OK(t, lost.publish(lost.Target("pod"), false))
			holds(t, lost.File(lost.Target("pod")), 0)
			check.OK(t, lost.down(lost.Target("pod")))
			for _, pool := range []string{"disk-a", "disk-b"} {
				if c, err := d.Store.Capacity(t.Context(), pool, "", ""); err != nil || c.Promised != 0 {
					t.Errorf("%s: %+v, %v", pool, c, err)
				}
			}
		})
	}
}
