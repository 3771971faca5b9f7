package node_test

import (
	"context"
	"os"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvmet"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/node"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// claimed is a store where each volume has the same claim, if it is known.
type claimed struct {
	*volume.Local
	claim volume.Claim
	known bool
}

func (c *claimed) Claimed(context.Context, volume.Volume, bool) (volume.Claim, bool) {
	return c.claim, c.known
}

// exporter exports nothing, and counts the exports that are ended.
type exporter struct{ ended int }

func (*exporter) Authenticates() bool                        { return true }
func (*exporter) Add(context.Context, ...nvmet.Export) error { return nil }
func (*exporter) Withdraw(context.Context, string) error     { return nil }
func (*exporter) Resized(context.Context, string) error      { return nil }
func (e *exporter) Remove(_ context.Context, _ string) error { e.ended++; return nil }
func (*exporter) Exports(context.Context) ([]nvmet.Export, error) {
	return nil, nil
}
func (e *exporter) open() (volume.Exporter, error) { return e, nil }

// TestStageExported: a volume that is exported to another node is staged on its home only for a claim of a later generation than the export's. Then the export
// is ended; otherwise it stays.
func TestStageExported(t *testing.T) {
	mounts, err := mount.LoadTable()
	check.OK(t, err)
	local, err := volume.NewLocal(t.Context(), nodeName, []blockdev.Pool{memory.NewDisk(8<<30).Open("fast", nil)}, mounts, 0)
	check.OK(t, err)
	e, store := &exporter{}, &claimed{Local: local}
	local.ServeExports(t.Context(), volume.Exporting{Boot: "1", Open: e.open, Key: make([]byte, 32), Locks: &keylock.Table{}})
	f := fixture{node.New(t.Context(), store, mounts, node.Options{Claims: true}), local, drivertest.Dir(t), t}
	id, staging := f.create("v", "ext4"), f.mkdir("staging")
	parsed, err := volume.ParseID(id)
	check.OK(t, err)
	_, err = local.Export(t.Context(), parsed, volume.Grant{Generation: 3, Node: "b"})
	check.OK(t, err)
	request := func() *csi.NodeStageVolumeRequest {
		return &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: capability("ext4")}
	}
	refuses := drivertest.Refuses(t, f.NodeStageVolume, request)
	refuses("no claim is known", func(*csi.NodeStageVolumeRequest) {}, errdefs.ErrUnavailable, "exported to node b (generation 3)")
	for generation := range int64(4) {
		store.claim, store.known = volume.Claim{Node: nodeName, Generation: generation}, true
		refuses("a claim of before", func(*csi.NodeStageVolumeRequest) {}, errdefs.ErrUnavailable, "exported to node b (generation 3)")
	}
	store.claim = volume.Claim{Node: "b", Generation: 3}
	refuses("a claim for another node", func(*csi.NodeStageVolumeRequest) {}, errdefs.ErrPrecondition, "not claimed for node node-1")
	if e.ended > 0 {
		t.Error("the export has ended")
	}
	store.claim = volume.Claim{Node: nodeName, Generation: 4}
	_, err = f.NodeStageVolume(t.Context(), request())
	check.OK(t, err)
	if _, is, err := local.ExportOf(t.Context(), parsed); is || err != nil || e.ended != 1 {
		t.Errorf("exported: %v, %v; ended %d times", is, err, e.ended)
	}
	_, err = f.NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
	check.OK(t, err)
	check.OK(t, os.Remove(staging))
	check.OK(t, local.Delete(t.Context(), parsed))
}
