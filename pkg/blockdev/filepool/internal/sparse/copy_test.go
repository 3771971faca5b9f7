package sparse_test

import (
	"bytes"
	"context"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/sparse"
)

// TestCopy: a copy has all bytes and all holes of its source, also of one whose length is no multiple of a block, and one that is only in
// the page cache, on any filesystem; and it leaves little in the page cache where there is a way past it.
func TestCopy(t *testing.T) {
	drivertest.NeedRoot(t)
	for _, kind := range []string{"ext4", "xfs", "btrfs", "tmpfs"} {
		t.Run(kind, func(t *testing.T) {
			dir := mounted(t, kind)
			seed := uint64(time.Now().UnixNano())
			t.Logf("seed %d", seed)
			random := rand.New(rand.NewPCG(seed, 0))
			size := int64(40<<20) + random.Int64N(2)*random.Int64N(1<<20)
			src, err := os.Create(filepath.Join(dir, "source"))
			check.OK(t, err)
			defer src.Close()
			check.OK(t, src.Truncate(size))
			want := make([]byte, size)
			for _, length := range []int64{1, 4096, 64 << 10, 64<<10 + 512, 300 << 10, 3 << 20, 17 << 20} {
				at := random.Int64N(size - length)
				fill(random, want[at:at+length])
				_, err := src.WriteAt(want[at:at+length], at)
				check.OK(t, err)
			}
			dst, err := os.Create(filepath.Join(dir, "copy"))
			check.OK(t, err)
			defer dst.Close()
			check.OK(t, dst.Truncate(size))
			done, err := sparse.Copy(context.Background(), dst, src, 0, size)
			check.OK(t, err)
			if done != size {
				t.Errorf("it is complete up to %d, want %d", done, size)
			}
			check.OK(t, dst.Sync())
			if n := cached(t, dst); kind != "tmpfs" && n > 1<<20 {
				t.Errorf("%d bytes of the copy are in the page cache", n)
			}
			have, err := io.ReadAll(dst)
			check.OK(t, err)
			if !bytes.Equal(have, want) {
				t.Error("the copy differs from its source")
			}
			if a, b := blocks(t, src), blocks(t, dst); b > a+1<<20 {
				t.Errorf("the copy has %d bytes, and its source %d", b, a)
			}
		})
	}
}

func fill(random *rand.Rand, b []byte) {
	for i := range b {
		b[i] = byte(random.Uint32()) | 1
	}
}

// cached is how much of a file is in the page cache, in bytes (mincore(2)).
func cached(t *testing.T, f *os.File) (n int) {
	t.Helper()
	info, err := f.Stat()
	check.OK(t, err)
	memory, err := unix.Mmap(int(f.Fd()), 0, int(info.Size()), unix.PROT_READ, unix.MAP_SHARED)
	check.OK(t, err)
	defer func() { check.OK(t, unix.Munmap(memory)) }()
	pages := make([]byte, (len(memory)+os.Getpagesize()-1)/os.Getpagesize())
	if _, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&memory[0])), uintptr(len(memory)), uintptr(unsafe.Pointer(&pages[0]))); errno != 0 {
		t.Fatal(errno)
	}
	for _, page := range pages {
		n += int(page&1) * os.Getpagesize()
	}
	return n
}

// blocks is how much of the disk a file has, in bytes.
func blocks(t *testing.T, f *os.File) int64 {
	t.Helper()
	var st unix.Stat_t
	check.OK(t, unix.Fstat(int(f.Fd()), &st))
	return st.Blocks * 512
}
