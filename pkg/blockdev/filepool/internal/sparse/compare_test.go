package sparse_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/sparse"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

const (
	page  = 4096
	block = 64 << 10
)

// image is a file that is written to at random, and cut.
type image struct {
	t      *testing.T
	random *rand.Rand
	file   *os.File
	size   int64
}

// step does something to a file: nothing of it is synced.
func (i *image) step() {
	i.t.Helper()
	at := i.random.Int64N(i.size/page) * page
	n := min(i.size-at, (1+i.random.Int64N(60))*page)
	var err error
	switch i.random.IntN(8) {
	case 0:
		err = unix.Fallocate(int(i.file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, at, n)
	case 1:
		if err = unix.Fallocate(int(i.file.Fd()), unix.FALLOC_FL_ZERO_RANGE|unix.FALLOC_FL_KEEP_SIZE, at, n); errors.Is(err, unix.EOPNOTSUPP) {
			err = nil
		}
	case 2: // preallocated, and never written
		err = unix.Fallocate(int(i.file.Fd()), unix.FALLOC_FL_KEEP_SIZE, at, n)
	case 3: // the same again, in other blocks
		b := make([]byte, n)
		if _, err = i.file.ReadAt(b, at); err == nil {
			_, err = i.file.WriteAt(b, at)
		}
	case 4: // within a page
		_, err = i.file.WriteAt([]byte{byte(i.random.Uint32())}, at+i.random.Int64N(page))
	case 5: // of one word: compressed, where the filesystem does that
		_, err = i.file.WriteAt(bytes.Repeat([]byte{byte(i.random.Uint32())}, int(n)), at)
	default:
		b := make([]byte, n)
		for i2 := range b {
			b[i2] = byte(i.random.Uint32())
		}
		_, err = i.file.WriteAt(b, at)
	}
	check.OK(i.t, err)
}

// cut makes a copy, which shares blocks where it can.
func (i *image) cut(name string) *os.File {
	i.t.Helper()
	f, err := os.Create(filepath.Join(filepath.Dir(i.file.Name()), name))
	check.OK(i.t, err)
	i.t.Cleanup(func() { _ = f.Close() })
	check.OK(i.t, f.Truncate(i.size))
	if err := unix.IoctlFileClone(int(f.Fd()), int(i.file.Fd())); err != nil {
		_, err := sparse.Copy(context.Background(), f, i.file, 0, i.size)
		check.OK(i.t, err)
	}
	return f
}

// mounted is a new filesystem of a kind, or of one that compresses what is written.
func mounted(t *testing.T, kind string) (dir string) {
	t.Helper()
	dir = filepath.Join(drivertest.Dir(t), "d")
	if kind == "tmpfs" {
		check.OK(t, os.Mkdir(dir, 0o700))
		check.OK(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=256m"))
		t.Cleanup(func() { drivertest.Unmount(t, dir) })
		return dir
	}
	fs, option, _ := strings.Cut(kind, " ")
	drivertest.MountNew(t, fs, dir, 512<<20)
	if option != "" {
		check.OK(t, unix.Mount("", dir, "", unix.MS_REMOUNT, "compress-force=zstd"))
	}
	return dir
}

// TestChanged: whatever was done to a file between two cuts, what differs is in the list, and every range of the list does differ: on
// filesystems that share blocks, compress them, and do neither.
func TestChanged(t *testing.T) {
	drivertest.NeedRoot(t)
	for _, kind := range []string{"xfs", "btrfs", "btrfs compressed", "ext4", "tmpfs"} {
		t.Run(kind, func(t *testing.T) {
			dir := mounted(t, kind)
			seed := uint64(time.Now().UnixNano())
			t.Logf("seed %d", seed)
			random := rand.New(rand.NewPCG(seed, 0))
			file, err := os.Create(filepath.Join(dir, "image"))
			check.OK(t, err)
			defer file.Close()
			i := &image{t, random, file, 4 << 20}
			check.OK(t, file.Truncate(i.size))
			var cuts []*os.File
			var sizes []int64
			for round := range 9 {
				for range random.IntN(60) {
					i.step()
				}
				if round == 5 {
					i.size += 1 << 20
					check.OK(t, file.Truncate(i.size))
				}
				cuts, sizes = append(cuts, i.cut(fmt.Sprint("cut", round))), append(sizes, i.size)
				for base := range round {
					compareCuts(t, cuts[base], cuts[round], sizes[base], sizes[round], random.Int64N(i.size))
				}
			}
		})
	}
}

func compareCuts(t *testing.T, base, target *os.File, baseSize, size, from int64) {
	t.Helper()
	for _, from := range []int64{0, from} {
		var have []blockdev.Extent
		check.OK(t, sparse.Changed(t.Context(), base, target, baseSize, size, from, func(e blockdev.Extent) error { have = append(have, e); return nil }))
		a, err := os.ReadFile(base.Name())
		check.OK(t, err)
		b, err := os.ReadFile(target.Name())
		check.OK(t, err)
		a = append(a, make([]byte, len(b)-len(a))...)
		end := int64(0)
		for _, e := range have {
			if e.Length <= 0 || e.Offset < end || e.Offset+e.Length > size || e.Offset+e.Length <= from {
				t.Fatalf("from byte %d: %v are not in order and within bounds", from, have)
			}
			end = e.Offset + e.Length
		}
		for at := from / block * block; at < size; at += block {
			stop := min(at+block, size)
			differs := !bytes.Equal(a[max(at, from):stop], b[max(at, from):stop])
			listed := slices.ContainsFunc(have, func(e blockdev.Extent) bool { return e.Offset <= at && stop <= e.Offset+e.Length })
			if differs != listed && (differs || at >= from) { // what is before from may count, or not
				t.Fatalf("from %s to %s, from byte %d: block %d differs: %v, listed: %v (%v)", base.Name(), target.Name(), from, at/block, differs, listed, have)
			}
		}
	}
}

// TestListedCutShort: a file that somebody cuts short while it is listed looks as if it had a hole there, and is an error.
func TestListedCutShort(t *testing.T) {
	dir := mounted(t, "tmpfs")
	const size = 8 << 20
	full := func(name string, content byte) *os.File {
		f, err := os.Create(filepath.Join(dir, name))
		check.OK(t, err)
		t.Cleanup(func() { _ = f.Close() })
		for at := int64(0); at < size; at += 2 * block {
			_, err := f.WriteAt(bytes.Repeat([]byte{content}, block), at)
			check.OK(t, err)
		}
		check.OK(t, f.Truncate(size))
		return f
	}
	none := full("none", 0)
	for name, list := range map[string]func(cut *os.File, yield func(blockdev.Extent) error) error{
		"allocated": func(cut *os.File, yield func(blockdev.Extent) error) error {
			return sparse.Allocated(t.Context(), cut, size, 0, yield)
		},
		"changed from": func(cut *os.File, yield func(blockdev.Extent) error) error {
			return sparse.Changed(t.Context(), cut, none, size, size, 0, yield)
		},
		"changed to": func(cut *os.File, yield func(blockdev.Extent) error) error {
			return sparse.Changed(t.Context(), none, cut, size, size, 0, yield)
		},
	} {
		cut := full("cut", 1)
		if err := list(cut, func(blockdev.Extent) error { return cut.Truncate(size / 2) }); !errors.Is(err, errdefs.ErrDataLoss) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestChangedReadsLittle: of files that share their blocks, no more is read than what differs.
func TestChangedReadsLittle(t *testing.T) {
	drivertest.NeedRoot(t)
	for _, fs := range []string{"xfs", "btrfs"} {
		t.Run(fs, func(t *testing.T) {
			dir := filepath.Join(drivertest.Dir(t), "d")
			drivertest.MountNew(t, fs, dir, 1<<30)
			file, err := os.Create(filepath.Join(dir, "image"))
			check.OK(t, err)
			defer file.Close()
			i := &image{t, rand.New(rand.NewPCG(1, 1)), file, 256 << 20}
			_, err = file.WriteAt(bytes.Repeat([]byte{1}, int(i.size)), 0)
			check.OK(t, err)
			one := i.cut("one")
			_, err = file.WriteAt([]byte{2}, 100<<20)
			check.OK(t, err)
			two := i.cut("two")
			check.OK(t, unix.Fsync(int(two.Fd())))
			sparse.ForgetCached(one)
			sparse.ForgetCached(two)
			before := readBytes(t)
			var have []blockdev.Extent
			check.OK(t, sparse.Changed(t.Context(), one, two, i.size, i.size, 0, func(e blockdev.Extent) error { have = append(have, e); return nil }))
			if len(have) != 1 || have[0].Offset != 100<<20 {
				t.Errorf("%v", have)
			}
			if read := readBytes(t) - before; read > 4<<20 {
				t.Errorf("%d bytes were read to find one block", read)
			}
		})
	}
}

// readBytes is how much this process has read of files (proc(5), /proc/pid/io).
func readBytes(t *testing.T) (n int64) {
	t.Helper()
	text, err := os.ReadFile("/proc/self/io")
	check.OK(t, err)
	_, err = fmt.Sscanf(string(text), "rchar: %d", &n)
	check.OK(t, err)
	return n
}
