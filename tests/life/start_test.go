package life

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

// TestStartWithBadDisk: a disk that hangs, or has errors, when the driver starts keeps nobody from the
// other pools, nor the driver from saying that it is alive; nothing is made anew, and when the disk is well again, all of
// it is there.
func TestStartWithBadDisk(t *testing.T) {
	drivertest.NeedRoot(t)
	type sickness struct {
		ill  func(t *testing.T, directory string)
		well func(t *testing.T, directory string)
		says string
		// mapped: the pool is on a disk of the device mapper.
		mapped bool
	}
	cases := map[string]sickness{
		"hangs": {
			ill:  func(t *testing.T, directory string) { drivertest.Run(t, "fsfreeze", "-f", directory) },
			well: func(t *testing.T, directory string) { drivertest.Run(t, "fsfreeze", "-u", directory) },
			says: "does not answer",
		},
		"has errors": {
			ill: func(t *testing.T, directory string) { shutDown(t, directory) },
			well: func(t *testing.T, directory string) { // as its operator repairs it: nothing of the driver's is in the way
				drivertest.Unmount(t, directory)
				drivertest.MountLoop(t, filepath.Join(filepath.Dir(directory), "pool.image"), directory)
			},
			says: "input/output error",
		},
	}
	// With a device mapper also a disk that answers no request any more, and one of which nothing can be read.
	var disk mapped
	if control, err := os.Open("/dev/mapper/control"); err == nil { // without the module there may be a node
		check.OK(t, control.Close())
		cases["answers nothing"] = sickness{
			ill:    func(t *testing.T, _ string) { disk.hang(t) },
			well:   func(t *testing.T, _ string) { disk.becomes(t, "linear") },
			says:   "does not answer",
			mapped: true,
		}
		cases["cannot be read"] = sickness{
			ill: func(t *testing.T, _ string) { disk.becomes(t, "error") },
			well: func(t *testing.T, directory string) {
				disk.becomes(t, "linear")
				drivertest.Unmount(t, directory)
				drivertest.Run(t, "mount", "/dev/mapper/"+disk.name, directory)
			},
			says:   "input/output error",
			mapped: true,
		}
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			dir := newDir(t)
			drivertest.MountNew(t, "xfs", filepath.Join(dir, "pool"), 512*miB)
			directory := filepath.Join(dir, "pool")
			if c.mapped {
				disk = mapDisk(t, directory)
			}
			o := drivertest.Options{Dir: dir, Pools: []string{"good=file://" + dir + "/good?reservePercent=0", "default=file://" + directory + "?reservePercent=0"}}
			d := start(t, o)
			in := func(name, pool string) *vol {
				r := co.Request(name, "ext4", smallest["ext4"])
				r.Parameters = map[string]string{"pool": pool}
				return d.made(r)
			}
			good, bad := in("good", "good"), in("bad", "default")
			write(t, bad.File(bad.running()), 1)
			bad.rest(bad.Target("pod"))
			d.Stop()

			c.ill(t, directory)
			d = start(t, o)
			check.OK(t, d.probe())
			target := good.at(d).running()
			write(t, good.File(target), 1)
			check.Code(t, bad.at(d).stage(), codes.Unavailable, c.says)
			check.Code(t, bad.at(d).delete(), codes.Unavailable)
			expect(t, d.storage(), "STORAGE_UNREACHABLE PoolMissing")
			expect(t, bad.at(d).problems(), "INACCESSIBLE PoolMissing")
			check.OK(t, d.probe())

			c.well(t, directory)
			for deadline := time.Now().Add(time.Minute); len(d.storage()) > 0 && time.Now().Before(deadline); {
				time.Sleep(100 * time.Millisecond)
			}
			expect(t, d.storage())
			check.OK(t, bad.at(d).intact([32]byte{}))
			check.OK(t, bad.at(d).delete())
			holds(t, good.File(target), 1)
			check.OK(t, good.at(d).down(target))
			if left, err := os.ReadDir(filepath.Join(directory, "volumes")); err != nil || len(left) > 0 {
				t.Errorf("left are %v, %v", left, err)
			}
		})
	}
}

// TestDiskComesBack: a disk that goes while the driver runs, and comes back, is served again without a
// restart, whether it is mounted anew or was repaired; another one in its place is not.
func TestDiskComesBack(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := newDir(t)
	drivertest.MountNew(t, "xfs", filepath.Join(dir, "pool"), 512*miB)
	directory, image := filepath.Join(dir, "pool"), filepath.Join(dir, "pool.image")
	d := start(t, drivertest.Options{Dir: dir})
	v := d.used("volume", "ext4")
	back := func() {
		t.Helper()
		for deadline := time.Now().Add(time.Minute); len(d.storage()) > 0 && time.Now().Before(deadline); {
			time.Sleep(100 * time.Millisecond)
		}
		expect(t, d.storage())
		check.OK(t, v.intact([32]byte{}))
	}
	mount := func(image string, options ...string) { drivertest.MountLoop(t, image, directory, options...) }

	// It stops, and its operator repairs it.
	shutDown(t, directory)
	expect(t, d.storage(), "STORAGE_UNREACHABLE PoolUnavailable")
	expect(t, d.storage(), "STORAGE_UNREACHABLE PoolMissing")
	check.Code(t, v.stage(), codes.Unavailable)
	drivertest.Unmount(t, directory) // the driver has let go of it
	check.OK(t, d.probe())
	check.Code(t, second(d.create(co.Request("another", "ext4", smallest["ext4"]))), codes.Unavailable)
	mount(image)
	back()

	// It is mounted from somewhere else: another device, with the same on it.
	drivertest.Run(t, "umount", "-l", directory)
	check.Code(t, second(d.create(co.Request("another", "ext4", smallest["ext4"]))), codes.Unavailable)
	copied := filepath.Join(dir, "copy-of-pool")
	drivertest.Run(t, "cp", "--sparse=always", image, copied)
	mount(copied, "-o", "nouuid")
	back()

	// Another disk is no pool of ours.
	drivertest.Run(t, "umount", "-l", directory)
	other := filepath.Join(dir, "other-disk")
	check.OK(t, os.WriteFile(other, nil, 0o600))
	check.OK(t, os.Truncate(other, 512*miB))
	drivertest.Run(t, "mkfs.xfs", "-q", other)
	mount(other)
	check.Code(t, second(d.create(co.Request("another", "ext4", smallest["ext4"]))), codes.Unavailable)
	if left, err := os.ReadDir(directory); err != nil || len(left) > 0 {
		t.Errorf("on another disk are %v, %v", left, err)
	}
	drivertest.Unmount(t, directory)
	mount(copied, "-o", "nouuid")
	back()
	check.OK(t, v.delete())
	d.nothingLeft()
}

// mapped is a disk of the device mapper below the filesystem of a pool's directory.
type mapped struct{ name, loop string }

func mapDisk(t *testing.T, directory string) mapped {
	t.Helper()
	t.Setenv("DM_DISABLE_UDEV", "1") // dmsetup makes the node itself
	drivertest.Unmount(t, directory)
	image := filepath.Join(filepath.Dir(directory), "pool.image")
	t.Cleanup(func() { drivertest.MountLoop(t, image, directory) }) // as whoever made it left it
	m := mapped{"disk-of-" + filepath.Base(filepath.Dir(directory)), drivertest.Loop(t, image)}
	t.Cleanup(func() { drivertest.Run(t, "losetup", "-d", m.loop) })
	drivertest.Run(t, "dmsetup", "create", m.name, "--table", m.table("linear"))
	t.Cleanup(func() { drivertest.Run(t, "dmsetup", "remove", "--retry", m.name) })
	drivertest.Run(t, "mount", "/dev/mapper/"+m.name, directory)
	t.Cleanup(func() { drivertest.Unmount(t, directory) })
	return m
}

func (m mapped) table(target string) string {
	if target == "linear" {
		target += " " + m.loop + " 0"
	}
	return fmt.Sprintf("0 %d %s", 512*miB/512, target)
}

// hang has no request answered, until becomes.
func (m mapped) hang(t *testing.T) {
	t.Helper()
	drivertest.Run(t, "dmsetup", "suspend", "--noflush", "--nolockfs", m.name)
	check.OK(t, os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0o600))
}

// becomes replaces the disk: linear, or error.
func (m mapped) becomes(t *testing.T, target string) {
	t.Helper()
	m.hang(t)
	drivertest.Run(t, "dmsetup", "reload", m.name, "--table", m.table(target))
	drivertest.Run(t, "dmsetup", "resume", m.name)
}
