package node_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/node"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// one is a store with a single volume, which has one device.
type one struct {
	node.Volumes
	volume volume.Volume
	device blockdev.Device
}

func (o one) Get(context.Context, volume.ID) (volume.Volume, error) { return o.volume, nil }
func (o one) Attached(context.Context, volume.ID) ([]blockdev.Device, error) {
	time.Sleep(time.Duration(rand.N(300)) * time.Microsecond) // mounts come and go meanwhile
	return []blockdev.Device{o.device}, nil
}

// TestStatsBesideMounts: while a volume is mounted and unmounted at a path again and again, its statistics there are those of the volume, or ErrNotFound.
func TestStatsBesideMounts(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	source, target := dir+"/source", dir+"/target"
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(unix.Mkdir(source, 0o700))
	must(unix.Mount("none", source, "tmpfs", 0, "size=1m"))
	defer func() { must(unix.Unmount(source, 0)) }()
	info, err := mount.At(source)
	must(err)
	id := volume.ID{Kind: blockdev.Volume, Pool: "p", Key: volume.KeyOf("v")}
	mounts, err := mount.LoadTable()
	must(err)
	s := node.New(t.Context(), one{volume: volume.Volume{ID: id}, device: blockdev.Device{Number: info.Device, Size: 1 << 20}}, mounts, node.Options{})

	ctx, stop := context.WithTimeout(t.Context(), 3*time.Second)
	defer stop()
	var measuring sync.WaitGroup
	for range 16 {
		measuring.Go(func() {
			for ctx.Err() == nil {
				r, err := s.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: id.String(), VolumePath: target})
				if err != nil && !errors.Is(err, errdefs.ErrNotFound) {
					t.Error(err)
					return
				}
				if err == nil && r.GetUsage()[0].GetTotal() != 1<<20 {
					t.Errorf("measured %v", r)
					return
				}
			}
		})
	}
	for ctx.Err() == nil {
		must(unix.Mkdir(target, 0o700))
		must(mount.Bind(source, target, false))
		time.Sleep(time.Duration(rand.N(100)) * time.Microsecond)
		for unix.Unmount(target, 0) != nil {
			runtime.Gosched() // a call that looks at the mount keeps it busy for a moment
		}
		must(unix.Rmdir(target))
	}
	measuring.Wait()
}

// larger is a store with a raw volume that takes more bytes in its pool than its size: those of its encryption too.
type larger struct{ one }

func (l larger) Used(context.Context, volume.ID) (int64, bool, error) {
	return l.volume.Size + l.volume.Encryption.Scheme.Overhead(), true, nil
}

// TestStatsOfEncrypted: an encrypted raw volume that is full, and so takes more than its size with its header, is reported as used up to its size, with nothing
// available.
func TestStatsOfEncrypted(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	image, target := dir+"/image", dir+"/target"
	check.OK(t, os.WriteFile(image, make([]byte, 1<<20), 0o600))
	check.OK(t, os.WriteFile(target, nil, 0o600))
	path := drivertest.Loop(t, image)
	defer drivertest.Run(t, "losetup", "-d", path)
	check.OK(t, unix.Mount(path, target, "", unix.MS_BIND, ""))
	defer func() { check.OK(t, unix.Unmount(target, 0)) }()
	info, err := mount.At(target)
	check.OK(t, err)
	v := volume.Volume{ID: volume.ID{Kind: blockdev.Volume, Pool: "p", Key: volume.KeyOf("v")}, Size: 1 << 20, Encryption: volume.Encryption{Scheme: volume.LUKS2}}
	mounts, err := mount.LoadTable()
	check.OK(t, err)
	s := node.New(t.Context(), larger{one{volume: v, device: blockdev.Device{Number: info.Device, Size: v.Size}}}, mounts, node.Options{})
	r, err := s.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: v.ID.String(), VolumePath: target})
	check.OK(t, err)
	if u := r.GetUsage()[0]; u.GetTotal() != v.Size || u.GetUsed() != v.Size || u.GetAvailable() != 0 {
		t.Errorf("%v, want all of %d bytes in use", u, v.Size)
	}
}
