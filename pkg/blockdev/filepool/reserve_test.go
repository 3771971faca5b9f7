package filepool_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pools"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// left returns how much of a filesystem is free for users other than root, in percent, as the kubelet counts.
func left(t *testing.T, dir string) (space, inodes float64) {
	t.Helper()
	var st unix.Statfs_t
	check.OK(t, unix.Statfs(dir, &st))
	return 100 * float64(st.Bavail) / float64(st.Blocks), 100 * float64(st.Ffree) / float64(st.Files)
}

// volNumber returns the volume of a number.
func volNumber(n int) blockdev.Ref {
	return blockdev.Ref{Kind: blockdev.Volume, Key: fmt.Sprintf("%032x", n)}
}

// fillPool makes volumes of a size until there is no room for another one.
func fillPool(t *testing.T, pool blockdev.Pool, size int64) (n int) {
	t.Helper()
	for ; ; n++ {
		ref := volNumber(n)
		_, err := pool.Create(t.Context(), blockdev.Spec{Ref: ref, Name: ref.String(), Size: size})
		if errors.Is(err, errdefs.ErrNoSpace) {
			return n
		}
		check.OK(t, err)
	}
}

// TestReserve: the default of the reserve depends on who else uses the filesystem, and the pool's volumes do not take it.
func TestReserve(t *testing.T) {
	below := func(name string) func(*testing.T, string) string {
		return func(t *testing.T, mnt string) string {
			dir := filepath.Join(mnt, name)
			check.OK(t, os.Mkdir(dir, 0o700))
			return dir
		}
	}
	// bound is a directory at which another one is bind-mounted, as a container sees those of the machine.
	bound := func(t *testing.T, source string) string {
		dir := drivertest.Dir(t)
		run(t, "mount", "--bind", source, dir)
		t.Cleanup(func() { drivertest.Unmount(t, dir) })
		return dir
	}
	for name, c := range map[string]struct {
		fs      string
		place   func(t *testing.T, mnt string) string // returns the pool's directory
		options string
		want    float64
		shared  bool
	}{
		"a disk":                       {"ext4", func(_ *testing.T, mnt string) string { return mnt }, "", filepool.OwnReserve, false},
		"a disk with XFS":              {"xfs", func(_ *testing.T, mnt string) string { return mnt }, "", filepool.OwnReserve, false},
		"a disk with btrfs":            {"btrfs", func(_ *testing.T, mnt string) string { return mnt }, "", filepool.OwnReserve, false},
		"a directory":                  {"ext4", below("pool"), "", filepool.SharedReserve, true},
		"a directory there is not":     {"ext4", func(_ *testing.T, mnt string) string { return mnt + "/pool" }, "", filepool.SharedReserve, true},
		"a directory, given":           {"ext4", below("pool"), "&reservePercent=7", 7, true},
		"a disk, given":                {"ext4", func(_ *testing.T, mnt string) string { return mnt }, "&reservePercent=30", 30, false},
		"a disk that is mounted twice": {"ext4", bound, "", filepool.SharedReserve, true},
		"a directory in a container":   {"ext4", func(t *testing.T, mnt string) string { return bound(t, below("pool")(t, mnt)) }, "", filepool.SharedReserve, true},
		"a subvolume": {"btrfs", func(t *testing.T, mnt string) string {
			run(t, "btrfs", "subvolume", "create", mnt+"/s")
			return mnt + "/s"
		}, "", filepool.SharedReserve, true},
		"a subvolume that is mounted": {"btrfs", func(t *testing.T, mnt string) string {
			run(t, "btrfs", "subvolume", "create", mnt+"/s")
			return bound(t, mnt+"/s")
		}, "", filepool.SharedReserve, true},
		"a disk with a directory bound": {"ext4", func(t *testing.T, mnt string) string { bound(t, below("other")(t, mnt)); return mnt }, "", filepool.SharedReserve, true},
	} {
		t.Run(name, func(t *testing.T) {
			mnt := mountNew(t, c.fs)
			dir := c.place(t, mnt)
			url := "file://" + dir + "?create=1" + c.options
			loc, err := pools.Parse(url)
			check.OK(t, err)
			if have, shared, err := loc.(filepool.Location).Reserve(); err != nil || have != c.want || shared != c.shared {
				t.Errorf("the reserve is %g %%, shared %v, %v; want %g %%, %v", have, shared, err, c.want, c.shared)
			}
			pool, err := pools.Open(t.Context(), "test", url)
			check.OK(t, err)
			defer pool.Close()
			fillPool(t, pool, 32*pooltest.MiB)
			least := c.want
			if c.fs == "btrfs" {
				least -= 5 // of 1 GiB, that much goes to metadata after the last promise
			}
			run(t, "sync", "--file-system", mnt) // before that btrfs shows space as free that files have
			if space, _ := left(t, mnt); space < least || space > c.want+6 {
				t.Errorf("%.1f %% of the filesystem are left, want %g", space, c.want)
			}
		})
	}
}

// TestReserveOfInodes: the reserve holds for inodes too, as the kubelet evicts pods when they run out.
func TestReserveOfInodes(t *testing.T) {
	mnt := mountNew(t, "tmpfs")
	run(t, "mount", "-o", "remount,nr_inodes=200", mnt)
	check.OK(t, os.Mkdir(mnt+"/pool", 0o700))
	pool, err := pools.Open(t.Context(), "test", "file://"+mnt+"/pool?create=1")
	check.OK(t, err)
	defer pool.Close()
	n := fillPool(t, pool, 4096)
	if _, inodes := left(t, mnt); inodes < filepool.SharedReserve || inodes > filepool.SharedReserve+2 || n < 70 {
		t.Errorf("%.1f %% of the inodes are left after %d volumes", inodes, n)
	}
	if c := pooltest.CapacityOf(t, pool); c.Available != 0 || c.MaxVolume != 0 {
		t.Errorf("room for another volume: %+v", c)
	}
	if have := pool.PoolHealth(t.Context()); len(have) != 1 || have[0].Reason != "PoolNearlyFull" || have[0].Severity != blockdev.Degraded || !strings.Contains(have[0].Message, "inodes") {
		t.Errorf("a pool without inodes: %+v", have)
	}
	check.OK(t, pooltest.Second(pool.Expand(t.Context(), volNumber(0), pooltest.MiB))) // it takes no inode
	check.OK(t, pool.Delete(t.Context(), volNumber(1)))
	if c := pooltest.CapacityOf(t, pool); c.Available == 0 {
		t.Error("no room after a volume was deleted")
	}
}

// TestReserveOfOld: a pool that has promised more than it would now goes on with what it has.
func TestReserveOfOld(t *testing.T) {
	mnt := mountNew(t, "ext4")
	check.OK(t, os.Mkdir(mnt+"/pool", 0o700))
	old, err := pools.Open(t.Context(), "test", "file://"+mnt+"/pool?create=1&reservePercent=0")
	check.OK(t, err)
	n := fillPool(t, old, 64*pooltest.MiB)
	check.OK(t, old.Close())
	pool, err := pools.Open(t.Context(), "test", "file://"+mnt+"/pool")
	check.OK(t, err)
	defer pool.Close()
	c := pooltest.CapacityOf(t, pool)
	if c.Available != 0 || c.Promised != int64(n)*64*pooltest.MiB {
		t.Errorf("%+v with %d volumes", c, n)
	}
	pooltest.Fails(t, pooltest.Second(pool.Create(t.Context(), blockdev.Spec{Ref: volNumber(n), Name: "another", Size: 4096})), errdefs.ErrNoSpace, "another volume")
	pooltest.Fails(t, pooltest.Second(pool.Expand(t.Context(), volNumber(0), 65*pooltest.MiB)), errdefs.ErrNoSpace, "growth")
	for i := range n {
		device := pooltest.Attach(t, pool, volNumber(i), blockdev.Attachment{})
		pooltest.WriteTo(t, device.Path, 63*pooltest.MiB, make([]byte, pooltest.MiB))
		check.OK(t, errors.Join(device.Close(), pool.Detach(t.Context(), volNumber(i))))
	}
	// It promises again when the reserve is free again.
	for i := range n {
		check.OK(t, pool.Delete(t.Context(), volNumber(i)))
		if space, _ := left(t, mnt); (pooltest.CapacityOf(t, pool).Available > 0) != (space > filepool.SharedReserve) {
			t.Errorf("with %.1f %% left, %+v", space, pooltest.CapacityOf(t, pool))
		}
	}
}
