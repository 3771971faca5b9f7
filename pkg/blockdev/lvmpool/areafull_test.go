package lvmpool_test

import (
	"fmt"
	"os/exec"
	"testing"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// TestLVMMetadataAreaFull: the metadata area of the group is full. That is a lack of space, and deletions, which make room, work.
func TestLVMMetadataAreaFull(t *testing.T) {
	onLVM(t, func(f *lvmFixture) {
		f.make(pooltest.Vol("a"), 8*pooltest.MiB)
		tag := 0
		for _, step := range []struct{ tags, length int }{{40, 1000}, {1, 1000}, {1, 200}, {1, 40}, {1, 8}} {
			for full := false; !full; {
				args := []string{"-q"}
				for range step.tags {
					tag++
					args = append(args, fmt.Sprintf("--addtag=%0*d", step.length, tag))
				}
				full = exec.Command("vgchange", append(args, f.group.Name)...).Run() != nil
			}
		}
		f.restart()
		err := pooltest.Second(f.pool.Create(f.Context(), blockdev.Spec{Ref: pooltest.Vol("b"), Name: "b", Size: 8 * pooltest.MiB}))
		says(f, err, errdefs.ErrNoSpace)
		for range 2 {
			err = f.pool.Delete(f.Context(), pooltest.Vol("a"))
		}
		if err != nil {
			f.Errorf("a full metadata area keeps volumes from being deleted: %v", err)
			out, err := exec.Command("lvremove", "-f", f.path(pooltest.Vol("a"))).CombinedOutput()
			f.Logf("by hand: %v, %s", err, out)
		}
	})
}
