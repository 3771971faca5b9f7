package sparse_test

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/sparse"
)

// BenchmarkCopy copies a file that is not in the page cache to a preallocated one, and syncs that: one that is full, and one with data in each 16th part of it.
func BenchmarkCopy(b *testing.B) {
	for _, extent := range []int64{4 << 10, 64 << 10, 256 << 10, 1 << 20} {
		b.Run(fmt.Sprintf("scattered by %d KiB", extent>>10), func(b *testing.B) {
			benchmarkCopy(b, func(src *os.File) {
				check.OK(b, src.Truncate(benchmarkSize))
				for at := int64(0); at < benchmarkSize; at += 16 * extent {
					_, err := io.Copy(io.NewOffsetWriter(src, at), io.LimitReader(rand.Reader, extent))
					check.OK(b, err)
				}
			})
		})
	}
	b.Run("full", func(b *testing.B) {
		benchmarkCopy(b, func(src *os.File) {
			_, err := io.CopyN(src, rand.Reader, benchmarkSize)
			check.OK(b, err)
		})
	})
}

const benchmarkSize = 512 << 20 // bytes

func benchmarkCopy(b *testing.B, fill func(src *os.File)) {
	dir, err := os.MkdirTemp("/var/tmp", "ashlar-copy")
	check.OK(b, err)
	defer func() { check.OK(b, os.RemoveAll(dir)) }()
	src, err := os.Create(filepath.Join(dir, "source"))
	check.OK(b, err)
	defer src.Close()
	fill(src)
	check.OK(b, src.Sync())
	for b.Loop() {
		b.StopTimer()
		dst, err := os.Create(filepath.Join(dir, "copy"))
		check.OK(b, err)
		check.OK(b, unix.Fallocate(int(dst.Fd()), 0, 0, benchmarkSize))
		check.OK(b, dst.Sync())
		sparse.ForgetCached(src)
		b.StartTimer()
		n, err := sparse.Copy(context.Background(), dst, src, 0, benchmarkSize)
		check.OK(b, err)
		if n != benchmarkSize {
			b.Fatalf("%d bytes were copied, want %d", n, benchmarkSize)
		}
		check.OK(b, dst.Sync())
		b.StopTimer()
		check.OK(b, dst.Close())
		b.StartTimer()
	}
}
