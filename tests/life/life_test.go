package life

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// TestLife takes a volume of each kind through all that CSI has, on each kind of pool.
func TestLife(t *testing.T) {
	for _, pool := range pools {
		for _, kind := range []string{"ext4", "xfs", "btrfs", block} {
			for _, provisioning := range provisionings(pool) {
				t.Run(fmt.Sprintf("%s pool/%s/%s", pool, kind, provisioning), func(t *testing.T) {
					d := startOn(t, pool)
					life(t, d, pool, kind, map[string]string{"provisioning": provisioning})
					d.nothingLeft()
				})
			}
		}
	}
}

func life(t *testing.T, d *driver, pool, kind string, parameters map[string]string) {
	size, provisioning := smallest[kind], parameters["provisioning"]
	larger, largest := size+64*miB, size+128*miB
	r := co.Request("source", kind, size)
	r.Parameters = parameters
	source := d.made(r)
	if taken := source.taken(); d.group == nil && (taken >= size) != (provisioning == "thick") {
		t.Errorf("the new %s image takes %d of %d bytes", provisioning, taken, size)
	}

	target := source.running()
	readOnly := source.Target("reader")
	check.OK(t, source.publish(readOnly, true))
	write(t, source.File(target), 1)
	holds(t, source.File(target), 1)
	refusesWrites(t, source.File(readOnly))
	if taken := source.taken(); d.group == nil && provisioning == "thick" && taken < size {
		t.Errorf("formatting and writing left the thick image with %d of %d bytes", taken, size)
	}
	used := source.usage(target)
	if used.GetTotal() > size || used.GetTotal() < size/2 || (kind != block && used.GetAvailable() <= 0) {
		t.Errorf("usage of %d bytes: %v", size, used)
	}
	if problems := source.problems(); len(problems) > 0 {
		t.Errorf("health: %v", problems)
	}

	// A snapshot while somebody writes.
	places := func(v *vol, at string) []place {
		if v.Block() {
			return []place{{at, 0}, {at, 12 * miB}}
		}
		return []place{{filepath.Join(at, "a"), 0}, {filepath.Join(at, "b"), 0}}
	}
	counting := count(t, places(source, target)...)
	before := counting.done.Load()
	snapshot, err := source.snapshot("snapshot")
	if err != nil && kind == block && pool == "plain" {
		// Nothing can hold the writes back, and the copy was not faster than they.
		check.Code(t, err, codes.FailedPrecondition, "stop the writes")
		before = counting.stop()
		snapshot, err = source.snapshot("snapshot")
	}
	check.OK(t, err)
	if !snapshot.GetReadyToUse() || snapshot.GetSizeBytes() != size || snapshot.GetSourceVolumeId() != source.ID {
		t.Errorf("snapshot: %v", snapshot)
	}

	// Growing while somebody writes.
	check.OK(t, source.expand(larger))
	counting.stop()
	switch err := source.nodeExpand(target); {
	case kind != block && !filesystem.GrowsMounted(filesystem.Type(kind)):
		check.Code(t, err, codes.FailedPrecondition, "CAP_SYS_RESOURCE", "staged next")
		check.OK(t, source.unpublish(target))
		check.OK(t, source.unpublish(readOnly))
		check.OK(t, source.unstage())
		check.OK(t, source.stage())
		check.OK(t, source.publish(target, false))
		check.OK(t, source.publish(readOnly, true))
	default:
		check.OK(t, err)
		check.OK(t, source.nodeExpand(source.Staging))
	}
	// Each filesystem keeps something for itself, and more when it is larger.
	if total := source.usage(target).GetTotal(); total < used.GetTotal()+(larger-size)*3/4 || total > larger {
		t.Errorf("grown from %d to %d bytes, it shows %d, %d before", size, larger, total, used.GetTotal())
	}
	holds(t, source.File(target), 1)

	// Source, clone and restore at once, each on its own.
	write(t, source.File(target), 2)
	r = co.FromVolume(co.Request("clone", kind, larger), source.ID)
	r.Parameters = parameters
	clone := d.made(r)
	r = co.FromSnapshot(co.Request("restore", kind, largest), snapshot.GetSnapshotId())
	r.Parameters = parameters
	restore := d.made(r)
	cloned, restored := clone.running(), restore.running()
	holds(t, clone.File(cloned), 2)
	holds(t, restore.File(restored), 1)
	pointInTime(t, before, places(restore, restored)...)
	if total := restore.usage(restored).GetTotal(); total < used.GetTotal()+(largest-size)*3/4 || total > largest {
		t.Errorf("restored to %d bytes, it shows %d", largest, total)
	}
	write(t, clone.File(cloned), 3)
	write(t, restore.File(restored), 4)
	holds(t, source.File(target), 2)
	holds(t, clone.File(cloned), 3)
	holds(t, restore.File(restored), 4)

	// The clone lives on without its source, the snapshot too.
	check.OK(t, source.down(target, readOnly))
	write(t, clone.File(cloned), 5)
	r = co.FromSnapshot(co.Request("late", kind, 0), snapshot.GetSnapshotId())
	r.Parameters = parameters
	r.CapacityRange = &csi.CapacityRange{RequiredBytes: size, LimitBytes: size}
	late := d.made(r)
	lately := late.running()
	holds(t, late.File(lately), 1)
	holds(t, clone.File(cloned), 5)
	check.OK(t, d.deleteSnapshot(snapshot.GetSnapshotId()))
	holds(t, late.File(lately), 1)
	check.OK(t, late.down(lately))
	check.OK(t, clone.down(cloned))
	check.OK(t, restore.down(restored))
}

// taken is how many bytes the image of a volume takes, where it has one.
func (v *vol) taken() int64 {
	v.t.Helper()
	if v.group != nil {
		return 0
	}
	return blocks(v.t, v.image())
}

// TestGroupSnapshot: three volumes that are written to in turn are cut at one moment.
func TestGroupSnapshot(t *testing.T) {
	for _, pool := range pools {
		t.Run(pool, func(t *testing.T) {
			d := startOn(t, pool)
			var volumes []*vol
			var targets, ids []string
			var places []place
			for _, kind := range []string{"xfs", "ext4", "btrfs"} {
				v := d.made(co.Request("of-"+kind, kind, smallest[kind]))
				target := v.running()
				volumes, targets, ids = append(volumes, v), append(targets, target), append(ids, v.ID)
				places = append(places, place{v.File(target), 0})
			}
			counting := count(t, places...)
			before := counting.done.Load()
			create := &csi.CreateVolumeGroupSnapshotRequest{Name: "group", SourceVolumeIds: ids}
			response, err := d.CreateVolumeGroupSnapshot(t.Context(), create)
			check.OK(t, err)
			group := response.GetGroupSnapshot()
			again, err := d.CreateVolumeGroupSnapshot(t.Context(), create)
			check.OK(t, err)
			if again.String() != response.String() {
				t.Errorf("repeated: %v, first: %v", again, response)
			}
			reached := counting.done.Load()
			for end := time.Now().Add(time.Minute); counting.done.Load() < reached+2; time.Sleep(time.Millisecond) { // nobody stays frozen
				if t.Failed() || time.Now().After(end) {
					t.Fatal("the writer is held up after the group was cut")
				}
			}
			counting.stop()

			var copies []place
			restored := map[string]*vol{}
			for i, v := range volumes {
				for _, member := range group.GetSnapshots() {
					if member.GetSourceVolumeId() != v.ID {
						continue
					}
					if member.GetGroupSnapshotId() != group.GetGroupSnapshotId() {
						t.Errorf("member %v is not of %s", member, group.GetGroupSnapshotId())
					}
					check.Code(t, d.deleteSnapshot(member.GetSnapshotId()), codes.InvalidArgument)
					kind := v.Capability.GetMount().GetFsType()
					copied := d.made(co.FromSnapshot(co.Request("copy-of-"+kind, kind, smallest[kind]), member.GetSnapshotId()))
					target := copied.running()
					copies = append(copies, place{copied.File(target), 0})
					restored[target] = copied
				}
				if len(copies) != i+1 {
					t.Fatalf("the group has no snapshot of %s: %v", v.Name, group)
				}
			}
			pointInTime(t, before, copies...)

			var members []string
			for _, member := range group.GetSnapshots() {
				members = append(members, member.GetSnapshotId())
			}
			for range 2 {
				_, err = d.DeleteVolumeGroupSnapshot(t.Context(), &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: group.GetGroupSnapshotId(), SnapshotIds: members})
				check.OK(t, err)
			}
			for target, v := range restored {
				check.OK(t, v.down(target))
			}
			for i, v := range volumes {
				check.OK(t, v.down(targets[i]))
			}
			d.nothingLeft()
		})
	}
}

// TestGroupSnapshotRaw: raw volumes whose writers cannot be held back, as their pool copies their bytes, are cut at one moment with a filesystem and with each
// other, in whatever order their IDs are: a writer that goes from one to the next finds its writes there in that order, or the group is refused.
func TestGroupSnapshotRaw(t *testing.T) {
	for name, c := range map[string]struct {
		kinds []string // in the order in which they are written to
		ids   []int    // places among these, in the order of the IDs
	}{
		"filesystem first, cut first": {[]string{"ext4", block, block}, []int{0, 1, 2}},
		"raw one first":               {[]string{block, "ext4", block}, []int{1, 2, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			d := startOn(t, "plain")
			volumes, ids, places := make([]*vol, len(c.kinds)), make([]string, len(c.kinds)), make([]place, len(c.kinds))
			targets := make([]string, len(c.kinds))
			last := ""
			for _, at := range c.ids {
				called := ""
				for n := 0; called == "" || volume.KeyOf(called) < last; n++ { // from the keys a group has its order
					called = fmt.Sprintf("of-%d-%d", at, n)
				}
				last = volume.KeyOf(called)
				v := d.made(co.Request(called, c.kinds[at], smallest["ext4"]))
				volumes[at], ids[at], targets[at] = v, v.ID, v.running()
				places[at] = place{v.File(targets[at]), 0}
			}
			counting := count(t, places...)
			request := &csi.CreateVolumeGroupSnapshotRequest{Name: "group", SourceVolumeIds: ids}
			before := counting.done.Load()
			response, err := d.CreateVolumeGroupSnapshot(t.Context(), request)
			for try := 0; status.Code(err) == codes.FailedPrecondition && try < 20; try++ { // it was written to after it was copied
				t.Log("refused")
				before = counting.done.Load()
				response, err = d.CreateVolumeGroupSnapshot(t.Context(), request)
			}
			check.OK(t, err)
			counting.stop()
			var copies []place
			for i, v := range volumes {
				for _, member := range response.GetGroupSnapshot().GetSnapshots() {
					if member.GetSourceVolumeId() == v.ID {
						copied := d.made(co.FromSnapshot(co.Request(fmt.Sprint("copy-", i), c.kinds[i], smallest["ext4"]), member.GetSnapshotId()))
						volumes, targets = append(volumes, copied), append(targets, copied.running())
						copies = append(copies, place{copied.File(targets[len(targets)-1]), 0})
					}
				}
			}
			pointInTime(t, before, copies...)
			for i, v := range volumes {
				check.OK(t, v.down(targets[i]))
			}
		})
	}
}

// TestGroupSnapshotAllOrNothing: with one member that cannot be cut, no snapshot is made.
func TestGroupSnapshotAllOrNothing(t *testing.T) {
	d := start(t, drivertest.Options{})
	good, bad := d.made(co.Request("good", "ext4", smallest["ext4"])), d.made(co.Request("bad", "ext4", smallest["ext4"]))
	target := good.running()
	check.OK(t, os.Rename(bad.image(), bad.image()+".away"))
	create := &csi.CreateVolumeGroupSnapshotRequest{Name: "group", SourceVolumeIds: []string{good.ID, bad.ID}}
	_, err := d.CreateVolumeGroupSnapshot(t.Context(), create)
	check.Code(t, err, codes.DataLoss)
	listed, err := d.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{})
	check.OK(t, err)
	if len(listed.GetEntries()) != 0 {
		t.Errorf("snapshots are there: %v", listed)
	}
	write(t, good.File(target), 1) // it is not frozen
	check.OK(t, os.Rename(bad.image()+".away", bad.image()))
	response, err := d.CreateVolumeGroupSnapshot(t.Context(), create)
	check.OK(t, err)
	if n := len(response.GetGroupSnapshot().GetSnapshots()); n != 2 {
		t.Errorf("the group has %d snapshots", n)
	}
	_, err = d.DeleteVolumeGroupSnapshot(t.Context(), &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: response.GetGroupSnapshot().GetGroupSnapshotId()})
	check.OK(t, err)
	check.OK(t, bad.delete())
	check.OK(t, good.down(target))
	d.nothingLeft()
}
