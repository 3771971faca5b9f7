package e2e

import (
	"context"
	"os"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
)

// TestGrowPool walks docs/operate: a disk that is lost is replaced by an empty one, which grows while its pool is in use. (That a
// disk which can be read is replaced by its copy, TestDiskComesBack of tests/life walks.)
func TestGrowPool(t *testing.T) {
	p := start(t)
	lost := p.made(request("lost", miB, "node-a"))
	p.eventually("the pool is known by its identity", func() bool { return p.pool("node-a").Spec.UUID != "" })
	id := p.pool("node-a").Spec.UUID
	place := p.dir + "/node-a/pool"
	var image string
	p.restart("node-a", func() {
		check.OK(t, os.Rename(place, place+".old"))
		image = drivertest.MountNew(t, "xfs", place, 512*miB)
	})
	t.Cleanup(p.agents["node-a"].Close) // before the disk is unmounted

	// replace-a-disk.md, "It is lost": the empty disk is not used, until somebody says so.
	p.eventually("the pool is missed", func() bool { return p.poolReason("node-a") == "PoolMissing" })
	if entries, err := os.ReadDir(place); err != nil || len(entries) > 0 {
		t.Fatalf("made on the empty disk: %v, %v", entries, err)
	}
	o := p.pool("node-a")
	check.OK(t, p.kube.Patch(t.Context(), o, client.RawPatch(types.MergePatchType, []byte(`{"spec":{"uuid":"new"}}`))))
	p.eventually("the new disk is used", func() bool {
		o := p.pool("node-a")
		return o.Spec.UUID != "new" && o.Spec.UUID != id && meta.IsStatusConditionTrue(o.Status.Conditions, v1alpha1.Healthy)
	})
	id = p.pool("node-a").Spec.UUID
	p.eventually("the loss is reported", func() bool {
		o := &v1alpha1.Volume{}
		key := lost.GetVolumeId()[strings.LastIndex(lost.GetVolumeId(), ".")+1:]
		check.OK(t, p.kube.Get(t.Context(), client.ObjectKey{Name: key}, o))
		c := meta.FindStatusCondition(o.Status.Conditions, v1alpha1.Ready)
		return c != nil && c.Status == "False" && c.Reason == "DataLoss"
	})
	p.called(codes.OK, remove(p.controller, lost.GetVolumeId()))

	// grow-a-pool.md: what had no room gets it.
	small, large := p.pool("node-a").Status.Total, int64(700*miB)
	thin := request("large", large, "node-a")
	thin.Parameters = map[string]string{"provisioning": "thin"}
	wanted := func(ctx context.Context) error {
		_, err := p.controller.CreateVolume(ctx, thin)
		return err
	}
	if small*2 < large {
		t.Fatalf("the pool has %d bytes", small)
	}
	p.called(codes.OK, create(p.controller, "kept", small/2&^(miB-1), "node-a"))
	p.called(codes.ResourceExhausted, create(p.controller, "none", small/2+miB, "node-a"))
	check.OK(t, os.Truncate(image, 2048*miB))
	for _, loop := range drivertest.LoopsOver(image) {
		drivertest.Run(t, "losetup", "-c", "/dev/"+loop)
	}
	drivertest.Run(t, "xfs_growfs", place)
	p.called(codes.OK, wanted)
	p.eventually("the object says it", func() bool { return p.pool("node-a").Status.Total > small*3 })

	r, err := p.controller.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	if check.OK(t, err); len(r.GetEntries()) != 2 {
		t.Errorf("there are %d volumes, expected kept and large", len(r.GetEntries()))
	}
	for _, e := range r.GetEntries() {
		if node := e.GetVolume().GetAccessibleTopology()[0].GetSegments()[csimap.TopologyKey]; node != "node-a" {
			t.Errorf("%s is on %s", e.GetVolume().GetVolumeId(), node)
		}
		p.called(codes.OK, remove(p.controller, e.GetVolume().GetVolumeId()))
	}
}

// poolReason is why a pool is not healthy.
func (p *parts) poolReason(node string) string {
	p.Helper()
	if c := meta.FindStatusCondition(p.pool(node).Status.Conditions, v1alpha1.Healthy); c != nil && c.Status == "False" {
		return c.Reason
	}
	return ""
}
