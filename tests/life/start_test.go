package life

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

// TestStartWithBadDisk: a disk that hangs, or has errors, when the driver starts keeps nobody from the
// other pools, nor the driver from saying that it is alive; nothing is made anew, and when the disk is well again, all of
// it is there.
func TestStartWithBadDisk(t *testing.T) {
	drivertest.NeedRoot(t)
	type sickness struct {
		ill  func(t *testing.T, folder string)
		well func(t *testing.T, folder string)
		says string
		// mapped: the pool is on a disk of the device mapper.
		mapped bool
	}
	cases := map[string]sickness{
		"hangs": {
			ill:  func(t *testing.T, folder string) { run(t, "fsfreeze", "-f", folder) },
			well: func(t *testing.T, folder string) { run(t, "fsfreeze", "-u", folder) },
			says: "does not answer",
		},
		"has errors": {
			ill: func(t *testing.T, folder string) { shutDown(t, folder) },
			well: func(t *testing.T, folder string) { // as its operator repairs it: nothing of the driver's is in the way
				drivertest.Unmount(t, folder)
				drivertest.MountLoop(t, filepath.Join(filepath.Dir(folder), "image-of-pool"), folder)
			},
			says: "input/output error",
		},
	}
	// With a device mapper also a disk that answers no request any more, and one of which nothing can be read.
	var disk mapped
	if control, err := os.Open("/dev/mapper/control"); err == nil { // without the module there may be a node
		ok(t, control.Close())
		cases["answers nothing"] = sickness{
			ill:    func(t *testing.T, _ string) { disk.hang(t) },
			well:   func(t *testing.T, _ string) { disk.becomes(t, "linear") },
			says:   "does not answer",
			mapped: true,
		}
		cases["cannot be read"] = sickness{
			ill: func(t *testing.T, _ string) { disk.becomes(t, "error") },
			well: func(t *testing.T, folder string) {
				disk.becomes(t, "linear")
				drivertest.Unmount(t, folder)
				run(t, "mount", "/dev/mapper/"+disk.name, folder)
			},
			says:   "input/output error",
			mapped: true,
		}
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			dir := newDir(t)
			poolFolder(t, dir, "xfs", 512*miB)
			folder := filepath.Join(dir, "pool")
			if c.mapped {
				disk = mapDisk(t, folder)
			}
			o := drivertest.Options{Dir: dir, Pools: []string{"good=file://" + dir + "/good?reservePercent=0", "default=file://" + folder + "?reservePercent=0"}}
			d := start(t, o)
			in := func(name, pool string) *vol {
				r := request(name, "ext4", smallest["ext4"])
				r.Parameters = map[string]string{"pool": pool}
				return d.made(r)
			}
			good, bad := in("good", "good"), in("bad", "default")
			write(t, bad.file(bad.running()), 1)
			bad.rest(bad.target("pod"))
			d.Stop()

			c.ill(t, folder)
			d = start(t, o)
			ok(t, d.probe())
			target := good.at(d).running()
			write(t, good.file(target), 1)
			wants(t, bad.at(d).stage(), codes.Unavailable, c.says)
			wants(t, bad.at(d).delete(), codes.Unavailable)
			expect(t, d.storage(), "STORAGE_UNREACHABLE PoolMissing")
			expect(t, bad.at(d).problems(), "INACCESSIBLE PoolMissing")
			ok(t, d.probe())

			c.well(t, folder)
			for deadline := time.Now().Add(time.Minute); len(d.storage()) > 0 && time.Now().Before(deadline); {
				time.Sleep(100 * time.Millisecond)
			}
			expect(t, d.storage())
			ok(t, bad.at(d).intact([32]byte{}))
			ok(t, bad.at(d).delete())
			holds(t, good.file(target), 1)
			ok(t, good.at(d).down(target))
			if left, err := os.ReadDir(filepath.Join(folder, "volumes")); err != nil || len(left) > 0 {
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
	poolFolder(t, dir, "xfs", 512*miB)
	folder, image := filepath.Join(dir, "pool"), filepath.Join(dir, "image-of-pool")
	d := start(t, drivertest.Options{Dir: dir})
	v := d.used("volume", "ext4")
	back := func() {
		t.Helper()
		for deadline := time.Now().Add(time.Minute); len(d.storage()) > 0 && time.Now().Before(deadline); {
			time.Sleep(100 * time.Millisecond)
		}
		expect(t, d.storage())
		ok(t, v.intact([32]byte{}))
	}
	mount := func(image string, options ...string) { drivertest.MountLoop(t, image, folder, options...) }

	// It stops, and its operator repairs it.
	shutDown(t, folder)
	expect(t, d.storage(), "STORAGE_UNREACHABLE PoolUnavailable")
	expect(t, d.storage(), "STORAGE_UNREACHABLE PoolMissing")
	wants(t, v.stage(), codes.Unavailable)
	drivertest.Unmount(t, folder) // the driver has let go of it
	ok(t, d.probe())
	wants(t, second(d.create(request("another", "ext4", smallest["ext4"]))), codes.Unavailable)
	mount(image)
	back()

	// It is mounted from somewhere else: another device, with the same on it.
	run(t, "umount", "-l", folder)
	wants(t, second(d.create(request("another", "ext4", smallest["ext4"]))), codes.Unavailable)
	copied := filepath.Join(dir, "copy-of-pool")
	run(t, "cp", "--sparse=always", image, copied)
	mount(copied, "-o", "nouuid")
	back()

	// Another disk is no pool of ours.
	run(t, "umount", "-l", folder)
	other := filepath.Join(dir, "other-disk")
	ok(t, os.WriteFile(other, nil, 0o600))
	ok(t, os.Truncate(other, 512*miB))
	run(t, "mkfs.xfs", "-q", other)
	mount(other)
	wants(t, second(d.create(request("another", "ext4", smallest["ext4"]))), codes.Unavailable)
	if left, err := os.ReadDir(folder); err != nil || len(left) > 0 {
		t.Errorf("on another disk are %v, %v", left, err)
	}
	drivertest.Unmount(t, folder)
	mount(copied, "-o", "nouuid")
	back()
	ok(t, v.delete())
	d.nothingLeft()
}

// mapped is a disk of the device mapper below the filesystem of a pool's folder.
type mapped struct{ name, loop string }

func mapDisk(t *testing.T, folder string) mapped {
	t.Helper()
	t.Setenv("DM_DISABLE_UDEV", "1") // dmsetup makes the node itself
	drivertest.Unmount(t, folder)
	image := filepath.Join(filepath.Dir(folder), "image-of-pool")
	t.Cleanup(func() { drivertest.MountLoop(t, image, folder) }) // as whoever made it left it
	m := mapped{"disk-of-" + filepath.Base(filepath.Dir(folder)), drivertest.Loop(t, image)}
	t.Cleanup(func() { run(t, "losetup", "-d", m.loop) })
	run(t, "dmsetup", "create", m.name, "--table", m.table("linear"))
	t.Cleanup(func() { run(t, "dmsetup", "remove", "--retry", m.name) })
	run(t, "mount", "/dev/mapper/"+m.name, folder)
	t.Cleanup(func() { ok(t, unix.Unmount(folder, 0)) })
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
	run(t, "dmsetup", "suspend", "--noflush", "--nolockfs", m.name)
	ok(t, os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0o600))
}

// becomes replaces the disk: linear, or error.
func (m mapped) becomes(t *testing.T, target string) {
	t.Helper()
	m.hang(t)
	run(t, "dmsetup", "reload", m.name, "--table", m.table(target))
	run(t, "dmsetup", "resume", m.name)
}
