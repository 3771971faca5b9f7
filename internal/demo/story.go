package demo

import (
	"cmp"
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

	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/command"
	"github.com/ashlar-csi/ashlar/internal/doctor"
	"github.com/ashlar-csi/ashlar/internal/machine"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
)

// This file has the steps of the demo, which call the driver as a container orchestrator does.

const (
	mib = 1 << 20
	pod = "pod" // the pod that uses the volumes
)

func (d *demonstration) story() {
	d.ext4()
	d.shortLife(filesystem.XFS)
	d.shortLife(filesystem.Btrfs)
	d.block()
	d.ephemeral()
}

// ext4 is the whole life of a volume, its snapshots and its copies.
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
	d.create(clone, 128*mib, data)
	d.use(clone)
	restore := d.volume("restore", filesystem.Ext4)
	d.create(restore, 96*mib, snapshot)
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

// shortLife is a shorter life of a thin volume with a filesystem, if kernel and tools have that.
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
	d.create(restore, size, snapshot)
	d.use(restore)
	d.compare(restore, before, "as the source was at the snapshot")
	d.compareJournal(restore, first, last)
	d.drop(snapshot)
	d.retire(restore)
	d.retire(v)
}

// lacks returns what this machine lacks for a filesystem; empty if nothing.
func lacks(ctx context.Context, fs filesystem.Type) string {
	tool := "mkfs." + string(fs)
	if _, _, err := command.Run(ctx, tool, "-V"); err != nil {
		return tool + " is not installed (apt-get install " + doctor.PackageOf(tool) + ")"
	}
	// This loads the kernel's module, as a mount does.
	fd, err := unix.Fsopen(string(fs), unix.FSOPEN_CLOEXEC)
	if err != nil {
		return fmt.Sprintf("this kernel has no %s (%v)", fs, err)
	}
	unix.Close(fd)
	return ""
}

// create makes a volume: thick with ext4 or as a raw device, thin with other filesystems.
func (d *demonstration) create(v *demoVolume, size int64, source *demoVolume) {
	r := co.Request(v.Name, cmp.Or(string(v.fs), co.Block), size)
	what := "CreateVolume " + v.Name
	switch {
	case source == nil:
	case source.kind == blockdev.Volume:
		what += " (a copy of data, mounted)"
		co.FromVolume(r, source.ID)
	default:
		what += " (from the snapshot)"
		co.FromSnapshot(r, source.ID)
	}
	d.step(what, func(ctx context.Context) (string, error) {
		r.Parameters = map[string]string{"provisioning": "thin"}
		if v.fs == filesystem.Ext4 || v.fs == "" {
			r.Parameters["provisioning"] = "thick"
		}
		made, err := d.Create(ctx, r)
		if err != nil {
			return "", err
		}
		d.volumes++
		v.ID, v.size = made.ID, size
		if made.Size != size {
			return "", fmt.Errorf("asked for %d bytes, got %d", size, made.Size)
		}
		return "", nil
	}, v)
}

func (d *demonstration) claim(v *demoVolume) {
	d.step("ControllerPublishVolume "+v.Name, func(ctx context.Context) (string, error) {
		return "claimed by node " + demoNode, v.Claim(ctx)
	}, v)
}

func (d *demonstration) stage(v *demoVolume) {
	d.step("NodeStageVolume "+v.Name, func(ctx context.Context) (string, error) { return "", v.stage(ctx) }, v)
}

func (v *demoVolume) stage(ctx context.Context) error {
	err := v.Stage(ctx)
	if err == nil {
		v.at[v.Staging] = false
	}
	return err
}

func (d *demonstration) publish(v *demoVolume) {
	d.step("NodePublishVolume "+v.Name, func(ctx context.Context) (string, error) { return "", v.publish(ctx, pod, false) }, v)
}

func (v *demoVolume) publish(ctx context.Context, pod string, readOnly bool) error {
	target := v.Target(pod)
	err := v.Publish(ctx, target, readOnly)
	if err == nil {
		v.at[target] = readOnly
	}
	return err
}

// use claims, stages and publishes a volume in one step.
func (d *demonstration) use(v *demoVolume) {
	d.step("claim, stage and publish "+v.Name, func(ctx context.Context) (string, error) { return "", v.up(ctx) }, v)
}

func (v *demoVolume) up(ctx context.Context) error {
	target, err := v.Up(ctx)
	if err == nil {
		v.at[v.Staging], v.at[target] = false, false
	}
	return err
}

// write writes files to a volume and returns their checksum.
func (d *demonstration) write(v *demoVolume, seed uint64, bytes int64) (sum string) {
	d.step(fmt.Sprintf("write 16 files, %s, to %s", machine.Size(bytes), v.Name), func(context.Context) (_ string, err error) {
		if err := writeFiles(v.Target(pod), seed, 16, bytes); err != nil {
			return "", err
		}
		sum, err = checksum(v.Target(pod))
		return "sha256 " + short(sum), err
	}, v)
	return sum
}

func short(sum string) string { return sum[:min(12, len(sum))] }

// stats compares the answer of NodeGetVolumeStats with statfs(2).
func (d *demonstration) stats(v *demoVolume) {
	d.step("NodeGetVolumeStats "+v.Name, func(ctx context.Context) (string, error) {
		response, err := d.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: v.ID, VolumePath: v.Target(pod), StagingTargetPath: v.Staging})
		if err != nil {
			return "", err
		}
		var st unix.Statfs_t
		if err := unix.Statfs(v.Target(pod), &st); err != nil {
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

// cut makes a snapshot of a volume that is being written to. It returns how many records of the writer's journal were on disk before and after: the snapshot
// has a number between.
func (d *demonstration) cut(snapshot, source *demoVolume) (first, last int64) {
	var journal *journalWriter
	d.step("start a writer in "+source.Name, func(context.Context) (_ string, err error) {
		if journal, err = startJournal(source.Target(pod)); err == nil {
			err = journal.wrote(20)
		}
		return "appends records, each on disk before the next", err
	}, source)
	d.step("CreateSnapshot "+snapshot.Name, func(ctx context.Context) (string, error) {
		first = journal.synced.Load()
		made, err := source.Snapshot(ctx, snapshot.Name)
		last = journal.synced.Load() + 1 // one more may be written, and not known to be on disk
		snapshot.ID, snapshot.size = made.GetSnapshotId(), source.size
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
	d.step("stop the writer in "+source.Name, func(context.Context) (string, error) {
		err := errors.Join(journal.wrote(20), journal.stop())
		return fmt.Sprintf("%d records; the longest wait for one was %d ms", journal.synced.Load(), journal.longest().Milliseconds()), err
	}, source)
	return first, last
}

// expand expands a volume in use. If ext4 cannot grow while it is mounted, it grows when it is staged again.
func (d *demonstration) expand(v *demoVolume, larger int64) {
	d.step("ControllerExpandVolume "+v.Name, func(ctx context.Context) (string, error) {
		err := v.Expand(ctx, larger)
		if err == nil {
			v.size = larger
		}
		return "online", err
	}, v)
	if v.fs == "" {
		return
	}
	online := filesystem.GrowsMounted(v.fs)
	d.step("NodeExpandVolume "+v.Name, func(ctx context.Context) (string, error) {
		err := v.NodeExpand(ctx, v.Target(pod))
		if !online && status.Code(err) == codes.FailedPrecondition {
			return "not online: this process lacks CAP_SYS_RESOURCE, which ext4 asks for", nil
		}
		if err == nil {
			v.fsSize = larger * 3 / 4 // the filesystem needs some space for itself
		}
		return "online", err
	}, v)
	if online {
		return
	}
	d.step("unpublish, unstage, stage, publish "+v.Name, func(ctx context.Context) (string, error) {
		err := co.InTurn(
			func() error { return v.unpublish(ctx, pod) },
			func() error { return v.unstage(ctx) },
			func() error { return v.stage(ctx) },
			func() error { return v.publish(ctx, pod, false) })
		v.fsSize = larger * 3 / 4
		return "so it has grown before it was mounted again", err
	}, v)
}

// compare checks that the files of a volume have a checksum.
func (d *demonstration) compare(v *demoVolume, want, words string) {
	d.step("compare "+v.Name, func(context.Context) (string, error) {
		have, err := checksum(v.Target(pod))
		if err == nil && have != want {
			err = fmt.Errorf("its files have the checksum %s, not %s", have, want)
		}
		return "sha256 " + short(have) + ", " + words, err
	}, v)
}

// compareJournal checks that the journal in a volume has first to last records.
func (d *demonstration) compareJournal(v *demoVolume, first, last int64) {
	d.step("compare the writer's journal in "+v.Name, func(context.Context) (string, error) {
		n, err := readJournal(v.Target(pod))
		if err == nil && (n < first || n > last) {
			err = fmt.Errorf("it has %d records; %d were on disk before the snapshot, %d after", n, first, last)
		}
		return fmt.Sprintf("%d whole records; there were %d before the snapshot and %d after it", n, first, last), err
	})
}

// readOnly publishes a volume once more, read-only, to another pod.
func (d *demonstration) readOnly(v *demoVolume, sum string) {
	const reader = "reader"
	d.step("NodePublishVolume "+v.Name+", read-only", func(ctx context.Context) (string, error) { return "", v.publish(ctx, reader, true) }, v)
	d.step("write to the read-only "+v.Name, func(context.Context) (string, error) {
		if have, err := checksum(v.Target(reader)); err != nil || have != sum {
			return "", errors.Join(errors.New("its files are not those of the volume"), err)
		}
		f, err := os.Create(filepath.Join(v.Target(reader), "file-0"))
		if err == nil {
			f.Close()
			return "", errors.New("the kernel let it be written")
		}
		if !errors.Is(err, unix.EROFS) {
			return "", err
		}
		return "reads as it should; the kernel refuses the write: " + unix.EROFS.Error(), nil
	})
	d.step("NodeUnpublishVolume "+v.Name+", read-only", func(ctx context.Context) (string, error) { return "", v.unpublish(ctx, reader) }, v)
}

// group makes snapshots of several volumes at one point in time, and deletes them.
func (d *demonstration) group(sources ...*demoVolume) {
	var ids, names []string
	for _, v := range sources {
		ids, names = append(ids, v.ID), append(names, v.Name)
	}
	var group *csi.VolumeGroupSnapshot
	var before int
	d.step("CreateVolumeGroupSnapshot "+strings.Join(names, "+"), func(ctx context.Context) (string, error) {
		var err error
		if before, err = d.snapshotImages(); err != nil {
			return "", err
		}
		if group, err = d.Group(ctx, "group", ids...); err != nil {
			return "", err
		}
		d.cuts += len(group.GetSnapshots())
		after, err := d.snapshotImages()
		if err == nil && after-before != len(ids) {
			err = fmt.Errorf("%d new images, not %d", after-before, len(ids))
		}
		return fmt.Sprintf("all frozen at one moment; %d new images in pool/snapshots", after-before), err
	})
	d.step("DeleteVolumeGroupSnapshot", func(ctx context.Context) (string, error) {
		if err := d.RemoveGroup(ctx, group.GetGroupSnapshotId(), group.GetSnapshots()...); err != nil {
			return "", err
		}
		after, err := d.snapshotImages()
		if err == nil && after != before {
			err = fmt.Errorf("%d images too many in pool/snapshots", after-before)
		}
		return "both images are gone again", err
	})
}

// snapshotImages counts the images of snapshots in the pool.
func (d *demonstration) snapshotImages() (int, error) {
	images, err := filepath.Glob(filepath.Join(d.dir, "pool", "snapshots", "*.img"))
	return len(images), err
}

// block is the life of a raw block volume.
func (d *demonstration) block() {
	d.heading("raw block: the device itself")
	raw := d.volume("raw", "")
	d.create(raw, 32*mib, nil)
	d.use(raw)
	const first, last = 0, 31 * mib
	d.step("write 2 MiB to the device, past all caches", func(context.Context) (string, error) {
		return "at its begin and at its end", co.InTurn(
			func() error { return writeDevice(raw.Target(pod), first, 5) },
			func() error { return writeDevice(raw.Target(pod), last, 6) })
	}, raw)
	d.expand(raw, 64*mib)
	d.step("read the device, past all caches", func(context.Context) (string, error) {
		return "what was written is there, and the new space reads as zeros", co.InTurn(
			func() error { return checkDevice(raw.Target(pod), first, 5) },
			func() error { return checkDevice(raw.Target(pod), last, 6) },
			func() error { return checkDevice(raw.Target(pod), 32*mib, 0) },
			func() error { return checkDevice(raw.Target(pod), 63*mib, 0) })
	}, raw)
	d.retire(raw)
}

// ephemeral is the life of an inline ephemeral volume.
func (d *demonstration) ephemeral() {
	d.heading("inline ephemeral: a volume that comes and goes with its pod")
	v := d.volume("csi-scratch", filesystem.Ext4)
	v.Volume = d.Inline(v.Name, co.Capability(string(v.fs), co.Writer), map[string]string{"size": "32Mi"})
	d.step("NodePublishVolume "+v.Name, func(ctx context.Context) (string, error) {
		err := v.publish(ctx, pod, false)
		if err == nil {
			d.volumes++
			v.size = 32 * mib
		}
		return "", err
	}, v)
	d.write(v, 7, 4*mib)
	d.step("NodeUnpublishVolume "+v.Name, func(ctx context.Context) (string, error) {
		err := v.unpublish(ctx, pod)
		v.size = 0
		return "", err
	}, v)
}

func (d *demonstration) unpublish(v *demoVolume) {
	d.step("NodeUnpublishVolume "+v.Name, func(ctx context.Context) (string, error) { return "", v.unpublish(ctx, pod) }, v)
}

func (v *demoVolume) unpublish(ctx context.Context, pod string) error {
	target := v.Target(pod)
	if err := v.Unpublish(ctx, target); err != nil {
		return err
	}
	delete(v.at, target)
	if machine.Exists(target) {
		return fmt.Errorf("the target %s is still there", target)
	}
	return nil
}

func (d *demonstration) unstage(v *demoVolume) {
	d.step("NodeUnstageVolume "+v.Name, func(ctx context.Context) (string, error) { return "", v.unstage(ctx) }, v)
}

func (v *demoVolume) unstage(ctx context.Context) error {
	if err := v.Unstage(ctx); err != nil {
		return err
	}
	delete(v.at, v.Staging)
	return os.Remove(v.Staging) // fails if it is not empty
}

func (d *demonstration) release(v *demoVolume) {
	d.step("ControllerUnpublishVolume "+v.Name, func(ctx context.Context) (string, error) {
		return "free for any node", v.Release(ctx)
	}, v)
}

func (d *demonstration) remove(v *demoVolume) {
	d.step("DeleteVolume "+v.Name, func(ctx context.Context) (string, error) {
		v.size = 0
		return "", v.Delete(ctx)
	}, v)
}

// retire ends the life of a volume in one step.
func (d *demonstration) retire(v *demoVolume) {
	d.step("unpublish, unstage, release, delete "+v.Name, func(ctx context.Context) (string, error) {
		err := co.InTurn(
			func() error { return v.Down(ctx, v.Target(pod)) },
			func() error { return v.Delete(ctx) })
		if err == nil {
			clear(v.at)
			v.size = 0
		}
		return "", err
	}, v)
}

// drop deletes a snapshot. What was restored from it stays.
func (d *demonstration) drop(snapshot *demoVolume) {
	d.step("DeleteSnapshot "+snapshot.Name, func(ctx context.Context) (string, error) {
		snapshot.size = 0
		return "", d.RemoveSnapshot(ctx, snapshot.ID)
	}, snapshot)
}
