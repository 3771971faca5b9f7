package life

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

// TestDamagedFilesystem: a filesystem that is damaged beyond what is repaired by itself is
// neither mounted nor made anew, and the next volume does not notice.
func TestDamagedFilesystem(t *testing.T) {
	d := start(t, drivertest.Options{})
	for _, kind := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			d := d.in(t)
			r := co.Request(kind, kind, smallest[kind])
			r.Parameters = map[string]string{"provisioning": "thin"}
			v, other := d.made(r), d.made(co.Request("other-"+kind, "ext4", smallest["ext4"]))
			target := v.running()
			write(t, v.File(target), 1)
			check.OK(t, v.unpublish(target))
			check.OK(t, v.unstage())
			before, err := os.ReadFile(v.image())
			check.OK(t, err)
			// All of the superblock but what says which filesystem it is.
			switch noise := strings.Repeat("\x5a\xa5noise!", 128); kind {
			case "ext4":
				put(t, v.image(), 1024, noise[:56])
				put(t, v.image(), 1024+60, noise[60:])
			case "xfs":
				put(t, v.image(), 4, noise[:508])
			case "btrfs":
				put(t, v.image(), 0x10000, noise[:64])
				put(t, v.image(), 0x10000+72, noise[72:])
				put(t, v.image(), 64*miB, noise)
			}
			damaged := checksum(t, v.image())
			for range 2 {
				check.Code(t, v.stage(), codes.DataLoss, kind, "nothing was mounted")
			}
			if checksum(t, v.image()) != damaged {
				t.Error("the image was written to")
			}
			if loops := remaining(v.image()); len(loops) > 0 {
				t.Errorf("still attached as %v", loops)
			}
			check.OK(t, other.down(other.running()))
			check.OK(t, os.WriteFile(v.image(), before, 0o600)) // as from a backup
			check.OK(t, v.stage())
			check.OK(t, v.publish(target, false))
			holds(t, v.File(target), 1)
			check.OK(t, v.down(target))
		})
	}
	d.nothingLeft()
}

// TestDamagedRecordInUse: a record that becomes unreadable while its volume is mounted is
// found at the next start. The volume can be taken down, which needs no record; whatever
// needs it says that it is damaged, and touches nothing. The next volume does not notice.
func TestDamagedRecordInUse(t *testing.T) {
	future := func(rec []byte) []byte {
		body := "{}\n"
		header := fmt.Sprintf("ashlar-record 3 gen=99 len=%d ", len(body))
		sum := crc32.Checksum([]byte(header+body), crc32.MakeTable(crc32.Castagnoli))
		return append([]byte(fmt.Sprintf("%scrc32c=%08x\n%s", header, sum, body)), rec[len(rec)/2:]...)
	}
	for name, damage := range map[string]func([]byte) []byte{
		"empty":  func([]byte) []byte { return nil },
		"noise":  func(rec []byte) []byte { return bytes.Repeat([]byte("\x9e\x01noise\n"), len(rec)/8) },
		"future": future,
	} {
		t.Run(name, func(t *testing.T) {
			d := start(t, drivertest.Options{})
			v, other := d.made(co.Request("volume", "ext4", smallest["ext4"])), d.made(co.Request("other", "ext4", smallest["ext4"]))
			target, others := v.running(), other.running()
			write(t, v.File(target), 1)
			rec, err := os.ReadFile(v.record())
			check.OK(t, err)
			damaged := damage(rec)
			if bytes.Equal(rec, damaged) {
				t.Fatal("it is not damaged")
			}
			check.OK(t, os.WriteFile(v.record(), damaged, 0o600))
			d = d.restart()
			v, other = d.volume(v.ID, v.Name, v.Capability), d.volume(other.ID, other.Name, other.Capability)
			holds(t, v.File(target), 1) // its pod goes on
			expect(t, v.problems(), "DATA_LOSS RecordDamaged")
			expect(t, other.problems())
			check.OK(t, d.probe())
			check.Code(t, v.publish(v.Target("second"), false), codes.DataLoss)
			check.Code(t, v.expand(2*smallest["ext4"]), codes.DataLoss)
			_, err = v.snapshot("cut")
			check.Code(t, err, codes.DataLoss)
			check.OK(t, v.unpublish(target))
			check.OK(t, v.unstage())
			check.Code(t, v.stage(), codes.DataLoss, "record")
			check.Code(t, v.delete(), codes.FailedPrecondition, "record")
			if now, err := os.ReadFile(v.record()); err != nil || !bytes.Equal(now, damaged) {
				t.Errorf("the record was changed (%v)", err)
			}
			if loops := remaining(v.image()); len(loops) > 0 {
				t.Errorf("still attached as %v", loops)
			}
			check.OK(t, os.WriteFile(v.record(), rec, 0o600)) // as from a backup
			d = d.restart()
			v, other = d.volume(v.ID, v.Name, v.Capability), d.volume(other.ID, other.Name, other.Capability)
			check.OK(t, v.stage())
			check.OK(t, v.publish(target, false))
			holds(t, v.File(target), 1)
			check.OK(t, v.down(target))
			write(t, other.File(others), 2)
			check.OK(t, other.down(others))
			d.nothingLeft()
		})
	}
}

// TestNoSpaceAtAll: on a filesystem without a single free block volumes can be used and given
// up, and nothing is begun that could not be ended.
func TestNoSpaceAtAll(t *testing.T) {
	drivertest.NeedRoot(t)
	for _, fs := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fs, func(t *testing.T) {
			dir := newDir(t)
			drivertest.MountNew(t, fs, filepath.Join(dir, "pool"), 512*miB)
			directory := filepath.Join(dir, "pool")
			d := start(t, drivertest.Options{Dir: dir})
			v, idle := d.made(co.Request("volume", "ext4", smallest["ext4"])), d.made(co.Request("idle", "ext4", smallest["ext4"]))
			r := co.Request("thin", block, smallest[block])
			r.Parameters = map[string]string{"provisioning": "thin"}
			thin := d.made(r)
			cut, err := idle.snapshot("cut")
			check.OK(t, err)
			target := v.running()
			write(t, v.File(target), 1)
			check.OK(t, idle.claim())
			fill(t, directory, "filler")
			kept := d.inPool()

			_, err = d.create(co.Request("another", "ext4", smallest["ext4"]))
			check.Code(t, err, codes.ResourceExhausted)
			_, err = v.snapshot("another cut")
			check.Code(t, err, codes.ResourceExhausted)
			check.Code(t, v.expand(2*smallest["ext4"]), codes.OutOfRange, "not enough space", "docs/runbooks/pool-full.md")
			if fs != "btrfs" { // which keeps some for itself, of which it says nothing
				expect(t, d.storage(), "STORAGE_DEGRADED PoolNearlyFull")
			}
			if now := d.inPool(); !slices.Equal(now, kept) {
				t.Errorf("in the pool are %v, were %v", now, kept)
			}
			write(t, v.File(target), 2) // thick is thick
			check.OK(t, v.unpublish(target))
			check.OK(t, v.unstage())
			check.OK(t, v.release())
			d = d.restart()
			v, idle, thin = d.volume(v.ID, v.Name, v.Capability), d.volume(idle.ID, idle.Name, idle.Capability), d.volume(thin.ID, thin.Name, thin.Capability)
			check.OK(t, v.claim())
			check.OK(t, v.stage())
			check.OK(t, v.publish(target, false))
			holds(t, v.File(target), 2)

			// All can be deleted, with the disk as full as ever before each.
			for i, gone := range []func() error{thin.delete, func() error { return d.deleteSnapshot(cut.GetSnapshotId()) }, idle.release, idle.delete,
				func() error { return v.unpublish(target) }, v.unstage, v.release, v.delete} {
				fill(t, directory, fmt.Sprint("filler-", i))
				check.OK(t, gone())
			}
			d.nothingLeft()
			fillers, err := filepath.Glob(filepath.Join(directory, "filler*"))
			check.OK(t, err)
			for _, path := range fillers {
				check.OK(t, os.RemoveAll(path))
			}
			v = d.made(co.Request("volume", "ext4", smallest["ext4"]))
			check.OK(t, v.delete())
			d.nothingLeft()
		})
	}
}

// fill takes all space of a filesystem with one large file, and with many small ones what it keeps
// for those (btrfs has space for data and for metadata, and an end of each).
func fill(t testing.TB, directory, name string) {
	t.Helper()
	directory = filepath.Join(directory, name)
	err := os.Mkdir(directory, 0o700)
	if errors.Is(err, unix.ENOSPC) {
		return
	}
	check.OK(t, err)
	f, err := os.Create(filepath.Join(directory, "large"))
	if errors.Is(err, unix.ENOSPC) {
		return
	}
	check.OK(t, err)
	defer f.Close()
	var end int64
	for step := int64(64 * miB); step >= 4096; {
		if err := unix.Fallocate(int(f.Fd()), 0, end, step); err != nil {
			step /= 2
			continue
		}
		end += step
	}
	small := make([]byte, 2000)
	for i, misses := 0, 0; misses < 100; i++ {
		if os.WriteFile(filepath.Join(directory, fmt.Sprint(i)), small, 0o600) != nil {
			misses++
		}
	}
	if err := unix.Syncfs(int(f.Fd())); err != nil && !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
}

// TestPoolTurnsReadOnly: when the kernel finds the pool's filesystem damaged and stops writing
// to it, the pool says so, and refuses what it cannot keep; volumes are taken down all the same.
// Then it can be unmounted. Repaired, it has all that was synced, and no restart is needed.
func TestPoolTurnsReadOnly(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := newDir(t)
	drivertest.MountNew(t, "ext4", filepath.Join(dir, "pool"), 512*miB)
	directory := filepath.Join(dir, "pool")
	d := start(t, drivertest.Options{Dir: dir})
	v, rest := d.made(co.Request("volume", "ext4", smallest["ext4"])), d.made(co.Request("rest", "ext4", smallest["ext4"]))
	target := v.running()
	write(t, v.File(target), 1)
	expect(t, d.storage())
	// As after an error in its journal (ext4(5), abort); that it is read-only then is an error of mount(8).
	_, _ = command("mount", "-o", "remount,abort", directory)
	for deadline := time.Now().Add(time.Minute); len(d.storage()) == 0 && time.Now().Before(deadline); {
		time.Sleep(10 * time.Millisecond)
	}
	expect(t, d.storage(), "STORAGE_UNREACHABLE PoolReadOnly")
	_, err := d.create(co.Request("another", "ext4", smallest["ext4"]))
	check.Code(t, err, codes.Unavailable, "read-only")
	if room, err := d.GetCapacity(t.Context(), &csi.GetCapacityRequest{}); err != nil || room.GetAvailableCapacity() != 0 || room.GetMaximumVolumeSize().GetValue() != 0 { // with an error the provisioner leaves what it was told before
		t.Errorf("room: %v, %v", room, err)
	}
	_, err = v.snapshot("cut")
	check.Code(t, err, codes.Unavailable, "read-only")
	check.Code(t, rest.claim(), codes.Unavailable, "read-only")
	check.Code(t, rest.delete(), codes.Unavailable, "read-only")
	check.OK(t, v.unpublish(target))
	check.OK(t, v.unstage())

	// Nothing of it is attached any more: its operator can unmount and repair it while the driver runs.
	expect(t, d.storage(), "STORAGE_UNREACHABLE PoolReadOnly")
	drivertest.Unmount(t, directory)
	if out, err := fsck(filepath.Join(dir, "pool.image")); err != nil {
		t.Fatalf("repair the pool's filesystem: %v: %s", err, out)
	}
	drivertest.MountLoop(t, filepath.Join(dir, "pool.image"), directory)
	for deadline := time.Now().Add(time.Minute); len(d.storage()) > 0 && time.Now().Before(deadline); {
		time.Sleep(10 * time.Millisecond)
	}
	expect(t, d.storage())
	expect(t, v.problems())
	check.OK(t, v.stage())
	check.OK(t, v.publish(target, false))
	holds(t, v.File(target), 1)
	check.OK(t, v.down(target))
	check.OK(t, rest.down(rest.running()))
	d.nothingLeft()
}

// TestReboot: a reboot takes all mounts and devices away, and brings the pool's filesystem back
// later than the driver.
func TestReboot(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := newDir(t)
	drivertest.MountNew(t, "xfs", filepath.Join(dir, "pool"), 2<<30)
	directory := filepath.Join(dir, "pool")
	d := start(t, drivertest.Options{Dir: dir})
	r := co.Request("xfs", "xfs", smallest["xfs"])
	r.Parameters = map[string]string{"provisioning": "thin"}
	all := []*vol{d.made(co.Request("ext4", "ext4", smallest["ext4"])), d.made(r), d.made(co.Request("raw", block, smallest[block]))}
	for _, v := range all {
		write(t, v.File(v.running()), 1)
	}
	gone := func() {
		t.Helper()
		for _, v := range all {
			device := strings.TrimSpace(drivertest.Run(t, "losetup", "-n", "-O", "NAME", "-j", v.image()))
			staged := v.Staging
			if v.Block() {
				staged += "/device"
			}
			check.OK(t, unix.Unmount(v.Target("pod"), unix.MNT_DETACH))
			check.OK(t, unix.Unmount(staged, unix.MNT_DETACH))
			if v.Block() {
				drivertest.Run(t, "losetup", "-d", device)
			}
		}
	}
	// again brings them up from wherever they are, as the kubelet does.
	again := func() {
		t.Helper()
		for _, v := range all {
			target := v.Target("pod")
			check.OK(t, v.stage())
			check.OK(t, v.publish(target, false))
			holds(t, v.File(target), 1)
			expect(t, v.problems())
		}
	}

	// Behind the back of a driver that runs.
	gone()
	for _, v := range all {
		target := v.Target("pod")
		_, err := d.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: v.ID, VolumePath: target})
		check.Code(t, err, codes.NotFound)
		check.Code(t, v.publish(target, false), codes.FailedPrecondition, "not staged")
		check.OK(t, v.unpublish(target))
	}
	again()

	// The pool's filesystem goes away and comes back. The volumes go on.
	check.OK(t, unix.Unmount(directory, unix.MNT_DETACH))
	check.OK(t, d.probe())
	expect(t, d.storage(), "STORAGE_UNREACHABLE PoolUnavailable")
	for _, v := range all {
		expect(t, v.problems(), "INACCESSIBLE PoolUnavailable")
		holds(t, v.File(v.Target("pod")), 1)
	}
	_, err := d.create(co.Request("another", "ext4", smallest["ext4"]))
	check.Code(t, err, codes.Unavailable, "mount")
	if left, err := os.ReadDir(directory); err != nil || len(left) > 0 {
		t.Errorf("in the directory below are %v, %v", left, err)
	}
	drivertest.MountLoop(t, filepath.Join(dir, "pool.image"), directory)
	check.OK(t, d.probe())
	again()

	// All at once.
	d.Stop()
	gone()
	drivertest.Unmount(t, directory)
	d = start(t, drivertest.Options{Dir: dir, Pools: []string{"default=file://" + directory + "?reservePercent=0"}})
	for i, v := range all {
		all[i] = d.volume(v.ID, v.Name, v.Capability)
		check.Code(t, all[i].stage(), codes.Unavailable, "a disk that is not mounted")
		check.Code(t, all[i].delete(), codes.Unavailable)
		expect(t, all[i].problems(), "INACCESSIBLE PoolMissing")
	}
	check.OK(t, d.probe())
	expect(t, d.storage(), "STORAGE_UNREACHABLE PoolMissing")
	if left, err := os.ReadDir(directory); err != nil || len(left) > 0 {
		t.Errorf("in the directory below are %v, %v", left, err)
	}
	drivertest.MountLoop(t, filepath.Join(dir, "pool.image"), directory)
	for deadline := time.Now().Add(time.Minute); len(d.storage()) > 0 && time.Now().Before(deadline); {
		time.Sleep(100 * time.Millisecond)
	}
	for _, v := range all {
		expect(t, v.problems())
	}
	again()
	for _, v := range all {
		check.OK(t, v.down(v.Target("pod")))
	}
	d.nothingLeft()
}

// fsck repairs an ext4; that it found something is no failure.
func fsck(image string) (string, error) {
	out, err := command("e2fsck", "-fy", image)
	if err != nil && !strings.Contains(fmt.Sprint(err), "exit status 1") {
		return out, err
	}
	return out, nil
}

func command(argv ...string) (string, error) {
	out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput()
	return string(out), err
}
