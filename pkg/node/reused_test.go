package node_test

import (
	"context"
	"errors"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/node"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

var errAttached = errors.New("it came as far as being attached")

// going is a store with a volume whose device goes away after Attached was called once.
type going struct {
	node.Volumes
	volume volume.Volume
	device blockdev.Device
	asked  int
}

func (g *going) Get(context.Context, volume.ID) (volume.Volume, error) { return g.volume, nil }

func (g *going) Attached(context.Context, volume.ID) ([]blockdev.Device, error) {
	if g.asked++; g.asked > 1 {
		return nil, nil
	}
	return []blockdev.Device{g.device}, nil
}

func (g *going) Attach(context.Context, volume.Volume, volume.Key) (blockdev.Device, error) {
	return blockdev.Device{}, errAttached
}

func (g *going) Detach(context.Context, volume.ID) error { return nil }

// TestNumberGoesToAnother: while a volume is staged or unstaged, its device goes away, and the device's number goes to another volume, which is mounted before
// the call looks for mounts. That mount is not taken for one of this volume.
func TestNumberGoesToAnother(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	staging, another := dir+"/staging", dir+"/another"
	check.OK(t, unix.Mkdir(staging, 0o700))
	check.OK(t, unix.Mkdir(another, 0o700))
	check.OK(t, unix.Mount("none", another, "tmpfs", 0, "size=1m"))
	defer func() { drivertest.Unmount(t, another) }()
	info, err := mount.At(another)
	check.OK(t, err)
	mounts, err := mount.LoadTable()
	check.OK(t, err)
	mounts.Add(info.Device, another, true)
	id := volume.ID{Kind: blockdev.Volume, Pool: "p", Key: volume.KeyOf("v")}
	server := func() *node.Server {
		return node.New(t.Context(), &going{volume: volume.Volume{ID: id}, device: blockdev.Device{Number: info.Device}}, mounts, node.Options{})
	}
	_, err = server().NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: id.String(), StagingTargetPath: staging})
	check.OK(t, err)
	_, err = server().NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: id.String(), StagingTargetPath: staging,
		VolumeCapability: co.Capability("ext4", co.Writer)})
	if !errors.Is(err, errAttached) {
		t.Errorf("stage: %v", err)
	}
}
