package life

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
)

// TestLife takes a volume of each kind through all that CSI has, on each kind of pool.
func TestLife(t *testing.T) {
	for _, pool := range pools {
		for _, kind := range []string{"ext4", "xfs", "btrfs", block} {
			for _, provisioning := range provisionings(pool) {
				t.Run(fmt.Sprintf("%s pool/%s/%s", pool, kind, provisioning), func(t *testing.T) {
					d := startOn(t, pool)
					life(t, d, pool, kind, provisioning)
					d.nothingLeft()
				})
			}
		}
	}
}

func life(t *testing.T, d *driver, pool, kind, provisioning string) {
	size := smallest[kind]
	larger, largest := size+64*miB, size+128*miB
	r := request("source", kind, size)
	r.Parameters = map[string]string{"provisioning": provisioning}
	source := d.made(r)
	if taken := source.taken(); d.group == nil && (taken >= size) != (provisioning == "thick") {
		t.Errorf("the new %s image takes %d of %d bytes", provisioning, taken, size)
	}

	target := source.running()
	readOnly := source.target("reader")
	ok(t, source.publish(readOnly, true))
	write(t, source.file(target), 1)
	holds(t, source.file(target), 1)
	refusesWrites(t, source.file(readOnly))
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
		if v.block() {
			return []place{{at, 0}, {at, 12 * miB}}
		}
		return []place{{filepath.Join(at, "a"), 0}, {filepath.Join(at, "b"), 0}}
	}
	counting := count(t, places(source, target)...)
	before := counting.done.Load()
	snapshot, err := source.snapshot("snapshot")
	if err != nil && kind == block && pool == "plain" {
		// Nothing can hold the writes back, and the copy was not faster than they.
		wants(t, err, codes.FailedPrecondition, "stop the writes")
		before = counting.stop()
		snapshot, err = source.snapshot("snapshot")
	}
	ok(t, err)
	if !snapshot.GetReadyToUse() || snapshot.GetSizeBytes() != size || snapshot.GetSourceVolumeId() != source.id {
		t.Errorf("snapshot: %v", snapshot)
	}

	// Growing while somebody writes.
	ok(t, source.expand(larger))
	counting.stop()
	switch err := source.nodeExpand(target); {
	case kind != block && !filesystem.GrowsMounted(filesystem.Type(kind)):
		wants(t, err, codes.FailedPrecondition, "CAP_SYS_RESOURCE", "staged next")
		ok(t, source.unpublish(target))
		ok(t, source.unpublish(readOnly))
		ok(t, source.unstage())
		ok(t, source.stage())
		ok(t, source.publish(target, false))
		ok(t, source.publish(readOnly, true))
	default:
		ok(t, err)
		ok(t, source.nodeExpand(source.staging))
	}
	// Each filesystem keeps something for itself, and more when it is larger.
	if total := source.usage(target).GetTotal(); total < used.GetTotal()+(larger-size)*3/4 || total > larger {
		t.Errorf("grown from %d to %d bytes, it shows %d, %d before", size, larger, total, used.GetTotal())
	}
	holds(t, source.file(target), 1)

	// Source, clone and restore at once, each on its own.
	write(t, source.file(target), 2)
	r = fromVolume(request("clone", kind, larger), source.id)
	r.Parameters = map[string]string{"provisioning": provisioning}
	clone := d.made(r)
	r = fromSnapshot(request("restore", kind, largest), snapshot.GetSnapshotId())
	r.Parameters = map[string]string{"provisioning": provisioning}
	restore := d.made(r)
	cloned, restored := clone.running(), restore.running()
	holds(t, clone.file(cloned), 2)
	holds(t, restore.file(restored), 1)
	pointInTime(t, before, places(restore, restored)...)
	if total := restore.usage(restored).GetTotal(); total < used.GetTotal()+(largest-size)*3/4 || total > largest {
		t.Errorf("restored to %d bytes, it shows %d", largest, total)
	}
	write(t, clone.file(cloned), 3)
	write(t, restore.file(restored), 4)
	holds(t, source.file(target), 2)
	holds(t, clone.file(cloned), 3)
	holds(t, restore.file(restored), 4)

	// The clone lives on without its source, the snapshot too.
	ok(t, source.down(target, readOnly))
	write(t, clone.file(cloned), 5)
	r = fromSnapshot(request("late", kind, 0), snapshot.GetSnapshotId())
	r.Parameters = map[string]string{"provisioning": provisioning}
	r.CapacityRange = &csi.CapacityRange{RequiredBytes: size, LimitBytes: size}
	late := d.made(r)
	lately := late.running()
	holds(t, late.file(lately), 1)
	holds(t, clone.file(cloned), 5)
	ok(t, d.deleteSnapshot(snapshot.GetSnapshotId()))
	holds(t, late.file(lately), 1)
	ok(t, late.down(lately))
	ok(t, clone.down(cloned))
	ok(t, restore.down(restored))
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
				v := d.made(request("of-"+kind, kind, smallest[kind]))
				target := v.running()
				volumes, targets, ids = append(volumes, v), append(targets, target), append(ids, v.id)
				places = append(places, place{v.file(target), 0})
			}
			counting := count(t, places...)
			before := counting.done.Load()
			create := &csi.CreateVolumeGroupSnapshotRequest{Name: "group", SourceVolumeIds: ids}
			response, err := d.CreateVolumeGroupSnapshot(t.Context(), create)
			ok(t, err)
			group := response.GetGroupSnapshot()
			again, err := d.CreateVolumeGroupSnapshot(t.Context(), create)
			ok(t, err)
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
					if member.GetSourceVolumeId() != v.id {
						continue
					}
					if member.GetGroupSnapshotId() != group.GetGroupSnapshotId() {
						t.Errorf("member %v is not of %s", member, group.GetGroupSnapshotId())
					}
					wants(t, d.deleteSnapshot(member.GetSnapshotId()), codes.InvalidArgument)
					kind := v.capability.GetMount().GetFsType()
					copied := d.made(fromSnapshot(request("copy-of-"+kind, kind, smallest[kind]), member.GetSnapshotId()))
					target := copied.running()
					copies = append(copies, place{copied.file(target), 0})
					restored[target] = copied
				}
				if len(copies) != i+1 {
					t.Fatalf("the group has no snapshot of %s: %v", v.name, group)
				}
			}
			pointInTime(t, before, copies...)

			var members []string
			for _, member := range group.GetSnapshots() {
				members = append(members, member.GetSnapshotId())
			}
			for range 2 {
				_, err = d.DeleteVolumeGroupSnapshot(t.Context(), &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: group.GetGroupSnapshotId(), SnapshotIds: members})
				ok(t, err)
			}
			for target, v := range restored {
				ok(t, v.down(target))
			}
			for i, v := range volumes {
				ok(t, v.down(targets[i]))
			}
			d.nothingLeft()
		})
	}
}

// TestGroupSnapshotAllOrNothing: with one member that cannot be cut, no snapshot is made.
func TestGroupSnapshotAllOrNothing(t *testing.T) {
	d := start(t, drivertest.Options{})
	good, bad := d.made(request("good", "ext4", smallest["ext4"])), d.made(request("bad", "ext4", smallest["ext4"]))
	target := good.running()
	ok(t, os.Rename(bad.image(), bad.image()+".away"))
	create := &csi.CreateVolumeGroupSnapshotRequest{Name: "group", SourceVolumeIds: []string{good.id, bad.id}}
	_, err := d.CreateVolumeGroupSnapshot(t.Context(), create)
	wants(t, err, codes.DataLoss)
	listed, err := d.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{})
	ok(t, err)
	if len(listed.GetEntries()) != 0 {
		t.Errorf("snapshots are there: %v", listed)
	}
	write(t, good.file(target), 1) // it is not frozen
	ok(t, os.Rename(bad.image()+".away", bad.image()))
	response, err := d.CreateVolumeGroupSnapshot(t.Context(), create)
	ok(t, err)
	if n := len(response.GetGroupSnapshot().GetSnapshots()); n != 2 {
		t.Errorf("the group has %d snapshots", n)
	}
	_, err = d.DeleteVolumeGroupSnapshot(t.Context(), &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: response.GetGroupSnapshot().GetGroupSnapshotId()})
	ok(t, err)
	ok(t, bad.delete())
	ok(t, good.down(target))
	d.nothingLeft()
}
