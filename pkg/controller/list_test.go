package controller_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/controller"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// many is a store that lists very many volumes and snapshots, all of them unwell.
type many struct {
	volume.Store
	volumes   []volume.Volume
	snapshots []volume.Snapshot
}

func newMany(n int) *many {
	m := &many{}
	node := "ip-10-0-123-123.eu-central-1.compute.internal"
	for i := range n {
		v := volume.Volume{ID: volume.ID{Kind: blockdev.Volume, Pool: "default", Key: fmt.Sprintf("%032x", i)}, Size: 10 << 30, Node: node}
		v.Claim.Node = node
		m.volumes = append(m.volumes, v)
		m.snapshots = append(m.snapshots, volume.Snapshot{ID: volume.ID{Kind: blockdev.Snapshot, Pool: "default", Key: v.ID.Key}, Source: v.ID, Size: v.Size, Node: node})
	}
	return m
}

// from is what is listed after an ID, whose key is its place.
func from[T any](all []T, after volume.ID, limit int) []T {
	var i int
	if _, err := fmt.Sscanf(after.Key, "%x", &i); err == nil {
		all = all[i+1:]
	}
	if limit > 0 && len(all) > limit {
		all = all[:limit]
	}
	return all
}

func (m *many) List(_ context.Context, after volume.ID, limit int) ([]volume.Volume, error) {
	return from(m.volumes, after, limit), nil
}

func (m *many) ListSnapshots(_ context.Context, _, after volume.ID, limit int) ([]volume.Snapshot, error) {
	return from(m.snapshots, after, limit), nil
}

func (m *many) Health(_ context.Context, id volume.ID) ([]blockdev.Problem, error) {
	if id.Key[31]%2 == 0 {
		return nil, nil
	}
	return []blockdev.Problem{{Severity: blockdev.Degraded, Reason: "Test", Message: strings.Repeat("m", 1000)}}, nil
}

// TestListsFit: a list of any length comes in answers that gRPC lets through as it is set up by
// default, also if the caller names no number; each thing is listed once.
func TestListsFit(t *testing.T) {
	const n = 25000
	client := csi.NewControllerClient(connect(t, controller.New(newMany(n))))
	for what, list := range map[string]struct {
		want int
		page func(most int32, token string) (ids []string, next string, err error)
	}{
		"volumes": {n, func(most int32, token string) (ids []string, next string, err error) {
			r, err := client.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: most, StartingToken: token})
			for _, e := range r.GetEntries() {
				ids = append(ids, e.GetVolume().GetVolumeId())
			}
			return ids, r.GetNextToken(), err
		}},
		"snapshots": {n, func(most int32, token string) (ids []string, next string, err error) {
			r, err := client.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{MaxEntries: most, StartingToken: token})
			for _, e := range r.GetEntries() {
				ids = append(ids, e.GetSnapshot().GetSnapshotId())
			}
			return ids, r.GetNextToken(), err
		}},
		"health": {n / 2, func(most int32, token string) (ids []string, next string, err error) {
			r, err := client.ControllerListVolumeHealth(t.Context(), &csi.ControllerListVolumeHealthRequest{MaxEntries: most, StartingToken: token})
			for _, e := range r.GetEntries() {
				ids = append(ids, e.GetVolumeId())
			}
			return ids, r.GetNextToken(), err
		}},
	} {
		for _, most := range []int32{0, n - 1, 2 * n} {
			var ids []string
			token := ""
			for pages := 1; ; pages++ {
				page, next, err := list.page(most, token)
				if err != nil {
					t.Fatalf("%s, %d at most, page %d: %v", what, most, pages, err)
				}
				if ids = append(ids, page...); next == "" {
					break
				}
				token = next
			}
			if len(ids) != list.want || len(slices.Compact(ids)) != list.want {
				t.Errorf("%s, %d at most: %d listed, want %d", what, most, len(ids), list.want)
			}
		}
	}
}
