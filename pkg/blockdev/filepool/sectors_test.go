package filepool_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pools"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
)

// badDisk is an ext4 on a disk some of whose sectors cannot be read: the disk is a file on a btrfs, which does not return data with a wrong checksum.
type badDisk struct {
	t     testing.TB
	image string // of the btrfs
	below string // where it is mounted
	dir   string // where the ext4 is mounted
}

func newBadDisk(t testing.TB) *badDisk {
	t.Helper()
	drivertest.NeedRoot(t)
	base := drivertest.Dir(t)
	d := &badDisk{t: t, image: filepath.Join(base, "btrfs"), below: filepath.Join(base, "below"), dir: filepath.Join(base, "pool")}
	for _, dir := range []string{d.below, d.dir} {
		check.OK(t, os.Mkdir(dir, 0o700))
	}
	check.OK(t, os.WriteFile(d.image, nil, 0o600))
	check.OK(t, os.Truncate(d.image, 512<<20))
	drivertest.RunBtrfs(t, "mkfs.btrfs", "-q", d.image)
	mountFile(t, d.image, d.below)
	disk := filepath.Join(d.below, "disk")
	check.OK(t, os.WriteFile(disk, nil, 0o600))
	check.OK(t, os.Truncate(disk, 128<<20))
	run(t, "mkfs.ext4", "-q", "-b", "4096", disk)
	mountFile(t, disk, d.dir)
	t.Cleanup(d.unmount)
	return d
}

// unmount unmounts both filesystems.
func (d *badDisk) unmount() {
	for _, dir := range []string{d.dir, d.below} {
		drivertest.Unmount(d.t, dir)
	}
}

// spoil makes some of the two sectors of 4 KiB that begin with some bytes unreadable, until heal is called.
func (d *badDisk) spoil(begin []byte, sectors ...int) (heal func() error) {
	d.t.Helper()
	d.unmount()
	data, err := os.ReadFile(d.image)
	check.OK(d.t, err)
	var found []int
	for at := 0; at < len(data); at += 4096 {
		if bytes.HasPrefix(data[at:], begin) {
			found = append(found, at)
		}
	}
	if len(found) != 2 {
		d.t.Fatalf("%q is at %v of the disk", begin, found)
	}
	write := func(first []byte) error {
		f, err := os.OpenFile(d.image, os.O_WRONLY, 0)
		for _, n := range sectors {
			if err == nil {
				_, err = f.WriteAt(first, int64(found[n]))
			}
		}
		return errors.Join(err, f.Close())
	}
	check.OK(d.t, write([]byte("?")))
	mountFile(d.t, d.image, d.below)
	mountFile(d.t, filepath.Join(d.below, "disk"), d.dir)
	return func() error { return write(begin[:1]) }
}

// TestReadAgain: the disk cannot read a record when the pool is opened, and can a moment later. The record is not taken for damaged.
func TestReadAgain(t *testing.T) {
	d := newBadDisk(t)
	url := "file://" + d.dir + "?reservePercent=0"
	pool, err := pools.Open(t.Context(), "test", url)
	check.OK(t, err)
	record, err := pool.Create(t.Context(), blockdev.Spec{Ref: pooltest.Vol("a"), Name: "a", Size: 4 * pooltest.MiB})
	check.OK(t, errors.Join(err, pool.Close()))
	path := filepath.Join(d.dir, "volumes", record.Key+".rec")
	written, err := os.ReadFile(path)
	check.OK(t, err)
	heal := d.spoil(written[:bytes.IndexByte(written, '\n')], 0, 1)
	if _, err := os.ReadFile(path); !errors.Is(err, unix.EIO) {
		t.Fatalf("it can be read: %v", err)
	}
	healed := make(chan error, 1)
	time.AfterFunc(time.Second, func() { healed <- heal() })
	pool, err = pools.Open(t.Context(), "test", url)
	check.OK(t, errors.Join(err, <-healed))
	defer func() { check.OK(t, pool.Close()) }()
	if have, err := pool.Get(t.Context(), record.Ref); err != nil || have.Name != "a" {
		t.Errorf("%+v, %v", have, err)
	}
}

// mountFile mounts the filesystem in a file; its loop device goes with the mount.
func mountFile(t testing.TB, image, dir string) {
	t.Helper()
	loop := drivertest.Loop(t, image)
	defer run(t, "losetup", "-d", loop)
	run(t, "mount", loop, dir)
}

// TestUnreadableSectors: the disk cannot read a sector with one copy of a record, or of the pool's identity. The other copy is used, and the unreadable
// one is written anew.
func TestUnreadableSectors(t *testing.T) {
	for n := range 2 {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			d := newBadDisk(t)
			url := "file://" + d.dir + "?reservePercent=0"
			pool, err := pools.Open(t.Context(), "test", url)
			check.OK(t, err)
			id := idOf(t, pool)
			record, err := pool.Create(t.Context(), blockdev.Spec{Ref: pooltest.Vol("a"), Name: "a", Size: 4 * pooltest.MiB})
			check.OK(t, err)
			check.OK(t, pool.Close())
			for _, file := range []string{"volumes/" + record.Key + ".rec", "pool"} {
				path := filepath.Join(d.dir, file)
				written, err := os.ReadFile(path)
				check.OK(t, err)
				d.spoil(written[:bytes.IndexByte(written, '\n')], n)
				if _, err := os.ReadFile(path); !errors.Is(err, unix.EIO) {
					t.Fatalf("it can be read: %v", err)
				}
				pool, err := pools.Open(t.Context(), "test", url)
				check.OK(t, err)
				if now := idOf(t, pool); now != id {
					t.Errorf("the pool is %s, was %s", now, id)
				}
				if _, err := pool.Get(t.Context(), record.Ref); err != nil {
					t.Error(err)
				}
				check.OK(t, pool.Close())
				if now, err := os.ReadFile(path); err != nil {
					t.Errorf("%s after a start: %d bytes, %v", file, len(now), err)
				}
			}
		})
	}
}
