package blockdev_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// direct writes to a device past all caches, so that an answer is the disk's.
func direct(t testing.TB, device string, offset, length int64, fill byte) error {
	t.Helper()
	f, err := os.OpenFile(device, os.O_RDWR|unix.O_DIRECT, 0)
	must(t, err)
	defer f.Close()
	memory, err := unix.Mmap(-1, 0, mib, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	must(t, err)
	defer func() { must(t, unix.Munmap(memory)) }()
	for i := range memory {
		memory[i] = fill
	}
	for end := offset + length; offset < end; offset += mib {
		if _, err := f.WriteAt(memory[:min(end-offset, mib)], offset); err != nil {
			return err
		}
	}
	return f.Sync()
}

// hog tries to take more of a pool than a raw device has, and returns the first write that
// failed. Each pass leaves one block of each extent of what the pass before wrote, and tries to have
// the rest freed.
func hog(t testing.TB, device string, size int64, passes int) error {
	t.Helper()
	f, err := os.OpenFile(device, os.O_RDWR|unix.O_DIRECT, 0)
	must(t, err)
	defer f.Close()
	memory, err := unix.Mmap(-1, 0, mib, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	must(t, err)
	defer func() { must(t, unix.Munmap(memory)) }()
	for pass := range int64(passes) {
		memory[0] = byte(pass + 1)
		for at := int64(0); at < size; at += mib {
			from, length := at+pass*4096, mib-pass*4096
			// What is not supported is written as zeros by the kernel, or refused.
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

// takenOf is how much of a filesystem is taken when all is written. btrfs sets space aside for
// its metadata beforehand, which does not count.
func takenOf(t testing.TB, fs, dir string) int64 {
	t.Helper()
	f, err := os.Open(dir)
	must(t, err)
	defer f.Close()
	must(t, unix.Syncfs(int(f.Fd())))
	if fs == "btrfs" {
		usage, err := exec.Command("btrfs", "filesystem", "usage", "-b", dir).CombinedOutput()
		must(t, err)
		_, rest, _ := strings.Cut(string(usage), "Used:")
		taken, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
		must(t, err)
		return taken
	}
	var st unix.Statfs_t
	must(t, unix.Fstatfs(int(f.Fd()), &st))
	return int64(st.Blocks-st.Bfree) * st.Frsize
}

// reserved opens a pool with a reserve. btrfs needs one for its metadata, and a large one on a
// disk that is as small as those of these tests.
func reserved(t testing.TB, fs, dir string) blockdev.Pool {
	t.Helper()
	percent := map[string]int{"btrfs": 40}[fs]
	pool, err := blockdev.Open(t.Context(), "test", fmt.Sprintf("file://%s?reservePercent=%d", dir, percent))
	must(t, err)
	t.Cleanup(func() { must(t, pool.Close()) })
	return pool
}

// TestHog: whatever is done to a thick device, its image takes no more than was promised, and
// others get what they were promised.
func TestHog(t *testing.T) {
	for _, fs := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fs, func(t *testing.T) {
			mnt := mountNew(t, fs)
			pool := reserved(t, fs, filepath.Join(mnt, "pool"))
			const size = 64 * mib
			create(t, pool, blockdev.Spec{Ref: vol("a"), Size: size})
			create(t, pool, blockdev.Spec{Ref: vol("b"), Size: size, Provisioning: blockdev.Thin})
			left := (capacityOf(t, pool).Available - 16*mib) / mib * mib
			create(t, pool, blockdev.Spec{Ref: vol("c"), Size: left, Provisioning: blockdev.Thin})
			for _, ref := range []blockdev.Ref{vol("a"), vol("b")} {
				device := attach(t, pool, ref, blockdev.Attachment{Keep: true})
				before := takenOf(t, fs, mnt)
				must(t, hog(t, device.Path, size, 8))
				most := before + 4*mib
				if ref == vol("b") {
					most += size
				}
				if now := takenOf(t, fs, mnt); now > most {
					t.Errorf("%s, of %d MiB, took %d MiB more", ref, size/mib, (now-before)/mib)
				}
				must(t, errors.Join(device.Close(), pool.Detach(t.Context(), ref)))
			}
			for _, ref := range []blockdev.Ref{vol("a"), vol("b"), vol("c")} {
				record, err := pool.Get(t.Context(), ref)
				must(t, err)
				device := attach(t, pool, ref, blockdev.Attachment{})
				for fill := range byte(2) {
					if err := direct(t, device.Path, 0, record.Size, fill+1); err != nil {
						t.Errorf("%s: %v", ref, err)
					}
				}
				must(t, device.Close())
			}
		})
	}
}

// TestHogSnapshots: with snapshots that come and go, which keep blocks of a volume's older
// states, what is promised is there too.
func TestHogSnapshots(t *testing.T) {
	for _, fs := range []string{"xfs", "btrfs"} {
		t.Run(fs, func(t *testing.T) {
			mnt := mountNew(t, fs)
			pool := reserved(t, fs, filepath.Join(mnt, "pool"))
			const size = 64 * mib
			create(t, pool, blockdev.Spec{Ref: vol("a"), Size: size})
			create(t, pool, blockdev.Spec{Ref: vol("b"), Size: 128 * mib, Provisioning: blockdev.Thin})
			before := takenOf(t, fs, mnt)
			device := attach(t, pool, vol("a"), blockdev.Attachment{Keep: true})
			must(t, direct(t, device.Path, 0, size, 1))
			cycles := 0
			for ; cycles < 12; cycles++ {
				spec := blockdev.Spec{Ref: snap("1"), Name: "cut", Size: size, Origin: vol("a")}
				_, err := pool.Create(t.Context(), spec)
				if errors.Is(err, errdefs.ErrNoSpace) {
					break // its own share of the pool is used up
				}
				must(t, err)
				for at := int64(0); at < size; at += 512 << 10 { // all but some blocks of each extent
					from := int64(cycles) * 4096
					must(t, direct(t, device.Path, at+from, 512<<10-from, byte(cycles+2)))
				}
				must(t, pool.Delete(t.Context(), snap("1")))
			}
			must(t, errors.Join(device.Close(), pool.Detach(t.Context(), vol("a"))))
			c := capacityOf(t, pool)
			t.Logf("after %d snapshots: %+v", cycles, c)
			if left := (c.Available - 16*mib) / mib * mib; left > 0 {
				create(t, pool, blockdev.Spec{Ref: vol("c"), Size: left})
			}
			device = attach(t, pool, vol("b"), blockdev.Attachment{})
			if err := direct(t, device.Path, 0, 128*mib, 9); err != nil {
				t.Errorf("the volume next to it cannot have what it was promised: %v", err)
			}
			must(t, device.Close())
			// All comes back with the volume.
			for _, ref := range []blockdev.Ref{vol("a"), vol("b"), vol("c")} {
				must(t, pool.Delete(t.Context(), ref))
			}
			if now := takenOf(t, fs, mnt); now > before {
				t.Errorf("with all deleted, %d MiB are taken, and %d were at first", now/mib, before/mib)
			}
		})
	}
}

// older makes files of a pool on btrfs those that drivers before this one made.
func older(t testing.TB, dir string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*s", "*"))
	must(t, err)
	for _, folder := range []string{"volumes", "snapshots"} {
		run(t, "chattr", "-C", filepath.Join(dir, folder))
	}
	for _, file := range files {
		run(t, "cp", "--sparse=always", file, file+".copy")
		must(t, os.Rename(file+".copy", file))
	}
}

func attributes(t testing.TB, path string) string {
	t.Helper()
	out, err := exec.Command("lsattr", "-d", path).CombinedOutput()
	must(t, err)
	return strings.Fields(string(out))[0]
}

// TestOlderImages: images that btrfs copies as they are written can be used, copied and
// deleted, and health tells of them; their copies are not such any more, nor is any record.
func TestOlderImages(t *testing.T) {
	mnt := mountNew(t, "btrfs")
	run(t, "mount", "-o", "remount,compress-force=zstd", mnt)
	dir := filepath.Join(mnt, "pool")
	pool := open(t, dir)
	const size = 32 * mib
	create(t, pool, blockdev.Spec{Ref: vol("a"), Size: size})
	create(t, pool, blockdev.Spec{Ref: vol("b"), Size: size})
	if have := attributes(t, path(dir, vol("a"), ".img")); !strings.Contains(have, "C") {
		t.Errorf("a new image has the attributes %s", have)
	}
	device := attach(t, pool, vol("a"), blockdev.Attachment{})
	text := bytes.Repeat([]byte("older "), mib)
	writeTo(t, device.Path, mib, text)
	must(t, errors.Join(device.Close(), pool.Close()))
	older(t, dir)

	pool = opened(t, dir)
	for _, ref := range []blockdev.Ref{vol("a"), vol("b")} {
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
	create(t, pool, blockdev.Spec{Ref: snap("a"), Size: size, Origin: vol("a")})
	create(t, pool, blockdev.Spec{Ref: vol("c"), Size: 2 * size, Origin: snap("a")})
	create(t, pool, blockdev.Spec{Ref: vol("d"), Size: size, Origin: vol("a"), Provisioning: blockdev.Thin})
	for _, ref := range []blockdev.Ref{vol("a"), vol("c"), vol("d")} {
		device := attach(t, pool, ref, blockdev.Attachment{})
		have := make([]byte, len(text))
		f, err := os.Open(device.Path)
		must(t, err)
		_, err = f.ReadAt(have, mib)
		must(t, errors.Join(err, f.Close()))
		if !bytes.Equal(have, text) {
			t.Errorf("%s has other bytes", ref)
		}
		must(t, device.Close())
		if ref != vol("a") && !strings.Contains(attributes(t, path(dir, ref, ".img")), "C") {
			t.Errorf("the copy %s is copied on write", ref)
		}
	}
	if have := blocksOf(t, path(dir, vol("c"), ".img")); have < 2*size {
		t.Errorf("the thick copy has %d bytes", have)
	}
	for _, ref := range []blockdev.Ref{snap("a"), vol("a"), vol("b"), vol("c"), vol("d")} {
		must(t, pool.Delete(t.Context(), ref))
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

// fragment makes the data of an image as fragmented as can be: of every two blocks one is written.
func fragment(t testing.TB, image string, size int64) {
	t.Helper()
	f, err := os.OpenFile(image, os.O_RDWR, 0)
	must(t, err)
	for at := int64(0); at < size; at += 8192 {
		_, err := f.WriteAt([]byte{1}, at)
		must(t, err)
	}
	must(t, errors.Join(f.Sync(), f.Close()))
}

// settled waits until the surveys of a pool know of an object.
func settled(t testing.TB, pool blockdev.Pool, ref blockdev.Ref) (surveys, extents int) {
	t.Helper()
	for {
		capacityOf(t, pool)
		if surveys, extents = blockdev.Surveys(pool, ref); surveys > 0 {
			return surveys, extents
		}
	}
}

// TestSurvey: the extents of images that share blocks are looked at when something changed,
// once, and not those of others.
func TestSurvey(t *testing.T) {
	mnt := mountNew(t, "xfs")
	pool := opened(t, filepath.Join(mnt, "pool"))
	const size = 2 * mib
	create(t, pool, blockdev.Spec{Ref: vol("a"), Size: size, Provisioning: blockdev.Thin})
	create(t, pool, blockdev.Spec{Ref: vol("b"), Size: size, Provisioning: blockdev.Thin})
	fragment(t, path(filepath.Join(mnt, "pool"), vol("a"), ".img"), size)
	fragment(t, path(filepath.Join(mnt, "pool"), vol("b"), ".img"), size)
	for i := range 8 {
		create(t, pool, blockdev.Spec{Ref: snap(fmt.Sprint(i)), Size: size, Origin: vol("a")})
	}
	_, extents := settled(t, pool, snap("7"))
	if extents != size/8192 {
		t.Errorf("%d extents were seen, and there are %d", extents, size/8192)
	}
	before, _ := settled(t, pool, vol("a"))
	for i := range 100 {
		capacityOf(t, pool)
		pool.PoolHealth(t.Context())
		if i%10 == 0 {
			create(t, pool, blockdev.Spec{Ref: vol("c"), Size: size})
			must(t, pool.Delete(t.Context(), vol("c")))
		}
	}
	if after, _ := blockdev.Surveys(pool, vol("a")); after != before {
		t.Errorf("there were %d surveys of what did not change", after-before)
	}
	if surveys, _ := blockdev.Surveys(pool, vol("b")); surveys > 0 {
		t.Error("the extents of an image that shares none were looked at")
	}
}

// TestSurveyBeforeRefusal: what is not known to be free is looked for before a volume is refused.
func TestSurveyBeforeRefusal(t *testing.T) {
	for _, fs := range []string{"xfs", "btrfs"} {
		t.Run(fs, func(t *testing.T) {
			t.Parallel()
			pool := opened(t, filepath.Join(mountNew(t, fs), "pool"))
			const size = 128 * mib
			create(t, pool, blockdev.Spec{Ref: vol("a"), Size: size})
			device := attach(t, pool, vol("a"), blockdev.Attachment{})
			must(t, direct(t, device.Path, 0, size, 1))
			create(t, pool, blockdev.Spec{Ref: snap("a"), Size: size, Origin: vol("a")})
			settled(t, pool, snap("a"))
			promised := capacityOf(t, pool).Available
			must(t, direct(t, device.Path, 0, size, 2)) // of which the last survey knows nothing
			must(t, device.Close())
			create(t, pool, blockdev.Spec{Ref: vol("b"), Size: (promised - 32*mib) / mib * mib})
			_, err := pool.Create(t.Context(), blockdev.Spec{Ref: vol("c"), Name: "c", Size: 64 * mib})
			fails(t, err, errdefs.ErrNoSpace, "more than there is")
		})
	}
}

// TestSurveyLimit: of images in more pieces than a survey looks at, too little is counted and
// never too much, health tells of them, and those of others are counted in full.
func TestSurveyLimit(t *testing.T) {
	mnt := mountNew(t, "xfs")
	dir := filepath.Join(mnt, "pool")
	pool := opened(t, dir)
	blockdev.LimitSurveys(pool, 1000)
	const size = 16 * mib
	create(t, pool, blockdev.Spec{Ref: vol("a"), Size: size, Provisioning: blockdev.Thin})
	create(t, pool, blockdev.Spec{Ref: vol("b"), Size: size})
	device := attach(t, pool, vol("b"), blockdev.Attachment{})
	must(t, errors.Join(direct(t, device.Path, 0, size, 1), device.Close()))
	create(t, pool, blockdev.Spec{Ref: snap("b"), Size: size, Origin: vol("b")})
	before := capacityOf(t, pool)
	fragment(t, path(dir, vol("a"), ".img"), size)
	create(t, pool, blockdev.Spec{Ref: snap("a"), Size: size, Origin: vol("a")})
	settled(t, pool, snap("a"))
	must(t, pool.Delete(t.Context(), snap("b"))) // all is looked at anew
	create(t, pool, blockdev.Spec{Ref: snap("b"), Size: size, Origin: vol("b")})
	settled(t, pool, snap("b"))
	after := capacityOf(t, pool)
	if lost := before.Available - size - after.Available; lost < 0 || lost > size+mib {
		t.Errorf("%d bytes less are available than there would be without fragmentation", lost)
	}
	if have := reasons(pool.PoolHealth(t.Context())); !slices.Equal(have, []string{"1 ImagesFragmented"}) {
		t.Errorf("health: %v", have)
	}
}

// TestSurveyHangs: no call waits for a survey that does not end, but one that would be refused,
// and that one no longer than its caller.
func TestSurveyHangs(t *testing.T) {
	mnt := mountNew(t, "xfs")
	dir := filepath.Join(mnt, "pool")
	pool := opened(t, dir)
	create(t, pool, blockdev.Spec{Ref: vol("a"), Size: 4 * mib})
	create(t, pool, blockdev.Spec{Ref: snap("a"), Size: 4 * mib, Origin: vol("a")})
	settled(t, pool, snap("a"))
	release := blockdev.HangSurveys(pool)
	defer release()
	create(t, pool, blockdev.Spec{Ref: snap("b"), Size: 4 * mib, Origin: vol("a")}) // so there will be one
	for range 3 {
		if c := capacityOf(t, pool); c.Available == 0 {
			t.Errorf("capacity: %+v", c)
		}
		pool.PoolHealth(t.Context())
		create(t, pool, blockdev.Spec{Ref: vol("b"), Size: 4 * mib})
		_, err := pool.Expand(t.Context(), vol("b"), 8*mib)
		must(t, err)
		must(t, attachedOnce(t, pool, vol("b")))
		create(t, pool, blockdev.Spec{Ref: snap("c"), Size: 8 * mib, Origin: vol("b")})
		must(t, errors.Join(pool.Delete(t.Context(), snap("c")), pool.Delete(t.Context(), vol("b"))))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	_, err := pool.Create(ctx, blockdev.Spec{Ref: vol("c"), Name: "c", Size: 4 << 30})
	fails(t, err, context.DeadlineExceeded, "a volume that does not fit")
	release()
	_, err = pool.Create(t.Context(), blockdev.Spec{Ref: vol("c"), Name: "c", Size: 4 << 30})
	if err == nil {
		t.Error("a volume was made that does not fit")
	}
	_, err = pool.Create(t.Context(), blockdev.Spec{Ref: vol("c"), Name: "c", Size: 4 << 30})
	fails(t, err, errdefs.ErrNoSpace, "a volume that does not fit, once it is known")
}

// TestFragmented: what the kernel takes long for ends with the caller, and is gone on with or
// undone later.
func TestFragmented(t *testing.T) {
	for _, fs := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fs, func(t *testing.T) {
			t.Parallel()
			mnt := mountNew(t, fs)
			dir := filepath.Join(mnt, "pool")
			pool := opened(t, dir)
			const size = 3 * blockdev.FirstStep
			create(t, pool, blockdev.Spec{Ref: vol("a"), Size: size, Provisioning: blockdev.Thin})
			fragment(t, path(dir, vol("a"), ".img"), 4*mib)
			before := capacityOf(t, pool)

			spec := blockdev.Spec{Ref: snap("a"), Name: "cut", Size: size, Origin: vol("a"), Quiesced: true}
			_, err := pool.Create(&endsAfter{Context: t.Context(), n: 1}, spec)
			fails(t, err, context.Canceled, "a snapshot whose caller is gone")
			_, err = pool.Get(t.Context(), snap("a"))
			fails(t, err, errdefs.ErrNotFound, "what is left of it")
			_, err = pool.Create(t.Context(), spec)
			must(t, err)

			for _, ref := range []blockdev.Ref{snap("a"), vol("a")} {
				fails(t, pool.Delete(&endsAfter{Context: t.Context(), n: 1}, ref), context.Canceled, "a deletion whose caller is gone")
				_, err = pool.Get(t.Context(), ref)
				fails(t, err, errdefs.ErrNotFound, "what is being deleted")
				if _, err := os.Stat(path(dir, ref, ".rec")); err != nil {
					t.Errorf("the record is gone before the space is back: %v", err)
				}
				must(t, pool.Delete(t.Context(), ref))
			}
			if after := capacityOf(t, pool); after.Promised != 0 || after.Available < before.Available {
				t.Errorf("with all deleted: %+v; at first %+v", after, before)
			}

			// Thick, and full of holes.
			create(t, pool, blockdev.Spec{Ref: vol("b"), Size: size})
			f, err := os.OpenFile(path(dir, vol("b"), ".img"), os.O_RDWR, 0)
			must(t, err)
			for at := int64(0); at < 4*mib; at += 8192 {
				must(t, unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, at, 4096))
			}
			must(t, f.Close())
			_, err = pool.Attach(&endsAfter{Context: t.Context(), n: 1}, vol("b"), blockdev.Attachment{})
			fails(t, err, context.Canceled, "an attachment whose caller is gone")
			must(t, errors.Join(attachedOnce(t, pool, vol("b")), pool.Detach(t.Context(), vol("b"))))
			if have := blocksOf(t, path(dir, vol("b"), ".img")); have < size {
				t.Errorf("attached, it has %d bytes of %d", have, size)
			}
		})
	}
}

// cutsShort is a context that, when it is asked for the n-th time, cuts a file to a size.
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

// TestSourceCutShort: a copy whose source loses its end meanwhile is no copy, whether what it lost
// was data or had a hole before it, and is not waited for.
func TestSourceCutShort(t *testing.T) {
	for _, fs := range []string{"ext4", "xfs", "btrfs"} {
		for name, size := range map[string]int64{"within data": 40 * mib, "in a hole": 100 * mib, "all": 0} {
			t.Run(fs+" "+name, func(t *testing.T) {
				dir := filepath.Join(mountNew(t, fs), "pool")
				pool := opened(t, dir)
				create(t, pool, blockdev.Spec{Ref: vol("a"), Size: 160 * mib, Provisioning: blockdev.Thin})
				device := attach(t, pool, vol("a"), blockdev.Attachment{})
				must(t, errors.Join(direct(t, device.Path, 0, 80*mib, 1), direct(t, device.Path, 150*mib, 10*mib, 1), device.Close()))
				for _, kind := range []blockdev.Ref{vol("a"), snap("a")} {
					if kind == snap("a") {
						must(t, os.Truncate(path(dir, vol("a"), ".img"), 160*mib))
						create(t, pool, blockdev.Spec{Ref: snap("a"), Size: 160 * mib, Origin: vol("a")})
					}
					ctx := &cutsShort{Context: t.Context(), n: 2, file: path(dir, kind, ".img"), size: size}
					_, err := pool.Create(ctx, blockdev.Spec{Ref: vol("b"), Name: "b", Size: 160 * mib, Origin: kind})
					fails(t, err, errdefs.ErrDataLoss, fmt.Sprintf("a copy of %s, which was cut short", kind))
					_, err = pool.Get(t.Context(), vol("b"))
					fails(t, err, errdefs.ErrNotFound, "the copy")
				}
			})
		}
	}
}

// TestDiscardsOfOthers: devices over files on btrfs take no discards; those that have their numbers
// next do, also if the driver died before it could see to that.
func TestDiscardsOfOthers(t *testing.T) {
	takes := func(device blockdev.Device) bool {
		most, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(device.Path), "queue/discard_max_bytes"))
		return err == nil && strings.TrimSpace(string(most)) != "0"
	}
	pool, other := opened(t, filepath.Join(mountNew(t, "btrfs"), "pool")), opened(t, filepath.Join(mountNew(t, "xfs"), "pool"))
	create(t, pool, blockdev.Spec{Ref: vol("a"), Size: 4 * mib})
	for _, keep := range []bool{true, false} {
		device := attach(t, pool, vol("a"), blockdev.Attachment{Keep: keep})
		if takes(device) {
			t.Error("a device over a file on btrfs takes discards")
		}
		must(t, errors.Join(device.Close(), pool.Detach(t.Context(), vol("a"))))
		if _, err := os.Stat(filepath.Join("/sys/block", filepath.Base(device.Path), "loop/backing_file")); err != nil { // nobody has it yet
			if most, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(device.Path), "queue/discard_max_bytes")); err == nil && string(most) == "0\n" {
				t.Errorf("%s is left without discards", device.Path)
			}
		}
	}
	device := attach(t, pool, vol("a"), blockdev.Attachment{})
	must(t, device.Close()) // and nothing else, as after a crash
	for i := range 8 {
		ref := vol(fmt.Sprint(i))
		create(t, other, blockdev.Spec{Ref: ref, Size: 4 * mib})
		if device := attach(t, other, ref, blockdev.Attachment{}); !takes(device) {
			t.Errorf("%s has no discards", device.Path)
		}
	}
}

// TestFreshLoop: a loop device that had no backing file yet, as the first ones of a machine, seems to
// take no discards. It is not given back for that: the next free one would be the same again, for ever.
func TestFreshLoop(t *testing.T) {
	drivertest.NeedRoot(t)
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	must(t, err)
	defer control.Close()
	n := 100_000 + os.Getpid()%100_000 // the lowest free one is what others get
	must(t, unix.IoctlSetInt(int(control.Fd()), unix.LOOP_CTL_ADD, n))
	if blockdev.ForgetStopped(n) {
		t.Error("a new loop device is removed")
	} else {
		must(t, unix.IoctlSetInt(int(control.Fd()), unix.LOOP_CTL_REMOVE, n))
	}
}
