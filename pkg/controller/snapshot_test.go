package controller_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/controller"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

func TestCreateSnapshot(t *testing.T) {
	f := start(t, 0)
	source, other := f.create(wanted("source")), f.create(wanted("other"))
	type request = *csi.CreateSnapshotRequest
	right := func() request {
		return &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: source, Parameters: map[string]string{}}
	}
	at := func(topology *csi.Topology) func(request) {
		return func(r request) {
			r.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: []*csi.Topology{topology}}
		}
	}
	refuses := drivertest.Refuses(t, f.CreateSnapshot, right)
	refuses("no name", func(r request) { r.Name = "" }, errdefs.ErrInvalid, "the request has no name")
	refuses("a long name", func(r request) { r.Name = strings.Repeat("s", 257) }, errdefs.ErrInvalid, "257 bytes, 256 are the most")
	refuses("no source", func(r request) { r.SourceVolumeId = "" }, errdefs.ErrInvalid, "no volume ID")
	refuses("a source that is gone", func(r request) { r.SourceVolumeId = nothing }, errdefs.ErrNotFound, "00000000")
	refuses("a foreign source", func(r request) { r.SourceVolumeId = foreign }, errdefs.ErrNotFound, foreign)
	refuses("a source that is a snapshot", func(r request) { r.SourceVolumeId = nothingCut }, errdefs.ErrNotFound, "is not the ID of a")
	refuses("an unknown parameter", func(r request) { r.Parameters["type"] = "full" }, errdefs.ErrInvalid, `unknown snapshot parameter "type"; there are none`)
	refuses("another node", at(onNode("node-2")), errdefs.ErrNoSpace, "can be used on node node-1, not on [node-2]")
	refuses("a zone", at(&csi.Topology{Segments: map[string]string{"zone": "a"}}), errdefs.ErrInvalid, "does not name a node")
	refuses("a topology that says nothing", at(&csi.Topology{}), errdefs.ErrInvalid, "says nothing")

	r := right()
	r.Parameters = map[string]string{"csi.storage.k8s.io/volumesnapshot/name": "x", "deletionPolicy": "Delete"}
	at(onNode(node))(r)
	snapshot := drivertest.Twice(t, f.CreateSnapshot, r).GetSnapshot()
	want := volume.ID{Kind: blockdev.Snapshot, Pool: "fast", Key: volume.KeyOf("s")}.String()
	if snapshot.GetSnapshotId() != want || snapshot.GetSourceVolumeId() != source || snapshot.GetSizeBytes() != 16*mib || !snapshot.GetReadyToUse() ||
		snapshot.GetGroupSnapshotId() != "" || snapshot.GetAccessibleTopology()[0].GetSegments()[csimap.TopologyKey] != node {
		t.Errorf("cut %v", snapshot)
	}
	refuses("of another volume", func(r request) { r.SourceVolumeId = other }, errdefs.ErrExists, "is of volume "+source+", not "+other)
	// An existing snapshot does not need its source any more.
	done(t, f.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: source})
	if again := drivertest.Twice(t, f.CreateSnapshot, r).GetSnapshot(); again.String() != snapshot.String() {
		t.Errorf("without its source it is %v, not %v", again, snapshot)
	}
	refuses("a new one of it", func(r request) { r.Name = "new" }, errdefs.ErrNotFound, "00") // a part of the key of the source
}

func TestDeleteSnapshot(t *testing.T) {
	f := start(t, 0)
	source := f.create(wanted("source"))
	id := f.cut("s", source)
	for given, want := range map[string]error{id: nil, "": errdefs.ErrInvalid, nothingCut: errdefs.ErrNotFound, source: errdefs.ErrNotFound, foreign: errdefs.ErrNotFound} {
		_, err := f.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: given})
		pooltest.Fails(t, err, want, "get "+given)
	}
	_, err := f.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{})
	pooltest.Fails(t, err, errdefs.ErrInvalid, "delete a snapshot without an ID")
	for _, gone := range []string{id, nothingCut, source, foreign} {
		drivertest.Twice(t, f.DeleteSnapshot, &csi.DeleteSnapshotRequest{SnapshotId: gone})
	}
	_, err = f.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: id})
	pooltest.Fails(t, err, errdefs.ErrNotFound, "a deleted snapshot")
	done(t, f.ControllerGetVolume, &csi.ControllerGetVolumeRequest{VolumeId: source}) // the volume whose ID was given as that of a snapshot
}

// TestListSnapshots: lists of all snapshots, of those of one volume, and of one; nothing is listed for IDs without an object.
func TestListSnapshots(t *testing.T) {
	f := start(t, 0)
	a, b := f.create(wanted("a")), f.create(wanted("b"))
	a1, a2, b1 := f.cut("a1", a), f.cut("a2", a), f.cut("b1", b)
	for what, c := range map[string]struct {
		snapshot, source string
		want             []string
	}{
		"all":                          {"", "", []string{a1, a2, b1}},
		"of a":                         {"", a, []string{a1, a2}},
		"of a volume that is gone":     {"", nothing, nil},
		"of a foreign volume":          {"", foreign, nil},
		"one":                          {a2, "", []string{a2}},
		"one of its source":            {a2, a, []string{a2}},
		"one of another source":        {a2, b, nil},
		"one that is gone":             {nothingCut, "", nil},
		"a foreign one":                {foreign, "", nil},
		"one that is a volume":         {a, "", nil},
		"of a source that is snapshot": {"", a1, nil},
	} {
		var ids []string
		for _, e := range drivertest.Twice(t, f.ListSnapshots, &csi.ListSnapshotsRequest{SnapshotId: c.snapshot, SourceVolumeId: c.source}).GetEntries() {
			ids = append(ids, e.GetSnapshot().GetSnapshotId())
		}
		slices.Sort(ids)
		slices.Sort(c.want)
		if !slices.Equal(ids, c.want) {
			t.Errorf("%s: %v, want %v", what, ids, c.want)
		}
	}
}

func TestGroupSnapshot(t *testing.T) {
	f := start(t, 0)
	a, b, c := f.create(wanted("a")), f.create(wanted("b")), f.create(wanted("c"))
	single := f.cut("single", a)
	type request = *csi.CreateVolumeGroupSnapshotRequest
	right := func() request {
		return &csi.CreateVolumeGroupSnapshotRequest{Name: "g", SourceVolumeIds: []string{a, b}, Parameters: map[string]string{}}
	}
	refuses := drivertest.Refuses(t, f.CreateVolumeGroupSnapshot, right)
	refuses("no name", func(r request) { r.Name = "" }, errdefs.ErrInvalid, "the request has no name")
	refuses("no sources", func(r request) { r.SourceVolumeIds = nil }, errdefs.ErrInvalid, "no source volume IDs")
	refuses("a source without an ID", func(r request) { r.SourceVolumeIds[1] = "" }, errdefs.ErrInvalid, "no volume ID")
	refuses("a source twice", func(r request) { r.SourceVolumeIds[1] = a }, errdefs.ErrInvalid, "name each source volume once")
	refuses("a source that is gone", func(r request) { r.SourceVolumeIds[1] = nothing }, errdefs.ErrNotFound, "00000000")
	refuses("a source that is a snapshot", func(r request) { r.SourceVolumeIds[1] = single }, errdefs.ErrNotFound, "is not the ID of a")
	refuses("an unknown parameter", func(r request) { r.Parameters["x"] = "y" }, errdefs.ErrInvalid, `unknown snapshot parameter "x"`)
	if left := done(t, f.ListSnapshots, &csi.ListSnapshotsRequest{}).GetEntries(); len(left) != 1 {
		t.Errorf("of refused groups there is %v", left)
	}

	group := drivertest.Twice(t, f.CreateVolumeGroupSnapshot, right()).GetGroupSnapshot()
	var members, sources []string
	for _, s := range group.GetSnapshots() {
		members, sources = append(members, s.GetSnapshotId()), append(sources, s.GetSourceVolumeId())
		if s.GetGroupSnapshotId() != group.GetGroupSnapshotId() || !s.GetReadyToUse() {
			t.Errorf("a member is %v", s)
		}
	}
	want := []string{a, b}
	if slices.Sort(want); !slices.Equal(sources, want) || !group.GetReadyToUse() {
		t.Errorf("cut %v", group)
	}
	turned := right()
	slices.Reverse(turned.SourceVolumeIds)
	if again := done(t, f.CreateVolumeGroupSnapshot, turned).GetGroupSnapshot(); again.String() != group.String() {
		t.Errorf("of the same volumes in another order: %v, not %v", again, group)
	}
	refuses("of other volumes", func(r request) { r.SourceVolumeIds[1] = c }, errdefs.ErrExists, "is of other volumes")
	refuses("of fewer volumes", func(r request) { r.SourceVolumeIds = []string{a} }, errdefs.ErrExists, "is of other volumes")

	f.findAndDelete(group.GetGroupSnapshotId(), members, single)
}

// findAndDelete finds a group by the IDs that a CO may give, and deletes it.
func (f fixture) findAndDelete(id string, members []string, other string) {
	f.t.Helper()
	type get = *csi.GetVolumeGroupSnapshotRequest
	refuses := drivertest.Refuses(f.t, f.GetVolumeGroupSnapshot, func() get { return &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: id} })
	refuses("get: no ID", func(r get) { r.GroupSnapshotId = "" }, errdefs.ErrInvalid, "no group snapshot ID")
	refuses("get: gone", func(r get) { r.GroupSnapshotId = "group.00000000000000000000000000000000" }, errdefs.ErrNotFound, "00000000")
	refuses("get: foreign", func(r get) { r.GroupSnapshotId = foreign }, errdefs.ErrNotFound, foreign)
	refuses("get: a member too few", func(r get) { r.SnapshotIds = members[1:] }, errdefs.ErrInvalid, "has the snapshots")
	refuses("get: another member", func(r get) { r.SnapshotIds = []string{members[0], other} }, errdefs.ErrInvalid, "has the snapshots")
	for _, given := range [][]string{nil, members, {members[1], members[0]}} {
		if g := drivertest.Twice(f.t, f.GetVolumeGroupSnapshot, &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: id, SnapshotIds: given}).GetGroupSnapshot(); len(g.GetSnapshots()) != len(members) {
			f.t.Errorf("with the members %v the group is %v", given, g)
		}
	}
	_, err := f.DeleteSnapshot(f.t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: members[0]})
	if pooltest.Fails(f.t, err, errdefs.ErrInvalid, "delete a member"); !strings.Contains(err.Error(), "is part of "+id+" and is deleted with it") {
		f.t.Errorf("delete a member: %v", err)
	}
	type remove = *csi.DeleteVolumeGroupSnapshotRequest
	refusesToDelete := drivertest.Refuses(f.t, f.DeleteVolumeGroupSnapshot, func() remove { return &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: id} })
	refusesToDelete("delete: no ID", func(r remove) { r.GroupSnapshotId = "" }, errdefs.ErrInvalid, "no group snapshot ID")
	refusesToDelete("delete: another member", func(r remove) { r.SnapshotIds = []string{other} }, errdefs.ErrInvalid, "has the snapshots")
	away := strings.Replace(members[0], "fast", "gone", 1) // an ID in a pool that is not there
	refusesToDelete("delete: another member, in a pool that is not there", func(r remove) { r.SnapshotIds = []string{away} }, errdefs.ErrInvalid, "has the snapshots")
	for _, incomplete := range []string{"group.00000000000000000000000000000000", foreign} { // its other members may be in that pool
		refusesToDelete("delete: a pool that is not there", func(r remove) { r.GroupSnapshotId, r.SnapshotIds = incomplete, []string{away} },
			errdefs.ErrUnavailable, "delete "+incomplete+": ")
	}
	for _, gone := range []string{id, "group.00000000000000000000000000000000", foreign} {
		drivertest.Twice(f.t, f.DeleteVolumeGroupSnapshot, &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: gone})
	}
	_, err = f.GetVolumeGroupSnapshot(f.t.Context(), &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: id})
	pooltest.Fails(f.t, err, errdefs.ErrNotFound, "a deleted group")
	if left := done(f.t, f.ListSnapshots, &csi.ListSnapshotsRequest{}).GetEntries(); len(left) != 1 || left[0].GetSnapshot().GetSnapshotId() != other {
		f.t.Errorf("beside a deleted group there is %v", left)
	}
}

// written is a store with snapshots of which so many ranges of 4 KiB were written, 8 KiB apart.
type written struct {
	volume.Store
	ranges int64
}

func (w written) Allocated(_ context.Context, _ volume.ID, from int64, yield func(blockdev.Extent) error) error {
	for i := range w.ranges {
		if e := (blockdev.Extent{Offset: i * 8192, Length: 4096}); e.Offset >= from {
			if err := yield(e); err != nil {
				return err
			}
		}
	}
	return nil
}

func (w written) Changed(ctx context.Context, _, target volume.ID, from int64, yield func(blockdev.Extent) error) error {
	return w.Allocated(ctx, target, from, yield)
}

func (written) GetSnapshot(_ context.Context, id volume.ID) (volume.Snapshot, error) {
	return volume.Snapshot{ID: id, Size: 16 * mib}, nil
}

// TestMetadataBatches: a message has as many ranges as the caller asks for, and 256 at most. If there are no ranges, there is one message, which tells the
// size.
func TestMetadataBatches(t *testing.T) {
	for _, c := range []struct {
		ranges, offset int64
		most           int32
		want           []int // ranges in each message
	}{
		{0, 0, 0, []int{0}},
		{5, 0, 0, []int{5}},
		{5, 0, 2, []int{2, 2, 1}},
		{4, 0, 2, []int{2, 2}},
		{5, 8192, 2, []int{2, 2}},
		{5, 16 * mib, 0, []int{0}},
		{600, 0, 0, []int{256, 256, 88}},
		{600, 0, 1000, []int{256, 256, 88}},
	} {
		s := controller.New(written{ranges: c.ranges})
		all := &stream[csi.GetMetadataAllocatedResponse]{ctx: t.Context()}
		check.OK(t, s.GetMetadataAllocated(&csi.GetMetadataAllocatedRequest{SnapshotId: nothingCut, StartingOffset: c.offset, MaxResults: c.most}, all))
		changed := &stream[csi.GetMetadataDeltaResponse]{ctx: t.Context()}
		check.OK(t, s.GetMetadataDelta(&csi.GetMetadataDeltaRequest{BaseSnapshotId: nothingCut, TargetSnapshotId: nothingCut, StartingOffset: c.offset, MaxResults: c.most}, changed))
		var allocated, delta []int
		next := c.offset
		for i, m := range all.sent {
			allocated, delta = append(allocated, len(m.GetBlockMetadata())), append(delta, len(changed.sent[i].GetBlockMetadata()))
			if m.GetVolumeCapacityBytes() != 16*mib || m.GetBlockMetadataType() != csi.BlockMetadataType_VARIABLE_LENGTH {
				t.Errorf("%+v: a message of %d bytes, %v", c, m.GetVolumeCapacityBytes(), m.GetBlockMetadataType())
			}
			for _, one := range m.GetBlockMetadata() {
				if one.GetByteOffset() != next || one.GetSizeBytes() != 4096 {
					t.Errorf("%+v: range %v, want the one at %d", c, one, next)
				}
				next += 8192
			}
		}
		if !slices.Equal(allocated, c.want) || !slices.Equal(delta, c.want) || len(changed.sent) != len(c.want) {
			t.Errorf("%+v: messages of %v and %v ranges", c, allocated, delta)
		}
	}
}

func TestMetadataRefuses(t *testing.T) {
	f := start(t, 0)
	source := f.create(wanted("source"))
	id := f.cut("s", source)
	type allocated = *csi.GetMetadataAllocatedRequest
	refuses := drivertest.Refuses(t, func(ctx context.Context, r allocated) (any, error) {
		return nil, f.GetMetadataAllocated(r, &stream[csi.GetMetadataAllocatedResponse]{ctx: ctx})
	}, func() allocated { return &csi.GetMetadataAllocatedRequest{SnapshotId: id} })
	refuses("no snapshot", func(r allocated) { r.SnapshotId = "" }, errdefs.ErrInvalid, "no snapshot ID")
	refuses("a snapshot that is gone", func(r allocated) { r.SnapshotId = nothingCut }, errdefs.ErrNotFound, "00000000")
	refuses("a volume", func(r allocated) { r.SnapshotId = source }, errdefs.ErrNotFound, "is not the ID of a")
	refuses("a negative number", func(r allocated) { r.MaxResults = -1 }, errdefs.ErrInvalid, "max_results is -1")
	refuses("before its begin", func(r allocated) { r.StartingOffset = -1 }, errdefs.ErrOutOfRange, "starting_offset -1 is not within the 16777216 bytes")
	refuses("behind its end", func(r allocated) { r.StartingOffset = 16*mib + 1 }, errdefs.ErrOutOfRange, "starting_offset 16777217")

	type delta = *csi.GetMetadataDeltaRequest
	refusesDelta := drivertest.Refuses(t, func(ctx context.Context, r delta) (any, error) {
		return nil, f.GetMetadataDelta(r, &stream[csi.GetMetadataDeltaResponse]{ctx: ctx})
	}, func() delta { return &csi.GetMetadataDeltaRequest{BaseSnapshotId: id, TargetSnapshotId: id} })
	refusesDelta("no base", func(r delta) { r.BaseSnapshotId = "" }, errdefs.ErrInvalid, "no snapshot ID")
	refusesDelta("no target", func(r delta) { r.TargetSnapshotId = "" }, errdefs.ErrInvalid, "no snapshot ID")
	refusesDelta("a base that is gone", func(r delta) { r.BaseSnapshotId = nothingCut }, errdefs.ErrNotFound, "00000000")
	refusesDelta("a target that is gone", func(r delta) { r.TargetSnapshotId = nothingCut }, errdefs.ErrNotFound, "00000000")
	refusesDelta("behind its end", func(r delta) { r.StartingOffset = 16*mib + 1 }, errdefs.ErrOutOfRange, "starting_offset 16777217")
}
