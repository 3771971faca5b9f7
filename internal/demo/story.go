package demo

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ashlar-csi/ashlar/internal/command"
	"github.com/ashlar-csi/ashlar/internal/doctor"
	"github.com/ashlar-csi/ashlar/internal/machine"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
)

// What the demo shows. The steps call the driver as a container orchestrator does: it
// makes the staging folder and the folder that a target is in, and removes its own.

const (
	mib = 1 << 20
	pod = "pod" // the folder of the pod that uses the volumes
)

func (d *demonstration) story() {
	d.ext4()
	d.shortLife(filesystem.XFS)
	d.shortLife(filesystem.Btrfs)
	d.block()
	d.ephemeral()
}

// ext4 is the whole life of a volume, of its snapshots, and of what is made of them.
func (d *demonstration) ext4() {
	d.heading("ext4: one volume, its snapshot, a clone and a restore")
	data := d.volume("data", filesystem.Ext4)
	d.create(data, 64*mib, nil)
	d.claim(data)
	d.stage(data)
	d.publish(data)
	before := d.write(data, 1, 16*mib)
	d.stats(data)
	snapshot := d.snapshot("data-snapshot")
	first, last := d.cut(snapshot, data)
	d.expand(data, 128*mib)
	now := d.write(data, 2, 16*mib)
	clone := d.volume("clone", filesystem.Ext4)
	d.create(clone, 128*mib, &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
		Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: data.id}}})
	d.use(clone)
	restore := d.volume("restore", filesystem.Ext4)
	d.create(restore, 96*mib, fromSnapshot(snapshot))
	restore.fsSize = 80 * mib // larger than its source: it has grown when it is staged
	d.use(restore)
	d.step("look at all three, mounted at once", func(context.Context) (string, error) { return "", nil }, data, clone, restore)
	d.compare(clone, now, "as the source is now")
	d.compare(restore, before, "as the source was at the snapshot")
	d.compareJournal(restore, first, last)

	d.heading("read-only, and a group of snapshots")
	d.readOnly(data, now)
	d.group(data, clone)

	d.heading("and back")
	d.drop(snapshot)
	d.retire(clone)
	d.retire(restore)
	d.unpublish(data)
	d.unstage(data)
	d.release(data)
	d.remove(data)
}

// shortLife is a shorter life, on thin volumes, where kernel and tools have the filesystem.
func (d *demonstration) shortLife(fs filesystem.Type) {
	if d.failed != nil {
		return
	}
	name, size := string(fs), fs.MinSize()
	d.heading(name + ": the smallest there is, thin; its snapshot and a restore")
	if missing := lacks(d.ctx, fs); missing != "" {
		d.printf("     left out: %s\n", missing)
		return
	}
	v := d.volume(name, fs)
	d.create(v, size, nil)
	d.use(v)
	before := d.write(v, 3, 16*mib)
	snapshot := d.snapshot(name + "-snapshot")
	first, last := d.cut(snapshot, v)
	d.expand(v, size+128*mib)
	d.write(v, 4, 16*mib)
	restore := d.volume(name+"-restore", fs)
	d.create(restore, size, fromSnapshot(snapshot))
	d.use(restore)
	d.compare(restore, before, "as the source was at the snapshot")
	d.compareJournal(restore, first, last)
	d.drop(snapshot)
	d.retire(restore)
	d.retire(v)
}

// lacks says what a machine lacks for a filesystem; empty if nothing.
func lacks(ctx context.Context, fs filesystem.Type) string {
	tool := "mkfs." + string(fs)
	if _, _, err := command.Run(ctx, tool, "-V"); err != nil {
		return tool + " is not installed (apt-get install " + doctor.PackageOf(tool) + ")"
	}
	// This loads the kernel's module, as mounting would.
	fd, err := unix.Fsopen(string(fs), unix.FSOPEN_CLOEXEC)
	if err != nil {
		return fmt.Sprintf("this kernel has no %s (%v)", fs, err)
	}
	unix.Close(fd)
	return ""
}

func fromSnapshot(snapshot *demoVolume) *csi.VolumeContentSource {
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
		Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: snapshot.id}}}
}

// create: the first filesystem is thick, as volumes are by default; the others are thin.
func (d *demonstration) create(v *demoVolume, size int64, source *csi.VolumeContentSource) {
	what := "CreateVolume " + v.name
	switch {
	case source.GetVolume() != nil:
		what += " (a copy of data, mounted)"
	case source.GetSnapshot() != nil:
		what += " (from the snapshot)"
	}
	d.step(what, func(ctx context.Context) (string, error) {
		provisioning := "thin"
		if v.fs == filesystem.Ext4 || v.fs == "" {
			provisioning = "thick"
		}
		response, err := d.CreateVolume(ctx, &csi.CreateVolumeRequest{Name: v.name, CapacityRange: &csi.CapacityRange{RequiredBytes: size},
			VolumeCapabilities: []*csi.VolumeCapability{v.capability(writer)}, VolumeContentSource: source,
			Parameters: map[string]string{"provisioning": provisioning}})
		if err != nil {
			return "", err
		}
		d.volumes++
		v.id, v.size = response.GetVolume().GetVolumeId(), size
		if got := response.GetVolume().GetCapacityBytes(); got != size {
			return "", fmt.Errorf("asked for %d bytes, got %d", size, got)
		}
		return "", nil
	}, v)
}

const writer = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER

func (d *demonstration) claim(v *demoVolume) {
	d.step("ControllerPublishVolume "+v.name, func(ctx context.Context) (string, error) {
		return "claimed by node " + demoNode, d.doClaim(ctx, v)
	}, v)
}

func (d *demonstration) doClaim(ctx context.Context, v *demoVolume) error {
	response, err := d.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{
		VolumeId: v.id, NodeId: demoNode, VolumeCapability: v.capability(writer)})
	v.context = response.GetPublishContext()
	return err
}

func (d *demonstration) stage(v *demoVolume) {
	d.step("NodeStageVolume "+v.name, func(ctx context.Context) (string, error) { return "", d.doStage(ctx, v) }, v)
}

func (d *demonstration) doStage(ctx context.Context, v *demoVolume) error {
	if err := os.MkdirAll(v.staging(), 0o750); err != nil {
		return err
	}
	_, err := d.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: v.id, PublishContext: v.context,
		StagingTargetPath: v.staging(), VolumeCapability: v.capability(writer)})
	if err == nil {
		v.at[v.staging()] = false
	}
	return err
}

func (d *demonstration) publish(v *demoVolume) {
	d.step("NodePublishVolume "+v.name, func(ctx context.Context) (string, error) { return "", d.doPublish(ctx, v, pod, false) }, v)
}

func (d *demonstration) doPublish(ctx context.Context, v *demoVolume, pod string, readOnly bool) error {
	target := v.target(pod)
	if err := os.MkdirAll(filepath.Dir(target), 0o750); err != nil {
		return err
	}
	_, err := d.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: v.id, PublishContext: v.context,
		StagingTargetPath: v.staging(), TargetPath: target, VolumeCapability: v.capability(writer), Readonly: readOnly})
	if err == nil {
		v.at[target] = readOnly
	}
	return err
}

// use claims, stages and publishes in one step.
func (d *demonstration) use(v *demoVolume) {
	d.step("claim, stage and publish "+v.name, func(ctx context.Context) (string, error) {
		return "", inTurn(
			func() error { return d.doClaim(ctx, v) },
			func() error { return d.doStage(ctx, v) },
			func() error { return d.doPublish(ctx, v, pod, false) })
	}, v)
}

// inTurn calls one after the other, up to the first error.
func inTurn(calls ...func() error) error {
	for _, call := range calls {
		if err := call(); err != nil {
			return err
		}
	}
	return nil
}

// write writes files and returns their checksum.
func (d *demonstration) write(v *demoVolume, seed uint64, bytes int64) (sum string) {
	d.step(fmt.Sprintf("write 16 files, %s, to %s", machine.Size(bytes), v.name), func(context.Context) (_ string, err error) {
		if err := writeFiles(v.target(pod), seed, 16, bytes); err != nil {
			return "", err
		}
		sum, err = checksum(v.target(pod))
		return "sha256 " + short(sum), err
	}, v)
	return sum
}

func short(sum string) string { return sum[:min(12, len(sum))] }

// stats compares what the driver says with statfs(2).
func (d *demonstration) stats(v *demoVolume) {
	d.step("NodeGetVolumeStats "+v.name, func(ctx context.Context) (string, error) {
		response, err := d.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: v.id, VolumePath: v.target(pod), StagingTargetPath: v.staging()})
		if err != nil {
			return "", err
		}
		var st unix.Statfs_t
		if err := unix.Statfs(v.target(pod), &st); err != nil {
			return "", err
		}
		for _, usage := range response.GetUsage() {
			total, available := int64(st.Blocks)*st.Frsize, int64(st.Bavail)*st.Frsize
			if usage.GetUnit() == csi.VolumeUsage_INODES {
				total, available = int64(st.Files), int64(st.Ffree)
			}
			if usage.GetTotal() != total || usage.GetAvailable() != available {
				return "", fmt.Errorf("%s: the driver says %d of %d are free, statfs says %d of %d", usage.GetUnit(), usage.GetAvailable(), usage.GetTotal(), available, total)
			}
		}
		return fmt.Sprintf("bytes and inodes are those of statfs, %d of %d inodes free", st.Ffree, st.Files), nil
	}, v)
}

// cut snapshots a volume that is being written to. It returns how many records of the
// writer's journal were on disk before and after: a snapshot has a number between.
func (d *demonstration) cut(snapshot, source *demoVolume) (first, last int64) {
	var journal *journalWriter
	d.step("start a writer in "+source.name, func(context.Context) (_ string, err error) {
		if journal, err = startJournal(source.target(pod)); err == nil {
			err = journal.wrote(20)
		}
		return "appends records, each on disk before the next", err
	}, source)
	d.step("CreateSnapshot "+snapshot.name, func(ctx context.Context) (string, error) {
		first = journal.synced.Load()
		response, err := d.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: snapshot.name, SourceVolumeId: source.id})
		last = journal.synced.Load() + 1 // one more may be written and not known to be on disk
		if err == nil && !response.GetSnapshot().GetReadyToUse() {
			err = errors.New("the snapshot is not ready")
		}
		snapshot.id, snapshot.size = response.GetSnapshot().GetSnapshotId(), source.size
		d.cuts++
		return "", err
	}, snapshot)
	if journal == nil {
		return first, last
	}
	if d.failed != nil {
		journal.cancel()
		return first, last
	}
	d.step("stop the writer in "+source.name, func(context.Context) (string, error) {
		err := errors.Join(journal.wrote(20), journal.stop())
		return fmt.Sprintf("%d records; the longest wait for one was %d ms", journal.synced.Load(), journal.longest().Milliseconds()), err
	}, source)
	return first, last
}

// expand grows a volume that is in use. Where ext4 cannot grow while it is mounted, it
// grows when it is staged again.
func (d *demonstration) expand(v *demoVolume, larger int64) {
	d.step("ControllerExpandVolume "+v.name, func(ctx context.Context) (string, error) {
		response, err := d.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{VolumeId: v.id,
			CapacityRange: &csi.CapacityRange{RequiredBytes: larger}, VolumeCapability: v.capability(writer)})
		if err != nil {
			return "", err
		}
		v.size = larger
		if response.GetNodeExpansionRequired() != (v.fs != "") {
			return "", fmt.Errorf("node_expansion_required is %v", response.GetNodeExpansionRequired())
		}
		return "online", nil
	}, v)
	if v.fs == "" {
		return
	}
	online := filesystem.GrowsMounted(v.fs)
	d.step("NodeExpandVolume "+v.name, func(ctx context.Context) (string, error) {
		_, err := d.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{VolumeId: v.id, VolumePath: v.target(pod), StagingTargetPath: v.staging(),
			CapacityRange: &csi.CapacityRange{RequiredBytes: larger}, VolumeCapability: v.capability(writer)})
		if !online && status.Code(err) == codes.FailedPrecondition {
			return "not online: this process lacks CAP_SYS_RESOURCE, which ext4 asks for", nil
		}
		if err == nil {
			v.fsSize = larger * 3 / 4 // what a filesystem keeps for itself is its own affair
		}
		return "online", err
	}, v)
	if online {
		return
	}
	d.step("unpublish, unstage, stage, publish "+v.name, func(ctx context.Context) (string, error) {
		err := inTurn(
			func() error { return d.doUnpublish(ctx, v, pod) },
			func() error { return d.doUnstage(ctx, v) },
			func() error { return d.doStage(ctx, v) },
			func() error { return d.doPublish(ctx, v, pod, false) })
		v.fsSize = larger * 3 / 4
		return "so it has grown before it was mounted again", err
	}, v)
}

// compare makes sure that a volume has the files with a checksum.
func (d *demonstration) compare(v *demoVolume, want, words string) {
	d.step("compare "+v.name, func(context.Context) (string, error) {
		have, err := checksum(v.target(pod))
		if err == nil && have != want {
			err = fmt.Errorf("its files have the checksum %s, not %s", have, want)
		}
		return "sha256 " + short(have) + ", " + words, err
	}, v)
}

// compareJournal makes sure that a restore holds a point in time between two records.
func (d *demonstration) compareJournal(v *demoVolume, first, last int64) {
	d.step("compare the writer's journal in "+v.name, func(context.Context) (string, error) {
		n, err := readJournal(v.target(pod))
		if err == nil && (n < first || n > last) {
			err = fmt.Errorf("it has %d records; %d were on disk before the snapshot, %d after", n, first, last)
		}
		return fmt.Sprintf("%d whole records; there were %d before the snapshot and %d after it", n, first, last), err
	})
}

// readOnly publishes a volume once more, for reading, to another pod.
func (d *demonstration) readOnly(v *demoVolume, sum string) {
	const reader = "reader"
	d.step("NodePublishVolume "+v.name+", read-only", func(ctx context.Context) (string, error) { return "", d.doPublish(ctx, v, reader, true) }, v)
	d.step("write to the read-only "+v.name, func(context.Context) (string, error) {
		if have, err := checksum(v.target(reader)); err != nil || have != sum {
			return "", errors.Join(errors.New("its files are not those of the volume"), err)
		}
		f, err := os.Create(filepath.Join(v.target(reader), "file-0"))
		if err == nil {
			f.Close()
			return "", errors.New("the kernel let it be written")
		}
		if !errors.Is(err, unix.EROFS) {
			return "", err
		}
		return "reads as it should; the kernel refuses the write: " + unix.EROFS.Error(), nil
	})
	d.step("NodeUnpublishVolume "+v.name+", read-only", func(ctx context.Context) (string, error) { return "", d.doUnpublish(ctx, v, reader) }, v)
}

// group cuts several volumes at one moment.
func (d *demonstration) group(sources ...*demoVolume) {
	var ids, names []string
	for _, v := range sources {
		ids, names = append(ids, v.id), append(names, v.name)
	}
	var group *csi.VolumeGroupSnapshot
	count := func() (n int, err error) {
		entries, err := os.ReadDir(filepath.Join(d.dir, "pool", "snapshots"))
		for _, entry := range entries {
			if strings.HasSuffix(entry.Name(), ".img") {
				n++
			}
		}
		return n, err
	}
	var before int
	d.step("CreateVolumeGroupSnapshot "+strings.Join(names, "+"), func(ctx context.Context) (string, error) {
		var err error
		if before, err = count(); err != nil {
			return "", err
		}
		response, err := d.CreateVolumeGroupSnapshot(ctx, &csi.CreateVolumeGroupSnapshotRequest{Name: "group", SourceVolumeIds: ids})
		if err != nil {
			return "", err
		}
		group = response.GetGroupSnapshot()
		d.cuts += len(group.GetSnapshots())
		after, err := count()
		if err == nil && (after-before != len(ids) || len(group.GetSnapshots()) != len(ids) || !group.GetReadyToUse()) {
			err = fmt.Errorf("%d snapshots in the answer and %d new images, not %d", len(group.GetSnapshots()), after-before, len(ids))
		}
		return fmt.Sprintf("all frozen at one moment; %d new images in pool/snapshots", after-before), err
	})
	d.step("DeleteVolumeGroupSnapshot", func(ctx context.Context) (string, error) {
		var members []string
		for _, snapshot := range group.GetSnapshots() {
			members = append(members, snapshot.GetSnapshotId())
		}
		_, err := d.DeleteVolumeGroupSnapshot(ctx, &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: group.GetGroupSnapshotId(), SnapshotIds: members})
		if err != nil {
			return "", err
		}
		after, err := count()
		if err == nil && after != before {
			err = fmt.Errorf("%d images too many in pool/snapshots", after-before)
		}
		return "both images are gone again", err
	})
}

// block is the life of a raw block volume.
func (d *demonstration) block() {
	d.heading("raw block: the device itself")
	raw := d.volume("raw", "")
	d.create(raw, 32*mib, nil)
	d.use(raw)
	const first, last = 0, 31 * mib
	d.step("write 2 MiB to the device, past all caches", func(context.Context) (string, error) {
		return "at its begin and at its end", inTurn(
			func() error { return writeDevice(raw.target(pod), first, 5) },
			func() error { return writeDevice(raw.target(pod), last, 6) })
	}, raw)
	d.expand(raw, 64*mib)
	d.step("read the device, past all caches", func(context.Context) (string, error) {
		return "what was written is there, and the new space reads as zeros", inTurn(
			func() error { return checkDevice(raw.target(pod), first, 5) },
			func() error { return checkDevice(raw.target(pod), last, 6) },
			func() error { return checkDevice(raw.target(pod), 32*mib, 0) },
			func() error { return checkDevice(raw.target(pod), 63*mib, 0) })
	}, raw)
	d.retire(raw)
}

// ephemeral is the life of a volume that comes and goes with its pod.
func (d *demonstration) ephemeral() {
	d.heading("inline ephemeral: a volume that comes and goes with its pod")
	v := d.volume("csi-scratch", filesystem.Ext4)
	v.id = v.name // the CO's, not the driver's
	d.step("NodePublishVolume "+v.name, func(ctx context.Context) (string, error) {
		target := v.target(pod)
		if err := os.MkdirAll(filepath.Dir(target), 0o750); err != nil {
			return "", err
		}
		_, err := d.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: v.id, TargetPath: target,
			VolumeCapability: v.capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER),
			VolumeContext:    map[string]string{"csi.storage.k8s.io/ephemeral": "true", "size": "32Mi"}})
		if err == nil {
			d.volumes++
			v.size, v.at[target] = 32*mib, false
		}
		return "", err
	}, v)
	d.write(v, 7, 4*mib)
	d.step("NodeUnpublishVolume "+v.name, func(ctx context.Context) (string, error) {
		err := d.doUnpublish(ctx, v, pod)
		v.size = 0
		return "", err
	}, v)
}

func (d *demonstration) unpublish(v *demoVolume) {
	d.step("NodeUnpublishVolume "+v.name, func(ctx context.Context) (string, error) { return "", d.doUnpublish(ctx, v, pod) }, v)
}

func (d *demonstration) doUnpublish(ctx context.Context, v *demoVolume, pod string) error {
	target := v.target(pod)
	_, err := d.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: v.id, TargetPath: target})
	if err != nil {
		return err
	}
	delete(v.at, target)
	if _, err := os.Lstat(target); !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("the target %s is still there", target)
	}
	return nil
}

func (d *demonstration) unstage(v *demoVolume) {
	d.step("NodeUnstageVolume "+v.name, func(ctx context.Context) (string, error) { return "", d.doUnstage(ctx, v) }, v)
}

func (d *demonstration) doUnstage(ctx context.Context, v *demoVolume) error {
	_, err := d.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging()})
	if err != nil {
		return err
	}
	delete(v.at, v.staging())
	return os.Remove(v.staging()) // fails if it is not empty
}

func (d *demonstration) release(v *demoVolume) {
	d.step("ControllerUnpublishVolume "+v.name, func(ctx context.Context) (string, error) {
		return "free for any node", d.doRelease(ctx, v)
	}, v)
}

func (d *demonstration) doRelease(ctx context.Context, v *demoVolume) error {
	_, err := d.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: v.id, NodeId: demoNode})
	return err
}

func (d *demonstration) remove(v *demoVolume) {
	d.step("DeleteVolume "+v.name, func(ctx context.Context) (string, error) { return "", d.doRemove(ctx, v) }, v)
}

func (d *demonstration) doRemove(ctx context.Context, v *demoVolume) error {
	_, err := d.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.id})
	v.size = 0
	return err
}

// retire ends the life of a volume in one step.
func (d *demonstration) retire(v *demoVolume) {
	d.step("unpublish, unstage, release, delete "+v.name, func(ctx context.Context) (string, error) {
		return "", inTurn(
			func() error { return d.doUnpublish(ctx, v, pod) },
			func() error { return d.doUnstage(ctx, v) },
			func() error { return d.doRelease(ctx, v) },
			func() error { return d.doRemove(ctx, v) })
	}, v)
}

// drop deletes a snapshot: what was restored from it does not need it any more.
func (d *demonstration) drop(snapshot *demoVolume) {
	d.step("DeleteSnapshot "+snapshot.name, func(ctx context.Context) (string, error) {
		_, err := d.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: snapshot.id})
		snapshot.size = 0
		return "", err
	}, snapshot)
}
