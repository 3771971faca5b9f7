package life

import (
	"fmt"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

// list is the calls that go page by page over things that come and go.
type list struct {
	page   func(most int32, token string) (ids []string, next string, err error)
	make   func(name string) (id string)
	remove func(id string)
}

func lists(d *driver) map[string]list {
	source := d.made(co.Request("source", block, 4096))
	return map[string]list{
		"ListVolumes": {
			page: func(most int32, token string) ([]string, string, error) {
				response, err := d.ListVolumes(d.t.Context(), &csi.ListVolumesRequest{MaxEntries: most, StartingToken: token})
				var ids []string
				for _, one := range response.GetEntries() {
					if one.GetVolume().GetVolumeId() != source.ID {
						ids = append(ids, one.GetVolume().GetVolumeId())
					}
				}
				return ids, response.GetNextToken(), err
			},
			make:   func(name string) string { return d.made(co.Request(name, block, 4096)).ID },
			remove: func(id string) { check.OK(d.t, d.volume(id, "", nil).delete()) },
		},
		"ListSnapshots": {
			page: func(most int32, token string) ([]string, string, error) {
				response, err := d.ListSnapshots(d.t.Context(), &csi.ListSnapshotsRequest{MaxEntries: most, StartingToken: token})
				var ids []string
				for _, one := range response.GetEntries() {
					ids = append(ids, one.GetSnapshot().GetSnapshotId())
				}
				return ids, response.GetNextToken(), err
			},
			make: func(name string) string {
				s, err := source.snapshot(name)
				check.OK(d.t, err)
				return s.GetSnapshotId()
			},
			remove: func(id string) { check.OK(d.t, d.deleteSnapshot(id)) },
		},
	}
}

// TestLists goes through the pages while things come and go: what was there all the
// time is listed, and nothing is listed twice.
func TestLists(t *testing.T) {
	d := start(t, drivertest.Options{})
	for name, l := range lists(d) {
		t.Run(name, func(t *testing.T) {
			stays := map[string]bool{}
			var goes []string
			for i := range 12 {
				id := l.make(fmt.Sprintf("%s-%d", name, i))
				if i%3 == 0 {
					goes = append(goes, id)
				} else {
					stays[id] = true
				}
			}
			for _, most := range []int32{0, 1, 2, 5, 12, 13, 1<<31 - 1} {
				seen := map[string]int{}
				for token, pages := "", 0; ; pages++ {
					ids, next, err := l.page(most, token)
					check.OK(t, err)
					if most > 0 && len(ids) > int(most) {
						t.Errorf("a page of %d has %d entries", most, len(ids))
					}
					for _, id := range ids {
						seen[id]++
					}
					if most == 2 && pages < len(goes) {
						l.remove(goes[pages])
						goes[pages] = l.make(fmt.Sprintf("%s-late-%d", name, pages))
					}
					if token = next; token == "" || pages > 100 {
						break
					}
				}
				for id := range stays {
					if seen[id] != 1 {
						t.Errorf("in pages of %d, %s is listed %d times", most, id, seen[id])
					}
				}
				for id, n := range seen {
					if n > 1 {
						t.Errorf("in pages of %d, %s is listed %d times", most, id, n)
					}
				}
			}
			for _, token := range []string{"x", "7", "vol.default.x", "group." + strings.Repeat("0", 32), strings.Repeat("x", 4096)} {
				_, _, err := l.page(1, token)
				check.Code(t, err, codes.Aborted)
			}
			_, _, err := l.page(-1, "")
			check.Code(t, err, codes.InvalidArgument)
			for id := range stays {
				l.remove(id)
			}
			for _, id := range goes {
				l.remove(id)
			}
		})
	}
	check.OK(t, d.volume(drivertest.VolumeID("source"), "", nil).delete())
	d.nothingLeft()
}

// TestListSnapshotsOf one volume, or of one ID.
func TestListSnapshotsOf(t *testing.T) {
	d := start(t, drivertest.Options{})
	a, b := d.made(co.Request("a", block, 4096)), d.made(co.Request("b", block, 4096))
	ids := map[*vol][]string{}
	for _, v := range []*vol{a, b} {
		for i := range 3 {
			s, err := v.snapshot(fmt.Sprintf("%s-%d", v.Name, i))
			check.OK(t, err)
			ids[v] = append(ids[v], s.GetSnapshotId())
		}
	}
	zeros := strings.Repeat("0", 32)
	for name, c := range map[string]struct {
		request *csi.ListSnapshotsRequest
		want    int
	}{
		"all":                     {&csi.ListSnapshotsRequest{}, 6},
		"of a":                    {&csi.ListSnapshotsRequest{SourceVolumeId: a.ID}, 3},
		"one":                     {&csi.ListSnapshotsRequest{SnapshotId: ids[b][1]}, 1},
		"one of a":                {&csi.ListSnapshotsRequest{SnapshotId: ids[a][1], SourceVolumeId: a.ID}, 1},
		"one of b, not of a":      {&csi.ListSnapshotsRequest{SnapshotId: ids[b][1], SourceVolumeId: a.ID}, 0},
		"one that there is not":   {&csi.ListSnapshotsRequest{SnapshotId: "snap.default." + zeros}, 0},
		"of none that there is":   {&csi.ListSnapshotsRequest{SourceVolumeId: "vol.default." + zeros}, 0},
		"of no volume of ours":    {&csi.ListSnapshotsRequest{SourceVolumeId: "../x"}, 0},
		"one that is no snapshot": {&csi.ListSnapshotsRequest{SnapshotId: a.ID}, 0},
	} {
		response, err := d.ListSnapshots(t.Context(), c.request)
		if err != nil || len(response.GetEntries()) != c.want {
			t.Errorf("%s: %d listed, %v", name, len(response.GetEntries()), err)
		}
	}
	_, err := d.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{SnapshotId: "snap.other." + zeros})
	check.Code(t, err, codes.Unavailable, "other") // a pool that the driver was not started with may have it
	// In pages of 2, a's are all of a's.
	var listed []string
	for token := ""; ; {
		response, err := d.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{SourceVolumeId: a.ID, MaxEntries: 2, StartingToken: token})
		check.OK(t, err)
		for _, one := range response.GetEntries() {
			listed = append(listed, one.GetSnapshot().GetSnapshotId())
		}
		if token = response.GetNextToken(); token == "" {
			break
		}
	}
	if len(listed) != 3 {
		t.Errorf("of a, in pages: %v", listed)
	}
	for v, all := range ids {
		for _, id := range all {
			check.OK(t, d.deleteSnapshot(id))
		}
		check.OK(t, v.delete())
	}
	d.nothingLeft()
}

// TestListVolumesStatus: which nodes have claimed a volume.
func TestListVolumesStatus(t *testing.T) {
	d := start(t, drivertest.Options{})
	v := d.made(co.Request("volume", block, 4096))
	nodes := func() []string {
		list, err := d.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
		check.OK(t, err)
		one, err := d.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: v.ID})
		check.OK(t, err)
		listed, got := list.GetEntries()[0].GetStatus().GetPublishedNodeIds(), one.GetStatus().GetPublishedNodeIds()
		expect(t, listed, got...)
		return got
	}
	expect(t, nodes())
	check.OK(t, v.claim())
	expect(t, nodes(), drivertest.Node)
	d = d.restart() // the claim is in the record
	v.driver, v.Client = d, d.Client
	expect(t, nodes(), drivertest.Node)
	check.OK(t, v.release())
	expect(t, nodes())
	check.OK(t, v.delete())
}
