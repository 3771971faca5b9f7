package volume_test

import (
	"bytes"
	"context"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvme"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvmet"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

var nvmeAddress = netip.MustParseAddrPort("127.0.0.1:4427")

// needNVMe returns the kernel's NVMe target. It skips the test on a kernel without NVMe over TCP, unless ASHLAR_NVME is set (hack/vm/kernel.sh).
func needNVMe(t *testing.T) *nvmet.Target {
	t.Helper()
	drivertest.NeedRoot(t)
	k, err := nvmet.Open(nvmeAddress)
	if err == nil {
		err = nvme.Available()
	}
	if err != nil && os.Getenv("ASHLAR_NVME") == "" {
		t.Skipf("this kernel has no NVMe over TCP: %v", err)
	}
	check.OK(t, err)
	return k
}

// connected is the pool of a consumer, with the one volume that it is connected to.
type connected struct {
	blockdev.Pool
	ref    blockdev.Ref
	device nvme.Device
}

func (connected) Name() string { return "default" }

func (connected) List(context.Context, blockdev.Kind, string, int) ([]blockdev.Record, error) {
	return nil, nil
}

func (c connected) Attached(context.Context, blockdev.Ref) ([]blockdev.Device, error) {
	return []blockdev.Device{{Path: c.device.Path, Number: c.device.Number, Size: c.device.Size}}, nil
}

func (c connected) Orphans(ctx context.Context) (map[blockdev.Ref][]blockdev.Device, error) {
	devices, err := c.Attached(ctx, c.ref)
	return map[blockdev.Ref][]blockdev.Device{c.ref: devices}, err
}

// holder is Consumers with one consumer, node, on this machine.
type holder struct {
	consumer
	node *volume.Local
}

func (h *holder) Hold(ctx context.Context, id volume.ID, _ volume.Grant) (func() error, error) {
	return h.node.Hold(ctx, id)
}

func connect(t *testing.T, e volume.Exported) nvme.Device {
	t.Helper()
	device, err := nvme.Connect(t.Context(), nvme.Connection{NQN: e.NQN, Host: e.Host, Address: nvmeAddress, Secret: e.Secret, UUID: e.UUID, Loss: -1})
	check.OK(t, err)
	t.Cleanup(func() { _ = nvme.Disconnect(context.Background(), e.NQN) })
	if device.Size != e.Size {
		t.Errorf("the device has %d bytes, exported are %d", device.Size, e.Size)
	}
	return device
}

// TestNVMeExport: a consumer uses a volume over NVMe/TCP like one of its own, also while the driver of the home starts anew, while the volume grows, and
// while a snapshot is made, which has what the consumer had cached. After the end of the export none of its writes arrive.
func TestNVMeExport(t *testing.T) {
	k := needNVMe(t)
	url := filesURL(t)
	pool := opened(t, "default", url)
	l, h := start(t, 0, pool), &holder{}
	exporting := volume.Exporting{Boot: "1", Open: func() (volume.Exporter, error) { return k, nil }, Key: nodeKey, Consumers: h, Locks: &keylock.Table{}}
	l.ServeExports(t.Context(), exporting)
	v, err := l.Create(t.Context(), volume.Spec{Name: "a", Size: volume.Range{Required: 32 * mib}, Filesystem: "ext4"})
	check.OK(t, err)
	first, err := l.Export(t.Context(), v.ID, grant(1, "b"))
	check.OK(t, err)
	device := connect(t, first)

	dir := t.TempDir()
	drivertest.Run(t, "mkfs.ext4", "-q", device.Path)
	check.OK(t, unix.Mount(device.Path, dir, "ext4", 0, ""))
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	mounts, err := mount.LoadTable()
	check.OK(t, err)
	h.node, err = volume.NewLocal(t.Context(), "b", []blockdev.Pool{connected{ref: blockdev.Ref{Kind: v.ID.Kind, Key: v.ID.Key}, device: device}}, mounts, 0)
	check.OK(t, err)

	// The home's driver starts anew.
	check.OK(t, pool.Close())
	pool = opened(t, "default", url)
	l = start(t, 0, pool)
	l.ServeExports(t.Context(), exporting)
	check.OK(t, os.WriteFile(filepath.Join(dir, "file"), []byte("content"), 0o600)) // in the page cache

	s, err := l.CreateSnapshot(t.Context(), "s", v.ID)
	check.OK(t, err)
	copied, err := l.Create(t.Context(), volume.Spec{Name: "copy", Source: s.ID, Size: volume.Range{Required: s.Size}, Filesystem: "ext4"})
	check.OK(t, err)
	restored, err := l.Attach(t.Context(), copied, nil)
	check.OK(t, err)
	drivertest.Run(t, "e2fsck", "-fn", restored.Path)
	there := t.TempDir()
	check.OK(t, unix.Mount(restored.Path, there, "ext4", 0, ""))
	have, err := os.ReadFile(filepath.Join(there, "file"))
	if err != nil || string(have) != "content" {
		t.Errorf("the copy has %q, %v", have, err)
	}
	drivertest.Unmount(t, there)
	check.OK(t, restored.Close())
	drop(t, l, copied)

	grown, err := l.Expand(t.Context(), v.ID, volume.Range{Required: 64 * mib})
	check.OK(t, err)
	check.OK(t, nvme.Resized(t.Context(), first.NQN, grown.Size))
	drivertest.Unmount(t, dir)

	fence(t, l, device, v, first)
	drop(t, l, v)
	check.OK(t, l.DeleteSnapshot(t.Context(), s.ID))
	check.OK(t, pool.Close())
	left, err := k.Exports(t.Context())
	if len(left) > 0 || err != nil {
		t.Errorf("the kernel has %v, %v", left, err)
	}
}

// fence makes sure that no write of a consumer, which writes all the time, arrives after its export has ended, as the volume is exported to another one.
func fence(t *testing.T, l *volume.Local, device nvme.Device, v volume.Volume, first volume.Exported) {
	t.Helper()
	f, err := os.OpenFile(device.Path, os.O_RDWR|unix.O_DIRECT, 0)
	check.OK(t, err)
	ended := make(chan error, 1)
	stop := make(chan struct{})
	go func() { // it goes on when there are errors
		block := alignedBlock()
		var last error
		for n := byte(1); ; n++ {
			select {
			case <-stop:
				ended <- last
				return
			default:
			}
			for i := range block {
				block[i] = n
			}
			_, last = f.WriteAt(block, 8*mib)
			if last != nil {
				time.Sleep(time.Millisecond)
			}
		}
	}()
	time.Sleep(300 * time.Millisecond)
	next, err := l.Export(t.Context(), v.ID, grant(2, "c"))
	check.OK(t, err)
	home, err := l.Attached(t.Context(), v.ID)
	check.OK(t, err)
	look := func() []byte {
		f, err := os.OpenFile(home[0].Path, os.O_RDONLY|unix.O_DIRECT, 0)
		check.OK(t, err)
		defer f.Close()
		block := alignedBlock()
		check.OK(t, second(f.ReadAt(block, 8*mib)))
		return block
	}
	before := look()
	time.Sleep(time.Second)
	if !bytes.Equal(before, look()) {
		t.Error("something was written after the export had ended")
	}
	other := connect(t, next)
	g, err := os.OpenFile(other.Path, os.O_RDWR|unix.O_DIRECT, 0)
	check.OK(t, err)
	own := alignedBlock()
	check.OK(t, second(g.WriteAt(own, 8*mib)))
	check.OK(t, nvme.Disconnect(t.Context(), first.NQN)) // before Linux 6.10 the writer waits for the connection until then
	close(stop)
	if err := <-ended; err == nil {
		t.Error("the writer has no error")
	}
	if !bytes.Equal(own, look()) {
		t.Error("the consumer of before has written")
	}
	check.OK(t, f.Close())
	check.OK(t, g.Close())
	fails(t, l.Unexport(t.Context(), v.ID, 1), nil, "another generation")
	device2, err := l.Attach(t.Context(), v, nil) // on the home, which ends the export
	check.OK(t, err)
	check.OK(t, device2.Close())
	if _, is, err := l.ExportOf(t.Context(), v.ID); is || err != nil {
		t.Errorf("exported: %v, %v", is, err)
	}
	check.OK(t, nvme.Disconnect(t.Context(), next.NQN))
}

// alignedBlock returns 4 KiB of memory that is aligned as O_DIRECT needs it.
func alignedBlock() []byte {
	const block = 4096
	all, err := unix.Mmap(-1, 0, block, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		panic(err)
	}
	return all
}
