package volume_test

import (
	"context"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// claimed is whether a node knows that it has the claim of each volume.
type claimed bool

func (c claimed) Has(volume.ID) bool                           { return bool(c) }
func (c claimed) Find(context.Context, volume.ID) (bool, error) { return bool(c), nil }

// TestExportedLegIsNotUsed: a leg that its node gives to another one is not in use here, though it has a device that is kept: whoever is to use its volume here now gets it by its mirror, or not at all, and never the leg itself.
func TestExportedLegIsNotUsed(t *testing.T) {
	p := newPair(t)
	v, err := p.home.Create(t.Context(), volume.Spec{Name: "v", Size: volume.Range{Required: 32 << 20}, Access: volume.AccessAny, ReplicaOf: volume.KeyOf("v")})
	check.OK(t, err)
	check.OK(t, pooltest.Second(p.home.Export(t.Context(), v.ID, volume.Grant{Generation: 1, Node: "user"})))
	mounts, err := mount.LoadTable()
	check.OK(t, err)
	mirrors, err := volume.NewLocal(t.Context(), "home", []blockdev.Pool{memory.NewDisk(1 << 30).Open(p.pool.Name(), nil)}, mounts, 0) // which has none of it
	check.OK(t, err)
	for is, want := range map[claimed]error{true: errdefs.ErrNotFound, false: errdefs.ErrPrecondition} {
		e := volume.NewEverywhere(p.home, p.user, claimed(false))
		e.Replicate(mirrors, is)
		_, err := e.Get(t.Context(), v.ID)
		pooltest.Fails(t, err, want, "a leg that is exported, used by itself")
		if is {
			pooltest.Fails(t, pooltest.Second(e.AttachRaw(t.Context(), v, nil, true)), want, "a leg that is exported, attached by itself")
		}
	}
	if to, is, err := p.home.ExportOf(t.Context(), v.ID); !is || to.Node != "user" || err != nil {
		t.Errorf("it is exported to %v: %v, %v", to, is, err)
	}
	check.OK(t, p.home.Unexport(t.Context(), v.ID, 1))
	check.OK(t, p.home.Delete(t.Context(), v.ID))
}
