package volume_test

import (
	"errors"
	"maps"
	"path/filepath"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pools"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// TestSnapshotMoves: what the new node has of a snapshot cannot be used before it has arrived. After a start of the drivers, the next call resumes the copy
// where the last one stopped. After its arrival the snapshot is the same, can be restored without its volume, and can move on.
func TestSnapshotMoves(t *testing.T) {
	restart := twoHomes(t, "a")
	a, b := restart()
	v, was := withContents(t, a)
	from, err := a.OpenMove(t.Context(), was.ID)
	check.OK(t, err)
	read := int64(0)
	fails(t, b.CopySnapshotIn(t.Context(), "snapshot", stopping(from, 6*mib, errdefs.ErrUnavailable, &read)), errdefs.ErrUnavailable, "an origin that goes away")
	a, b = restart()
	fails(t, second(b.GetSnapshot(t.Context(), was.ID)), errdefs.ErrUnavailable, "GetSnapshot of what is not all there")
	fails(t, second(b.Create(t.Context(), volume.Spec{Name: "early", Pool: "a", Source: was.ID})), errdefs.ErrUnavailable, "Create of what is not all there")
	fails(t, second(b.CreateSnapshot(t.Context(), "snapshot", v.ID)), errdefs.ErrUnavailable, "CreateSnapshot of the name of what is not all there")
	if all, err := b.ListSnapshots(t.Context(), volume.ID{}, volume.ID{}, 0); err != nil || len(all) != 0 {
		t.Errorf("listed are %v, %v", all, err)
	}
	fails(t, b.Arrive(t.Context(), was.ID), errdefs.ErrNotFound, "Arrive of what is not all there")
	from, err = a.OpenMove(t.Context(), was.ID)
	check.OK(t, err)
	check.OK(t, b.CopySnapshotIn(t.Context(), "snapshot", stopping(from, gib, nil, &read)))
	if read < 6*mib {
		t.Errorf("it is read from byte %d on", read)
	}
	read = -1
	check.OK(t, b.CopySnapshotIn(t.Context(), "snapshot", stopping(from, gib, nil, &read)))
	if here, err := b.IsCopiedIn(t.Context(), was.ID, from.Created); read != -1 || err != nil || !here {
		t.Errorf("all was there: %v, %v, and it is read from byte %d on", here, err, read)
	}
	fails(t, second(b.GetSnapshot(t.Context(), was.ID)), errdefs.ErrUnavailable, "GetSnapshot of what has not arrived")
	for range 2 {
		check.OK(t, b.Arrive(t.Context(), was.ID))
		check.OK(t, a.DepartSnapshot(t.Context(), was.ID, from.Created))
	}
	fails(t, second(a.GetSnapshot(t.Context(), was.ID)), errdefs.ErrNotFound, "GetSnapshot of what has left")
	moved, err := b.GetSnapshot(t.Context(), was.ID)
	check.OK(t, err)
	if moved.Node = was.Node; moved != was {
		t.Errorf("it was %+v, and is %+v", was, moved)
	}
	restored, err := b.Create(t.Context(), volume.Spec{Name: "restored", Pool: "a", Source: was.ID})
	check.OK(t, err)
	holds(t, b, restored)
	again, err := b.OpenMove(t.Context(), was.ID)
	if check.OK(t, err); !again.Created.Equal(from.Created) || again.Labels["source"] != v.ID.String() {
		t.Errorf("it moves on as %+v, came as %+v", again, from)
	}
	check.OK(t, a.CopySnapshotIn(t.Context(), "snapshot", again))
	check.OK(t, a.Arrive(t.Context(), was.ID))
	if back, err := a.GetSnapshot(t.Context(), was.ID); err != nil || back != was {
		t.Errorf("it was %+v, and is %+v, %v", was, back, err)
	}
}

// TestSnapshotMovesRefused: a snapshot that was cut at another time is not taken for the one that moves, and not removed as that. One that was deleted and made
// again is copied anew. Descriptions with unknown or bad values are refused.
func TestSnapshotMovesRefused(t *testing.T) {
	a, b := twoHomes(t, "a")()
	v, was := withContents(t, a)
	from, err := a.OpenMove(t.Context(), was.ID)
	check.OK(t, err)
	fails(t, a.DepartSnapshot(t.Context(), was.ID, from.Created.Add(1e6)), errdefs.ErrPrecondition, "DepartSnapshot of another one")
	check.OK(t, a.CopySnapshotIn(t.Context(), "snapshot", from)) // where it is whole
	check.OK(t, second(a.GetSnapshot(t.Context(), was.ID)))

	for name, change := range map[string]func(*volume.Origin){
		"another snapshot": func(o *volume.Origin) { o.ID.Key = volume.KeyOf("another") },
		"an unknown label": func(o *volume.Origin) { o.Labels["claim.node"] = "node-7" },
		"a volume":         func(o *volume.Origin) { o.ID.Kind = blockdev.Volume },
		"an export":        func(o *volume.Origin) { o.Labels["export"] = "x" },
	} {
		other, err := a.OpenMove(t.Context(), was.ID)
		check.OK(t, err)
		change(&other)
		fails(t, b.CopySnapshotIn(t.Context(), "snapshot", other), errdefs.ErrUnsupported, name)
	}

	check.OK(t, b.CopySnapshotIn(t.Context(), "snapshot", from))
	check.OK(t, a.DeleteSnapshot(t.Context(), was.ID))
	check.OK(t, second(a.CreateSnapshot(t.Context(), "snapshot", v.ID)))
	anew, err := a.OpenMove(t.Context(), was.ID)
	check.OK(t, err)
	check.OK(t, b.CopySnapshotIn(t.Context(), "snapshot", anew))
	if here, err := b.IsCopiedIn(t.Context(), was.ID, from.Created); here || err != nil {
		t.Errorf("what was cut before is there: %v, %v", here, err)
	}
	check.OK(t, b.Arrive(t.Context(), was.ID))
	fails(t, b.CopySnapshotIn(t.Context(), "snapshot", from), errdefs.ErrExists, "BringSnapshot of another one than is there")
}

// TestSnapshotMovesLeftovers: a copied snapshot that has not arrived is a leftover, and can be dropped as one. After its arrival it is none, and stays.
func TestSnapshotMovesLeftovers(t *testing.T) {
	urls := twoPools(t)
	var opened []blockdev.Pool
	for _, name := range []string{"a", "b"} {
		pool, err := pools.Open(t.Context(), "a", urls[name])
		check.OK(t, err)
		t.Cleanup(func() { check.OK(t, pool.Close()) })
		opened = append(opened, pool)
	}
	a, b := start(t, 0, opened[0]), start(t, 0, opened[1])
	_, was := withContents(t, a)
	from, err := a.OpenMove(t.Context(), was.ID)
	check.OK(t, err)
	check.OK(t, b.CopySnapshotIn(t.Context(), "snapshot", from))
	left, err := b.Leftovers(t.Context(), opened[1])
	if check.OK(t, err); len(left) != 1 || left[0].ID != was.ID || left[0].For != was.ID.Key || !left[0].Comes() {
		t.Fatalf("left are %+v", left)
	}
	check.OK(t, b.DropLeftover(t.Context(), left[0]))
	fails(t, second(b.GetSnapshot(t.Context(), was.ID)), errdefs.ErrNotFound, "GetSnapshot of what was dropped")
	check.OK(t, b.CopySnapshotIn(t.Context(), "snapshot", from))
	check.OK(t, b.Arrive(t.Context(), was.ID))
	check.OK(t, b.DropLeftover(t.Context(), left[0]))
	check.OK(t, second(b.GetSnapshot(t.Context(), was.ID)))
	if left, err := a.Leftovers(t.Context(), opened[0]); err != nil || len(left) != 0 {
		t.Errorf("left are %+v, %v", left, err)
	}
}

// TestGroupMoves: the members of a group move one by one. A start of the drivers keeps the members on either node. One that has not arrived is not part of the
// group yet.
func TestGroupMoves(t *testing.T) {
	restart := twoHomes(t, "a")
	a, b := restart()
	v, _ := withContents(t, a)
	other, err := a.Create(t.Context(), volume.Spec{Name: "other", Pool: "a", Provisioning: blockdev.Thin, Size: volume.Range{Required: mib}})
	check.OK(t, err)
	group, err := a.CreateGroup(t.Context(), "group", []volume.ID{v.ID, other.ID})
	check.OK(t, err)
	for i, m := range group.Snapshots {
		from, err := a.OpenMove(t.Context(), m.ID)
		check.OK(t, err)
		check.OK(t, b.CopySnapshotIn(t.Context(), m.Name, from))
		a, b = restart()
		fails(t, second(b.GetGroup(t.Context(), group.ID)), errdefs.ErrNotFound, "GetGroup of what has not arrived")
		check.OK(t, b.Arrive(t.Context(), m.ID))
		check.OK(t, a.DepartSnapshot(t.Context(), m.ID, from.Created))
		a, b = restart()
		for j, one := range group.Snapshots {
			at := a
			if j <= i {
				at = b
			}
			if now, err := at.GetSnapshot(t.Context(), one.ID); err != nil || now != one {
				t.Errorf("after %d moves: it was %+v, and is %+v, %v", i+1, one, now, err)
			}
		}
	}
	moved, err := b.GetGroup(t.Context(), group.ID)
	if check.OK(t, err); !moved.Created.Equal(group.Created) || len(moved.Snapshots) != 2 {
		t.Errorf("the group was %+v, and is %+v", group, moved)
	}
	check.OK(t, b.DeleteGroup(t.Context(), group.ID))
}

// TestGroupMovesDeletedLater: if a group of which another node has a part is not deleted because a member is being read (ErrBusy), that member is still there.
func TestGroupMovesDeletedLater(t *testing.T) {
	a, b := twoHomes(t, "a")()
	v, _ := withContents(t, a)
	other, err := a.Create(t.Context(), volume.Spec{Name: "other", Pool: "a", Provisioning: blockdev.Thin, Size: volume.Range{Required: mib}})
	check.OK(t, err)
	group, err := a.CreateGroup(t.Context(), "group", []volume.ID{v.ID, other.ID})
	check.OK(t, err)
	stays, goes := group.Snapshots[0], group.Snapshots[1]
	if stays.Source != v.ID {
		stays, goes = goes, stays
	}
	from, err := a.OpenMove(t.Context(), goes.ID)
	check.OK(t, err)
	check.OK(t, b.CopySnapshotIn(t.Context(), goes.Name, from))
	check.OK(t, b.Arrive(t.Context(), goes.ID))
	check.OK(t, a.DepartSnapshot(t.Context(), goes.ID, from.Created))
	read, err := a.Open(t.Context(), stays.ID)
	check.OK(t, err)
	fails(t, read.Read(t.Context(), 0, func(int64, []byte) error { return a.DeleteGroup(t.Context(), group.ID) }), errdefs.ErrBusy, "DeleteGroup while a member is read")
	check.OK(t, second(a.GetSnapshot(t.Context(), stays.ID)))
	check.OK(t, a.DeleteGroup(t.Context(), group.ID))
	fails(t, second(a.GetSnapshot(t.Context(), stays.ID)), errdefs.ErrNotFound, "GetSnapshot of what was deleted")
}

// TestEncryptedSnapshotMoves: an encrypted snapshot moves as it is, without a key, and its record keeps what it says of the header.
func TestEncryptedSnapshotMoves(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	var homes []*volume.Local
	var files []blockdev.Pool
	for _, name := range []string{"a", "b"} {
		files = append(files, pooltest.OpenedFiles(t, filepath.Join(dir, name)))
		homes = append(homes, start(t, 0, files[len(files)-1]))
	}
	v, err := homes[0].Create(t.Context(), volume.Spec{Name: "v", Size: volume.Range{Required: 24 * mib}})
	check.OK(t, err)
	_, err = files[0].SetLabels(t.Context(), blockdev.Ref{Kind: blockdev.Volume, Key: v.ID.Key}, func(labels map[string]string) error {
		labels["encryption"], labels["header"] = string(volume.LUKS2), string(volume.Formatted)+":0a0b" // by its labels, as the machine may have no device mapper
		return nil
	})
	check.OK(t, err)
	was, err := homes[0].CreateSnapshot(t.Context(), "s", v.ID)
	check.OK(t, err)
	from, err := homes[0].OpenMove(t.Context(), was.ID)
	check.OK(t, err)
	check.OK(t, homes[1].CopySnapshotIn(t.Context(), "s", from))
	check.OK(t, homes[1].Arrive(t.Context(), was.ID))
	check.OK(t, homes[0].DepartSnapshot(t.Context(), was.ID, from.Created))
	moved, err := homes[1].GetSnapshot(t.Context(), was.ID)
	if check.OK(t, err); moved != was || moved.Scheme != volume.LUKS2 {
		t.Errorf("it was %+v, and is %+v", was, moved)
	}
	on, err := homes[1].OpenMove(t.Context(), was.ID)
	if check.OK(t, err); !maps.Equal(on.Labels, from.Labels) || on.Header != from.Header || on.Header.State != volume.Formatted {
		t.Errorf("its record said %v, and says %v", from.Labels, on.Labels)
	}
}

// TestLVMSnapshotMoves: a snapshot moves from each kind of pool to each other kind, whatever the granularities are, and can be restored there.
func TestLVMSnapshotMoves(t *testing.T) {
	urls := kindURLs(t)
	text := drivertest.Content{Seed: "text", Offset: 5*mib + 4096, Size: 3 * mib}
	homes := map[string]*volume.Local{}
	for kind, url := range urls {
		homes[kind] = start(t, 0, open(t, "p", url))
	}
	at := "plain"
	v, err := homes[at].Create(t.Context(), volume.Spec{Name: "v", Pool: "p", Size: volume.Range{Required: 16*mib + 4096}})
	check.OK(t, err)
	device, err := homes[at].AttachRaw(t.Context(), v, nil, true)
	check.OK(t, err)
	check.OK(t, text.Write(device.Path))
	check.OK(t, errors.Join(device.Close(), homes[at].Detach(t.Context(), v.ID)))
	was, err := homes[at].CreateSnapshot(t.Context(), "s", v.ID)
	check.OK(t, err)
	drop(t, homes[at], v)
	for _, to := range []string{"linear", "plain", "thin", "linear", "xfs", "thin", "plain", "xfs", "linear", "thin", "xfs", "plain"} {
		from, err := homes[at].OpenMove(t.Context(), was.ID)
		check.OK(t, err)
		check.OK(t, homes[to].CopySnapshotIn(t.Context(), "s", from))
		check.OK(t, homes[to].Arrive(t.Context(), was.ID))
		check.OK(t, homes[at].DepartSnapshot(t.Context(), was.ID, from.Created))
		moved, err := homes[to].GetSnapshot(t.Context(), was.ID)
		check.OK(t, err)
		if moved.Size < was.Size || moved.Size >= was.Size+8*mib || !moved.Created.Truncate(time.Microsecond).Equal(was.Created.Truncate(time.Microsecond)) || moved.Source != v.ID {
			t.Errorf("from %s to %s: it is %+v", at, to, moved)
		}
		restored, err := homes[to].Create(t.Context(), volume.Spec{Name: "restored", Pool: "p", Source: was.ID, Size: volume.Range{Required: 32 * mib}})
		check.OK(t, err)
		device, err := homes[to].AttachRaw(t.Context(), restored, nil, false)
		check.OK(t, err)
		if err := text.In(device.Path); err != nil {
			t.Errorf("from %s to %s: %v", at, to, err)
		}
		check.OK(t, device.Close())
		drop(t, homes[to], restored)
		at = to
	}
	check.OK(t, homes[at].DeleteSnapshot(t.Context(), was.ID))
}

// TestSnapshotMovesOfOtherPool: a snapshot whose volume is in a pool that the volume's ID does not name moves, and is still of that volume, before and
// after the volume comes to the same node. A snapshot cannot move to a node without a pool of its name.
func TestSnapshotMovesOfOtherPool(t *testing.T) {
	a, b, _ := otherPools(t)()
	v, before := withContents(t, a)
	move(t, "source", v.ID, a, b, "b")
	after, err := b.CreateSnapshot(t.Context(), "after", v.ID)
	check.OK(t, err)
	pool, err := pools.Open(t.Context(), "b", twoPools(t)["b"])
	check.OK(t, err)
	t.Cleanup(func() { check.OK(t, pool.Close()) })
	c := start(t, 0, pool)
	from, err := a.OpenMove(t.Context(), before.ID)
	check.OK(t, err)
	fails(t, c.CopySnapshotIn(t.Context(), "snapshot", from), errdefs.ErrUnavailable, "BringSnapshot to a node without a pool of that name")
	for _, move := range []struct {
		was      volume.Snapshot
		from, to *volume.Local
	}{{before, a, b}, {after, b, c}} {
		from, err := move.from.OpenMove(t.Context(), move.was.ID)
		check.OK(t, err)
		check.OK(t, move.to.CopySnapshotIn(t.Context(), move.was.Name, from))
		check.OK(t, move.to.Arrive(t.Context(), move.was.ID))
		check.OK(t, move.from.DepartSnapshot(t.Context(), move.was.ID, from.Created))
		moved, err := move.to.GetSnapshot(t.Context(), move.was.ID)
		if check.OK(t, err); moved != move.was || moved.Source != v.ID {
			t.Errorf("it was %+v, and is %+v", move.was, moved)
		}
		restored, err := move.to.Create(t.Context(), volume.Spec{Name: "restored", Source: moved.ID, Size: volume.Range{Required: gib}})
		if check.OK(t, err); restored.Pool != moved.ID.Pool || restored.Source != moved.ID {
			t.Errorf("restored is %+v", restored)
		}
		holds(t, move.to, restored)
	}
	move(t, "source", v.ID, b, c, "b")
	if of, err := c.ListSnapshots(t.Context(), v.ID, volume.ID{}, 0); err != nil || len(of) != 1 || of[0] != after {
		t.Errorf("the volume's snapshots are %+v, %v", of, err)
	}
	if again, err := c.CreateSnapshot(t.Context(), "after", v.ID); err != nil || again != after {
		t.Errorf("cut again it is %+v, %v", again, err)
	}
}
