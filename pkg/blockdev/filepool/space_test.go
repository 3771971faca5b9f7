package filepool_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/ashlar-csi/ashlar/internal/check"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/loop"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pools"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// direct writes to a device past all caches, so that the disk itself answers.
func direct(t testing.TB, device string, offset, length int64, fill byte) error {
	t.Helper()
	f, err := os.OpenFile(device, os.O_RDWR|unix.O_DIRECT, 0)
	check.OK(t, err)
	defer f.Close()
	memory, err := unix.Mmap(-1, 0, pooltest.MiB, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	check.OK(t, err)
	defer func() { check.OK(t, unix.Munmap(memory)) }()
	for i := range memory {
		memory[i] = fill
	}
	for end := offset + length; offset < end; offset += pooltest.MiB {
		if _, err := f.WriteAt(memory[:min(end-offset, pooltest.MiB)], offset); err != nil {
			return err
		}
	}
	return f.Sync()
}

// hog tries to take more of a pool than a raw device's size, and returns the error of the first write that failed. Each pass leaves one block of each
// extent that the pass before wrote, and discards the rest.
func hog(t testing.TB, device string, size int64, passes int) error {
	t.Helper()
	f, err := os.OpenFile(device, os.O_RDWR|unix.O_DIRECT, 0)
	check.OK(t, err)
	defer f.Close()
	memory, err := unix.Mmap(-1, 0, pooltest.MiB, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	check.OK(t, err)
	defer func() { check.OK(t, unix.Munmap(memory)) }()
	for pass := range int64(passes) {
		memory[0] = byte(pass + 1)
		for at := int64(0); at < size; at += pooltest.MiB {
			from, length := at+pass*4096, pooltest.MiB-pass*4096
			// The kernel writes zeros for a request that is not supported, or refuses it.
			for _, request := range []uint{0x1277, 0x127f} { // BLKDISCARD, BLKZEROOUT
				if err := ioctl(f, request, &[2]uint64{uint64(from), uint64(length)}); err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
					return fmt.Errorf("pass %d, request %x at %d: %w", pass, request, at, err)
				}
			}
			_ = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, from, length)
			if _, err := f.WriteAt(memory[:length], from); err != nil {
				return fmt.Errorf("pass %d, write at %d: %w", pass, at, err)
			}
		}
		if err := f.Sync(); err != nil {
			return err
		}
	}
	return nil
}

// takenOf returns how much of a filesystem is taken when all is written. Space that btrfs has set aside for its metadata does not count.
func takenOf(t testing.TB, fs, dir string) int64 {
	t.Helper()
	f, err := os.Open(dir)
	check.OK(t, err)
	defer f.Close()
	check.OK(t, unix.Syncfs(int(f.Fd())))
	if fs == "btrfs" {
		usage, err := exec.Command("btrfs", "filesystem", "usage", "-b", dir).CombinedOutput()
		check.OK(t, err)
		_, rest, _ := strings.Cut(string(usage), "Used:")
		taken, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
		check.OK(t, err)
		return taken
	}
	var st unix.Statfs_t
	check.OK(t, unix.Fstatfs(int(f.Fd()), &st))
	return int64(st.Blocks-st.Bfree) * st.Frsize
}

// reserved opens a pool with a reserve. btrfs needs one for its metadata, and a large one on disks as small as those of these tests.
func reserved(t testing.TB, fs, dir string) blockdev.Pool {
	t.Helper()
	percent := map[string]int{"btrfs": 40}[fs]
	pool, err := pools.Open(t.Context(), "test", fmt.Sprintf("file://%s?reservePercent=%d", dir, percent))
	check.OK(t, err)
	t.Cleanup(func() { check.OK(t, pool.Close()) })
	return pool
}

// TestHog: whatever is done to a thick device, its image takes no more space than was promised, and other volumes get theirs.
func TestHog(t *testing.T) {
	for _, fs := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fs, func(t *testing.T) {
			mnt := mountNew(t, fs)
			pool := reserved(t, fs, filepath.Join(mnt, "pool"))
			const size = 64 * pooltest.MiB
			pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: size})
			pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("b"), Size: size, Provisioning: blockdev.Thin})
			left := (pooltest.CapacityOf(t, pool).Available - 16*pooltest.MiB) / pooltest.MiB * pooltest.MiB
			pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("c"), Size: left, Provisioning: blockdev.Thin})
			for _, ref := range []blockdev.Ref{pooltest.Vol("a"), pooltest.Vol("b")} {
				device := pooltest.Attach(t, pool, ref, blockdev.Attachment{Keep: true})
				before := takenOf(t, fs, mnt)
				check.OK(t, hog(t, device.Path, size, 8))
				most := before + 4*pooltest.MiB
				if ref == pooltest.Vol("b") {
					most += size
				}
				if now := takenOf(t, fs, mnt); now > most {
					t.Errorf("%s, of %d MiB, took %d MiB more", ref, size/pooltest.MiB, (now-before)/pooltest.MiB)
				}
				check.OK(t, errors.Join(device.Close(), pool.Detach(t.Context(), ref)))
			}
			for _, ref := range []blockdev.Ref{pooltest.Vol("a"), pooltest.Vol("b"), pooltest.Vol("c")} {
				record, err := pool.Get(t.Context(), ref)
				check.OK(t, err)
				device := pooltest.Attach(t, pool, ref, blockdev.Attachment{})
				for fill := range byte(2) {
					if err := direct(t, device.Path, 0, record.Size, fill+1); err != nil {
						t.Errorf("%s: %v", ref, err)
					}
				}
				check.OK(t, device.Close())
			}
		})
	}
}

// TestGivenBlocks: space that images have just taken does not count twice, as theirs and as free.
func TestGivenBlocks(t *testing.T) {
	for _, fs := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fs, func(t *testing.T) {
			pool := pooltest.OpenedFiles(t, filepath.Join(mountNew(t, fs), "pool"))
			const size = 64 * pooltest.MiB
			pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: size, Provisioning: blockdev.Thin})
			device := pooltest.Attach(t, pool, pooltest.Vol("a"), blockdev.Attachment{})
			defer device.Close()
			before := pooltest.CapacityOf(t, pool).Total
			for at := int64(0); at < size; at += 8 * pooltest.MiB {
				check.OK(t, direct(t, device.Path, at, 8*pooltest.MiB, 1))
				filepool.Remeasure(pool)
				if now := pooltest.CapacityOf(t, pool).Total; now > before+pooltest.MiB {
					t.Fatalf("with %d bytes written the total is %d, and was %d", at, now, before)
				}
			}
		})
	}
}

// TestHogSnapshots: all promised space is there also with snapshots that come and go, and keep earlier blocks of a volume.
func TestHogSnapshots(t *testing.T) {
	for _, fs := range []string{"xfs", "btrfs"} {
		t.Run(fs, func(t *testing.T) {
			mnt := mountNew(t, fs)
			pool := reserved(t, fs, filepath.Join(mnt, "pool"))
			const size = 64 * pooltest.MiB
			pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: size})
			pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("b"), Size: 128 * pooltest.MiB, Provisioning: blockdev.Thin})
			before := takenOf(t, fs, mnt)
			device := pooltest.Attach(t, pool, pooltest.Vol("a"), blockdev.Attachment{Keep: true})
			check.OK(t, direct(t, device.Path, 0, size, 1))
			cycles := 0
			for ; cycles < 12; cycles++ {
				spec := blockdev.Spec{Ref: pooltest.Snap("1"), Name: "cut", Size: size, Origin: pooltest.Vol("a")}
				_, err := pool.Create(t.Context(), spec)
				if errors.Is(err, errdefs.ErrNoSpace) {
					break // its own share of the pool is used up
				}
				check.OK(t, err)
				for at := int64(0); at < size; at += 512 << 10 { // all but some blocks of each extent
					from := int64(cycles) * 4096
					check.OK(t, direct(t, device.Path, at+from, 512<<10-from, byte(cycles+2)))
				}
				check.OK(t, pool.Delete(t.Context(), pooltest.Snap("1")))
			}
			check.OK(t, errors.Join(device.Close(), pool.Detach(t.Context(), pooltest.Vol("a"))))
			c := pooltest.CapacityOf(t, pool)
			t.Logf("after %d snapshots: %+v", cycles, c)
			if left := (c.Available - 16*pooltest.MiB) / pooltest.MiB * pooltest.MiB; left > 0 {
				pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("c"), Size: left})
			}
			device = pooltest.Attach(t, pool, pooltest.Vol("b"), blockdev.Attachment{})
			if err := direct(t, device.Path, 0, 128*pooltest.MiB, 9); err != nil {
				t.Errorf("the volume next to it cannot have what it was promised: %v", err)
			}
			check.OK(t, device.Close())
			// Deleting the volume frees all of it.
			for _, ref := range []blockdev.Ref{pooltest.Vol("a"), pooltest.Vol("b"), pooltest.Vol("c")} {
				check.OK(t, pool.Delete(t.Context(), ref))
			}
			if now := takenOf(t, fs, mnt); now > before {
				t.Errorf("with all deleted, %d MiB are taken, and %d were at first", now/pooltest.MiB, before/pooltest.MiB)
			}
		})
	}
}

// TestOldExtents: what a volume on btrfs keeps of old extents, after snapshots that are deleted, comes back by what docs/runbooks/pool-full.md says, while the
// volume is in use.
func TestOldExtents(t *testing.T) {
	mnt := mountNew(t, "btrfs")
	dir := filepath.Join(mnt, "pool")
	pool := reserved(t, "btrfs", dir)
	const size, extent, kept, rounds = 64 * pooltest.MiB, 512 << 10, 4096, 3
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: size})
	device := pooltest.Attach(t, pool, pooltest.Vol("a"), blockdev.Attachment{Keep: true})
	defer func() { check.OK(t, errors.Join(device.Close(), pool.Detach(t.Context(), pooltest.Vol("a")))) }()
	before := takenOf(t, "btrfs", mnt)
	for round := range int64(rounds) {
		pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Snap("1"), Size: size, Origin: pooltest.Vol("a")})
		for at := int64(0); at < size; at += extent {
			check.OK(t, direct(t, device.Path, at+round*kept, extent-round*kept, byte(round+1)))
		}
		check.OK(t, pool.Delete(t.Context(), pooltest.Snap("1")))
	}
	image := path(dir, pooltest.Vol("a"), ".img")
	if now := takenOf(t, "btrfs", mnt); now < before+size {
		t.Fatalf("%d MiB are taken, and %d were at first: this test shows nothing", now/pooltest.MiB, before/pooltest.MiB)
	}
	run(t, "btrfs", "filesystem", "defragment", "-f", "-t", "1G", image)
	if now := takenOf(t, "btrfs", mnt); now > before+4*pooltest.MiB {
		t.Errorf("%d MiB are taken, and %d were at first", now/pooltest.MiB, before/pooltest.MiB)
	}
	have, err := os.ReadFile(image)
	check.OK(t, err)
	for at, is := range have {
		if want := byte(min(at%extent/kept, rounds-1) + 1); is != want {
			t.Fatalf("byte %d is %d, not %d", at, is, want)
		}
	}
	if problems, err := pool.Health(t.Context(), pooltest.Vol("a")); err != nil || len(problems) > 0 || !strings.Contains(attributes(t, image), "C") {
		t.Errorf("health: %v, %v; attributes %s", problems, err, attributes(t, image))
	}
}

// older turns files of a pool on btrfs into those of drivers before this one.
func older(t testing.TB, dir string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*s", "*"))
	check.OK(t, err)
	for _, kind := range []string{"volumes", "snapshots"} {
		run(t, "chattr", "-C", filepath.Join(dir, kind))
	}
	for _, file := range files {
		run(t, "cp", "--sparse=always", file, file+".copy")
		check.OK(t, os.Rename(file+".copy", file))
	}
}

func attributes(t testing.TB, path string) string {
	t.Helper()
	out, err := exec.Command("lsattr", "-d", path).CombinedOutput()
	check.OK(t, err)
	return strings.Fields(string(out))[0]
}

// TestOlderImages: images that btrfs writes to new places can be used, copied and deleted, and health reports them. Their copies are written in place, and
// so are all records.
func TestOlderImages(t *testing.T) {
	mnt := mountNew(t, "btrfs")
	run(t, "mount", "-o", "remount,compress-force=zstd", mnt)
	dir := filepath.Join(mnt, "pool")
	pool := pooltest.OpenFiles(t, dir)
	const size = 32 * pooltest.MiB
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: size})
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("b"), Size: size})
	if have := attributes(t, path(dir, pooltest.Vol("a"), ".img")); !strings.Contains(have, "C") {
		t.Errorf("a new image has the attributes %s", have)
	}
	device := pooltest.Attach(t, pool, pooltest.Vol("a"), blockdev.Attachment{})
	text := bytes.Repeat([]byte("older "), pooltest.MiB)
	pooltest.WriteTo(t, device.Path, pooltest.MiB, text)
	check.OK(t, errors.Join(device.Close(), pool.Close()))
	older(t, dir)

	pool = pooltest.OpenedFiles(t, dir)
	for _, ref := range []blockdev.Ref{pooltest.Vol("a"), pooltest.Vol("b")} {
		if have := attributes(t, path(dir, ref, ".rec")); !strings.Contains(have, "C") {
			t.Errorf("the record of %s has the attributes %s", ref, have)
		}
		if have := attributes(t, path(dir, ref, ".img")); strings.Contains(have, "C") {
			t.Fatalf("the image of %s has the attributes %s: this test shows nothing", ref, have)
		}
	}
	if have := reasons(pool.PoolHealth(t.Context())); !slices.Equal(have, []string{"1 ImagesCopiedOnWrite"}) {
		t.Errorf("health: %v", have)
	}
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Snap("a"), Size: size, Origin: pooltest.Vol("a")})
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("c"), Size: 2 * size, Origin: pooltest.Snap("a")})
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("d"), Size: size, Origin: pooltest.Vol("a"), Provisioning: blockdev.Thin})
	for _, ref := range []blockdev.Ref{pooltest.Vol("a"), pooltest.Vol("c"), pooltest.Vol("d")} {
		device := pooltest.Attach(t, pool, ref, blockdev.Attachment{})
		have := make([]byte, len(text))
		f, err := os.Open(device.Path)
		check.OK(t, err)
		_, err = f.ReadAt(have, pooltest.MiB)
		check.OK(t, errors.Join(err, f.Close()))
		if !bytes.Equal(have, text) {
			t.Errorf("%s has other bytes", ref)
		}
		check.OK(t, device.Close())
		if ref != pooltest.Vol("a") && !strings.Contains(attributes(t, path(dir, ref, ".img")), "C") {
			t.Errorf("the copy %s is copied on write", ref)
		}
	}
	if have := blocksOf(t, path(dir, pooltest.Vol("c"), ".img")); have < 2*size {
		t.Errorf("the thick copy has %d bytes", have)
	}
	for _, ref := range []blockdev.Ref{pooltest.Snap("a"), pooltest.Vol("a"), pooltest.Vol("b"), pooltest.Vol("c"), pooltest.Vol("d")} {
		check.OK(t, pool.Delete(t.Context(), ref))
	}
	if problems := pool.PoolHealth(t.Context()); len(problems) > 0 {
		t.Errorf("health with all deleted: %v", problems)
	}
}

func ioctl(f *os.File, request uint, what *[2]uint64) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), uintptr(request), uintptr(unsafe.Pointer(what))); errno != 0 {
		return errno
	}
	return nil
}

// fragment fragments the data of an image as much as possible: it writes one of every two blocks.
func fragment(t testing.TB, image string, size int64) {
	t.Helper()
	f, err := os.OpenFile(image, os.O_RDWR, 0)
	check.OK(t, err)
	for at := int64(0); at < size; at += 8192 {
		_, err := f.WriteAt([]byte{1}, at)
		check.OK(t, err)
	}
	check.OK(t, errors.Join(f.Sync(), f.Close()))
}

// surveyed waits until surveys of a pool have looked at an object.
func surveyed(t testing.TB, pool blockdev.Pool, ref blockdev.Ref) (surveys, extents int) {
	t.Helper()
	for {
		pooltest.CapacityOf(t, pool)
		if surveys, extents = filepool.Surveys(pool, ref); surveys > 0 {
			return surveys, extents
		}
	}
}

// TestSurvey: extents of images that share blocks are read when something changed, once, and those of other images are not.
func TestSurvey(t *testing.T) {
	mnt := mountNew(t, "xfs")
	pool := pooltest.OpenedFiles(t, filepath.Join(mnt, "pool"))
	const size = 2 * pooltest.MiB
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: size, Provisioning: blockdev.Thin})
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("b"), Size: size, Provisioning: blockdev.Thin})
	fragment(t, path(filepath.Join(mnt, "pool"), pooltest.Vol("a"), ".img"), size)
	fragment(t, path(filepath.Join(mnt, "pool"), pooltest.Vol("b"), ".img"), size)
	for i := range 8 {
		pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Snap(fmt.Sprint(i)), Size: size, Origin: pooltest.Vol("a")})
	}
	_, extents := surveyed(t, pool, pooltest.Snap("7"))
	if extents != size/8192 {
		t.Errorf("%d extents were seen, and there are %d", extents, size/8192)
	}
	before, _ := surveyed(t, pool, pooltest.Vol("a"))
	for i := range 100 {
		pooltest.CapacityOf(t, pool)
		pool.PoolHealth(t.Context())
		if i%10 == 0 {
			pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("c"), Size: size})
			check.OK(t, pool.Delete(t.Context(), pooltest.Vol("c")))
		}
	}
	if after, _ := filepool.Surveys(pool, pooltest.Vol("a")); after != before {
		t.Errorf("there were %d surveys of what did not change", after-before)
	}
	if surveys, _ := filepool.Surveys(pool, pooltest.Vol("b")); surveys > 0 {
		t.Error("the extents of an image that shares none were looked at")
	}
}

// TestSurveyBeforeRefusal: before a volume is refused, a survey looks for space that is not known to be free.
func TestSurveyBeforeRefusal(t *testing.T) {
	for _, fs := range []string{"xfs", "btrfs"} {
		t.Run(fs, func(t *testing.T) {
			t.Parallel()
			pool := pooltest.OpenedFiles(t, filepath.Join(mountNew(t, fs), "pool"))
			const size = 128 * pooltest.MiB
			pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: size})
			device := pooltest.Attach(t, pool, pooltest.Vol("a"), blockdev.Attachment{})
			check.OK(t, direct(t, device.Path, 0, size, 1))
			pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Snap("a"), Size: size, Origin: pooltest.Vol("a")})
			surveyed(t, pool, pooltest.Snap("a"))
			promised := pooltest.CapacityOf(t, pool).Available
			check.OK(t, direct(t, device.Path, 0, size, 2)) // after the last survey
			check.OK(t, device.Close())
			pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("b"), Size: (promised - 32*pooltest.MiB) / pooltest.MiB * pooltest.MiB})
			_, err := pool.Create(t.Context(), blockdev.Spec{Ref: pooltest.Vol("c"), Name: "c", Size: 64 * pooltest.MiB})
			pooltest.Fails(t, err, errdefs.ErrNoSpace, "more than there is")
		})
	}
}

// TestSurveyLimit: of images in more pieces than a survey looks at, less is counted, and never more. Health reports them, and other images are counted in
// full.
func TestSurveyLimit(t *testing.T) {
	mnt := mountNew(t, "xfs")
	dir := filepath.Join(mnt, "pool")
	pool := pooltest.OpenedFiles(t, dir)
	filepool.LimitSurveys(pool, 1000)
	const size = 16 * pooltest.MiB
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: size, Provisioning: blockdev.Thin})
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("b"), Size: size})
	device := pooltest.Attach(t, pool, pooltest.Vol("b"), blockdev.Attachment{})
	check.OK(t, errors.Join(direct(t, device.Path, 0, size, 1), device.Close()))
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Snap("b"), Size: size, Origin: pooltest.Vol("b")})
	before := pooltest.CapacityOf(t, pool)
	fragment(t, path(dir, pooltest.Vol("a"), ".img"), size)
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Snap("a"), Size: size, Origin: pooltest.Vol("a")})
	surveyed(t, pool, pooltest.Snap("a"))
	check.OK(t, pool.Delete(t.Context(), pooltest.Snap("b"))) // this makes a survey due
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Snap("b"), Size: size, Origin: pooltest.Vol("b")})
	surveyed(t, pool, pooltest.Snap("b"))
	after := pooltest.CapacityOf(t, pool)
	if lost := before.Available - size - after.Available; lost < 0 || lost > size+pooltest.MiB {
		t.Errorf("%d bytes less are available than there would be without fragmentation", lost)
	}
	if have := reasons(pool.PoolHealth(t.Context())); !slices.Equal(have, []string{"1 ImagesFragmented"}) {
		t.Errorf("health: %v", have)
	}
}

// TestSurveyHangs: a survey does not end. Only a call that would be refused waits for it, and no longer than its context.
func TestSurveyHangs(t *testing.T) {
	mnt := mountNew(t, "xfs")
	dir := filepath.Join(mnt, "pool")
	pool := pooltest.OpenedFiles(t, dir)
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: 4 * pooltest.MiB})
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Snap("a"), Size: 4 * pooltest.MiB, Origin: pooltest.Vol("a")})
	surveyed(t, pool, pooltest.Snap("a"))
	release := filepool.HangSurveys(pool)
	defer release()
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Snap("b"), Size: 4 * pooltest.MiB, Origin: pooltest.Vol("a")}) // this makes a survey due
	for range 3 {
		if c := pooltest.CapacityOf(t, pool); c.Available == 0 {
			t.Errorf("capacity: %+v", c)
		}
		pool.PoolHealth(t.Context())
		pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("b"), Size: 4 * pooltest.MiB})
		_, err := pool.Expand(t.Context(), pooltest.Vol("b"), 8*pooltest.MiB)
		check.OK(t, err)
		check.OK(t, attachedOnce(t, pool, pooltest.Vol("b")))
		pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Snap("c"), Size: 8 * pooltest.MiB, Origin: pooltest.Vol("b")})
		check.OK(t, errors.Join(pool.Delete(t.Context(), pooltest.Snap("c")), pool.Delete(t.Context(), pooltest.Vol("b"))))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	_, err := pool.Create(ctx, blockdev.Spec{Ref: pooltest.Vol("c"), Name: "c", Size: 4 << 30})
	pooltest.Fails(t, err, context.DeadlineExceeded, "a volume that does not fit")
	release()
	_, err = pool.Create(t.Context(), blockdev.Spec{Ref: pooltest.Vol("c"), Name: "c", Size: 4 << 30})
	if err == nil {
		t.Error("a volume was made that does not fit")
	}
	_, err = pool.Create(t.Context(), blockdev.Spec{Ref: pooltest.Vol("c"), Name: "c", Size: 4 << 30})
	pooltest.Fails(t, err, errdefs.ErrNoSpace, "a volume that does not fit, once it is known")
}

// TestFragmented: work that takes the kernel long ends with its caller, and is gone on with or undone later.
func TestFragmented(t *testing.T) {
	for _, fs := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fs, func(t *testing.T) {
			t.Parallel()
			mnt := mountNew(t, fs)
			dir := filepath.Join(mnt, "pool")
			pool := pooltest.OpenedFiles(t, dir)
			const size = 3 * filepool.FirstStep
			pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: size, Provisioning: blockdev.Thin})
			fragment(t, path(dir, pooltest.Vol("a"), ".img"), 4*pooltest.MiB)
			before := pooltest.CapacityOf(t, pool)

			spec := blockdev.Spec{Ref: pooltest.Snap("a"), Name: "cut", Size: size, Origin: pooltest.Vol("a"), Quiesced: true}
			_, err := pool.Create(&pooltest.EndsAfter{Context: t.Context(), N: 1}, spec)
			pooltest.Fails(t, err, context.Canceled, "a snapshot whose caller is gone")
			_, err = pool.Get(t.Context(), pooltest.Snap("a"))
			pooltest.Fails(t, err, errdefs.ErrNotFound, "what is left of it")
			_, err = pool.Create(t.Context(), spec)
			check.OK(t, err)

			for _, ref := range []blockdev.Ref{pooltest.Snap("a"), pooltest.Vol("a")} {
				pooltest.Fails(t, pool.Delete(&pooltest.EndsAfter{Context: t.Context(), N: 1}, ref), context.Canceled, "a deletion whose caller is gone")
				_, err = pool.Get(t.Context(), ref)
				pooltest.Fails(t, err, errdefs.ErrNotFound, "what is being deleted")
				if _, err := os.Stat(path(dir, ref, ".rec")); err != nil {
					t.Errorf("the record is gone before the space is back: %v", err)
				}
				check.OK(t, pool.Delete(t.Context(), ref))
			}
			if after := pooltest.CapacityOf(t, pool); after.Promised != 0 || after.Available < before.Available {
				t.Errorf("with all deleted: %+v; at first %+v", after, before)
			}

			// Thick, and full of holes.
			pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("b"), Size: size})
			f, err := os.OpenFile(path(dir, pooltest.Vol("b"), ".img"), os.O_RDWR, 0)
			check.OK(t, err)
			for at := int64(0); at < 4*pooltest.MiB; at += 8192 {
				check.OK(t, unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, at, 4096))
			}
			check.OK(t, f.Close())
			_, err = pool.Attach(&pooltest.EndsAfter{Context: t.Context(), N: 1}, pooltest.Vol("b"), blockdev.Attachment{})
			pooltest.Fails(t, err, context.Canceled, "an attachment whose caller is gone")
			check.OK(t, errors.Join(attachedOnce(t, pool, pooltest.Vol("b")), pool.Detach(t.Context(), pooltest.Vol("b"))))
			if have := blocksOf(t, path(dir, pooltest.Vol("b"), ".img")); have < size {
				t.Errorf("attached, it has %d bytes of %d", have, size)
			}
		})
	}
}

// cutsShort is a context that cuts a file to a size when Err is called for the n-th time.
type cutsShort struct {
	context.Context
	n    int
	file string
	size int64
}

func (c *cutsShort) Err() error {
	if c.n--; c.n == 0 {
		_ = os.Truncate(c.file, c.size)
	}
	return c.Context.Err()
}

// TestSourceCutShort: the source of a copy loses its end meanwhile, data or a hole. The copy fails with errdefs.ErrDataLoss, and is removed.
func TestSourceCutShort(t *testing.T) {
	for _, fs := range []string{"ext4", "xfs", "btrfs"} {
		for name, size := range map[string]int64{"within data": 40 * pooltest.MiB, "in a hole": 100 * pooltest.MiB, "all": 0} {
			t.Run(fs+" "+name, func(t *testing.T) {
				dir := filepath.Join(mountNew(t, fs), "pool")
				pool := pooltest.OpenedFiles(t, dir)
				pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: 160 * pooltest.MiB, Provisioning: blockdev.Thin})
				device := pooltest.Attach(t, pool, pooltest.Vol("a"), blockdev.Attachment{})
				check.OK(t, errors.Join(direct(t, device.Path, 0, 80*pooltest.MiB, 1), direct(t, device.Path, 150*pooltest.MiB, 10*pooltest.MiB, 1), device.Close()))
				for _, kind := range []blockdev.Ref{pooltest.Vol("a"), pooltest.Snap("a")} {
					if kind == pooltest.Snap("a") {
						check.OK(t, os.Truncate(path(dir, pooltest.Vol("a"), ".img"), 160*pooltest.MiB))
						pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Snap("a"), Size: 160 * pooltest.MiB, Origin: pooltest.Vol("a")})
					}
					ctx := &cutsShort{Context: t.Context(), n: 2, file: path(dir, kind, ".img"), size: size}
					_, err := pool.Create(ctx, blockdev.Spec{Ref: pooltest.Vol("b"), Name: "b", Size: 160 * pooltest.MiB, Origin: kind})
					pooltest.Fails(t, err, errdefs.ErrDataLoss, fmt.Sprintf("a copy of %s, which was cut short", kind))
					_, err = pool.Get(t.Context(), pooltest.Vol("b"))
					pooltest.Fails(t, err, errdefs.ErrNotFound, "the copy")
				}
			})
		}
	}
}

// TestDiscardsOfOthers: devices over files on btrfs take no discards. Later devices with their numbers do, also if the driver died before it had removed
// them.
func TestDiscardsOfOthers(t *testing.T) {
	takes := func(device blockdev.Device) bool {
		most, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(device.Path), "queue/discard_max_bytes"))
		return err == nil && strings.TrimSpace(string(most)) != "0"
	}
	pool, other := pooltest.OpenedFiles(t, filepath.Join(mountNew(t, "btrfs"), "pool")), pooltest.OpenedFiles(t, filepath.Join(mountNew(t, "xfs"), "pool"))
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: 4 * pooltest.MiB})
	for _, keep := range []bool{true, false} {
		device := pooltest.Attach(t, pool, pooltest.Vol("a"), blockdev.Attachment{Keep: keep})
		if takes(device) {
			t.Error("a device over a file on btrfs takes discards")
		}
		check.OK(t, errors.Join(device.Close(), pool.Detach(t.Context(), pooltest.Vol("a"))))
		if _, err := os.Stat(filepath.Join("/sys/block", filepath.Base(device.Path), "loop/backing_file")); err != nil { // nobody has the number yet
			if most, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(device.Path), "queue/discard_max_bytes")); err == nil && string(most) == "0\n" {
				t.Errorf("%s is left without discards", device.Path)
			}
		}
	}
	device := pooltest.Attach(t, pool, pooltest.Vol("a"), blockdev.Attachment{})
	check.OK(t, device.Close()) // only this, as after a crash
	for i := range 8 {
		ref := pooltest.Vol(fmt.Sprint(i))
		pooltest.Create(t, other, blockdev.Spec{Ref: ref, Size: 4 * pooltest.MiB})
		if device := pooltest.Attach(t, other, ref, blockdev.Attachment{}); !takes(device) {
			t.Errorf("%s has no discards", device.Path)
		}
	}
}

// TestFreshLoop: a loop device that never had a backing file, like the first ones of a machine, seems to take no discards. It is not removed for that: the
// kernel would give the same number again, for ever.
func TestFreshLoop(t *testing.T) {
	drivertest.NeedRoot(t)
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	check.OK(t, err)
	defer control.Close()
	n := 100_000 + os.Getpid()%100_000 // not the lowest free one, which others get
	check.OK(t, unix.IoctlSetInt(int(control.Fd()), unix.LOOP_CTL_ADD, n))
	if loop.ForgetStopped(n) {
		t.Error("a new loop device is removed")
		return
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		err = unix.IoctlSetInt(int(control.Fd()), unix.LOOP_CTL_REMOVE, n)
		if !errors.Is(err, unix.EBUSY) || time.Now().After(deadline) { // udev and others have a new device open for a moment
			break
		}
	}
	check.OK(t, err)
}

// TestDiscardWhileMeasured: blocks that an image gives back while images are measured do not count twice, as the image's and as free.
func TestDiscardWhileMeasured(t *testing.T) {
	dir := filepath.Join(mountNew(t, "ext4"), "pool")
	pool := pooltest.OpenedFiles(t, dir)
	for i := range 200 { // so many take a while to measure
		check.OK(t, pooltest.Second(pool.Create(t.Context(), blockdev.Spec{Ref: volNumber(i), Name: "a", Size: pooltest.MiB, Provisioning: blockdev.Thin})))
	}
	large := pooltest.Vol("f")
	const size = 64 * pooltest.MiB
	check.OK(t, pooltest.Second(pool.Create(t.Context(), blockdev.Spec{Ref: large, Name: "a", Size: size, Provisioning: blockdev.Thin})))
	image, err := os.OpenFile(path(dir, large, ".img"), os.O_RDWR, 0)
	check.OK(t, err)
	defer image.Close()
	fill := func() { t.Helper(); check.OK(t, unix.Fallocate(int(image.Fd()), 0, 0, size)) }
	fill()
	filepool.Remeasure(pool)
	most := pooltest.CapacityOf(t, pool).Total
	for range 200 {
		filepool.Remeasure(pool)
		measured := make(chan int64)
		go func() {
			c, _ := pool.Capacity(context.Background())
			measured <- c.Total
		}()
		time.Sleep(time.Duration(rand.N(1000)) * time.Microsecond)
		check.OK(t, unix.Fallocate(int(image.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, size))
		if total := <-measured; total > most+size/2 {
			t.Fatalf("%d bytes may be promised, %d is all there is", total, most)
		}
		fill()
	}
}

// TestQuota: a pool whose quota is used up does not count as read-only: it can be emptied.
func TestQuota(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := filepath.Join(drivertest.Dir(t), "mounted")
	drivertest.MountNew(t, "btrfs", dir, 512*pooltest.MiB)
	at := dir + "/pool"
	run(t, "btrfs", "subvolume", "create", at)
	run(t, "btrfs", "quota", "enable", dir)
	pool, err := pools.OpenLazy(t.Context(), "test", "file://"+at+"?create=1&reservePercent=0", nil)
	check.OK(t, err)
	t.Cleanup(func() { check.OK(t, pool.Close()) })
	kept := pooltest.Vol("a")
	pooltest.Create(t, pool, blockdev.Spec{Ref: kept, Name: "a", Size: 32 * pooltest.MiB})
	run(t, "btrfs", "qgroup", "limit", "34M", at)
	for i := 0; err == nil; i++ { // data, and then what inodes take
		err = os.WriteFile(fmt.Sprint(at, "/others", i%1000), make([]byte, min(pooltest.MiB, 64*pooltest.MiB>>min(i, 14))), 0o600)
	}
	if !errors.Is(err, unix.EDQUOT) {
		t.Fatal(err)
	}
	pooltest.Fails(t, pooltest.Second(pool.Create(t.Context(), blockdev.Spec{Ref: pooltest.Vol("b"), Name: "b", Size: 32 * pooltest.MiB})), errdefs.ErrNoSpace, "Create")
	if problems := pool.PoolHealth(t.Context()); len(problems) > 0 {
		t.Errorf("the pool's health: %v", problems)
	}
	if c, err := pool.Capacity(t.Context()); err != nil || c.Promised != 32*pooltest.MiB {
		t.Errorf("%+v, %v", c, err)
	}
	check.OK(t, pool.Delete(t.Context(), kept))
}
