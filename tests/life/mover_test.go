package life

import (
	"io"
	"os"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

// TestMover: what a data mover that works on blocks does with a filesystem: its snapshot is read as a raw volume, the bytes are
// written to a new raw volume, and that one is bound again as a filesystem, by the same handle. Nothing is formatted on the way: not
// where the filesystem came as bytes, and not where none came. The kernel mounts it beside its source, but for btrfs before Linux 6.7.
func TestMover(t *testing.T) {
	for i, pool := range pools {
		for _, fs := range []string{"ext4", "xfs", "btrfs"}[:max(1, 3-2*i)] { // all of them in one pool
			t.Run(pool+"/"+fs, func(t *testing.T) {
				d := startOn(t, pool)
				v := d.made(co.Request("shop", fs, smallest[fs]))
				target := v.running()
				write(t, target+"/goods", 7)
				snapshot, err := v.snapshot("now")
				check.OK(t, err)
				source := d.made(co.FromSnapshot(co.Request("source", block, snapshot.GetSizeBytes()), snapshot.GetSnapshotId()))
				moved := d.made(co.Request("moved", block, snapshot.GetSizeBytes()))
				empty := d.made(co.Request("empty", block, smallest[fs]))
				from, to, nothing := source.running(), moved.running(), empty.running()
				copyDevice(t, to, from)
				drivertest.Run(t, "cmp", from, to)
				leave(t, source, from)
				leave(t, moved, to)
				leave(t, empty, nothing)

				_, noTemporaryID := os.Stat("/sys/fs/btrfs/features/temp_fsid")
				alone := fs == "btrfs" && noTemporaryID != nil
				if alone {
					leave(t, v, target)
				}
				for _, raw := range []*vol{source, moved} {
					bound := d.volume(raw.ID, raw.Name, co.Capability(fs, csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER))
					at := bound.running()
					holds(t, at+"/goods", 7)
					write(t, at+"/more", 8)
					leave(t, bound, at)
					at = bound.running()
					holds(t, at+"/more", 8)
					leave(t, bound, at)
				}
				bound := d.volume(empty.ID, empty.Name, co.Capability(fs, csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER))
				check.OK(t, bound.claim())
				if bound.stage() == nil {
					t.Error("what was never filled is a filesystem")
				}
				check.OK(t, bound.unstage())
				check.OK(t, bound.release())

				if !alone {
					leave(t, v, target)
				}
				for _, one := range []*vol{v, source, moved, empty} {
					check.OK(t, one.delete())
				}
				check.OK(t, d.deleteSnapshot(snapshot.GetSnapshotId()))
				d.nothingLeft()
			})
		}
	}
}

// leave takes a volume down at a target; it stays.
func leave(t testing.TB, v *vol, target string) {
	t.Helper()
	check.OK(t, v.unpublish(target))
	check.OK(t, v.unstage())
	check.OK(t, v.release())
}

func copyDevice(t testing.TB, to, from string) {
	t.Helper()
	in, err := os.Open(from)
	check.OK(t, err)
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY, 0)
	check.OK(t, err)
	_, err = io.Copy(struct{ io.Writer }{out}, struct{ io.Reader }{in}) // by reading and writing
	check.OK(t, err)
	check.OK(t, out.Sync())
	check.OK(t, out.Close())
}
