package anynode

import (
	"fmt"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// arrivedIn waits until a volume has moved to a pool of a node.
func (v *volume) arrivedIn(node, pool string) {
	v.Helper()
	v.moving("it is over", func(now *v1alpha1.Volume) bool {
		return now.Spec.NodeName == node && now.Spec.Pool == pool && now.Spec.Move == nil && now.Status.Move == nil
	})
	if now := v.object(); now.ID() != v.of.ID {
		v.Errorf("its ID is %s, and was %s", now.ID(), v.of.ID)
	}
}

// TestMoveToOtherPool: a volume moves from a file pool to an LVM pool of another name, whose sizes are coarser, and back, while a node uses it and while nobody does; it is used by its ID all along, also
// after a start of its new home.
func TestMoveToOtherPool(t *testing.T) {
	group := drivertest.NewGroup(t, 512*mib)
	c := newNodesWith(t, map[string][]string{newHome: {"--pool=lvm=" + group.URL()}})
	odd := func(r *csi.CreateVolumeRequest) { r.CapacityRange.RequiredBytes += 4096 }
	for user, who := range map[string]string{third: "third", home: "old", newHome: "new"} {
		for filesystem, encrypted := range map[string]bool{"ext4": false, co.Block: true} {
			t.Run(fmt.Sprintf("%s/%s", who, filesystem), func(t *testing.T) {
				in := *c
				in.TB = t
				u := in.writtenTo(fmt.Sprintf("other-%s-%s", who, filesystem), user, filesystem, encrypted, odd)
				u.moveTo(newHome, "lvm")
				u.arrivedIn(newHome, "lvm")
				if files := u.files(home); len(files) > 0 {
					t.Errorf("left at home: %v", files)
				}
				u.goesOn()
				killed(&in, in.agents[newHome])()
				u.goesOn()
				if !encrypted { // its devices grow with its key only: it moves back when nobody uses it
					u.moveTo(home, "default")
					u.arrivedIn(home, "default")
					u.goesOn()
				}
				u.writer.end()
				check.OK(t, u.writer.err)
				u.whole(user)
				u.leave(user)
				for at, place := range map[string]string{home: "default", newHome: "lvm"} {
					if u.object().Spec.NodeName != at {
						u.moveTo(at, place)
						u.arrivedIn(at, place)
					}
					for _, node := range []string{newHome, third, home} {
						u.use(node, func(string) { u.whole(node) })
					}
				}
				u.again("delete it", u.of.Delete)
			})
		}
	}
}
