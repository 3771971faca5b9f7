package life

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
)

func expansion(v *vol, size int64) *csi.ControllerExpandVolumeRequest {
	return &csi.ControllerExpandVolumeRequest{VolumeId: v.ID, CapacityRange: &csi.CapacityRange{RequiredBytes: size}, VolumeCapability: v.Capability}
}

// TestRepeats makes every call three times.
func TestRepeats(t *testing.T) {
	for _, kind := range []string{"ext4", "xfs", "btrfs", block} {
		t.Run(kind, func(t *testing.T) {
			d := start(t, drivertest.Options{})
			v := d.made(co.Request("volume", kind, smallest[kind]))
			target, reader := v.Target("pod"), v.Target("reader")
			var snapshot *csi.Snapshot
			thrice := func(step func() error) {
				t.Helper()
				for range 3 {
					check.OK(t, step())
				}
			}
			thrice(func() error {
				again, err := d.create(co.Request("volume", kind, smallest[kind]))
				if err == nil && again.ID != v.ID {
					t.Errorf("one name has volumes %s and %s", v.ID, again.ID)
				}
				return err
			})
			thrice(v.claim)
			thrice(v.stage)
			thrice(func() error { return v.publish(target, false) })
			thrice(func() error { return v.publish(reader, true) })
			staged := v.Staging
			if kind == block {
				staged += "/device"
			}
			for _, path := range []string{staged, target, reader} {
				if n := mountsAt(t, path); n != 1 {
					t.Errorf("%d mounts at %s", n, path)
				}
			}
			if n := len(drivertest.LoopsOver(v.image())); n != 1 {
				t.Errorf("%d devices over the image", n)
			}
			write(t, v.File(target), 1)
			thrice(func() error {
				again, err := v.snapshot("snapshot")
				if err == nil && snapshot != nil && again.String() != snapshot.String() {
					t.Errorf("the snapshot was %v, and is %v", snapshot, again)
				}
				snapshot = again
				return err
			})
			thrice(func() error { return v.expand(smallest[kind]) })
			thrice(func() error { return v.nodeExpand(target) })
			thrice(func() error {
				_, err := d.create(co.FromSnapshot(co.Request("restore", kind, smallest[kind]), snapshot.GetSnapshotId()))
				return err
			})
			thrice(func() error {
				_, err := d.create(co.FromVolume(co.Request("clone", kind, smallest[kind]), v.ID))
				return err
			})
			holds(t, v.File(target), 1)

			thrice(func() error { return v.unpublish(target) })
			thrice(func() error { return v.unpublish(reader) })
			thrice(v.unstage)
			thrice(v.release)
			thrice(v.delete)
			thrice(func() error { return d.deleteSnapshot(snapshot.GetSnapshotId()) })
			for _, name := range []string{"restore", "clone"} {
				thrice(d.volume(drivertest.VolumeID(name), name, v.Capability).delete)
			}
			for _, path := range []string{target, reader} {
				if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
					t.Errorf("%s is left: %v", path, err)
				}
			}
			d.nothingLeft()
		})
	}
}

// TestConflicts: a call that differs from what is there is refused and changes nothing.
func TestConflicts(t *testing.T) {
	d := start(t, drivertest.Options{})
	v := d.made(co.Request("volume", "ext4", smallest["ext4"]))
	other := d.made(co.Request("other", "ext4", smallest["ext4"]))
	snapshot, err := v.snapshot("snapshot")
	check.OK(t, err)

	for name, change := range map[string]func(*csi.CreateVolumeRequest){
		"larger":       func(r *csi.CreateVolumeRequest) { r.CapacityRange.RequiredBytes *= 2 },
		"limit":        func(r *csi.CreateVolumeRequest) { r.CapacityRange = &csi.CapacityRange{LimitBytes: 16 * miB} },
		"provisioning": func(r *csi.CreateVolumeRequest) { r.Parameters = map[string]string{"provisioning": "thin"} },
		"filesystem": func(r *csi.CreateVolumeRequest) {
			r.VolumeCapabilities = []*csi.VolumeCapability{co.Capability("xfs", co.Writer)}
		},
		"source": func(r *csi.CreateVolumeRequest) { co.FromVolume(r, other.ID) },
	} {
		t.Run("create with other "+name, func(t *testing.T) {
			d := d.in(t)
			r := co.Request("volume", "ext4", smallest["ext4"])
			change(r)
			_, err := d.create(r)
			check.Code(t, err, codes.AlreadyExists)
		})
	}
	_, err = other.snapshot("snapshot")
	check.Code(t, err, codes.AlreadyExists)
	same := co.Request("volume", "ext4", 1)
	same.CapacityRange.LimitBytes = smallest["ext4"]
	if again := d.made(same); again.ID != v.ID {
		t.Errorf("a range that the volume is in gets %s, not %s", again.ID, v.ID)
	}

	claim := func(change func(*csi.ControllerPublishVolumeRequest)) error {
		r := &csi.ControllerPublishVolumeRequest{VolumeId: v.ID, NodeId: drivertest.Node, VolumeCapability: co.Capability("ext4", co.MultiWriter)}
		change(r)
		_, err := d.ControllerPublishVolume(t.Context(), r)
		return err
	}
	check.Code(t, v.stage(), codes.FailedPrecondition, "not claimed")
	check.OK(t, v.claim())
	check.OK(t, other.claim())
	check.Code(t, claim(func(r *csi.ControllerPublishVolumeRequest) { r.NodeId = "elsewhere" }), codes.NotFound)
	check.Code(t, claim(func(r *csi.ControllerPublishVolumeRequest) { r.Readonly = true }), codes.AlreadyExists)
	check.Code(t, claim(func(r *csi.ControllerPublishVolumeRequest) { r.VolumeCapability = co.Capability("ext4", readerOnly) }), codes.AlreadyExists)
	check.Code(t, claim(func(r *csi.ControllerPublishVolumeRequest) { r.VolumeCapability = co.Capability(block, co.MultiWriter) }), codes.AlreadyExists)
	check.OK(t, claim(func(*csi.ControllerPublishVolumeRequest) {}))
	check.Code(t, v.delete(), codes.FailedPrecondition)

	// Staged.
	check.Code(t, v.publish(v.Target("early"), false), codes.FailedPrecondition, "staged")
	absent(t, v.Target("early"))
	check.OK(t, v.stage())
	check.Code(t, stageAs(v, func(r *csi.NodeStageVolumeRequest) { r.VolumeCapability = co.Capability("ext4", readerOnly) }), codes.AlreadyExists)
	check.Code(t, stageAs(v, func(r *csi.NodeStageVolumeRequest) { r.VolumeCapability = co.Capability("xfs", co.MultiWriter) }), codes.AlreadyExists)
	check.Code(t, stageAs(v, func(r *csi.NodeStageVolumeRequest) { r.VolumeCapability = co.Capability(block, co.MultiWriter) }), codes.AlreadyExists)
	check.Code(t, stageAs(v, func(r *csi.NodeStageVolumeRequest) { r.VolumeId = other.ID }), codes.AlreadyExists)
	elsewhere := filepath.Join(d.Dir, "elsewhere")
	check.OK(t, os.Mkdir(elsewhere, 0o700))
	check.Code(t, stageAs(v, func(r *csi.NodeStageVolumeRequest) { r.StagingTargetPath = elsewhere }), codes.FailedPrecondition, "one staging path", v.Staging)
	check.Code(t, stageAs(v, func(r *csi.NodeStageVolumeRequest) {
		r.VolumeCapability, r.StagingTargetPath = co.Capability(block, co.MultiWriter), elsewhere
	}), codes.FailedPrecondition) // a second device would not see what is written to the first
	check.Code(t, stageAs(v, func(r *csi.NodeStageVolumeRequest) { r.StagingTargetPath = filepath.Join(d.Dir, "nowhere") }), codes.FailedPrecondition)
	check.OK(t, d.volume(other.ID, "volume", v.Capability).unstage()) // it is not staged there
	check.Code(t, other.unpublish(v.Staging), codes.FailedPrecondition, "not this volume")
	if n := mountsAt(t, v.Staging); n != 1 {
		t.Fatalf("%d mounts at the staging path, of 1", n)
	}

	// Published.
	target := v.Target("pod")
	check.OK(t, v.publish(target, false))
	write(t, v.File(target), 1)
	check.Code(t, v.publish(target, true), codes.AlreadyExists)
	check.Code(t, v.unstage(), codes.FailedPrecondition, target)
	check.Code(t, publishAs(v, target, func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability = co.Capability("xfs", co.MultiWriter) }), codes.FailedPrecondition, "staged as ext4")
	check.OK(t, publishAs(v, target, func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability = co.Capability("", co.MultiWriter) }))
	check.Code(t, publishAs(v, target, func(r *csi.NodePublishVolumeRequest) {
		r.VolumeCapability = co.Capability("ext4", co.MultiWriter)
		r.VolumeCapability.GetMount().MountFlags = []string{`context="system_u:object_r:container_file_t:s0:c1,c2"`}
	}), codes.FailedPrecondition, "SELinux")
	check.OK(t, other.stage())
	check.Code(t, other.publish(target, false), codes.AlreadyExists)
	check.Code(t, other.unpublish(target), codes.FailedPrecondition, "not this volume")
	check.Code(t, d.volume(other.ID, "volume", v.Capability).unstage(), codes.FailedPrecondition)
	holds(t, v.File(target), 1)
	check.OK(t, v.release())
	check.Code(t, v.delete(), codes.FailedPrecondition) // it is attached, claimed or not
	check.Code(t, v.publish(target, false), codes.FailedPrecondition, "not claimed")
	check.Code(t, v.stage(), codes.FailedPrecondition, "not claimed")
	holds(t, v.File(target), 1) // its pod goes on
	check.OK(t, v.unpublish(target))
	check.Code(t, v.delete(), codes.FailedPrecondition)
	check.OK(t, v.unstage())
	check.OK(t, v.delete())
	check.OK(t, other.down())
	check.OK(t, d.deleteSnapshot(snapshot.GetSnapshotId()))
	d.nothingLeft()
}

func absent(t testing.TB, path string) {
	t.Helper()
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s is there: %v", path, err)
	}
}

func stageAs(v *vol, change func(*csi.NodeStageVolumeRequest)) error {
	r := v.StageRequest()
	change(r)
	_, err := v.NodeStageVolume(v.t.Context(), r)
	return err
}

func publishAs(v *vol, target string, change func(*csi.NodePublishVolumeRequest)) error {
	r := v.PublishRequest(target, false)
	change(r)
	_, err := v.NodePublishVolume(v.t.Context(), r)
	return err
}

// TestBlockConflicts: one target, one mode.
func TestBlockConflicts(t *testing.T) {
	d := start(t, drivertest.Options{})
	v := d.made(co.Request("volume", block, smallest[block]))
	target := v.running()
	check.Code(t, v.publish(target, true), codes.AlreadyExists)
	check.Code(t, stageAs(v, func(r *csi.NodeStageVolumeRequest) { r.VolumeCapability = co.Capability("ext4", co.MultiWriter) }), codes.FailedPrecondition)
	mounted := d.volume(v.ID, v.Name, co.Capability("ext4", co.MultiWriter))
	check.Code(t, mounted.publish(v.Target("mount"), false), codes.FailedPrecondition)
	absent(t, v.Target("mount"))
	write(t, target, 1)
	check.OK(t, v.unpublish(target))
	check.OK(t, v.publish(target, true))
	check.Code(t, v.publish(target, false), codes.AlreadyExists)
	refusesWrites(t, target)
	holds(t, target, 1)
	check.OK(t, v.down(target))
	d.nothingLeft()
}

// TestAccessModes: which of them allow a second target.
func TestAccessModes(t *testing.T) {
	d := start(t, drivertest.Options{})
	for _, kind := range []string{"ext4", block} {
		for mode, shared := range map[csi.VolumeCapability_AccessMode_Mode]bool{co.Writer: true, co.MultiWriter: true, singleWriter: false, readerOnly: true, readers: true} {
			t.Run(kind+"/"+mode.String(), func(t *testing.T) {
				d := d.in(t)
				r := co.Request("volume", kind, smallest[kind])
				r.VolumeCapabilities = []*csi.VolumeCapability{co.Capability(kind, mode)}
				v := d.made(r)
				reads := mode == readerOnly || mode == readers
				if reads && kind != block { // it needs something to read
					w := d.volume(v.ID, v.Name, co.Capability(kind, co.Writer))
					target := w.running()
					write(t, w.File(target), 1)
					check.OK(t, w.unpublish(target))
					check.OK(t, w.unstage())
					check.OK(t, w.release())
				}
				first, second := v.running(), v.Target("second")
				err := v.publish(second, false)
				if !shared {
					check.Code(t, err, codes.FailedPrecondition, first)
					absent(t, second)
					check.OK(t, v.publish(first, false))
					check.OK(t, v.unpublish(first))
					err = v.publish(second, false)
				}
				check.OK(t, err)
				if reads {
					refusesWrites(t, v.File(first))
				} else {
					write(t, v.File(second), 2)
				}
				check.OK(t, v.down(first, second))
			})
		}
		for _, mode := range []csi.VolumeCapability_AccessMode_Mode{
			csi.VolumeCapability_AccessMode_UNKNOWN,
			csi.VolumeCapability_AccessMode_MULTI_NODE_SINGLE_WRITER, csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER} {
			r := co.Request("volume", kind, smallest[kind])
			r.VolumeCapabilities = []*csi.VolumeCapability{co.Capability(kind, mode)}
			_, err := d.create(r)
			check.Code(t, err, codes.InvalidArgument)
		}
	}
	d.nothingLeft()
}

// TestReaders: what was restored for many readers can be had by as many as there are on its node, after
// a restart too, and by nobody for writing.
func TestReaders(t *testing.T) {
	d := start(t, drivertest.Options{})
	for _, kind := range []string{"ext4", "xfs", "btrfs", block} {
		t.Run(kind, func(t *testing.T) {
			d := d.in(t)
			source := d.made(co.Request("source-"+kind, kind, smallest[kind]))
			target := source.running()
			write(t, source.File(target), 1)
			s, err := source.snapshot("snapshot-" + kind)
			check.OK(t, err)
			r := co.FromSnapshot(co.Request("restored-"+kind, kind, smallest[kind]), s.GetSnapshotId())
			r.VolumeCapabilities = []*csi.VolumeCapability{co.Capability(kind, readers)}
			v := d.made(r)
			valid, err := d.ValidateVolumeCapabilities(t.Context(), &csi.ValidateVolumeCapabilitiesRequest{VolumeId: v.ID, VolumeCapabilities: r.VolumeCapabilities})
			check.OK(t, err)
			if valid.GetConfirmed() == nil {
				t.Errorf("not confirmed: %s", valid.GetMessage())
			}
			_, err = d.ControllerPublishVolume(t.Context(), &csi.ControllerPublishVolumeRequest{VolumeId: v.ID, NodeId: "elsewhere", VolumeCapability: v.Capability})
			check.Code(t, err, codes.NotFound)
			check.OK(t, v.claim())
			check.OK(t, v.stage())
			var pods []string
			for _, pod := range []string{"first", "second", "third"} {
				for range 2 {
					check.OK(t, v.publish(v.Target(pod), pod == "third"))
				}
				pods = append(pods, v.Target(pod))
				refusesWrites(t, v.File(v.Target(pod)))
				holds(t, v.File(v.Target(pod)), 1)
			}
			writer := d.volume(v.ID, v.Name, co.Capability(kind, co.Writer))
			if !v.Block() { // a raw device is one that takes writes, or another one
				check.Code(t, writer.stage(), codes.AlreadyExists)
			}
			check.OK(t, v.down(pods...))
			check.OK(t, d.deleteSnapshot(s.GetSnapshotId()))
			check.OK(t, source.down(target))
		})
	}
	d.nothingLeft()
}

// TestReadOnlyClaim: a claim for reading only carries through to the target.
func TestReadOnlyClaim(t *testing.T) {
	d := start(t, drivertest.Options{})
	for _, kind := range []string{"ext4", "xfs", block} {
		t.Run(kind, func(t *testing.T) {
			d := d.in(t)
			v := d.made(co.Request("volume", kind, smallest[kind]))
			target := v.running()
			write(t, v.File(target), 1)
			check.OK(t, v.unpublish(target))
			check.OK(t, v.unstage())
			check.OK(t, v.release())
			response, err := d.ControllerPublishVolume(t.Context(), &csi.ControllerPublishVolumeRequest{VolumeId: v.ID, NodeId: drivertest.Node, VolumeCapability: v.Capability, Readonly: true})
			check.OK(t, err)
			v.PublishContext = response.GetPublishContext()
			for range 2 {
				check.OK(t, v.stage())
				check.OK(t, v.publish(target, false))
			}
			holds(t, v.File(target), 1)
			refusesWrites(t, v.File(target))
			check.Code(t, v.expand(smallest[kind]+64*miB), codes.OK)
			if kind != block {
				check.Code(t, v.nodeExpand(target), codes.FailedPrecondition, "read-only")
			}
			check.OK(t, v.down(target))
		})
	}
	d.nothingLeft()
}

// TestIDs: an ID is input. None touches anything outside of the pool.
func TestIDs(t *testing.T) {
	d := start(t, drivertest.Options{})
	check.OK(t, os.WriteFile(filepath.Join(d.Dir, "precious.img"), []byte("precious"), 0o600))
	check.OK(t, os.WriteFile(filepath.Join(d.Dir, "pool/precious.rec"), []byte("precious"), 0o600))
	tree := func() string { return drivertest.Run(t, "find", d.Dir, "-not", "-type", "s", "-printf", "%p %s %T@\n") }
	staging, target := filepath.Join(d.Dir, "staging"), filepath.Join(d.Dir, "target")
	check.OK(t, os.Mkdir(staging, 0o700))
	before := tree()
	c := co.Capability("ext4", co.Writer)
	zeros := strings.Repeat("0", 32)
	for _, id := range []string{
		"x", "../precious", "vol.default.../../precious", "vol.default.../../../precious", "vol.../precious." + zeros, "/etc/passwd",
		"vol.default." + zeros, "snap.default." + zeros, "vol.other." + zeros, "VOL.default." + zeros, "vol.default." + zeros + "\n",
		"vol.default." + strings.Repeat("A", 32), "vol.default." + zeros + "/..", "vol.default." + zeros + "\x00", "group." + zeros, strings.Repeat("vol.", 1000),
	} {
		ctx := t.Context()
		errs := map[string]error{}
		_, errs["DeleteVolume"] = d.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id})
		_, errs["DeleteSnapshot"] = d.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: id})
		_, errs["ControllerUnpublishVolume"] = d.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: drivertest.Node})
		_, errs["NodeUnstageVolume"] = d.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
		_, errs["NodeUnpublishVolume"] = d.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target})
		if !strings.HasPrefix(id, "group."+zeros) {
			_, errs["DeleteVolumeGroupSnapshot"] = d.DeleteVolumeGroupSnapshot(ctx, &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: id})
		}
		// What is in a pool that the driver was not started with is neither deleted nor released.
		done, missing := codes.OK, codes.NotFound
		if id == "vol.other."+zeros {
			done, missing = codes.Unavailable, codes.Unavailable
		}
		for call, err := range errs {
			if want := map[string]codes.Code{"DeleteVolume": done, "ControllerUnpublishVolume": done}[call]; status.Code(err) != want {
				t.Errorf("%s of %q: %v, want %s", call, id, err, want)
			}
		}
		errs = map[string]error{}
		_, errs["ControllerPublishVolume"] = d.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{VolumeId: id, NodeId: drivertest.Node, VolumeCapability: c})
		_, errs["ControllerExpandVolume"] = d.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: miB}})
		_, errs["ControllerGetVolume"] = d.ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{VolumeId: id})
		_, errs["ControllerModifyVolume"] = d.ControllerModifyVolume(ctx, &csi.ControllerModifyVolumeRequest{VolumeId: id})
		_, errs["ControllerGetVolumeHealth"] = d.ControllerGetVolumeHealth(ctx, &csi.ControllerGetVolumeHealthRequest{VolumeId: id})
		_, errs["ValidateVolumeCapabilities"] = d.ValidateVolumeCapabilities(ctx, &csi.ValidateVolumeCapabilitiesRequest{VolumeId: id, VolumeCapabilities: []*csi.VolumeCapability{c}})
		_, errs["CreateSnapshot"] = d.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: "name", SourceVolumeId: id})
		_, errs["CreateVolumeGroupSnapshot"] = d.CreateVolumeGroupSnapshot(ctx, &csi.CreateVolumeGroupSnapshotRequest{Name: "name", SourceVolumeIds: []string{id}})
		_, errs["GetSnapshot"] = d.GetSnapshot(ctx, &csi.GetSnapshotRequest{SnapshotId: id})
		_, errs["GetVolumeGroupSnapshot"] = d.GetVolumeGroupSnapshot(ctx, &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: id})
		_, errs["CreateVolume from a volume"] = d.create(co.FromVolume(co.Request("name", "ext4", miB), id))
		_, errs["CreateVolume from a snapshot"] = d.create(co.FromSnapshot(co.Request("name", "ext4", miB), id))
		_, errs["NodeStageVolume"] = d.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: c})
		_, errs["NodePublishVolume"] = d.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: id, StagingTargetPath: staging, TargetPath: target, VolumeCapability: c})
		_, errs["NodeExpandVolume"] = d.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{VolumeId: id, VolumePath: staging})
		_, errs["NodeGetVolumeStats"] = d.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: staging})
		_, errs["NodeGetVolumeHealth"] = d.NodeGetVolumeHealth(ctx, &csi.NodeGetVolumeHealthRequest{VolumeId: id})
		for call, err := range errs {
			want := missing
			if strings.Contains(call, "napshot") && call != "CreateSnapshot" && call != "CreateVolumeGroupSnapshot" {
				want = codes.NotFound // it is the ID of a volume
			}
			if status.Code(err) != want {
				t.Errorf("%s of %q: %v, want %s", call, id, err, want)
			}
		}
	}
	if after := tree(); after != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
}

// TestPaths: a path has to say where it leads.
func TestPaths(t *testing.T) {
	d := start(t, drivertest.Options{})
	v := d.made(co.Request("volume", "ext4", smallest["ext4"]))
	target := v.running()
	write(t, v.File(target), 1)
	for _, path := range []string{"", "relative", "./pods", "/", target + "/", target + "/../pod", d.Dir + "//pods", "/proc/self/../" + d.Dir} {
		t.Run(path, func(t *testing.T) {
			d := d.in(t)
			on := d.volume(v.ID, v.Name, v.Capability)
			on.Staging = path
			_, err := d.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: v.ID, StagingTargetPath: path, VolumeCapability: v.Capability})
			check.Code(t, err, codes.InvalidArgument)
			check.Code(t, on.unstage(), codes.InvalidArgument)
			check.Code(t, v.publish(path, false), codes.InvalidArgument)
			check.Code(t, v.unpublish(path), codes.InvalidArgument)
			if path != "" {
				check.Code(t, on.publish(v.Target("other"), false), codes.InvalidArgument)
			}
		})
	}
	// A link at the end leads elsewhere, whoever made it.
	elsewhere, link := filepath.Join(d.Dir, "elsewhere"), v.Target("link")
	check.OK(t, os.Mkdir(elsewhere, 0o700))
	check.OK(t, os.WriteFile(filepath.Join(elsewhere, "precious"), []byte("precious"), 0o600))
	check.OK(t, os.Symlink(elsewhere, link))
	staged := d.volume(v.ID, v.Name, v.Capability)
	staged.Staging = link
	check.Code(t, v.publish(link, false), codes.FailedPrecondition)
	check.Code(t, v.unpublish(link), codes.FailedPrecondition)
	check.Code(t, stageAs(staged, func(*csi.NodeStageVolumeRequest) {}), codes.FailedPrecondition)
	if n := mountsAt(t, elsewhere) + mountsAt(t, link); n > 0 {
		t.Errorf("%d mounts where the link leads", n)
	}
	if _, err := os.Stat(filepath.Join(elsewhere, "precious")); err != nil {
		t.Error(err)
	}
	// The directory above the target is the caller's to make.
	check.Code(t, v.publish(filepath.Join(d.Dir, "nowhere/target"), false), codes.FailedPrecondition)
	// A file is no directory, a directory no file.
	file := v.Target("file")
	check.OK(t, os.WriteFile(file, nil, 0o600))
	check.Code(t, v.publish(file, false), codes.FailedPrecondition)
	holds(t, v.File(target), 1)
	check.OK(t, v.down(target))
	d.nothingLeft()
}

// TestDeadMounts: a filesystem that shut itself down can be unmounted, and after that
// mounted again.
func TestDeadMounts(t *testing.T) {
	d := start(t, drivertest.Options{})
	v := d.made(co.Request("volume", "xfs", smallest["xfs"]))
	target := v.running()
	write(t, v.File(target), 1)
	shutDown(t, target)
	if got := v.problems(); !slices.Equal(got, []string{"INACCESSIBLE FilesystemShutDown"}) {
		t.Errorf("health: %v", got)
	}
	if err := v.publish(v.Target("other"), false); err == nil {
		t.Error("a dead filesystem was published")
	}
	for range 2 {
		check.OK(t, v.unpublish(target))
	}
	absent(t, target)
	for range 2 {
		check.OK(t, v.unstage())
	}
	check.OK(t, v.stage())
	check.OK(t, v.publish(target, false))
	holds(t, v.File(target), 1)

	// Stage clears a dead mount away by itself.
	check.OK(t, v.unpublish(target))
	shutDown(t, v.Staging)
	check.OK(t, v.stage())
	check.OK(t, v.publish(target, false))
	holds(t, v.File(target), 1)
	if n := mountsAt(t, v.Staging); n != 1 {
		t.Errorf("%d mounts at the staging path", n)
	}
	check.OK(t, v.down(target))
	d.nothingLeft()
}

// shutDown makes an XFS fail from now on (XFS_IOC_GOINGDOWN, with its log written).
func shutDown(t testing.TB, path string) {
	t.Helper()
	f, err := os.Open(path)
	check.OK(t, err)
	defer f.Close()
	const goingDown, flushLog = 0x8004587d, 1
	check.OK(t, unix.IoctlSetPointerInt(int(f.Fd()), goingDown, flushLog))
}

// TestForeignMounts: what somebody else mounted over a path of ours is not ours to take.
func TestForeignMounts(t *testing.T) {
	d := start(t, drivertest.Options{})
	for _, kind := range []string{"ext4", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			d := d.in(t)
			v := d.made(co.Request("volume-"+kind, kind, smallest[kind]))
			target := v.running()
			write(t, v.File(target), 1)
			check.OK(t, unix.Mount("tmpfs", target, "tmpfs", 0, ""))
			check.Code(t, v.publish(target, false), codes.AlreadyExists)
			check.Code(t, v.unpublish(target), codes.FailedPrecondition, "not this volume")
			if n := mountsAt(t, target); n != 2 {
				t.Errorf("%d mounts at the target, of 2", n)
			}
			drivertest.Unmount(t, target)
			check.OK(t, v.publish(target, false))
			holds(t, v.File(target), 1)
			check.OK(t, v.unpublish(target))

			check.OK(t, unix.Mount("tmpfs", v.Staging, "tmpfs", 0, ""))
			check.Code(t, v.stage(), codes.AlreadyExists)
			check.Code(t, v.unstage(), codes.FailedPrecondition, "not this volume")
			check.Code(t, v.publish(target, false), codes.FailedPrecondition)
			absent(t, target)
			drivertest.Unmount(t, v.Staging)
			check.OK(t, v.stage())
			check.OK(t, v.publish(target, false))
			holds(t, v.File(target), 1)
			check.OK(t, v.down(target))
		})
	}
	d.nothingLeft()
}

// TestTargetWithFiles: what is in the directory below a mount is somebody's.
func TestTargetWithFiles(t *testing.T) {
	d := start(t, drivertest.Options{})
	for _, kind := range []string{"ext4", block} {
		t.Run(kind, func(t *testing.T) {
			d := d.in(t)
			v := d.made(co.Request("volume-"+kind, kind, smallest[kind]))
			target := v.Target("pod")
			precious := target
			if kind != block {
				check.OK(t, os.Mkdir(target, 0o700))
				precious = filepath.Join(target, "precious")
			}
			check.OK(t, os.WriteFile(precious, []byte("precious"), 0o600))
			v.running()
			for range 2 {
				check.Code(t, v.unpublish(target), codes.FailedPrecondition, "not removed")
			}
			if text, err := os.ReadFile(precious); string(text) != "precious" {
				t.Errorf("it is %q now: %v", text, err)
			}
			if n := mountsAt(t, target); n != 0 {
				t.Errorf("%d mounts left", n)
			}
			check.OK(t, os.Remove(precious))
			check.OK(t, v.down(target))
		})
	}
	d.nothingLeft()
}

// TestBusyTarget: a process in the volume keeps it where it is.
func TestBusyTarget(t *testing.T) {
	d := start(t, drivertest.Options{})
	v := d.made(co.Request("volume", "ext4", smallest["ext4"]))
	target := v.running()
	f, err := os.Create(filepath.Join(target, "open"))
	check.OK(t, err)
	check.Code(t, v.unpublish(target), codes.FailedPrecondition, "a process has files open")
	_, err = f.WriteString("still here")
	check.OK(t, errors.Join(err, f.Sync(), f.Close()))
	check.OK(t, v.down(target))
	d.nothingLeft()
}

// TestHeldDevice: unstage tells when somebody holds the device, as the kubelet does with
// a loop device of its own over a raw block volume.
func TestHeldDevice(t *testing.T) {
	d := start(t, drivertest.Options{})
	for name, hold := range map[string]func(t *testing.T, device string) (release func()){
		"by a process": func(t *testing.T, device string) func() {
			f, err := os.Open(device)
			check.OK(t, err)
			return func() { _ = f.Close() }
		},
		"by a loop device": func(t *testing.T, device string) func() {
			loop := drivertest.PlainLoop(t, device)
			release := sync.OnceFunc(func() { drivertest.Run(t, "losetup", "-d", loop) })
			t.Cleanup(release)
			return release
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := d.in(t)
			v := d.made(co.Request("volume", block, smallest[block]))
			target := v.running()
			release := hold(t, target)
			check.Code(t, v.unpublish(target), codes.FailedPrecondition, "a process has files open")
			release()
			release = hold(t, "/dev/"+drivertest.LoopsOver(v.image())[0])
			check.OK(t, v.unpublish(target))
			for range 2 {
				check.Code(t, v.unstage(), codes.FailedPrecondition, "held open")
			}
			check.OK(t, v.release())
			check.Code(t, v.delete(), codes.FailedPrecondition)
			release()
			check.OK(t, v.down(target))
		})
	}
	d.nothingLeft()
}

// TestFailedPublish leaves nothing that could be taken for a published volume.
func TestFailedPublish(t *testing.T) {
	d := start(t, drivertest.Options{})
	v := d.made(co.Request("volume", "ext4", smallest["ext4"]))
	v.Capability.GetMount().MountFlags = []string{"no-such-option"}
	check.OK(t, v.claim())
	check.Code(t, v.stage(), codes.InvalidArgument, "no-such-option")
	if loops, mounts := remaining(v.image()), mountsAt(t, v.Staging); len(loops)+mounts > 0 {
		t.Errorf("left: devices %v, %d mounts", loops, mounts)
	}
	v.Capability.GetMount().MountFlags = []string{"noatime,nodiscard", "nosuid"}
	target := v.running()
	flags := strings.Fields(drivertest.Run(t, "findmnt", "-no", "OPTIONS", target))[0]
	for _, want := range []string{"rw", "noatime", "nosuid"} {
		if !slices.Contains(strings.Split(flags, ","), want) {
			t.Errorf("%s is not among the options of the target: %s", want, flags)
		}
	}
	// Something else is on its staging path when it is published.
	check.OK(t, v.unpublish(target))
	check.OK(t, unix.Mount("tmpfs", v.Staging, "tmpfs", 0, ""))
	check.Code(t, v.publish(target, false), codes.FailedPrecondition)
	drivertest.Unmount(t, v.Staging)
	absent(t, target)
	check.OK(t, v.down(target))
	d.nothingLeft()
}

// TestSnapshotOfDeletedVolume: a snapshot that is there is the answer to the call that made
// it, also after its volume is gone.
func TestSnapshotOfDeletedVolume(t *testing.T) {
	d := start(t, drivertest.Options{})
	v := d.made(co.Request("volume", "ext4", smallest["ext4"]))
	first, err := v.snapshot("snapshot")
	check.OK(t, err)
	check.OK(t, v.delete())
	nodes := &csi.TopologyRequirement{Requisite: []*csi.Topology{csimap.Topology(drivertest.Node)}}
	for _, where := range []*csi.TopologyRequirement{nil, nodes} {
		again, err := d.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "snapshot", SourceVolumeId: v.ID, AccessibilityRequirements: where})
		check.OK(t, err)
		if again.GetSnapshot().GetSnapshotId() != first.GetSnapshotId() {
			t.Errorf("the same call again made %v, not %v", again, first)
		}
		_, err = d.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "another", SourceVolumeId: v.ID, AccessibilityRequirements: where})
		check.Code(t, err, codes.NotFound)
	}
	_, err = d.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: first.GetSnapshotId()})
	check.OK(t, err)
}

// TestStageOtherwise: what is staged is not staged again with other mount flags, nor at a second path; and it
// stays as it is, and can be taken down.
func TestStageOtherwise(t *testing.T) {
	d := start(t, drivertest.Options{})
	for _, kind := range []string{"ext4", "xfs", "btrfs", block} {
		t.Run(kind, func(t *testing.T) {
			d := d.in(t)
			v := d.made(co.Request(kind, kind, smallest[kind]))
			target := v.running()
			write(t, v.File(target), 1)
			for range 2 {
				second := d.volume(v.ID, "second", v.Capability)
				second.PublishContext = v.PublishContext
				check.Code(t, second.stage(), codes.FailedPrecondition, "one staging path")
				for _, path := range []string{second.Staging, filepath.Join(second.Staging, "device")} {
					if n := mountsAt(t, path); n != 0 {
						t.Errorf("%d mounts at %s", n, path)
					}
				}
				check.OK(t, v.stage())
				if kind == block {
					continue
				}
				other := d.volume(v.ID, v.Name, co.Capability(kind, co.MultiWriter))
				other.PublishContext = v.PublishContext
				other.Capability.GetMount().MountFlags = []string{"noatime"}
				check.Code(t, other.stage(), codes.AlreadyExists, "mount flags")
			}
			holds(t, v.File(target), 1)
			check.OK(t, v.down(target))
		})
	}
	d.nothingLeft()
}

// TestMountedByHand: an administrator repairs a filesystem where it is staged, and mounts it there again, while health is
// asked all the time. It is staged as before.
func TestMountedByHand(t *testing.T) {
	d := start(t, drivertest.Options{})
	v := d.made(co.Request("volume", "xfs", smallest["xfs"]))
	check.OK(t, v.claim())
	check.OK(t, v.stage())
	device := strings.TrimSpace(drivertest.Run(t, "findmnt", "-no", "SOURCE", v.Staging))
	held, err := os.Open(device) // else it goes
	check.OK(t, err)
	drivertest.Unmount(t, v.Staging)
	v.problems()
	drivertest.Run(t, "mount", device, v.Staging)
	check.OK(t, held.Close())
	check.OK(t, v.stage())
	check.OK(t, v.expand(2*smallest["xfs"]))
	check.OK(t, v.nodeExpand(v.Staging))
	if said := v.problems(); len(said) > 0 {
		t.Errorf("said %v", said)
	}
	target := v.Target("pod")
	check.OK(t, v.publish(target, false))
	if size := v.usage(target).GetTotal(); size <= smallest["xfs"] {
		t.Errorf("it has %d bytes", size)
	}
	check.OK(t, v.down(target))
	d.nothingLeft()
}
