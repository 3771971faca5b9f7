package node_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/node"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// TestRefusedStageLeavesNothing: a stage that is refused leaves neither a mount nor a device. After such an answer the kubelet takes the volume for not
// staged: it does not unstage it, and what was left would keep the volume from being deleted.
func TestRefusedStageLeavesNothing(t *testing.T) {
	drivertest.NeedRoot(t)
	f := start(t, node.Options{})
	id, staging := f.create("v", block), f.mkdir("staging")
	device := filepath.Join(staging, "device")
	t.Run("its device cannot be bound", func(t *testing.T) {
		check.OK(t, os.Mkdir(device, 0o700))
		refuses := drivertest.Refuses(t, f.NodeStageVolume, func() *csi.NodeStageVolumeRequest { return f.stage(id, block) })
		refuses("stage", func(*csi.NodeStageVolumeRequest) {}, errdefs.ErrPrecondition, device)
		f.notAttached(id)
		check.OK(t, os.Remove(device))
	})
	t.Run("its filesystem cannot grow", func(t *testing.T) {
		if !filesystem.GrowsMounted(filesystem.Ext4) {
			t.Skip("this process may not grow an ext4 that is mounted")
		}
		drivertest.Twice(t, f.NodeStageVolume, f.stage(id, block))
		drivertest.Run(t, "mkfs.ext4", "-q", "-b", "4096", "-O", "sparse_super2,^resize_inode", device, "2048")
		drivertest.Twice(t, f.NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
		_, err := f.NodeStageVolume(t.Context(), f.stage(id, "ext4"))
		if err == nil || !strings.Contains(err.Error(), "grow the ext4 filesystem") {
			t.Errorf("staged: %v", err)
		}
		f.notAttached(id)
	})
	t.Run("an earlier driver has mounted it, and it cannot grow", func(t *testing.T) {
		if !filesystem.GrowsMounted(filesystem.Ext4) {
			t.Skip("this process may not grow an ext4 that is mounted")
		}
		id := f.createFixed("unpublished", staging)
		drivertest.Twice(t, f.NodeStageVolume, f.stage(id, "ext4"))
		f.expand(id)
		_, err := f.NodeStageVolume(t.Context(), f.stage(id, "ext4"))
		if err == nil || !strings.Contains(err.Error(), "grow the ext4 filesystem") {
			t.Errorf("staged: %v", err)
		}
		f.notAttached(id)
	})
	if left := drivertest.Gone(func() []string { return drivertest.Leftovers(f.dir) }); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// createFixed makes a volume with an ext4 of its size, which cannot grow while it is mounted, and leaves it unstaged.
func (f fixture) createFixed(name, staging string) string {
	f.t.Helper()
	id := f.create(name, block)
	drivertest.Twice(f.t, f.NodeStageVolume, f.stage(id, block))
	drivertest.Run(f.t, "mkfs.ext4", "-q", "-b", "4096", "-O", "sparse_super2,^resize_inode", filepath.Join(staging, "device"))
	drivertest.Twice(f.t, f.NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
	return id
}

// expand has a volume grow to 32 MiB at its controller.
func (f fixture) expand(text string) {
	f.t.Helper()
	id, err := volume.ParseID(text)
	check.OK(f.t, err)
	_, err = f.store.Expand(f.t.Context(), id, volume.Range{Required: 32 * pooltest.MiB})
	check.OK(f.t, err)
}

// TestStagedInUseDoesNotGrow: after its start the kubelet stages the volumes of pods once more. That succeeds also if a filesystem cannot grow to the size that
// its volume has by now: with an error the pod would not be set up again. NodeExpandVolume says why it does not grow.
func TestStagedInUseDoesNotGrow(t *testing.T) {
	drivertest.NeedRoot(t)
	if !filesystem.GrowsMounted(filesystem.Ext4) {
		t.Skip("this process may not grow an ext4 that is mounted")
	}
	f := start(t, node.Options{})
	staging, target := f.mkdir("staging"), f.path("target")
	id := f.createFixed("v", staging)
	drivertest.Twice(t, f.NodeStageVolume, f.stage(id, "ext4"))
	publish := &csi.NodePublishVolumeRequest{VolumeId: id, StagingTargetPath: staging, TargetPath: target, VolumeCapability: capability("ext4")}
	drivertest.Twice(t, f.NodePublishVolume, publish)
	f.expand(id)
	drivertest.Twice(t, f.NodeStageVolume, f.stage(id, "ext4"))
	drivertest.Twice(t, f.NodePublishVolume, publish)
	check.OK(t, os.WriteFile(filepath.Join(target, "file"), []byte("written"), 0o600))
	// After FAILED_PRECONDITION the kubelet does not ask again, and lets the pod have the volume as it is.
	_, err := f.NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{VolumeId: id, VolumePath: target})
	if !errors.Is(err, errdefs.ErrUnsupported) || !strings.Contains(err.Error(), "grow the ext4 filesystem") {
		t.Errorf("expanded: %v", err)
	}
	drivertest.Twice(t, f.NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target})
	drivertest.Twice(t, f.NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
	f.notAttached(id)
}

// stage is the request to stage a volume at the path staging of the fixture.
func (f fixture) stage(id, access string) *csi.NodeStageVolumeRequest {
	return &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: f.path("staging"), VolumeCapability: capability(access)}
}

// notAttached makes sure that a volume has no device.
func (f fixture) notAttached(text string) {
	f.t.Helper()
	id, err := volume.ParseID(text)
	check.OK(f.t, err)
	devices, err := f.store.Attached(f.t.Context(), id)
	check.OK(f.t, err)
	if len(devices) > 0 {
		f.t.Errorf("it is attached as %v", devices)
	}
}

// TestExpandBesideAPodThatIsGone: of a raw volume that two pods have, the kubelet names the path of the pod that came last, also after that has gone. The
// volume is found by its staging path then.
func TestExpandBesideAPodThatIsGone(t *testing.T) {
	drivertest.NeedRoot(t)
	f := start(t, node.Options{})
	id, staging := f.create("v", block), f.mkdir("staging")
	drivertest.Twice(t, f.NodeStageVolume, f.stage(id, block))
	for _, target := range []string{f.path("first"), f.path("last")} {
		drivertest.Twice(t, f.NodePublishVolume, &csi.NodePublishVolumeRequest{VolumeId: id, StagingTargetPath: staging, TargetPath: target, VolumeCapability: capability(block)})
	}
	drivertest.Twice(t, f.NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: f.path("last")})
	request := func() *csi.NodeExpandVolumeRequest {
		return &csi.NodeExpandVolumeRequest{VolumeId: id, VolumePath: f.path("last"), StagingTargetPath: staging}
	}
	if grown := drivertest.Twice(t, f.NodeExpandVolume, request()); grown.GetCapacityBytes() != 16*pooltest.MiB {
		t.Errorf("it has %v", grown)
	}
	refuses := drivertest.Refuses(t, f.NodeExpandVolume, request)
	refuses("without a staging path", func(r *csi.NodeExpandVolumeRequest) { r.StagingTargetPath = "" }, errdefs.ErrNotFound, "is not at "+f.path("last"))
	refuses("with another one", func(r *csi.NodeExpandVolumeRequest) { r.StagingTargetPath = f.path("nowhere") }, errdefs.ErrNotFound, "is not at "+f.path("nowhere"))
	drivertest.Twice(t, f.NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: f.path("first")})
	drivertest.Twice(t, f.NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
	f.notAttached(id)
}

// TestStageBalanced: a btrfs that was unmounted while it was balanced, and whose volume has grown since, stays mounted by the first try to stage it, though that
// is refused: only mounted it comes to the end of that, and then it grows. The answer is one after which the kubelet knows that the volume may be staged.
func TestStageBalanced(t *testing.T) {
	drivertest.NeedRoot(t)
	const size = 2 << 30
	f := start(t, node.Options{})
	staging := f.mkdir("staging")
	v, err := f.store.Create(t.Context(), volume.Spec{Name: "v", Size: volume.Range{Required: size}, Filesystem: filesystem.Btrfs})
	check.OK(t, err)
	request, unstage := f.stage(v.ID.String(), "btrfs"), &csi.NodeUnstageVolumeRequest{VolumeId: v.ID.String(), StagingTargetPath: staging}
	drivertest.Twice(t, f.NodeStageVolume, request)
	for n := range 8 {
		check.OK(t, os.WriteFile(filepath.Join(staging, strconv.Itoa(n)), make([]byte, 64*pooltest.MiB), 0o600))
	}
	drivertest.Run(t, "sync", "-f", staging)
	paused := func() bool {
		drivertest.Run(t, "btrfs", "balance", "start", "--background", "--full-balance", staging)
		_ = exec.Command("btrfs", "balance", "pause", staging).Run() // it may have ended
		said, _ := exec.Command("btrfs", "balance", "status", staging).Output()
		return strings.Contains(string(said), "is paused")
	}
	if !slices.ContainsFunc(make([]bool, 20), func(bool) bool { return paused() }) {
		t.Fatal("no balance was paused before it ended")
	}
	drivertest.Twice(t, f.NodeUnstageVolume, unstage)
	_, err = f.store.Expand(t.Context(), v.ID, volume.Range{Required: size + 512*pooltest.MiB})
	check.OK(t, err)
	if _, err := f.NodeStageVolume(t.Context(), request); !errors.Is(err, errdefs.ErrBusy) || !strings.Contains(err.Error(), "balance") {
		t.Errorf("staged while it is balanced: %v", err)
	}
	if _, err := os.Stat(filepath.Join(staging, "0")); err != nil {
		t.Errorf("it is not mounted any more: %v", err)
	}
	err = errdefs.ErrBusy
	for ended := time.Now().Add(time.Minute); errors.Is(err, errdefs.ErrBusy) && time.Now().Before(ended); time.Sleep(100 * time.Millisecond) {
		_, err = f.NodeStageVolume(t.Context(), request)
	}
	check.OK(t, err)
	var st unix.Statfs_t
	check.OK(t, unix.Statfs(staging, &st))
	if total := filesystem.UsageOf(st).Total; total != size+512*pooltest.MiB {
		t.Errorf("it has %d bytes", total)
	}
	drivertest.Twice(t, f.NodeUnstageVolume, unstage)
	f.notAttached(v.ID.String())
}
