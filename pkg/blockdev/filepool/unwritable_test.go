package filepool_test

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// failing is a filesystem on a disk that can be made to fail: a file on a tmpfs, with all its bytes in memory.
type failing struct{ dir, disk string }

func newFailing(t *testing.T, kind string) failing {
	t.Helper()
	drivertest.NeedRoot(t)
	const size = 160 * pooltest.MiB
	base := drivertest.Dir(t)
	below, dir := filepath.Join(base, "below"), filepath.Join(base, "mnt")
	check.OK(t, errors.Join(os.Mkdir(below, 0o700), os.Mkdir(dir, 0o700)))
	run(t, "mount", "-t", "tmpfs", "-o", fmt.Sprintf("size=%d,huge=never", size), "tmpfs", below)
	t.Cleanup(func() { drivertest.Unmount(t, below) })
	d := failing{dir, filepath.Join(below, "disk")}
	check.OK(t, errors.Join(os.WriteFile(d.disk, nil, 0o600), os.Truncate(d.disk, size)))
	options := map[string]string{"ext4": "-b4096", "btrfs": "-K"}
	drivertest.RunBtrfs(t, "mkfs."+kind, "-q", options[kind], d.disk)
	run(t, "fallocate", "-l", fmt.Sprint(size), d.disk) // mkfs may have discarded it
	device := drivertest.Loop(t, d.disk)
	defer run(t, "losetup", "-d", device) // it goes with the mount
	run(t, "mount", "-t", kind, "-o", "nodiscard", device, dir)
	t.Cleanup(func() { drivertest.Unmount(t, dir) })
	return d
}

// spoil makes the disk refuse writes (ENOSPC) to some slots of the record of a key: it removes their bytes, and leaves no memory for others.
func (d failing) spoil(t *testing.T, key string, slots ...int) {
	t.Helper()
	disk, err := os.OpenFile(d.disk, os.O_RDWR, 0)
	check.OK(t, err)
	defer disk.Close()
	all, err := os.ReadFile(d.disk)
	check.OK(t, err)
	var places []int64 // offsets of the slots, in order
	header, field := []byte("ashlar-record 2 gen="), fmt.Sprintf(`"key":%q`, key)
	for at := bytes.Index(all, header); at >= 0; {
		if bytes.Contains(all[at:at+slotSize], []byte(field)) {
			places = append(places, int64(at))
		}
		next := bytes.Index(all[at+1:], header)
		if next < 0 {
			break
		}
		at += 1 + next
	}
	if len(places) != 2 {
		t.Fatalf("the record of %s is at %d on the disk", key, places)
	}
	for _, slot := range slots {
		check.OK(t, unix.Fallocate(int(disk.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, places[slot], 4096))
	}
	if err := os.WriteFile(d.disk+"."+key, make([]byte, pooltest.MiB), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("there is memory left: %v", err)
	}
}

const slotSize = 8192

// eachUnwritable calls try on each kind of disk, with the first slot of a record, the second, or both taking no writes.
func eachUnwritable(t *testing.T, try func(t *testing.T, disk failing, slots []int)) {
	t.Helper()
	for _, kind := range []string{"ext4", "btrfs"} {
		for _, slots := range [][]int{{0}, {1}, {0, 1}} {
			t.Run(fmt.Sprintf("%s, slots %d", kind, slots), func(t *testing.T) { try(t, newFailing(t, kind), slots) })
		}
	}
}

// TestChangeUnwritable: the disk takes no writes to one slot of a record, or to both. The record can be changed all the same: a volume is claimed and
// released. After a start all that was answered is there, and no file that a crash left.
func TestChangeUnwritable(t *testing.T) {
	eachUnwritable(t, func(t *testing.T, disk failing, slots []int) {
		dir := disk.dir + "/pool"
		pool := pooltest.OpenFiles(t, dir)
		t.Cleanup(func() { _ = pool.Close() }) // before the filesystem is unmounted
		ref := pooltest.Vol("a")
		check.OK(t, pooltest.Second(pool.Create(t.Context(), blockdev.Spec{Ref: ref, Name: "a", Size: 4 * pooltest.MiB})))
		disk.spoil(t, ref.Key, slots...)
		for _, node := range []string{"a node", "", "another node"} {
			check.OK(t, pooltest.Second(pool.SetLabels(t.Context(), ref, func(labels map[string]string) error { labels["claim"] = node; return nil })))
		}
		record := path(dir, ref, ".rec")
		if _, err := os.Lstat(record + ".new"); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("what was to take its place: %v", err)
		}
		check.OK(t, errors.Join(pool.Close(), os.WriteFile(record+".new", []byte("cut short"), 0o600)))
		pool = pooltest.OpenFiles(t, dir)
		if r, err := pool.Get(t.Context(), ref); err != nil || r.Labels["claim"] != "another node" {
			t.Errorf("after a start: %+v, %v", r, err)
		}
		if problems := pool.PoolHealth(t.Context()); len(problems) > 0 {
			t.Errorf("the pool's health: %v", problems)
		}
		check.OK(t, pool.Delete(t.Context(), ref))
		if left := contents(t, dir+"/volumes"); left != "" {
			t.Errorf("left is %s", left)
		}
	})
}

// TestDeleteUnwritable: an object whose record takes no writes in one slot, or in both, can be deleted. If one slot takes them, a start goes on with a
// deletion that was cut short.
func TestDeleteUnwritable(t *testing.T) {
	eachUnwritable(t, func(t *testing.T, disk failing, slots []int) {
		dir := disk.dir + "/pool"
		pool := pooltest.OpenFiles(t, dir)
		t.Cleanup(func() { _ = pool.Close() }) // before the filesystem is unmounted
		whole, cut := pooltest.Vol("a"), pooltest.Vol("b")
		for _, ref := range []blockdev.Ref{whole, cut} {
			check.OK(t, pooltest.Second(pool.Create(t.Context(), blockdev.Spec{Ref: ref, Name: "a", Size: 4 * pooltest.MiB})))
		}
		for _, ref := range []blockdev.Ref{whole, cut} {
			disk.spoil(t, ref.Key, slots...)
		}
		check.OK(t, pool.Delete(t.Context(), whole))
		for _, extension := range []string{".rec", ".img"} {
			if _, err := os.Lstat(path(dir, whole, extension)); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s: %v", extension, err)
			}
		}

		if len(slots) == 2 { // both slots have lost their bytes
			return
		}
		run(t, "chattr", "+i", path(dir, cut, ".img"))
		if err := pool.Delete(t.Context(), cut); err == nil {
			t.Error("an image was deleted that nobody may delete")
		}
		run(t, "chattr", "-i", path(dir, cut, ".img"))
		check.OK(t, pool.Close())
		record, err := os.Open(path(dir, cut, ".rec"))
		check.OK(t, err)
		check.OK(t, errors.Join(unix.Fadvise(int(record.Fd()), 0, 0, unix.FADV_DONTNEED), record.Close())) // drop what the disk did not take
		pool = pooltest.OpenFiles(t, dir)
		if r, err := pool.Get(t.Context(), cut); !errors.Is(err, errdefs.ErrNotFound) {
			t.Errorf("%+v, %v; want %v", r, err, errdefs.ErrNotFound)
		}
		check.OK(t, pool.Delete(t.Context(), cut))
		if c := pooltest.CapacityOf(t, pool); c.Promised != 0 {
			t.Errorf("%+v", c)
		}
	})
}

// TestCompletedBesideLabels: a volume of whose record one slot could not be written is attached, which writes both, while its labels change. No label is lost,
// and the slots agree.
func TestCompletedBesideLabels(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	pool := pooltest.OpenFiles(t, dir)
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: 4 * pooltest.MiB})
	for n := range 200 {
		filepool.OneSlot(pool, pooltest.Vol("a"))
		attached := make(chan error)
		go func() {
			device, err := pool.Attach(t.Context(), pooltest.Vol("a"), blockdev.Attachment{})
			attached <- errors.Join(err, device.Close())
		}()
		_, err := pool.SetLabels(t.Context(), pooltest.Vol("a"), func(labels map[string]string) error { labels["n"] = strconv.Itoa(n); return nil })
		check.OK(t, errors.Join(err, <-attached))
		record, err := pool.Get(t.Context(), pooltest.Vol("a"))
		if check.OK(t, err); record.Labels["n"] != strconv.Itoa(n) {
			t.Fatalf("label %d is lost: %v", n, record.Labels)
		}
	}
	check.OK(t, pool.Close())
	pool = pooltest.OpenedFiles(t, dir)
	record, err := pool.Get(t.Context(), pooltest.Vol("a"))
	if check.OK(t, err); record.Labels["n"] != "199" {
		t.Errorf("after a start its labels are %v", record.Labels)
	}
}
