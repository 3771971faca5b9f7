package pooltest

import (
	"context"
	"errors"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pools"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Fails checks that an error wraps the wanted one, and no other sentinel.
func Fails(t testing.TB, err, want error, what string) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("%s: error %v, want %v", what, err, want)
	}
	if kinds := errdefs.Kinds(err); len(kinds) > 1 {
		t.Errorf("%s: error %v is of %d kinds: %v", what, err, len(kinds), kinds)
	}
}

// OpenFiles opens the file pool "test" of a directory, without a reserve.
func OpenFiles(t testing.TB, dir string) blockdev.Pool {
	t.Helper()
	pool, err := pools.Open(context.Background(), "test", "file://"+dir+"?reservePercent=0&create=1")
	check.OK(t, err)
	return pool
}

// OpenedFiles is OpenFiles, with a Close at the end of the test.
func OpenedFiles(t testing.TB, dir string) blockdev.Pool {
	t.Helper()
	drivertest.NeedRoot(t)
	pool := OpenFiles(t, dir)
	t.Cleanup(func() { check.OK(t, pool.Close()) })
	return pool
}

// MiB is a mebibyte, in bytes.
const MiB = 1 << 20

// Vol names a volume by one hexadecimal digit.
func Vol(digit string) blockdev.Ref {
	return blockdev.Ref{Kind: blockdev.Volume, Key: strings.Repeat(digit, 32)}
}

// Snap names a snapshot by one hexadecimal digit.
func Snap(digit string) blockdev.Ref {
	return blockdev.Ref{Kind: blockdev.Snapshot, Key: strings.Repeat(digit, 32)}
}

// Create makes an object that is named by its Ref.
func Create(t testing.TB, pool blockdev.Pool, spec blockdev.Spec) blockdev.Record {
	t.Helper()
	spec.Name = spec.Ref.String()
	record, err := pool.Create(t.Context(), spec)
	check.OK(t, err)
	return record
}

// Attach attaches an object until the end of the test, or until it is closed.
func Attach(t testing.TB, pool blockdev.Pool, ref blockdev.Ref, how blockdev.Attachment) blockdev.Device {
	t.Helper()
	device, err := pool.Attach(t.Context(), ref, how)
	check.OK(t, err)
	t.Cleanup(func() { _ = device.Close() })
	return device
}

// WriteTo writes to a file or device, and syncs it.
func WriteTo(t testing.TB, path string, offset int64, b []byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	check.OK(t, err)
	_, err = f.WriteAt(b, offset)
	check.OK(t, errors.Join(err, f.Sync(), f.Close()))
}

// CapacityOf returns the capacity of a pool.
func CapacityOf(t testing.TB, pool blockdev.Pool) blockdev.Capacity {
	t.Helper()
	c, err := pool.Capacity(t.Context())
	check.OK(t, err)
	return c
}

// Second returns the error of a call that returns another value too.
func Second[T any](_ T, err error) error { return err }

// AtOnce calls do n times at once, and returns the errors.
func AtOnce(n int, do func(i int) error) []error {
	errs := make([]error, n)
	var all sync.WaitGroup
	begin := make(chan struct{})
	for i := range n {
		all.Go(func() {
			<-begin
			errs[i] = do(i)
		})
	}
	close(begin)
	all.Wait()
	return errs
}

// EndsAfter is a context that ends when Err was called N times.
type EndsAfter struct {
	context.Context
	N int
}

// Err returns nil N times, and context.Canceled after that.
func (c *EndsAfter) Err() error {
	if c.N--; c.N < 0 {
		return context.Canceled
	}
	return nil
}

// OpenURL opens the pool "p" at a URL.
func OpenURL(t testing.TB, url string) blockdev.Pool {
	t.Helper()
	pool, err := pools.Open(t.Context(), "p", url)
	check.OK(t, err)
	return pool
}
